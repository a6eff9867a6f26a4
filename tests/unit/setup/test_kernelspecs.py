"""Test twin kernelspecs: creation, refresh, refusal and removal."""

from __future__ import annotations

import json
import os
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from machines import empty_machine

from sandbox_provisioner.errors import SandboxError
from sandbox_provisioner.kernel.settings import OLD_DEFAULTS
from sandbox_provisioner.setup import kernelspecs

SPEC = {
    "argv": ["python", "-m", "some_kernel", "-f", "{connection_file}"],
    "display_name": "Some Kernel ☃",
    "language": "some",
    "interrupt_mode": "message",
    "env": {"SOME": "thing"},
    "metadata": {"debugger": True},
    "kernel_protocol_version": "5.5",
}


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The empty kernels folder of this test's user."""
    return empty_machine(monkeypatch, tmp_path) / "kernels"


def add(folder: Path, name: str, **changes: Any) -> Path:
    place = folder / name
    place.mkdir(parents=True)
    (place / "kernel.json").write_text(json.dumps({**SPEC, **changes}))
    return place


def read(place: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((place / "kernel.json").read_text())
    return content


def install(name: str, folder: Path) -> kernelspecs.Kernel:
    (origin,) = kernelspecs.origins([name])
    return kernelspecs.install_twin(origin, folder)


def test_twin_copies_kernelspec_and_sets_provisioner(folder: Path) -> None:
    add(folder, "some")
    twin = install("some", folder)
    assert twin.name == "some-sandbox"
    assert read(folder / "some-sandbox") == {
        **SPEC,
        "display_name": "Some Kernel ☃ (sandbox)",
        "metadata": {
            "debugger": True,
            "kernel_provisioner": {"provisioner_name": "sandbox-provisioner", "config": {}},
            "sandbox_twin_of": "some",
            "sandbox_twin_version": 2,
        },
    }


def test_jupyter_finds_the_twin(folder: Path) -> None:
    add(folder, "some")
    install("some", folder)
    spec = KernelSpecManager().get_kernel_spec("some-sandbox")
    assert spec.display_name == "Some Kernel ☃ (sandbox)"
    assert spec.argv == SPEC["argv"]
    assert (spec.interrupt_mode, spec.env) == ("message", {"SOME": "thing"})


def test_resources_are_copied(folder: Path) -> None:
    place = add(folder, "some")
    (place / "logo-64x64.png").write_bytes(b"\x89PNG")
    (place / "bin").mkdir()
    (place / "bin" / "start").write_text("#!/bin/sh\n")
    (place / "bin" / "start").chmod(0o755)
    (place / "dangling").symlink_to("nowhere")
    install("some", folder)
    twin = folder / "some-sandbox"
    assert (twin / "logo-64x64.png").read_bytes() == b"\x89PNG"
    assert os.access(twin / "bin" / "start", os.X_OK)
    assert not (twin / "dangling").is_symlink()


def test_twin_of_read_only_original_can_be_refreshed_and_removed(folder: Path) -> None:
    place = add(folder, "some")
    (place / "more").mkdir()
    (place / "more" / "file").touch(mode=0o444)
    for path in (place / "kernel.json", place / "more", place):
        path.chmod(path.stat().st_mode & ~0o222)
    install("some", folder)
    install("some", folder)
    assert kernelspecs.remove_twins(folder) == [folder / "some-sandbox"]
    place.chmod(0o755)
    (place / "more").chmod(0o755)


def test_refresh_keeps_the_users_settings(folder: Path) -> None:
    place = add(folder, "some")
    (place / "old.png").touch()
    install("some", folder)
    twin = read(folder / "some-sandbox")
    twin["metadata"]["kernel_provisioner"]["config"] = {"network": "host"}
    (folder / "some-sandbox" / "kernel.json").write_text(json.dumps(twin))
    (place / "old.png").rename(place / "new.png")
    (place / "kernel.json").write_text(json.dumps({**SPEC, "display_name": "Newer"}))
    install("some", folder)
    files = sorted(path.name for path in (folder / "some-sandbox").iterdir())
    assert files == ["kernel.json", "logo-svg.svg", "new.png"]
    refreshed = read(folder / "some-sandbox")
    assert refreshed["display_name"] == "Newer (sandbox)"
    assert refreshed["metadata"]["kernel_provisioner"]["config"] == {"network": "host"}


@pytest.mark.parametrize(
    ("seconds", "settings"),
    [
        (None, {}),
        (60.0, {"enable_checkpoint_at_idle": True, "idle_timeout": 60.0}),
        (0.0, {"enable_checkpoint_at_idle": False}),
    ],
)
def test_idle_timeout_is_set_by_the_user(folder: Path, seconds: float | None, settings: dict[str, Any]) -> None:
    add(folder, "some")
    (origin,) = kernelspecs.origins(["some"])
    twin = kernelspecs.install_twin(origin, folder, kernelspecs.idle_settings(seconds))
    assert twin.config == settings


def test_defaults_of_the_first_version_are_removed(folder: Path) -> None:
    add(folder, "some")
    install("some", folder)
    old = read(folder / "some-sandbox")
    del old["metadata"]["sandbox_twin_version"]
    old["metadata"]["kernel_provisioner"]["config"] = {**OLD_DEFAULTS, "network": "host"}
    (folder / "some-sandbox" / "kernel.json").write_text(json.dumps(old))
    assert install("some", folder).config == {"network": "host"}
    assert read(folder / "some-sandbox")["metadata"]["kernel_provisioner"]["config"] == {"network": "host"}


def test_idle_timeout_of_the_user_is_kept_even_if_it_is_the_old_default(folder: Path) -> None:
    add(folder, "some")
    (origin,) = kernelspecs.origins(["some"])
    kernelspecs.install_twin(origin, folder, kernelspecs.idle_settings(1800.0))
    assert install("some", folder).config == OLD_DEFAULTS


def test_nothing_else_is_left_in_the_data_folder(folder: Path) -> None:
    add(folder, "some")
    install("some", folder)
    install("some", folder)
    assert [path.name for path in folder.parent.iterdir()] == ["kernels"]
    assert sorted(path.name for path in folder.iterdir()) == ["some", "some-sandbox"]


def test_handwritten_kernelspec_is_not_overwritten(folder: Path) -> None:
    add(folder, "some")
    mine = add(folder, "some-sandbox", display_name="Mine")
    with pytest.raises(SandboxError, match="was not made by `jupyter sandbox setup`"):
        install("some", folder)
    assert read(mine)["display_name"] == "Mine"


def test_read_only_folder_is_an_error(folder: Path, tmp_path: Path) -> None:
    add(folder, "some")
    (tmp_path / "file").touch()
    with pytest.raises(SandboxError, match="could not be written"):
        install("some", tmp_path / "file" / "kernels")


def test_failed_refresh_keeps_the_old_twin(folder: Path) -> None:
    place = add(folder, "some")
    install("some", folder)
    os.mkfifo(place / "pipe")
    with pytest.raises(SandboxError, match="could not be written"):
        install("some", folder)
    assert read(folder / "some-sandbox")["metadata"]["sandbox_twin_of"] == "some"
    assert [path.name for path in folder.parent.iterdir()] == ["kernels"]


def test_sandboxed_and_foreign_kernels_get_no_twin(folder: Path) -> None:
    add(folder, "some")
    add(folder, "local", metadata={"kernel_provisioner": {"provisioner_name": "local-provisioner"}})
    add(folder, "mine", metadata={"kernel_provisioner": {"provisioner_name": "sandbox-provisioner"}})
    add(folder, "far", metadata={"kernel_provisioner": {"provisioner_name": "cluster-provisioner"}})
    install("some", folder)
    names = {kernel.name for kernel in kernelspecs.origins()}
    assert {"some", "local"} <= names
    assert not names & {"mine", "far", "some-sandbox"}
    with pytest.raises(SandboxError, match="cluster-provisioner"):
        kernelspecs.origins(["far"])


def test_twin_of_built_in_python_kernel(folder: Path) -> None:
    twin = install("python3", folder)
    argv = twin.spec["argv"]
    assert argv[1:3] == ["-m", "ipykernel_launcher"]
    assert twin.display_name == "Python 3 (sandbox)"
    assert (folder / "python3-sandbox" / "logo-64x64.png").is_file()


def test_names_in_menus_are_different(folder: Path) -> None:
    for name in ("one", "three", "two"):
        add(folder, name, display_name="Some (ipykernel)")
    names = ["Some (sandbox)", "Some (ipykernel) (sandbox)", "Some (ipykernel) (two-sandbox)"]
    for _ in range(2):
        assert [install(name, folder).display_name for name in ("one", "three", "two")] == names


def test_refresh_shortens_the_name_of_an_older_twin(folder: Path) -> None:
    add(folder, "some", display_name="Some (ipykernel)")
    twin = install("some", folder)
    (twin.folder / "kernel.json").write_text(json.dumps({**twin.spec, "display_name": "Some (ipykernel) (sandbox)"}))
    install("some", folder)
    assert read(twin.folder)["display_name"] == "Some (sandbox)"


@pytest.mark.parametrize("logo", ["logo-svg.svg", "logo-64x64.png", ""])
def test_logo_shows_a_shield_on_the_original(folder: Path, logo: str) -> None:
    place = add(folder, "some")
    if logo:
        (place / logo).write_bytes(b"<svg/>")
    for _ in range(2):  # a refresh draws one shield, not two
        picture = ElementTree.parse(install("some", folder).folder / "logo-svg.svg").getroot()
        embedded = [
            image.get("href", "").partition(",")[2] for image in picture.iter("{http://www.w3.org/2000/svg}image")
        ]
        assert [b64decode(image) for image in embedded] == ([b"<svg/>"] if logo else [])


def test_unknown_kernel_is_an_error_that_lists_known_kernels(folder: Path) -> None:
    add(folder, "some")
    with pytest.raises(SandboxError, match="no kernel named other") as caught:
        kernelspecs.origins(["some", "other"])
    assert "some" in caught.value.remedy


@pytest.mark.parametrize("content", ["", "[]", "{", '{"metadata": 1}', '{"metadata": {"kernel_provisioner": 1}}'])
def test_broken_kernelspec_is_skipped(folder: Path, content: str) -> None:
    add(folder, "some")
    (add(folder, "broken") / "kernel.json").write_text(content)
    assert "some" in {kernel.name for kernel in kernelspecs.origins()}


def test_only_twins_are_removed(folder: Path) -> None:
    stanza = {"kernel_provisioner": {"provisioner_name": "sandbox-provisioner", "config": {}}}
    add(folder, "some")
    add(folder, "other")
    add(folder, "by-hand-sandbox", metadata=stanza)
    install("some", folder)
    install("other", folder)
    assert kernelspecs.remove_twins(folder, ["some"]) == [folder / "some-sandbox"]
    assert kernelspecs.remove_twins(folder) == [folder / "other-sandbox"]
    assert kernelspecs.remove_twins(folder) == []
    assert sorted(path.name for path in folder.iterdir()) == ["by-hand-sandbox", "other", "some"]


def test_twin_can_be_removed_by_its_own_name(folder: Path) -> None:
    add(folder, "some")
    install("some", folder)
    assert kernelspecs.remove_twins(folder, ["some-sandbox"]) == [folder / "some-sandbox"]


def test_removing_from_empty_folder(folder: Path) -> None:
    assert kernelspecs.remove_twins(folder / "nowhere") == []


def test_kernels_folder(folder: Path) -> None:
    assert kernelspecs.kernels_folder(sys_prefix=False) == folder
    assert kernelspecs.kernels_folder(sys_prefix=True) == Path(sys.prefix, "share", "jupyter", "kernels")
