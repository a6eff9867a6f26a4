"""Provide the magic ``%sandbox`` and the module ``jupyter_sandbox``, with which a notebook controls its own sandbox.

``entrypoint`` calls ``install`` in the kernel's process before the kernel imports anything. The code must run on any
version of Python that a kernel may use. A kernel without IPython gets only the module.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PATH = "/run/jupyter/sandbox"
MAX_REQUEST = 4096
SHELLS = "IPython.core.interactiveshell"
USAGE = """\
%sandbox status           show the id of this kernel's sandbox and its saved state
%sandbox savepoint NAME   save the kernel's memory as a savepoint; the kernel runs on
%sandbox savepoints       list the savepoints
%sandbox rewind NAME      go back to a savepoint; the present state is kept as another
%sandbox keep-awake [on|off|DURATION]
                          do not hibernate while threads or subprocesses work; a duration is such as 90s, 30m or 2h
"""
OPERATIONS = {"status": (0, 0), "savepoint": (1, 1), "savepoints": (0, 0), "rewind": (1, 1), "keep-awake": (0, 1)}
"""The operations, each with the minimum and maximum number of arguments."""
MODULE = "jupyter_sandbox"
DURATION = re.compile(r"([0-9]{1,7})([smhd]?)")
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def install() -> None:
    """Add the module ``jupyter_sandbox``, and register the magic with IPython when a shell is created."""
    sys.meta_path.insert(0, _ShellFinder())
    module = ModuleType(MODULE, "The sandbox that this kernel runs in.")
    module.keep_awake = keep_awake  # type: ignore[attr-defined]
    sys.modules[MODULE] = module


@contextmanager
def keep_awake(seconds: float | None = None) -> Iterator[None]:
    """Do not hibernate this kernel as idle while the body runs, for at most ``seconds``.

    Use it in a thread or around a subprocess that works while no cell is running. Raises RuntimeError if the sandbox
    refuses.
    """
    name = f"with-{os.urandom(8).hex()}"
    _request_keep_awake(name, seconds)
    try:
        yield
    finally:
        _request_keep_awake(name, 0)


def _request_keep_awake(name: str, seconds: float | None) -> None:
    request = {"op": "keep-awake", "name": name, "seconds": seconds}
    try:
        answer = ask(request)
        while answer.get("outcome") == "restored":
            answer = ask(request)
    except Problem as problem:
        raise RuntimeError(str(problem)) from None
    if "problem" in answer:
        raise RuntimeError(answer["problem"])


class _ShellFinder:
    """Import finder that patches IPython's shell module when it is imported, and then removes itself."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != SHELLS:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            _patch_after_import(spec)
        return spec


def _patch_after_import(spec: ModuleSpec) -> None:
    """Patch the module's shell class right after the module has been executed."""
    loader: Any = spec.loader
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        execute(module)
        _patch_shell(module.InteractiveShell)

    loader.exec_module = exec_module


def _patch_shell(kind: Any) -> None:
    init_magics = kind.init_magics

    def with_ours(shell: Any) -> None:
        kind.init_magics = init_magics
        init_magics(shell)
        shell.register_magic_function(_magic(shell), "line", "sandbox")

    kind.init_magics = with_ours


def _magic(shell: Any) -> Callable[[str], None]:
    def sandbox(line: str) -> None:
        try:
            print(run(line, lambda: _cell(shell)), end="")
        except Problem as problem:
            raise sys.modules["IPython.core.error"].UsageError(str(problem)) from None

    sandbox.__doc__ = f"Show or save the state of this kernel's sandbox.\n\n{USAGE}"
    return sandbox


def _cell(shell: Any) -> dict[str, Any]:
    """Return the header of the cell's request and its execution count: the host itself answers a rewind's cell."""
    try:
        return {"parent": shell.get_parent()["header"], "count": len(shell.history_manager.input_hist_parsed) - 1}
    except (AttributeError, LookupError, TypeError):
        return {"parent": None}


class Problem(Exception):
    """The command is invalid, or the host refused it and gave a reason."""


def run(line: str, cell: Callable[[], dict[str, Any]]) -> str:
    """Execute a line of ``%sandbox`` and return the text for the user.

    ``cell`` returns the fields that a rewind adds to its request. Raises Problem.
    """
    op, *names = line.split() or ["help"]
    if op == "help":
        return USAGE
    minimum, maximum = OPERATIONS.get(op, (1, 0))
    if not minimum <= len(names) <= maximum:
        raise Problem(f"%sandbox {line.strip()[:200]} is not a valid command. The commands are:\n{USAGE}")
    request: dict[str, Any] = {"op": op}
    if op == "keep-awake":
        request.update(name="notebook", seconds=_seconds(names[0] if names else "on"))
        names = []
    if names:
        request["name"] = names[0]
    if op == "rewind":
        request.update(cell())
    answer = ask(request)
    while answer.get("outcome") == "restored" and not names:
        answer = ask(request)  # The sandbox was restored meanwhile; its new host does not know the request.
    if "problem" in answer:
        raise Problem(answer["problem"])
    return answer_text(op, "".join(names), answer)


