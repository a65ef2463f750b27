"""Transforming panels and finishing sums, on the host, in the simulator and on a GPU, against NumPy's definition; and
the kernels as machine code."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cuda

from tests.kernels.gemm.machine_code import assemble, assert_no_spills, sampled
from tests.kernels.passes.fused_values import LEFT_OUT, a_transform, an_epilogue, bits, numbers
from tests.sampling import examples
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.passes import pairs_device, transform_device, transform_host
from tilewright.pipeline.plan.pairs import (
    CONSTANT_MARGIN,
    COUNT,
    LEFT,
    LEFT_SQUARES,
    PRODUCT,
    RIGHT,
    RIGHT_SQUARES,
    Form,
    Forms,
    Pairwise,
    combined,
    unit_of,
)
from tilewright.pipeline.plan.transform import (
    Epilogue,
    Transform,
    as_number,
    finished,
    missing_element,
    number_dtype,
    put_diagonal,
    transformed,
    wide_dtype,
)
from tilewright.pipeline.worker import fusion

on_gpu = pytest.mark.simulator if SIMULATOR else pytest.mark.gpu
simulated_as_numpy_warns = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""Of integers that wrap, and of NaN, in the simulator's threads."""
SOURCES = transform_device.SOURCES
TRANSFORMED = transform_device.TRANSFORMED
MISSING = [None, "nan", 3, 3.0, 0.5, -1]
F4, F8 = np.dtype("f4"), np.dtype("f8")
SUMS = [
    *((dtype, dtype) for dtype in TRANSFORMED),
    *((np.dtype(code), stored) for code in ("i4", "u4", "i8", "u8") for stored in (F4, F8)),
    *((np.dtype(code), np.dtype(code)) for code in ("i1", "u2", "i4", "u4", "i8", "u8")),
]
"""The dtypes of sums and of what they become."""
SHAPES = [(1, 1), (5, 3), (9 if SIMULATOR else 37, 33), (2, 77)]
"""One element, part of a block, several blocks down and across, and several across."""
WHOLE = slice(None)
FORMS: tuple[Form, ...] = ("values", "squares", "presence")


def target_of(stored: np.dtype, wanted: np.dtype) -> np.dtype:
    """The wanted dtype, or a complex one for complex numbers."""
    return np.dtype(f"c{max(8, 2 * wanted.itemsize)}") if stored.kind == "c" != wanted.kind else wanted


@pytest.fixture(scope="module")
def pool() -> Any:
    with ThreadPoolExecutor(2) as threads:
        yield threads


@settings(max_examples=examples(40))
@given(
    st.sampled_from([np.dtype(code) for code in ("i1", "u8", "f2", "c8")]),
    st.sampled_from([F4, np.dtype("c16")]),
    st.sampled_from(MISSING),
    st.integers(0, LEFT_OUT - 1),
    st.integers(0, 30),
    st.integers(0, 30),
    st.sampled_from(FORMS),
    st.integers(0, 2**32),
)
def test_the_host_transforms_a_panel(
    pool: ThreadPoolExecutor,
    stored: np.dtype,
    wanted: np.dtype,
    missing: Any,
    chosen: int,
    rows: int,
    columns: int,
    form: Form,
    seed: int,
) -> None:
    """Any part of a matrix; of complex numbers nothing but the results."""
    rng = np.random.default_rng(seed)
    dtype = target_of(stored, wanted)
    region = slice(3, 3 + rows), slice(2, 2 + columns)
    transform = a_transform(rng, (rows + 5, columns + 5), dtype, chosen, missing)
    panel, target = numbers(rng, (rows, columns), stored), np.empty((rows, columns), dtype)
    form = "values" if dtype.kind == "c" else form
    changes = fusion.changes_of(transform, stored, region, form)
    transform_host.transform(panel, target, changes, pool)
    np.testing.assert_array_equal(bits(target), bits(transformed(transform, panel, *region, form)))


