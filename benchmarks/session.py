"""Start kernels for the benchmarks. Manager and client are the same for each kind of kernel; the kernelspec differs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_client.provisioning.provisioner_base import KernelProvisionerBase

TIMEOUT = 60.0


@dataclass(frozen=True)
class Contender:
    """One of the kinds of kernel that are compared."""

    name: str
    title: str
    provisioner: str
    transport: str = "tcp"
    settings: Mapping[str, object] = field(default_factory=lambda: {"template": "none"}, hash=False)
    """Settings of SandboxProvisioner. The other provisioners have none."""
    in_project: bool = False
    """True if the kernel's interpreter is in the environment of the project folder, in which the kernel then works."""


PLAIN = Contender("plain", "plain", "local-provisioner")
GVISOR = Contender("gvisor", "gVisor alone", "host-sockets", transport="ipc")
SANDBOXED = Contender("sandboxed", "sandboxed", "sandbox-provisioner")
PERSISTENT = Contender(
    "persistent", "persistent", "sandbox-provisioner", settings={"template": "none", "sandbox_id": "persistent"}
)
TEMPLATE = Contender("template", "from a template", "sandbox-provisioner", settings={"template": "use"})
WARM_POOL = Contender(
    "warm-pool", "from the warm pool", "sandbox-provisioner", settings={"template": "use", "standby": 1}
)
PRELOADED = Contender(
    "preloaded",
    "from a template with both",
    "sandbox-provisioner",
    settings={"template": "use", "preload": ["numpy", "pandas"]},
)
PLAIN_IN_PROJECT = Contender("plain-in-project", "plain", "local-provisioner", in_project=True)
IN_PROJECT = Contender(
    "in-project", "with .venv in the folder", "sandbox-provisioner", settings={"template": "use"}, in_project=True
)
CONTENDERS = (PLAIN, GVISOR, SANDBOXED)


class Execution(NamedTuple):
    """The duration of one cell and the bytes that it printed, measured at the client."""

    seconds: float
    printed: int


class Session:
    """A kernel with a connected client. ``seconds_to_ready`` is the time from the start to the first reply."""

    def __init__(self, contender: Contender, kernelspecs: Path, folder: Path) -> None:
        self._folder = folder
        self._manager = KernelManager(
            kernel_name=contender.name,
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[str(kernelspecs)], ensure_native_kernel=False),
            connection_file=str(folder / "kernel.json"),
            transport=contender.transport,
        )
        self._end = ExitStack()
        self._end.callback(self._manager.shutdown_kernel, now=True)

    def start(self) -> None:
        """Start the kernel, connect, and wait for its first reply."""
        begin = time.perf_counter()
        self._manager.start_kernel(cwd=str(self._folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._client: BlockingKernelClient = self._manager.client()
        self._end.callback(self._client.stop_channels)
        self._client.start_channels()
        self._client.kernel_info(reply=True, timeout=TIMEOUT)
        self.seconds_to_ready = time.perf_counter() - begin

    @property
    def provisioner(self) -> KernelProvisionerBase | None:
        """The kernel's provisioner."""
        return self._manager.provisioner

    def wait_for_ready(self) -> None:
        """Wait until all channels are connected, and discard earlier messages."""
        self._client.wait_for_ready(timeout=TIMEOUT)

    def execute(self, code: str) -> Execution:
        """Run a cell, and wait for its reply and its last output."""
        begin = time.perf_counter()
        request = self._client.execute(code)
        printed = 0
        while True:
            message = self._client.get_iopub_msg(timeout=TIMEOUT)
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                printed += len(content["text"].encode())
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                break
        reply = self._client.get_shell_msg(timeout=TIMEOUT)
        seconds = time.perf_counter() - begin
        if reply["parent_header"]["msg_id"] != request or reply["content"]["status"] != "ok":
            raise RuntimeError(f"The cell {code!r} failed: {reply['content']}")
        return Execution(seconds, printed)

    def stop(self) -> None:
        """End the kernel at once, even if its start was not completed."""
        self._end.close()


class Bench:
    """A temporary folder with the kernelspecs, and all running sessions."""

    def __init__(self) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="bench-")
        self._folder = Path(self._scratch.name)
        self._open: list[Session] = []
        self._count = 0

    def __enter__(self) -> Self:
        factory = KernelProvisionerFactory.instance()
        factory.provisioners[GVISOR.provisioner] = EntryPoint(
            GVISOR.provisioner, "host_sockets:HostSocketProvisioner", factory.GROUP_NAME
        )
        make_environment(self.project / ".venv")
        for contender in (*CONTENDERS, PERSISTENT, TEMPLATE, WARM_POOL, PRELOADED, PLAIN_IN_PROJECT, IN_PROJECT):
            folder = self._folder / "kernels" / contender.name
            folder.mkdir(parents=True)
            (folder / "kernel.json").write_text(json.dumps(self._kernelspec(contender)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in list(self._open):
            self.stop(session)
        self._scratch.cleanup()

    def _kernelspec(self, contender: Contender) -> dict[str, object]:
        config = contender.settings if contender.provisioner == SANDBOXED.provisioner else {}
        python = str(self.project / ".venv" / "bin" / "python") if contender.in_project else sys.executable
        return {
            "argv": [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            "display_name": contender.title,
            "language": "python",
            "env": {"IPYTHONDIR": str(self._folder / "ipython")} if contender in (PLAIN, PLAIN_IN_PROJECT) else {},
            "metadata": {"kernel_provisioner": {"provisioner_name": contender.provisioner, "config": config}},
        }

    @property
    def project(self) -> Path:
        """The project folder, which holds its own environment."""
        return self._folder / "project"

    @property
    def jupyter_path(self) -> Path:
        """The folder in which Jupyter finds the kernelspecs, as a value of JUPYTER_PATH."""
        return self._folder

    def start(self, contender: Contender, folder_name: str = "") -> Session:
        """Start a kernel of this kind in its project, in the folder ``folder_name``, or in a new folder."""
        self._count += 1
        folder = self.project if contender.in_project else self._folder / (folder_name or str(self._count))
        folder.mkdir(exist_ok=True)
        session = Session(contender, self._folder / "kernels", folder)
        self._open.append(session)
        session.start()
        return session

    def stop(self, session: Session) -> None:
        """End a session's kernel and remove its files."""
        self._open.remove(session)
        session.stop()


def make_environment(prefix: Path) -> None:
    """Create a virtual environment that also finds the packages of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", prefix], check=True)
    (own,) = (path for path in map(Path, sys.path) if path.name == "site-packages" and path.is_relative_to(sys.prefix))
    (site_folder(prefix) / "borrowed.pth").write_text(f"{own}\n")


def site_folder(prefix: Path) -> Path:
    """Return the folder of an environment in which packages are installed."""
    (found,) = prefix.glob("lib/python3*/site-packages")
    return found
