"""A provisioner that runs kernels in gVisor without a relay: the kernel is PID 1, and binds sockets in a host folder.

Bundle, mounts and flags of runsc are those of sandbox-provisioner, so that only the data path differs. runsc cannot
checkpoint such a sandbox ("Cannot save endpoint with bound host socket"), so sandbox-provisioner needs a relay.
"""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from sandbox_provisioner.gvisor import bundle, interpreter, runsc
from sandbox_provisioner.gvisor.bundle import BundleSpec, Mount
from sandbox_provisioner.gvisor.runtime_dir import RuntimeFolder

PASSED_ON = ("LANG", "LC_ALL", "PATH")


class HostSocketProvisioner(LocalProvisioner):
    """Runs the kernel's command with ``runsc run``. The KernelManager must use the transport ipc."""

    _folder: RuntimeFolder | None = None

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Write the bundle, and replace the kernel's command with ``runsc run``."""
        assert self.parent is not None
        binary = runsc.find()
        kwargs = await super().pre_launch(**kwargs)
        sockets = str(Path(self.parent.connection_file).parent)
        mounts = [*interpreter.visible(kwargs["cmd"], os.environ), Mount(sockets, sockets, True)]
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        environment["HOME"] = str(Path.home())
        spec = BundleSpec(
            kwargs["cmd"][0], environment["HOME"], getpass.getuser(), tuple(mounts), environment=environment
        )
        folder = self._folder = RuntimeFolder.create()
        bundle.write(folder.bundle, spec)
        config = bundle.config(spec)
        config["process"] |= {"args": kwargs["cmd"], "cwd": sockets}
        (folder.bundle / "config.json").write_text(json.dumps(config))
        flags = [*binary.settings(spec.network, runsc.PLATFORMS[0]), "--host-uds=all"]
        kwargs["cmd"] = binary.command(
            folder.state, "run", f"--bundle={folder.bundle}", folder.path.name, settings=flags
        )
        return kwargs | {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}

    async def send_signal(self, signum: int) -> None:
        """Ignore signals. The benchmark only ends kernels, and ``kill`` does that."""

    async def kill(self, restart: bool = False) -> None:
        """End the sandbox and remove its folder."""
        if self._folder:
            await asyncio.to_thread(self._folder.remove)

    async def cleanup(self, restart: bool = False) -> None:
        """Remove a sandbox whose start failed."""
        await self.kill()
        await super().cleanup(restart)
