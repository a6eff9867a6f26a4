"""Sandboxes that are saved and restored: handles, the policy for them, and sandboxes that no process has open.

- ``manager``: SandboxManager, finds or creates, holds and closes sandboxes; ``supervisor``: its background work for one
- ``handle``: SandboxHandle, made by its three factories; ``memory``: run, save and restore its memory
- ``stored_state``: the document and the checkpoints of an open sandbox
- ``start_request``: StartRequest; ``registration``: the record of the requested sandbox
- ``registry``: PersistentSandboxRegistry, the sandboxes that exist; ``user_sandboxes``: a user's stores and registry
- ``recovery``: save sandboxes whose server was killed, and remove files and objects that such servers left
- ``detached``: operations on sandboxes that no server has open; ``listing``: their state in storage
- ``sandboxed_notebooks``: which notebooks ran in a sandbox, and the kernels without one that are allowed for them
- ``model``: a sandbox as users see it in REST, command line and client; ``lookup``: find it by id or notebook
"""
