"""What may be asked of neighbours and pairs: every option checked by itself, then against the matrices it is for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewright.kernels.arguments import as_count, check_choice, check_flag, shown
from tilewright.kernels.choices import PRECISIONS
from tilewright.kernels.neighbours.order import (
    INTEGER,
    METRICS,
    Bound,
    MetricName,
    is_known,
    key_bound,
    sum_dtype,
    sums_fit,
    value_dtype,
)
from tilewright.kernels.numbers import counted
from tilewright.pipeline.errors import DTypeError, OptionError, ShapeError
from tilewright.pipeline.gram.options import SIDES, Side, axis_of, other
from tilewright.pipeline.options import RunRequest
from tilewright.pipeline.store.arrays import Input, Source, name_of, read_unit
from tilewright.pipeline.store.attributes import dimension_names
from tilewright.pipeline.store.labels.alignment import ALIGNS, Align, Along, check_same_labels, ends_told
from tilewright.pipeline.store.origin import is_same_array
from tilewright.pipeline.store.region import StoredArray
from tilewright.pipeline.store.sources.parts import open_matrix


@dataclass(frozen=True)
class NeighbourRequest(RunRequest):
    """Neighbours, or pairs where k is None, by the parameters of ``tilewright.topk`` and ``tilewright.pairs``, which
    say what each may be."""

    a: Input
    b: Input | None = None
    out: Source | None = None
    k: Any = None
    above: Any = None
    below: Any = None
    metric: MetricName = "dot"
    of: Side = "rows"
    align: Align = "labels"
    exclude_self: Any = False
    count_only: Any = False
    resume: Any = True
    verify: Any = True
    overwrite: Any = False

    @property
    def work(self) -> str:
        """Its name in events and records."""
        return "pairs" if self.k is None else "topk"

    @property
    def threshold(self) -> float:
        """Of pairs."""
        return float(self.above if self.above is not None else self.below)

    def checked(self) -> NeighbourRequest:
        """The same, once its options are found good, but for what only `open_sides` can tell."""
        self.check_place()
        check_choice("metric", self.metric, METRICS)
        check_choice("of", self.of, SIDES)
        check_choice("align", self.align, ALIGNS)
        check_choice("precision", self.precision, PRECISIONS)
        options: dict[str, Any] = {
            name: check_flag(name, getattr(self, name))
            for name in ("exclude_self", "count_only", "resume", "verify", "overwrite")
        }
        if self.k is None:
            thresholds = _thresholds(self.above, self.below)
            _check_parts(thresholds, self.metric)
            return replace(self, **options, **thresholds)
        k = as_count(self.k)
        if k is None or k < 1:
            raise OptionError(f"k={shown(self.k)}: how many neighbours each row gets, 1 or more")
        return replace(self, **options, k=k)


def _thresholds(above: Any, below: Any) -> dict[str, Any]:
    """Raise OptionError unless one of both is a number, and no NaN."""
    given = {name: value for name, value in (("above", above), ("below", below)) if value is not None}
    if len(given) != 1:
        found = "neither above nor below is given" if not given else "both above and below are given"
        raise OptionError(
            f"{found}: say which pairs are wanted, by above=t (--above), those whose value is at least t, or by below=t"
            " (--below), those whose value is at most t"
        )
    ((name, value),) = given.items()
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise OptionError(f"{name}={shown(value)} is no number; give the threshold of pairs' values")
    if number != number:
        raise OptionError(f"{name}=nan: no value is on either side of NaN; give a number")
    try:
        threshold = float(number)
    except OverflowError:
        threshold = math.inf if number > 0 else -math.inf
    return {"above": None, "below": None, name: threshold}


RANGES = {
    "cosine": (-1.0, 1.0, "a cosine is a number from -1 to 1, and no angle"),
    "l2": (0.0, math.inf, "a distance is 0 or more"),
}
"""By metric: the least and the largest value that a pair can have, and both in words. A dot product may be any number.
"""


def _check_parts(thresholds: Mapping[str, float | None], metric: str) -> None:
    """Raise OptionError for a threshold that no value of a metric reaches, or every one."""
    if metric not in RANGES:
        return
    least, most, words = RANGES[metric]
    for name, threshold in thresholds.items():
        if threshold is None:
            continue
        if name == "above":
            every, none, allowed = threshold <= least, threshold > most, f"more than {least:g}"
        else:
            every, none, allowed = threshold >= most, threshold < least, f"{least:g} or more"
        if every or none:
            raise OptionError(
                f"{name}={threshold:g}: {'every' if every else 'no'} pair has such a value by metric={metric!r}, since"
                f" {words}; give {allowed}{_limit(name, most)}"
            )


def _limit(name: str, most: float) -> str:
    if math.isinf(most):
        return ""
    return f", and {most:g} at most" if name == "above" else f", and less than {most:g}"


@dataclass(frozen=True)
class Sides:
    """The two matrices whose rows, or columns, are compared."""

    arrays: Mapping[str, StoredArray]
    """By role: ``A`` and, where two are compared, ``B``."""
    of: str
    metric: MetricName
    sums: np.dtype

    @property
    def is_one(self) -> bool:
        """Whether A is compared with itself."""
        return "B" not in self.arrays

    @property
    def a(self) -> StoredArray:
        return self.arrays["A"]

    @property
    def b(self) -> StoredArray:
        return self.arrays["A" if self.is_one else "B"]

    @property
    def m(self) -> int:
        """Items of A."""
        return int(self.a.shape[axis_of(self.of)])

    @property
    def n(self) -> int:
        """Items of B."""
        return int(self.b.shape[axis_of(self.of)])

    @property
    def width(self) -> int:
        """Elements of an item."""
        return int(self.a.shape[1 - axis_of(self.of)])

    @property
    def values(self) -> np.dtype:
        """The dtype of values."""
        return value_dtype(self.sums, self.metric)

    def unit(self, array: StoredArray) -> tuple[int, int]:
        """Of what is read as one piece: items, and elements of each."""
        unit = read_unit(array)
        axis = axis_of(self.of)
        return unit[axis], unit[1 - axis]

    @property
    def item_name(self) -> str | None:
        """What the dimension of A's items is called; None where it has no name."""
        return dimension_names(self.a)[axis_of(self.of)]


