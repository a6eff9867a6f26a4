"""gVisor without a relay, to compare with: the kernel is PID 1 and binds ipc sockets in a folder of the host.

The bundle, its mounts and runsc's flags are the product's own, so that what differs is the data path. runsc could
not checkpoint such a sandbox ("Cannot save endpoint with bound host socket"): that is why there is a relay.
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
    """Starts the kernel's command under ``runsc run``; needs a KernelManager with the ipc transport."""

    _folder: RuntimeFolder | None = None

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Write the bundle, and put ``runsc run`` in place of the kernel's command."""
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
        """Nothing but the end is ever asked of this kernel, and ``kill`` brings it."""

    async def kill(self, restart: bool = False) -> None:
        """End the sandbox, and remove its folder with everything in it."""
        if self._folder:
            await asyncio.to_thread(self._folder.remove)

    async def cleanup(self, restart: bool = False) -> None:
        """The same for a sandbox whose start was broken off."""
        await self.kill()
        await super().cleanup(restart)
