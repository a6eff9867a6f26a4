"""Convert exceptions to HTTP statuses and problem details (RFC 9457).

A response contains the problem and its remedy. The server's paths are removed; only the server's log contains them.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from tornado.web import HTTPError

from ..errors import SandboxError
from ..errors.redaction import without_paths

MEDIA_TYPE = "application/problem+json"

DETAILS = {
    HTTPStatus.FORBIDDEN: "You are not logged in or not authorized.",
    HTTPStatus.NOT_FOUND: "No such address.",
    HTTPStatus.METHOD_NOT_ALLOWED: "Method not allowed.",
    HTTPStatus.INTERNAL_SERVER_ERROR: "Internal error. See the server's log.",
}
"""Details of HTTP errors that are not a SandboxError; others use the status's standard description."""


def describe(error: BaseException | None, status: int = HTTPStatus.INTERNAL_SERVER_ERROR) -> dict[str, Any]:
    """Return the problem detail of an exception. ``status`` is used if the exception has none of its own."""
    if not isinstance(error, SandboxError):
        known = HTTPStatus(error.status_code if isinstance(error, HTTPError) else status)
        about = DETAILS.get(known, known.description or known.phrase)
        return {"type": "about:blank", "title": known.phrase, "status": int(known), "detail": about}
    body = {
        "type": error.kind.type,
        "title": error.kind.replace("-", " ").capitalize(),
        "status": int(error.kind.status),
        "detail": without_paths(error, error.problem),
        "remedy": without_paths(error, error.remedy),
        "variable": without_paths(error, getattr(error, "setting", "") or getattr(error, "field", "")),
    }
    return {name: value for name, value in body.items() if value or name == "detail"}
