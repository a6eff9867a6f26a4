"""The REST API over HTTP: Jupyter Server's authentication and authorisation, requests in, answers and problems out."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.utils import url_path_join
from tornado import web
from tornado.iostream import StreamClosedError

from . import contract, depiction, problems
from .errors import SandboxError
from .eventstream import Subscription
from .execution import Execution
from .sandboxes import Sandboxes
from .words import printable

AUTH_RESOURCE = "sandboxes"
KEEPALIVE = 15.0


class SandboxHandler(APIHandler):
    """What all have in common; ``path`` is the template of the URL in openapi.yaml."""

    auth_resource = AUTH_RESOURCE

    def initialize(self, sandboxes: Sandboxes, path: str) -> None:
        """Called by tornado for each request."""
        self.sandboxes = sandboxes
        self.path = path

    def set_default_headers(self) -> None:
        """Nothing that is told here stays true for long."""
        super().set_default_headers()
        self.set_header("Cache-Control", "no-store")

    def compute_etag(self) -> str | None:
        """Nothing is cached, so nothing needs a mark."""
        return None

    async def prepare(self) -> None:  # type: ignore[override]
        """Refuse parameters that are no text, before Jupyter Server stumbles over them."""
        try:
            for name in self.request.arguments:
                self.get_arguments(name)
        except web.HTTPError:
            self.request.arguments.clear()
            raise
        await super().prepare()

    def query(self) -> dict[str, Any]:
        """The parameters behind the question mark, checked."""
        self._check_path()
        arguments = {name: self.get_query_arguments(name, strip=False) for name in self.request.query_arguments}
        return contract.read_query(self.path, str(self.request.method).lower(), arguments)

    def body(self) -> dict[str, Any]:
        """The body, checked."""
        self.query()
        return contract.read_body(self.path, str(self.request.method).lower(), self.request.body)

    def answer(self, value: Any, status: int = 200) -> None:
        """Send what was asked for."""
        self.set_status(status)
        self.finish(json.dumps(value))

    def created(self, sandbox: dict[str, Any], started: bool = True) -> None:
        """Send a sandbox that was started, or was there, and where it is."""
        self.set_header("Location", url_path_join(self.base_url, "api/sandboxes", sandbox["id"]))
        self.answer(sandbox, 201 if started else 200)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Every error is a problem detail."""
        problem = problems.describe(kwargs.get("exc_info", (None, None, None))[1], status_code)
        self.set_status(problem["status"])
        if problem["status"] == 405:
            self.set_header("Allow", ", ".join(method.upper() for method in self._methods()))
        self.finish(json.dumps(problem), set_content_type=problems.MEDIA_TYPE)

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        """The log has what the answer leaves out; a traceback only of what should not have happened."""
        if isinstance(value, SandboxError):
            self.log.warning("%s %s: %s", self.request.method, self.request.path, printable(str(value)))
        else:
            super().log_exception(typ, value, tb)

    def _check_path(self) -> None:
        contract.check_path(self.path, self.path_kwargs)

    def _methods(self) -> list[str]:
        return [
            *(method for method in ("get", "post", "delete") if method in contract.spec()["paths"][self.path]),
            "options",
        ]


