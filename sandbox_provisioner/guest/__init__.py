"""Code that runs inside the sandbox: standard library only, copied in as flat files.

In PID 1, in its event loop:

- ``__main__``: the loop, the pipe to the host, and the host's requests
- ``frames``: the codec of that pipe, also used on the host
- ``streams``: connect the host's streams to sockets and process pipes; ``processes``: start, signal and reap processes
- ``host_api``: forward requests from processes in the sandbox to the host
- ``seccomp`` and ``capabilities``: restrict PID 1 and its children

In the kernel's process:

- ``entrypoint``: start a Python kernel with the following modules
- ``hooks``: run a notebook's functions around a checkpoint; PID 1 calls them
- ``replaced_files``: keep the content of files that the host replaced while they are open
- ``magics``: the magic ``%sandbox`` and the module ``jupyter_sandbox``
- ``notes``: add a note to errors that the sandbox causes, and to a pip that failed without network
- ``zygote``: stop a template's kernel before it serves, and give each copy its identity

As processes of their own, which the host starts:

- ``open_files``: list the files that processes use; ``archive``: pack and unpack the files of a snapshot
"""
