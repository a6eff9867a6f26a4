"""A server that speaks Google Cloud Storage's JSON API, so that tests can use its real client, with faults.

As a program it serves until its standard input ends, and says where in its first line of output. Beside Google's own
paths it has ``/faults`` (POST one, GET, DELETE), ``/requests`` (GET what was asked for, DELETE), ``/clock`` (POST an
offset) and ``/limit`` (POST how often an object may be changed, GET how many changes were refused), so that any number
of processes can share one server and any test can make it misbehave.
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
    """Serves in threads, on a port of 127.0.0.1 that was free."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        handler = type("BoundHandler", (Handler,), {"service": Service()})
        super().__init__(("127.0.0.1", 0), handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class GCS:
    """A server in a process of its own, as tests use it; ``url`` is what STORAGE_EMULATOR_HOST should be."""

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
        """A bucket that nobody else uses."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        self._call("POST", "/storage/v1/b?project=test", {"name": name})
        return name

    def fault(self, kind: Kind, **details: Any) -> None:
        """Make something go wrong: see ``gcs_faults.Fault``."""
        self._call("POST", "/faults", {"kind": kind, **details})

    def faults(self) -> list[dict[str, Any]]:
        """Return the faults that are set, with the number of times that each ``struck``."""
        found: list[dict[str, Any]] = self._call("GET", "/faults")
        return found

    def requests(self) -> list[tuple[str, str]]:
        """Return the requests since ``reset``: operations and names of objects."""
        return [(operation, name) for operation, name in self._call("GET", "/requests")]

    def set_clock(self, offset: float) -> None:
        """Let the server's clock run ``offset`` seconds ahead of ours."""
        self._call("POST", "/clock", {"offset": offset})

    def limit_mutations(self, rate: float = 1.0, burst: float = 2.0) -> None:
        """Refuse changes of one object name beyond ``rate`` per second, as Google does; 0 refuses none."""
        self._call("POST", "/limit", {"rate": rate, "burst": burst})

    def refused_mutations(self) -> int:
        """Return how many changes were refused since ``limit_mutations``."""
        return int(self._call("GET", "/limit")["refused"])

    def reset_faults(self) -> None:
        """No faults any more, and nothing asked for yet."""
        self._call("DELETE", "/faults")
        self._call("DELETE", "/requests")

    def reset(self) -> None:
        """No faults, no limit, the right time, nothing asked for yet, and a new bucket."""
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
