"""The command ``jupyter sandbox``.

- ``app``: the parser, ``setup`` and ``doctor``; ``sandboxes``: list, show, revert, reset, delete, prune
- ``kernels``: hibernate, wake, keep-awake, restart, exec, savepoints, rewind, snapshots, fork
- ``templates``: templates; ``settings``: the command ``config``
- ``plain_notebooks``: allow a kernel without a sandbox for a notebook
- ``targets``: find sandboxes in storage and on running servers; ``options``: arguments and their completion
- ``output``, ``progress``: tables, JSON and progress lines; ``exit_codes``: the exit status of each failure
"""

from __future__ import annotations

from .app import main

__all__ = ["main"]
