"""Whether a sandboxed kernel could start on this machine: every precondition as data, and what would mend it."""

from __future__ import annotations

import getpass
import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TextIO

from jupyter_core.paths import jupyter_data_dir, jupyter_runtime_dir

from .errors import SandboxError
from .kernelspecs import PROVISIONER, Kernel, kernels
from .progress import marks
from .runsc import OLDEST, Runsc, find, inspect, require_user_namespaces
from .runsc_sources import writable
