"""SandboxProvisioner: Jupyter's way to start a kernel inside a gVisor sandbox.

Deriving from LocalProvisioner keeps what a client sees (connection file, ports, CurveZMQ keys, resolve_path)
exactly as Jupyter's own; the process, and everything the kernel can reach, is ours.
"""

from __future__ import annotations

import getpass
import ipaddress
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from jupyter_core.paths import jupyter_config_path, jupyter_path, jupyter_runtime_dir
from traitlets import Bool, Enum, List, Unicode, default

from . import config
from .bundle import BundleSpec, Mount, parse_mount
from .errors import ConfigurationError, SandboxError
from .folders import homes, masks, shields, working_folder
from .gvisor import GVisorSandbox
from .handle import SandboxHandle
from .interpreter import parts, resolve, roomy, visible
from .iothread import IO
from .kernel import SandboxedKernel, printable
from .relay import CHANNELS
from .runsc import PLATFORMS, find
from .runtime import runtime_root

PASSED = (
    "PATH", "LANG", "LANGUAGE", "TZ", "TERM", "COLUMNS", "LINES", "VIRTUAL_ENV", "CONDA_PREFIX",
    "CONDA_DEFAULT_ENV", "PYTHONPATH", "IPYKERNEL_CELL_NAME", "JPY_SESSION_NAME", "OMP_NUM_THREADS",
)  # fmt: skip
"""What a kernel sees of the server's environment, besides LC_*, unless told otherwise."""

FALLBACK_HOME = "/home/sandbox"
GUEST_RUNTIME = "/run/jupyter"
STABLE_START = 20.0


