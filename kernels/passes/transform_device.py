"""Transforming a panel on a GPU before it is multiplied, and finishing the sums of a tile: the twin of
`transform_host.py`, and of NumPy's definition in `pipeline/plan/transform.py`, to the bit.

Both are one pass at the speed of memory, on the stream of what comes before and after. Every operation is rounded by
itself (`ptx/floats.py`), as in NumPy: the compiler would else make one of a multiplication and an addition.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import cuda

from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.kernels.elements import conversion, numba_type
from tilewright.kernels.gemm.base import COMPLEX, FLOATS, INTEGERS, Variant
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.numbers import ceil_div, power_of_two
from tilewright.kernels.passes.launcher import Launcher

THREADS = 32 if SIMULATOR else 256
EACH = 4
"""Elements of a column that a thread reads before it uses the first."""
MOST_BLOCKS = 2112
"""Sixteen for each of 132 multiprocessors."""

ROW_OFFSETS, COLUMN_OFFSETS, OFFSET, ROW_FACTORS, COLUMN_FACTORS = 1, 2, 4, 8, 16
BUT_EQUAL, BUT_NAN, CONJUGATE = 32, 64, 128
PAIRS, ALPHA, BETA = 256, 512, 1024
SQUARES, PRESENCE = 2048, 4096
"""Flags of what a launch does; what is not among them is left out."""

ALPHA_PLACE, WEIGHT_PLACE, OFFSET_PLACE, BETA_PLACE = range(4)
"""Of an epilogue's numbers in the array that holds them."""

SOURCES = tuple(dtype for dtype in INTEGERS + FLOATS + COMPLEX if dtype != BFLOAT16)
TRANSFORMED = tuple(np.dtype(code) for code in ("f4", "f8", "c8", "c16"))


class _Operations(NamedTuple):
    """Of one width of floats, each rounded by itself."""

    add: Any
    subtract: Any
    multiply: Any


if SIMULATOR:

    def operations_of(dtype: np.dtype) -> _Operations:
        return _Operations(lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x * y)

else:
    from tilewright.kernels.ptx import floats

    def operations_of(dtype: np.dtype) -> _Operations:
        if dtype.itemsize // (2 if dtype.kind == "c" else 1) == 8:
            return _Operations(floats.add64, floats.subtract64, floats.multiply64)
        return _Operations(floats.add32, floats.subtract32, floats.multiply32)


def part_dtype(dtype: np.dtype) -> np.dtype:
    """Of the real part of numbers of this dtype."""
    return np.zeros(0, dtype).real.dtype


def _real_reading(stored: np.dtype, number: np.dtype) -> Any:
    """Converts a real stored element to a float inside a kernel, rounding once."""
    convert = conversion(number)
    if stored != np.float16 or number != np.float64:
        return convert
    half = conversion(np.dtype(np.float32))  # exact, and the only one that there is from float16

    @cuda.jit(device=True, inline="always")
    def widen(value: Any) -> Any:
        return convert(half(value))

    return widen


def _parts(stored: np.dtype, number: np.dtype) -> tuple[Any, Any]:
    """Functions of a stored element: its real and its imaginary part, as parts of a ``number``."""
    part = part_dtype(number)
    convert, zero = _real_reading(part_dtype(stored), part), conversion(part)
    if stored.kind == "c":

        @cuda.jit(device=True, inline="always")
        def real_of(value: Any) -> Any:
            return convert(value.real)

        @cuda.jit(device=True, inline="always")
        def imaginary_of(value: Any) -> Any:
            return convert(value.imag)

    else:

        @cuda.jit(device=True, inline="always")
        def real_of(value: Any) -> Any:
            return convert(value)

        @cuda.jit(device=True, inline="always")
        def imaginary_of(value: Any) -> Any:
            return zero(0)

    return real_of, imaginary_of


def _complex_product(operations: _Operations) -> tuple[Any, Any]:
    """Functions of the parts of two numbers: the parts of their product, of four products and two sums."""
    add, subtract, multiply = operations

    @cuda.jit(device=True, inline="always")
    def real(a: Any, b: Any, c: Any, d: Any) -> Any:
        return subtract(multiply(a, c), multiply(b, d))

    @cuda.jit(device=True, inline="always")
    def imaginary(a: Any, b: Any, c: Any, d: Any) -> Any:
        return add(multiply(a, d), multiply(b, c))

    return real, imaginary


