"""Emulated Google Cloud Storage: a server for Google's real client, with faults that tests inject.

The program prints its address and serves until its standard input ends. Several processes can share one server. In
addition to Google's JSON API, it has these paths for tests:

- ``/faults``: POST adds a fault, GET lists the faults, DELETE removes them;
- ``/requests``: GET lists the requests since the last DELETE;
- ``/clock``: POST sets the offset of the server's clock;
- ``/limit``: POST limits the changes of an object, GET returns the number of refused changes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
import uuid
from http.server import ThreadingHTTPServer
from typing import Any

from gcs_faults import Kind
from gcs_handler import Handler, Service


class Server(ThreadingHTTPServer):
    """Serves in threads, on a free port of 127.0.0.1."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        handler = type("BoundHandler", (Handler,), {"service": Service()})
        super().__init__(("127.0.0.1", 0), handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log errors, except those of closed connections."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class GCS:
    """The server in its own process. ``url`` is the value for STORAGE_EMULATOR_HOST."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout
        self.url = self._process.stdout.readline().decode().strip()
        self.bucket = self.new_bucket()

    def close(self) -> None:
        self._process.communicate(timeout=10)

    def _call(self, method: str, path: str, content: Any = None) -> Any:
        data = None if content is None else json.dumps(content).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data=data, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or b"null")

    def new_bucket(self) -> str:
        """Create a bucket with a random name, and return the name."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        self._call("POST", "/storage/v1/b?project=test", {"name": name})
        return name

    def fault(self, kind: Kind, **details: Any) -> None:
        """Inject a fault. ``details`` are fields of ``gcs_faults.Fault``."""
        self._call("POST", "/faults", {"kind": kind, **details})

    def faults(self) -> list[dict[str, Any]]:
        """Return the current faults. ``struck`` is the number of requests that each one affected."""
        found: list[dict[str, Any]] = self._call("GET", "/faults")
        return found

    def requests(self) -> list[tuple[str, str]]:
        """Return the operation and the object name of each request since the last reset."""
        return [(operation, name) for operation, name in self._call("GET", "/requests")]

    def set_clock(self, offset: float) -> None:
        """Set the server's clock ``offset`` seconds ahead of this machine's."""
        self._call("POST", "/clock", {"offset": offset})

    def limit_mutations(self, rate: float = 1.0, burst: float = 2.0) -> None:
        """Refuse more than ``rate`` changes per second of one object name, as Google does. 0 disables the limit."""
        self._call("POST", "/limit", {"rate": rate, "burst": burst})

    def refused_mutations(self) -> int:
        """Return the number of changes that were refused since ``limit_mutations``."""
        return int(self._call("GET", "/limit")["refused"])

    def reset_faults(self) -> None:
        """Remove all faults, and forget all requests."""
        self._call("DELETE", "/faults")
        self._call("DELETE", "/requests")

    def reset(self) -> None:
        """Remove all faults, the limit and the clock's offset, forget all requests, and use a new bucket."""
        self.reset_faults()
        self.limit_mutations(0)
        self.set_clock(0)
        self.bucket = self.new_bucket()


def main() -> None:
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.url, flush=True)
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
