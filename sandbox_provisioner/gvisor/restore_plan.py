"""Derive the mounts, network and user of a restored sandbox from the present configuration.

runsc restores an image only into a sandbox with the same mount destinations, so these come from the checkpoint's
record. Their sources, and whether they are writable, do not: anyone who can write to the storage could otherwise choose
the host folders that a woken kernel sees.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from .._text import printable
from .bundle import BundleSpec, Mount, carried_mounts, innermost, requested_mounts
from .carried import covered
from .mounts import within


@dataclass(frozen=True)
class Grant:
    """The mounts, network and platform that the present configuration and start request allow a sandbox.

    ``spec``, which mounts the kernel's ``folder``, is for a sandbox that was started without a template. ``carrying``,
    with the folder as ``BundleSpec.carried``, is for a copy of a template; None without a folder.
    """

    spec: BundleSpec
    platform: str = "systrap"
    folder: Mount | None = None
    carrying: BundleSpec | None = None
    cwd: str = ""
    """The notebook's folder, in ``folder``; empty means ``folder`` itself."""
    optional: frozenset[str] = frozenset()
    """Sources of read-only mounts that are left out if the sandbox was saved without them."""
    watched: tuple[Mount, ...] = ()
    """Mounts whose sources contained no links when they were planned, but that other kernels could replace by links."""

    @classmethod
    def of(cls, spec: BundleSpec, platform: str) -> Grant:
        """Return a grant of exactly the mounts in ``spec``, which must come from a trusted source."""
        if spec.carried is None:
            return cls(spec, platform)
        shown = replace(spec, carried=None, inner=None, mounts=(*spec.mounts, *carried_mounts(spec)))
        return cls(shown, platform, spec.carried, spec)


def derive(saved: BundleSpec, cwd: object, grant: Grant) -> tuple[BundleSpec, list[str]]:
    """Return the spec to restore a checkpoint with, and the reasons why that is not allowed; empty if it is.

    ``saved`` and ``cwd``, the kernel's folder in the sandbox, are from the checkpoint's record and are not trusted. The
    interpreter, home and environment of PID 1 are taken from ``saved``: they exist only inside the sandbox.
    """
    given = grant.carrying if saved.carried else grant.spec
    now, was = grant.folder, _saved_folder(saved, cwd)
    part = _present_part(now, grant.cwd or now.destination, was, cwd) if now and was else None
    if saved.carried and (problem := _unbindable(grant, part, saved.carried)):
        return grant.spec, [problem]
    assert given is not None
    if now and part:
        given = _at_saved_folder(given, now, part, was)
    inside = replace(
        given, python=saved.python, home=saved.home, environment=saved.environment, read_only=saved.read_only
    )
    mounts, reasons = _match(_seen(saved), _seen(inside), covered(inside), cwd, grant.optional)
    if saved.network != given.network:
        reasons.append(
            f"it was saved with network={_shown(saved.network)}, and the setting network is {given.network!r} now"
        )
    own, inner = (
        tuple(mounts[each.destination] for each in part if each.destination in mounts)
        for part in (requested_mounts(saved), saved.inner or ())
    )
    spec = replace(inside, mounts=own, inner=None if saved.inner is None else inner)
    if not reasons:
        made = {mount.destination for mount in requested_mounts(spec)}
        reasons += [
            f"{_shown(place)} was a separate mount when the kernel was saved, and is now part of another mount"
            for place in sorted({mount.destination for mount in own} - made)
        ]
    return spec, reasons


def _seen(spec: BundleSpec) -> list[Mount]:
    """Return the requested mounts, and the carried folder and its parts as the kernel sees them."""
    return [*requested_mounts(spec), *carried_mounts(spec)]


def _unbindable(grant: Grant, part: Mount | None, carried: Mount) -> str:
    """Return the reason why a copy of a template that was saved with ``carried`` cannot get its folder, or ""."""
    place = f"its folder {_shown(carried.destination)} cannot be mounted:"
    if grant.folder is None or grant.carrying is None:
        return f"{place} this start gives the kernel no folder (see the setting working_folder)"
    if part is None:
        return f"{place} the setting folder_scope allows only {grant.folder.source} now"
    return ""


def _at_saved_folder(given: BundleSpec, now: Mount, part: Mount, was: str) -> BundleSpec:
    """Return ``given`` with ``part`` instead of the present folder ``now``, at the destination ``was``."""

    def moved(mounts: Iterable[Mount]) -> tuple[Mount, ...]:
        return tuple(
            mount._replace(destination=was + mount.destination[len(part.destination) :])
            if within(mount.destination, part.destination)
            else mount
            for mount in mounts
            if mount != now
        )

    folder = part._replace(destination=was)
    if given.carried:
        inner = (mount for mount in given.inner or () if within(mount.destination, part.destination))
        return replace(given, carried=folder, mounts=moved(given.mounts), inner=moved(inner))
    return replace(given, mounts=(*moved(given.mounts), folder))


