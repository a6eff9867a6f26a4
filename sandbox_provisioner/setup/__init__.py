"""Prepare a machine for sandboxed kernels: install runsc, test it, install kernelspecs, diagnose problems.

- ``runsc_install``: get runsc from its source (``go``), from Debian (``debian``) or from a ``release``
- ``kernelspecs``: a sandboxed ``-sandbox`` twin of each kernelspec; ``logo``: the twin's logo
- ``trial``: try a kernel in a sandbox before its twin is installed; ``trial_kernel``: the program of one attempt
- ``self_test``: run, save and restore a sandbox
- ``doctor``: check every precondition; ``progress``: show the progress of a long step
- ``folders``: check folders; ``timeouts``: limit the time of a call
"""
