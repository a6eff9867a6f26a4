"""Run every command of the documentation and compare its output with the documented one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_pages import RUN, SHOWN, Block, blocks, fits, steps
from doc_shell import Reader
from leftovers import leftovers
from notebooks import until

from sandbox_provisioner.gvisor.runsc import Runsc

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MOST_EXCUSES = 6


def told(found: list[Block], mark: str) -> bool:
    """Return True if a page has this comment on a line of its own."""
    return any(block.language == "" and block.text == mark for block in found)


def runnable() -> list[object]:
    """The pages with something to run, each with its marks."""
    found = []
    for page in PAGES:
        content = blocks(page)
        if any(True for _ in steps(content)):
            marks = [pytest.mark.runsc, *([pytest.mark.slow] if told(content, "slow") else [])]
            found.append(pytest.param(page, id=page.stem, marks=marks))
    return found


@pytest.fixture
def reader(tmp_path: Path, runsc: Runsc, runtime: Path) -> Iterator[Reader]:
    somebody = Reader(tmp_path, runsc)
    yield somebody
    somebody.leave()
    until(lambda: leftovers(runtime) == [])  # a template may still be under construction in the background


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", runnable())
def test_commands_of_page_print_documented_output(page: Path, reader: Reader) -> None:
    found = blocks(page)
    if told(found, "before: a server") or told(found, "before: a kernel"):
        reader.prepare(server=told(found, "before: a server"))
    for step in steps(found):
        seen = reader.do(step)
        if step.shown is not None:
            assert fits(step.shown, seen), (
                f"{page.name}:{step.line}: {step.command}\nshows:\n{step.shown}\nsaid:\n{seen}"
            )


def test_every_code_block_is_run_shown_or_excluded() -> None:
    excuses = []
    for page in PAGES:
        for block in blocks(page):
            known = block.language in RUN or block.language == "" or block.language.startswith(SHOWN)
            assert known, f"{page.name}:{block.line}: what is {block.language!r}?"
            if block.excuse:
                excuses.append(f"{page.name}:{block.line}: {block.excuse}")
    print("Not run:", *excuses, sep="\n")
    assert len(excuses) <= MOST_EXCUSES, excuses


def test_index_lists_every_page_and_every_command_is_documented() -> None:
    listed = (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.stem == "index" or re.search(rf"^{page.stem}$", listed, re.MULTILINE), f"{page.name} is not listed"
    said = "\n".join(block.text for page in PAGES for block in blocks(page) if block.language in RUN)
    for command in ("list", "show", "hibernate", "wake", "exec", "snapshot", "savepoint", "rewind", "fork", "revert"):
        assert f"jupyter sandbox {command} " in said, f"nothing shows how to {command}"


@pytest.mark.parametrize(
    ("shown", "seen"),
    [
        ("ID        SIZE\n1f3c2a9b  38 MB", "ID           SIZE\n0aacde41     381 MB\n"),
        ("woken in 0.41 s (44109460 bytes) ...", "woken in 1.2 s (52 bytes) and so on\n"),
        ("made 2026-11-16T16:10:15+00:00", "made 2027-01-02T03:04:05.6+00:00"),
    ],
)
def test_output_matches_despite_machine_and_time(shown: str, seen: str) -> None:
    assert fits(shown, seen)


@pytest.mark.parametrize(
    ("shown", "seen"), [("saved", "running"), ("saved", "saved\nand more"), ("42", "41"), ("0 removed", "1 removed")]
)
def test_different_output_does_not_match(shown: str, seen: str) -> None:
    assert not fits(shown, seen)
