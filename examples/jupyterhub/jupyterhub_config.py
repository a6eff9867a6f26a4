"""A hub for tests on one machine. It culls idle servers; their notebooks continue when they are opened again.

Everyone who can connect can log in with any name, so the hub listens only on this machine.
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
"""The folder in which the hub is started. It contains all data."""
SAVING = 60
"""Seconds that a stopping server may take to save its kernels."""

c.JupyterHub.bind_url = "http://127.0.0.1:8000"
c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.allow_all = True
c.JupyterHub.allow_named_servers = True
# A link to a notebook starts a culled server again without a question.
c.JupyterHub.implicit_spawn_seconds = 0.01

# Users who need no account on this machine. For real accounts, use "pam" above and "localprocess" here.
c.JupyterHub.spawner_class = "simple"
c.SimpleLocalProcessSpawner.home_dir_template = str(HERE / "home" / "{username}")
if os.geteuid() == 0:
    c.Spawner.args = ["--allow-root"]  # all users run as the account that started the hub
# Not the home folder itself: a sandboxed kernel can write to all of its notebook's folder.
c.Spawner.notebook_dir = "~/notebooks"


def hub_secret() -> bytes:
    """Return the secret from which users' keys are derived. The first start of the hub creates it."""
    file = HERE / "sandbox_secret"
    if not file.exists():
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as new:
            new.write(secrets.token_hex(32))
    return file.read_bytes()


SECRET = hub_secret()


def prepare(spawner: Any) -> None:
    Path(spawner.home_dir, "notebooks").mkdir(parents=True, exist_ok=True)
    name = spawner.user.name
    # Each user gets a key that signs stored data, and a prefix for a bucket.
    spawner.environment = {
        **spawner.environment,
        "SANDBOX_SIGNING_KEY": hmac.new(SECRET, name.encode(), sha256).hexdigest(),
        "SANDBOX_OBJECT_PREFIX": f"users/{re.sub('[^a-z0-9]', '-', name)}-{sha256(name.encode()).hexdigest()[:16]}",
    }


c.Spawner.pre_spawn_hook = prepare

# All servers of a user share a home, which contains Jupyter's data folder with the saved kernels. Servers without a
# shared home need a bucket. A server that opens a notebook takes it over from the server that runs it.
c.Spawner.environment = {"SANDBOX_ENABLE_HANDOFF": "1", "SANDBOX_HIBERNATE_DEADLINE": str(SAVING)}
# The spawner sends SIGINT, SIGTERM and SIGKILL at this interval. The server must finish after SIGINT.
c.LocalProcessSpawner.interrupt_timeout = SAVING + 30

# The timeout must be longer than five minutes, the interval at which servers report their activity to the hub.
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
