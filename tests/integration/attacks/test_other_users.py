"""A sandbox of another user cannot be opened, read, forked, reverted or deleted by its id in shared storage."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from apis import KERNEL, Api, serving
from gcs_server import GCS

from sandbox_provisioner.cli.app import main
from sandbox_provisioner.config import GCSConfig, Place
from sandbox_provisioner.errors import ForeignSandboxError, SandboxError
from sandbox_provisioner.errors.signature import SignatureError
from sandbox_provisioner.gvisor.bundle import BundleSpec
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.lock.base import Owner
from sandbox_provisioner.persistence.backends import open_stores
from sandbox_provisioner.persistence.metadata import GCSSandboxMetadata
from sandbox_provisioner.persistence.names import metadata_name
from sandbox_provisioner.sandbox import detached
from sandbox_provisioner.sandbox.handle import Identity, SandboxHandle
from sandbox_provisioner.sandbox.manager import SandboxManager
from sandbox_provisioner.sandbox.start_request import StartRequest
from sandbox_provisioner.sandbox.user_sandboxes import registry, settings

BUCKETS = ("SANDBOX_METADATA", "SANDBOX_LOCK", "SANDBOX_CHECKPOINT", "FILESYSTEM_SNAPSHOT")
KEYS = {"one key": ("k" * 32, "k" * 32), "a key each": ("a" * 32, "b" * 32)}
SPEC = BundleSpec("/usr/bin/python3", "/home", "user")


@pytest.fixture(params=list(KEYS))
def become(
    request: pytest.FixtureRequest, gcs: GCS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """Return a function that sets the user to Alice or Bob, who share a bucket without prefixes."""
    for name in BUCKETS:
        monkeypatch.setenv(f"{name}_BUCKET", gcs.bucket)
    monkeypatch.setenv("SANDBOX_ENABLE_HANDOFF", "1")
    monkeypatch.setenv("SANDBOX_HANDOFF_TIMEOUT", "5")

    def become(name: str) -> None:
        monkeypatch.setenv("LOGNAME", name)
        monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / name / "data"))
        monkeypatch.setenv("SANDBOX_SIGNING_KEY", KEYS[request.param][name == "bob"])

    return become


def own(name: str) -> None:
    """Create a sandbox that the current user owns."""

    async def create() -> None:
        stores, about = open_stores(settings()), Identity(user=os.environ["LOGNAME"])
        handle = await SandboxHandle.create_persistent(
            name, SPEC, Runsc(Path("/nowhere"), ""), stores, Owner.here("a"), about
        )
        await handle.release()

    asyncio.run(create())


# -- from Python and the command line --------------------------------------------------------------------------------


def test_another_users_id_is_refused_and_leaves_no_record(become: Callable[[str], None]) -> None:
    become("alice")
    own("box")
    become("bob")

    async def open_box() -> None:
        request = StartRequest("python3", "/work/a.ipynb", "box", user="bob", enable_handoff=True, patience=5.0)
        await SandboxManager(settings(), Runsc(Path("/nowhere"), ""), "bob's").open(request)

    with pytest.raises((ForeignSandboxError, SignatureError)):
        asyncio.run(open_box())
    assert registry().list().records == []


def test_no_operation_accepts_another_users_id(
    become: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    become("alice")
    own("box")
    become("bob")
    stores, owner = open_stores(settings()), Owner.here("bob's")
    before = stores.metadata.read(metadata_name("box"))
    record = registry().record("box", stores)  # a record like that of an older version
    for attempt in (
        lambda: detached.destroy_persistent(stores, "box", owner),
        lambda: detached.destroy_persistent(stores, "box", owner, unverified=True),
        lambda: detached.revert_persistent(stores, "box", owner),
        lambda: detached.drop_savepoint(stores, "box", "a", owner),
        lambda: detached.fork_persistent(stores, "box", GCSSandboxMetadata("new", "", ""), owner),
    ):
        with pytest.raises((ForeignSandboxError, SignatureError)):
            asyncio.run(attempt())
    capsys.readouterr()
    for command in (["delete"], ["delete", "--unverified"], ["revert"], ["fork"]):
        assert main([*command, str(record.id)]) == 5, command
        assert "alice" in (said := capsys.readouterr().err) or "signed with the key" in said
    assert main(["list", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["sandboxes"]
    assert (listed["state"], listed["size"]) == ("unknown", None)
    assert stores.metadata.read(metadata_name("box")) == before


def test_named_user_shares_a_sandbox_with_the_same_key(
    become: Callable[[str], None],
) -> None:
    async def open_box(user: str, shared_with: tuple[str, ...] = ()) -> tuple[str, ...]:
        become(user)
        request = StartRequest("python3", "", "box", user=user, shared_with=shared_with)
        manager = SandboxManager(settings(), Runsc(Path("/nowhere"), ""), user)
        handle = await manager.open(request)
        found = handle.metadata.shared_with
        await manager.close(handle, save=False)
        return found

    assert asyncio.run(open_box("alice", ("bob", "carol"))) == ("bob", "carol")
    if os.environ["SANDBOX_SIGNING_KEY"] == "a" * 32:
        with pytest.raises(SignatureError, match="SANDBOX_SIGNING_KEY"):
            asyncio.run(open_box("bob"))
        return
    assert asyncio.run(open_box("bob")) == ("bob", "carol")
    assert asyncio.run(open_box("alice")) == ()
    with pytest.raises(ForeignSandboxError, match=r"belongs to user 'alice'.*SANDBOX_SHARED_WITH=bob"):
        asyncio.run(open_box("bob"))


# -- two real servers --------------------------------------------------------------------------------------------------


@pytest.mark.runsc
def test_running_sandbox_is_not_handed_to_another_user(become: Callable[[str], None], tmp_path: Path) -> None:
    with ExitStack() as stack:
        servers: dict[str, Api] = {}
        for name in ("alice", "bob"):
            become(name)
            (tmp_path / name).mkdir(exist_ok=True)
            servers[name] = stack.enter_context(serving(tmp_path / name))
        alice, bob = servers["alice"], servers["bob"]
        mine = alice.good("POST", "", {"kernel_name": KERNEL, "sandbox_id": "mine"})
        alice.run(mine, "secret = 'of alice'")
        for state in ("running", "hibernated"):
            if state == "hibernated":
                alice.good("POST", f"/{mine['id']}/hibernate")
            answer = bob.ask("POST", "", {"kernel_name": KERNEL, "sandbox_id": "mine"})
            assert answer.status in (403, 422), answer
            assert answer.body["type"] in ("urn:sandbox:not-yours", "urn:sandbox:not-signed")
            assert bob.good("GET", "")["items"] == []
            for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/wake"), ("POST", "/revert")):
                assert bob.ask(method, f"/mine{path}").status == 404
            assert alice.good("GET", f"/{mine['id']}")["state"] == state
        alice.good("POST", f"/{mine['id']}/wake")
        assert alice.run(mine, "print(secret)").strip() == "of alice"
        alice.good("DELETE", f"/{mine['id']}")


# -- two real user ids ---------------------------------------------------------------------------------------------


ALICE, BOB = 52001, 52002


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder with a private home for each user, and a storage that all users can write to, like /tmp."""
    folder = Path(tempfile.mkdtemp(prefix="two-users-"))
    folder.chmod(0o755)
    for uid in (ALICE, BOB):
        (folder / str(uid)).mkdir(mode=0o700)
        os.chown(folder / str(uid), uid, uid)
    (folder / "storage").mkdir()
    (folder / "storage").chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def as_user(uid: int, function: Callable[[], Any]) -> Any:
    """Call ``function`` as another user. Return its result, or the name and text of the SandboxError that it raised."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            os.environ["LOGNAME"] = f"user{uid}"
            try:
                answer = ["result", function()]
            except (SandboxError, OSError) as error:
                answer = [type(error).__name__, str(error)]
            os.write(writing, json.dumps(answer).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer or '["died", ""]')


def config_of(shared: Path, uid: int, prefix: str) -> GCSConfig:
    places = {
        field: Place(getattr(GCSConfig, field).stem, mount=shared / "storage")
        for field in ("metadata", "locks", "checkpoints", "snapshots")
    }
    home = shared / str(uid)
    return GCSConfig(home / "local", own=home / "data", prefix=prefix, signing_key="", **places)


@pytest.mark.root  # no other user can become two other users
def test_two_user_ids_in_one_folder(shared: Path) -> None:
    def create(uid: int, prefix: str) -> Any:
        async def run() -> str:
            stores = open_stores(config_of(shared, uid, prefix))
            handle = await SandboxHandle.create_persistent(
                "box", SPEC, Runsc(Path("/nowhere"), ""), stores, Owner.here("server"), Identity(user=f"user{uid}")
            )
            await handle.release()
            return handle.sandbox_id

        return as_user(uid, lambda: asyncio.run(run()))

    def read(uid: int, prefix: str) -> Any:
        return as_user(
            uid, lambda: detached.describe_persistent(open_stores(config_of(shared, uid, prefix)), "box").user
        )

    def delete(uid: int, prefix: str) -> Any:
        stores = config_of(shared, uid, prefix)
        return as_user(
            uid, lambda: asyncio.run(detached.destroy_persistent(open_stores(stores), "box", Owner.here("server")))
        )

    assert create(ALICE, "alice") == create(BOB, "bob") == ["result", "box"]
    assert read(ALICE, "alice") == ["result", f"user{ALICE}"]
    key = shared / str(ALICE) / "data" / "key"
    assert (key.stat().st_uid, key.stat().st_mode & 0o777) == (ALICE, 0o600)

    # With the default modes, the operating system denies Bob access.
    assert read(BOB, "alice")[0] == delete(BOB, "alice")[0] == "StorageError"
    # With permissive modes, the signature protects the document.
    document = shared / "storage" / "alice" / metadata_name("box")
    for path in (shared / "storage" / "alice", *(shared / "storage" / "alice").rglob("*")):
        path.chmod(0o777)
    before = document.read_bytes()
    assert read(BOB, "alice")[0] == "SignatureError"
    assert delete(BOB, "alice")[0] in ("SignatureError", "StorageError")  # Bob may have no access to the lease's files
    assert document.read_bytes() == before

    bobs = (shared / "storage" / "bob" / metadata_name("box")).read_bytes()
    forged = bobs.replace(f"user{BOB}".encode(), f"user{ALICE}".encode())
    for planted in (bobs, forged, before.replace(b'"running": false', b'"running": true')):
        assert as_user(BOB, lambda data=planted: document.write_bytes(data))[0] == "result"
        assert read(ALICE, "alice")[0] == "SignatureError"
    document.write_bytes(before)
    assert read(ALICE, "alice") == ["result", f"user{ALICE}"]
    assert delete(ALICE, "alice")[0] == "result"
