"""Code that runs inside the sandbox: standard library only, copied in as flat files.

- ``__main__``: PID 1, which starts and reaps processes and connects their sockets and pipes to the host's pipe
- ``frames``: the codec of that pipe, used on both sides
- ``processes``: start a child; ``seccomp`` and ``capabilities``: restrict PID 1 and its children
- ``host_api``: forward requests from processes in the sandbox to the host
- ``entrypoint``: start a Python kernel with hooks, the magic ``%sandbox`` and a larger call stack chunk
- ``zygote``: stop a template's kernel before it serves, and give each copy its identity
- ``hooks``, ``magics``: functions around a checkpoint; ``%sandbox`` and the module ``jupyter_sandbox``
- ``open_files``: list the files that processes use; ``archive``: pack and unpack the files of a snapshot
"""
