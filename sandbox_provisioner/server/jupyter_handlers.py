"""Replace Jupyter Server's handlers that start kernels, to send this package's errors with the right HTTP status."""

from __future__ import annotations

import json
import re
from textwrap import fill
from typing import Any

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.services.kernels.handlers import KernelActionHandler, MainKernelHandler
from jupyter_server.services.sessions.handlers import SessionHandler, SessionRootHandler
from tornado import web

from ..errors import PlainKernelError, SandboxError
from . import problem_details
from .plain_kernels import PlainKernelGuard

WIDTH = 80
"""Characters of a line of a refusal, because JupyterLab's dialog does not wrap lines."""
ID = r"\w+-\w+-\w+-\w+-\w+"
NO_BREAK = "\0"
"""Stands for a space at which a line must not be broken. ``printable`` removes it from names."""


class StartHandler(APIHandler):
    """Base class of the handlers. It sends SandboxErrors; Jupyter Server would send each of them with status 500.

    ``message`` in an error is the text that JupyterLab shows.
    """

    def initialize(self, guard: PlainKernelGuard) -> None:
        """Set the guard. Called by tornado for each request."""
        self.guard = guard

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Send an error. Called by tornado."""
        error = kwargs.get("exc_info", (None, None, None))[1]
        cause = error if isinstance(error, SandboxError) else getattr(error, "__cause__", None)
        if not isinstance(cause, SandboxError):
            super().write_error(status_code, **kwargs)
            return
        problem = problem_details.describe(cause)
        self.set_status(problem["status"])
        text = _in_lines(str(cause)) if isinstance(cause, PlainKernelError) else str(cause)
        known = {"message": text, "reason": problem["title"], "traceback": ""}
        self.finish(json.dumps({**known, **problem}), set_content_type=problem_details.MEDIA_TYPE)

    def log_exception(self, *exc_info: Any) -> None:
        """Log an error; a refusal without its traceback. Called by tornado."""
        cause = exc_info[1] if isinstance(exc_info[1], SandboxError) else getattr(exc_info[1], "__cause__", None)
        if isinstance(cause, SandboxError):
            self.log.warning("%s", cause)
        else:
            super().log_exception(*exc_info)


def _in_lines(text: str) -> str:
    """Wrap a text for JupyterLab's dialogs. Commands in backticks stay in one line, so that they can be copied."""
    unbroken = re.sub("`[^`]*`", lambda command: command[0].replace(" ", NO_BREAK), text)
    return fill(unbroken, WIDTH, break_long_words=False, break_on_hyphens=False).replace(NO_BREAK, " ")


class KernelsHandler(StartHandler, MainKernelHandler):
    """Handler of ``/api/kernels``."""


class KernelActionsHandler(StartHandler, KernelActionHandler):
    """Handler of ``/api/kernels/{id}/restart`` and ``/api/kernels/{id}/interrupt``."""


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
        (rf"{base}/api/kernels/(?P<kernel_id>{ID})/(?P<action>restart|interrupt)", KernelActionsHandler, options),
        (f"{base}/api/sessions", SessionsHandler, options),
        (rf"{base}/api/sessions/(?P<session_id>{ID})", OneSessionHandler, options),
    ]
