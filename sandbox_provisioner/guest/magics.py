"""Provide the magic ``%sandbox`` and the module ``jupyter_sandbox``, with which a notebook controls its own sandbox.

Runs in the kernel's process in the sandbox, in the thread of the cell that uses it, with any version of Python.
``entrypoint`` calls ``install`` before the kernel imports anything. A kernel without IPython gets only the module.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PATH = "/run/jupyter/sandbox"
MAX_REQUEST = 4096
SHELLS = "IPython.core.interactiveshell"
USAGE = """\
%sandbox status           show the id of this kernel's sandbox and its saved state
%sandbox savepoint NAME   save the kernel's memory as a savepoint; the kernel keeps running
%sandbox savepoints       list the savepoints
%sandbox rewind NAME      go back to a savepoint; first save the present state as another one
%sandbox keep-awake [on|off|DURATION]
                          do not hibernate while threads or subprocesses work; DURATION: for example 90s, 30m, 2h
%sandbox reset-home       at the next restart of the kernel, do not keep the files in its home folder
"""
OPERATIONS = {
    "status": (0, 0),
    "savepoint": (1, 1),
    "savepoints": (0, 0),
    "rewind": (1, 1),
    "keep-awake": (0, 1),
    "reset-home": (0, 0),
}
"""The operations, each with the minimum and maximum number of arguments."""
NAMED = {
    "savepoint": "a name for the savepoint",
    "rewind": "the name of a savepoint (%sandbox savepoints lists them)",
}
"""The operations that need a name, each with the text that explains it."""
MODULE = "jupyter_sandbox"
DURATION = re.compile(r"([0-9]{1,7})([smhd]?)")
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def install(on_shell: Callable[[Any], None] = lambda shell: None) -> None:
    """Add the module ``jupyter_sandbox``. Register the magic when a shell is created; then call ``on_shell``."""
    sys.meta_path.insert(0, _ShellFinder(on_shell))
    module = ModuleType(MODULE, "The sandbox that this kernel runs in.")
    module.keep_awake = keep_awake  # type: ignore[attr-defined]
    sys.modules[MODULE] = module


@contextmanager
def keep_awake(seconds: float | None = None) -> Iterator[None]:
    """Do not hibernate this kernel as idle while the body runs, for at most ``seconds``.

    Use it in a thread or around a subprocess that works while no cell is running. Raises RuntimeError if the host
    refuses.
    """
    request = {"op": "keep-awake", "name": f"with-{os.urandom(8).hex()}", "seconds": seconds}
    try:
        ask(request)
        try:
            yield
        finally:
            ask({**request, "seconds": 0})
    except Problem as problem:
        raise RuntimeError(str(problem)) from None


class _ShellFinder:
    """Import finder that patches IPython's shell module when it is imported, and then removes itself."""

    def __init__(self, on_shell: Callable[[Any], None]) -> None:
        self.on_shell = on_shell

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != SHELLS:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            _patch_after_import(spec, self.on_shell)
        return spec


def _patch_after_import(spec: ModuleSpec, on_shell: Callable[[Any], None]) -> None:
    """Patch the module's shell class right after the module has been executed."""
    loader: Any = spec.loader
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        execute(module)
        _patch_shell(module.InteractiveShell, on_shell)

    loader.exec_module = exec_module


def _patch_shell(shell_class: Any, on_shell: Callable[[Any], None]) -> None:
    """Let the first shell of this class register the magic and call ``on_shell``, and then restore the class."""
    original = shell_class.init_magics

    def init_magics(shell: Any) -> None:
        shell_class.init_magics = original
        original(shell)
        shell.register_magic_function(_magic(shell), "line", "sandbox")
        on_shell(shell)

    shell_class.init_magics = init_magics


def _magic(shell: Any) -> Callable[[str], None]:
    def sandbox(line: str) -> None:
        try:
            print(run(line, lambda: _current_cell(shell)), end="")
        except Problem as problem:
            raise sys.modules["IPython.core.error"].UsageError(str(problem)) from None

    sandbox.__doc__ = f"Show or save the state of this kernel's sandbox.\n\n{USAGE}"
    return sandbox


def _current_cell(shell: Any) -> dict[str, Any]:
    """Return the header and execution count of the cell's request, which the host has to answer after a rewind."""
    try:
        return {"parent": shell.get_parent()["header"], "count": len(shell.history_manager.input_hist_parsed) - 1}
    except (AttributeError, LookupError, TypeError):
        return {"parent": None}


class Problem(Exception):
    """The command is invalid, or the host refused it and gave a reason."""


