"""Test the lookup of recorded sandboxes in storage."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from documents import put_document
from gcs_server import GCS
from hypothesis import given
from hypothesis import strategies as st

from sandbox_provisioner.cli.output import details
from sandbox_provisioner.cli.targets import Found
from sandbox_provisioner.config import GCSConfig, Place
from sandbox_provisioner.errors import MetadataError
from sandbox_provisioner.gvisor.bundle import BundleSpec
from sandbox_provisioner.persistence import metadata, names
from sandbox_provisioner.persistence.backends import open_stores
from sandbox_provisioner.persistence.metadata import (
    Checkpoint,
    GCSArtifact,
    GCSSandboxMetadata,
    Tenancy,
)
from sandbox_provisioner.persistence.records import SandboxRecord
from sandbox_provisioner.persistence.snapshots import FILE, MANIFEST
from sandbox_provisioner.sandbox import model
from sandbox_provisioner.sandbox.listing import look
from sandbox_provisioner.sandbox.model import NamedState
from sandbox_provisioner.sandbox.registry import PersistentSandboxRegistry
from sandbox_provisioner.sandbox.user_sandboxes import Persistence
from sandbox_provisioner.storage.base import FileRecord

PRINT = {"use": "mapped", "state": "", "size": 3, "digest": "cd" * 32}
FILES = {"checkpoint.img": FileRecord(30, 32, (1,)), "pages.img": FileRecord(70, 32, (1, 2, 3))}
SAVED = Checkpoint(
    artifact=GCSArtifact("sandboxes/a/checkpoints/1/", "2026-11-16T01:00:00+00:00", FILES),
    runsc_version="20260905",
    runsc_sha256="ab" * 32,
    platform="systrap",
    architecture="x86_64",
    cpu_features=("avx2",),
    spec=BundleSpec("/usr/bin/python3", "/home/me", "me"),
    files={"/usr/lib/x.so": PRINT, "/usr/lib/y.so": PRINT},
    contents={"process": 1},
    seconds=0.25,
)
OLDER = replace(SAVED, artifact=replace(SAVED.artifact, created="2026-11-15T01:00:00+00:00", files={}))
BARE = GCSSandboxMetadata("a", "2026-11-16", "2026-11-16", tenancy=Tenancy(1, "a server", False))
FULL = replace(BARE, checkpoint=SAVED, previous=OLDER, savepoints={"before-training": SAVED})

JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=20),
    lambda inner: st.dictionaries(st.text(max_size=10) | st.sampled_from(["files", "artifact"]), inner, max_size=4),
    max_leaves=10,
)

Keep = Callable[[GCSSandboxMetadata], SandboxRecord]


@pytest.fixture(params=["local", "gcs"])
def sandboxes(request: pytest.FixtureRequest, gcs: GCS, tmp_path: Path) -> Persistence:
    """Return a user's sandboxes on a disk or in a bucket."""
    config = GCSConfig(tmp_path / "storage")
    if request.param == "gcs":
        places = {name: Place(getattr(config, name).stem, gcs.bucket) for name in ("metadata", "locks", "checkpoints")}
        config = replace(config, **places, snapshots=Place(config.snapshots.stem, gcs.bucket))
    return Persistence(open_stores(config), PersistentSandboxRegistry(tmp_path / "registry"))


@pytest.fixture
def keep(sandboxes: Persistence) -> Keep:
    """Return a function that stores a document and returns its record."""

    def make(document: GCSSandboxMetadata) -> SandboxRecord:
        record = sandboxes.registry.allocate(sandboxes.stores)
        put_document(sandboxes.stores, replace(document, sandbox_id=record.sandbox_id))
        return record

    return make


def write(sandboxes: Persistence, record: SandboxRecord, data: bytes) -> None:
    sandboxes.stores.metadata.write(names.metadata_name(record.sandbox_id), data)


def test_no_records(sandboxes: Persistence) -> None:
    assert look(sandboxes, []) == []


def test_lost_changes_are_shown(sandboxes: Persistence, keep: Keep) -> None:
    (stored,) = look(sandboxes, [keep(replace(FULL, lost_since=SAVED.created))])
    assert stored.sandbox.checkpoint
    assert stored.sandbox.lost_since == stored.sandbox.checkpoint.created
    shown = details(Found(stored.sandbox))["lost"]
    assert shown.startswith("all changes after 2026-11-16T01:00:00+00:00")
    (stored,) = look(sandboxes, [keep(FULL)])
    assert stored.sandbox.lost_since is None
    assert "lost" not in details(Found(stored.sandbox))


@pytest.mark.parametrize(
    ("document", "state"),
    [
        (BARE, "empty"),
        (replace(BARE, tenancy=None), "empty"),
        (FULL, "saved"),
        (replace(FULL, tenancy=Tenancy(1, "a server", True)), "running"),
    ],
)
def test_state_of_document(sandboxes: Persistence, keep: Keep, document: GCSSandboxMetadata, state: str) -> None:
    (stored,) = look(sandboxes, [keep(document)])
    assert (stored.sandbox.state, stored.problem, stored.sandbox.problem) == (state, None, None)


