"""Every option of `gram`, `cov` and `corr` beside every other one, against the definition, for any dtype, chunks, gaps
and number of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright as tw
from tests.pipeline.gram import naive
from tests.pipeline.plan.test_band import mask as band_mask
from tilewright.pipeline.gram import masks
from tilewright.pipeline.plan.band import Band

DTYPES = ("i1", "u1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16")
CODE = 3
"""What stands for a missing number, where one does."""
FEWEST_PAIRS = 5
"""Correlations over fewer pairs may be of numbers that hardly differ, of which rounding leaves little."""

Draw = Callable[..., Any]


def numbers(rng: np.random.Generator, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    values: Any = 20 * rng.standard_normal(shape) + 15
    if dtype.kind == "c":
        values = values + 1j * rng.standard_normal(shape)
    found: np.ndarray = (np.abs(values) if dtype.kind == "u" else values).astype(dtype)
    return np.where(found == CODE, CODE + 1, found).astype(dtype)


@dataclass
class Case:
    """Matrices as they are given, and as the definition has them: lines × variables, or the transpose."""

    x: np.ndarray
    y: np.ndarray | None
    of: str
    given: dict[str, Any] = field(default_factory=dict)
    """The options of the function."""
    asked: dict[str, Any] = field(default_factory=dict)
    """Those of the definition."""
    attributes: dict[str, Any] = field(default_factory=dict)

    def both(self, **options: Any) -> None:
        self.given |= options
        self.asked |= options

    @property
    def summed(self) -> str:
        return "rows" if self.of == "columns" else "columns"

    @property
    def matrices(self) -> dict[str, np.ndarray]:
        return {"X": self.x} if self.y is None else {"X": self.x, "Y": self.y}


def with_gaps(draw: Draw, rng: np.random.Generator, case: Case) -> None:
    """A fifth of the elements missing, but none of the first two lines of either side, and what says so."""
    real = case.x.dtype.kind != "c"
    floats = case.x.dtype.kind in "fc"
    kinds = [
        "mask",
        "mask of an axis",
        *(["nan"] if floats else []),
        *(["number", "attributes"] if real else []),
    ]
    kind = draw(st.sampled_from(kinds), label="what is missing")
    gone = {}
    for role, matrix in case.matrices.items():
        lacks = rng.random(matrix.shape) < 0.2
        lacks[:2] = lacks[:, :2] = False
        gone[role] = lacks[-1] if kind == "mask of an axis" else lacks
    code: Any = {"number": CODE, "attributes": CODE, "nan": np.nan}.get(kind)
    if code is not None:
        case.x = np.where(gone["X"], code, case.x).astype(case.x.dtype)
        case.y = None if case.y is None else np.where(gone["Y"], code, case.y).astype(case.y.dtype)
    if kind == "attributes":
        case.attributes = {"missing_value": CODE}
        case.given["missing"] = "attributes"
        case.asked["missing"] = gone
    elif code is not None:
        case.both(missing="nan" if kind == "nan" else CODE)
    else:
        case.given["missing"] = gone["X"] if case.y is None else gone
        case.asked["missing"] = gone


def given_values(
    draw: Draw, rng: np.random.Generator, case: Case, name: str, sides: Sequence[str] = ("columns", "rows")
) -> None:
    """Numbers of one side for ``center`` or ``scale``: of two matrices those of the side that they share."""
    side = case.summed if case.y is not None else draw(st.sampled_from(sides), label=f"{name} of")
    values = rng.random(case.x.shape[0 if side == "rows" else 1]) + 0.5
    case.both(**{name: {side: values}})


def with_treatment(draw: Draw, rng: np.random.Generator, case: Case, pairwise: bool) -> None:
    centers = [False, True, "columns", "rows", "values", *([] if pairwise else ["both"])]
    center = draw(st.sampled_from(centers), label="center")
    if center == "values":
        given_values(draw, rng, case, "center")
    else:
        case.both(center=center)
    centered = naive.Asked(of=case.of, center=center if center != "values" else False).centered
    over_pairs = pairwise and case.of in centered
    # Means over pairs do not go with factors of the lines that are summed over.
    sides = [case.of] if over_pairs else ["columns", "rows"]
    scales: list[Any] = [False, *([] if over_pairs and case.y is not None else ["values"])]
    scales += [
        side for side in (True, "columns", "rows")
        if set(centered) <= {case.of if side is True else side}
        and not (pairwise and side in (True, case.of) and case.of not in centered)
    ]  # fmt: skip
    scale = draw(st.sampled_from(scales), label="scale")
    if scale == "values":
        given_values(draw, rng, case, "scale", sides)
    else:
        case.both(scale=scale)


def drawn_case(draw: Draw, rng: np.random.Generator, name: str) -> Case:
    of = draw(st.sampled_from(["columns", "rows"]), label="of")
    dtype = np.dtype(draw(st.sampled_from(DTYPES), label="dtype"))
    lines, variables = draw(st.integers(8, 60), label="lines"), draw(st.integers(3, 30), label="variables")
    beside = draw(st.one_of(st.none(), st.integers(3, 20)), label="variables of Y")
    x, y = (
        None if count is None else numbers(rng, (lines, count) if of == "columns" else (count, lines), dtype)
        for count in (variables, beside)
    )
    assert x is not None
    case = Case(x, y, of)
    if draw(st.booleans(), label="gaps"):
        with_gaps(draw, rng, case)
    counted = "missing" in case.given and dtype.kind != "c"
    pairwise = counted and draw(st.booleans(), label="pairwise")
    if pairwise:
        case.both(missing_as="pairwise")
    divisors: list[Any] = [None, "n", "n-1"]
    divisors += (["pairs"] if counted else []) + ([] if pairwise else [7.5])
    if name == "gram":
        with_treatment(draw, rng, case, pairwise)
        case.both(divide=draw(st.sampled_from(divisors), label="divide"))
    else:
        case.asked |= {"center": True, "scale": name == "corr", "divide": "n-1", "conjugated": "right"}
        if name == "cov":
            case.both(divide=draw(st.sampled_from(divisors), label="divide"))
    counts = pairwise or case.asked["divide"] == "pairs"
    if not counts and draw(st.booleans(), label="weights"):
        case.both(weights=rng.random(lines) + 0.1)
    with_odd_variables(draw, case)
    if draw(st.booleans(), label="double precision"):
        case.given["dtype"] = "c16" if dtype.kind == "c" else "f8"
    return case


def with_odd_variables(draw: Draw, case: Case) -> None:
    """One that is constant, and one without any number, where these may be."""
    made = case.asked["center"] is not False or case.asked["scale"] is not False
    if not made or not draw(st.booleans(), label="odd variables"):
        return
    case.both(constant=draw(st.sampled_from(["zero", "nan"]), label="constant"))
    lines = case.x.T if case.of == "rows" else case.x
    lines[:, 0] = CODE + 1
    missing = case.given.get("missing")
    if isinstance(missing, str | int):
        lines[:, -1] = np.nan if missing == "nan" else CODE
    if case.attributes:
        case.asked["missing"]["X"] = case.x == CODE


def as_axes(case: Case, matrix: np.ndarray) -> tuple[tuple[int, ...], list[int]]:
    """The shape of a matrix whose side that is summed over is two axes, and the numbers of these."""
    lines = matrix.shape[0 if case.of == "columns" else 1]
    factor = next(number for number in (4, 3, 2, 1) if lines % number == 0)
    if case.of == "columns":
        return (factor, lines // factor, matrix.shape[1]), [0, 1]
    return (matrix.shape[0], factor, lines // factor), [1, 2]


def check_case(clusters: dict[int, Client], folder: Path, draw: Draw) -> None:
    rng = np.random.default_rng(draw(st.integers(0, 2**32), label="seed"))
    name = draw(st.sampled_from(["gram", "gram", "cov", "corr"]), label="function")
    case = drawn_case(draw, rng, name)
    missing = case.given.get("missing")
    flattened = draw(st.booleans(), label="three axes")
    paths = []
    for role, matrix in case.matrices.items():
        shape: tuple[int, ...] = matrix.shape
        if flattened:
            shape, case.given["sum_over"] = as_axes(case, matrix)
        chunks = tuple(draw(st.integers(1 + length // 8, length + 3)) for length in shape)
        stored = naive.put(
            folder / f"{role}.zarr", matrix.reshape(shape), chunks, attributes=case.attributes,
            compressors=draw(st.sampled_from([None, "auto"])),
        )  # fmt: skip
        paths.append(stored)
        mask = missing.get(role) if isinstance(missing, dict) else missing
        if isinstance(mask, np.ndarray):
            laid = (
                mask.reshape(shape) if mask.ndim == 2 else np.broadcast_to(mask, matrix.shape).reshape(shape)
            )
            given_mask: Any = laid
            if draw(st.booleans(), label="a stored mask"):
                given_mask = naive.put(folder / f"{role} mask.zarr", laid, chunks)
            case.given["missing"] = (
                {**case.given["missing"], role: given_mask} if case.y is not None else given_mask
            )
    if not flattened:
        case.given["of"] = case.of
    band = None
    if draw(st.booleans(), label="a band"):
        variables = [each.shape[1 if case.of == "columns" else 0] for each in case.matrices.values()]
        band = Band(*(draw(st.integers(0, count - 1)) for count in (variables[0], variables[-1])))
        case.given["window"] = tuple(band)
    if draw(st.booleans(), label="chunks of C"):
        side = case.given["chunks"] = draw(st.integers(2, 20))
        if draw(st.booleans(), label="shards of C"):
            case.given["shards"] = side * draw(st.integers(1, 3))
    case.given["codec"] = draw(st.sampled_from([None, "none", "zstd:3", "gzip"]), label="codec of C")
    with pytest.MonkeyPatch.context() as patched:
        if draw(st.booleans(), label="masks are read in chunks"):
            patched.setattr(masks, "HELD_ELEMENTS", 0)
        run = getattr(tw, name)(
            *paths,
            folder / "c.zarr",
            cluster=clusters[draw(st.sampled_from([1, 2, 3]), label="workers")],
            device="cpu",
            device_memory=draw(st.sampled_from([None, "100KiB"])),
            listener=lambda event: None,
            **case.given,
        )
    assert run.verification is not None
    assert run.verification.passed, run.verification
    assert run.plan.symmetric == (case.y is None and (band is None or band.before == band.after))
    compare(zarr.open_array(folder / "c.zarr")[...], case, band)
    assert tw.audit(folder / "c.zarr").passed


def compare(found: np.ndarray, case: Case, band: Band | None) -> None:
    asked = naive.Asked(of=case.of, **case.asked)
    expected, size = naive.gram_and_size(case.x, case.y, asked)
    inside = np.ones(found.shape, bool) if band is None else band_mask(*found.shape, band)
    assert not found[~inside].any()
    if case.y is None and (band is None or band.before == band.after):
        np.testing.assert_array_equal(found, found.conj().T)
    if found.dtype.kind in "iu":
        np.testing.assert_array_equal(found, np.where(inside, expected, 0))
        return
    lines = case.x.shape[0 if case.of == "columns" else 1]
    eps = np.finfo(found.dtype).eps
    bound = (lines + 20) * eps * np.nan_to_num(size)
    if asked.missing_as == "pairwise" and asked.scaled == case.of:
        there = [naive.present(each, masked(asked.missing, role)) for role, each in case.matrices.items()]
        left, *_, right = [each if case.of == "columns" else each.T for each in (there[0], there[-1])]
        inside &= left.T.astype(int) @ right >= FEWEST_PAIRS
        bound = np.full(found.shape, 2e4 * eps)
    np.testing.assert_array_equal(np.isnan(found[inside]), np.isnan(expected[inside]))
    apart = np.abs(found - expected)
    assert (np.nan_to_num(apart) <= bound)[inside].all(), (case.given, np.nanmax(apart[inside]))


def masked(missing: Any, role: str) -> Any:
    return missing[role] if isinstance(missing, dict) else missing


@settings(max_examples=8)
@given(data=st.data())
def test_all_options_at_once(
    clusters: dict[int, Client], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_case(clusters, tmp_path_factory.mktemp("gram"), data.draw)


@pytest.mark.slow
@settings(max_examples=500, derandomize=False)
@given(data=st.data())
def test_all_options_at_once_many_times_over(
    clusters: dict[int, Client], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_case(clusters, tmp_path_factory.mktemp("gram"), data.draw)


def check_added(clusters: dict[int, Client], folder: Path, draw: Draw) -> None:
    """Axes that are added up first, of which a part may be missing."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32), label="seed"))
    shape = [draw(st.integers(4, 12)) for _ in "ab"]
    axes: list[int] = []
    for _ in range(draw(st.integers(1, 2), label="axes to add up")):
        place = draw(st.integers(0, len(shape)))
        axes = [axis + (axis >= place) for axis in axes] + [place]
        shape.insert(place, draw(st.integers(1, 3)))
    dtype = np.dtype(draw(st.sampled_from(["i1", "u2", "i4", "f4", "f8"]), label="dtype"))
    x: np.ndarray = (np.abs if dtype.kind == "u" else np.asarray)(20 * rng.standard_normal(shape)).astype(
        dtype
    )
    options: dict[str, Any] = {"of": draw(st.sampled_from(["columns", "rows"])), "divide": 7.5}
    options["center"] = draw(st.sampled_from([False, True, "columns", "rows", "both"]), label="center")
    gone = np.zeros(shape, bool)
    if draw(st.booleans(), label="gaps"):
        gone = rng.random(shape) < 0.1
        for axis in {*range(len(shape))} - {*axes}:  # some are there of each line
            np.moveaxis(gone, axis, 0)[0] = False
        code: Any = CODE if dtype.kind in "iu" else np.nan
        x = np.where(gone, code, np.where(x == CODE, CODE + 1, x)).astype(dtype)
        options["missing"] = CODE if dtype.kind in "iu" else "nan"
    chunks = tuple(draw(st.integers(1 + length // 3, length)) for length in shape)
    path = naive.put(folder / "x.zarr", x, chunks, dimension_names="pqrs"[: len(shape)])
    found = tw.gram(
        path,
        add_up=[draw(st.sampled_from([axis, "pqrs"[axis]])) for axis in axes],
        cluster=clusters[draw(st.sampled_from([1, 2, 3]), label="workers")],
        device="cpu",
        listener=lambda event: None,
        **options,
    )
    lacking = gone.any(axis=tuple(axes))
    whole = np.where(lacking, 0, x.sum(axis=tuple(axes), dtype="f8"))
    expected, size = naive.gram_and_size(whole, None, naive.Asked(**options | {"missing": lacking}))
    assert (np.abs(found - expected) <= 40 * np.finfo(found.dtype).eps * size).all()


@settings(max_examples=4)
@given(data=st.data())
def test_axes_that_are_added_up(
    clusters: dict[int, Client], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_added(clusters, tmp_path_factory.mktemp("added"), data.draw)


@pytest.mark.slow
@settings(max_examples=100, derandomize=False)
@given(data=st.data())
def test_axes_that_are_added_up_many_times_over(
    clusters: dict[int, Client], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_added(clusters, tmp_path_factory.mktemp("added"), data.draw)
