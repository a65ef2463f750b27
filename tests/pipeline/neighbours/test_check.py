"""What a search says of an item is judged by what its pairs come to, and the check says what it has compared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tilewright.pipeline.neighbours.check import NeighbourCheck, Part, Reported, judged
from tilewright.pipeline.neighbours.tasks import Work


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
@pytest.mark.parametrize("allowed", [1e-6, np.inf])
def test_a_neighbour_without_a_value_is_a_fault(metric: str, allowed: float) -> None:
    """Of which no bound is exceeded, as of nothing that is compared with NaN."""
    work = SimpleNamespace(metric=metric, bound=None, exclude_self=False, k=2, of="rows", a=np.ones((5, 3)))
    keys = -np.array([1.0, 4.0]) if metric == "l2" else np.array([4.0, 1.0])
    values = np.array([1.0, 2.0]) if metric == "l2" else np.array([4.0, 1.0])
    part = Part(np.array([-np.inf]), [(0, np.arange(2), keys, np.full(2, allowed))])
    columns: Any = np.array([3, 1])
    assert judged(cast(Work, work), [Reported(2, columns, values)], part, 0.0).passed
    for place in range(2):
        wrong = values.copy()
        wrong[place] = np.nan
        check = judged(cast(Work, work), [Reported(2, columns, wrong)], part, 0.0)
        assert not check.passed
        assert check.cause == f"item 2 and item {columns[place]} of B have no value, but are reported"


def test_it_says_where_no_value_was_compared() -> None:
    def said(compared: int, unchecked: int, error: float = 0.0) -> str:
        return str(NeighbourCheck(True, 3, 3, compared, error, unchecked, "", 0.0))

    begin = "verified in 0.00 s: all 3 items compared with all of B anew; "
    assert said(0, 0) == f"{begin}no pair was found of them, so that no value was compared"
    assert said(2, 2) == f"{begin}no value was compared; 2 overflow and were not compared"
    assert said(2, 1, 0.25) == (
        f"{begin}largest error 0.25 of what rounding may make; 1 overflow and were not compared"
    )
