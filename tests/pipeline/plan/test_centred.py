"""Which products a CPU forms of centred bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tilewright.kernels.cpu.centred_panel import MOST_APART
from tilewright.pipeline.plan.centred import MOST_MISSING, multiplies_bytes
from tilewright.pipeline.plan.pairs import Pairwise
from tilewright.pipeline.plan.transform import Counted, Epilogue, Fused, Transform

F4, F8, I1 = np.dtype("f4"), np.dtype("f8"), np.dtype("i1")
ELEMENTS = 1000
MEANS = np.array([0.0, 1.7, 0.3], "f4")
CENTRED = Transform(F4, row_offsets=MEANS, missing=-1, counted=Counted(20, 0, 2))


def decided(transform: Transform | None, *, dtype: Any = I1, sums: np.dtype = F4, **more: Any) -> bool:
    fused = Fused((transform, transform), more.get("epilogue"), more.get("pairwise"))
    return multiplies_bytes(fused, np.dtype(dtype), more.get("summed", 0), ELEMENTS, sums)


def with_extent(least: int, most: int) -> Transform:
    return replace(CENTRED, counted=Counted(0, least, most))


def test_of_dosages() -> None:
    assert decided(CENTRED)
    assert decided(CENTRED, epilogue=Epilogue(alpha=0.5))
    assert decided(replace(CENTRED, row_offsets=None, column_offsets=MEANS), summed=1)
    assert decided(replace(CENTRED, row_offsets=None))
    assert decided(CENTRED, dtype="u1")


@pytest.mark.parametrize(
    "changes",
    [
        {"counted": None},
        {"column_offsets": MEANS},
        {"row_factors": MEANS},
        {"column_factors": MEANS},
        {"offset": 0.5},
        {"dtype": F8},
        {"row_offsets": np.array([0.0, np.nan, 0.0], "f4")},
        {"counted": Counted(int(MOST_MISSING * ELEMENTS) + 1, 0, 2)},
    ],
)
def test_not_of_other_transforms(changes: dict[str, Any]) -> None:
    assert not decided(replace(CENTRED, **changes))


def test_not_of_other_products() -> None:
    assert not decided(None)
    assert not decided(CENTRED, summed=1)
    assert not decided(CENTRED, dtype="i2")
    assert not decided(CENTRED, sums=F8)
    assert not decided(CENTRED, pairwise=Pairwise())


def test_numbers_are_bytes_beside_what_they_are_centred_by() -> None:
    nearest = np.rint(MEANS)
    assert decided(with_extent(int(nearest.max()) - MOST_APART, int(nearest.min()) + MOST_APART))
    assert not decided(with_extent(int(nearest.max()) - MOST_APART - 1, 2))
    assert not decided(with_extent(0, int(nearest.min()) + MOST_APART + 1))
