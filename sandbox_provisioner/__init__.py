"""Jupyter kernels inside gVisor sandboxes."""

from __future__ import annotations

__version__ = "0.1.0"
