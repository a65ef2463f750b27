"""Reading device memory and doing nothing with it: no kernel that reads its input once can be faster."""

from __future__ import annotations

import functools
from typing import Any

from numba import cuda, types, uint32, uint64

from tilewright.kernels.gpu import launch
from tilewright.kernels.gpu.compiled import compile_kernel
from tilewright.kernels.gpu.device_array import address
from tilewright.kernels.gpu.device_choice import current_device
from tilewright.kernels.gpu.streams import DEFAULT_STREAM
from tilewright.kernels.ptx.memory import global_array, load_vector

THREADS = 512
UNROLL = 4
WORDS = 4
REGISTERS = UNROLL * WORDS
BLOCKS_PER_MULTIPROCESSOR = 4
UNLIKELY = 0x5EED5EED


@functools.cache
def _kernel() -> Any:
    def read_all(address, vectors, seen):  # type: ignore[no-untyped-def]
        words = global_array(address, uint32)
        registers = cuda.local.array(REGISTERS, uint32)
        step = uint64(cuda.gridsize(1))
        vector = uint64(cuda.grid(1))
        mixed = uint32(0)
        while vector + uint64(UNROLL - 1) * step < vectors:
            for turn in range(UNROLL):
                load_vector(
                    registers, uint32(turn * WORDS), words, (vector + uint64(turn) * step) * uint64(WORDS)
                )
            for word in range(REGISTERS):
                mixed ^= registers[word]
            vector += uint64(UNROLL) * step
        if mixed == uint32(UNLIKELY):  # so that the compiler keeps the loads
            seen[0] = mixed

    signature = types.void(types.uint64, types.uint64, types.Array(types.uint32, 1, "C"))
    return compile_kernel(read_all, signature)


@functools.cache
def _seen(device: int) -> Any:
    return cuda.device_array(1, "uint32")


def read(data: Any, stream: Any = DEFAULT_STREAM) -> None:
    """Enqueue a pass over a contiguous device array, aligned to 16 bytes (all but a ragged end of it)."""
    device = current_device()
    blocks = BLOCKS_PER_MULTIPROCESSOR * int(cuda.gpus[device].MULTIPROCESSOR_COUNT)
    vectors = data.nbytes // (WORDS * 4)
    launch.enqueue(_kernel(), blocks, THREADS, stream, 0, address(data), vectors, _seen(device))
