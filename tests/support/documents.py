"""Write a sandbox's document to storage as a server does."""

from __future__ import annotations

from sandbox_provisioner.persistence import metadata, names
from sandbox_provisioner.persistence.backends import Stores
from sandbox_provisioner.persistence.metadata import GCSSandboxMetadata


def put_document(stores: Stores, document: GCSSandboxMetadata) -> None:
    """Write a sandbox's document, signed."""
    name = names.metadata_name(document.sandbox_id)
    stores.metadata.write(name, stores.signer.sign(name, metadata.encode(document)))
