"""Requests from a notebook to its sandbox: valid ones are answered, and invalid ones do no harm."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from fake_actions import FakeActions as Clerk
from fake_actions import checkpoint
from guests import LIMIT, scripted_guest
from hypothesis import given
from hypothesis import strategies as st
from jupyter_client.session import Session

from sandbox_provisioner.errors import SandboxError
from sandbox_provisioner.guest.magics import answer_text
from sandbox_provisioner.kernel.host_api import (
    INTERNAL,
    MAX_ANSWER,
    MAX_PROBLEM,
    attend,
    serve,
)
from sandbox_provisioner.kernel.synthetic_replies import Cell, end_cell
from sandbox_provisioner.persistence.metadata import Checkpoint

HEADER = {"msg_id": "a1", "msg_type": "execute_request", "session": "s", "username": "me", "version": "5.4"}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
REQUESTS = st.fixed_dictionaries(
    {"op": st.sampled_from(["status", "savepoint", "savepoints", "rewind", "keep-awake", "reset-home"]) | JSON},
    optional={
        "name": JSON,
        "seconds": JSON,
        "parent": st.dictionaries(st.sampled_from(list(HEADER)), JSON) | JSON,
        "count": JSON,
    },
)


@pytest.fixture
def clerk() -> Clerk:
    return Clerk()


# -- validation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_", [{}, {"op": "delete"}, {"op": ["status"]}, {"op": "savepoint"}, {"op": "rewind"}])
async def test_unknown_operation_is_refused_with_a_hint(clerk: Clerk, request_: dict[str, Any]) -> None:
    assert "`%sandbox` lists the operations" in (await serve(request_, clerk))["problem"]


@pytest.mark.parametrize("name", ["", "..", "a/b", "a b", "-a", "a" * 129, "a\n", "\ud800", 1, None, ["a"]])
async def test_invalid_name_is_refused(clerk: Clerk, name: Any) -> None:
    for op in ("savepoint", "rewind"):
        problem = (await serve({"op": op, "name": name}, clerk))["problem"]
        assert "is not a valid name" in problem
        assert len(problem) < 400
    assert not clerk.made and not clerk.rewound


@pytest.mark.parametrize("seconds", [-1, 10_000_001, float("nan"), float("inf"), True, "1", [1]])
async def test_invalid_time_is_refused(clerk: Clerk, seconds: Any) -> None:
    answer = await serve({"op": "keep-awake", "name": "a", "seconds": seconds}, clerk)
    assert answer["problem"].startswith("A kernel cannot be kept awake for")


@pytest.mark.parametrize("seconds", [None, 0, 0.5, 10_000_000])
async def test_valid_time_is_accepted(clerk: Clerk, seconds: Any) -> None:
    answer = await serve({"op": "keep-awake", "name": "a", "seconds": seconds}, clerk)
    assert answer == {"awake": f"It is kept awake for {seconds} seconds"}


@pytest.mark.parametrize(
    "parent",
    [None, "a1", [], {}, {"msg_id": 1}, {**HEADER, "session": "s" * 10_000}, {**HEADER, "msg_id": "\ud800"}],
    ids=str,
)
async def test_rewind_works_without_a_valid_header_of_its_cell(clerk: Clerk, parent: Any) -> None:
    await serve({"op": "rewind", "name": "before", "parent": parent, "count": 3}, clerk)
    assert clerk.rewound == [("before", None)]


async def test_only_known_fields_of_a_cells_header_are_kept(clerk: Clerk) -> None:
    parent = {**HEADER, "date": 5, "subshell_id": None, "extra": "x", "msg_type": "shutdown_request"}
    await serve({"op": "rewind", "name": "before", "parent": parent, "count": "many"}, clerk)
    assert clerk.rewound == [("before", Cell(HEADER, 0))]


@given(REQUESTS)
def test_any_request_is_answered_or_refused(request_: dict[str, Any]) -> None:
    clerk = Clerk()
    answer = asyncio.run(serve(request_, clerk))
    assert answer.get("problem") != INTERNAL
    assert len(json.dumps(answer)) < 1000
    for _, cell in clerk.rewound:
        assert cell is None or end_cell(cell, Session(key=b"secret"), "Rewound.").private


# -- answers ---------------------------------------------------------------------------------------------------------


async def test_savepoint_is_made_and_its_size_and_time_are_reported(clerk: Clerk) -> None:
    answer = await serve({"op": "savepoint", "name": "before"}, clerk)
    assert list(clerk.made) == ["before"]
    text = answer_text("savepoint", "before", answer)
    assert text == "Saved as before (123 MB in 0.4 s). The kernel keeps running.\n"


async def test_status_lists_the_savepoints_oldest_first(clerk: Clerk) -> None:
    clerk.made = {"late": checkpoint(), "early": checkpoint(created="2026-11-15T08:00:00.000+00:00")}
    assert answer_text("status", "", await serve({"op": "status"}, clerk)) == (
        "Sandbox:    nb-1\n"
        "State:      running\n"
        "Notebook:   /n/a.ipynb\n"
        "When idle:  hibernates after 30 minutes\n"
        "Savepoints:\n"
        "  early  2026-11-15 08:00 UTC  123 MB\n"
        "  late   2026-11-16 15:50 UTC  123 MB\n"
    )


def test_status_lists_the_files_that_the_kernel_sees() -> None:
    files = {"writable": ["/p"], "read_only": ["/p/.git/config", "/usr"], "in_memory": ["/home/me", "/tmp"]}
    text = answer_text("status", "", {"status": {"sandbox_id": "nb-1", "state": "running", "files": files}})
    assert text.endswith(
        "Writable:   /p\n"
        "Read-only:  /p/.git/config, /usr\n"
        "In memory:  /home/me, /tmp\n"
        "Elsewhere:  files cannot be written. Files in memory are saved with the kernel, and deleted with it.\n"
    )


async def test_status_of_ephemeral_sandbox_gives_reason() -> None:
    words = answer_text(
        "status", "", await serve({"op": "status"}, Clerk(ephemeral="Nothing is kept: it has no notebook."))
    )
    assert words.endswith("Nothing is kept: it has no notebook.\n")
    assert "avepoint" not in words


async def test_empty_list_of_savepoints_explains_how_to_make_one(clerk: Clerk) -> None:
    words = answer_text("savepoints", "", await serve({"op": "savepoints"}, clerk))
    assert words == "No savepoints. `%sandbox savepoint NAME` makes one.\n"


async def test_home_is_reset_at_the_next_restart(clerk: Clerk) -> None:
    answer = await serve({"op": "reset-home"}, clerk)
    assert answer_text("reset-home", "", answer) == "The next restart of the kernel empties its home folder.\n"


async def test_rewind_gets_the_cell_that_requested_it(clerk: Clerk) -> None:
    answer = await serve({"op": "rewind", "name": "before", "parent": HEADER, "count": 3}, clerk)
    assert clerk.rewound == [("before", Cell(HEADER, 3))]
    assert answer == {"kept": "before-rewind-1"}


async def test_only_the_latest_of_many_savepoints_are_listed(clerk: Clerk) -> None:
    clerk.made = {f"{number:04}-{'x' * 100}": checkpoint(created=f"2026-{number:04}") for number in range(1000)}
    answer = await serve({"op": "savepoints"}, clerk)
    assert MAX_ANSWER // 2 < len(json.dumps(answer)) <= MAX_ANSWER
    names = [one["name"] for one in answer["savepoints"]]
    assert names == list(clerk.made)[-len(names) :]
    assert f"and {1000 - len(names)} older ones" in answer_text("savepoints", "", answer)


async def test_sandbox_error_is_reported_and_any_other_is_only_logged(
    clerk: Clerk, caplog: pytest.LogCaptureFixture
) -> None:
    request = {"op": "savepoint", "name": "before"}
    clerk.error = SandboxError("There is one already.", "Choose another name.")
    assert await serve(request, clerk) == {"problem": "There is one already. Choose another name."}
    clerk.error = SandboxError("x" * 100_000)
    assert len((await serve(request, clerk))["problem"]) == MAX_PROBLEM
    assert caplog.text == ""
    clerk.error = ValueError("a secret")
    with caplog.at_level(logging.ERROR):
        assert await serve(request, clerk) == {"problem": INTERNAL}
    assert "a secret" in caplog.text


# -- over a connection -----------------------------------------------------------------------------------------------


class Slow(Clerk):
    """A kernel whose requests end only when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[str] = []
        self.go = asyncio.Event()

    async def savepoint(self, name: str) -> Checkpoint:
        self.begun.append(name)
        await self.go.wait()
        return await super().savepoint(name)