def transform_function(stored: np.dtype, dtype: np.dtype) -> Any:
    """The plain function of the kernel that transforms a matrix: see `transform`.

    Block: THREADS, as lines of ``width`` columns (a power of two). Blocks are dealt pieces of EACH times as many rows
    and ``width`` columns in turn: neighbouring threads read and write neighbouring elements, and a column's vectors are
    read once for a piece. No shared memory.
    """
    operations = operations_of(dtype)
    _, subtract, multiply = operations
    product_real, product_imaginary = _complex_product(operations)
    complex_numbers, half = dtype.kind == "c", stored == np.float16
    real_of, imaginary_of = _parts(stored, dtype)
    part = conversion(part_dtype(dtype))
    single = conversion(np.dtype(np.float32))
    element = numba_type(stored)
    u64 = numba.uint64

    @cuda.jit(device=True, inline="always")
    def comparable(value: Any) -> Any:
        return single(value) if half else value  # Numba compares no float16

    def transform_kernel(
        source: Any,
        target: Any,
        row_offsets: Any,
        column_offsets: Any,
        offset: Any,
        row_factors: Any,
        column_factors: Any,
        missing: Any,
        flags: Any,
        width: Any,
    ) -> None:
        held = cuda.local.array(EACH, element)
        rows, columns = u64(source.shape[0]), u64(source.shape[1])
        lines = u64(THREADS) // u64(width)
        x, y = u64(cuda.threadIdx.x) % u64(width), u64(cuda.threadIdx.x) // u64(width)
        tall = lines * u64(EACH)
        across = (columns + u64(width) - u64(1)) // u64(width)
        pieces = (rows + tall - u64(1)) // tall * across
        piece = u64(cuda.blockIdx.x)
        while piece < pieces:
            first, column = piece // across * tall + y, piece % across * u64(width) + x
            if column < columns:
                for i in range(EACH):
                    row = first + u64(i) * lines
                    if row < rows:
                        held[i] = source[row, column]
                for i in range(EACH):
                    row = first + u64(i) * lines
                    if row < rows:
                        value = held[i]
                        real, imaginary = real_of(value), imaginary_of(value)
                        if flags & ROW_OFFSETS:
                            real = subtract(real, row_offsets[row].real)
                            if complex_numbers:
                                imaginary = subtract(imaginary, row_offsets[row].imag)
                        if flags & COLUMN_OFFSETS:
                            real = subtract(real, column_offsets[column].real)
                            if complex_numbers:
                                imaginary = subtract(imaginary, column_offsets[column].imag)
                        if flags & OFFSET:
                            real = subtract(real, offset)
                            if complex_numbers:
                                imaginary = subtract(imaginary, part(0))
                        if flags & (ROW_FACTORS | COLUMN_FACTORS):
                            down = row_factors[row if flags & ROW_FACTORS else u64(0)]
                            scale = column_factors[column if flags & COLUMN_FACTORS else u64(0)]
                            if complex_numbers:
                                a, b, c, d = down.real, down.imag, scale.real, scale.imag
                                if not flags & COLUMN_FACTORS:
                                    c, d = a, b
                                elif flags & ROW_FACTORS:
                                    c, d = product_real(a, b, c, d), product_imaginary(a, b, c, d)
                                real, imaginary = (
                                    product_real(real, imaginary, c, d),
                                    product_imaginary(real, imaginary, c, d),
                                )
                            elif flags & ROW_FACTORS and flags & COLUMN_FACTORS:
                                real = multiply(real, multiply(down, scale))
                            else:
                                real = multiply(real, down if flags & ROW_FACTORS else scale)
                        if not complex_numbers:
                            if flags & SQUARES:
                                real = multiply(real, real)
                            if flags & PRESENCE:
                                real = part(1)
                        gone = flags & BUT_EQUAL and comparable(value) == comparable(missing[0])
                        if gone or (flags & BUT_NAN and comparable(value) != comparable(value)):
                            real, imaginary = part(0), part(0)
                        if complex_numbers:
                            if flags & CONJUGATE:
                                imaginary = -imaginary
                            target[row, column] = complex(real, imaginary)
                        else:
                            target[row, column] = real
            piece += u64(cuda.gridDim.x)

    return transform_kernel


def transform_signature(stored: np.dtype, dtype: np.dtype) -> Any:
    line = numba.types.Array(numba_type(dtype), 1, "A")
    return numba.void(
        numba.types.Array(numba_type(stored), 2, "A"),
        numba.types.Array(numba_type(dtype), 2, "A"),
        line,
        line,
        numba_type(part_dtype(dtype)),
        line,
        line,
        numba.types.Array(numba_type(stored), 1, "A"),
        numba.int32,
        numba.int32,
    )


TRANSFORM = Launcher(transform_function, transform_signature)


