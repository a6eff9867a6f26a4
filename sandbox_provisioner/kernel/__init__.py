"""A Jupyter kernel in a sandbox, and the relay between it and its clients.

- ``kernel``: SandboxedKernel; ``launch_plan``: its command, mounts and environment; ``env_filter``: allowed variables
- ``settings``: the settings as traits; ``start_request``: settings in the environment of one start
- ``relay``, ``relay_client``: the listeners and the clients' connections; ``peers``: the user behind a connection
- ``zmtp``: ZeroMQ's protocol; ``message_tracker``, ``message_reader``: follow Jupyter's messages as they pass
- ``activity``: whether the kernel is busy; ``output_log``: its output as lines of the server's log
- ``handshake``, ``heartbeat``, ``synthetic_replies``: answers on behalf of a hibernated kernel
- ``host_api``, ``notebook_actions``: requests that a notebook makes with ``%sandbox``
- ``shared_folders``: remember the folders that sandboxes can write to
"""
