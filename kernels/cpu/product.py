"""The CPU twins of the public kernels: the same answers, from BLAS and compiled loops.

Floating point goes to BLAS, which writes straight into ``out`` where it can. Integers are split into digits whose
products are exact in floating point (`tilewright.kernels.gemm.exact.digits`) and go to BLAS too, which is two orders of
magnitude faster than NumPy's own integer product. Where the CPU has the instructions of AVX-512, integers that lie
within 255 of each other go to products of bytes (`tilewright.kernels.cpu.byte_integer`), and wide ones to 52-bit
multiply-adds (`tilewright.kernels.cpu.integer`), as soon as those are less work than the digits that the values need;
on any other CPU digits do all of it. Only the first few integers of a process are left to NumPy: they are multiplied
before a loop is loaded.

Everything here may be called from several threads at once: the loops run on threads of their own, not in Numba's thread
pool, which some of its threading layers do not let threads share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.kernels.cpu import blas
from tilewright.kernels.cpu.loops import (
    Allowance,
    blocks,
    by_memory,
    compiled,
    cpu_threads,
    on_threads,
    source_type,
    target_type,
)
from tilewright.kernels.deferred import numba
from tilewright.kernels.float8 import FLOAT8, to_float32
from tilewright.kernels.gemm.base import compute_dtype
from tilewright.kernels.gemm.exact import digits
from tilewright.kernels.numbers import Extent, ceil_div

if TYPE_CHECKING:
    from tilewright.kernels.cpu import integer as host_integer

BLOCK = 1280
"""Side of the blocks that integers are split in: large enough for BLAS, and 15 of them in float64 are 200 MB."""
FLOAT_BLOCK = 2048
"""Side of the blocks in which floating-point operands are converted."""
STRIP_ROWS, STRIP_COLUMNS = 1024, 4096
"""The most of a strip of a lower half of two matrices, and of any product where BLAS itself cannot add it to what is
there: then a cache still holds part of what BLAS has written. A lower half with up to half as many rows more is one
strip, since each call of BLAS ends with threads that wait for others."""
SCRATCH_NBYTES = 320 << 20
"""The most memory a product takes for itself, whatever its sides; what BLAS packs inside is not counted."""
FEW_MULTIPLICATIONS = 2**27
"""Of integers, that a process leaves to NumPy before it loads loops: a fifteenth of a second. Setting Numba up takes a
fifth of one, and loops that are not kept on disk one more to compile."""
FEW_ELEMENTS = 2**22
"""The most of a matrix that is left to NumPy: what is multiplied is converted, and lies beside the result."""
STRASSEN_PRODUCTS = 4
"""From this many digit products on, Strassen's seven half-size products in place of eight save more than they cost."""
STRASSEN_SIDE = 1024
"""Blocks with a shorter side are not halved for it."""


def matmul(
    a: np.ndarray, b: np.ndarray, out: np.ndarray, *, accumulate: bool = False, lower: bool = False
) -> None:
    """``out (+)= a b`` for matrices that were checked: shapes fit, dtypes cast to out's, nothing overlaps.

    a: m × k, b: k × n, out: m × n, written; any strides. lower: of a square out only elements on and below the diagonal
    are wanted; blocks above it are left out, and keep what they hold. Scratch memory is at most `SCRATCH_NBYTES`, and a
    copy of an operand is made only where BLAS cannot read its strides.
    """
    if 0 in out.shape or (accumulate and not a.shape[1]):
        return
    if not a.shape[1]:
        out[...] = 0
    elif out.dtype.kind in "iu" and _numpy_serves(a, b, out):
        _few_integers(a, b, out, accumulate, lower)
    elif out.dtype.kind in "iu":
        _integers(a, b, out, accumulate, lower)
    else:
        # Overflow to infinity and NaN are answers here, as on a GPU, not reasons to warn.
        with np.errstate(all="ignore"):
            _floats(a, b, out, accumulate, lower)


def kernel_name(dtype: np.dtype) -> str:
    """What multiplies matrices with this result dtype; for integers, the candidates (the values decide, and of the
    first few of a process it is NumPy)."""
    if dtype.kind not in "iu":
        return "BLAS"
    from tilewright.kernels.cpu import byte_integer as host_bytes
    from tilewright.kernels.cpu import integer as host_integer

    units = (host_bytes, "products of bytes"), (host_integer, "52-bit multiply-adds")
    named = [name for unit, name in units if unit.available()]
    return f"{', '.join(named)} or exact digits" if named else "BLAS on exact digits"


