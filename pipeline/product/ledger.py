"""The record of finished tiles, with which a run that was stopped resumes where it stood, and by which a finished
product is audited and repaired.

A file beside the growing output holds lines of JSON: the first says what is being computed. ``stored`` says that a
tile's objects have been written, with the bytes and the checksum of each. ``tile`` says the same once they have been
forced to disk, and is forced to disk itself. ``withdrawn`` says that a tile proved damaged, or of other inputs.
``inputs`` says how A and B looked, and ``read`` what was read of them (`inputs.py`). Each line ends with a checksum of
itself.

Only the submitting process appends, after a tile's task has returned. So a crash of a process never leaves a line ahead
of the data; it loses at most the line of a tile that is stored already, which is then computed again with the same
bytes. After a crash of the machine that stores C, each ``tile`` line is true. A ``stored`` one may be ahead of the
data, so whoever goes on compares the checksums of its tile with the files.

In a folder the record has a copy, which is read where somebody has removed the record itself, or for the lines of it
that are damaged: one that takes back another must not be missed.

The record of a finished product stays in its folder, with what an audit needs of it. Readers of Zarr ignore the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from itertools import chain
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

import zarr

from tilewright.kernels.numbers import counted
from tilewright.kernels.passes.contents import NOTHING, Contents
from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.plan.inputs import Geometry, Recipe
from tilewright.pipeline.plan.product import MatmulPlan
from tilewright.pipeline.plan.told import NOTHING_FOUND, Corners, Found, StoredObject
from tilewright.pipeline.product.in_place import growing_in_place
from tilewright.pipeline.product.inputs import Hashes
from tilewright.pipeline.product.output import CHECKSUMS_NAME, FILE_NAME, partial_path
from tilewright.pipeline.sealed_lines import sealed, unsealed
from tilewright.pipeline.store.appearance import Appearance
from tilewright.pipeline.store.arrays import Source, local_path
from tilewright.pipeline.store.journal import FileJournal, Journal, journal_in, twin_of, write_whole
from tilewright.pipeline.transfer.files import with_remedy

REPAIR = "repair"
"""In what was asked for, says of a growing array that it is to take the place of a damaged one."""
VERSION = 9
"""A record of another version is ignored: the run starts anew. 9: a CPU multiplies centred bytes as such."""


class Group(NamedTuple):
    """The pieces of a larger tile, which are kept together or not at all: what was found in that, in A, B and C, is
    with one of them (`kept.py`)."""

    first: int
    """The index of the one that it is with."""
    size: int
    """How many they are."""


class Stored(NamedTuple):
    """What the record says of a finished tile."""

    objects: tuple[StoredObject, ...] = ()
    """All of its stored objects."""
    found: Found = NOTHING_FOUND
    synced: bool = True
    """Whether they have been forced to disk."""
    group: Group | None = None
    """Where it is a piece of a larger tile, which an earlier run finished: all pieces of that."""
    counts: tuple[StoredObject, ...] = ()
    """Of the numbers of pairs beside C, where these are stored."""


@dataclass(frozen=True)
class Past:
    """What an earlier run left."""

    geometry: Geometry
    """Of the tiles of ``finished``: what a plan must keep, or cut finer, to resume."""
    c_unit: tuple[int, int]
    """Sides of the stored pieces of C, of which each tile holds whole ones."""
    finished: Mapping[int, Stored]
    """By each finished tile's index."""
    array: Any = None
    """What `array_facts` said of C when it was begun."""
    digest: str = ""
    """The fingerprint of the product."""
    request: dict[str, Any] = field(default_factory=dict)
    """What was asked for."""
    bad_lines: int = 0
    """Lines that are damaged; each may have been about any tile."""
    inputs: tuple[Appearance, Appearance] | None = None
    """How A and B looked; None where that says nothing, since one of them changed while it was read."""
    read: Mapping[str, Hashes] = field(default_factory=dict)
    """Hashes of what was read of ``A`` and of ``B``."""
    fault: str = ""
    """What is wrong with the record itself, in a sentence."""
    beside: Any = None
    """What `array_facts` said of the array of the numbers of pairs; None without."""
    recipes: tuple[Recipe, ...] = ()
    """By which the tiles were computed, from the first on: more than one where runs went on with other memory, or on
    another kind of device."""


