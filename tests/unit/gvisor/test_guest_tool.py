"""Test GuestTool: the output of the package's scripts in a sandbox is read completely; stalled scripts are killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from sandbox_provisioner.errors import GuestError, SandboxError
from sandbox_provisioner.gvisor import guest_tool
from sandbox_provisioner.gvisor.bundle import BundleSpec
from sandbox_provisioner.gvisor.guest_tool import GuestTool
from sandbox_provisioner.gvisor.runsc import Runsc
from sandbox_provisioner.gvisor.sandbox import GVisorSandbox

pytestmark = [pytest.mark.runsc, pytest.mark.debian]
LONG = 60


@pytest.fixture
async def sandbox(spec: BundleSpec, runsc: Runsc) -> AsyncIterator[GVisorSandbox]:
    sandbox = GVisorSandbox("box", spec, runsc)
    await asyncio.wait_for(sandbox.start(), LONG)
    yield sandbox
    await asyncio.wait_for(sandbox.delete(), LONG)


async def put(sandbox: GVisorSandbox, code: str) -> None:
    await (await sandbox.execute(["true"], files={"/.sandbox/tool.py": f"import os, sys, time\n{code}\n"})).wait()


async def test_script_gets_arguments_and_input_and_its_output_is_read(sandbox: GVisorSandbox) -> None:
    await put(sandbox, "sys.stdout.write(sys.stdin.read() * 3 + sys.argv[1]); sys.stderr.write('well\\ndone')")
    async with GuestTool.run(sandbox, "The task", "tool.py", "end", stdin=True) as tool:
        assert await tool.write(b"word " * 200_000)
        words = asyncio.create_task(tool.finish())
        assert await asyncio.wait_for(words, LONG) == "well | done"
    async with GuestTool.run(sandbox, "The task", "tool.py", "end") as tool:
        assert b"".join([piece async for piece in tool.output()]) == b"end"
    assert sandbox.connection._processes == {}


async def test_failure_is_reported_with_the_end_of_stderr(sandbox: GVisorSandbox) -> None:
    await put(sandbox, "sys.stderr.write('x' * 3_000_000); sys.exit('the reason')")
    with pytest.raises(GuestError, match=r"^The task failed in the sandbox: x+the reason\.$") as failure:
        async with GuestTool.run(sandbox, "The task", "tool.py") as tool:
            await asyncio.wait_for(tool.finish(), LONG)
    assert len(str(failure.value)) < 5000
    await put(sandbox, "sys.exit(7)")
    with pytest.raises(GuestError, match="the helper exited with status 7"):
        async with GuestTool.run(sandbox, "The task", "tool.py") as tool:
            await asyncio.wait_for(tool.finish(), LONG)


async def test_script_is_killed_after_the_block_or_a_stall(
    sandbox: GVisorSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_tool, "STALL", 1.0)
    await put(sandbox, "while True: os.write(1, b'x' * 65536)")
    async with GuestTool.run(sandbox, "The task", "tool.py") as tool:
        async for _ in tool.output():
            break
    assert sandbox.connection._processes == {}
    await put(sandbox, "time.sleep(1000)")
    with pytest.raises(GuestError, match="no input or output for 1 seconds"):
        async with GuestTool.run(sandbox, "The task", "tool.py", stdin=True) as tool:
            while True:
                await tool.write(bytes(1 << 16))
    assert sandbox.connection._processes == {}


async def test_script_that_closes_its_stdin_fails_only_in_finish(sandbox: GVisorSandbox) -> None:
    await put(sandbox, "sys.exit('enough')")
    with pytest.raises(GuestError, match="enough"):
        async with GuestTool.run(sandbox, "The task", "tool.py", stdin=True) as tool:
            while await tool.write(bytes(1 << 18)):
                pass
            await tool.finish()


async def test_end_of_the_sandbox_ends_the_script(sandbox: GVisorSandbox) -> None:
    await put(sandbox, "time.sleep(1000)")
    with pytest.raises(SandboxError):
        async with GuestTool.run(sandbox, "The task", "tool.py") as tool:
            waiting = asyncio.create_task(tool.finish())
            await sandbox.delete()
            await asyncio.wait_for(waiting, LONG)