@pytest.mark.parametrize(("sums", "stored"), SUMS, ids=str)
def test_the_host_finishes_sums_where_they_are(
    sums: np.dtype, stored: np.dtype, pool: ThreadPoolExecutor, rng: np.random.Generator
) -> None:
    """Band by band, into their own memory where elements are of one size."""
    found, before = numbers(rng, (40, 33), sums), numbers(rng, (40, 33), stored)
    region = slice(7, 47), slice(1, 34)
    epilogue = an_epilogue(rng, (50, 40), wide_dtype(stored, sums), 0xFF)
    wanted = finished(epilogue, found, *region, stored, before)
    target = found.view(stored) if sums.itemsize == stored.itemsize else np.empty(found.shape, stored)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fusion, "FINISHED_NBYTES", 7 * 33 * sums.itemsize)
        fusion.finish(epilogue, found, target, region, before, pool)
    np.testing.assert_array_equal(bits(target), bits(wanted))


def element_by_element(transform: Transform, value: Any, i: int, j: int) -> Any:
    """As the words are defined, of one element of a real matrix."""
    number = transform.dtype.type
    if transform.missing == "nan" and value != value:
        return number(0)
    if transform.missing not in (None, "nan") and float(value) == transform.missing:
        return number(0)
    with np.errstate(all="ignore"):
        result = number(value)
        for vector, place in ((transform.row_offsets, i), (transform.column_offsets, j)):
            result = result - vector[place] if vector is not None else result
        result = result - number(transform.offset) if transform.offset else result
        factors = [
            vector[place]
            for vector, place in ((transform.row_factors, i), (transform.column_factors, j))
            if vector is not None
        ]
        return number(result * np.prod(factors, dtype=transform.dtype)) if factors else result


@pytest.mark.parametrize("missing", MISSING, ids=str)
@pytest.mark.parametrize("stored", ["i2", "f4"])
def test_the_definition(stored: str, missing: Any, rng: np.random.Generator) -> None:
    matrix = numbers(rng, (9, 11), np.dtype(stored))
    matrix[2, 3] = 3
    for chosen in range(LEFT_OUT):
        transform = a_transform(rng, (9, 11), F8, chosen, missing)
        found = transformed(transform, matrix, WHOLE, WHOLE)
        wanted = [[element_by_element(transform, matrix[i, j], i, j) for j in range(11)] for i in range(9)]
        np.testing.assert_array_equal(found, wanted)
        with np.errstate(over="ignore"):
            squares = np.square(wanted)
        np.testing.assert_array_equal(transformed(transform, matrix, WHOLE, WHOLE, "squares"), squares)
        missing_ones = (
            matrix != matrix if missing == "nan" else matrix == (np.inf if missing is None else missing)
        )
        if missing is None:
            missing_ones[...] = False
        there = transformed(transform, matrix, WHOLE, WHOLE, "presence")
        np.testing.assert_array_equal(there, ~missing_ones)
    assert missing_element(Transform(F8, missing=300), np.dtype("i1")) is None
    assert missing_element(Transform(F8, missing=0.1), F4) == np.float32(0.1)


@pytest.mark.parametrize(("sums", "stored"), SUMS, ids=str)
def test_the_definition_of_an_epilogue(sums: np.dtype, stored: np.dtype, rng: np.random.Generator) -> None:
    """Of small numbers, in a wide type that holds all of them exactly, or nearly."""
    small = [rng.integers(0, 5, side) for side in (6, 7, 6, 7, 6, 7)]
    found, before = rng.integers(0, 9, (6, 7)), rng.integers(0, 9, (6, 7))
    rows, columns, one, other, down, across = small
    epilogue = Epilogue(3, rows, columns, one, other, 2, down, across, 4, 5)
    wanted = 3 * np.multiply.outer(rows, columns) * (found - 2 * np.multiply.outer(one, other))
    wanted = wanted + down[:, None] + across + 4 + 5 * before
    result = finished(epilogue, found.astype(sums), WHOLE, WHOLE, stored, before.astype(stored))
    assert result.dtype == stored
    np.testing.assert_array_equal(result, wanted.astype(stored))
    plain = finished(Epilogue(), found.astype(sums), WHOLE, WHOLE, stored)
    np.testing.assert_array_equal(plain, found.astype(stored))


def test_float16_is_rounded_from_float32() -> None:
    sums = np.array([[1.0, 2049.0, 70000.0]], np.float32)
    found = finished(Epilogue(alpha=1.0001), sums, WHOLE, WHOLE, np.dtype("f2"))
    with np.errstate(over="ignore"):
        wanted = (sums * np.float32(1.0001)).astype("f2")
    np.testing.assert_array_equal(found, wanted)


