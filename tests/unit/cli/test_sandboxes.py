"""Test ``jupyter sandbox`` without a running server: with storage alone."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from documents import put_document
from gcs_server import GCS
from machines import empty_machine

from sandbox_provisioner.cli.app import main
from sandbox_provisioner.cli.options import span
from sandbox_provisioner.cli.output import ago, size
from sandbox_provisioner.errors.kinds import ExitStatus
from sandbox_provisioner.gvisor.bundle import BundleSpec
from sandbox_provisioner.lock.base import Owner
from sandbox_provisioner.persistence import names, records
from sandbox_provisioner.persistence.metadata import Checkpoint, GCSArtifact, GCSSandboxMetadata, Tenancy
from sandbox_provisioner.persistence.records import SandboxRecord
from sandbox_provisioner.persistence.snapshots import MANIFEST
from sandbox_provisioner.sandbox import detached
from sandbox_provisioner.sandbox.user_sandboxes import Persistence
from sandbox_provisioner.setup import doctor
from sandbox_provisioner.storage.local import LocalStore

JUST_NOW = re.compile("just now|[0-9]+ seconds? ago")
COMMAND = str(Path(sys.executable).parent / "jupyter-sandbox")
Keep = Callable[..., SandboxRecord]
Ask = Callable[..., Any]


@pytest.fixture(autouse=True)
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the data folder of a machine without settings and stored sandboxes."""
    for name in [*os.environ]:
        if name.startswith(("SANDBOX_", "FILESYSTEM_")) and name != "SANDBOX_RUNTIME_DIR":
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return empty_machine(monkeypatch, tmp_path)


@pytest.fixture
def keep(tmp_path: Path, data: Path) -> Keep:
    """Return a function that stores a sandbox, with a checkpoint of ``saved`` bytes if given."""

    def make(
        days: float = 0, saved: int | None = 2000, running: bool = False, savepoints: tuple[str, ...] = (), **facts: Any
    ) -> SandboxRecord:
        kept = Persistence.open()
        record = kept.registry.allocate(kept.stores, **facts)
        record = replace(record, last_used=datetime.now(UTC) - timedelta(days=days))
        LocalStore(data / "sandbox" / "registry").write(f"{record.id}.json", records.encode(record))
        document = GCSSandboxMetadata(
            sandbox_id=record.sandbox_id,
            created=record.created.isoformat(),
            last_used=record.last_used.isoformat(),
            tenancy=Tenancy(1, "a server", running),
            checkpoint=None if saved is None else checkpoint(kept, record, tmp_path / "image", saved),
            savepoints={name: checkpoint(kept, record, tmp_path / "image", 300, name) for name in savepoints},
        )
        put_document(kept.stores, document)
        return record

    return make


