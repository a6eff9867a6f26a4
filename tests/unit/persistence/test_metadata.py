"""Test metadata.json: a written document can be read again; any other text raises an error of this package."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_provisioner.errors import MetadataError
from sandbox_provisioner.gvisor.bundle import BundleSpec, Mount
from sandbox_provisioner.persistence.metadata import (
    SCHEMA,
    Checkpoint,
    GCSArtifact,
    GCSSandboxMetadata,
    Note,
    Tenancy,
    decode,
    decode_artifact,
    decode_note,
    encode,
    encode_artifact,
)
from sandbox_provisioner.storage.base import FileRecord
from sandbox_provisioner.storage.local import LocalStore

SPEC = BundleSpec(
    "/usr/bin/python3",
    "/home/me",
    "me",
    (Mount("/data", "/data", True), Mount("", "/x")),
    "none",
    {"PATH": "/bin"},
    True,
)
ARTIFACT = GCSArtifact(
    "sandboxes/a/checkpoints/1/", "2026-11-16T00:00:00", {"pages.img": FileRecord(70, 32, (1, 2, 3))}
)
CHECKPOINT = Checkpoint(
    artifact=ARTIFACT,
    runsc_version="20260905",
    runsc_sha256="ab" * 32,
    platform="systrap",
    architecture="x86_64",
    cpu_features=("avx2", "sse2"),
    spec=SPEC,
    files={"/usr/lib/x.so": {"use": "mapped", "state": "", "size": 3, "digest": "cd" * 32}},
    contents={"process": 1},
    seconds=0.25,
)
FULL = GCSSandboxMetadata(
    sandbox_id="a",
    created="2026-11-16T00:00:00",
    last_used="2026-11-16T00:00:01",
    kernel_name="python3-sandbox",
    notebook_path="work/Ünïcode.ipynb",
    user="me",
    settings={"enable_handoff": True},
    tenancy=Tenancy(7, "server-1 (process 5 of me on here)", running=True),
    checkpoint=CHECKPOINT,
    previous=replace(CHECKPOINT, seconds=1.0),
)
BARE = GCSSandboxMetadata("a", "2026-11-16", "2026-11-16")

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


@pytest.mark.parametrize("document", [FULL, BARE], ids=["full", "bare"])
def test_document_survives_storage(document: GCSSandboxMetadata) -> None:
    assert decode(encode(document), "there", "a") == document


def test_artifact_and_note_survive_storage() -> None:
    note = Note("a", "gs://b", SPEC, "systrap", {"process": 1}, 3, "sandboxes/a/checkpoints/1/", "c1")
    assert decode_artifact(encode_artifact(ARTIFACT), "there") == ARTIFACT
    assert decode_note(json.loads(json.dumps(asdict(note))), "there") == note


def test_document_with_an_empty_file_survives_storage(tmp_path: Path) -> None:
    (tmp_path / "pages.img").touch()
    record = LocalStore(tmp_path / "store").upload(tmp_path / "pages.img", "pages.img")
    artifact = replace(ARTIFACT, files={"pages.img": record})
    document = replace(BARE, checkpoint=replace(CHECKPOINT, artifact=artifact))
    assert decode(encode(document), "there", "a") == document
    assert decode_artifact(encode_artifact(artifact), "there") == artifact


def test_document_of_an_earlier_version_has_lost_nothing() -> None:
    earlier = json.loads(encode(FULL))
    del earlier["lost_since"]
    assert decode(json.dumps(earlier).encode(), "there", "a").lost_since == ""


def test_sandbox_that_ended_unsaved_is_recorded_as_older_until_the_user_is_told() -> None:
    lost = FULL.taken_over(8, "server-2", runs_on=False)
    assert lost.lost_since == CHECKPOINT.created
    assert lost.tenancy == Tenancy(8, "server-2", running=False)
    assert lost == replace(FULL.stopped(), tenancy=lost.tenancy)
    again = lost.taken_over(9, "server-3", runs_on=False)
    assert again.lost_since == CHECKPOINT.created
    assert again.started(CHECKPOINT, None, "now").saved(CHECKPOINT, "now").lost_since == CHECKPOINT.created
    assert again.told().lost_since == again.reverted("before-revert").lost_since == ""


def test_orphan_saved_sandbox_and_sandbox_without_checkpoint_have_lost_nothing() -> None:
    orphan = FULL.taken_over(8, "server-2", runs_on=True)
    assert orphan.running
    assert orphan.lost_since == orphan.saved(CHECKPOINT, "now").lost_since == ""
    saved = FULL.saved(CHECKPOINT, "now")
    assert saved.taken_over(8, "server-2", runs_on=False).lost_since == ""
    assert replace(FULL, checkpoint=None).stopped().lost_since == ""
    assert BARE.taken_over(8, "server-2", runs_on=False).lost_since == ""


def test_newer_schema_is_refused_with_remedy() -> None:
    newer = json.loads(encode(BARE)) | {"schema": SCHEMA + 1}
    with pytest.raises(MetadataError, match=rf"there has schema {SCHEMA + 1}.*Upgrade"):
        decode(json.dumps(newer).encode(), "there", "a")


def test_document_of_another_sandbox_is_refused() -> None:
    with pytest.raises(MetadataError, match="of sandbox 'a'"):
        decode(encode(BARE), "there", "b")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda document: document.pop("created"),
        lambda document: document.update(created=5),
        lambda document: document.update(settings=[]),
        lambda document: document["tenancy"].update(token="7"),
        lambda document: document["tenancy"].update(token=True),
        lambda document: document["tenancy"].update(running=1),
        lambda document: document["checkpoint"]["spec"].update(mounts=[["/a", "/b"]]),
        lambda document: document["checkpoint"]["spec"]["mounts"].append([1, 2, 3]),
        lambda document: document["checkpoint"]["artifact"]["files"].update(x={"size": 1}),
        lambda document: document["checkpoint"]["artifact"]["files"]["pages.img"].update(size=-1),
        lambda document: document["checkpoint"]["artifact"]["files"]["pages.img"].update(parts=[1]),
        lambda document: document["checkpoint"]["artifact"]["files"]["pages.img"].update(digests=["ab" * 32]),
        lambda document: document["checkpoint"]["artifact"]["files"]["pages.img"].update(digests=["x", "y", "z"]),
        lambda document: document["checkpoint"].update(cpu_features=[None]),
        lambda document: document["checkpoint"].update(seconds="long"),
    ],
)
def test_defect_of_a_document_is_reported_with_its_location(spoil: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(encode(FULL))
    spoil(document)
    with pytest.raises(MetadataError, match=r"^there cannot be understood: "):
        decode(json.dumps(document).encode(), "there", "a")


@given(st.binary(max_size=200))
def test_any_bytes_raise_only_metadata_error(data: bytes) -> None:
    for decoding in (lambda: decode(data, "there", "a"), lambda: decode_artifact(data, "there")):
        with pytest.raises(MetadataError):
            decoding()


@given(st.sampled_from(sorted(json.loads(encode(FULL)))), JSON)
def test_any_value_of_a_member_raises_only_metadata_error(name: str, value: Any) -> None:
    document = json.loads(encode(FULL)) | {name: value}
    try:
        decoded = decode(json.dumps(document).encode(), "there", "a")
    except MetadataError:
        return
    assert decode(encode(decoded), "there", "a") == decoded


@given(JSON)
def test_any_note_raises_only_metadata_error(value: Any) -> None:
    with pytest.raises(MetadataError):
        decode_note(value if isinstance(value, dict) else {"spec": value}, "there")
