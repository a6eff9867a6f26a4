"""The host's end of the byte stream to a sandbox's PID 1. Runs on the host's I/O loop.

- ``connection``: GuestConnection, which callers use: its state, pipes, control messages and hooks
- ``stream``: GuestStream, one flow of bytes with credit in both directions
- ``process``: GuestProcess, a command that runs inside the sandbox
- ``host_api``: requests from the guest that wait for an answer, limited in number
- ``activation``: send requests to the kernel of a template or of a copy
"""
