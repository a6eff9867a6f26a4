"""The host's end of the byte stream to a sandbox's PID 1. Callers use ``connection.GuestConnection``.

- ``connection``: the state, control messages, hooks; opens streams and starts processes
- ``pipe``: the two pipes below it
- ``stream``: GuestStream, one flow of bytes with credit in both directions
- ``process``: GuestProcess, a command that runs inside the sandbox
- ``host_api``: requests from the guest that wait for an answer, limited in number
- ``activation``: give a copy of a template its identity
"""
