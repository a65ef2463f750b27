"""The 52-bit multiply-adds of the CPU: their packing in Python integers anywhere, the loops where a CPU has them."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import os
import re
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels import naive
from tilewright.kernels import matmul
from tilewright.kernels.cpu import byte_integer as host_bytes
from tilewright.kernels.cpu import integer as host_integer
from tilewright.kernels.cpu import product as host
from tilewright.kernels.cpu.integer import LIMB, NARROW, WIDE, WORDS_A, WORDS_B, IfmaProduct, Tiling
from tilewright.kernels.cpu.loops import cpu_threads, target_type

# Nothing but the instructions themselves needs such a CPU: the packing, and all else of a product of blocks, is tested
# with them as Python integers, and whole products without them in test_product.py.
needs_ifma = pytest.mark.skipif(
    not host_integer.available(),
    reason=f"this CPU lacks one of {', '.join(host_integer.FEATURES)}, or Numba is told not to use it",
)
words = st.integers(-(1 << 63), (1 << 63) - 1) | st.sampled_from(
    [0, 1, -1, -(1 << 63), (1 << 63) - 1, (1 << 52) - 1, 1 << 52, -(1 << 52), 0x7FFF, 0x8000, 0xFFFF]
)
layouts = st.sampled_from(sorted(naive.HOST_LAYOUTS))
tilings = pytest.mark.parametrize("tiling", [WIDE, NARROW], ids=["wide", "narrow"])


@pytest.fixture(autouse=True)
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little data crosses many blocks, and every product takes this way, whatever it costs."""
    monkeypatch.setattr(host, "BLOCK", 30)
    monkeypatch.setattr(host, "STRASSEN_SIDE", 8)
    monkeypatch.setattr(host_bytes, "available", lambda: False)
    choice = host_integer.tiling
    monkeypatch.setattr(host_integer, "tiling", lambda bits: dataclasses.replace(choice(bits), cost=0.0))


def low(x: int, y: int) -> int:
    """What ``vpmadd52luq`` adds."""
    limb = (1 << LIMB) - 1
    return (x & limb) * (y & limb) & limb


def high(x: int, y: int) -> int:
    """What ``vpmadd52huq`` adds."""
    limb = (1 << LIMB) - 1
    return (x & limb) * (y & limb) >> LIMB


def cross(x: int, y: int) -> int:
    """What ``vpdpwssd`` adds: products of the signed 16-bit halves of two 32-bit words."""
    return sum(
        int(np.int16(np.uint16(x >> shift & 0xFFFF))) * int(np.int16(np.uint16(y >> shift & 0xFFFF)))
        for shift in (0, 16)
    )


def multiply_packed(
    tiling: Tiling, left: np.ndarray, right: np.ndarray, shape: tuple[int, int]
) -> list[list[int]]:
    """The product of packed panels by the meaning of the instructions, in Python integers that wrap as lanes do."""
    m, n = shape
    pairs_a, pairs_b = left.view(np.uint32), right.view(np.uint32)
    found = []
    for i in range(m):
        panel_a, row = divmod(i, tiling.rows)
        found.append([0] * n)
        for j in range(n):
            panel_b, column = divmod(j, tiling.columns)
            lows = highs = crosses = 0
            for step in range(left.shape[1]):
                x, y = int(left[panel_a, step, row]), int(right[panel_b, step, column])
                lows = (lows + low(x, y)) % (1 << 64)
                if tiling.pairs:
                    highs = (highs + high(x, y)) % (1 << 64)
                    pair_a = int(pairs_a[panel_a, step, 2 * tiling.rows + row])
                    pair_b = int(pairs_b[panel_b, step, 2 * tiling.columns + column])
                    crosses = (crosses + cross(pair_a, pair_b)) % (1 << 32)
            found[i][j] = (lows + ((highs + crosses) << LIMB)) % (1 << 64)
    return found


