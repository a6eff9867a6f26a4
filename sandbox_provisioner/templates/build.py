"""Build a template: start its kernel in a separate sandbox, stop it before it serves, checkpoint it and publish it.

A server runs this in a separate process, ``python -m sandbox_provisioner.templates.build``. The process reads the
recipe from its standard input, waits LATER seconds, runs at the lowest priority, and ends with the server.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from .._text import printable
from ..errors import GuestError, LinkClosedError, SandboxError, UnsettledError
from ..guest.capabilities import CARRIED
from ..gvisor.bundle import BundleSpec, Mount
from ..gvisor.carried import visible_mounts
from ..gvisor.interpreter import as_zygote
from ..gvisor.mounts import within
from ..gvisor.sandbox import GVisorSandbox
from ..kernel.launch_plan import targets
from ..kernel.starting import FIRST_PROCESS
from ..mux.activation import tell
from ..persistence.checkpoints import now
from .spec import CONNECTION_FILE, Recipe
from .store import FolderMark, Mark, Template, TemplateShelf, mark

STARTING = 120.0
"""Longest time, in seconds, until a kernel must have stopped for the checkpoint."""
SERVING = 10.0
"""Seconds after a kernel's first socket answers until it is considered serving, if it did not stop before."""
PRELOADING = 600.0
"""Longest time for the import of one module, in seconds."""
SETTLED = 1.0
"""Seconds for which the files of a template must have been unchanged before a build starts."""
TRIES = 3
"""Number of attempts to build while files keep changing."""
LATER = 5.0
"""Delay in seconds before a background build, so that the kernel's start comes first."""
POLL = 0.2
"""Seconds between two checks if the server still runs."""
MAX_REASON = 2000
"""Maximum characters of a reason that comes from the guest."""

Say = Callable[[str], None]
"""Called with the name of each step when it begins."""


def in_background(recipe: Recipe) -> None:
    """Start a process that builds the template. Blocks for milliseconds."""
    command = [sys.executable, "-P", "-m", "sandbox_provisioner.templates.build", str(os.getpid())]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(  # -P, cwd: never import from a folder that a notebook can write to
        command, cwd="/", stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
    )
    assert process.stdin
    with suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(json.dumps(recipe.to_json()).encode())
    _background.append(process)
    _background[:] = [started for started in _background if started.poll() is None]


_background: list[subprocess.Popen[bytes]] = []
"""Build processes that have not been waited for yet."""


def main() -> None:
    """Build the template whose recipe is on stdin, for the server whose process id is the first argument."""
    server, recipe = int(sys.argv[1]), Recipe.from_json(json.load(sys.stdin))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    os.nice(19)
    asyncio.run(_build_for(server, recipe))


async def _build_for(server: int, recipe: Recipe) -> None:
    """Build the template, but cancel the build when the process ``server`` ends."""
    work = asyncio.create_task(_build_later(recipe))
    while not work.done() and os.getppid() == server:
        await asyncio.wait({work}, timeout=POLL)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


async def _build_later(recipe: Recipe) -> None:
    await asyncio.sleep(LATER)
    shelf = TemplateShelf()
    try:
        await build(recipe, shelf, wait=False)
    except SandboxError as error:  # shown by `jupyter sandbox template list`; retried later, but not at each start
        failure = f"the build failed: {error}"
        shelf.fail(Template(recipe.kernel_name, recipe.key, now(), unfit=failure, failed=True))


