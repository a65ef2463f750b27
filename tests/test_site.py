"""The site's pages name all there is: every document in the contents, every public name among the docstrings."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import tilewright as tw
from tilewright import kernels

DOCS = Path(__file__).resolve().parent.parent / "docs"


def test_every_page_is_in_the_contents() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^(?:.*<)?([\w./-]+\.md)>?$", index, re.M))
    pages = {path.name for path in DOCS.glob("*.md")} - {"index.md"}
    assert listed == pages | {"../README.md", "../CHANGELOG.md", "../CONTRIBUTING.md"}


def test_every_public_name_is_among_the_docstrings() -> None:
    shown = re.findall(r"^\.\. auto\w+:: ([\w.]+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.M)
    names = [f"tilewright.{name}" for name in tw.__all__ if name != "__version__"]
    names += [f"tilewright.kernels.{name}" for name in kernels.__all__]
    assert sorted(shown) == sorted(names)


def test_versions_are_listed_the_newest_first(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("versions", DOCS / "versions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("0.9.0", "0.10.1", "main", "0.10.0"):
        (tmp_path / name / "docs").mkdir(parents=True)
        (tmp_path / name / "docs" / "index.html").touch()
    (tmp_path / "_static").mkdir()
    module.write(tmp_path, "0.10.1")
    assert json.loads((tmp_path / "versions.json").read_text()) == ["main", "0.10.1", "0.10.0", "0.9.0"]
    assert 'url=0.10.1/docs/index.html"' in (tmp_path / "index.html").read_text()
    assert "0.9.0" in (tmp_path / "versions.list.js").read_text()


def test_pictures_are_readable_in_light_and_dark() -> None:
    """They follow the reader's system, and say in words what they show."""
    drawn = sorted((DOCS / "pictures").glob("*.svg"))
    assert drawn
    for path in drawn:
        text = path.read_text(encoding="utf-8")
        assert "prefers-color-scheme:dark" in text
        assert re.search(r"<title>[^<]+</title>\s*<desc>[^<]+</desc>", text), path.name
        assert ElementTree.fromstring(text).get("role") == "img"
        used = {word for names in re.findall(r'class="([^"]+)"', text) for word in names.split()}
        assert used <= set(re.findall(r"\.([a-z]+)[{,]", text)), path.name
