"""Power cuts: C is stored on ext4 in a file, through a loop device, and a copy of that file, taken at some moment, is
what a disk would hold had the power been cut then. Mounting the copy replays its journal.

What the system has not yet sent to the device is not in the copy, so what nobody forced to disk is lost, as it is with
a real disk. The copy must be of one moment: were data read before, and the journal after, a commit, the copy would show
what no disk can. So the writers are stopped, and the copy is taken again until the device has finished no write between
its beginning and its end, and has none under way. (A frozen file system, as by ``fsfreeze``, would be of one moment,
too, but freezing sends all that is left to the device first.) A process that is stopped first ends the call it is in:
cuts within one ``fsync`` are up to ext4's journal, and not tried.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.campaign import processes
from tests.campaign.changes import CLIENT
from tests.campaign.lane import Lane
from tests.campaign.works import WORKS, Product, differences, digest, digests, entries_in

TOOLS = ("mkfs.ext4", "mount", "umount")
IMAGE_NBYTES = 2**27
COMMIT_SECONDS = 1
"""After so long ext4 commits its journal by itself; its default is 5."""
SETTLE_SECONDS = 1.5
"""The longest time between the moment at which everything stops and the cut: longer than a commit takes to come."""
COPIES = 200
PARTS = {"middle": 3, "end": 2}
"""How often the power is cut before the command has ended, and right after it has succeeded."""
CLONE_NEWNS = 0x20000


@dataclass(frozen=True)
class Cut:
    """One case, as its seed gives it."""

    seed: int
    work: str
    moment: str
    part: float
    """Of the changes of the file system that the command makes: where it is stopped."""
    settle_seconds: float


def cut_of(seed: int) -> Cut:
    rng = random.Random(f"cut {seed}")
    moment = rng.choices(list(PARTS), list(PARTS.values()))[0]
    products = [name for name, work in WORKS.items() if isinstance(work, Product)]
    settle = rng.choice((0.0, rng.uniform(0, SETTLE_SECONDS)))
    return Cut(seed, rng.choice(products), moment, rng.uniform(0.05, 1), settle)


def why_not() -> str:
    """Why the power cannot be cut here; empty where it can."""
    if os.geteuid() != 0:
        return "mounting file systems takes root"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"there is no {missing[0]}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def try_it() -> None:
            Disk(folder).close()

        if processes.wait(processes.fork(try_it, folder / "try.log")) != 0:
            said = (folder / "try.log").read_text().strip().splitlines()
            return f"ext4 cannot be mounted from a file: {said[-1] if said else 'no reason is given'}"
    return ""


class Disk:
    """A file system of its own, which only this process and its children see."""

    def __init__(self, folder: Path) -> None:
        _hide_mounts()
        self.image, self.place = folder / "disk.img", folder / "disk"
        self.copy, self.after = folder / "copy.img", folder / "after"
        self.place.mkdir()
        self.after.mkdir()
        with self.image.open("wb") as file:
            file.truncate(IMAGE_NBYTES)
        _run("mkfs.ext4", "-q", "-F", self.image)
        _run("mount", "-o", f"loop,commit={COMMIT_SECONDS}", self.image, self.place)
        number = os.stat(self.place).st_dev
        self.facts = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")

    def writes(self) -> tuple[int, int]:
        """Writes that the device has finished, and those under way."""
        facts = self.facts.read_text().split()
        return int(facts[4]), int(facts[8])

    def cut(self) -> None:
        """Copy what the device holds, at one moment, and mount the copy."""
        for _ in range(COPIES):
            before = self.writes()
            _run("cp", "--sparse=always", self.image, self.copy)
            if before == self.writes() and before[1] == 0:
                _run("mount", "-o", "loop", self.copy, self.after)
                return
        raise RuntimeError(f"{self.image} was written to through each of {COPIES} copies")

    def forget(self) -> None:
        """Take the copy away, and what is on the disk."""
        if os.path.ismount(self.after):
            _run("umount", self.after)
        self.copy.unlink(missing_ok=True)
        for entry in self.place.iterdir():
            if entry.name != "lost+found":
                shutil.rmtree(entry)
        _run("sync", "-f", self.place)

    def close(self) -> None:
        self.forget()
        _run("umount", self.place)


def _hide_mounts() -> None:
    """Keep what this process mounts from all others; it goes with the last that sees it."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    _run("mount", "--make-rprivate", "/")


