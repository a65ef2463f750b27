"""Where a product is wrong, block by block: Freivalds' check with vectors that are cut where the blocks are.

The check of a whole product compares a row of C over a quarter of its columns at once, and names the worst place. Here
each group of columns that proves wrong is cut into smaller ones, until they are as narrow as a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import zarr

from tilewright.kernels.cpu.thin import wide_dtype
from tilewright.kernels.numbers import ceil_div
from tilewright.pipeline.check.fused import inner_terms
from tilewright.pipeline.check.vectors import IMAGE_NBYTES, line_nbytes, vector_count
from tilewright.pipeline.check.verify import Verification, verify_product
from tilewright.pipeline.events import Listener, log_notices
from tilewright.pipeline.plan.transform import NOT_FUSED, Fused
from tilewright.pipeline.store.region import StoredArray

if TYPE_CHECKING:
    from distributed import Client

LOCATED_GROUPS = 64
"""The most groups of columns that one pass compares in."""


def wrong_blocks(
    client: Client,
    a: StoredArray,
    b: StoredArray,
    c: zarr.Array[Any],
    block: tuple[int, int],
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    rounds: int = 2,
    precision: str = "full",
    listener: Listener = log_notices,
    fused: Fused = NOT_FUSED,
    sums: np.dtype | None = None,
    before: zarr.Array[Any] | None = None,
) -> Verification:
    """The check of C, whose ``wrong`` holds all blocks in which an error shows.

    block: rows and columns of each, but for those at C's edges. Each pass reads A, B and C once, and divides the
    columns of wrong blocks by up to `LOCATED_GROUPS`. Raises as `verify_product`.
    """
    n = c.shape[1]
    k = inner_terms(fused, n, a.shape[0 if transpose_a else 1])
    dtype = c.dtype.newbyteorder("=")
    one = line_nbytes(vector_count(rounds, dtype), 1, wide_dtype(dtype))
    most = max(2, min(LOCATED_GROUPS, IMAGE_NBYTES // (one * max(1, k))))
    columns = block[1]
    cuts = _cut((0, n), columns, most)
    while True:
        found = verify_product(
            client,
            a,
            b,
            c,
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            rounds=rounds,
            precision=precision,
            listener=listener,
            cuts=cuts,
            block_rows=block[0],
            fused=fused,
            sums=sums,
            before=before,
        )
        wide = sorted({(first, stop) for _, _, first, stop in found.wrong if stop - first > columns})
        if not wide:
            return found
        # Only groups that are wrong are cut; what lies between them is one group each.
        each = max(2, (most - len(wide) - 1) // len(wide))
        fine = {cut for group in wide for cut in _cut(group, columns, each)}
        narrow = {edge for _, _, *group in found.wrong for edge in group}
        cuts = tuple(sorted(fine | narrow | {0, n}))


def _cut(group: tuple[int, int], columns: int, most: int) -> tuple[int, ...]:
    """Cut columns at edges of blocks, into ``most`` parts at most."""
    first, stop = group
    blocks = ceil_div(stop - first, columns)
    step = columns * ceil_div(blocks, most)
    return (*range(first, stop, step), stop)
