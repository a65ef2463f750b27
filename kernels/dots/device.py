"""The dot product on a GPU, bit-identical from run to run.

Each block adds up its products in a wide accumulator and leaves one partial sum. There are four ways to
finish, and they are the ladder of this file: on the host, by atomic additions, under a mutex, and by a second
pass over the partial sums in a fixed order. Only the first and the last give the same bits every time; the
last, which also leaves the result on the device, is the default.

The grid depends on the length alone, not on the GPU, so that the order of additions is the same everywhere.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numba import cuda, types

from tilewright.kernels.dots.block_sums import MAX_BLOCKS, THREADS, accumulator_type, block_sum_of
from tilewright.kernels.elements import numba_type
from tilewright.kernels.errors import OptionError
from tilewright.kernels.gpu import launch
from tilewright.kernels.gpu.compiled import compile_kernel
from tilewright.kernels.gpu.device_array import Memory, address, strided_view
from tilewright.kernels.gpu.device_choice import SIMULATOR, current_device
from tilewright.kernels.gpu.streams import DEFAULT_STREAM, keep_until_passed
from tilewright.kernels.mutex import lock, unlock
from tilewright.kernels.numbers import ceil_div
from tilewright.kernels.widths import is_integer

UNROLL = 8
"""Elements of each vector that a thread has under way at once: what it takes to keep the memory busy."""
FINISHES = ("second-pass", "host", "atomic", "mutex")
PIECE_NBYTES = 8 << 20
"""Bytes of each host vector copied at a time."""
STREAMS = 4
"""Pieces under way at once, each filled by a host thread: one thread copies far slower than the bus reads."""


def grid(length: int) -> int:
    """Blocks for vectors of this length; at least one, which then writes the zero of empty vectors."""
    return max(1, min(MAX_BLOCKS, ceil_div(length, THREADS * UNROLL)))


@functools.cache
def _kernels(accumulator: Any, conjugate: bool) -> dict[str, Any]:
    """The kernels for one accumulator type. Block: `THREADS`; shared memory: `THREADS` accumulators.

    x, y: any dtypes and strides; ``partials``: an accumulator for each block, written.
    """
    zero = 0
    block_sum = block_sum_of(accumulator)
    is_complex = accumulator == types.complex128
    conjugated = conjugate and is_complex

    @cuda.jit(device=True)
    def product(x, y, i):  # type: ignore[no-untyped-def]
        if conjugated:
            return accumulator(x[i]).conjugate() * accumulator(y[i])
        return accumulator(x[i]) * accumulator(y[i])

    @cuda.jit(device=True)
    def thread_sum(x, y):  # type: ignore[no-untyped-def]
        """The sum of this thread's products: every grid-width-th element, UNROLL at a time."""
        length = x.shape[0]
        step = cuda.gridsize(1)
        i = cuda.grid(1)
        total = accumulator(zero)
        while i + (UNROLL - 1) * step < length:
            for turn in range(UNROLL):
                total += product(x, y, i + turn * step)
            i += UNROLL * step
        while i < length:
            total += product(x, y, i)
            i += step
        return total

    @cuda.jit
    def block_partials(x, y, partials):  # type: ignore[no-untyped-def]
        total = block_sum(thread_sum(x, y))
        if cuda.threadIdx.x == 0:
            partials[cuda.blockIdx.x] = total

    @cuda.jit
    def atomic(x, y, parts):  # type: ignore[no-untyped-def]
        """``parts``: one accumulator of zero, seen as its real parts (two for complex)."""
        total = block_sum(thread_sum(x, y))
        if cuda.threadIdx.x == 0:
            if is_complex:
                cuda.atomic.add(parts, 0, total.real)
                cuda.atomic.add(parts, 1, total.imag)
            else:
                cuda.atomic.add(parts, 0, total.real)

    @cuda.jit
    def mutex(x, y, mutexes, sums):  # type: ignore[no-untyped-def]
        """``sums``: one accumulator of zero; ``mutexes``: one free mutex."""
        total = block_sum(thread_sum(x, y))
        if cuda.threadIdx.x == 0:
            lock(mutexes, 0)
            sums[0] += total
            unlock(mutexes, 0)

    return {
        "block_partials": block_partials,
        "atomic": atomic,
        "mutex": mutex,
    }


