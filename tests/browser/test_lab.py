"""Use a sandboxed kernel in JupyterLab, with a real server and a real browser. Run by `make test-lab`."""

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
from notebooks import until

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
"""Timeout in milliseconds, as Playwright expects it."""


@pytest.fixture
def lab(tmp_path: Path, notebook_folder: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Run JupyterLab with the sandboxed kernel, and yield its address. The fixture's parameter is the idle timeout."""
    env = {**os.environ, "JUPYTER_DATA_DIR": str(tmp_path / "data"), "SERVER_SECRET": "do not tell"}
    env["JUPYTER_PREFER_ENV_PATH"] = "0"  # the kernels of this test, not those of the virtual environment
    sandbox = [sys.executable, "-m", "sandbox_provisioner.cli", "setup", "--kernel", "python3"]
    if hasattr(request, "param"):
        sandbox += ["--idle-timeout", str(request.param)]
    subprocess.run(sandbox, env=env, check=True, capture_output=True, timeout=120)
    options = ["--no-browser", "--port=0", f"--IdentityProvider.token={TOKEN}", "--LabApp.news_url=", "--allow-root"]
    options += ["--LabApp.expose_app_in_browser=True"]
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
    """A new notebook with the sandboxed kernel, selected in the launcher."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page()
        page.goto(f"{lab}lab?reset&token={TOKEN}", timeout=PATIENCE)
        page.click('.jp-LauncherCard[title="Python 3 (sandbox)"] >> nth=0', timeout=PATIENCE)
        page.wait_for_selector("text=(sandbox) | Idle", timeout=PATIENCE)
        page.click(".jp-Notebook .cm-content", timeout=PATIENCE)
        yield page
        browser.close()


def run(page: Page, number: int, code: str) -> str:
    """Type and run code in the cell with this number, wait for its end, and return its output."""
    page.keyboard.type(code)
    page.keyboard.press("Shift+Enter")
    cell = page.locator(".jp-CodeCell").nth(number - 1)
    cell.locator("text=/^\\[\\d+\\]:$/").first.wait_for(timeout=PATIENCE)
    return "\n".join(output.strip() for output in cell.locator(".jp-OutputArea-output").all_inner_texts())


def test_pick_sandboxed_kernel_and_run_cell(lab: str, page: Page) -> None:
    assert run(page, 1, "import os; print(os.uname().nodename, os.environ.get('SERVER_SECRET'))") == "sandbox None"
    with urllib.request.urlopen(f"{lab}api/kernels?token={TOKEN}") as answer:
        assert [kernel["name"] for kernel in json.load(answer)] == ["python3-sandbox"]


def test_rewind_in_notebook(page: Page) -> None:
    run(page, 1, "x = 1")
    assert "Saved as before" in run(page, 2, "%sandbox savepoint before")
    assert run(page, 3, "x = 2; print(x)") == "2"
    assert "Rewound to before" in run(page, 4, "%sandbox rewind before")
    assert run(page, 5, "print(x)") == "1"
    assert page.locator(".jp-Dialog").count() == 0


def states(lab: str) -> list[str]:
    """Return the states of all sandboxes."""
    with urllib.request.urlopen(f"{lab}api/sandboxes?token={TOKEN}") as answer:
        return [sandbox["state"] for sandbox in json.load(answer)["items"]]


ASK_USAGE = """async () => {
    const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
    const header = {
        msg_id: crypto.randomUUID(), msg_type: "usage_request", username: "", session: kernel.clientId,
        date: new Date().toISOString(), version: "5.2",
    };
    const message = {header, parent_header: {}, metadata: {}, content: {}, channel: "control", buffers: []};
    return (await kernel.sendControlMessage(message, true).done).header.msg_type;
}"""
"""The request of JupyterLab's Kernel Usage panel."""
TICKS = """
import os, time
while not os.path.exists("stop"):
    print("tick", file=open("ticks", "a"))
    time.sleep(0.5)
print("end", file=open("ticks", "a"))
"""


@pytest.mark.parametrize("lab", [2], indirect=True)
def test_cell_continues_during_usage_request_and_reload(lab: str, page: Page, notebook_folder: Path) -> None:
    ticks = notebook_folder / "ticks"
    (notebook_folder / "ticks.py").write_text(TICKS)
    page.on("dialog", lambda dialog: dialog.accept())
    page.keyboard.type("%run ticks.py")
    page.keyboard.press("Shift+Enter")
    until(ticks.exists)
    assert page.evaluate(ASK_USAGE) == "usage_reply"
    for reload in (True, False):
        seen = len(ticks.read_text().splitlines())
        while len(ticks.read_text().splitlines()) < seen + 12:  # three times the idle timeout
            assert states(lab) == ["running"]
            time.sleep(0.3)
        if reload:
            page.reload(timeout=PATIENCE)
            page.wait_for_selector(".jp-Notebook .cm-content", timeout=PATIENCE)
    (notebook_folder / "stop").touch()
    until(lambda: ticks.read_text().endswith("end\n"))
    until(lambda: states(lab) == ["hibernated"])


PLANT_LINK = """import os
path = ".ipynb_checkpoints/Untitled-checkpoint.ipynb"
os.makedirs(".ipynb_checkpoints", exist_ok=True)
os.path.lexists(path) and os.unlink(path)
os.symlink("{}", path)
"""


def test_save_explains_refused_checkpoint_link(page: Page, notebook_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("the user's")
    (notebook_folder / "plant.py").write_text(PLANT_LINK.format(tmp_path / "outside"))
    run(page, 1, "%run plant.py")
    assert (notebook_folder / ".ipynb_checkpoints" / "Untitled-checkpoint.ipynb").read_text() == "the user's"
    page.keyboard.press("Control+s")
    page.click("text=Rename and Save", timeout=PATIENCE)
    page.wait_for_selector(".jp-Dialog >> text=symbolic link", timeout=PATIENCE)
    assert (tmp_path / "outside").read_text() == "the user's"
