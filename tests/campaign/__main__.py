"""``python -m tests.campaign --kills 3000 --seed 0``: seeded cases in parallel, a table, and exit status 1 where a
promise was broken."""

from __future__ import annotations

import os

if __name__ == "__main__":
    # Before NumPy and Dask are imported: threads of theirs must not be there when a process forks.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    os.environ.update(DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED="False")
    # A case is the same wherever it runs, and a GPU that thirty processes share is slow.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import argparse
import fcntl
import json
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.campaign import processes, table
from tests.campaign.damages import damage_of, run_damage
from tests.campaign.kills import count_kill_of, keep_logs, kill_of, run_kill
from tests.campaign.lane import Lane, run_all
from tests.campaign.power import cut_of, run_cut, why_not
from tests.campaign.states import run_state, state_of

LEAST_FREE_NBYTES = 2**30
"""A file system in memory with less is left alone."""
TOLD_SECONDS = 30
CASES_A_CORE = 2
"""At a time: a case waits half of its time, for deadlines and for processes that were stopped."""

Case = dict[str, Any]


def _kill(lane: Lane, seed: int, change: int | None) -> Case:
    return run_kill(lane, kill_of(seed), change)


def _damage(lane: Lane, seed: int, change: int | None) -> Case:
    return run_damage(lane, damage_of(seed))


def _cut(lane: Lane, seed: int, change: int | None) -> Case:
    return run_cut(lane, cut_of(seed))


def _count(lane: Lane, seed: int, change: int | None) -> Case:
    return run_kill(lane, count_kill_of(seed), change)


def _state(lane: Lane, seed: int, change: int | None) -> Case:
    return run_state(lane, state_of(seed))


KINDS: dict[str, Callable[[Lane, int, int | None], Case]] = {
    "damages": _damage,
    "cuts": _cut,
    "counts": _count,
    "states": _state,
    "kills": _kill,
}
"""What a case of each kind is made and judged by, in the order in which they run: kills, the longest and most, last, so
that ``--seconds`` leaves out some of them alone."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    for kind in KINDS:
        parser.add_argument(f"--{kind}", type=int, default=0, metavar="N", help=f"cases of this kind: {kind}")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; each other has the next")
    parser.add_argument(
        "--jobs", type=int, default=CASES_A_CORE * len(os.sched_getaffinity(0)), help="cases at a time"
    )
    parser.add_argument("--table", type=Path, help="file for the results, as JSON")
    parser.add_argument("--change", type=int, help="before which change of the file system a kill is to be")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so long")
    parser.add_argument("--logs", type=Path, help="folder for what the commands of broken cases wrote")
    options = parser.parse_args(argv)
    counts = {kind: getattr(options, kind) for kind in KINDS}
    if not any(counts.values()):
        parser.error("nothing to do: give a number of cases")
    cases: list[Case] = []
    if counts["cuts"] and (reason := why_not()):
        cases.append({"kind": "cuts", "seed": options.seed, "not_run": reason, "broken": []})
        counts["cuts"] = 0
    todo = [(kind, options.seed + number) for kind, count in counts.items() for number in range(count)]
    asked = sum(getattr(options, kind) for kind in KINDS)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # either ends it with the table of what was run
    began = time.monotonic()
    lanes: dict[int, Path] = {}
    folder = Path(tempfile.mkdtemp(prefix="tilewright-campaign-", dir=_fast_folder()))
    try:
        modules = processes.warm(lambda: run_all(folder / "warm"), folder)
        jobs = max(1, min(options.jobs, len(todo)))
        counter = folder / "taken"
        counter.touch()
        for number in range(jobs):
            place, results = folder / f"lane-{number}", folder / f"results-{number}"
            results.touch()
            run = _lane(place, modules, _taken(todo, counter), results, options, began + options.seconds)
            lanes[processes.fork(run, folder / f"lane-{number}.log")] = results
        done, failed = gathered(lanes, len(todo), began)
        cases += done
    finally:
        for lane in lanes:
            processes.finish(lane)
        shutil.rmtree(folder, ignore_errors=True)
    seconds = round(time.monotonic() - began, 1)
    facts = {
        "seed": options.seed,
        "asked": len(todo),
        "ran": len(cases),
        "seconds": seconds,
        "failed": failed,
    }
    if options.table is not None:
        table.write(options.table, cases, facts)
    print(table.summary(cases))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = used.ru_utime + used.ru_stime
    print(
        f"{len(done)} cases of {asked} in {seconds:.0f} s from seed {options.seed},"
        f" {busy / max(1, len(done)):.1f} s of a core each"
    )
    for line in failed:
        print(line)
    return int(bool(failed) or any(case["broken"] for case in cases))


def _fast_folder() -> str | None:
    """A file system in memory, where there is one with room: a campaign forces thousands of files to disk."""
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > LEAST_FREE_NBYTES:
        return str(memory)
    return None


def _taken(todo: Sequence[tuple[str, int]], counter: Path) -> Iterator[tuple[str, int]]:
    """Cases that no other process has taken, one at a time: they take from a few tenths of a second to half a minute.
    counter: a file that says how many are taken."""
    while True:
        with counter.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            number = int(file.read() or "0")
            file.seek(0)
            file.write(str(number + 1))
        if number >= len(todo):
            return
        yield todo[number]


def _lane(
    place: Path,
    modules: Sequence[str],
    todo: Iterable[tuple[str, int]],
    results: Path,
    options: argparse.Namespace,
    until: float,
) -> Callable[[], None]:
    """Run cases one after the other, and write a line for each, in a process of its own."""

    def run() -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the cluster of the lane has to end with it
        lane = Lane(place, modules)
        try:
            for kind, seed in todo:
                if time.monotonic() > until:
                    break
                try:
                    case = KINDS[kind](lane, seed, options.change)
                except Exception:
                    case = {"seed": seed, "broken": [f"the campaign fails: {traceback.format_exc()}"]}
                if case["broken"] and options.logs is not None:
                    keep_logs(lane, options.logs / f"{kind}-{seed}")
                with results.open("a") as file:
                    file.write(json.dumps({"kind": kind, **case}) + "\n")
        finally:
            lane.close()

    return run


def gathered(lanes: dict[int, Path], count: int, began: float) -> tuple[list[Case], list[str]]:
    """The cases of all lanes once they have ended, or of what they have run when Ctrl-C or SIGTERM comes, and what went
    wrong with lanes. lanes: by its process, the file of a
    lane's results."""
    running, failed, told = set(lanes), [], began
    try:
        while running:
            for pid in sorted(running):
                if (status := processes.ended(pid)) is not None:
                    running.discard(pid)
                    if status:
                        log = lanes[pid].with_name(lanes[pid].name.replace("results", "lane") + ".log")
                        failed.append(f"a lane ends with {status}: {log.read_text()[-2000:]}")
            if time.monotonic() > told + TOLD_SECONDS:
                told = time.monotonic()
                done = sum(results.read_text().count("\n") for results in lanes.values())
                print(f"{done} of {count} after {told - began:.0f} s", file=sys.stderr, flush=True)
            time.sleep(0.1)
    except KeyboardInterrupt:
        failed.append(f"it was interrupted while {len(running)} of {len(lanes)} lanes were at work")
    whole = [
        line
        for results in lanes.values()
        for line in results.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
    cases = [json.loads(line) for line in whole]
    return sorted(cases, key=lambda case: (list(KINDS).index(case["kind"]), case["seed"])), failed


if __name__ == "__main__":
    raise SystemExit(main())
