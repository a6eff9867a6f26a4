"""Stop a template's kernel just before it serves, and give each restored copy its identity.

Runs in the main thread of the kernel's process in the sandbox, with any version of Python. The host sends requests to a
socket (``mux.activation`` and ``templates.build``): each connection carries one line of JSON, and one as the answer.
The requests "preload" and "report" come before the checkpoint. Each restored copy then gets the request "activate" with
its key, folder and environment. It draws new random state, so that it differs from the other copies, and applies the
user's configuration, extensions and startup files.
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
from importlib.abc import MetaPathFinder
from typing import Any

PATH = "/run/jupyter/frozen"
INIT_MAPS = "/run/jupyter/maps"
"""The file in which PID 1 records its memory mappings."""
MAPPED = re.compile(r" (/[^\n]*)$", re.MULTILINE)
HISTORY_DELAY = 1.0
"""Delay in seconds before the start time in the history is updated: a start does not wait for that."""


class MissingModules(MetaPathFinder):
    """Last finder on ``sys.meta_path``: record the names of the modules that no other finder has found."""

    def __init__(self) -> None:
        self.names = {"sitecustomize", "usercustomize"}  # looked for before this finder was added

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Record the name."""
        self.names.add(fullname)


missing = MissingModules()


def stop_at_start() -> None:
    """Patch ipykernel's application class to stop before it serves, and to apply no user files before that."""
    sys.meta_path.append(missing)
    kind = import_module("ipykernel.kernelapp").IPKernelApp
    reseed_generators, environment = sys.modules["hooks"].reseed_generators, dict(os.environ)
    originals = {name: getattr(kind, name) for name in ("load_config_file", "init_extensions", "init_code", "start")}

    def init_extensions(app: Any) -> None:
        if not _has_extensions(app):
            originals["init_extensions"](app)

    def init_code(app: Any) -> None:
        if not _has_startup_code(app):
            originals["init_code"](app)

    def start(app: Any) -> None:
        def activate(request: dict[str, Any]) -> None:
            for name, method in originals.items():
                setattr(kind, name, method)
            _take_identity(app, request, environment)
            reseed_generators()
            _reset_random_state(app)
            sys.meta_path.remove(missing)

        _serve_until_activated(app, activate)
        _apply_user_settings(app)
        app.start()

    kind.load_config_file = lambda app, *arguments, **options: None
    kind.init_extensions, kind.init_code, kind.start = init_extensions, init_code, start


def _has_extensions(app: Any) -> bool:
    """Return True if extensions beyond IPython's default ones are configured."""
    return bool(app.extensions or app.extra_extensions)


def _has_startup_code(app: Any) -> bool:
    """Return True if the application, started now, would run code before the first cell."""
    options = (app.exec_lines, app.exec_files, app.code_to_run, app.file_to_run, app.module_to_run)
    application = import_module("IPython.core.application")
    folders = [app.profile_dir.startup_dir]
    folders += [f"{top}/startup" for top in application.ENV_CONFIG_DIRS + application.SYSTEM_CONFIG_DIRS]
    return any(options) or "PYTHONSTARTUP" in os.environ or any(map(_has_python_files, folders))


def _has_config_file(app: Any) -> bool:
    """Return True if the application, started now, would find a configuration file."""
    stems = {"ipython_config", *(name.rpartition(".")[0] for name in app.config_files)}
    names = {f"{stem}{ending}" for stem in stems for ending in (".py", ".json")}
    return any(os.path.exists(os.path.join(folder, name)) for folder in app.config_file_paths for name in names)


def _has_python_files(folder: str) -> bool:
    try:
        return any(name.endswith((".py", ".ipy")) for name in os.listdir(folder))
    except OSError:
        return False


# -- before the checkpoint ---------------------------------------------------------------------------------------------


def _import(name: str) -> str:
    """Import a module. Return why it cannot be part of a template, or an empty string."""
    threads, children, devices = threading.active_count(), _children(), set(_open_devices())
    try:
        import_module(name)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    if threading.active_count() > threads:
        return "it started a thread"
    if _children() != children:
        return "it started a process"
    if opened := set(_open_devices()) - devices:
        return f"it opened {', '.join(sorted(opened))}"
    return ""


def _open_devices() -> Iterator[str]:
    """Yield the devices that this process has open, such as a GPU; the harmless ones are left out."""
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


def _why_unfit(app: Any) -> str:
    """Return why this kernel cannot be a template, or an empty string."""
    if not isinstance(app.kernel, import_module("ipykernel.ipkernel").IPythonKernel) or app.shell is None:
        return "it is not an IPython kernel"
    if _children():
        return "it has started a process, which would not get the new identity"
    return ""


