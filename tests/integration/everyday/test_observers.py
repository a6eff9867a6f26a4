"""Test that programs which only observe a kernel neither wake it nor keep it awake."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.session import Session
from kernels import LONG, Open
from notebooks import Notebook, until
from servers import Server

pytestmark = [pytest.mark.runsc, pytest.mark.user]

USAGE = {"hostname": "sandbox", "pid": 0, "kernel_cpu": 0, "kernel_memory": 0}


def ask(kc: BlockingKernelClient, channel: str, kind: str, **content: Any) -> dict[str, Any]:
    """Send a request. Return its reply, and check that iopub has its busy and idle status."""
    message = kc.session.msg(kind, content)
    getattr(kc, f"{channel}_channel").send(message)
    reply = getattr(kc, f"get_{channel}_msg")(timeout=LONG)
    assert reply["parent_header"]["msg_id"] == message["header"]["msg_id"]
    states: list[str] = []
    while len(states) < 2:
        news = kc.get_iopub_msg(timeout=LONG)
        if news["parent_header"].get("msg_id") == message["header"]["msg_id"]:
            states.append(news["content"]["execution_state"])
    assert states == ["busy", "idle"]
    return dict(reply)


def test_usage_of_a_hibernated_kernel_is_answered_without_waking_it(open_notebook: Open) -> None:
    notebook = open_notebook()
    assert ask(notebook.kc, "control", "usage_request")["content"]["hostname"] == "sandbox"
    notebook.run(
        "import ipykernel.kernelbase as base\nseen = []\nold = base.Kernel.usage_request\n"
        "async def usage(*a): seen.append(1); await old(*a)\n"
        "get_ipython().kernel.control_handlers['usage_request'] = lambda *a: usage(get_ipython().kernel, *a)"
    )
    notebook.hibernate()
    for _ in range(3):
        reply = ask(notebook.kc, "control", "usage_request")
        assert (reply["msg_type"], {**reply["content"], **USAGE}) == ("usage_reply", reply["content"])
    newcomer = notebook.km.client(session=Session(key=notebook.km.session.key))
    newcomer.start_channels()
    assert ask(newcomer, "control", "usage_request")["content"]["kernel_memory"] == 0
    assert notebook.asleep
    assert notebook.run("print(len(seen))") == "0\n"
    assert ask(newcomer, "control", "usage_request")["content"]["pid"] > 0
    assert notebook.run("print(len(seen))") == "1\n"
    newcomer.stop_channels()


def test_list_of_comms_is_repeated_until_a_message_may_change_it(open_notebook: Open) -> None:
    notebook = open_notebook()
    notebook.run("from comm import create_comm\nfirst = create_comm(target_name='a'), create_comm(target_name='b')")
    notebook.drain()
    known = {target: ask(notebook.kc, "shell", "comm_info_request", **target_of(target)) for target in ("", "a")}
    assert [len(reply["content"]["comms"]) for reply in known.values()] == [2, 1]
    for _ in range(2):
        notebook.hibernate()
        for target, before in known.items():
            reply = ask(notebook.kc, "shell", "comm_info_request", **target_of(target))
            assert reply["content"] == before["content"]
        assert notebook.asleep
        notebook.wake()
    notebook.run("second = create_comm(target_name='a')")
    notebook.hibernate()
    reply = ask(notebook.kc, "shell", "comm_info_request", target_name="a")
    assert len(reply["content"]["comms"]) == 2
    assert not notebook.asleep


def target_of(name: str) -> dict[str, str]:
    return {"target_name": name} if name else {}


def test_unsigned_request_is_not_answered(open_notebook: Open) -> None:
    notebook = open_notebook()
    notebook.hibernate()
    stranger = notebook.km.client(session=Session(key=b"another key"))
    stranger.start_channels()
    stranger.control_channel.send(stranger.session.msg("usage_request"))
    assert ask(notebook.kc, "control", "usage_request")["content"]["kernel_memory"] == 0
    assert not stranger.control_channel.msg_ready()
    assert notebook.asleep
    stranger.stop_channels()


def test_requests_during_the_save_are_answered(open_notebook: Open) -> None:
    notebook = open_notebook()
    notebook.run("ballast = bytearray(200_000_000)")

    async def hibernate_and_observe() -> None:
        saving = asyncio.create_task(notebook.km.provisioner.hibernate())
        while not saving.done():
            notebook.kc.control_channel.send(notebook.kc.session.msg("usage_request"))
            sent.append(1)
            await asyncio.sleep(0.05)
        await saving

    sent: list[int] = []
    asyncio.run(hibernate_and_observe())
    for _ in sent:  # those that reached the kernel just before the save wake it
        notebook.kc.get_control_msg(timeout=LONG)


def test_resource_usage_extension_sees_a_hibernated_kernel(
    serve: Callable[..., Server], sandboxed: Callable[..., str]
) -> None:
    server = serve("--ServerApp.jpserver_extensions={'jupyter_resource_usage': True}")
    notebook = Notebook(server, sandboxed(enable_checkpoint_at_idle=True, idle_timeout=3.0))

    def usage() -> dict[str, Any]:
        status, answer = server.ask("GET", f"metrics/v1/kernel_usage/get_usage/{notebook.kernel_id}")
        assert status == 200
        return dict(answer["content"])

    def state() -> str:
        return str(server.ask("GET", "sandboxes")[1]["items"][0]["state"])

    assert usage()["hostname"] == "sandbox"
    until(lambda: usage() and state() == "hibernated")
    assert {**usage(), **USAGE}.items() >= USAGE.items()
    assert usage()["kernel_memory"] == 0
    assert state() == "hibernated"
    notebook.close()
