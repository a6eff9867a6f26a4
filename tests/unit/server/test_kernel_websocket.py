"""Test many websockets to one kernel: they share the kernel_info requests that Jupyter Server sends for each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Empty
from typing import Any
from uuid import uuid4

import pytest
import websocket
from notebooks import Notebook
from servers import READY, Server

pytestmark = pytest.mark.runsc

COUNT = 16


class Browser:
    """A websocket to a kernel, as a browser opens it."""

    def __init__(self, notebook: Notebook) -> None:
        address = f"{notebook.server.url}api/kernels/{notebook.kernel_id}/channels?token=t".replace("http", "ws", 1)
        self.socket = websocket.create_connection(address, timeout=READY)

    def run(self, code: str) -> list[str]:
        """Run a cell until its reply and its idle status have arrived. Return the types of its messages."""
        request = uuid4().hex
        header = {"msg_id": request, "msg_type": "execute_request", "username": "", "session": "", "version": "5.3"}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": {"code": code}, "channel": "shell"}
        self.socket.send(json.dumps(message))
        types: list[str] = []
        while not {"execute_reply", "idle"} <= set(types):
            answer = json.loads(self.socket.recv())
            if answer["parent_header"].get("msg_id") == request:
                types.append(answer["content"].get("execution_state", answer["msg_type"]))
        return types


@pytest.fixture
def notebook(serve: Callable[..., Server], sandboxed: Callable[..., str]) -> Iterator[Notebook]:
    notebook = Notebook(serve(), sandboxed())
    yield notebook
    notebook.close()


def open_at_once(notebook: Notebook) -> list[Browser]:
    with ThreadPoolExecutor(COUNT) as pool:
        return list(pool.map(lambda _: Browser(notebook), range(COUNT)))


def kernel_info_requests(notebook: Notebook) -> set[str]:
    """Return the ids of all kernel_info requests that appeared on the iopub channel."""
    found: set[str] = set()
    while True:
        try:
            message: dict[str, Any] = notebook.kc.get_iopub_msg(timeout=1)
        except Empty:
            return found
        if message["parent_header"].get("msg_type") == "kernel_info_request":
            found.add(message["parent_header"]["msg_id"])


def test_websockets_opened_at_once_share_kernel_info_requests(notebook: Notebook) -> None:
    kernel_info_requests(notebook)
    browsers = open_at_once(notebook)
    with ThreadPoolExecutor(COUNT) as pool:
        cells = list(pool.map(lambda browser: browser.run("1"), browsers))
    for types in cells:
        assert sorted(types) == ["busy", "execute_input", "execute_reply", "execute_result", "idle"]
    assert 0 < len(kernel_info_requests(notebook)) < COUNT  # Jupyter Server itself sends at least two per websocket
    for browser in browsers:
        browser.socket.close()
