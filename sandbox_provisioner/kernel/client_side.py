"""Act as a client of a kernel, or in its name, with the keys that its KernelManager has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jupyter_client.session import Session

from ..errors import SandboxError
from .activity import ActivityWatch
from .kernel import SandboxedKernel
from .synthetic_replies import error_replies


class ClientSide:
    """The keys of one kernel and the watch on its iopub channel. ``km`` is the KernelManager. I/O thread only."""

    def __init__(self, km: Any, kernel: SandboxedKernel, max_message_size: int) -> None:
        self._km = km
        self._kernel = kernel
        self._max_message_size = max_message_size
        self._watch: ActivityWatch | None = None

    def session(self) -> Session:
        """Return a session to sign messages on behalf of the kernel."""
        return Session(key=self._km.session.key, signature_scheme=self._km.session.signature_scheme)

    def adopt_keys(self, sandbox_id: str, contents: Mapping[str, Any]) -> dict[str, str]:
        """Use the keys of a saved kernel, which knows no others. Return arguments for ``pre_launch``. Jupyter's loop.

        Raises SandboxError if ``contents``, the description of the sandbox, names no kernel.
        """
        km, saved = self._km, contents.get("connection")
        if saved is None:
            raise SandboxError(
                f"Sandbox {sandbox_id} was not saved by Jupyter: there is no kernel in it.",
                "Name another sandbox, or delete this one.",
            )
        km.session.key = saved["key"].encode()
        km.session.signature_scheme = saved["signature_scheme"]
        if "curve_publickey" not in saved:
            return {"transport_encryption": "disabled"}
        km.curve_publickey, km.curve_secretkey = saved["curve_publickey"].encode(), saved["curve_secretkey"].encode()
        return {}

    def watch(self, on_news: Callable[[], None]) -> None:
        """Listen to the kernel's iopub channel, to record when it is used and when its requests end."""
        self.stop_watching()
        km = self._km
        self._watch = ActivityWatch(self._kernel.activity, on_news, self._max_message_size)
        curve = (km.curve_publickey, km.curve_secretkey) if getattr(km, "curve_publickey", None) else None
        self._watch.listen(km._make_url("iopub"), self.session(), curve)
        if self._kernel.restored:
            self._watch.probe(km._make_url("shell"), self.session(), curve)

    def stop_watching(self) -> None:
        """Close the connection to the iopub channel."""
        if self._watch:
            self._watch.close()
            self._watch = None

    def refuse_held(self, error: SandboxError) -> None:
        """Answer the held requests with the reason why the kernel was not woken; the next cell retries."""
        reason = f"The kernel could not be woken, and its state is kept. {error}"
        self._kernel.relay.answer(lambda held: error_replies(held, self.session(), reason))