@tilings
@given(data=st.data(), sign=st.sampled_from([-1, 1]))
def test_packed_words_and_pairs_make_the_product(tiling: Tiling, data: st.DataObject, sign: int) -> None:
    """Ragged panels, sums of two blocks of different sizes; needs none of the instructions."""
    m, k, n = (data.draw(st.integers(1, most)) for most in (7, 5, 18))

    def drawn(rows: int, columns: int) -> np.ndarray:
        return np.array(data.draw(st.lists(st.lists(words, min_size=columns, max_size=columns),
                                           min_size=rows, max_size=rows)), np.int64).reshape(rows, columns)  # fmt: skip

    a, b = drawn(m, k), drawn(k, n)
    second_a, second_b = (drawn(max(rows - 1, 0), max(columns - 1, 0)) for rows, columns in ((m, k), (k, n)))
    with ThreadPoolExecutor(2) as pool:
        product = IfmaProduct(tiling, m, n, k, pool)
        left = product.left((m, k), a, (second_a, sign))
        right = product.right((k, n), b, (second_b, sign))
    sum_a, sum_b = a.astype(object), b.astype(object)
    sum_a[: m - 1, : k - 1] += sign * second_a
    sum_b[: k - 1, : n - 1] += sign * second_b
    bits = 64 if tiling.pairs else LIMB
    found = multiply_packed(tiling, left, right, (m, n))
    assert [[x % (1 << bits) for x in row] for row in found] == [
        [int(x) % (1 << bits) for x in row] for row in sum_a @ sum_b
    ]


