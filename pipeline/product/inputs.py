"""What A and B were when a product's tiles were computed from them, and whether they still are.

Three looks tell that, each more certain and dearer than the one before. An input that looks from outside as it did
(`appearance.py`) is taken to be what it was. What a worker reads is hashed as it is read, so a part of an input that is
read twice, by whomever and in whatever run, is seen to have changed in between. And before a tile is given up, or a
product refused, because an input looks otherwise, the parts of it that tiles depend on are read and compared with their
hashes: so a copy, a moved folder or a new time costs one reading of the input, and no tile.

A run with other tiles or panels than an earlier one reads other parts, whose hashes say nothing of those of the earlier
run. So it compares the earlier ones first, where it is going to read any of their numbers.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias

import numpy as np

from tilewright import __version__
from tilewright.kernels.numbers import counted, format_nbytes
from tilewright.pipeline.cluster.submit import run_bounded
from tilewright.pipeline.errors import StoreError, VerificationError
from tilewright.pipeline.events import Teller, on_lost, on_waiting
from tilewright.pipeline.plan.called import AS_FACTORS, Names
from tilewright.pipeline.plan.product import MatmulPlan, Tile
from tilewright.pipeline.plan.told import Corners, PanelContent
from tilewright.pipeline.reduce import end_if_given_up
from tilewright.pipeline.store.appearance import Appearance, appearance_of
from tilewright.pipeline.store.arrays import name_of
from tilewright.pipeline.store.content import chunks_text, content_hash
from tilewright.pipeline.store.region import Flattened, Masked, Section, StoredArray
from tilewright.pipeline.store.region_read import read_region
from tilewright.pipeline.store.waiting import reading_while

if TYPE_CHECKING:
    from distributed import Client

Hashes: TypeAlias = Mapping[Corners, int]
"""Of parts of one array, by where they lie in it."""

COMPARED_NBYTES = 64 * 2**20
"""Bytes of parts that one task reads and compares, one part after the other."""

MOST_COMPARED = 1000
"""Parts of one task, however small."""

SHOWN = 3
"""Changed parts that a message names."""


class InputChangedError(StoreError):
    """An input changed while a product was computed."""


@dataclass(frozen=True)
class Fingerprint:
    """What two runs of the same product have in common."""

    digest: str
    """Of what tiles of one C must share, beside the numbers of A and B: their shapes and dtypes, the request, which
    names the kind of device, and the version of Tilewright, whose releases may sum in other orders. The plan's geometry
    is compared beside it.

    Sums of floats may differ in their last bits by what is not in it: the model of GPU, the threads and the build of
    BLAS, the versions of the driver and of other packages. A run may go on elsewhere, and its result is no less right.
    """
    inputs: tuple[Appearance, Appearance]
    """How A and B looked."""
    request: dict[str, Any] = field(default_factory=dict, compare=False)
    """What was asked for."""


def fingerprint(a: StoredArray, b: StoredArray, request: dict[str, Any]) -> Fingerprint:
    """The fingerprint of a product of these factors, as they look now, for a request.

    Raises
    ------
    StoreError
        A file or folder of an input cannot be inspected.
    """
    stored = [_facts(array) for array in (a, b)]
    facts = json.dumps([__version__, stored, request], sort_keys=True)
    digest = hashlib.sha256(facts.encode()).hexdigest()
    return Fingerprint(digest, (appearance_of(a), appearance_of(b)), request)


def _facts(array: StoredArray) -> list[Any]:
    """Of a matrix: its shape and dtype, and of which axes it is made."""
    facts: list[Any] = [list(array.shape), array.dtype.newbyteorder("=").str]
    if isinstance(array, Section):
        return [*facts, _facts(array.array), list(array.rows), list(array.columns)]
    if isinstance(array, Masked):
        facts += [str(code) for code in array.codes] + ([str(array.packing)] if array.packing else [])
        return [*facts, _facts(array.array), list(array.mask.shape), list(array.axes)]
    if isinstance(array, Flattened):
        facts.append([list(array.array.shape), list(array.rows), list(array.columns)])
    return facts


def needs(plan: MatmulPlan, tile: Tile) -> list[tuple[str, Corners]]:
    """What a tile is computed from: the rectangles of A and of B, each in its array as stored. Where C is symmetric
    both are of A."""
    rows, columns = (tile.row_start, tile.row_stop), (tile.column_start, tile.column_stop)
    inner = 0, plan.k
    of_a = (*inner, *rows) if plan.transpose_a else (*rows, *inner)
    of_b = (*columns, *inner) if plan.transpose_b else (*inner, *columns)
    return [("A", of_a), ("A" if plan.symmetric else "B", of_b)]


def overlaps(wanted: Iterable[Corners], parts: Iterable[Corners]) -> dict[Corners, tuple[bool, bool]]:
    """For each rectangle that is wanted: whether any of its elements lies in a part, and whether all do. Parts may
    overlap, as those of plans with other panels do.

    >>> overlaps([(0, 4, 0, 2), (0, 2, 2, 4)], [(0, 2, 0, 2)])
    {(0, 4, 0, 2): (True, False), (0, 2, 2, 4): (False, False)}
    """
    wanted, parts = list(dict.fromkeys(wanted)), list(parts)
    edges = np.array([*wanted, *parts], np.int64).reshape(-1, 2, 2)
    rows, columns = (np.unique(edges[:, axis]) for axis in (0, 1))
    lies_in = np.zeros((max(0, len(rows) - 1), max(0, len(columns) - 1)), bool)
    """Of the cells between one edge and the next."""

    def cells(corners: Corners) -> np.ndarray:
        top, bottom = np.searchsorted(rows, corners[:2])
        left, right = np.searchsorted(columns, corners[2:])
        return lies_in[top:bottom, left:right]

    for part in parts:
        cells(part)[...] = True
    return {corners: (bool(cells(corners).any()), bool(cells(corners).all())) for corners in wanted}


@dataclass(frozen=True)
class _Compared:
    """The outcome of reading again what tiles were computed from."""

    lost: set[int]
    """Tiles that do not, or may not, belong to the inputs as they are."""
    unknown: set[int]
    """Of these, those of which it is not known what they were computed from."""
    changed: dict[str, list[Corners]]
    """Parts that hold other numbers, or cannot be read any more. Not all, where all tiles were lost before the end."""
    told: str
    """What was compared, and how long it took."""


def parts_across(parts: Sequence[Corners], wanted: Iterable[Corners]) -> list[bool]:
    """For each part: whether it has elements both inside and outside of any of the rectangles that are wanted.

    >>> parts_across([(0, 4, 0, 2), (0, 2, 0, 2), (4, 8, 0, 2)], [(0, 2, 0, 4)])
    [True, False, False]
    """
    top, bottom, left, right = np.array(parts, np.int64).reshape(-1, 4).T
    across = np.zeros(len(top), bool)
    for first_row, last_row, first, last in dict.fromkeys(wanted):
        meets = (top < last_row) & (first_row < bottom) & (left < last) & (first < right)
        within = (first_row <= top) & (bottom <= last_row) & (first <= left) & (right <= last)
        across |= meets & ~within
    return [bool(one) for one in across]


@dataclass
class Seen:
    """What one tile's panels add to what is known of the inputs."""

    fresh: dict[str, dict[Corners, int]] = field(default_factory=dict)
    """Hashes that nobody knew, or that differ from those of an earlier run."""
    changed: dict[str, list[Corners]] = field(default_factory=dict)
    """Parts that an earlier run, whose tiles were kept, read as other numbers."""
    torn: dict[str, list[Corners]] = field(default_factory=dict)
    """Parts that this run has read as other numbers."""


