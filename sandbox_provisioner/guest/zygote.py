"""A kernel that is stopped just before it would serve, and is told there who it is.

There it imports what it is told to, and is checkpointed, as a template: an IPython kernel that belongs to nobody. Each
restored copy is told here who it is, and becomes that: its key, folder and environment, other random numbers than its
siblings have, and then all that a user may have written (configuration, extensions, start-up files). It is spoken to
by lines of JSON on a socket, one for each connection. Runs in the kernel's own Python, of whatever version.
"""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime
from importlib import import_module, invalidate_caches
from typing import Any

PATH = "/run/jupyter/frozen"
INIT_MAPS = "/run/jupyter/maps"
"""What PID 1 has mapped; it put that there."""
MAPPED = re.compile(r" (/[^\n]*)$", re.MULTILINE)
LATER = 1.0
"""Seconds after which what nobody waits for is done."""


def stop_at_start() -> None:
    """Have any application of ipykernel's stop when it is about to serve, and do nothing of the user's before."""
    kind = import_module("ipykernel.kernelapp").IPKernelApp
    reseed, before = sys.modules["hooks"]._reseed, dict(os.environ)
    own = {name: getattr(kind, name) for name in ("load_config_file", "init_extensions", "init_code", "start")}

    def init_extensions(app: Any) -> None:
        if not _extended(app):
            own["init_extensions"](app)

    def init_code(app: Any) -> None:
        if not _has_code(app):
            own["init_code"](app)

    def start(app: Any) -> None:
        def become(orders: dict[str, Any]) -> None:
            for name, method in own.items():
                setattr(kind, name, method)
            _become(app, orders, before)
            reseed()
            _forget_chances(app)

        _wait_for_orders(app, become)
        _heed_user(app)
        app.start()

    kind.load_config_file = lambda app, *arguments, **options: None
    kind.init_extensions, kind.init_code, kind.start = init_extensions, init_code, start


def _extended(app: Any) -> bool:
    """Whether there are extensions besides those that everybody has."""
    return bool(app.extensions or app.extra_extensions)


def _has_code(app: Any) -> bool:
    """Whether an application that is started now would run anything before the first cell."""
    given = (app.exec_lines, app.exec_files, app.code_to_run, app.file_to_run, app.module_to_run)
    application = import_module("IPython.core.application")
    folders = [app.profile_dir.startup_dir]
    folders += [f"{top}/startup" for top in application.ENV_CONFIG_DIRS + application.SYSTEM_CONFIG_DIRS]
    return any(given) or "PYTHONSTARTUP" in os.environ or any(_listed(folder, ".py", ".ipy") for folder in folders)


def _configured(app: Any) -> bool:
    """Whether there is a configuration file that an application which is started now would read."""
    stems = {"ipython_config", *(name.rpartition(".")[0] for name in app.config_files)}
    wanted = {f"{stem}{ending}" for stem in stems for ending in (".py", ".json")}
    return any(os.path.exists(os.path.join(folder, name)) for folder in app.config_file_paths for name in wanted)


def _listed(folder: str, *endings: str) -> bool:
    try:
        return any(name.endswith(endings) for name in os.listdir(folder))
    except OSError:
        return False


# -- before the checkpoint ---------------------------------------------------------------------------------------------


def _import(name: str) -> str:
    """Import a module; why that, or freezing it then, is not possible."""
    threads, children, devices = threading.active_count(), _children(), set(_devices())
    try:
        import_module(name)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    if threading.active_count() > threads:
        return "it started a thread"
    if _children() != children:
        return "it started a process"
    if opened := set(_devices()) - devices:
        return f"it opened {', '.join(sorted(opened))}"
    return ""


def _devices() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if path.startswith("/dev/") and path not in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"):
            yield path


def _children() -> list[str]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return file.read().split()


def _unfit(app: Any) -> str:
    """Why no copy of this kernel could become another's; empty if it could."""
    kernels = import_module("ipykernel.ipkernel")
    if not isinstance(app.kernel, kernels.IPythonKernel) or app.shell is None:
        return "it is not IPython's"
    if _children():
        return "it has started a process, which would not learn whose it is"
    return ""


