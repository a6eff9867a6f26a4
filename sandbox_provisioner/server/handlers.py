"""Serve the REST API over HTTP, with Jupyter Server's authentication and authorization."""

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

from .._text import printable
from ..errors import SandboxError
from ..sandbox.model import encode
from . import models, openapi, problem_details
from .event_stream import Subscription
from .execution import Execution
from .plain_kernels import PlainKernelGuard
from .service import Sandboxes

AUTH_RESOURCE = "sandboxes"
KEEPALIVE = 15.0
"""Seconds without an event after which a stream of events sends an empty comment."""


class SandboxHandler(APIHandler):
    """Base class of all handlers; ``path`` is the URL template in openapi.yaml."""

    auth_resource = AUTH_RESOURCE

    def initialize(self, sandboxes: Sandboxes, guard: PlainKernelGuard, path: str) -> None:
        """Set the attributes. Called by tornado for each request."""
        self.sandboxes = sandboxes
        self.guard = guard
        self.path = path

    def set_default_headers(self) -> None:
        """Forbid caching: every response is soon out of date. Called by tornado."""
        super().set_default_headers()
        self.set_header("Cache-Control", "no-store")

    def compute_etag(self) -> str | None:
        """Return None: responses are not cached. Called by tornado."""
        return None

    async def prepare(self) -> None:  # type: ignore[override]
        """Reject parameters that are not UTF-8 text, before Jupyter Server fails on them. Called by tornado."""
        try:
            for name in self.request.arguments:
                self.get_arguments(name)
        except web.HTTPError:
            self.request.arguments.clear()
            raise
        await super().prepare()

    def query(self) -> dict[str, Any]:
        """Check the URL and return its query parameters. Raises BadRequestError."""
        self._check_path()
        arguments = {  # tornado's own method replaces control characters
            name: [self.decode_argument(value, name) for value in values]
            for name, values in self.request.query_arguments.items()
        }
        return openapi.read_query(self.path, str(self.request.method).lower(), arguments)

    def body(self) -> dict[str, Any]:
        """Check the request and return its body. Raises BadRequestError."""
        self.query()
        return openapi.read_body(self.path, str(self.request.method).lower(), self.request.body)

    def answer(self, value: Any, status: int = 200) -> None:
        """Send an instance of one of the classes in ``sandbox.model`` as JSON."""
        self.set_status(status)
        self.finish(json.dumps(encode(value)))

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Send an error as a problem detail. Called by tornado."""
        problem = problem_details.describe(kwargs.get("exc_info", (None, None, None))[1], status_code)
        self.set_status(problem["status"])
        if problem["status"] == 405:
            self.set_header("Allow", ", ".join(method.upper() for method in self._methods()))
        self.finish(json.dumps(problem), set_content_type=problem_details.MEDIA_TYPE)

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        """Log the full error, of which the response omits parts; add a traceback if unexpected. Called by tornado."""
        if isinstance(value, SandboxError):
            self.log.warning("%s %s: %s", self.request.method, self.request.path, printable(str(value)))
        else:
            super().log_exception(typ, value, tb)

    def _check_path(self) -> None:
        openapi.check_path(self.path, self.path_kwargs)

    def _methods(self) -> list[str]:
        return [
            *(method for method in ("get", "post", "put", "delete") if method in openapi.spec()["paths"][self.path]),
            "options",
        ]


class OperationHandler(SandboxHandler):
    """Handler of the operations whose results are sent as JSON. Their ``operationId`` names the method to call."""

    @property
    def operations(self) -> Any:
        """The object with the methods."""
        return self.sandboxes

    async def run(self, **parts: str) -> None:
        """Call the method with the variable parts of the path, the query parameters and the fields of the body.

        A result is sent with the status that openapi.yaml describes. An operation that starts a kernel
        returns a tuple: the sandbox, and True if the kernel was started, False if it was open already.
        """
        operation = openapi.spec()["paths"][self.path].get(str(self.request.method).lower())
        if operation is None:
            raise web.HTTPError(405)
        fields = self.body() if "requestBody" in operation else self.query()
        result = await getattr(self.operations, operation["operationId"])(*parts.values(), **fields)
        status = int(min(operation["responses"]))
        if result is None:
            self.set_status(status)
        elif isinstance(result, tuple):
            sandbox, started = result
            self.set_header("Location", url_path_join(self.base_url, "api/sandboxes", sandbox.id))
            self.answer(sandbox, 201 if started else 200)
        else:
            self.answer(result, status)

    @web.authenticated
    @authorized
    async def get(self, **parts: str) -> None:
        """Handle GET."""
        await self.run(**parts)

    @web.authenticated
    @authorized
    async def post(self, **parts: str) -> None:
        """Handle POST."""
        await self.run(**parts)

    @web.authenticated
    @authorized
    async def delete(self, **parts: str) -> None:
        """Handle DELETE."""
        await self.run(**parts)


class PlainNotebooksHandler(OperationHandler):
    """Handler of ``/api/sandboxes/plain-notebooks``."""

    @property
    def operations(self) -> Any:
        """The object with the methods."""
        return self.guard

    @web.authenticated
    @authorized(action="execute")  # type: ignore[untyped-decorator]
    async def put(self) -> None:
        """Handle PUT. It lets a notebook's code run outside of sandboxes."""
        await self.run()


