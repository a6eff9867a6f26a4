"""Read the commands and documented outputs of a documentation page, so that a test can run and compare them.

HTML comments in the page are instructions for the test. These precede a code block:

    not run: REASON                   do not run the block
    not run: REASON; instead: COMMAND run COMMAND instead of the block
    fails: STATUS                     the block's last command has this exit status
    cell: NOTEBOOK                    run the block as a cell of this notebook, in the server that was started last
    output                            the block is the output of the block before

These stand alone:

    browser NOTEBOOK: CODE -> OUTPUT  run a cell in the server that was started last; OUTPUT is optional
    meanwhile: COMMAND                run a command that stands for an action of the reader, such as Ctrl-C
    before: a kernel                  the page needs an installed sandboxed kernel
    before: a server                  the page needs a sandboxed kernel and a running server
    slow                              run the page's test only with the slow tests
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

RUN = ("console", "sh", "python")
"""Languages of the blocks that are run."""
SHOWN = ("text", "json", "yaml", "{include} ", "{toctree}", "{figure} ", "ini")
"""Languages of the blocks that are not run."""
ALONE = ("browser ", "meanwhile: ", "before: ", "slow")
FENCE = re.compile(r"(?P<fence>```+)(?P<language>.*)")
COMMENT = re.compile(r"<!-- (?P<text>.*?) -->")
VARIABLE = re.compile(
    r"(?P<anything>\.\.\.)"
    r"|(?P<age>just now|\b\d+ \w+ ago)"
    r"|(?P<id>\b[0-9a-f]{8}(?:[0-9a-f-]*[0-9a-f])?\b)"
    r"|(?P<number>\b\d[\d.]*(?= (?:[kMGT]?B|s)\b)|\b\d{4}[\dT:.+-]*\d|\b\d\d:\d\d[\d:.]*)"
    r"|(?P<space>\s+)"
)
"""Parts of a documented output that may differ: omitted text, ids, sizes, ages, durations, times, white space."""
PATTERNS = {
    "anything": r".*",
    "age": r"(?:just now|\d+ \w+ ago)",
    "id": r"[0-9a-f-]+",
    "number": r"\d[\dT:.+-]*",
    "space": r"\s+",
}


@dataclass(frozen=True)
class Step:
    """A command, its documented output (None: not documented) and exit status. The kind is sh, python or browser."""

    line: int
    kind: str
    command: str
    shown: str | None = None
    status: int = 0


@dataclass(frozen=True)
class Block:
    """A fenced code block with the comments before it, or a comment that stands alone. The latter has no language."""

    line: int
    language: str
    text: str
    marks: tuple[str, ...] = ()

    @property
    def not_run(self) -> str:
        """The reason why the block is not run. Empty if it is run."""
        return next((mark.removeprefix("not run: ") for mark in self.marks if mark.startswith("not run: ")), "")

    @property
    def status(self) -> int:
        """The expected exit status of the last command."""
        return next((int(mark.removeprefix("fails: ")) for mark in self.marks if mark.startswith("fails: ")), 0)


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    found: list[Block] = []
    marks: list[str] = []
    inside: tuple[int, str, str, list[str]] | None = None
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if inside and line.strip() == inside[1]:
            found.append(Block(inside[0], inside[2], "\n".join(inside[3]), tuple(marks)))
            inside, marks = None, []
        elif inside:
            inside[3].append(line)
        elif match := FENCE.fullmatch(line.strip()):
            inside = (number, match["fence"], match["language"], [])
        elif (match := COMMENT.fullmatch(line.strip())) and match["text"].startswith(ALONE):
            found.append(Block(number, "", match["text"]))
        elif match:
            marks.append(match["text"])
        else:
            assert not (marks and line.strip()), f"{page}:{number}: no block follows the comments {marks}"
    assert inside is None and not marks, f"{page}: the last block is not closed, or no block follows {marks}"
    return found


def steps(found: list[Block]) -> Iterator[Step]:
    """Yield the steps of a page, in order."""
    for number, block in enumerate(found):
        instead = block.not_run.partition("; instead: ")[2]
        if instead:
            yield Step(block.line, "sh", instead)
        elif block.not_run:
            continue
        elif block.language == "console":
            yield from _console(block)
        elif block.language in ("sh", "python"):
            after = found[number + 1] if number + 1 < len(found) else None
            shown = after.text if after and after.language == "text" and "output" in after.marks else None
            cell = next((mark.removeprefix("cell: ") for mark in block.marks if mark.startswith("cell: ")), "")
            if cell:
                yield Step(block.line, "browser", f"{cell}: {block.text}", shown)
            else:
                yield Step(block.line, block.language, block.text, shown, block.status)
        elif block.text.startswith("meanwhile: "):
            yield Step(block.line, "sh", block.text.removeprefix("meanwhile: "))
        elif block.text.startswith("browser "):
            code, arrow, shown = block.text.removeprefix("browser ").partition(" -> ")
            yield Step(block.line, "browser", code, shown if arrow else None)


def _console(block: Block) -> Iterator[Step]:
    """Yield a step for each line with a prompt. The lines after it are its output."""
    parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    assert parts[0] == "" and len(parts) > 1, f"the console block in line {block.line} does not begin with a prompt"
    for number, part in enumerate(parts[1:], 1):
        lines = part.splitlines()
        count = 1 + next(i for i, line in enumerate(lines) if not line.endswith("\\"))
        status = block.status if number == len(parts) - 1 else 0
        yield Step(block.line, "sh", "\n".join(lines[:count]), "\n".join(lines[count:]), status)


def matches(shown: str, output: str) -> bool:
    """Return True if an output matches the documented one, apart from values that depend on machine or time."""
    shown, pattern, position = shown.strip(), "", 0
    for match in VARIABLE.finditer(shown):
        assert match.lastgroup
        pattern += re.escape(shown[position : match.start()]) + PATTERNS[match.lastgroup]
        position = match.end()
    return re.fullmatch(pattern + re.escape(shown[position:]), output.strip(), re.DOTALL) is not None
