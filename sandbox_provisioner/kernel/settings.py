"""Declare the settings of a sandboxed kernel as traits."""

from __future__ import annotations

from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from traitlets import Bool, Enum, Float, Int, List, Unicode, default

from .. import config
from ..gvisor.runsc import PLATFORMS
from .relay import MAX_MESSAGE


class SandboxSettings(LocalProvisioner):
    """The settings of a sandboxed kernel; SandboxProvisioner inherits them.

    Each can be set in the kernelspec (metadata.kernel_provisioner.config), in Jupyter's configuration
    (c.SandboxProvisioner.NAME) or by an environment variable; the first of these that sets it takes precedence.
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
    client_transport = Enum(
        ("ipc", "tcp"),
        config=True,
        help="How clients on this machine reach the kernel: unix sockets that only this user can open, or loopback "
        "TCP, which other users of the machine can connect to. KernelManager.transport goes before it where that is "
        "configured. Environment: SANDBOX_CLIENT_TRANSPORT",
    )
    max_message_size = Int(
        min=1 << 20,
        config=True,
        help="Bytes of the largest message that a kernel can send its clients; the connection on which it sends a "
        "larger one is closed. Environment: SANDBOX_MAX_MESSAGE_SIZE",
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

    @default("client_transport")
    def _default_client_transport(self) -> str:
        return config.choice("SANDBOX_CLIENT_TRANSPORT", ("ipc", "tcp"), "ipc")

    @default("max_message_size")
    def _default_max_message_size(self) -> int:
        return config.count("SANDBOX_MAX_MESSAGE_SIZE", MAX_MESSAGE)

    @default("working_folder")
    def _default_working_folder(self) -> str:
        return config.text("SANDBOX_WORKING_FOLDER")

    @default("allow_home")
    def _default_allow_home(self) -> bool:
        return config.flag("SANDBOX_ALLOW_HOME")

    template = Enum(
        ("build", "use", "none"),
        config=True,
        help="Start kernels as copies of a template, a kernel that was prepared and saved once. 'build': where there "
        "is none that fits, it is made in the background; 'use': only `jupyter sandbox template build` makes it; "
        "'none': every kernel starts from nothing. Environment: SANDBOX_TEMPLATE",
    )
    preload = List(
        Unicode(),
        config=True,
        help="Modules that the template imports, so that a new kernel has them in memory before its first cell, such "
        "as numpy. Environment, comma-separated: SANDBOX_PRELOAD",
    )

    standby = Int(
        min=0,
        config=True,
        help="How many copies of its template are kept running for each kernelspec, so that the next kernel in the "
        "same folder starts at once; they are ended when memory is scarce, and with the server. "
        "Environment: SANDBOX_STANDBY",
    )

    @default("standby")
    def _default_standby(self) -> int:
        return config.count("SANDBOX_STANDBY", 0)

    @default("template")
    def _default_template(self) -> str:
        return config.choice("SANDBOX_TEMPLATE", ("build", "use", "none"), "build")

    @default("preload")
    def _default_preload(self) -> list[str]:
        return config.words("SANDBOX_PRELOAD")

    persistent = Bool(
        config=True,
        help="Keep the state of a notebook's kernel: it is saved when it is idle, when the server stops and before it "
        "moves to another server, and is back when the notebook is opened again. Environment: SANDBOX_PERSISTENT",
    )
    sandbox_id = Unicode(
        config=True,
        help="The persistent sandbox that the kernel runs in, by an id of your own, in whatever storage this server "
        "has; empty means the notebook's. Environment: SANDBOX_ID",
    )
    gcs_sandbox_id = Unicode(
        config=True,
        help="The same, but in Google Cloud Storage or not at all. Environment: GCS_SANDBOX_ID",
    )
    enable_handoff = Bool(
        config=True,
        help="Hand the sandbox over, with its state, to another server that opens the same notebook. "
        "Environment: SANDBOX_ENABLE_HANDOFF",
    )
    enable_checkpoint_at_idle = Bool(
        config=True,
        help="Save the kernel and give its memory back when no cell ran for idle_timeout seconds, whoever is "
        "connected; the next cell wakes it. Environment: SANDBOX_ENABLE_CHECKPOINT_AT_IDLE",
    )
    idle_timeout = Float(
        config=True,
        help="Seconds without a running or waiting cell after which the kernel is saved, if "
        "enable_checkpoint_at_idle. Environment: SANDBOX_IDLE_TIMEOUT",
    )
    handoff_timeout = Float(
        config=True,
        help="Seconds to wait for another server to hand the sandbox over, or for the lease of a dead one to run out, "
        "if enable_handoff. Environment: SANDBOX_HANDOFF_TIMEOUT",
    )
    on_shutdown = Enum(
        ("delete", "checkpoint"),
        config=True,
        help="What 'Shut Down Kernel' does with a persistent sandbox: 'delete' it, or 'checkpoint' it, so that "
        "the notebook has its state when it is opened again. Environment: SANDBOX_ON_SHUTDOWN",
    )
    hook_timeout = Float(
        config=True,
        help="Seconds that a notebook's sandbox_before_checkpoint() or sandbox_after_restore() may take; 0 runs "
        "neither. Environment: SANDBOX_HOOK_TIMEOUT",
    )
    reseed = Bool(
        config=True,
        help="Seed Python's and numpy's random numbers anew after each restore, so that two kernels which come of the "
        "same checkpoint do not draw the same. Environment: SANDBOX_RESEED",
    )
    storage_dir = Unicode(
        config=True,
        help="The local folder for persistent sandboxes, if no bucket is configured; empty means one in Jupyter's data "
        "folder. Environment: SANDBOX_STORAGE_DIR",
    )

    shared_with = List(
        Unicode(),
        config=True,
        help="Names of other users who may open, fork, change and delete the sandbox as you may; their servers need "
        "the same storage and the same SANDBOX_SIGNING_KEY. Environment, comma-separated: SANDBOX_SHARED_WITH",
    )

    @default("shared_with")
    def _default_shared_with(self) -> list[str]:
        return config.words("SANDBOX_SHARED_WITH")

    @default("persistent")
    def _default_persistent(self) -> bool:
        return config.flag("SANDBOX_PERSISTENT", default=True)

    @default("sandbox_id")
    def _default_sandbox_id(self) -> str:
        return config.text("SANDBOX_ID")

    @default("gcs_sandbox_id")
    def _default_gcs_sandbox_id(self) -> str:
        return config.text("GCS_SANDBOX_ID")

    @default("enable_handoff")
    def _default_enable_handoff(self) -> bool:
        return config.flag("SANDBOX_ENABLE_HANDOFF")

    @default("enable_checkpoint_at_idle")
    def _default_enable_checkpoint_at_idle(self) -> bool:
        return config.flag("SANDBOX_ENABLE_CHECKPOINT_AT_IDLE")

    @default("idle_timeout")
    def _default_idle_timeout(self) -> float:
        return config.seconds("SANDBOX_IDLE_TIMEOUT", 1800.0)

    @default("handoff_timeout")
    def _default_handoff_timeout(self) -> float:
        return config.seconds("SANDBOX_HANDOFF_TIMEOUT", 120.0)

    @default("on_shutdown")
    def _default_on_shutdown(self) -> str:
        return config.choice("SANDBOX_ON_SHUTDOWN", ("delete", "checkpoint"), "delete")

    @default("hook_timeout")
    def _default_hook_timeout(self) -> float:
        return config.seconds("SANDBOX_HOOK_TIMEOUT", 10.0)

    @default("reseed")
    def _default_reseed(self) -> bool:
        return config.flag("SANDBOX_RESEED")

    @default("storage_dir")
    def _default_storage_dir(self) -> str:
        return config.text("SANDBOX_STORAGE_DIR")