def checkpoint(kept: Persistence, record: SandboxRecord, file: Path, length: int, below: str = "first") -> Checkpoint:
    file.write_bytes(b"x" * length)
    name = f"{names.checkpoints_prefix(record.sandbox_id)}{below}/"
    assert kept.stores.checkpoints is not None
    stored = kept.stores.checkpoints.upload(file, f"{name}pages.img")
    artifact = GCSArtifact(name, "2026-01-02T03:04:05+00:00", {"pages.img": stored})
    spec = BundleSpec("/usr/bin/python3", "/home/tester", "tester")
    return Checkpoint(artifact, "runsc", "", "systrap", "x86_64", (), spec, {}, {}, 0.5)


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Return a function that runs a command, which must succeed, and returns its JSON output."""

    def run(*arguments: str) -> Any:
        assert main([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def objects(data: Path) -> list[str]:
    """Return the names of all stored files."""
    return [info.name for info in LocalStore(data / "sandbox" / "storage").list("")]


def test_empty_list(capsys: pytest.CaptureFixture[str], ask: Ask) -> None:
    assert main(["list"]) == 0
    assert capsys.readouterr().out == "No sandboxes.\n"
    assert ask("list") == {"sandboxes": [], "unreadable": []}


def test_list_is_sorted_by_last_use(keep: Keep, capsys: pytest.CaptureFixture[str]) -> None:
    older = keep(days=3, saved=1_234_567, kernel_name="bash-sandbox", notebook_path="/home/a/b.ipynb")
    newer = keep(saved=None, kernel_name="python3-sandbox", notebook_path="/home/a/n.ipynb")
    assert main(["list"]) == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    header, first, second = ([cell.strip() for cell in line if cell.strip()] for line in lines)
    assert header == ["ID", "STATE", "SIZE", "USED", "KERNEL", "NOTEBOOK"]
    assert first[:3] + first[4:] == [str(newer.id)[:8], "empty", "0 B", "python3-sandbox", "/home/a/n.ipynb"]
    assert JUST_NOW.fullmatch(first[3])
    assert second == [str(older.id)[:8], "saved", "1.2 MB", "3 days ago", "bash-sandbox", "/home/a/b.ipynb"]


def test_list_as_json(keep: Keep, ask: Ask) -> None:
    record = keep(kernel_name="python3-sandbox", notebook_path="/n.ipynb", settings={"network": "none"})
    (shown,) = ask("list")["sandboxes"]
    assert shown == {
        "id": str(record.id),
        "sandbox_id": record.sandbox_id,
        "state": "saved",
        "persistent": True,
        "kernel_id": None,
        "kernel_name": "python3-sandbox",
        "notebook_path": "/n.ipynb",
        "created": record.created.isoformat(),
        "last_used": record.last_used.isoformat(),
        "size": 2000,
        "checkpoint": {"created": "2026-01-02T03:04:05+00:00", "size": 2000},
        "previous": None,
        "savepoints": [],
        "snapshots": [],
        "problem": None,
        "busy": False,
        "busy_reasons": [],
        "files": None,
        "lost_since": None,
        "storage": "local",
        "where": record.where,
        "settings": {"network": "none"},
    }
    assert ask("show", str(record.id)[:6]) == {"sandboxes": [shown]}


def test_complete_snapshots_are_counted_and_deleted(keep: Keep, ask: Ask, data: Path) -> None:
    record = keep()
    store = Persistence.open().stores.snapshots
    assert store is not None
    for name, file in (("good", MANIFEST), ("good", "files.tar"), ("unfinished", "files.tar")):
        store.write(f"{names.snapshot_prefix(record.sandbox_id, name)}{file}", b"x" * 500)
    store.write(f"{names.prefix(record.sandbox_id)}snapshots/no.id/{MANIFEST}", b"x" * 500)
    (shown,) = ask("list")["sandboxes"]
    assert shown["checkpoint"]["size"] == 2000
    assert [(snapshot["name"], snapshot["size"]) for snapshot in shown["snapshots"]] == [("good", 1000)]
    assert shown["size"] == 3000
    assert ask("delete", str(record.id))["freed"] == 4000
    assert objects(data) == []


def test_list_shows_states(
    keep: Keep, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states = {str(keep(running=True).id): "running", str(keep().id): "saved"}
    kept = Persistence.open()
    states[str(kept.registry.allocate(kept.stores).id)] = "gone"
    damaged = kept.registry.allocate(kept.stores)
    name = names.metadata_name(damaged.sandbox_id)
    kept.stores.metadata.write(name, kept.stores.signer.sign(name, b"{"))
    states[str(damaged.id)] = "unknown"
    monkeypatch.setenv("SANDBOX_STORAGE_DIR", str(tmp_path / "other"))
    elsewhere = Persistence.open()
    states[str(elsewhere.registry.allocate(elsewhere.stores).id)] = "elsewhere"
    monkeypatch.delenv("SANDBOX_STORAGE_DIR")
    assert {shown["id"]: shown["state"] for shown in ask("list")["sandboxes"]} == states
    assert main(["list"]) == 0
    printed = capsys.readouterr().err
    assert str(tmp_path / "other") in printed and "cannot be understood" in printed


def test_unreadable_records_are_reported(keep: Keep, ask: Ask, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = keep()
    broken = data / "sandbox" / "registry" / "5f0c6b1e-8c8e-4a1c-9d3b-3d1f0a1b2c3d.json"
    broken.write_text("{")
    (broken.parent / "\x1b[2J").touch()
    assert any(str(broken) in message for message in ask("list")["unreadable"])
    for arguments in (["list"], ["prune", "--older-than", "1d"]):
        assert main(arguments) == 0
        printed = capsys.readouterr().err
        assert str(broken) in printed and "?[2J" in printed and "\x1b" not in printed
    assert main(["delete", "5f0c6b1e"]) == 1
    assert str(broken) in capsys.readouterr().err
    assert broken.exists()
    assert [shown["id"] for shown in ask("list")["sandboxes"]] == [str(record.id)]


def test_show(keep: Keep, capsys: pytest.CaptureFixture[str]) -> None:
    record = keep(kernel_name="python3-sandbox", notebook_path="/n.ipynb", settings={"network": "none"})
    assert main(["show", str(record.id)]) == 0
    printed = capsys.readouterr().out
    for words in (
        str(record.id),
        record.where,
        "python3-sandbox",
        "/n.ipynb",
        '{"network": "none"}',
        "2.0 kB",
    ):
        assert words in printed
    assert JUST_NOW.search(printed)


def test_revert(keep: Keep, ask: Ask, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record = keep()
    kept = Persistence.open()
    assert main(["revert", str(record.id)]) == 4
    assert "has no previous checkpoint" in capsys.readouterr().err
    document = kept.describe(record)
    assert document.checkpoint is not None
    older = replace(document.checkpoint, seconds=7.0)
    put_document(kept.stores, replace(document, previous=older))
    assert ask("revert", str(record.id)) == {"reverted": {str(record.id): older.created}}
    reverted = kept.describe(record)
    assert (reverted.checkpoint, reverted.previous) == (older, None)


def test_reset_keeps_the_checkpoint_as_savepoint(keep: Keep, ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    record = keep()
    kept = Persistence.open()
    before = kept.describe(record)
    assert ask("reset", str(record.id)) == {"reset": [str(record.id)]}
    document = kept.describe(record)
    (name,) = set(document.savepoints) - set(before.savepoints)
    assert name.startswith("before-reset-")
    assert (document.checkpoint, document.savepoints[name]) == (None, before.checkpoint)
    assert main(["reset", str(record.id)]) == 0
    assert capsys.readouterr().out.endswith("its next kernel is new.\n")
    assert set(kept.describe(record).savepoints) == set(document.savepoints)


def test_list_filters(keep: Keep, ask: Ask, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = keep(days=3, notebook_path=str(tmp_path / "a.ipynb"))
    empty = keep(saved=None, notebook_path=str(tmp_path / "b.ipynb"))

    def listed(*options: str) -> list[str]:
        return [shown["id"] for shown in ask("list", *options)["sandboxes"]]

    assert listed() == [str(empty.id), str(saved.id)]
    assert listed("--state", "saved") == [str(saved.id)]
    assert listed("--notebook", "b.ipynb") == listed("--notebook", str(tmp_path / "b.ipynb")) == [str(empty.id)]
    assert listed("--older-than", "2d") == [str(saved.id)]
    assert main(["list", "--older-than", "9d"]) == 0
    assert capsys.readouterr().out == "No matching sandboxes.\n"
    with pytest.raises(SystemExit):
        main(["list", "--state", "lost"])


def test_find_by_id_prefix_or_notebook(
    keep: Keep, ask: Ask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "a.ipynb")
    record, other = keep(notebook_path=path, kernel_name="one"), keep()
    for wanted in (str(record.id), str(record.id)[:13], str(record.id).upper()[:13], "a.ipynb", path):
        assert [shown["id"] for shown in ask("show", wanted)["sandboxes"]] == [str(record.id)]
    twin = keep(notebook_path=path, kernel_name="two")
    assert main(["show", "a.ipynb"]) == 2
    printed = capsys.readouterr().err
    assert "matches 2 sandboxes" in printed and str(record.id) in printed and str(twin.id) in printed
    assert main(["show", ""]) == main(["show", "nothing.ipynb"]) == 3
    assert str(other.id) in capsys.readouterr().err


def test_list_and_delete_savepoints(keep: Keep, ask: Ask, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = keep(savepoints=("before", "after"))
    (shown,) = ask("show", str(record.id))["sandboxes"]
    assert shown["size"] == 2600
    assert [item["name"] for item in shown["savepoints"]] == ["before", "after"]
    assert ask("savepoint", str(record.id)) == {"items": shown["savepoints"]}
    assert main(["savepoint", str(record.id)]) == 0
    assert "before" in capsys.readouterr().out
    assert main(["savepoint", str(record.id), "--delete", "before"]) == 0
    assert capsys.readouterr().out == "Deleted savepoint before.\n"
    assert [item["name"] for item in ask("savepoint", str(record.id))["items"]] == ["after"]
    assert not any("/before/" in name for name in objects(data))
    assert main(["savepoint", str(record.id), "--delete", "before"]) == 3
    assert "Its savepoints: after." in capsys.readouterr().err
    assert ask("savepoint", str(record.id), "--delete", "after") == {"deleted": "after"}
    assert main(["savepoint", str(record.id)]) == 0
    assert capsys.readouterr().out == "No savepoints.\n"


def test_list_and_delete_snapshots(keep: Keep, ask: Ask, data: Path) -> None:
    record = keep()
    store = Persistence.open().stores.snapshots
    assert store is not None
    for file in (MANIFEST, "files.tar"):
        store.write(f"{names.snapshot_prefix(record.sandbox_id, 'good')}{file}", b"x" * 500)
    assert [item["name"] for item in ask("snapshot", str(record.id))["items"]] == ["good"]
    assert ask("snapshot", str(record.id), "--delete", "good") == {"deleted": "good"}
    assert ask("snapshot", str(record.id)) == {"items": []}
    assert not any("/snapshots/" in name for name in objects(data))
    assert main(["snapshot", str(record.id), "--delete", "good"]) == 3


def test_fork_in_storage(keep: Keep, ask: Ask, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.ipynb").write_text("cells")
    record = keep(notebook_path=str(tmp_path / "a.ipynb"), kernel_name="k", savepoints=("before",))
    fork = ask("fork", "a.ipynb", "--notebook", "b.ipynb")
    assert fork["id"] != str(record.id)
    assert (fork["state"], fork["kernel_name"], fork["size"]) == ("saved", "k", 2000)
    assert fork["notebook_path"] == str(tmp_path / "b.ipynb")
    assert (tmp_path / "b.ipynb").read_text() == "cells"
    early = ask("fork", "a.ipynb", "--savepoint", "before")
    assert (early["size"], early["notebook_path"]) == (300, None)
    assert len(ask("list")["sandboxes"]) == 3
    assert main(["fork", "a.ipynb", "--notebook", "b.ipynb"]) == 4
    assert f"{tmp_path / 'b.ipynb'} already has the sandbox {fork['id']}." in capsys.readouterr().err
    assert main(["fork", "a.ipynb", "--savepoint", "never"]) == 3
    assert main(["fork", "a.ipynb", "--notebook", "no/such/folder.ipynb"]) == 1
    assert "no/such/folder.ipynb" in capsys.readouterr().err
    assert len(ask("list")["sandboxes"]) == 3


@pytest.mark.parametrize(
    "arguments",
    [["wake"], ["restart"], ["exec", "--", "ls"], ["rewind", "name"], ["savepoint", "new"], ["snapshot", "new"]],
)
def test_commands_that_need_a_server_without_one(
    arguments: list[str], keep: Keep, capsys: pytest.CaptureFixture[str]
) -> None:
    record = keep(savepoints=("name",))
    command, *rest = arguments
    assert main([command, str(record.id), *rest]) == 5
    printed = capsys.readouterr().err
    assert str(record.id) in printed and "Start one with `jupyter lab`" in printed


def test_hibernate_saved_sandbox_does_nothing(keep: Keep, ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    record = keep()
    assert [shown["state"] for shown in ask("hibernate", str(record.id))["sandboxes"]] == ["saved"]
    running = keep(running=True)
    assert main(["hibernate", str(running.id)]) == 5
    assert "The command needs a running Jupyter Server" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["exec", "ID"], ["savepoint", "ID", "bad name"], ["savepoint", "ID", "new", "--delete", "old"],
     ["fork", "ID", "--savepoint", "../x"], ["rewind", "ID"], ["list", "--server", "http://x", "--no-server"]],
)  # fmt: skip
def test_invalid_arguments_show_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert f"usage: jupyter sandbox {arguments[0]}" in capsys.readouterr().err


def test_unreachable_named_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--server", "http://127.0.0.1:1/"]) == 5
    assert "http://127.0.0.1:1/ does not answer" in capsys.readouterr().err
    assert main(["list", "--server", "nonsense"]) == 5
    assert "'nonsense' is not the address of a Jupyter Server" in capsys.readouterr().err


def completions(line: str) -> list[str]:
    """Return the completions of a command line."""
    with tempfile.NamedTemporaryFile() as answer:
        environment = {
            **os.environ,
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_STDOUT_FILENAME": answer.name,
            "_ARGCOMPLETE_IFS": "\n",
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
        }
        subprocess.run([COMMAND], env=environment, check=True)
        return [word.strip() for word in Path(answer.name).read_text().split("\n")]


def test_shell_completion(keep: Keep) -> None:
    record = keep(savepoints=("before", "after"))
    assert completions("jupyter-sandbox hib") == ["hibernate"]
    assert completions("jupyter-sandbox list --st") == ["--state"]
    assert "saved" in completions("jupyter-sandbox list --state ")
    assert completions(f"jupyter-sandbox show {str(record.id)[:4]}") == [str(record.id)]
    assert completions(f"jupyter-sandbox rewind {record.id} bef") == ["before"]


def test_delete_reports_freed_bytes(keep: Keep, ask: Ask, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = keep(kernel_name="python3-sandbox", notebook_path="/n.ipynb")
    other = keep()
    assert main(["delete", str(record.id)[:8]]) == 0
    printed = capsys.readouterr().out
    assert f"Deleted {record.id} (python3-sandbox, /n.ipynb): 2.0 kB" in printed
    assert "1 sandbox deleted, 2.0 kB freed." in printed
    assert [shown["id"] for shown in ask("list")["sandboxes"]] == [str(other.id)]
    assert all(str(other.id) in name for name in objects(data)) and objects(data)
    deleted = [{"id": str(other.id), "freed": 2000}]
    assert ask("delete", str(other.id), str(other.id)) == {"deleted": deleted, "kept": [], "freed": 2000}
    assert objects(data) == []


def lose_key(data: Path) -> None:
    """Replace the user's key."""
    (data / "sandbox" / "key").write_text("b" * 64)


