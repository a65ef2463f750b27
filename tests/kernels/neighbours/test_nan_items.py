"""Items with a NaN are found, whatever the dtype and the layout."""

from __future__ import annotations

import numpy as np
import pytest

from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.kernels.neighbours.nan_items import items_with_nan

DTYPES = [np.dtype(name) for name in ("<f2", ">f2", "<f4", ">f8")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_items_with_a_nan_of_any_sign_are_found(dtype: np.dtype, threads: int) -> None:
    items = np.random.default_rng(1).standard_normal((1001, 700)).astype(dtype)
    items[3, 699], items[500, 0], items[1000, 350] = np.nan, -np.nan, np.nan
    items[4, 0], items[5, 1], items[6, 2] = np.inf, -np.inf, 0
    wanted = np.isnan(items).any(1)
    assert wanted.sum() == 3
    np.testing.assert_array_equal(items_with_nan(items, threads), wanted)
    np.testing.assert_array_equal(items_with_nan(np.asfortranarray(items), threads), wanted)
    np.testing.assert_array_equal(
        items_with_nan(items[::-2, 1::3], threads), np.isnan(items[::-2, 1::3]).any(1)
    )


def test_those_of_bfloat16_are_found() -> None:
    bits = np.array([[0x7F80, 0x3F80], [0x7F81, 0], [0xFFC0, 0], [0xFF80, 0]], np.uint16)
    assert items_with_nan(bits.view(BFLOAT16)).tolist() == [False, True, True, False]


@pytest.mark.parametrize("dtype", ["i1", "u8", "?"])
def test_integers_have_none(dtype: str) -> None:
    assert not items_with_nan(np.ones((3, 4), dtype)).any()
    assert items_with_nan(np.ones((0, 4), dtype)).shape == (0,)
    assert items_with_nan(np.ones((3, 0), "f4")).tolist() == [False] * 3


def test_a_nan_next_to_infinity_is_one() -> None:
    """As bits, which no float of 53 bits tells apart."""
    items = np.ones((4, 3))
    items.view(np.uint64)[1:, 1] = [0x7FF0000000000001, 0xFFF0000000000001, 0x7FF0000000000000]
    assert items_with_nan(items).tolist() == [False, True, True, False]