def test_stored_items_have_name_time_and_size(sandboxes: Persistence, keep: Keep) -> None:
    record = keep(FULL)
    assert sandboxes.stores.snapshots is not None
    for file in (FILE, MANIFEST):
        sandboxes.stores.snapshots.write(f"{names.snapshot_prefix(record.sandbox_id, 'clean')}{file}", b"12345")
    sandboxes.stores.snapshots.write(f"{names.snapshot_prefix(record.sandbox_id, 'unfinished')}{FILE}", b"12345")
    (stored,) = look(sandboxes, [record])
    saved = datetime(2026, 11, 16, 1, tzinfo=UTC)
    assert stored.sandbox.checkpoint == model.Stored(saved, 100)
    assert stored.sandbox.previous and stored.sandbox.previous.size == 0
    assert stored.sandbox.savepoints == (NamedState("before-training", saved, 100),)
    assert [(snapshot.name, snapshot.size) for snapshot in stored.sandbox.snapshots] == [("clean", 10)]
    assert stored.sandbox.size == 210


def test_invalid_time_is_reported(sandboxes: Persistence, keep: Keep) -> None:
    assert FULL.checkpoint is not None
    damaged = replace(FULL.checkpoint, artifact=replace(FULL.checkpoint.artifact, created="yesterday"))
    (stored,) = look(sandboxes, [keep(replace(FULL, checkpoint=damaged))])
    assert isinstance(stored.problem, MetadataError)
    assert (stored.sandbox.state, stored.sandbox.size) == ("unknown", None)


def test_checkpoint_counts_as_last_use(sandboxes: Persistence, keep: Keep) -> None:
    record = replace(keep(FULL), last_used=datetime(2026, 1, 1, tzinfo=UTC))
    (stored,) = look(sandboxes, [record])
    assert stored.sandbox.last_used == datetime(2026, 11, 16, 1, tzinfo=UTC)


def test_failed_lookup_does_not_affect_others(sandboxes: Persistence, keep: Keep) -> None:
    gone, damaged, first, last = (
        sandboxes.registry.allocate(sandboxes.stores),
        keep(BARE),
        keep(BARE),
        keep(FULL),
    )
    name = names.metadata_name(damaged.sandbox_id)
    write(sandboxes, damaged, sandboxes.stores.signer.sign(name, b'{"schema": 2'))
    elsewhere = replace(first, where="another place")
    listed = look(sandboxes, [first, gone, damaged, elsewhere, last])
    assert [one.record for one in listed] == [first, gone, damaged, elsewhere, last]
    assert [one.sandbox.state for one in listed] == ["empty", "gone", "unknown", "elsewhere", "saved"]
    assert [one.sandbox.size for one in listed] == [0, None, None, None, 200]
    assert isinstance(listed[2].problem, MetadataError)
    assert listed[2].sandbox.problem == str(listed[2].problem)


def test_order_is_kept(sandboxes: Persistence, keep: Keep) -> None:
    records = [keep(FULL if number % 2 else BARE) for number in range(20)]
    assert [one.sandbox.state for one in look(sandboxes, records)] == ["empty", "saved"] * 10


# -- summaries -----------------------------------------------------------------------------------------------------

SHOWN = (
    False,
    ("2026-11-16T01:00:00+00:00", 100),
    ("2026-11-15T01:00:00+00:00", 0),
    {"before-training": ("2026-11-16T01:00:00+00:00", 100)},
)


def shown(data: bytes) -> tuple[object, ...]:
    """Return the fields of a document's summary: running, checkpoint, previous and savepoints."""
    found = metadata.summarise(data, "there", "a")
    items = [(item.created, item.size) for item in (found.checkpoint, found.previous) if item]
    return found.running, *items, {name: (item.created, item.size) for name, item in found.savepoints.items()}


@pytest.mark.parametrize("layout", [{}, {"indent": 1}, {"indent": 2}, {"indent": "\t"}, {"separators": (",", ":")}])
def test_summary_does_not_depend_on_layout(layout: dict[str, Any]) -> None:
    data = json.dumps(json.loads(metadata.encode(FULL)), **layout).encode()
    assert shown(data) == SHOWN


def test_summary_of_document_without_savepoints() -> None:
    document = json.loads(metadata.encode(FULL)) | {"schema": 1}
    del document["savepoints"]
    assert shown(json.dumps(document).encode()) == (*SHOWN[:-1], {})


@given(st.dictionaries(st.text(), JSON, max_size=4), st.dictionaries(st.text() | st.just("files"), JSON, max_size=4))
def test_summary_ignores_other_contents(files: dict[str, Any], others: dict[str, Any]) -> None:
    saved = replace(SAVED, files=files, contents=others)
    document = replace(FULL, checkpoint=saved, savepoints={"before-training": saved}, settings=others)
    assert shown(metadata.encode(document)) == SHOWN


@given(st.binary(max_size=200) | st.sampled_from([b'\n  "files": {\n', b'{\n  "files": {\n', b'\n  "files": {\n\n  }']))
def test_invalid_bytes_raise_metadata_error(data: bytes) -> None:
    with pytest.raises(MetadataError, match=r"^there cannot be understood"):
        metadata.summarise(data, "there", "a")


def test_document_of_another_sandbox_is_refused() -> None:
    with pytest.raises(MetadataError, match="of sandbox 'a'"):
        metadata.summarise(metadata.encode(BARE), "there", "b")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda document: document.pop("previous"),
        lambda document: document["tenancy"].update(running=1),
        lambda document: document["checkpoint"].pop("artifact"),
        lambda document: document["checkpoint"]["artifact"].update(created=5),
        lambda document: document["checkpoint"]["artifact"]["files"].update(x={"size": "1"}),
        lambda document: document.update(savepoints={"x": []}),
    ],
)
def test_invalid_field_is_reported(spoil: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(metadata.encode(FULL))
    spoil(document)
    with pytest.raises(MetadataError, match=r"^there cannot be understood: "):
        metadata.summarise(json.dumps(document, indent=1).encode(), "there", "a")
