"""Random actions on notebooks that are open on two Jupyter Servers, for test_stress.py.

Each notebook has a counter in its kernel's memory. Every cell adds one to it and returns its value. So the next cell
shows if a cell was lost or ran twice, or if an older state was restored.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

from servers import Server
from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest
from tornado.websocket import WebSocketClientConnection, websocket_connect

TOKEN = {"Authorization": "token t", "Connection": "close"}
PATIENCE = 300.0
"""Timeout of a request in seconds. The tests set shorter limits for operations."""
AT_ONCE = 4
"""Number of notebooks with an action at the same time. With more, actions only wait for a processor."""
ADD = "n = globals().get('n', 0) + 1"
POLL_INTERVAL = 0.1


async def ask(server: Server, method: str, path: str, body: object = None) -> Any:
    """Send an HTTP request and return the decoded JSON. Raises AssertionError with the body of an error response."""
    data = None if body is None else json.dumps(body)
    request = HTTPRequest(
        f"{server.url}api/{path}", method, TOKEN, data, request_timeout=PATIENCE, allow_nonstandard_methods=True
    )
    try:
        answer = await AsyncHTTPClient(force_instance=True).fetch(request)
    except HTTPClientError as error:
        text = error.response.body.decode() if error.response and error.response.body else ""
        raise AssertionError(f"{method} {path} failed with {error.code}: {text}") from error
    return json.loads(answer.body or b"null")


class ClosedError(Exception):
    """A websocket was closed by the server, or its kernel ended."""


class Tab:
    """A browser tab's websocket to a kernel."""

    def __init__(self, server: Server, kernel_id: str) -> None:
        self._url = f"ws{server.url.removeprefix('http')}api/kernels/{kernel_id}/channels"
        self._socket: WebSocketClientConnection | None = None
        self._waiting: dict[tuple[str, str], asyncio.Future[dict[str, Any]]] = {}

    async def connect(self) -> None:
        """Open the websocket."""
        request = HTTPRequest(self._url, headers=TOKEN, request_timeout=PATIENCE)
        self._socket = await websocket_connect(request, on_message_callback=self._on_message)

    def close(self) -> None:
        """Close the websocket, even if cells are waiting."""
        if self._socket:
            self._socket.close()

    async def send(self, code: str, *wanted: str) -> list[asyncio.Future[dict[str, Any]]]:
        """Send a cell. Return a future for the first message of each ``wanted`` type or execution state."""
        assert self._socket is not None
        msg_id = uuid4().hex
        header = {"msg_id": msg_id, "msg_type": "execute_request", "username": "", "session": msg_id, "version": "5.3"}
        content = {"code": code, "silent": False, "store_history": False, "user_expressions": {"n": "n"}}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
        loop = asyncio.get_running_loop()
        futures = [self._waiting.setdefault((msg_id, kind), loop.create_future()) for kind in wanted]
        await self._socket.write_message(json.dumps(message))
        return futures

    def _on_message(self, text: str | bytes | None) -> None:
        if text is None:
            self._fail("the websocket was closed")
            return
        message = json.loads(text)
        request, content = (message["parent_header"] or {}).get("msg_id", ""), message["content"]
        if content.get("execution_state") == "dead":
            self._fail("the kernel has ended")
        future = self._waiting.pop((request, content.get("execution_state", message["msg_type"])), None)
        if future and not future.done():
            future.set_result(content)

    def _fail(self, reason: str) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ClosedError(f"a cell got no reply, because {reason}"))
                future.exception()


