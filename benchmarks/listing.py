"""`make bench`: compare the list of a thousand persistent sandboxes with code that decodes each whole document.

The sandboxes are in local storage, with the documents of kernels that have hibernated twice, but with tiny images. The
two ways alternate, so that other load on the machine affects both equally. Compare the ratios.
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

from common import readable, run_benchmark, temporary_storage, verdict

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
"""Number of host files that a kernel uses. A new kernel uses 63, one with numpy and pandas 123."""
ROUNDS = 5

ListSandboxes = Callable[[Persistence, Iterable[SandboxRecord]], list[StoredSandbox]]


def main(arguments: Sequence[str]) -> int:
    asked = options(arguments)

    def measure() -> None:
        with temporary_storage():
            sandboxes = Persistence.open()
            for number in range(asked.sandboxes):
                store_sandbox(sandboxes, number)
            compare(sandboxes, asked.sandboxes)

    return run_benchmark(measure)


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure how long it takes to list persistent sandboxes.")
    parser.add_argument(
        "--sandboxes", type=int, metavar="COUNT", default=SANDBOXES, help=f"number of sandboxes (default: {SANDBOXES})"
    )
    parser.add_argument(
        "--quick",
        action="store_const",
        const=FEW,
        dest="sandboxes",
        help=f"list only {FEW}: check that the benchmark works",
    )
    return parser.parse_args(arguments)


def compare(sandboxes: Persistence, count: int) -> None:
    """Measure and print the table."""
    seconds: dict[ListSandboxes, list[float]] = {one_by_one: [], look: []}
    for _ in range(ROUNDS):
        for list_sandboxes, times in seconds.items():
            times.append(measure_once(list_sandboxes, sandboxes, count))
    slow, fast = (statistics.median(times) for times in seconds.values())
    mark = f"  {verdict(fast <= GOAL)} (goal {readable(GOAL)})"
    print(f"\n{'':36}{'one by one':>22}{'list':>22}{'list/one by one':>18}")
    title = f"{count:,} sandboxes (median of {ROUNDS})"
    print(f"{title:36}{readable(slow):>22}{readable(fast):>22}{f'{fast / slow:.2f}x':>18}{mark}", flush=True)


def measure_once(list_sandboxes: ListSandboxes, sandboxes: Persistence, count: int) -> float:
    """Return the seconds in which all sandboxes are listed. Garbage of earlier measurements is collected before."""
    gc.collect()
    begun = time.perf_counter()
    found = list_sandboxes(sandboxes, sandboxes.registry.list().records)
    seconds = time.perf_counter() - begun
    if len(found) != count or {one.sandbox.state for one in found} != {"saved"}:
        raise SandboxError(f"The list should contain {count} sandboxes in the state 'saved'.")
    return seconds


def one_by_one(sandboxes: Persistence, recorded: Iterable[SandboxRecord]) -> list[StoredSandbox]:
    """Decode each sandbox's whole document and search its folder, without the code that is optimized for lists."""

    def read(record: SandboxRecord) -> StoredSandbox:
        document = sandboxes.describe(record)
        sandboxes.stores.metadata.list(names.prefix(record.sandbox_id))
        return StoredSandbox(record, describe(record, document, {}))

    with ThreadPoolExecutor(8) as threads:
        return list(threads.map(read, recorded))


def store_sandbox(sandboxes: Persistence, number: int) -> None:
    """Write a sandbox with two checkpoints and a savepoint. Every tenth also has a file snapshot.

    The files are written directly: calls of the package would take much longer.
    """
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
    """Write a checkpoint's image, and return its description, which is as large as that of a real kernel."""
    prefix = f"{names.checkpoints_prefix(sandbox_id)}{name}/"
    for file in IMAGE_FILES:
        put(storage / prefix / file, b"image")
    python = "/usr/lib/python3.11"
    prints = {
        f"{python}/site-packages/package{number}/library{number}.cpython-311-x86_64-linux-gnu.so": FilePrint(
            "mapped", "", 100_000 + number, hashlib.sha256(str(number).encode()).hexdigest()
        )
        for number in range(FILES)
    }
    return Checkpoint(
        artifact=GCSArtifact(prefix, now(), {file: FileRecord(40_000_000, 1 << 25, (1, 2)) for file in IMAGE_FILES}),
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
