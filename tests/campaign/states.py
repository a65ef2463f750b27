"""What a count keeps of its pieces is cut or damaged at random: the same command counts what was lost, and nothing
else; or it says that the state cannot be gone on with, and what to do. A wrong count is never given."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from tests.campaign import processes
from tests.campaign.lane import Lane
from tests.campaign.works import COUNTS, Count, differences, parsed, pieces_in

STOPPED_PART = 0.7
"""Of its changes, after how many a count is killed to leave what is damaged."""


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def _flip_a_bit(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _zero_the_end(rng: random.Random, data: bytes) -> bytes:
    """What file systems leave that make a file long before they write what is in it."""
    kept = _cut(rng, data)
    return kept + bytes(len(data) - len(kept))


def _take_out_a_part(rng: random.Random, data: bytes) -> bytes:
    first, last = sorted(rng.randrange(len(data)) for _ in range(2))
    return data[:first] + data[last:]


def _overwrite_a_part(rng: random.Random, data: bytes) -> bytes:
    first, last = sorted(rng.randrange(len(data)) for _ in range(2))
    return data[:first] + rng.randbytes(last - first) + data[last:]


def _swap_lines(rng: random.Random, data: bytes) -> bytes:
    head, *lines = data.splitlines(keepends=True)
    rng.shuffle(lines)
    return b"".join([head, *lines])


def _double_lines(rng: random.Random, data: bytes) -> bytes:
    head, *lines = data.splitlines(keepends=True)
    return b"".join([head, *lines, *rng.choices(lines, k=len(lines))])


DAMAGES: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "cut short": _cut,
    "bit flipped": _flip_a_bit,
    "end zeroed": _zero_the_end,
    "part taken out": _take_out_a_part,
    "part overwritten": _overwrite_a_part,
    "lines swapped": _swap_lines,
    "lines doubled": _double_lines,
}
WEIGHTS = {"cut short": 6}
"""How often each comes up, once if nothing else is said."""


@dataclass(frozen=True)
class DamagedState:
    """One case, as its seed gives it."""

    seed: int
    work: str
    state: str
    damage: str


def state_of(seed: int) -> DamagedState:
    rng = random.Random(f"state {seed}")
    weights = [WEIGHTS.get(name, 1) for name in DAMAGES]
    return DamagedState(
        seed,
        rng.choice(list(COUNTS)),
        rng.choice(("finished", "stopped")),
        rng.choices(list(DAMAGES), weights)[0],
    )


def run_state(lane: Lane, case: DamagedState) -> dict[str, Any]:
    """Carry a case out; returns what it is and what came of it. ``broken`` names the promises that were not kept."""
    work = COUNTS[case.work]
    whole = _made(lane, work, case.state)
    folder = lane.begin(work)
    record = work.record(folder)
    record.parent.mkdir()
    hurt = DAMAGES[case.damage](random.Random(f"damage of {case.seed}"), whole)
    record.write_bytes(hurt)
    told: dict[str, Any] = asdict(case) | {"broken": [], "nbytes": len(hurt)}
    intact = _intact(hurt, whole)
    status = _run(lane, work.argv(folder), 0, told)
    if status == 0:
        added = set(pieces_in(parsed(record.read_bytes()[len(hurt) :])))
        told |= {"kept": len(intact), "counted": len(added)}
        if again := intact & added:
            told["broken"].append(f"pieces whose lines are whole are counted again: {sorted(again)[:4]}")
    else:
        told["refused"] = True
        if work.result(folder):
            told["broken"].append(f"it ends with {status}, and leaves counts")
        if "--no-resume" not in lane.log(0).read_text() and "another place" not in lane.log(0).read_text():
            told["broken"].append(f"it ends with {status}: {lane.log(0).read_text()[-300:]}")
        record.unlink()  # as a user does who is told to give another place
        if (status := _run(lane, work.argv(folder), 1, told)) != 0:
            told["broken"].append(f"from nothing it ends with {status}: {lane.log(1).read_text()[-300:]}")
    if found := differences(work.result(folder), lane.reference(work, "local").result):
        told["broken"].append(f"the output is another: {', '.join(found)}")
    if left := work.leftovers(folder):
        told["broken"].append(f"left over: {', '.join(left[:4])}")
    return told


def _made(lane: Lane, work: Count, state: str) -> bytes:
    """The record of a count that nothing disturbed, or of one that was killed on the way."""
    place = lane.home / f"{state}-{work.name}.jsonl"
    if not place.exists():
        folder = lane.run_to(work, STOPPED_PART if state == "stopped" else None)
        shutil.copy(work.record(folder), place)
    return place.read_bytes()


def _intact(hurt: bytes, whole: bytes) -> set[Any]:
    """The pieces of the lines that are what they were, where the first is one of them."""
    before = whole.split(b"\n")
    lines = hurt.split(b"\n")
    if lines[0] != before[0]:
        return set()
    return set(pieces_in(parsed(b"\n".join(line for line in lines if line in before))))


def _run(lane: Lane, argv: list[str], number: int, told: dict[str, Any]) -> int | None:
    client = lane.start(argv, "local", number)
    status = processes.wait(client)
    if status is None:
        told["broken"].append(f"command {number} hangs for {processes.LIMIT_SECONDS} s")
        processes.end(client)
    if "Traceback" in lane.log(number).read_text(errors="replace"):
        told["broken"].append(f"command {number} prints a traceback")
    return status
