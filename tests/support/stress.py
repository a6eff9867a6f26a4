"""Notebooks with which random things happen on two Jupyter Servers at once, for test_stress.py.

Each notebook has a counter in its kernel's memory. Every cell adds one to it and says its value, so that a cell which
was lost, or ran twice, and a state that went back are seen at the next cell.
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
"""Seconds after which a request fails in any case; the limit for an operation is the test's."""
AT_ONCE = 4
"""Notebooks with which something happens at the same moment: more of them only wait for a processor."""
ADD = "n = globals().get('n', 0) + 1"
LOOK_EVERY = 0.1


async def ask(server: Server, method: str, path: str, body: object = None) -> Any:
    """Return the JSON of an HTTP request. AssertionError with the answer if that is an error."""
    data = None if body is None else json.dumps(body)
    request = HTTPRequest(
        f"{server.url}api/{path}", method, TOKEN, data, request_timeout=PATIENCE, allow_nonstandard_methods=True
    )
    try:
        answer = await AsyncHTTPClient(force_instance=True).fetch(request)
    except HTTPClientError as error:
        said = error.response.body.decode() if error.response and error.response.body else ""
        raise AssertionError(f"{method} {path} was answered with {error.code}: {said}") from error
    return json.loads(answer.body or b"null")


class ClosedError(Exception):
    """The server closed a websocket, or told that the kernel has ended."""


class Tab:
    """A websocket to a kernel, as a browser has it."""

    def __init__(self, server: Server, kernel_id: str) -> None:
        self._url = f"ws{server.url.removeprefix('http')}api/kernels/{kernel_id}/channels"
        self._socket: WebSocketClientConnection | None = None
        self._waiting: dict[tuple[str, str], asyncio.Future[dict[str, Any]]] = {}

    async def connect(self) -> None:
        """Open it."""
        request = HTTPRequest(self._url, headers=TOKEN, request_timeout=PATIENCE)
        self._socket = await websocket_connect(request, on_message_callback=self._heard)

    def close(self) -> None:
        """Close it, whatever is under way."""
        if self._socket:
            self._socket.close()

    async def send(self, code: str, *wanted: str) -> list[asyncio.Future[dict[str, Any]]]:
        """Send a cell; return for each of the ``wanted`` kinds of messages a future that has its first one."""
        assert self._socket is not None
        name = uuid4().hex
        header = {"msg_id": name, "msg_type": "execute_request", "username": "", "session": name, "version": "5.3"}
        content = {"code": code, "silent": False, "store_history": False, "user_expressions": {"n": "n"}}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
        loop = asyncio.get_running_loop()
        futures = [self._waiting.setdefault((name, kind), loop.create_future()) for kind in wanted]
        await self._socket.write_message(json.dumps(message))
        return futures

    def _heard(self, text: str | bytes | None) -> None:
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
                future.set_exception(ClosedError(f"A cell has no reply: {reason}"))
                future.exception()


