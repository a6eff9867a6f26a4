"""Sandboxed kernels for one person on one machine. All of it is optional; what is commented out is the default."""

from __future__ import annotations

c = get_config()  # noqa: F821

# -- which kernels there are -------------------------------------------------------------------------------------------

# For notebooks that you do not trust: every kernel runs in a sandbox, also one whose kernelspec does not ask for it,
# and there are no terminals.
c.KernelProvisionerFactory.default_provisioner_name = "sandbox-provisioner"
c.ServerApp.terminals_enabled = False
# What the launcher shows. It only hides the others: by itself it would keep nobody from starting them.
c.KernelSpecManager.allowed_kernelspecs = {"python3-sandbox"}
c.KernelSpecManager.ensure_native_kernel = False
c.MultiKernelManager.default_kernel_name = "python3-sandbox"

# -- when a notebook's kernel is saved, and its memory given back ------------------------------------------------------

# After so many seconds without a running cell, also if a browser tab is open; the kernelspec's own settings go before
# these (`jupyter sandbox setup --idle-timeout`).
# c.SandboxProvisioner.enable_checkpoint_at_idle = True
# c.SandboxProvisioner.idle_timeout = 1800
# Jupyter's own culler does the same to sandboxed kernels, and shuts all others down.
c.MappingKernelManager.cull_idle_timeout = 4 * 3600
# When the server stops, all are saved at once; those that take longer are saved when it starts again.
# c.SandboxKernelManager.hibernate_deadline = 60
# "Shut Down Kernel" deletes what was saved; with "checkpoint" the notebook has its state when it is opened again.
# c.SandboxProvisioner.on_shutdown = "delete"
# False: kernels start afresh, always.
# c.SandboxProvisioner.persistent = True

# -- what a kernel may reach -------------------------------------------------------------------------------------------

# More folders, read-only unless they end in :rw.
# c.SandboxProvisioner.mounts = ["/srv/data", "/srv/results:rw"]
# Variables of the server's environment.
# c.SandboxProvisioner.pass_environment = ["HTTP_PROXY"]
# c.SandboxProvisioner.network = "none"

# -- where it is kept --------------------------------------------------------------------------------------------------

# In Jupyter's data folder, unless said otherwise.
# c.SandboxProvisioner.storage_dir = "/srv/sandboxes"