def _run(*command: str | Path) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.strip()}")


def run_cut(lane: Lane, cut: Cut) -> dict[str, Any]:
    """Carry a case out; returns what it is and what came of it. ``broken`` names the promises that were not kept."""
    work = WORKS[cut.work]
    assert isinstance(work, Product)
    reference = lane.reference(work, "local")
    folder = lane.begin(work)
    disk = lane.own(Disk)
    disk.forget()
    told: dict[str, Any] = {**asdict(cut), "broken": []}
    if cut.moment == "middle":
        lane.orders.change = 1 + int(cut.part * reference.changes[CLIENT])
        lane.orders.role = CLIENT
    client = lane.start(_argv(work, folder, disk.place), "local")
    status = None
    for _ in processes.looks(processes.LIMIT_SECONDS):
        if lane.orders.stopped or (status := processes.ended(client)) is not None:
            break
    if lane.orders.stopped:
        processes.wait_until_stopped(lane.orders.stopped)
    elif status != 0:
        told["broken"].append(f"the command ends with {status}: {lane.log(0).read_text()[-300:]}")
    time.sleep(cut.settle_seconds)
    disk.cut()
    if status is None:
        processes.send(client, signal.SIGKILL)
        processes.wait(client)
    lane.orders.role = 0
    finished, partial = disk.after / "C.zarr", disk.after / "C.zarr.partial"
    told["status"] = status
    if status == 0 or finished.exists():
        told["whole"] = not (found := differences(digests(finished), reference.result))
        if found:
            told["broken"].append(f"C is not whole: {', '.join(found[:4])}, {len(found)} files in all")
    if not finished.exists():
        lines = _lines(partial)
        wrong = [name for name, good in lines.items() if reference.result.get(name) != good]
        tiles = {reference.tiles[name] for name in lines}
        told |= {"lines": len(tiles), "untrue": len({reference.tiles[name] for name in wrong})}
        if wrong:
            told["broken"].append(
                f"lines of the record are not true: {', '.join(wrong[:4])}, {len(wrong)} chunks"
            )
        _go_on(lane, work, folder, disk, len(tiles), told)
    disk.forget()
    return told


def _argv(work: Product, folder: Path, place: Path) -> Sequence[str]:
    argv = work.argv(folder)
    return [*argv[:3], str(place / "C.zarr"), *argv[4:], "--durability", "full"]


def _lines(partial: Path) -> dict[str, str]:
    """By name, a digest of each chunk of the tiles of which a line says that they are on disk; of none where it is not
    there."""
    tiles: dict[int, list[str]] = {}
    for entry in entries_in(partial / "tilewright-ledger.jsonl"):
        if "tile" in entry and "objects" in entry:
            tiles[entry["tile"]] = ["/".join(map(str, ("c", *place))) for *place, _, _ in entry["objects"]]
        elif "withdrawn" in entry:
            tiles.pop(entry["withdrawn"], None)
    names = [name for chunks in tiles.values() for name in chunks]
    return {name: digest(partial / name) if (partial / name).is_file() else "" for name in names}


def _go_on(lane: Lane, work: Product, folder: Path, disk: Disk, lines: int, told: dict[str, Any]) -> None:
    """The same command, on what the cut has left, ends with the right C, and keeps each tile that a line names."""
    status = processes.wait(lane.start(_argv(work, folder, disk.after), "local", 1))
    if status != 0:
        told["broken"].append(
            f"after the cut the command ends with {status}: {lane.log(1).read_text()[-300:]}"
        )
        return
    if found := differences(digests(disk.after / "C.zarr"), lane.reference(work, "local").result):
        told["broken"].append(
            f"after the cut C is another: {', '.join(found[:4])}, {len(found)} files in all"
        )
    told["kept"] = lane.printed(1)["resumed"]
    if told["kept"] < lines:
        told["broken"].append(f"{lines} tiles were on disk, and {told['kept']} of them kept")
