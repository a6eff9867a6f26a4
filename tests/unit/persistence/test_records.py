"""Test SandboxRecord: an encoded record can be decoded; anything else is refused with the reason."""

from __future__ import annotations

import json
from dataclasses import fields
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_provisioner.errors import ConfigurationError, UnreadableRecordError
from sandbox_provisioner.persistence import records
from sandbox_provisioner.persistence.records import SandboxRecord

ID = UUID("5f0c6b1e-8c8e-4a1c-9d3b-3d1f0a1b2c3d")
RECORD = SandboxRecord(
    id=ID,
    storage="gcs",
    where="gs://bucket/prefix",
    sandbox_id="box",
    kernel_name="python3-sandbox",
    settings={"network": "none", "mounts": ["/data:/data:ro"]},
    notebook_path="/home/tester/a notebook.ipynb",
    created=datetime(2026, 1, 2, 3, 4, 5, 6, UTC),
    last_used=datetime(2026, 2, 3, tzinfo=UTC),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
TIMES = st.datetimes(timezones=st.just(UTC))
RECORDS = st.builds(
    SandboxRecord,
    id=st.uuids(),
    storage=st.text(),
    where=st.text(),
    sandbox_id=st.text(),
    kernel_name=st.text(),
    settings=st.dictionaries(st.text(), VALUES, max_size=3),
    notebook_path=st.text(st.characters()),
    created=TIMES,
    last_used=TIMES,
)


def document(**changes: Any) -> bytes:
    return json.dumps({**json.loads(records.encode(RECORD)), **changes}).encode()


def refusal_of(data: bytes) -> UnreadableRecordError:
    with pytest.raises(UnreadableRecordError) as refusal:
        records.decode(data, ID, "the/file.json")
    assert refusal.value.path == "the/file.json"
    assert "the/file.json" in refusal.value.problem
    assert len(str(refusal.value)) < 500
    return refusal.value


@given(RECORDS)
def test_decoded_record_equals_the_encoded_one(record: SandboxRecord) -> None:
    assert records.decode(records.encode(record), record.id, "") == record


def test_times_are_stored_in_utc() -> None:
    elsewhere = RECORD.created.astimezone(timezone(timedelta(hours=-7)))
    data = document(created=elsewhere.isoformat())
    assert records.decode(data, ID, "").created.isoformat() == RECORD.created.isoformat()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "Expecting value"),
        (records.encode(RECORD)[:-50], "Unterminated"),
        (b"\xff\xfe\xfa", "decode"),
        (b"[]", "not a sandbox record"),
        (b"{}", "not a sandbox record"),
        (document(version="1"), "not a sandbox record"),
        (document(version=True), "not a sandbox record"),
        (document(kernel_name=None), "kernel_name has the wrong type: 'None'"),
        (document(settings=[]), "settings has the wrong type: '[]'"),
        (document(id="../../etc/passwd"), "badly formed"),
        (document(id="00000000-0000-0000-0000-000000000000"), "of sandbox 00000000"),
        (document(created="yesterday"), "yesterday"),
        (document(created="2026-01-02T03:04:05"), "no time zone"),
        (document(created="0001-01-01T00:00:00+14:00"), "out of range"),
        (document(settings={"a": float("inf")}), "Infinity is not a number"),
        (b'{"version": 1' + b"0" * 5000 + b"}", "digits"),
        (b"[" * 100_000, "recursion"),
        (document(where="x" * 1_000_000), "bytes"),
    ],
)
def test_malformed_record_is_refused_with_the_reason(data: bytes, reason: str) -> None:
    assert reason in refusal_of(data).problem


def test_newer_record_is_refused_with_remedy() -> None:
    refusal = refusal_of(document(version=2))
    assert "version 2" in refusal.problem
    assert "Upgrade" in refusal.remedy


@given(st.binary() | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_record_or_unreadable(data: bytes) -> None:
    refusal_of(data)


@given(st.sampled_from([field.name for field in fields(SandboxRecord)]), VALUES)
def test_any_value_of_a_field_is_accepted_or_unreadable(name: str, value: Any) -> None:
    try:
        records.decode(document(**{name: value}), ID, "the/file.json")
    except UnreadableRecordError as error:
        assert error.path == "the/file.json"


@pytest.mark.parametrize("value", [object(), float("nan"), {1, 2}, b"bytes"])
def test_settings_that_are_not_json_are_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        records.encode(SandboxRecord(**{**vars(RECORD), "settings": {"x": value}}))
    assert refusal.value.setting == "settings"
