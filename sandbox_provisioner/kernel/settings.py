"""Declare the settings of a sandboxed kernel as traits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from traitlets import Bool, Enum, Float, Int, List, Unicode, default
from traitlets.traitlets import DefaultHandler

from .. import config
from ..gvisor.runsc import PLATFORMS
from .relay import MAX_MESSAGE


def _from_environment(trait: str, read: Callable[[], Any]) -> DefaultHandler:
    """Return the default of ``trait``: the result of ``read``, which reads an environment variable."""
    handler: DefaultHandler = default(trait)(lambda settings: read())
    return handler


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
        help="The kernel's channels inside the sandbox: unix sockets, or loopback TCP for a kernel that knows "
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
        help="The effect of 'Shut Down Kernel' on a persistent sandbox: 'delete' it, or 'checkpoint' it, so that "
        "the notebook has its state when it is opened again. Environment: SANDBOX_ON_SHUTDOWN",
    )
    hook_timeout = Float(
        config=True,
        help="Seconds that a notebook's sandbox_before_checkpoint() or sandbox_after_restore() may take; 0 runs "
        "neither. Environment: SANDBOX_HOOK_TIMEOUT",
    )
    reseed = Bool(
        config=True,
        help="Seed Python's and numpy's random numbers again after each restore, so that two kernels from the same "
        "checkpoint do not draw the same numbers. Environment: SANDBOX_RESEED",
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

    _default_mounts = _from_environment("mounts", lambda: config.words("SANDBOX_MOUNTS"))
    _default_pass_environment = _from_environment("pass_environment", lambda: config.words("SANDBOX_PASS_ENVIRONMENT"))
    _default_network = _from_environment("network", lambda: config.choice("SANDBOX_NETWORK", ("none", "host"), "none"))
    _default_platform = _from_environment(
        "platform", lambda: config.choice("SANDBOX_PLATFORM", PLATFORMS, PLATFORMS[0])
    )
    _default_guest_transport = _from_environment(
        "guest_transport", lambda: config.choice("SANDBOX_GUEST_TRANSPORT", ("ipc", "tcp"), "ipc")
    )
    _default_client_transport = _from_environment(
        "client_transport", lambda: config.choice("SANDBOX_CLIENT_TRANSPORT", ("ipc", "tcp"), "ipc")
    )
    _default_max_message_size = _from_environment(
        "max_message_size", lambda: config.count("SANDBOX_MAX_MESSAGE_SIZE", MAX_MESSAGE)
    )
    _default_working_folder = _from_environment("working_folder", lambda: config.text("SANDBOX_WORKING_FOLDER"))
    _default_allow_home = _from_environment("allow_home", lambda: config.flag("SANDBOX_ALLOW_HOME"))
    _default_standby = _from_environment("standby", lambda: config.count("SANDBOX_STANDBY", 0))
    _default_template = _from_environment(
        "template", lambda: config.choice("SANDBOX_TEMPLATE", ("build", "use", "none"), "build")
    )
    _default_preload = _from_environment("preload", lambda: config.words("SANDBOX_PRELOAD"))
    _default_shared_with = _from_environment("shared_with", lambda: config.words("SANDBOX_SHARED_WITH"))
    _default_persistent = _from_environment("persistent", lambda: config.flag("SANDBOX_PERSISTENT", default=True))
    _default_sandbox_id = _from_environment("sandbox_id", lambda: config.text("SANDBOX_ID"))
    _default_gcs_sandbox_id = _from_environment("gcs_sandbox_id", lambda: config.text("GCS_SANDBOX_ID"))
    _default_enable_handoff = _from_environment("enable_handoff", lambda: config.flag("SANDBOX_ENABLE_HANDOFF"))
    _default_enable_checkpoint_at_idle = _from_environment(
        "enable_checkpoint_at_idle", lambda: config.flag("SANDBOX_ENABLE_CHECKPOINT_AT_IDLE")
    )
    _default_idle_timeout = _from_environment("idle_timeout", lambda: config.seconds("SANDBOX_IDLE_TIMEOUT", 1800.0))
    _default_handoff_timeout = _from_environment(
        "handoff_timeout", lambda: config.seconds("SANDBOX_HANDOFF_TIMEOUT", 120.0)
    )
    _default_on_shutdown = _from_environment(
        "on_shutdown", lambda: config.choice("SANDBOX_ON_SHUTDOWN", ("delete", "checkpoint"), "delete")
    )
    _default_hook_timeout = _from_environment("hook_timeout", lambda: config.seconds("SANDBOX_HOOK_TIMEOUT", 10.0))
    _default_reseed = _from_environment("reseed", lambda: config.flag("SANDBOX_RESEED"))
    _default_storage_dir = _from_environment("storage_dir", lambda: config.text("SANDBOX_STORAGE_DIR"))
