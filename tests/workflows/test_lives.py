"""Lives of a product: it is stopped, killed, torn, audited, planned otherwise and gone on with in any order, while its
inputs are touched and changed, and a model says at every step what must be there.

What a run may count on are the units that its record holds: tiles, or groups of pieces that a larger tile was cut into.
A unit is sound as long as its files hold what was written and its numbers are of the inputs as they are; the model
knows both by itself. Then, whatever happened before:

- a run that ends well leaves the right bytes, and nothing beside them;
- no file of a sound unit is written again, whether the run ends well or not, and none loses its line in the record;
- an audit names the files that hold other bytes than were written, and no others.

The slow test has `MANY` lives in all, others each time, or as many of as many steps as ``TILEWRIGHT_LIVES`` says, as in
``1000x500``; ``--hypothesis-seed`` sets them. Its `PARTS` are shared by pytest's processes. The other test has `FEW`,
the same in every run.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import zarr
from distributed import Client
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import tilewright as tw
from tilewright.kernels.numbers import ceil_div
from tilewright.pipeline.events import Event, Notice, UnitDone
from tilewright.pipeline.plan.grid import TileGrid
from tilewright.pipeline.product import ledger
from tilewright.pipeline.product.output import CHECKSUMS_NAME, MARK_NAME, partial_path
from tilewright.pipeline.sealed_lines import unsealed
from tilewright.pipeline.store.chunks import draft_of
from tilewright.pipeline.store.journal import twin_of

FEW, MANY, PARTS = "2x75", "200x75", 100
"""Lives and steps, of which one takes 13 ms of a core: one in seven is a run, which takes 90 ms. They wait for no disk,
and the arrays are as small as can be: the time goes into planning and handing out tiles, which is what is tried."""

M, K, N = 20, 16, 28
INPUT_CHUNK = 8
MEMORIES = {"i4": (1500, 2000, 3000, 1000), "f8": (2500, 3000, 6000, 1500)}
"""Bytes for the tiles: for 14, 10 and 5 of integers, for 14, 12 and 4 of floats, in stored pieces of 4 × 4; and for
less than these take, so that larger tiles are cut."""

CHOICE = st.integers(0, 2**16 - 1)
"""Of one thing among those that there are. Which tiles a stopped run has finished is not the same each time, but
Hypothesis must be able to draw the same again."""

DAMAGES = st.sampled_from(["cut", "remove", "flip", "swap"])
"""Of a file; see `tear`."""

Place = tuple[int, int]
"""Of a stored piece of C."""


class Stopped(Exception):
    pass


class Unit(NamedTuple):
    """What the record keeps together or not at all."""

    places: frozenset[Place]
    unsynced: frozenset[Place]
    """Those that a power cut may still take: a run compares their checksums before it counts on them."""


class Line(NamedTuple):
    """What one line of the record is about."""

    kind: str
    tile: int | None


def kind_of(line: str) -> Line:
    entry = json.loads(line)
    for kind in ("tile", "stored", "withdrawn"):
        if kind in entry:
            return Line(kind, entry[kind])
    return Line("read" if "read" in entry else "inputs", None)


class Lives(RuleBasedStateMachine):
    """The life of one product C = A B of small whole numbers, whose sums are exact in any order."""

    client: Client
    root: Path

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=self.root))
        self.out = self.folder / "c"
        self.partial = partial_path(self.out)
        self.units: list[Unit] = []
        self.written: dict[Place, bytes] = {}
        """What the recorded pieces of the growing C held when they were recorded."""
        self.stale: set[Place] = set()
        """Pieces that depend on numbers which have changed since."""
        self.final: dict[Place, bytes] | None = None
        """What the pieces of a finished C held when it got its name."""
        self.is_current = True
        """Whether that is of the inputs as they are."""
        self.repairing = False
        """Whether the growing C is one that a repair has begun."""
        self.reads_known = True
        """Whether the record says of all tiles what they were computed from."""
        self.final_reads_known = True
        """Whether that of the finished C does, which a repair goes on with."""
        self.unseen = False
        """Whether a change may have escaped all but the check."""

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @initialize(dtype=st.sampled_from(["i4", "f8"]), numbers=st.integers(0, 99))
    def put_inputs(self, dtype: str, numbers: int) -> None:
        rng = np.random.default_rng(numbers)
        self.dtype = np.dtype(dtype)
        self.numbers = {"a": rng.integers(-9, 10, (M, K)), "b": rng.integers(-9, 10, (K, N))}
        for name, data in self.numbers.items():
            array = zarr.create_array(
                self.folder / name,
                shape=data.shape,
                chunks=(INPUT_CHUNK, INPUT_CHUNK),
                dtype=dtype,
                compressors=None,
            )
            array[...] = data

    # What must be there.

    def pieces(self, folder: Path) -> dict[Place, bytes]:
        """What the pieces of C should hold, in the pieces that the array in a folder has."""
        rows, columns = json.loads((folder / "zarr.json").read_text())["chunk_grid"]["configuration"][
            "chunk_shape"
        ]
        c = self.numbers["a"] @ self.numbers["b"]
        return {
            (top // rows, left // columns): c[top : top + rows, left : left + columns]
            .astype({"i": "i8", "f": "f8"}[self.dtype.kind])
            .tobytes()
            for top in range(0, M, rows)
            for left in range(0, N, columns)
        }

    def is_whole(self, unit: Unit) -> bool:
        return all(held(self.partial, place) == self.written[place] for place in unit.places)

    def is_sound(self, unit: Unit) -> bool:
        return not unit.places & self.stale and self.is_whole(unit)

    def recorded(self) -> list[Unit]:
        """What the record of the growing C says."""
        past = ledger.read_record(self.partial / ledger.FILE_NAME)
        if past is None:
            return []
        together: dict[Any, list[ledger.Stored]] = {}
        for index, stored in past.finished.items():
            together.setdefault(stored.group or index, []).append(stored)
        return [
            Unit(places_of(some), places_of(stored for stored in some if not stored.synced))
            for key, some in together.items()
            if not isinstance(key, ledger.Group) or len(some) == key.size
        ]

    def units_of_final(self) -> list[Unit]:
        """The tiles of a finished C that hold what was written."""
        record = ledger.read_record(self.out / CHECKSUMS_NAME)
        assert record is not None
        assert self.final is not None
        units = [Unit(places_of([stored]), frozenset()) for stored in record.finished.values()]
        return [
            unit for unit in units if all(held(self.out, place) == self.final[place] for place in unit.places)
        ]

    @invariant()
    def nothing_lies_beside(self) -> None:
        names = {path.name for path in self.folder.iterdir()}
        assert names <= {"a", "b", self.out.name, self.partial.name}
        assert (self.out.name in names) is (self.final is not None)

    # Runs.

    def run(
        self,
        *,
        stop: int | None = None,
        kill: bool = False,
        memory: int = 0,
        verify: bool = True,
        durability: str = "full",
        repair: bool = False,
        **options: Any,
    ) -> None:
        """A run that ends well; or with ``stop``, as that many tiles are stored, if there are so many. repair: of the
        finished C, in the place of which another one would be put."""
        sound = [unit for unit in self.units if self.reads_known and self.is_sound(unit)]
        if options.get("resume") is False:
            sound, self.units = [], []
        before = {place: identity(self.partial, place) for unit in sound for place in unit.places}
        # Of what was forced to disk a run looks at the lengths alone, before the check.
        torn = any(
            held(self.partial, place) != self.written[place]
            for unit in self.units
            for place in unit.places - unit.unsynced
        )
        verify = verify or torn or self.unseen
        if repair:
            of_final = [unit for unit in self.units_of_final() if not unit.places & before.keys()]
            # Of those that a stopped repair has stored, its own files stay.
            own = {place for unit in self.units if self.is_whole(unit) for place in unit.places}
            before |= {
                place: identity(self.partial if place in own else self.out, place)
                for unit in of_final
                for place in unit.places
            }
            sound += of_final
        done: set[Place] = set()
        told: list[str] = []
        snapshot = self.folder.parent / f"{self.folder.name}.killed"
        count = 0
        plan: Any = None

        def listener(event: Event) -> None:
            nonlocal count, plan
            if isinstance(event, Notice):
                told.append(event.message)
            if not (isinstance(event, UnitDone) and event.name == "matmul"):
                return
            if plan is None:
                past = ledger.read_record(self.partial / ledger.FILE_NAME)
                assert past is not None
                plan = {tile.index: tile for tile in TileGrid.of((M, N), past.geometry).tiles()}, past.c_unit
            tiles, (rows, columns) = plan
            tile = tiles[event.index]
            its = {
                (top // rows, left // columns)
                for top in range(tile.row_start, tile.row_stop, rows)
                for left in range(tile.column_start, tile.column_stop, columns)
            }
            assert not its & before.keys(), f"a sound tile, {its}, was computed again: {told}"
            done.update(its)
            count += 1
            if count == stop:
                if kill:
                    copy_as_it_is(self.partial, snapshot, self.out)
                raise Stopped

        paths = self.folder / "a", self.folder / "b", self.out
        options |= {"cluster": self.client, "device": "cpu", "durability": durability, "listener": listener}
        options["device_memory"] = MEMORIES[self.dtype.str[1:]][memory]
        try:
            if repair:
                tw.repair(*paths, **options)
            else:
                run = tw.matmul(*paths, verify=verify, overwrite=self.final is not None, **options)
                assert verify is (run.verification is not None)
        except (Stopped, tw.TilewrightError) as error:
            refused = (tw.OutputExistsError, tw.VerificationError) if repair else ()
            if isinstance(error, refused):
                self.follow_refused_repair(error)
                return
            if isinstance(error, tw.TilewrightError) and "in such pieces" not in str(error):
                raise
            if repair and not self.partial.exists():  # it had not begun
                return
            if snapshot.exists():
                shutil.rmtree(self.partial)
                snapshot.rename(self.partial)
                before |= {place: identity(self.partial, place) for place in before}
            self.follow(sound, before, done, repair)
            return
        if repair:
            assert self.final is not None
            assert {place: held(self.out, place) for place in self.final} == self.final
            if count == 0 and self.partial.exists():  # nothing was bad
                return
        for place, found in before.items():
            assert identity(self.out, place) == found, "a sound piece was written again"
        right = self.final if repair else self.pieces(self.out)
        assert right is not None
        assert {place: held(self.out, place) for place in right} == right
        assert sorted(os.listdir(self.out)) == ["c", CHECKSUMS_NAME, "zarr.json"]
        assert sum(path.is_file() for path in (self.out / "c").rglob("*")) == len(right)
        assert not self.partial.exists()
        self.is_current |= not repair
        self.final_reads_known = self.reads_known and (self.final_reads_known or not repair)
        self.final = right
        self.units, self.written, self.stale = [], {}, set()
        self.reads_known, self.unseen = True, False

    def follow_refused_repair(self, error: Exception) -> None:
        """A repair may be refused where another run has begun to replace C, or the inputs are others; it leaves C as it
        was, and the tiles of the other run."""
        assert self.final is not None
        if isinstance(error, tw.OutputExistsError):
            assert self.recorded() == self.units
            return
        assert not self.is_current
        assert self.repairing or not self.units
        assert not self.partial.exists()
        self.units, self.written, self.stale = [], {}, set()

    def follow(self, sound: list[Unit], before: dict[Place, Any], done: set[Place], repair: bool) -> None:
        """Take in what a run left that did not end well."""
        now = self.recorded()
        places = {place for unit in now for place in unit.places}
        kept = {place for unit in sound for place in unit.places}
        assert kept | done <= places, "a finished tile has no line in the record"
        for place, found in before.items():
            assert identity(self.partial, place) == found, "a sound piece was written again"
        right = self.pieces(self.partial) if places else {}
        for place in done:
            assert held(self.partial, place) == right[place], "a recorded piece has other bytes"
        self.stale -= done
        linked = self.final if repair and self.final is not None else right
        if repair and not self.is_current:
            self.stale |= places - done - self.written.keys()
        self.written = {
            place: right[place] if place in done else self.written.get(place, linked[place])
            for place in places
        }
        self.units = now
        self.repairing = repair
        self.reads_known &= self.final_reads_known or not repair

    @rule(
        stop=st.integers(1, 8),
        memory=st.integers(0, 3),
        verify=st.booleans(),
        durability=st.sampled_from(["full", "none"]),
        kill=st.booleans(),
    )
    def commit(self, **how: Any) -> None:
        self.run(**how)

    @rule(memory=st.integers(0, 3), verify=st.booleans(), durability=st.sampled_from(["full", "none"]))
    def finish(self, **how: Any) -> None:
        self.run(**how)

    @rule(stop=st.integers(1, 8))
    def begin_anew(self, stop: int) -> None:
        self.run(stop=stop, resume=False)

    @rule(
        victims=st.lists(CHOICE, max_size=4),
        how=DAMAGES,
        stop=st.integers(1, 4),
        memory=st.integers(0, 3),
        kill=st.booleans(),
    )
    def repair(self, victims: list[int], how: str, **options: Any) -> None:
        if self.final is None:
            return
        for victim in victims:
            tear(self.out, sorted(self.final), victim=victim, other=victim // 7, how=how, at=victim)
        self.run(repair=True, **options)

    @rule()
    def ask_without_overwrite(self) -> None:
        if self.final is None:
            return
        with pytest.raises(tw.OutputExistsError, match="--overwrite"):
            tw.matmul(self.folder / "a", self.folder / "b", self.out, cluster=self.client)

    # What befalls files.

    @rule(victim=CHOICE, other=CHOICE, how=DAMAGES, at=CHOICE)
    def tear_growing(self, **damage: Any) -> None:
        if self.written:
            tear(self.partial, sorted(self.written), **damage)

    @rule(victim=CHOICE, other=CHOICE, how=DAMAGES, at=CHOICE)
    def tear_finished(self, **damage: Any) -> None:
        if self.final is not None:
            tear(self.out, sorted(self.final), **damage)

    @rule(victims=CHOICE, emptied=st.booleans())
    def cut_power(self, victims: int, emptied: bool) -> None:
        """What was not forced to disk has its length, and zeros or nothing in it."""
        unsynced = sorted(place for unit in self.units for place in unit.unsynced)
        for number, place in enumerate(unsynced):
            path = chunk(self.partial, place)
            if victims >> number & 1 and path.is_file():
                path.write_bytes(bytes(0 if emptied else path.stat().st_size))

    @rule(victim=CHOICE, how=st.sampled_from(["garbage", "flip", "tear"]), at=CHOICE, alone=st.booleans())
    def damage_ledger(self, victim: int, how: str, at: int, alone: bool) -> None:
        """Tear the last line, or damage any but the first. That costs nothing where the copy has all lines; if the
        record stands ``alone``, what the line is about, if no other line says so."""
        if not self.units:
            return
        path = self.partial / ledger.FILE_NAME
        copy = twin_of(path)
        copied = not alone and copy.is_file() and copy.read_bytes() == path.read_bytes()
        head, *lines = path.read_text().splitlines()
        about = [kind_of(line) if unsealed(line) is not None else None for line in lines]
        victim = len(lines) - 1 if how == "tear" else victim % len(lines)
        if about[victim] is None or about[-1] is None:  # torn before; the next run writes it all anew
            return
        if copy.is_file() and None in about:  # whose lines the copy alone has
            return
        if not copied:
            copy.unlink(missing_ok=True)
        told = about[victim]
        assert told is not None
        line = lines[victim]
        damaged = {
            "garbage": "{garbage",
            "flip": line[:9] + chr(ord(line[9]) ^ 1) + line[10:],
            "tear": line[: 1 + at % (len(line) - 1)],
        }[how]
        text = "".join(f"{one}\n" for one in [head, *lines[:victim], damaged, *lines[victim + 1 :]])
        path.write_text(text[:-1] if how == "tear" else text)
        before = {place for unit in self.units for place in unit.places}
        # The last line that is left of a tile counts.
        last = {one.tile: one.kind for place, one in enumerate(about) if one and place != victim}
        self.units = self.recorded()
        after = {place for unit in self.units for place in unit.places}
        if copied:
            assert after == before
        elif told.kind == "withdrawn":
            self.unseen = True  # what was withdrawn is back
            fresh = after - before
            self.stale |= fresh
            self.written |= {place: held(self.partial, place) or b"" for place in fresh}
        elif told.kind in ("read", "inputs") or last.get(told.tile) in ("tile", "stored"):
            assert after == before
            self.reads_known &= told.kind != "read"
        else:
            assert after <= before
            assert after.isdisjoint((row, column) for row, column, *_ in json.loads(line)["objects"])
        self.written = {place: self.written[place] for place in after}

    @rule(which=CHOICE)
    def leave_drafts(self, which: int) -> None:
        """What a killed worker had under way."""
        if not self.partial.exists():
            return
        folders = [self.partial, *sorted(path for path in self.partial.iterdir() if path.is_dir())]
        folder = folders[which % len(folders)]
        draft_of(folder / "0").write_bytes(b"half")
        for name in (ledger.FILE_NAME, CHECKSUMS_NAME):
            (self.partial / name).with_suffix(".draft").write_bytes(b"half")

    # What befalls the inputs.

    @rule(name=st.sampled_from("ab"), how=st.sampled_from(["time", "attribute", "copy", "stray"]))
    def touch(self, name: str, how: str) -> None:
        array = self.folder / name
        if how == "attribute":
            zarr.open_array(array, mode="r+").attrs["touched"] = time.time_ns()
        elif how == "stray":
            (array / ".nfs000000012").write_text("x")
        elif how == "copy":
            copy = array.with_name("copy")
            shutil.copytree(array, copy, copy_function=shutil.copyfile)
            shutil.rmtree(array)
            copy.rename(array)
        else:
            for path in (array / "c").rglob("*"):
                os.utime(path)

    @rule(
        name=st.sampled_from("ab"),
        row=CHOICE,
        column=CHOICE,
        by=st.integers(1, 50),
        put_time_back=st.booleans(),
    )
    def change_a_number(self, name: str, row: int, column: int, by: int, put_time_back: bool) -> None:
        if not self.units and self.final is None:
            return
        self.is_current = False
        numbers = self.numbers[name]
        place = row % numbers.shape[0], column % numbers.shape[1]
        path = chunk(self.folder / name, (place[0] // INPUT_CHUNK, place[1] // INPUT_CHUNK))
        facts = path.stat()
        numbers[place] += by
        zarr.open_array(self.folder / name, mode="r+")[place] = numbers[place]
        if put_time_back:
            os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
            self.unseen = True
        if not self.units:
            return
        axis = "ab".index(name)
        side = chunk_sides(self.partial)[axis]
        first = place[axis] // INPUT_CHUNK * INPUT_CHUNK
        self.stale |= {one for one in self.written if first - side < one[axis] * side < first + INPUT_CHUNK}

    # What is found.

    @rule()
    def audit(self) -> None:
        if self.units:
            self.assert_audit(self.partial, self.written)
        if self.final is not None:
            self.assert_audit(self.out, self.final)

    def assert_audit(self, folder: Path, written: dict[Place, bytes]) -> None:
        bad = {key(place) for place, data in written.items() if held(folder, place) != data}
        found = tw.audit(folder)
        assert {one.file for one in found.bad} == bad
        assert found.passed is (not bad)


def key(place: Place) -> str:
    return f"c/{place[0]}/{place[1]}"


def chunk(folder: Path, place: Place) -> Path:
    return folder / key(place)


def held(folder: Path, place: Place) -> bytes | None:
    """What the file of a piece holds; None where there is no file."""
    path = chunk(folder, place)
    return path.read_bytes() if path.is_file() else None


def identity(folder: Path, place: Place) -> tuple[int, int]:
    """What is other of a file that was written again."""
    facts = chunk(folder, place).stat()
    return facts.st_ino, facts.st_mtime_ns


def chunk_sides(folder: Path) -> tuple[int, int]:
    rows, columns = json.loads((folder / "zarr.json").read_text())["chunk_grid"]["configuration"][
        "chunk_shape"
    ]
    return rows, columns


def places_of(tiles: Iterable[ledger.Stored]) -> frozenset[Place]:
    return frozenset((one.place[0], one.place[1]) for stored in tiles for one in stored.objects)


def tear(folder: Path, places: list[Place], *, victim: int, other: int, how: str, at: int) -> None:
    """Damage the file of a piece."""
    path, another = (chunk(folder, places[choice % len(places)]) for choice in (victim, other))
    if not path.is_file() or not another.is_file() or not path.stat().st_size:
        return
    held = path.read_bytes()
    if how == "cut":
        path.write_bytes(held[: at % len(held)])
    elif how == "remove":
        path.unlink()
    elif how == "flip":
        # In the highest byte of a number: the check of a product of floats sees no change below their rounding.
        flipped = bytearray(held)
        flipped[min(at // 8 * 8 % len(held) + 7, len(held) - 1)] ^= 1 << at % 8
        path.write_bytes(flipped)
    elif path != another:
        path.write_bytes(another.read_bytes())
        another.write_bytes(held)


def copy_as_it_is(folder: Path, to: Path, finished: Path) -> None:
    """What a process that is killed now leaves, drafts and all: its record first, so that no line of the copy is ahead
    of the files that were copied. What is a link to a file of ``finished`` is one in the copy."""
    to.mkdir()
    of_finished = {path.stat().st_ino: path for path in finished.rglob("*") if path.is_file()}
    shutil.copy2(folder / ledger.FILE_NAME, to / ledger.FILE_NAME)
    for place, _, names in os.walk(folder):
        below = to / os.path.relpath(place, folder)
        below.mkdir(exist_ok=True)
        for name in names:
            if name != ledger.FILE_NAME:
                try:
                    same = of_finished.get(os.stat(os.path.join(place, name)).st_ino)
                    if same is not None:
                        os.link(same, below / name)
                    else:
                        shutil.copy2(os.path.join(place, name), below / name)
                except FileNotFoundError:  # a draft that has got its name meanwhile
                    assert name not in (MARK_NAME, "zarr.json")


@pytest.fixture
def lives(
    client: Client, small_pieces: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., None]]:
    memory = Path("/dev/shm")  # each step would wait for a disk
    root = Path(
        tempfile.mkdtemp(
            prefix="lives-", dir=memory if os.access(memory, os.W_OK) else tmp_path_factory.getbasetemp()
        )
    )

    def run(size: str, parts: int = 1, start: str | None = None, **options: Any) -> None:
        lives, steps = map(int, size.split("x"))
        machine = type("Lives", (Lives,), {"client": client, "root": root})
        if start is not None:
            machine = seed(start)(machine)
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=ceil_div(lives, parts),
                stateful_step_count=steps,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                print_blob=True,
                database=None,
                # Making what fails smaller takes longer than a test may: more lives of fewer steps find it small.
                phases=[Phase.generate],
                **options,
            ),
        )

    yield run
    shutil.rmtree(root)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewright.pipeline.plan import tiling

    monkeypatch.setattr(tiling, "LEAST_CHUNK_NBYTES", 1)
    monkeypatch.setattr(tiling, "SMALL_CHUNK_NBYTES", 1)
    monkeypatch.setattr(tiling, "MOST_CHUNK_NBYTES", 128)


@pytest.mark.more
def test_no_tile_is_lost_and_no_wrong_byte_is_stored(lives: Callable[..., None]) -> None:
    lives(FEW, derandomize=True)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_so_it_is_in_many_lives(
    part: int, lives: Callable[..., None], request: pytest.FixtureRequest
) -> None:
    asked = request.config.getoption("--hypothesis-seed")
    start = None if asked is None else f"{asked}, part {part}"  # else all parts would live the same lives
    lives(os.environ.get("TILEWRIGHT_LIVES", MANY), PARTS, start, derandomize=False)
