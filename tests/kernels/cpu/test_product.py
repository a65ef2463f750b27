"""The CPU twin against the naive product, in blocks so small that little data crosses many of them.

Integers go by digits here, as on any CPU; `test_integer.py` tries the instructions that some have for them.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels import naive
from tilewright.kernels import matmul
from tilewright.kernels.cpu import byte_integer as host_bytes
from tilewright.kernels.cpu import integer as host_integer
from tilewright.kernels.cpu import loops as host_loops
from tilewright.kernels.cpu import product as host
from tilewright.kernels.errors import DTypeError
from tilewright.kernels.gemm.base import ELEMENTS
from tilewright.kernels.gemm.exact import digits

sides = st.integers(0, 23)
layouts = st.sampled_from(sorted(naive.HOST_LAYOUTS))


@pytest.fixture(autouse=True)
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "BLOCK", 6)
    monkeypatch.setattr(host, "FLOAT_BLOCK", 5)
    monkeypatch.setattr(host, "STRIP_ROWS", 4)
    monkeypatch.setattr(host, "STRIP_COLUMNS", 7)
    monkeypatch.setattr(host, "STRASSEN_SIDE", 8)


@pytest.fixture(autouse=True)
def by_digits() -> Iterator[None]:
    """With a patch of its own, which outlasts a test that takes the blocks' real sides back."""
    with pytest.MonkeyPatch.context() as patch:
        for unit in (host_bytes, host_integer):
            patch.setattr(unit, "available", lambda: False)
        yield


def test_every_dtype_is_tried() -> None:
    assert {np.dtype(code) for code in naive.DTYPES} == set(ELEMENTS)


