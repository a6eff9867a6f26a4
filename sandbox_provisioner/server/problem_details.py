"""Convert exceptions to HTTP statuses and problem details (RFC 9457).

A body contains the problem and its remedy, without the server's paths, which only its log contains.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from tornado.web import HTTPError

from .. import errors
from .._redaction import without_paths
from ..errors import SandboxError
from .kernels import NotebookInUseError
from .openapi import BadRequestError

MEDIA_TYPE = "application/problem+json"

STATUSES: tuple[tuple[type[SandboxError], HTTPStatus, str], ...] = (
    (BadRequestError, HTTPStatus.BAD_REQUEST, "bad-request"),
    (errors.ConfigurationError, HTTPStatus.BAD_REQUEST, "not-set-up"),
    (errors.ForeignSandboxError, HTTPStatus.FORBIDDEN, "not-yours"),
    (errors.SignatureError, HTTPStatus.UNPROCESSABLE_ENTITY, "not-signed"),
    (errors.UnknownSandboxError, HTTPStatus.NOT_FOUND, "not-found"),
    (errors.SandboxNotFoundError, HTTPStatus.NOT_FOUND, "not-found"),
    (errors.SavepointNotFoundError, HTTPStatus.NOT_FOUND, "not-found"),
    (errors.SnapshotNotFoundError, HTTPStatus.NOT_FOUND, "not-found"),
    (errors.SavepointExistsError, HTTPStatus.CONFLICT, "exists"),
    (errors.TooManySavepointsError, HTTPStatus.CONFLICT, "too-many"),
    (errors.SandboxExistsError, HTTPStatus.CONFLICT, "exists"),
    (errors.SnapshotError, HTTPStatus.CONFLICT, "snapshot"),
    (errors.AmbiguousSandboxError, HTTPStatus.CONFLICT, "ambiguous"),
    (NotebookInUseError, HTTPStatus.CONFLICT, "in-use"),
    (errors.LeaseHeldError, HTTPStatus.CONFLICT, "in-use"),
    (errors.FencedError, HTTPStatus.CONFLICT, "in-use"),
    (errors.LeaseLostError, HTTPStatus.CONFLICT, "in-use"),
    (errors.StateError, HTTPStatus.CONFLICT, "wrong-state"),
    (errors.LinkClosedError, HTTPStatus.CONFLICT, "wrong-state"),
    (errors.StorageNotHereError, HTTPStatus.CONFLICT, "elsewhere"),
    (errors.UnsaveableError, HTTPStatus.UNPROCESSABLE_ENTITY, "unsaveable"),
    (errors.IncompatibleError, HTTPStatus.UNPROCESSABLE_ENTITY, "incompatible"),
    (errors.CommandNotFoundError, HTTPStatus.UNPROCESSABLE_ENTITY, "command"),
    (errors.GuestError, HTTPStatus.UNPROCESSABLE_ENTITY, "command"),
    (errors.CorruptObjectError, HTTPStatus.UNPROCESSABLE_ENTITY, "damaged"),
    (errors.MetadataError, HTTPStatus.UNPROCESSABLE_ENTITY, "damaged"),
    (errors.UnreadableRecordError, HTTPStatus.UNPROCESSABLE_ENTITY, "damaged"),
    (errors.StorageError, HTTPStatus.SERVICE_UNAVAILABLE, "storage"),
    (errors.DiskFullError, HTTPStatus.INSUFFICIENT_STORAGE, "disk-full"),
    (errors.SandboxError, HTTPStatus.SERVICE_UNAVAILABLE, "sandbox"),
)
"""HTTP status and problem type of each exception; the first matching row counts."""

PLAIN = {
    HTTPStatus.FORBIDDEN: "You are not logged in, or not allowed to do that.",
    HTTPStatus.NOT_FOUND: "There is nothing at this address.",
    HTTPStatus.METHOD_NOT_ALLOWED: "That cannot be done with what is at this address.",
    HTTPStatus.INTERNAL_SERVER_ERROR: "This should not have happened. The server's log has more.",
}
"""Details of HTTP errors that are not a SandboxError; others use the status's standard description."""


def describe(error: BaseException | None, status: int = HTTPStatus.INTERNAL_SERVER_ERROR) -> dict[str, Any]:
    """Return the problem detail of an exception. ``status`` is used unless it is a SandboxError or an HTTPError."""
    if not isinstance(error, SandboxError):
        known = HTTPStatus(error.status_code if isinstance(error, HTTPError) else status)
        about = PLAIN.get(known, known.description or known.phrase)
        return {"type": "about:blank", "title": known.phrase, "status": int(known), "detail": about}
    status, kind = next((status, kind) for known, status, kind in STATUSES if isinstance(error, known))
    body = {
        "type": f"urn:sandbox:{kind}",
        "title": kind.replace("-", " ").capitalize(),
        "status": int(status),
        "detail": without_paths(error, error.problem),
        "remedy": without_paths(error, error.remedy),
        "variable": without_paths(error, getattr(error, "setting", "") or getattr(error, "field", "")),
    }
    return {name: value for name, value in body.items() if value or name == "detail"}
