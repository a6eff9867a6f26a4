"""Call the REST API of a Jupyter Server's sandboxes over HTTP.

This file is made from ``_async.py`` by ``tools/unasync.py``: change that one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar, Unpack
from urllib.parse import quote, urlsplit

import httpx

from .._text import json_object
from ..sandbox.model import (
    Capabilities,
    Deleted,
    EffectiveSettings,
    NamedState,
    NamedStates,
    PlainNotebook,
    PlainNotebooks,
    Rewound,
    Sandbox,
    SandboxPage,
    State,
)
from .discovery import address, running_servers
from .errors import AnswerError, NoServerError, ProblemError, ServerUnreachableError, refusal
from .models import CreateSandbox, Event, Exit, Output, decode

TIMEOUT = 30.0
"""Default timeout in seconds for connecting and for GET requests. Responses to other requests have no timeout."""
SILENCE = 60.0
"""Seconds without data after which a stream of events fails; the server sends something every 15 seconds."""
PAGE = 1000
"""Sandboxes per page of the list: the server's maximum."""

Fields = Mapping[str, Any]
T = TypeVar("T")


class SandboxClient:
    """A client of one Jupyter Server. ``url`` may be the address that the server prints, with or without its token.

    Methods take a sandbox's ``id`` or ``sandbox_id``, and raise ProblemError if the server refuses a request,
    ServerUnreachableError if it does not answer, and AnswerError if its response is not understood.
    """

    def __init__(self, url: str, token: str = "", timeout: float = TIMEOUT) -> None:
        self.url, self.token = address(url, token)
        headers = {b"Authorization": f"token {self.token}".encode()} if self.token else {}
        far = urlsplit(self.url).hostname not in ("localhost", "127.0.0.1", "::1")
        self._http = httpx.Client(headers=headers, timeout=timeout, trust_env=far)
        self._patient = httpx.Timeout(timeout, read=None)
        self._watchful = httpx.Timeout(timeout, read=SILENCE)

    @classmethod
    def from_running_server(cls, timeout: float = TIMEOUT) -> Self:
        """Return a client of this user's newest local server that has sandboxes. Raises NoServerError without one."""
        for server in running_servers():
            client = cls(server.url, server.token, timeout)
            try:
                client.capabilities()
            except (ProblemError, ServerUnreachableError, AnswerError):
                client.close()
            else:
                return client
        raise NoServerError()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def capabilities(self) -> Capabilities:
        """Return the server's versions, kernels and storage abilities."""
        return self._ask(Capabilities, "GET", "capabilities")

    def settings(self, kernel_name: str | None = None, notebook_path: str | None = None) -> EffectiveSettings:
        """Return the effective settings of the server and of a notebook's or kernelspec's kernel."""
        wanted = {"kernel_name": kernel_name, "notebook_path": notebook_path}
        query = {name: value for name, value in wanted.items() if value is not None}
        return self._ask(EffectiveSettings, "GET", "settings", query=query)

    def list(
        self, state: State | None = None, notebook: str | None = None, unused_for: float | None = None
    ) -> Sequence[Sandbox]:
        """Return the sandboxes, the last used first, filtered by the arguments.

        ``notebook`` is relative to the server's root folder; ``unused_for`` is in seconds.
        """
        wanted = {"state": state, "notebook": notebook, "unused_for": unused_for, "limit": PAGE}
        found: list[Sandbox] = []
        after: str | None = None
        while True:
            query = {name: value for name, value in {**wanted, "after": after}.items() if value is not None}
            page = self._ask(SandboxPage, "GET", "", query=query)
            found += page.items
            after = page.next
            if after is None:
                return found

    def show(self, id: str) -> Sandbox:
        """Return a sandbox."""
        return self._ask(Sandbox, "GET", _path(id))

    def create(self, **body: Unpack[CreateSandbox]) -> Sandbox:
        """Start a kernel in a new sandbox, or open the existing sandbox of the given id or notebook."""
        return self._ask(Sandbox, "POST", "", body)

    def hibernate(self, id: str, force: bool = False) -> Sandbox:
        """Hibernate a sandbox: save its memory and free it. The next cell wakes it.

        Raises ProblemError (409) while a cell runs or the kernel is kept awake. With ``force``, a running cell pauses,
        and continues only after the kernel's next message; ``busy_reasons`` of the result tells that.
        """
        query = {"force": "true"} if force else None
        return self._ask(Sandbox, "POST", _path(id, "hibernate"), query=query)

    def wake(self, id: str) -> Sandbox:
        """Wake a hibernated kernel, or start one for a stored sandbox."""
        return self._ask(Sandbox, "POST", _path(id, "wake"))

    def keep_awake(self, id: str, seconds: float | None = None) -> Sandbox:
        """Keep an idle kernel awake for ``seconds``: None for no limit, 0 to let it be hibernated again."""
        return self._ask(Sandbox, "POST", _path(id, "keep-awake"), {"seconds": seconds})

    def restart(self, id: str) -> Sandbox:
        """Restart a sandbox's kernel; keep its savepoints."""
        return self._ask(Sandbox, "POST", _path(id, "restart"))

    def revert(self, id: str) -> Sandbox:
        """Return a sandbox that is not running to its previous checkpoint; keep the latest as a savepoint."""
        return self._ask(Sandbox, "POST", _path(id, "revert"))

    def reset(self, id: str) -> Sandbox:
        """Make a sandbox's next start begin with a new kernel; keep its latest checkpoint as a savepoint."""
        return self._ask(Sandbox, "POST", _path(id, "reset"))

    def delete(self, id: str, unverified: bool = False) -> Deleted:
        """End a sandbox's kernel and delete its stored state.

        With ``unverified``, also delete a sandbox without the server's signature, unless it names another user.
        """
        query = {"unverified": "true"} if unverified else None
        return self._ask(Deleted, "DELETE", _path(id), query=query)

    def execute(self, id: str, command: Sequence[str], cwd: str | None = None) -> Iterator[Output | Exit]:
        """Run a command beside the kernel; yield its output as it arrives, then its exit status.

        Closing the iterator early kills the command.
        """
        body = {"command": [*command], **({} if cwd is None else {"cwd": cwd})}
        with self._stream("POST", _path(id, "execute"), self._patient, body) as answer:
            for line in answer.iter_lines():
                piece = json_object(line)
                if "status" in piece:
                    yield decode(Exit, piece)
                    return
                yield decode(Output, piece)
        raise ServerUnreachableError(self.url, "the connection closed before the command's exit status arrived")

    def fork(self, id: str, savepoint: str | None = None, notebook_path: str | None = None) -> Sandbox:
        """Start a second kernel from a savepoint of the first, or from its current state; the first keeps running."""
        wanted = {"savepoint": savepoint, "notebook_path": notebook_path}
        body = {name: value for name, value in wanted.items() if value is not None}
        return self._ask(Sandbox, "POST", _path(id, "fork"), body)

    def savepoints(self, id: str) -> Sequence[NamedState]:
        """Return the savepoints of a sandbox, the oldest first."""
        return (self._ask(NamedStates, "GET", _path(id, "savepoints"))).items

    def savepoint(self, id: str, name: str) -> NamedState:
        """Save the current memory of a kernel under a new name; the kernel keeps running."""
        return self._ask(NamedState, "POST", _path(id, "savepoints"), {"name": name})

    def delete_savepoint(self, id: str, name: str) -> None:
        """Delete a savepoint."""
        self._send("DELETE", _path(id, "savepoints", name))

    def rewind(self, id: str, savepoint: str) -> Rewound:
        """Rewind the kernel to a savepoint; its current state is first saved as another savepoint."""
        return self._ask(Rewound, "POST", _path(id, "savepoints", savepoint, "rewind"))

    def snapshots(self, id: str) -> Sequence[NamedState]:
        """Return the file snapshots of a sandbox, the oldest first."""
        return (self._ask(NamedStates, "GET", _path(id, "snapshots"))).items

    def snapshot(self, id: str, name: str) -> NamedState:
        """Save the files that were written in a sandbox, outside its mounts, under a new name; it keeps running."""
        return self._ask(NamedState, "POST", _path(id, "snapshots"), {"name": name})

    def delete_snapshot(self, id: str, name: str) -> None:
        """Delete a file snapshot."""
        self._send("DELETE", _path(id, "snapshots", name))

    def plain_notebooks(self) -> Sequence[PlainNotebook]:
        """Return the notebooks that ran in a sandbox and may use a plain kernel (without a sandbox)."""
        return (self._ask(PlainNotebooks, "GET", "plain-notebooks")).items

    def allow_plain(self, notebook_path: str, kernel_name: str) -> PlainNotebook:
        """Let a notebook that ran in a sandbox use a plain kernel, until the notebook runs in a sandbox again."""
        body = {"notebook_path": notebook_path, "kernel_name": kernel_name}
        return self._ask(PlainNotebook, "PUT", "plain-notebooks", body)

    def revoke_plain(self, notebook_path: str) -> None:
        """Revoke a notebook's permission to use a plain kernel."""
        self._send("DELETE", "plain-notebooks", query={"notebook_path": notebook_path})

    def events(self) -> Iterator[Event]:
        """Yield the events of the server's sandboxes from now on, without end."""
        with self._stream("GET", "events", self._watchful) as answer:
            data = ""
            for line in answer.iter_lines():
                if line.startswith("data:"):
                    data += line.removeprefix("data:")
                elif not line and data:
                    yield decode(Event, json_object(data))
                    data = ""

    def _ask(self, kind: type[T], method: str, path: str, body: Fields | None = None, query: Fields | None = None) -> T:
        return decode(kind, json_object(self._send(method, path, body, query)))

    def _send(self, method: str, path: str, body: Fields | None = None, query: Fields | None = None) -> bytes:
        timeout = self._http.timeout if method == "GET" else self._patient
        with self._stream(method, path, timeout, body, query) as answer:
            return answer.read()

    @contextmanager
    def _stream(
        self, method: str, path: str, timeout: httpx.Timeout, body: Fields | None = None, query: Fields | None = None
    ) -> Iterator[httpx.Response]:
        url = f"{self.url}api/sandboxes{'/' if path else ''}{path}"
        try:
            with self._http.stream(method, url, json=body, params=query, timeout=timeout) as answer:
                if not answer.is_success:
                    raise refusal(self.url, answer.status_code, json_object(answer.read()))
                yield answer
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerUnreachableError(self.url, str(error)) from error


def _path(*parts: str) -> str:
    return "/".join(quote(part, safe="") for part in parts)
