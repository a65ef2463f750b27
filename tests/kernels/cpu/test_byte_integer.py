"""Products of bytes: their packing and all else of a block anywhere, the instruction where a CPU has it."""

from __future__ import annotations

import ctypes
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.kernels import naive
from tilewright.kernels.cpu import byte_integer as host_bytes
from tilewright.kernels.cpu import product as host
from tilewright.kernels.cpu.byte_integer import COLUMNS, DEPTH, GROUP, LANES, ROWS, ByteProduct
from tilewright.kernels.numbers import Extent

needs_vnni = pytest.mark.skipif(
    not host_bytes.available(),
    reason=f"this CPU lacks one of {', '.join(host_bytes.FEATURES)}, or Numba is told not to use it",
)

EXTENTS = [
    ("i1", Extent(-128, 127)),
    ("i1", Extent(-1, 2)),
    ("u1", Extent(0, 255)),
    ("i2", Extent(-300, -45)),
    ("u4", Extent(2**32 - 256, 2**32 - 1)),
    ("i8", Extent(10**12, 10**12 + 255)),
    ("u8", Extent(0, 3)),
]
"""Dtypes, and extents of numbers that are bytes beside one that is taken off them."""


def drawn(rng: np.random.Generator, shape: tuple[int, int], of: tuple[str, Extent]) -> np.ndarray:
    dtype, extent = of
    found = rng.integers(extent.least, extent.most, shape, dtype, endpoint=True)
    if found.size > 1:  # both ends
        found.flat[0], found.flat[-1] = extent
    return found


def tile(left: int, right: int, groups: int, place: int) -> None:
    """What the instruction adds, in Python's integers."""

    def memory_at(address: int, kind: type, *shape: int) -> np.ndarray:
        memory = (kind * math.prod(shape)).from_address(int(address))
        return np.frombuffer(memory, np.dtype(kind)).reshape(shape)

    a = memory_at(left, ctypes.c_uint8, groups, ROWS, GROUP).astype(object)
    b = memory_at(right, ctypes.c_int8, groups, COLUMNS, GROUP).astype(object)
    sums = sum(np.dot(a[group], b[group].T) for group in range(groups))
    assert np.abs(sums).max() < 2**31
    memory_at(place, ctypes.c_int32, ROWS, COLUMNS)[...] = sums


@given(
    sides=st.tuples(st.integers(1, 2 * ROWS + 1), st.integers(1, 9), st.integers(1, COLUMNS + 2)),
    of=st.tuples(st.sampled_from(EXTENTS), st.sampled_from(EXTENTS)),
    by_columns=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 2**32 - 1),
)
def test_packed_bytes_make_the_product(
    sides: tuple[int, int, int],
    of: tuple[tuple[str, Extent], tuple[str, Extent]],
    by_columns: tuple[bool, bool],
    seed: int,
) -> None:
    """Needs none of the instructions, and checks that no sum of 32 bits wraps."""
    m, k, n = sides
    assume(9 * of[0][1].magnitude * of[1][1].magnitude < 2**62)  # larger ones wrap in a loop, not in Python
    rng = np.random.default_rng(seed)
    a, b = drawn(rng, (m, k), of[0]), drawn(rng, (k, n), of[1])
    blocks = [
        np.asfortranarray(block) if its else block for block, its in zip((a, b), by_columns, strict=True)
    ]
    target = rng.integers(-9, 9, (m, n))
    wanted = target.astype(object) + a.astype(object) @ b.astype(object)
    quiet = ThreadPoolExecutor(2, initializer=lambda: np.seterr(over="ignore"))
    with pytest.MonkeyPatch.context() as patch, quiet as pool:
        product = ByteProduct(of[0][1], of[1][1], m, n, k, pool)
        left, right = (
            side(block.view(block.dtype.str.replace("u8", "i8")))
            for side, block in zip((product.left, product.right), blocks, strict=True)
        )
        patch.setattr(host_bytes, "byte_tile", tile)
        patch.setattr(host_bytes, "compiled", lambda function, *signature: function)
        product.add(left, right, target)
    assert ((target.astype(object) - wanted) % 2**64 == 0).all()