def _saved_folder(saved: BundleSpec, cwd: object) -> str:
    """Return the destination of the folder that the saved kernel, which worked in ``cwd``, could write to; or ""."""
    if saved.carried:
        return saved.carried.destination
    places = [mount.destination for mount in saved.mounts if mount.source and mount.writable]
    return max((place for place in places if isinstance(cwd, str) and within(cwd, place)), key=len, default="")


def _present_part(now: Mount, here: str, was: str, cwd: object) -> Mount | None:
    """Return the part of the folder ``now`` for a kernel that worked in ``cwd`` and could write to the folder ``was``.

    ``here`` is the notebook's folder now. It is at the same place in the part as ``cwd`` was in ``was``. If the
    notebook was moved so that this is impossible, the part is ``now``. None if it is not in ``now``, or is a link.
    """
    below = os.path.relpath(cwd, was) if isinstance(cwd, str) and within(cwd, was) else "."
    place = here
    if below != ".":
        place = here.removesuffix(f"/{below}") if here.endswith(f"/{below}") else now.destination
    source = os.path.normpath(os.path.join(now.source, os.path.relpath(place, now.destination)))
    if not within(place, now.destination) or os.path.realpath(source) != source:
        return None
    return Mount(source, place, True)


def _match(
    saved: Iterable[Mount], given: Iterable[Mount], unseen: Iterable[Mount], cwd: object, optional: Collection[str]
) -> tuple[dict[str, Mount], list[str]]:
    """Return a mount from ``given`` for each saved destination, and the reasons why a restore is not allowed.

    The mounts in ``unseen`` protect nothing, because the carried folder covers them. Those with a source in
    ``optional`` are not required.
    """
    allowed = {mount.destination: mount for mount in given}
    found: dict[str, Mount] = {}
    reasons = []
    for mount in saved:
        place = mount.destination
        now = allowed.get(place) or _part(mount, allowed)
        if now is None:
            reasons.append(_missing(mount, cwd, innermost(place, found.values())))
        elif bool(now.source) != bool(mount.source):
            kinds = ("a private folder in memory", "a folder or file of the host")
            was, is_now = kinds[bool(mount.source)], kinds[bool(now.source)]
            reasons.append(
                f"{_shown(place)} was {was} when the kernel was saved, and is {is_now} in the present configuration"
            )
        else:
            found[place] = now
    reasons += [
        f"{_shown(place)} must now be protected from the kernel, but was not protected when the kernel was saved"
        for place, mount in allowed.items()
        if place not in found
        and mount not in unseen
        and mount.source not in optional
        and _protects(mount, innermost(place, found.values()))
    ]
    return found, reasons


def _missing(saved: Mount, cwd: object, above: Mount | None) -> str:
    """Return the reason why a restore is not allowed without a mount that the saved sandbox had."""
    place = _shown(saved.destination)
    if above and above.source and above.writable:
        return (
            f"{place} was read-only when the kernel was saved, and does not exist any more, or is a link now (create "
            "it again: an empty file or folder is enough)"
        )
    contains = saved.writable and isinstance(cwd, str) and within(cwd, saved.destination)
    setting = "mounts" if not contains else "working_folder" if saved.destination == cwd else "folder_scope"
    return (
        f"{place} was mounted when the kernel was saved, and is not in the present configuration "
        f"(the setting {setting} can add it)"
    )


def _part(saved: Mount, allowed: Mapping[str, Mount]) -> Mount | None:
    """Return a mount for a destination that now lies inside an allowed mount; None if it does not."""
    place = saved.destination
    if not os.path.isabs(place) or os.path.normpath(place) != place:
        return None
    if not saved.source:
        return Mount("", place, saved.writable)
    above = innermost(place, allowed.values())
    if above is None or not above.source:
        return None
    outer = os.path.realpath(above.source)
    source = os.path.join(outer, os.path.relpath(place, above.destination))
    if os.path.realpath(source) != source or not os.path.exists(source):
        return None
    return Mount(source, place, above.writable and saved.writable)


def _protects(mount: Mount, above: Mount | None) -> bool:
    """Return True if ``mount`` keeps the kernel from reading or changing a part of the host folder ``above``."""
    return bool(above and above.source and (not mount.source or (above.writable and not mount.writable)))


def _shown(text: str) -> str:
    return printable(text)[:200]
