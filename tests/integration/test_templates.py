"""Kernels that start as copies of a template: their contents, what they share, and when no template is used."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from kernel_templates import have_template, is_copy
from kernels import Open, run
from traitlets.config import Config

from sandbox_provisioner.cli.app import main
from sandbox_provisioner.errors import SandboxError
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.templates import spec as recipes
from sandbox_provisioner.templates.build import build
from sandbox_provisioner.templates.match import recipe_for
from sandbox_provisioner.templates.store import TemplateShelf, mark

pytestmark = [pytest.mark.runsc, pytest.mark.templates, pytest.mark.user]

Start = Callable[..., Any]
Sandboxed = Callable[..., str]
LONG = 60


def ask(kc: Any, expression: str) -> Any:
    return json.loads(run(kc, f"import json, os, sys\nprint(json.dumps({expression}))"))


# -- copies -----------------------------------------------------------------------------------------------------------


def test_copy_has_own_folder_environment_and_no_capabilities(
    start_kernel: Start, sandboxed: Sandboxed, notebook_folder: Path
) -> None:
    (notebook_folder / "there").write_text("before")
    km, kc = start_kernel(sandboxed(), env={**os.environ, "GIVEN": "to this one"})
    assert is_copy(km)
    assert ask(kc, "[os.getcwd(), os.environ['GIVEN'], open('there').read()]") == [
        str(notebook_folder),
        "to this one",
        "before",
    ]
    run(kc, "open('made', 'w').write('inside')")
    assert (notebook_folder / "made").read_text() == "inside"
    capabilities = ask(kc, "[l.split() for l in open('/proc/self/status').read().splitlines() + "
                     "open('/proc/1/status').read().splitlines() if l.startswith('Cap')]")  # fmt: skip
    assert len(capabilities) in (8, 10) and all(int(value, 16) == 0 for _, value in capabilities)
    assert ask(kc, "sys.argv[-1]").endswith(Path(km.connection_file).name)
    assert ask(kc, "json.load(open(sys.argv[-1]))['key']") == km.session.key.decode()


@pytest.mark.debian
def test_copies_share_no_key_random_state_identity_or_file(start_kernel: Start, sandboxed: Sandboxed) -> None:
    name = sandboxed(preload=["numpy", "tempfile", "multiprocessing"])
    chances = """[
        __import__("random").random(), float(numpy.random.random()), os.urandom(8).hex(), str(uuid.uuid4()),
        str(uuid.getnode()), __import__("secrets").token_hex(), tempfile.mktemp(), ssl.RAND_bytes(8).hex(),
        multiprocessing.current_process().authkey.hex(), get_ipython().kernel.session.session,
        get_ipython().kernel.ident, get_ipython().kernel.session.key.decode(),
        get_ipython().kernel.iopub_thread._pipe_uuid.hex(), sys.argv[-1]]"""
    seen = []
    for _ in range(2):
        km, kc = start_kernel(name)
        assert is_copy(km)
        assert ask(kc, "sorted(set(sys.modules) & {'numpy', 'pandas'})") == ["numpy"]
        run(kc, "import multiprocessing, numpy, ssl, tempfile, uuid")
        run(kc, "assert not os.path.exists('/tmp/a file'); open('/tmp/a file', 'w').close()")
        seen.append(ask(kc, chances))
    assert not set(seen[0]) & set(seen[1])


def test_restarted_and_persistent_kernels_are_copies(open_notebook: Open) -> None:
    notebook = open_notebook()
    assert is_copy(notebook.km)
    notebook.run("x = 1")
    notebook.hibernate()
    assert notebook.run("x") == "1"
    notebook.km.restart_kernel(now=True)
    notebook.kc.wait_for_ready(timeout=LONG)
    assert is_copy(notebook.km)
    assert notebook.run("'x' in globals()") == "False"


def test_startup_code_runs_in_each_copy(
    kernelspecs: KernelSpecManager, start_kernel: Start, sandboxed: Sandboxed, notebook_folder: Path
) -> None:
    code = "import os as _os; found = [_os.getcwd(), _os.environ['GIVEN']]"
    spec = kernelspecs.get_kernel_spec("python3").to_dict()
    spec["argv"] += [f"--IPKernelApp.exec_lines={code}", "--IPKernelApp.extensions=autoreload"]
    name = sandboxed(spec=spec)
    for given in ("here", "there"):
        folder = notebook_folder / given
        folder.mkdir()
        km, kc = start_kernel(name, cwd=str(folder), env={**os.environ, "GIVEN": given})
        assert is_copy(km)
        assert ask(kc, "found") == [str(folder), given]
        assert ask(kc, "'IPython.extensions.autoreload' in sys.modules") is True
        assert run(kc, "%who").strip() in ("Interactive namespace is empty.", "json\t os\t sys")


@pytest.mark.parametrize("option", ["--profile=mine", "--ipython-dir=/tmp", "--config=/tmp/config.py"])
def test_user_profile_prevents_template(
    kernelspecs: KernelSpecManager, sandboxed: Sandboxed, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    spec = kernelspecs.get_kernel_spec("python3").to_dict()
    name = sandboxed(spec=spec | {"argv": [*spec["argv"], option]})
    monkeypatch.setenv("JUPYTER_PATH", str(Path(kernelspecs.kernel_dirs[0]).parent))
    with pytest.raises(SandboxError, match="cannot have a template"):
        recipe_for(name, Config())


def test_history_begins_at_start(start_kernel: Start, sandboxed: Sandboxed) -> None:
    begun = time.time()
    _, kc = start_kernel(sandboxed())
    time.sleep(1.5)
    row = ask(kc, "list(map(str, get_ipython().history_manager.db.execute('SELECT * FROM sessions').fetchone()))")
    assert row[0] == "1"
    assert run(kc, f"import datetime\ndatetime.datetime.fromisoformat({row[1]!r}).timestamp() > {begun}") == "True"
    assert ask(kc, "[str(path) for path in _dh]") == [os.getcwd()]


# -- preloaded modules ---------------------------------------------------------------------------------------------


def test_unfreezable_module_is_reported_and_skipped(
    kernelspecs: KernelSpecManager, sandboxed: Sandboxed, shelf: TemplateShelf, start_kernel: Start, tmp_path: Path
) -> None:
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    (libraries / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()"
    )
    (libraries / "broken.py").write_text("raise RuntimeError('no')")
    (libraries / "fine.py").write_text("x = 1")
    os.utime(libraries, (1, 1))
    spec = kernelspecs.get_kernel_spec("python3").to_dict() | {"env": {"PYTHONPATH": str(libraries)}}
    name = sandboxed(spec=spec, preload=["threaded", "broken", "nonesuch", "fine"])
    found = shelf.get(name)
    assert found is not None
    assert found.preloaded == ["fine"], found.left_out
    assert dict(found.left_out) == {
        "threaded": "it started a thread",
        "broken": "RuntimeError: no",
        "nonesuch": "ModuleNotFoundError: No module named 'nonesuch'",
    }
    km, kc = start_kernel(name)
    assert is_copy(km)
    assert ask(kc, "sorted(set(sys.modules) & {'threaded', 'broken', 'fine'})") == ["fine"]


# -- starts without template -----------------------------------------------------------------------------------------


def test_changed_library_is_fresh_in_next_kernel(
    kernelspecs: KernelSpecManager, sandboxed: Sandboxed, start_kernel: Start, shelf: TemplateShelf, tmp_path: Path
) -> None:
    library = tmp_path / "libraries" / "mine.py"
    library.parent.mkdir()
    library.write_text("VERSION = 1")  # a build waits until recent changes have settled
    spec = kernelspecs.get_kernel_spec("python3").to_dict() | {"env": {"PYTHONPATH": str(library.parent)}}
    name = sandboxed(spec=spec, preload=["mine"])
    km, kc = start_kernel(name)
    assert is_copy(km) and run(kc, "import mine; mine.VERSION") == "1"
    library.write_text("VERSION = 2")
    km, kc = start_kernel(name)
    assert not is_copy(km) and run(kc, "import mine; mine.VERSION") == "2"
    assert shelf.get(name) is None


def test_changed_kernelspec_invalidates_template(
    kernelspecs: KernelSpecManager, sandboxed: Sandboxed, start_kernel: Start
) -> None:
    name = sandboxed()
    assert is_copy(start_kernel(name)[0])
    path = Path(kernelspecs.kernel_dirs[0], name, "kernel.json")
    for change in ({"env": {"SOMETHING": "else"}}, {"argv": [*json.loads(path.read_text())["argv"], "--no-stderr"]}):
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        assert not is_copy(start_kernel(name)[0])


def test_other_runsc_invalidates_template(
    sandboxed: Sandboxed, start_kernel: Start, runsc: Runsc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "runsc"
    shutil.copy(runsc.path, other)
    monkeypatch.setenv("SANDBOX_RUNSC", str(other))
    name = sandboxed()
    assert is_copy(start_kernel(name)[0])
    newer = tmp_path / "newer"
    newer.write_bytes(other.read_bytes() + b"another build")
    newer.chmod(0o755)
    newer.rename(other)
    assert not is_copy(start_kernel(name)[0])


def test_other_guest_code_invalidates_template(
    sandboxed: Sandboxed, start_kernel: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = sandboxed()
    assert is_copy(start_kernel(name)[0])
    shutil.copytree(recipes.GUEST, tmp_path / "guest")
    with (tmp_path / "guest" / "frames.py").open("a") as file:
        file.write("# another version\n")
    monkeypatch.setattr(recipes, "GUEST", tmp_path / "guest")
    assert not is_copy(start_kernel(name)[0])


@pytest.mark.parametrize("variable", ["PYTHONPATH", "LANG", "PYTHONDONTWRITEBYTECODE"])
def test_different_start_uses_no_template(
    sandboxed: Sandboxed, start_kernel: Start, shelf: TemplateShelf, variable: str
) -> None:
    name = sandboxed()
    before = shelf.get(name)
    assert not is_copy(start_kernel(name, env={**os.environ, variable: "/tmp"})[0])
    assert shelf.get(name) == before


def test_folder_with_foreign_mount_uses_no_template(
    sandboxed: Sandboxed, start_kernel: Start, notebook_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "library").mkdir()
    name = sandboxed(mounts=[f"{tmp_path}/library:{notebook_folder}/library"])
    km, kc = start_kernel(name)
    assert not is_copy(km)
    assert ask(kc, "os.access('library', os.W_OK)") is False


def test_unrestorable_template_is_dropped(
    sandboxed: Sandboxed, start_kernel: Start, shelf: TemplateShelf, caplog: pytest.LogCaptureFixture
) -> None:
    name = sandboxed()
    template = shelf.get(name)
    assert template is not None
    image = shelf.folder / name / template.image / "checkpoint.img"
    image.write_bytes(image.read_bytes()[:1000])
    spoilt = replace(template, marks={**template.marks, str(image): mark(str(image)) or []})
    shelf.publish(spoilt)
    with caplog.at_level(logging.WARNING):
        km, kc = start_kernel(name)
    assert not is_copy(km) and run(kc, "1 + 1") == "2"
    assert "template unusable; starting without it" in caplog.text
    assert shelf.get(name) is None
    assert not image.exists()


def test_folder_swapped_for_link_during_restore_is_not_mounted(
    sandboxed: Sandboxed,
    start_kernel: Start,
    runsc: Runsc,
    notebook_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret, work = tmp_path / "secret", notebook_folder / "work"
    secret.mkdir()
    (secret / "key").write_text("not for guests")
    work.mkdir()
    swapping = tmp_path / "runsc"
    swap = f"mv {work} {work}-moved; ln -s {secret} {work}"
    swapping.write_text(f'#!/bin/sh\ncase "$*" in *" restore "*) {swap} ;; esac\nexec {runsc.path} "$@"\n')
    swapping.chmod(0o755)
    monkeypatch.setenv("SANDBOX_RUNSC", str(swapping))
    with pytest.raises(Exception, match="was replaced while the start"):
        start_kernel(sandboxed(), cwd=str(work))
    assert os.listdir(secret) == ["key"]


def test_bash_kernel_starts_without_template(sandboxed: Sandboxed, start_kernel: Start, shelf: TemplateShelf) -> None:
    spec = {"argv": [os.sys.executable, "-m", "bash_kernel", "-f", "{connection_file}"], "language": "bash"}  # type: ignore[attr-defined]
    name = sandboxed("bash", spec | {"display_name": "Bash"})
    found = shelf.get(name)
    assert found is not None and found.unfit == "it is not an IPython kernel" and not found.image
    km, kc = start_kernel(name)
    assert not is_copy(km) and run(kc, "echo $((6 * 7))").strip() == "42"


# -- builds ---------------------------------------------------------------------------------------------------------


def test_template_contains_no_secret(
    kernelspecs: KernelSpecManager,
    sandboxed: Sandboxed,
    shelf: TemplateShelf,
    monkeypatch: pytest.MonkeyPatch,
    start_kernel: Start,
) -> None:
    secrets = {name: os.urandom(12).hex() for name in ("AWS_SECRET_ACCESS_KEY", "PASSED_KEY", "KERNEL_KEY")}
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secrets["AWS_SECRET_ACCESS_KEY"])
    monkeypatch.setenv("PASSED_KEY", secrets["PASSED_KEY"])
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/somebody/secret-notebook.ipynb")
    spec = kernelspecs.get_kernel_spec("python3").to_dict() | {"env": {"KERNEL_KEY": secrets["KERNEL_KEY"]}}
    name = sandboxed(spec=spec, pass_environment=["PASSED_KEY"], persistent=False)
    template = shelf.get(name)
    assert template is not None
    image = b"".join(path.read_bytes() for path in (shelf.folder / name / template.image).iterdir())
    assert len(image) == template.size > 10_000_000
    assert b"ipykernel" in image
    km, kc = start_kernel(name)
    assert is_copy(km)
    assert ask(kc, "[os.environ['PASSED_KEY'], os.environ['KERNEL_KEY'], 'AWS_SECRET_ACCESS_KEY' in os.environ]") == [
        secrets["PASSED_KEY"],
        secrets["KERNEL_KEY"],
        False,
    ]
    for text in (*secrets.values(), "secret-notebook", km.session.key.decode()):
        assert text.encode() not in image and text.encode("utf-32-le") not in image
    assert shelf.folder.stat().st_mode & 0o077 == 0 or (shelf.folder / name).stat().st_mode & 0o077 == 0


def test_server_builds_missing_template_in_background(
    sandboxed: Sandboxed, start_kernel: Start, shelf: TemplateShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = sandboxed()
    shelf.drop(name)
    km, _ = start_kernel(name)
    assert not is_copy(km)
    assert shelf.get(name) is None
    monkeypatch.setenv("SANDBOX_TEMPLATE", "build")
    km, _ = start_kernel(name)
    assert not is_copy(km)
    deadline = time.monotonic() + LONG
    while shelf.get(name) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    km, _ = start_kernel(name)
    assert is_copy(km)


def test_concurrent_builds_of_one_template(
    sandboxed: Sandboxed, kernelspecs: KernelSpecManager, shelf: TemplateShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = sandboxed()
    monkeypatch.setenv("JUPYTER_PATH", str(Path(kernelspecs.kernel_dirs[0]).parent))
    recipe = recipe_for(name, Config())
    before = shelf.get(name)
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda wait: asyncio.run(build(recipe, shelf, wait)), (True, True, False)))
    current = shelf.get(name)
    assert current is not None and current in made and current != before
    assert current.changed == ""
    assert [path.name for path in (shelf.folder / name).glob("image-*")] == [current.image]


def test_template_command(
    sandboxed: Sandboxed,
    kernelspecs: KernelSpecManager,
    shelf: TemplateShelf,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = sandboxed()
    monkeypatch.setenv("JUPYTER_PATH", str(Path(kernelspecs.kernel_dirs[0]).parent))
    assert main(["template", "build", name]) == 0
    assert f"Template of {name}: " in capsys.readouterr().out
    assert main(["template", "list"]) == 0
    assert name in capsys.readouterr().out
    assert main(["template", "list", "--json"]) == 0
    (shown,) = [each for each in json.loads(capsys.readouterr().out) if each["kernel_name"] == name]
    assert shown["current"] is True and shown["size"] > 10_000_000 and not {"marks", "folders"} & {*shown}
    assert main(["template", "delete", name]) == 0
    assert shelf.get(name) is None
    assert main(["template", "delete", name]) == 1
    assert main(["template", "build", "nonesuch", "python3"]) == 1
    said = capsys.readouterr().err
    assert "There is no kernel named nonesuch." in said and "Kernel python3 does not run in a sandbox." in said
    assert have_template(name, shelf) is not None
