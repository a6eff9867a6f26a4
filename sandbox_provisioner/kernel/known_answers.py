"""Answer the requests that only observe a kernel while it is hibernated: its use of resources, and its comms.

The list of comms is repeated from the kernel's last reply, as long as no client has sent a message that may change it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from .._text import json_object

USAGE, COMM_INFO = "usage_request", "comm_info_request"
OBSERVING = frozenset({USAGE, COMM_INFO})
"""Requests that only observe a kernel: they do not keep it awake, and do not wake it if the answer is known."""
UNCHANGING = OBSERVING | {"kernel_info_request", "is_complete_request", "complete_request", "history_request"}
"""Requests that leave the kernel's comms as they are."""
MAX_TARGETS = 16
"""Maximum number of lists that are kept, and of requests whose replies are awaited."""
MAX_TARGET = 200


class KnownAnswers:
    """The known answers of one kernel. I/O loop only."""

    def __init__(self) -> None:
        self._comms: dict[str, Mapping[str, Any]] = {}
        self._asked: dict[str, str] = {}

    def requested(self, kind: object) -> None:
        """Forget the lists of comms if a request of this kind may change them. Called for each request on shell."""
        if kind not in UNCHANGING:
            self.forget()

    def forget(self) -> None:
        """Forget all lists of comms, and those that the kernel is still to send."""
        self._comms.clear()
        self._asked.clear()

    def asked(self, header: Mapping[str, Any], content: bytes) -> None:
        """Note the target of a comm_info_request that is sent to the kernel."""
        if len(self._asked) < MAX_TARGETS:
            self._asked[str(header.get("msg_id"))] = _target(json_object(content))

    def replied(self, parent: Mapping[str, Any], content: bytes) -> None:
        """Keep the list in the kernel's comm_info_reply."""
        target, found = self._asked.pop(str(parent.get("msg_id")), None), json_object(content)
        if target is None or len(self._comms) >= MAX_TARGETS or not isinstance(found.get("comms"), dict):
            return
        with suppress(ValueError):  # a kernel can send text that cannot be encoded again
            json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
            self._comms[target] = found

    def answer(self, kind: str, content: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the content of the reply to a request; None if it is not known."""
        if kind == USAGE:  # a hibernated kernel has no process
            return {"hostname": "sandbox", "pid": 0, "kernel_cpu": 0, "kernel_memory": 0, "cpu_count": os.cpu_count()}
        return self._comms.get(_target(content)) if kind == COMM_INFO else None


def _target(content: Mapping[str, Any]) -> str:
    """Return the target that a comm_info_request asks for; empty for all."""
    return str(content.get("target_name") or "")[:MAX_TARGET]