async def test_requests_are_answered_one_at_a_time_in_their_order() -> None:
    async with scripted_guest() as guest:
        await guest.hello()
        slow = Slow()
        attend(guest.connection, slow)
        for number, name in enumerate(("first", "second"), 1):
            await guest.say(op="ask", number=number, request={"op": "savepoint", "name": name})
        async with asyncio.timeout(LIMIT):
            while not slow.begun:
                await asyncio.sleep(0)
        await guest.say(op="ask", number=3, request={"op": "nonsense"})
        for _ in range(10):
            await asyncio.sleep(0)
        assert slow.begun == ["first"]
        slow.go.set()
        assert [(await guest.expect_control("answer"))["number"] for _ in range(3)] == [1, 2, 3]
        assert slow.begun == ["first", "second"]


async def test_no_answer_is_sent_to_a_guest_that_ended_meanwhile() -> None:
    async with scripted_guest() as guest:
        await guest.hello()
        slow = Slow()
        attend(guest.connection, slow)
        await guest.say(op="ask", number=1, request={"op": "savepoint", "name": "before"})
        async with asyncio.timeout(LIMIT):
            while not slow.begun:
                await asyncio.sleep(0)
        guest.connection.close(SandboxError("it ended."))
        slow.go.set()
        async with asyncio.timeout(LIMIT):
            while not slow.made:
                await asyncio.sleep(0)
        assert guest.arrived() == []
