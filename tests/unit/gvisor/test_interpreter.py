"""Test the search for the host files that a command needs: nothing is executed, and no home is mounted."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox_provisioner.errors import CommandNotFoundError
from sandbox_provisioner.gvisor.interpreter import (
    environment_parts,
    needed_paths,
    path_file_entries,
    pip_target,
    program_folders,
    programs,
    resolve,
    site_folders,
    trusted_mounts,
    user_site_folders,
)
from sandbox_provisioner.gvisor.mounts import homes, private


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set HOME to a folder of this test, and return it."""
    home = tmp_path / "home" / "me"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    return home


def executable(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def environment(folder: Path) -> Path:
    """Create a virtual environment of this Python in ``folder``, and return its python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin" / "python"


def packages(prefix: Path) -> Path:
    return next(prefix.glob("lib/python3*/site-packages"))


def shown(argv: list[str | Path], env: dict[str, str] | None = None, writable: list[Path] | None = None) -> set[str]:
    mounts = trusted_mounts(needed_paths(list(map(str, argv)), env or {}), list(map(str, writable or [])))
    assert not any(mount.writable or mount.source != mount.destination for mount in mounts)
    return {mount.source for mount in mounts}


# -- homes -----------------------------------------------------------------------------------------------------


def test_homes_of_the_environment_and_of_the_user_database(home: Path) -> None:
    assert homes() == {str(home), pwd.getpwuid(os.geteuid()).pw_dir} - {"/"}


def test_root_folder_is_not_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/")
    assert "/" not in homes()


@pytest.mark.parametrize(
    "path", ["", "..", "../..", ".ssh", ".ssh/keys", ".config", ".aws", ".local", ".local/share", ".jupyter", ".bashrc"]
)
def test_homes_their_parents_and_hidden_parts_are_private(home: Path, path: str) -> None:
    assert private(os.path.normpath(home / path))


@pytest.mark.parametrize("path", ["project", ".venv", ".pyenv/versions/3", ".conda/envs/x", ".local/lib", ".local/bin"])
def test_library_folders_in_a_home_are_not_private(home: Path, path: str) -> None:
    assert not private(str(home / path))


def test_root_folder_is_private_and_system_folders_are_not() -> None:
    assert private("/")
    assert not private("/usr")
    assert not private("/opt/tools")


def test_link_to_a_private_folder_is_private(home: Path, tmp_path: Path) -> None:
    (home / ".ssh").mkdir()
    (tmp_path / "innocent").symlink_to(home / ".ssh")
    (tmp_path / "parent").symlink_to(home.parent)
    assert private(str(tmp_path / "innocent"))
    assert private(str(tmp_path / "parent"))


# -- the program -----------------------------------------------------------------------------------------------


def test_command_is_resolved_on_the_path_of_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = executable(tmp_path / "theirs" / "tool")
    executable(tmp_path / "ours" / "tool")
    monkeypatch.setenv("PATH", str(tmp_path / "ours"))
    assert resolve("tool", {"PATH": str(tmp_path / "theirs")}) == str(program)
    assert resolve(str(program), {"PATH": ""}) == str(program)


@pytest.mark.parametrize("command", ["no-such-program", "/no/such/program"])
def test_missing_command_is_named(command: str) -> None:
    with pytest.raises(CommandNotFoundError, match=command) as refusal:
        resolve(command, {"PATH": "/usr/bin:/bin"})
    assert refusal.value.command == command
    assert isinstance(refusal.value, FileNotFoundError)


def test_file_that_is_not_executable_is_no_command(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program")
    with pytest.raises(CommandNotFoundError):
        resolve("text", {"PATH": str(tmp_path)})


@pytest.mark.user
def test_links_of_a_program_are_followed_and_a_cycle_ends(tmp_path: Path) -> None:
    real = executable(tmp_path / "c" / "bin" / "tool", "no script")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "tool").symlink_to("../c/bin/tool")
    (tmp_path / "tool").symlink_to(tmp_path / "b" / "tool")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    assert set(programs(str(tmp_path / "tool"))) == {str(tmp_path / "tool"), str(tmp_path / "b" / "tool"), str(real)}
    assert list(programs(str(tmp_path / "circle"))) == []
    assert list(programs(str(tmp_path / "missing"))) == []


@pytest.mark.parametrize(
    ("first", "found"),
    [
        ("#!/bin/sh\n", "/bin/sh"),
        ("#! /bin/sh -e\n", "/bin/sh"),
        ("#!/usr/bin/env sh\n", "sh"),
        ("#!/no/such/interpreter\n", ""),
        ("#!\n", ""),
        ("#!/usr/bin/env no-such-program\n", ""),
        ("\x7fELF", ""),
    ],
)
def test_interpreter_of_a_script_is_found(tmp_path: Path, first: str, found: str) -> None:
    script = executable(tmp_path / "script", first)
    others = [path for path in programs(str(script)) if path != str(script)]
    assert bool(others) is bool(found)
    assert not others or Path(others[0]).name == Path(found).name


def test_base_python_of_a_virtual_environment_is_found(tmp_path: Path) -> None:
    python = environment(tmp_path / "env")
    assert os.path.realpath(sys.executable) in {os.path.realpath(path) for path in programs(str(python))}


def test_program_is_mounted_with_its_installation_folder(tmp_path: Path, home: Path) -> None:
    program = executable(tmp_path / "opt" / "tool" / "bin" / "tool")
    assert program_folders(str(program)) == [str(tmp_path / "opt" / "tool")]


def test_program_in_the_users_bin_is_mounted_without_the_home(home: Path) -> None:
    program = executable(home / ".local" / "bin" / "tool")
    (home / ".local" / "lib").mkdir()
    (home / ".local" / "share").mkdir()
    assert program_folders(str(program)) == [str(home / ".local" / "bin"), str(home / ".local" / "lib")]


@pytest.mark.parametrize("place", ["bin/tool", "tool"])
def test_program_near_the_top_of_a_home_is_mounted_without_the_home(home: Path, place: str) -> None:
    program = executable(home / place)
    (home / "diary").touch()
    assert not any(os.path.exists(os.path.join(folder, "diary")) for folder in program_folders(str(program)))
    assert not any(home.is_relative_to(folder) for folder in shown([program]))


# -- mounted files ---------------------------------------------------------------------------------------------


def test_python_is_mounted_with_its_environment_and_base(tmp_path: Path) -> None:
    python = environment(tmp_path / "env")
    folders = shown([python])
    assert str(tmp_path / "env") in folders
    assert any(Path(sys.base_prefix).resolve().is_relative_to(folder) for folder in folders)


def test_existing_paths_in_arguments_and_search_path_are_mounted(tmp_path: Path, home: Path) -> None:
    for name in ("code", "script.py"):
        (tmp_path / name).mkdir()
    env = {"PYTHONPATH": f"{tmp_path}/code::relative:{tmp_path}/missing"}
    folders = shown(["/bin/sh", f"{tmp_path}/script.py", "-f", "relative", f"{tmp_path}/no-such"], env)
    assert {f"{tmp_path}/code", f"{tmp_path}/script.py"} <= folders
    assert not any("missing" in folder or "no-such" in folder or not os.path.isabs(folder) for folder in folders)


@pytest.mark.parametrize("place", ["", "..", ".ssh"])
def test_home_in_arguments_or_search_path_is_not_mounted(home: Path, place: str) -> None:
    (home / ".ssh").mkdir()
    secret = os.path.normpath(home / place)
    assert secret not in shown(["/bin/sh", secret], {"PYTHONPATH": secret})


def test_user_packages_are_mounted_without_the_home(home: Path) -> None:
    site = home / ".local" / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    assert str(site) in user_site_folders()
    folders = shown(["/bin/sh"])
    assert str(site) in folders
    assert not {str(home), str(home / ".local")} & folders


def test_site_folders_of_every_python(tmp_path: Path) -> None:
    for name in ("lib/python3.11/site-packages", "lib/python3/dist-packages", "lib64/python3.12/site-packages"):
        (tmp_path / name).mkdir(parents=True)
    assert {os.path.relpath(folder, tmp_path) for folder in site_folders(str(tmp_path))} == {
        "lib/python3.11/site-packages",
        "lib/python3/dist-packages",
        "lib64/python3.12/site-packages",
    }


def test_entries_of_path_files_and_editable_finders(tmp_path: Path) -> None:
    (tmp_path / "a.pth").write_text("/src/one\n# comment\nimport site\nrelative\n/src/two\n")
    (tmp_path / "__editable___pkg_finder.py").write_text("x = 1\nMAPPING: dict = {'pkg': '/src/three'}\n")
    assert list(path_file_entries(str(tmp_path))) == ["/src/one", "/src/two", "/src/three"]


@pytest.mark.parametrize("text", ["MAPPING = __import__('os').system('true')", "MAPPING = [", "MAPPING = 5", "MAPPING"])
def test_editable_finder_is_not_executed(tmp_path: Path, text: str) -> None:
    (tmp_path / "__editable___pkg_finder.py").write_text(text)
    assert list(path_file_entries(str(tmp_path))) == []


def test_binary_path_files_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "bad.pth").write_bytes(b"\xff\xfe\n/src\n")
    (tmp_path / "gone.pth").symlink_to("nowhere")
    assert list(path_file_entries(str(tmp_path))) == []


def test_path_files_of_an_environment_name_only_folders_beside_it(tmp_path: Path, home: Path) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    python = environment(project / "env")
    for folder in (project / "src", elsewhere):
        folder.mkdir()
    (packages(project / "env") / "dev.pth").write_text(f"{project}/src\n{elsewhere}\n{home}\n")
    folders = shown([python])
    assert f"{project}/src" in folders
    assert not {str(elsewhere), str(home)} & folders


def test_path_files_that_the_guest_may_have_written_are_not_trusted(tmp_path: Path) -> None:
    project = tmp_path / "project"
    python = environment(project / "env")
    (project / "src").mkdir()
    (packages(project / "env") / "dev.pth").write_text(f"{project}/src\n")
    assert f"{project}/src" not in shown([python], writable=[project])


def test_no_program_is_executed(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    python = executable(tmp_path / "env" / "bin" / "python", f"#!/bin/sh\ntouch {trap}\n")
    (tmp_path / "env" / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    (tmp_path / "env" / "lib" / "python3.11" / "site-packages" / "x.pth").write_text(f"import os; os.mkdir('{trap}')\n")
    assert str(tmp_path / "env") in shown([python])
    assert not trap.exists()


def test_script_cannot_name_an_interpreter_in_the_home(home: Path, tmp_path: Path) -> None:
    executable(home / "papers" / "bin" / "interpreter", "binary")
    (home / "papers" / "secret").touch()
    script = executable(tmp_path / "project" / "bin" / "tool", f"#!{home}/papers/bin/interpreter\n")
    assert str(home / "papers") not in shown([script])


def test_parts_of_an_environment(tmp_path: Path) -> None:
    environment(tmp_path / "env")
    there = {path.name for path in (tmp_path / "env").iterdir()} - {".gitignore"}
    assert {str(tmp_path / "env" / name) for name in there} <= set(environment_parts(str(tmp_path / "env")))


def test_mounts_of_this_python() -> None:
    """The mounts are sufficient for a Python to find its library."""
    folders = shown([sys.executable])
    assert any(Path(os.__file__).resolve().is_relative_to(folder) for folder in folders)
    assert any(Path(pytest.__file__).resolve().is_relative_to(folder) for folder in folders)


# -- where pip installs ------------------------------------------------------------------------------------------------


def test_pip_installs_packages_of_a_virtual_environment_into_the_home(tmp_path: Path) -> None:
    python = environment(tmp_path / "venv")
    own = Path("/home/me/.sandbox-packages")
    folder = own / packages(tmp_path / "venv").relative_to(tmp_path / "venv")
    env = {"HOME": "/home/me", "PYTHONPATH": "/given"}
    assert pip_target(str(python), env) == (str(folder), {"PIP_PREFIX": str(own), "PYTHONPATH": f"/given:{folder}"})


@pytest.mark.parametrize("case", ["no environment", "shared with the system", "told otherwise"])
def test_pip_is_not_configured_outside_a_virtual_environment(tmp_path: Path, case: str) -> None:
    python = environment(tmp_path / "venv")
    settings = tmp_path / "venv" / "pyvenv.cfg"
    if case == "no environment":
        settings.unlink()
    elif case == "shared with the system":
        settings.write_text(settings.read_text().replace("packages = false", "packages = true"))
    told = {"PIP_PREFIX": "/mine"} if case == "told otherwise" else {}
    assert pip_target(str(python), {"HOME": "/home/me", **told}) == ("", {})