class KnownContent:
    """The hashes of all that was read of A and B, in this run, and in earlier ones whose tiles it keeps.

    past: of those, by role.
    """

    def __init__(self, past: Mapping[str, Hashes] | None = None) -> None:
        self._past = {role: dict((past or {}).get(role, {})) for role in "AB"}
        self._now: dict[str, dict[Corners, int]] = {"A": {}, "B": {}}
        self._panels: dict[tuple[str, Corners], int] = {}

    def hashes(self, role: str) -> dict[Corners, int]:
        """All that are known of an input, the newest of each part."""
        return self._past[role] | self._now[role]

    def forget(self, role: str, parts: Iterable[Corners]) -> None:
        """These parts hold other numbers by now."""
        for corners in parts:
            self._past[role].pop(corners, None)
            self._now[role].pop(corners, None)

    def see(self, contents: Iterable[PanelContent]) -> Seen:
        """Add what the panels of a tile held."""
        seen = Seen()
        for panel in contents:
            role, past, now = panel.role, self._past[panel.role], self._now[panel.role]
            known = self._panels.setdefault((role, panel.corners), panel.digest)
            torn = []
            for corners, value in panel.parts or ():
                if corners in now:
                    if now[corners] != value:
                        torn.append(corners)
                    continue
                now[corners] = value
                if (before := past.pop(corners, None)) != value:
                    seen.fresh.setdefault(role, {})[corners] = value
                    if before is not None:
                        seen.changed.setdefault(role, []).append(corners)
            if known != panel.digest:
                seen.torn.setdefault(role, []).extend(torn or [panel.corners])
        return seen


