"""Runs that nobody made, for what is said of runs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np

from tilewright.pipeline.events import Caution, Span, UnitDone, WorkDone, WorkPlanned
from tilewright.pipeline.plan.inputs import Geometry, Limits, StoredMatrix
from tilewright.pipeline.plan.product import MatmulPlan, plan_tiles
from tilewright.pipeline.product.execute import MatmulRun
from tilewright.pipeline.report.timeline import Recorder

F4 = np.dtype("f4")


def plan_of(tiles: tuple[int, int], *, symmetric: bool = False) -> MatmulPlan:
    """A C of so many tiles, of 10 × 10 each."""
    m, n = (10 * side for side in tiles)
    a = StoredMatrix(m, 40, F4, (10, 10))
    b = a.transposed if symmetric else StoredMatrix(40, n, F4, (10, 10))
    keep = Geometry(10, 10, 10, 1, 10, 10)
    return plan_tiles(a, b, F4, (10, 10), Limits(4, 10**6, on_host=True), symmetric=symmetric, keep=keep)


def run_of(
    plan: MatmulPlan, workers: list[str], *, tile_seconds: float = 1.0, say: str = "said", skipped: int = 0
) -> MatmulRun:
    """Workers take tiles in turns; of each tile a half is read, three quarters multiplied, from the quarter on, and a
    tenth at its end written. ``skipped``: tiles of an earlier run."""
    rounds = -(-(plan.tile_count - skipped) // len(workers))
    seconds = rounds * tile_seconds
    clock: Iterator[float] = count(1000.0, seconds / 5)  # begin, planned, said, heard, done, end
    recorder = Recorder(lambda event: None, clock=lambda: next(clock))
    recorder(WorkPlanned("matmul", plan.tile_count, skipped, "tiles", 0, 0))
    recorder(Caution(say))
    stages = {"read": 0.5, "compute": 0.75, "write": 0.1}
    for done, index in enumerate(range(skipped, plan.tile_count)):
        worker, begin = workers[done % len(workers)], 1000.0 + done // len(workers) * tile_seconds
        spans = (
            Span(worker, "load", begin, begin + 0.5 * tile_seconds),
            Span(worker, "compute", begin + 0.25 * tile_seconds, begin + tile_seconds),
            Span(worker, "write", begin + 0.9 * tile_seconds, begin + tile_seconds),
        )
        recorder(UnitDone("matmul", index, worker, tile_seconds, 800, 8000, stages, spans))
    recorder.heard(
        {worker: {"metrics": {"memory": 2**28, "tilewright": {}}} for worker in workers},
    )
    recorder(WorkDone("matmul", seconds))
    busy = recorder.busy()
    made = plan.tile_count - skipped
    return MatmulRun(
        plan=plan,
        device="CPU",
        kernel="BLAS",
        seconds=seconds,
        stages={name: share * tile_seconds * made for name, share in stages.items()},
        read_nbytes=made * 800,
        shared_nbytes=0,
        write_nbytes=made * 400,
        operations=made * 8000,
        workers=busy,
        resumed=skipped,
        verification=None,
        names={"A": "a.zarr", "B": "b.zarr", "C": "c.zarr"},
        timeline=recorder.timeline(),
    )
