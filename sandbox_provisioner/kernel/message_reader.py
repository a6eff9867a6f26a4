"""Read the headers of Jupyter messages as they pass, and check the messages' signatures.

The bodies are hashed piece by piece and not kept, so a message of any size needs little memory.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Mapping
from typing import Any

DELIMITER = b"<IDS|MSG>"
MAX_SIGNATURE = 256
MAX_HEADER = 1 << 16
MAX_IDENTITIES = 8
SIGNED_FRAMES = 4
"""Header, parent header, metadata and content. Buffers follow and are not signed."""

Header = Mapping[str, Any]


class MessageReader:
    """A ``zmtp.Sink`` that calls ``on_message(header, parent_header)`` for each message with a valid signature.

    Reads one direction of a connection. ``key`` and ``scheme`` come from the connection file; with an empty key,
    messages are not signed and all are reported.
    """

    def __init__(self, key: bytes, scheme: str, on_message: Callable[[Header, Header], None]) -> None:
        self._base = hmac.new(key, digestmod=scheme.partition("-")[2]) if key else None
        self._on_message = on_message
        self._begin()

    def _begin(self) -> None:
        self._kept = b""
        self._identities = 0
        self._frame = -2
        """-2 before the delimiter, -1 in the signature, then the index of a signed frame."""
        self._signature = b""
        self._parts: list[bytes] = []
        self._sum = self._base.copy() if self._base else None
        self._valid = True

    def piece(self, data: bytes) -> None:
        """Process the next bytes of the current frame."""
        if self._frame >= SIGNED_FRAMES or not self._valid:
            return
        if self._sum and self._frame >= 0:
            self._sum.update(data)
        if self._frame < 2:
            largest = (len(DELIMITER) + 1, MAX_SIGNATURE, MAX_HEADER, MAX_HEADER)[self._frame + 2]
            self._kept += data[: largest + 1 - len(self._kept)]
            if len(self._kept) > largest and self._frame > -2:
                self._valid = False

    def end_frame(self, more: bool) -> None:
        """End the current frame, and the message if ``more`` is False."""
        kept, self._kept = self._kept, b""
        if self._frame == -2:
            self._identities += 1
            if kept == DELIMITER:
                self._frame = -1
            elif self._identities > MAX_IDENTITIES:
                self._valid = False
        elif self._frame == -1:
            self._signature, self._frame = kept, 0
        else:
            if self._frame < 2:
                self._parts.append(kept)
            self._frame += 1
        if not more:
            self._end_message()

    def _end_message(self) -> None:
        try:
            if self._valid and self._frame >= SIGNED_FRAMES and self._signed():
                header, parent = map(json.loads, self._parts)
                if isinstance(header, dict) and isinstance(parent, dict):
                    self._on_message(header, parent)
        except (ValueError, RecursionError):
            pass
        finally:
            self._begin()

    def _signed(self) -> bool:
        return self._sum is None or hmac.compare_digest(self._sum.hexdigest().encode(), self._signature)