class InputRecord(Protocol):
    """Where it is kept what tiles were computed from, for a later run."""

    def add_read(self, role: str, hashes: Hashes) -> None:
        """Keep what parts of A or B hold, before the first tile that depends on them."""

    def doubt_inputs(self) -> None:
        """Note that an input may be another one by now though it looks as before: a later run must compare it."""

    def withdraw(self, index: int) -> None:
        """Note that what is stored of this tile is invalid."""


class InputWatch:
    """Keeps an eye on A and B while a run computes a product, and on the tiles that depend on what they were.

    roles: the arrays, by ``A`` and ``B``. before: how they looked before the first tile. finished: the tiles of earlier
    runs, by index, from which those are removed that no longer belong to this product. past: what those runs read, by
    role. whereabouts: of a product that is not to be trusted, for a message. repairing: whether the finished tiles are
    what they are to be, so that inputs which are not theirs are refused.
    """

    def __init__(
        self,
        client: Client,
        roles: Mapping[str, StoredArray],
        plan: MatmulPlan,
        before: Fingerprint,
        tell: Teller,
        finished: MutableMapping[int, Any],
        past: Mapping[str, Hashes],
        whereabouts: str,
        with_others: Callable[[Mapping[int, Any], Iterable[int]], set[int]] = lambda _, lost: set(lost),
        *,
        names: Names = AS_FACTORS,
        repairing: bool = False,
    ) -> None:
        self._names = names
        self._client, self._plan, self._tell = client, plan, tell
        self._arrays = {role: roles[role] for role in ("A" if plan.symmetric else "AB")}
        self._looks = dict(zip("AB", before.inputs, strict=True))
        self._known = KnownContent(past)
        self._past = finished
        self._done: set[int] = set()
        self._whereabouts, self._with_others, self._repairing = whereabouts, with_others, repairing
        self.record: InputRecord | None = None
        """Where what is read is kept, once there is such a place."""

    @property
    def finished(self) -> set[int]:
        """The tiles of earlier runs and of this one that belong to the product."""
        return {*self._past, *self._done}

    @property
    def _left(self) -> set[int]:
        """The tiles that are still to be computed."""
        return set(range(self._plan.tile_count)) - self.finished

    def hashes(self) -> dict[str, Hashes]:
        """What is known of each input, for the record."""
        return {role: self._known.hashes(role) for role in self._arrays}

    def compare_past(
        self, looked: tuple[Appearance, Appearance] | None, *, other_panels: bool = False
    ) -> None:
        """Remove the finished tiles of earlier runs that do not belong to the inputs as they are.

        looked: how these looked to the runs; None where that is not to be trusted. Where they look the same nothing is
        read but what `_changed_across` says. Else workers read what the tiles were computed from, and a tile is kept if
        all of it was recorded and is the same. other_panels: whether any of them was computed by panels of another
        depth.
        """
        if not self._past:
            return
        reasons = {}
        for role, before in zip("AB", looked or (None, None), strict=True):
            if role in self._arrays and before != self._looks[role]:
                found = before.differs_in(self._looks[role]) if before is not None else []
                reasons[role] = " and ".join(found) or "it changed while an earlier run read it"
        alike = [role for role in self._arrays if role not in reasons]
        reasons |= dict.fromkeys(
            self._changed_across(alike, other_panels=other_panels),
            "it looks as before, and holds other numbers",
        )
        if not reasons:
            return
        count = len(self._past)
        self._tell.say(
            f"{self._named(reasons)} may have changed ({'; '.join(dict.fromkeys(reasons.values()))}); reading"
            f" what {counted(count, 'finished tile')} of an earlier run were computed from, to compare it"
        )
        compared = self._compare(list(reasons), self._past)
        given_up = self._with_others(self._past, compared.lost)
        for index in given_up:
            del self._past[index]
        if not compared.lost:
            self._tell.say(f"{compared.told}: all of it is the same, and every tile is kept")
            return
        why = self._shown(compared.changed)
        if compared.unknown:
            why.append(f"of {counted(len(compared.unknown), 'tile')} it is not recorded what was read")
        lost = f"{len(given_up)} of {counted(count, 'finished tile')}"
        self._tell.say(f"{compared.told}: {'; '.join(why)}; {lost} are computed again")

    def compare_repaired(self, *, other_panels: bool) -> None:
        """Raise VerificationError where the tiles that a repair lacks would be computed from other numbers than C was,
        as far as the record tells and `see` will not. other_panels: as in `compare_past`."""
        if not (roles := self._changed_across(list(self._arrays), other_panels=other_panels)):
            return
        compared = self._compare(roles, self._left)
        if compared.lost - compared.unknown:
            self._refuse_repair(compared.changed)

    def _changed_across(self, roles: Sequence[str], *, other_panels: bool) -> list[str]:
        """The inputs that hold other numbers in parts that earlier runs have read, and this one is going to read in
        other parts, so that it would not see that. other_panels: whether it may also be parts within one tile."""
        wanted: dict[str, list[Corners]] = {role: [] for role in roles}
        for _, all_of in self._tiles(self._left):
            for role, corners in all_of:
                if role in wanted:
                    wanted[role].append(corners)
        changed = []
        for role, its in wanted.items():
            hashes = self._known.hashes(role)
            if other_panels:
                used = overlaps(hashes, its)
                across = [used[corners][0] for corners in hashes]
            else:
                across = parts_across(list(hashes), its)
            parts = [part for part, is_across in zip(hashes.items(), across, strict=True) if is_across]
            with closing(self._read_again(role, parts)) as results:
                if any(found for _, found in results):
                    changed.append(role)
        return changed

    def see(self, index: int, contents: Sequence[PanelContent]) -> None:
        """Take in what a tile was computed from, before that tile is recorded.

        Where an earlier run read other numbers there, its tiles that depend on them are withdrawn, and no longer among
        the `finished`; in a repair that raises VerificationError. Raises StoreError where this run has.
        """
        seen = self._known.see(contents)
        if seen.torn:
            self._refuse(self._dependent(seen.torn), self._shown(seen.torn), seen.torn)
        if seen.changed and self._repairing:
            self._refuse_repair(seen.changed)
        if seen.changed:
            stale = self._with_others(self._past, self._dependent(seen.changed) & self._past.keys())
            self.withdraw(stale)
            if stale:
                self._tell.say(
                    f"{'; '.join(self._shown(seen.changed))}, other than an earlier run read there;"
                    f" {counted(len(stale), 'finished tile')} of that run are computed again"
                )
        if self.record is not None:
            for role, hashes in seen.fresh.items():
                self.record.add_read(role, hashes)
        self._done.add(index)

    def check_stayed(self) -> None:
        """Raise StoreError where an input has changed since the work began: a product of both would get its name. One
        that only looks otherwise is read and compared first."""
        looks = {role: appearance_of(array) for role, array in self._arrays.items()}
        if not (otherwise := [role for role, look in looks.items() if look != self._looks[role]]):
            return
        if not self._plan.tile_count:
            return
        compared = self._compare(otherwise, self.finished)
        if compared.lost or not self.finished:
            self._refuse(compared.lost, self._shown(compared.changed), compared.changed or otherwise)
        why = " and ".join(
            dict.fromkeys(text for role in otherwise for text in self._looks[role].differs_in(looks[role]))
        )
        self._looks |= looks
        self._tell.say(
            f"{self._named(otherwise)} may have changed while {self._names.c} was computed ({why}); {compared.told}:"
            " all of it is the same"
        )

    def _refuse(self, lost: set[int], shown: list[str], roles: Iterable[str]) -> NoReturn:
        """Raise StoreError about inputs that changed, once the tiles that depend on that are withdrawn."""
        lost = self._with_others(self._past, lost)
        kept = len(self._past) + len(self._done) - len(lost)
        self.withdraw(lost)
        if self.record is not None:
            self.record.doubt_inputs()  # it may yet be put back, with its times
        then = (
            "computes it anew"
            if not kept
            else f"keeps the {counted(kept, 'tile')} that do not depend on that"
        )
        raise InputChangedError(
            f"{self._named(roles)} changed while {self._names.c} was computed"
            f"{''.join(f' ({text})' for text in shown)}, so that {self._names.c} may be of neither the old nor the new;"
            f" it is {self._whereabouts}, and the next run {then}: let nobody write to the inputs until that is done"
        )

    def _refuse_repair(self, changed: Mapping[str, Sequence[Corners]]) -> NoReturn:
        raise VerificationError(
            f"{'; '.join(self._shown(changed))}, other than C was computed from, so that no part of C can be repaired"
            " by it"
        )

    def withdraw(self, lost: Iterable[int]) -> None:
        """Tiles that no longer belong to the product, or are damaged."""
        for index in sorted(self._with_others(self._past, lost)):
            self._past.pop(index, None)
            self._done.discard(index)
            if self.record is not None:
                self.record.withdraw(index)

    def _tiles(self, indices: Iterable[int]) -> Iterator[tuple[int, list[tuple[str, Corners]]]]:
        wanted = set(indices)
        for tile in self._plan.tiles() if wanted else ():
            if tile.index in wanted:
                yield tile.index, needs(self._plan, tile)

    def _dependent(self, parts: Mapping[str, Sequence[Corners]]) -> set[int]:
        """The finished tiles that were computed from any of these parts."""
        tiles = dict(self._tiles(self.finished))
        touched = {
            role: overlaps(
                (corners for all_of in tiles.values() for of, corners in all_of if of == role), found
            )
            for role, found in parts.items()
        }
        return {
            index
            for index, all_of in tiles.items()
            if any(role in touched and touched[role][corners][0] for role, corners in all_of)
        }

    def _compare(self, roles: Sequence[str], indices: Iterable[int]) -> _Compared:
        """Read what tiles were computed from of these inputs, and compare it with what was read. A tile is lost unless
        parts that are the same hold all that it needs: one that a larger tile has read besides may have changed
        elsewhere. Parts that are not known to be the same are forgotten, unless nobody has looked at them and other
        finished tiles were computed from them."""
        start, nbytes = time.perf_counter(), 0
        tiles = dict(self._tiles(indices))
        lost: set[int] = set()
        changed: dict[str, list[Corners]] = {}
        unknown: set[int] = set()
        same: dict[str, set[Corners]] = {role: set() for role in roles}
        for role in roles:
            of_tiles = {
                index: [corners for of, corners in all_of if of == role] for index, all_of in tiles.items()
            }
            hashes = self._known.hashes(role)
            unknown |= _lacking(of_tiles, hashes)
            lost |= unknown
            still = {corners for index, all_of in of_tiles.items() if index not in lost for corners in all_of}
            used = overlaps(hashes, still)
            parts = [(corners, value) for corners, value in hashes.items() if used[corners][0]]
            # The first panel of every band comes first: of another input all tiles are lost soon.
            along = {"A": 0 if self._plan.transpose_a else 1, "B": 1 if self._plan.transpose_b else 0}[role]
            parts.sort(key=lambda part: part[0][2 * along])
            with closing(self._read_again(role, parts)) as results:
                for batch, found in results:
                    nbytes += sum(map(_elements, batch)) * self._arrays[role].dtype.itemsize
                    same[role].update(set(batch).difference(found))
                    if not found:
                        continue
                    changed.setdefault(role, []).extend(found)
                    lost |= _lacking(of_tiles, hashes.keys() - set(changed[role]))
                    if len(lost) == len(tiles):
                        break
            if len(lost) == len(tiles):
                break
        others = list(self._tiles(self.finished - tiles.keys()))
        for role, parts_of_it in same.items():
            doubtful = self._known.hashes(role).keys() - parts_of_it
            used = overlaps(
                doubtful, [corners for _, all_of in others for of, corners in all_of if of == role]
            )
            others_read = {part for part in doubtful if used[part][0] and part not in changed.get(role, ())}
            self._known.forget(role, doubtful - others_read)
        seconds = time.perf_counter() - start
        told = f"{format_nbytes(nbytes)} of {' and '.join(roles)} were compared in {seconds:.1f} s"
        return _Compared(lost, unknown, changed, told)

    def _read_again(
        self, role: str, parts: Sequence[tuple[Corners, int]]
    ) -> Generator[tuple[list[Corners], list[Corners]], None, None]:
        """Let workers read parts of an input, and yield some at a time, and those of them that are not what they
        were."""
        if not parts:
            return
        batches = list(_batches(parts, self._arrays[role].dtype.itemsize))
        results = run_bounded(
            self._client,
            changed_parts,
            ((self._arrays[role], batch) for batch in batches),
            key=f"compare-{role}-{time.time_ns():x}",
            waiting=on_waiting(self._tell.listener, "matmul", "keeps what is finished"),
            lost=on_lost(self._tell.listener, "matmul", "comparison"),
        )
        with closing(results):
            for place, found in results:
                yield [corners for corners, _ in batches[place]], found

    def _named(self, roles: Iterable[str]) -> str:
        return " and ".join(f"{self._names.of(role)}, {name_of(self._arrays[role])}," for role in roles)

    def _shown(self, changed: Mapping[str, Sequence[Corners]]) -> list[str]:
        """For each input, which of its parts are others, and the chunks that they lie in."""
        texts = []
        for role, parts in changed.items():
            array, shown = self._arrays[role], sorted(set(parts))
            places = [
                f"{chunks_text(array, corners)} (rows {corners[0]} to {corners[1] - 1},"
                f" columns {corners[2]} to {corners[3] - 1})"
                for corners in shown[:SHOWN]
            ]
            more = f" and {counted(len(shown) - SHOWN, 'more part')}" if len(shown) > SHOWN else ""
            texts.append(f"{self._names.of(role)} holds other numbers in {', '.join(places)}{more}")
        return texts


