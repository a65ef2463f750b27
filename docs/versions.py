"""List the versions of the site that are in a folder, for the switch on every page, and lead there from its top: run by
``make docs`` behind Sphinx."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

PAGE = """<!doctype html><meta charset="utf-8"><title>Tilewright</title>
<meta http-equiv="refresh" content="0; url={to}"><a href="{to}">Tilewright</a>
"""


def order(name: str) -> tuple[bool, list[int], str]:
    """By the numbers of versions, the newest first; names without any, such as ``main``, before them."""
    numbers = [int(number) for number in re.findall(r"\d+", name)]
    return bool(numbers), [-number for number in numbers], name


def versions(site: Path) -> list[str]:
    """Folders of the site that hold one of its versions, in the order in which they are offered."""
    found = [path.parent.parent.name for path in site.glob("*/docs/index.html")]
    return sorted(found, key=order)


def write(site: Path, version: str) -> None:
    """version: empty for a site that is of one version alone."""
    known = versions(site)
    if known:
        text = f"window.TILEWRIGHT_VERSIONS = {json.dumps(known)};\n"
        (site / "versions.list.js").write_text(text, encoding="utf-8")
        (site / "versions.json").write_text(json.dumps(known) + "\n", encoding="utf-8")
    to = f"{version}/docs/index.html" if version else "docs/index.html"
    (site / "index.html").write_text(PAGE.format(to=to), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
