"""Declare the settings of a sandboxed kernel as traits, and read those in a kernelspec."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from traitlets import Bool, Enum, Float, Int, List, Unicode

from .. import config
from ..gvisor.runsc import PLATFORMS
from .relay import MAX_MESSAGE
from .scope import PROTECTED

TWIN_MARK = "sandbox_twin_of"
"""The key in the metadata of a kernelspec that `jupyter sandbox setup` made: the name of the original."""
TWIN_VERSION = "sandbox_twin_version"
"""The key in the same metadata with the version of its format; the first version did not write it."""
OLD_DEFAULTS: Mapping[str, Any] = {"enable_checkpoint_at_idle": True, "idle_timeout": 1800.0}
"""Settings that the first version of `jupyter sandbox setup` wrote into each twin. They are now built-in defaults."""


class SandboxSettings(config.Settings, LocalProvisioner):  # type: ignore[metaclass]
    """The settings of a sandboxed kernel; SandboxProvisioner inherits them.

    Each can be set in Jupyter's configuration (c.SandboxProvisioner.NAME), by an environment variable, or in the
    kernelspec (metadata.kernel_provisioner.config); the last of these that sets it takes precedence.
    """

    runsc = config.setting(
        "SANDBOX_RUNSC",
        Unicode(
            help="Path of the runsc binary. If empty, runsc is searched on PATH and in the folder where `jupyter "
            "sandbox setup` installs it.",
        ),
    )
    mounts = config.setting(
        "SANDBOX_MOUNTS",
        List(
            Unicode(),
            help="Further folders and files that the kernel sees, each 'source[:destination][:ro|rw]', read-only "
            "unless it ends in :rw.",
        ),
    )
    pass_environment = config.setting(
        "SANDBOX_PASS_ENVIRONMENT",
        List(Unicode(), help="Further variables of the server's environment that the kernel gets."),
    )
    network = config.setting(
        "SANDBOX_NETWORK",
        Enum(
            ("none", "host"),
            help="'none': the kernel reaches only its own loopback address. 'host': it uses the host's network.",
        ),
    )
    platform = config.setting("SANDBOX_PLATFORM", Enum(PLATFORMS, help="How gVisor intercepts system calls."))
    guest_transport = config.setting(
        "SANDBOX_GUEST_TRANSPORT",
        Enum(
            ("ipc", "tcp"),
            help="Transport of the kernel's channels inside the sandbox: unix sockets, or loopback TCP for kernels "
            "without ipc support. Clients are not affected.",
        ),
    )
    client_transport = config.setting(
        "SANDBOX_CLIENT_TRANSPORT",
        Enum(
            ("ipc", "tcp"),
            help="How clients on this machine reach the kernel: unix sockets that only this user can open, or loopback "
            "TCP, which other users of the machine can connect to. KernelManager.transport takes precedence "
            "if it is configured.",
        ),
    )
    max_message_size = config.setting(
        "SANDBOX_MAX_MESSAGE_SIZE",
        Int(
            MAX_MESSAGE,
            min=1 << 20,
            help="Bytes of the largest message that a kernel can send its clients; a larger message closes the "
            "connection on which it is sent.",
        ),
    )
    working_folder = config.setting(
        "SANDBOX_WORKING_FOLDER",
        Unicode(help="Working folder of the kernel, which it can write to; empty means the notebook's folder."),
    )
    folder_scope = config.setting(
        "SANDBOX_FOLDER_SCOPE",
        Enum(
            ("project", "notebook", "root"),
            help="The folder that the kernel can write to. 'project': the nearest folder at or above the notebook's "
            "that contains .git, pyproject.toml, setup.py, environment.yml, requirements.txt, .jupyter-sandbox or one "
            "of project_markers; without one, the notebook's folder. 'notebook': the notebook's folder. 'root': the "
            "server's root folder. It is never above the root folder, and never a home. The working folder stays the "
            "notebook's folder.",
        ),
    )
    project_markers = config.setting(
        "SANDBOX_PROJECT_MARKERS",
        List(Unicode(), help="Further names of files and folders that mark the folder of a project."),
    )
    protected_paths = config.setting(
        "SANDBOX_PROTECTED_PATHS",
        List(
            Unicode(),
            list(PROTECTED),
            help="Files and folders that stay read-only in a folder that the kernel can write to, because programs on "
            "the host would execute them. Paths, or patterns for names, in the folder itself, the notebook's folder "
            "and the folders in between. Environments, which contain pyvenv.cfg or conda-meta, are always read-only.",
        ),
    )
    home_folder = config.setting(
        "SANDBOX_HOME_FOLDER",
        Unicode(
            "notebooks",
            help="Working folder of the kernel of a notebook that lies directly in your home, below the home. It is "
            "created if it does not exist. Empty refuses such a notebook.",
        ),
    )
    allow_home = config.setting(
        "SANDBOX_ALLOW_HOME",
        Bool(help="Allow a kernel to work in your home folder itself, where it can read and change all files."),
    )

    template = config.setting(
        "SANDBOX_TEMPLATE",
        Enum(
            ("build", "use", "none"),
            help="Start kernels as copies of a template, a kernel that was prepared and saved once. 'build': build a "
            "missing or outdated template in the background; 'use': use only templates from `jupyter sandbox "
            "template build`; 'none': use no templates.",
        ),
    )
    preload = config.setting(
        "SANDBOX_PRELOAD",
        List(
            Unicode(),
            help="Modules that the template imports, such as numpy. They are in memory before the first cell runs.",
        ),
    )

    standby = config.setting(
        "SANDBOX_STANDBY",
        Int(
            min=0,
            help="Number of running template copies in the warm pool of each kernelspec. The next kernel in the same "
            "folder starts from one at once. The copies end when memory is scarce, and with the server.",
        ),
    )

    persistent = config.setting(
        "SANDBOX_PERSISTENT",
        Bool(
            True,
            help="Keep the state of a notebook's kernel: save it when it is idle, when the server stops, and before it "
            "moves to another server, and restore it when the notebook is opened again.",
        ),
    )
    sandbox_id = config.setting(
        "SANDBOX_ID",
        Unicode(
            help="Id of the kernel's persistent sandbox in this server's storage, chosen by you. The sandbox is "
            "created if it does not exist. Empty means the notebook's own sandbox."
        ),
    )
    gcs_sandbox_id = config.setting(
        "GCS_SANDBOX_ID",
        Unicode(help="Like sandbox_id, but the start fails if the storage is not Google Cloud Storage."),
    )
    enable_handoff = config.setting(
        "SANDBOX_ENABLE_HANDOFF",
        Bool(help="Hand the sandbox and its state over to another server that opens the same notebook."),
    )
    enable_checkpoint_at_idle = config.setting(
        "SANDBOX_ENABLE_CHECKPOINT_AT_IDLE",
        Bool(
            True,
            help="Save a persistent kernel and free its memory when no cell ran for idle_timeout seconds, even if "
            "clients are connected. The next cell wakes it. If it is not set and the storage cannot save memory, "
            "kernels are not saved.",
        ),
    )
    idle_timeout = config.setting(
        "SANDBOX_IDLE_TIMEOUT",
        Float(
            1800.0,
            help="Seconds without a running or waiting cell after which the kernel is saved, if "
            "enable_checkpoint_at_idle; 0: never.",
        ),
    )
    handoff_timeout = config.setting(
        "SANDBOX_HANDOFF_TIMEOUT",
        Float(
            120.0,
            help="With enable_handoff: seconds to wait until another server hands the sandbox over, or until the lease "
            "of a crashed server expires.",
        ),
    )
    on_shutdown = config.setting(
        "SANDBOX_ON_SHUTDOWN",
        Enum(
            ("delete", "checkpoint"),
            help="Effect of 'Shut Down Kernel' on a persistent sandbox: 'delete' it, or 'checkpoint' it, so that the "
            "notebook has its state when it is opened again.",
        ),
    )
    hook_timeout = config.setting(
        "SANDBOX_HOOK_TIMEOUT",
        Float(
            10.0,
            help="Seconds that a notebook's sandbox_before_checkpoint() or sandbox_after_restore() may take; 0 runs "
            "neither.",
        ),
    )
    reseed = config.setting(
        "SANDBOX_RESEED",
        Bool(
            help="Give Python's and numpy's random number generators new seeds after each restore, so that two kernels "
            "from the same checkpoint produce different numbers."
        ),
    )
    home_limit = config.setting(
        "SANDBOX_HOME_LIMIT",
        Int(
            1 << 30,
            min=0,
            help="Maximum bytes of the files in a persistent kernel's home folder, such as packages installed with "
            "%pip, that are carried over a restart of the kernel. If there are more, or with 0, the home folder is "
            "empty after a restart.",
        ),
    )
    storage_dir = config.setting(
        "SANDBOX_STORAGE_DIR",
        Unicode(
            help="The local folder for persistent sandboxes, if no bucket is configured; empty means one in Jupyter's "
            "data folder."
        ),
    )

    shared_with = config.setting(
        "SANDBOX_SHARED_WITH",
        List(
            Unicode(),
            help="Names of other users who may open, fork, change and delete the sandbox as you may; their servers "
            "need the same storage and the same SANDBOX_SIGNING_KEY.",
        ),
    )


def own_config(metadata: Mapping[str, Any], stanza: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a kernelspec's ``config`` stanza without OLD_DEFAULTS, which its user did not choose."""
    written_by_first_version = TWIN_MARK in metadata and TWIN_VERSION not in metadata
    if written_by_first_version and OLD_DEFAULTS.items() <= stanza.items():
        return {name: value for name, value in stanza.items() if name not in OLD_DEFAULTS}
    return dict(stanza)


def unknown_settings(names: Iterable[str], place: str) -> list[str]:
    """Return a warning for each of the ``names`` that is not a setting, with the most similar one."""
    known = SandboxSettings.class_trait_names(config=True)
    warnings = []
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, 1, 0.0)[0]
            warnings.append(
                f"{place} contains {name!r}, which is not a setting of SandboxProvisioner and has no effect. "
                f"The most similar setting is {near!r}; `jupyter sandbox config` lists all."
            )
    return warnings
