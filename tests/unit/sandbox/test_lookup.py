"""Test the lookup of a sandbox by its id, the beginning of its id, or its notebook."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandbox_provisioner.errors import AmbiguousSandboxError, UnknownSandboxError, UnreadableRecordError
from sandbox_provisioner.sandbox.lookup import look_up


@dataclass(frozen=True)
class Known:
    """A sandbox that has only an id and a notebook path."""

    id: str
    sandbox_id: str = ""
    notebook_path: str | None = None


FIRST = Known("5f0c1111-0000-4000-8000-000000000001", "mine", "/home/me/a.ipynb")
SECOND = Known("5f0c2222-0000-4000-8000-000000000002", "theirs", "/home/me/b.ipynb")
KNOWN = (FIRST, SECOND)


@pytest.mark.parametrize("wanted", [FIRST.id, "mine", "5f0c1", "5F0C1111-00", "/home/me/a.ipynb"])
def test_id_prefix_and_notebook(wanted: str) -> None:
    assert look_up(wanted, KNOWN) == FIRST


def test_notebook_relative_to_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = Known("1", notebook_path=os.path.join(os.getcwd(), "a.ipynb"))
    assert look_up("a.ipynb", [notebook, SECOND]) == notebook


def test_complete_id_precedes_prefix() -> None:
    short = Known("other", "5f0c")
    assert look_up("5f0c", [*KNOWN, short]) == short


def test_several_matches() -> None:
    with pytest.raises(AmbiguousSandboxError) as raised:
        look_up("5f0c", KNOWN)
    assert raised.value.matching == (FIRST.id, SECOND.id)


def test_file_name_in_any_folder() -> None:
    assert look_up("b.ipynb", KNOWN) == SECOND


def test_file_name_in_several_folders() -> None:
    other = Known("7", notebook_path="/home/you/a.ipynb")
    with pytest.raises(AmbiguousSandboxError, match=r"\(/home/me/a.ipynb\), 7 \(/home/you/a.ipynb\)\. Use the full id"):
        look_up("a.ipynb", [*KNOWN, other])


def test_file_in_the_working_folder_precedes_the_same_name_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.ipynb").touch()
    with pytest.raises(UnknownSandboxError):
        look_up("a.ipynb", KNOWN)


@pytest.mark.parametrize("wanted", ["", "-", "nonsense", "c.ipynb", "me/a.ipynb"])
def test_no_match(wanted: str) -> None:
    with pytest.raises(UnknownSandboxError) as raised:
        look_up(wanted, KNOWN)
    assert raised.value.known == (FIRST.id, SECOND.id)


def test_whole_id() -> None:
    assert look_up("mine", KNOWN, whole_id=True) == FIRST
    for wanted in ("5f0c1", "/home/me/a.ipynb"):
        with pytest.raises(UnknownSandboxError):
            look_up(wanted, KNOWN, whole_id=True)


def test_unreadable_record() -> None:
    error = UnreadableRecordError("/registry/77aa0000-0000-4000-8000-000000000003.json", "it is no JSON")
    with pytest.raises(UnreadableRecordError):
        look_up("77aa", KNOWN, [error])
    assert look_up("mine", KNOWN, [error]) == FIRST
