"""Make the blocking client, client/_sync.py, from the asynchronous one, client/_async.py: one source, two clients.

``python tools/unasync.py`` writes it; ``--check`` fails if it is not what would be written.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parent.parent / "sandbox_provisioner" / "client"
SOURCE, TARGET = CLIENT / "_async.py", CLIENT / "_sync.py"

WORDS = (
    (r"``_sync\.py`` is made .*\n", "This file is made from ``_async.py`` by ``tools/unasync.py``: change that one.\n"),
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\basynccontextmanager\b", "contextmanager"),
    (r"\bAsync(SandboxClient|Iterator)\b", r"\1"),
    (r"\bhttpx\.AsyncClient\b", "httpx.Client"),
    (r"\ba(close|read|iter_lines)\b", r"\1"),
    (r"\b__a(enter|exit)__\b", r"__\1__"),
)


def unasync(source: str) -> str:
    """Return the blocking version of the program."""
    for pattern, replacement in WORDS:
        source = re.sub(pattern, replacement, source)
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(TARGET), "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True, cwd=CLIENT).stdout


def main(arguments: list[str]) -> int:
    """Write the blocking client, or check it, and return the exit status."""
    made = unasync(SOURCE.read_text())
    if "--check" not in arguments:
        TARGET.write_text(made)
        return 0
    if TARGET.exists() and TARGET.read_text() == made:
        return 0
    print(f"{TARGET} is not made from {SOURCE.name}: run `python tools/unasync.py`.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
