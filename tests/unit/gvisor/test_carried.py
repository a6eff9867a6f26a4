"""Copies of a template show the same mounts as a sandbox that is started without one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sandbox_provisioner.errors import ConfigurationError
from sandbox_provisioner.guest.capabilities import CARRIED, EMPTY, MOUNTED, READ_ONLY, WRITABLE
from sandbox_provisioner.gvisor.bundle import BundleSpec, Mount, all_mounts
from sandbox_provisioner.gvisor.carried import carry, covered, parts, visible_mounts

BARE = BundleSpec(python="/usr/bin/python3", home="/home/ada", user="ada")


@pytest.fixture
def folder(tmp_path: Path) -> Mount:
    """A project folder at another path in the sandbox."""
    for name in (".git/hooks", ".venv/lib", "secret", "src"):
        (tmp_path / "project" / name).mkdir(parents=True)
    (tmp_path / "project" / ".git" / "config").touch()
    return Mount(f"{tmp_path}/project", "/w", True)


def inside(folder: Mount, path: str) -> Mount:
    """Return a read-only mount of a part of the folder on itself."""
    return Mount(f"{folder.source}/{path}", f"/w/{path}")


def with_mounts(*mounts: Mount) -> BundleSpec:
    return replace(BARE, mounts=mounts)


def test_folder_without_parts(folder: Mount) -> None:
    library = Mount("/opt", "/opt")
    copy = carry(with_mounts(library), with_mounts(library, folder), folder)
    assert copy is not None and parts(copy) == []
    assert Mount(folder.source, CARRIED, True) in all_mounts(copy) and folder not in all_mounts(copy)
    assert {folder, library} < {*visible_mounts(copy)}


def test_parts_are_ordered_and_pinned(folder: Mount) -> None:
    environment, mask = inside(folder, ".venv"), Mount("", "/w/secret", True)
    protected = (inside(folder, ".git/hooks"), inside(folder, ".git/config"), mask)
    copy = carry(with_mounts(environment), with_mounts(environment, folder, *protected), folder)
    assert copy is not None
    assert [(path, kind) for path, kind, _ in parts(copy)] == [
        (".git", WRITABLE),
        (".venv", MOUNTED),
        ("secret", EMPTY),
        (".git/config", READ_ONLY),
        (".git/hooks", READ_ONLY),
    ]
    assert {path: changed for path, _, changed in parts(copy)} == {
        path: Path(folder.source, path).stat().st_ctime_ns for path, _, _ in parts(copy)
    }
    assert {*protected, environment} < {*visible_mounts(copy)}


def test_mount_of_the_template_that_the_kernel_does_not_see_is_covered(folder: Mount) -> None:
    source = inside(folder, "src")
    copy = carry(with_mounts(source), with_mounts(folder), folder)
    assert copy is not None
    assert covered(copy) == [source] and source not in visible_mounts(copy) and parts(copy) == []


def test_other_mounts_do_not_suit_copies(folder: Mount, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (Path(folder.source) / "link").symlink_to(tmp_path / "elsewhere")
    for bare, given in (
        ((), (Mount("/opt", "/opt"),)),
        ((Mount("/opt", "/opt"),), ()),
        ((), (Mount(f"{tmp_path}/elsewhere", "/w/data"),)),
        ((), (inside(folder, "link"),)),
        ((Mount("", "/w/secret", True),), (Mount("", "/w/secret", True),)),
    ):
        assert carry(with_mounts(*bare), with_mounts(*given, folder), folder) is None, (bare, given)


def test_part_replaced_by_a_link_is_refused(folder: Mount) -> None:
    copy = carry(BARE, with_mounts(folder, inside(folder, ".git/hooks")), folder)
    assert copy is not None
    git = Path(folder.source, ".git")
    git.rename(git.with_name("moved"))
    git.symlink_to("moved")
    with pytest.raises(ConfigurationError, match=r"/w/.git/hooks was replaced"):
        parts(copy)
