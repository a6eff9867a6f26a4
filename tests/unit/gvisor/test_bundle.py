"""Test the bundle: which parts of the host a sandbox sees, according to the configuration for runsc."""

from __future__ import annotations

import json
import os
import random
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from sandbox_provisioner.errors import ConfigurationError
from sandbox_provisioner.gvisor.bundle import (
    GUEST,
    GUEST_INSIDE,
    SYSTEM,
    BundleSpec,
    Mount,
    all_mounts,
    arrange,
    config,
    etc,
    parse_mount,
    system_mounts,
    write,
)

PLAIN = BundleSpec(python="/usr/bin/python3", home="/home/me", user="me")


# -- a mount as a setting --------------------------------------------------------------------------------------


def test_mount_is_read_only_at_the_source_path_by_default(tmp_path: Path) -> None:
    path = str(tmp_path)
    assert parse_mount(path) == Mount(path, path, False)
    assert parse_mount(f"{path}:ro") == Mount(path, path, False)
    assert parse_mount(f"{path}:rw") == Mount(path, path, True)
    assert parse_mount(f"{path}:/data") == Mount(path, "/data", False)
    assert parse_mount(f"{path}:/data:ro") == Mount(path, "/data", False)
    assert parse_mount(f"{path}:/data:rw") == Mount(path, "/data", True)


def test_file_with_spaces_and_accents_in_its_path_can_be_mounted(tmp_path: Path) -> None:
    file = tmp_path / "å b.csv"
    file.touch()
    assert parse_mount(f"{file}:/data/é.csv") == Mount(str(file), "/data/é.csv", False)


def test_tilde_in_a_mount_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "data").mkdir()
    assert parse_mount("~/data") == Mount(f"{tmp_path}/data", f"{tmp_path}/data", False)


def test_destination_is_normalized(tmp_path: Path) -> None:
    assert parse_mount(f"{tmp_path}:/a/./b/../c/").destination == "/a/c"
    assert parse_mount(f"{tmp_path}/").destination == str(tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not an absolute path"),
        ("relative", "not an absolute path"),
        ("/usr:relative", "not an absolute path"),
        ("/", "not an absolute path below /"),
        ("/usr:/", "not an absolute path below /"),
        ("/usr:/..", "not an absolute path below /"),
        ("/usr:/a:/b:ro", "not of the form"),
        ("/usr:/a:wo", "not of the form"),
        ("/no/such/folder", "/no/such/folder does not exist"),
    ],
)
def test_invalid_mount_is_refused_with_the_reason(text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem) as refusal:
        parse_mount(text)
    assert refusal.value.setting == "mounts"
    assert repr(text) in str(refusal.value)
    assert refusal.value.remedy


# -- the order of mounts ---------------------------------------------------------------------------------------


def test_outer_mounts_precede_inner_mounts() -> None:
    mounts = [Mount("/3", "/a/b/c"), Mount("/1", "/a"), Mount("/2", "/a/b"), Mount("/4", "/b")]
    assert [mount.destination for mount in arrange(mounts)] == ["/a", "/b", "/a/b", "/a/b/c"]


def test_last_mount_of_a_destination_wins() -> None:
    assert arrange([Mount("/1", "/a"), Mount("/2", "/a", True)]) == [Mount("/2", "/a", True)]


def test_mount_that_its_outer_mount_shows_is_left_out() -> None:
    assert arrange([Mount("/usr", "/usr"), Mount("/usr/lib", "/usr/lib")]) == [Mount("/usr", "/usr")]


@pytest.mark.parametrize(
    "inner",
    [Mount("/usr/lib", "/usr/lib", True), Mount("/opt/lib", "/usr/lib"), Mount("", "/usr/lib", True)],
    ids=["writable", "another source", "in memory"],
)
def test_mount_that_differs_from_its_outer_mount_is_kept(inner: Mount) -> None:
    assert inner in arrange([Mount("/usr", "/usr"), inner])


def test_mount_that_a_mount_in_between_hides_is_kept() -> None:
    mounts = [Mount("/a", "/a"), Mount("", "/a/b", True), Mount("/a/b/c", "/a/b/c")]
    assert arrange(mounts) == mounts


def test_paths_with_a_common_prefix_are_independent() -> None:
    mounts = [Mount("/data", "/data"), Mount("/data-two", "/data-two")]
    assert arrange(mounts) == mounts