def changed_parts(array: StoredArray, parts: Sequence[tuple[Corners, int]]) -> list[Corners]:
    """Those parts of an array that do not hold what they did, by their hashes, or cannot be read. A task's work: each
    part is read by this thread, and takes its bytes of memory for that time."""
    changed = []
    with reading_while(end_if_given_up()):
        for (top, bottom, left, right), value in parts:
            try:
                held = read_region(array, (slice(top, bottom), slice(left, right)))
            except StoreError:
                changed.append((top, bottom, left, right))
                continue
            if content_hash(held) != value:
                changed.append((top, bottom, left, right))
    return changed


def _lacking(needed: Mapping[int, Sequence[Corners]], parts: Iterable[Corners]) -> set[int]:
    """The tiles of which these parts do not hold all that each needs."""
    held = overlaps((corners for all_of in needed.values() for corners in all_of), parts)
    return {index for index, all_of in needed.items() if not all(held[corners][1] for corners in all_of)}


def _elements(corners: Corners) -> int:
    top, bottom, left, right = corners
    return (bottom - top) * (right - left)


def _batches(parts: Iterable[tuple[Corners, int]], itemsize: int) -> Iterator[list[tuple[Corners, int]]]:
    """The parts in order, in pieces of about `COMPARED_NBYTES`."""
    batch: list[tuple[Corners, int]] = []
    nbytes = 0
    for part in parts:
        batch.append(part)
        nbytes += _elements(part[0]) * itemsize
        if nbytes >= COMPARED_NBYTES or len(batch) == MOST_COMPARED:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
