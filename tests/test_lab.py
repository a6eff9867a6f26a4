"""A person picks the sandboxed kernel in JupyterLab: a real server and a real browser. Run by `make test-lab`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
TOKEN = "test"
PATIENCE = 90_000


@pytest.fixture
def lab(tmp_path: Path, notebook_folder: Path) -> Iterator[str]:
    """A JupyterLab server with the sandboxed kernel installed; yields its address."""
    env = {**os.environ, "JUPYTER_DATA_DIR": str(tmp_path / "data"), "SERVER_SECRET": "do not tell"}
    sandbox = [sys.executable, "-m", "sandbox_provisioner.cli", "setup", "--kernel", "python3"]
    subprocess.run(sandbox, env=env, check=True, capture_output=True, timeout=120)
    options = ["--no-browser", "--port=0", f"--IdentityProvider.token={TOKEN}", "--LabApp.news_url=", "--allow-root"]
    command = [sys.executable, "-m", "jupyter", "lab", f"--notebook-dir={notebook_folder}", *options]
    log = tmp_path / "lab.log"
    with log.open("wb") as file:
        server = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield wait_for_address(log, server)
    finally:
        server.terminate()
        server.wait(timeout=60)


def wait_for_address(log: Path, server: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + 90
    while server.poll() is None and time.monotonic() < deadline:
        if found := re.search(r"http://127\.0\.0\.1:\d+/", log.read_text()):
            return found[0]
        time.sleep(0.2)
    raise AssertionError(f"JupyterLab did not start:\n{log.read_text()}")


@pytest.fixture
def page(lab: str) -> Iterator[Page]:
    """A new notebook with the sandboxed kernel, picked in the launcher."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page()
        page.goto(f"{lab}lab?reset&token={TOKEN}", timeout=PATIENCE)
        page.click('.jp-LauncherCard[title="Python 3 (ipykernel) (sandbox)"] >> nth=0', timeout=PATIENCE)
        page.wait_for_selector("text=(sandbox) | Idle", timeout=PATIENCE)
        page.click(".jp-Notebook .cm-content", timeout=PATIENCE)
        yield page
        browser.close()


def run(page: Page, number: int, code: str) -> str:
    """What the cell says that was typed and run as that of this number, once it is done with."""
    page.keyboard.type(code)
    page.keyboard.press("Shift+Enter")
    cell = page.locator(".jp-CodeCell").nth(number - 1)
    cell.locator("text=/^\\[\\d+\\]:$/").first.wait_for(timeout=PATIENCE)
    return "\n".join(output.strip() for output in cell.locator(".jp-OutputArea-output").all_inner_texts())


def test_a_person_picks_the_sandboxed_kernel_and_runs_a_cell(lab: str, page: Page) -> None:
    assert run(page, 1, "import os; print(os.uname().nodename, os.environ.get('SERVER_SECRET'))") == "sandbox None"
    with urllib.request.urlopen(f"{lab}api/kernels?token={TOKEN}") as answer:
        assert [kernel["name"] for kernel in json.load(answer)] == ["python3-sandbox"]


def test_a_notebook_goes_back_to_its_savepoint_and_its_cells_end(page: Page) -> None:
    run(page, 1, "x = 1")
    assert "Saved as before" in run(page, 2, "%sandbox savepoint before")
    assert run(page, 3, "x = 2; print(x)") == "2"
    assert "Rewound to before" in run(page, 4, "%sandbox rewind before")
    assert run(page, 5, "print(x)") == "1"
    assert page.locator(".jp-Dialog").count() == 0
