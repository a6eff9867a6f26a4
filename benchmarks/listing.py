"""`make bench`: a list of a thousand persistent sandboxes, beside one that looks at each of them by itself, in one run.

The sandboxes are in the embedded local storage, as kernels that have hibernated twice leave them; only their images are
short. The contenders take turns, so that whatever else the machine does hits them both alike: read the ratio.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from common import framed, readable, scratch, verdict

from sandbox_provisioner.config import user_name
from sandbox_provisioner.errors import SandboxError
from sandbox_provisioner.gvisor.bundle import BundleSpec, Mount
from sandbox_provisioner.persistence import compatibility, metadata, names, records
from sandbox_provisioner.persistence.checkpoints import IMAGE_FILES, now
from sandbox_provisioner.persistence.compatibility import FilePrint
from sandbox_provisioner.persistence.metadata import (
    Checkpoint,
    GCSArtifact,
    GCSSandboxMetadata,
    Stored,
    Summary,
    Tenancy,
)
from sandbox_provisioner.persistence.records import SandboxRecord
from sandbox_provisioner.persistence.snapshots import FILE, MANIFEST
from sandbox_provisioner.sandbox.listing import StoredSandbox, describe, look
from sandbox_provisioner.sandbox.user_sandboxes import Persistence
from sandbox_provisioner.storage.base import FileRecord

GOAL = 0.5
SANDBOXES, FEW = 1000, 50
FILES = 100
"""The host's files that a kernel has in use: 63 if it has imported nothing, and 123 with numpy and pandas."""
ROUNDS = 5

Look = Callable[[Persistence, Iterable[SandboxRecord]], list[StoredSandbox]]


def main(arguments: Sequence[str]) -> int:
    asked = options(arguments)

    def measure() -> None:
        with scratch():
            sandboxes = Persistence.open()
            for number in range(asked.sandboxes):
                keep(sandboxes, number)
            compare(sandboxes, asked.sandboxes)

    return framed(measure)


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure how long a list of sandboxes takes.")
    parser.add_argument("--sandboxes", type=int, default=SANDBOXES, help="how many there are")
    parser.add_argument("--quick", action="store_const", const=FEW, dest="sandboxes", help=f"{FEW}: that it works")
    return parser.parse_args(arguments)


def compare(sandboxes: Persistence, count: int) -> None:
    """Measure and print."""
    seconds: dict[Look, list[float]] = {one_by_one: [], look: []}
    for _ in range(ROUNDS):
        for contender, taken in seconds.items():
            taken.append(measure_once(contender, sandboxes, count))
    theirs, ours = (statistics.median(taken) for taken in seconds.values())
    mark = f"  {verdict(ours <= GOAL)} (goal {readable(GOAL)})"
    print(f"\n{'':36}{'one by one':>22}{'list':>22}{'list/one by one':>18}")
    title = f"{count:,} sandboxes (median of {ROUNDS})"
    print(f"{title:36}{readable(theirs):>22}{readable(ours):>22}{f'{ours / theirs:.2f}x':>18}{mark}", flush=True)


def measure_once(contender: Look, sandboxes: Persistence, count: int) -> float:
    """How long it takes from the records to what is seen of all; what the one before left does not count."""
    gc.collect()
    begun = time.perf_counter()
    seen = contender(sandboxes, sandboxes.registry.list().records)
    seconds = time.perf_counter() - begun
    if len(seen) != count or {one.sandbox.state for one in seen} != {"saved"}:
        raise SandboxError("Not all sandboxes were seen as they are.")
    return seconds


def one_by_one(sandboxes: Persistence, recorded: Iterable[SandboxRecord]) -> list[StoredSandbox]:
    """What does without anything that is made for lists: each sandbox's whole document, and a search of its folder."""

    def sight(record: SandboxRecord) -> StoredSandbox:
        document = sandboxes.describe(record)
        assert document.checkpoint and document.previous
        kept = [Stored(one.created, one.size) for one in (document.checkpoint, document.previous)]
        sandboxes.stores.metadata.list(names.prefix(record.sandbox_id))
        named = {name: Stored(one.created, one.size) for name, one in document.savepoints.items()}
        return StoredSandbox(record, describe(record, Summary(document.running, *kept, savepoints=named), {}))

    with ThreadPoolExecutor(8) as threads:
        return list(threads.map(sight, recorded))


def keep(sandboxes: Persistence, number: int) -> None:
    """Put a sandbox with two checkpoints there, every tenth with a snapshot; without the care that takes its time."""
    record = SandboxRecord(
        id=uuid4(),
        storage=sandboxes.stores.kind,
        where=sandboxes.stores.metadata.where,
        sandbox_id=f"box-{number}",
        kernel_name="python3-sandbox",
        settings={"network": "none", "mounts": [], "idle_timeout": 1800.0},
        notebook_path=f"/home/me/notebooks/project-{number}/analysis.ipynb",
        created=datetime.now(UTC),
        last_used=datetime.now(UTC),
    )
    storage = Path(sandboxes.stores.metadata.where)
    put(storage.parent / "data" / "sandbox" / "registry" / f"{record.id}.json", records.encode(record))
    document = GCSSandboxMetadata(
        sandbox_id=record.sandbox_id,
        created=now(),
        last_used=now(),
        kernel_name=record.kernel_name,
        notebook_path=record.notebook_path,
        user=user_name(),
        settings=record.settings,
        tenancy=Tenancy(number, "Jupyter server 1234", False),
        checkpoint=checkpoint(storage, record.sandbox_id, "20261116T150625-40dd45b2"),
        previous=checkpoint(storage, record.sandbox_id, "20261116T140625-7b1d45e4"),
        savepoints={"before-training": checkpoint(storage, record.sandbox_id, "20261115T080102-11b2c3d4")},
    )
    name = names.metadata_name(record.sandbox_id)
    put(storage / name, sandboxes.stores.signer.sign(name, metadata.encode(document)))
    if number % 10 == 0:
        for file in (FILE, MANIFEST):
            put(storage / f"{names.snapshot_prefix(record.sandbox_id, 'clean')}{file}", b"files")


def checkpoint(storage: Path, sandbox_id: str, name: str) -> Checkpoint:
    """A checkpoint as a kernel's is."""
    below = f"{names.checkpoints_prefix(sandbox_id)}{name}/"
    for file in IMAGE_FILES:
        put(storage / below / file, b"image")
    python = "/usr/lib/python3.11"
    prints = {
        f"{python}/site-packages/package{number}/library{number}.cpython-311-x86_64-linux-gnu.so": FilePrint(
            "mapped", "", 100_000 + number, hashlib.sha256(str(number).encode()).hexdigest()
        )
        for number in range(FILES)
    }
    return Checkpoint(
        artifact=GCSArtifact(below, now(), {file: FileRecord(40_000_000, 1 << 25, (1, 2)) for file in IMAGE_FILES}),
        runsc_version="release-20260905.0",
        runsc_sha256=hashlib.sha256(b"runsc").hexdigest(),
        platform="systrap",
        architecture="x86_64",
        cpu_features=tuple(f"feature{number}" for number in range(54)),
        spec=BundleSpec(
            "/usr/bin/python3.11", "/home/me", "me", tuple(Mount(f"/opt/{n}", f"/opt/{n}") for n in range(10))
        ),
        files=compatibility.to_json(prints),
        contents={"cwd": "/home/me/notebooks", "process": 1},
        seconds=0.5,
    )


def put(path: Path, data: bytes) -> None:
    """Write a file and the folders above it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_bytes(data)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
