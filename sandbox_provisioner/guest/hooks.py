"""Run a notebook's own functions before its kernel is checkpointed and after it is restored. Runs in the sandbox.

PID 1 calls ``call_hook``. The kernel's process, of any version of Python, serves the calls in a separate thread, which
``entrypoint`` starts with ``listen``. The hook itself runs in the kernel's main thread, as a cell does, unless a cell
keeps that thread busy.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

PATH = "/run/jupyter/hooks"
BEFORE_CHECKPOINT = "sandbox_before_checkpoint"
KEEP_FILES = "keep files"
"""Stands for the name of a function: only keep the content of replaced files. Older kernels do nothing then."""
MAIN_THREAD_FREE = 0.5
"""Seconds to wait for the main thread before the hook runs in the hooks' own thread."""
MAX_MESSAGE = 1000
"""Bytes of a request, and of an answer."""


def call_hook(request: dict[str, Any], seconds: float) -> str:
    """Send a request to the kernel and wait for its answer, at most ``seconds``. Runs in PID 1.

    Return the error, which is empty if the hook succeeded or the kernel has no hooks.
    """
    until = time.monotonic() + seconds
    answer = b""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(seconds)
        try:
            peer.connect(PATH)
            peer.sendall(json.dumps(request).encode())
            peer.shutdown(socket.SHUT_WR)
            while len(answer) < MAX_MESSAGE and (piece := peer.recv(MAX_MESSAGE)):
                answer += piece
                peer.settimeout(max(0.001, until - time.monotonic()))
        except TimeoutError:
            return f"it took longer than {seconds:g} seconds"
        except OSError:
            return ""
    return answer[:MAX_MESSAGE].decode("utf-8", "replace")


def listen() -> None:
    """Serve PID 1's calls in a daemon thread of the kernel, which debuggers do not trace."""
    from replaced_files import keep_content

    server = socket.socket(socket.AF_UNIX)
    try:
        if os.path.exists(PATH):
            os.unlink(PATH)
        server.bind(PATH)
        server.listen()
    except OSError:
        server.close()
        return
    thread = threading.Thread(target=_serve, args=(server, keep_content), name="sandbox hooks", daemon=True)
    thread.pydev_do_not_trace = thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]
    thread.start()


def _serve(server: socket.socket, keep_content: Callable[[], None]) -> None:
    while True:
        peer, _ = server.accept()
        with peer:
            try:
                request = b""
                while len(request) < MAX_MESSAGE and (piece := peer.recv(MAX_MESSAGE)):
                    request += piece
                call = json.loads(request)
                answer = _handle(**call)
                if call["name"] in (BEFORE_CHECKPOINT, KEEP_FILES):
                    keep_content()  # after the notebook's function, which may close files
                peer.sendall(answer.encode("utf-8", "replace"))
            except Exception:
                pass  # The caller stopped waiting, the caller is not PID 1, or IPython is only partly imported.


def _handle(name: str, reseed: bool) -> str:
    """Reseed the random number generators if requested, and run the notebook's function ``name`` if there is one."""
    if reseed:
        reseed_generators()
    shells = sys.modules.get("IPython.core.interactiveshell")
    if shells is None or not shells.InteractiveShell.initialized():
        return ""
    shell = shells.InteractiveShell.instance()
    hook = shell.user_ns.get(name)
    return _run_hook(shell, hook) if callable(hook) else ""


def _run_hook(shell: Any, hook: Callable[[], object]) -> str:
    """Run a hook once, in the main thread if that is free soon, else in this thread. Return its error."""
    only_once, started, ended = threading.Lock(), threading.Event(), threading.Event()
    error = ""

    def run() -> None:
        nonlocal error
        if not only_once.acquire(blocking=False):
            return
        started.set()
        try:
            hook()
        except BaseException as exception:
            error = f"{type(exception).__name__}: {exception}"
            shell.showtraceback()
        ended.set()

    loop = getattr(getattr(shell, "kernel", None), "io_loop", None)
    if loop is not None:
        loop.add_callback(run)
        started.wait(MAIN_THREAD_FREE)
    run()
    ended.wait()
    return error


def reseed_generators() -> None:
    """Reseed the random number generators, so that this process differs from other copies of it."""
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "ssl" in sys.modules:
        sys.modules["ssl"].RAND_add(os.urandom(32), 32.0)
