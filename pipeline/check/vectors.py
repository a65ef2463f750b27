"""The random vectors that a product is checked with: how they are drawn, cut into groups and sent, and what escapes
them (`docs/verification.md` has the proofs)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from tilewright.kernels.cpu.thin import NUMBER, wide_dtype
from tilewright.kernels.gemm.base import compute_dtype
from tilewright.kernels.numbers import ceil_div
from tilewright.pipeline import config

IMAGE_NBYTES = 256 * 2**20
"""The most that B times the probe, which every worker holds whole, may take: where k is long there are fewer groups."""

MOST_GROUPS = 4
"""Groups of columns that floats are compared in: each costs one more vector in each round."""

INTEGER_VECTORS = 10
"""Vectors of bits in each round for integers. Each halves the chance of whatever escapes the others."""

FRACTION_BITS = 24
"""Bits of an element of a vector for floats: as many as float32 holds, so that what is multiplied by a float32, or by
a part of a complex64, is exact in float64."""

UNIT_VARIANCE = math.sqrt(3)
"""What sums with such a vector, whose elements are uniform between -1 and 1, are multiplied by: then an element counts
as one of variance 1."""

LARGEST_SIZE = 2.0**19
"""Errors count as no larger than this many times the tolerance: from there on the vectors' last bit matters."""


@dataclass(frozen=True)
class Probe:
    """The vectors of all rounds, one a row of length n, and where the groups of columns are cut."""

    vectors: np.ndarray
    """For floats float32: odd multiples of 2^-24 between -1 and 1. For integers int8: 0 or -1, all of whose bits are
    set, where an element is counted. They stay as narrow until they are used: where C's rows are long they are much of
    what is sent."""
    dtype: np.dtype
    """What sums are formed in."""
    cuts: tuple[int, ...]
    exact: bool
    bits: int
    """Bits of C's elements: integers are compared modulo 2^bits."""
    compute: np.dtype
    """What C's elements are formed in."""
    threads: int
    block_rows: int = 0
    """Where wrong blocks are asked for: how many rows each has; it has the columns of a group. 0 where they are not."""
    left_out: np.ndarray | None = None
    """What the columns of op(B) hold, uint8 (`kernels/cpu/thin.py`): all but those of ``NUMBER`` count as zeros, in
    C too."""

    def inside(self, columns: slice) -> Iterator[tuple[int, slice, slice]]:
        """The groups that share columns with these: each group's number, and the shared columns counted from the first
        of these and from the first of all."""
        for group, (start, stop) in enumerate(self.groups()):
            first, last = max(start, columns.start), min(stop, columns.stop)
            if first < last:
                yield group, slice(first - columns.start, last - columns.start), slice(first, last)

    def groups(self) -> Iterable[tuple[int, int]]:
        """First and last + 1 column of every group."""
        return zip(self.cuts, self.cuts[1:], strict=False)

    def special_groups(self, kinds: np.ndarray) -> tuple[list[int], list[int]]:
        """The groups with some special columns, and those with no others; kinds: of all columns, uint8."""
        special = kinds != NUMBER
        some = [group for group, (start, stop) in enumerate(self.groups()) if special[start:stop].any()]
        whole = [group for group in some if special[self.cuts[group] : self.cuts[group + 1]].all()]
        return [group for group in some if group not in whole], whole

    @property
    def group_count(self) -> int:
        return len(self.cuts) - 1

    @property
    def line_nbytes(self) -> int:
        """Results of a row of op(A), or of op(B): its products with the vectors of every group, and its norms."""
        return line_nbytes(len(self.vectors), self.group_count, self.dtype)


def line_nbytes(vectors: int, groups: int, wide: np.dtype) -> int:
    return groups * vectors * wide.itemsize + 8 * (groups + 1)


def vector_count(rounds: int, dtype: np.dtype) -> int:
    """How many vectors there are in each group for a C of this dtype; of integers, one sums up whole rows."""
    return 1 + rounds * INTEGER_VECTORS if dtype.kind in "iu" else rounds


def group_width(n: int, k: int, dtype: np.dtype, rounds: int, step: int) -> int:
    """Columns of a group: all of them for integers; for floats whole chunks of ``step`` columns, in as many groups as
    there may be."""
    if dtype.kind in "iu":
        return max(1, n)
    one = line_nbytes(vector_count(rounds, dtype), 1, wide_dtype(dtype))
    groups = max(1, min(MOST_GROUPS, IMAGE_NBYTES // (one * max(1, k))))
    return step * ceil_div(ceil_div(n, step), groups) if n else 1


def draw_probe(
    n: int,
    k: int,
    dtype: np.dtype,
    rounds: int,
    step: int,
    cuts: tuple[int, ...] = (),
    block_rows: int = 0,
) -> Probe:
    """Fresh vectors from the system's entropy: a fixed seed could be met by a fixed fault.

    cuts: where the groups are cut; by default as `group_width` says. block_rows: as `Probe.block_rows`.
    """
    generator = np.random.default_rng()
    exact = dtype.kind in "iu"
    shape = vector_count(rounds, dtype), n
    if exact:
        vectors = generator.integers(-1, 1, shape, np.int8)
        vectors[0] = -1
    else:
        # Multiples of 2^-24 from 0 to 1, the latter not reached, become the midpoints of cells between -1 and 1.
        vectors = generator.random(shape, np.float32) * np.float32(2) - np.float32(1 - 2.0**-FRACTION_BITS)
    if not cuts:
        cuts = (*range(0, n, group_width(n, k, dtype, rounds, step)), n) if n else (0,)
    return Probe(
        vectors,
        wide_dtype(dtype),
        cuts,
        exact,
        8 * dtype.itemsize,
        compute_dtype(dtype),
        config.threads("read-threads"),
        block_rows,
    )


def chance_to_escape(rounds: int, exact: bool, size: float) -> float:
    """An upper bound of the chance that an error escapes so many rounds.

    size: of an error in floats, in multiples of what its sum may deviate by. The error is the vector of the differences
    between a row of C and the exact product, over the columns of a group, and its size the Euclidean norm of that (of
    complex numbers: of the real or of the imaginary parts, whichever is larger). Any error in integers counts alike.
    """
    if exact:
        return 2.0 ** -(rounds * INTEGER_VECTORS)
    return max(1.0, min(float(size), LARGEST_SIZE)) ** -rounds
