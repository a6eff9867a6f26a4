"""Define ``Source``, the interface of each way to get runsc, and ``run``, which runs the commands of a source."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from ...errors import SandboxError
from ...gvisor.programs import trusted_path
from ..progress import Note


class Source(ABC):
    """A way to get runsc."""

    name: ClassVar[str]
    title: ClassVar[str]

    @abstractmethod
    def obtain(self, target: Path, workspace: Path, note: Note) -> None:
        """Write runsc to ``target``. ``workspace`` is an empty folder for temporary files.

        Raises SandboxError with a one-line problem on failure.
        """


def run(
    argv: Sequence[str],
    note: Note,
    *,
    cwd: Path,
    limit: float,
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> str:
    """Run a command, pass each line of its output to ``note``, and return the output.

    The command and its children are killed after ``limit`` seconds or when this process is interrupted. Raises
    SandboxError if it was killed and, with ``check``, if its status is not 0.
    """
    environment = {**(os.environ if env is None else env), "LC_ALL": "C", "PATH": trusted_path()}
    lines = []
    with subprocess.Popen(
        argv,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as child:
        clock = threading.Timer(limit, os.killpg, (child.pid, signal.SIGKILL))
        clock.daemon = True
        try:
            clock.start()
            for line in child.stdout or ():
                lines.append(line)
                note(line)
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
        finally:
            clock.cancel()
    if child.returncode == -signal.SIGKILL:
        raise SandboxError(f"{Path(argv[0]).name} was stopped after {limit:.0f} s: {_reason(lines)}")
    if check and child.returncode:
        raise SandboxError(f"{Path(argv[0]).name} failed: {_reason(lines)}")
    return "".join(lines)


def _reason(lines: Sequence[str]) -> str:
    """Return the last error in a command's output, or else its last line, as the reason of its failure."""
    printed = [" ".join(line.split()) for line in lines if line.strip()]
    errors = [line for line in printed if line.startswith(("ERROR:", "E:"))]
    return (errors or printed or ["it gave no reason"])[-1][:300]
