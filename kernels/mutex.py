"""A mutual-exclusion lock for user kernels, in device memory.

A mutex is one int32 that is 0 when free and 1 when held; an array of zeros is an array of free mutexes.

Take it from at most one thread of a warp at a time. The lanes of a warp share an instruction stream: before
compute capability 7.0, a lane that waits in `lock` keeps the lane that holds the mutex from ever reaching
`unlock`, and the kernel hangs. Later devices schedule lanes independently, so that it ends, but the lanes
still take turns. The usual pattern is one thread a block, behind a barrier::

    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        lock(mutexes, 0)
        total[0] += partial
        unlock(mutexes, 0)

Where an addition is all that is needed, `numba.cuda.atomic.add` is faster; a mutex guards what no single
atomic can express. Blocks acquire it in no particular order, so a floating-point sum under it differs between
runs.
"""

from __future__ import annotations

from numba import cuda

FREE = 0
HELD = 1


@cuda.jit(device=True)
def lock(mutexes, index):  # type: ignore[no-untyped-def]
    """Wait until mutex ``index`` of ``mutexes`` (int32 in device memory) is free, and take it.

    What its earlier holder wrote to device memory is visible afterwards.
    """
    while cuda.atomic.cas(mutexes, index, FREE, HELD) != FREE:
        pass
    # Acquire: no read after the lock may be served before the exchange, or from a stale first-level cache.
    cuda.threadfence()


@cuda.jit(device=True)
def unlock(mutexes, index):  # type: ignore[no-untyped-def]
    """Give mutex ``index`` back; only its holder may. What was written under it is visible to the next
    holder."""
    # Release: everything written under the lock reaches device memory before the mutex reads as free.
    cuda.threadfence()
    cuda.atomic.exch(mutexes, index, FREE)