class Limits:
    """Measures operations; one that takes over ``longest`` seconds fails as a hang."""

    def __init__(self, longest: float) -> None:
        self.longest = longest
        self.turns = asyncio.Semaphore(AT_ONCE)
        self.took: defaultdict[str, list[float]] = defaultdict(list)

    @asynccontextmanager
    async def within(self, what: str, name: str) -> AsyncIterator[None]:
        """Do ``what`` with notebook ``name`` in time."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self.longest):
                yield
        except TimeoutError as error:
            raise AssertionError(f"{name}: {what} has been under way for {self.longest:g} s") from error
        self.took[what].append(time.monotonic() - began)

    def summary(self) -> str:
        """Return a table of the operations: how many, and the longest."""
        lines = (f"{what:20}{len(took):6}{max(took):8.2f} s" for what, took in sorted(self.took.items()))
        return "\n".join([f"{'operation':20}{'done':>6}{'longest':>10}", *lines])


class Notebook:
    """A notebook that is open on one of two servers; ``count`` is the value that its counter must have."""

    def __init__(self, name: str, kernel: str, servers: Sequence[Server], limits: Limits, seed: object) -> None:
        self.name, self.kernel = name, kernel
        self.servers, self.limits = list(servers), limits
        self.random = random.Random(f"{seed} {name}")
        self.server = self.random.choice(self.servers)
        self.count = 0
        self.done: list[str] = []
        self._tab: Tab | None = None

    @property
    def other(self) -> Server:
        """The server that does not have it."""
        return next(server for server in self.servers if server is not self.server)

    async def live(self, until: float) -> None:
        """Do random things until a time of the monotonic clock."""
        await self._do(self.open)
        things: dict[Callable[[], Awaitable[None]], int] = {
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
            (thing,) = self.random.choices(list(things), list(things.values()))
            await self._do(thing)
            await asyncio.sleep(self.random.uniform(0, 0.3))

    async def _do(self, thing: Callable[[], Awaitable[None]]) -> None:
        try:
            async with self.limits.turns:
                self.done.append(thing.__name__)
                await thing()
        except (AssertionError, ClosedError) as error:
            raise AssertionError(f"{self.name}: after {self.done[-8:]}: {error}") from error

    # -- its kernel and its websocket

    async def open(self) -> None:
        """Open it on its server: its kernel starts, or comes from the other server."""
        session = {"path": self.name, "name": self.name, "type": "notebook", "kernel": {"name": self.kernel}}
        async with self.limits.within("open", self.name):
            self.session = await ask(self.server, "POST", "sessions", session)
            await self._identify()
        await self.connect()

    async def _identify(self) -> None:
        self.kernel_id = self.session["kernel"]["id"]
        listed = (await ask(self.server, "GET", "sandboxes"))["items"]
        (self.sandbox,) = [item["id"] for item in listed if item["notebook_path"] == self.name]

    async def connect(self) -> None:
        """Open a websocket to its kernel, and run a cell."""
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
        """Send a cell; return futures for the wanted messages."""
        assert self._tab is not None
        return await self._tab.send(code, *wanted)

    def check(self, reply: dict[str, Any], count: int) -> None:
        """See that a cell ended well, with that value of the counter."""
        value = reply.get("user_expressions", {}).get("n", {}).get("data", {}).get("text/plain")
        assert value == str(count), f"the counter is {value} and should be {count}: {str(reply)[:1000]}"

    # -- things that happen

    async def execute(self) -> None:
        """Run a cell; a kernel that sleeps wakes for it."""
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
            await ask(self.server, "POST", f"sandboxes/{self.sandbox}/hibernate")

    async def hibernate_during_a_cell(self) -> None:
        """Hibernate the kernel while a cell is sent, at a random moment."""
        async with self.limits.within("hibernate in a cell", self.name):
            saving = asyncio.ensure_future(ask(self.server, "POST", f"sandboxes/{self.sandbox}/hibernate"))
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
            while not reply.done():  # one that comes before the cell began interrupts nothing
                await ask(self.server, "POST", f"kernels/{self.kernel_id}/interrupt")
                await asyncio.wait({reply}, timeout=3)
            assert (await reply)["ename"] == "KeyboardInterrupt"
        await self.settle()

    async def settle(self) -> None:
        """Learn whether an interrupt came before the cell had begun."""
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
        """Open it on the other server, which asks the first one for the sandbox."""
        self.disconnect_now()
        before, kernel_id, self.server = self.server, self.kernel_id, self.other
        await self.open()
        async with self.limits.within("leave", self.name):
            while kernel_id in [kernel["id"] for kernel in await ask(before, "GET", "kernels")]:
                await asyncio.sleep(LOOK_EVERY)

    async def hand_off_during_a_cell(self) -> None:
        """Open it on the other server while a cell runs, which ends there."""
        (busy,) = await self.send(f"import time; time.sleep({self.random.uniform(0.2, 1):.2f}); {ADD}", "busy")
        self.count += 1
        async with self.limits.within("execute", self.name):
            await busy
        await self.hand_off()

    async def _cancel(self, **asked: Any) -> None:
        async with self.limits.within(f"cancel {asked['action']}", self.name):
            await ask(self.server, "POST", "stress/cancel", {**asked, "after": self.random.uniform(0, 1)})

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
        """Cancel a start on the other server at a random moment; the sandbox is on the one or the other then."""
        self.disconnect_now()
        self.server = self.other
        try:
            await self._cancel(action="start", path=self.name, kernel=self.kernel)
        finally:
            self.server = self.other
        async with self.limits.within("leave", self.name):
            while (await ask(self.server, "GET", f"stress/wanted?kernel_id={self.kernel_id}"))["wanted"]:
                await asyncio.sleep(LOOK_EVERY)
        await self.open()

    async def start_afresh(self) -> None:
        """Shut the kernel down, which deletes the sandbox, and start a new one."""
        await self.shut_down()
        await self.open()

    async def shut_down(self) -> None:
        """Shut the kernel down, which deletes the sandbox."""
        self.disconnect_now()
        async with self.limits.within("shut down", self.name):
            await ask(self.server, "DELETE", f"sessions/{self.session['id']}")
        self.count = 0


async def stress(notebooks: Sequence[Notebook], until: float) -> None:
    """Let all notebooks live until a time of the monotonic clock; the first failure ends it."""
    async with asyncio.TaskGroup() as group:
        for notebook in notebooks:
            group.create_task(notebook.live(until))
