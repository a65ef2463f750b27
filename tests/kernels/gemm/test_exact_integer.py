"""Exact integers on the tensor cores: the residues' arithmetic without a GPU, and bit-for-bit answers on
one."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.kernels import naive
from tilewright.kernels.gemm.exact import residues
from tilewright.kernels.gpu.device_choice import SIMULATOR

if SIMULATOR:
    pytest.skip("the simulator has no tensor cores", allow_module_level=True)

from numba import cuda

from tilewright.kernels.gemm import scratch, select, tuning
from tilewright.kernels.gemm.base import Operand, Problem
from tilewright.kernels.gemm.exact import byte_planes, exact_integer, residue_epilogue
from tilewright.kernels.gemm.tensor import mma, mma_launch
from tilewright.kernels.gpu.device_array import transposed
from tilewright.kernels.gpu.device_choice import capability, current_device

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
COUNTS = range(1, len(residues.MODULI) + 1)
DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def wrapped(value: int) -> int:
    return value % (1 << 64)


def test_moduli_are_pairwise_coprime_and_fit_a_byte() -> None:
    assert all(math.gcd(p, q) == 1 for p, q in itertools.combinations(residues.MODULI, 2))
    assert max(residues.MODULI) <= 256


def test_moduli_suffice_for_any_int64() -> None:
    most = 2.0**63
    assert residues.moduli_needed(most, most, residues.DEPTH_LIMIT) == len(residues.MODULI)
    assert residues.moduli_needed(2.0**31, 2.0**31, residues.DEPTH_LIMIT) == 10
    assert residues.moduli_needed(0.0, most, 1) == 1


def test_no_sum_overflows_int32() -> None:
    assert residues.DEPTH_LIMIT * residues.DIGIT_BOUND**2 < 1 << 31
    assert residues.SINGLE_DEPTH_LIMIT * 255 * 255 < 1 << 31


@pytest.mark.parametrize("count", COUNTS)
def test_capacity_leaves_the_margin(count: int) -> None:
    product = math.prod(residues.MODULI[:count])
    assert 2 * residues.MARGIN * float(residues.capacities()[count]) <= product
    # The fraction that decides the multiple of P may be short by this, which the margin must cover.
    shortfall = count * 256 / 2**residues.FRACTION_BITS
    assert 0.5 / residues.MARGIN + shortfall < 0.5


@given(st.integers(1, len(residues.MODULI)), st.fractions(-1, 1))
@example(len(residues.MODULI), 1)
@example(len(residues.MODULI), -1)
@example(1, 1)
def test_combination_gives_the_product_back(count: int, share: Any) -> None:
    c = int(share * int(residues.capacities()[count]))
    moduli = residues.modulus_set(count).moduli
    # What the tensor cores would hold: any number congruent to c times the weight.
    sums = [c * modulus.weight % modulus.p - modulus.p * (i % 3) for i, modulus in enumerate(moduli)]
    assert residues.combined(sums) == wrapped(c)


@given(INT64, st.sampled_from(COUNTS), st.booleans())
@example(-(1 << 63), 18, True)
@example((1 << 63) - 1, 18, False)
def test_residue_from_bytes(x: int, count: int, weighted: bool) -> None:
    """The device's way: unsigned bytes of x + 2**63 times int8 weights, then a rounded division in
    float32."""
    for modulus in residues.modulus_set(count).moduli:
        weights, bias = residues.byte_weights(modulus, weighted=weighted)
        total = bias + sum(w * b for w, b in zip(weights, (x + (1 << 63)).to_bytes(8, "little"), strict=True))
        assert all(-128 <= w <= 127 for w in weights)
        scale = modulus.weight if weighted else 1
        assert (total - scale * x) % modulus.p == 0
        assert abs(total) < 1 << 19


def test_float32_division_rounds_right_for_every_sum() -> None:
    """As the pass divides: the bits of a float32 at which numbers have steps of 1, and a multiply-add."""
    totals = np.arange(-(1 << 19), 1 << 19, dtype=np.int64)
    whole = np.float32(byte_planes.WHOLE)
    assert whole.view(np.uint32) == byte_planes.WHOLE_BITS
    assert byte_planes.WHOLE_BITS % 256 == 0
    words = (totals + byte_planes.WHOLE_BITS).astype(np.uint32)
    numbers = words.view(np.float32) - whole
    np.testing.assert_array_equal(numbers, totals)
    inverses = byte_planes.inverse_table()[-1]
    for p, inverse in zip(residues.MODULI, inverses, strict=True):
        # float64 holds the product exactly, so that the sum is rounded once, to a step of 1.
        quotients = (numbers.astype(np.float64) * np.float64(inverse) + byte_planes.WHOLE).astype(np.float32)
        rest = totals - (quotients - whole).astype(np.int64) * p
        # For p = 256 both -128 and 128 are the byte 0x80.
        assert rest.min() >= -128
        assert rest.max() <= (128 if p == 256 else 127)
        bits = quotients.view(np.uint32).astype(np.int64)
        np.testing.assert_array_equal((words - bits * p) % 256, rest % 256)


@pytest.mark.parametrize("p_index", range(len(residues.MODULI)))
def test_reduction_of_sums(p_index: int, rng: np.random.Generator) -> None:
    p, offset, magic = (int(x) for x in residue_epilogue.reduction_table()[p_index])
    limit = residue_epilogue.LARGEST_SUM
    near = np.array([0, limit, -limit, limit // p * p, -(limit // p) * p])
    sums = np.concatenate([rng.integers(-limit, limit, 10_000), *(near + d for d in (-1, 0, 1))])
    sums = np.clip(sums, -limit, limit).astype(np.int64)
    x = sums + offset
    assert (x >= 0).all()
    assert offset % p == 0
    rest = x - ((x * magic) >> 32) * p
    assert ((rest >= 0) & (rest < 2 * p)).all()
    np.testing.assert_array_equal(np.where(rest < p, rest, rest - p), sums % p)


def test_tables_agree_with_the_moduli() -> None:
    factors, fractions, products = residue_epilogue.combination_tables()
    for count in COUNTS:
        chosen = residues.modulus_set(count)
        assert int(products[count]) == chosen.product
        assert [int(x) for x in factors[count, :count]] == [m.factor for m in chosen.moduli]
        assert not factors[count, count:].any(), "what an earlier tile left must be multiplied by zero"
        assert not fractions[count, count:].any()
        # The fixed-point sum of all fractions and a half fits into 32 bits.
        largest = sum((m.p - 1) * m.fraction for m in chosen.moduli)
        assert largest + (1 << (residues.FRACTION_BITS - 1)) < 1 << 32
    assert len(residues.MODULI) % residue_epilogue.BATCH == 0


@pytest.mark.parametrize(
    ("range_a", "range_b", "expected"),
    [
        ((-128, 127), (-128, 127), (0, 1)),
        ((0, 255), (-1, 1), (1, 1)),
        ((-1, 1), (0, 255), (2, 1)),
        ((0, 128), (0, 255), (3, 1)),
        ((-129, 0), (0, 0), (residues.RESIDUES, 1)),
        ((-1, 255), (0, 1), (residues.RESIDUES, 3)),
        ((0, 256), (0, 0), (residues.RESIDUES, 1)),
    ],
)
def test_plan(range_a: tuple[int, int], range_b: tuple[int, int], expected: tuple[int, int]) -> None:
    assert residues.plan(range_a, range_b, 8192) == expected


@given(st.integers(1, 1 << 17), st.integers(1, 1 << 17), st.integers(1, 1 << 17), st.booleans())
def test_scratch_memory_is_bounded(m: int, n: int, k: int, wide: bool) -> None:
    where = exact_integer.layout(m, n, k, 132, residues=wide)
    count = len(residues.MODULI) if wide else 1
    least = count * exact_integer.LINE_UNIT * (m + n)
    planes = where.nbytes - where.planes_a
    assert planes <= max(exact_integer.PLANES_NBYTES, least)
    assert planes >= (m + n) * max(where.single_depth, count * where.residue_depth * wide)
    assert where.single_depth % exact_integer.LINE_UNIT == 0
    assert where.residue_depth <= min(residues.DEPTH_LIMIT, where.single_depth)
    assert where.planes_b - where.planes_a >= m * where.single_depth


def test_what_a_small_product_borrows_follows_its_tiles() -> None:
    one, four = (exact_integer.scratch_nbytes(side, side, 4096, 8) for side in (256, 512))
    kept = exact_integer.CLUSTER * residue_epilogue.WORKSPACE_NBYTES
    assert one - kept == exact_integer.PLAN_NBYTES + 2 * 256 * len(residues.MODULI) * 4096
    assert four - 4 * kept == exact_integer.PLAN_NBYTES + 2 * 512 * len(residues.MODULI) * 4096
    assert exact_integer.scratch_nbytes(63, 1 << 20, 1 << 20, 8) == 0
    assert exact_integer.scratch_nbytes(128, 100, 700, 8) == 0


def problem(dtypes: tuple[str, ...], m: int, n: int, k: int, capability: Any = (9, 0)) -> Problem:
    a, b, c = (np.dtype(name) for name in dtypes)
    return Problem(
        Operand(m, k, a, (k, 1), 128),
        Operand(k, n, b, (n, 1), 128),
        Operand(m, n, c, (n, 1), 128),
        False,
        "full",
        capability,
    )


def test_supports() -> None:
    large = 2048, 2048, 2048
    wide = ("int64", "int64", "int64")
    for able in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)):
        assert exact_integer.supports_mma(problem(wide, *large, capability=able))
    for unable in ((7, 5), None):
        assert not exact_integer.supports_mma(problem(wide, *large, capability=unable))
    assert not exact_integer.supports_mma(problem(wide, 64, 64, 64, capability=(8, 0)))
    assert not exact_integer.supports_mma(problem(("int8", "int8", "float32"), *large, capability=(8, 0)))
    for a, b in itertools.product(DTYPES, repeat=2):
        assert exact_integer.supports(problem((a, b, "int64"), *large))
    assert not exact_integer.supports(problem(("int64", "int64", "int64"), *large, capability=(8, 0)))
    assert not exact_integer.supports(problem(("int64", "int64", "int64"), *large, capability=(10, 0)))
    assert not exact_integer.supports(problem(("int64", "int64", "int64"), *large, capability=None))
    assert not exact_integer.supports(problem(("float32", "int8", "float32"), *large))
    assert not exact_integer.supports(problem(("int64", "int64", "int64"), 64, 64, 64))
    assert not exact_integer.supports(problem(("int64", "int64", "int64"), 1, 1 << 15, 1 << 15))


@pytest.mark.parametrize("has", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("dtypes", [("int8", "int8", "int32"), ("int64", "int64", "int64")])
def test_the_engine_that_the_device_has_is_chosen(
    dtypes: tuple[str, ...], has: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "preferred", lambda asked: None)
    name = select.select(problem(dtypes, 1024, 1024, 1024, has)).name
    assert name == ("exact-integer-wgmma" if has == (9, 0) else "exact-integer-mma")


@pytest.mark.parametrize("k", [2048, 2**20])
@pytest.mark.parametrize(("a", "b"), list(itertools.combinations_with_replacement(DTYPES, 2)))
def test_integers_get_the_tensor_cores_for_the_type_that_holds_their_sums(
    a: str, b: str, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "preferred", lambda asked: None)
    c = naive.stored_dtype(a, b, k)
    if c.kind == "f":
        assert "uint64" in (a, b)
        return
    for has, kernel in (((9, 0), exact_integer.EXACT_INTEGER), ((8, 0), exact_integer.EXACT_INTEGER_MMA)):
        assert select.select(problem((a, b, c.name), 512, 512, k, has)) is kernel


# --- On a GPU --------------------------------------------------------------------------------------------


ENGINES = {"wgmma": exact_integer.WGMMA, "mma": exact_integer.MMA}
Engine = exact_integer.Engine


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "wgmma" and capability(current_device()) != (9, 0):
        pytest.skip("wgmma exists on compute capability 9.0 alone")
    return ENGINES[request.param]


def reference(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
    """NumPy's own int64 product, which wraps modulo 2**64; narrower results are that, cut off."""
    with np.errstate(over="ignore"):
        return (a.astype(np.int64) @ b.astype(np.int64)).astype(dtype)


