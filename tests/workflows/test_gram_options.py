"""Every option of `gram`, `cov` and `corr` beside every other one, against the definition, for any dtype, chunks, gaps
and number of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
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
from tests.workflows.labels import KINDS, Labels, drawn_labels, others_along, put_labelled
from tests.workflows.products import check_precision
from tilewright.kernels.choices import PRECISIONS
from tilewright.kernels.tolerance import operand_roundoff
from tilewright.pipeline.errors import OptionError, TilewrightError
from tilewright.pipeline.events import Event
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
    given = case.asked["center"]
    subtracted = {*centered, *(given if isinstance(given, dict) else ())}
    over_pairs = pairwise and case.of in centered
    # Means over pairs do not go with factors of the lines that are summed over.
    sides = [case.of] if over_pairs else ["columns", "rows"]
    scales: list[Any] = [False, *([] if over_pairs and case.y is not None else ["values"])]
    scales += [
        side for side in (True, "columns", "rows")
        if subtracted <= {case.of if side is True else side}
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
    alleles = name == "gram" and y is None and dtype.kind != "c" and draw(st.booleans(), label="dosages")
    if alleles:
        case.x = dosages(draw, rng, x.shape, dtype)
    if draw(st.booleans(), label="gaps"):
        with_gaps(draw, rng, case)
    if alleles:
        with_alleles(draw, rng, case)
        return case
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


def dosages(draw: Draw, rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Of alleles, from 0 to 2: counted, or as imputation has them."""
    found: Any = rng.binomial(2, 0.2 + 0.6 * rng.random(), shape)
    if dtype.kind == "f" and draw(st.booleans(), label="imputed"):
        found = np.clip(found + 0.3 * rng.standard_normal(shape), 0, 2)
    found = found.astype(dtype)
    found[1, 1] = 2  # so that these are no haplotypes
    return np.asarray(found)


def with_alleles(draw: Draw, rng: np.random.Generator, case: Case) -> None:
    """What a relationship matrix may be asked for besides its divisor."""
    case.both(center=case.summed, divide="2pq")
    scale = draw(st.sampled_from([False, case.summed, "values"]), label="scale")
    if scale == "values":
        given_values(draw, rng, case, "scale")
    else:
        case.both(scale=scale)
    if scale == case.summed:  # alleles that all have, or none
        case.both(constant="zero")
    else:
        with_odd_variables(draw, case, 1)
    if draw(st.booleans(), label="double precision"):
        case.given["dtype"] = "f8"


def with_odd_variables(draw: Draw, case: Case, constant: int = CODE + 1) -> None:
    """One that is constant, and one without any number, where these may be."""
    made = case.asked["center"] is not False or case.asked["scale"] is not False
    if not made or not draw(st.booleans(), label="odd variables"):
        return
    case.both(constant=draw(st.sampled_from(["zero", "nan"]), label="constant"))
    lines = case.x.T if case.of == "rows" else case.x
    lines[:, 0] = constant
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


def with_labels(draw: Draw, rng: np.random.Generator, case: Case, axes: Axes) -> dict[int, Labels]:
    """Coordinates of X along axes that are summed over, by which latitudes may be weights."""
    by_axes = case.asked.get("weights") is not None and draw(st.booleans(), label="weights by axes")
    if not by_axes and not draw(st.booleans(), label="coordinates"):
        return {}
    found = {}
    weights: dict[str | int, Any] = {}
    broadcast = np.ones(())
    for axis in axes.summed:
        cosines = by_axes and (not weights or draw(st.booleans(), label="cosines"))
        kinds = ("latitudes", "radians") if cosines else KINDS
        found[axis] = drawn_labels(draw, axes.shape[axis], kinds)
        values = found[axis].cosines if cosines else rng.random(axes.shape[axis]) + 0.1
        key = draw(st.sampled_from([axis, axes.names[axis]]), label="axis of weights")
        if cosines or (by_axes and draw(st.booleans(), label="weights of an axis")):
            weights[key] = "cos" if cosines else values
        else:
            values = np.ones(axes.shape[axis])
        broadcast = np.multiply.outer(broadcast, values)
    if by_axes:
        case.given["weights"], case.asked["weights"] = weights, broadcast.ravel()
    return found


