"""Whether a stored group of neighbours, or of pairs, is one: all of it by its form, and a sample of its items by what
they are compared with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import zarr

from tilewright.kernels.arguments import shown
from tilewright.kernels.neighbours.order import NO_INDEX
from tilewright.kernels.numbers import counted
from tilewright.pipeline import config
from tilewright.pipeline.cluster.profiles import Cluster
from tilewright.pipeline.errors import (
    DamagedError,
    DTypeError,
    OptionError,
    ShapeError,
    StoreError,
    TilewrightError,
)
from tilewright.pipeline.events import Caution, Listener, UnitDone, WorkDone, WorkPlanned
from tilewright.pipeline.gram.job import unchanged
from tilewright.pipeline.neighbours.check import (
    NeighbourCheck,
    Reported,
    check_reported,
    drawn_items,
    out_of_order,
    reported_in,
)
from tilewright.pipeline.neighbours.group import KINDS
from tilewright.pipeline.neighbours.job import free, planned_on, searching
from tilewright.pipeline.neighbours.options import NeighbourRequest, Sides, open_sides
from tilewright.pipeline.product.audit import Audit, BadObject
from tilewright.pipeline.provenance import PROVENANCE
from tilewright.pipeline.store.arrays import Input, name_of, open_array, write_unit
from tilewright.pipeline.store.attributes import packing_notice
from tilewright.pipeline.store.region import StoredArray, chunks_in
from tilewright.pipeline.store.region_read import read_region
from tilewright.pipeline.store.sources.parts import open_matrix
from tilewright.pipeline.worker.survey import survey

AUDIT = "audit"
"""Its name in events."""
ARRAYS = {"topk": ("indices", "values"), "pairs": ("row", "column", "value")}
"""Of a group, by the work that made it; the last holds values, the others int64."""


@dataclass(frozen=True)
class NeighbourAudit(Audit):
    """What an audit found of stored neighbours, or pairs.

    ``by`` is ``items``. ``objects``, ``nbytes`` and ``bad`` are of all arrays of the group: each stored object that
    cannot be decoded, or holds what no search stores, with its rows and columns, or with its stretch of pairs.
    """

    check: NeighbourCheck | None = None
    """What comparing a sample of items anew has shown; None where the group is bad already."""

    @property
    def passed(self) -> bool:
        """Whether nothing is bad, and all that was drawn is as it should be."""
        return super().passed and self.check is not None and self.check.passed

    def to_json(self) -> dict[str, object]:
        return super().to_json() | {"check": None if self.check is None else self.check.to_json()}

    def __str__(self) -> str:
        if self.check is None:
            return f"{super().__str__()}\nno item was compared anew"
        if not self.check.passed:
            return f"audit failed: {self.name}: {self.check.cause}\n{self.check.sample}"
        return f"{super().__str__()}\n{self.check}"


@dataclass(frozen=True)
class BadPairs(BadObject):
    """A stored object of pairs: its rows are places among them."""

    def __str__(self) -> str:
        return f"{self.file} (pairs {self.rows[0]} to {self.rows[1] - 1}): {self.reason}"


@dataclass(frozen=True)
class _Group:
    """A group as it is stored, with what it says of itself."""

    name: str
    request: NeighbourRequest
    """What was asked for, without the matrices."""
    inputs: Mapping[str, str]
    """Names of the matrices, by role; empty where the group does not say."""
    shapes: Mapping[str, Any]
    arrays: Mapping[str, zarr.Array[Any]]

    @property
    def values(self) -> zarr.Array[Any]:
        return self.arrays[ARRAYS[self.request.work][-1]]

    @property
    def length(self) -> int:
        """Items of A, or pairs."""
        return int(self.values.shape[0])


def audit_neighbours(
    path: Path,
    name: str,
    description: tuple[str, Mapping[str, Any]],
    a: Input | None,
    b: Input | None,
    *,
    cluster: Cluster,
    cluster_file: str | None,
    listener: Listener,
) -> NeighbourAudit:
    """Look at all of a group in a local folder, block by block, and compare a sample of its items anew.

    description: as `description_at` finds it. a, b: what it was made of; None: what the group names. Nothing is
    written.

    Raises
    ------
    StoreError
        An array of the group or a matrix is not there, or cannot be read; or the group does not say what it is.
    ShapeError, DTypeError
        The group is of other matrices.
    OptionError
        It was made of one matrix and two are given, or of two, and one is.
    """
    start = time.perf_counter()
    group = _open_group(path, name, *description)
    request, sides = _with_inputs(group, a, b)
    _check_fit(group, sides)
    for role, array in sides.arrays.items():
        if (note := packing_notice(role, array)) is not None:
            listener(Caution(note))
    request = replace(request, cluster=cluster, cluster_file=cluster_file, listener=listener)
    bad, reported = _Look(group, sides, drawn_items(sides.m)).over_all(listener)
    found = NeighbourAudit(
        name,
        "items",
        sum(1 for array in group.arrays.values() for _ in _pieces(array, 0, group.length)),
        sum(array.nbytes for array in group.arrays.values()),
        tuple(bad),
        0.0,
    )
    if not bad:
        found = replace(found, check=_compared(group, request, sides, reported))
    return replace(found, seconds=time.perf_counter() - start)


def _compared(
    group: _Group, request: NeighbourRequest, sides: Sides, reported: list[Reported]
) -> NeighbourCheck:
    """Compare items with all of B, on the cores of the workers."""
    with (
        searching(request, sides, AUDIT) as client,
        unchanged(client, sides.arrays, f"{group.name} was compared with it") as arrays,
    ):
        pairs = sides.m * sides.n
        density = group.length / pairs if request.k is None and pairs else 0.0
        work, plan = planned_on(
            "cpu", survey(client, "cpu"), request, replace(sides, arrays=arrays), lambda _: density
        )
        try:
            return check_reported(client, work, reported, plan.threads, request.listener)
        finally:
            free(client, work)


def _open_group(path: Path, name: str, work: str, attributes: Mapping[str, Any]) -> _Group:
    """Raises StoreError where it does not say what was asked for, or an array is missing; as `open_array`."""
    said, provenance = attributes[KINDS[work]], attributes.get(PROVENANCE)
    provenance = provenance if isinstance(provenance, dict) else {}
    inputs, shapes = provenance.get("inputs"), provenance.get("shapes")
    arrays = {
        array: open_array(path / array, ndim=2 if work == "topk" else 1, role=array) for array in ARRAYS[work]
    }
    known = isinstance(inputs, dict) and "A" in inputs and inputs.keys() <= {"A", "B"}
    names = {role: str(one) for role, one in inputs.items()} if known and inputs else {}
    shapes = shapes if isinstance(shapes, dict) else {}
    return _Group(name, _request_of(name, work, said), names, shapes, arrays)


def _request_of(name: str, work: str, said: Any) -> NeighbourRequest:
    told = said if isinstance(said, dict) else {}
    options: dict[str, Any] = {option: told.get(option) for option in ("metric", "of", "precision")}
    if work == "topk":
        options |= {"k": told.get("k", 0), "exclude_self": told.get("exclude_self", False)}
    else:
        options |= {"above": told.get("above"), "below": told.get("below")}
    try:
        # What stands there was made of these matrices, whatever their labels say.
        return NeighbourRequest(cast("Input", None), device="cpu", align="position", **options).checked()
    except OptionError as error:
        raise StoreError(
            f"C: the attribute {KINDS[work]} of {name} is {shown(said)}, and {work} writes none such ({error}); make"
            " the group again"
        ) from error


def _with_inputs(group: _Group, a: Input | None, b: Input | None) -> tuple[NeighbourRequest, Sides]:
    """What the group is of: matrices that are given, or those that it names."""
    if not group.inputs and a is None:
        raise StoreError(
            f"A: {group.name} does not name what it was made of; give that (a, and b where there were two)"
        )
    given = {role: source for role, source in (("A", a), ("B", b)) if source is not None}
    found: dict[str, Any] = {}
    for role in dict.fromkeys([*given, *group.inputs]):
        if role in given:
            found[role] = given[role]
            continue
        try:
            found[role] = open_matrix(group.inputs[role], role)
        except TilewrightError as error:
            raise StoreError(
                f"{error} ({group.name} names it so; give {role} as it is found from here: {role.lower()})"
            ) from error
    request = replace(group.request, a=found["A"], b=found.get("B"))
    # What is asked for of a search is asked of the group, by `_check_fit`, which knows what to change.
    sides = open_sides(replace(request, k=None, exclude_self=False))
    if group.inputs and sides.is_one != ("B" not in group.inputs):
        if sides.is_one:
            raise OptionError(
                f"{group.name} compares {group.inputs['A']} with {group.inputs['B']}, and A and B are one array,"
                f" {name_of(sides.a)}; give both (a, b)"
            )
        raise OptionError(
            f"{group.name} compares {group.inputs['A']} with itself, and B, {name_of(sides.b)}, is given; leave B out"
        )
    return request, sides


def _check_fit(group: _Group, sides: Sides) -> None:
    """Raise ShapeError or DTypeError where the group is not of these matrices."""
    request = group.request
    for role, array in sides.arrays.items():
        before = group.shapes.get(role)
        if isinstance(before, list) and before != list(array.shape):
            raise ShapeError(
                f"{role}: {name_of(array)} has shape {tuple(array.shape)}, and {group.name} was made of"
                f" {group.inputs.get(role)} when that had {shown(tuple(before))}; give the array that it was made of"
            )
    shapes = {array.shape for array in group.arrays.values()}
    if request.k is not None:
        wanted = (sides.m, request.k)
        if shapes != {wanted}:
            raise ShapeError(
                f"{group.name} has indices of shape {group.arrays['indices'].shape} and values of shape"
                f" {group.values.shape}; {request.k} neighbours of each of {counted(sides.m, 'item')} of A,"
                f" {name_of(sides.a)}, have {wanted}: give the A that it was made of"
            )
        if request.k > sides.n - request.exclude_self:
            raise ShapeError(
                f"{group.name} has {request.k} neighbours of each item, and {name_of(sides.b)} has"
                f" {counted(sides.n, 'item')}; give the {'A' if sides.is_one else 'B'} that it was made of"
            )
    elif len(shapes) != 1:
        told = ", ".join(f"{name} {array.shape[0]}" for name, array in group.arrays.items())
        raise ShapeError(f"{group.name} has arrays of different lengths ({told}); make the group again")
    *numbers, values = ARRAYS[request.work]
    for name, wanted_dtype in [*((name, np.dtype(np.int64)) for name in numbers), (values, sides.values)]:
        dtype = group.arrays[name].dtype.newbyteorder("=")
        if dtype != wanted_dtype:
            of = " and ".join(dict.fromkeys(str(array.dtype) for array in sides.arrays.values()))
            raise DTypeError(
                f"{name}: {group.name} has {dtype}, and {request.work} by {sides.metric} of {of} stores {wanted_dtype};"
                " give the arrays that it was made of"
            )


_Fault: TypeAlias = tuple[str, np.ndarray, Callable[[tuple[int, ...]], str]]
"""The name of an array, where in a block something is wrong, and what is, there."""


class _Part(NamedTuple):
    """What was found in a block."""

    bad: list[BadObject]
    reported: list[Reported]
    """Of the items that were drawn."""
    ends: tuple[tuple[int, int], tuple[int, int]] | None
    """The first pair and the last; None where they are not known."""


@dataclass(frozen=True)
class _Look:
    """A pass over a group."""

    group: _Group
    sides: Sides
    items: np.ndarray
    """Those that are drawn."""
    step: int = field(init=False)
    """Rows of a block: no array has larger stored objects."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "step", max(write_unit(array)[0] for array in self.group.arrays.values()))

    def over_all(self, listener: Listener) -> tuple[list[BadObject], list[Reported]]:
        """Bad objects in the order of arrays and rows, and what the group says of the items that were drawn, which
        means something where nothing is bad. Raises StoreError where something cannot be read now."""
        start = time.perf_counter()
        length = self.group.length
        firsts = range(0, length, self.step)
        arrays = self.group.arrays.values()
        row_nbytes = sum(array.nbytes for array in arrays) // max(1, length)
        listener(WorkPlanned(AUDIT, len(firsts), 0, "blocks", row_nbytes * length, 0))
        bad: dict[str, BadObject] = {}
        reports: dict[int, list[Reported]] = {item: [] for item in self.items.tolist()}
        before: tuple[int, int] | None = None
        with ThreadPoolExecutor(config.threads("read-threads"), "tilewright-audit") as pool:
            for number, part in enumerate(pool.map(self._block, firsts)):
                first = firsts[number]
                for one in part.bad:
                    bad.setdefault(one.file, one)
                if part.ends is not None and before is not None and part.ends[0] <= before:
                    told = f"{_told(part.ends[0])} follows {_told(before)}, and pairs are in order"
                    one = self._bad("row", (first,), told)
                    bad.setdefault(one.file, one)
                before = None if part.ends is None else part.ends[1]
                for each in part.reported:
                    reports[each.item].append(each)
                rows = min(first + self.step, length) - first
                listener(UnitDone(AUDIT, number, "", 0.0, row_nbytes * rows, 0, {}))
        listener(WorkDone(AUDIT, time.perf_counter() - start))
        return list(bad.values()), [self._joined(item, parts) for item, parts in reports.items()]

    def _joined(self, item: int, parts: list[Reported]) -> Reported:
        """What blocks say of one item together."""
        columns = [np.empty(0, np.int64), *(part.columns for part in parts)]
        values = [np.empty(0, self.sides.values), *(part.values for part in parts)]
        return Reported(item, np.concatenate(columns), np.concatenate(values))

    def _block(self, first: int) -> _Part:
        stop = min(first + self.step, self.group.length)
        held: dict[str, np.ndarray] = {}
        bad: list[BadObject] = []
        for name, array in self.group.arrays.items():
            try:
                held[name] = read_region(array, _region(array, first, stop))
            except DamagedError:
                undecoded = list(self._undecoded(name, array, first, stop))
                if not undecoded:
                    raise
                bad += undecoded
        if bad:
            return _Part(bad, [], None)
        topk = "indices" in held
        faults = self._in_neighbours(held, first) if topk else self._in_pairs(held)
        for name, places, tell in faults:
            if len(found := np.argwhere(places)):
                place = tuple(int(one) for one in found[0])
                bad.append(self._bad(name, (place[0] + first, *place[1:]), tell(place)))
                break  # others may come of it
        if topk:
            inside = self.items[(self.items >= first) & (self.items < stop)]
            return _Part(bad, [_copied(reported_in(held, first, item)) for item in inside.tolist()], None)
        row, column = held["row"], held["column"]
        if bad or not len(row):
            return _Part(bad, [], None)
        inside = self.items[(self.items >= row[0]) & (self.items <= row[-1])]
        ends = (int(row[0]), int(column[0])), (int(row[-1]), int(column[-1]))
        return _Part(bad, [_copied(reported_in(held, first, item)) for item in inside.tolist()], ends)

    def _in_neighbours(self, held: Mapping[str, np.ndarray], first: int) -> Iterator[_Fault]:
        indices, values = held["indices"], held["values"]
        n, metric = self.sides.n, self.sides.metric

        def told(place: tuple[int, ...], what: str) -> str:
            return f"of item {first + place[0]}, {what}"

        yield (
            "indices",
            (indices < NO_INDEX) | (indices >= n),
            lambda place: told(place, f"{indices[place]} is a neighbour, and B has {counted(n, 'item')}"),
        )
        missing = indices == NO_INDEX
        yield (
            "indices",
            missing[:, :-1] & ~missing[:, 1:],
            lambda place: told(place, f"neighbour {place[1]} is missing, and not the next"),
        )
        yield (
            "values",
            missing != _is_nan(values),
            lambda place: told(
                place, f"neighbour {place[1]} is {indices[place]}, and its value {values[place]}"
            ),
        )
        if self.group.request.exclude_self:
            yield (
                "indices",
                indices == np.arange(first, first + len(indices))[:, None],
                lambda place: told(place, "it is its own neighbour"),
            )
        ordered = np.sort(indices, axis=1)
        yield (
            "indices",
            (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NO_INDEX),
            lambda place: told(place, f"{ordered[place]} is a neighbour twice"),
        )
        yield (
            "values",
            out_of_order(indices, values, metric),
            lambda place: told(place, f"neighbours {place[1]} and {place[1] + 1} are not in order"),
        )

    def _in_pairs(self, held: Mapping[str, np.ndarray]) -> Iterator[_Fault]:
        row, column, value = (held[name] for name in ARRAYS["pairs"])
        for name, count in (("row", self.sides.m), ("column", self.sides.n)):
            yield name, *_outside(held[name], count)
        yield "value", _is_nan(value), lambda place: f"pair {_told((row[place], column[place]))} has no value"
        if self.sides.is_one:
            yield (
                "column",
                column <= row,
                lambda place: f"pair {_told((row[place], column[place]))} is not of an item and a later one",
            )
        back = np.zeros(len(row), bool)
        back[1:] = (row[1:] < row[:-1]) | ((row[1:] == row[:-1]) & (column[1:] <= column[:-1]))

        def behind(place: tuple[int, ...]) -> str:
            here, one_before = place[0], place[0] - 1
            pair, before = (row[here], column[here]), (row[one_before], column[one_before])
            return f"{_told(pair)} follows {_told(before)}, and pairs are in order"

        yield "row", back, behind

    def _undecoded(self, name: str, array: zarr.Array[Any], first: int, stop: int) -> Iterator[BadObject]:
        for region in _pieces(array, first, stop):
            try:
                read_region(array, region)
            except DamagedError:
                yield self._bad(name, tuple(part.start for part in region), "it cannot be decoded")

    def _bad(self, name: str, place: tuple[int, ...], reason: str) -> BadObject:
        """The stored object with this element."""
        array = self.group.arrays[name]
        unit = write_unit(array)
        chunk = tuple(at // side for at, side in zip(place, unit, strict=True))
        rows, *columns = (
            (at * side, min((at + 1) * side, whole))
            for at, side, whole in zip(chunk, unit, array.shape, strict=True)
        )
        file = f"{name}/{array.metadata.encode_chunk_key(chunk)}"
        if columns:
            return BadObject(file, rows, columns[0], reason)
        return BadPairs(file, rows, (0, 1), reason)


def _outside(numbers: np.ndarray, count: int) -> tuple[np.ndarray, Callable[[tuple[int, ...]], str]]:
    """Which numbers are of no item."""
    wrong = (numbers < 0) | (numbers >= count)
    return wrong, lambda place: f"{numbers[place]} is none of {counted(count, 'item')}"


def _copied(report: Reported) -> Reported:
    """Without the block around it."""
    return Reported(report.item, report.columns.copy(), report.values.copy())


def _told(pair: tuple[int, int]) -> str:
    return f"({pair[0]}, {pair[1]})"


def _is_nan(values: np.ndarray) -> np.ndarray:
    return np.isnan(values) if values.dtype.kind == "f" else np.zeros(values.shape, bool)


def _region(array: StoredArray, first: int, stop: int) -> tuple[slice, ...]:
    return slice(first, stop), *(slice(0, side) for side in array.shape[1:])


def _pieces(array: zarr.Array[Any], first: int, stop: int) -> Iterator[tuple[slice, ...]]:
    """The parts of some rows that lie in one stored object each."""
    region = _region(array, first, stop)
    for piece in chunks_in(region, write_unit(array)):
        yield tuple(
            slice(whole.start + part.start, whole.start + part.stop)
            for whole, part in zip(region, piece.target, strict=True)
        )
