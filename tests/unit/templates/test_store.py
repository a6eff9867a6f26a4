"""Test the store of templates on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox_provisioner.templates.store import Template, TemplateShelf

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