def on_device(array: np.ndarray, *, lines_apart: int = 0) -> Any:
    """A matrix on the device, whose lines are so many elements apart that belong to nobody."""
    whole = np.zeros((array.shape[0], array.shape[1] + lines_apart), array.dtype)
    whole[:, : array.shape[1]] = array
    return cuda.to_device(whole)[:, : array.shape[1]]


def place_of(vector: Any, dtype: np.dtype) -> Any:
    return cuda.to_device(np.zeros(1, dtype) if vector is None else vector.astype(dtype))


@pytest.mark.sample(6)
@simulated_as_numpy_warns
@on_gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("missing", [None, "nan", 3], ids=str)
@pytest.mark.parametrize("wanted", [F4, F8], ids=str)
@pytest.mark.parametrize("stored", SOURCES, ids=str)
def test_the_kernel_transforms_a_panel(
    stored: np.dtype, wanted: np.dtype, missing: Any, shape: tuple[int, int], rng: np.random.Generator
) -> None:
    device = transform_device
    for dtype in {target_of(stored, wanted), np.dtype(f"c{2 * wanted.itemsize}")}:
        panel = numbers(rng, shape, stored)
        for place, chosen in enumerate(rng.integers(0, LEFT_OUT, 3 if SIMULATOR else LEFT_OUT)):
            form = "values" if dtype.kind == "c" else FORMS[place % len(FORMS)]
            transform = a_transform(rng, shape, dtype, int(chosen), missing)
            target = on_device(np.zeros(shape, dtype), lines_apart=3)
            element = missing_element(transform, stored)
            flags = sum(
                flag
                for flag, is_so in (
                    (device.ROW_OFFSETS, transform.row_offsets is not None),
                    (device.COLUMN_OFFSETS, transform.column_offsets is not None),
                    (device.OFFSET, transform.offset != 0),
                    (device.ROW_FACTORS, transform.row_factors is not None),
                    (device.COLUMN_FACTORS, transform.column_factors is not None),
                    (device.BUT_NAN, missing == "nan"),
                    (device.BUT_EQUAL, element is not None),
                    (device.CONJUGATE, transform.conjugate),
                    (device.SQUARES, form == "squares"),
                    (device.PRESENCE, form == "presence"),
                )
                if is_so
            )
            with np.errstate(all="ignore"):
                device.transform(
                    on_device(panel, lines_apart=1),
                    target,
                    (place_of(transform.row_offsets, dtype), place_of(transform.column_offsets, dtype)),
                    device.part_dtype(dtype).type(transform.offset),
                    (place_of(transform.row_factors, dtype), place_of(transform.column_factors, dtype)),
                    cuda.to_device(np.array([0 if element is None else element], stored)),
                    flags,
                    0,
                )
            wanted_values = transformed(transform, panel, WHOLE, WHOLE, form)
            np.testing.assert_array_equal(bits(target.copy_to_host()), bits(wanted_values))


@pytest.mark.sample(6)
@simulated_as_numpy_warns
@on_gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("sums", "stored"), SUMS, ids=str)
def test_the_kernel_finishes_sums(
    sums: np.dtype, stored: np.dtype, shape: tuple[int, int], rng: np.random.Generator
) -> None:
    """Also where they are, where elements are of one size."""
    device = transform_device
    wide = wide_dtype(stored, sums)
    number = number_dtype(wide)
    for given_ones in [0, 0xFF, *rng.integers(0, 256, 2 if SIMULATOR else 40)]:
        found, before = numbers(rng, shape, sums), numbers(rng, shape, stored)
        epilogue = an_epilogue(rng, shape, wide, int(given_ones))
        source = on_device(found)
        within = SIMULATOR or sums.itemsize != stored.itemsize
        target = on_device(np.zeros(shape, stored)) if within else source.view(stored)
        vectors = (
            (epilogue.row_pairs, device.PAIRS),
            (epilogue.column_pairs, device.PAIRS),
            (epilogue.row_factors, device.ROW_FACTORS),
            (epilogue.column_factors, device.COLUMN_FACTORS),
            (epilogue.row_offsets, device.ROW_OFFSETS),
            (epilogue.column_offsets, device.COLUMN_OFFSETS),
        )
        flags = 0
        for flag, is_so in (
            *((flag, vector is not None) for vector, flag in vectors),
            (device.ALPHA, epilogue.alpha != 1),
            (device.OFFSET, epilogue.offset != 0),
            (device.BETA, epilogue.beta != 0),
        ):
            flags |= flag if is_so else 0
        values = epilogue.alpha, epilogue.pair_weight, epilogue.offset, epilogue.beta
        places: Any = tuple(place_of(vector, number) for vector, _ in vectors)
        of_numbers = cuda.to_device(np.array([as_number(value, number) for value in values], number))
        with np.errstate(all="ignore"):
            device.finish(
                source, target, on_device(before, lines_apart=2), places, of_numbers, wide, flags, 0
            )
        wanted = finished(epilogue, found, WHOLE, WHOLE, stored, before)
        np.testing.assert_array_equal(bits(target.copy_to_host()), bits(wanted))


