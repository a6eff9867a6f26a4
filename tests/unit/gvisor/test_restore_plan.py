"""Test that mounts of a restored sandbox come from the present configuration, and only destinations from storage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sandbox_provisioner.guest.capabilities import CARRIED
from sandbox_provisioner.gvisor.bundle import BundleSpec, Mount, all_mounts
from sandbox_provisioner.gvisor.restore_plan import Grant, derive

BASE = BundleSpec(python="/usr/bin/python3", home="/home/user", user="user")


def with_mounts(*mounts: Mount) -> BundleSpec:
    return replace(BASE, mounts=mounts)


def sources(spec: BundleSpec) -> dict[str, tuple[str, bool]]:
    return {mount.destination: (mount.source, mount.writable) for mount in all_mounts(spec)}


def test_source_and_mode_come_from_the_grant(tmp_path: Path) -> None:
    saved = with_mounts(Mount("/root", "/work", True), Mount("/etc", "/lib-of-mine", True))
    grant = Grant(with_mounts(Mount(str(tmp_path), "/work", True), Mount("/opt", "/lib-of-mine")))
    spec, reasons = derive(saved, "/work", grant)
    assert reasons == []
    assert sources(spec)["/work"] == (str(tmp_path), True)
    assert sources(spec)["/lib-of-mine"] == ("/opt", False)


def test_destination_without_grant_is_refused_by_name() -> None:
    saved = with_mounts(Mount("/root", "/root", True))
    _, reasons = derive(saved, "/work", Grant(BASE))
    assert len(reasons) == 1 and "/root was mounted when" in reasons[0] and "mounts" in reasons[0]
    _, reasons = derive(saved, "/root", Grant(BASE))
    assert "working_folder" in reasons[0]


def test_new_mount_is_left_out() -> None:
    spec, reasons = derive(BASE, None, Grant(with_mounts(Mount("/opt", "/new"))))
    assert reasons == []
    assert "/new" not in sources(spec)


def test_moved_folder_is_mounted_at_the_saved_destination(tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    folder = Mount(str(tmp_path), str(tmp_path), True)
    shield = Mount(f"{tmp_path}/.venv", f"{tmp_path}/.venv")
    saved = with_mounts(Mount("/gone", "/old", True), Mount("/gone/.venv", "/old/.venv"))
    spec, reasons = derive(saved, "/old", Grant(with_mounts(folder, shield), folder=folder))
    assert reasons == []
    assert sources(spec)["/old"] == (str(tmp_path), True)
    assert sources(spec)["/old/.venv"] == (f"{tmp_path}/.venv", False)
    assert str(tmp_path) not in sources(spec)


def test_missing_protection_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    folder = Mount(str(tmp_path), "/work", True)
    saved = with_mounts(folder)
    for inner in (Mount(f"{tmp_path}/bin", "/work/bin"), Mount("", "/work/bin", True)):
        _, reasons = derive(saved, "/work", Grant(with_mounts(folder, inner), folder=folder))
        reason = "/work/bin must now be protected from the kernel, but was not protected when the kernel was saved"
        assert reasons == [reason]


def test_part_of_a_granted_mount_keeps_its_destination(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    saved = with_mounts(Mount("/elsewhere", "/work", True), Mount("/root", "/work/part"))
    spec, reasons = derive(saved, "/work", Grant(with_mounts(Mount(str(tmp_path), "/work", True))))
    assert reasons == []
    assert sources(spec)["/work/part"] == (f"{tmp_path}/part", False)


def test_part_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "part").symlink_to("/etc")
    saved = with_mounts(Mount(str(tmp_path), "/work", True), Mount("/root", "/work/part"))
    _, reasons = derive(saved, "/work", Grant(with_mounts(Mount(str(tmp_path), "/work", True))))
    assert "/work/part was read-only when" in reasons[0] and "is a link now" in reasons[0]


def test_destination_that_is_not_normalized_is_refused(tmp_path: Path) -> None:
    saved = with_mounts(Mount("/root", "/work/../etc"))
    _, reasons = derive(saved, "/work", Grant(with_mounts(Mount(str(tmp_path), "/work", True))))
    assert "/work/../etc was mounted when" in reasons[0]


def test_network_of_the_present_configuration() -> None:
    for saved, now in (("host", "none"), ("none", "host")):
        spec, reasons = derive(replace(BASE, network=saved), None, Grant(replace(BASE, network=now)))
        assert f"network={saved}" in reasons[0] and now in reasons[0]
        assert spec.network == now


def test_folder_of_a_template_copy_comes_from_the_grant(tmp_path: Path) -> None:
    folder = Mount(str(tmp_path), str(tmp_path), True)
    saved = replace(BASE, carried=Mount("/root", "/old", True))
    grant = Grant(with_mounts(folder), "systrap", folder, replace(BASE, carried=folder))
    spec, reasons = derive(saved, "/old", grant)
    assert reasons == []
    assert spec.carried == Mount(str(tmp_path), "/old", True)
    assert sources(spec)[CARRIED] == (str(tmp_path), True)


def test_template_copy_is_refused_a_folder_with_other_mounts(tmp_path: Path) -> None:
    folder = Mount(str(tmp_path), str(tmp_path), True)
    saved = replace(BASE, carried=Mount("/root", "/old", True))
    shield = Mount(f"{tmp_path}/bin", f"{tmp_path}/bin")
    grant = Grant(with_mounts(folder, shield), "systrap", folder, replace(BASE, carried=folder, inner=(shield,)))
    _, reasons = derive(saved, "/old", grant)
    assert "/old/bin must now be protected" in reasons[0]
    _, reasons = derive(saved, "/old", Grant(BASE))
    assert "working_folder" in reasons[0]


def project_copy(folder: Path, place: str) -> BundleSpec:
    """Return a template's copy with an environment and a protected folder, in a project folder shown at ``place``."""
    environment = Mount(f"{folder}/.venv", f"{place}/.venv")
    inner = (environment, Mount(f"{folder}/.git/hooks", f"{place}/.git/hooks"))
    return replace(BASE, mounts=(environment,), carried=Mount(str(folder), place, True), inner=inner)


