"""What users are told of the types of sums."""

from __future__ import annotations

import doctest
import re

import numpy as np
import pytest

from tilewright.pipeline.plan import sums


def types(*names: str) -> list[np.dtype]:
    return [np.dtype(name) for name in names]


def test_the_examples_hold() -> None:
    found = doctest.testmod(sums)
    assert found.attempted
    assert not found.failed


LIMITS = {"int8": 127, "int64": 2**63 - 1}


@pytest.mark.parametrize(
    ("result", "a", "b", "k", "reason"),
    [
        ("float32", "float32", "float32", 9, ""),
        ("float64", "int8", "float64", 9, ""),
        ("int32", "uint8", "int8", 1, "int32: 1 product of uint8 by int8 reaches 32640 at most"),
        ("int32", "uint16", "int16", 1, "int32: 1 product of uint16 by int16 reaches 2147450880 at most"),
        ("int32", "int8", "int8", 0, "int32: 0 products of int8 by int8 reach 0 at most"),
        (
            "int64", "int64", "int8", 9,
            "int64, which has the most bits there are: 9 products of int64 by int8 could reach 1.06e+22, and it holds",
        ),
        (
            "int8", "int8", "int8", 4000,
            "int8, as asked for: 4000 products of int8 by int8 could reach 65536000, and it holds",
        ),
        (
            "int64", "int8", "int8", 4000,
            "int64, as asked for: 4000 products of int8 by int8 reach 65536000 at most, and numpy.matmul's int8 holds",
        ),
        ("float32", "int8", "int8", 4000, "float32, as asked for: sums are rounded"),
        ("float64", "uint64", "int8", 5, "float64, the type to which uint64 and int8 promote: sums are rounded"),
    ],
)  # fmt: skip
def test_reasons(result: str, a: str, b: str, k: int, reason: str) -> None:
    if reason.endswith("it holds"):
        reason += f" up to {LIMITS[result]}"
    elif reason.endswith("holds"):
        reason += f" up to {LIMITS[a]}"
    assert sums.dtype_reason(*types(result, a, b), k) == reason


def test_a_plan_is_told_the_bound_of_the_dtypes_and_that_it_is_no_finding() -> None:
    for allowed in (
        ("int32", "int8", "int8"),
        ("float64", "int64", "int64"),
        ("float32", "float32", "float32"),
    ):
        assert sums.planned_wrap("C", *types(*allowed), 1000) is None
    note = sums.planned_wrap("C", *types("int8", "int8", "int8"), 1000)
    assert note is not None
    assert note.startswith("C could wrap modulo 2^8: 1000 products of int8 by int8 reach 16384000 at most")
    assert "the run looks at the true ranges" in note
    assert note.endswith("; --dtype int32 (dtype='int32') is safe")
    note = sums.planned_wrap("C", *types("int64", "int64", "int64"), 1)
    assert note is not None
    assert note.endswith(
        "; no integer type is safe, and --dtype float64 (dtype='float64') gives rounded sums"
    )


def test_a_finding_goes_by_the_true_ranges() -> None:
    int64 = types("int64", "int64", "int64")
    limit = 2**63 - 1
    assert sums.found_wrap("C", *int64, 7, limit // 7, 1) is None
    note = sums.found_wrap("C", *int64, 7, limit // 7 + 1, 1)
    assert note is not None
    assert re.match(
        r"C may have wrapped modulo 2\^64: .* 1317624576693539402 and 1, 7 products can reach 92", note
    )
    assert sums.found_wrap("C", *int64, 0, limit, limit) is None
    narrow = types("int8", "int64", "int64")
    assert sums.found_wrap("C", *narrow, 100, 1, 1) is None
    note = sums.found_wrap("C", *narrow, 128, 1, 1)
    assert note is not None
    assert note.endswith("; --dtype int32 (dtype='int32') is safe")
    unsigned = types("uint32", "uint64", "uint64")
    note = sums.found_wrap("C", *unsigned, 2, 2**63 - 1, 1)
    assert note is not None
    assert note.endswith("; --dtype uint64 (dtype='uint64') is safe")
    assert sums.found_wrap("C", *types("float64", "int64", "int64"), 9, limit, limit) is None


@pytest.mark.parametrize(
    ("result", "a", "k", "possible"),
    [
        ("int64", "int64", 1, True),
        ("int32", "int8", 9, False),
        ("int8", "int8", 9, True),
        ("f4", "f4", 9, False),
    ],
)
def test_ranges_are_looked_for_only_where_they_decide(result: str, a: str, k: int, possible: bool) -> None:
    assert sums.can_wrap_by_dtype(*types(result, a, a), k) is possible
