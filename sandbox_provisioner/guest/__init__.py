"""Code that runs inside the sandbox: standard library only, copied in as flat files.

- ``__main__``: PID 1: the event loop, its pipe to the host, and the host's control messages
- ``frames``: the codec of that pipe, used on both sides
- ``streams``: connect the host's streams to sockets and process pipes; ``processes``: start, signal and reap processes
- ``host_api``: forward requests from processes in the sandbox to the host
- ``seccomp`` and ``capabilities``: restrict PID 1 and its children
- ``entrypoint``: start a Python kernel with hooks, the magic ``%sandbox`` and a larger call stack chunk
- ``zygote``: stop a template's kernel before it serves, and give each copy its identity
- ``hooks``, ``magics``: functions around a checkpoint; ``%sandbox`` and the module ``jupyter_sandbox``
- ``open_files``: list the files that processes use; ``archive``: pack and unpack the files of a snapshot
"""
