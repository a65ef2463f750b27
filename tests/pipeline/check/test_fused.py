"""The check of products with transforms and an epilogue: right ones pass, and wrong ones do not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampling import examples, with_others
from tilewright.kernels.cpu.loops import Allowance
from tilewright.kernels.gemm.base import compute_dtype
from tilewright.pipeline.check import fused as fused_sides
from tilewright.pipeline.check import verify
from tilewright.pipeline.check.locate import wrong_blocks
from tilewright.pipeline.check.verify import Verification, verify_product
from tilewright.pipeline.plan.transform import Epilogue, Fused, Transform, finished, transformed

WHOLE = slice(None)
F4, F8 = np.dtype("f4"), np.dtype("f8")


@dataclass(frozen=True)
class Case:
    """A right product and what it is of."""

    a: np.ndarray
    b: np.ndarray
    c: np.ndarray
    fused: Fused
    sums: np.dtype
    before: np.ndarray | None
    transposed: tuple[bool, bool]

    def verified(self, client: Client, folder: Path, **options: Any) -> Verification:
        stored = [put(folder / name, getattr(self, name)) for name in "abc"]
        before = None if self.before is None else put(folder / "before", self.before)
        return verify_product(
            client,
            *stored,
            transpose_a=self.transposed[0],
            transpose_b=self.transposed[1],
            fused=self.fused,
            sums=self.sums,
            before=before,
            listener=lambda event: None,
            **options,
        )


def put(path: Path, values: np.ndarray) -> zarr.Array[Any]:
    array = zarr.create_array(path, shape=values.shape, dtype=values.dtype, chunks=(8, 9), overwrite=True)
    array[...] = values
    return array


def any_numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if dtype.kind in "iu":
        return rng.integers(-100, 100, shape).astype(dtype)
    values = rng.standard_normal(shape)
    return (values + 1j * rng.standard_normal(shape) if dtype.kind == "c" else values).astype(dtype)


def a_case(
    rng: np.random.Generator, stored: np.dtype, to: np.dtype | None, result: np.dtype, sides: tuple[int, int, int],
    given_ones: int,
) -> Case:  # fmt: skip
    """Of factors that are stored so and transformed to another dtype, or to none. given_ones: which parts of the
    epilogue there are, as bits."""
    m, n, k = sides
    transposed = bool(rng.integers(2)), bool(rng.integers(2))
    a = any_numbers(rng, (k, m) if transposed[0] else (m, k), stored)
    b = any_numbers(rng, (n, k) if transposed[1] else (k, n), stored)
    transforms: list[Transform | None] = [None, None]
    if to is not None:
        for place, factor in enumerate((a, b)):
            rows, columns = factor.shape
            transforms[place] = Transform(
                to,
                any_numbers(rng, (rows,), to),
                None,
                0.5,
                None,
                any_numbers(rng, (columns,), to),
                missing=3,
            )
    number = np.dtype({"f": "f8", "c": "c16"}.get(result.kind, "i8"))

    def vector(side: int, bit: int) -> Any:
        return any_numbers(rng, (side,), number) if given_ones >> bit & 1 else None

    whole = result.kind in "iu"
    epilogue = Epilogue(
        (-3 if whole else 0.3) if given_ones & 1 else 1,
        vector(m, 1),
        vector(n, 2),
        vector(m, 3),
        vector(n, 3),
        (2 if whole else 0.2) if given_ones >> 3 & 1 else 0,
        vector(m, 4),
        vector(n, 5),
        (5 if whole else 1.5) if given_ones >> 6 & 1 else 0,
        (-2 if whole else -0.7) if given_ones >> 7 & 1 else 0,
    )
    before = any_numbers(rng, (m, n), result) if epilogue.beta else None
    left, right = (
        factor if transform is None else transformed(transform, factor, WHOLE, WHOLE)
        for transform, factor in zip(transforms, (a, b), strict=True)
    )
    exact = left.dtype.kind in "iu"
    sums = np.dtype("i8") if exact else compute_dtype(result)
    left, right = (
        (factor.T if turned else factor).astype(sums)
        for factor, turned in zip((left, right), transposed, strict=True)
    )
    c = finished(epilogue, left @ right, WHOLE, WHOLE, result, before)
    return Case(a, b, c, Fused((transforms[0], transforms[1]), epilogue), sums, before, transposed)


KINDS = [
    *((np.dtype("i1"), None, result) for result in (F4, F8, np.dtype("i4"), np.dtype("i8"))),
    *((np.dtype("i2"), to, to) for to in (F4, F8)),
    *((F4, to, result) for to in (None, F4) for result in (F4, F8, np.dtype("f2"))),
    (np.dtype("c16"), np.dtype("c16"), np.dtype("c16")),
]
"""Dtypes as stored, transformed, and of C."""
OTHERS = [(np.dtype("c8"), np.dtype("c8"), np.dtype("c8")), (np.dtype("c8"), None, np.dtype("c16"))]
"""For which the loops of the check would be compiled once more."""


any_case = given(
    st.sampled_from(with_others(KINDS, OTHERS)),
    st.integers(1, 255),
    st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(0, 20)),
    st.integers(0, 2**32),
)


@settings(max_examples=examples(20))
@any_case
def test_right_products_pass(
    client: Client,
    tmp_path_factory: pytest.TempPathFactory,
    kind: tuple[np.dtype, np.dtype | None, np.dtype],
    chosen: int,
    sides: tuple[int, int, int],
    seed: int,
) -> None:
    check_right_product(client, tmp_path_factory, kind, chosen, sides, seed)


@pytest.mark.slow
@settings(max_examples=1000)
@any_case
def test_many_right_products_pass(
    client: Client,
    tmp_path_factory: pytest.TempPathFactory,
    kind: tuple[np.dtype, np.dtype | None, np.dtype],
    chosen: int,
    sides: tuple[int, int, int],
    seed: int,
) -> None:
    check_right_product(client, tmp_path_factory, kind, chosen, sides, seed)


def check_right_product(
    client: Client,
    tmp_path_factory: pytest.TempPathFactory,
    kind: tuple[np.dtype, np.dtype | None, np.dtype],
    chosen: int,
    sides: tuple[int, int, int],
    seed: int,
) -> None:
    case = a_case(np.random.default_rng(seed), *kind, sides, chosen)
    found = case.verified(client, tmp_path_factory.mktemp("right"))
    assert found.passed, found
    assert found.largest_error <= 0.5 * found.tolerance, "far from the limit"


@pytest.mark.sample(13)
@pytest.mark.parametrize("error", ["one element", "a row", "its offset", "its factor", "not added"])
@pytest.mark.parametrize(
    ("stored", "to", "result"),
    [*KINDS, *(pytest.param(*kind, marks=pytest.mark.slow) for kind in OTHERS)],
    ids=str,
)
def test_wrong_ones_are_caught(
    stored: np.dtype,
    to: np.dtype | None,
    result: np.dtype,
    error: str,
    client: Client,
    tmp_path: Path,
    rng: np.random.Generator,
) -> None:
    """As they come of a wrong sum, or of an epilogue that is left out."""
    case = a_case(rng, stored, to, result, (20, 30, 25), 255)
    c, epilogue = case.c.copy(), case.fused.epilogue
    assert epilogue is not None
    scale = np.abs(c.astype(complex)).max()
    if error == "one element":
        c[7, 11] += c.dtype.type(scale if c.dtype.kind in "fc" else 1)
    elif error == "a row":
        c[7] = c[8]
    else:
        changes: dict[str, Any] = {"beta": 0}
        if error == "its offset":
            changes = {"row_offsets": None}
        elif error == "its factor":
            changes = {"column_factors": None}
        wrong = replace(epilogue, **changes)
        sums = np.zeros(c.shape, case.sums)
        right, left_out = (
            finished(one, sums, WHOLE, WHOLE, result, case.before) for one in (epilogue, wrong)
        )
        if error == "its factor":
            c = c * 2
        else:
            c = c - right + left_out
    found = replace(case, c=c.astype(result)).verified(client, tmp_path)
    assert found.conclusive
    assert not found.passed


def test_wrong_blocks_are_located(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    case = a_case(rng, F4, F4, F4, (24, 27, 10), 255)
    c = case.c.copy()
    c[9, 20] += 100 * np.abs(c).max()
    stored = [put(tmp_path / name, values) for name, values in (("a", case.a), ("b", case.b), ("c", c))]
    assert case.before is not None
    found = wrong_blocks(
        client,
        *stored,
        (8, 9),
        transpose_a=case.transposed[0],
        transpose_b=case.transposed[1],
        fused=case.fused,
        sums=case.sums,
        before=put(tmp_path / "before", case.before),
        listener=lambda event: None,
    )
    assert found.wrong == ((8, 16, 18, 27),)


def test_long_vectors_are_sent_once(
    client: Client, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = a_case(rng, F4, F4, F4, (20, 30, 25), 255)
    sent = []

    def run_sent(*arguments: Any, **options: Any) -> Any:
        sent.append(options["key"])
        return original(*arguments, **options)

    original = verify.run_sent
    monkeypatch.setattr(verify, "run_sent", run_sent)
    monkeypatch.setattr(verify, "SENT_NBYTES", 0)
    assert case.verified(client, tmp_path).passed
    assert len(sent) == 2, "with B's rows, and with A's"


@pytest.mark.sample(1)
@pytest.mark.parametrize("where", ["A", "B", "offset", "before"])
def test_nan_is_followed_to_where_it_comes_from(
    where: str, client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    """What it decides must be NaN, and all else is compared as usual."""
    case = a_case(rng, F4, None, F4, (20, 30, 25), 255)
    a, b, before, epilogue = case.a.copy(), case.b.copy(), case.before, case.fused.epilogue
    assert epilogue is not None
    assert before is not None
    before = before.copy()
    if where in "AB":
        (a if where == "A" else b)[3, 4] = np.nan
    elif where == "before":
        before[3, 4] = np.nan
    else:
        offsets = np.array(epilogue.row_offsets)
        offsets[3] = np.nan
        epilogue = replace(epilogue, row_offsets=offsets)
    left, right = (
        factor.T if turned else factor for factor, turned in zip((a, b), case.transposed, strict=True)
    )
    with np.errstate(invalid="ignore"):
        c = finished(epilogue, left @ right, WHOLE, WHOLE, F4, before)
    changed = replace(case, a=a, b=b, c=c, before=before, fused=Fused((None, None), epilogue))
    assert changed.verified(client, tmp_path).passed
    spoiled = c.copy()
    row, column = next(place for place in np.argwhere(np.isfinite(c)) if place[0] > 3)
    spoiled[row, column] += 100 * np.nanmax(np.abs(c))
    assert not replace(changed, c=spoiled).verified(client, tmp_path).passed
    spoiled = c.copy()
    spoiled[tuple(np.argwhere(np.isnan(c))[0])] = 1
    assert not replace(changed, c=spoiled).verified(client, tmp_path).passed, "a number where there is none"


@pytest.mark.parametrize("transpose", [False, True])
def test_a_block_is_transformed_alike_without_loops(
    transpose: bool, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = rng.integers(-1, 3, (9, 14)).astype("i1")
    array = zarr.create_array(tmp_path / "x", data=block)
    offsets, factors = (rng.standard_normal(side).astype("f4") for side in block.shape)
    transform = Transform(np.dtype("f4"), row_offsets=offsets, column_factors=factors, missing=-1)
    side = fused_sides.FusedSide(array, transpose, transform)
    places = (slice(2, 9), slice(3, 14))
    part = block[places]
    found = []
    for elements in (0, block.size):
        monkeypatch.setattr(fused_sides, "_by_numpy", Allowance(elements))
        found.append(side._transformed(part, *(places[::-1] if transpose else places)))
    assert found[0].tobytes() == found[1].tobytes()
    np.testing.assert_array_equal(found[1], transformed(transform, part, *places))