def _files() -> set[str]:
    """What this process has read of its programs and libraries, and where it would look for more."""
    paths = {os.path.join(sys.prefix, "pyvenv.cfg"), *filter(None, sys.path)}
    for folder in filter(os.path.isdir, sys.path):
        paths.update(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".pth"))
    for module in list(sys.modules.values()):
        for attribute in ("__file__", "__cached__"):
            path = getattr(module, attribute, None)
            if isinstance(path, str):
                paths.add(path)
    for maps in ("/proc/self/maps", INIT_MAPS):
        with open(maps, errors="surrogateescape") as file:
            paths.update(MAPPED.findall(file.read()))
    return {os.path.realpath(path) for path in paths if os.path.isabs(path) and os.path.exists(path)}


def _wait_for_orders(app: Any, become: Callable[[dict[str, Any]], None]) -> None:
    """Say whether it is fit, import modules and say what was read; return when it has become what it was told."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(PATH)
        server.listen()
        while os.path.exists(PATH):
            peer, _ = server.accept()
            with peer, peer.makefile("rw", encoding="utf-8") as stream:
                line = stream.readline()
                if line.endswith("\n"):
                    stream.write(json.dumps(_answer(app, json.loads(line), become)) + "\n")
                    stream.flush()


def _answer(app: Any, message: dict[str, Any], become: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    if message["op"] == "preload":
        return _preload(message["modules"])
    if message["op"] == "report":
        return {"unfit": _unfit(app)}
    try:
        become(message)
        os.unlink(PATH)
        return {}
    except Exception as error:
        return {"trouble": f"{type(error).__name__}: {error}"}


def _preload(modules: list[str]) -> dict[str, Any]:
    left_out = {name: reason for name in modules if (reason := _import(name))}
    gc.collect()
    gc.freeze()  # what is here now stays for good: no copy has to look through it again
    return {"left_out": left_out, "files": sorted(_files())}


# -- after the restore -------------------------------------------------------------------------------------------------


def _become(app: Any, orders: dict[str, Any], before: dict[str, str]) -> None:
    """Take on the environment, folder and key of the kernel that is wanted."""
    frozen_in, cwd, frozen_file, file = os.getcwd(), orders["cwd"], app.connection_file, orders["connection_file"]
    own = {name: value for name, value in os.environ.items() if before.get(name) != value}
    os.environ.clear()
    os.environ.update({**own, **orders["env"]})
    time.tzset()
    os.chdir(cwd)
    for paths in (sys.path, app.config_file_paths):
        paths[:] = [cwd if path == frozen_in else path for path in paths]
    invalidate_caches()  # there are folders now that were not there
    sys.argv = [part.replace(frozen_file, file) for part in sys.argv]
    app.connection_file = app.config.IPKernelApp.connection_file = file
    for left in (frozen_file, INIT_MAPS):
        os.unlink(left)
    app.session.key = orders["key"].encode()
    app.session.signature_scheme = orders["signature_scheme"]
    if "JPY_SESSION_NAME" in os.environ:
        app.shell.user_ns["__session__"] = os.environ["JPY_SESSION_NAME"]
    app.shell.init_environment()
    app.shell.init_virtualenv()
    app.shell.starting_dir = cwd


def _forget_chances(app: Any) -> None:
    """Draw again what was drawn by chance when the template was made."""
    app.session.session = str(uuid.uuid4())
    app.kernel.ident = str(uuid.uuid4())
    app.shell.displayhook.topic = app.kernel._topic("execute_result")
    app.iopub_thread._pipe_uuid = os.urandom(16)
    for module, name in (("uuid", "_node"), ("uuid", "_last_timestamp"), ("tempfile", "_name_sequence")):
        if hasattr(sys.modules.get(module), name):
            setattr(sys.modules[module], name, None)
    processes: Any = sys.modules.get("multiprocessing.process")
    if processes:
        processes.current_process().authkey = os.urandom(32)
        processes.ORIGINAL_DIR = os.getcwd()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()


def _heed_user(app: Any) -> None:
    """Do what the user's files say, as an application does that was started just now."""
    if _configured(app):
        given = app.config.copy()
        app.load_config_file()
        app.update_config(given)
        for configurable in (app.kernel, app.shell, *app.shell.configurables):
            configurable.update_config(app.config)
        app.init_gui_pylab()
    if _extended(app):
        app.init_extensions()
    if _has_code(app):
        app.init_code()
    app.shell.history_manager.reset(new_session=False)
    import_module("tornado.ioloop").IOLoop.current().call_later(LATER, _date_history, app.shell.history_manager)


def _date_history(history: Any) -> None:
    """The session in the history, which was begun in the template, began just now."""
    if history.enabled and history.session_number:
        with history.db:
            begun = (datetime.now().isoformat(" "), history.session_number)
            history.db.execute("UPDATE sessions SET start = ? WHERE session = ?", begun)
