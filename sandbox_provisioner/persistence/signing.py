"""Sign documents in storage with a key of the user's, and refuse those that are not signed with it.

Everybody who can write to a bucket or a shared folder can write a sandbox's ``metadata.json`` or a snapshot's manifest.
The signature is an HMAC-SHA256 of the document's bytes and of its name in storage, so that a document can be neither
changed nor put in another's place. It stands in the document itself, as the first member of the JSON object, because
both must change in one compare-and-swap. An older document of the same sandbox has a valid signature: a MAC alone does
not detect that it was put back.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from uuid import UUID

from . import records
from .config import SHORTEST_KEY, SIGNING_KEY, GCSConfig, user_name
from .errors import ConfigurationError, ConflictError, ForeignSandboxError, SandboxError, SignatureError
from .records import SandboxRecord
from .storage.base import NEW
from .storage.disk import READ, closing
from .storage.local import LocalStore

KEY, REGISTRY = "key", "registry"
LONGEST = 4096
"""Characters that a key has at most."""
PURPOSE = b"sandbox-provisioner document 1"
SIGNATURE = re.compile(rb'\{\n "signature": "([0-9a-f]{16}) ([0-9a-f]{64})",')

log = logging.getLogger(__name__)


class EarlierSandboxes:
    """The user's sandboxes from before documents were signed, each until its document is signed.

    The user's own registry knows them: its records say of each newer sandbox that it has been signed.
    """

    def __init__(self, registry: Path) -> None:
        self._store = LocalStore(registry)

    def __contains__(self, sandbox_id: str) -> bool:
        return any(self._find(sandbox_id))

    def discard(self, sandbox_id: str) -> None:
        """Record that the documents of a sandbox are signed from now on. Blocks."""
        while found := next(self._find(sandbox_id), None):
            record, name, generation = found
            try:
                self._store.write(name, records.encode(replace(record, signed=True)), generation)
            except ConflictError:
                continue

    def _find(self, sandbox_id: str) -> Iterator[tuple[SandboxRecord, str, int]]:
        for info in self._store.list(""):
            try:
                data, found = self._store.read(info.name)
                if b'"signed": true' in data:
                    continue
                record = records.decode(data, UUID(info.name.removesuffix(".json")), info.name)
            except (SandboxError, ValueError):
                continue  # what cannot be read proves nothing
            if record.sandbox_id == sandbox_id and not record.signed:
                yield record, info.name, found.generation


class Signer:
    """Signs documents for one user, and checks those that are read. The key is read when it is first needed."""

    def __init__(self, config: GCSConfig) -> None:
        self.user = user_name()
        self.earlier = EarlierSandboxes(config.own / REGISTRY)
        self._config = config

    def sign(self, name: str, data: bytes) -> bytes:
        """Return the document ``data``, a JSON object, with the signature that it has as the object ``name``."""
        return b'{\n "signature": "%s %s",' % (_id(self._key), _mac(self._key, name, data)) + data[1:]

    def verify(self, name: str, where: str, sandbox_id: str, data: bytes) -> None:
        """Raise SignatureError unless the document ``data`` was signed, as the object ``name``, with our key.

        An unsigned document is accepted if the user's registry knows the sandbox from before documents were signed.
        """
        found = SIGNATURE.match(data)
        known = {_id(key): key for key in self._accepted}
        key = known.get(found[1]) if found else None
        if found and key and hmac.compare_digest(found[2], _mac(key, name, b"{" + data[found.end() :])):
            return
        if self._config.trust_storage:
            log.warning("Sandbox %s: %s in %s is not signed with this key; accepted", sandbox_id, name, where)
        elif not found:
            if not self._claims_us(data) or sandbox_id not in self.earlier:
                raise SignatureError.unsigned(name, where, foreign=not self._claims_us(data))
        elif found[1] not in known:
            raise SignatureError.other_key(name, where, found[1].decode(), _id(self._key).decode(), str(self._key_file))
        else:
            raise SignatureError.changed(name, where)

    def require_access(self, sandbox_id: str, user: str, shared_with: Sequence[str]) -> None:
        """Raise ForeignSandboxError unless a sandbox is ours or is shared with us."""
        if user and user != self.user and self.user not in shared_with:
            raise ForeignSandboxError(sandbox_id, user, self.user)

    @cached_property
    def _key(self) -> bytes:
        return (self._config.signing_key or read_or_make_key(self._key_file)).encode()

    @cached_property
    def _accepted(self) -> list[bytes]:
        """The keys of the user's: a key that the variable replaced signed what was kept before."""
        replaced = self._config.signing_key and os.path.lexists(self._key_file)
        return [self._key, *([read_or_make_key(self._key_file).encode()] if replaced else [])]

    @property
    def _key_file(self) -> Path:
        return self._config.own / KEY

    def _claims_us(self, data: bytes) -> bool:
        """Return whether an unsigned document names no user but us. One that cannot be read names none."""
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            return True
        return not isinstance(document, dict) or document.get("user", "") in ("", self.user)


def _id(key: bytes) -> bytes:
    """Return the name by which a document says with which key it was signed."""
    return hmac.digest(key, b"key id", "sha256").hex()[:16].encode()


def _mac(key: bytes, name: str, data: bytes) -> bytes:
    return hmac.digest(key, b"\n".join((PURPOSE, name.encode(), data)), "sha256").hex().encode()


def read_or_make_key(path: Path) -> str:
    """Return the key in a file, which is made, with mode 0600, if it is not there. ConfigurationError. Blocks."""
    try:
        LocalStore(path.parent).write(path.name, f"{secrets.token_hex(32)}\n".encode(), NEW)
    except ConflictError:
        pass  # it is there already
    try:
        with closing(os.open(path, READ)) as file:
            found = os.fstat(file)
            text = os.read(file, LONGEST + 2).decode().strip()
    except (OSError, ValueError) as error:
        raise _unusable(path, f"it cannot be read: {error}") from error
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise _unusable(path, "it is not a file of your own")
    if not SHORTEST_KEY <= len(text) <= LONGEST:
        raise _unusable(path, f"it has {len(text)} characters, and a key has {SHORTEST_KEY} to {LONGEST}")
    if found.st_mode & 0o077:
        log.warning("The key %s could be read or changed by others (mode %o)", path, stat.S_IMODE(found.st_mode))
        path.chmod(0o600)
    return text


def _unusable(path: Path, problem: str) -> ConfigurationError:
    return ConfigurationError(
        SIGNING_KEY,
        f"The key {path}, which signs what is saved, cannot be used: {problem}.",
        f"Restore it from a backup, or set {SIGNING_KEY}: what was saved is signed with it.",
    )