def _seconds(word: str) -> int | None:
    """Return how many seconds to keep the kernel awake: None for no limit, 0 to stop. Raises Problem."""
    if word in ("on", "off"):
        return None if word == "on" else 0
    match = DURATION.fullmatch(word)
    if not match:
        raise Problem(f"{word[:100]!r} is not on, off, or a duration such as 90s, 30m or 2h.")
    return int(match[1]) * UNITS[match[2]]


def ask(request: dict[str, Any]) -> dict[str, Any]:
    """Send a request to the host and return its answer. Raises Problem if no valid answer arrives.

    KeyboardInterrupt ends the wait, but does not cancel the request.
    """
    data = json.dumps(request, default=_plain).encode()
    if len(data) > MAX_REQUEST:
        data = json.dumps({**request, "parent": None}).encode()
    answer = b""
    with socket.socket(socket.AF_UNIX) as peer:
        try:
            peer.connect(PATH)
            peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # PID 1 may still have sent an answer that gives the reason.
        try:
            while True:
                piece = peer.recv(MAX_REQUEST)
                if not piece:
                    break
                answer += piece
        except OSError:
            pass
    try:
        found: dict[str, Any] = json.loads(answer)
    except ValueError:
        raise Problem("The sandbox does not answer. Its server may be stopping; try again.") from None
    return found


def _plain(value: Any) -> str:
    """Return a value that JSON cannot encode, such as a date, as text."""
    return str(value.isoformat()) if hasattr(value, "isoformat") else str(value)


# -- output for the user -------------------------------------------------------------------------------------------


def answer_text(op: str, name: str, answer: dict[str, Any]) -> str:
    """Return the text that tells the user about an answer."""
    if answer.get("outcome") == "restored":
        if op == "savepoint":
            return f"Restored from savepoint {name}.\n"
        return f"Restored to the state before the rewind to {name}.\n"
    if op == "savepoint":
        return f"Saved as {name} ({size(answer['size'])} in {answer['seconds']:.1f} s). The kernel runs on.\n"
    if op == "rewind":
        return f"Rewound to {name}; the state before is kept as savepoint {answer['kept']}.\n"
    if op == "keep-awake":
        return f"{answer['awake']}.\n"
    return (_status(answer["status"]) if op == "status" else "") + _savepoints(answer)


def _status(status: dict[str, Any]) -> str:
    lines = [("Sandbox", status["sandbox_id"]), ("State", status["state"])]
    if status.get("notebook"):
        lines.append(("Notebook", status["notebook"]))
    if status.get("ephemeral"):
        lines.append(("Kept", status["ephemeral"]))
    elif status.get("idle_timeout"):
        lines.append(("When idle", f"hibernates after {duration(status['idle_timeout'])}"))
    else:
        lines.append(("When idle", "runs on"))
    if status.get("awake"):
        lines.append(("Awake", status["awake"]))
    return "".join(f"{label + ':':<12}{words}\n" for label, words in lines)


def _savepoints(answer: dict[str, Any]) -> str:
    savepoints = answer.get("savepoints")
    if savepoints is None:
        return ""
    if not savepoints:
        return "No savepoints. `%sandbox savepoint NAME` makes one.\n"
    width = max(len(one["name"]) for one in savepoints)
    lines = [f"  {one['name']:<{width}}  {when(one['created'])}  {size(one['size'])}\n" for one in savepoints]
    if answer.get("more"):
        lines.insert(0, f"  and {answer['more']} older ones\n")
    return "".join(["Savepoints:\n", *lines])


def when(created: str) -> str:
    """Shorten an ISO 8601 time in UTC to minutes."""
    return f"{created[:10]} {created[11:16]} UTC"


def size(amount: int) -> str:
    """Format a number of bytes with a decimal unit."""
    value, units = float(amount), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        del units[0]
    return f"{value:.0f} {units[0]}" if value >= 9.95 or units[0] == "B" else f"{value:.1f} {units[0]}"


def duration(seconds: float) -> str:
    """Format seconds as hours or minutes if that is exact, else as seconds."""
    for length, unit in ((3600, "hour"), (60, "minute")):
        if seconds >= length and seconds % length == 0:
            count = int(seconds // length)
            return f"{count} {unit}" if count == 1 else f"{count} {unit}s"
    return f"{seconds:g} seconds"
