"""Derive the mounts, network and user of a restored sandbox from the present configuration.

runsc restores an image only into a sandbox with the same mount destinations, so these come from the checkpoint's
record. Their sources, and whether they are writable, do not: anyone who can write to the storage could otherwise choose
the host folders that a woken kernel sees.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from .._text import printable
from .bundle import BundleSpec, Mount, carried_mounts, innermost, requested_mounts
from .carried import covered
from .mounts import within


@dataclass(frozen=True)
class Grant:
    """The mounts, network and platform that the present configuration and start request allow a sandbox.

    ``spec``, which mounts the kernel's ``folder``, is for a sandbox that was started without a template. ``carrying``,
    with the folder as ``BundleSpec.carried``, is for a copy of a template; None if no copy can have these mounts.
    """

    spec: BundleSpec
    platform: str = "systrap"
    folder: Mount | None = None
    carrying: BundleSpec | None = None
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
    if given is None:
        place = _shown(saved.carried.destination) if saved.carried else ""
        problem = f"its folder {place} cannot be mounted: " + (
            "this start gives the kernel no folder (see the setting working_folder)"
            if grant.folder is None
            else f"{grant.folder.source} now contains mounts that a kernel started from a template cannot have"
        )
        return grant.spec, [problem]
    given = _at_saved_folder(given, saved, cwd, grant.folder)
    inside = replace(given, python=saved.python, home=saved.home, environment=saved.environment)
    mounts, reasons = _match(_seen(saved), _seen(inside), covered(inside), cwd)
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
        now = {mount.destination for mount in requested_mounts(spec)}
        reasons += [
            f"{_shown(place)} was a separate mount when the kernel was saved, and is now part of another mount"
            for place in sorted({mount.destination for mount in own} - now)
        ]
    return spec, reasons


def _seen(spec: BundleSpec) -> list[Mount]:
    """Return the requested mounts, and the carried folder and its parts as the kernel sees them."""
    return [*requested_mounts(spec), *carried_mounts(spec)]


def _at_saved_folder(given: BundleSpec, saved: BundleSpec, cwd: object, folder: Mount | None) -> BundleSpec:
    """Return ``given`` with the present folder, and the mounts in it, moved to the saved kernel's folder."""
    if given.carried and saved.carried:
        place, before = saved.carried.destination, given.carried.destination
        carried = given.carried._replace(destination=place)
        mounts, inner = (_moved(each or (), before, place) for each in (given.mounts, given.inner))
        return replace(given, carried=carried, mounts=mounts, inner=inner)
    places = [mount.destination for mount in saved.mounts if mount.source and mount.writable]
    if folder is None or not isinstance(cwd, str) or cwd not in places or cwd == folder.destination:
        return given
    return replace(given, mounts=_moved(given.mounts, folder.destination, cwd))


def _moved(mounts: Iterable[Mount], before: str, now: str) -> tuple[Mount, ...]:
    """Return the mounts, with the destinations of those in the folder ``before`` moved to the folder ``now``."""
    return tuple(
        mount._replace(destination=now + mount.destination[len(before) :])
        if within(mount.destination, before)
        else mount
        for mount in mounts
    )


def _match(
    saved: Iterable[Mount], given: Iterable[Mount], unseen: Iterable[Mount], cwd: object
) -> tuple[dict[str, Mount], list[str]]:
    """Return a mount from ``given`` for each saved destination, and the reasons why a restore is not allowed.

    The mounts in ``unseen`` protect nothing, because the carried folder covers them.
    """
    allowed = {mount.destination: mount for mount in given}
    found: dict[str, Mount] = {}
    reasons = []
    for mount in saved:
        place = mount.destination
        now = allowed.get(place) or _part(mount, allowed)
        if now is None:
            setting = "working_folder" if place == cwd else "mounts"
            reasons.append(
                f"{_shown(place)} was mounted when the kernel was saved, and is not in the present configuration "
                f"(the setting {setting} can add it)"
            )
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
        if place not in found and mount not in unseen and _protects(mount, innermost(place, found.values()))
    ]
    return found, reasons


def _part(saved: Mount, allowed: Mapping[str, Mount]) -> Mount | None:
    """Return a mount for a destination that now lies inside an allowed mount; None if it does not."""
    place = saved.destination
    if not os.path.isabs(place) or os.path.normpath(place) != place:
        return None
    if not saved.source:
        return Mount("", place, True)
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
