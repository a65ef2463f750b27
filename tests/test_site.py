"""The site's pages name all there is: every document in the contents, every public name among the docstrings."""

from __future__ import annotations

import re
from pathlib import Path

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
