"""Sign documents in storage with the user's key, and refuse documents that are not signed with it.

Everyone who can write to a bucket or a shared folder can write a sandbox's ``metadata.json`` or a snapshot's manifest.
The signature is an HMAC-SHA256 of the document's bytes and its name in storage, so that a document can be neither
changed nor moved to another name. The signature is the first member of the JSON object, because document and signature
must change in one compare-and-swap. A replay is not detected: an older document of the same sandbox has a valid
signature.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from uuid import UUID

from .._text import json_object
from ..config import SHORTEST_KEY, SIGNING_KEY, GCSConfig, user_name
from ..errors import ConfigurationError, ConflictError, ForeignSandboxError, SandboxError
from ..errors.signature import SignatureError
from ..storage.base import NEW
from ..storage.disk import READ, closing
from ..storage.local import LocalStore
from . import records
from .records import SandboxRecord

KEY, REGISTRY = "key", "registry"
LONGEST = 4096
"""Maximum characters of a key."""
PURPOSE = b"sandbox-provisioner document 1"
SIGNATURE = re.compile(rb'\{\n "signature": "([0-9a-f]{16}) ([0-9a-f]{64})",')

log = logging.getLogger(__name__)


class EarlierSandboxes:
    """The user's sandboxes from before documents were signed, as long as their documents are unsigned.

    Their records in the user's own registry do not have ``signed`` set.
    """

    def __init__(self, registry: Path) -> None:
        self._store = LocalStore(registry)

    def __contains__(self, sandbox_id: str) -> bool:
        return any(self._find(sandbox_id))

    def discard(self, sandbox_id: str) -> None:
        """Record that the documents of a sandbox are now signed. Blocks."""
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
                continue  # an unreadable record does not make an unsigned document acceptable
            if record.sandbox_id == sandbox_id and not record.signed:
                yield record, info.name, found.generation


class Signer:
    """Signer and verifier of the current user's documents. The key is read on first use."""

    def __init__(self, config: GCSConfig) -> None:
        self.user = user_name()
        self.earlier = EarlierSandboxes(config.own / REGISTRY)
        self._config = config

    def sign(self, name: str, data: bytes) -> bytes:
        """Return the JSON object ``data`` with its signature for the object name ``name``."""
        return b'{\n "signature": "%s %s",' % (_id(self._key), _mac(self._key, name, data)) + data[1:]

    def verify(self, name: str, where: str, sandbox_id: str, data: bytes) -> None:
        """Raise SignatureError unless the document ``data`` was signed with the user's key for the object ``name``.

        With ``trust_storage`` every document is accepted, with a warning. An unsigned document is accepted if it names
        no other user and the sandbox is in ``earlier``: the user's sandboxes from before documents were signed.
        """
        found = SIGNATURE.match(data)
        known = {_id(key): key for key in self._accepted}
        key = known.get(found[1]) if found else None
        if found and key and hmac.compare_digest(found[2], _mac(key, name, b"{" + data[found.end() :])):
            return
        if self._config.trust_storage:
            log.warning("Sandbox %s: %s in %s is not signed with this user's key; accepted", sandbox_id, name, where)
        elif not found:
            if not self.names_us(data) or sandbox_id not in self.earlier:
                raise SignatureError.unsigned(name, where, foreign=not self.names_us(data))
        elif found[1] not in known:
            raise SignatureError.other_key(name, where, found[1].decode(), _id(self._key).decode())
        else:
            raise SignatureError.changed(name, where)

    def require_access(self, sandbox_id: str, user: str, shared_with: Sequence[str]) -> None:
        """Raise ForeignSandboxError unless a sandbox is the user's own or shared with them."""
        if user and user != self.user and self.user not in shared_with:
            raise ForeignSandboxError(sandbox_id, user, self.user)

    @cached_property
    def _key(self) -> bytes:
        return (self._config.signing_key or read_or_make_key(self._key_file)).encode()

    @cached_property
    def _accepted(self) -> list[bytes]:
        """The user's keys: the current one, and the key file that SANDBOX_SIGNING_KEY replaced, for older documents."""
        replaced = self._config.signing_key and os.path.lexists(self._key_file)
        return [self._key, *([read_or_make_key(self._key_file).encode()] if replaced else [])]

    @property
    def _key_file(self) -> Path:
        return self._config.own / KEY

    @property
    def has_key(self) -> bool:
        """True if a key exists; without one, stored documents cannot be verified."""
        return bool(self._config.signing_key) or os.path.lexists(self._key_file)

    def require_usable_key(self) -> None:
        """Read the keys, and make one if none exists. Blocks. Raises ConfigurationError if a key cannot be used."""
        _ = self._accepted

    def names_us(self, data: bytes) -> bool:
        """Return True if an unverified document names the current user, or no user."""
        return named_user(data) in ("", self.user)


def named_user(data: bytes) -> str:
    """Return the user that an unverified document names; empty if it cannot be read."""
    return str(json_object(data).get("user", ""))


def _id(key: bytes) -> bytes:
    """Return the id of a key, which is part of the signature."""
    return hmac.digest(key, b"key id", "sha256").hex()[:16].encode()


def _mac(key: bytes, name: str, data: bytes) -> bytes:
    return hmac.digest(key, b"\n".join((PURPOSE, name.encode(), data)), "sha256").hex().encode()


def read_or_make_key(path: Path) -> str:
    """Return the key in a file, which is made with mode 0600 if missing. Blocks. Raises ConfigurationError."""
    with suppress(ConflictError):  # the key exists
        LocalStore(path.parent).write(path.name, f"{secrets.token_hex(32)}\n".encode(), NEW)
    try:
        with closing(os.open(path, READ)) as file:
            found = os.fstat(file)
            text = os.read(file, LONGEST + 2).decode().strip()
    except (OSError, ValueError) as error:
        raise _unusable(path, f"it cannot be read: {error}") from error
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise _unusable(path, "it is not a regular file that you own")
    if not SHORTEST_KEY <= len(text) <= LONGEST:
        raise _unusable(path, f"it has {len(text)} characters, and a key has {SHORTEST_KEY} to {LONGEST}")
    if found.st_mode & 0o077:
        log.warning("The key %s was open to others (mode %o); changed to 600", path, stat.S_IMODE(found.st_mode))
        path.chmod(0o600)
    return text


def _unusable(path: Path, problem: str) -> ConfigurationError:
    return ConfigurationError(
        SIGNING_KEY,
        f"The key {path}, which signs stored documents, cannot be used: {problem}.",
        "Restore it from a backup: saved sandboxes are signed with it. Without a backup, remove the file, so that a "
        "new key is made. Then delete each saved sandbox with `jupyter sandbox delete --unverified ID`; or, if nobody "
        "else can write to the storage, start the server once with SANDBOX_TRUST_STORAGE=1 and open the sandboxes to "
        "keep.",
    )