class StreamHandler(SandboxHandler):
    """Base class of handlers that stream their response until the client disconnects."""

    _streaming: asyncio.Task[None] | None = None

    async def stream(self, media_type: str, pieces: AsyncIterator[str]) -> None:
        """Send ``pieces``, each after the previous one has been written to the connection."""
        self.set_header("Content-Type", media_type)
        self.set_header("X-Accel-Buffering", "no")
        self._streaming = asyncio.create_task(self._send(pieces))
        await asyncio.wait({self._streaming})
        if not self._streaming.cancelled():
            self._streaming.result()

    def on_connection_close(self) -> None:
        """Cancel the stream. Called by tornado when the client disconnects."""
        super().on_connection_close()
        if self._streaming:
            self._streaming.cancel()

    async def _send(self, pieces: AsyncIterator[str]) -> None:
        with suppress(StreamClosedError):
            await self.flush()  # raises if the client has disconnected meanwhile
            async for piece in pieces:
                self.write(piece)
                await self.flush()


class EventsHandler(StreamHandler):
    """Handler of ``/api/sandboxes/events``."""

    _track_activity = False

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Stream the events of this server's sandboxes (operation ``stream_events``)."""
        self.query()
        await self.stream("text/event-stream", self._events())

    async def _events(self) -> AsyncIterator[str]:
        with Subscription() as subscription:
            yield ": events of this server's sandboxes\n\n"
            while True:
                entries = await subscription.take(KEEPALIVE)
                lines = (f"event: {entry.what}\ndata: {json.dumps(models.event(entry))}\n\n" for entry in entries)
                yield "".join(lines) or ":\n\n"


class ExecuteHandler(StreamHandler):
    """Handler of ``/api/sandboxes/{id}/execute``."""

    @web.authenticated
    @authorized(action="execute")  # type: ignore[untyped-decorator]
    async def post(self, id: str) -> None:
        """Execute a command in a sandbox and stream its output (operation ``execute_in_sandbox``)."""
        body = self.body()
        execution = await self.sandboxes.execute_in_sandbox(id, body["command"], body.get("cwd"))
        try:
            await self.stream("application/x-ndjson", self._lines(execution))
        finally:
            await execution.kill()

    async def _lines(self, execution: Execution) -> AsyncIterator[str]:
        async for piece in execution.output():
            yield json.dumps({"stream": piece.stream, "data": base64.b64encode(piece.data).decode()}) + "\n"
        yield json.dumps({"status": await execution.status()}) + "\n"


class NothingHandler(SandboxHandler):
    """Handler of all other paths below ``/api/sandboxes/``: 404, but only for authorized clients."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Raise 404 for any method."""
        raise web.HTTPError(404)

    head = post = put = patch = delete = get


ACTIONS = ("hibernate", "wake", "restart", "revert", "reset", "keep-awake", "fork")

ROUTES: tuple[tuple[str, type[SandboxHandler]], ...] = (
    ("/api/sandboxes", OperationHandler),
    ("/api/sandboxes/capabilities", OperationHandler),
    ("/api/sandboxes/events", EventsHandler),
    ("/api/sandboxes/plain-notebooks", PlainNotebooksHandler),
    ("/api/sandboxes/{id}", OperationHandler),
    *((f"/api/sandboxes/{{id}}/{action}", OperationHandler) for action in ACTIONS),
    ("/api/sandboxes/{id}/execute", ExecuteHandler),
    ("/api/sandboxes/{id}/savepoints", OperationHandler),
    ("/api/sandboxes/{id}/savepoints/{name}", OperationHandler),
    ("/api/sandboxes/{id}/savepoints/{name}/rewind", OperationHandler),
    ("/api/sandboxes/{id}/snapshots", OperationHandler),
    ("/api/sandboxes/{id}/snapshots/{name}", OperationHandler),
)
"""Handlers of the paths in openapi.yaml; the first matching path counts."""


def handlers(
    base_url: str, sandboxes: Sandboxes, guard: PlainKernelGuard
) -> list[tuple[str, type[SandboxHandler], dict[str, Any]]]:
    """Return the handlers to add to Jupyter Server's web application."""
    base = re.escape(base_url.rstrip("/"))
    known: list[tuple[str, type[SandboxHandler]]] = [*ROUTES, ("/api/sandboxes", NothingHandler)]
    patterns = [re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", path) for path, _ in ROUTES]
    return [
        (base + pattern, handler, {"sandboxes": sandboxes, "guard": guard, "path": path})
        for pattern, (path, handler) in zip([*patterns, "/api/sandboxes/.*"], known, strict=True)
    ]
