"""A real JupyterHub with a real proxy, and a client that acts as the browser of a user."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode, urljoin, urlsplit
from uuid import uuid4

from servers import READY

CONFIG = Path(__file__).parents[2] / "examples" / "jupyterhub" / "jupyterhub_config.py"
BIN = Path(sys.executable).parent
KEPT = ("SANDBOX_RUNSC", "SANDBOX_RUNTIME_DIR")
INSTALL = """{} is not installed beside {}; `make test-hub` installs it. By hand:
    pip install jupyterhub jupyterhub-idle-culler jupyterlab
    npm install --global --prefix {} configurable-http-proxy"""


def require_tools() -> None:
    """Fail if a program is missing, and name the commands that install it."""
    for tool in ("jupyterhub", "jupyterhub-idle-culler", "jupyter-lab", "configurable-http-proxy"):
        assert (BIN / tool).exists(), INSTALL.format(tool, sys.executable, sys.prefix)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Hub:
    """The hub of the example, with its data in ``folder``, on free ports. ``config`` is additional configuration."""

    def __init__(self, folder: Path, config: str = "") -> None:
        require_tools()
        self.log = folder / "hub.log"
        self.url = f"http://127.0.0.1:{free_port()}"
        lines = [
            f"load_subconfig({str(CONFIG)!r})",
            f"c.JupyterHub.bind_url = {self.url!r}",
            f"c.JupyterHub.hub_bind_url = 'http://127.0.0.1:{free_port()}'",
            f"c.ConfigurableHTTPProxy.api_url = 'http://127.0.0.1:{free_port()}'",
            f"c.Spawner.environment.update({ {name: os.environ[name] for name in KEPT if name in os.environ} })",
            config,
        ]
        file = folder / "test_config.py"
        file.write_text("\n".join(lines))
        env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
        command = [str(BIN / "jupyterhub"), "--config", str(file)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
        deadline = time.monotonic() + READY
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(self.log_end())
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            return bool(urllib.request.urlopen(f"{self.url}/hub/health", timeout=READY).status == 200)
        except URLError:
            return False

    def log_end(self) -> str:
        """Return the end of the log of the hub and its users' servers."""
        return self.log.read_text()[-10_000:]

    def stop(self) -> None:
        """Stop the hub and all users' servers with SIGINT, as Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(READY)


class Browser:
    """A user's browser: logs in with a form, stores cookies, follows redirects, and starts stopped servers."""

    def __init__(self, hub: Hub, user: str) -> None:
        self.hub, self.user = hub, user
        self.cookies = CookieJar()
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(self.cookies))
        self._ask("GET", "/hub/login")
        form = urlencode({"username": user, "password": "", "_xsrf": self._xsrf("/hub/")})
        status, page = self._ask("POST", "/hub/login", form.encode())
        assert status == 200, page

    def _ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, str]:
        request = urllib.request.Request(urljoin(self.hub.url, path), body, headers, method=method)
        try:
            with self._opener.open(request, timeout=READY) as answer:
                self.path = urlsplit(answer.url).path
                return answer.status, answer.read().decode()
        except HTTPError as error:
            self.path = urlsplit(error.url or "").path
            return error.code, error.read().decode()

    def _xsrf(self, path: str) -> str:
        return next(cookie.value or "" for cookie in self.cookies if cookie.name == "_xsrf" and cookie.path == path)

    def visit(self, server: str, page: str) -> None:
        """Open a page of one of the user's servers. The hub starts the server if it does not run."""
        deadline = time.monotonic() + READY
        while True:
            status, _ = self._ask("GET", f"/hub{self.base(server)}{page}")
            if status == 200 and self.path == self.base(server) + page:
                return
            assert status < 500 and time.monotonic() < deadline, f"{status} {self.path}\n{self.hub.log_end()}"
            if status in (404, 424):  # the server does not exist or does not run; a browser goes to the spawn page
                self._ask("GET", "/hub/spawn/" + self.base(server).removeprefix("/user/").removesuffix("/"))
            time.sleep(0.5)

    def api(self, server: str, method: str, path: str, body: Any = None) -> Any:
        """Send a request to the API of one of the user's servers. An empty name selects the default server."""
        base = self.base(server)
        data = None if body is None else json.dumps(body).encode()
        token = {"X-XSRFToken": self._xsrf(base)}
        status, answer = self._ask(method, f"{base}api/{path}", data, **token)
        assert status < 300, f"{status} {answer}\n{self.hub.log_end()}"
        return json.loads(answer or "null")

    def base(self, server: str) -> str:
        return f"/user/{self.user}/{quote(server)}/" if server else f"/user/{self.user}/"

    def servers(self) -> list[str]:
        """Return the names of the user's running servers."""
        status, answer = self._ask("GET", f"/hub/api/users/{self.user}", Referer=f"{self.hub.url}/hub/home")
        assert status == 200, answer
        return [name for name, server in json.loads(answer)["servers"].items() if not server["stopped"]]

    def open_notebook(self, kernel: str, name: str, server: str = "") -> Notebook:
        """Open a notebook through its link, and start its session."""
        self.visit(server, f"lab/tree/{name}")
        session = {"path": name, "name": name, "type": "notebook", "kernel": {"name": kernel}}
        return Notebook(self, server, self.api(server, "POST", "sessions", session)["kernel"]["id"])


class Notebook:
    """An open notebook: a websocket to its kernel, through the proxy."""

    def __init__(self, browser: Browser, server: str, kernel_id: str) -> None:
        import websocket

        session = uuid4().hex
        path = f"{browser.base(server)}api/kernels/{kernel_id}/channels?session_id={session}"
        request = urllib.request.Request(browser.hub.url + path)
        browser.cookies.add_cookie_header(request)
        self.kernel_id, self._session = kernel_id, session
        self._socket = websocket.create_connection(
            request.full_url.replace("http", "ws", 1),
            cookie=request.get_header("Cookie"),
            origin=browser.hub.url,
            header={"Sec-Fetch-Mode": "websocket", "Sec-Fetch-Site": "same-origin"},
            timeout=READY,
        )

    def run(self, code: str) -> str:
        """Execute a cell. Return its printed output and result. Fails on an error."""
        header = {"msg_id": uuid4().hex, "msg_type": "execute_request", "session": self._session, "version": "5.3"}
        header |= {"username": "", "date": "2000-01-01T00:00:00Z"}
        content = {"code": code, "silent": False}
        message = {"channel": "shell", "header": header, "parent_header": {}, "metadata": {}, "content": content}
        self._socket.send(json.dumps(message))
        pieces = []
        while True:
            answer = json.loads(self._socket.recv())
            kind, content = answer["header"]["msg_type"], answer["content"]
            if answer["parent_header"].get("msg_id") != header["msg_id"]:
                continue
            if kind == "stream":
                pieces.append(content["text"])
            elif kind == "execute_result":
                pieces.append(content["data"]["text/plain"])
            elif kind == "error":
                raise AssertionError("\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                return "".join(pieces)

    def close(self) -> None:
        self._socket.close()