@simulated_as_numpy_warns
@on_gpu
@pytest.mark.parametrize("stored", TRANSFORMED, ids=str)
def test_the_kernel_puts_nan_where_that_is_added(stored: np.dtype, rng: np.random.Generator) -> None:
    """As rows and columns of variables without any value are made."""
    shape, number = (9 if SIMULATOR else 37, 33), number_dtype(stored)
    found = numbers(rng, shape, stored)
    found[~np.isfinite(found)] = 1
    rows, columns = (np.where(np.arange(side) % 5 == 2, np.nan, 0).astype(number) for side in shape)
    vectors = (None, None, None, None, rows, columns)
    target = on_device(np.zeros(shape, stored))
    transform_device.finish(
        on_device(found),
        target,
        on_device(np.zeros(shape, stored)),
        tuple(place_of(vector, number) for vector in vectors),
        cuda.to_device(np.array([1, 0, 0, 0], number)),
        stored,
        transform_device.ROW_OFFSETS | transform_device.COLUMN_OFFSETS,
        0,
    )
    gone = np.isnan(rows)[:, np.newaxis] | np.isnan(columns)
    result = target.copy_to_host()
    np.testing.assert_array_equal(np.isnan(result), gone)
    np.testing.assert_array_equal(result[~gone], found[~gone])


@simulated_as_numpy_warns
@on_gpu
@pytest.mark.parametrize("stored", [*TRANSFORMED, np.dtype("i8")], ids=str)
def test_the_kernel_writes_a_diagonal(stored: np.dtype, rng: np.random.Generator) -> None:
    for shape, top, left in (((37, 40), 0, 0), ((5, 40), 20, 3), ((9, 4), 2, 7), ((3, 3), 10, 0)):
        block, diagonal = numbers(rng, shape, stored), numbers(rng, (60,), stored)
        expected = block.copy()
        put_diagonal(expected, diagonal, top, left)
        first = max(top, left)
        last = max(first, min(top + shape[0], left + shape[1]))
        target = on_device(block, lines_apart=2)
        part = cuda.to_device(diagonal)[first:last]
        transform_device.put_diagonal(target, part, first - top, first - left, 0)
        np.testing.assert_array_equal(bits(target.copy_to_host()), bits(expected))


@pytest.mark.parametrize(("sums", "stored"), SUMS, ids=str)
def test_a_diagonal_is_what_is_said_whatever_the_sums(
    sums: np.dtype, stored: np.dtype, rng: np.random.Generator
) -> None:
    whole, diagonal = numbers(rng, (11, 11), sums), numbers(rng, (11,), stored)
    plain, given_one = Epilogue(alpha=3), Epilogue(alpha=3, diagonal=diagonal)
    without = finished(plain, whole, WHOLE, WHOLE, stored)
    for rows, columns in ((WHOLE, WHOLE), (slice(2, 9), slice(0, 5)), (slice(6, 11), slice(0, 4))):
        found = finished(given_one, whole[rows, columns], rows, columns, stored)
        expected = without.copy()
        np.fill_diagonal(expected, diagonal)
        np.testing.assert_array_equal(bits(found), bits(expected[rows, columns]))


