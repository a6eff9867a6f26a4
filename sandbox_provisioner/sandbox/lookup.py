"""Find the sandbox that a user named, by its id, its id in storage, the beginning of its id, or its notebook.

A notebook is named by its path, or by its file name alone if no file in the working folder has this name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from ..errors import AmbiguousSandboxError, UnknownSandboxError, UnreadableRecordError
from ..persistence.records import SandboxRecord
from .model import Sandbox

N = TypeVar("N", bound=SandboxRecord | Sandbox)


def look_up(
    wanted: str, known: Iterable[N], unreadable: Iterable[UnreadableRecordError] = (), whole_id: bool = False
) -> N:
    """Return the item of ``known`` that ``wanted`` names. With ``whole_id``, only a complete id is accepted.

    Raises UnknownSandboxError with all ids, AmbiguousSandboxError with the matching ids, or the error of an unreadable
    record whose id matches.
    """
    items, beginning, path = list(known), wanted.lower().replace("-", ""), os.path.abspath(wanted)
    attempts: tuple[Callable[[N], bool], ...] = (
        lambda item: wanted in (str(item.id), item.sandbox_id),
        lambda item: bool(beginning) and str(item.id).replace("-", "").startswith(beginning),
        lambda item: bool(wanted) and item.notebook_path in (wanted, path),
        lambda item: os.path.basename(item.notebook_path or "") == wanted != "" and not os.path.lexists(path),
    )
    for fits in attempts[:1] if whole_id else attempts:
        found = [item for item in items if fits(item)]
        if len(found) > 1:
            raise AmbiguousSandboxError(wanted, [str(item.id) for item in found], [_title(item) for item in found])
        if found:
            return found[0]
    for error in unreadable:
        if beginning and Path(error.path).stem.replace("-", "").startswith(beginning):
            raise error
    raise UnknownSandboxError(wanted, [str(item.id) for item in items])


def _title(item: SandboxRecord | Sandbox) -> str:
    """Return the id and the notebook of an item."""
    return f"{item.id} ({item.notebook_path})" if item.notebook_path else str(item.id)
