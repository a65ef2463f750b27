"""How many pairs to expect, by a sample of both matrices: what the plan of an output of unknown size goes by."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tilewright.pipeline.cluster.answers import ask_all
from tilewright.pipeline.errors import ClusterError
from tilewright.pipeline.events import Listener
from tilewright.pipeline.neighbours.tasks import Work, free_held, held_for_estimate, searched_items
from tilewright.pipeline.reduce import Reduction, reduce_pieces

if TYPE_CHECKING:
    from distributed import Client

SAMPLE = "sample"
"""Its name in events."""
STRETCHES = 8
ROWS, COLUMNS = 64, 1024
"""Items of a stretch of A, and of one of B: adjacent ones lie in the same chunks. All together are 4 million pairs."""
SAMPLE_NBYTES = 2**27
"""What the sample reads at most of each matrix, and a worker holds of B meanwhile."""


def expected_density(client: Client, work: Work, m: int, listener: Listener) -> float:
    """The share of pairs of two different items that are wanted, by a sample. Raises StoreError where a chunk cannot be
    read."""
    reduction: Reduction[tuple[int, int], tuple[int, int]] = Reduction(
        name=SAMPLE,
        chunk=count_in_sample,
        identity=lambda: (0, 0),
        combine=lambda total, part: (total[0] + part[0], total[1] + part[1]),
        commutative=True,
        lighter="run fewer tasks at once (threads_per_worker, in a profile)",
    )
    least = max(1, SAMPLE_NBYTES // (STRETCHES * max(1, work.width) * work.b.dtype.itemsize))
    rows = _stretches(m, min(ROWS, least))
    columns = _stretches(work.n, min(COLUMNS, least))
    # On the cores, whatever the workers have: it is little work.
    sampled = replace(work, keep=True, once=False, device="cpu")
    calls = [(sampled, first, stop, columns) for first, stop in rows]
    try:
        found, looked = reduce_pieces(client, reduction, calls, [0] * len(calls), listener)
    finally:
        with suppress(ClusterError):
            ask_all(client, free_held, work.key)
    return found / looked if looked else 0.0


def _stretches(length: int, most: int) -> list[tuple[int, int]]:
    """Stretches evenly spread over a side."""
    if length <= STRETCHES * most:
        return [(start, min(start + most, length)) for start in range(0, length, most)]
    starts = np.linspace(0, length - most, STRETCHES).astype(int).tolist()
    return [(start, start + most) for start in starts]


def count_in_sample(
    work: Work, first: int, stop: int, columns: list[tuple[int, int]]
) -> tuple[tuple[int, int], dict[str, float]]:
    """What a task does: how many of the pairs of some items are wanted, and how many were looked at. Pairs of an item
    with itself, where B is A, are no pairs."""
    from tilewright.kernels.neighbours.host import Beyond

    begin = time.perf_counter()
    assert work.bound is not None, "pairs have one"
    block = searched_items(work, work.a, first, stop)
    found = looked = 0
    search = Beyond(
        block,
        work.bound,
        metric=work.metric,
        b_dtype=work.b.dtype.newbyteorder("="),
        first_row=first,
        threads=work.threads,
    )
    for start, end in columns:
        search.update(held_for_estimate(work, start, end), start)
        looked += (stop - first) * (end - start)
        if work.one:
            looked -= max(0, min(stop, end) - max(first, start))
    pairs = search.result()
    found = len(pairs.row) - (int((pairs.row == pairs.column).sum()) if work.one else 0)
    return (found, looked), {"sample": time.perf_counter() - begin}