def array_facts(array: zarr.Array[Any]) -> dict[str, Any]:
    """What the metadata of C say of how its objects are read: all but attributes and names of dimensions, which users
    add. As it comes back from JSON."""
    facts = json.loads(json.dumps(array.metadata.to_dict(), sort_keys=True, default=str))
    return {name: fact for name, fact in facts.items() if name not in METADATA_OF_USERS}


METADATA_OF_USERS = ("attributes", "dimension_names", "consolidated_metadata")


class Ledger:
    """The open record of one run. Threads may append at once."""

    def __init__(
        self,
        place: Path | Journal,
        digest: str,
        plan: MatmulPlan,
        finished: Mapping[int, Stored] | None = None,
        array: zarr.Array[Any] | None = None,
        name: str = FILE_NAME,
        *,
        earlier: Sequence[Recipe] = (),
        request: Mapping[str, Any] | None = None,
        inputs: tuple[Appearance, Appearance] | None = None,
        read: Mapping[str, Hashes] | None = None,
        beside: zarr.Array[Any] | None = None,
    ) -> None:
        """Begin the record in the output's folder, or in another journal, with what was asked for, the tiles that
        earlier runs finished, as tiles of this plan, and by which recipes, and what is known of its inputs, as in
        ``Past``. ``beside`` is the array of the numbers of pairs, which gets a record of its own at the end. The whole
        record is rewritten, and put in place in one step."""
        self._journal = FileJournal(place / name) if isinstance(place, Path) else place
        self._beside = beside
        self._appending = RLock()
        self._tiles = dict(finished or {})
        self._begun = Past(
            plan.geometry,
            plan.c_unit,
            self._tiles,
            array_facts(array) if array is not None else None,
            digest,
            dict(request or {}),
            inputs=inputs,
            read={role: dict(hashes) for role, hashes in (read or {}).items()},
            beside=array_facts(beside) if beside is not None else None,
            recipes=(*(recipe for recipe in dict.fromkeys(earlier) if recipe != plan.recipe), plan.recipe),
        )
        self._read: dict[str, dict[Corners, int]] = {role: {} for role in "AB"}
        """What was read since it was begun."""
        with _writing_to(self._journal.name):
            self._journal.begin(record_bytes(self._begun))

    def record(self, index: int, stored: Stored) -> None:
        """Note that the tile of this index is stored, in which objects, and what was found on the way; and whether a
        power cut leaves it: if so, this is durable when it returns. Raises StoreError if the disk is full or refuses
        the write."""
        with self._appending:
            self._append([_line(index, stored)], sync=stored.synced)
            self._tiles[index] = stored

    def settle(self, tiles: Iterable[tuple[int, Stored]]) -> None:
        """Note that tiles have been forced to disk, given with what was recorded of them, unless they were withdrawn
        meanwhile, or stored again; durable when it returns. Raises as ``record``."""
        with self._appending:  # a line behind that of a tile's withdrawal would bring it back
            lines = []
            for index, stored in tiles:
                if self._tiles.get(index) is stored:
                    self._tiles[index] = stored._replace(synced=True)
                    lines.append(_line(index, self._tiles[index]))
            if lines:
                self._append(lines, sync=True)

    def lose(self, tiles: Iterable[tuple[int, Stored]]) -> None:
        """Note that tiles cannot be forced to disk, given as to ``settle``: they are withdrawn, since the system takes
        for written what it once failed to write, and would say so next time. Raises as ``record``."""
        with self._appending:
            for index, stored in tiles:
                if self._tiles.get(index) is stored:
                    self.withdraw(index)

    def add_read(self, role: str, hashes: Hashes) -> None:
        """Note what parts of A or B hold, before the first tile that was computed from them is recorded: so it is
        durable when that is. Raises as ``record``."""
        self._read[role].update(hashes)
        self._append(list(_read_lines(role, hashes)), sync=False)

    def doubt_inputs(self) -> None:
        """Note that A and B may be others than those that tiles were computed from, though they look the same; durable
        when it returns. Raises as ``record``."""
        self._append([sealed({"inputs": None})], sync=True)

    def withdraw(self, index: int) -> None:
        """Note that what is stored of this tile is invalid, so that a resumed run computes it again. Raises as
        ``record``."""
        with self._appending:
            self._tiles.pop(index, None)
            self._append([sealed({"withdrawn": index})], sync=True)

    @property
    def found(self) -> list[Found]:
        """What was found of each finished tile."""
        return [stored.found for stored in self.tiles.values()]

    @property
    def tiles(self) -> Mapping[int, Stored]:
        """All that is recorded, by the tile's index."""
        return self._tiles

    def _append(self, lines: Sequence[str], *, sync: bool) -> None:
        data = "".join(f"{line}\n" for line in lines).encode()
        with self._appending, _writing_to(self._journal.name):
            self._journal.append(data, sync=sync)

    def keep(self) -> None:
        """Put what an audit and a repair need of the record into the output's folder, durably; the record itself stays.
        Raises as ``record``."""
        bare = {
            index: stored._replace(found=NOTHING_FOUND, group=None) for index, stored in self._tiles.items()
        }
        read = {role: {**self._begun.read.get(role, {}), **hashes} for role, hashes in self._read.items()}
        request = {name: asked for name, asked in self._begun.request.items() if name != REPAIR}
        kept = replace(self._begun, finished=bare, request=request, inputs=None, read=read)
        with _writing_to(self._journal.name):
            self._journal.keep(CHECKSUMS_NAME, record_bytes(kept))
        journal = None if self._beside is None else journal_in(self._beside, FILE_NAME)
        if journal is not None:
            of_counts = {index: Stored(stored.counts, synced=stored.synced) for index, stored in bare.items()}
            with _writing_to(journal.name):
                journal.keep(
                    CHECKSUMS_NAME,
                    record_bytes(replace(kept, finished=of_counts, array=kept.beside, beside=None)),
                )

    def close(self) -> None:
        self._journal.close()

    def remove(self, folder: Path | None = None) -> None:
        """Delete the record, which is no longer needed or not to be trusted; ``folder`` is where the output is by now,
        if it has got another name."""
        self._journal.remove(folder)


