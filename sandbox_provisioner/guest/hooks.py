"""Run a notebook's own functions before its kernel is checkpointed and after it is restored.

``entrypoint`` calls ``listen`` in the kernel's process, in any version of Python; PID 1 uses ``call`` to run a hook. A
hook runs in the main thread, as a cell does, unless a cell keeps that thread busy.
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
MAIN_THREAD_FREE = 0.5
"""Seconds to wait for the main thread before the hook runs in the hooks' own thread."""
MAX_MESSAGE = 1000
"""Bytes of a request, and of an answer."""


def call(request: dict[str, Any], seconds: float) -> str:
    """Send a request to the kernel and wait for its answer, at most ``seconds``. Called by PID 1.

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
    """Serve the requests of ``call`` in a daemon thread that debuggers do not trace."""
    server = socket.socket(socket.AF_UNIX)
    try:
        if os.path.exists(PATH):
            os.unlink(PATH)
        server.bind(PATH)
        server.listen()
    except OSError:
        server.close()
        return
    thread = threading.Thread(target=_serve, args=(server,), name="sandbox hooks", daemon=True)
    thread.pydev_do_not_trace = thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]
    thread.start()


def _serve(server: socket.socket) -> None:
    while True:
        peer, _ = server.accept()
        with peer:
            try:
                request = b""
                while len(request) < MAX_MESSAGE and (piece := peer.recv(MAX_MESSAGE)):
                    request += piece
                peer.sendall(_run_hook(**json.loads(request)).encode("utf-8", "replace"))
            except Exception:
                pass  # The caller stopped waiting, the caller is not PID 1, or IPython is only partly imported.


def _run_hook(name: str, reseed: bool) -> str:
    if reseed:
        _reseed()
    shells = sys.modules.get("IPython.core.interactiveshell")
    if shells is None or not shells.InteractiveShell.initialized():
        return ""
    shell = shells.InteractiveShell.instance()
    hook = shell.user_ns.get(name)
    return _execute(shell, hook) if callable(hook) else ""


def _execute(shell: Any, hook: Callable[[], object]) -> str:
    claim, started, ended = threading.Lock(), threading.Event(), threading.Event()
    trouble = ""

    def run() -> None:
        nonlocal trouble
        if not claim.acquire(blocking=False):
            return
        started.set()
        try:
            hook()
        except BaseException as error:
            trouble = f"{type(error).__name__}: {error}"
            shell.showtraceback()
        ended.set()

    loop = getattr(getattr(shell, "kernel", None), "io_loop", None)
    if loop is not None:
        loop.add_callback(run)
        started.wait(MAIN_THREAD_FREE)
    run()
    ended.wait()
    return trouble


def _reseed() -> None:
    """Reseed the random number generators, so that this process differs from other copies of it."""
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "ssl" in sys.modules:
        sys.modules["ssl"].RAND_add(os.urandom(32), 32.0)