def _places(m: int, n: int, side: int, lower: bool) -> Iterator[tuple[slice, slice]]:
    """The rows and columns of blocks of a matrix, column of blocks after column; without those above the diagonal where
    ``lower``."""
    for columns in blocks(n, side):
        for rows in blocks(m, side):
            if not (lower and rows.start < columns.start):
                yield rows, columns


def _is_transpose(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether one matrix is the other's transpose, in the same memory."""
    return (
        a.ctypes.data == b.ctypes.data
        and a.dtype == b.dtype
        and a.shape == b.shape[::-1]
        and a.strides == b.strides[::-1]
    )


def _floats(a: np.ndarray, b: np.ndarray, out: np.ndarray, accumulate: bool, lower: bool) -> None:
    compute = compute_dtype(out.dtype)
    if a.dtype == b.dtype == out.dtype == compute:
        if lower and _is_transpose(a, b) and blas.takes(a, b, out):
            blas.multiply_lower(a, out, accumulate=accumulate)
        elif accumulate:
            _add_product(a, b, out, lower)
        else:
            np.matmul(a, b, out=out)  # of a matrix by its own transpose NumPy has BLAS compute one half
        return
    k = a.shape[1]
    m, n = out.shape
    for rows, columns in _places(m, n, FLOAT_BLOCK, lower):
        target = out[rows, columns]
        total = np.zeros(target.shape, compute)
        for depth in blocks(k, FLOAT_BLOCK):
            left, right = _numbers(a[rows, depth], compute), _numbers(b[depth, columns], compute)
            _add_product(left, right, total, lower=False)
        if accumulate:
            total += target
        target[...] = total  # rounded once, where out is narrower


def _numbers(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Elements as numbers of another type."""
    return (to_float32(array) if array.dtype in FLOAT8 else array).astype(dtype, copy=False)


def _add_product(a: np.ndarray, b: np.ndarray, out: np.ndarray, lower: bool) -> None:
    """``out += a b`` where all have the dtype that BLAS computes in."""
    m, n = out.shape
    if blas.takes(a, b, out):
        for rows, columns in _strips(m, n, lower) if lower else ((slice(0, m), slice(0, n)),):
            blas.multiply(a[rows], b[:, columns], out[rows, columns], accumulate=True)
        return
    places = list(_strips(m, n, lower))
    memory = np.empty(max(out[place].size for place in places), out.dtype)
    for rows, columns in places:
        target = out[rows, columns]
        # Without gaps: where lines begin at multiples of 8 KiB, NumPy takes several times as long to copy one half of a
        # symmetric product to the other.
        product = memory[: target.size].reshape(target.shape)
        np.matmul(a[rows], b[:, columns], out=product)
        target += product


def _strips(m: int, n: int, lower: bool) -> Iterator[tuple[slice, slice]]:
    """The rows and columns of strips of a matrix; with ``lower`` of those left of the diagonal, and the squares on
    it."""
    height = m if lower and 2 * m <= 3 * STRIP_ROWS else STRIP_ROWS
    for rows in blocks(m, height):
        stop = rows.start if lower else n
        if stop:
            yield from ((rows, columns) for columns in blocks(stop, STRIP_COLUMNS))
        if lower:
            yield rows, rows


def _ring(array: np.ndarray) -> np.ndarray:
    """A view of integers whose values, as signed 64-bit numbers, are right modulo 2**64, hence modulo any result's
    2**bits.
    """
    if array.dtype.kind == "u" and array.dtype.itemsize == 8:
        return array.view(np.int64)
    return array


def _extremes(array: Any, start: int, stop: int) -> Any:
    low = np.int64(array[start, 0])
    high = low
    for i in range(start, stop):
        for j in range(array.shape[1]):
            value = np.int64(array[i, j])
            low = min(low, value)
            high = max(high, value)
    return low, high


def _extent(pool: ThreadPoolExecutor, array: np.ndarray) -> Extent:
    """The least and the largest value of a non-empty integer matrix."""
    array = by_memory(array)
    extremes = compiled(_extremes, source_type(array.dtype), numba.int64, numba.int64)
    found = on_threads(pool, extremes, array.shape[0], array)
    return Extent(min(int(low) for low, _ in found), max(int(high) for _, high in found))


def _split(
    first: Any,
    second: Any,
    sign: int,
    bits: int,
    widths: Any,
    count: int,
    masks: Any,
    parts: Any,
    start: int,
    stop: int,
) -> None:
    """Write the parts (sums of digits) of ``first + sign * second``, rows start to stop, as floating point.

    first, second: integers, at most as large as a part; missing rows and columns count as zero. masks[p] has bit i set
    where digit i belongs to part p. parts: (number of parts, rows, columns), written.
    """
    columns = parts.shape[2]
    spare = 64 - bits
    if count == 1 and second.shape[0] == 0 and first.shape == parts.shape[1:]:
        # Small values, which are digits themselves.
        for i in range(start, stop):
            for j in range(columns):
                parts[0, i, j] = (np.int64(first[i, j]) << spare) >> spare
        return
    line = np.empty(columns, np.int64)
    digit = np.empty((count, columns), np.int64)
    for i in range(start, stop):
        line[:] = 0
        if i < first.shape[0]:
            for j in range(first.shape[1]):
                line[j] = np.int64(first[i, j])
        if i < second.shape[0]:
            for j in range(second.shape[1]):
                line[j] += sign * np.int64(second[i, j])
        if spare:
            # The representative modulo 2**bits that is nearest zero, so that the last digit is short.
            for j in range(columns):
                line[j] = (line[j] << spare) >> spare
        for d in range(count - 1):
            width = widths[d]
            half = np.int64(1) << (width - 1)
            mask = (np.int64(1) << width) - 1
            for j in range(columns):
                low = ((line[j] + half) & mask) - half
                digit[d, j] = low
                line[j] = (line[j] - low) >> width
        for j in range(columns):
            digit[count - 1, j] = line[j]
        for p in range(parts.shape[0]):
            line[:] = 0
            for d in range(count):
                if (masks[p] >> d) & 1:
                    for j in range(columns):
                        line[j] += digit[d, j]
            for j in range(columns):
                parts[p, i, j] = line[j]


def _collect(
    products: Any,
    weights: Any,
    first: Any,
    first_sign: int,
    second: Any,
    second_sign: int,
    start: int,
    stop: int,
) -> None:
    """Add ``sign * sum over p of weights[p] * products[p]`` into one or two targets, wrapping; rows start to
    stop.

    products: (number of products, rows, columns) of exact integers in floating point. Targets are signed
    integers, at most as large as a product.
    """
    columns = products.shape[2]
    line = np.empty(columns, np.int64)
    for i in range(start, stop):
        line[:] = 0
        for p in range(products.shape[0]):
            weight = weights[p]
            for j in range(columns):
                line[j] += weight * np.int64(products[p, i, j])
        if i < first.shape[0]:
            for j in range(first.shape[1]):
                first[i, j] += first_sign * line[j]
        if i < second.shape[0]:
            for j in range(second.shape[1]):
                second[i, j] += second_sign * line[j]


class _DigitProduct:
    """Exact products of integer blocks by one plan, with the scratch memory that they share."""

    def __init__(
        self, plan: digits.DigitPlan, bits: int, m: int, n: int, k: int, pool: ThreadPoolExecutor
    ) -> None:
        dtype = np.dtype(plan.unit.name)
        self._plan, self._bits, self._pool = plan, bits, pool
        self._parts_a = np.empty(len(plan.parts_a) * m * k, dtype)
        self._parts_b = np.empty(len(plan.parts_b) * k * n, dtype)
        self._products = np.empty(len(plan.products) * m * n, dtype)
        self._weights = np.array([product.weight for product in plan.products], np.uint64).view(np.int64)

    @property
    def has_equal_sides(self) -> bool:
        """Whether the parts of a matrix as a left operand are those of it as a right one."""
        plan = self._plan
        return plan.parts_a == plan.parts_b and plan.digits_a == plan.digits_b

    def left(self, shape: tuple[int, int], first: np.ndarray, *second: tuple[np.ndarray, int]) -> np.ndarray:
        """The left operands made of ``first``, or of ``first + sign * second``, filled up to shape with
        zeros.
        """
        plan = self._plan
        return self._digits(shape, first, second, plan.parts_a, plan.digits_a, self._parts_a)

    def right(self, shape: tuple[int, int], first: np.ndarray, *second: tuple[np.ndarray, int]) -> np.ndarray:
        plan = self._plan
        return self._digits(shape, first, second, plan.parts_b, plan.digits_b, self._parts_b)

    def _digits(
        self,
        shape: tuple[int, int],
        first: np.ndarray,
        second: tuple[tuple[np.ndarray, int], ...],
        groups: tuple[tuple[int, ...], ...],
        count: int,
        scratch: np.ndarray,
    ) -> np.ndarray:
        """The parts in scratch memory, each laid out in the order in which ``first`` lies in memory."""
        other, sign = second[0] if second else (first[:0, :0], 0)
        rows, columns = shape
        flipped = by_memory(first) is not first
        if flipped:
            first, other, rows, columns = first.T, other.T, columns, rows
        widths = np.array(self._plan.widths)
        integer, integers = numba.int64, numba.int64[::1]
        source, target = source_type(first.dtype), numba.from_dtype(scratch.dtype)[:, :, ::1]
        split = compiled(
            _split, source, source, integer, integer, integers, integer, integers, target, integer, integer
        )
        masks = np.array([sum(1 << digit for digit in group) for group in groups])
        parts = scratch[: len(groups) * rows * columns].reshape(len(groups), rows, columns)
        on_threads(self._pool, split, rows, first, other, sign, self._bits, widths, count, masks, parts)
        return parts.transpose(0, 2, 1) if flipped else parts

    def add(self, left: np.ndarray, right: np.ndarray, *targets: tuple[np.ndarray, int]) -> None:
        """Add left × right, times a sign, into each of one or two targets."""
        plan = self._plan
        m, n = left.shape[1], right.shape[2]
        products = self._products[: len(plan.products) * m * n].reshape(-1, m, n)
        for index, product in enumerate(plan.products):
            np.matmul(
                left[plan.parts_a.index(product.a)], right[plan.parts_b.index(product.b)], out=products[index]
            )
        (first, first_sign), (second, second_sign) = (*targets, (targets[0][0][:0, :0], 0))[:2]
        integer, target = numba.int64, target_type(first.dtype)
        source = numba.from_dtype(products.dtype)[:, :, ::1]
        collect = compiled(_collect, source, integer[::1], target, integer, target, integer, integer, integer)
        on_threads(self._pool, collect, m, products, self._weights, first, first_sign, second, second_sign)


def _halves(side: int) -> tuple[slice, slice]:
    return slice(0, ceil_div(side, 2)), slice(ceil_div(side, 2), side)


def _strassen(
    work: _DigitProduct | host_integer.IfmaProduct, a: np.ndarray, b: np.ndarray, c: np.ndarray
) -> None:
    """``c += a b`` by seven products of halves (Strassen 1969): sums of integers are exact in the ring.

    Halves of odd sides differ by one, and the shorter one counts as filled up with zeros.
    """
    (m1, m2), (k1, k2), (n1, n2) = _halves(a.shape[0]), _halves(a.shape[1]), _halves(b.shape[1])
    a11, a12, a21, a22 = a[m1, k1], a[m1, k2], a[m2, k1], a[m2, k2]
    b11, b12, b21, b22 = b[k1, n1], b[k1, n2], b[k2, n1], b[k2, n2]
    c11, c12, c21, c22 = c[m1, n1], c[m1, n2], c[m2, n1], c[m2, n2]
    left = functools.partial(work.left, a11.shape)
    right = functools.partial(work.right, b11.shape)
    work.add(left(a11, (a22, 1)), right(b11, (b22, 1)), (c11, 1), (c22, 1))
    work.add(left(a21, (a22, 1)), right(b11), (c21, 1), (c22, -1))
    work.add(left(a11), right(b12, (b22, -1)), (c12, 1), (c22, 1))
    work.add(left(a22), right(b21, (b11, -1)), (c11, 1), (c21, 1))
    work.add(left(a11, (a12, 1)), right(b22), (c11, -1), (c12, 1))
    work.add(left(a21, (a11, -1)), right(b11, (b12, 1)), (c22, 1))
    work.add(left(a12, (a22, -1)), right(b21, (b22, 1)), (c11, 1))


def _whole(side: Callable[..., np.ndarray], block: np.ndarray) -> np.ndarray:
    return side(block.shape, block)


def _bytes(
    pool: ThreadPoolExecutor,
    a: np.ndarray,
    b: np.ndarray,
    target: np.ndarray,
    extents: tuple[Extent, Extent],
    lower: bool,
) -> None:
    """``target += a b`` of numbers that are bytes, wrapping."""
    from tilewright.kernels.cpu import byte_integer as host_bytes

    (m, k), n = a.shape, b.shape[1]
    sides = min(m, BLOCK), min(n, BLOCK), min(k, host_bytes.DEPTH)
    work = host_bytes.ByteProduct(*extents, *sides, pool)
    for steps in blocks(k, host_bytes.DEPTH):
        right, begin = None, -1
        for rows, columns in _places(m, n, BLOCK, lower):
            if right is None or columns.start != begin:
                right, begin = work.right(b[steps, columns]), columns.start
            reach = rows.start - columns.start if lower else None
            work.add(work.left(a[rows, steps]), right, target[rows, columns], reach)


_few = Allowance(FEW_MULTIPLICATIONS)


def _numpy_serves(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> bool:
    """Whether matrices are of the few integers for which no loop need be loaded."""
    return max(a.size, b.size, out.size) <= FEW_ELEMENTS and _few.takes(out.size * a.shape[1])


def _few_integers(a: np.ndarray, b: np.ndarray, out: np.ndarray, accumulate: bool, lower: bool) -> None:
    """By NumPy's own loop, which wraps as ``out`` does, and is quickest down two lines of memory."""
    product = np.ascontiguousarray(a, out.dtype) @ np.asfortranarray(b, out.dtype)
    if accumulate:
        product += out
    np.copyto(out, product, where=np.tri(*out.shape, dtype=np.bool_) if lower else True)


def _integers(a: np.ndarray, b: np.ndarray, out: np.ndarray, accumulate: bool, lower: bool) -> None:
    m, k = a.shape
    n = b.shape[1]
    bits = 8 * out.dtype.itemsize
    a, b = _ring(a), _ring(b)
    # Signed, because Numba would make float64 of int64 + uint64; sums wrap to the same bits.
    target = out.view(f"i{out.dtype.itemsize}")
    # Not above: floats have no use for these loops.
    from tilewright.kernels.cpu import byte_integer as host_bytes
    from tilewright.kernels.cpu import integer as host_integer

    if not accumulate:
        target[...] = 0
    with ThreadPoolExecutor(cpu_threads()) as pool:
        one = _is_transpose(a, b)
        of_a = _extent(pool, a)
        of_b = of_a if one else _extent(pool, b)
        largest = of_a.magnitude, of_b.magnitude
        plan = digits.plan(*largest, k, bits)
        if host_bytes.available() and host_bytes.fits(of_a, of_b) and plan.cost > host_bytes.COST:
            _bytes(pool, a, b, target, (of_a, of_b), lower)
            return
        unit = host_integer.tiling(bits)
        words = host_integer.available() and unit.cost < plan.cost
        pays = unit.halve if words else len(plan.products) >= STRASSEN_PRODUCTS
        halve = pays and min(m, n, k) >= STRASSEN_SIDE
        if halve and not words:
            # Sums of two blocks are one bit longer (not so with `words`, modulo 2**64).
            plan = digits.plan(2 * largest[0], 2 * largest[1], k, bits)
        depth = BLOCK if words else min(BLOCK, plan.depth)
        scale = 2 if halve else 1
        most_m, most_n, most_k = (min(length, BLOCK) for length in (m, n, k))
        work: _DigitProduct | host_integer.IfmaProduct
        if words:
            work = host_integer.IfmaProduct(unit, most_m, most_n, most_k, pool)
        else:
            work = _DigitProduct(plan, bits, most_m, most_n, most_k, pool)
        # Then BLAS computes one half of a block on the diagonal, as NumPy sees that its operands are one.
        one = one and lower and isinstance(work, _DigitProduct) and work.has_equal_sides
        for steps in blocks(k, scale * depth):
            right, begin = None, -1
            for rows, columns in _places(m, n, scale * BLOCK, lower):
                if halve:
                    _strassen(work, a[rows, steps], b[steps, columns], target[rows, columns])
                    continue
                if right is None or columns.start != begin:
                    right, begin = _whole(work.right, b[steps, columns]), columns.start
                if one and rows == columns:
                    left = right.transpose(0, 2, 1)
                else:
                    left = _whole(work.left, a[rows, steps])
                work.add(left, right, (target[rows, columns], 1))