def test_parts_of_a_template_copy_come_from_the_grant(tmp_path: Path) -> None:
    for name in (".venv", ".git/hooks"):
        (tmp_path / name).mkdir(parents=True)
    now = project_copy(tmp_path, str(tmp_path))
    for place in (str(tmp_path), "/old"):
        spec, reasons = derive(project_copy(Path("/root"), place), place, Grant.of(now, "systrap"))
        assert reasons == []
        assert (spec.carried, spec.inner) == (Mount(str(tmp_path), place, True), project_copy(tmp_path, place).inner)
        assert sources(spec)[f"{place}/.venv"] == (f"{tmp_path}/.venv", False)
        assert place not in sources(spec) and f"{place}/.git/hooks" not in sources(spec)


def test_template_copy_without_a_needed_protection_is_refused(tmp_path: Path) -> None:
    now = project_copy(tmp_path, "/w")
    saved = replace(now, inner=now.inner[:1])
    _, reasons = derive(saved, "/w", Grant.of(now, "systrap"))
    assert reasons == [
        "/w/.git/hooks must now be protected from the kernel, but was not protected when the kernel was saved"
    ]


def test_mount_that_the_folder_covers_needs_no_protection(tmp_path: Path) -> None:
    saved = replace(BASE, carried=Mount(str(tmp_path), "/w", True))
    now = replace(saved, mounts=(Mount(f"{tmp_path}/src", "/w/src"),))
    spec, reasons = derive(saved, "/w", Grant(BASE, folder=saved.carried, carrying=now))
    assert (spec.mounts, reasons) == (derive(saved, "/w", Grant.of(saved, "systrap"))[0].mounts, [])


