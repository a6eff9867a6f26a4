"""The guarded contents managers: how a server gets them, their settings, and ordinary files."""

from __future__ import annotations

import asyncio
import dis
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
from jupyter_core.utils import ensure_async
from jupyter_server.base.handlers import AuthenticatedFileHandler
from jupyter_server.files.handlers import FilesHandler
from jupyter_server.gateway.gateway_client import GatewayClient
from jupyter_server.serverapp import ServerApp
from jupyter_server.services.contents import filecheckpoints, largefilemanager
from jupyter_server.services.contents.filemanager import FileContentsManager
from tornado.web import HTTPError
from traitlets.config import Config

from sandbox_provisioner.config import own_folder
from sandbox_provisioner.contents import managers
from sandbox_provisioner.contents.file_functions import guarded_os, guarded_path, guarded_shutil
from sandbox_provisioner.contents.file_handler import GuardedFileHandler
from sandbox_provisioner.contents.managers import CLASSES
from sandbox_provisioner.contents.rebinding import MODULES
from sandbox_provisioner.errors import ConfigurationError
from sandbox_provisioner.setup import doctor

pytestmark = pytest.mark.user

NOTEBOOK: dict[str, Any] = {"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


class OtherManager(FileContentsManager):
    """A contents manager of another package."""


class OtherCheckpoints(filecheckpoints.FileCheckpoints):
    """Checkpoints of another package."""


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use Jupyter folders and a trash folder that only this test uses."""
    for name in ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR"):
        monkeypatch.setenv(f"JUPYTER_{name}", str(tmp_path / name))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def server(root: Path, *options: str) -> ServerApp:
    app = ServerApp()
    app.initialize(["--allow-root", "--port=0", f"--ServerApp.root_dir={root}", *options], new_httpserver=False)
    return app


def full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def test_default_contents_manager_is_guarded(root: Path) -> None:
    manager = server(root).contents_manager
    assert type(manager) is managers.GuardedAsyncLargeFileManager
    assert isinstance(manager, largefilemanager.AsyncLargeFileManager)
    assert type(manager.checkpoints) is managers.GuardedAsyncFileCheckpoints
    assert manager.files_handler_class is GuardedFileHandler
    assert manager.root_dir == manager.checkpoints.root_dir == str(root)


@pytest.mark.parametrize("stock", [kind for kind in CLASSES if "Checkpoints" not in kind.__name__])
def test_configured_stock_manager_is_guarded(root: Path, stock: type) -> None:
    app = server(root, f"--ServerApp.contents_manager_class={full_name(stock)}")
    assert type(app.contents_manager) is CLASSES[stock]
    # Other extensions update the configuration when they are linked; the server reads it again then.
    app.update_config(Config(ServerApp={"open_browser": False}))
    assert app.contents_manager_class is CLASSES[stock]


def test_manager_is_guarded_with_any_kernel_manager(root: Path) -> None:
    GatewayClient.clear_instance()  # another test of this process may have had a gateway
    theirs = "jupyter_server.services.kernels.kernelmanager.AsyncMappingKernelManager"
    app = server(root, f"--ServerApp.kernel_manager_class={theirs}")
    assert type(app.contents_manager) is managers.GuardedAsyncLargeFileManager


def test_unknown_manager_is_kept_with_a_warning(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app = server(root, f"--ServerApp.contents_manager_class={full_name(OtherManager)}")
    assert type(app.contents_manager) is OtherManager
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "not guarded" in line]
    assert "OtherManager" in line


def test_settings_of_the_stock_classes_apply(root: Path) -> None:
    manager = server(
        root, "--FileContentsManager.delete_to_trash=False", "--FileCheckpoints.checkpoint_dir=.saved"
    ).contents_manager
    assert not manager.delete_to_trash
    assert manager.checkpoints.checkpoint_dir == ".saved"


def test_configured_checkpoints_and_handlers(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    make = managers.GuardedLargeFileManager
    generic = make(root_dir=str(root), checkpoints_class=filecheckpoints.GenericFileCheckpoints)
    assert type(generic.checkpoints) is managers.GuardedGenericFileCheckpoints
    assert make(files_handler_class=AuthenticatedFileHandler).files_handler_class is GuardedFileHandler
    assert make(files_handler_class=FilesHandler).files_handler_class is FilesHandler
    assert "not guarded" not in caplog.text
    other = make(root_dir=str(root), checkpoints_class=OtherCheckpoints)
    assert type(other.checkpoints) is OtherCheckpoints
    assert "The files of OtherCheckpoints are not guarded" in caplog.text


def test_doctor_uses_the_configured_manager(tmp_path: Path) -> None:
    (check,) = doctor.check_contents_manager()
    assert check.ok, check
    configuration = tmp_path / "CONFIG_DIR" / "jupyter_server_config.py"
    configuration.parent.mkdir(exist_ok=True)
    configuration.write_text(f"c.ServerApp.contents_manager_class = {full_name(OtherManager)!r}\n")
    (check,) = doctor.check_contents_manager()
    assert not check.ok
    assert not check.required
    assert "OtherManager" in check.finding
    configuration.write_text(f"c.ServerApp.contents_manager_class = {full_name(FileContentsManager)!r}\n")
    assert doctor.check_contents_manager()[0].ok
    configuration.write_text("c.ServerApp.contents_manager_class = 'no.such.class'\n")
    (check,) = doctor.check_contents_manager()
    assert not check.ok


def names(code: CodeType) -> Iterator[tuple[str, ...]]:
    """Yield each dotted name that begins with a global name in a function's code."""
    found: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            found = [str(instruction.argval)]
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and found:
            found.append(str(instruction.argval))
        elif instruction.opname not in ("PRECALL", "CACHE"):
            found = []
            continue
        if found:
            yield tuple(found)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names(constant)


def test_all_file_functions_of_jupyter_server_are_replaced() -> None:
    """Every file function that Jupyter Server's code calls has a replacement. A missing one is an AttributeError."""
    own = [value for module in MODULES for value in vars(module).values() if belongs(value, module)]
    members = [member for value in own for member in (vars(value).values() if isinstance(value, type) else [value])]
    functions = [getattr(member, "__wrapped__", member) for member in members]
    used = {name for function in functions if hasattr(function, "__code__") for name in names(function.__code__)}
    assert {("os", "listdir"), ("os", "replace"), ("shutil", "copyfile"), ("os", "path", "isfile")} <= used
    # Jupyter Server calls os.readlink only after os.path.islink, whose replacement always returns False.
    used -= {("os", "readlink")}
    for name in used:
        if name[:2] == ("os", "path") and len(name) > 2:
            assert hasattr(guarded_path, name[2]), name
        elif name[0] == "os" and len(name) > 1:
            assert hasattr(guarded_os, name[1]), name
        elif name[0] == "shutil" and len(name) > 1:
            assert hasattr(guarded_shutil, name[1]), name


def belongs(value: object, module: ModuleType) -> bool:
    return isinstance(value, type | FunctionType) and value.__module__ == module.__name__


MANAGERS = [CLASSES[kind] for kind in CLASSES if "Checkpoints" not in kind.__name__]


@pytest.fixture(params=MANAGERS, ids=lambda kind: kind.__name__)
def manager(request: pytest.FixtureRequest, root: Path) -> Any:
    return request.param(root_dir=str(root))


def do(result: Any) -> Any:
    async def wait() -> Any:
        return await ensure_async(result)

    return asyncio.run(wait())


def test_ordinary_files(manager: Any, root: Path, tmp_path: Path) -> None:
    model = do(manager.save({"type": "notebook", "content": NOTEBOOK}, "a.ipynb"))
    assert model["type"] == "notebook"
    assert model["writable"]
    model = do(manager.get("a.ipynb", require_hash=True))
    assert model["hash"] == hashlib.sha256((root / "a.ipynb").read_bytes()).hexdigest()
    do(manager.save({"type": "directory"}, "sub"))
    do(manager.save({"type": "file", "format": "base64", "content": "AP8="}, "sub/b.bin"))
    assert (root / "sub" / "b.bin").read_bytes() == b"\0\xff"
    assert do(manager.copy("sub/b.bin"))["path"] == "sub/b-Copy1.bin"
    do(manager.copy("sub", "other"))
    assert sorted(os.listdir(root / "other" / "sub")) == ["b-Copy1.bin", "b.bin"]
    do(manager.rename("a.ipynb", "sub/c.ipynb"))
    assert os.listdir(root / "sub" / ".ipynb_checkpoints") == ["c-checkpoint.ipynb"]
    do(manager.delete("sub"))
    assert not (root / "sub").exists()
    assert (tmp_path / "xdg" / "Trash" / "files" / "sub" / "c.ipynb").exists()
    with pytest.raises(HTTPError) as caught:
        do(manager.get("sub"))
    assert caught.value.status_code == 404


def test_checkpoints(manager: Any, root: Path) -> None:
    for text in ("first", "second"):
        do(manager.save({"type": "file", "format": "text", "content": text}, "a.txt"))
        if text == "first":
            checkpoint = do(manager.create_checkpoint("a.txt"))
    assert do(manager.list_checkpoints("a.txt")) == [checkpoint]
    do(manager.restore_checkpoint("checkpoint", "a.txt"))
    assert (root / "a.txt").read_text() == "first"
    do(manager.delete_checkpoint("checkpoint", "a.txt"))
    assert do(manager.list_checkpoints("a.txt")) == []


if os.geteuid() != 0:  # root can write to read-only folders

    def test_checkpoint_of_a_file_in_a_read_only_folder(
        manager: Any, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Jupyter Server's default folder for it, where another user has put a link to one of this user's files.
        foreign = tmp_path / "tmp" / "jupyter_checkpoints" / "sub"
        foreign.mkdir(parents=True)
        (tmp_path / "tmp" / "ours").write_text("ours")
        (foreign / "a-checkpoint.txt").symlink_to(tmp_path / "tmp" / "ours")
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
        monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
        (root / "sub").mkdir()
        (root / "sub" / "a.txt").write_text("first")
        (root / "sub").chmod(0o555)
        do(manager.create_checkpoint("sub/a.txt"))
        assert (tmp_path / "tmp" / "ours").read_text() == "ours"
        kept = own_folder() / "checkpoints" / "jupyter_checkpoints" / "sub" / "a-checkpoint.txt"
        assert kept.read_text() == "first"
        (root / "sub" / "a.txt").write_text("second")
        do(manager.restore_checkpoint("checkpoint", "sub/a.txt"))
        assert (root / "sub" / "a.txt").read_text() == "first"
        with pytest.raises(HTTPError) as caught:
            do(manager.new({"type": "file"}, "sub/b.txt"))
        assert caught.value.status_code == 403


def test_saving_through_a_link_inside_keeps_the_link(manager: Any, root: Path) -> None:
    (root / "b.txt").write_text("old")
    (root / "a.txt").symlink_to("b.txt")
    do(manager.save({"type": "file", "format": "text", "content": "new"}, "a.txt"))
    assert (root / "a.txt").is_symlink()
    assert (root / "b.txt").read_text() == "new"
    assert sorted(os.listdir(root)) == ["a.txt", "b.txt"]
    do(manager.delete("a.txt"))
    assert not (root / "a.txt").is_symlink()
    assert (root / "b.txt").read_text() == "new"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The growing list of all calls of os.open."""
    paths: list[str] = []
    real_open = os.open

    def open_and_count(path: Any, *arguments: Any, **options: Any) -> int:
        paths.append(str(path))
        return real_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", open_and_count)
    return paths


def test_listing_limits_the_work_for_links(manager: Any, root: Path, opened: list[str]) -> None:
    """Without the limit, 100 links that are chained to each other take 325,000 calls of os.open."""
    (root / "sub" / "folder").mkdir(parents=True)
    (root / "sub" / "file.txt").touch()
    (root / "sub" / "short").symlink_to("file.txt")
    for number in range(100):
        target = f"link{number - 1}" if number % 38 else "folder"
        (root / "sub" / f"link{number}").symlink_to("folder/../" * 11 + target)
    entries = {entry["name"]: entry for entry in do(manager.get("sub"))["content"]}
    assert len(opened) < 25_000
    assert set(entries) == set(os.listdir(root / "sub"))
    assert {entries[name]["writable"] for name in ("folder", "file.txt", "short")} == {True}
    links = [name for name in entries if name.startswith("link")]
    refused = [name for name in links if entries[name]["type"] == "file" and not entries[name]["writable"]]
    assert 30 < len(refused) < 100
    assert {entries[name]["type"] for name in links if name not in refused} == {"directory"}
    assert do(manager.get(f"sub/{refused[0]}"))["type"] == "directory"
    do(manager.delete(f"sub/{refused[0]}"))
    assert not (root / "sub" / refused[0]).is_symlink()


def test_folder_behind_long_links_is_listed(manager: Any, root: Path, opened: list[str]) -> None:
    (root / "real").mkdir()
    for number in range(50):
        (root / "real" / f"{number}.txt").touch()
        (root / "real" / f"link{number}").symlink_to(f"{number}.txt")
    (root / "link").symlink_to("real/../" * 450 + "real")
    entries = do(manager.get("link"))["content"]
    assert len(opened) < 15_000
    assert len(entries) == 100
    assert all(entry["writable"] for entry in entries)


def test_links_to_configured_places(tmp_path: Path, root: Path) -> None:
    for name in ("free", "mounted", "writable", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file.txt").write_text(name)
        (root / name).symlink_to(tmp_path / name)
    config = Config()
    config.GuardedContents.allowed_link_targets = [str(tmp_path / "free")]
    config.SandboxProvisioner.mounts = [str(tmp_path / "mounted"), f"{tmp_path}/writable:/data:rw", "/no/such/place"]
    manager = managers.GuardedLargeFileManager(root_dir=str(root), config=config)
    for name, readable, writable in (
        ("free", True, True),
        ("mounted", True, False),
        ("writable", True, True),
        ("other", False, False),
    ):
        path = f"{name}/file.txt"
        body = {"type": "file", "format": "text", "content": "new"}
        if readable:
            assert manager.get(path)["content"] == name
            assert manager.get(path)["writable"] is writable
            assert [entry["name"] for entry in manager.get(name)["content"]] == ["file.txt"]
        if writable:
            manager.save(body, path)
            assert (tmp_path / path).read_text() == "new"
            continue
        with pytest.raises(HTTPError) as caught:
            manager.save(body, path)
        assert caught.value.status_code == 403
        assert (tmp_path / path).read_text() == name


def test_links_to_places_in_the_environment(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "free").mkdir()
    (root / "link").symlink_to(tmp_path / "free")
    monkeypatch.setenv("SANDBOX_ALLOWED_LINK_TARGETS", f"{tmp_path}/missing, {tmp_path}/free")
    manager = managers.GuardedLargeFileManager(root_dir=str(root))
    manager.new({"type": "file"}, "link/a.txt")
    assert (tmp_path / "free" / "a.txt").exists()


def test_relative_link_target_is_an_error(root: Path) -> None:
    with pytest.raises(ConfigurationError, match="'relative'"):
        managers.GuardedLargeFileManager(root_dir=str(root), allowed_link_targets=["relative"])


def test_paths_outside_and_hidden_paths(manager: Any, root: Path) -> None:
    (root / ".hidden").write_text("hidden")
    for path in ("../x", ".hidden", "missing", "a\0b"):
        with pytest.raises(HTTPError) as caught:
            do(manager.get(path))
        assert caught.value.status_code == 404, path
    manager.allow_hidden = True
    assert do(manager.get(".hidden"))["content"] == "hidden"


def test_hook_gets_the_path_in_the_file_system(manager: Any, root: Path) -> None:
    seen = []
    manager.register_post_save_hook(lambda os_path, model, contents_manager: seen.append(os_path))
    do(manager.save({"type": "file", "format": "text", "content": ""}, "a.txt"))
    assert seen == [str(root / "a.txt")]


def test_files_that_are_too_large_are_not_loaded(manager: Any, root: Path) -> None:
    manager.max_file_size = 2000
    for name in ("a.txt", "a.ipynb"):
        with (root / name).open("wb") as file:
            file.truncate(2001)
        for options in ({}, {"require_hash": True}, {"content": False, "require_hash": True}, {"type": "file"}):
            with pytest.raises(HTTPError) as caught:
                do(manager.get(name, **options))
            assert caught.value.status_code == 400
            message = str(caught.value)
            assert name in message and "2001 bytes" in message and "at most 2000" in message
        assert do(manager.get(name, content=False))["size"] == 2001
        do(manager.create_checkpoint(name))
        do(manager.restore_checkpoint("checkpoint", name))
        do(manager.rename(name, f"renamed-{name}"))
    (root / "b.txt").write_text("x" * 2000)
    assert do(manager.get("b.txt"))["content"] == "x" * 2000
    for content in (True, False):
        model = do(manager.get("b.txt", content=content, require_hash=True))
        assert model["hash"] == hashlib.sha256(b"x" * 2000).hexdigest()
        assert model["hash_algorithm"] == "sha256"
    assert do(manager.get("", content=False, require_hash=True))["hash"] is None


def test_size_limit_of_the_environment(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = managers.GuardedLargeFileManager
    assert make(root_dir=str(root)).max_file_size == 512 << 20
    monkeypatch.setenv("SANDBOX_MAX_FILE_SIZE", "12345")
    assert make(root_dir=str(root)).max_file_size == 12345
    assert make(root_dir=str(root)).checkpoints.max_file_size == 12345


def test_reading_ends_at_the_size_when_opened(root: Path) -> None:
    manager = managers.GuardedLargeFileManager(root_dir=str(root), max_file_size=10)
    (root / "a.txt").write_text("12345")
    with manager.open(manager._get_os_path("a.txt"), "rb") as file:
        with (root / "a.txt").open("a") as same:
            same.write("6" * 1000)
        assert file.read(3) == b"123"
        assert file.read() == b"45"
        assert file.read() == b""
