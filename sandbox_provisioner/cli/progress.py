"""Show a progress line while a sandbox is saved or restored, in this process or on a server."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from .._text import one_line
from ..client import AsyncSandboxClient
from ..errors import SandboxError
from ..events import EventKind
from ..setup.progress import Progress, Step
from .output import SHORT_ID, reported, size
from .targets import Found, Server

WIDTH = 20
"""Characters of the bar."""


@contextmanager
def watched(
    arguments: argparse.Namespace, verb: str, found: Found, server: Server | None, total: int | None = None
) -> Iterator[Step]:
    """Run the block as a step that shows the progress of ``server``, if any.

    ``total`` is the number of bytes to move, if known.
    """
    progress = Progress(sys.stderr if arguments.json else sys.stdout)
    name = os.path.basename(found.sandbox.notebook_path or "")
    title = one_line(f"{verb} {found.sandbox.id[:SHORT_ID]} {name}".rstrip())
    with reported(progress, title) as step, ExitStack() as stack:
        if server:
            events = _show_events(server, found.sandbox.sandbox_id, lambda done: step.note(bar(done, total)))
            stack.enter_context(events)
        yield step


def bar(done: int, total: int | None) -> str:
    """Return a progress bar; only the moved bytes if the total is unknown."""
    if not total:
        return size(done)
    part = min(done / total, 1.0)
    filled = round(part * WIDTH)
    return f"[{'#' * filled}{'.' * (WIDTH - filled)}] {part:.0%} of {size(total)}"


@contextmanager
def _show_events(server: Server, sandbox_id: str, show: Callable[[int], None]) -> Iterator[None]:
    """Follow a server's events in a thread while the block runs; call ``show`` with the bytes that have been moved.

    Errors of the event stream are ignored.
    """
    loop = asyncio.new_event_loop()
    task = loop.create_task(_follow(server.client.url, server.client.token, sandbox_id, show))
    thread = threading.Thread(target=_run, args=(loop, task), daemon=True)
    thread.start()
    try:
        yield
    finally:
        with suppress(RuntimeError):  # the thread has already closed the loop
            loop.call_soon_threadsafe(task.cancel)
        thread.join()


def _run(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    try:
        with suppress(asyncio.CancelledError, SandboxError):
            loop.run_until_complete(task)
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


async def _follow(url: str, token: str, sandbox_id: str, show: Callable[[int], None]) -> None:
    async with AsyncSandboxClient(url, token) as client:
        async for event in client.events():
            if event.what == EventKind.PROGRESS and event.id == sandbox_id:
                show(event.size or 0)
