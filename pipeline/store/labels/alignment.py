"""Whether two arrays have the same labels along a side that pairs their elements: matrices that are summed over it, an
array and its mask, an array and weights.

Elements are paired by where they lie. Coordinates say what they are of, such as times; where both arrays have some that
differ, a result would be of pairs that nobody means, and no check of the product would see that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import zarr

from tilewright.kernels.numbers import counted
from tilewright.pipeline.errors import OptionError
from tilewright.pipeline.store.arrays import name_of
from tilewright.pipeline.store.attributes import dimension_names
from tilewright.pipeline.store.coordinates import axes_of, known_along, span_of
from tilewright.pipeline.store.labels.times import STANDARD, Instants, instants, shown_instant
from tilewright.pipeline.store.region import StoredArray, base_of
from tilewright.pipeline.store.sources.beside import Coordinates

Align: TypeAlias = Literal["labels", "position"]
ALIGNS: tuple[Align, ...] = get_args(Align)
"""What pairs elements of two arrays: the same place with the same label, where both have any; or the place alone."""

ROUNDINGS = 8
"""Roundings of the coarser dtype, of the largest coordinate, by which two may differ and be the same."""

HOW = "ask to pair them by where they lie (align='position', --align position)"


@dataclass(frozen=True)
class Along:
    """A side of a matrix, or an axis of an array, and what the array is called."""

    role: str
    array: StoredArray
    side: int

    @property
    def full_name(self) -> str:
        return f"{self.role} ({name_of(self.array)})"

    @property
    def variable(self) -> str:
        """What it is called in an example of code: ``x`` of X, ``weights`` of ``weights['lat']``."""
        return self.role.lower().removeprefix("the ").partition("[")[0]

    @cached_property
    def base(self) -> zarr.Array[Any]:
        """The array that is stored."""
        return base_of(self.array)

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """Of that, the axes that the side is made of."""
        return axes_of(self.array, self.side)

    @cached_property
    def names(self) -> tuple[str | None, ...]:
        """Of these axes."""
        names = dimension_names(self.base)
        return tuple(names[axis] for axis in self.axes)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of these axes."""
        return tuple(int(self.base.shape[axis]) for axis in self.axes)

    @cached_property
    def span(self) -> tuple[int, int]:
        """The first place along the flattened axes, and the last + 1."""
        return span_of(self.array, self.side, math.prod(self.shape))

    def places(self, number: int) -> np.ndarray:
        """For each element of the side, its place along one of the axes."""
        along, behind = self.shape[number], math.prod(self.shape[number + 1 :])
        return np.arange(*self.span) // behind % along

    def coordinates(self, number: int) -> Coordinates | None:
        """Of one of the axes, as far as they are known."""
        return known_along(self.base, self.axes[number])


@dataclass(frozen=True)
class _Labels:
    """Some coordinates of an axis."""

    found: Coordinates

    @cached_property
    def instants(self) -> Instants | None:
        return instants(self.found.values, self.found.attributes)

    @property
    def kind(self) -> str:
        """What they are, in words."""
        units = self.found.attributes.get("units", "")
        if self.instants is not None:
            same = self.instants.calendar == STANDARD
            return "times" if same else f"times by the calendar {self.instants.calendar}"
        if isinstance(units, str) and " since " in units:
            return f"{units!r} by the calendar {self.found.attributes.get('calendar', STANDARD)}"
        return {"U": "texts", "T": "texts", "O": "objects", "b": "texts"}.get(
            self.found.values.dtype.kind, "numbers"
        )

    def shown(self, place: int) -> str:
        if self.instants is not None and self.instants.calendar == STANDARD:
            date = shown_instant(int(self.instants.values[place]))
            if date is not None:
                return date
        value, units = self.found.values[place], self.found.attributes.get("units")
        if isinstance(value, str):
            return repr(str(value))
        return f"{value} {units}" if isinstance(units, str) and " since " in units else str(value)

    def taken(self, places: np.ndarray) -> _Labels:
        return _Labels(Coordinates(self.found.values[places], self.found.attributes))