def open_sides(request: NeighbourRequest) -> Sides:
    """Open the matrices of a request whose options are checked.

    Raises
    ------
    StoreError
        One is not there, or cannot be read.
    ShapeError
        One has not two dimensions, or both have items of different lengths.
    DTypeError
        One holds complex numbers.
    OptionError
        The elements of A's items have other labels than those of B's; there are fewer rows than neighbours are asked
        for; sums of integers might not fit into 64 bits; or
        ``exclude_self`` is asked for of two matrices.
    """
    given = {"A": request.a} if request.b is None else {"A": request.a, "B": request.b}
    arrays = {role: open_matrix(source, role) for role, source in given.items()}
    if len(arrays) == 2 and is_same_array(arrays["A"], arrays["B"]):
        del arrays["B"]
    for role, array in arrays.items():
        if not is_known(array.dtype.newbyteorder("=")):
            raise DTypeError(
                f"{role}: {name_of(array)} holds {array.dtype}; neighbours are found among bool, integers and floats"
                " of 16, 32 or 64 bits"
            )
    a, b = arrays["A"], arrays.get("B", arrays["A"])
    dtypes = a.dtype.newbyteorder("="), b.dtype.newbyteorder("=")
    sides = Sides(arrays, request.of, request.metric, sum_dtype(*dtypes))
    along = 1 - axis_of(request.of)
    elements = Along("A", a, along), Along("B", b, along)
    if a.shape[along] != b.shape[along]:
        raise ShapeError(
            f"{name_of(a)} has {counted(int(a.shape[along]), other(request.of)[:-1])} and {name_of(b)} has"
            f" {b.shape[along]}; {request.of} that are compared must have equally many elements{ends_told(*elements)}"
        )
    if request.align == "labels":
        check_same_labels(*elements, f"the elements of {request.of}")
    if sides.sums == INTEGER and not sums_fit(*dtypes, sides.width, request.metric):
        names = " and ".join(dict.fromkeys(str(dtype) for dtype in dtypes))
        raise OptionError(
            f"metric={request.metric!r}: sums of {counted(sides.width, 'product')} of {names} may exceed 64 bits, and"
            " then nobody knows which is nearer; store the numbers as integers of at most 16 bits, or as floats"
        )
    if request.exclude_self and not sides.is_one:
        raise OptionError(
            f"exclude_self: {name_of(a)} and {name_of(b)} are two matrices, and no row of one is a row of the other;"
            " leave B out, or exclude_self (--exclude-self)"
        )
    if request.k is not None:
        _check_enough(request, sides)
    return sides


def _check_enough(request: NeighbourRequest, sides: Sides) -> None:
    most = sides.n - bool(request.exclude_self)
    if request.k <= most:
        return
    role = "A" if sides.is_one else "B"
    but = ", and none is its own neighbour (exclude_self)" if request.exclude_self else ""
    if most < 1:
        raise OptionError(
            f"k={request.k}: {role}, {name_of(sides.b)}, has {counted(sides.n, request.of[:-1])}{but}, so that none"
            " is a neighbour; give a matrix with more"
        )
    raise OptionError(
        f"k={request.k}: {role}, {name_of(sides.b)}, has {counted(sides.n, request.of[:-1])}{but}; ask for"
        f" {most} at most (k, -k)"
    )


def bound_of(request: NeighbourRequest, sides: Sides) -> Bound | None:
    """Which keys the wanted pairs have; None where no pair can have one."""
    return key_bound(request.threshold, request.above is not None, sides.sums, request.metric)