async def build(recipe: Recipe, shelf: TemplateShelf, wait: bool, say: Say = lambda step: None) -> Template | None:
    """Build the template, publish it and return it. Without ``wait``, return None if another process is building it.

    A template without an image records why the kernel cannot have one. Raises SandboxError if the build failed.
    """
    async with shelf.building(recipe.kernel_name, wait) as draft:
        if draft is None:
            return None
        key, found = recipe.key, shelf.get(recipe.kernel_name)
        if not wait and found and found.image and found.key == key and not found.changed:
            return found
        left_out: dict[str, str] = {}
        while True:
            say("start")
            modules = [name for name in recipe.preload if name not in left_out]
            report = await _freeze_settled(recipe, modules, draft, say)
            if not report["left_out"] or report["unfit"]:
                break
            left_out |= report["left_out"]
        template = Template(
            kernel_name=recipe.kernel_name,
            key=key,
            created=now(),
            preloaded=modules,
            left_out=left_out,
            unfit=report["unfit"],
            marks=report["marks"],
            folders=report["folders"],
        )
        return shelf.publish(template, None if report["unfit"] else draft)


async def _freeze_settled(recipe: Recipe, modules: list[str], draft: Path, say: Say) -> dict[str, Any]:
    """Call ``_freeze`` up to TRIES times, as long as files change during the build, for example by pip."""
    for _ in range(TRIES - 1):
        with suppress(UnsettledError):
            return await _freeze(recipe, modules, draft, say)
        await asyncio.sleep(SETTLED)
    return await _freeze(recipe, modules, draft, say)


async def _freeze(recipe: Recipe, modules: list[str], draft: Path, say: Say) -> dict[str, Any]:
    """Start the kernel, checkpoint it to ``draft`` if possible, and return its report with the marks of its files."""
    begun = time.time()
    empty = draft.with_name(f"{draft.name}-folder")
    empty.mkdir(mode=0o700, exist_ok=True)
    spec = replace(recipe.spec, carried=Mount(str(empty), CARRIED, True))
    sandbox = GVisorSandbox(f"template-{recipe.kernel_name}", spec, recipe.runsc, recipe.platform)
    try:
        await sandbox.start()
        found = await _report(sandbox, recipe, modules)
        report = {**found, "marks": {}, "folders": {}}
        if not found["left_out"] and not found["unfit"]:
            places = _host_places([*found["files"], *found["folders"]], spec)
            writable = [path for path, mount in places.values() if mount.writable]
            if writable:
                return {**report, "unfit": f"it reads {writable[0]}, which kernels can write to"}
            report["marks"] = _marks((places[path][0] for path in found["files"] if path in places), begun)
            report["folders"] = _folder_marks(
                {places[path][0]: names for path, names in found["folders"].items() if path in places}, begun
            )
            say("checkpoint")
            await sandbox.checkpoint(draft)
    finally:
        await sandbox.delete()
    return report


async def _report(sandbox: GVisorSandbox, recipe: Recipe, modules: list[str]) -> dict[str, Any]:
    """Start the kernel, make it import ``modules``, and return its report.

    ``unfit``: why the kernel cannot have a template; ``left_out``: the modules that cannot be part of the template,
    with the reasons; ``files``: the files that the kernel and PID 1 use; ``folders``: those in which they searched
    for modules, each with the names.
    """
    files = {CONNECTION_FILE: json.dumps(dict(recipe.connection))}
    process = await sandbox.execute(as_zygote(recipe.argv), env=recipe.env, cwd=CARRIED, stdin=False, files=files)
    if process.number != FIRST_PROCESS:
        raise SandboxError("A process started before the kernel in the template's sandbox. No template was built.")
    end = asyncio.create_task(process.read())
    try:
        unfit = await _unfit(sandbox, recipe, end)
        if unfit:
            return {"unfit": unfit, "left_out": {}, "files": [], "folders": {}}
        left_out = {}
        for name in modules:
            if reason := await _preload(sandbox, name):
                left_out[name] = reason
            if end.done() and left_out:
                return {"unfit": "", "left_out": left_out, "files": [], "folders": {}}
        found = await tell(sandbox.connection, op="preload", modules=[])
    finally:
        end.cancel()
        await asyncio.gather(end, return_exceptions=True)
    used, searched = found.get("files"), found.get("folders")
    if not isinstance(used, list) or not isinstance(searched, dict) or not all(map(_is_names, searched.values())):
        raise GuestError("The template's kernel sent an invalid report. No template was built.")
    return {"unfit": "", "left_out": left_out, "files": list(map(str, used)), "folders": searched}


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


