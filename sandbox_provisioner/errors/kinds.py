"""Define the kinds of problems once, for HTTP responses and for the exit status of ``jupyter sandbox``."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from http import HTTPStatus


class ExitStatus(IntEnum):
    """The exit statuses of ``jupyter sandbox``; ``meaning`` explains each in its help."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> ExitStatus:
        """Return a new member with this value and its attributes."""
        member = int.__new__(cls, value)
        member._value_, member.meaning = value, meaning
        return member

    OK = 0, "success"
    FAILED = 1, "failure"
    USAGE = 2, "invalid command, or several sandboxes match"
    MISSING = 3, "no such sandbox, savepoint or snapshot"
    CONFLICT = 4, "the sandbox is in use or in a state that does not allow this, or the name is taken"
    UNABLE = 5, "this machine or server is not set up for this, is not running, or denies access"


class Kind(StrEnum):
    """The kinds of problems, each with its HTTP ``status`` and ``exit_status``. A problem type ends in the value."""

    status: HTTPStatus
    exit_status: ExitStatus

    def __new__(cls, value: str, status: HTTPStatus, exit_status: ExitStatus) -> Kind:
        """Return a new member with this value and its attributes."""
        member = str.__new__(cls, value)
        member._value_, member.status, member.exit_status = value, status, exit_status
        return member

    @property
    def type(self) -> str:
        """The problem type (RFC 9457)."""
        return f"urn:sandbox:{self.value}"

    BAD_REQUEST = "bad-request", HTTPStatus.BAD_REQUEST, ExitStatus.FAILED
    NOT_SET_UP = "not-set-up", HTTPStatus.BAD_REQUEST, ExitStatus.UNABLE
    NOT_YOURS = "not-yours", HTTPStatus.FORBIDDEN, ExitStatus.UNABLE
    NOT_FOUND = "not-found", HTTPStatus.NOT_FOUND, ExitStatus.MISSING
    AMBIGUOUS = "ambiguous", HTTPStatus.CONFLICT, ExitStatus.USAGE
    ELSEWHERE = "elsewhere", HTTPStatus.CONFLICT, ExitStatus.UNABLE
    EXISTS = "exists", HTTPStatus.CONFLICT, ExitStatus.CONFLICT
    IN_USE = "in-use", HTTPStatus.CONFLICT, ExitStatus.CONFLICT
    PLAIN_KERNEL = "plain-kernel", HTTPStatus.CONFLICT, ExitStatus.CONFLICT
    SNAPSHOT = "snapshot", HTTPStatus.CONFLICT, ExitStatus.CONFLICT
    TOO_MANY = "too-many", HTTPStatus.CONFLICT, ExitStatus.CONFLICT
    WRONG_STATE = "wrong-state", HTTPStatus.CONFLICT, ExitStatus.CONFLICT
    COMMAND = "command", HTTPStatus.UNPROCESSABLE_ENTITY, ExitStatus.FAILED
    DAMAGED = "damaged", HTTPStatus.UNPROCESSABLE_ENTITY, ExitStatus.FAILED
    INCOMPATIBLE = "incompatible", HTTPStatus.UNPROCESSABLE_ENTITY, ExitStatus.FAILED
    NOT_SIGNED = "not-signed", HTTPStatus.UNPROCESSABLE_ENTITY, ExitStatus.UNABLE
    UNSAVEABLE = "unsaveable", HTTPStatus.UNPROCESSABLE_ENTITY, ExitStatus.FAILED
    SANDBOX = "sandbox", HTTPStatus.SERVICE_UNAVAILABLE, ExitStatus.FAILED
    STORAGE = "storage", HTTPStatus.SERVICE_UNAVAILABLE, ExitStatus.FAILED
    UNREACHABLE = "unreachable", HTTPStatus.SERVICE_UNAVAILABLE, ExitStatus.UNABLE
    DISK_FULL = "disk-full", HTTPStatus.INSUFFICIENT_STORAGE, ExitStatus.UNABLE
