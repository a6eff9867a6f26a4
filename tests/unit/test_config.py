"""Test settings from environment variables: valid values, and errors that name the variable and its value."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traitlets import Bool, Enum, Float, HasTraits, Int, List, Unicode

from sandbox_provisioner import config
from sandbox_provisioner.config import GCSConfig, Place
from sandbox_provisioner.errors import ConfigurationError

LOCK, METADATA = "SANDBOX_LOCK_BUCKET", "SANDBOX_METADATA_BUCKET"
CHECKPOINT, CHECKPOINT_MOUNT = "SANDBOX_CHECKPOINT_BUCKET", "SANDBOX_CHECKPOINT_MOUNT_PATH"
STEMS = ["SANDBOX_METADATA", "SANDBOX_LOCK", "SANDBOX_CHECKPOINT", "FILESYSTEM_SNAPSHOT"]


def test_environment_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_X", "late")
    assert config.words("SANDBOX_X") == ["late"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [("", []), ("one", ["one"]), ("one,two", ["one", "two"]), (" one , ,two, ", ["one", "two"]), ("a b", ["a b"])],
)
def test_words_are_separated_by_commas(value: str, expected: list[str]) -> None:
    assert config.words("SANDBOX_X", {"SANDBOX_X": value}) == expected


def test_words_of_an_unset_variable() -> None:
    assert config.words("SANDBOX_X", {}) == []


@pytest.mark.parametrize("value", ["1", "true", "yes", "on", "YES", " True "])
def test_flag_that_means_yes(value: str) -> None:
    assert config.flag("SANDBOX_X", {"SANDBOX_X": value}) is True


@pytest.mark.parametrize("value", ["0", "false", "no", "off", "", "No"])
def test_flag_that_means_no(value: str) -> None:
    assert config.flag("SANDBOX_X", {"SANDBOX_X": value}) is False
    assert config.flag("SANDBOX_X", {}) is False


@pytest.mark.parametrize("value", ["Maybe", "2", " yes please"])
def test_invalid_flag_is_refused_by_name(value: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        config.flag("SANDBOX_X", {"SANDBOX_X": value})
    assert refusal.value.setting == "SANDBOX_X"
    assert "SANDBOX_X" in str(refusal.value)
    assert repr(value) in str(refusal.value)
    assert refusal.value.remedy


@pytest.mark.parametrize(("environ", "expected"), [({}, "b"), ({"SANDBOX_X": ""}, "b"), ({"SANDBOX_X": "a"}, "a")])
def test_choice_or_its_default(environ: dict[str, str], expected: str) -> None:
    assert config.choice("SANDBOX_X", ("a", "b"), "b", environ) == expected


def test_error_for_an_invalid_choice_names_the_valid_ones() -> None:
    with pytest.raises(ConfigurationError) as refusal:
        config.choice("SANDBOX_X", ("a", "b"), "a", {"SANDBOX_X": "c"})
    assert refusal.value.setting == "SANDBOX_X"
    assert "'c'" in str(refusal.value)
    assert "a or b" in refusal.value.remedy


def gcs(*variables: str) -> GCSConfig:
    """Return the configuration of a server where these variables have valid values."""
    values = {name: "/" if name.endswith("_MOUNT_PATH") else "some-bucket" for name in variables}
    return GCSConfig.from_environment(Path("/default"), values)


def refusal_of(environ: dict[str, str]) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as refusal:
        GCSConfig.from_environment(Path("/default"), environ)
    return refusal.value


def test_embedded_storage_supports_everything(tmp_path: Path) -> None:
    settings = GCSConfig.from_environment(tmp_path, {})
    assert settings == GCSConfig(folder=tmp_path, signing_key="")
    assert settings.can_persist() and settings.can_checkpoint() and settings.can_snapshot()


def test_empty_variable_counts_as_unset(tmp_path: Path) -> None:
    assert GCSConfig.from_environment(tmp_path, {LOCK: "", "SANDBOX_STORAGE_DIR": ""}) == GCSConfig(
        folder=tmp_path, signing_key=""
    )


def test_storage_folder_need_not_exist(tmp_path: Path) -> None:
    settings = GCSConfig.from_environment(Path("/default"), {"SANDBOX_STORAGE_DIR": str(tmp_path / "new")})
    assert settings.folder == tmp_path / "new"
    assert not (tmp_path / "new").exists()


def test_links_in_the_storage_folder_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    settings = GCSConfig.from_environment(Path("/default"), {"SANDBOX_STORAGE_DIR": f"{tmp_path}//link/"})
    assert settings.folder == tmp_path / "real"


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("ending", ["_BUCKET", "_MOUNT_PATH"])
def test_storage_with_a_bucket_or_mount_path_is_not_embedded(stem: str, ending: str) -> None:
    assert gcs().embedded
    assert not gcs(stem + ending).embedded


def test_configuration_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {METADATA: "meta.data", LOCK: "lo_ck", CHECKPOINT_MOUNT: str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SANDBOX_OBJECT_PREFIX", "team/1/")
    assert GCSConfig.from_environment(tmp_path) == GCSConfig(
        folder=tmp_path,
        metadata=Place("SANDBOX_METADATA", bucket="meta.data"),
        locks=Place("SANDBOX_LOCK", bucket="lo_ck"),
        checkpoints=Place("SANDBOX_CHECKPOINT", mount=tmp_path),
        prefix="team/1",
    )


CAPABILITIES = [
    # variables that are set, (can persist, can checkpoint, can snapshot)
    ([METADATA], (False, False, False)),
    ([LOCK], (False, False, False)),
    ([METADATA, LOCK], (True, False, False)),
    (["SANDBOX_METADATA_MOUNT_PATH", "SANDBOX_LOCK_MOUNT_PATH"], (True, False, False)),
    ([METADATA, LOCK, CHECKPOINT], (True, True, False)),
    ([METADATA, LOCK, CHECKPOINT_MOUNT], (True, True, False)),
    ([CHECKPOINT], (False, False, False)),
    (["FILESYSTEM_SNAPSHOT_BUCKET"], (False, False, True)),
    (["FILESYSTEM_SNAPSHOT_MOUNT_PATH"], (False, False, True)),
]


@pytest.mark.parametrize(("variables", "able"), CAPABILITIES)
def test_features_follow_from_the_variables(variables: list[str], able: tuple[bool, ...]) -> None:
    settings = gcs(*variables)
    assert able == (
        settings.can_persist(),
        settings.can_checkpoint(),
        settings.can_snapshot(),
    )


ALL = {LOCK, METADATA, CHECKPOINT}
PLAIN = {"gcs_sandbox_id": "box"}
HANDOFF = {"gcs_sandbox_id": "box", "enable_handoff": True}
IDLE = {"gcs_sandbox_id": "box", "enable_checkpoint_at_idle": True}
TABLE = [
    # request, variables that are set, missing variable
    ({}, set(), None),
    ({}, {CHECKPOINT}, None),
    (PLAIN, {LOCK, METADATA}, None),
    (PLAIN, ALL, None),
    (PLAIN, {METADATA}, LOCK),
    (PLAIN, {LOCK}, METADATA),
    (PLAIN, set(), LOCK),
    *[
        row
        for asked in (HANDOFF, IDLE, HANDOFF | IDLE)
        for row in [
            (asked, ALL, None),
            (asked, {LOCK, METADATA, CHECKPOINT_MOUNT}, None),
            (asked, {LOCK, METADATA}, CHECKPOINT),
            (asked, {LOCK, CHECKPOINT}, METADATA),
            (asked, {METADATA, CHECKPOINT}, LOCK),
            (asked, set(), LOCK),
        ]
    ],
]


@pytest.mark.parametrize(("asked", "variables", "missing"), TABLE)
def test_required_variables_of_each_request(
    asked: dict[str, str | bool], variables: set[str], missing: str | None
) -> None:
    settings = gcs(*variables)
    if missing is None:
        settings.require(**asked)  # type: ignore[arg-type]
        return
    with pytest.raises(ConfigurationError) as refusal:
        settings.require(**asked)  # type: ignore[arg-type]
    assert refusal.value.setting == missing
    assert missing in refusal.value.problem


@pytest.mark.parametrize("stem", ["SANDBOX_LOCK", "SANDBOX_METADATA"])
def test_gcs_sandbox_id_needs_buckets(stem: str) -> None:
    others = {LOCK, METADATA} - {f"{stem}_BUCKET"}
    with pytest.raises(ConfigurationError) as refusal:
        gcs(f"{stem}_MOUNT_PATH", *others).require("box")
    assert refusal.value.setting == f"{stem}_BUCKET"
    assert "MOUNT_PATH" not in str(refusal.value)


def test_error_names_all_missing_variables() -> None:
    with pytest.raises(ConfigurationError) as refusal:
        gcs().require("box", enable_handoff=True)
    assert re.findall(r"\w+_(?:BUCKET|MOUNT_PATH)", refusal.value.problem) == [
        LOCK,
        METADATA,
        CHECKPOINT,
        CHECKPOINT_MOUNT,
    ]


@pytest.mark.parametrize("flags", [{}, {"enable_handoff": True}, {"enable_checkpoint_at_idle": True}])
def test_sandbox_id_works_with_any_storage(flags: dict[str, bool]) -> None:
    gcs().require(sandbox_id="box", **flags)
    gcs("SANDBOX_METADATA_MOUNT_PATH", LOCK, CHECKPOINT).require(sandbox_id="box", **flags)
    with pytest.raises(ConfigurationError) as refusal:
        gcs(METADATA, CHECKPOINT).require(sandbox_id="box", **flags)
    assert refusal.value.setting == LOCK
    assert "SANDBOX_LOCK_MOUNT_PATH" in refusal.value.problem


GOOD_BUCKETS = ["abc", "a-b_c", "1.2.3", "my.bucket.example", "x" * 63, ".".join(["x" * 55] * 3)]
BAD_BUCKETS = [
    "ab", "x" * 64, ".".join(["x" * 62] * 4), "Abc", "-abc", "abc-", "a..b", ".abc", "a/b", "gs://abc", "a b", "abc\n",
    "192.168.5.4", "büro", "../abc", " ",
]  # fmt: skip


@pytest.mark.parametrize("name", GOOD_BUCKETS)
def test_valid_bucket_name(name: str) -> None:
    assert GCSConfig.from_environment(Path("/default"), {LOCK: name}).locks.bucket == name


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("name", BAD_BUCKETS, ids=repr)
def test_invalid_bucket_name_is_refused(stem: str, name: str) -> None:
    refusal = refusal_of({f"{stem}_BUCKET": name})
    assert refusal.setting == f"{stem}_BUCKET"
    assert refusal.setting in refusal.problem and repr(name) in refusal.problem
    assert refusal.remedy


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("path", ["relative", "./here", "~/mount", "/not/there", "/dev/null", "/" + "x" * 5000])
def test_mount_path_must_be_an_existing_folder(stem: str, path: str) -> None:
    refusal = refusal_of({f"{stem}_MOUNT_PATH": path})
    assert refusal.setting == f"{stem}_MOUNT_PATH"
    assert refusal.setting in refusal.problem and repr(path) in refusal.problem


def test_circular_link_as_mount_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "round").symlink_to("round")
    assert refusal_of({CHECKPOINT_MOUNT: str(tmp_path / "round")}).setting == CHECKPOINT_MOUNT


@pytest.mark.parametrize("path", ["relative", "~/storage", "/dev/null"])
def test_invalid_storage_folder_is_refused(path: str) -> None:
    refusal = refusal_of({"SANDBOX_STORAGE_DIR": path})
    assert refusal.setting == "SANDBOX_STORAGE_DIR"
    assert repr(path) in refusal.problem


@pytest.mark.parametrize(
    "prefix", ["/a", "a//b", "..", "a/../b", ".a", "a/.b", "a b", "a\\b", "é", "a\n", "/", "x" * 201]
)
def test_invalid_object_prefix_is_refused(prefix: str) -> None:
    refusal = refusal_of({"SANDBOX_OBJECT_PREFIX": prefix})
    assert refusal.setting == "SANDBOX_OBJECT_PREFIX"
    assert repr(prefix) in refusal.problem


VALUES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=80)
VARIABLES = [stem + ending for stem in STEMS for ending in ("_BUCKET", "_MOUNT_PATH")]


@given(st.dictionaries(st.sampled_from([*VARIABLES, "SANDBOX_OBJECT_PREFIX", "SANDBOX_STORAGE_DIR"]), VALUES))
def test_any_environment_is_accepted_or_refused_by_name(environ: dict[str, str]) -> None:
    try:
        settings = GCSConfig.from_environment(Path("/default"), environ)
    except ConfigurationError as refusal:
        assert repr(environ[refusal.setting]) in refusal.problem
    else:
        assert settings.folder.is_absolute()


@pytest.mark.parametrize(("value", "expected"), [("", 3), ("0", 0), ("12", 12)])
def test_count_is_a_whole_number(value: str, expected: int) -> None:
    assert config.count("SANDBOX_X", 3, {"SANDBOX_X": value}) == expected


@pytest.mark.parametrize("value", ["-1", "1.5", "two", " 1"])
def test_invalid_count_is_refused_by_name(value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"SANDBOX_X is {value!r}, which is not a whole number"):
        config.count("SANDBOX_X", 3, {"SANDBOX_X": value})


class Owner(HasTraits):
    color = config.setting("SANDBOX_X_COLOR", Enum(("red", "blue"), help="The color."))
    count = config.setting("SANDBOX_X_COUNT", Int(7, min=1, help="The count."))
    names = config.setting("SANDBOX_X_NAMES", List(Unicode(), help="The names."))
    on = config.setting("SANDBOX_X_ON", Bool(True, help="The switch."))
    wait = config.setting("SANDBOX_X_WAIT", Float(1.5, help="The time."))
    where = config.setting("SANDBOX_X_WHERE", Unicode("here", help="The place."))


def test_setting_reads_its_variable_for_each_object(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Owner()
    assert (before.color, before.count, before.names, before.on, before.wait) == ("red", 7, [], True, 1.5)
    for name, value in (("COLOR", "blue"), ("COUNT", "8"), ("NAMES", "a, b"), ("ON", "0"), ("WAIT", "2")):
        monkeypatch.setenv(f"SANDBOX_X_{name}", value)
    after = Owner(wait=3.0)
    assert (after.color, after.count, after.names, after.on, after.wait) == ("blue", 8, ["a", "b"], False, 3.0)
    assert after.where == "here"
    monkeypatch.setenv("SANDBOX_X_COLOR", "green")
    with pytest.raises(ConfigurationError, match="red or blue"):
        _ = Owner().color


def test_help_of_a_setting_names_its_variable() -> None:
    traits = Owner.class_traits(config=True)
    assert traits["names"].help == "The names. Environment, comma-separated: SANDBOX_X_NAMES"
    assert traits["wait"].help == "The time. Environment: SANDBOX_X_WAIT"


@pytest.fixture
def no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be a user without a home, with a data folder that cannot be created, and return the folder used as /tmp."""
    monkeypatch.setenv("HOME", "/")
    monkeypatch.setenv("JUPYTER_DATA_DIR", "/dev/null/data")
    monkeypatch.setattr(config, "TMP", str(tmp_path))
    tmp_path.chmod(0o1777)
    return tmp_path


def test_user_without_a_home_has_a_private_folder_in_tmp(no_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = config.own_folder()
    assert config.own_folder() == found and found.parent.parent == no_home
    assert stat.S_IMODE(found.parent.stat().st_mode) == 0o700
    (warning,) = caplog.messages
    assert str(found.parent) in warning and "JUPYTER_DATA_DIR" in warning


@pytest.mark.parametrize("folder_mode, tmp_mode", [(0o777, 0o1777), (0o700, 0o777)])
def test_folder_of_a_user_without_a_home_must_be_private(no_home: Path, folder_mode: int, tmp_mode: int) -> None:
    config.own_folder().parent.chmod(folder_mode)
    no_home.chmod(tmp_mode)
    with pytest.raises(ConfigurationError, match="Set JUPYTER_DATA_DIR to a folder of your own"):
        config.own_folder()


def test_user_with_a_home_has_no_folder_in_tmp(no_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/some")
    assert config.own_folder() == Path("/dev/null/data/sandbox")
    assert list(no_home.iterdir()) == []
