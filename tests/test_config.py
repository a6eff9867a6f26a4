"""Settings from environment variables: what counts as an answer, and what is refused by name."""

from __future__ import annotations

import pytest

from sandbox_provisioner import config
from sandbox_provisioner.errors import ConfigurationError


def test_text_is_the_value_as_it_stands() -> None:
    assert config.text("SANDBOX_X", environ={"SANDBOX_X": " a, b "}) == " a, b "
    assert config.text("SANDBOX_X", "otherwise", {}) == "otherwise"
    assert config.text("SANDBOX_X", environ={}) == ""


def test_the_environment_is_read_when_asked_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_X", "late")
    assert config.text("SANDBOX_X") == "late"
    assert config.words("SANDBOX_X") == ["late"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [("", []), ("one", ["one"]), ("one,two", ["one", "two"]), (" one , ,two, ", ["one", "two"]), ("a b", ["a b"])],
)
def test_words_are_separated_by_commas(value: str, expected: list[str]) -> None:
    assert config.words("SANDBOX_X", {"SANDBOX_X": value}) == expected


def test_no_words_where_nothing_is_set() -> None:
    assert config.words("SANDBOX_X", {}) == []


@pytest.mark.parametrize("value", ["1", "true", "yes", "on", "YES", " True "])
def test_a_flag_that_is_set(value: str) -> None:
    assert config.flag("SANDBOX_X", {"SANDBOX_X": value}) is True


@pytest.mark.parametrize("value", ["0", "false", "no", "off", "", "No"])
def test_a_flag_that_is_not_set(value: str) -> None:
    assert config.flag("SANDBOX_X", {"SANDBOX_X": value}) is False
    assert config.flag("SANDBOX_X", {}) is False


@pytest.mark.parametrize("value", ["maybe", "2", "yes please"])
def test_a_flag_that_is_neither_is_refused_by_name(value: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        config.flag("SANDBOX_X", {"SANDBOX_X": value})
    assert refusal.value.setting == "SANDBOX_X"
    assert "SANDBOX_X" in str(refusal.value)
    assert repr(value) in str(refusal.value)
    assert refusal.value.remedy


@pytest.mark.parametrize(("environ", "expected"), [({}, "b"), ({"SANDBOX_X": ""}, "b"), ({"SANDBOX_X": "a"}, "a")])
def test_a_choice_or_its_default(environ: dict[str, str], expected: str) -> None:
    assert config.choice("SANDBOX_X", ("a", "b"), "b", environ) == expected


def test_a_choice_that_there_is_not_names_those_there_are() -> None:
    with pytest.raises(ConfigurationError) as refusal:
        config.choice("SANDBOX_X", ("a", "b"), "a", {"SANDBOX_X": "c"})
    assert refusal.value.setting == "SANDBOX_X"
    assert "'c'" in str(refusal.value)
    assert "a or b" in refusal.value.remedy
