"""Rates of this machine, measured in a moment: what a CPU multiplies, and at what rate an input is read. Nothing is
written, so no rate of that is known."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from tilewright.pipeline.forecast import rates
from tilewright.pipeline.forecast.rates import Rates
from tilewright.pipeline.neighbours.plan import NeighbourPlan
from tilewright.pipeline.plan.product import MatmulPlan
from tilewright.pipeline.store.arrays import as_stored_matrix
from tilewright.pipeline.store.region import StoredArray
from tilewright.pipeline.store.region_read import region_reads
from tilewright.pipeline.threads import run_all

SIDE = 1024
"""The most rows, columns and depth of what is multiplied; of fewer rows or columns the rate is no other product's."""
MULTIPLY_SECONDS = 0.05
"""It is multiplied for at least so long, `TIMES` times."""
READ_NBYTES = 32 * 2**20
"""About how much is read, as often, of different rows."""
TIMES = 3


def measured_here(
    plan: MatmulPlan, kind: str, a: StoredArray, clock: Callable[[], float] = time.perf_counter
) -> tuple[Rates, Rates]:
    """The slowest and the fastest rates of this process, for a plan of CPUs. What is multiplied was perhaps measured
    before; reading depends on the array. Raises as reading does."""
    m, n, k = (
        max(1, min(SIDE, side)) for side in (plan.tile_rows, plan.tile_columns, max(plan.panel_depth, 1))
    )
    operations = _measured_once(
        f"{kind}; {k} deep", min(m, n) == SIDE, lambda: _multiply_rates(plan, (m, n, k), clock)
    )
    read = _read_rates(plan.read_threads, a, clock)
    slowest, fastest = (
        Rates(multiplied, each, None) for multiplied, each in zip(operations, read, strict=True)
    )
    return slowest, fastest


def measured_search(
    plan: NeighbourPlan, kind: str, a: StoredArray, clock: Callable[[], float] = time.perf_counter
) -> tuple[Rates, Rates]:
    """The same of a search on CPUs: what all cores of this machine compare for a moment, and how fast A is read. Pairs
    are compared as the nearest are."""
    rows, columns, width = (
        min(side, most) for side, most in ((plan.m, SIDE), (plan.n, 8 * SIDE), (plan.width, SIDE))
    )
    operations = _measured_once(
        f"{kind}; {width} wide",
        (rows, columns) == (SIDE, 8 * SIDE),
        lambda: _search_rates(plan, a.dtype, (rows, columns, width), clock),
    )
    read = _read_rates(max(1, plan.threads // plan.workers), a, clock)
    slowest, fastest = (
        Rates(multiplied, each, None) for multiplied, each in zip(operations, read, strict=True)
    )
    return slowest, fastest


def _measured_once(
    kind: str, is_large: bool, measure: Callable[[], tuple[float, float]]
) -> tuple[float, float]:
    """What is measured, or was before. is_large: whether what is measured is as large as it would be for any larger
    plan; what is smaller is mostly the cost of a call, so that its rate is neither kept nor looked up."""
    if not is_large:
        return measure()
    found = rates.measured(kind)
    if found is None:
        found = measure()
        rates.remember_measured(kind, *found)
    return found


def _search_rates(
    plan: NeighbourPlan, dtype: np.dtype, sides: tuple[int, int, int], clock: Callable[[], float]
) -> tuple[float, float]:
    """sides: rows that look for neighbours, rows that may be some, and their width."""
    from tilewright.kernels.neighbours.host import Nearest

    rows, columns, width = sides
    numbers = np.random.default_rng(0).integers(0, 100, (rows + columns, width))
    block, panel = np.split(numbers.astype(dtype.newbyteorder("=")), [rows])

    def search() -> None:
        nearest = Nearest(block, min(plan.k or 1, columns), metric=plan.metric)
        nearest.update(panel, 0)
        nearest.result()

    search()  # compiled
    return _timed(search, 2 * rows * columns * width, clock)


def _timed(work: Callable[[], object], operations: int, clock: Callable[[], float]) -> tuple[float, float]:
    """The least and the most operations a second."""
    found = []
    for _ in range(TIMES):
        start, times = clock(), 0
        while clock() - start < MULTIPLY_SECONDS or not times:
            work()
            times += 1
        found.append(operations * times / max(clock() - start, 1e-9))
    return min(found), max(found)


def _multiply_rates(
    plan: MatmulPlan, sides: tuple[int, int, int], clock: Callable[[], float]
) -> tuple[float, float]:
    """sides: m, n and k of what is multiplied."""
    from tilewright.kernels import matmul

    m, n, k = sides
    left, right = (
        np.ones(shape, operand) for shape, operand in zip(((m, k), (k, n)), plan.operands, strict=True)
    )
    multiply = partial(matmul, left, right, dtype=plan.sums, device="cpu")
    multiply()  # compiled, and its memory is there
    return _timed(multiply, 2 * m * n * k, clock)


def _read_rates(
    threads: int, a: StoredArray, clock: Callable[[], float]
) -> tuple[float, float] | tuple[None, None]:
    """Of whole rows of chunks of A, as far as that is little, by as many threads as a worker has."""
    rows, columns = a.shape
    if not rows or not columns:
        return None, None
    row_nbytes = columns * a.dtype.itemsize
    unit = as_stored_matrix(a).unit[0]
    high = min(rows, max(1, READ_NBYTES // (row_nbytes * unit)) * unit)
    wide = min(columns, max(1, READ_NBYTES // (high * a.dtype.itemsize)))
    out = np.zeros((high, wide), a.dtype.newbyteorder("="))
    out.fill(0)  # its memory is there
    found = []
    with ThreadPoolExecutor(max(1, threads)) as pool:
        for place in range(TIMES):
            first = (rows - high) * place // TIMES // unit * unit
            parts = region_reads(a, (slice(first, first + high), slice(0, wide)))
            start = clock()
            run_all(pool, [partial(part.read, out[part.target]) for part in parts])
            found.append(out.nbytes / max(clock() - start, 1e-9))
    return min(found), max(found)
