"""Errors about the dtype of a product name another one: which is followed here, and not refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import assume, given
from hypothesis import strategies as st

from tilewright.kernels.gemm.base import NUMPY_ELEMENTS
from tilewright.pipeline.errors import DTypeError, OptionError, OutputError, TilewrightError
from tilewright.pipeline.plan.transform import Epilogue
from tilewright.pipeline.product.fusing import AskedOfSums, checked_sums

SIDE = 3
K = 5

dtypes = st.sampled_from(NUMPY_ELEMENTS)
numbers = st.sampled_from([1, 2, -1, 300, -(2**40), 2**63, 0.5, 1j, 2 + 0.5j])


def held(dtype: Any) -> zarr.Array[Any]:
    return zarr.create_array({}, shape=(SIDE, SIDE), chunks=(SIDE, SIDE), dtype=dtype)


@st.composite
def products(draw: st.DrawFn) -> AskedOfSums:
    vectors: dict[str, Any] = {
        name: np.full(SIDE, draw(numbers))
        for name in ("row_factors", "column_factors", "row_offsets", "column_offsets")
        if draw(st.booleans()) and draw(st.booleans())
    }
    before = draw(st.none() | dtypes | st.just(np.dtype(bool)))
    beta = 0 if before is None else draw(numbers)
    return AskedOfSums(
        (draw(dtypes), draw(dtypes)),
        ("A", "B"),
        K,
        (SIDE, SIDE),
        Epilogue(alpha=draw(numbers), beta=beta, **vectors),
        None if before is None else held(before),
    )


def remedies(message: str) -> list[Any]:
    """The dtypes that an error says to ask for; None for leaving it out."""
    told = message.rsplit("; ", 1)[1]
    left_out = [None] if "leave dtype out" in told else []
    return [*left_out, *re.findall(r"\bdtype='(\w+)'", told)]


@given(products(), st.none() | dtypes)
def test_dtypes_that_errors_name_are_not_refused(asked: AskedOfSums, wanted: np.dtype | None) -> None:
    try:
        checked_sums(asked, wanted)
    except TilewrightError as error:
        refused = str(error)
    else:
        assume(False)
    named = remedies(refused)
    assert named, refused
    for dtype in named:
        sums, epilogue = checked_sums(asked, dtype)
        assert f"leave dtype out for {sums.result}" in refused or np.dtype(dtype) == sums.result
        assert epilogue is not None


@pytest.mark.parametrize(
    ("asked", "wanted", "error", "told"),
    [
        pytest.param(
            AskedOfSums((np.dtype("i1"),) * 2, ("A", "B"), K, (SIDE, SIDE), Epilogue(beta=1), held("u8")),
            "uint64",
            DTypeError,
            "pass dtype='int64' if no number exceeds 9223372036854775807, or dtype='float64', which rounds, or"
            " convert it first",
            id="no-dtype-is-usual",
        ),
        pytest.param(
            AskedOfSums((np.dtype("f8"),) * 2, ("A", "B"), K, (SIDE, SIDE), Epilogue(beta=1j), held("i1")),
            "int8",
            DTypeError,
            "pass dtype='complex128', or convert it first",
            id="usual-is-real",
        ),
        pytest.param(
            AskedOfSums((np.dtype("i4"),) * 2, ("A", "B"), K, (SIDE, SIDE), Epilogue(beta=0.5), held("c8")),
            "float64",
            OutputError,
            "leave dtype out for complex64, or convert it first",
            id="held-is-complex",
        ),
        pytest.param(
            AskedOfSums((np.dtype("u4"),) * 2, ("A", "B"), K, (SIDE, SIDE), Epilogue(beta=0.5), held("i2")),
            None,
            OptionError,
            "pass dtype='float64', which rounds",
            id="fraction",
        ),
    ],
)
def test_what_errors_about_dtypes_name(
    asked: AskedOfSums, wanted: str | None, error: type[Exception], told: str
) -> None:
    with pytest.raises(error) as raised:
        checked_sums(asked, wanted)
    assert str(raised.value).endswith(told)
