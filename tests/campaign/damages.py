"""Chunks of a finished C, or of one that a stopped run left, are damaged: an audit names them and no other, and a
repair, or the same command again, computes just their tiles again."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.campaign import processes
from tests.campaign.lane import Lane
from tests.campaign.works import WORKS, Product, differences, recorded_tiles

PRODUCTS = [name for name, work in WORKS.items() if isinstance(work, Product)]
REMEDIES = {("finished", "audit"): 12, ("finished", "repair"): 4, ("stopped", "resume"): 4}
"""How often each comes up: what is damaged, and what is done about it once it has been audited."""
ELEMENT_NBYTES = 8
"""A multiple of every element's, whose least byte comes first."""
STOPPED_PART = 0.6
"""Of its changes, after how many a run is killed to leave what is damaged."""


def _cut(rng: random.Random, chunk: Path, other: Path) -> None:
    os.truncate(chunk, rng.randrange(1, chunk.stat().st_size))


def _empty(rng: random.Random, chunk: Path, other: Path) -> None:
    os.truncate(chunk, 0)


def _flip_a_bit(rng: random.Random, chunk: Path, other: Path) -> None:
    data = bytearray(chunk.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    chunk.write_bytes(data)


def _flip_the_least_bit(rng: random.Random, chunk: Path, other: Path) -> None:
    """Of an element that is stored as it is: less than any check of a product of floats can tell from rounding."""
    data = bytearray(chunk.read_bytes())
    data[rng.randrange(len(data) // ELEMENT_NBYTES) * ELEMENT_NBYTES] ^= 1
    chunk.write_bytes(data)


def _zero_the_end(rng: random.Random, chunk: Path, other: Path) -> None:
    """What file systems leave that make a file long before they write what is in it."""
    data = chunk.read_bytes()
    start = rng.randrange(len(data) - 1)
    while not any(data[start:]):
        start -= 1
    chunk.write_bytes(data[:start] + bytes(len(data) - start))


def _delete(rng: random.Random, chunk: Path, other: Path) -> None:
    chunk.unlink()


def _swap(rng: random.Random, chunk: Path, other: Path) -> None:
    aside = chunk.with_name("aside")
    chunk.rename(aside)
    other.rename(chunk)
    aside.rename(other)


DAMAGES: dict[str, Callable[[random.Random, Path, Path], None]] = {
    "cut short": _cut,
    "emptied": _empty,
    "bit flipped": _flip_a_bit,
    "least bit flipped": _flip_the_least_bit,
    "end zeroed": _zero_the_end,
    "deleted": _delete,
    "two swapped": _swap,
}
"""Each damages the first of two chunks; the last one both."""


@dataclass(frozen=True)
class Damage:
    """One case, as its seed gives it."""

    seed: int
    work: str
    state: str
    remedy: str
    damage: str


def damage_of(seed: int) -> Damage:
    rng = random.Random(f"damage {seed}")
    state, remedy = rng.choices(list(REMEDIES), list(REMEDIES.values()))[0]
    return Damage(seed, rng.choice(PRODUCTS), state, remedy, rng.choice(list(DAMAGES)))


def run_damage(lane: Lane, damage: Damage) -> dict[str, Any]:
    """Carry a case out; returns what it is and what came of it. ``broken`` names the promises that were not kept."""
    work = WORKS[damage.work]
    assert isinstance(work, Product)
    made = _made(lane, work, damage.state)
    folder = lane.begin(work)
    where = work.output(folder) if damage.state == "finished" else work.partial(folder)
    shutil.copytree(made, where)
    tiles = lane.reference(work, "local").tiles
    recorded = recorded_tiles(where) if damage.state == "stopped" else set(tiles.values())
    chunks = sorted(name for name, tile in tiles.items() if tile in recorded)
    rng = random.Random(f"chunks {damage.seed}")
    one, other = rng.sample(chunks, 2)
    DAMAGES[damage.damage](rng, where / one, where / other)
    hurt = {one, other} if damage.damage == "two swapped" else {one}
    case = _Case(lane, work, folder, asdict(damage) | {"broken": [], "chunks": sorted(hurt)})
    case.audit(where, hurt, len(chunks))
    hurt_tiles = {tiles[name] for name in hurt}
    if damage.remedy == "repair":
        case.remedy(["repair", *work.argv(folder)[1:4], "--json"], hurt_tiles)
        if (repaired := lane.printed(1).get("repaired")) != len(hurt_tiles):
            case.broken(f"{repaired} tiles were repaired, and {len(hurt_tiles)} damaged")
    elif damage.remedy == "resume":
        case.remedy(work.argv(folder), hurt_tiles | (set(tiles.values()) - recorded))
    return case.told


def _made(lane: Lane, work: Product, state: str) -> Path:
    """C as a run left it that nothing disturbed, or one that was killed on the way."""
    place = lane.home / f"{state}-{work.name}"
    if not place.exists():
        folder = lane.run_to(work, STOPPED_PART if state == "stopped" else None)
        shutil.copytree(work.output(folder) if state == "finished" else work.partial(folder), place)
    return place


@dataclass
class _Case:
    lane: Lane
    work: Product
    folder: Path
    told: dict[str, Any] = field(default_factory=dict)

    def broken(self, promise: str) -> None:
        self.told["broken"].append(promise)

    def audit(self, where: Path, hurt: set[str], chunks: int) -> None:
        """An audit of what lies at a place names what is hurt, and nothing else of so many chunks."""
        status = self._run(["audit", str(where), "--json"], 0)
        named = {one["file"] for one in self.lane.printed(0).get("bad", ())}
        self.told |= {
            "found": hurt <= named,
            "false_alarms": len(named - hurt),
            "undamaged": chunks - len(hurt),
        }
        if hurt - named or status != 1:
            self.broken(f"an audit that ends with {status} does not name {sorted(hurt - named)}")
        if named - hurt:
            self.broken(f"an audit names undamaged chunks: {sorted(named - hurt)[:4]}")

    def remedy(self, argv: Sequence[str], wanted: set[int]) -> None:
        """A command leaves C as it should be, and computes just these tiles."""
        stored = len(self.lane.stored())
        status = self._run(argv, 1)
        reference = self.lane.reference(self.work, "local")
        computed = {reference.tiles["/".join(path.split("/")[-3:])] for path in self.lane.stored()[stored:]}
        self.told |= {"status": status, "computed": len(computed), "wanted": len(wanted)}
        if status != 0:
            self.broken(f"{argv[0]} ends with {status}: {self.lane.log(1).read_text()[-300:]}")
        if found := differences(self.work.result(self.folder), reference.result):
            self.broken(
                f"after {argv[0]} the output is another: {', '.join(found[:4])}, {len(found)} files in all"
            )
        if left := self.work.leftovers(self.folder):
            self.broken(f"{argv[0]} leaves {', '.join(left[:4])}")
        if computed - wanted:
            self.broken(f"{argv[0]} computes undamaged tiles again: {sorted(computed - wanted)[:8]}")
        if wanted - computed:
            self.broken(f"{argv[0]} does not compute damaged tiles again: {sorted(wanted - computed)[:8]}")

    def _run(self, argv: Sequence[str], number: int) -> int | None:
        client = self.lane.start(argv, "" if argv[0] == "audit" else "local", number)
        status = processes.wait(client)
        if status is None:
            self.broken(f"{argv[0]} hangs for {processes.LIMIT_SECONDS} s")
            processes.end(client)
        return status