def test_delete_unverified_after_loss_of_key(keep: Keep, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = keep()
    lose_key(data)
    assert main(["delete", str(record.id)]) == 5
    printed = capsys.readouterr().err
    assert "SANDBOX_SIGNING_KEY" in printed
    assert "jupyter sandbox doctor" in printed
    assert objects(data) != []
    assert main(["delete", "--unverified", str(record.id)]) == 0
    assert objects(data) == []
    assert Persistence.open().registry.list().records == []


def test_prune_unverified_after_loss_of_key(
    keep: Keep, data: Path, ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = keep(days=40), keep()
    lose_key(data)
    assert main(["prune", "--older-than", "30d"]) == 5
    capsys.readouterr()
    assert ask("list")["sandboxes"][1]["id"] == str(old.id)
    assert main(["prune", "--older-than", "30d", "--unverified"]) == 0
    capsys.readouterr()
    assert [shown["id"] for shown in ask("list")["sandboxes"]] == [str(new.id)]


@pytest.mark.parametrize("key", ["b" * 64, "short"])
def test_dry_run_shows_refusals(keep: Keep, data: Path, capsys: pytest.CaptureFixture[str], key: str) -> None:
    old = keep(days=40)
    before = objects(data)
    (data / "sandbox" / "key").write_text(key)
    dry = ["prune", "--older-than", "30d", "--dry-run"]
    assert main(dry) == 5
    printed = capsys.readouterr()
    assert f"Would not delete {old.id}, unknown; the reason is below" in printed.out
    assert "0 sandboxes, 0 B in total. Nothing was deleted." in printed.out
    assert main([*dry, "--json"]) == 5
    told = json.loads(capsys.readouterr().out)
    assert (told["would_delete"], [each["id"] for each in told["would_keep"]]) == ([], [str(old.id)])
    assert main(dry[:-1]) == 5
    refused = capsys.readouterr().err
    assert refused == printed.err
    assert objects(data) == before


def test_dry_run_unverified(keep: Keep, data: Path, ask: Ask) -> None:
    old = keep(days=40)
    lose_key(data)
    told = ask("prune", "--older-than", "30d", "--dry-run", "--unverified")
    assert ([each["id"] for each in told["would_delete"]], told["would_keep"]) == ([str(old.id)], [])
    assert ask("prune", "--older-than", "30d", "--unverified")["deleted"][0]["id"] == str(old.id)


async def test_dry_run_with_sandbox_in_use(keep: Keep, capsys: pytest.CaptureFixture[str]) -> None:
    old = keep(days=40)
    owner = Owner("lab-7", "somewhere", 7, "ada", "n")
    lease = await Persistence.open().stores.leases.acquire(names.lock_name(old.sandbox_id), owner)
    assert await asyncio.to_thread(main, ["prune", "--older-than", "30d", "--dry-run"]) == 4
    assert "is in use by" in capsys.readouterr().err
    await lease.release()


@pytest.mark.parametrize("word", ["savepoint", "snapshot"])
def test_unread_savepoints_are_not_reported_as_missing(
    keep: Keep, data: Path, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    record = keep(savepoints=("clean",))
    lose_key(data)
    for options in ([], ["--json"]):
        assert main([word, str(record.id), *options]) == 5
        printed = capsys.readouterr()
        assert printed.out == ""
        assert "is signed with the key" in printed.err


@pytest.mark.parametrize("signed", [True, False])
def test_unsigned_sandbox_of_another_user_is_not_deleted(
    keep: Keep, data: Path, capsys: pytest.CaptureFixture[str], signed: bool
) -> None:
    record = keep()
    name = names.metadata_name(record.sandbox_id)
    kept = Persistence.open()
    document = {**json.loads(kept.stores.metadata.read(name)[0]), "user": "alice"}
    del document["signature"]
    written = json.dumps(document).encode()
    kept.stores.metadata.write(name, kept.stores.signer.sign(name, written) if signed else written)
    lose_key(data)
    before = objects(data)
    assert main(["delete", "--unverified", str(record.id)]) == 5
    assert "it names the user 'alice'" in capsys.readouterr().err
    assert objects(data) == before


@pytest.mark.user
def test_doctor_reports_unverified_sandboxes(keep: Keep, data: Path) -> None:
    assert doctor.check_saved() == []
    records = [keep() for _ in range(3)]
    (sound,) = doctor.check_saved()
    assert sound.ok
    kept = Persistence.open()
    name = names.metadata_name(records[0].sandbox_id)
    kept.stores.metadata.write(name, kept.stores.metadata.read(name)[0] + b" ")
    (changed,) = doctor.check_saved()
    assert "1 of 3 are not proven to be yours: the record of 1 was changed after it was signed" in changed.finding
    assert str(records[0].id) in changed.finding
    lose_key(data)
    (lost,) = doctor.check_saved()
    assert not lost.ok
    assert not lost.required
    assert "3 of 3 are not proven to be yours: the record of 3 is signed with the key" in lost.finding
    for helps in ("SANDBOX_SIGNING_KEY", "SANDBOX_TRUST_STORAGE=1", "jupyter sandbox delete --unverified ID"):
        assert helps in lost.remedy
    (data / "sandbox" / "key").unlink()
    (missing,) = doctor.check_saved()
    ids = ", ".join(str(record.id) for record in kept.registry.list().records)
    assert missing.finding == f"the key that signed the records of 3 sandboxes is missing. Sandboxes: {ids}"
    assert not (data / "sandbox" / "key").exists()


async def open_and_sign(record: SandboxRecord) -> None:
    """Sign a sandbox's document with the current key, like a server that opens it."""
    stores = Persistence.open().stores
    async with detached.borrowed(record.sandbox_id, stores, Owner.here("a test")) as book:
        await detached.sign(book, stores)


@pytest.mark.user
def test_doctor_reports_unusable_key(keep: Keep, data: Path) -> None:
    key = data / "sandbox" / "key"
    records = [keep() for _ in range(2)]
    key.write_text("short")
    (unusable,) = doctor.check_saved()
    assert not unusable.ok
    assert unusable.required
    assert f"The key {key}, which signs stored documents, cannot be used: it has 5 characters" in unusable.finding
    for record in records:
        assert str(record.id) in unusable.finding
    for helps in ("backup", "remove the file", "SANDBOX_TRUST_STORAGE=1", "jupyter sandbox delete --unverified ID"):
        assert helps in unusable.remedy


@pytest.mark.user
def test_doctor_reports_unusable_key_before_first_save(keep: Keep, data: Path) -> None:
    record = keep()
    assert main(["delete", str(record.id)]) == 0
    assert doctor.check_saved() == []
    (data / "sandbox" / "key").write_text("short")
    (unusable,) = doctor.check_saved()
    assert not unusable.ok


def test_doctor_remedy_for_unusable_key_works(keep: Keep, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deleted, kept = keep(), keep()
    key = data / "sandbox" / "key"
    key.write_text("short")
    assert main(["delete", "--unverified", str(deleted.id)]) == 5  # the remedy says to delete the file first
    key.unlink()
    assert main(["delete", "--unverified", str(deleted.id)]) == 0
    assert len(key.read_text().strip()) == 64
    monkeypatch.setenv("SANDBOX_TRUST_STORAGE", "1")
    asyncio.run(open_and_sign(kept))
    monkeypatch.delenv("SANDBOX_TRUST_STORAGE")
    (sound,) = doctor.check_saved()
    assert sound.ok


def test_delete_with_unknown_id_deletes_nothing(keep: Keep, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = keep(notebook_path="/home/a/b.ipynb")
    before = objects(data)
    for command in ("delete", "show"):
        assert main([command, str(record.id), "nonsense"]) == 3
        printed = capsys.readouterr()
        assert printed.out == ""
        assert "'nonsense'" in printed.err and f"{record.id} (/home/a/b.ipynb)" in printed.err
    assert objects(data) == before


async def test_sandbox_in_use_is_kept_and_owner_named(
    keep: Keep, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    used, idle = keep(days=40), keep(days=41)
    name = names.lock_name(used.sandbox_id)
    lease = await Persistence.open().stores.leases.acquire(name, Owner("lab-7", "somewhere", 7, "ada", "n"))
    assert await asyncio.to_thread(main, ["prune", "--older-than", "30d", "--json"]) == 4
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert [entry["id"] for entry in result["deleted"]] == [str(idle.id)]
    assert [entry["id"] for entry in result["kept"]] == [str(used.id)]
    assert "lab-7" in printed.err
    assert await asyncio.to_thread(main, ["delete", str(used.id)]) == 4
    assert "lab-7" in capsys.readouterr().err
    await lease.release()
    assert await asyncio.to_thread(main, ["delete", str(used.id)]) == 0
    assert objects(data) == []


def test_prune_skips_sandboxes_used_or_deleted_meanwhile(keep: Keep, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    first, used, deleted = keep(days=40), keep(days=41), keep(days=42)
    destroy = Persistence.destroy

    def meanwhile(storage: Persistence, record: SandboxRecord, unverified: bool = False) -> int:
        storage.registry.touch(used.id)
        storage.registry.forget(deleted.id)
        return destroy(storage, record, unverified)

    monkeypatch.setattr(Persistence, "destroy", meanwhile)
    pruned = ask("prune", "--older-than", "30d")
    assert pruned == {"deleted": [{"id": str(first.id), "freed": 2000}], "kept": [], "freed": 2000}
    assert [shown["id"] for shown in ask("list")["sandboxes"]] == [str(used.id)]


def test_sandbox_in_other_storage_is_not_deleted(
    keep: Keep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = keep(days=40)
    monkeypatch.setenv("SANDBOX_STORAGE_DIR", str(tmp_path / "other"))
    for arguments in (["delete", str(record.id)], ["prune", "--older-than", "30d"]):
        assert main(arguments) == 5
        assert record.where in capsys.readouterr().err
    monkeypatch.delenv("SANDBOX_STORAGE_DIR")
    assert main(["delete", str(record.id)]) == 0


def test_dry_run_deletes_nothing(keep: Keep, ask: Ask, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stale, _ = keep(days=40, notebook_path="/old.ipynb"), keep(days=2)
    before = objects(data)
    assert main(["prune", "--older-than", "30d", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert f"Would delete {stale.id} (/old.ipynb), saved, 2.0 kB" in printed
    assert "1 sandbox, 2.0 kB in total. Nothing was deleted." in printed
    assert [shown["id"] for shown in ask("prune", "--older-than", "30d", "--dry-run")["would_delete"]] == [
        str(stale.id)
    ]
    assert objects(data) == before
    assert ask("prune", "--older-than", "30d")["deleted"] == [{"id": str(stale.id), "freed": 2000}]
    assert len(ask("list")["sandboxes"]) == 1


def test_commands_with_buckets(gcs: GCS, keep: Keep, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    for stem in ("SANDBOX_METADATA", "SANDBOX_LOCK", "SANDBOX_CHECKPOINT", "FILESYSTEM_SNAPSHOT"):
        monkeypatch.setenv(f"{stem}_BUCKET", gcs.bucket)
    monkeypatch.setenv("SANDBOX_OBJECT_PREFIX", "team")
    record, _ = keep(days=40), keep(days=2)
    shown = ask("show", str(record.id))["sandboxes"][0]
    assert (shown["state"], shown["size"], shown["where"]) == ("saved", 2000, f"gs://{gcs.bucket}/team")
    assert ask("prune", "--older-than", "30d") == {
        "deleted": [{"id": str(record.id), "freed": 2000}],
        "kept": [],
        "freed": 2000,
    }
    left = Persistence.open().stores.metadata.list("")
    assert left and not any(record.sandbox_id in info.name for info in left)


@pytest.mark.timeout(30)
def test_show_ends_if_storage_does_not_answer(gcs: GCS, keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    for stem in ("SANDBOX_METADATA", "SANDBOX_LOCK", "SANDBOX_CHECKPOINT", "FILESYSTEM_SNAPSHOT"):
        monkeypatch.setenv(f"{stem}_BUCKET", gcs.bucket)
    record = keep()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://{}:{}".format(*silent.getsockname()))
        program = "import sys; from sandbox_provisioner.cli import main, targets; targets.STORAGE_TIMEOUT = 1.0; main()"
        done = subprocess.run([sys.executable, "-c", program, "show", str(record.id)], capture_output=True, text=True)
    assert done.returncode == ExitStatus.UNABLE, done.stderr
    assert f"The storage (gcs, gs://{gcs.bucket}) did not answer within 1 s." in done.stderr


@pytest.mark.parametrize("text", ["30", "d", "-1d", "1y", "1.5d", "9999999d", "1d2h", "", "٣d"])
def test_invalid_duration_shows_the_usage(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["prune", "--older-than", text])
    assert caught.value.code == 2
    assert "usage: jupyter sandbox prune" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["prune"], ["delete"], ["show"]])
def test_missing_argument_deletes_nothing(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_storage_folder_from_server_configuration(keep: Keep, ask: Ask, tmp_path: Path) -> None:
    keep()
    (tmp_path / "config").mkdir()
    setting = f"c.SandboxProvisioner.storage_dir = {str(tmp_path / 'chosen')!r}\n"
    (tmp_path / "config" / "jupyter_server_config.py").write_text(setting)
    (shown,) = ask("list")["sandboxes"]
    assert shown["state"] == "elsewhere"
    assert str(tmp_path / "chosen") in shown["problem"]


def test_wrong_setting_fails_with_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SANDBOX_METADATA_BUCKET", "Not A Bucket")
    assert main(["list"]) == 5
    assert "SANDBOX_METADATA_BUCKET is 'Not A Bucket'" in capsys.readouterr().err


def test_unprintable_names_are_escaped(keep: Keep) -> None:
    keep(notebook_path="/\x1b[2J\n\udcff/é.ipynb", kernel_name="k\r")
    answer = subprocess.run([COMMAND, "list"], env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True)
    assert answer.returncode == 0 and answer.stderr == b""
    assert answer.stdout.count(b"\n") == 2
    assert b"\x1b" not in answer.stdout and b"\r" not in answer.stdout
    assert rb"/?[2J??/\xe9.ipynb" in answer.stdout


@pytest.mark.parametrize(
    ("amount", "words"),
    [
        (None, "?"), (0, "0 B"), (9, "9 B"), (999, "999 B"), (1000, "1.0 kB"), (9949, "9.9 kB"), (9950, "10 kB"),
        (999_499, "999 kB"), (999_500, "1.0 MB"), (123_456_789, "123 MB"), (5 * 10**12, "5.0 TB"), (10**16, "10000 TB"),
    ],
)  # fmt: skip
def test_sizes(amount: int | None, words: str) -> None:
    assert size(amount) == words


@pytest.mark.parametrize(
    ("age", "words"),
    [
        ({"seconds": -5}, "in the future"), ({}, "just now"), ({"seconds": 59.5}, "59 seconds ago"),
        ({"seconds": 61}, "1 minute ago"),
        ({"minutes": 59}, "59 minutes ago"), ({"hours": 5}, "5 hours ago"), ({"days": 1}, "1 day ago"),
        ({"days": 29}, "29 days ago"), ({"days": 65}, "2 months ago"), ({"days": 800}, "2 years ago"),
    ],
)  # fmt: skip
def test_ages(age: dict[str, int], words: str) -> None:
    assert ago(datetime.now(UTC) - timedelta(**age)) == words


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90s", timedelta(seconds=90)), ("12h", timedelta(hours=12)), ("30d", timedelta(30)), ("2w", timedelta(14))],
)
def test_durations(text: str, expected: timedelta) -> None:
    assert span(text) == expected