def record_bytes(past: Past) -> bytes:
    """All lines of a record."""
    *earlier, recipe = past.recipes
    head = {
        "version": VERSION,
        "fingerprint": past.digest,
        "request": past.request,
        "tile": list(past.geometry[:2]),
        "within": [list(sides) for sides in past.geometry.within],
        "c_unit": list(past.c_unit),
        **_entry(recipe),
        "earlier": [_entry(recipe) for recipe in earlier],
        "array": past.array,
    }
    if past.beside is not None:
        head["beside"] = past.beside
    lines = [sealed(head)]
    lines += [line for role, hashes in past.read.items() for line in _read_lines(role, hashes)]
    lines.append(sealed({"inputs": past.inputs}))
    lines += [_line(index, stored) for index, stored in sorted(past.finished.items())]
    return "".join(f"{line}\n" for line in lines).encode()


def write_record(path: Path, past: Past) -> None:
    """Write a whole record and put it in place in one step, durably; a copy of an older one goes. Raises StoreError if
    the disk is full or refuses the write."""
    with _writing_to(str(path)):
        write_whole(path, record_bytes(past))
        twin_of(path).unlink(missing_ok=True)


@contextmanager
def _writing_to(name: str) -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except FileNotFoundError as error:  # of a file that was written a moment ago, or of its folder
        raise StoreError(
            f"output: another run has taken {name} over, which does not see the lock of this one, or it was removed;"
            f" let only one write there at a time ({error.strerror})"
        ) from error
    except OSError as error:
        raise StoreError(
            f"output: cannot write the record of finished tiles, {name}: {with_remedy(error)}"
        ) from error


PARTS_OF_A_LINE = 1000
"""Parts of an input in one line of the record."""


def _entry(recipe: Recipe) -> dict[str, Any]:
    depth, k_parts, *cell, on_host = recipe
    return {"panel_depth": depth, "k_parts": k_parts, "cell": cell, "device": "cpu" if on_host else "cuda"}


