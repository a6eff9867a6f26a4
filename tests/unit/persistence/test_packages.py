"""The names and versions of the packages that files belong to."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox_provisioner.persistence.packages import difference, installed, top


@pytest.fixture
def site(tmp_path: Path) -> Path:
    site = tmp_path / "site-packages"
    files = {
        "Fast_Lib-1.0.dist-info": "fast_lib/core.so,,\n",
        "pillow-11.2.1.dist-info": "PIL/_imaging.so,sha256=x,1\npillow-11.2.1.dist-info/METADATA,,\n",
        "no_record-1.dist-info": None,
        "unrelated": None,
    }
    for name, record in files.items():
        (site / name).mkdir(parents=True)
        if record is not None:
            (site / name / "RECORD").write_text(record)
    return site


def test_package_is_found_by_name_or_by_list_of_files(site: Path) -> None:
    files = [f"{site}/fast_lib/core.so", f"{site}/PIL/_imaging.so", f"{site}/unknown/a.so", "/usr/lib/libc.so.6"]
    assert installed(files) == {f"{site}/fast_lib": "Fast_Lib 1.0", f"{site}/PIL": "pillow 11.2.1"}


def test_missing_folder_has_no_packages(tmp_path: Path) -> None:
    assert installed([f"{tmp_path}/site-packages/a/b.so"]) == {}


@pytest.mark.parametrize(
    ("file", "found"),
    [
        ("/env/site-packages/numpy/core/a.so", "/env/site-packages/numpy"),
        ("/env/site-packages/single.so", "/env/site-packages/single.so"),
        ("/site-packages/x/dist-packages/y/z.so", "/site-packages/x/dist-packages/y"),
        ("/env/site-packages", ""),
        ("/usr/lib/a.so", ""),
    ],
)
def test_place_of_package(file: str, found: str) -> None:
    assert top(file) == found


@pytest.mark.parametrize(
    ("before", "now", "remark"),
    [
        ("numpy 1.26.4", "numpy 2.0.1", " (numpy 1.26.4 is now numpy 2.0.1)"),
        ("numpy 1.26.4", "numpy 1.26.4", " (a part of numpy 1.26.4)"),
        ("numpy 1.26.4", "", " (a part of numpy 1.26.4)"),
        ("", "numpy 2.0.1", " (a part of numpy 2.0.1)"),
        ("", "", ""),
    ],
)
def test_remark_names_both_versions(before: str, now: str, remark: str) -> None:
    place = "/env/site-packages/numpy"
    known = [{place: package} if package else {} for package in (before, now)]
    assert difference(*known, f"{place}/core/a.so") == remark
