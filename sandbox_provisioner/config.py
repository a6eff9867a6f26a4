"""Parse and check all settings from environment variables. Nothing is read at import."""

from __future__ import annotations

import getpass
import logging
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from jupyter_core.paths import jupyter_data_dir
from traitlets import Bool, Enum, Float, Int, List, TraitType, default
from traitlets.config import Config, Configurable

from .errors import ConfigurationError

log = logging.getLogger(__name__)

TMP = "/tmp"
Trait = TypeVar("Trait", bound=TraitType[Any, Any])

SIGNING_KEY = "SANDBOX_SIGNING_KEY"
TRUST_STORAGE = "SANDBOX_TRUST_STORAGE"
SHORTEST_KEY = 32
"""Smallest length of SANDBOX_SIGNING_KEY, in characters."""

YES = ("1", "true", "yes", "on")
NO = ("0", "false", "no", "off", "")

BUCKET = re.compile(
    r"(?=.{3,222}$)(?!\d+\.\d+\.\d+\.\d+$)(?=[a-z0-9])[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*(?<=[a-z0-9])"
)
"""Matches the bucket names that Google allows."""
PREFIX = re.compile(r"(?=.{1,200}$)[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")
"""Matches valid prefixes of object names; the names themselves have at most 512 characters."""

STORAGE_FOLDERS = (
    "SANDBOX_STORAGE_DIR",
    "SANDBOX_METADATA_MOUNT_PATH",
    "SANDBOX_LOCK_MOUNT_PATH",
    "SANDBOX_CHECKPOINT_MOUNT_PATH",
    "FILESYSTEM_SNAPSHOT_MOUNT_PATH",
)
"""Variables that name the folders in which sandboxes are stored."""


class Source(StrEnum):
    """The places that can set a setting; each takes precedence over those above it."""

    BUILT_IN = "built-in"
    CONFIGURATION = "configuration"
    ENVIRONMENT = "environment"
    OWN = "kernelspec"
    REQUEST = "request"


