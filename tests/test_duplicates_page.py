"""The table of the page on duplicates is that of the formula."""

from __future__ import annotations

import re
from pathlib import Path

from tilewright.pipeline.duplicates.bands import best_bands, chance

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "duplicates.md").read_text(encoding="utf-8")


def test_the_table_of_chances() -> None:
    assert best_bands(0.8, 128) == (21, 6)
    rows = [line.split("|")[1:-1] for line in PAGE.splitlines() if re.match(r"\| 0\.\d", line)]
    assert len(rows) == 6
    for s, *shown in rows:
        for (bands, width), cell in zip(((21, 6), (9, 13), (32, 4)), shown, strict=True):
            decimals = len(cell.strip(" %").partition(".")[2])
            assert round(100 * chance(float(s), bands, width), decimals) == float(cell.strip(" %"))
    assert round(chance(0.3, 32, 4), 2) == 0.23
