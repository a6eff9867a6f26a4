"""Test which folder a kernel can write to, and which paths in it stay read-only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandbox_provisioner.errors import ConfigurationError
from sandbox_provisioner.gvisor.bundle import Mount
from sandbox_provisioner.kernel.scope import PROTECTED, project_folder, protected, require_not_executed


def at(path: Path) -> Mount:
    return Mount(os.path.realpath(path), str(path), True)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The server's root folder, which is also the home."""
    (tmp_path / "root" / "project" / "notebooks" / "deep").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "root"))
    return tmp_path / "root"


def chosen(folder: Path, root: Path | str, kind: str = "project", *markers: str) -> str:
    return project_folder(at(folder), kind, str(root), markers).destination


@pytest.mark.parametrize("marker", [".git", "pyproject.toml", "environment.yml", ".jupyter-sandbox", "dvc.yaml"])
def test_nearest_folder_with_a_marker_is_the_project(root: Path, marker: str) -> None:
    project = root / "project"
    (project / marker).touch()
    assert chosen(project / "notebooks" / "deep", root, "project", "dvc.yaml") == str(project)
    assert chosen(project / "notebooks" / "deep", root, "notebook", "dvc.yaml") == f"{project}/notebooks/deep"
    (project / "notebooks" / marker).touch()
    assert chosen(project / "notebooks" / "deep", root, "project", "dvc.yaml") == f"{project}/notebooks"


def test_notebooks_folder_without_a_marker(root: Path) -> None:
    assert chosen(root / "project" / "notebooks", root) == f"{root}/project/notebooks"


def test_marker_above_the_root_folder_is_ignored(root: Path) -> None:
    (root / "project" / ".git").mkdir()
    assert chosen(root / "project" / "notebooks", root / "project" / "notebooks") == f"{root}/project/notebooks"


def test_marker_in_the_home_is_ignored(root: Path) -> None:
    (root / ".git").mkdir()
    for server_root in (root, ""):
        assert chosen(root / "project" / "notebooks", server_root) == f"{root}/project/notebooks"


def test_scope_root_ends_below_the_home(root: Path) -> None:
    assert chosen(root / "project" / "notebooks", root, "root") == f"{root}/project"
    assert chosen(root / "project" / "notebooks" / "deep", root / "project" / "notebooks", "root") == (
        f"{root}/project/notebooks"
    )


def test_hidden_folder_is_never_the_project(root: Path) -> None:
    (root / ".local" / "share" / "project").mkdir(parents=True)
    (root / ".local" / "share" / "pyproject.toml").touch()
    assert chosen(root / ".local" / "share" / "project", root) == f"{root}/.local/share/project"


def test_without_a_server_the_search_ends_at_the_home(root: Path, tmp_path: Path) -> None:
    (root / "project" / ".git").mkdir()
    assert chosen(root / "project" / "notebooks", "") == f"{root}/project"
    (tmp_path / "shared" / "notebooks").mkdir(parents=True)
    (tmp_path / "shared" / ".git").mkdir()
    assert chosen(tmp_path / "shared" / "notebooks", "") == f"{tmp_path}/shared/notebooks"


def test_notebooks_folder_that_is_a_link_is_the_scope_itself(root: Path) -> None:
    (root / "project" / ".git").mkdir()
    (root / "link").symlink_to(root / "project" / "notebooks")
    assert project_folder(at(root / "link"), "project", str(root)) == at(root / "link")
    (root / "other").symlink_to(root / "project")
    found = project_folder(at(root / "other" / "notebooks"), "project", str(root))
    assert found == Mount(str(root / "project"), str(root / "other"), True)


def paths(folder: Path, cwd: Path) -> set[str]:
    return {mount.destination for mount in protected(at(folder), str(cwd), PROTECTED)}


def test_files_that_the_host_executes_are_protected(root: Path) -> None:
    project, notebooks = root / "project", root / "project" / "notebooks"
    (project / ".git" / "hooks").mkdir(parents=True)
    (project / ".git" / "config").touch()
    (project / ".git" / "HEAD").touch()
    (project / "my-env").mkdir()
    (project / "my-env" / "pyvenv.cfg").touch()
    (notebooks / ".envrc").touch()
    (notebooks / "deep" / ".vscode").mkdir()
    (notebooks / "data").mkdir()
    (project / ".jupyter_cache").mkdir()
    assert paths(project, notebooks) == {
        f"{project}/.git/hooks",
        f"{project}/.git/config",
        f"{project}/my-env",
        f"{project}/.jupyter_cache",
        f"{notebooks}/.envrc",
    }
    assert paths(project, notebooks / "deep") >= {f"{notebooks}/deep/.vscode", f"{notebooks}/.envrc"}
    assert all(not mount.writable for mount in protected(at(project), str(notebooks), PROTECTED))


def test_links_and_pipes_are_not_protected(root: Path) -> None:
    project = root / "project"
    (project / ".vscode").symlink_to("/etc")
    (project / ".git").symlink_to(root)
    os.mkfifo(project / ".envrc")
    assert paths(project, project) == set()


def test_git_file_of_a_submodule_is_protected(root: Path) -> None:
    (root / "project" / ".git").write_text("gitdir: ../.git/modules/project")
    assert paths(root / "project", root / "project") == {f"{root}/project/.git"}


def test_folder_that_is_an_environment_keeps_its_programs(root: Path) -> None:
    project = root / "project"
    for name in ("bin", "lib", "conda-meta"):
        (project / name).mkdir()
    assert paths(project, project / "notebooks") == {f"{project}/bin", f"{project}/lib", f"{project}/conda-meta"}


@pytest.mark.parametrize("part", [".git", ".git/hooks", ".vscode", "venv/notebooks", "own/bin", ".jupyter-x"])
def test_no_kernel_works_in_a_part_that_the_host_executes(root: Path, part: str) -> None:
    folder = root / "project" / part
    folder.mkdir(parents=True)
    (root / "project" / "own").mkdir(exist_ok=True)
    (root / "project" / "own" / "pyvenv.cfg").touch()
    with pytest.raises(ConfigurationError, match="programs on the host execute files in"):
        require_not_executed(str(folder), str(root), PROTECTED)
    require_not_executed(str(root / "project" / "notebooks"), str(root), PROTECTED)


def test_too_many_protected_paths_are_refused(root: Path) -> None:
    for number in range(101):
        (root / "project" / f".jupyter-{number:03}").touch()
    with pytest.raises(ConfigurationError, match="at most 100 can be protected"):
        paths(root / "project", root / "project")


def test_environment_is_found_among_many_files(root: Path) -> None:
    for number in range(11_000):
        (root / "project" / f"a{number}").touch()
    (root / "project" / "zz" / "conda-meta").mkdir(parents=True)
    assert paths(root / "project", root / "project") == {str(root / "project" / "zz")}


def test_protected_file_with_a_second_name_is_refused(root: Path) -> None:
    (root / "project" / ".envrc").touch()
    os.link(root / "project" / ".envrc", root / "project" / "innocent")
    with pytest.raises(ConfigurationError, match="has a second name"):
        paths(root / "project", root / "project")


@pytest.mark.parametrize("name", [b".jupyter\xff\xfe", b".jupyter\xed\xa0\x80"])
def test_names_that_are_not_utf8_are_left_out(root: Path, name: bytes) -> None:
    os.mkdir(os.fsencode(root / "project") + b"/" + name)
    assert paths(root / "project", root / "project") == set()
