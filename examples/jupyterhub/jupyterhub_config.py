"""A hub to try out on one machine: idle servers are culled, and their notebooks come back with their state.

Anybody who reaches it can log in under any name, so it listens on this machine only.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

c = get_config()  # noqa: F821

HERE = Path.cwd()
"""Everything is kept in the folder that the hub is started in."""
SAVING = 60
"""Seconds that a server which is being stopped may take to save its kernels."""

c.JupyterHub.bind_url = "http://127.0.0.1:8000"
c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.allow_all = True
c.JupyterHub.allow_named_servers = True
# Whoever follows a link to a notebook after the server was culled gets a server, without being asked.
c.JupyterHub.implicit_spawn_seconds = 0.01

# Users that need not exist on this machine. For those that do: "pam" above, "localprocess" here.
c.JupyterHub.spawner_class = "simple"
c.SimpleLocalProcessSpawner.home_dir_template = str(HERE / "home" / "{username}")
if os.geteuid() == 0:
    c.Spawner.args = ["--allow-root"]  # these users are all the one who started the hub
# Not the home folder itself: a sandboxed kernel may write to all of its notebook's folder.
c.Spawner.notebook_dir = "~/notebooks"


def hub_secret() -> bytes:
    """Read the secret that users' keys are made of; it is made when the hub starts for the first time."""
    file = HERE / "sandbox_secret"
    if not file.exists():
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as new:
            new.write(secrets.token_hex(32))
    return file.read_bytes()


SECRET = hub_secret()


def prepare(spawner: Any) -> None:
    Path(spawner.home_dir, "notebooks").mkdir(parents=True, exist_ok=True)
    name = spawner.user.name
    # What a user's servers keep is signed with a key of that user's, and in a bucket it has a prefix of its own.
    spawner.environment = {
        **spawner.environment,
        "SANDBOX_SIGNING_KEY": hmac.new(SECRET, name.encode(), sha256).hexdigest(),
        "SANDBOX_OBJECT_PREFIX": f"users/{re.sub('[^a-z0-9]', '-', name)}-{sha256(name.encode()).hexdigest()[:16]}",
    }


c.Spawner.pre_spawn_hook = prepare

# All servers of a user share a home, and so Jupyter's data folder, where saved kernels are kept; servers that do not
# share one need a bucket. The one that opens a notebook gets its kernel from the one that has it.
c.Spawner.environment = {"SANDBOX_ENABLE_HANDOFF": "1", "SANDBOX_HIBERNATE_DEADLINE": str(SAVING)}
# The spawner sends SIGINT, SIGTERM, SIGKILL, with so many seconds in between. The first must be enough.
c.LocalProcessSpawner.interrupt_timeout = SAVING + 30

# Longer than the five minutes in which servers tell the hub of their activity.
c.JupyterHub.services = [
    {
        "name": "idle-culler",
        "command": [sys.executable, "-m", "jupyterhub_idle_culler", "--timeout=3600", "--cull-every=300"],
    }
]
c.JupyterHub.load_roles = [
    {
        "name": "idle-culler",
        "scopes": ["list:users", "read:users:activity", "read:servers", "delete:servers"],
        "services": ["idle-culler"],
    }
]