def _invalid(variable: str, value: str, reason: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(variable, f"{variable} is {value!r}, which is {reason}.", remedy)


def words(variable: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the comma-separated items of ``variable``, without empty items."""
    return [item.strip() for item in environ.get(variable, "").split(",") if item.strip()]


def seconds(variable: str, default: float, environ: Mapping[str, str] = os.environ) -> float:
    """Return a time in seconds. Raises ConfigurationError if the value is not a finite number from 0."""
    value = environ.get(variable) or str(default)
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise _invalid(variable, value, "not a number of seconds", "Set it to a number like 1800.")
    return number


def count(variable: str, default: int, environ: Mapping[str, str] = os.environ) -> int:
    """Return a whole number. Raises ConfigurationError for any other value."""
    value = environ.get(variable) or str(default)
    if not value.isdecimal():
        raise _invalid(variable, value, "not a whole number", "Set it to a number like 2.")
    return int(value)


def flag(variable: str, environ: Mapping[str, str] = os.environ, default: bool = False) -> bool:
    """Return True for yes and False for no. Raises ConfigurationError for any other value."""
    value = environ.get(variable, "")
    answer = value.strip().lower() or ("1" if default else "0")
    if answer not in YES + NO:
        raise _invalid(variable, value, "neither yes nor no", "Set it to 1 or 0.")
    return answer in YES


def choice(variable: str, choices: Sequence[str], default: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the value. Raises ConfigurationError if it is not one of ``choices``."""
    value = environ.get(variable) or default
    if value not in choices:
        raise _invalid(variable, value, "not a valid value", f"Set it to {' or '.join(choices)}.")
    return value


def setting(variable: str, trait: Trait) -> Trait:
    """Make ``trait`` configurable, also by an environment variable, and return it. For subclasses of Settings.

    The variable is read for each new object, by the function of this module for the trait's type. Its name is added to
    the trait's help.
    """
    kind = ", comma-separated" if isinstance(trait, List) else ""
    trait.help = trait.metadata["help"] = f"{trait.help} Environment{kind}: {variable}"
    trait.tag(config=True, variable=variable)
    unset = trait.default()

    def class_init(owner: Any, name: str) -> None:
        type(trait).class_init(trait, owner, name)
        default(name)(lambda _: _value(variable, trait, unset)).class_init(owner, name)

    vars(trait)["class_init"] = class_init  # called by traitlets when it makes the class
    return trait


def _value(variable: str, trait: TraitType[Any, Any], unset: Any) -> object:
    match trait:
        case List():
            return words(variable) or list(unset)
        case Enum(values=[first, *others]):
            return choice(variable, (first, *others), first)
        case Bool():
            return flag(variable, default=unset)
        case Float():
            return seconds(variable, unset)
        case Int():
            return count(variable, unset)
        case _:
            return os.environ.get(variable, unset)


class Settings(Configurable):
    """Base class of the classes with a ``setting``: environment variables take precedence over Jupyter's configuration.

    A value that is passed to the constructor takes precedence over both.
    """

    def __init__(self, **kwargs: Any) -> None:
        self._own = frozenset(kwargs)
        super().__init__(**kwargs)

    def source(self, name: str) -> Source:
        """Return the place that sets the setting ``name`` of this object."""
        if name in self._own:
            return Source.OWN
        if os.environ.get(self.variables()[name]):
            return Source.ENVIRONMENT
        return Source.CONFIGURATION if name in super()._find_my_config(self.config) else Source.BUILT_IN

    @classmethod
    def variables(cls) -> dict[str, str]:
        """Return the environment variable of each setting, by the setting's name."""
        traits = cls.class_traits(config=True).items()
        return {name: trait.metadata["variable"] for name, trait in traits if "variable" in trait.metadata}

    def _find_my_config(self, cfg: Config) -> Any:
        """Return the configuration of this object without the settings whose variables are set. Called by traitlets."""
        found = super()._find_my_config(cfg)
        for name, variable in self.variables().items():
            if os.environ.get(variable):
                found.pop(name, None)
        return found


def user_name() -> str:
    """Return the user's name for the records of sandboxes: the login name, or "user UID" if the user has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"


def own_folder() -> Path:
    """Return the folder for the user's key and registry: in Jupyter's data folder, or in /tmp for a user without home.

    A container that runs with any uid has no home: HOME is /, which the user cannot write to. Raises ConfigurationError
    if another user has created the folder in /tmp.
    """
    data = Path(jupyter_data_dir())
    if os.path.expanduser("~") != "/" or _can_create(data):
        return data / "sandbox"
    folder = Path(f"{TMP}/jupyter-sandbox-data-{os.geteuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    if not own or replaceable(folder.parent):
        problem = f"You have no home folder, and another user can change {folder}."
        raise ConfigurationError("JUPYTER_DATA_DIR", problem, "Set JUPYTER_DATA_DIR to a folder of your own.")
    _report_data_folder(str(data), str(folder))
    return folder / "sandbox"


def replaceable(folder: Path) -> bool:
    """Return True if other users can rename and replace the entries of ``folder``. Raises OSError."""
    mode = folder.stat().st_mode
    return bool(mode & 0o022) and not mode & stat.S_ISVTX


def _can_create(folder: Path) -> bool:
    """Return True if the folder, or the nearest existing one above it, can be written."""
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    return os.access(nearest, os.W_OK | os.X_OK)


@cache
def _report_data_folder(missing: str, used: str) -> None:
    log.warning(
        "You have no home folder, so Jupyter's data folder %s cannot be created. Saved kernels are kept in %s. Set "
        "JUPYTER_DATA_DIR to keep them in a folder of your own.",
        missing,
        used,
    )


def signing_key(environ: Mapping[str, str] = os.environ) -> str:
    """Return SANDBOX_SIGNING_KEY. Raises ConfigurationError, without the key in its text, if the key is too short."""
    value = environ.get(SIGNING_KEY, "").strip()
    if value and len(value) < SHORTEST_KEY:
        problem = f"{SIGNING_KEY} has {len(value)} characters, so it can be guessed."
        remedy = f"Use {SHORTEST_KEY} or more characters, such as the output of `openssl rand -hex 32`."
        raise ConfigurationError(SIGNING_KEY, problem, remedy)
    return value


@dataclass(frozen=True)
class Place:
    """The storage for one kind of object: a bucket, a folder where a bucket is mounted, both or neither."""

    stem: str
    """First part of the names of its two variables."""
    bucket: str = ""
    mount: Path | None = None

    @property
    def bucket_variable(self) -> str:
        """The variable that names the bucket."""
        return f"{self.stem}_BUCKET"

    @property
    def mount_variable(self) -> str:
        """The variable that names the folder."""
        return f"{self.stem}_MOUNT_PATH"

    @property
    def variables(self) -> str:
        """Both variables, for an error message about a missing place."""
        return f"{self.bucket_variable} (or {self.mount_variable})"

    @property
    def is_set(self) -> bool:
        """True if a bucket or a folder is configured."""
        return bool(self.bucket or self.mount)

    def read(self, environ: Mapping[str, str]) -> Place:
        """Return this place with the values of its variables. Raises ConfigurationError for an invalid value."""
        return Place(self.stem, _bucket(self.bucket_variable, environ), _mount(self.mount_variable, environ))


@dataclass(frozen=True)
class GCSConfig:
    """The storage for persistent sandboxes, and the features that it makes possible on this server.

    Without any bucket and mount path, the storage is embedded: everything is in ``folder``, on this machine, and all
    features are available. Otherwise each kind of object has its own place, a feature is only available if its place is
    set, and ``folder`` only contains data that is being copied to or from these places.

    Metadata and locks need compare-and-swap. Their bucket is therefore used through Google's client even if a mount
    path is set; a mount path without a bucket is a folder that several servers share. Checkpoints and snapshots are
    never overwritten, so their mount path is used if it is set.
    """

    folder: Path
    metadata: Place = Place("SANDBOX_METADATA")
    locks: Place = Place("SANDBOX_LOCK")
    checkpoints: Place = Place("SANDBOX_CHECKPOINT")
    snapshots: Place = Place("FILESYSTEM_SNAPSHOT")
    prefix: str = ""
    """Prefix of every object name, in buckets and mounted folders; without a slash at its end."""
    own: Path = field(default_factory=own_folder)
    """The user's folder with the key and the registry, independent of the other storage."""
    signing_key: str = field(default_factory=signing_key, repr=False)
    """The key that signs stored documents; if it is empty, the key in ``own`` is used."""
    trust_storage: bool = False
    """True if documents without a valid signature are accepted."""

    @classmethod
    def from_environment(cls, default_folder: Path, environ: Mapping[str, str] = os.environ) -> GCSConfig:
        """Return the configuration in ``environ``. Raises ConfigurationError for an invalid value.

        ``default_folder`` is used unless SANDBOX_STORAGE_DIR is set.
        """
        return cls(
            folder=_absolute("SANDBOX_STORAGE_DIR", environ) or Path(os.path.realpath(default_folder)),
            metadata=cls.metadata.read(environ),
            locks=cls.locks.read(environ),
            checkpoints=cls.checkpoints.read(environ),
            snapshots=cls.snapshots.read(environ),
            prefix=_prefix("SANDBOX_OBJECT_PREFIX", environ),
            signing_key=signing_key(environ),
            trust_storage=flag(TRUST_STORAGE, environ),
        )

    @property
    def embedded(self) -> bool:
        """True if no bucket and no mount path is set: everything is stored in ``folder``."""
        return not any(place.is_set for place in (self.metadata, self.locks, self.checkpoints, self.snapshots))

    def can_persist(self) -> bool:
        """Return True if metadata and leases can be stored, so that sandboxes can be persistent."""
        return self.embedded or (self.metadata.is_set and self.locks.is_set)

    def can_checkpoint(self) -> bool:
        """Return True if persistent sandboxes can be checkpointed."""
        return self.can_persist() and (self.embedded or self.checkpoints.is_set)

    def can_snapshot(self) -> bool:
        """Return True if file snapshots can be stored, for both persistent and ephemeral sandboxes."""
        return self.embedded or self.snapshots.is_set

    def require(
        self,
        gcs_sandbox_id: str | None = None,
        enable_handoff: bool = False,
        enable_checkpoint_at_idle: bool = False,
        sandbox_id: str | None = None,
    ) -> None:
        """Check, before anything is created, that the storage supports the requested sandbox.

        ``gcs_sandbox_id`` needs buckets for metadata and locks; ``sandbox_id`` works with any storage. Raises
        ConfigurationError: ``setting`` is the first missing variable, and the text names all.
        """
        gcs = gcs_sandbox_id is not None
        saves = enable_handoff or enable_checkpoint_at_idle
        if self.embedded and not gcs:
            return
        missing = []
        if gcs or saves or sandbox_id is not None:
            missing += [place for place in (self.locks, self.metadata) if not (place.bucket if gcs else place.is_set)]
        if saves and not self.checkpoints.is_set:
            missing.append(self.checkpoints)
        if missing:
            strict = (self.locks, self.metadata) if gcs else ()
            names = [place.bucket_variable if place in strict else place.variables for place in missing]
            raise ConfigurationError(
                missing[0].bucket_variable,
                f"This server cannot store the requested sandbox: {' and '.join(names)} must be set.",
                "Set these variables in the server's environment, or request a sandbox that does not need them.",
            )


def storage_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of the storage and the machine that are set, with their values; not the secret key."""
    places = (GCSConfig.metadata, GCSConfig.locks, GCSConfig.checkpoints, GCSConfig.snapshots)
    names = [name for place in places for name in (place.bucket_variable, place.mount_variable)]
    names += ["SANDBOX_OBJECT_PREFIX", TRUST_STORAGE, "STORAGE_EMULATOR_HOST", "SANDBOX_RUNTIME_DIR", "RUNSC_PATH"]
    found = {name: environ[name] for name in names if environ.get(name)}
    return found | ({SIGNING_KEY: "(set)"} if environ.get(SIGNING_KEY) else {})


def _bucket(variable: str, environ: Mapping[str, str]) -> str:
    value = environ.get(variable, "")
    if value and not BUCKET.fullmatch(value):
        remedy = "Set it to the bucket's name alone, without gs:// and without a path."
        raise _invalid(variable, value, "not a valid bucket name", remedy)
    return value


def _absolute(variable: str, environ: Mapping[str, str]) -> Path | None:
    value = environ.get(variable, "")
    if not value:
        return None
    if not os.path.isabs(value):
        raise _invalid(variable, value, "not an absolute path", "Begin it with /.")
    if os.path.exists(value) and not os.path.isdir(value):
        raise _invalid(variable, value, "not a folder", "Set it to the path of a folder.")
    return Path(os.path.realpath(value))


def _mount(variable: str, environ: Mapping[str, str]) -> Path | None:
    folder = _absolute(variable, environ)
    if folder and not os.path.isdir(folder):
        remedy = "Mount the bucket there first, or correct the path."
        raise _invalid(variable, environ[variable], "not an existing folder", remedy)
    return folder


def _prefix(variable: str, environ: Mapping[str, str]) -> str:
    value = environ.get(variable, "")
    prefix = value.removesuffix("/")
    if value and not PREFIX.fullmatch(prefix):
        remedy = "Use letters, digits, '-', '_' and '.', in parts that do not begin with a dot, separated by '/'."
        raise _invalid(variable, value, "not a valid prefix of object names", remedy)
    return prefix
