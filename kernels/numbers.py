"""Arithmetic on counts and sizes that every layer needs, and numbers as people read them.

Pure: nothing else of Tilewright is imported here, so that the arithmetic of a plan loads no device code.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np

IntOrArray = TypeVar("IntOrArray", int, np.ndarray)

WARP = 32
"""Threads that a GPU runs together."""


class Extent(NamedTuple):
    """The least and the largest of some integers."""

    least: int
    most: int

    @property
    def magnitude(self) -> int:
        """The largest absolute value."""
        return max(-self.least, self.most)


def ceil_div(a: IntOrArray, b: IntOrArray) -> IntOrArray:
    """The least number of groups of ``b`` that hold ``a`` things; a >= 0, b > 0. Element by element for arrays."""
    return -(-a // b)


def round_up(length: int, unit: int) -> int:
    """The smallest multiple of ``unit`` that is not below ``length``."""
    return ceil_div(length, unit) * unit


def power_of_two(least: int) -> int:
    """The smallest power of two that is not below ``least``; 1 for 0."""
    return 1 << max(least - 1, 0).bit_length()


def share_of_cores(usable: int, all_cores: int, neighbours: int) -> int:
    """Cores for one process that may use ``usable`` of its host's, shared by ``neighbours`` processes, itself included.

    OMP_NUM_THREADS is no guide: Dask sets it to 1 in every worker process, even where that is the only one of its host.
    """
    return min(usable, ceil_div(all_cores, neighbours))


def counted(count: int, noun: str) -> str:
    """A count with its noun, as a message says it: ``1 tile``, ``0 tiles``, ``8 tiles``."""
    return f"{count} {noun}{'s' * (count != 1)}"


def format_nbytes(nbytes: float) -> str:
    """Bytes for people, in powers of 1024 with three digits, or four before the next unit begins."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if round(abs(nbytes)) < 1024 or unit == "TiB":
            whole = unit == "B" or round(abs(nbytes)) >= 1000  # which .3g would write with an exponent
            return f"{nbytes:.0f} {unit}" if whole else f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    raise AssertionError("unreachable: TiB returns")


def format_count(value: float) -> str:
    """A rate for people, in powers of 1000 with three digits: ``1.23 T``."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if value < 1000 or prefix == "P":
            return f"{value:.3g} {prefix}"
        value /= 1000
    raise AssertionError("unreachable: P returns")


def format_seconds(seconds: float) -> str:
    """A duration for people: ``0.42 s``, ``12 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