def test_a_tile_fits_the_registers_and_no_sum_of_a_block_wraps() -> None:
    vectors = COLUMNS // LANES
    assert ROWS * vectors + vectors + 1 <= 32
    assert DEPTH * 255 * 128 < 2**31
    assert DEPTH % GROUP == 0


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (Extent(0, 255), Extent(-128, 127), True),
        (Extent(-300, -45), Extent(10**12, 10**12 + 255), True),
        (Extent(0, 256), Extent(0, 1), False),
        (Extent(0, 1), Extent(-128, 128), False),
    ],
)
def test_which_numbers_are_bytes(a: Extent, b: Extent, expected: bool) -> None:
    assert host_bytes.fits(a, b) is expected


@needs_vnni
@given(
    sides=st.tuples(st.integers(1, 70), st.integers(1, 40), st.integers(1, 70)),
    of=st.tuples(st.sampled_from(EXTENTS), st.sampled_from(EXTENTS)),
    lie=st.tuples(*[st.sampled_from(sorted(naive.HOST_LAYOUTS))] * 3),
    dtype=st.sampled_from(["i4", "u4", "i8", "u8"]),
    half=st.tuples(st.booleans(), st.booleans()),
    accumulate=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape_layout_and_dtype(
    sides: tuple[int, int, int],
    of: tuple[tuple[str, Extent], tuple[str, Extent]],
    lie: tuple[str, str, str],
    dtype: str,
    half: tuple[bool, bool],
    accumulate: bool,
    seed: int,
) -> None:
    """half: whether the product is of a matrix by its own transpose, and one half of it is wanted."""
    m, k, n = sides
    rng = np.random.default_rng(seed)
    a, b = drawn(rng, (m, k), of[0]), drawn(rng, (k, n), of[1])
    if half[0]:
        b = a.T
    before = naive.numbers(rng, (m, b.shape[1]), dtype)
    a, b = naive.HOST_LAYOUTS[lie[0]](a), naive.HOST_LAYOUTS[lie[1]](b)
    out = naive.HOST_LAYOUTS[lie[2]](before)
    taken: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("BLOCK", 60), ("DEPTH", 12), ("COST", 0.0)):
            patch.setattr(host if name == "BLOCK" else host_bytes, name, value)
        kind = ByteProduct
        patch.setattr(host_bytes, "ByteProduct", lambda *its: taken.append(its) or kind(*its))
        host.matmul(a, b, out, accumulate=accumulate, lower=all(half))
    assert taken
    naive.assert_surroundings_kept(out)
    wanted = naive.wrap(
        before.astype(object) * accumulate + a.astype(object) @ b.astype(object), np.dtype(dtype)
    )
    where = np.tri(*out.shape, dtype=bool) if all(half) else np.ones(out.shape, bool)
    assert (out[where] == wanted[where]).all()


@needs_vnni
@pytest.mark.parametrize(
    ("dtype", "x", "y"), [("i1", -128, -128), ("i1", -128, 127), ("u1", 255, 255), ("i8", -400, 700)]
)
def test_the_largest_sums_of_a_long_k(dtype: str, x: int, y: int) -> None:
    """Longer than what one 32-bit sum could take."""
    k = 70_003
    a, b = np.full((9, k), x, dtype), np.full((k, 49), y, dtype)
    out = np.zeros((9, 49), "i8")
    host.matmul(a, b, out)
    assert (out == k * x * y).all()


@needs_vnni
def test_blocks_and_tiles_above_the_diagonal_are_left_out() -> None:
    x = np.ones((5, 2 * COLUMNS + 9), "i1")
    out = np.full((x.shape[1], x.shape[1]), 7, "i8")
    host.matmul(x.T, x, out, accumulate=True, lower=True)
    assert (out[: COLUMNS - ROWS, COLUMNS:] == 7).all()
    assert (np.tril(out) == np.tril(np.full_like(out, 12))).all()


@needs_vnni
def test_full_size_blocks_are_exact(rng: np.random.Generator) -> None:
    a, b = rng.integers(-128, 128, (1301, 2603), "i1"), rng.integers(0, 256, (2603, 1297), "u1")
    found = np.zeros((1301, 1297), "i4")
    host.matmul(a, b, found)
    rows = [0, 1, 649, 650, 651, 1299, 1300]
    np.testing.assert_array_equal(found[rows], a[rows].astype("i8") @ b)
