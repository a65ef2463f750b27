"""Random stops of one product after another: what is recorded is kept, and no allocation waits for nothing."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable

import pytest

from tests.slurm.jobs import CHUNKS, IDLE_SECONDS, UNDER_WAY, WAIT_SECONDS, Run
from tests.slurm.stops import WAYS

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]

STOPS = int(os.environ.get("STOPS", "10"))
SEED = os.environ.get("STOPS_SEED", "0")
MOST_STOPS = 5
"""Of one test, so that several processes share them."""
TILE_SECONDS = 1.5


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


@pytest.mark.parametrize("part", range(-(-STOPS // MOST_STOPS)))
def test_random_stops_lose_no_tile(submit: Callable[..., Run], part: int) -> None:
    """`STOPS` of them in all parts, chosen by `STOPS_SEED`; what is stored again is at most what was under way at each.
    A product that is finished before its next stop is verified, and another one begun."""
    chance = random.Random(f"{SEED} {part}")
    chosen = chance.choices(WAYS, k=min(MOST_STOPS, STOPS - part * MOST_STOPS))
    told = f"STOPS_SEED={SEED}, part {part}: {[stop.__name__ for stop in chosen]}"
    print(told)
    idle = Idle()
    idle.start()
    products, again, before = 0, 0, {}
    run: Run | None = None
    try:
        for stop in chosen:
            stopped = False
            while not stopped:
                if run is None:
                    run = submit(seconds=TILE_SECONDS, profile="patient", output=f"C{products}.zarr")
                    run.before = before
                    idle.run_of = run
                run.wait_until_it_works()
                run.wait_for_more_tiles()
                assert run.process.poll() in (None, 0), f"{told}\n{run.said}"
                time.sleep(chance.uniform(0, TILE_SECONDS))
                if run.process.poll() is None:
                    begun = time.monotonic()
                    stop(run)
                    stopped = True
                    print(
                        f"{stop.__name__}: {time.monotonic() - begun:.1f} s, {len(run.before) // CHUNKS} tiles kept"
                    )
                if run.process.poll() == 0:
                    again = max(again, run.stored_again())
                    run.verify()
                    products, before, run = products + 1, {}, None
                elif run.process.poll() is not None:
                    before, run = run.before, None
                else:
                    run.wait_until_it_works()
                    run.wait_for_more_tiles()
                    again = max(again, run.stored_again())
                assert again <= UNDER_WAY * CHUNKS, told
        if run is None:
            run = submit(seconds=0, profile="patient", output=f"C{products}.zarr")
            run.before = before
            idle.run_of = run
        assert run.process.wait(WAIT_SECONDS) == 0, run.said
        again = max(again, run.stored_again())
        run.verify()
    finally:
        idle.end()
    print(f"idle for {idle.longest:.1f} s at most; {again} chunks stored again at most by one stop")
    assert again <= UNDER_WAY * CHUNKS, told
    assert idle.longest <= IDLE_SECONDS, told