class AllHandler(SandboxHandler):
    """``/api/sandboxes``."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """list_sandboxes."""
        self.answer(await self.sandboxes.list(self.query()))

    @web.authenticated
    @authorized
    async def post(self) -> None:
        """create_sandbox."""
        self.created(*await self.sandboxes.create(self.body()))


class CapabilitiesHandler(SandboxHandler):
    """``/api/sandboxes/capabilities``."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """get_capabilities."""
        self.query()
        self.answer(await self.sandboxes.capabilities())


class StreamHandler(SandboxHandler):
    """One whose answer comes piece by piece, for as long as somebody is there to read it."""

    _streaming: asyncio.Task[None] | None = None

    async def stream(self, media_type: str, pieces: AsyncIterator[str]) -> None:
        """Send ``pieces``, each when the one before has been taken."""
        self.set_header("Content-Type", media_type)
        self.set_header("X-Accel-Buffering", "no")
        self._streaming = asyncio.create_task(self._send(pieces))
        await asyncio.wait({self._streaming})
        if not self._streaming.cancelled():
            self._streaming.result()

    def on_connection_close(self) -> None:
        """Nobody reads any more."""
        super().on_connection_close()
        if self._streaming:
            self._streaming.cancel()

    async def _send(self, pieces: AsyncIterator[str]) -> None:
        with suppress(StreamClosedError):
            await self.flush()  # which fails if the requester has left meanwhile
            async for piece in pieces:
                self.write(piece)
                await self.flush()


class EventsHandler(StreamHandler):
    """``/api/sandboxes/events``."""

    _track_activity = False

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """stream_events."""
        self.query()
        await self.stream("text/event-stream", self._events())

    async def _events(self) -> AsyncIterator[str]:
        with Subscription() as news:
            yield ": what happens to this server's sandboxes\n\n"
            while True:
                entries = await news.take(KEEPALIVE)
                told = (f"event: {entry.what}\ndata: {json.dumps(depiction.event(entry))}\n\n" for entry in entries)
                yield "".join(told) or ":\n\n"


class OneHandler(SandboxHandler):
    """``/api/sandboxes/{id}``."""

    @web.authenticated
    @authorized
    async def get(self, id: str) -> None:
        """show_sandbox."""
        self.query()
        self.answer(await self.sandboxes.show(id))

    @web.authenticated
    @authorized
    async def delete(self, id: str) -> None:
        """delete_sandbox."""
        self.query()
        self.answer(await self.sandboxes.delete(id))


class ActionHandler(SandboxHandler):
    """``/api/sandboxes/{id}/hibernate`` and the like: the last part of the path is the method to call."""

    @web.authenticated
    @authorized
    async def post(self, id: str) -> None:
        """hibernate_sandbox, wake_sandbox, restart_sandbox, revert_sandbox."""
        self.query()
        action = getattr(self.sandboxes, self.path.rpartition("/")[2])
        self.answer(await action(id))


class KeepAwakeHandler(SandboxHandler):
    """``/api/sandboxes/{id}/keep-awake``."""

    @web.authenticated
    @authorized
    async def post(self, id: str) -> None:
        """keep_sandbox_awake."""
        self.answer(await self.sandboxes.keep_awake(id, self.body()["seconds"]))


class ExecuteHandler(StreamHandler):
    """``/api/sandboxes/{id}/execute``."""

    @web.authenticated
    @authorized(action="execute")  # type: ignore[untyped-decorator]
    async def post(self, id: str) -> None:
        """execute_in_sandbox."""
        body = self.body()
        execution = await self.sandboxes.execute(id, body["command"], body.get("cwd"))
        try:
            await self.stream("application/x-ndjson", self._lines(execution))
        finally:
            await execution.kill()

    async def _lines(self, execution: Execution) -> AsyncIterator[str]:
        async for piece in execution.output():
            yield json.dumps({"stream": piece.stream, "data": base64.b64encode(piece.data).decode()}) + "\n"
        yield json.dumps({"status": await execution.status()}) + "\n"


class ForkHandler(SandboxHandler):
    """``/api/sandboxes/{id}/fork``."""

    @web.authenticated
    @authorized
    async def post(self, id: str) -> None:
        """fork_sandbox."""
        self.created(await self.sandboxes.fork(id, self.body()))


class SavepointsHandler(SandboxHandler):
    """``/api/sandboxes/{id}/savepoints``."""

    @web.authenticated
    @authorized
    async def get(self, id: str) -> None:
        """list_savepoints."""
        self.query()
        self.answer(await self.sandboxes.savepoints(id))

    @web.authenticated
    @authorized
    async def post(self, id: str) -> None:
        """create_savepoint."""
        self.answer(await self.sandboxes.create_savepoint(id, self.body()["name"]), 201)


class SavepointHandler(SandboxHandler):
    """``/api/sandboxes/{id}/savepoints/{name}``."""

    @web.authenticated
    @authorized
    async def delete(self, id: str, name: str) -> None:
        """delete_savepoint."""
        self.query()
        await self.sandboxes.delete_savepoint(id, name)
        self.set_status(204)


class RewindHandler(SandboxHandler):
    """``/api/sandboxes/{id}/savepoints/{name}/rewind``."""

    @web.authenticated
    @authorized
    async def post(self, id: str, name: str) -> None:
        """rewind_sandbox."""
        self.query()
        self.answer(await self.sandboxes.rewind(id, name))


class SnapshotsHandler(SandboxHandler):
    """``/api/sandboxes/{id}/snapshots``."""

    @web.authenticated
    @authorized
    async def get(self, id: str) -> None:
        """list_snapshots."""
        self.query()
        self.answer(await self.sandboxes.snapshots(id))

    @web.authenticated
    @authorized
    async def post(self, id: str) -> None:
        """create_snapshot."""
        self.answer(await self.sandboxes.create_snapshot(id, self.body()["name"]), 201)


class SnapshotHandler(SandboxHandler):
    """``/api/sandboxes/{id}/snapshots/{name}``."""

    @web.authenticated
    @authorized
    async def delete(self, id: str, name: str) -> None:
        """delete_snapshot."""
        self.query()
        await self.sandboxes.delete_snapshot(id, name)
        self.set_status(204)


class NothingHandler(SandboxHandler):
    """Any other path below ``/api/sandboxes/``: there is nothing, and who may not know that is told nothing else."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Whatever it is, it is not here."""
        raise web.HTTPError(404)

    head = post = put = patch = delete = get


ROUTES: tuple[tuple[str, type[SandboxHandler]], ...] = (
    ("/api/sandboxes", AllHandler),
    ("/api/sandboxes/capabilities", CapabilitiesHandler),
    ("/api/sandboxes/events", EventsHandler),
    ("/api/sandboxes/{id}", OneHandler),
    *((f"/api/sandboxes/{{id}}/{action}", ActionHandler) for action in ("hibernate", "wake", "restart", "revert")),
    ("/api/sandboxes/{id}/keep-awake", KeepAwakeHandler),
    ("/api/sandboxes/{id}/execute", ExecuteHandler),
    ("/api/sandboxes/{id}/fork", ForkHandler),
    ("/api/sandboxes/{id}/savepoints", SavepointsHandler),
    ("/api/sandboxes/{id}/savepoints/{name}", SavepointHandler),
    ("/api/sandboxes/{id}/savepoints/{name}/rewind", RewindHandler),
    ("/api/sandboxes/{id}/snapshots", SnapshotsHandler),
    ("/api/sandboxes/{id}/snapshots/{name}", SnapshotHandler),
)
"""The paths of openapi.yaml, the first that fits first."""


def handlers(base_url: str, sandboxes: Sandboxes) -> list[tuple[str, type[SandboxHandler], dict[str, Any]]]:
    """What a Jupyter Server's web application is to be given."""
    base = re.escape(base_url.rstrip("/"))
    known = [
        (base + re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", path), handler, {"sandboxes": sandboxes, "path": path})
        for path, handler in ROUTES
    ]
    return [*known, (f"{base}/api/sandboxes/.*", NothingHandler, {"sandboxes": sandboxes, "path": "/api/sandboxes"})]