class SandboxProvisioner(LocalProvisioner):
    """Starts a kernel inside a gVisor sandbox.

    Every setting can be given in the kernelspec (metadata.kernel_provisioner.config), in Jupyter's configuration
    (c.SandboxProvisioner.NAME) and by an environment variable; the first of these that says something wins.
    """

    runsc = Unicode(
        config=True,
        help="The runsc binary; empty looks on PATH and where `jupyter sandbox setup` puts it. "
        "Environment: SANDBOX_RUNSC",
    )
    mounts = List(
        Unicode(),
        config=True,
        help="Further folders and files that the kernel sees, each 'source[:destination][:ro|rw]', read-only unless "
        "it ends in :rw. Environment, comma-separated: SANDBOX_MOUNTS",
    )
    pass_environment = List(
        Unicode(),
        config=True,
        help="Further variables of the server's environment that the kernel gets. "
        "Environment, comma-separated: SANDBOX_PASS_ENVIRONMENT",
    )
    network = Enum(
        ("none", "host"),
        config=True,
        help="'none': the kernel reaches no address but its own loopback. 'host': it uses the host's network. "
        "Environment: SANDBOX_NETWORK",
    )
    platform = Enum(
        PLATFORMS,
        config=True,
        help="How gVisor intercepts system calls. Environment: SANDBOX_PLATFORM",
    )
    guest_transport = Enum(
        ("ipc", "tcp"),
        config=True,
        help="What the kernel's channels are inside the sandbox: unix sockets, or loopback TCP for a kernel that knows "
        "no ipc. Clients notice no difference. Environment: SANDBOX_GUEST_TRANSPORT",
    )
    working_folder = Unicode(
        config=True,
        help="The folder that the kernel works in and may write to; empty means the notebook's. "
        "Environment: SANDBOX_WORKING_FOLDER",
    )
    allow_home = Bool(
        config=True,
        help="Let a notebook that lies directly in your home folder see and change all of it. "
        "Environment: SANDBOX_ALLOW_HOME",
    )

    @default("mounts")
    def _default_mounts(self) -> list[str]:
        return config.words("SANDBOX_MOUNTS")

    @default("pass_environment")
    def _default_pass_environment(self) -> list[str]:
        return config.words("SANDBOX_PASS_ENVIRONMENT")

    @default("network")
    def _default_network(self) -> str:
        return config.choice("SANDBOX_NETWORK", ("none", "host"), "none")

    @default("platform")
    def _default_platform(self) -> str:
        return config.choice("SANDBOX_PLATFORM", PLATFORMS, PLATFORMS[0])

    @default("guest_transport")
    def _default_guest_transport(self) -> str:
        return config.choice("SANDBOX_GUEST_TRANSPORT", ("ipc", "tcp"), "ipc")

    @default("working_folder")
    def _default_working_folder(self) -> str:
        return config.text("SANDBOX_WORKING_FOLDER")

    @default("allow_home")
    def _default_allow_home(self) -> bool:
        return config.flag("SANDBOX_ALLOW_HOME")

    parent: Any

    def __init__(self, **kwargs: Any) -> None:
        known = set(self.trait_names())
        for name in kwargs:
            if name not in known:
                settings = ", ".join(sorted(self.trait_names(config=True)))
                raise ConfigurationError(
                    name,
                    f"The kernelspec gives the sandbox a setting {name!r}, which there is not.",
                    f"There are: {settings}.",
                )
        super().__init__(**kwargs)
        self._kernel = SandboxedKernel()
        self._launched = False

    # -- the contract of KernelProvisionerBase; KernelManager calls all of these -----------------------------------

    @property
    def has_process(self) -> bool:
        """Whether a kernel was launched and its end not yet waited for."""
        return self._launched

    async def poll(self) -> int | None:
        """None while the kernel runs, else its exit status."""
        return self._kernel.status

    async def wait(self) -> int | None:
        """Wait until the kernel has ended and its sandbox is gone."""
        if not self._launched:
            return 0
        status = await IO.run(self._kernel.ended())
        self._launched = False
        return status

    async def send_signal(self, signum: int) -> None:
        """Signal the kernel's process group inside the sandbox."""
        if self._launched:
            await IO.run(self._kernel.signal(signum))

    async def kill(self, restart: bool = False) -> None:
        """End the kernel and its sandbox at once."""
        await self.send_signal(signal.SIGKILL)

    async def terminate(self, restart: bool = False) -> None:
        """Ask the kernel to end."""
        await self.send_signal(signal.SIGTERM)

    async def cleanup(self, restart: bool = False) -> None:
        """Give everything back; before a restart the listeners stay, so that clients find the same ports."""
        if not restart:
            await self._release()

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Reserve the ports, and only then write the connection file; a machine that is not ready says so first."""
        find(self.runsc)
        IO.hold(self, self._kernel.close)
        try:
            await self._reserve()
            self.ports_cached = True
            return await super().pre_launch(**kwargs)
        except BaseException:
            await self._release()
            raise

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Start the sandbox and the kernel in it."""
        try:
            await self._launch(cmd, **kwargs)
        except BaseException as error:
            if isinstance(error, SandboxError):
                self.log.error("Kernel %s was not started: %s", self.kernel_id, error)
            await self._release()
            raise
        return self.connection_info

    async def get_provisioner_info(self) -> dict[str, Any]:
        """What identifies this kernel's sandbox, besides the connection."""
        info: dict[str, Any] = await super().get_provisioner_info()
        if self.sandbox:
            info.update(sandbox_id=self.sandbox.sandbox_id, container_id=self.sandbox.container_id)
        return info

    def get_stable_start_time(self, recommended: float = 10.0) -> float:
        """A start takes longer in a sandbox, the more so when many start at once."""
        return max(recommended, STABLE_START)

    @property
    def sandbox(self) -> GVisorSandbox | None:
        """The driver of the sandbox that the present kernel runs in; call its methods through ``iothread.IO.run``."""
        return self._kernel.handle.instance if self._kernel.handle else None

    # -- how -----------------------------------------------------------------------------------------------------

    async def _release(self) -> None:
        if IO.held_by(self):
            await IO.run(self._kernel.close())
            IO.release(self)
        self._launched = False

    async def _reserve(self) -> None:
        km = self.parent
        if km.transport == "ipc":
            paths = {channel: os.path.abspath(f"{km.ip}-{number}") for number, channel in enumerate(CHANNELS, 1)}
            await IO.run(self._kernel.relay.reserve_ipc(paths))
            ports = {channel: number for number, channel in enumerate(CHANNELS, 1)}
        else:
            ip = "127.0.0.1" if km.ip == "localhost" else km.ip
            if not ipaddress.ip_address(ip).is_loopback:
                raise ConfigurationError(
                    "KernelManager.ip",
                    f"A sandboxed kernel can only be reached over loopback, and {km.ip} is not.",
                    "Leave KernelManager.ip at 127.0.0.1.",
                )
            wanted = {channel: getattr(km, f"{channel}_port") for channel in CHANNELS}
            ports = await IO.run(self._kernel.relay.reserve_tcp(ip, wanted))
        if not km.cache_ports:
            km._record_random_port_names()  # so that a restart with new ports forgets these
        for channel, port in ports.items():
            setattr(km, f"{channel}_port", port)

    async def _launch(self, cmd: list[str], **kwargs: Any) -> None:
        env = self._environment(kwargs["env"])
        connection = os.path.realpath(self.parent.connection_file)
        inside = f"{GUEST_RUNTIME}/{os.path.basename(connection)}"
        argv = [part.replace(connection, inside) for part in cmd]
        argv[0] = resolve(argv[0], env)
        folder = self._folder(kwargs.get("cwd"))
        cwd = folder.destination if folder else env["HOME"]
        info = json.loads(Path(connection).read_text()) | self._guest_endpoints()
        runsc = find(self.runsc)
        given = [*([folder] if folder else []), *map(parse_mount, self.mounts)]
        writable = [mount.source for mount in given if mount.writable]
        seen = [*visible([sys.executable], env, writable), *visible(argv, env, writable)]
        trusted = [*jupyter_path(), *jupyter_config_path(), str(runsc.path.parent)]
        trusted += [part for mount in seen for part in (mount.source, *parts(mount.source))]
        mounts = [*seen, *given, *shields(given, trusted)]
        spec = BundleSpec(
            python=os.path.realpath(sys.executable),
            home=env["HOME"],
            user=env["USER"],
            mounts=(*mounts, *masks(mounts, {*homes(), *_own_folders()}, env["HOME"])),
            network=self.network,
            environment={"PATH": env.get("PATH", os.defpath), "HOME": env["HOME"]},
        )

        async def launch() -> None:
            await self._kernel.launch(
                SandboxHandle.create_ephemeral(self.kernel_id, spec, runsc, self.platform),
                roomy(argv),
                env=env,
                cwd=cwd,
                folder=folder,
                files={inside: json.dumps(info)},
                targets=_targets(info),
                sinks={name: _sink(kwargs.get(name), fd) for name, fd in (("stdout", 1), ("stderr", 2))},
                on_end=self._ended,
            )

        await IO.run(launch())
        self._launched = True
        self.cwd = cwd

    def _ended(self, status: int) -> None:
        if status > 0:
            words = printable(self._kernel.last_words)
            self.log.warning("Kernel %s ended with status %d. %s", self.kernel_id, status, words)

    def _guest_endpoints(self) -> dict[str, Any]:
        """The kernel's own endpoints, as its connection file inside the sandbox has them."""
        first, ip = (1, f"{GUEST_RUNTIME}/kernel") if self.guest_transport == "ipc" else (5001, "127.0.0.1")
        ports = {f"{channel}_port": first + number for number, channel in enumerate(CHANNELS)}
        return {"transport": self.guest_transport, "ip": ip, **ports}

    def _environment(self, env: dict[str, str]) -> dict[str, str]:
        """Of all variables: the kernelspec's, those this start was given, and the harmless or permitted ones."""
        _server_environment.update(_initial_environment().items(), os.environ.items())
        named = {*self.kernel_spec.env, *self.pass_environment, *PASSED}
        passed = {
            name: value
            for name, value in env.items()
            if name in named or name.startswith("LC_") or (name, value) not in _server_environment
        }
        home = os.path.expanduser("~")
        passed["HOME"] = home if os.path.isabs(home) and home != "/" else FALLBACK_HOME
        passed["USER"] = passed["LOGNAME"] = getpass.getuser()
        passed["TMPDIR"] = "/tmp"
        passed["JPY_PARENT_PID"] = "1"  # the sandbox's init, which ipykernel knows not to watch
        return passed

    def _folder(self, cwd: str | None) -> Mount | None:
        """The folder that the kernel works in and may write to; None if it gets only its private home."""
        wanted, allowed, reserved = self.working_folder or cwd, self.allow_home, _own_folders()
        try:
            folder = working_folder(wanted or os.getcwd(), allowed, reserved)
        except ConfigurationError as error:
            if wanted:
                raise
            self.log.warning("The kernel works in a private, empty home. %s", error.problem)
            return None
        if folder.source in map(os.path.realpath, sys.path):
            self.log.warning("The server itself imports from %s, which this kernel can write to.", folder.source)
        return folder


def _own_folders() -> list[str]:
    """Where connection files and the folders of running sandboxes are."""
    return [jupyter_runtime_dir(), str(runtime_root())]


def _targets(info: dict[str, Any]) -> dict[str, str]:
    mark = "unix:{ip}-{port}" if info["transport"] == "ipc" else "tcp:{ip}:{port}"
    return {channel: mark.format(ip=info["ip"], port=info[f"{channel}_port"]) for channel in CHANNELS}


def _sink(given: Any, inherited: int) -> int | None:
    """A copy of the descriptor that Popen would be told of: nothing said is our own, a pipe is read by nobody."""
    number = inherited if given is None else given if isinstance(given, int) else given.fileno()
    return None if number in (subprocess.PIPE, subprocess.DEVNULL, subprocess.STDOUT) else os.dup(number)


_server_environment: set[tuple[str, str]] = set()
"""Every variable the server was ever seen to have: what a restart brings back of them was not given to the kernel."""


def _initial_environment() -> dict[str, str]:
    """The environment that this process was started with, whatever it has become since."""
    try:
        raw = Path("/proc/self/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
