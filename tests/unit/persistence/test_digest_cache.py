"""Test DigestCache: equal bytes, equal hash; unchanged files are not read again; a damaged cache is ignored."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox_provisioner.persistence import digest_cache
from sandbox_provisioner.persistence.digest_cache import NAME, DigestCache

UNTRUE = "f" * 64


@contextmanager
def opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_PATH)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def print_of(path: Path, prints: DigestCache) -> str:
    with opened(path) as descriptor:
        return prints.of(descriptor)


def falsify(folder: Path) -> None:
    """Replace all digests in the cache by a wrong one, so that a test detects values from the cache."""
    known = json.loads((folder / NAME).read_text())
    (folder / NAME).write_text(json.dumps(dict.fromkeys(known, UNTRUE)))


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_cache, "SETTLED", 0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"content" * 500_000)
    return path


def test_digest_covers_all_bytes(file: Path, tmp_path: Path) -> None:
    prints = DigestCache(tmp_path)
    assert print_of(file, prints) == hashlib.sha256(file.read_bytes()).hexdigest()
    (tmp_path / "empty").touch()
    assert print_of(tmp_path / "empty", prints) == hashlib.sha256(b"").hexdigest()


def test_cached_file_is_not_read_again_in_any_process(file: Path, tmp_path: Path, settled: None) -> None:
    folder = tmp_path / "made" / "on demand"
    prints = DigestCache(folder)
    true = print_of(file, prints)
    prints.save()
    falsify(folder)
    assert print_of(file, prints) == true
    assert print_of(file, DigestCache(folder)) == UNTRUE


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(b"another" * 500_000),
        lambda path: os.utime(path, (1, 1)),
        lambda path: path.chmod(0o600),
        lambda path: (path.with_name("copy").write_bytes(path.read_bytes()), path.with_name("copy").rename(path)),
    ],
    ids=["written to", "touched", "its mode changed", "replaced"],
)
def test_changed_file_is_read_again(file: Path, tmp_path: Path, settled: None, change: object) -> None:
    prints = DigestCache(tmp_path)
    print_of(file, prints)
    prints.save()
    falsify(tmp_path)
    change(file)  # type: ignore[operator]
    assert print_of(file, DigestCache(tmp_path)) == hashlib.sha256(file.read_bytes()).hexdigest()


def test_recently_changed_file_is_not_cached(file: Path, tmp_path: Path) -> None:
    prints = DigestCache(tmp_path)
    print_of(file, prints)
    prints.save()
    assert not (tmp_path / NAME).exists()


def test_cache_is_private_and_leaves_no_other_file(file: Path, tmp_path: Path, settled: None) -> None:
    folder = tmp_path / "memory"
    prints = DigestCache(folder)
    print_of(file, prints)
    prints.save()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / NAME).stat().st_mode) == 0o600
    assert [name for name in os.listdir(folder) if not name.startswith(".")] == [NAME]


def test_cache_is_bounded_and_keeps_the_last_used(
    tmp_path: Path, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest_cache, "MOST_ENTRIES", 3)
    prints = DigestCache(tmp_path)
    files = [tmp_path / str(number) for number in range(5)]
    for path in files:
        path.write_text(path.name)
        print_of(path, prints)
    print_of(files[0], prints)
    prints.save()
    falsify(tmp_path)
    after = DigestCache(tmp_path)
    assert [print_of(path, after) == UNTRUE for path in files] == [True, False, False, True, True]


def test_unwritable_cache_is_ignored(file: Path, tmp_path: Path, settled: None) -> None:
    prints = DigestCache(file / "not a folder")
    assert print_of(file, prints) == hashlib.sha256(file.read_bytes()).hexdigest()
    prints.save()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    ).map(lambda value: json.dumps(value).encode())
)
def test_damaged_cache_is_empty(file: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    assert print_of(file, DigestCache(tmp_path)) == hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("content", [b"[" * 100_000, b" " * (digest_cache.MOST_BYTES + 1)], ids=["deep", "large"])
def test_oversized_cache_is_empty(file: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    assert print_of(file, DigestCache(tmp_path)) == hashlib.sha256(file.read_bytes()).hexdigest()


def test_huge_file_is_identified_by_size_and_samples(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    seen = set()
    for offset, byte, size in (
        (0, b"a", 1 << 40),
        (0, b"b", 1 << 40),
        ((1 << 40) - 1, b"c", 1 << 40),
        (0, b"b", 1 << 39),
    ):
        path.unlink(missing_ok=True)
        with path.open("wb") as file:
            file.truncate(size)
            file.seek(offset)
            file.write(byte)
        seen.add(print_of(path, DigestCache(tmp_path)))
    assert len(seen) == 4