def _recipe(entry: dict[str, Any]) -> Recipe:
    """What an entry says. Raises KeyError, TypeError or ValueError for what no entry says."""
    rows, columns = entry["cell"]
    on_host = {"cpu": True, "cuda": False}[entry["device"]]
    return Recipe(entry["panel_depth"], entry["k_parts"], rows, columns, on_host)


def _line(index: int, stored: Stored) -> str:
    line: dict[str, Any] = {"tile" if stored.synced else "stored": index}
    line["objects"] = listed_objects(stored.objects)
    if stored.counts:
        line["counts"] = listed_objects(stored.counts)
    if stored.group is not None:
        line["group"] = list(stored.group)
    if stored.found != NOTHING_FOUND:
        line["found"] = [
            list(astuple(contents)) for contents in (stored.found.a, stored.found.b, stored.found.c)
        ]
    return sealed(line)


def listed_objects(objects: Iterable[StoredObject]) -> list[list[Any]]:
    """Stored objects as a line of a record has them."""
    return [[*one.place, one.nbytes, f"{one.checksum:016x}"] for one in objects]


def _stored(entry: dict[str, Any]) -> Stored:
    """What a line says of its tile. Raises TypeError or ValueError for what no line says."""
    told = [Contents(*contents) for contents in entry.get("found", ())] or [NOTHING] * 3
    for contents in told:
        extent = contents.least, contents.most
        found = contents.nan, contents.infinite, contents.masked
        if not all(number is None or _is_whole(number) for number in extent) or not all(
            map(_is_count, found)
        ):
            raise ValueError(f"{contents} is no record of what a tile holds")
    objects, counts = told_objects(entry["objects"]), told_objects(entry.get("counts", ()))
    group = Group(*entry["group"]) if "group" in entry else None
    if not all(map(_is_count, group or ())):
        raise ValueError(f"{group} is no group of tiles")
    return Stored(objects, Found(*told), "tile" in entry, group, counts)


def told_objects(listed: Iterable[Any]) -> tuple[StoredObject, ...]:
    """What `listed_objects` says. Raises TypeError or ValueError for what it never says."""
    objects = []
    for *place, nbytes, checksum in listed:
        if not all(map(_is_count, [*place, nbytes])):
            raise ValueError(f"{place} and {nbytes!r} are no place and no number of bytes")
        objects.append(StoredObject(tuple(place), nbytes, int(checksum, 16)))
    return tuple(objects)


def _read_lines(role: str, hashes: Hashes) -> Iterator[str]:
    """Lines that say what parts of an input hold: the corners of each, and its hash in hexadecimal digits."""
    parts = [[*corners, f"{value:016x}"] for corners, value in hashes.items()]
    for first in range(0, len(parts), PARTS_OF_A_LINE):
        yield sealed({"read": role, "parts": parts[first : first + PARTS_OF_A_LINE]})


def _add_parts(read: dict[str, dict[Corners, int]], entry: dict[str, Any]) -> None:
    """Add what a line says of an input. Raises KeyError, TypeError or ValueError for what no line says."""
    hashes = read[entry["read"]]
    for top, bottom, left, right, value in entry["parts"]:
        corners = top, bottom, left, right
        if not all(map(_is_count, corners)) or top >= bottom or left >= right:
            raise ValueError(f"{corners} is no part of an array")
        hashes[corners] = int(value, 16)


def _looks(inputs: Any) -> tuple[Appearance, Appearance] | None:
    """How a line says that A and B looked. Raises TypeError or ValueError for what no line says."""
    if inputs is None:
        return None
    a, b = inputs
    return Appearance(*a), Appearance(*b)


def _is_whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def _is_count(number: Any) -> bool:
    return _is_whole(number) and number >= 0


def read_record(path: Path) -> Past | None:
    """What the record in a file says; see `read_journal`."""
    return read_journal(FileJournal(path))


def journal_at(out: Source) -> tuple[Journal | None, zarr.Array[Any] | None]:
    """Where an output's record of finished tiles would lie, None where it can have none; and the array that is there,
    if it is written in place. Raises StoreError where that cannot be looked at."""
    path = local_path(out)
    if path is not None:
        return FileJournal(partial_path(path) / FILE_NAME), None
    array = growing_in_place(out)
    return (journal_in(array, FILE_NAME) if array is not None else None), array


