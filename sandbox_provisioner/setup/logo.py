"""Draw the logo of a twin: the original kernel's logo with a shield in a corner."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path

SOURCES = {"logo-svg.svg": "image/svg+xml", "logo-64x64.png": "image/png", "logo-32x32.png": "image/png"}
"""The files of a kernelspec that can have its logo, the best first, with their types."""
MAX_LOGO = 1 << 20
"""Bytes of the largest logo that is used."""
SHIELD = (
    '<path d="M48 33 62 38v9c0 8-6 13-14 16-8-3-14-8-14-16v-9z" fill="#2e7d32" stroke="#fff" stroke-width="2.5"/>'
    '<path d="m42 47 4.5 5 8-9" fill="none" stroke="#fff" stroke-width="3.5"/>'
)
NEUTRAL = (
    '<rect x="6" y="10" width="48" height="40" rx="5" fill="#eceff1" stroke="#607d8b" stroke-width="3"/>'
    '<path d="m16 22 9 8-9 8m14 0h12" fill="none" stroke="#607d8b" stroke-width="4"/>'
)
"""Picture for a kernel without a logo: a terminal."""


def sandbox_logo(resources: Path) -> str:
    """Return the logo, as SVG, of the twin of the kernel whose kernelspec is in the folder ``resources``."""
    picture = next((drawn for name, kind in SOURCES.items() if (drawn := _embedded(resources / name, kind))), NEUTRAL)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64" width="64" height="64">{picture}{SHIELD}</svg>\n'
    )


def _embedded(file: Path, kind: str) -> str:
    """Return an SVG element with the picture in ``file``; empty if it cannot be read or is too large."""
    try:
        if file.stat().st_size > MAX_LOGO:
            return ""
        data = b64encode(file.read_bytes()).decode("ascii")
    except OSError:
        return ""
    return f'<image width="64" height="64" href="data:{kind};base64,{data}"/>'
