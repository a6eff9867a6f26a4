"""``python roomy.py MODULE ...`` is ``python -m MODULE ...`` with hooks, a magic, and room for frames.

The working folder is the last place where modules are looked for, not the first: a file ``ipykernel_launcher.py`` or
``pathlib.py`` in a notebook's folder does not run in place of the kernel's own. A flag like ``-P`` would not do: older
versions of Python have none, and a variable would be inherited by what cells start. IPython itself adds the folder,
before the installed packages, when the kernel has been imported; so ``ipykernel_launcher`` needs no entry at all.

With ``--frozen`` before MODULE it stops when it would begin to serve; see frozen.py.

CPython keeps frames in chunks of 16 KiB. A function that is called over and over just where one chunk ends has a chunk
mapped and unmapped for every call (python/cpython#142183), which takes microseconds on a host and a millisecond under
gVisor: the first completion in a notebook took 70 seconds instead of 3. A frame that asks for more than 16 KiB gets
a chunk of the next power of two, and what it leaves of it is for the frames above: hence one frame at the very bottom
that asks for a little more than half of 1 MiB. Runs in the kernel's own Python, of whatever version.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable

WORDS = 70_000


def with_room(run: Callable[[str], None], module: str) -> None:
    """The frame at the bottom."""
    run(module)


def main() -> None:
    """Run the module that is named first, in a namespace that has nothing of ours."""
    sys.path.insert(0, os.path.dirname(__file__))
    __import__("hooks").listen()
    __import__("magics").install()
    if sys.argv[1] == "--frozen":
        del sys.argv[1]
        __import__("frozen").stop_at_start()
        del sys.modules["frozen"]
    del sys.path[0], sys.modules["hooks"], sys.modules["magics"]
    if not sys.flags.isolated and not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
        if sys.argv[1] != "ipykernel_launcher":
            sys.path.append(os.getcwd())
    run: Callable[[str], None] = runpy._run_module_as_main  # type: ignore[attr-defined]
    module, begin = sys.argv.pop(1), with_room
    begin.__code__ = begin.__code__.replace(co_stacksize=WORDS)
    ours = globals()
    for name in [name for name in ours if not name.startswith("__")]:
        del ours[name]
    begin(run, module)


if __name__ == "__main__":
    main()
