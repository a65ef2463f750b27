"""Products of centred bytes with missing numbers, against NumPy's in double precision."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.kernels.cpu import byte_integer, centred_bytes
from tilewright.kernels.cpu.centred_panel import ALIGNMENT, GROUP, MOST_APART, PIECE, SIDE, packed_nbytes

pytestmark = pytest.mark.skipif(
    not byte_integer.available(),
    reason=f"this CPU lacks one of {', '.join(byte_integer.FEATURES)}, or Numba is told not to use it",
)

CODES = {"i1": -1, "u1": 255}
PATTERNS = ("none", "few", "many", "lines", "steps", "all")


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as held:
        yield held


def some_missing(rng: np.random.Generator, pattern: str, shape: tuple[int, int]) -> np.ndarray:
    """Where numbers are missing: a few or many anywhere, all of some lines or steps, or all."""
    gone = np.zeros(shape, bool)
    if pattern in ("few", "many"):
        gone = rng.random(shape) < {"few": 0.02, "many": 0.6}[pattern]
    elif pattern == "lines":
        gone[:, rng.random(shape[1]) < 0.3] = True
    elif pattern == "steps":
        gone[rng.random(shape[0]) < 0.3] = True
    return gone if pattern != "all" else ~gone


def drawn(
    rng: np.random.Generator, dtype: str, pattern: str, shape: tuple[int, int], *, dosages: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes (k × lines), what their steps are centred by, and what is multiplied, in float64."""
    k = shape[0]
    if dosages:
        x, centres = rng.integers(0, 3, shape), rng.uniform(0, 2, k)
    else:
        middles = rng.integers(-40, 40, k) if dtype == "i1" else rng.integers(127, 128, k)
        reach = MOST_APART - 40 if dtype == "i1" else MOST_APART
        x = middles[:, np.newaxis] + rng.integers(-reach, reach + 1, shape)
        centres = middles + rng.uniform(-0.49, 0.49, k)
    gone = some_missing(rng, pattern, shape) | (x == CODES[dtype])
    x = np.where(gone, CODES[dtype], x).astype(dtype)
    centres = centres.astype("f4")
    return x, centres, np.where(gone, 0.0, x - centres.astype("f8")[:, np.newaxis])


def packed(
    x: np.ndarray, centres: np.ndarray | None, code: int | None, pool: ThreadPoolExecutor
) -> list[centred_bytes.Packed]:
    memory = np.full(packed_nbytes(x.shape[1], x.shape[0]) + 3, 0xAA, np.uint8)
    return centred_bytes.pack(x, centres, code, memory[3:], pool)  # where no cache line begins


def bound(one: np.ndarray, other: np.ndarray, x: np.ndarray) -> Any:
    """What a sum may be from the right one: a few roundings of all that it is made of."""
    size = np.abs(one).T @ np.abs(other)
    return 2**-22 * (size + np.abs(x).max(initial=0))


@given(
    sides=st.tuples(st.integers(1, 2 * SIDE + 3), st.integers(1, 2 * SIDE + 3), st.integers(1, 41)),
    dtype=st.sampled_from(sorted(CODES)),
    pattern=st.sampled_from(PATTERNS),
    dosages=st.booleans(),
    turned=st.booleans(),
    accumulate=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_products_are_numpys(
    pool: ThreadPoolExecutor,
    sides: tuple[int, int, int],
    dtype: str,
    pattern: str,
    dosages: bool,
    turned: bool,
    accumulate: bool,
    seed: int,
) -> None:
    m, n, k = sides
    rng = np.random.default_rng(seed)
    both, centres, values = drawn(rng, dtype, pattern, (k, m + n), dosages=dosages)
    if turned:
        both = np.asfortranarray(both)
    left, right = (packed(part, centres, CODES[dtype], pool) for part in (both[:, :m], both[:, m:]))
    before = rng.integers(-9, 10, (m, n)).astype("f4")
    out = before.copy()
    centred_bytes.multiply(left, right, out, pool, accumulate=accumulate, lower=False)
    wanted = values[:, :m].T @ values[:, m:] + (before if accumulate else 0)
    wide = both.astype("f8") - np.rint(centres)[:, np.newaxis]
    assert (np.abs(out - wanted) <= bound(wide, wide, before)[:1, :1].max() + 2**-22 * np.abs(wanted)).all()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_bits_depend_on_two_lines_alone(
    pool: ThreadPoolExecutor, pattern: str, rng: np.random.Generator
) -> None:
    """Wherever lines lie, in whatever order, and whether one half is wanted or all: along more than a piece of k."""
    x, centres, values = drawn(rng, "i1", pattern, (PIECE + 9, 3 * SIDE + 5), dosages=True)
    whole = packed(x, centres, -1, pool)
    assert len(whole) == 2
    lower = np.full((x.shape[1],) * 2, np.nan, "f4")
    centred_bytes.multiply(whole, whole, lower, pool, accumulate=False, lower=True)
    full = np.zeros_like(lower)
    centred_bytes.multiply(whole, whole, full, pool, accumulate=False, lower=False)
    half = np.tril_indices(len(full))
    assert lower[half].tobytes() == full[half].tobytes()
    np.testing.assert_allclose(full, values.T @ values, rtol=2e-7, atol=1e-3)
    for lines in (slice(7, 100), slice(50, 149)):
        some = packed(np.ascontiguousarray(x[:, lines]), centres, -1, pool)
        part = np.zeros((len(range(*lines.indices(x.shape[1]))), len(full)), "f4")
        centred_bytes.multiply(some, whole, part, pool, accumulate=False, lower=False)
        assert part.tobytes() == np.ascontiguousarray(full[lines]).tobytes()


def test_without_centres_and_missing_numbers_sums_are_exact(
    pool: ThreadPoolExecutor, rng: np.random.Generator
) -> None:
    x = rng.integers(-127, 128, (203, 60)).astype("i1")
    made = packed(x, None, None, pool)
    out = np.zeros((60, 60), "f4")
    centred_bytes.multiply(made, made, out, pool, accumulate=False, lower=False)
    wide = x.astype("i8")
    np.testing.assert_array_equal(out, wide.T @ wide)


def test_what_is_multiplied_lies_in_the_memory_that_is_given(
    pool: ThreadPoolExecutor, rng: np.random.Generator
) -> None:
    x, centres, _ = drawn(rng, "u1", "few", (PIECE + 70, SIDE + 1), dosages=True)
    nbytes = packed_nbytes(x.shape[1], x.shape[0])
    memory = np.full(nbytes + 4 * ALIGNMENT, 0xAA, np.uint8)
    for piece in centred_bytes.pack(x, centres, 255, memory[1 : nbytes + 1], pool):
        for part in piece[:5]:
            assert np.shares_memory(part, memory)
            assert part.ctypes.data % ALIGNMENT == 0
    assert memory[0] == 0xAA
    assert (memory[nbytes + 1 :] == 0xAA).all()


def test_blocks_are_as_wide_as_tiles_of_the_product_of_bytes() -> None:
    assert (SIDE, GROUP) == (byte_integer.COLUMNS, byte_integer.GROUP)
    assert SIDE % byte_integer.ROWS == 0
    assert 255 * MOST_APART * PIECE < 2**31
    assert 2 * PIECE < 2**16
