"""A kernel that replaces files of the shared folder by links cannot lead the server out of that folder."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError as HTTPFailure
from urllib.request import Request, urlopen

import pytest
from jupyter_core.utils import ensure_async
from notebooks import Notebook
from servers import READY, Server
from tornado.web import HTTPError

from sandbox_provisioner.contents.managers import (
    GuardedAsyncFileContentsManager,
    GuardedAsyncGenericFileCheckpoints,
    GuardedAsyncLargeFileManager,
    GuardedFileContentsManager,
    GuardedGenericFileCheckpoints,
    GuardedLargeFileManager,
)
from sandbox_provisioner.kernel.folders import list_file, remember

pytestmark = pytest.mark.user

SECRET = "the-user's-secret"
FORGED = "written-by-the-guest"
RACE_SECONDS = 2.0
EMPTY: dict[str, Any] = {"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
MANAGERS = [
    (GuardedLargeFileManager, {}),
    (GuardedAsyncLargeFileManager, {}),
    (GuardedFileContentsManager, {"checkpoints_class": GuardedGenericFileCheckpoints, "use_atomic_writing": False}),
    (GuardedAsyncFileContentsManager, {"checkpoints_class": GuardedAsyncGenericFileCheckpoints}),
]

Manager = Any
Serve = Callable[..., Server]


def notebook(text: str) -> dict[str, Any]:
    return {**EMPTY, "metadata": {"note": text}}


@pytest.fixture(autouse=True)
def trash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the user's own trash and data folder out of the tests."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "xdg" / "Trash"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The user's files outside the server's folder."""
    folder = tmp_path / "home"
    (folder / ".ipynb_checkpoints").mkdir(parents=True)
    for name in ("a.ipynb", ".~a.ipynb", ".ipynb_checkpoints/a-checkpoint.ipynb"):
        (folder / name).write_text(json.dumps(notebook(SECRET)))
    for name in ("a.txt", ".~a.txt", ".ipynb_checkpoints/a-checkpoint.txt", "key"):
        (folder / name).write_text(SECRET)
    return folder


