"""The commands of a page of the documentation, in a form in which a test can run them.

What a reader does not see is in HTML comments before a block:

    not run: WHY                    it is not run
    not run: WHY; instead: COMMAND  that is run in its place
    fails: STATUS                   its last command ends with this status
    cell: NOTEBOOK                  it is run there, in the server that was started last
    output                          it is what the block before says
    browser NOTEBOOK: CODE -> SEEN  stands alone: somebody runs a cell in the server that was started last
    meanwhile: COMMAND              stands alone: what a reader does otherwise, such as Ctrl-C
    before: a kernel                stands alone: there is a sandboxed kernel; with "before: a server", a server too
    slow                            stands alone: the page's test takes long
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

RUN = ("console", "sh", "python")
SHOWN = ("text", "json", "yaml", "{include} ", "{toctree}", "{figure} ", "ini")
ALONE = ("browser ", "meanwhile: ", "before: ", "slow")
FENCE = re.compile(r"(?P<fence>```+)(?P<language>.*)")
COMMENT = re.compile(r"<!-- (?P<text>.*?) -->")
LOOSE = re.compile(
    r"(?P<anything>\.\.\.)"
    r"|(?P<id>\b[0-9a-f]{8}(?:[0-9a-f-]*[0-9a-f])?\b)"
    r"|(?P<number>\b\d[\d.]*(?= (?:[kMGT]?B|s)\b)|\b\d{4}[\dT:.+-]*\d|\b\d\d:\d\d[\d:.]*)"
    r"|(?P<space>\s+)"
)
"""In an output: what is left out, an id, an amount of bytes or seconds or a large number or a time, and white space."""
ANY = {"anything": r".*", "id": r"[0-9a-f-]+", "number": r"\d[\dT:.+-]*", "space": r"\s+"}


@dataclass(frozen=True)
class Step:
    """A command of a shell, and what it must say, if that is shown. ``kind`` is "sh", "python" or "browser"."""

    line: int
    kind: str
    command: str
    shown: str | None = None
    status: int = 0


@dataclass(frozen=True)
class Block:
    """A fenced block, or a comment that stands alone, which has no language."""

    line: int
    language: str
    text: str
    marks: tuple[str, ...] = ()

    @property
    def excuse(self) -> str:
        """Why it is not run; empty if it is."""
        return next((mark.removeprefix("not run: ") for mark in self.marks if mark.startswith("not run: ")), "")

    @property
    def status(self) -> int:
        """How it ends."""
        return next((int(mark.removeprefix("fails: ")) for mark in self.marks if mark.startswith("fails: ")), 0)


def blocks(page: Path) -> list[Block]:
    """All of a page, in order; a comment that does not stand alone belongs to the block that follows it."""
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
            assert not (marks and line.strip()), f"{page}:{number}: no block follows {marks}"
    assert inside is None and not marks, f"{page} ends too early"
    return found


def steps(found: list[Block]) -> Iterator[Step]:
    """Return the steps of a page, in order."""
    for number, block in enumerate(found):
        instead = block.excuse.partition("; instead: ")[2]
        if instead:
            yield Step(block.line, "sh", instead)
        elif block.excuse:
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
    """Each line that begins with a prompt is a command, with what follows as its output."""
    parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    assert parts[0] == "" and len(parts) > 1, f"the console in line {block.line} begins with no prompt"
    for number, part in enumerate(parts[1:], 1):
        lines = part.splitlines()
        count = 1 + next(i for i, line in enumerate(lines) if not line.endswith("\\"))
        status = block.status if number == len(parts) - 1 else 0
        yield Step(block.line, "sh", "\n".join(lines[:count]), "\n".join(lines[count:]), status)


def fits(shown: str, seen: str) -> bool:
    """Return True if an output matches the page, apart from values that depend on the machine or the time."""
    shown, pattern, at = shown.strip(), "", 0
    for match in LOOSE.finditer(shown):
        assert match.lastgroup
        pattern += re.escape(shown[at : match.start()]) + ANY[match.lastgroup]
        at = match.end()
    return re.fullmatch(pattern + re.escape(shown[at:]), seen.strip(), re.DOTALL) is not None
