"""Test which requests have known answers while a kernel is hibernated, and for how long a list of comms is known."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sandbox_provisioner.kernel.known_answers import COMM_INFO, MAX_TARGETS, USAGE, KnownAnswers


def learn(known: KnownAnswers, target: str = "", number: int = 1, reply: Any = None) -> dict[str, Any]:
    """Let a kernel answer a comm_info_request. Return the content of its reply."""
    header = {"msg_id": f"{target}{number}"}
    content = {"status": "ok", "comms": {"id": {"target_name": target}}} if reply is None else reply
    known.asked(header, json.dumps({"target_name": target} if target else {}).encode())
    known.replied(header, json.dumps(content).encode())
    return dict(content) if isinstance(content, dict) else {}


def test_hibernated_kernel_uses_no_memory() -> None:
    answer = KnownAnswers().answer(USAGE, {})
    assert answer and (answer["kernel_memory"], answer["kernel_cpu"]) == (0, 0)


def test_comms_are_known_for_each_target_that_was_asked() -> None:
    known = KnownAnswers()
    content = learn(known, "a")
    assert known.answer(COMM_INFO, {"target_name": "a"}) == content
    assert known.answer(COMM_INFO, {"target_name": "b"}) is None
    assert known.answer(COMM_INFO, {}) is None


@pytest.mark.parametrize("kind", ["execute_request", "comm_open", "comm_msg", "comm_close", "debug_request", None, 1])
def test_message_that_may_change_the_comms_makes_them_unknown(kind: Any) -> None:
    known = KnownAnswers()
    learn(known)
    known.requested(kind)
    assert known.answer(COMM_INFO, {}) is None


def test_reply_to_an_earlier_request_than_the_change_is_not_kept() -> None:
    known = KnownAnswers()
    known.asked({"msg_id": "1"}, b"{}")
    known.requested("execute_request")
    known.replied({"msg_id": "1"}, b'{"comms": {}}')
    assert known.answer(COMM_INFO, {}) is None


@pytest.mark.parametrize("kind", [COMM_INFO, USAGE, "kernel_info_request"])
def test_observing_requests_leave_the_comms_known(kind: str) -> None:
    known = KnownAnswers()
    learn(known)
    known.requested(kind)
    assert known.answer(COMM_INFO, {}) is not None


@pytest.mark.parametrize("reply", [[], {}, {"comms": []}, 1, "text"])
def test_malformed_reply_is_not_kept(reply: Any) -> None:
    known = KnownAnswers()
    learn(known, reply=reply)
    assert known.answer(COMM_INFO, {}) is None


def test_number_of_lists_and_of_open_requests_is_limited() -> None:
    known = KnownAnswers()
    for number in range(3 * MAX_TARGETS):
        learn(known, f"target {number}")
    assert sum(known.answer(COMM_INFO, {"target_name": f"target {n}"}) is not None for n in range(99)) == MAX_TARGETS
    for number in range(3 * MAX_TARGETS):
        known.asked({"msg_id": str(number)}, b"{}")
    assert len(known._asked) == MAX_TARGETS


def test_other_requests_have_no_known_answer() -> None:
    assert KnownAnswers().answer("kernel_info_request", {}) is None