class Limits:
    """Measures operations. Fails if one takes longer than ``longest`` seconds."""

    def __init__(self, longest: float) -> None:
        self.longest = longest
        self.at_once = asyncio.Semaphore(AT_ONCE)
        self.durations: defaultdict[str, list[float]] = defaultdict(list)

    @asynccontextmanager
    async def within(self, operation: str, notebook: str) -> AsyncIterator[None]:
        """Measure the block, an operation on a notebook."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self.longest):
                yield
        except TimeoutError as error:
            raise AssertionError(f"{notebook}: {operation} took more than {self.longest:g} s") from error
        self.durations[operation].append(time.monotonic() - began)

    def summary(self) -> str:
        """Return a table of the operations, with their number and the longest duration."""
        rows = sorted(self.durations.items())
        lines = (f"{operation:20}{len(seconds):6}{max(seconds):8.2f} s" for operation, seconds in rows)
        return "\n".join([f"{'operation':20}{'count':>6}{'longest':>10}", *lines])


class Notebook:
    """A notebook that is open on one of two servers. ``count`` is the expected value of its counter."""

    def __init__(self, name: str, kernel: str, servers: Sequence[Server], limits: Limits, seed: object) -> None:
        self.name, self.kernel = name, kernel
        self.servers, self.limits = list(servers), limits
        self.random = random.Random(f"{seed} {name}")
        self.server = self.random.choice(self.servers)
        self.count = 0
        self.actions: list[str] = []
        """Names of all actions, for the message of a failure."""
        self._tab: Tab | None = None

    @property
    def other(self) -> Server:
        """The server on which the notebook is not open."""
        return next(server for server in self.servers if server is not self.server)

    async def live(self, until: float) -> None:
        """Do random actions until a time of the monotonic clock."""
        await self._do(self.open)
        weights: dict[Callable[[], Awaitable[None]], int] = {
            self.execute: 6,
            self.execute_many: 2,
            self.hibernate: 4,
            self.hibernate_during_a_cell: 3,
            self.wake: 2,
            self.interrupt: 2,
            self.disconnect: 3,
            self.hand_off: 3,
            self.hand_off_during_a_cell: 2,
            self.cancel_hibernate: 3,
            self.cancel_wake: 3,
            self.cancel_start: 2,
            self.start_afresh: 1,
        }
        while time.monotonic() < until:
            (action,) = self.random.choices(list(weights), list(weights.values()))
            await self._do(action)
            await asyncio.sleep(self.random.uniform(0, 0.3))

    async def _do(self, action: Callable[[], Awaitable[None]]) -> None:
        try:
            async with self.limits.at_once:
                self.actions.append(action.__name__)
                await action()
        except (AssertionError, ClosedError) as error:
            raise AssertionError(f"{self.name}: after {self.actions[-8:]}: {error}") from error

    # -- kernel and websocket

    async def open(self) -> None:
        """Open the notebook on its server. The kernel is started, or handed off by the other server."""
        session = {"path": self.name, "name": self.name, "type": "notebook", "kernel": {"name": self.kernel}}
        async with self.limits.within("open", self.name):
            self.session = await ask(self.server, "POST", "sessions", session)
            await self._read_ids()
        await self.connect()

    async def _read_ids(self) -> None:
        self.kernel_id = self.session["kernel"]["id"]
        listed = (await ask(self.server, "GET", "sandboxes"))["items"]
        (self.sandbox,) = [item["id"] for item in listed if item["notebook_path"] == self.name]

    async def connect(self) -> None:
        """Open a websocket to the kernel, and run a cell."""
        self.disconnect_now()
        async with self.limits.within("connect", self.name):
            self._tab = Tab(self.server, self.kernel_id)
            await self._tab.connect()
        await self.execute()

    def disconnect_now(self) -> None:
        """Close the websocket."""
        if self._tab:
            self._tab.close()

    async def send(self, code: str, *wanted: str) -> list[asyncio.Future[dict[str, Any]]]:
        """Send a cell. Return futures for the wanted messages."""
        assert self._tab is not None
        return await self._tab.send(code, *wanted)

    def check(self, reply: dict[str, Any], count: int) -> None:
        """Fail if a cell failed, or if the counter has another value."""
        value = reply.get("user_expressions", {}).get("n", {}).get("data", {}).get("text/plain")
        assert value == str(count), f"the counter is {value} and should be {count}: {str(reply)[:1000]}"

    # -- actions

    async def execute(self) -> None:
        """Run a cell. A hibernated kernel wakes."""
        async with self.limits.within("execute", self.name):
            (reply,) = await self.send(ADD, "execute_reply")
            self.count += 1
            self.check(await reply, self.count)

    async def execute_many(self) -> None:
        """Send several cells at once."""
        async with self.limits.within("execute many", self.name):
            replies = [(await self.send(ADD, "execute_reply"))[0] for _ in range(self.random.randint(2, 6))]
            for reply in replies:
                self.count += 1
                self.check(await reply, self.count)

    async def hibernate(self) -> None:
        """Hibernate the kernel."""
        async with self.limits.within("hibernate", self.name):
            await ask(self.server, "POST", f"sandboxes/{self.sandbox}/hibernate?force=true")

    async def hibernate_during_a_cell(self) -> None:
        """Hibernate the kernel, and send a cell at a random moment of it."""
        async with self.limits.within("hibernate in a cell", self.name):
            saving = asyncio.ensure_future(ask(self.server, "POST", f"sandboxes/{self.sandbox}/hibernate?force=true"))
            try:
                await asyncio.sleep(self.random.uniform(0, 0.5))
                (reply,) = await self.send(ADD, "execute_reply")
                self.count += 1
                self.check(await reply, self.count)
            finally:
                await saving

    async def wake(self) -> None:
        """Wake the kernel."""
        async with self.limits.within("wake", self.name):
            await ask(self.server, "POST", f"sandboxes/{self.sandbox}/wake")

    async def interrupt(self) -> None:
        """Interrupt a cell."""
        async with self.limits.within("interrupt", self.name):
            busy, reply = await self.send("import time; n += 1; time.sleep(1000)", "busy", "execute_reply")
            self.count += 1
            await busy
            while not reply.done():  # an interrupt that arrives before the cell begins has no effect
                await ask(self.server, "POST", f"kernels/{self.kernel_id}/interrupt")
                await asyncio.wait({reply}, timeout=3)
            assert (await reply)["ename"] == "KeyboardInterrupt"
        await self.resynchronize_count()

    async def resynchronize_count(self) -> None:
        """Run a cell, and accept both possible values: the interrupted cell may not have changed the counter."""
        async with self.limits.within("execute", self.name):
            (reply,) = await self.send(ADD, "execute_reply")
            content = await reply
            value = int(content["user_expressions"]["n"]["data"]["text/plain"])
            assert value in (self.count, self.count + 1), f"the counter is {value} after {self.count} and one cell"
            self.count = value

    async def disconnect(self) -> None:
        """Close the websocket while a cell runs, and open another one."""
        async with self.limits.within("disconnect", self.name):
            (busy,) = await self.send(f"import time; time.sleep({self.random.uniform(0, 0.5):.2f}); {ADD}", "busy")
            self.count += 1
            await busy
            self.disconnect_now()
            await asyncio.sleep(self.random.uniform(0, 0.3))
        await self.connect()

    async def hand_off(self) -> None:
        """Open the notebook on the other server, which asks the first one for the sandbox."""
        self.disconnect_now()
        before, kernel_id, self.server = self.server, self.kernel_id, self.other
        await self.open()
        async with self.limits.within("leave", self.name):
            while kernel_id in [kernel["id"] for kernel in await ask(before, "GET", "kernels")]:
                await asyncio.sleep(POLL_INTERVAL)

    async def hand_off_during_a_cell(self) -> None:
        """Open the notebook on the other server while a cell runs. The cell is completed there."""
        (busy,) = await self.send(f"import time; time.sleep({self.random.uniform(0.2, 1):.2f}); {ADD}", "busy")
        self.count += 1
        async with self.limits.within("execute", self.name):
            await busy
        await self.hand_off()

    async def _cancel(self, **request: Any) -> None:
        async with self.limits.within(f"cancel {request['action']}", self.name):
            await ask(self.server, "POST", "stress/cancel", {**request, "after": self.random.uniform(0, 1)})

    async def cancel_hibernate(self) -> None:
        """Cancel a hibernation at a random moment."""
        await self._cancel(action="hibernate", kernel_id=self.kernel_id)
        await self.execute()

    async def cancel_wake(self) -> None:
        """Cancel a wake at a random moment."""
        await self.hibernate()
        await self._cancel(action="wake", kernel_id=self.kernel_id)
        await self.execute()

    async def cancel_start(self) -> None:
        """Cancel a start on the other server at a random moment. Either server may have the sandbox afterwards."""
        self.disconnect_now()
        self.server = self.other
        try:
            await self._cancel(action="start", path=self.name, kernel=self.kernel)
        finally:
            self.server = self.other
        async with self.limits.within("leave", self.name):
            while (await ask(self.server, "GET", f"stress/wanted?kernel_id={self.kernel_id}"))["wanted"]:
                await asyncio.sleep(POLL_INTERVAL)
        await self.open()

    async def start_afresh(self) -> None:
        """Shut the kernel down, which deletes the sandbox. Then start a new one."""
        await self.shut_down()
        await self.open()

    async def shut_down(self) -> None:
        """Shut the kernel down, which deletes the sandbox."""
        self.disconnect_now()
        async with self.limits.within("shut down", self.name):
            await ask(self.server, "DELETE", f"sessions/{self.session['id']}")
        self.count = 0


async def stress(notebooks: Sequence[Notebook], until: float) -> None:
    """Do random actions on all notebooks until a time of the monotonic clock. Raises the first failure."""
    async with asyncio.TaskGroup() as group:
        for notebook in notebooks:
            group.create_task(notebook.live(until))
