"""Run, save, restore and list sandboxes: open ones through a handle, others directly in storage.

- ``manager``: find, create, hold and close sandboxes; ``supervisor``: the background work for one open sandbox
- ``handle``: SandboxHandle, one open sandbox; ``memory``: run, save and restore the memory of that sandbox
- ``stored_state``: the document and the checkpoints of an open sandbox
- ``start_request``: the sandbox that a kernel start requests; ``user_sandboxes``: a user's stores and registry
- ``registry``: PersistentSandboxRegistry, the sandboxes that exist, and the record of an open one
- ``recovery``: save sandboxes whose server was killed, and remove files and objects that such servers left
- ``detached``: operations on sandboxes that no server has open; ``listing``: their state in storage
- ``sandboxed_notebooks``: which notebooks ran in a sandbox, and which plain kernels the user allowed for them
- ``model``: a sandbox as users see it in REST, command line and client; ``visible``: the files that its kernel sees
- ``lookup``: find one by id or notebook
"""