def test_grant_of_a_spec_restores_that_spec(tmp_path: Path) -> None:
    for spec in (
        with_mounts(Mount(str(tmp_path), "/work", True)),
        replace(BASE, carried=Mount(str(tmp_path), "/work", True)),
    ):
        derived, reasons = derive(spec, "/work", Grant.of(spec, "systrap"))
        assert reasons == []
        assert all_mounts(derived) == all_mounts(spec)


def project_grant(project: Path, *inner: Mount) -> Grant:
    """Return the grant for a notebook in the folder "notebooks" of a project."""
    (project / "notebooks").mkdir(exist_ok=True)
    folder = Mount(str(project), str(project), True)
    optional = frozenset(mount.source for mount in inner)
    carrying = replace(BASE, carried=folder)
    return Grant(with_mounts(folder, *inner), "systrap", folder, carrying, f"{project}/notebooks", optional)


@pytest.mark.parametrize("copy", [False, True], ids=["new", "copy of a template"])
def test_kernel_that_had_only_the_notebooks_folder_gets_only_that(tmp_path: Path, copy: bool) -> None:
    guarded = Mount(f"{tmp_path}/.envrc", f"{tmp_path}/.envrc")
    own = Mount("/gone", f"{tmp_path}/notebooks", True)
    saved = replace(BASE, carried=own) if copy else with_mounts(own)
    spec, reasons = derive(saved, own.destination, project_grant(tmp_path, guarded))
    assert reasons == []
    place = CARRIED if copy else own.destination
    assert sources(spec)[place] == (f"{tmp_path}/notebooks", True)
    assert str(tmp_path) not in sources(spec)


@pytest.mark.parametrize("copy", [False, True], ids=["new", "copy of a template"])
def test_moved_project_is_mounted_at_the_saved_destination(tmp_path: Path, copy: bool) -> None:
    saved = replace(BASE, carried=Mount("/gone", "/old", True)) if copy else with_mounts(Mount("/gone", "/old", True))
    spec, reasons = derive(saved, "/old/notebooks", project_grant(tmp_path))
    assert reasons == []
    assert sources(spec)[CARRIED if copy else "/old"] == (str(tmp_path), True)


@pytest.mark.parametrize("copy", [False, True], ids=["new", "copy of a template"])
def test_larger_folder_than_the_present_scope_is_refused(tmp_path: Path, copy: bool) -> None:
    own = Mount(str(tmp_path / "notebooks"), str(tmp_path / "notebooks"), True)
    was = Mount(str(tmp_path), str(tmp_path), True)
    saved = replace(BASE, carried=was) if copy else with_mounts(was)
    grant = Grant(with_mounts(own), "systrap", own, replace(BASE, carried=own), own.destination)
    _, reasons = derive(saved, own.destination, grant)
    assert "folder_scope" in reasons[0]


def test_kernel_saved_without_an_optional_protection_is_restored_without_it(tmp_path: Path) -> None:
    config = Mount(f"{tmp_path}/.git/config", f"{tmp_path}/.git/config")
    saved = with_mounts(Mount(str(tmp_path), str(tmp_path), True))
    spec, reasons = derive(saved, f"{tmp_path}/notebooks", project_grant(tmp_path, config))
    assert reasons == []
    assert config.destination not in sources(spec)


def test_protected_path_that_was_deleted_is_named_with_a_remedy(tmp_path: Path) -> None:
    saved = with_mounts(Mount(str(tmp_path), str(tmp_path), True), Mount("/gone", f"{tmp_path}/.idea"))
    _, reasons = derive(saved, f"{tmp_path}/notebooks", project_grant(tmp_path))
    assert f"{tmp_path}/.idea was read-only" in reasons[0] and "create it again" in reasons[0]
    (tmp_path / ".idea").mkdir()
    _, reasons = derive(saved, f"{tmp_path}/notebooks", project_grant(tmp_path))
    assert reasons == []