async def _preload(sandbox: GVisorSandbox, name: str) -> str:
    """Make the kernel import a module. Return why the module cannot be part of a template, or an empty string."""
    try:
        async with asyncio.timeout(PRELOADING):
            answer = await tell(sandbox.connection, op="preload", modules=[name])
    except TimeoutError:
        raise SandboxError(
            f"{name} could not be imported within {PRELOADING:g} seconds. No template was built.",
            "Remove it from the setting preload, or build the template again.",
        ) from None
    except LinkClosedError:
        await asyncio.sleep(POLL)
        return "its import ended the kernel"
    left_out = answer.get("left_out")
    return printable(str(left_out.get(name, ""))[:MAX_REASON]) if isinstance(left_out, dict) else ""


async def _unfit(sandbox: GVisorSandbox, recipe: Recipe, end: asyncio.Future[tuple[bytes, bytes]]) -> str:
    """Return why the kernel cannot be checkpointed before it serves; empty if it can."""
    answer = asyncio.create_task(tell(sandbox.connection, op="report"))
    serving = asyncio.create_task(_serves(sandbox, recipe))
    try:
        watched: set[asyncio.Future[Any]] = {answer, end, serving}
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return printable(str(answer.result().get("unfit", ""))[:MAX_REASON])
        if end.done():
            output = b"\n".join(end.result())[-MAX_REASON:]
            return f"it ended before it could be checkpointed: {printable(output)}"
        return "unlike ipykernel, it does not stop for the checkpoint before it serves clients"
    finally:
        for task in (answer, serving):
            task.cancel()
        await asyncio.gather(answer, serving, return_exceptions=True)


async def _serves(sandbox: GVisorSandbox, recipe: Recipe) -> None:
    """Wait until SERVING seconds after the kernel's shell socket answers, but not longer than STARTING."""
    answered = asyncio.Event()
    stream = sandbox.connection.open(targets(recipe.connection)["shell"])
    stream.on_data = lambda data: answered.set()
    try:
        async with asyncio.timeout(STARTING):
            await answered.wait()
            await asyncio.sleep(SERVING)
    except TimeoutError:
        pass
    finally:
        stream.reset()


def _host_places(paths: Iterable[str], spec: BundleSpec) -> dict[str, tuple[str, Mount]]:
    """Return the host path and the mount of each of the sandbox's ``paths`` that ``spec`` mounts from the host."""
    views = sorted(visible_mounts(spec), key=lambda mount: len(mount.destination), reverse=True)
    places = {}
    for path in paths:
        view = next((mount for mount in views if within(path, mount.destination)), None)
        if view and view.source and view.destination != CARRIED:
            places[path] = view.source + path[len(view.destination) :], view
    return places


def _marks(paths: Iterable[str], begun: float) -> dict[str, Mark]:
    """Return the mark of each file. Raises UnsettledError if a file may have changed while it was read."""
    marks = {path: found for path in paths if (found := mark(path))}
    for path, found in marks.items():
        _require_settled(path, found, begun)
    return marks


def _folder_marks(searched: Mapping[str, list[str]], begun: float) -> dict[str, FolderMark]:
    """Return the mark of each folder in which names were ``searched``. Raises UnsettledError if one was changed."""
    marks = {path: found for path, names in searched.items() if (found := FolderMark.of(path, names))}
    for path, found in marks.items():
        _require_settled(path, found.mark, begun)
    return marks


def _require_settled(path: str, found: Mark, begun: float) -> None:
    if found[-1] > (begun - SETTLED) * 1e9:
        raise UnsettledError(
            f"{path} was changed while the template was built, or just before.",
            "The next start builds the template again; so does `jupyter sandbox template build`.",
        )


if __name__ == "__main__":
    main()
