"""Run a module like ``python -m MODULE ...``, but with hooks, ``%sandbox``, notes and a larger call stack chunk.

The command is ``python entrypoint.py MODULE ...``. With ``--frozen`` before MODULE the kernel stops before it serves
(``zygote``). Runs in the kernel's process in the sandbox, with any version of Python.

The working folder is searched for modules last, not first: a file ``ipykernel_launcher.py`` or ``pathlib.py`` in a
notebook's folder must not run instead of the kernel's own. The flag ``-P`` does not exist in older versions of Python,
and its environment variable would also affect processes that cells start. For ``ipykernel_launcher`` the folder is left
out: IPython itself adds it when the kernel has been imported.

CPython keeps call frames in chunks of 16 KiB. If a function is called repeatedly where a chunk ends, each call maps and
unmaps a chunk (python/cpython#142183). That takes microseconds on a host and a millisecond under gVisor: the first
completion in a notebook took 70 seconds instead of 3. A frame that needs more than 16 KiB gets a chunk of the next
power of two, and later frames use the rest of it. Therefore the bottom frame requests slightly more than half of 1 MiB.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable

STACK_SIZE = 70_000
"""Stack size of the bottom frame, in words of 8 bytes."""


def in_large_frame(run: Callable[[str], None], module: str) -> None:
    """Call ``run(module)`` in the bottom frame, whose stack size ``main`` has enlarged."""
    run(module)


def main() -> None:
    """Run the module named by the first argument as ``__main__``, in a namespace without this file's names."""
    sys.path.insert(0, os.path.dirname(__file__))
    __import__("hooks").listen()
    __import__("magics").install(__import__("notes").attach)
    if sys.argv[1] == "--frozen":
        del sys.argv[1]
        __import__("zygote").stop_at_start()
        del sys.modules["zygote"]
    for name in ("hooks", "magics", "notes", "replaced_files"):
        del sys.modules[name]
    del sys.path[0]
    if not sys.flags.isolated and not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
        if sys.argv[1] != "ipykernel_launcher":
            sys.path.append(os.getcwd())
    run_module: Callable[[str], None] = runpy._run_module_as_main  # type: ignore[attr-defined]
    module, call = sys.argv.pop(1), in_large_frame
    call.__code__ = call.__code__.replace(co_stacksize=STACK_SIZE)
    names = globals()
    for name in [name for name in names if not name.startswith("__")]:
        del names[name]
    call(run_module, module)


if __name__ == "__main__":
    main()
