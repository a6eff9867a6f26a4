"""Execute whole notebooks with nbclient: plots, widgets, input, much output, long cells, interrupts."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from kernels import run
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook
from servers import READY

pytestmark = [pytest.mark.runsc, pytest.mark.template_copies]

Execute = Callable[..., NotebookNode]
Start = Callable[..., tuple[KernelManager, BlockingKernelClient]]

PLOT = """
import matplotlib.pyplot as plt
plt.plot([1, 3, 2])
plt.show()
"""
SLIDER = """
import ipywidgets
from IPython.display import display
slider = ipywidgets.IntSlider(value=7)
display(slider)
"""
LINES = 500


@pytest.fixture
def execute(
    sandboxed: Callable[..., str], notebook_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Execute:
    """Executes cells as a notebook in a sandboxed kernel, and returns the notebook with its outputs."""
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))

    def run_cells(*cells: str, **options: Any) -> NotebookNode:
        notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])
        resources = {"metadata": {"path": str(notebook_folder)}}
        client = NotebookClient(notebook, kernel_name=sandboxed(), resources=resources, **options)
        return client.execute()

    return run_cells


def printed(cell: NotebookNode) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def test_plots_and_files(execute: Execute, notebook_folder: Path) -> None:
    notebook = execute(PLOT, "plt.savefig('saved.png')")
    (image,) = [output.data["image/png"] for output in notebook.cells[0].outputs if "data" in output]
    assert base64.b64decode(image).startswith(b"\x89PNG")
    assert (notebook_folder / "saved.png").read_bytes().startswith(b"\x89PNG")


def test_widget_state_is_saved(execute: Execute) -> None:
    notebook = execute(SLIDER, "slider.value = 11")
    (view,) = [output.data["application/vnd.jupyter.widget-view+json"] for output in notebook.cells[0].outputs]
    states = notebook.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"]
    assert states[view["model_id"]]["state"]["value"] == 11


def test_widget_change_reaches_kernel(start_kernel: Start, sandboxed: Callable[..., str]) -> None:
    _, kc = start_kernel(sandboxed())
    run(kc, SLIDER)
    moved = {"method": "update", "state": {"value": 42}, "buffer_paths": []}
    comm = {"comm_id": run(kc, "slider.model_id").strip("'"), "data": moved}
    kc.shell_channel.send(kc.session.msg("comm_msg", comm))
    assert run(kc, "slider.value") == "42"


def test_input_request(start_kernel: Start, sandboxed: Callable[..., str]) -> None:
    _, kc = start_kernel(sandboxed())
    asked: list[str] = []

    def type_in(message: dict[str, Any]) -> None:
        asked.append(message["content"]["prompt"])
        kc.input("Ada")

    reply = kc.execute_interactive("name = input('Who? ')", allow_stdin=True, stdin_hook=type_in, timeout=READY)
    assert reply["content"]["status"] == "ok"
    assert asked == ["Who? "]
    assert run(kc, "name") == "'Ada'"


def test_fifty_megabytes_of_printed_lines(execute: Execute) -> None:
    notebook = execute(f"for n in range({LINES}): print(n, 'x' * 99_999)")
    lines = printed(notebook.cells[0]).splitlines()
    assert lines == [f"{n} {'x' * 99_999}" for n in range(LINES)]


def test_single_output_of_fifty_megabytes(execute: Execute) -> None:
    notebook = execute("'ab' * 25_000_000")
    assert notebook.cells[0].outputs[0].data["text/plain"] == repr("ab" * 25_000_000)


@pytest.mark.parametrize(
    "seconds", [8, pytest.param(120, marks=[pytest.mark.slow, pytest.mark.timeout(400)], id="two minutes")]
)
def test_long_cell_streams_output(execute: Execute, seconds: int) -> None:
    cell = f"import time\nfor n in range({seconds}): print(n, flush=True); time.sleep(1)"
    notebook = execute(cell, "print('after')")
    assert printed(notebook.cells[0]).split() == [str(n) for n in range(seconds)]
    assert printed(notebook.cells[1]) == "after\n"


@pytest.mark.debian
def test_cell_over_timeout_is_interrupted(execute: Execute) -> None:
    def limit(cell: NotebookNode) -> int:
        return 8 if "sleep" in cell.source else READY

    endless = "x = 1\nimport time\nwhile True: time.sleep(0.1)"
    notebook = execute(endless, "print(x)", timeout_func=limit, interrupt_on_timeout=True, allow_errors=True)
    (error,) = notebook.cells[0].outputs
    assert error.ename == "KeyboardInterrupt"
    assert printed(notebook.cells[1]) == "1\n"