def read_journal(journal: Journal) -> Past | None:
    """What a record says; None where there is none, or its first line is damaged, or of another version.

    Any other line that is damaged is taken from the copy. Where that has none, as of the last one after a crash in the
    middle of a write, it is left out: its tile is computed again.

    Raises
    ------
    StoreError
        There is a record, or may be one, and it cannot be read now: for None all tiles would be removed.
    """
    try:
        data = journal.read()
        past = None if data is None else parsed(data)
        damaged = past is None or bool(past.bad_lines) or not (data or b"").endswith(b"\n")
        twin = journal.twin() if damaged else None
    except OSError as error:
        raise StoreError(
            f"output: cannot read the record of finished tiles, {journal.name}: {error.strerror or error}; nothing was"
            " removed: let this process read it and run it again, or start over with --no-resume (resume=False)"
        ) from error
    if past is not None and twin is not None and data is not None:
        whole, taken = _healed(data, twin)
        healed = parsed(whole) if taken else None
        if healed is not None:
            lines = f"{counted(taken, 'line')} of the record of finished tiles, {journal.name},"
            was = "was" if taken == 1 else "were"
            return replace(healed, fault=f"{lines} {was} damaged; what its copy has there is used")
    if past is not None or twin is None or (past := parsed(twin)) is None:
        return past
    fault = "missing" if data is None else "damaged"
    return replace(past, fault=f"the record of finished tiles, {journal.name}, is {fault}; its copy is used")


HEALED_LINES = 16
"""Lines of the copy that a damaged place may have been: a lost end joins two."""


def _healed(data: bytes, twin: bytes) -> tuple[bytes, int]:
    """The lines of a record, and in the places of those that are damaged those that its copy has there; how many of
    these there are."""
    ours, theirs = data.removesuffix(b"\n").split(b"\n"), twin.split(b"\n")[:-1]
    lines: list[bytes] = []
    damaged: list[bytes] = []
    place = taken = 0
    for line in ours:
        if unsealed(line.decode(errors="replace")) is None:
            damaged.append(line)
            continue
        near = theirs[place : place + (HEALED_LINES if damaged else 1)]
        if line in near:
            lines += near[: near.index(line)]
            taken += near.index(line)
            place += near.index(line) + 1
        else:  # nobody knows any more what of the copy comes before which line
            theirs = []
            lines += damaged
        lines.append(line)
        damaged = []
    end = theirs[place:] if damaged else []
    return b"\n".join([*lines, *(end or damaged), b""]), taken + len(end)


def parsed(data: bytes) -> Past | None:
    """What the lines of a record say, as `read_journal` gives it."""
    lines = data.decode(errors="replace").split("\n")
    head, *entries = map(unsealed, lines)
    finished: dict[int, Stored] = {}
    try:
        if head is None or head["version"] != VERSION:
            return None
        (rows, columns), (unit_rows, unit_columns) = head["tile"], head["c_unit"]
        recipes = *map(_recipe, head["earlier"]), _recipe(head)
        within = tuple((larger, wider) for larger, wider in head["within"])
        inputs = None
        read: dict[str, dict[Corners, int]] = {"A": {}, "B": {}}
        for entry in entries:
            if entry is None:
                continue
            if "read" in entry:
                _add_parts(read, entry)
            elif "inputs" in entry:
                inputs = _looks(entry["inputs"])
            elif "withdrawn" in entry:
                finished.pop(entry["withdrawn"], None)
            else:
                index = entry["tile"] if "tile" in entry else entry["stored"]
                finished[index] = _stored(entry)
        past = Past(
            Geometry(rows, columns, *recipes[-1][:4], within),
            (unit_rows, unit_columns),
            finished,
            head["array"],
            head["fingerprint"],
            head["request"],
            # What follows the last line's end is empty; where it is not, a crash tore the line.
            sum(entry is None for entry in entries[:-1]),
            inputs,
            read,
            beside=head.get("beside"),
            recipes=recipes,
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    numbers = rows, columns, *chain(*within, *(recipe[:4] for recipe in recipes)), *past.c_unit
    positive = all(_is_count(number) and number > 0 for number in numbers)
    return past if positive and all(map(_is_count, past.finished)) else None
