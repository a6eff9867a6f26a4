"""Errors of the client: refused requests, unreachable servers and invalid responses.

All are SandboxErrors, so ``str()`` contains the problem and its remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._text import printable
from ..errors import SandboxError


class ProblemError(SandboxError):
    """A server refused a request; the fields are those of the problem detail (RFC 9457)."""

    def __init__(self, status: int, type: str, title: str, detail: str, remedy: str = "", variable: str = "") -> None:
        self.status = status
        self.type = type
        self.title = title
        self.detail = detail
        self.variable = variable
        super().__init__(detail or title, remedy)

    @property
    def kind(self) -> str:
        """Last part of the problem type, such as ``in-use``; empty for other types."""
        return self.type.removeprefix("urn:sandbox:") if self.type.startswith("urn:sandbox:") else ""


class ServerUnreachableError(SandboxError):
    """The server at ``url`` did not answer, or closed the connection."""

    def __init__(self, url: str, reason: str) -> None:
        self.url = url
        problem = f"The Jupyter Server at {url} does not answer: {printable(reason).rstrip('.') or 'it hung up'}."
        super().__init__(problem, "`jupyter server list` shows those of yours that run here.")


class AnswerError(SandboxError):
    """A server sent a response that this client does not understand."""

    def __init__(self, problem: str) -> None:
        remedy = "The server may have another version of sandbox_provisioner than this client."
        super().__init__(f"The server's answer is {printable(problem)[:300]}.", remedy)


class NoServerError(SandboxError):
    """The request needs a running server, and none was found."""

    def __init__(self, problem: str = "No Jupyter Server of yours that has sandboxes runs here.") -> None:
        super().__init__(
            problem, "Start one with `jupyter lab` or `jupyter server`, or name another one with `--server URL`."
        )


def refusal(url: str, status: int, body: Any) -> ProblemError:
    """Return the error for a response with an error status; ``body`` is its decoded JSON, None if invalid."""
    problem: Mapping[str, Any] = body if isinstance(body, Mapping) else {}
    if isinstance(problem.get("detail"), str) and isinstance(problem.get("title"), str):
        words = {name: str(problem.get(name) or "") for name in ("type", "title", "detail", "remedy", "variable")}
        if status in (401, 403) and not words["remedy"]:
            words["remedy"] = f"Check the token for {url}."
        return ProblemError(status, **words)
    said = printable(str(problem.get("message") or ""))[:300].rstrip(".")
    if status == 404:
        detail = f"The Jupyter Server at {url} has no sandboxes."
        remedy = "Install sandbox-provisioner in its environment, and see that its server extension is enabled."
    elif status in (401, 403) or 300 <= status < 400:
        detail, remedy = "The Jupyter Server did not let you in.", f"Check the token for {url}."
    else:
        detail = f"The Jupyter Server at {url} answered with status {status}{f': {said}' if said else ''}."
        remedy = "Its log says more."
    return ProblemError(status, "about:blank", f"Status {status}", detail, remedy)