def _files() -> set[str]:
    """Return the program, library and path files that this process and PID 1 use."""
    paths = {os.path.join(sys.prefix, "pyvenv.cfg"), *filter(os.path.isfile, sys.path)}
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


def _folders() -> dict[str, set[str]]:
    """Return the folders searched for modules, each with the names that it was searched for, found or not.

    An entry with another name, such as a package that is installed later, cannot change the modules in memory.
    """
    folders: dict[str, set[str]] = {}
    for name in {*sys.modules, *missing.names}:
        package, _, last = name.rpartition(".")
        searched = list(getattr(sys.modules.get(package), "__path__", ())) if package else sys.path
        for folder in searched:
            if isinstance(folder, str) and os.path.isabs(folder) and os.path.isdir(folder):
                folders.setdefault(os.path.realpath(folder), set()).add(last)
    return folders


def _serve_until_activated(app: Any, activate: Callable[[dict[str, Any]], None]) -> None:
    """Answer the host's requests until one of them has activated this copy."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(PATH)
        server.listen()
        while os.path.exists(PATH):
            peer, _ = server.accept()
            with peer, peer.makefile("rw", encoding="utf-8") as stream:
                line = stream.readline()
                if line.endswith("\n"):
                    stream.write(json.dumps(_answer(app, json.loads(line), activate)) + "\n")
                    stream.flush()


def _answer(app: Any, request: dict[str, Any], activate: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    if request["op"] == "preload":
        return _preload(request["modules"])
    if request["op"] == "report":
        return {"unfit": _why_unfit(app)}
    try:
        activate(request)
        os.unlink(PATH)
        return {}
    except Exception as error:
        return {"trouble": f"{type(error).__name__}: {error}"}


def _preload(modules: list[str]) -> dict[str, Any]:
    left_out = {name: reason for name in modules if (reason := _import(name))}
    gc.collect()
    gc.freeze()  # These objects are permanent, so no copy needs to scan them again.
    folders = {folder: sorted(names) for folder, names in _folders().items()}
    return {"left_out": left_out, "files": sorted(_files()), "folders": folders}


# -- after the restore -------------------------------------------------------------------------------------------------


def _take_identity(app: Any, request: dict[str, Any], start_environment: dict[str, str]) -> None:
    """Take on the environment, folder, connection file and key of the requested kernel.

    Variables that the template's kernel has changed since ``start_environment`` are kept.
    """
    template_cwd, cwd = os.getcwd(), request["cwd"]
    template_file, file = app.connection_file, request["connection_file"]
    changed = {name: value for name, value in os.environ.items() if start_environment.get(name) != value}
    os.environ.clear()
    os.environ.update({**changed, **request["env"]})
    time.tzset()
    os.chdir(cwd)
    for paths in (sys.path, app.config_file_paths):
        paths[:] = [cwd if path == template_cwd else path for path in paths]
    invalidate_caches()  # The restored copy has folders that the template did not have.
    sys.argv = [part.replace(template_file, file) for part in sys.argv]
    app.connection_file = app.config.IPKernelApp.connection_file = file
    os.unlink(template_file)
    os.unlink(INIT_MAPS)
    app.session.key = request["key"].encode()
    app.session.signature_scheme = request["signature_scheme"]
    if "JPY_SESSION_NAME" in os.environ:
        app.shell.user_ns["__session__"] = os.environ["JPY_SESSION_NAME"]
    app.shell.init_environment()
    app.shell.init_virtualenv()
    app.shell.starting_dir = cwd


def _reset_random_state(app: Any) -> None:
    """Renew the random ids and seeds that were drawn when the template was made."""
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


def _apply_user_settings(app: Any) -> None:
    """Apply the user's configuration, extensions and startup files as a newly started application does."""
    if _has_config_file(app):
        from_command_line = app.config.copy()
        app.load_config_file()
        app.update_config(from_command_line)
        for configurable in (app.kernel, app.shell, *app.shell.configurables):
            configurable.update_config(app.config)
        app.init_gui_pylab()
    if _has_extensions(app):
        app.init_extensions()
    if _has_startup_code(app):
        app.init_code()
    app.shell.history_manager.reset(new_session=False)
    import_module("tornado.ioloop").IOLoop.current().call_later(
        HISTORY_DELAY, _set_history_time, app.shell.history_manager
    )


def _set_history_time(history: Any) -> None:
    """Set the start time of the history session to now, because the session began in the template."""
    if history.enabled and history.session_number:
        now = datetime.now().isoformat(" ")
        with history.db:
            history.db.execute("UPDATE sessions SET start = ? WHERE session = ?", (now, history.session_number))
