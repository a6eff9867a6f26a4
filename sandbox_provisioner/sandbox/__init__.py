"""Sandboxes that are saved and restored: handles, the policy for them, and sandboxes that no process has open.

- ``handle``: SandboxHandle, made by its three factories; ``manager``: SandboxManager, the policy for them
- ``claims``: find or create the sandbox of a kernel's start
- ``registry``: PersistentSandboxRegistry, the sandboxes that exist; ``user_sandboxes``: a user's stores and registry
- ``recovery``: save sandboxes whose server was killed, and remove files and objects that such servers left
- ``detached``: operations on sandboxes that no server has open; ``listing``: their state in storage
- ``model``: a sandbox as users see it in REST, command line and client; ``lookup``: find it by id or notebook
"""