PAIRWISE = [
    Pairwise(),
    Pairwise(ddof=1),
    Pairwise(centered=True, ddof=1),
    Pairwise(scaled=True, own=True),
    Pairwise(centered=True, scaled=True, constant_is_zero=True),
]


def sums_of_pairs(
    pairwise: Pairwise, shape: tuple[int, int], dtype: np.dtype, rng: np.random.Generator
) -> dict[Forms, np.ndarray]:
    """Of small whole numbers, and of anything; pairs there are few."""
    found = {forms: numbers(rng, shape, dtype) for forms in pairwise.forms}
    small = rng.random(shape) < 0.7
    for forms in pairwise.forms:
        found[forms] = np.where(small, rng.integers(-3, 20, shape), found[forms]).astype(dtype)
    found[COUNT] = rng.integers(0, 5, shape).astype(dtype)
    return found


@pytest.mark.parametrize("pairwise", PAIRWISE, ids=str)
def test_the_host_combines_sums_where_they_are(
    pairwise: Pairwise, pool: ThreadPoolExecutor, rng: np.random.Generator
) -> None:
    for dtype in (F4, F8):
        sums = sums_of_pairs(pairwise, (40, 33), dtype, rng)
        region = slice(7, 47), slice(1, 34)
        wanted = combined(pairwise, sums, *region, dtype)
        target = next(iter(sums.values()))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(fusion, "FINISHED_NBYTES", 7 * 33 * dtype.itemsize * len(sums))
            fusion.combine(pairwise, list(sums.values()), target, region, pool)
        np.testing.assert_array_equal(bits(target), bits(wanted))


@pytest.mark.sample(8)
@simulated_as_numpy_warns
@on_gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pairwise", PAIRWISE, ids=str)
def test_the_kernel_combines_sums(
    pairwise: Pairwise, shape: tuple[int, int], rng: np.random.Generator
) -> None:
    """Also where one of them is; to the bit, so that no two operations became one."""
    device = pairs_device
    region = slice(3, 3 + shape[0]), slice(1, 1 + shape[1])
    flags = sum(
        flag
        for flag, is_so in (
            (device.CENTERED, pairwise.centered or pairwise.scaled),
            (device.SCALED, pairwise.scaled),
            (device.OWN, pairwise.own),
            (device.CONSTANT_IS_ZERO, pairwise.constant_is_zero),
        )
        if is_so
    )
    for dtype, stored in ((F4, F4), (F8, F8), (F8, F4)):
        sums = sums_of_pairs(pairwise, shape, dtype, rng)
        held = {forms: on_device(one, lines_apart=2) for forms, one in sums.items()}
        first = held[PRODUCT]
        target = first if dtype == stored else on_device(np.zeros(shape, stored))
        order = PRODUCT, COUNT, LEFT, RIGHT, LEFT_SQUARES, RIGHT_SQUARES
        places: Any = tuple(held.get(forms, first) for forms in order)
        with np.errstate(all="ignore"):
            device.combine(places, target, unit_of(dtype), CONSTANT_MARGIN, pairwise.ddof, -2, flags, 0)
        wanted = combined(pairwise, sums, *region, stored)
        np.testing.assert_array_equal(bits(target.copy_to_host()), bits(wanted))


def compiled_variants() -> list[Any]:
    if SIMULATOR:
        return []
    return [*sampled(list(transform_device.variants()), 6), *sampled(list(pairs_device.variants()), 2)]


@pytest.mark.more
@pytest.mark.sample(2)
@pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("variant", compiled_variants())
@pytest.mark.parametrize("target", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
def test_becomes_machine_code_that_rounds_each_operation(
    variant: Any, target: tuple[int, int], tmp_path: Path
) -> None:
    """No multiplication and addition become one, whose product would not be rounded."""
    text, _ = cuda.compile_ptx(variant.function, variant.signature, cc=target)
    operations = set(re.findall(r"\b(?:fma|mad|mul|add|sub)(?:\.\w+)*\.f(?:32|64)", text))
    assert all(".rn." in operation and not operation.startswith("fma") for operation in operations)
    assembled = assemble(text, f"sm_{target[0]}{target[1]}", tmp_path)
    assert_no_spills(assembled)
