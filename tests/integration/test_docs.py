"""Run every command of the documentation and compare its output with the documented one."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_pages import RUN, SHOWN, Block, blocks, matches, steps
from doc_shell import DocShell
from leftovers import leftovers
from notebooks import until

from sandbox_provisioner.cli import app
from sandbox_provisioner.gvisor.runsc import Runsc

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MAX_NOT_RUN = 6


def has_comment(page: list[Block], comment: str) -> bool:
    """Return True if a page has this comment on a line of its own."""
    return any(block.language == "" and block.text == comment for block in page)


def pages_with_commands() -> list[object]:
    """Return a parameter for each page with commands, with its markers."""
    parameters = []
    for page in PAGES:
        content = blocks(page)
        if any(True for _ in steps(content)):
            marks = [pytest.mark.runsc, *([pytest.mark.slow] if has_comment(content, "slow") else [])]
            parameters.append(pytest.param(page, id=page.stem, marks=marks))
    return parameters


@pytest.fixture
def shell(tmp_path: Path, runsc: Runsc, runtime: Path) -> Iterator[DocShell]:
    shell = DocShell(tmp_path, runsc)
    yield shell
    shell.close()
    until(lambda: leftovers(runtime) == [])  # a template may still be under construction in the background


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", pages_with_commands())
def test_commands_of_page_print_documented_output(page: Path, shell: DocShell) -> None:
    content = blocks(page)
    if has_comment(content, "before: a server") or has_comment(content, "before: a kernel"):
        shell.prepare(server=has_comment(content, "before: a server"))
    for step in steps(content):
        output = shell.run(step)
        if step.shown is not None:
            assert matches(step.shown, output), (
                f"{page.name}:{step.line}: {step.command}\ndocumented:\n{step.shown}\nprinted:\n{output}"
            )


def test_every_code_block_is_run_shown_or_excluded() -> None:
    not_run = []
    for page in PAGES:
        for block in blocks(page):
            known = block.language in RUN or block.language == "" or block.language.startswith(SHOWN)
            assert known, f"{page.name}:{block.line}: unknown language {block.language!r}"
            if block.not_run:
                not_run.append(f"{page.name}:{block.line}: {block.not_run}")
    print("Not run:", *not_run, sep="\n")
    assert len(not_run) <= MAX_NOT_RUN, not_run


def test_index_lists_every_page_and_every_command_is_documented() -> None:
    listed = (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.stem == "index" or re.search(rf"^{page.stem}$", listed, re.MULTILINE), f"{page.name} is not listed"
    texts = "\n".join(page.read_text() for page in PAGES)
    parser = app._parser()
    (commands,) = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    assert {"setup", "list", "allow-plain"} <= set(commands)
    for command in commands:
        assert re.search(rf"jupyter sandbox {command}\b", texts), f"no page shows `jupyter sandbox {command}`"


@pytest.mark.parametrize(
    ("shown", "output"),
    [
        ("ID        SIZE\n1f3c2a9b  38 MB", "ID           SIZE\n0aacde41     381 MB\n"),
        ("woken in 0.41 s (44109460 bytes) ...", "woken in 1.2 s (52 bytes) and so on\n"),
        ("made 2026-11-16T16:10:15+00:00", "made 2027-01-02T03:04:05.6+00:00"),
    ],
)
def test_output_matches_despite_machine_and_time(shown: str, output: str) -> None:
    assert matches(shown, output)


@pytest.mark.parametrize(
    ("shown", "output"), [("saved", "running"), ("saved", "saved\nand more"), ("42", "41"), ("0 removed", "1 removed")]
)
def test_different_output_does_not_match(shown: str, output: str) -> None:
    assert not matches(shown, output)