def second_pass_function(accumulator: Any) -> Any:
    """The plain function of the kernel that adds up partial sums, in a fixed order.

    partials: of the accumulator's type, contiguous; ``out``: one element of the result's dtype, written. One block of
    `THREADS`; shared memory: `THREADS` accumulators.
    """
    zero = 0
    block_sum = block_sum_of(accumulator)

    def second_pass(partials, out):  # type: ignore[no-untyped-def]
        total = accumulator(zero)
        for i in range(cuda.threadIdx.x, partials.shape[0], THREADS):
            total += partials[i]
        total = block_sum(total)
        if cuda.threadIdx.x == 0:
            out[0] = total

    return second_pass


def second_pass_signature(accumulator: Any, result: np.dtype) -> Any:
    element = numba_type(result)
    return types.void(types.Array(accumulator, 1, "C"), types.Array(element, 1, "C"))


@functools.cache
def _second_pass(accumulator: Any, result: np.dtype) -> Any:
    return compile_kernel(second_pass_function(accumulator), second_pass_signature(accumulator, result))


def _finish(partials: Any, out: Any, queue: Any) -> None:
    """Enqueue the sum of ``partials``, one-dimensional, into ``out``, one element."""
    kernel = _second_pass(numba_type(partials.dtype), out.dtype)
    launch.enqueue(kernel, 1, THREADS, queue, 0, partials, out)


def _numpy(accumulator: Any) -> np.dtype:
    return np.dtype(str(accumulator))


def on_device(
    x: Any, y: Any, result: np.dtype, conjugate: bool, queue: Any, finish: str = FINISHES[0]
) -> Any:
    """The product as a device array of shape (), on the current GPU; ``finish`` is one of `FINISHES`."""
    accumulator = accumulator_type(result)
    wide = _numpy(accumulator)
    blocks = grid(x.shape[0])
    out = cuda.device_array((), result, stream=queue)
    element = _one_element(out)
    if finish == "second-pass" and _vectorised(x, y, result):
        in_two_passes(x, y, conjugate, element, queue)
    elif finish in ("second-pass", "host"):
        partials = cuda.device_array(blocks, wide, stream=queue)
        _first_pass(x, y, result, conjugate, blocks, partials, queue)
        if finish == "second-pass":
            _finish(partials, element, queue)
            keep_until_passed(queue, partials)
        else:
            total = partials.copy_to_host(stream=queue).sum(dtype=wide)
            out.copy_to_device(np.asarray(total.astype(result)), stream=queue)
    elif finish in ("atomic", "mutex"):
        kernels, launched = _kernels(accumulator, conjugate), (blocks, THREADS, queue)
        total = cuda.to_device(np.zeros(1, wide), stream=queue)
        if finish == "atomic":
            parts = 2 if wide.kind == "c" else 1
            half = np.dtype(np.float64) if wide.kind == "c" else wide
            view = strided_view(total, (parts,), (half.itemsize,), half)
            kernels["atomic"][launched](x, y, view)
        else:
            mutexes = cuda.to_device(np.zeros(1, np.int32), stream=queue)
            kernels["mutex"][launched](x, y, mutexes, total)
            keep_until_passed(queue, mutexes)
        _finish(total, element, queue)
        keep_until_passed(queue, total)
    else:
        raise OptionError(f"finish={finish!r} is unknown; it may be {', '.join(map(repr, FINISHES))}")
    return out