def test_folders_above_inner_mounts_are_pinned(tmp_path: Path) -> None:
    """A mount point cannot be renamed. Without the pin, a kernel could move the folder above a read-only mount."""
    inner = tmp_path / "one" / "two" / "env"
    inner.mkdir(parents=True)
    top = str(tmp_path)
    pins = set(arrange([Mount(top, top, True), Mount(str(inner), str(inner))])) - {
        Mount(top, top, True),
        Mount(str(inner), str(inner)),
    }
    assert pins == {Mount(f"{top}/one", f"{top}/one", True), Mount(f"{top}/one/two", f"{top}/one/two", True)}


def test_missing_folder_is_not_pinned(tmp_path: Path) -> None:
    top = str(tmp_path)
    mounts = arrange([Mount(top, top, True), Mount("/usr", f"{top}/new/place")])
    assert all(os.path.exists(mount.source) for mount in mounts)


def some_mounts(dice: random.Random) -> list[Mount]:
    def path() -> str:
        return "/" + "/".join(dice.choices("abc", k=dice.randint(1, 4)))

    return [Mount(dice.choice(["", path()]), path(), dice.random() < 0.5) for _ in range(dice.randrange(9))]


@pytest.mark.parametrize("seed", range(100))
def test_any_mounts_are_ordered_and_keep_their_effect(seed: int) -> None:
    mounts = some_mounts(random.Random(seed))
    arranged = arrange(mounts)
    destinations = [mount.destination for mount in arranged]
    assert len(set(destinations)) == len(destinations)
    assert not any(outer.startswith(f"{inner}/") for outer, inner in combinations(destinations, 2))
    for path in {*destinations, *(mount.destination for mount in mounts)}:
        assert seen_at(path, arranged) == seen_at(path, list({m.destination: m for m in mounts}.values()))


def seen_at(path: str, mounts: list[Mount]) -> tuple[str, bool] | None:
    """Return the host path at ``path`` in the sandbox, and True if it is writable."""
    holding = [mount for mount in mounts if path == mount.destination or path.startswith(f"{mount.destination}/")]
    if not holding:
        return None
    mount = max(holding, key=lambda mount: len(mount.destination))
    inside = path[len(mount.destination) :]
    return (mount.source + inside if mount.source else f"memory{inside}", mount.writable)


# -- config.json -----------------------------------------------------------------------------------------------


def destinations(spec: BundleSpec) -> dict[str, dict[str, Any]]:
    return {mount["destination"]: mount for mount in config(spec)["mounts"]}


def test_pid_1_is_the_guest_init_under_the_given_python() -> None:
    process = config(PLAIN)["process"]
    assert process["args"] == ["/usr/bin/python3", "-I", "-S", "-B", GUEST_INSIDE]


def test_no_capabilities_and_no_new_privileges() -> None:
    process = config(PLAIN)["process"]
    assert set(process["capabilities"]) == {"bounding", "effective", "inheritable", "permitted", "ambient"}
    assert not any(process["capabilities"].values())
    assert process["noNewPrivileges"] is True


@pytest.mark.parametrize(("network", "own"), [("none", True), ("host", False)])
def test_host_network_only_on_request(network: str, own: bool) -> None:
    spec = BundleSpec("/usr/bin/python3", "/home/me", "me", network=network)
    kinds = [namespace["type"] for namespace in config(spec)["linux"]["namespaces"]]
    assert {"pid", "ipc", "uts", "mount"} <= set(kinds)
    assert ("network" in kinds) is own


def test_environment_of_the_server_is_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "token")
    spec = BundleSpec("/usr/bin/python3", "/home/me", "me", environment={"PATH": "/bin", "LANG": "C"})
    assert sorted(config(spec)["process"]["env"]) == ["LANG=C", "PATH=/bin"]
    assert "token" not in json.dumps(config(spec))


def test_system_folders_are_read_only() -> None:
    mounts = destinations(PLAIN)
    assert "/usr" in mounts
    for mount in system_mounts():
        assert "ro" in mounts[mount.destination]["options"]
        assert mount.source == mount.destination


def test_only_system_and_given_folders_of_the_host_are_mounted() -> None:
    given_folder = Mount("/srv/data", "/data", True)
    spec = BundleSpec("/usr/bin/python3", "/home/me", "me", mounts=(given_folder,))
    sources = {mount.source for mount in all_mounts(spec) if mount.source}
    assert sources == {mount.source for mount in system_mounts()} | {"/srv/data"}
    for forbidden in ("/", "/etc", "/home", "/root", "/var", "/tmp", "/run", "/proc", "/sys", "/dev"):
        assert forbidden not in sources


def test_home_and_temporary_folders_are_in_memory() -> None:
    mounts = destinations(PLAIN)
    for path, mode in {"/home/me": "0700", "/run": "0700", "/tmp": "1777", "/dev/shm": "1777"}.items():
        assert mounts[path]["type"] == "tmpfs"
        assert f"mode={mode}" in mounts[path]["options"]