def check_same_labels(one: Along, other: Along, paired: str) -> None:
    """Raise OptionError where both sides, of one length, have labels that differ, or are made of the same axes in
    another order.

    paired: what is done along the side, in words, such as ``summed over``.
    """
    if one.base is other.base and (one.axes, one.span) == (other.axes, other.span):
        return
    if any(set(side.names) == {None} for side in (one, other)):
        return  # axes without a name have no coordinates
    _check_order(one, other, paired)
    for names, left, right, places in _labelled(one, other):
        differ = _differing(left, right)
        if differ.any():
            raise OptionError(_told(names, left, right, np.flatnonzero(differ), places, one, other, paired))


def _check_order(one: Along, other: Along, paired: str) -> None:
    left, right = one.names, other.names
    if left != right and None not in left and sorted(map(str, left)) == sorted(map(str, right)):
        raise OptionError(
            f"the axes that are {paired} lie as {', '.join(map(str, left))} in {one.full_name} and as"
            f" {', '.join(map(str, right))} in {other.full_name}, and their elements are paired in the order in which"
            f" they lie: transpose one of both (xarray: y.transpose(...)), or {HOW}"
        )


def _labelled(one: Along, other: Along) -> Iterator[tuple[tuple[str, str], _Labels, _Labels, np.ndarray]]:
    """For each two axes that lie along each other and have coordinates: what each is called, the labels of elements
    that are paired, and the places of these along the side. Where a side has other axes than the other, none."""
    if len(one.shape) != len(other.shape):
        return
    whole = one.shape == other.shape and one.span == other.span == (0, math.prod(one.shape))
    for number in range(len(one.shape)):
        left, right = one.coordinates(number), other.coordinates(number)
        if left is None or right is None:
            continue
        if whole:  # each label once
            of_left = of_right = np.arange(one.shape[number])
        else:
            of_left, of_right = one.places(number), other.places(number)
        known = np.ones(len(of_left), bool)
        for found, places in ((left, of_left), (right, of_right)):
            known &= (places >= found.first) & (places < found.first + len(found.values))
        yield (
            (str(one.names[number]), str(other.names[number])),
            _Labels(left).taken(of_left[known] - left.first),
            _Labels(right).taken(of_right[known] - right.first),
            np.flatnonzero(known),
        )


def _differing(left: _Labels, right: _Labels) -> np.ndarray:
    """Where labels are not the same."""
    one, other = left.found.values, right.found.values
    if left.instants is not None and right.instants is not None:
        if left.instants.calendar != right.instants.calendar:
            return np.ones(len(one), bool)
        rounding = left.instants.rounding + right.instants.rounding
        return np.abs(left.instants.values - right.instants.values) > rounding
    if left.kind != right.kind:
        return np.ones(len(one), bool)
    if {one.dtype.kind, other.dtype.kind} <= set("iufc"):
        return _apart(one, other)
    return np.array([bool(a != b) for a, b in zip(one.tolist(), other.tolist(), strict=True)], bool)


