"""Give a copy of a template its identity, or send requests to the kernel of a template that is being made.

PID 1 first writes the files, binds the folder and gives up its capabilities. Then the kernel, which waits in
``guest.zygote``, receives its key, folder and environment in one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from .._text import printable
from ..errors import GuestError, LinkClosedError
from .connection import GuestLink

FROZEN = "unix:/run/jupyter/frozen"
LONGEST_REPORT = 1 << 23
LONGEST = 500
ACTIVATING = 30.0
"""Longest time for the activation of a copy, in seconds."""


async def activate(
    link: GuestLink,
    orders: Mapping[str, Any],
    *,
    folder: str,
    files: Mapping[str, str],
    expect: Mapping[str, int],
    outlive: bool,
) -> None:
    """Give a copy of a template the identity in ``orders``.

    Raises GuestError if that fails, with ESTALE if the ``folder`` is not as ``expect``ed. ``outlive`` takes effect only
    after the activation: without an identity, a sandbox whose server is gone is of no use.
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
    """Send a message to the stopped kernel of a template as soon as it listens, and return its answer.

    Raises GuestError for an invalid answer, LinkClosedError if the kernel has exited or closes the stream.
    """
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
