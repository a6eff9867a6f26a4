"""Test the problem details of exceptions: they match the schema and contain no path of the server."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from tornado.web import HTTPError

from sandbox_provisioner import errors
from sandbox_provisioner.errors import BadRequestError, ConfigurationError, SandboxError, subclasses
from sandbox_provisioner.errors.redaction import without_paths
from sandbox_provisioner.server.openapi import check
from sandbox_provisioner.server.problem_details import describe

SECRET = "/home/me/my files/storage"
PROBLEM = {"$ref": "#/components/schemas/Problem"}
ARGUMENTS: dict[str, Any] = {
    "problem": f"{SECRET} is not there, nor is '{SECRET}/a', nor (/root/x.json), nor file:///etc/y.",
    "remedy": 'Look into "/var/lib/my jupyter/z" or /srv/w.',
    "argv": ["runsc"],
    "returncode": 1,
    "words": "open /run/a/b.sock: no such file",
    "errno": None,
    "expected": 3,
    "owner": "Jupyter server 1 on host",
    "reasons": ["/usr/lib/libc.so.6 has changed"],
    "known": ["one", "two"],
    "matching": ["one", "two"],
    "previous": True,
    "setting": "SANDBOX_ID",
    "storage": "local",
    "sandbox_id": "box",
    "name": "sandboxes/box/metadata.json",
    "wanted": "box",
    "action": "wake",
    "state": "running",
    "reason": "it expired",
    "version": "1",
}


KINDS = [kind for kind in subclasses() if kind.__module__ == errors.__name__]


def example(kind: type[SandboxError]) -> SandboxError:
    """Return an exception with a path in every text argument."""
    names = [name for name in inspect.signature(kind).parameters if name not in ("args", "kwargs")]
    return kind(**{name: ARGUMENTS.get(name, SECRET) for name in names})


def test_signature_problem_has_remedy_without_path() -> None:
    error = errors.SignatureError.other_key("sandboxes/box/metadata.json", SECRET, "a" * 16, "b" * 16)
    body = describe(error)
    assert body["variable"] == "SANDBOX_SIGNING_KEY"
    assert "sandbox/key in Jupyter's data folder" in body["remedy"]
    assert "`jupyter sandbox doctor`" in body["remedy"]
    assert SECRET not in str(body)


@pytest.mark.parametrize(
    ("error", "setting"),
    [
        (errors.StorageNotHereError("box", "local", SECRET, "/other"), "SANDBOX_STORAGE_DIR"),
        (errors.StorageNotHereError("box", "mounted", SECRET, "/other"), "SANDBOX_METADATA_MOUNT_PATH"),
        (errors.StorageNotHereError("box", "gcs", "gs://bucket", "/other"), "SANDBOX_METADATA_BUCKET"),
        (errors.DiskFullError(f"could not write in {SECRET}"), "SANDBOX_STORAGE_DIR"),
    ],
)
def test_problem_with_hidden_path_names_the_setting(error: SandboxError, setting: str) -> None:
    body = describe(error)
    assert setting in body["remedy"]
    assert SECRET not in str(body)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_problems_contain_no_path(kind: type[SandboxError]) -> None:
    error = example(kind)
    for text in (str(describe(error)), without_paths(error)):
        for part in ("/home", "files/storage", "/root", "/etc", "/var", "jupyter/z", "/srv", "/run", "/usr"):
            assert part not in text


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_problems_match_the_schema(kind: type[SandboxError]) -> None:
    problem = describe(example(kind))
    check(PROBLEM, problem, "problem")
    assert problem["type"].startswith("urn:sandbox:")
    assert problem["detail"]


def test_problem_names_the_missing_variable() -> None:
    problem = describe(ConfigurationError("SANDBOX_LOCK_BUCKET", "It is not set.", "Set it."))
    assert problem == {
        "type": "urn:sandbox:not-set-up",
        "title": "Not set up",
        "status": 400,
        "detail": "It is not set.",
        "remedy": "Set it.",
        "variable": "SANDBOX_LOCK_BUCKET",
    }


def test_text_without_paths_is_unchanged() -> None:
    text = "Set a/b.ipynb, 1/2, and/or `jupyter sandbox list`; see https://gvisor.dev/docs."
    assert without_paths(BadRequestError(text)) == text


def test_forbidden_gives_no_reason() -> None:
    told = describe(HTTPError(403, "User is not authorized to read on resource: sandboxes."))
    assert told == describe(HTTPError(403)) == describe(None, 403)


def test_unexpected_errors_are_not_disclosed() -> None:
    problem = describe(ValueError(f"{SECRET} and a password"))
    assert problem["status"] == 500
    assert "password" not in str(problem)
