"""The gVisor driver: start, checkpoint and restore one sandbox with runsc. Independent of storage and Jupyter Server.

- ``sandbox``: GVisorSandbox, the driver; ``state``: its legal actions and states
- ``container``: one runsc container; ``zombies``: reap runsc's children if the server is PID 1
- ``pause``: stop a sandbox, write its image, and let it go on
- ``runsc``: find and call the runsc binary; ``programs``: find trusted programs on the host
- ``bundle``: the OCI configuration; ``mounts``: the host folders that a kernel may use
- ``carried``: the folder of a template's copy, and its protected parts
- ``reserved_dirs``: folders that no kernel may write to; ``restore_plan``: mounts of a restored sandbox
- ``interpreter``: the host files that a kernel's command needs; ``runtime_dir``: the folders of running sandboxes
- ``guest_tool``: run one of our own scripts inside a sandbox
"""