def test_folder_below_home_or_tmp_is_mounted() -> None:
    given_folders = (Mount("/home/me/work", "/home/me/work", True), Mount("/tmp/x/y", "/tmp/x/y", True))
    spec = BundleSpec("/usr/bin/python3", "/home/me", "me", mounts=given_folders)
    order = list(destinations(spec))
    assert order.index("/home/me") < order.index("/home/me/work")
    assert order.index("/tmp") < order.index("/tmp/x/y")
    assert "rw" in destinations(spec)["/home/me/work"]["options"]


def test_home_itself_can_be_mounted() -> None:
    spec = BundleSpec("/usr/bin/python3", "/home/me", "me", mounts=(Mount("/home/me", "/home/me", True),))
    assert destinations(spec)["/home/me"]["type"] == "bind"


# -- written files ---------------------------------------------------------------------------------------------


def test_bundle_contains_config_json_and_a_root_with_few_files(tmp_path: Path) -> None:
    write(tmp_path, PLAIN)
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads(json.dumps(config(PLAIN)))
    root = tmp_path / "rootfs"
    guest = root / GUEST_INSIDE[1:]
    for source in GUEST.glob("*.py"):
        assert (guest / source.name).read_text() == source.read_text()
    for name, text in etc(PLAIN).items():
        assert (root / "etc" / name).read_text() == text
    links = {path for path in SYSTEM if os.path.islink(path)}
    assert {f"/{path.name}" for path in root.iterdir()} == {"/etc", GUEST_INSIDE} | links
    for link in links:
        assert (root / link[1:]).readlink() == Path(link).readlink()


@pytest.mark.parametrize("secret", ["shadow", "gshadow", "sudoers", "ssh", "machine-id", "fstab", "environment"])
def test_private_files_of_etc_are_absent(tmp_path: Path, secret: str) -> None:
    write(tmp_path, PLAIN)
    assert not (tmp_path / "rootfs" / "etc" / secret).exists()


def test_users_of_the_host_are_absent() -> None:
    users = [line.split(":")[0] for line in etc(PLAIN)["passwd"].splitlines()]
    assert users == ["me", "nobody"]
    assert etc(PLAIN)["passwd"].startswith("me:x:0:0::/home/me:")


@pytest.mark.parametrize(("network", "there"), [("none", False), ("host", True)])
def test_resolver_files_only_with_a_network(tmp_path: Path, network: str, there: bool) -> None:
    write(tmp_path, BundleSpec("/usr/bin/python3", "/home/me", "me", network=network))
    resolver = tmp_path / "rootfs" / "etc" / "resolv.conf"
    assert resolver.exists() is (there and os.path.isfile("/etc/resolv.conf"))


# -- a read-only sandbox -----------------------------------------------------------------------------------------------


def read_only(*mounts: Mount) -> BundleSpec:
    return BundleSpec("/usr/bin/python3", "/home/me", "me", mounts, read_only=True)


def test_folders_between_home_and_kernel_folder_are_covered() -> None:
    spec = read_only(Mount("/usr", "/home/me/work/project/notebooks", True), Mount("/usr", "/home/me/.cache/a/b", True))
    assert Mount("", "/home/me/work") in all_mounts(spec)
    made = {mount["destination"]: mount for mount in config(spec)["mounts"]}
    assert "ro" in made["/home/me/work"]["options"]
    assert "/home/me/.cache" not in made
    assert config(spec)["root"]["readonly"]


def test_folder_directly_in_the_home_needs_no_cover() -> None:
    spec = read_only(Mount("/usr", "/home/me/project", True), Mount("/usr", "/srv/a/b", True))
    assert [mount for mount in all_mounts(spec) if not mount.source and not mount.writable] == []


def test_sandbox_of_an_earlier_version_is_not_read_only() -> None:
    spec = BundleSpec("/usr/bin/python3", "/home/me", "me", (Mount("/usr", "/home/me/work/project", True),))
    assert not config(spec)["root"]["readonly"]
    assert "/var/tmp" not in {mount.destination for mount in all_mounts(spec)}
    assert Mount("", "/home/me/work") not in all_mounts(spec)


def test_root_contains_the_folders_above_mounts(tmp_path: Path) -> None:
    write(tmp_path, read_only(Mount("/usr", "/srv/a/b", True), Mount("/usr", "/home/me/work/project", True)))
    assert (tmp_path / "rootfs" / "srv" / "a").is_dir()
    assert not (tmp_path / "rootfs" / "home" / "me").exists()
