"""A sandbox is restored only from documents, manifests and images that its user wrote."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import google_crc32c
import psutil
import pytest
from value_program import start_program, tell

from sandbox_provisioner.config import GCSConfig
from sandbox_provisioner.errors import CorruptObjectError, SandboxError
from sandbox_provisioner.errors.signature import SignatureError
from sandbox_provisioner.gvisor.bundle import BundleSpec
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.kernel.env_filter import filtered
from sandbox_provisioner.lock.base import Owner
from sandbox_provisioner.persistence import metadata, records
from sandbox_provisioner.persistence.backends import Stores, open_stores
from sandbox_provisioner.persistence.names import metadata_name, snapshot_prefix
from sandbox_provisioner.persistence.snapshots import MANIFEST
from sandbox_provisioner.sandbox import detached
from sandbox_provisioner.sandbox.handle import SandboxHandle
from sandbox_provisioner.sandbox.registry import PersistentSandboxRegistry
from sandbox_provisioner.storage.local import LocalStore

pytestmark = pytest.mark.runsc

KEYS = {"ours": "k" * 32, "theirs": "t" * 32}
BOX = metadata_name("box")
Open = Callable[..., Awaitable[SandboxHandle]]


def stores_of(folder: Path, key: str = "ours", machine: str = "here", trust: bool = False) -> Stores:
    """Return the stores of a user with this key. All share one storage; each ``machine`` has its own data folder."""
    own = folder / machine
    return open_stores(GCSConfig(folder / "storage", own=own, signing_key=KEYS[key], trust_storage=trust))


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    return stores_of(tmp_path)


@pytest.fixture
async def saved(spec: BundleSpec, runsc: Runsc, stores: Stores) -> None:
    """Save two sandboxes, ``box`` and ``other``, and a snapshot of ``box``."""
    for name, value in (("box", "mine"), ("other", "other's")):
        handle = await SandboxHandle.create_persistent(name, spec, runsc, stores, Owner.here("first"))
        await handle.start()
        await start_program(handle)
        await tell(handle, f"set {value}")
        await handle.save_snapshot("files")
        await handle.save()
        await handle.release()


@pytest.fixture
async def attach(spec: BundleSpec, runsc: Runsc, stores: Stores) -> AsyncIterator[Open]:
    made: list[SandboxHandle] = []

    async def attach(where: Stores = stores, name: str = "box") -> SandboxHandle:
        made.append(await SandboxHandle.attach_persistent(name, spec, runsc, where, Owner.here("second")))
        return made[-1]

    yield attach
    for handle in made:
        await handle.release()


def unsign(data: bytes) -> bytes:
    """Return a document in the format of versions that did not sign documents."""
    document = json.loads(data)
    del document["signature"]
    return json.dumps(document | {"schema": 2}, indent=1).encode()


async def refused(attach: Open, stores: Stores, match: str) -> None:
    """Check that no operation reads or changes the sandbox, and that its document stays unchanged."""
    before = stores.metadata.read(BOX)
    owner = Owner.here("second")
    for attempt in (
        lambda: attach(stores),
        lambda: detached.revert_persistent(stores, "box", owner),
        lambda: detached.drop_savepoint(stores, "box", "a", owner),
        lambda: detached.fork_persistent(stores, "box", metadata.GCSSandboxMetadata("new", "", ""), owner),
    ):
        with pytest.raises(SignatureError, match=match):
            await attempt()
    for look in (detached.describe_persistent, detached.summarise_persistent):
        with pytest.raises(SignatureError, match=match):
            look(stores, "box")
    assert stores.metadata.read(BOX) == before


async def test_changed_document_is_refused(saved: None, attach: Open, stores: Stores) -> None:
    data, _ = stores.metadata.read(BOX)
    for changed in (data.replace(b'"network": "none"', b'"network": "host"'), data + b"\n"):
        assert changed != data
        stores.metadata.write(BOX, changed)
        await refused(attach, stores, r"does not match its signature and was refused.*Restore the original")
    stores.metadata.write(BOX, data)
    handle = await attach()
    await handle.restore()
    assert await tell(handle, "get") == "mine"


async def test_oversized_document_is_not_read(saved: None, attach: Open, stores: Stores) -> None:
    path = Path(stores.metadata.where) / BOX
    data = path.read_bytes()
    os.truncate(path, 1 << 33)
    before = psutil.Process().memory_info().rss
    with pytest.raises(CorruptObjectError, match="8,589,934,592 bytes"):
        await attach()
    with pytest.raises(CorruptObjectError, match="8,589,934,592 bytes"):
        detached.describe_persistent(stores, "box")
    assert psutil.Process().memory_info().rss - before < 100 << 20
    path.write_bytes(data)
    handle = await attach()
    await handle.restore()
    assert await tell(handle, "get") == "mine"


async def test_swapped_documents_are_refused(saved: None, attach: Open, stores: Stores) -> None:
    other, _ = stores.metadata.read(metadata_name("other"))
    for swapped in (other, other.replace(b'"sandbox_id": "other"', b'"sandbox_id": "box"')):
        stores.metadata.write(BOX, swapped)
        await refused(attach, stores, "does not match its signature")


async def test_foreign_document_is_refused_with_the_variable(
    saved: None, attach: Open, stores: Stores, tmp_path: Path
) -> None:
    theirs = stores_of(tmp_path, "theirs").signer
    data, _ = stores.metadata.read(BOX)
    stores.metadata.write(BOX, theirs.sign(BOX, unsign(data)))
    await refused(attach, stores, r"signed with the key [0-9a-f]{16} .* set SANDBOX_SIGNING_KEY to it on all servers")
    with pytest.raises(SignatureError):
        await detached.destroy_persistent(stores, "box", Owner.here("second"))


@pytest.mark.parametrize("known", [True, False], ids=["in-registry", "unknown"])
async def test_stripped_signature_is_refused(
    saved: None, attach: Open, stores: Stores, tmp_path: Path, known: bool
) -> None:
    if known:
        PersistentSandboxRegistry(tmp_path / "here" / "registry").record("box", stores)
    data, _ = stores.metadata.read(BOX)
    stores.metadata.write(BOX, unsign(data))
    await refused(attach, stores, r"is not signed and was refused.*SANDBOX_TRUST_STORAGE=1")


async def test_earlier_document_is_accepted_unsigned_once(
    saved: None, attach: Open, stores: Stores, tmp_path: Path
) -> None:
    registry = PersistentSandboxRegistry(tmp_path / "here" / "registry")
    record = registry.record("box", stores)
    earlier = json.loads(records.encode(record))
    del earlier["signed"]
    LocalStore(tmp_path / "here" / "registry").write(f"{record.id}.json", json.dumps(earlier).encode())
    manifest = snapshot_prefix("box", "files") + MANIFEST
    assert stores.snapshots is not None
    for store, name in ((stores.metadata, BOX), (stores.snapshots, manifest)):
        store.write(name, unsign(store.read(name)[0]))
    unsigned, _ = stores.metadata.read(BOX)

    assert detached.describe_persistent(stores, "box").checkpoint
    handle = await attach()
    await handle.restore()
    assert await tell(handle, "get") == "mine"
    await handle.load_snapshot("box", "files")
    await handle.release()

    assert registry.load(record.id).signed
    assert b'"signature"' in stores.snapshots.read(manifest)[0]
    stores.metadata.write(BOX, unsigned)
    await refused(attach, stores, "is not signed")


async def test_trusted_storage_is_signed_again(saved: None, attach: Open, stores: Stores, tmp_path: Path) -> None:
    data, _ = stores.metadata.read(BOX)
    stores.metadata.write(BOX, stores_of(tmp_path, "theirs").signer.sign(BOX, unsign(data)))
    await (await attach(stores_of(tmp_path, trust=True))).release()
    handle = await attach()
    await handle.restore()
    assert await tell(handle, "get") == "mine"


async def test_changed_manifest_is_refused(saved: None, attach: Open, stores: Stores) -> None:
    assert stores.snapshots is not None
    names = {name: snapshot_prefix(name, "files") + MANIFEST for name in ("box", "other")}
    data, _ = stores.snapshots.read(names["box"])
    handle = await attach()
    await handle.restore()
    for changed in (unsign(data), data.replace(b'"size"', b' "size"'), stores.snapshots.read(names["other"])[0]):
        stores.snapshots.write(names["box"], changed)
        with pytest.raises(SignatureError):
            await handle.load_snapshot("box", "files")


def forge(data: bytes, wanted: bytes) -> bytes:
    """Return different bytes with the CRC32C of ``data``. A CRC is linear, so four free bytes are enough."""
    target = google_crc32c.value(data)
    base = google_crc32c.value(wanted[:-4] + bytes(4)) ^ target
    rows = []
    for bit in range(32):
        free = (1 << bit).to_bytes(4, "little")
        rows.append((google_crc32c.value(wanted[:-4] + free) ^ google_crc32c.value(wanted[:-4] + bytes(4)), 1 << bit))
    solution = 0
    for bit in reversed(range(32)):
        pivot = next(((row, mask) for row, mask in rows if row >> bit & 1), None)
        if pivot is None:
            continue
        rows.remove(pivot)
        rows = [(row ^ pivot[0], mask ^ pivot[1]) if row >> bit & 1 else (row, mask) for row, mask in rows]
        if base >> bit & 1:
            base ^= pivot[0]
            solution ^= pivot[1]
    forged = wanted[:-4] + solution.to_bytes(4, "little")
    assert google_crc32c.value(forged) == target
    return forged


async def test_changed_image_with_the_same_checksum_is_refused(saved: None, attach: Open, stores: Stores) -> None:
    document = detached.describe_persistent(stores, "box")
    assert document.checkpoint is not None
    artifact = document.checkpoint.artifact
    image = Path(stores.metadata.where, artifact.name, "pages.img")
    data, first = image.read_bytes(), artifact.files["pages.img"].part_size
    changed = bytearray(data[:first])
    changed[4096:4100] = bytes(byte ^ 255 for byte in changed[4096:4100])
    image.write_bytes(forge(data[:first], bytes(changed)) + data[first:])
    assert [google_crc32c.value(image.read_bytes()[:first])] == list(artifact.files["pages.img"].parts[:1])
    handle = await attach()
    with pytest.raises(CorruptObjectError, match=r"pages\.img .* wrong checksum"):
        await handle.restore()
    await handle.release()
    image.write_bytes(data)
    handle = await attach()
    await handle.restore()
    assert await tell(handle, "get") == "mine"


async def test_old_record_without_digests_is_restored(saved: None, attach: Open, stores: Stores) -> None:
    document = detached.describe_persistent(stores, "box")
    assert document.checkpoint is not None
    artifact = document.checkpoint.artifact
    files = {name: replace(record, digests=()) for name, record in artifact.files.items()}
    checkpoint = replace(document.checkpoint, artifact=replace(artifact, files=files))
    stores.metadata.write(BOX, stores.signer.sign(BOX, metadata.encode(replace(document, checkpoint=checkpoint))))
    handle = await attach()
    await handle.restore()
    assert await tell(handle, "get") == "mine"


async def test_running_sandbox_keeps_state_after_document_change(
    spec: BundleSpec, runsc: Runsc, stores: Stores
) -> None:
    handle = await SandboxHandle.create_persistent("box", spec, runsc, stores, Owner.here("first"))
    try:
        await handle.start()
        await start_program(handle)
        await tell(handle, "set mine")
        data, _ = stores.metadata.read(BOX)
        stores.metadata.write(BOX, data + b"\n")
        with pytest.raises(SignatureError):
            await handle.save()
        assert await tell(handle, "get") == "mine"
        stores.metadata.write(BOX, data)
        await handle.save()
        await handle.restore()
        assert await tell(handle, "get") == "mine"
    finally:
        await handle.release()


def test_key_is_created_once_for_this_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SANDBOX_SIGNING_KEY")
    config = GCSConfig(tmp_path / "storage", own=tmp_path / "own")
    signed = open_stores(config).signer.sign("a", b"{}")
    key = tmp_path / "own" / "key"
    assert (key.stat().st_mode & 0o777, key.stat().st_uid) == (0o600, os.geteuid())
    assert open_stores(config).signer.sign("a", b"{}") == signed
    copied = GCSConfig(tmp_path / "storage", own=tmp_path / "elsewhere", signing_key=key.read_text().strip())
    open_stores(copied).signer.verify("a", "there", "box", signed)
    with pytest.raises(SignatureError):
        open_stores(copied).signer.verify("b", "there", "box", signed)

    # A server whose key is set by the variable still accepts documents that the key file has signed.
    replaced = open_stores(GCSConfig(tmp_path / "storage", own=tmp_path / "own", signing_key=KEYS["ours"])).signer
    replaced.verify("a", "there", "box", signed)
    with pytest.raises(SignatureError, match="signed with the key"):
        open_stores(config).signer.verify("a", "there", "box", replaced.sign("a", b"{}"))

    key.chmod(0o644)
    assert open_stores(config).signer.sign("a", b"{}") == signed
    assert key.stat().st_mode & 0o777 == 0o600
    for content in (b"", b"short", b"\xff" * 64):
        key.write_bytes(content)
        with pytest.raises(SandboxError, match=r"own/key, which signs stored documents, cannot be used"):
            open_stores(config).signer.sign("a", b"{}")
    key.unlink()
    key.symlink_to("/etc/passwd")
    with pytest.raises(SandboxError):
        open_stores(config).signer.sign("a", b"{}")


def test_key_is_not_passed_to_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_SIGNING_KEY", KEYS["ours"])
    assert KEYS["ours"] not in filtered(dict(os.environ), ["SANDBOX_SIGNING_KEY"]).values()


@pytest.mark.parametrize("key", ["short", "k" * 31])
def test_error_does_not_show_refused_short_key(key: str, tmp_path: Path) -> None:
    with pytest.raises(SandboxError) as refusal:
        GCSConfig.from_environment(tmp_path, {"SANDBOX_SIGNING_KEY": key})
    assert f"SANDBOX_SIGNING_KEY has {len(key)} characters" in str(refusal.value)
    assert key not in str(refusal.value)
    assert KEYS["ours"] not in repr(GCSConfig(tmp_path, signing_key=KEYS["ours"]))
