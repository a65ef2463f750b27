"""Random stops of one product after another: what is recorded is kept, and no allocation waits for nothing."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from tests.slurm.conftest import Bucket
from tests.slurm.jobs import CHUNKS, IDLE_SECONDS, UNDER_WAY, WAIT_SECONDS, Run
from tests.slurm.stops import WAYS, command_killed, keeper_killed, node_down

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]

STOPS = int(os.environ.get("STOPS", "10"))
SEED = os.environ.get("STOPS_SEED", "0")
MOST_STOPS = 5
"""Of one test, so that several processes share them."""
TILE_SECONDS = 1.5
SUDDEN = (node_down, command_killed, keeper_killed)
"""Stops that leave a command no time to record."""
UNRECORDED = 16
"""Tiles that two workers of two threads each finish in the five seconds, and in those that recording takes."""


class Idle(threading.Thread):
    """Watches a job for how long it holds its nodes without one of the processes that it needs."""

    def __init__(self) -> None:
        super().__init__(name="idle", daemon=True)
        self.run_of: Run | None = None
        self.longest = 0.0
        self._ended = threading.Event()

    def run(self) -> None:
        since: tuple[Run, float] | None = None
        while not self._ended.wait(0.5):
            run = self.run_of
            if run is None or run.state() != "RUNNING" or run.works():
                since = None
            elif since is None or since[0] is not run:
                since = run, time.monotonic()
            else:
                self.longest = max(self.longest, time.monotonic() - since[1])

    def end(self) -> None:
        self._ended.set()
        self.join()


def parts(stops: int) -> list[int]:
    """How many of the stops there are in each."""
    count = -(-stops // MOST_STOPS)
    return [stops // count + (part < stops % count) for part in range(count)]


@pytest.mark.parametrize(("part", "count"), list(enumerate(parts(STOPS))))
def test_random_stops_lose_no_tile(submit: Callable[..., Run], part: int, count: int) -> None:
    """`STOPS` of them in all parts, chosen by `STOPS_SEED`; what is stored again is at most what was under way at each.
    A product that is finished before its next stop is verified, and another one begun."""
    stop_at_random(submit, f"{SEED} {part}", count)


@pytest.mark.parametrize(("part", "count"), list(enumerate(parts(-(-STOPS // 4)))))
def test_random_stops_lose_no_tile_on_s3(
    submit: Callable[..., Run], bucket: Bucket, part: int, count: int
) -> None:
    """A quarter as many, with C on S3, whose connections are cut. The record is stored there once in five seconds, so
    that a stop which leaves no time for that costs what was finished since, too."""
    far = partial(submit, server=bucket.server)
    stop_at_random(far, f"{SEED} {part} S3", count, bucket.url, UNRECORDED)


def stop_at_random(
    submit: Callable[..., Run], seed: str, count: int, where: str = "", unrecorded: int = 0
) -> None:
    """Stop products so often in random ways.

    where: what the name of each begins with. unrecorded: tiles that a sudden stop may cost beside those under way.
    """
    chance = random.Random(seed)
    chosen = chance.choices(WAYS, k=count)
    told = f"{seed}: {[stop.__name__ for stop in chosen]}"
    print(told)
    idle = Idle()
    idle.start()
    products, most, allowed, before = 0, 0, 0, {}
    run: Run | None = None
    try:
        for stop in chosen:
            stopped = False
            while not stopped:
                if run is None:
                    run = submit(seconds=TILE_SECONDS, profile="patient", output=f"{where}C{products}.zarr")
                    run.before = before
                    idle.run_of = run
                run.wait_until_it_works()
                run.wait_for_more_tiles()
                assert run.process.poll() in (None, 0), f"{told}\n{run.said}"
                time.sleep(chance.uniform(0, TILE_SECONDS))
                if run.process.poll() is None:
                    begun = time.monotonic()
                    stop(run)
                    stopped, allowed = True, UNDER_WAY + (unrecorded if stop in SUDDEN else 0)
                    print(
                        f"{stop.__name__}: {time.monotonic() - begun:.1f} s, {len(run.before) // CHUNKS} tiles kept"
                    )
                if run.process.poll() is None:
                    run.wait_until_it_works()
                    run.wait_for_more_tiles()
                again = run.stored_again()
                assert again <= allowed * CHUNKS, told
                most = max(most, again)
                if run.process.poll() is not None:
                    if run.process.poll() == 0 or run.is_whole():
                        run.verify()
                        products, before = products + 1, {}
                    else:
                        before = run.before
                    run = None
        if run is None:
            run = submit(seconds=0, profile="patient", output=f"{where}C{products}.zarr")
            run.before = before
            idle.run_of = run
        run.hurry()
        assert run.process.wait(WAIT_SECONDS) == 0, run.said
        again = run.stored_again()
        assert again <= allowed * CHUNKS, told
        run.verify()
    finally:
        idle.end()
    print(
        f"idle for {idle.longest:.1f} s at most; {max(most, again)} chunks stored again at most by one stop"
    )
    assert idle.longest <= IDLE_SECONDS, told