def in_two_passes(x: Any, y: Any, conjugate: bool, out: Any, queue: Any) -> None:
    """Enqueue the product of vectors that the kernel of 16-byte loads takes, into ``out``, one element."""
    from tilewright.kernels.dots import vectors as dot_vectors
    from tilewright.kernels.gemm.scratch import borrowed

    accumulator = accumulator_type(out.dtype)
    blocks, wide = grid(x.shape[0]), _numpy(accumulator)
    with borrowed(blocks * wide.itemsize, queue) as scratch:
        sums = Memory(scratch, (blocks,), (wide.itemsize,), wide, queue, False)
        dot_vectors.launch_partials(x, y, accumulator, conjugate, blocks, sums, queue)
        _finish(sums, out, queue)


def _one_element(out: Any) -> Any:
    """An array of shape () as one of shape (1,), for a kernel."""
    if SIMULATOR:
        return strided_view(out, (1,), (out.dtype.itemsize,))
    return Memory(address(out), (1,), (out.dtype.itemsize,), out.dtype, out.stream, False)


def _vectorised(x: Any, y: Any, result: np.dtype) -> bool:
    """Whether the kernel of 16-byte loads takes both vectors. It adds up integers as integers, and so on."""
    if (
        SIMULATOR
        or is_integer(x.dtype) != is_integer(result)
        or (x.dtype.kind == "c") != (result.kind == "c")
    ):
        return False
    from tilewright.kernels.dots import vectors as dot_vectors

    return dot_vectors.suits(x, y)


def _first_pass(
    x: Any, y: Any, result: np.dtype, conjugate: bool, blocks: int, partials: Any, queue: Any
) -> None:
    """Leave the sum of each block's products in ``partials``."""
    accumulator = accumulator_type(result)
    if _vectorised(x, y, result):
        from tilewright.kernels.dots import vectors as dot_vectors

        dot_vectors.launch_partials(x, y, accumulator, conjugate, blocks, partials, queue)
        return
    _kernels(accumulator, conjugate)["block_partials"][blocks, THREADS, queue](x, y, partials)


def from_host(x: np.ndarray, y: np.ndarray, result: np.dtype, conjugate: bool) -> Any:
    """The product of vectors in host memory as a NumPy scalar, piece by piece over several streams.

    Each of `STREAMS` host threads copies its pieces into pinned memory of its own, from which the bus reads
    them while the GPU multiplies the piece before. Pieces have a fixed size and their sums are added up in
    order, so the streams' timing leaves no trace in the answer.
    """
    accumulator = accumulator_type(result)
    length = max(1, PIECE_NBYTES // max(x.itemsize, y.itemsize))
    pieces = max(1, ceil_div(len(x), length))
    sums = cuda.device_array(pieces, _numpy(accumulator))
    home = current_device()

    def multiply(lane: int) -> None:
        with cuda.gpus[home]:
            queue = cuda.stream()
            size = min(length, len(x))
            staged = [cuda.pinned_array(size, vector.dtype) for vector in (x, y)]
            held = [cuda.device_array(size, vector.dtype, stream=queue) for vector in (x, y)]
            partials = cuda.device_array(grid(size), sums.dtype, stream=queue)
            for piece in range(lane, pieces, STREAMS):
                part = slice(piece * length, min((piece + 1) * length, len(x)))
                count = part.stop - part.start
                queue.synchronize()  # the bus has read this lane's last piece out of the pinned memory
                for vector, host, device in zip((x, y), staged, held, strict=True):
                    np.copyto(host[:count], vector[part])
                    device[:count].copy_to_device(host[:count], stream=queue)
                blocks = grid(count)
                parts = held[0][:count], held[1][:count]
                _first_pass(*parts, result, conjugate, blocks, partials[:blocks], queue)
                _finish(partials[:blocks], sums[piece : piece + 1], queue)
            queue.synchronize()

    if len(x) == 0:
        return np.zeros(1, result)[0]
    lanes = min(STREAMS, pieces)
    if SIMULATOR:  # which runs one kernel at a time
        for lane in range(lanes):
            multiply(lane)
    else:
        with ThreadPoolExecutor(lanes) as pool:
            list(pool.map(multiply, range(lanes)))
    out = cuda.device_array(1, result)
    _finish(sums, out, DEFAULT_STREAM)
    return out.copy_to_host()[0]
