"""The widths of sums of integers, against the corners of what their factors hold."""

from __future__ import annotations

import doctest
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels import naive
from tilewright.kernels import dot, matmul, widths
from tilewright.kernels.errors import DTypeError
from tilewright.kernels.gemm.check import result_dtype

INTEGERS = [np.dtype(name) for name in naive.INTEGERS]
PAIRS = list(itertools.product(INTEGERS, INTEGERS))


def around_limits(a: np.dtype, b: np.dtype) -> list[int]:
    """Lengths at which the type changes, and their neighbours."""
    product = widths.largest_sum_of(a, b, 1)
    limits = [int(np.iinfo(dtype).max) // product for dtype in widths.SUM_DTYPES]
    return [max(0, limit + step) for limit in limits for step in (-1, 0, 1)]


def test_the_examples_hold() -> None:
    assert doctest.testmod(widths).attempted >= 8
    assert not doctest.testmod(widths).failed


@pytest.mark.parametrize(("a", "b"), PAIRS, ids=str)
def test_the_default_is_the_smallest_that_holds_the_corners(a: np.dtype, b: np.dtype) -> None:
    for k in (0, 1, 2, 3, 1000, 2**31, 2**33, 2**62, *around_limits(a, b)):
        expected = naive.stored_dtype(a, b, k)
        assert widths.sum_dtype(a, b, k) == expected
        assert result_dtype(a, b, k=k) == expected
        assert result_dtype(a, b) == np.result_type(a, b), "the kernels' own is NumPy's"


@given(pair=st.sampled_from(PAIRS), k=st.integers(0, 2**40))
def test_the_default_is_never_narrower_than_numpys_and_grows_with_k(
    pair: tuple[np.dtype, np.dtype], k: int
) -> None:
    a, b = pair
    numpys, found, longer = np.result_type(a, b), widths.sum_dtype(a, b, k), widths.sum_dtype(a, b, k + 1)
    assert widths.sum_dtype(b, a, k) == found
    assert np.can_cast(a, found, "same_kind")
    assert np.can_cast(b, found, "same_kind")
    if numpys.kind == "f":
        assert found == np.float64, "uint64 and signed integers have no common integer type"
    else:
        assert found in widths.SUM_DTYPES
        assert np.can_cast(numpys, found, "safe")
        assert longer.itemsize >= found.itemsize


@given(data=st.data(), pair=st.sampled_from(PAIRS), k=st.integers(1, 50))
def test_sums_that_cannot_wrap_do_not(data: st.DataObject, pair: tuple[np.dtype, np.dtype], k: int) -> None:
    """By the bound of the elements' true sizes."""
    x, y = (
        data.draw(
            st.lists(
                st.one_of(st.integers(0, 9), st.integers(int(np.iinfo(d).min), int(np.iinfo(d).max))),
                min_size=k,
                max_size=k,
            )
        )
        for d in pair
    )
    exact = sum(left * right for left, right in zip(x, y, strict=True))
    largest = widths.largest_sum(k, max(map(abs, x)), max(map(abs, y)))
    assert abs(exact) <= largest <= widths.largest_sum_of(*pair, k)
    for result in INTEGERS:
        if all(np.can_cast(d, result, "same_kind") for d in pair) and not widths.can_wrap(result, largest):
            assert np.iinfo(result).min <= exact <= np.iinfo(result).max
    safe = widths.safe_dtype(*pair, largest)
    if safe is not None:
        assert not widths.can_wrap(safe, largest)
        assert all(np.can_cast(d, safe, "same_kind") for d in pair)
        smaller = widths.SUM_DTYPES[: widths.SUM_DTYPES.index(safe)]
        assert all(
            widths.can_wrap(d, largest) or not all(np.can_cast(f, d, "same_kind") for f in pair)
            for d in smaller
        )


@pytest.mark.parametrize(
    ("a", "b", "k", "expected"),
    [
        ("int8", "int8", 0, "int32"),
        ("int8", "int8", 1, "int32"),
        ("int8", "int8", 131071, "int32"),
        ("int8", "int8", 131072, "int64"),
        ("uint8", "uint8", 33025, "int32"),
        ("uint8", "uint8", 33026, "uint32"),
        ("uint8", "uint8", 66052, "int64"),
        ("uint8", "int8", 65793, "int32"),
        ("uint8", "int8", 65794, "int64"),
        ("int16", "int16", 1, "int32"),
        ("int16", "int16", 2, "int64"),
        ("int32", "int32", 1, "int64"),
        ("int32", "int32", 2, "int64"),
        ("uint32", "uint32", 0, "uint32"),
        ("uint32", "uint32", 1, "uint64"),
        ("uint32", "uint32", 2, "uint64"),
        ("uint32", "int32", 5, "int64"),
        ("uint64", "uint8", 1, "uint64"),
        ("uint64", "uint8", 0, "uint64"),
        ("int64", "int8", 1, "int64"),
        ("uint64", "int64", 1, "float64"),
        ("int8", "float32", 1000, "float32"),
        ("float16", "float16", 1000, "float16"),
    ],
)
def test_cases(a: str, b: str, k: int, expected: str) -> None:
    assert widths.sum_dtype(np.dtype(a), np.dtype(b), k) == expected


def test_the_kernels_keep_numpys_types() -> None:
    x = np.full((3, 4), 100, "i1")
    assert matmul(x, x.T, device="cpu").dtype == np.int8
    assert dot(x[0], x[0], device="cpu").dtype == np.int8


def test_a_refused_dtype_names_what_there_would_be_without_it() -> None:
    int8 = np.dtype("int8")
    with pytest.raises(DTypeError, match="leave dtype out for int8,"):
        result_dtype(int8, int8, "uint8")
    with pytest.raises(DTypeError, match="leave dtype out for int64,"):
        result_dtype(int8, int8, "uint8", k=10**6)
