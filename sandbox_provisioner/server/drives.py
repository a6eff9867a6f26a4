"""Map paths that begin with the name of a drive, such as ``RTC:a.ipynb``, to the paths of notebooks.

JupyterLab sends such a path for a session if the notebook belongs to one of its drives. Jupyter Server finds no such
folder, and uses the root folder instead. So the notebooks ``a/x.ipynb`` and ``b/x.ipynb`` of a drive would be the same.
``RTC:`` is the drive of jupyter-collaboration: its files are the server's files. The files of any other drive are not
in the root folder: its kernels work there, and the drive's name belongs to the notebook's path.
"""

from __future__ import annotations

import re
from functools import wraps
from typing import Any

from jupyter_server.utils import ApiPath, to_os_path

DRIVE = re.compile(r"^/*[^/:]+:(?=.)")
"""Matches the name of a drive in front of a path."""
SERVER_FILES = re.compile(r"^/*(RTC:/*)+(?=.)")
"""Matches the names of drives that show the server's own files."""


def server_path(path: str) -> str:
    """Return the path of a request without the name of a drive that shows the server's own files."""
    return SERVER_FILES.sub("", path)


def notebook_file(path: str, root: str) -> str:
    """Return the absolute path that identifies a session's notebook. For other drives, no file is there."""
    return to_os_path(ApiPath(server_path(path)), root)


def attach(serverapp: Any) -> None:
    """Make the server's session manager, of any class, understand paths with the name of a drive."""
    sessions, root = serverapp.session_manager, serverapp.root_dir
    start, get_env = sessions.start_kernel_for_session, sessions.get_kernel_env
    exists, get = sessions.session_exists, sessions.get_session

    @wraps(start)
    async def start_kernel_for_session(session_id: str, path: Any, *args: Any, **kwargs: Any) -> Any:
        return await start(session_id, server_path(path) if path else path, *args, **kwargs)

    @wraps(get_env)
    def get_kernel_env(path: Any, name: Any = None) -> Any:
        env = get_env(path, server_path(name) if name else name)
        return {**env, "JPY_SESSION_NAME": notebook_file(path, root)} if name and DRIVE.match(path) else env

    async def spelling(path: Any) -> Any:
        """Return the path under which the manager knows a session of the same notebook; without one, ``path``."""
        known = [session["path"] for session in await sessions.list_sessions()]
        same = [each for each in known if path and server_path(each) == server_path(path)]
        return path if path in same or not same else same[0]

    @wraps(exists)
    async def session_exists(path: Any) -> Any:
        return await exists(await spelling(path))

    @wraps(get)
    async def get_session(**known: Any) -> Any:
        if "path" in known:
            known["path"] = await spelling(known["path"])
        return await get(**known)

    sessions.start_kernel_for_session, sessions.get_kernel_env = start_kernel_for_session, get_kernel_env
    sessions.session_exists, sessions.get_session = session_exists, get_session
