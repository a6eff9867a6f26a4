"""Start a notebook's kernel, hibernate and wake it. Prints what its cells printed, as JSON."""

from __future__ import annotations

import json
import os
import sys

from jupyter_client.manager import KernelManager
from jupyter_core.utils import run_sync
from kernels import run
from servers import READY


def main(folder: str) -> None:
    os.chdir(folder)
    manager = KernelManager(kernel_name="python3-sandbox")
    manager.start_kernel(env={**os.environ, "JPY_SESSION_NAME": os.path.join(folder, "a.ipynb")})
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=READY)
        user = run(client, "import getpass, os; x = 41; (os.environ['HOME'], getpass.getuser())")
        run_sync(manager.provisioner.hibernate)()
        slept = manager.provisioner.asleep
        print(json.dumps({"uid": os.getuid(), "user": user, "slept": slept, "answer": run(client, "x + 1")}))
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


if __name__ == "__main__":
    main(sys.argv[1])
