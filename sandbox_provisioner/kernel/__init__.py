"""A Jupyter kernel in a sandbox, and the relay between it and its clients.

- ``kernel``: SandboxedKernel; ``operations``: what servers and programs do with one; ``client_side``: act as its client
- ``settings``: the settings as traits; ``start_request``: the request of one start
- ``launch_plan``: command, mounts and environment; ``env_filter``: allowed variables; ``folders``: the kernel's folder
- ``starting``: start the process; ``endpoints``: reserve the clients' addresses
- ``relay``, ``relay_client``: the listeners and the clients' connections; ``peers``: the user behind a connection
- ``zmtp``: ZeroMQ's protocol; ``message_tracker``, ``message_reader``: follow Jupyter's messages as they pass
- ``activity``: whether the kernel is busy; ``output``, ``output_log``: its output, in the server's log or elsewhere
- ``handshake``, ``heartbeat``, ``synthetic_replies``: answers on behalf of a hibernated kernel
- ``host_api``, ``notebook_actions``: requests that a notebook makes with ``%sandbox``
- ``shared_folders``: remember the folders that sandboxes can write to
"""
