"""The words of what a run found, without a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from tilewright.kernels.passes.contents import NOTHING, Contents
from tilewright.kernels.widths import can_wrap, largest_sum
from tilewright.pipeline.plan.told import Found
from tilewright.pipeline.product.findings import findings_of, not_finite_caution, sought_in
from tilewright.pipeline.product.ledger import FILE_NAME, Ledger, Stored, read_record
from tilewright.pipeline.product.request import Factors


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> zarr.Array:
    return zarr.create_array(tmp_path_factory.mktemp("f") / "A", data=np.zeros((3, 3), np.int32))


INT32 = st.integers(-(2**31), 2**31 - 1)


@given(a=st.tuples(INT32, INT32), b=st.tuples(INT32, INT32), k=st.integers(1, 2**40))
def test_wrapping_is_possible_just_where_the_bound_says_so(
    pair: zarr.Array, a: tuple[int, int], b: tuple[int, int], k: int
) -> None:
    factors = Factors(pair, pair, np.dtype(np.int64), k)
    found = Found(Contents(min(a), max(a)), Contents(min(b), max(b)), NOTHING)
    bound = k * max(map(abs, a)) * max(map(abs, b))
    findings = findings_of(factors, found)
    assert largest_sum(k, max(map(abs, a)), max(map(abs, b))) == bound
    assert findings.wraps == ("possible" if bound > 2**63 - 1 else "no")
    assert len(findings.cautions) == (findings.wraps == "possible")


def test_ranges_are_looked_for_only_where_types_and_length_can_wrap(pair: zarr.Array) -> None:
    for dtype, k, extent in ((np.int64, 1, False), (np.int64, 2, True), (np.int32, 1, True)):
        assert can_wrap(np.dtype(dtype), k * 2**62) == extent
        sought = sought_in(Factors(pair, pair, np.dtype(dtype), k))
        assert [each.extent for each in sought] == [extent, extent, False]
    assert sought_in(Factors(pair, pair, np.dtype(np.float64), 9))[2].not_finite


def test_the_record_keeps_what_was_found(tmp_path: Path) -> None:
    from tilewright.pipeline.plan.inputs import Limits, StoredMatrix
    from tilewright.pipeline.plan.product import plan_tiles

    stored = StoredMatrix(40, 40, np.dtype("i8"), (10, 10), True)
    plan = plan_tiles(stored, stored, np.dtype("i8"), (10, 10), limits=Limits(1, 4000))
    found = Found(
        Contents(-(2**63), 2**63 - 1, masked=3), Contents(0, 2**64 - 1), Contents(nan=1, infinite=2)
    )
    ledger = Ledger(tmp_path, "abc", plan)
    ledger.record(0, Stored(found=found))
    ledger.record(1, Stored())
    ledger.close()
    past = read_record(tmp_path / FILE_NAME)
    assert past is not None
    assert past.finished == {0: Stored(found=found), 1: Stored()}


def test_a_share_too_small_for_its_digits_is_not_none(pair: zarr.Array) -> None:
    factors = Factors(pair, pair, np.dtype(np.float32), 3)
    found = Found(c=Contents(nan=1))
    assert not_finite_caution(factors, Found(), (1000, 1000), None) is None
    caution = not_finite_caution(factors, found, (1000, 1000), None)
    assert caution is not None
    assert caution.startswith("less than 0.01% of C's 1000000 elements are not finite (1 NaN)")
