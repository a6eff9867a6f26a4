"""Test the record of the notebooks that ran in a sandbox."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from stat import S_IMODE
from unittest import mock

import pytest

from sandbox_provisioner.config import GCSConfig
from sandbox_provisioner.errors import BadRequestError
from sandbox_provisioner.persistence.backends import open_stores
from sandbox_provisioner.sandbox import sandboxed_notebooks, user_sandboxes
from sandbox_provisioner.sandbox.sandboxed_notebooks import FOLDER, KEEP_MISSING, SandboxedNotebooks

NOW = 1e9


@pytest.fixture
def notebooks(tmp_path: Path) -> SandboxedNotebooks:
    return SandboxedNotebooks(tmp_path / "own" / FOLDER)


def paths(notebooks: SandboxedNotebooks) -> list[str]:
    return [entry.notebook for entry in notebooks.entries()]


def test_recorded_notebook_needs_permission(notebooks: SandboxedNotebooks, tmp_path: Path) -> None:
    path = str(tmp_path / "a.ipynb")
    assert not notebooks.refused(path, "python3") and notebooks.find(path) is None
    notebooks.record([path])
    assert notebooks.refused(path, "Python3")
    entry = notebooks.find(path)
    assert entry and (entry.notebook, entry.allowed, entry.refused) == (path, "", "python3")
    notebooks.allow(path, "Python3")
    assert not notebooks.refused(path, "python3")
    assert notebooks.refused(path, "python4") and notebooks.refused(path, "python3", can_allow=False)
    notebooks.record([path])
    assert notebooks.refused(path, "python3")


def test_permission_for_unknown_notebook_is_not_kept(notebooks: SandboxedNotebooks, tmp_path: Path) -> None:
    notebooks.allow(str(tmp_path / "a.ipynb"), "python3")
    assert notebooks.entries() == []


def test_folder_is_private(notebooks: SandboxedNotebooks, tmp_path: Path) -> None:
    notebooks.record([str(tmp_path / "a.ipynb")])
    assert S_IMODE((tmp_path / "own" / FOLDER).stat().st_mode) == 0o700


def test_links_lead_to_the_entry(notebooks: SandboxedNotebooks, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "folder").symlink_to("real")
    (tmp_path / "real" / "a.ipynb").touch()
    (tmp_path / "first.ipynb").symlink_to("second.ipynb")
    (tmp_path / "second.ipynb").symlink_to("folder/a.ipynb")
    notebooks.record([str(tmp_path / "real" / "a.ipynb")])
    for path in ("first.ipynb", "second.ipynb", "folder/a.ipynb", "real/../folder/./a.ipynb", "REAL/A.IPYNB"):
        assert notebooks.refused(str(tmp_path / path), "python3"), path


def test_notebook_that_became_a_link(notebooks: SandboxedNotebooks, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "folder").symlink_to("real")
    notebooks.record([str(tmp_path / "folder" / "a.ipynb")])
    (tmp_path / "real" / "a.ipynb").symlink_to(tmp_path / "new.ipynb")
    (tmp_path / "other").symlink_to("real")
    for path in ("folder/a.ipynb", "real/a.ipynb", "other/a.ipynb"):
        assert notebooks.refused(str(tmp_path / path), "python3"), path


def test_endless_links(notebooks: SandboxedNotebooks, tmp_path: Path) -> None:
    (tmp_path / "a.ipynb").symlink_to("a.ipynb")
    assert not notebooks.refused(str(tmp_path / "a.ipynb"), "python3")
    assert not notebooks.refused("/a\0.ipynb", "python3")


def test_moved_and_copied_folder(notebooks: SandboxedNotebooks) -> None:
    notebooks.record(["/nb/a/1.ipynb", "/nb/a/b/2.ipynb", "/nb/ab.ipynb"])
    notebooks.allow("/nb/a/1.ipynb", "python3")
    notebooks.copy("/nb/a", "/nb/copy")
    notebooks.move("/nb/a", "/nb/moved")
    assert paths(notebooks) == [
        "/nb/ab.ipynb",
        "/nb/copy/1.ipynb",
        "/nb/copy/b/2.ipynb",
        "/nb/moved/1.ipynb",
        "/nb/moved/b/2.ipynb",
    ]
    assert not notebooks.refused("/nb/moved/1.ipynb", "python3")
    assert notebooks.refused("/nb/copy/1.ipynb", "python3")
    notebooks.forget("/nb/moved")
    assert paths(notebooks) == ["/nb/ab.ipynb", "/nb/copy/1.ipynb", "/nb/copy/b/2.ipynb"]


def test_renamed_in_upper_case(notebooks: SandboxedNotebooks) -> None:
    notebooks.record(["/nb/a.ipynb"])
    notebooks.move("/nb/a.ipynb", "/nb/A.ipynb")
    assert paths(notebooks) == ["/nb/A.ipynb"]


def test_notebook_moved_over_another_needs_permission(notebooks: SandboxedNotebooks) -> None:
    notebooks.record(["/nb/a.ipynb"])
    notebooks.move("/nb/plain.ipynb", "/nb/a.ipynb")
    assert notebooks.refused("/nb/a.ipynb", "python3")


@pytest.mark.parametrize("twin", ["A.ipynb", "e\u0301.ipynb"])
def test_path_in_other_case_has_its_own_entry(notebooks: SandboxedNotebooks, twin: str) -> None:
    path = "/nb/a.ipynb" if twin == "A.ipynb" else "/nb/\xe9.ipynb"
    notebooks.record([path])
    notebooks.forget(f"/nb/{twin}")
    notebooks.move("/nb/new.ipynb", f"/nb/{twin}")
    assert notebooks.refused(path, "python3") and notebooks.refused(f"/nb/{twin}", "python3")
    notebooks.record([f"/nb/{twin}"])
    notebooks.allow(f"/nb/{twin}", "python3")
    assert notebooks.refused(path, "python3") and not notebooks.refused(f"/nb/{twin}", "python3")
    notebooks.move(path, "/nb/b.ipynb")
    assert notebooks.refused("/nb/b.ipynb", "python3")


def test_folder_replaced_by_a_link_moves_and_deletes_no_entry(notebooks: SandboxedNotebooks, tmp_path: Path) -> None:
    for name in ("a.ipynb", "b.ipynb"):
        (tmp_path / name).touch()
        notebooks.record([str(tmp_path / name)])
    (tmp_path / "old").symlink_to(".")
    notebooks.allow(str(tmp_path / "a.ipynb"), "python3")
    notebooks.forget(str(tmp_path / "old" / "a.ipynb"))
    notebooks.move(str(tmp_path / "old" / "a.ipynb"), str(tmp_path / "old" / "b.ipynb"))
    assert notebooks.find(str(tmp_path / "a.ipynb")) and notebooks.refused(str(tmp_path / "b.ipynb"), "python3")


def test_permission_does_not_follow_a_link(notebooks: SandboxedNotebooks, tmp_path: Path) -> None:
    first, second = str(tmp_path / "a.ipynb"), str(tmp_path / "b.ipynb")
    notebooks.record([first, second])
    (tmp_path / "a.ipynb").symlink_to("b.ipynb")
    with pytest.raises(BadRequestError, match="leads through a link"):
        notebooks.allow(first, "python3")
    assert notebooks.refused(second, "python3")
    notebooks.allow(second, "python3")
    notebooks.allow(first, "python3")
    assert not notebooks.refused(first, "python3")


def test_links_are_resolved_by_the_system(notebooks: SandboxedNotebooks, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    for number in range(200):
        (tmp_path / f"link{number}").symlink_to("x/../" * 800 + ".")
    chain = "".join(f"link{number}/" for number in range(200))
    (tmp_path / "f.ipynb").symlink_to(f"{chain}a.ipynb")
    with mock.patch("os.lstat", side_effect=AssertionError("resolved in Python")):
        assert not notebooks.refused(str(tmp_path / "f.ipynb"), "python3")


def test_entry_of_failed_start_is_withdrawn(notebooks: SandboxedNotebooks) -> None:
    replaced = notebooks.record(["/nb/a.ipynb", "/nb/b.ipynb"])
    notebooks.record(["/nb/b.ipynb"])  # another start
    notebooks.withdraw(replaced)
    assert paths(notebooks) == ["/nb/b.ipynb"]


def test_permission_returns_after_a_failed_start(notebooks: SandboxedNotebooks) -> None:
    notebooks.record(["/nb/a.ipynb"])
    notebooks.allow("/nb/a.ipynb", "python3")
    notebooks.withdraw(notebooks.record(["/nb/a.ipynb"]))
    assert not notebooks.refused("/nb/a.ipynb", "python3")
    notebooks.record(["/nb/a.ipynb"])  # this start succeeds
    notebooks.withdraw(notebooks.record(["/nb/a.ipynb"]))
    assert notebooks.refused("/nb/a.ipynb", "python3")


def test_entry_of_missing_file_is_kept_for_a_time(notebooks: SandboxedNotebooks, tmp_path: Path) -> None:
    file = tmp_path / "a.ipynb"
    notebooks.record([str(file)])
    notebooks.prune(NOW)
    notebooks.prune(NOW + KEEP_MISSING - 1)
    file.touch()
    notebooks.prune(NOW + KEEP_MISSING + 1)
    file.unlink()
    notebooks.prune(NOW + KEEP_MISSING + 2)
    assert paths(notebooks) == [str(file)]
    notebooks.prune(NOW + 2 * KEEP_MISSING + 2)
    assert paths(notebooks) == []


def test_number_of_entries_is_bounded(
    notebooks: SandboxedNotebooks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandboxed_notebooks, "MOST_ENTRIES", 2)
    for name in "abc":
        (tmp_path / name).touch()
        notebooks.record([str(tmp_path / name)])
    notebooks.prune(NOW)
    assert paths(notebooks) == [str(tmp_path / "b"), str(tmp_path / "c")]


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"notebook": 1}', "\udcff"])
def test_unreadable_entry_allows_no_kernel(notebooks: SandboxedNotebooks, tmp_path: Path, content: str) -> None:
    notebooks.record(["/nb/a.ipynb"])
    notebooks.allow("/nb/a.ipynb", "python3")
    (entry,) = (file for file in (tmp_path / "own" / FOLDER).glob("*/*") if not file.name.startswith("."))
    entry.write_text(content, errors="surrogateescape")
    assert notebooks.refused("/nb/a.ipynb", "python3")
    notebooks.prune(NOW)
    notebooks.allow("/nb/a.ipynb", "python3")
    assert not notebooks.refused("/nb/a.ipynb", "python3")


def test_recorded_sandboxes_of_earlier_versions(data: Path, tmp_path: Path) -> None:
    registry, stores = user_sandboxes.registry(), open_stores(GCSConfig(folder=tmp_path / "storage"))
    registry.allocate(stores, notebook_path="/nb/a.ipynb", kernel_name="python3-sandbox")
    registry.allocate(stores, kernel_name="python3-sandbox")
    notebooks = SandboxedNotebooks()
    notebooks.prepare()
    assert paths(notebooks) == ["/nb/a.ipynb"]
    notebooks.forget("/nb/a.ipynb")
    notebooks.prepare()
    assert paths(notebooks) == []


WRITER = """
import sys
from pathlib import Path
from sandbox_provisioner.sandbox.sandboxed_notebooks import SandboxedNotebooks
notebooks = SandboxedNotebooks(Path(sys.argv[1]))
print("ready", flush=True)
for number in range(int(sys.argv[2])):
    notebooks.record(["/nb/shared.ipynb", f"/nb/{sys.argv[3]}-{number}.ipynb"])
    notebooks.allow("/nb/shared.ipynb", "python3")
    notebooks.move(f"/nb/{sys.argv[3]}-{number}.ipynb", f"/nb/{sys.argv[3]}.{number}.ipynb")
"""


def write(folder: Path, number: int, name: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", WRITER, str(folder), str(number), name]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def test_two_processes_write_at_once(notebooks: SandboxedNotebooks, tmp_path: Path) -> None:
    for writer in [write(tmp_path / "own" / FOLDER, 20, name) for name in ("one", "two")]:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    expected = {f"/nb/{name}.{number}.ipynb" for name in ("one", "two") for number in range(20)}
    assert set(paths(notebooks)) == {"/nb/shared.ipynb", *expected}


def test_killed_process_leaves_complete_entries(notebooks: SandboxedNotebooks, tmp_path: Path) -> None:
    for _ in range(5):
        writer = write(tmp_path / "own" / FOLDER, 1000, "one")
        assert writer.stdout and writer.stdout.readline() == "ready\n"
        while not notebooks.entries():
            pass
        writer.kill()
        writer.communicate()
        assert all(entry.notebook.endswith(".ipynb") for entry in notebooks.entries())
        assert notebooks.find("/nb/shared.ipynb")
        notebooks.record(["/nb/one-0.ipynb"])