@given(
    m=sides,
    n=sides,
    k=sides,
    dtype=st.sampled_from(naive.DRAWN),
    lie=st.tuples(layouts, layouts, layouts),
    transpose=st.tuples(st.booleans(), st.booleans()),
    accumulate=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape_layout_and_dtype(
    m: int,
    n: int,
    k: int,
    dtype: str,
    lie: tuple[str, str, str],
    transpose: tuple[bool, bool],
    accumulate: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    a, b, before = (naive.numbers(rng, shape, dtype) for shape in ((m, k), (k, n), (m, n)))
    stored_a = naive.HOST_LAYOUTS[lie[0]](a.T if transpose[0] else a)
    stored_b = naive.HOST_LAYOUTS[lie[1]](b.T if transpose[1] else b)
    out = naive.HOST_LAYOUTS[lie[2]](before)
    returned = matmul(
        stored_a,
        stored_b,
        out,
        accumulate=accumulate,
        transpose_a=transpose[0],
        transpose_b=transpose[1],
        device="cpu",
    )
    assert returned is out
    naive.assert_product(out, a, b, before if accumulate else None)
    naive.assert_surroundings_kept(out)


@given(
    side=st.integers(1, 23),
    k=sides,
    dtype=st.sampled_from(naive.DRAWN),
    narrow=st.booleans(),
    one=st.booleans(),
    by_rows=st.booleans(),
    accumulate=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_lower_half(
    side: int, k: int, dtype: str, narrow: bool, one: bool, by_rows: bool, accumulate: bool, seed: int
) -> None:
    """Of a matrix by its own transpose in the same memory, or of two matrices."""
    rng = np.random.default_rng(seed)
    x, y = (naive.numbers(rng, (side, k) if by_rows else (k, side), dtype) for _ in "xy")
    if narrow and np.dtype(dtype).kind in "iu":
        x, y = x % 4, y % 4  # small values, which one product of digits multiplies
    right = x if one else y
    before = naive.numbers(rng, (side, side), dtype)
    whole, half = before.copy(), before.copy()
    options = {"transpose_a": not by_rows, "transpose_b": by_rows, "accumulate": accumulate, "device": "cpu"}
    matmul(x, right, whole, **options)
    matmul(x, right, half, lower=True, **options)
    below = np.tri(side, dtype=bool)
    a, b = (x, right.T) if by_rows else (x.T, right)
    naive.assert_product(np.where(below, half, whole), a, b, before if accumulate else None)


def test_blocks_above_the_diagonal_are_left_out() -> None:
    for dtype in ("i8", "f4", "f2"):
        x = np.ones((24, 24), dtype)
        out = np.full((24, 24), 7, dtype)
        matmul(x, x, out, transpose_a=True, accumulate=True, lower=True, device="cpu")
        assert (out[:6, 18:] == 7).all()
        assert (np.tril(out) == np.tril(np.full_like(out, 31))).all()


@given(
    dtypes=st.tuples(st.sampled_from(naive.DRAWN), st.sampled_from(naive.DRAWN)),
    seed=st.integers(0, 2**32 - 1),
)
def test_mixed_dtypes_promote_as_numpy_does(dtypes: tuple[str, str], seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = naive.numbers(rng, (9, 7), dtypes[0]), naive.numbers(rng, (7, 11), dtypes[1])
    try:
        np.result_type(a, b)
    except TypeError:  # bfloat16 and 16 bits or more that are no wider float
        with pytest.raises(DTypeError, match="no common type"):
            matmul(a, b, device="cpu")
        return
    found = matmul(a, b, device="cpu")
    assert found.dtype == np.result_type(a, b)
    naive.assert_product(found, a.astype(found.dtype), b.astype(found.dtype))


@given(
    bits=st.tuples(st.integers(0, 63), st.integers(0, 63)),
    shape=st.tuples(st.integers(1, 12), st.integers(1, 40), st.integers(1, 12)),
    dtype=st.sampled_from(["i8", "u8"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_integers_of_every_magnitude_are_exact(
    bits: tuple[int, int], shape: tuple[int, int, int], dtype: str, seed: int
) -> None:
    """The number of digits follows the data, so every magnitude takes another way; extremes are put in."""
    rng = np.random.default_rng(seed)
    m, k, n = shape
    operands = []
    for size, width in (((m, k), bits[0]), ((k, n), bits[1])):
        low = 0 if dtype == "u8" else -(1 << width)
        values = rng.integers(low, (1 << width) - 1, size, dtype, endpoint=True)
        values.flat[0], values.flat[-1] = low, (1 << width) - 1
        operands.append(values)
    naive.assert_product(matmul(*operands, device="cpu"), *operands)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", naive.INTEGERS)
@pytest.mark.parametrize("extreme", ["min", "max"])
def test_extreme_integers_do_not_lose_a_bit(dtype: str, extreme: str) -> None:
    """Every product at its largest and all of one sign: the case that the exactness bound is made for."""
    value = getattr(np.iinfo(dtype), extreme)
    a, b = np.full((5, 200), value, dtype), np.full((200, 4), value, dtype)
    naive.assert_product(matmul(a, b, device="cpu"), a, b)


@pytest.mark.parametrize(
    ("dtype", "largest", "unit", "products"),
    [
        ("i4", (195_816_174, 209_547), "float64", 1),
        ("i4", ((1 << 14) - 1, 3), "float32", 1),
        ("i8", ((1 << 32) - 1, (1 << 29) - 1), "float64", 2),
        ("i8", ((1 << 43) - 1, (1 << 42) - 1), "float64", 3),
    ],
)
def test_no_exact_sum_is_longer_than_its_plan_allows(
    dtype: str,
    largest: tuple[int, int],
    unit: str,
    products: int,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    """Digits of one sign near their bounds, and k of more than a real block, over which their sums are not exact."""
    monkeypatch.undo()
    k = 2 * host.BLOCK + 1
    plan = digits.plan(*largest, k, 8 * np.dtype(dtype).itemsize)
    assert (plan.unit.name, len(plan.products)) == (unit, products)
    assert plan.depth < host.BLOCK, "else blocks alone keep the sums exact"

    def near_the_bounds(shape: tuple[int, int], most: int, count: int) -> np.ndarray:
        """Every digit positive and in the upper eighth of its range, at random, so that errors do not cancel."""
        values, bounds = np.zeros(shape, dtype), digits.magnitudes(most, plan.widths, count)
        place = (0, *itertools.accumulate(plan.widths))
        for digit, bound in enumerate(bounds):
            high = (
                bound - 1 if digit < count - 1 else bound
            )  # the lower digits reach further below zero than above
            values += rng.integers(high - bound // 8, high, shape, dtype, endpoint=True) << place[digit]
        return np.minimum(values, most)

    a = near_the_bounds((9, k), largest[0], plan.digits_a)
    b = near_the_bounds((k, 8), largest[1], plan.digits_b)
    a[0, 0], b[0, 0] = largest
    naive.assert_product(matmul(a, b, device="cpu"), a, b)


def test_a_wider_result_does_not_wrap() -> None:
    a = np.full((3, 2), np.iinfo("i4").max, "i4")
    found = matmul(a, a.T, dtype=np.int64, device="cpu")
    assert found.dtype == np.int64
    assert (found == 2 * int(np.iinfo("i4").max) ** 2).all()


def test_full_size_blocks_are_exact(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Real block sizes, Strassen's halves of odd sides among them, against rows done by NumPy."""
    monkeypatch.undo()
    a, b = naive.numbers(rng, (1025, 1311), "i8"), naive.numbers(rng, (1311, 1030), "i8")
    found = matmul(a, b, device="cpu")
    rows = [0, 1, 511, 512, 513, 1023, 1024]
    np.testing.assert_array_equal(found[rows], a[rows] @ b)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("side", "dtypes"), [(650, ("i8", "i8")), (525, ("c8", "c16")), (650, ("i1", "i4"))])
def test_scratch_memory_is_bounded(
    monkeypatch: pytest.MonkeyPatch, side: int, dtypes: tuple[str, str], rng: np.random.Generator
) -> None:
    """Blocks of a quarter of the side, so a sixteenth of the memory; more than one of them each way."""
    monkeypatch.undo()
    for name in ("BLOCK", "FLOAT_BLOCK", "STRASSEN_SIDE", "STRIP_ROWS", "STRIP_COLUMNS"):
        monkeypatch.setattr(host, name, getattr(host, name) // 4)
    a, b = (naive.numbers(rng, (side, side), dtype) for dtype in dtypes)
    out = np.zeros((side, side), np.result_type(a, b))
    matmul(a, b, out, accumulate=True, device="cpu")  # compiles
    tracemalloc.start()
    matmul(a, b, out, accumulate=True, device="cpu")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= host.SCRATCH_NBYTES / 16


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
def test_floats_are_what_numpy_gives(dtype: str, rng: np.random.Generator) -> None:
    a, b = naive.numbers(rng, (40, 30), dtype), naive.numbers(rng, (30, 50), dtype)
    np.testing.assert_array_equal(matmul(a, b, device="cpu"), a @ b)


@pytest.mark.more
def test_floats_are_right_where_blas_has_several_threads() -> None:
    """In a process of its own: in those of `make test` it has one."""
    code = (
        "import numpy as np; from tilewright.kernels import matmul\n"
        "a, b = np.random.default_rng(1).integers(-9, 10, (2, 600, 600))\n"
        "for dtype in ('f4', 'f8', 'c16'):\n"
        "    assert (matmul(a.astype(dtype), b.astype(dtype), device='cpu') == a @ b).all()"
    )
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"OPENBLAS_NUM_THREADS": "2"}, check=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "f2", "f4", "f8"])
def test_nan_and_infinity_propagate(dtype: str) -> None:
    a, b = np.ones((12, 13), dtype), np.ones((13, 14), dtype)
    a[2, 3], a[4, 5], a[6, 7] = np.nan, np.inf, -np.inf
    b[5, 9] = 0
    expected = np.full((12, 14), 13.0)
    expected[2], expected[4], expected[6] = np.nan, np.inf, -np.inf
    expected[4, 9] = np.nan  # inf × 0
    rest = [row for row in range(12) if row not in (2, 4, 6)]
    expected[rest, 9] = 12
    np.testing.assert_array_equal(matmul(a, b, device="cpu").astype("f8"), expected)


def test_float16_is_summed_in_float32() -> None:
    """4096 ones and a 2049th: float16 sums would stop at 2048."""
    a = np.ones((1, 4097), "f2")
    assert matmul(a, a, transpose_b=True, device="cpu")[0, 0] == np.float16(4097)


def test_big_endian_input_is_understood() -> None:
    a = np.arange(6, dtype=">i4").reshape(2, 3)
    np.testing.assert_array_equal(matmul(a, a, transpose_b=True, device="cpu"), a @ a.T)


def test_products_from_many_threads_at_once(rng: np.random.Generator) -> None:
    """As Dask's workers call it."""
    cases = [(naive.numbers(rng, (30, 40), "i8"), naive.numbers(rng, (40, 20), "i8")) for _ in range(8)]
    products = naive.at_once(lambda case: matmul(*case, device="cpu"), cases)
    for (a, b), found in zip(cases, products, strict=True):
        np.testing.assert_array_equal(found, a @ b)


def test_the_compiler_is_started_once_and_who_needs_it_is_told_of_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = host_loops.start_compiler()
    assert host_loops.start_compiler() is first
    first.join(60)
    assert not first.is_alive()

    def fail(*arguments: object, **options: object) -> None:
        raise OSError("no place for machine code")

    told: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda failed: told.append(failed.exc_value))
    monkeypatch.setattr(host_loops, "kept", fail)
    host_loops.compiled.cache_clear()
    host_loops.start_compiler.__wrapped__().join(60)
    assert not told, "a traceback beside whatever the command says"
    with pytest.raises(OSError, match="no place"):
        host_loops.compiled(host_loops._same, host_loops.numba.int64)


@pytest.mark.parametrize(
    "dtypes", [("i8", "i8", "i8"), ("u8", "i4", "i8"), ("i2", "u1", "u4"), ("i1", "i1", "i1")]
)
@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_numpy_multiplies_the_first_few_integers(
    dtypes: tuple[str, str, str],
    lower: bool,
    accumulate: bool,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    """To the bit, as the loops multiply them; the next product is theirs."""
    side, k = 23, 17
    monkeypatch.setattr(host, "_few", host_loops.Allowance(side * side * k))
    infos = [np.iinfo(dtype) for dtype in dtypes]
    a, b, before = (
        rng.integers(info.min, info.max, shape, dtype=info.dtype, endpoint=True)
        for info, shape in zip(infos, ((k, side), (k, side), (side, side)), strict=True)
    )
    outs = before.copy(), before.copy()
    for place, out in enumerate(outs):
        by_loops = mock.Mock(side_effect=host._integers)
        monkeypatch.setattr(host, "_integers", by_loops)
        host.matmul(a.T, b, out, accumulate=accumulate, lower=lower)
        assert by_loops.call_count == place
    wanted = np.tri(side, dtype=bool) if lower else np.ones((side, side), bool)
    np.testing.assert_array_equal(outs[0][wanted], outs[1][wanted])
    np.testing.assert_array_equal(outs[0][~wanted], before[~wanted])
