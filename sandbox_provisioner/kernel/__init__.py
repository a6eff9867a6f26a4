"""A Jupyter kernel in a sandbox, and the relay between it and its clients.

- ``kernel``: SandboxedKernel; ``operations``: the operations that servers and programs call
- ``settings``: the settings as traits; ``start_request``: the request of one start
- ``launch_plan``: command, mounts and environment; ``env_filter``: allowed variables; ``folders``: the kernel's folder
- ``scope``: the project that a notebook belongs to, and the files in it that stay read-only
- ``home``: carry the home folder over a restart; ``starting``: start the process
- ``client_side``: the addresses and keys of its KernelManager
- ``relay``, ``relay_client``: the listeners and the clients' connections
- ``zmtp``: ZeroMQ's protocol; ``messages``: follow Jupyter's messages as they pass
- ``activity``: whether the kernel is busy; ``output``: copy its output to the server's log or elsewhere
- ``handshake``, ``known_answers``, ``synthetic_replies``: answers on behalf of a hibernated kernel
- ``host_api``: requests that a notebook makes with ``%sandbox``
"""
