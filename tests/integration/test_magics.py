"""Test ``%sandbox``: its output, in a real kernel, and requests that are pending when a sandbox hibernates.

Some tests replace the host's actions by FakeActions; requests and answers always take the real path.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from fake_actions import FakeActions as Clerk
from fake_actions import checkpoint
from kernels import LONG, Notebook, Open

from sandbox_provisioner.errors import SandboxError
from sandbox_provisioner.guest import host_api, magics
from sandbox_provisioner.guest.magics import Problem, answer_text, duration, run, size
from sandbox_provisioner.gvisor.bundle import BundleSpec
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.gvisor.sandbox import GVisorSandbox
from sandbox_provisioner.kernel.host_api import attend
from sandbox_provisioner.mux.process import GuestProcess
from sandbox_provisioner.persistence.metadata import Checkpoint

pytestmark = pytest.mark.template_copies

runsc_ = pytest.mark.runsc

# -- what a person reads -----------------------------------------------------------------------------------------


def test_socket_path_is_the_same_on_both_ends() -> None:
    assert (magics.PATH, magics.MAX_REQUEST) == (host_api.PATH, host_api.MAX_REQUEST)


@pytest.mark.parametrize("line", ["", "  ", "help"])
def test_magic_without_arguments_prints_usage(line: str) -> None:
    assert all(f"%sandbox {word}" in run(line, dict) for word in magics.OPERATIONS)


@pytest.mark.parametrize("line", ["nonsense", "savepoint a b", "status now", "-h", "x" * 5000])
def test_unknown_subcommand_prints_usage(line: str) -> None:
    with pytest.raises(Problem, match=r"is not a valid command\. The commands are:\n%sandbox status") as problem:
        run(line, dict)
    assert len(str(problem.value)) < 1000


@pytest.mark.parametrize("op", ["savepoint", "rewind"])
def test_missing_name_of_a_savepoint_is_explained(op: str) -> None:
    with pytest.raises(Problem, match=f"^%sandbox {op} needs .*, for example: %sandbox {op} before-cleaning$"):
        run(op, dict)


def test_magic_without_listener_is_explained() -> None:
    with pytest.raises(Problem, match="The sandbox does not answer"):
        run("status", dict)


def test_restore_during_request_is_reported() -> None:
    restored = {"outcome": "restored"}
    assert answer_text("savepoint", "a", restored) == "Restored from savepoint a.\n"
    assert answer_text("rewind", "a", restored) == "Restored to the state before the rewind to a.\n"


@pytest.mark.parametrize(
    ("amount", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (123_456_789, "123 MB"),
        (999_600, "1.0 MB"),
        (5 * 10**15, "5000 TB"),
    ],
)
def test_sizes_are_human_readable(amount: int, words: str) -> None:
    assert size(amount) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (1, "1 seconds"),
        (45, "45 seconds"),
        (60, "1 minute"),
        (90, "90 seconds"),
        (1800, "30 minutes"),
        (3600, "1 hour"),
    ],
)
def test_durations_are_human_readable(seconds: float, words: str) -> None:
    assert duration(seconds) == words


# -- in a kernel -------------------------------------------------------------------------------------------------


@pytest.fixture
def clerk() -> Clerk:
    return Clerk()


@pytest.fixture
def notebook(open_notebook: Open, clerk: Clerk) -> Notebook:
    opened = open_notebook()
    attend(opened.km.provisioner.sandbox.connection, clerk)
    return opened


def usage_error(notebook: Notebook, line: str) -> str:
    """Return the error below a cell. Fails unless it is one line without a traceback."""
    request = notebook.kc.execute(line)
    printed = "".join(notebook.outputs(request))
    assert notebook.reply(request)["status"] == "error"
    assert printed.startswith("UsageError: ")
    assert "Traceback" not in printed
    return printed


@runsc_
def test_magic_saves_lists_and_refuses_in_one_line(notebook: Notebook, clerk: Clerk) -> None:
    assert "%sandbox rewind NAME" in notebook.run("%sandbox")
    assert notebook.run("name = 'before'\n%sandbox savepoint {name}") == (
        "Saved as before (123 MB in 0.4 s). The kernel keeps running.\n"
    )
    assert notebook.run("%sandbox status").startswith("Sandbox:    nb-1\n")
    assert "  before  2026-11-16 15:50 UTC  123 MB\n" in notebook.run("%sandbox savepoints")
    clerk.error = SandboxError("There is one already.", "Choose another name.")
    assert usage_error(notebook, "%sandbox savepoint before") == (
        "UsageError: There is one already. Choose another name.\n"
    )
    assert "is not a valid name" in usage_error(notebook, "%sandbox savepoint a/b")
    assert "needs a name for the savepoint" in usage_error(notebook, "%sandbox savepoint")


@runsc_
def test_rewind_request_names_its_cell(notebook: Notebook, clerk: Clerk) -> None:
    request = notebook.kc.execute("%sandbox rewind before")
    number = notebook.reply(request)["execution_count"]
    ((name, cell),) = clerk.rewound
    assert cell is not None
    assert (name, cell.header["msg_id"], cell.number) == ("before", request, number)
    assert cell.header["session"] == notebook.kc.session.session


class Waiting(Clerk):
    """A clerk whose savepoints are finished once ``go`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()
        self.go = asyncio.Event()

    async def savepoint(self, name: str) -> Checkpoint:
        self.begun.set()
        await self.go.wait()
        return checkpoint()


@runsc_
def test_waiting_magic_can_be_interrupted(open_notebook: Open) -> None:
    notebook, clerk = open_notebook(), Waiting()
    attend(notebook.km.provisioner.sandbox.connection, clerk)
    request = notebook.kc.execute("print('waits', flush=True)\n%sandbox savepoint before")
    assert "waits" in next(notebook.outputs(request))
    while not clerk.begun.is_set():
        pass
    notebook.km.interrupt_kernel()
    assert notebook.reply(request)["ename"] == "KeyboardInterrupt"
    assert notebook.run("1 + 1") == "2"


@runsc_
def test_only_the_magic_is_added_to_notebook(open_notebook: Open) -> None:
    seen = open_notebook().run(
        "import sys, IPython.core.interactiveshell as shells\n"
        "ours = [name for name in ('magics', 'hooks', 'asks') if name in sys.modules]\n"
        "ours, [finder for finder in sys.meta_path if 'magics' in str(finder)], "
        "shells.InteractiveShell.init_magics.__qualname__, 'exec_module' in vars(shells.__spec__.loader)"
    )
    assert seen == "([], [], 'InteractiveShell.init_magics', False)"


@runsc_
def test_magic_help_in_ipython(notebook: Notebook) -> None:
    assert "%sandbox savepoint NAME" in notebook.run("print(get_ipython().find_line_magic('sandbox').__doc__)")


@runsc_
def test_magic_savepoint_and_rewind(open_notebook: Open, notebook_folder: Path) -> None:
    notebook = open_notebook()
    notebook.run("x = 'then'")
    assert "Saved as before" in notebook.run(
        "%sandbox savepoint before\n%sandbox status\nprint(x, file=open('x', 'a'))"
    )
    notebook.run("x = 'now'")
    request = notebook.kc.execute("%sandbox rewind before")
    assert notebook.reply(request)["status"] == "ok"
    (printed,) = notebook.outputs(request)
    assert printed.startswith("Rewound to before; the state before is kept as savepoint before-rewind-")
    notebook.kc.wait_for_ready(timeout=LONG)
    assert notebook.run("print(x)") == "then\n"
    assert (notebook_folder / "x").read_text() == "then\n" * 2  # the restored cell continued and wrote once more
    assert "'nowhere'" in usage_error(notebook, "%sandbox rewind nowhere")


@runsc_
def test_magic_in_ephemeral_kernel(open_notebook: Open) -> None:
    notebook = open_notebook(name="")
    assert "This kernel's state is not saved" in notebook.run("%sandbox status")
    assert "This kernel's state is not saved" in usage_error(notebook, "%sandbox savepoint before")


# -- requests while the sandbox is hibernated ----------------------------------------------------------------------

ASK = "import sys; sys.path.insert(0, '/.sandbox'); import magics; print(magics.run(sys.argv[1], dict))"
Make = Callable[..., GVisorSandbox]


@pytest.fixture
async def make(spec: BundleSpec, runsc: Runsc) -> AsyncIterator[Make]:
    made: list[GVisorSandbox] = []

    def make(**changes: Any) -> GVisorSandbox:
        made.append(GVisorSandbox(f"asking-{len(made)}", BundleSpec(**{**vars(spec), **changes}), runsc))
        return made[-1]

    yield make
    for sandbox in made:
        await asyncio.wait_for(sandbox.delete(), LONG)


async def run_magic(sandbox: GVisorSandbox, line: str) -> GuestProcess:
    return await sandbox.execute([sandbox.spec.python, "-I", "-B", "-c", ASK, line])


async def output(process: GuestProcess) -> str:
    out, err = await asyncio.wait_for(process.read(), LONG)
    return (out + err).decode().strip()


async def started(make: Make, **changes: Any) -> tuple[GVisorSandbox, Waiting]:
    sandbox, clerk = make(**changes), Waiting()
    await asyncio.wait_for(sandbox.start(), LONG)
    attend(sandbox.connection, clerk)
    return sandbox, clerk


@runsc_
@pytest.mark.parametrize("early", [True, False], ids=["answered while hibernated", "answered after restore"])
async def test_request_is_answered_after_hibernation(make: Make, tmp_path: Path, early: bool) -> None:
    sandbox, clerk = await started(make)
    process = await run_magic(sandbox, "savepoint before")
    await asyncio.wait_for(clerk.begun.wait(), LONG)
    await sandbox.checkpoint(tmp_path / "image")
    if early:
        clerk.go.set()
        await asyncio.sleep(0)
    await sandbox.restore(tmp_path / "image")
    clerk.go.set()
    assert await output(process) == "Saved as before (123 MB in 0.4 s). The kernel keeps running."


@runsc_
async def test_restored_copy_reports_its_savepoint(make: Make, tmp_path: Path) -> None:
    sandbox, clerk = await started(make)
    process = await run_magic(sandbox, "savepoint before")
    await asyncio.wait_for(clerk.begun.wait(), LONG)
    await sandbox.copy(tmp_path / "image")
    clerk.go.set()
    assert await output(process) == "Saved as before (123 MB in 0.4 s). The kernel keeps running."
    restored = make()
    await restored.restore(tmp_path / "image")
    adopted = restored.connection.process(process.number)
    assert adopted is not None
    assert await output(adopted) == "Restored from savepoint before."
    attend(restored.connection, Clerk())
    assert "nb-1" in await output(await run_magic(restored, "status"))


@runsc_
async def test_request_fails_if_its_server_was_killed(make: Make, tmp_path: Path) -> None:
    sandbox, clerk = await started(make, outlives=True)
    command = f"{sandbox.spec.python} -I -B -c {shlex.quote(ASK)} 'savepoint before' 2> /tmp/said; touch /tmp/done"
    await sandbox.execute(["sh", "-c", command])
    await asyncio.wait_for(clerk.begun.wait(), LONG)
    assert sandbox._container and sandbox._container.folder
    folder = sandbox._container.folder
    sandbox.connection.detach()
    orphan = GVisorSandbox.orphan("asking", sandbox.spec, sandbox.runsc, "systrap", folder, sandbox.container_id)
    await orphan.checkpoint(tmp_path / "image")
    restored = make(outlives=True)
    await restored.restore(tmp_path / "image")
    attend(restored.connection, Clerk())
    waiting = await restored.execute(["sh", "-c", "until test -e /tmp/done; do sleep 0.1; done; cat /tmp/said"])
    assert "The server ended before it answered." in await output(waiting)
    assert "nb-1" in await output(await run_magic(restored, "status"))