@dataclass(frozen=True)
class Axes:
    """Those of a matrix as it is stored."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    summed: list[int]
    """The numbers of those that are summed over."""

    @classmethod
    def of(cls, case: Case, role: str, flattened: bool) -> Axes:
        matrix = case.matrices[role]
        if flattened:
            shape, summed = as_axes(case, matrix)
        else:
            shape, summed = matrix.shape, [0 if case.of == "columns" else 1]
        names = [role.lower()] * len(shape)
        for axis, name in zip(summed, "st", strict=False):
            names[axis] = name
        return cls(shape, tuple(names), summed)


def check_case(clusters: dict[int, Client], folder: Path, draw: Draw, device: Any = "cpu") -> None:
    rng = np.random.default_rng(draw(st.integers(0, 2**32), label="seed"))
    name = draw(st.sampled_from(["gram", "gram", "cov", "corr"]), label="function")
    case = drawn_case(draw, rng, name)
    missing = case.given.get("missing")
    flattened = draw(st.booleans(), label="three axes")
    axes_of = {role: Axes.of(case, role, flattened) for role in case.matrices}
    of_x = with_labels(draw, rng, case, axes_of["X"])
    differ = False
    paths = []

    def others() -> dict[int, Labels | None]:
        nonlocal differ
        found = {axis: others_along(draw, labels) for axis, labels in of_x.items()}
        differ |= not all(same for _, same in found.values())
        return {axis: labels for axis, (labels, _) in found.items()}

    for role, matrix in case.matrices.items():
        axes = axes_of[role]
        chunks = tuple(draw(st.integers(1 + length // 8, length + 3)) for length in axes.shape)
        stored = put_labelled(
            folder / role, matrix.reshape(axes.shape), chunks, axes.names, of_x if role == "X" else others(),
            attributes=case.attributes, compressors=draw(st.sampled_from([None, "auto"])),
        )  # fmt: skip
        paths.append(stored)
        mask = missing.get(role) if isinstance(missing, dict) else missing
        if isinstance(mask, np.ndarray):
            whole = mask if mask.ndim == 2 else np.broadcast_to(mask, matrix.shape)
            given_mask: Any = whole.reshape(axes.shape)
            if draw(st.booleans(), label="a stored mask"):
                along = others() if role == "X" else {}
                given_mask = put_labelled(folder / f"{role} mask", given_mask, chunks, axes.names, along)
            case.given["missing"] = (
                {**case.given["missing"], role: given_mask} if case.y is not None else given_mask
            )
    if flattened:
        case.given["sum_over"] = [
            draw(st.sampled_from([axis, axes_of["X"].names[axis]])) for axis in axes_of["X"].summed
        ]
    else:
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
    precision = draw(st.sampled_from(PRECISIONS), label="precision")
    told: list[Event] = []
    compute = partial(
        getattr(tw, name),
        *paths,
        folder / "c.zarr",
        cluster=clusters[draw(st.sampled_from([1, 2, 3]), label="workers")],
        device=device,
        device_memory=draw(st.sampled_from([None, "100KiB" if device == "cpu" else "400KiB"])),
        listener=told.append,
    )
    if differ:
        with pytest.raises(
            tw.OptionError, match=r"^the coordinates [st],.* are not the same in X .*'position'"
        ):
            compute(**case.given)
        case.given["align"] = "position"
    with pytest.MonkeyPatch.context() as patched:
        if draw(st.booleans(), label="masks are read in chunks"):
            patched.setattr(masks, "HELD_ELEMENTS", 0)
        try:
            run, refused = compute(precision=precision, **case.given), False
        except tw.OptionError as error:
            if not str(error).startswith(f"precision={precision!r} is a choice for"):
                raise
            run, refused = compute(**case.given), True
    check_precision(run, precision, refused, told if device == "cpu" else None)
    assert run.verification is not None
    assert run.verification.passed, run.verification
    assert run.plan.symmetric == (case.y is None and (band is None or band.before == band.after))
    narrow = precision if device != "cpu" and not refused else "full"
    compare(zarr.open_array(folder / "c.zarr")[...], case, band, narrow)
    assert tw.audit(folder / "c.zarr").passed
    if case.asked["divide"] == "2pq":
        beyond = case.x.copy()
        beyond[1, 1] = 5
        zarr.open_array(paths[0])[...] = beyond.reshape(axes_of["X"].shape)
        with pytest.raises(tw.OptionError, match="that are not from 0 to 2, as dosages"):
            tw.gram(paths[0], folder / "d.zarr", cluster=clusters[1], device=device, **case.given)


def compare(found: np.ndarray, case: Case, band: Band | None, precision: str) -> None:
    """precision: that of the products."""
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
    bound = ((lines + 20) * eps + 4 * operand_roundoff(precision, found.dtype)) * np.nan_to_num(size)
    if asked.missing_as == "pairwise" and asked.scaled == case.of:
        there = [naive.present(each, masked(asked.missing, role)) for role, each in case.matrices.items()]
        left, *_, right = [each if case.of == "columns" else each.T for each in (there[0], there[-1])]
        inside &= left.T.astype(int) @ right >= FEWEST_PAIRS
        bound = np.full(found.shape, 2e4 * eps if precision == "full" else np.inf)
    np.testing.assert_array_equal(np.isnan(found[inside]), np.isnan(expected[inside]))
    apart = np.abs(found - expected)
    assert (np.nan_to_num(apart) <= bound)[inside].all(), (case.given, np.nanmax(apart[inside]))


def masked(missing: Any, role: str) -> Any:
    return missing[role] if isinstance(missing, dict) else missing


@settings(max_examples=24)
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


@pytest.mark.gpu
@settings(max_examples=40)
@given(data=st.data())
def test_all_options_at_once_on_a_gpu(
    clusters: dict[int, Client], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_case(clusters, tmp_path_factory.mktemp("gram"), data.draw, "cuda")


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


def test_real_numbers_in_a_complex_dtype_are_centred(rng: np.random.Generator) -> None:
    x = rng.standard_normal((40, 3)).astype(np.float32)
    found = np.asarray(tw.gram(x, center=True, dtype="complex64", device="cpu"))
    assert found.dtype == np.complex64
    np.testing.assert_allclose(found, 39 * np.cov(x.T), atol=1e-4)


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"overwrite": np.array([1, 2])}, OptionError),
        ({"beta": 1, "out": b"c.zarr"}, TilewrightError),
        ({"chunks": 10**5000}, OptionError),
    ],
)
def test_what_cannot_be_meant_is_an_error_of_ours(asked: dict[str, Any], error: type[Exception]) -> None:
    a = np.ones((2, 2))
    with pytest.raises(error):
        tw.matmul(a, a, **({"out": "c.zarr", "device": "cpu"} | asked))
