"""Sandboxed kernels for one person on one machine. All settings are optional; those in comments show the defaults."""

from __future__ import annotations

c = get_config()  # noqa: F821

# -- available kernels -------------------------------------------------------------------------------------------------

# For notebooks that you do not trust: kernels run in a sandbox even if their kernelspec names no provisioner, and there
# are no terminals.
c.KernelProvisionerFactory.default_provisioner_name = "sandbox-provisioner"
c.ServerApp.terminals_enabled = False
# Show only this kernel in the launcher. This hides the other kernels, but does not prevent their start.
c.KernelSpecManager.allowed_kernelspecs = {"python3-sandbox"}
c.KernelSpecManager.ensure_native_kernel = False
c.MultiKernelManager.default_kernel_name = "python3-sandbox"

# -- saving kernels ----------------------------------------------------------------------------------------------------

# Hibernate a kernel after this number of seconds without a running cell, even if a browser tab is open. Environment
# variables, and settings in the kernelspec (`jupyter sandbox setup --idle-timeout`), take precedence.
# c.SandboxProvisioner.enable_checkpoint_at_idle = True
# c.SandboxProvisioner.idle_timeout = 1800
# Jupyter's culler also hibernates sandboxed kernels. It shuts down all other kernels.
c.MappingKernelManager.cull_idle_timeout = 4 * 3600
# Seconds to save all kernels when the server stops. Kernels that take longer are saved at the next start.
# c.SandboxKernelManager.hibernate_deadline = 60
# "Shut Down Kernel" deletes the saved state. With "checkpoint", it saves the kernel instead.
# c.SandboxProvisioner.on_shutdown = "delete"
# False: do not save kernels.
# c.SandboxProvisioner.persistent = True

# -- access of kernels -------------------------------------------------------------------------------------------------

# Additional folders, read-only unless they end in :rw.
# c.SandboxProvisioner.mounts = ["/srv/data", "/srv/results:rw"]
# Additional variables from the server's environment.
# c.SandboxProvisioner.pass_environment = ["HTTP_PROXY"]
# c.SandboxProvisioner.network = "none"

# -- storage -----------------------------------------------------------------------------------------------------------

# The default is a folder in Jupyter's data folder.
# c.SandboxProvisioner.storage_dir = "/srv/sandboxes"
