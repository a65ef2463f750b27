"""The first pass of a dot product over contiguous vectors of one dtype: 16-byte loads, several under way.

What `tilewright.kernels.dot` does for any strides and dtypes reads one element at a time, which for narrow
ones leaves the memory idle. This pass reads at the memory's speed for every dtype; the passes behind it are
the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda, types, uint32, uint64
from numba.np.numpy_support import from_dtype

from tilewright.kernels.dots.block_sums import THREADS, block_sum_of
from tilewright.kernels.gpu import launch
from tilewright.kernels.gpu.compiled import compile_kernel
from tilewright.kernels.gpu.device_array import address
from tilewright.kernels.ptx.floats import half_value
from tilewright.kernels.ptx.integers import byte_dot, signed_byte_dot, signed_half
from tilewright.kernels.ptx.memory import global_array, load_vector

VECTOR = 16
"""Bytes of one load."""
UNROLL = 4
"""Loads of each vector that a thread has under way at once."""
BLOCKS_PER_MULTIPROCESSOR = 8
"""Of `block_sums.MAX_BLOCKS`, on the GPU with the most multiprocessors."""


def _reader(dtype: np.dtype, factor: Any) -> Callable[..., Any]:
    """``read(registers, i)``: element i of the vectors in ``registers``, ready to be multiplied.

    Elements of 16 bits come two to a word: LLVM loads vectors of words in one instruction, but not those of narrower
    elements. Bytes are multiplied a word at a time, and not read one by one.
    """
    if dtype == np.float16:

        def read(registers, i):  # type: ignore[no-untyped-def]
            return half_value(registers[i // 2] >> uint32(16 * (i % 2)))

    elif dtype == np.int16:

        def read(registers, i):  # type: ignore[no-untyped-def]
            return signed_half(registers[i // 2], uint32(16 * (i % 2)))

    elif dtype.itemsize == 2:
        kept = uint32(0xFFFF)

        def read(registers, i):  # type: ignore[no-untyped-def]
            return registers[i // 2] >> uint32(16 * (i % 2)) & kept

    else:

        def read(registers, i):  # type: ignore[no-untyped-def]
            return factor(registers[i])

    return cuda.jit(device=True, inline="always")(read)


def source(dtype: np.dtype, accumulator: Any, conjugate: bool) -> Callable[..., None]:
    """``partial_sums(x, y, length, partials)`` for two vectors of ``dtype``, as a plain function.

    accumulator: the Numba type of the sums, `block_sums.accumulator_type` of a result of the same kind as ``dtype``;
    integers may be narrower or wider than it.
    ``x`` and ``y`` are addresses, multiples of 16; ``length`` counts elements; ``partials`` has an
    accumulator for each block, and all are written. Complex numbers are read as the pairs of reals they are.
    Block: `THREADS`; shared memory: `THREADS` accumulators.
    """
    block_sum = block_sum_of(accumulator)
    is_complex = dtype.kind == "c"
    wide = types.float64 if is_complex else accumulator
    of_word = types.int32 if dtype.kind == "i" else types.uint32
    # A product of two float16 is exact in float32, to which they are converted faster than to float64; one of integers
    # of 16 bits is exact in 32, whatever the accumulator.
    short = types.float32 if dtype == np.float16 else of_word
    factor = short if dtype.itemsize == 2 else wide
    real_dtype = np.dtype(f"f{dtype.itemsize // 2}") if is_complex else dtype
    scalar = from_dtype(real_dtype)
    element = scalar if real_dtype.itemsize >= 4 else types.uint32
    of_bytes = dtype.itemsize == 1
    word_product = signed_byte_dot if dtype.kind == "i" else byte_dot
    read = _reader(real_dtype, factor)
    parts = 2 if is_complex else 1
    lanes = VECTOR // real_dtype.itemsize
    slots = VECTOR // max(4, real_dtype.itemsize)
    registers = slots * UNROLL

    @cuda.jit(device=True, inline="always")
    def add_product(real, imaginary, a, b, c, d):  # type: ignore[no-untyped-def]
        """The sums with the product of the complex numbers a + b i (conjugated, if wanted) and c + d i added."""
        real += a * c
        imaginary += a * d
        if conjugate:
            real += b * d
            imaginary -= b * c
        else:
            real -= b * d
            imaginary += b * c
        return real, imaginary

    @cuda.jit(device=True, inline="always")
    def add_bytes(real, imaginary, left, right, count):  # type: ignore[no-untyped-def]
        """The same for bytes, four products in one instruction; taken one by one, they ran at 0.82 of the memory's
        speed. The sum of ``count`` products fits into 32 bits, whatever the accumulator."""
        total = uint32(0)
        for word in range(count // 4):
            total = word_product(left[word], right[word], total)
        return wide(real + wide(of_word(total))), imaginary

    @cuda.jit(device=True, inline="always")
    def add_elements(real, imaginary, left, right, count):  # type: ignore[no-untyped-def]
        """The sums with the products of the first ``count`` elements of both vectors added."""
        for i in range(0, count, parts):
            if is_complex:
                a, b = read(left, i), read(left, i + 1)
                c, d = read(right, i), read(right, i + 1)
                real, imaginary = add_product(real, imaginary, a, b, c, d)
            else:
                real = wide(real + wide(factor(read(left, i) * read(right, i))))
        return real, imaginary

    add = add_bytes if of_bytes else add_elements

    def partial_sums(x_address, y_address, length, partials):  # type: ignore[no-untyped-def]
        x = global_array(x_address, element)
        y = global_array(y_address, element)
        left = cuda.local.array(registers, element)
        right = cuda.local.array(registers, element)
        thread = uint64(cuda.blockIdx.x) * uint64(THREADS) + uint64(cuda.threadIdx.x)
        step = uint64(cuda.gridDim.x) * uint64(THREADS)
        scalars = length * uint64(parts)
        vectors = scalars // uint64(lanes)
        real = wide(0)
        imaginary = wide(0)
        vector = thread
        while vector + uint64(UNROLL - 1) * step < vectors:
            for turn in range(UNROLL):
                place = (vector + uint64(turn) * step) * uint64(slots)
                load_vector(left, uint32(turn * slots), x, place)
                load_vector(right, uint32(turn * slots), y, place)
            real, imaginary = add(real, imaginary, left, right, lanes * UNROLL)
            vector += uint64(UNROLL) * step
        while vector < vectors:
            load_vector(left, uint32(0), x, vector * uint64(slots))
            load_vector(right, uint32(0), y, vector * uint64(slots))
            real, imaginary = add(real, imaginary, left, right, lanes)
            vector += step
        place = vectors * uint64(lanes) + thread * uint64(parts)
        if place < scalars:  # the elements after the last whole vector
            single_x = global_array(x_address, scalar)
            single_y = global_array(y_address, scalar)
            if is_complex:
                a, b = factor(single_x[place]), factor(single_x[place + uint64(1)])
                c, d = factor(single_y[place]), factor(single_y[place + uint64(1)])
                real, imaginary = add_product(real, imaginary, a, b, c, d)
            else:
                real = wide(real + wide(factor(single_x[place]) * factor(single_y[place])))
        if is_complex:
            total = block_sum(accumulator(complex(real, imaginary)))
        else:
            total = block_sum(accumulator(real))
        if cuda.threadIdx.x == 0:
            partials[cuda.blockIdx.x] = total

    return partial_sums


def signature(accumulator: Any) -> Any:
    partials = types.Array(accumulator, 1, "C")
    return types.void(types.uint64, types.uint64, types.uint64, partials)


def launch_bounds(dtype: np.dtype) -> tuple[int, int]:
    """Threads of a block, and how many blocks must fit a multiprocessor: all that `block_sums.MAX_BLOCKS` gives it, or
    half of them, so that none is left to run almost alone. Integers of 16 bits need so many registers that only half
    fit.
    """
    narrow = dtype.kind in "iu" and dtype.itemsize == 2
    return THREADS, BLOCKS_PER_MULTIPROCESSOR // 2 if narrow else BLOCKS_PER_MULTIPROCESSOR


@functools.cache
def _kernel(dtype: np.dtype, accumulator: Any, conjugate: bool) -> Any:
    function = source(dtype, accumulator, conjugate)
    return compile_kernel(function, signature(accumulator), launch_bounds=launch_bounds(dtype))


def suits(x: Any, y: Any) -> bool:
    """Whether both device vectors have one dtype, are contiguous and begin at multiples of 16."""
    return (
        x.dtype == y.dtype
        and all(vector.strides[0] == vector.dtype.itemsize for vector in (x, y))
        and address(x) % VECTOR == 0
        and address(y) % VECTOR == 0
    )


def launch_partials(
    x: Any, y: Any, accumulator: Any, conjugate: bool, blocks: int, partials: Any, stream: Any
) -> None:
    """Write the sum of each block's products to ``partials``, a device array of ``blocks`` accumulators."""
    arguments = (address(x), address(y), x.shape[0], partials)
    kernel = _kernel(x.dtype, accumulator, conjugate and x.dtype.kind == "c")
    launch.enqueue(kernel, blocks, THREADS, stream, 0, *arguments)
