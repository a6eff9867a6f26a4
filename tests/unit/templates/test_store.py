"""Test the store of templates on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox_provisioner.templates.store import FolderMark, Template, TemplateShelf, mark

pytestmark = pytest.mark.user


async def test_image_in_use_is_kept(tmp_path: Path) -> None:
    shelf = TemplateShelf(tmp_path)
    async with shelf.building("k", wait=False) as draft:
        assert draft is not None
        draft.mkdir()
        (draft / "checkpoint.img").write_bytes(b"x")
        template = shelf.publish(Template("k", "key", "2026-01-01T00:00:00+00:00"), draft)
        async with shelf.building("k", wait=False) as other:
            assert other is None
        draft.mkdir()
        assert shelf.drop("k", "another image") is False
    with shelf.using(template) as image:
        assert shelf.drop("k")
        assert (image / "checkpoint.img").exists()
    assert not shelf.drop("k")
    async with shelf.building("k", wait=False):
        pass
    assert not image.exists()
    with pytest.raises(FileNotFoundError), shelf.using(template):
        pass


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"kernel_name": "other", "key": "", "created": ""}'])
def test_invalid_document_is_not_a_template(tmp_path: Path, content: str) -> None:
    (tmp_path / "k").mkdir()
    (tmp_path / "k" / "template.json").write_text(content)
    assert TemplateShelf(tmp_path).get("k") is None
    assert TemplateShelf(tmp_path).list() == []


NOTICED: dict[str, Callable[[Path], object]] = {
    "a module that was searched for": lambda site: (site / "optional.py").touch(),
    "a package that was searched for": lambda site: (site / "optional").mkdir(),
    "a compiled module that was searched for": lambda site: (site / "used.cpython-313-x86_64-linux-gnu.so").touch(),
    "a path file": lambda site: (site / "any.pth").touch(),
    "a loaded file": lambda site: (site / "used.py").write_text("x = 2"),
    "a removed folder": lambda site: site.rename(site.with_name("moved")),
}
IGNORED: dict[str, Callable[[Path], object]] = {
    "another package": lambda site: (site / "unrelated").mkdir(),
    "another package's description": lambda site: (site / "used-2.0.dist-info").mkdir(),
    "a hard link to a loaded file": lambda site: os.link(site / "used.py", site.parent / "in-another-environment.py"),
    "a newer time": lambda site: os.utime(site, (9, 9)),
}


@pytest.mark.parametrize(
    ("change", "noticed"), [*((each, True) for each in NOTICED), *((each, False) for each in IGNORED)]
)
async def test_changes_that_concern_a_template(tmp_path: Path, change: str, noticed: bool) -> None:
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "used.py").write_text("x = 1")
    os.utime(site, (1, 1))
    folder = FolderMark.of(str(site), ["used", "optional"])
    used = str(site / "used.py")
    assert folder is not None
    shelf = TemplateShelf(tmp_path / "shelf")
    async with shelf.building("k", wait=False):
        shelf.publish(
            Template(
                "k", "key", "2026-01-01T00:00:00+00:00", marks={used: mark(used) or []}, folders={str(site): folder}
            )
        )
    template = shelf.get("k")
    assert template is not None and template.changed == ""
    (NOTICED | IGNORED)[change](site)
    assert bool(template.changed) is noticed
