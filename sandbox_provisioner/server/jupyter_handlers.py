"""Replace Jupyter Server's handlers that start kernels, to send this package's errors with the right HTTP status."""

from __future__ import annotations

import json
import re
from textwrap import fill
from typing import Any

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.services.kernels.handlers import MainKernelHandler
from jupyter_server.services.sessions.handlers import SessionHandler, SessionRootHandler
from tornado import web

from ..errors import ConfigurationError, PlainKernelError, SandboxError
from . import problem_details
from .plain_kernels import PlainKernelGuard

WIDTH = 80
"""Characters of a line of a refusal, because JupyterLab's dialog does not wrap lines."""
NO_BREAK = "\0"
"""Stands for a space at which a line must not be broken. ``printable`` removes it from names."""


class StartHandler(APIHandler):
    """Base class of the handlers. ``message`` in an error is the text that JupyterLab shows."""

    answered: tuple[type[SandboxError], ...] = (PlainKernelError, ConfigurationError)
    """The errors that this class sends; Jupyter Server sends the others."""

    def initialize(self, guard: PlainKernelGuard) -> None:
        """Set the guard. Called by tornado for each request."""
        self.guard = guard

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Send an error. Called by tornado."""
        error = kwargs.get("exc_info", (None, None, None))[1]
        cause = error if isinstance(error, self.answered) else getattr(error, "__cause__", None)
        if not isinstance(cause, self.answered):
            super().write_error(status_code, **kwargs)
            return
        problem = problem_details.describe(cause)
        self.set_status(problem["status"])
        text = _in_lines(str(cause)) if isinstance(cause, PlainKernelError) else str(cause)
        known = {"message": text, "reason": problem["title"], "traceback": ""}
        self.finish(json.dumps({**known, **problem}), set_content_type=problem_details.MEDIA_TYPE)

    def log_exception(self, *exc_info: Any) -> None:
        """Log an error; a refusal without its traceback. Called by tornado."""
        if isinstance(exc_info[1], self.answered):
            self.log.warning("%s", exc_info[1])
        else:
            super().log_exception(*exc_info)


def _in_lines(text: str) -> str:
    """Wrap a text for JupyterLab's dialogs. Commands in backticks stay in one line, so that they can be copied."""
    unbroken = re.sub("`[^`]*`", lambda command: command[0].replace(" ", NO_BREAK), text)
    return fill(unbroken, WIDTH, break_long_words=False, break_on_hyphens=False).replace(NO_BREAK, " ")


class KernelsHandler(StartHandler, MainKernelHandler):
    """Handler of ``/api/kernels``."""

    answered = (SandboxError,)


class SessionsHandler(StartHandler, SessionRootHandler):
    """Handler of ``/api/sessions``."""


class OneSessionHandler(StartHandler, SessionHandler):
    """Handler of ``/api/sessions/{id}``."""

    @web.authenticated
    @authorized
    async def patch(self, session_id: str) -> None:
        """Check if the new kernel is allowed, because Jupyter Server would report a refusal with status 501."""
        body: Any = self.get_json_body()
        model = body if isinstance(body, dict) else {}
        kernel = model.get("kernel")
        if isinstance(kernel, dict) and kernel.get("id") is None and kernel.get("name") is not None:
            sessions: Any = self.session_manager
            before = await sessions.get_session(session_id=session_id)
            await self.guard.require_allowed(str(kernel["name"]), before["path"], model.get("path"))
        await super().patch(session_id)  # type: ignore[misc]


def handlers(base_url: str, guard: PlainKernelGuard) -> list[tuple[str, type[APIHandler], dict[str, Any]]]:
    """Return the handlers that take the place of Jupyter Server's own."""
    base = re.escape(base_url.rstrip("/"))
    options = {"guard": guard}
    return [
        (f"{base}/api/kernels", KernelsHandler, options),
        (f"{base}/api/sessions", SessionsHandler, options),
        (rf"{base}/api/sessions/(?P<session_id>\w+-\w+-\w+-\w+-\w+)", OneSessionHandler, options),
    ]
