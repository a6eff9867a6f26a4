"""Errors of the client: refused requests, unreachable servers and invalid responses.

All are SandboxErrors, so ``str()`` contains the problem and its remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from .._text import printable
from ..errors import SandboxError
from ..errors.kinds import ExitStatus, Kind

KINDS = {kind.type: kind for kind in Kind}
EXIT_STATUSES: Mapping[int, ExitStatus] = {
    HTTPStatus.UNAUTHORIZED: ExitStatus.UNABLE,
    HTTPStatus.FORBIDDEN: ExitStatus.UNABLE,
    HTTPStatus.NOT_FOUND: ExitStatus.UNABLE,
    HTTPStatus.CONFLICT: ExitStatus.CONFLICT,
}
"""Exit statuses of responses that are not from this package, or that have a problem type of a newer version."""


class ProblemError(SandboxError):
    """A server refused a request; the fields are those of the problem detail (RFC 9457).

    ``known`` is False if this version does not know the problem's type; ``kind`` is then ``Kind.SANDBOX``.
    """

    def __init__(self, status: int, type: str, title: str, detail: str, remedy: str = "", variable: str = "") -> None:
        self.status = status
        self.type = type
        self.title = title
        self.detail = detail
        self.variable = variable
        self.known = type in KINDS
        self.kind = KINDS.get(type, Kind.SANDBOX)
        super().__init__(detail or title, remedy)

    @property
    def exit_status(self) -> ExitStatus:
        """The exit status of the server's error; derived from the HTTP status if this version does not know it."""
        return self.kind.exit_status if self.known else EXIT_STATUSES.get(self.status, ExitStatus.FAILED)


class ServerUnreachableError(SandboxError, kind=Kind.UNREACHABLE):
    """The server at ``url`` did not answer, or closed the connection."""

    def __init__(self, url: str, reason: str) -> None:
        self.url = url
        problem = (
            f"The Jupyter Server at {url} does not answer: {printable(reason).rstrip('.') or 'connection closed'}."
        )
        super().__init__(problem, "`jupyter server list` shows your servers on this machine.")


class AnswerError(SandboxError):
    """A server sent a response that this client does not understand."""

    def __init__(self, problem: str) -> None:
        remedy = "The server and this client may have different versions of sandbox_provisioner."
        super().__init__(f"The server's response is invalid: {printable(problem)[:300]}.", remedy)


class NoServerError(SandboxError, kind=Kind.UNREACHABLE):
    """The request needs a running server, and none was found."""

    def __init__(self, problem: str = "None of your running Jupyter Servers on this machine serves sandboxes.") -> None:
        super().__init__(
            problem, "Start one with `jupyter lab` or `jupyter server`, or name a server with `--server URL`."
        )


def refusal(url: str, status: int, problem: Mapping[str, Any]) -> ProblemError:
    """Return the error for a response with an error status; ``problem`` is its body, empty if it is no JSON object."""
    if isinstance(problem.get("detail"), str) and isinstance(problem.get("title"), str):
        words = {name: str(problem.get(name) or "") for name in ("type", "title", "detail", "remedy", "variable")}
        if status in (401, 403) and not words["remedy"]:
            words["remedy"] = f"Check the token for {url}."
        return ProblemError(status, **words)
    message = printable(str(problem.get("message") or ""))[:300].rstrip(".")
    if status == 404:
        detail = f"The Jupyter Server at {url} does not serve sandboxes."
        remedy = "Install sandbox-provisioner in its environment and check that its server extension is enabled."
    elif status in (401, 403) or 300 <= status < 400:
        detail, remedy = "The Jupyter Server denied access.", f"Check the token for {url}."
    else:
        detail = f"The Jupyter Server at {url} answered with status {status}{f': {message}' if message else ''}."
        remedy = "See the server's log."
    return ProblemError(status, "about:blank", f"Status {status}", detail, remedy)
