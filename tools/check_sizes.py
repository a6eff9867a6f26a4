"""Fail if a module, class or function of the package is too long to be read in one go. Run by `make check`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "sandbox_provisioner"
MODULE, CLASS, FUNCTION = 450, 300, 50
"""Maximum lines of each."""


def too_long(path: Path) -> Iterator[str]:
    """Yield a description of the module and of each class and function in it that is too long."""
    text = path.read_text()
    if (lines := text.count("\n")) > MODULE:
        yield f"{path}: {lines} lines, at most {MODULE}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            most = CLASS if isinstance(node, ast.ClassDef) else FUNCTION
            if (lines := (node.end_lineno or 0) - node.lineno + 1) > most:
                yield f"{path}:{node.lineno}: {node.name} has {lines} lines, at most {most}"


if __name__ == "__main__":
    found = [line for path in sorted(PACKAGE.rglob("*.py")) for line in too_long(path)]
    sys.exit("\n".join(found) or 0)
