"""Access to files beneath a folder: which links are followed, for reading and for writing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox_provisioner.contents.beneath import Beneath
from sandbox_provisioner.contents.entries import AccessRefused, move_to_trash
from sandbox_provisioner.contents.file_functions import Refused
from sandbox_provisioner.contents.links import Area, LinkRules, open_real
from sandbox_provisioner.kernel.folders import recall, remember

pytestmark = pytest.mark.user


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A server's folder with a project in it, and a file outside."""
    (tmp_path / "root" / "project" / "data").mkdir(parents=True)
    (tmp_path / "root" / "other").mkdir()
    (tmp_path / "outside").mkdir()
    for place in ("root/project/a", "root/project/data/b", "root/other/c", "outside/secret"):
        (tmp_path / place).write_text(place)
    return tmp_path / "root"


def read(beneath: Beneath, path: Path) -> str:
    with os.fdopen(beneath.open(str(path), os.O_RDONLY)) as file:
        return file.read()


def write(beneath: Beneath, path: Path, text: str = "new") -> None:
    with os.fdopen(beneath.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
        file.write(text)


@pytest.mark.parametrize("target", ["data/b", "./data/../data/b", "../project/data/b", "{root}/project/data/b"])
def test_link_inside_is_followed(root: Path, target: str) -> None:
    link = root / "project" / "link"
    link.symlink_to(target.format(root=root))
    beneath = Beneath(LinkRules(str(root), shared=lambda: [str(root / "project")]))
    assert read(beneath, link) == "root/project/data/b"
    write(beneath, link)
    assert (root / "project" / "data" / "b").read_text() == "new"
    assert link.is_symlink()


@pytest.mark.parametrize("target", ["{outside}/secret", "../../outside/secret", "data/../../../outside/secret"])
@pytest.mark.parametrize("operation", [read, write])
def test_link_outside_is_refused(root: Path, target: str, operation: Callable[..., object]) -> None:
    link = root / "project" / "link"
    link.symlink_to(target.format(outside=root.parent / "outside"))
    with pytest.raises(AccessRefused, match="symbolic link"):
        operation(Beneath(LinkRules(str(root))), link)
    assert (root.parent / "outside" / "secret").read_text() == "outside/secret"


def test_folder_link_outside_is_refused(root: Path) -> None:
    (root / "folder").symlink_to(root.parent / "outside")
    beneath = Beneath(LinkRules(str(root)))
    for operation in (read, write):
        with pytest.raises(AccessRefused):
            operation(beneath, root / "folder" / "secret")
    for method in (beneath.listdir, beneath.size, beneath.stat):
        with pytest.raises(AccessRefused):
            method(str(root / "folder"))
    for method in (beneath.mkdir, beneath.unlink, beneath.rmtree, beneath.lstat):
        with pytest.raises(AccessRefused):
            method(str(root / "folder" / "secret"))


def test_dangling_link_outside_creates_nothing(root: Path) -> None:
    (root / "link").symlink_to(root.parent / "outside" / "new")
    with pytest.raises(AccessRefused):
        write(Beneath(LinkRules(str(root))), root / "link")
    assert os.listdir(root.parent / "outside") == ["secret"]


def test_link_out_of_shared_folder_is_refused(root: Path) -> None:
    (root / "project" / "link").symlink_to("../other/c")
    (root / "mine").symlink_to("other/c")
    beneath = Beneath(LinkRules(str(root), shared=lambda: [str(root / "project")]))
    for operation in (read, write):
        with pytest.raises(AccessRefused):
            operation(beneath, root / "project" / "link")
    assert read(beneath, root / "mine") == "root/other/c"
    # A chain of links is bound by each of them.
    (root / "chain").symlink_to("project/link")
    with pytest.raises(AccessRefused):
        read(beneath, root / "chain")


def test_links_to_allowed_areas(root: Path) -> None:
    outside = root.parent / "outside"
    (root / "project" / "link").symlink_to(outside / "secret")
    shared = [str(root / "project")]
    read_only = Beneath(LinkRules(str(root), [Area(str(outside), writable=False)], lambda: shared))
    assert read(read_only, root / "project" / "link") == "outside/secret"
    with pytest.raises(AccessRefused, match="must not be written"):
        write(read_only, root / "project" / "link")
    assert not read_only.access(str(root / "project" / "link"), os.W_OK)
    write(Beneath(LinkRules(str(root), [Area(str(outside))], lambda: shared)), root / "project" / "link")
    assert (outside / "secret").read_text() == "new"
    # A single file can be an area too; its neighbours are not.
    (outside / "neighbour").write_text("")
    (root / "project" / "second").symlink_to(outside / "neighbour")
    one_file = Beneath(LinkRules(str(root), [Area(str(outside / "secret"))], lambda: shared))
    assert read(one_file, root / "project" / "link") == "new"
    with pytest.raises(AccessRefused):
        read(one_file, root / "project" / "second")


def test_link_in_allowed_area_stays_there(root: Path) -> None:
    outside = root.parent / "outside"
    (outside / "back").symlink_to(root / "other" / "c")
    (root / "link").symlink_to(outside)
    with pytest.raises(AccessRefused):
        read(Beneath(LinkRules(str(root), [Area(str(outside))])), root / "link" / "back")


def test_hidden_and_protected_places_are_not_written_through_links(root: Path) -> None:
    project = root / "project"
    for place in (".git/hooks/post-commit", "env/bin/activate"):
        (project / place).parent.mkdir(parents=True)
        (project / place).write_text("old")
    (project / "hook").symlink_to(".git/hooks/post-commit")
    (project / "script").symlink_to("env/bin/activate")
    beneath = Beneath(LinkRules(str(root), shared=lambda: [str(project)], protected=lambda: [str(project / "env")]))
    for name in ("hook", "script"):
        assert read(beneath, project / name) == "old"
        with pytest.raises(AccessRefused):
            write(beneath, project / name)
    # A hidden name that the request has itself is not hidden by the link.
    (project / "alias").symlink_to("data")
    beneath.mkdir(str(project / "alias" / ".ipynb_checkpoints"))
    write(beneath, project / "alias" / ".ipynb_checkpoints" / "b")
    assert (project / "data" / ".ipynb_checkpoints" / "b").read_text() == "new"


@pytest.mark.timeout(20)
def test_special_files_are_refused_without_waiting(root: Path) -> None:
    os.mkfifo(root / "fifo")
    (root / "link").symlink_to("fifo")
    beneath = Beneath(LinkRules(str(root)))
    for name in ("fifo", "link"):
        for operation in (read, write):
            with pytest.raises(AccessRefused, match="neither a file nor a folder"):
                operation(beneath, root / name)
        with pytest.raises(AccessRefused, match="neither a file nor a folder"):
            beneath.stat(str(root / name))


def test_endless_links_are_refused_and_can_be_deleted(root: Path) -> None:
    (root / "first").symlink_to("second")
    (root / "second").symlink_to("first")
    with pytest.raises(AccessRefused, match="too many symbolic links"):
        read(Beneath(LinkRules(str(root))), root / "first")
    Beneath(LinkRules(str(root))).unlink(str(root / "first"))
    assert not (root / "first").is_symlink()


def test_root_that_the_user_reaches_through_a_link(root: Path) -> None:
    name = root.parent / "name"
    name.symlink_to(root)
    (root / "link").symlink_to(name / "other" / "c")
    beneath = Beneath(LinkRules(str(name)))
    assert read(beneath, name / "other" / "c") == "root/other/c"
    assert read(beneath, name / "link") == "root/other/c"


def test_root_that_is_replaced_by_a_link_is_not_found(root: Path) -> None:
    beneath = Beneath(LinkRules(str(root)))
    root.rename(root.parent / "moved")
    root.symlink_to(root.parent / "outside")
    with pytest.raises(OSError):
        read(beneath, root / "secret")
    with pytest.raises(OSError):
        open_real(str(root))


def test_paths_that_are_not_beneath_the_root(root: Path) -> None:
    beneath = Beneath(LinkRules(str(root)))
    for path in (root.parent / "outside" / "secret", root / ".." / "outside" / "secret"):
        with pytest.raises(PermissionError):
            read(beneath, path)
    with pytest.raises(ValueError):
        read(beneath, root / "a\0b")


def test_move_and_replace(root: Path) -> None:
    beneath = Beneath(LinkRules(str(root)))
    secret = root.parent / "outside" / "secret"
    (root / "link").symlink_to(secret)
    beneath.move(str(root / "link"), str(root / "other" / "renamed"))
    assert os.readlink(root / "other" / "renamed") == str(secret)
    beneath.move(str(root / "project"), str(root / "other" / "project"))
    assert (root / "other" / "project" / "data" / "b").exists()
    (root / "alias").symlink_to("other/c")
    (root / "fresh").write_text("fresh")
    beneath.replace(str(root / "fresh"), str(root / "alias"))
    assert (root / "alias").is_symlink()
    assert (root / "other" / "c").read_text() == "fresh"


def test_copytree_copies_links_that_lead_outside_as_links(root: Path) -> None:
    project = root / "project"
    (project / "out").symlink_to(root.parent / "outside")
    (project / "in").symlink_to("data")
    (project / "a").chmod(0o640)
    Beneath(LinkRules(str(root))).copytree(str(project), str(root / "copy"))
    assert os.readlink(root / "copy" / "out") == str(root.parent / "outside")
    assert (root / "copy" / "in" / "b").read_text() == "root/project/data/b"
    assert not (root / "copy" / "in").is_symlink()
    assert (root / "copy" / "a").stat().st_mode & 0o777 == 0o640


@pytest.mark.timeout(30)
def test_copytree_ends_if_links_lead_to_their_own_folder(root: Path) -> None:
    """Without a limit, the copy has 2 to the power of 40 folders."""
    for name in ("first", "second"):
        (root / "project" / name).symlink_to(".")
    Beneath(LinkRules(str(root))).copytree(str(root / "project"), str(root / "copy"))
    assert (root / "copy" / "first" / "data" / "b").read_text() == "root/project/data/b"
    assert not (root / "copy" / "first").is_symlink()
    assert os.readlink(root / "copy" / "first" / "second") == "."


def sharing(root: Path, *areas: Area, folders: tuple[str, ...] = ("project",)) -> tuple[Beneath, list[str]]:
    """Return a guard with shared folders, and the growing list of them."""
    shared = [str(root / folder) for folder in folders]
    return Beneath(LinkRules(str(root), areas, lambda: list(shared)), shared.extend), shared


@pytest.mark.parametrize("target", ["../other/c", "c", "missing", "../../outside/secret", "{root}/other/c", "data/b"])
def test_link_is_not_moved_out_of_a_shared_folder(root: Path, target: str) -> None:
    (root / "project" / "x").symlink_to(target.format(root=root))
    beneath, _ = sharing(root)
    for move in (beneath.move, beneath.replace):
        with pytest.raises(AccessRefused, match=r"project/x is a symbolic link to .* cannot be moved out of"):
            move(str(root / "project" / "x"), str(root / "other" / "x"))
        assert (root / "project" / "x").is_symlink()
        assert sorted(os.listdir(root / "other")) == ["c"]
    beneath.move(str(root / "project" / "x"), str(root / "project" / "data" / "x"))
    assert (root / "project" / "data" / "x").is_symlink()


def test_link_to_its_own_folder_or_allowed_area_can_be_moved_out(root: Path) -> None:
    beneath, _ = sharing(root, Area(str(root.parent / "outside")))
    (root / "project" / "in").symlink_to(root / "project" / "data" / "b")
    (root / "project" / "area").symlink_to(root.parent / "outside" / "secret")
    for name, text in (("in", "root/project/data/b"), ("area", "outside/secret")):
        beneath.move(str(root / "project" / name), str(root / "other" / name))
        assert read(beneath, root / "other" / name) == text


@pytest.mark.parametrize("way", ["move", "replace", "copytree"])
def test_links_of_a_moved_or_copied_folder_may_not_lead_out_of_it(root: Path, way: str) -> None:
    beneath, shared = sharing(root)
    (root / "project" / "data" / "out").symlink_to("../../other/c")
    (root / "project" / "data" / "up").symlink_to("../c")
    (root / "project" / "data" / "in").symlink_to("b")
    new = root / "other" / "data"
    getattr(beneath, way)(str(root / "project" / "data"), str(new))
    assert os.readlink(new / "out") == "../../other/c"
    for name in ("out", "up"):
        for operation in (read, write):
            with pytest.raises(AccessRefused):
                operation(beneath, new / name)
    assert read(beneath, new / "in") == "root/project/data/b"
    assert shared == [str(root / "project"), *[str(new)] * shared.count(str(new))]
    assert (root / "other" / "c").read_text() == "root/other/c"


def test_shared_folder_that_is_renamed_stays_shared(root: Path) -> None:
    beneath, shared = sharing(root, folders=("project", "project/data"))
    (root / "project" / "out").symlink_to("../other/c")
    (root / "project" / "data" / "up").symlink_to("../a")
    beneath.move(str(root / "project"), str(root / "renamed"))
    beneath.move(str(root / "renamed"), str(root / "again"))
    assert {str(root / "again"), str(root / "again" / "data")} <= set(shared)
    for link in ("out", "data/up"):
        with pytest.raises(AccessRefused):
            read(beneath, root / "again" / link)
    assert read(beneath, root / "again" / "a") == "root/project/a"


def test_links_of_a_copied_linked_folder_may_not_lead_out_of_it(root: Path) -> None:
    beneath, _ = sharing(root)
    (root / "project" / "out").symlink_to("../../other/c")
    (root / "mine").mkdir()
    (root / "mine" / "theirs").symlink_to("../project")
    beneath.copytree(str(root / "mine"), str(root / "copy"))
    assert (root / "copy" / "theirs" / "out").read_text() == "root/other/c"
    with pytest.raises(AccessRefused):
        read(beneath, root / "copy" / "theirs" / "out")


def test_moves_within_shared_folder_and_of_own_links_are_allowed(root: Path) -> None:
    beneath, shared = sharing(root)
    beneath.move(str(root / "project" / "data"), str(root / "project" / "renamed"))
    (root / "mine").mkdir()
    (root / "mine" / "link").symlink_to("../other/c")
    beneath.move(str(root / "mine"), str(root / "moved"))
    beneath.copytree(str(root / "moved"), str(root / "copied"))
    beneath.move(str(root / "moved" / "link"), str(root / "other" / "link"))
    assert shared == [str(root / "project")]


def test_entry_that_becomes_a_link_during_move_is_moved_back(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beneath, _ = sharing(root)
    rename = os.rename

    def swap_and_rename(source: str, target: str, **folders: int) -> None:
        monkeypatch.undo()
        (root / "project" / "a").unlink()
        (root / "project" / "a").symlink_to("../other/c")
        rename(source, target, **folders)

    monkeypatch.setattr(os, "rename", swap_and_rename)
    with pytest.raises(AccessRefused, match="was replaced"):
        beneath.move(str(root / "project" / "a"), str(root / "other" / "a"))
    assert sorted(os.listdir(root / "other")) == ["c"]
    assert (root / "project" / "a").is_symlink()


def test_links_of_folder_on_another_file_system_may_not_lead_out_of_it(root: Path) -> None:
    volume = Path("/dev/shm") / f"volume-{os.getpid()}"
    volume.mkdir()
    (root / "volume").symlink_to(volume)
    (root / "project" / "data" / "out").symlink_to(volume / "file")
    (root / "project" / "x").symlink_to(root / "other" / "c")
    beneath, shared = sharing(root, Area(str(volume), trusted=True))
    try:
        assert volume.stat().st_dev != root.stat().st_dev
        beneath.move(str(root / "project" / "data"), str(root / "volume" / "data"))
        assert (volume / "data" / "out").is_symlink()
        assert not (root / "project" / "data").exists()
        assert set(shared) == {str(root / "project"), str(volume / "data")}
        with pytest.raises(AccessRefused):
            beneath.move(str(root / "project" / "x"), str(root / "volume" / "x"))
        assert os.listdir(volume) == ["data"]
    finally:
        shutil.rmtree(volume)


def test_copyfile_to_itself_keeps_the_file(root: Path) -> None:
    (root / "link").symlink_to("other/c")
    with pytest.raises(shutil.SameFileError):
        Beneath(LinkRules(str(root))).copyfile(str(root / "link"), str(root / "other" / "c"))
    assert (root / "other" / "c").read_text() == "root/other/c"


def test_makedirs(root: Path) -> None:
    beneath = Beneath(LinkRules(str(root)))
    for _ in range(2):
        beneath.makedirs(str(root / "x" / "y" / "z"))
    assert (root / "x" / "y" / "z").is_dir()
    with pytest.raises(OSError):
        beneath.makedirs(str(root / "other" / "c" / "d"))
    (root / "out").symlink_to(root.parent / "outside")
    with pytest.raises(AccessRefused):
        beneath.makedirs(str(root / "out" / "made"))


def test_no_descriptor_is_left_open(root: Path) -> None:
    (root / "out").symlink_to(root.parent / "outside")
    (root / "in").symlink_to("project/data")
    beneath = Beneath(LinkRules(str(root)))
    before = len(os.listdir("/proc/self/fd"))
    for path in ("out/secret", "in/b", "missing/x", "project/a", "in/../other/c", "project/a/b"):
        for operation in (read, write):
            try:
                operation(beneath, root / path)
            except (AccessRefused, OSError):
                pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_trash_has_the_file_and_a_note_of_its_place(root: Path) -> None:
    beneath, trash = Beneath(LinkRules(str(root))), root.parent / "Trash"
    for number, text in enumerate(("first", "second")):
        (root / "note.txt").write_text(text)
        with beneath.locate(str(root / "note.txt"), follow=False) as place:
            move_to_trash(place, trash)
        assert not (root / "note.txt").exists()
        name = f"note {number}.txt" if number else "note.txt"
        assert (trash / "files" / name).read_text() == text
        assert f"Path={root}/note.txt\n" in (trash / "info" / f"{name}.trashinfo").read_text()
    with beneath.locate(str(root / "missing"), follow=False) as place, pytest.raises(FileNotFoundError):
        move_to_trash(place, trash)
    assert len(os.listdir(trash / "info")) == 2


@pytest.mark.parametrize(
    "name", ["x" * 255, "x" * 250 + ".txt", "x." + "y" * 253, "é" * 127, os.fsdecode(b"\xff" * 255)]
)
def test_file_with_longest_name_goes_to_the_trash(root: Path, name: str) -> None:
    trash = root.parent / "Trash"
    for _ in range(2):
        (root / name).write_text("x")
        with Beneath(LinkRules(str(root))).locate(str(root / name), follow=False) as place:
            move_to_trash(place, trash)
    assert not (root / name).exists()
    assert len(os.listdir(trash / "files")) == len(os.listdir(trash / "info")) == 2


def test_trash_on_another_file_system(root: Path) -> None:
    trash = Path("/dev/shm") / f"trash-{os.getpid()}"
    (root / "project" / "out").symlink_to(root.parent / "outside")
    try:
        assert os.stat("/dev/shm").st_dev != root.stat().st_dev
        with Beneath(LinkRules(str(root))).locate(str(root / "project"), follow=False) as place:
            move_to_trash(place, trash)
        assert (trash / "files" / "project" / "data" / "b").read_text() == "root/project/data/b"
        assert (trash / "files" / "project" / "out").is_symlink()
    finally:
        shutil.rmtree(trash, ignore_errors=True)
    assert not (root / "project").exists()
    assert (root.parent / "outside" / "secret").exists()


def test_shared_folders_are_remembered_once(tmp_path: Path) -> None:
    file = tmp_path / "sandbox" / "shared-folders"
    assert recall(file) == frozenset()
    remember(["/a", "/b\nc"], file)
    remember(["/a"], file)
    assert recall(file) == {"/a", "/b\nc"}
    size = file.stat().st_size
    remember(["/a"], file)
    assert file.stat().st_size == size
    with file.open("a") as torn:
        torn.write('"/torn')
    remember(["/d"], file)
    assert recall(file) == {"/a", "/b\nc", "/d"}
    assert file.stat().st_mode & 0o777 == 0o600


def test_links_to_forbidden_places(root: Path) -> None:
    (root / "project" / "run").mkdir()
    (root / "project" / "run" / "secret").write_text("key")
    (root / "project" / "link").symlink_to("run/secret")
    (root / "own").symlink_to("project/run/secret")
    shared, forbidden = [str(root / "project")], [str(root / "project" / "run")]
    beneath = Beneath(LinkRules(str(root), shared=lambda: shared, forbidden=lambda: forbidden))
    for operation in (read, write):
        with pytest.raises(AccessRefused, match="must not be accessed"):
            operation(beneath, root / "project" / "link")
    assert read(beneath, root / "project" / "run" / "secret") == "key"
    assert read(beneath, root / "own") == "key"


def test_refusals_are_one_printable_line(root: Path) -> None:
    (root / "project" / "link").symlink_to(root.parent / "a\n\x1b]0;title\x07")
    with pytest.raises(AccessRefused) as caught:
        Beneath(LinkRules(str(root))).stat(str(root / "project" / "link"))
    assert str(Refused(str(caught.value)).log_message).isprintable()