def transform(
    source: Any,
    target: Any,
    offsets: tuple[Any, Any],
    offset: float,
    factors: tuple[Any, Any],
    missing: Any,
    flags: int,
    stream: Any,
) -> None:
    """Enqueue ``target = (source - offsets[0][i] - offsets[1][j] - offset) * (factors[0][i] * factors[1][j])``.

    source, target: device memory, rows × columns of any strides, the latter of `TRANSFORMED`, written; they do not
    overlap. offsets, factors: of the target's dtype, as long as the rows, and the columns; any array of one element
    where the flags leave it out. missing: an array of one element of the source's dtype, which becomes 0 with
    `BUT_EQUAL`, as NaN does with `BUT_NAN`. Of real numbers the squares of that are written with `SQUARES`, and ones
    with `PRESENCE`. An empty side does nothing.
    """
    rows, columns = source.shape
    if rows * columns == 0:
        return
    dtypes = np.dtype(source.dtype), np.dtype(target.dtype)
    grid, width = dealt(rows, columns)
    arguments = source, target, *offsets, float(offset), *factors, missing, flags, width
    TRANSFORM.enqueue(dtypes, grid, THREADS, stream, *arguments)


def dealt(rows: int, columns: int) -> tuple[int, int]:
    """Blocks, and the columns of a block."""
    width = min(THREADS, power_of_two(columns))
    pieces = ceil_div(rows, THREADS // width * EACH) * ceil_div(columns, width)
    return min(MOST_BLOCKS, pieces), width


def finish_function(sums: np.dtype, wide: np.dtype, stored: np.dtype, before: np.dtype) -> Any:
    """The plain function of the kernel that finishes sums: see `finish`. Grid and block as for `transform_function`.

    wide: what the epilogue is formed in. Its vectors and numbers are float64, or complex128 where that is complex, or
    of it where it holds integers, which wrap.
    """
    if wide.kind in "iu":
        return _finish_integers(wide, stored)
    operations, exact = operations_of(wide), operations_of(np.dtype(np.float64))
    add, subtract, _ = operations
    product_real, product_imaginary = _complex_product(operations)
    exact_real, exact_imaginary = _complex_product(exact)
    multiply, exact_multiply, exact_add = operations.multiply, exact.multiply, exact.add
    complex_numbers = wide.kind == "c"
    sum_real, sum_imaginary = _parts(sums, wide)
    before_real, before_imaginary = _parts(before, wide)
    part = conversion(part_dtype(wide))
    store = conversion(stored)
    u64 = numba.uint64

    def finish_kernel(
        source: Any,
        target: Any,
        held: Any,
        row_pairs: Any,
        column_pairs: Any,
        row_factors: Any,
        column_factors: Any,
        row_offsets: Any,
        column_offsets: Any,
        numbers: Any,
        flags: Any,
        width: Any,
    ) -> None:
        rows, columns = u64(source.shape[0]), u64(source.shape[1])
        lines = u64(THREADS) // u64(width)
        x, y = u64(cuda.threadIdx.x) % u64(width), u64(cuda.threadIdx.x) // u64(width)
        tall = lines * u64(EACH)
        across = (columns + u64(width) - u64(1)) // u64(width)
        pieces = (rows + tall - u64(1)) // tall * across
        piece = u64(cuda.blockIdx.x)
        alpha, weight = numbers[ALPHA_PLACE], numbers[WEIGHT_PLACE]
        offset, beta = numbers[OFFSET_PLACE], numbers[BETA_PLACE]
        while piece < pieces:
            first, column = piece // across * tall + y, piece % across * u64(width) + x
            for i in range(EACH):
                row = first + u64(i) * lines
                if row < rows and column < columns:
                    value = source[row, column]
                    real, imaginary = sum_real(value), sum_imaginary(value)
                    if flags & PAIRS:
                        a, b = row_pairs[row], column_pairs[column]
                        if complex_numbers:
                            c = exact_real(a.real, a.imag, b.real, b.imag)
                            d = exact_imaginary(a.real, a.imag, b.real, b.imag)
                            real = subtract(real, part(exact_real(weight.real, weight.imag, c, d)))
                            imaginary = subtract(
                                imaginary, part(exact_imaginary(weight.real, weight.imag, c, d))
                            )
                        else:
                            real = subtract(real, part(exact_multiply(weight, exact_multiply(a, b))))
                    if flags & (ROW_FACTORS | COLUMN_FACTORS):
                        a = row_factors[row if flags & ROW_FACTORS else u64(0)]
                        b = column_factors[column if flags & COLUMN_FACTORS else u64(0)]
                        if complex_numbers:
                            c, d = a.real, a.imag
                            if not flags & ROW_FACTORS:
                                c, d = b.real, b.imag
                            elif flags & COLUMN_FACTORS:
                                c, d = (
                                    exact_real(a.real, a.imag, b.real, b.imag),
                                    exact_imaginary(a.real, a.imag, b.real, b.imag),
                                )
                            c, d = (
                                part(exact_real(alpha.real, alpha.imag, c, d)),
                                part(exact_imaginary(alpha.real, alpha.imag, c, d)),
                            )
                            real, imaginary = (
                                product_real(real, imaginary, c, d),
                                product_imaginary(real, imaginary, c, d),
                            )
                        else:
                            if not flags & ROW_FACTORS:
                                a = b
                            elif flags & COLUMN_FACTORS:
                                a = exact_multiply(a, b)
                            real = multiply(real, part(exact_multiply(alpha, a)))
                    elif flags & ALPHA:
                        if complex_numbers:
                            c, d = part(alpha.real), part(alpha.imag)
                            real, imaginary = (
                                product_real(real, imaginary, c, d),
                                product_imaginary(real, imaginary, c, d),
                            )
                        else:
                            real = multiply(real, part(alpha))
                    if flags & (ROW_OFFSETS | COLUMN_OFFSETS):
                        a = row_offsets[row if flags & ROW_OFFSETS else u64(0)]
                        b = column_offsets[column if flags & COLUMN_OFFSETS else u64(0)]
                        if not flags & ROW_OFFSETS:
                            a = b
                        c, d = a.real, a.imag
                        if flags & ROW_OFFSETS and flags & COLUMN_OFFSETS:
                            c = exact_add(a.real, b.real)
                            if complex_numbers:
                                d = exact_add(a.imag, b.imag)
                        real = add(real, part(c))
                        if complex_numbers:
                            imaginary = add(imaginary, part(d))
                    if flags & OFFSET:
                        real = add(real, part(offset.real))
                        if complex_numbers:
                            imaginary = add(imaginary, part(offset.imag))
                    if flags & BETA:
                        was = held[row, column]
                        c, d = before_real(was), before_imaginary(was)
                        if complex_numbers:
                            e, f = part(beta.real), part(beta.imag)
                            real = add(real, product_real(e, f, c, d))
                            imaginary = add(imaginary, product_imaginary(e, f, c, d))
                        else:
                            real = add(real, multiply(part(beta), c))
                    if complex_numbers:
                        target[row, column] = complex(real, imaginary)
                    else:
                        target[row, column] = store(real)
            piece += u64(cuda.gridDim.x)

    return finish_kernel


def _finish_integers(wide: np.dtype, stored: np.dtype) -> Any:
    """The same for integers, which are formed modulo 2^64 and cut to C's."""
    store = conversion(stored)
    word = conversion(np.dtype(np.uint64))
    u64 = numba.uint64

    def finish_integers_kernel(
        source: Any,
        target: Any,
        held: Any,
        row_pairs: Any,
        column_pairs: Any,
        row_factors: Any,
        column_factors: Any,
        row_offsets: Any,
        column_offsets: Any,
        numbers: Any,
        flags: Any,
        width: Any,
    ) -> None:
        rows, columns = u64(source.shape[0]), u64(source.shape[1])
        lines = u64(THREADS) // u64(width)
        x, y = u64(cuda.threadIdx.x) % u64(width), u64(cuda.threadIdx.x) // u64(width)
        tall = lines * u64(EACH)
        across = (columns + u64(width) - u64(1)) // u64(width)
        pieces = (rows + tall - u64(1)) // tall * across
        piece = u64(cuda.blockIdx.x)
        while piece < pieces:
            first, column = piece // across * tall + y, piece % across * u64(width) + x
            for i in range(EACH):
                row = first + u64(i) * lines
                if row < rows and column < columns:
                    value = word(source[row, column])
                    if flags & PAIRS:
                        value -= (
                            word(numbers[WEIGHT_PLACE]) * word(row_pairs[row]) * word(column_pairs[column])
                        )
                    if flags & ROW_FACTORS:
                        value *= word(row_factors[row])
                    if flags & COLUMN_FACTORS:
                        value *= word(column_factors[column])
                    if flags & (ALPHA | ROW_FACTORS | COLUMN_FACTORS):
                        value *= word(numbers[ALPHA_PLACE])
                    if flags & ROW_OFFSETS:
                        value += word(row_offsets[row])
                    if flags & COLUMN_OFFSETS:
                        value += word(column_offsets[column])
                    if flags & OFFSET:
                        value += word(numbers[OFFSET_PLACE])
                    if flags & BETA:
                        value += word(numbers[BETA_PLACE]) * word(held[row, column])
                    target[row, column] = store(value)
            piece += u64(cuda.gridDim.x)

    return finish_integers_kernel


def _number_dtype(wide: np.dtype) -> np.dtype:
    return wide if wide.kind in "iu" else np.dtype(np.complex128 if wide.kind == "c" else np.float64)


def finish_signature(sums: np.dtype, wide: np.dtype, stored: np.dtype, before: np.dtype) -> Any:
    line = numba.types.Array(numba_type(_number_dtype(wide)), 1, "A")
    matrices = [numba.types.Array(numba_type(dtype), 2, "A") for dtype in (sums, stored, before)]
    return numba.void(*matrices, *[line] * 7, numba.int32, numba.int32)


FINISH = Launcher(finish_function, finish_signature)


def finish(
    sums: Any,
    target: Any,
    before: Any,
    vectors: tuple[Any, Any, Any, Any, Any, Any],
    numbers: Any,
    wide: np.dtype,
    flags: int,
    stream: Any,
) -> None:
    """Enqueue ``target = alpha * (factors) * (sums - weight * pairs) + offsets + offset + beta * before``.

    sums, target, before: device memory, rows × columns of any strides; target is written, and may be where the sums
    are, of elements of the same size. before: any matrix without `BETA`. vectors: pairs, factors and offsets, each of
    the rows and of the columns, and numbers: alpha, the weight of pairs, offset and beta; of float64, complex128 or
    ``wide``, as `finish_function` says. A vector that the flags leave out is any array of one element. An empty side
    does nothing.
    """
    rows, columns = sums.shape
    if rows * columns == 0:
        return
    dtypes = np.dtype(sums.dtype), wide, np.dtype(target.dtype), np.dtype(before.dtype)
    grid, width = dealt(rows, columns)
    arguments = sums, target, before, *vectors, numbers, flags, width
    FINISH.enqueue(dtypes, grid, THREADS, stream, *arguments)


def diagonal_function(stored: np.dtype) -> Any:
    """The plain function of the kernel that writes a diagonal: see `put_diagonal`. A thread writes one element; blocks
    of `THREADS`."""
    u64 = numba.uint64

    def diagonal_kernel(target: Any, diagonal: Any, down: Any, across: Any) -> None:
        i = u64(cuda.blockIdx.x) * u64(THREADS) + u64(cuda.threadIdx.x)
        if i < u64(diagonal.shape[0]):
            target[u64(down) + i, u64(across) + i] = diagonal[i]

    return diagonal_kernel


def diagonal_signature(stored: np.dtype) -> Any:
    element = numba_type(stored)
    matrix, vector = (numba.types.Array(element, dimensions, "A") for dimensions in (2, 1))
    return numba.void(matrix, vector, numba.int32, numba.int32)


DIAGONAL = Launcher(diagonal_function, diagonal_signature)


def put_diagonal(target: Any, diagonal: Any, down: int, across: int, stream: Any) -> None:
    """Enqueue ``target[down + i, across + i] = diagonal[i]``.

    target: device memory, rows × columns of any strides, written. diagonal: of its dtype, no longer than what is below
    and to the right of that place. An empty one does nothing.
    """
    length = diagonal.shape[0]
    if length:
        dtypes = (np.dtype(target.dtype),)
        DIAGONAL.enqueue(dtypes, ceil_div(length, THREADS), THREADS, stream, target, diagonal, down, across)


def variants() -> Iterable[Variant]:
    """What tests compile to machine code."""
    for dtype in TRANSFORMED:
        for stored in SOURCES:
            if stored.kind != "c" or dtype.kind == "c":
                name = f"transform {stored} to {dtype}"
                yield TRANSFORM.variant(name, stored, dtype)
    single, double = np.dtype(np.float32), np.dtype(np.float64)
    of_integers = [(sums, double, stored) for sums in INTEGERS[2:] for stored in (single, double)]
    alike = [(dtype, dtype, dtype) for dtype in (*TRANSFORMED, *INTEGERS)]
    for sums, wide, stored in (*of_integers, *alike):
        for before in dict.fromkeys((stored, sums)):
            dtypes = sums, wide, stored, before
            name = f"finish {sums} as {stored} in {wide}, to {before}"
            yield FINISH.variant(name, *dtypes)
    for stored in (*TRANSFORMED, *INTEGERS):
        yield DIAGONAL.variant(f"diagonal of {stored}", stored)
