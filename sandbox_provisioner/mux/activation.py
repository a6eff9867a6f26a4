"""Give a copy of a template its identity, or send requests to the kernel of a template that is being made.

Runs on the host's I/O loop. PID 1 first writes the files, binds the folder and gives up its capabilities. Then the
kernel, which waits in ``guest.zygote``, receives its key, folder and environment in one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from .._text import printable
from ..errors import GuestError, LinkClosedError
from .connection import GuestConnection

ZYGOTE = "unix:/run/jupyter/frozen"
MAX_ANSWER = 1 << 23
"""Maximum bytes of the stopped kernel's answer."""
MAX_PROBLEM = 500
"""Characters of the stopped kernel's error that are reported."""
ACTIVATING = 30.0
"""Time limit in seconds for the activation of a copy."""


async def activate(
    connection: GuestConnection,
    identity: Mapping[str, Any],
    *,
    folder: str,
    parts: Sequence[tuple[str, str, int]],
    cover: str,
    files: Mapping[str, str],
    expect: Mapping[str, int],
    outlive: bool,
) -> None:
    """Give a copy of a template its ``identity``: key, folder and environment.

    PID 1 writes ``files``, binds ``folder`` with its protected ``parts``, and makes ``cover``, a folder above it,
    read-only. Raises GuestError if that fails, with the errno ESTALE if a part, or a path in ``expect``, no longer has
    the given st_ctime_ns. ``outlive`` is set last: a copy without an identity must end with its server.
    """
    shown = {"folder": folder, "parts": parts, "cover": cover}
    try:
        async with asyncio.timeout(ACTIVATING):
            await connection.activate(**shown, files=dict(files), expect=dict(expect), outlive=False)
            answer = await tell(connection, op="activate", **identity)
            if outlive:
                await connection.activate(folder="", parts=[], cover="", files={}, expect={}, outlive=True)
    except TimeoutError:
        raise GuestError(f"A copy of a template was not ready within {ACTIVATING:g} seconds.") from None
    if answer.get("trouble"):
        problem = printable(str(answer["trouble"])[:MAX_PROBLEM])
        raise GuestError(f"A copy of a template could not be activated: {problem}.")


async def tell(connection: GuestConnection, **message: Any) -> dict[str, Any]:
    """Send a message to the stopped kernel of a template as soon as it listens, and return its answer.

    Raises GuestError for an invalid answer, LinkClosedError if the kernel has exited or closes the stream.
    """
    reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    received = bytearray()
    stream = connection.open(ZYGOTE)

    def receive(data: bytes) -> None:
        received.extend(data)
        stream.consumed(len(data))
        if not reply.done() and (len(received) > MAX_ANSWER or received.endswith(b"\n")):
            reply.set_result(bytes(received))

    def end() -> None:
        if not reply.done():
            reply.set_exception(LinkClosedError("The template's kernel has exited or does not answer."))

    stream.on_data, stream.on_end = receive, end
    stream.write(json.dumps(message).encode() + b"\n")
    try:
        answer = json.loads(await reply)
        if not isinstance(answer, dict):
            raise ValueError("not an object")
        return answer
    except ValueError as error:
        raise GuestError("Invalid answer from the template's kernel.") from error
    finally:
        stream.reset()