def snapshot(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return the mode, the time and the content of each entry of a folder."""
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in sorted(folder.rglob("*"))
    }


def put(path: Path, text: str) -> None:
    """Write a file atomically. If there is a link in its place, replace the link instead of following it."""
    part = path.with_name(f"{path.name}-part-{threading.get_ident()}")
    part.write_text(text)
    os.replace(part, path)


def fill_files(folder: Path) -> None:
    put(folder / "a.ipynb", json.dumps(notebook(FORGED)))
    put(folder / "a.txt", FORGED)


def fill_checkpoints(folder: Path) -> None:
    put(folder / "a-checkpoint.ipynb", json.dumps(notebook(FORGED)))
    put(folder / "a-checkpoint.txt", FORGED)


def fill_folder(folder: Path) -> None:
    """Fill a folder with the files of the guest, without links."""
    (folder / ".ipynb_checkpoints").mkdir(parents=True, exist_ok=True)
    fill_files(folder)
    fill_checkpoints(folder / ".ipynb_checkpoints")


def fill(root: Path) -> None:
    fill_folder(root)
    fill_folder(root / "sub")


@contextmanager
def guarded(root: Path, home: Path) -> Iterator[None]:
    """Check that the block changes none of the user's files, and copies none to the server's folder."""
    before = snapshot(home)
    yield
    assert snapshot(home) == before
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert SECRET.encode() not in path.read_bytes(), path


async def read(cm: Manager, path: str) -> Any:
    return await ensure_async(cm.get(path))


async def read_hash(cm: Manager, path: str) -> Any:
    return await ensure_async(cm.get(path, content=False, require_hash=True))


async def read_as_file(cm: Manager, path: str) -> Any:
    return await ensure_async(cm.get(path, type="file", format="base64"))


async def save(cm: Manager, path: str) -> Any:
    if path.endswith(".ipynb"):
        model = {"type": "notebook", "content": notebook(FORGED)}
    else:
        model = {"type": "file", "format": "text", "content": FORGED}
    return await ensure_async(cm.save(model, path))


async def save_as_file(cm: Manager, path: str) -> Any:
    return await ensure_async(cm.save({"type": "file", "format": "text", "content": FORGED}, path))


def upload(chunk: int) -> Callable[[Manager, str], Any]:
    async def save_chunk(cm: Manager, path: str) -> Any:
        model = {"type": "file", "format": "text", "content": FORGED, "chunk": chunk}
        return await ensure_async(cm.save(model, path))

    return save_chunk


async def new(cm: Manager, path: str) -> Any:
    return await ensure_async(cm.new({"type": "file", "format": "text", "content": FORGED}, path))


async def copy(cm: Manager, path: str) -> Any:
    return await ensure_async(cm.copy(path))


async def create_checkpoint(cm: Manager, path: str) -> Any:
    return await ensure_async(cm.create_checkpoint(path))


async def restore_checkpoint(cm: Manager, path: str) -> Any:
    return await ensure_async(cm.restore_checkpoint("checkpoint", path))


async def list_checkpoints(cm: Manager, path: str) -> Any:
    return await ensure_async(cm.list_checkpoints(path))


async def delete_checkpoint(cm: Manager, path: str) -> Any:
    return await ensure_async(cm.delete_checkpoint("checkpoint", path))


async def rename(cm: Manager, path: str) -> Any:
    folder, _, name = path.rpartition("/")
    model = await ensure_async(cm.update({"path": f"{folder}/renamed-{name}".strip("/")}, path))
    with suppress(HTTPError):
        await ensure_async(cm.rename(f"{folder}/renamed-{name}".strip("/"), path))
    return model


async def delete(cm: Manager, path: str) -> Any:
    return await ensure_async(cm.delete(path))


async def trust(cm: Manager, path: str) -> Any:
    return await ensure_async(cm.trust_notebook(path))


FILE_WAYS: dict[str, Callable[[Manager, str], Any]] = {
    "read": read,
    "hash": read_hash,
    "read as file": read_as_file,
    "save": save,
    "save as file": save_as_file,
    "first chunk": upload(1),
    "next chunk": upload(2),
    "last chunk": upload(-1),
    "new": new,
    "copy": copy,
    "create checkpoint": create_checkpoint,
    "restore checkpoint": restore_checkpoint,
}
"""Operations that read or write the file. They are refused if the path contains a link to an outside place."""
ENTRY_WAYS: dict[str, Callable[[Manager, str], Any]] = {"rename": rename, "delete": delete}
"""Operations on the directory entry itself. They are allowed even if it is a link."""


async def list_folder(cm: Manager, path: str) -> Any:
    return await ensure_async(cm.get(path, type="directory"))


async def make_untitled(cm: Manager, path: str) -> Any:
    return await ensure_async(cm.new_untitled(path, type="notebook"))


async def make_folder(cm: Manager, path: str) -> Any:
    return await ensure_async(cm.save({"type": "directory"}, f"{path}/made"))


async def copy_folder(cm: Manager, path: str) -> Any:
    return await ensure_async(cm.copy(path, ""))


async def copy_into_folder(cm: Manager, path: str) -> Any:
    return await ensure_async(cm.copy("a.txt", path))


async def move_into_folder(cm: Manager, path: str) -> Any:
    return await ensure_async(cm.rename("a.txt", f"{path}/moved.txt"))


async def move_out_of_folder(cm: Manager, path: str) -> Any:
    return await ensure_async(cm.rename(f"{path}/a.txt", "moved.txt"))


FOLDER_WAYS: dict[str, Callable[[Manager, str], Any]] = {
    "list": list_folder,
    "new untitled": make_untitled,
    "new folder": make_folder,
    "copy folder": copy_folder,
    "copy into folder": copy_into_folder,
    "move into folder": move_into_folder,
    "move out of folder": move_out_of_folder,
}


@pytest.fixture(params=MANAGERS, ids=lambda pair: pair[0].__name__)
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Manager:
    root = tmp_path / "root"
    fill(root)
    kind, options = request.param
    return kind(root_dir=str(root), **options)


def refusal(way: Callable[[Manager, str], Any], cm: Manager, path: str) -> HTTPError:
    with pytest.raises(HTTPError) as caught:
        asyncio.run(way(cm, path))
    assert caught.value.status_code == 403, caught.value
    assert SECRET not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("way", FILE_WAYS)
@pytest.mark.parametrize("name", ["a.txt", "a.ipynb"])
@pytest.mark.parametrize("target", ["{name}", "missing", "../home/{name}"])
def test_file_is_a_link(manager: Manager, home: Path, way: str, name: str, target: str) -> None:
    root = Path(manager.root_dir)
    (root / name).unlink()
    relative = target.startswith("..")
    (root / name).symlink_to(target.format(name=name) if relative else home / target.format(name=name))
    with guarded(root, home):
        error = refusal(FILE_WAYS[way], manager, name)
        assert name in str(error)
        assert "link" in str(error)
        assert "allowed_link_targets" in str(error)


@pytest.mark.parametrize("way", ENTRY_WAYS)
def test_link_itself_can_be_renamed_and_deleted(manager: Manager, home: Path, way: str) -> None:
    root = Path(manager.root_dir)
    (root / "a.txt").unlink()
    (root / "a.txt").symlink_to(home / "a.txt")
    with guarded(root, home):
        model = asyncio.run(ENTRY_WAYS[way](manager, "a.txt"))
        assert SECRET not in repr(model)
    assert (root / "a.txt").is_symlink() == (way == "rename")


def test_link_to_a_folder_can_be_deleted(manager: Manager, home: Path) -> None:
    root = Path(manager.root_dir)
    manager.always_delete_dir = True
    for trash_first in (True, False):
        manager.delete_to_trash = trash_first
        (root / "link").symlink_to(home)
        with guarded(root, home):
            asyncio.run(delete(manager, "link"))
        assert not (root / "link").is_symlink()


@pytest.mark.parametrize("way", [*FILE_WAYS, *ENTRY_WAYS])
@pytest.mark.parametrize("name", ["a.txt", "a.ipynb"])
def test_folder_of_a_file_is_a_link(manager: Manager, home: Path, way: str, name: str) -> None:
    root = Path(manager.root_dir)
    shutil.rmtree(root / "sub")
    (root / "sub").symlink_to(home)
    with guarded(root, home):
        refusal({**FILE_WAYS, **ENTRY_WAYS}[way], manager, f"sub/{name}")


@pytest.mark.parametrize("way", FOLDER_WAYS)
def test_folder_is_a_link(manager: Manager, home: Path, way: str) -> None:
    root = Path(manager.root_dir)
    shutil.rmtree(root / "sub")
    (root / "sub").symlink_to(home)
    with guarded(root, home):
        refusal(FOLDER_WAYS[way], manager, "sub")


@pytest.mark.parametrize("way", [create_checkpoint, restore_checkpoint, list_checkpoints, save])
def test_checkpoints_folder_is_a_link(manager: Manager, home: Path, way: Callable[..., Any]) -> None:
    root = Path(manager.root_dir)
    shutil.rmtree(root / ".ipynb_checkpoints")
    (root / ".ipynb_checkpoints").symlink_to(home / ".ipynb_checkpoints")
    with guarded(root, home):
        refusal(way, manager, "a.ipynb")


@pytest.mark.parametrize("way", [rename, delete])
def test_file_with_linked_checkpoints_is_renamed_and_deleted(
    manager: Manager, home: Path, way: Callable[..., Any]
) -> None:
    root = Path(manager.root_dir)
    shutil.rmtree(root / ".ipynb_checkpoints")
    (root / ".ipynb_checkpoints").symlink_to(home / ".ipynb_checkpoints")
    with guarded(root, home):
        asyncio.run(way(manager, "a.ipynb"))
    assert (root / "a.ipynb").exists() == (way is rename)


@pytest.mark.parametrize("way", [create_checkpoint, restore_checkpoint, list_checkpoints, delete_checkpoint, save])
@pytest.mark.parametrize("target", ["a.ipynb", "missing"])
def test_checkpoint_is_a_link(manager: Manager, home: Path, way: Callable[..., Any], target: str) -> None:
    root = Path(manager.root_dir)
    checkpoint = root / ".ipynb_checkpoints" / "a-checkpoint.ipynb"
    checkpoint.unlink()
    checkpoint.symlink_to(home / target)
    with guarded(root, home):
        refusal(way, manager, "a.ipynb")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["a.txt", "a.ipynb"])
def test_fifo_is_refused_and_does_not_hang(manager: Manager, home: Path, name: str) -> None:
    root = Path(manager.root_dir)
    (root / name).unlink()
    os.mkfifo(root / name)
    for way in FILE_WAYS.values():
        assert "neither a file nor a folder" in str(refusal(way, manager, name))
    asyncio.run(delete(manager, name))
    assert not (root / name).exists()
    fill(root)
    checkpoint = root / ".ipynb_checkpoints" / "a-checkpoint.ipynb"
    checkpoint.unlink()
    os.mkfifo(checkpoint)
    for way in (create_checkpoint, restore_checkpoint, save):
        refusal(way, manager, "a.ipynb")


def test_listing_shows_links_without_their_targets(manager: Manager, home: Path) -> None:
    root = Path(manager.root_dir)
    (root / "to-folder").symlink_to(home)
    (root / "to-file").symlink_to(home / "a.txt")
    (root / "to-nothing").symlink_to("missing")
    (root / "inside").symlink_to("sub")
    os.mkfifo(root / "fifo")
    entries = {entry["name"]: entry for entry in asyncio.run(list_folder(manager, ""))["content"]}
    assert set(entries) == {"a.txt", "a.ipynb", "sub", "to-folder", "to-file", "to-nothing", "inside"}
    assert entries["to-folder"]["type"] == "file"
    assert entries["to-file"]["size"] == len(str(home / "a.txt"))
    assert entries["inside"]["type"] == "directory"


def test_invalid_notebook_is_not_repaired_from_outside(manager: Manager, home: Path) -> None:
    root = Path(manager.root_dir)
    (root / "a.ipynb").write_text("{")
    (root / ".~a.ipynb").symlink_to(home / "a.ipynb")
    with guarded(root, home), pytest.raises(HTTPError):
        asyncio.run(read(manager, "a.ipynb"))


def make_project(root: Path) -> Path:
    """Make a folder that a sandbox can write to, with links that would lead to the user's files from elsewhere."""
    project = root / "project"
    (project / "deep" / "folder").mkdir(parents=True)
    (root / "private").mkdir()
    (root / "private" / "a.txt").write_text(SECRET)
    (project / "link.txt").symlink_to("private/a.txt")
    (project / "deep" / "link.txt").symlink_to("../private/a.txt")
    (project / "deep" / "folder" / "link.txt").symlink_to("../../private/a.txt")
    (project / "deep" / "folder" / "second.txt").symlink_to("../private/a.txt")
    (project / "deep" / "folder" / "own.txt").write_text(FORGED)
    remember([str(project)], list_file())
    return project


async def move_to_root(cm: Manager, path: str) -> Any:
    return await ensure_async(cm.rename(path, path.rpartition("/")[2]))


async def copy_to_root(cm: Manager, path: str) -> Any:
    return await ensure_async(cm.copy(path, ""))


async def rename_project(cm: Manager, path: str) -> Any:
    await ensure_async(cm.rename("project", "renamed"))
    return await ensure_async(cm.rename(path.replace("project", "renamed"), path.rpartition("/")[2]))


OUT_WAYS = {"move": move_to_root, "copy": copy_to_root, "rename the project and move": rename_project}


@pytest.mark.parametrize("way", ["move", "rename the project and move"])
def test_link_is_not_moved_out_of_the_folder(manager: Manager, way: str) -> None:
    root = Path(manager.root_dir)
    make_project(root)
    error = refusal(OUT_WAYS[way], manager, "project/link.txt")
    assert "link.txt" in str(error)
    assert not os.path.lexists(root / "link.txt")


@pytest.mark.parametrize("way", OUT_WAYS)
def test_links_in_a_moved_folder_are_refused(manager: Manager, way: str) -> None:
    root = Path(manager.root_dir)
    make_project(root)
    manager.always_delete_dir = True
    asyncio.run(OUT_WAYS[way](manager, "project/deep"))
    assert (root / "deep" / "link.txt").is_symlink()
    assert asyncio.run(read(manager, "deep/folder/own.txt"))["content"] == FORGED
    operations = (read, save, upload(1), create_checkpoint, move_to_root)
    for path in ("deep/link.txt", "deep/folder/link.txt"):
        assert (root / path).read_text() == SECRET
        assert all(path in str(refusal(operation, manager, path)) for operation in operations)
    asyncio.run(ensure_async(manager.rename("deep/folder", "folder")))
    assert (root / "folder" / "second.txt").read_text() == SECRET
    assert all("folder/second.txt" in str(refusal(operation, manager, "folder/second.txt")) for operation in operations)
    assert (root / "private" / "a.txt").read_text() == SECRET


def test_race_while_a_file_is_moved_out(manager: Manager, home: Path) -> None:
    root = Path(manager.root_dir)
    project = make_project(root)

    async def move_again_and_again() -> int:
        moved, deadline = 0, time.monotonic() + RACE_SECONDS
        while time.monotonic() < deadline:
            with suppress(HTTPError):
                await ensure_async(manager.rename("project/moving.txt", "moved.txt"))
                moved += 1
            assert not (root / "moved.txt").is_symlink()
            (root / "moved.txt").unlink(missing_ok=True)
        return moved

    with swapping(swap_file, project / "moving.txt", home / "a.txt"):
        assert asyncio.run(move_again_and_again())


Swap = Callable[[Path, Path], None]


def swap_file(place: Path, target: Path) -> None:
    """Replace a file by a link, then by a file again."""
    link = place.with_name(f"link-{place.name}")
    link.symlink_to(target)
    os.replace(link, place)
    put(place, FORGED if place.suffix == ".txt" else json.dumps(notebook(FORGED)))


def swap_folder(fill_again: Callable[[Path], None]) -> Swap:
    """Return a function that replaces a folder by a link, then restores the folder and its deleted files."""

    def swap(place: Path, target: Path) -> None:
        if place.is_symlink():
            place.unlink()
        place.mkdir(exist_ok=True)
        fill_again(place)
        aside = place.with_name(f"{place.name}-aside")
        os.rename(place, aside)
        place.symlink_to(target)
        time.sleep(0)  # let the other thread run
        place.unlink()
        os.rename(aside, place)

    return swap


@contextmanager
def swapping(swap: Swap, place: Path, target: Path) -> Iterator[None]:
    """Call ``swap`` repeatedly in a thread during the block."""
    done = threading.Event()
    swaps: list[str] = []

    def loop() -> None:
        while not done.is_set():
            try:
                swap(place, target)
                swaps.append("done")
            except OSError as error:  # an operation created or moved this entry meanwhile
                swaps.append(str(error))
                shutil.rmtree(place.with_name(f"{place.name}-aside"), ignore_errors=True)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    assert "done" in swaps


RACES: dict[str, tuple[Swap, str, str]] = {
    "file": (swap_file, "sub/a.txt", "a.txt"),
    "notebook": (swap_file, "sub/a.ipynb", "a.ipynb"),
    "checkpoint": (swap_file, "sub/.ipynb_checkpoints/a-checkpoint.ipynb", "a.ipynb"),
    "checkpoints folder": (swap_folder(fill_checkpoints), "sub/.ipynb_checkpoints", ".ipynb_checkpoints"),
    "folder": (swap_folder(fill_folder), "sub", ""),
}


async def try_everything(cm: Manager, refill: Callable[[], None]) -> tuple[int, set[str]]:
    """Do all operations again and again. Returns how many succeeded, and all results and errors."""
    ways = [*FILE_WAYS.values(), *ENTRY_WAYS.values(), list_checkpoints]
    cases = [(way, f"sub/{name}") for way in ways for name in ("a.txt", "a.ipynb")]
    cases += [(trust, "sub/a.ipynb"), *((way, "sub") for way in FOLDER_WAYS.values())]
    done, results, deadline = 0, set(), time.monotonic() + RACE_SECONDS
    while time.monotonic() < deadline:
        for way, path in cases:
            try:
                results.add(repr(await way(cm, path)))
                done += 1
            except (HTTPError, OSError, ValueError) as error:
                results.add(str(error))
            with suppress(OSError):
                refill()
    return done, results


@pytest.mark.parametrize("race", RACES)
def test_race(manager: Manager, home: Path, race: str) -> None:
    root = Path(manager.root_dir)
    manager.delete_to_trash = len(race) % 2 == 0  # some races with trash, others without
    swap, place, target = RACES[race]

    def refill() -> None:
        put(root / "a.txt", FORGED)
        if race != "folder":
            fill_files(root / "sub")

    with guarded(root, home), swapping(swap, root / place, home / target):
        done, results = asyncio.run(try_everything(manager, refill))
    assert done
    assert not [result for result in results if SECRET in result]


def fetch(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    """Return the status and the text of a page."""
    request = Request(f"{server.url}{path}", headers={"Authorization": "token t", **headers}, method=method)
    try:
        with urlopen(request, timeout=READY) as answer:
            return answer.status, answer.read().decode()
    except HTTPFailure as error:
        return error.code, error.read().decode()


PAGES = ("files/{}", "files/{}?download=1", "view/{}", "nbconvert/script/{}", "api/contents/{}?content=1&hash=1")


def test_pages_of_a_server(serve: Serve, notebook_folder: Path, home: Path) -> None:
    fill(notebook_folder)
    server = serve()
    (notebook_folder / "inside.ipynb").symlink_to("sub/a.ipynb")
    (notebook_folder / "link.ipynb").symlink_to(home / "a.ipynb")
    (notebook_folder / "folder").symlink_to(home)
    os.mkfifo(notebook_folder / "fifo.ipynb")
    for page in PAGES:
        for path in ("a.ipynb", "inside.ipynb"):
            assert fetch(server, page.format(path))[0] == 200, (page, path)
        for path in ("link.ipynb", "folder/a.ipynb", "fifo.ipynb"):
            status, text = fetch(server, page.format(path))
            assert status == 403, (page, path, text)
            assert SECRET not in text
            assert "neither a file" in text if "fifo" in path else "symbolic link" in text
        assert fetch(server, page.format("missing.ipynb"))[0] == 404, page
    assert fetch(server, "files/link.ipynb", "HEAD")[0] == 403
    assert fetch(server, "files/.ipynb_checkpoints/a-checkpoint.txt")[0] == 404
    assert fetch(server, "files/sub")[0] == 403
    assert fetch(server, "files/a.txt") == (200, FORGED)
    assert fetch(server, "files/a.txt", "HEAD") == (200, "")
    assert fetch(server, "files/a.txt", Range="bytes=2-5") == (206, FORGED[2:6])
    assert fetch(server, "files/a.txt", Range="bytes=-5") == (206, FORGED[-5:])


def test_requests_that_write(serve: Serve, notebook_folder: Path, home: Path) -> None:
    fill(notebook_folder)
    server = serve()
    (notebook_folder / "link.txt").symlink_to(home / "a.txt")
    (notebook_folder / "folder").symlink_to(home)
    whole = {"type": "file", "format": "text", "content": FORGED}
    with guarded(notebook_folder, home):
        for path in ("link.txt", "folder/a.txt", "folder/new.txt"):
            for body in (whole, {**whole, "chunk": 1}, {**whole, "chunk": 2}, {**whole, "chunk": -1}):
                status, answer = server.ask("PUT", f"contents/{path}", body)
                assert status == 403, (path, answer)
                assert "symbolic link" in answer["message"]
        assert server.ask("POST", "contents/folder", {"type": "notebook"})[0] == 403
        assert server.ask("POST", "contents/", {"copy_from": "link.txt"})[0] == 403
        assert server.ask("POST", "contents/folder", {"copy_from": "a.txt"})[0] == 403
        assert server.ask("PATCH", "contents/folder/a.txt", {"path": "stolen.txt"})[0] == 403
        assert server.ask("PATCH", "contents/a.txt", {"path": "folder/a2.txt"})[0] == 403
        assert server.ask("DELETE", "contents/folder/a.txt")[0] == 403
        assert server.ask("GET", "contents/")[0] == 200
        assert server.ask("DELETE", "contents/link.txt")[0] == 204
        assert server.ask("DELETE", "contents/folder")[0] == 204
    assert not (notebook_folder / "link.txt").is_symlink()


def test_race_over_http(serve: Serve, notebook_folder: Path, home: Path) -> None:
    fill(notebook_folder)
    server = serve()
    seen = set()
    with guarded(notebook_folder, home), swapping(swap_file, notebook_folder / "a.ipynb", home / "a.ipynb"):
        deadline = time.monotonic() + RACE_SECONDS
        while time.monotonic() < deadline:
            for page in PAGES:
                seen.add(fetch(server, page.format("a.ipynb"))[1])
            server.ask("PUT", "contents/a.ipynb", {"type": "notebook", "content": notebook(FORGED)})
            server.ask("POST", "contents/a.ipynb/checkpoints")
            server.ask("POST", "contents/a.ipynb/checkpoints/checkpoint")
    assert not [text for text in seen if SECRET in text]


ATTACK = """
import os, shutil
def attack(path, target):
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)
    os.symlink(target, path)
"""


@pytest.mark.runsc
def test_kernel_that_makes_links(
    serve: Serve, sandboxed: Callable[..., str], notebook_folder: Path, home: Path, tmp_path: Path
) -> None:
    project = notebook_folder / "project"
    fill_folder(project)
    (notebook_folder / "private.ipynb").write_text(json.dumps(notebook(SECRET)))
    server = serve()
    kernel = Notebook(server, sandboxed(), "project/a.ipynb")
    kernel.run(ATTACK)
    body = {"type": "notebook", "content": notebook("the user's edit")}
    steps = (
        ("PUT", "contents/project/a.ipynb", body),
        ("POST", "contents/project/a.ipynb/checkpoints", None),
        ("POST", "contents/project/a.ipynb/checkpoints/checkpoint", None),
    )
    for method, path, content in steps:
        assert server.ask(method, path, content)[0] < 300
    attacks = (
        (".ipynb_checkpoints/a-checkpoint.ipynb", str(home / "a.ipynb")),
        (".ipynb_checkpoints/a-checkpoint.ipynb", str(home / "missing")),
        # Inside the server's folder, but outside the kernel's.
        (".ipynb_checkpoints/a-checkpoint.ipynb", "../../private.ipynb"),
        ("a.ipynb", str(home / "a.ipynb")),
        ("a.ipynb", "../private.ipynb"),
        (".ipynb_checkpoints", str(home / ".ipynb_checkpoints")),
    )
    private = (notebook_folder / "private.ipynb").read_text()
    for place, target in attacks:
        fill_folder(project)
        kernel.run(f"attack({place!r}, {target!r})")
        assert (project / place).is_symlink()
        with guarded(project, home):
            for method, path, content in steps:
                status, answer = server.ask(method, path, content)
                assert status == 403, (place, target, method, answer)
        assert (notebook_folder / "private.ipynb").read_text() == private
        (project / place).unlink()
    fill_folder(project)
    for method, path, content in steps:
        assert server.ask(method, path, content)[0] < 300
    kernel.close()


@pytest.mark.runsc
def test_kernel_makes_links_in_moved_folder(serve: Serve, sandboxed: Callable[..., str], notebook_folder: Path) -> None:
    (notebook_folder / "project" / "results").mkdir(parents=True)
    (notebook_folder / "private.txt").write_text(SECRET)
    server = serve()
    kernel = Notebook(server, sandboxed(), "project/a.ipynb")
    kernel.run("import os; folder = os.open('results', os.O_RDONLY)")
    assert server.ask("PATCH", "contents/project/results", {"path": "results"})[0] == 200
    kernel.run("os.symlink('../private.txt', 'link.txt', dir_fd=folder)")
    assert (notebook_folder / "results" / "link.txt").read_text() == SECRET
    body = {"type": "file", "format": "text", "content": FORGED}
    for path in ("results/link.txt", "kept/link.txt"):
        for method, content in (("GET", None), ("PUT", body)):
            status, answer = server.ask(method, f"contents/{path}", content)
            assert status == 403, (method, path, answer)
            assert path in answer["message"]
        server.ask("PATCH", "contents/results", {"path": "kept"})
    assert (notebook_folder / "private.txt").read_text() == SECRET
    status, answer = server.ask("PATCH", "contents/kept/link.txt", {"path": "link.txt"})
    assert status == 403
    assert "is a symbolic link to ../private.txt" in answer["message"]
    kernel.close()