def run(line: str, cell: Callable[[], dict[str, Any]]) -> str:
    """Execute a line of ``%sandbox`` and return the text for the user. Raises Problem.

    ``cell`` returns the fields that a rewind adds to its request.
    """
    op, *arguments = line.split() or ["help"]
    if op == "help":
        return USAGE
    if op in NAMED and not arguments:
        raise Problem(f"%sandbox {op} needs {NAMED[op]}, for example: %sandbox {op} before-cleaning")
    minimum, maximum = OPERATIONS.get(op, (1, 0))
    if not minimum <= len(arguments) <= maximum:
        raise Problem(f"%sandbox {line.strip()[:200]} is not a valid command. The commands are:\n{USAGE}")
    request: dict[str, Any] = {"op": op}
    if op == "keep-awake":
        request.update(name="notebook", seconds=_parse_duration("".join(arguments) or "on"))
    elif arguments:
        request["name"] = arguments[0]
    if op == "rewind":
        request.update(cell())
    return answer_text(op, request.get("name", ""), ask(request))


def _parse_duration(word: str) -> int | None:
    """Return how many seconds to keep the kernel awake: None for no limit, 0 to stop. Raises Problem."""
    if word in ("on", "off"):
        return None if word == "on" else 0
    match = DURATION.fullmatch(word)
    if not match:
        raise Problem(f"{word[:100]!r} is not on, off, or a duration such as 90s, 30m or 2h.")
    return int(match[1]) * UNITS[match[2]]


def ask(request: dict[str, Any]) -> dict[str, Any]:
    """Send a request to the host and return its answer. Raises Problem if it is refused or not answered.

    If the sandbox is restored meanwhile, its new host does not know the request, which is then sent again. For a
    savepoint or a rewind the restore itself is the answer. KeyboardInterrupt ends the wait, but does not cancel the
    request.
    """
    answer = _ask_once(request)
    while answer.get("outcome") == "restored" and request["op"] not in ("savepoint", "rewind"):
        answer = _ask_once(request)
    if "problem" in answer:
        raise Problem(answer["problem"])
    return answer


def _ask_once(request: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(request, default=_as_text).encode()
    if len(data) > MAX_REQUEST:
        data = json.dumps({**request, "parent": None}).encode()
    answer = b""
    with socket.socket(socket.AF_UNIX) as peer:
        with suppress(OSError):  # PID 1 may have refused the request already, with a reason to read.
            peer.connect(PATH)
            peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)
        with suppress(OSError):
            while piece := peer.recv(MAX_REQUEST):
                answer += piece
    try:
        decoded: dict[str, Any] = json.loads(answer)
    except ValueError:
        raise Problem("The sandbox does not answer. Its server may be stopping; try again.") from None
    return decoded


def _as_text(value: Any) -> str:
    """Return a value that JSON cannot encode, such as a date, as text."""
    return str(value.isoformat()) if hasattr(value, "isoformat") else str(value)


# -- output for the user -------------------------------------------------------------------------------------------


def answer_text(op: str, name: str, answer: dict[str, Any]) -> str:
    """Return the text that the user sees for an answer."""
    if answer.get("outcome") == "restored":
        if op == "savepoint":
            return f"Restored from savepoint {name}.\n"
        return f"Restored to the state before the rewind to {name}.\n"
    if op == "savepoint":
        return f"Saved as {name} ({size(answer['size'])} in {answer['seconds']:.1f} s). The kernel keeps running.\n"
    if op == "rewind":
        return f"Rewound to {name}; the state before is kept as savepoint {answer['kept']}.\n"
    if op == "keep-awake":
        return f"{answer['awake']}.\n"
    if op == "reset-home":
        return "The next restart of the kernel empties its home folder.\n"
    return (_status(answer["status"]) if op == "status" else "") + _savepoints(answer)


def _status(status: dict[str, Any]) -> str:
    lines = {"Sandbox": status["sandbox_id"], "State": status["state"], "Notebook": status.get("notebook")}
    if status.get("ephemeral"):
        lines["Ephemeral"] = status["ephemeral"]
    else:
        timeout = status.get("idle_timeout")
        lines["When idle"] = f"hibernates after {duration(timeout)}" if timeout else "keeps running"
    lines["Awake"] = status.get("awake")
    files = status.get("files", {})
    for label, kind in (("Writable", "writable"), ("Read-only", "read_only"), ("In memory", "in_memory")):
        lines[label] = ", ".join(files.get(kind, []))
    if files:
        lines["Elsewhere"] = "files cannot be written. Files in memory are saved with the kernel, and deleted with it."
    return "".join(f"{label + ':':<12}{text}\n" for label, text in lines.items() if text)


def _savepoints(answer: dict[str, Any]) -> str:
    savepoints = answer.get("savepoints")
    if savepoints is None:
        return ""
    if not savepoints:
        return "No savepoints. `%sandbox savepoint NAME` makes one.\n"
    width = max(len(savepoint["name"]) for savepoint in savepoints)
    text = "Savepoints:\n"
    if answer.get("more"):
        text += f"  and {answer['more']} older ones\n"
    for savepoint in savepoints:
        created = f"{savepoint['created'][:10]} {savepoint['created'][11:16]} UTC"
        text += f"  {savepoint['name']:<{width}}  {created}  {size(savepoint['size'])}\n"
    return text


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