def _apart(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Where numbers differ by more than they are rounded to; NaN is NaN."""
    coarser = [np.finfo(each.dtype).eps for each in (one, other) if each.dtype.kind in "fc"]
    if not coarser:
        return one != other
    kind = np.result_type(one, other, np.float64)
    one, other = one.astype(kind), other.astype(kind)
    sizes = np.abs(np.concatenate([one, other]))
    largest = float(sizes[np.isfinite(sizes)].max(initial=0))
    with np.errstate(invalid="ignore"):
        same = (one == other) | (np.abs(one - other) <= ROUNDINGS * float(max(coarser)) * largest)
    return ~(same | (np.isnan(one) & np.isnan(other)))


def _told(
    names: tuple[str, str],
    left: _Labels,
    right: _Labels,
    differ: np.ndarray,
    places: np.ndarray,
    one: Along,
    other: Along,
    paired: str,
) -> str:
    first, length = int(differ[0]), len(left.found.values)
    kinds = ""
    if left.kind != right.kind:
        kinds = f", {left.kind} in {one.role} and {right.kind} in {other.role}"
    turned = _in_another_order(left, right)
    order = ", the same labels in another order" if turned else ""
    of_one, of_other = one.variable, other.variable
    if turned and left.found.values.dtype.kind != "O":
        cure = (
            "put one in the order of the other, as with"
            f" {of_other} = {of_other}.sel({names[1]}={of_one}.{names[0]}) in xarray"
        )
    elif kinds:
        cure = "give both the same coordinates"
    elif _have_none_in_common(left, right):
        order = ", and neither has a label of the other"
        cure = "give both the same coordinates, if they are of the same"
    else:
        cure = _common_told(one, other, names)
    called = " and ".join(dict.fromkeys(names))
    return (
        f"the coordinates {called}, {paired}, are not the same in {one.full_name} and {other.full_name}: of"
        f" {counted(length, 'label')} {len(differ)} differ{kinds}{order}, first at place {places[first]}:"
        f" {left.shown(first)} in {one.role}, {right.shown(first)} in {other.role}. Elements are paired by where they"
        f" lie: {cure}, or {HOW}"
    )


def _in_another_order(left: _Labels, right: _Labels) -> bool:
    if left.instants is not None and right.instants is not None:
        one, other = np.sort(left.instants.values), np.sort(right.instants.values)
        rounding = left.instants.rounding + right.instants.rounding
        same = left.instants.calendar == right.instants.calendar
        return same and bool((np.abs(one - other) <= rounding).all())
    if left.kind != right.kind or "O" in (left.found.values.dtype.kind, right.found.values.dtype.kind):
        return False
    one, other = np.sort(left.found.values), np.sort(right.found.values)
    return not _differing(_Labels(Coordinates(one, {})), _Labels(Coordinates(other, {}))).any()


def ends_told(one: Along, other: Along) -> str:
    """A clause about the labels of two sides of different lengths, each of one axis; empty where one has none."""
    told = []
    for each in (one, other):
        found = each.coordinates(0) if len(each.shape) == 1 else None
        if found is None:
            return ""
        first, last = (place - found.first for place in each.span)
        if not 0 <= first < last <= len(found.values):
            return ""
        labels = _Labels(Coordinates(found.values[first:last], found.attributes))
        told.append(f"in {each.role} from {labels.shown(0)} to {labels.shown(last - first - 1)}")
    names = str(one.names[0]), str(other.names[0])
    called = " and ".join(dict.fromkeys(names))
    return f". The coordinates {called} go {', '.join(told)}: {_common_told(one, other, names)}"


def _common_told(one: Along, other: Along, names: tuple[str, str]) -> str:
    """How to take what both have along the axes that are paired, and nothing of the others, in one order. xarray.align
    would take from all axes of one name what both have there, such as two fields' latitudes and longitudes."""
    left, right = one.variable, other.variable
    return (
        f"take what both have, in one order, as with common = numpy.intersect1d({left}.{names[0]}, {right}.{names[1]})"
        f" and {left}, {right} = {left}.sel({names[0]}=common), {right}.sel({names[1]}=common) in xarray"
    )


def _have_none_in_common(left: _Labels, right: _Labels) -> bool:
    if left.instants is not None and right.instants is not None:
        if left.instants.rounding or right.instants.rounding:
            return False  # what is nearly the same is for `_differing`
        return not np.isin(left.instants.values, right.instants.values).any()
    if "O" in (left.found.values.dtype.kind, right.found.values.dtype.kind):
        return False
    return not np.isin(left.found.values, right.found.values).any()


def labels_at(side: Along, place: int) -> str:
    """What the coordinates say of a place along a side, such as ``lat=15.0, lon=90.0``; empty where there are none."""
    told = []
    for number, name in enumerate(side.names):
        found, at = side.coordinates(number), int(side.places(number)[place])
        if found is not None and found.first <= at < found.first + len(found.values):
            one = found.values[at - found.first :][:1]
            told.append(f"{name}={_Labels(Coordinates(one, found.attributes)).shown(0)}")
    return ", ".join(told)
