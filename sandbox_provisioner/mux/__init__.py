"""The host's end of the byte stream to a sandbox's PID 1.

- ``connection``: GuestLink, which sends and receives frames, opens streams and starts processes
- ``stream``: one flow of bytes with credit in both directions
- ``process``: a command that runs inside the sandbox
- ``host_api``: requests from the guest that wait for an answer, limited in number
- ``activation``: give a copy of a template its identity
"""
