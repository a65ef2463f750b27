"""What the check of neighbours and pairs says."""

from __future__ import annotations

from tilewright.pipeline.neighbours.check import NeighbourCheck


def test_it_says_where_no_value_was_compared() -> None:
    def said(compared: int, unchecked: int, error: float = 0.0) -> str:
        return str(NeighbourCheck(True, 3, 3, compared, error, unchecked, "", 0.0))

    begin = "verified in 0.00 s: all 3 items compared with all of B anew; "
    assert said(0, 0) == f"{begin}no pair was found of them, so that no value was compared"
    assert said(2, 2) == f"{begin}no value was compared; 2 overflow and were not compared"
    assert said(2, 1, 0.25) == (
        f"{begin}largest error 0.25 of what rounding may make; 1 overflow and were not compared"
    )
