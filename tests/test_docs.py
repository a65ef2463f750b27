"""The documents' own text is wrapped as the code is, so that a change of a sentence shows as one."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MOST_CHARACTERS = 120
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_lines_are_wrapped(path: Path) -> None:
    """Rows of tables and blocks of code cannot be."""
    in_code, long = False, []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.lstrip()
        if text.startswith("```"):
            in_code = not in_code
        elif not in_code and not text.startswith("|") and len(line) > MOST_CHARACTERS:
            long.append(f"{path.name}:{number} has {len(line)} characters, more than {MOST_CHARACTERS}")
    assert not long, "\n".join(long)
