"""Prepare a machine for sandboxed kernels: install runsc, test it, install kernelspecs, diagnose problems.

- ``runsc_install``: get runsc from its source (``go``), from Debian (``debian``) or from a ``release``
- ``kernelspecs``: a sandboxed ``-sandbox`` twin of each kernelspec; ``logo``: the twin's logo
- ``self_test``: run, save and restore a sandbox
- ``doctor``: check every precondition; ``progress``: show the progress of a long step
- ``folders``: check folders; ``timeouts``: limit the time of a call
"""
