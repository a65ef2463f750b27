"""What a count costs that is killed near its end: the time of the run that goes on, as a share of the whole count's.

    python benchmarks/stopped_count.py [FOLDER] [--gigabytes 20] [--at 0.9] [--by KIND] [--cached] [--repeats R]

Makes a corpus in a folder below FOLDER, which is removed at the end, and counts it by `tilewright histogram --state`:
once as a whole, and once killed (SIGKILL) when that share of its bytes is in the record, and again. All must give the
same counts, and the run that goes on must count no byte that was recorded. Each run begins with none of the corpus in
the page cache; with --cached all of it is there: one file of a gigabyte under many names.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tilewright.kernels.histograms.tokens import KINDS

GIGABYTE = 10**9
BLOCK_NBYTES = 2**26
LOOK_SECONDS = 0.01
LIMIT = 0.15
"""What the issue of durability allows, of a count that is killed at 90 %."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("."))
    parser.add_argument("--gigabytes", type=int, default=20)
    parser.add_argument(
        "--at", type=float, default=0.9, help="share of the bytes after which it is killed; 0.9"
    )
    parser.add_argument("--by", choices=tuple(KINDS), default="byte")
    parser.add_argument("--cached", action="store_true", help="measure from the page cache")
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="stopped-count-", dir=options.folder))
    shares = []
    try:
        corpus = make_corpus(folder / "corpus", options.gigabytes, options.cached)
        for number in range(options.repeats):
            place = folder / str(number)
            place.mkdir()
            count = Count(corpus, options.by, place, cold=not options.cached)
            shares.append(count.measure(options.gigabytes * GIGABYTE, options.at))
    finally:
        shutil.rmtree(folder)
    share = sorted(shares)[len(shares) // 2]
    print(f"killed at {options.at:.0%}, the rest takes {share:.1%} of the whole count's time")
    return int(options.at >= 0.9 and share > LIMIT)


def make_corpus(folder: Path, gigabytes: int, cached: bool) -> Path:
    """Files of a gigabyte each, of text that repeats every 64 MiB; cached: one of them, under many names."""
    folder.mkdir()
    letters = np.frombuffer(b"etaoin shrdlucmfwypvbgkjqxz.,\n", np.uint8)
    block = letters[np.random.default_rng(20).integers(0, len(letters), BLOCK_NBYTES)].tobytes()
    for number in range(gigabytes):
        path = folder / f"{number:03}.txt"
        if cached and number:
            os.link(folder / "000.txt", path)
            continue
        with path.open("wb") as file:
            for start in range(0, GIGABYTE, BLOCK_NBYTES):
                file.write(block[: GIGABYTE - start])
            file.flush()
            os.fsync(file.fileno())  # what is not on disk cannot leave the page cache
    return folder


class Count:
    """The runs of one count."""

    def __init__(self, corpus: Path, by: str, place: Path, *, cold: bool) -> None:
        self.corpus, self.by, self.place, self.cold = corpus, by, place, cold

    def measure(self, nbytes: int, at: float) -> float:
        whole, wanted = self.run("whole")
        killed = self.killed("stopped", int(at * nbytes))
        recorded = recorded_nbytes(self.record("stopped"))
        rest, found = self.run("stopped")
        assert found["counts"] == wanted["counts"], "the counts differ"
        assert recorded_nbytes(self.record("stopped")) == nbytes, "bytes that were recorded are counted again"
        print(
            f"{nbytes / GIGABYTE:.0f} GB by {self.by}: {whole:.1f} s as a whole; killed after {killed:.1f} s with"
            f" {recorded / nbytes:.1%} recorded, the rest in {rest:.1f} s",
            flush=True,
        )
        return rest / whole

    def run(self, state: str) -> tuple[float, dict]:
        began = self.begin()
        done = subprocess.run(self.command(state), stdout=subprocess.PIPE, check=True)
        return time.perf_counter() - began, json.loads(done.stdout)

    def killed(self, state: str, nbytes: int) -> float:
        began = self.begin()
        with subprocess.Popen(self.command(state), stdout=subprocess.DEVNULL) as process:
            while recorded_nbytes(self.record(state)) < nbytes:
                if process.poll() is not None:
                    raise SystemExit("it ended before it was killed: give it more to count")
                time.sleep(LOOK_SECONDS)
            process.send_signal(signal.SIGKILL)
        return time.perf_counter() - began

    def begin(self) -> float:
        for path in self.corpus.iterdir() if self.cold else ():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        return time.perf_counter()

    def command(self, state: str) -> list[str]:
        words = ["histogram", str(self.corpus), "--by", self.by, "--state", str(self.place / state)]
        return [sys.executable, "-m", "tilewright", *words, "--json", "--quiet", "--device", "cpu"]

    def record(self, state: str) -> Path:
        return self.place / state / "tilewright-counts.jsonl"


def recorded_nbytes(record: Path) -> int:
    """Bytes of the pieces that a record holds, each as often as it was counted."""
    try:
        lines = record.read_text().splitlines()
    except FileNotFoundError:
        return 0
    total = 0
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:  # torn, or half written
            continue
        total += entry.get("nbytes", 0)
    return total


if __name__ == "__main__":
    raise SystemExit(main())
