"""Activation: a copy of a template becomes somebody's kernel, or says, when the template is made, what it is.

PID 1 has the folder and the files first, and gives up its powers; then the kernel, which waits in guest/frozen.py, is
told its key, folder and environment in one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from .errors import GuestError, LinkClosedError
from .link import GuestLink
from .words import printable

FROZEN = "unix:/run/jupyter/frozen"
LONGEST_REPORT = 1 << 23
LONGEST = 500
ACTIVATING = 30.0
"""Seconds that a copy has to become what it is told."""


async def activate(
    link: GuestLink,
    orders: Mapping[str, Any],
    *,
    folder: str,
    files: Mapping[str, str],
    expect: Mapping[str, int],
    outlive: bool,
) -> None:
    """Make a copy of a template what ``orders`` say; GuestError, with ESTALE for a ``folder`` not as ``expect``ed.

    It comes to outlive its server only then: one that does not know whose it is would be of no use to anybody.
    """
    try:
        async with asyncio.timeout(ACTIVATING):
            await link.activate(folder=folder, files=dict(files), expect=dict(expect), outlive=False)
            said = await tell(link, op="activate", **orders)
            if outlive:
                await link.activate(folder="", files={}, expect={}, outlive=True)
    except TimeoutError:
        raise GuestError(f"A copy of a template was not ready within {ACTIVATING:g} seconds.") from None
    if said.get("trouble"):
        raise GuestError(f"A copy of a template could not be activated: {printable(str(said['trouble'])[:LONGEST])}.")


async def tell(link: GuestLink, **message: Any) -> dict[str, Any]:
    """Say something to a frozen kernel, as soon as it listens; its answer. GuestError, LinkClosedError."""
    answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    heard = bytearray()
    stream = link.open(FROZEN)

    def hear(data: bytes) -> None:
        heard.extend(data)
        stream.consumed(len(data))
        if not answer.done() and (len(heard) > LONGEST_REPORT or heard.endswith(b"\n")):
            answer.set_result(bytes(heard))

    def end() -> None:
        if not answer.done():
            answer.set_exception(LinkClosedError("The frozen kernel ended, or does not answer."))

    stream.on_data, stream.on_end = hear, end
    stream.write(json.dumps(message).encode() + b"\n")
    try:
        said = json.loads(await answer)
    except ValueError as error:
        raise GuestError("What the frozen kernel says makes no sense.") from error
    finally:
        stream.reset()
    if not isinstance(said, dict):
        raise GuestError("What the frozen kernel says makes no sense.")
    return said
