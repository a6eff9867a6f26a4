"""Get runsc from a release by Google."""

from __future__ import annotations

import hashlib
import platform
import re
import urllib.error
import urllib.request
from functools import partial
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO

from ...errors import SandboxError
from ..progress import Note
from ..timeouts import call_within
from .source import Source

RELEASES = "https://storage.googleapis.com/gvisor/releases/release"
VERSION = re.compile(r"20\d{6}(\.\d+)?")
DIGEST = re.compile(r"[0-9a-fA-F]{128}")
REACH_TIMEOUT = 5.0
"""Seconds until a download must have begun, name resolution included."""
READ_TIMEOUT = 30.0


class ReleaseSource(Source):
    """A release by Google; the user gives its version and SHA-512 digest.

    The digest that is published beside the binary is not used: an attacker who replaces one can replace both.
    """

    name = "release"
    title = "Google's release"

    def __init__(self, version: str, sha512: str, base: str = RELEASES) -> None:
        if not VERSION.fullmatch(version):
            raise SandboxError(
                f"--release is {version!r:.50}, which is not the version of a release.",
                "Use a version such as 20260126.0.",
            )
        if not DIGEST.fullmatch(sha512):
            raise SandboxError(
                f"--sha512 is {sha512!r:.150}, which is not a SHA-512 digest.", "Give all 128 hexadecimal digits."
            )
        self._base, self._version, self._sha512 = base.rstrip("/"), version, sha512.lower()

    def obtain(self, target: Path, workspace: Path, note: Note) -> None:
        """Download the binary for this machine. Raises SandboxError if that fails or its digest differs."""
        url = f"{self._base}/{self._version}/{platform.machine().replace('arm64', 'aarch64')}/runsc"
        note("connecting")
        try:
            with _open_url(url) as answer, target.open("wb") as file:
                found = _copy(answer, file, int(answer.headers.get("Content-Length") or 0), note)
        except (OSError, HTTPException) as error:
            raise SandboxError(f"the download of {url} failed ({_reason(error)})") from error
        if found != self._sha512:
            raise SandboxError(f"the SHA-512 digest of {url} is {found}, which differs from --sha512")


def _open_url(url: str) -> HTTPResponse:
    """Open ``url``. Raises TimeoutError if the download has not begun after REACH_TIMEOUT."""
    try:
        answer: HTTPResponse = call_within(REACH_TIMEOUT, partial(urllib.request.urlopen, url, timeout=READ_TIMEOUT))
    except TimeoutError:
        raise TimeoutError(f"no answer within {REACH_TIMEOUT:g} s") from None
    return answer


def _copy(answer: IO[bytes], file: IO[bytes], size: int, note: Note) -> str:
    digest, done = hashlib.sha512(), 0
    while chunk := answer.read(1 << 20):
        file.write(chunk)
        digest.update(chunk)
        done += len(chunk)
        note(f"{done >> 20} of {size >> 20} MB" if size else f"{done >> 20} MB")
    if done < size:
        raise OSError(f"it ended after {done} of {size} bytes")
    return digest.hexdigest()


def _reason(error: Exception) -> str:
    """Return the cause of a network error as text, without its wrapper."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP status {error.code}"
    return str(getattr(cause, "strerror", None) or cause) or type(cause).__name__