@tilings
@given(
    sides=st.tuples(st.integers(1, 12), st.integers(0, 5), st.integers(1, 40)),
    smaller=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_products_are_added_into_targets_of_any_size(
    tiling: Tiling, sides: tuple[int, int, int], smaller: bool, seed: int
) -> None:
    """All of a block's product but the tiles, which are made of Python integers: on a CPU without the instructions
    nothing else runs this."""
    m, k, n = sides
    rng = np.random.default_rng(seed)
    a, b, first, second = (naive.numbers(rng, shape, "i8") for shape in ((m, k), (k, n), (m, n), (m, n)))
    if smaller:  # the second of two targets, as of Strassen's halves of an odd side
        second = second[: m - 1, : n - 1]

    def words_at(place: int, *shape: int) -> np.ndarray:
        memory = (ctypes.c_uint64 * math.prod(shape)).from_address(int(place))
        return np.frombuffer(memory, np.uint64).reshape(shape)

    def tile(left: int, right: int, steps: int, place: int) -> None:
        panels = words_at(left, 1, steps, WORDS_A), words_at(right, 1, steps, WORDS_B)
        sums = words_at(place, tiling.rows, tiling.columns)
        sums[...] = np.array(multiply_packed(tiling, *panels, sums.shape), np.uint64)

    before = first.copy(), second.copy()
    quiet = ThreadPoolExecutor(2, initializer=partial(np.seterr, over="ignore"))  # sums wrap, as they should
    with pytest.MonkeyPatch.context() as patch, quiet as pool:
        for name in ("_wide_tile", "_narrow_tile"):
            patch.setattr(host_integer, name, tile)
        product = IfmaProduct(tiling, m, n, k, pool)
        left, right = product.left((m, k), a), product.right((k, n), b)
        patch.setattr(host_integer, "compiled", lambda function, *signature: function)
        product.add(left, right, (first, -1), (second, 1))
    bits = 64 if tiling.pairs else LIMB
    exact = a.astype(object) @ b.astype(object)
    for found, old, sign in ((first, before[0], -1), (second, before[1], 1)):
        wanted = old.astype(object) + sign * exact[: found.shape[0], : found.shape[1]]
        assert ((found.astype(object) - wanted) % (1 << bits) == 0).all()


@tilings
def test_a_tile_fits_the_registers_and_panels_their_lines(tiling: Tiling) -> None:
    vectors = tiling.columns // host_integer.LANES
    sums = tiling.rows * vectors * (2 if tiling.pairs else 1)
    pairs = vectors // 2 if tiling.pairs else 0
    assert sums + tiling.rows * pairs + vectors + pairs + 1 <= 32
    share = 1.5 if tiling.pairs else 1  # a pair is half a word
    assert tiling.rows * share <= WORDS_A
    assert tiling.columns * share <= WORDS_B


@needs_ifma
def test_no_sum_leaves_the_registers() -> None:
    """The loops over k: every multiply-add of a tile once, and no vector goes to the stack."""
    integer, panels, target = numba.int64, numba.uint64[:, :, ::1], target_type(np.dtype("i8"))
    signature = (
        panels, panels, integer, integer, numba.boolean, target, integer, target, integer, integer, integer
    )  # fmt: skip
    dispatcher = numba.njit(signature, nogil=True)(host_integer._multiply)
    (assembly,) = dispatcher.inspect_asm().values()
    blocks = re.split(r"^\.L\w+:", assembly, flags=re.MULTILINE)
    loops = [block.split("\tj")[0] for block in blocks if "vpmadd52luq" in block]
    counts = {
        tuple(len(re.findall(name, loop)) for name in ("vpmadd52luq", "vpmadd52huq", "vpdpwssd"))
        for loop in loops
    }
    assert counts == {(10, 10, 5), (24, 0, 0)}
    for loop in loops:
        # The compiler may walk a panel by %rbp, which then moves: the stack's does not within a function.
        stack = "%rsp" if re.search(r"\b(?:add|inc|lea)q\t.*%rbp$", loop, re.MULTILINE) else "%r[sb]p"
        assert not re.search(rf"%zmm.*\({stack}\)|\({stack}\).*%zmm", loop), loop


@needs_ifma
@given(
    m=st.integers(0, 70),
    n=st.integers(0, 70),
    k=st.integers(0, 70),
    dtype=st.sampled_from(naive.DRAWN_INTEGERS),
    lie=st.tuples(layouts, layouts, layouts),
    accumulate=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape_layout_and_dtype(
    m: int, n: int, k: int, dtype: str, lie: tuple[str, str, str], accumulate: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    a, b, before = (naive.numbers(rng, shape, dtype) for shape in ((m, k), (k, n), (m, n)))
    out = naive.HOST_LAYOUTS[lie[2]](before)
    matmul(
        naive.HOST_LAYOUTS[lie[0]](a),
        naive.HOST_LAYOUTS[lie[1]](b),
        out,
        accumulate=accumulate,
        device="cpu",
    )
    naive.assert_product(out, a, b, before if accumulate else None)
    naive.assert_surroundings_kept(out)


@needs_ifma
@given(
    dtypes=st.tuples(st.sampled_from(naive.DRAWN_INTEGERS), st.sampled_from(naive.DRAWN_INTEGERS)),
    result=st.sampled_from(["i8", "u8"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_narrower_operands_keep_their_sign(dtypes: tuple[str, str], result: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = naive.numbers(rng, (11, 13), dtypes[0]), naive.numbers(rng, (13, 17), dtypes[1])
    out = np.zeros((11, 17), result)
    host._integers(a, b, out, accumulate=False, lower=False)
    np.testing.assert_array_equal(out, naive.wrap(a.astype(object) @ b.astype(object), result))


@pytest.mark.sample(4)
@needs_ifma
@pytest.mark.parametrize("dtype", ["i8", "u8", "i4", "u4"])
@pytest.mark.parametrize("values", [("min", "min"), ("max", "max"), ("min", "max"), ("max", "min")])
@pytest.mark.parametrize("k", [1, 2, 127, 4099])
def test_extremes_wrap_in_every_lane(dtype: str, values: tuple[str, str], k: int) -> None:
    """Every sum at its largest: the high halves and the cross terms leave their lanes many times over."""
    x, y = (int(getattr(np.iinfo(dtype), value)) for value in values)
    found = matmul(np.full((7, k), x, dtype), np.full((k, 19), y, dtype), device="cpu")
    assert (found == naive.wrap(np.array([[k * x * y]], object), dtype)).all()


@pytest.mark.sample(1)
@needs_ifma
@pytest.mark.parametrize("dtype", ["i8", "u8", "u4"])
def test_full_size_blocks_are_exact(
    dtype: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Real block sizes and prime sides, Strassen's halves among them, against rows done by NumPy."""
    monkeypatch.undo()
    a, b = naive.numbers(rng, (1031, 1327), dtype), naive.numbers(rng, (1327, 1033), dtype)
    found = matmul(a, b, device="cpu")
    rows = [0, 1, 514, 515, 516, 1029, 1030]
    np.testing.assert_array_equal(found[rows], a[rows] @ b)


@needs_ifma
def test_what_the_values_cost_decides(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Full range goes to the multiply-adds, small values to the digits, one product of which is cheaper, and bytes to
    the instruction for them."""
    monkeypatch.undo()
    taken: list[str] = []
    for owner, name in (
        (host, "_DigitProduct"),
        (host_integer, "IfmaProduct"),
        (host_bytes, "ByteProduct"),
    ):
        kind = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, kind=kind: (taken.append(kind.__name__), kind(*a))[1])
    for dtype, most, expected in (
        ("i8", 1 << 63, "IfmaProduct"),
        ("i8", 1 << 7, "ByteProduct"),
        ("i8", 1 << 20, "_DigitProduct"),
        ("i4", 1 << 31, "IfmaProduct"),
        ("i4", 1 << 7, "ByteProduct"),
        ("i1", 1 << 7, "ByteProduct"),
    ):
        a = rng.integers(-most, most - 1, (300, 300), dtype, endpoint=True)
        np.testing.assert_array_equal(matmul(a, a, device="cpu")[:9], a[:9] @ a)
        assert taken.pop() == expected, (dtype, most)


@needs_ifma
def test_scratch_memory_is_bounded(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Blocks of a quarter of the side, so a sixteenth of the memory; more than one of them each way."""
    monkeypatch.setattr(host, "BLOCK", 320)
    monkeypatch.setattr(host, "STRASSEN_SIDE", 256)
    a, b = naive.numbers(rng, (650, 660), "i8"), naive.numbers(rng, (660, 670), "i8")
    out = np.zeros((650, 670), "i8")
    matmul(a, b, out, device="cpu")  # compiles
    tracemalloc.start()
    matmul(a, b, out, accumulate=True, device="cpu")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= host.SCRATCH_NBYTES / 16
    np.testing.assert_array_equal(out[:9], 2 * (a[:9] @ b))


@needs_ifma
def test_products_from_many_threads_at_once(rng: np.random.Generator) -> None:
    """As Dask's workers call it."""
    cases = [(naive.numbers(rng, (31, 47), "i8"), naive.numbers(rng, (47, 23), "i8")) for _ in range(8)]
    products = naive.at_once(lambda case: matmul(*case, device="cpu"), cases)
    for (a, b), found in zip(cases, products, strict=True):
        np.testing.assert_array_equal(found, a @ b)


@pytest.mark.parametrize(
    ("wanted", "expected"), [("1", 1), ("2", 2), ("9", 4), ("0", 4), ("", 4), ("many", 4)]
)
def test_openmp_setting_bounds_the_threads(
    wanted: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BLAS heeds it, and so must loops that do BLAS's work in a worker process of many."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", wanted)
    assert cpu_threads() == expected


def test_a_run_names_the_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    for bytes_too, words_too, expected in (
        (True, True, "products of bytes, 52-bit multiply-adds or exact digits"),
        (True, False, "products of bytes or exact digits"),
        (False, False, "BLAS on exact digits"),
    ):
        monkeypatch.setattr(host_bytes, "available", lambda has=bytes_too: has)
        monkeypatch.setattr(host_integer, "available", lambda has=words_too: has)
        assert host.kernel_name(np.dtype("i8")) == expected
    assert host.kernel_name(np.dtype("f8")) == "BLAS"


def test_without_the_instructions_the_answer_is_the_same(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(host_integer, "available", lambda: False)
    monkeypatch.setattr(host_integer, "IfmaProduct", None)  # not to be touched
    a, b = naive.numbers(rng, (37, 41), "i8"), naive.numbers(rng, (41, 43), "i8")
    naive.assert_product(matmul(a, b, device="cpu"), a, b)
