"""Test the notes on errors with mount tables of sandboxes that differ from the usual one."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from sandbox_provisioner.guest import notes

TABLE = """\
18 17 0:20 / / ro - overlay none ro
22 18 0:23 / /usr ro - 9p none ro,trans=fd
25 18 0:26 / /proc rw - proc none rw
26 18 0:27 / /home/ada rw - tmpfs none rw,mode=0700
34 26 0:35 / /home/ada/my\\040work rw - 9p none rw,trans=fd
35 34 0:36 / /home/ada/my\\040work/.git rw - 9p none rw,trans=fd
36 35 0:37 / /home/ada/my\\040work/.git/hooks ro - 9p none ro,trans=fd
37 18 0:38 / /.sandbox-folder rw - 9p none rw,trans=fd
"""


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox with a read-only root and a read-only folder in the kernel's folder, whose name has a space."""
    (tmp_path / "mountinfo").write_text(TABLE)
    monkeypatch.setattr(notes, "MOUNT_TABLE", str(tmp_path / "mountinfo"))


def refused(path: str) -> str:
    return notes.explain(OSError(errno.EROFS, "Read-only file system", path))


@pytest.mark.parametrize("path", ["/opt/new.txt", "/usr/new.txt", "/home/ada/my work/.git/hooks/pre-commit"])
def test_read_only_place_is_named_with_the_folder_for_files(path: str) -> None:
    note = refused(path)
    assert note.startswith(f"Sandbox: {path} is read-only in this sandbox. Files can be kept in /home/ada/my work. ")
    assert ".git," not in note and "/.sandbox-folder" not in note


@pytest.mark.parametrize("path", ["/home/ada/my work/new.txt", "/home/ada/my work/.git/new", "/home/ada/new.txt"])
def test_read_only_file_system_of_the_host_is_not_explained(path: str) -> None:
    assert refused(path) == ""


def test_long_chain_of_errors_is_examined_only_in_part() -> None:
    error: BaseException = OSError(errno.EROFS, "Read-only file system", "/usr/x")
    for _ in range(3 * notes.MAX_CHAIN):
        outer = ValueError("outer")
        outer.__cause__, error = error, outer
    assert notes.explain(error) == ""
    error.__cause__ = error
    assert notes.explain(error) == ""


def test_members_of_a_group_are_examined() -> None:
    members = [ValueError("one"), OSError(errno.EROFS, "Read-only file system", "/usr/x")]
    assert "read-only" in notes.explain(ExceptionGroup("several", members))


def test_strange_path_is_printable_and_bounded() -> None:
    note = refused("/usr/\x1b[2J" + "x" * 9999)
    assert note.isprintable() and len(note) < 600