def product(engine: Engine, a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
    c = cuda.to_device(np.full((a.shape[0], b.shape[1]), 77, dtype))
    exact_integer.launch(cuda.to_device(a), cuda.to_device(b), c, False, 0, engine)
    return c.copy_to_host()


def full_range(rng: np.random.Generator, dtype: Any, shape: tuple[int, int]) -> np.ndarray:
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, shape, dtype, endpoint=True)


SHAPES = [(128, 256, 128), (300, 261, 333), (65, 1000, 129), (1, 257, 40), (513, 3, 1030)]


@pytest.mark.gpu
@pytest.mark.parametrize(("a_dtype", "b_dtype"), list(itertools.product(DTYPES, DTYPES)))
def test_no_sum_wraps_in_the_type_that_holds_it(
    engine: Engine, a_dtype: str, b_dtype: str, rng: np.random.Generator
) -> None:
    k = 700
    c_dtype = naive.stored_dtype(a_dtype, b_dtype, k)
    if c_dtype.kind == "f":
        assert "uint64" in (a_dtype, b_dtype)
        return
    a, b = full_range(rng, a_dtype, (130, k)), full_range(rng, b_dtype, (k, 270))
    a[0], b[:, 0] = np.iinfo(a_dtype).min, np.iinfo(b_dtype).min
    a[1], b[:, 1] = np.iinfo(a_dtype).max, np.iinfo(b_dtype).max
    np.testing.assert_array_equal(product(engine, a, b, c_dtype), reference(a, b, c_dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_full_range(engine: Engine, dtype: str, m: int, n: int, k: int, rng: np.random.Generator) -> None:
    a, b = full_range(rng, dtype, (m, k)), full_range(rng, dtype, (k, n))
    np.testing.assert_array_equal(product(engine, a, b, dtype), reference(a, b, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("a_dtype", DTYPES)
@pytest.mark.parametrize("b_dtype", ["int8", "uint16", "int64"])
@pytest.mark.parametrize("c_dtype", ["int16", "int32", "uint64"])
def test_mixed_and_widened(
    engine: Engine, a_dtype: str, b_dtype: str, c_dtype: str, rng: np.random.Generator
) -> None:
    a, b = full_range(rng, a_dtype, (130, 300)), full_range(rng, b_dtype, (300, 270))
    np.testing.assert_array_equal(product(engine, a, b, c_dtype), reference(a, b, c_dtype))


POWERS = [sign * (1 << bits) for bits in (7, 8, 15, 16, 23, 31, 32, 47, 62) for sign in (1, -1)]
EDGES = sorted({power + step for power in POWERS for step in (-1, 0, 1)} | {0, -(1 << 63), (1 << 63) - 128})


@pytest.mark.gpu
@pytest.mark.parametrize("low", EDGES)
def test_range_edges(engine: Engine, low: int, rng: np.random.Generator) -> None:
    """Ranges that begin at a boundary of digits or of a kind of product, small and equally large partners."""
    high = low + 127
    a = rng.integers(low, high, (130, 140), endpoint=True)
    for low_b, high_b in ((-128, 127), (0, 255), (low, high)):
        b = rng.integers(low_b, high_b, (140, 260), endpoint=True)
        np.testing.assert_array_equal(product(engine, a, b, np.int64), reference(a, b, np.int64))
        np.testing.assert_array_equal(
            product(engine, b.T.copy(), a.T.copy(), np.int64), reference(b.T, a.T, np.int64)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("a_value", [-(1 << 63), (1 << 63) - 1, -128, 127, 128, 255, 256, -129, 0])
@pytest.mark.parametrize("b_value", [-(1 << 63), (1 << 63) - 1, -128, 255, 0])
def test_constant_matrices(engine: Engine, a_value: int, b_value: int) -> None:
    a, b = np.full((129, 257), a_value), np.full((257, 131), b_value)
    np.testing.assert_array_equal(product(engine, a, b, np.int64), reference(a, b, np.int64))


@pytest.mark.gpu
@pytest.mark.parametrize("place", [(0, 0), (64, 100), (128, 299)])
def test_one_outlier_among_small_values(
    engine: Engine, place: tuple[int, int], rng: np.random.Generator
) -> None:
    a, b = rng.integers(-3, 3, (129, 300)), rng.integers(-3, 3, (300, 260))
    a[place] = (1 << 62) + 12345
    np.testing.assert_array_equal(product(engine, a, b, np.int64), reference(a, b, np.int64))


@pytest.mark.gpu
@pytest.mark.parametrize("limit", [residues.DEPTH_LIMIT, residues.SINGLE_DEPTH_LIMIT])
@pytest.mark.parametrize("step", [-1, 0, 1, 129])
def test_depths_around_a_panel(engine: Engine, limit: int, step: int, rng: np.random.Generator) -> None:
    """The largest sums there are, at every k around the one where a sum of bytes is put away."""
    k = limit + step
    for value in (-128, 255):
        a, b = np.full((64, k), value), np.full((k, 70), value)
        np.testing.assert_array_equal(product(engine, a, b, np.int64), reference(a, b, np.int64))
    a, b = np.full((64, k), -(1 << 63)), full_range(rng, np.int64, (k, 70))
    np.testing.assert_array_equal(product(engine, a, b, np.int64), reference(a, b, np.int64))
    narrow = np.full((64, k), 255, np.uint8)
    other = np.full((k, 70), 255, np.uint8)
    np.testing.assert_array_equal(
        product(engine, narrow, other, np.int64), reference(narrow, other, np.int64)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("scratch_nbytes", [1 << 20, 1 << 24])
def test_many_panels(
    engine: Engine, scratch_nbytes: int, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Little scratch memory: several panels of k, each added to what the others left."""
    monkeypatch.setattr(exact_integer, "PLANES_NBYTES", scratch_nbytes)
    a, b = full_range(rng, np.int64, (200, 3000)), full_range(rng, np.int64, (3000, 300))
    a[:, :1500] %= 100  # panels of one byte, then panels of residues
    b[:1500] %= 100
    np.testing.assert_array_equal(product(engine, a, b, np.int64), reference(a, b, np.int64))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64"])
@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
@pytest.mark.parametrize("c_column_major", [False, True])
def test_layouts(
    engine: Engine,
    dtype: str,
    a_transposed: bool,
    b_transposed: bool,
    c_column_major: bool,
    rng: np.random.Generator,
) -> None:
    a, b = full_range(rng, dtype, (200, 144)), full_range(rng, dtype, (144, 272))
    device_a = transposed(cuda.to_device(a.T.copy())) if a_transposed else cuda.to_device(a)
    device_b = transposed(cuda.to_device(b.T.copy())) if b_transposed else cuda.to_device(b)
    before = full_range(rng, dtype, (200, 272))
    for accumulate in (False, True):
        c = cuda.to_device(np.asarray(before, order="F" if c_column_major else "C"))
        exact_integer.launch(device_a, device_b, c, accumulate, 0, engine)
        expected = reference(a, b, dtype) + (before if accumulate else np.zeros_like(before))
        np.testing.assert_array_equal(c.copy_to_host(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("padding", [0, 4, 1])
def test_many_tiles_a_block_leave_in_their_places(
    engine: Engine, padding: int, rng: np.random.Generator
) -> None:
    """C through shared memory, where its rows begin at multiples of 16 bytes, and from registers."""
    m, n, k = 3100, 5004, 200
    a, b = full_range(rng, "int8", (m, k)), full_range(rng, "int8", (k, n))
    held = cuda.to_device(np.full((m, n + padding), 77, np.int32))
    exact_integer.launch(cuda.to_device(a), cuda.to_device(b), held[:, :n], False, 0, engine)
    found = held.copy_to_host()
    np.testing.assert_array_equal(found[:, :n], (a.astype("f4") @ b.astype("f4")).astype(np.int32))
    assert (found[:, n:] == 77).all()


@pytest.mark.gpu
@pytest.mark.parametrize("tile", mma_launch.TILES)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1500, 5001, 333), (2049, 4096, 70), (129, 257, 65), (128, 256, 16)]
)
def test_every_tile_of_mma(tile: mma.Tile, m: int, n: int, k: int, rng: np.random.Generator) -> None:
    """Several tiles a block, those of smaller devices too; bytes, then a few residues, then all of them."""
    config = functools.partial(mma.Config, tile=tile)
    engine = Engine(config, mma_launch.launch_product, mma_launch.compiled)
    a, b = rng.integers(-128, 127, (m, k)), rng.integers(0, 255, (k, n))
    exact = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.int64)
    np.testing.assert_array_equal(product(engine, a, b, np.int64), exact)
    narrow_a, narrow_b = a.astype(np.int8), b.astype(np.uint8)
    np.testing.assert_array_equal(product(engine, narrow_a, narrow_b, np.int32), exact)
    for factor in (1 << 10, (1 << 50) + 1):
        with np.errstate(over="ignore"):
            expected = exact * np.int64(factor) * np.int64(factor)
        np.testing.assert_array_equal(product(engine, a * factor, b * factor, np.int64), expected)


@pytest.mark.gpu
def test_products_on_two_streams_do_not_share_scratch(engine: Engine, rng: np.random.Generator) -> None:
    pairs = [(rng.integers(-100, 100, (512, 512)), full_range(rng, np.int64, (512, 512))) for _ in range(2)]
    streams = [cuda.stream(), cuda.stream()]
    arrays = [tuple(cuda.to_device(x) for x in pair) for pair in pairs]
    outputs = [cuda.device_array((512, 512), np.int64) for _ in pairs]
    cuda.synchronize()
    for _ in range(10):
        for (a, b), c, stream in zip(arrays, outputs, streams, strict=True):
            exact_integer.launch(a, b, c, False, stream, engine)
    cuda.synchronize()
    for (a, b), c in zip(pairs, outputs, strict=True):
        np.testing.assert_array_equal(c.copy_to_host(), reference(a, b, np.int64))


@pytest.mark.gpu
def test_public_product_takes_the_tensor_cores(rng: np.random.Generator) -> None:
    from tilewright.kernels import matmul

    here = problem(("int64", "int64", "int64"), 1024, 900, 700, capability(current_device()))
    assert select.select(here).name in ("exact-integer-wgmma", "exact-integer-mma")
    a, b = rng.integers(-128, 127, (1024, 700)), full_range(rng, np.int64, (700, 900))
    np.testing.assert_array_equal(matmul(a, b, device="cuda"), reference(a, b, np.int64))
    scratch.release()
    np.testing.assert_array_equal(matmul(a, b, device="cuda"), reference(a, b, np.int64))
