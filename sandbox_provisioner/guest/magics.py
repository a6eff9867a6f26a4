"""The magic ``%sandbox``: a notebook asks after its own sandbox, names a state of it, and goes back to one.

It is put into IPython by ``install``, which is called in the kernel's own process before that has imported anything,
whatever its Python's version; a kernel without IPython never hears of it.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PATH = "/run/jupyter/sandbox"
MAX_REQUEST = 4096
SHELLS = "IPython.core.interactiveshell"
USAGE = """\
%sandbox status           what this kernel's sandbox is called, and what is kept of it
%sandbox savepoint NAME   keep the kernel's memory as it is now; the kernel runs on
%sandbox savepoints       the savepoints that there are
%sandbox rewind NAME      go back to a savepoint; what is now is kept as another
"""
WORDS = {"status": 0, "savepoint": 1, "savepoints": 0, "rewind": 1}
"""What can be asked for, and how many words follow it."""


def install() -> None:
    """Have IPython know the magic from its first cell on, if it is ever imported."""
    sys.meta_path.insert(0, _Watch())


class _Watch:
    """Sees one module being imported, and is gone then."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != SHELLS:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            _follow(spec)
        return spec


def _follow(spec: ModuleSpec) -> None:
    """Once the module has been executed, its shell adds the magic to the others."""
    loader: Any = spec.loader
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        execute(module)
        _add(module.InteractiveShell)

    loader.exec_module = exec_module


def _add(kind: Any) -> None:
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

    sandbox.__doc__ = f"Ask after this kernel's sandbox, or save its state.\n\n{USAGE}"
    return sandbox


def _cell(shell: Any) -> dict[str, Any]:
    """The header of the request that the cell is, and its number, for a host that has to answer it itself."""
    try:
        return {"parent": shell.get_parent()["header"], "count": len(shell.history_manager.input_hist_parsed) - 1}
    except (AttributeError, LookupError, TypeError):
        return {"parent": None}


class Problem(Exception):
    """What was asked for makes no sense, or the host says why it was not done."""


def run(line: str, cell: Callable[[], dict[str, Any]]) -> str:
    """Do what the line says, in a ``cell``; returns what the person is told."""
    op, *names = line.split() or ["help"]
    if op == "help":
        return USAGE
    if len(names) != WORDS.get(op, -1):
        raise Problem(f"%sandbox {line.strip()[:200]} is not among these:\n{USAGE}")
    request: dict[str, Any] = {"op": op}
    if names:
        request["name"] = names[0]
    if op == "rewind":
        request.update(cell())
    answer = ask(request)
    while answer.get("outcome") == "restored" and not names:
        answer = ask(request)  # the host that was asked is not this one's any more
    if "problem" in answer:
        raise Problem(answer["problem"])
    return told(op, "".join(names), answer)


def ask(request: dict[str, Any]) -> dict[str, Any]:
    """The host's answer to a request; KeyboardInterrupt ends the wait for it, and not what was asked for."""
    said = json.dumps(request, default=_plain).encode()
    if len(said) > MAX_REQUEST:
        said = json.dumps({**request, "parent": None}).encode()
    answer = b""
    with socket.socket(socket.AF_UNIX) as peer:
        try:
            peer.connect(PATH)
            peer.sendall(said)
            peer.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the answer, if there is one, says why
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
        raise Problem("The sandbox does not answer. Its server may be about to stop; try again.") from None
    return found


def _plain(value: Any) -> str:
    """A date as text."""
    return str(value.isoformat()) if hasattr(value, "isoformat") else str(value)


# -- what a person is told -----------------------------------------------------------------------------------------


def told(op: str, name: str, answer: dict[str, Any]) -> str:
    """An answer in words."""
    if answer.get("outcome") == "restored":
        if op == "savepoint":
            return f"This is savepoint {name} again.\n"
        return f"This is the kernel as it was before it was to be rewound to {name}.\n"
    if op == "savepoint":
        return f"Saved as {name} ({size(answer['size'])} in {answer['seconds']:.1f} s). The kernel runs on.\n"
    if op == "rewind":
        return f"Rewound to {name}; what was is kept as savepoint {answer['kept']}.\n"
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
    return "".join(f"{label + ':':<12}{words}\n" for label, words in lines)


def _savepoints(answer: dict[str, Any]) -> str:
    savepoints = answer.get("savepoints")
    if savepoints is None:
        return ""
    if not savepoints:
        return "There is no savepoint. `%sandbox savepoint NAME` makes one.\n"
    width = max(len(one["name"]) for one in savepoints)
    lines = [f"  {one['name']:<{width}}  {when(one['created'])}  {size(one['size'])}\n" for one in savepoints]
    if answer.get("more"):
        lines.insert(0, f"  and {answer['more']} that are older\n")
    return "".join(["Savepoints:\n", *lines])


def when(created: str) -> str:
    """An ISO 8601 time in UTC, to the minute."""
    return f"{created[:10]} {created[11:16]} UTC"


def size(amount: int) -> str:
    """Bytes as a person counts them."""
    value, units = float(amount), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        del units[0]
    return f"{value:.0f} {units[0]}" if value >= 9.95 or units[0] == "B" else f"{value:.1f} {units[0]}"


def duration(seconds: float) -> str:
    """Seconds as a person counts them."""
    for length, unit in ((3600, "hour"), (60, "minute")):
        if seconds >= length and seconds % length == 0:
            count = int(seconds // length)
            return f"{count} {unit}" if count == 1 else f"{count} {unit}s"
    return f"{seconds:g} seconds"
