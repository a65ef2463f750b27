"""A command in a terminal and its job, and what can be seen of both from outside."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import zarr

from tests.object_stores.servers import client
from tilewright.pipeline.errors import OutputExistsError
from tilewright.pipeline.product.output import check_output_free
from tilewright.pipeline.store.remote.opening import store_at

Chunks = dict[str, tuple[object, object]]
"""By its name, what tells whether a chunk has been stored again: file and time, or tag and time."""
ROOT = Path(__file__).parents[2]
RIG = Path(os.environ.get("TILEWRIGHT_SLURM_RIGS", "/nonexistent")) / os.environ.get(
    "PYTEST_XDIST_WORKER", "gw0"
)
"""The folder of the Slurm that this process has for itself."""
TILES = 64
CHUNKS = 4
"""Of each tile."""
UNDER_WAY = 8
"""Tiles that two workers may have under way: two threads each, and as many that are being written."""
NEEDED = (("dask", "scheduler"), ("batch.launcher",), ("batch.inside",))
"""Words in the commands of the processes that a job needs."""
WAIT_SECONDS = 420
IDLE_SECONDS = 30
"""How long an allocation may outlive its work."""


def slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def wait_for(what: Callable[[], object], seconds: float = WAIT_SECONDS) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, f"{what} is not so after {seconds} s"
        time.sleep(0.1)


def command_of(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def environment_of(pid: int) -> dict[str, str]:
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        return dict(line.split("=", 1) for line in lines if "=" in line)
    return {}


def processes(*words: str) -> list[int]:
    """Those whose command has all of these words."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            command = command_of(int(folder.name)).decode(errors="replace")
            if all(word in command for word in words):
                found.append(int(folder.name))
    return found


def children(pid: int) -> list[int]:
    """Of all threads of a process."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(child) for child in path.read_text().split()]
    return found


def set_pace(place: Path, name: str, seconds: float) -> None:
    new = place / f"{name}.pace.new"
    new.write_text(str(seconds))
    new.replace(place / f"{name}.pace")


@dataclass
class Run:
    """A command in a terminal, and the job that it has submitted."""

    place: Path
    process: subprocess.Popen[str]
    name: str
    """Of the files with what it says."""
    output: str = "C.zarr"
    """A folder in the place, or a URL of S3."""
    server: int = 0
    """The port of what answers for that, without what cuts connections."""
    before: Chunks = field(default_factory=dict)
    """The chunks of C at the last stop."""

    @property
    def said(self) -> str:
        return (self.place / f"{self.name}.stderr").read_text()

    @property
    def job(self) -> str:
        return self._submitted()[1]

    @property
    def folder(self) -> Path:
        return Path(self._submitted()[2])

    def _submitted(self) -> re.Match[str]:
        found = re.search(r"^submitted as job (\d+); its files are in (.+)$", self.said, re.M)
        assert found is not None, self.said
        return found

    def chunks(self) -> Chunks:
        """Those that are stored."""
        if self.server:
            bucket, start = self.output.removeprefix("s3://").split("/", 1)
            start += "/c/"
            there = client(self.server).list_objects_v2(Bucket=bucket, Prefix=start).get("Contents", [])
            return {one["Key"].removeprefix(start): (one["ETag"], one["LastModified"]) for one in there}
        found: Chunks = {}
        for name in (f"{self.output}.partial", self.output):
            folder = self.place / name / "c"
            with suppress(FileNotFoundError):  # it gets its name meanwhile, under which it is looked at next
                for path in folder.rglob("*") if folder.is_dir() else ():
                    with suppress(OSError):
                        if path.is_file() and path.name.isdigit():
                            status = path.stat()
                            found[str(path.relative_to(folder))] = status.st_ino, status.st_mtime_ns
        return found

    def slow_down(self) -> None:
        """Have it go on for a minute and a half from now on, and yet a thread free every few seconds."""
        set_pace(self.place, self.name, 6)

    def hurry(self) -> None:
        """Have its tiles take no longer than they do by themselves, from now on."""
        set_pace(self.place, self.name, 0)

    def wait_for_tiles(self, count: int) -> None:
        wait_for(lambda: len(self.chunks()) >= count * CHUNKS or self.process.poll() is not None)
        assert self.process.poll() is None, self.said

    def wait_for_more_tiles(self) -> None:
        """Until it has stored another one, or is over."""
        there = len(self.chunks())
        wait_for(lambda: len(self.chunks()) >= there + CHUNKS or self.process.poll() is not None)

    def works(self) -> bool:
        """Whether the job has all processes without which its nodes would be idle."""
        return all(processes(*words, str(self.folder)) for words in NEEDED)

    def wait_until_it_works(self) -> None:
        """Or is over. A job that was stopped stores tiles until it has ended, and then waits in Slurm's queue."""
        wait_for(lambda: self.process.poll() is not None or (self.state() == "RUNNING" and self.works()))

    def stored_again(self) -> int:
        """Chunks that were there at the last stop, and were stored once more."""
        now = self.chunks()
        return sum(now.get(name) != was for name, was in self.before.items())

    def state(self) -> str:
        return slurm("squeue", "--noheader", "--states=all", f"--jobs={self.job}", "--format=%T").strip()

    def attempt(self) -> int:
        with suppress(OSError, ValueError):
            return int(json.loads((self.folder / "state.json").read_text())["attempt"])
        return 0

    def address(self) -> str:
        """Of its scheduler."""
        file = self.folder / f"scheduler-{self.attempt()}.json"
        return str(json.loads(file.read_text())["address"])

    def finished(self) -> dict[str, object]:
        """The report of the command, which is to come to a good end soon."""
        self.hurry()
        status = self.process.wait(WAIT_SECONDS)
        assert status == 0, self.said
        report: dict[str, object] = json.loads((self.place / f"{self.name}.stdout").read_text())
        self.verify()
        return report

    def is_whole(self) -> bool:
        """Whether the product has its place, however the command came to its end: one that is stopped just after that
        loses nothing, and no other would go on with it."""
        try:
            check_output_free(self.output if self.server else self.place / self.output, overwrite=False)
        except OutputExistsError:
            return True
        return False

    def verify(self) -> None:
        """Compare the whole product with NumPy's."""
        names = [self.place / "A.zarr", self.place / "B.zarr", self.output]
        if not self.server:
            names[2] = self.place / self.output
        places = (store_at(name) if isinstance(name, str) else name for name in names)
        a, b, c = (np.asarray(zarr.open_array(place, mode="r")[...]) for place in places)
        np.testing.assert_array_equal(c, a @ b)

    def goes_on(self, attempt: int = 2) -> dict[str, object]:
        """The job was stopped, and has come to a good end in another try."""
        report = self.finished()
        assert self.attempt() >= attempt, self.said
        kept = report["resumed"]
        assert isinstance(kept, int)
        assert kept >= len(self.before) // CHUNKS - UNDER_WAY
        assert self.stored_again() <= UNDER_WAY * CHUNKS
        return report
