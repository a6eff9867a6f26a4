"""Control a persistent sandbox from Python. Run it twice: the process inside continues with its memory.

    python examples/persistent.py apple; python examples/persistent.py pear

`jupyter sandbox list` shows the sandbox, `jupyter sandbox delete ID` removes it.
"""

from __future__ import annotations

import asyncio
import os
import sys

from sandbox_provisioner import (
    BundleSpec,
    Persistence,
    SandboxError,
    SandboxHandle,
    SandboxManager,
    find_runsc,
    interpreter_mounts,
    storage_settings,
)

NAME = "examples/persistent.py"
CODE = """
import sys
heard = []
for line in sys.stdin:
    heard.append(line.strip())
    print("Heard so far:", ", ".join(heard), flush=True)
"""


async def tell(handle: SandboxHandle, line: str) -> str:
    process = handle.instance.connection.process(handle.contents["process"])
    if process is None:
        raise SandboxError("The process in the sandbox has ended.", "Delete the sandbox and start again.")
    await process.write(f"{line}\n".encode())
    return (await anext(process.stream())).data.decode().strip()


async def main(line: str) -> None:
    python = os.path.realpath(sys.executable)
    environment = {"PATH": os.defpath}
    spec = BundleSpec(
        python, "/home/me", "me", tuple(interpreter_mounts([python], environment)), environment=environment
    )
    kept = Persistence.open()
    manager, handle = SandboxManager(storage_settings(), find_runsc(), NAME), None
    try:
        if known := kept.registry.find_notebook(NAME, "python"):
            sandbox_id = kept.registry.reattach(str(known[0].id), kept.stores).sandbox_id
            handle = await manager.attach(sandbox_id, spec)
        else:
            sandbox_id = kept.registry.allocate(kept.stores, notebook_path=NAME, kernel_name="python").sandbox_id
            handle = await manager.create(sandbox_id, spec)
        if handle.metadata.checkpoint:
            await handle.restore()
        else:
            await handle.start()
            process = await handle.instance.execute([python, "-c", CODE])
            handle.describe({"process": process.number})
        print(await tell(handle, line))
        saved = await handle.save()
        print(f"Saved {saved.size / 1e6:.1f} MB as {sandbox_id}.")
    finally:
        if handle:
            await manager.close(handle, save=True)


if __name__ == "__main__":
    try:
        asyncio.run(main(" ".join(sys.argv[1:]) or "nothing"))
    except SandboxError as error:
        sys.exit(str(error))
