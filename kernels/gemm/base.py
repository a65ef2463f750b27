"""What every matrix-product kernel of the ladder has in common: the problem it is given and the record it offers.

``select.py`` walks the records and takes the first whose ``supports`` accepts the problem. A kernel never sees
a transpose flag: ``op(A)`` and ``op(B)`` arrive as views whose strides say how they lie in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Capability = tuple[int, int]


@dataclass(frozen=True)
class Operand:
    """How one matrix lies in memory. Strides are in elements; a row-major matrix has strides (columns, 1)."""

    rows: int
    columns: int
    dtype: np.dtype
    strides: tuple[int, int]
    alignment: int
    """The largest power of two, at most 128, that divides the address of the first element (bytes)."""

    @property
    def row_major(self) -> bool:
        """Whether elements of a row lie side by side (a single column counts as both)."""
        return self.strides[1] == 1 or self.columns == 1

    @property
    def column_major(self) -> bool:
        return self.strides[0] == 1 or self.rows == 1


@dataclass(frozen=True)
class Problem:
    """C = op(A) op(B) (+ C when ``accumulate``), with op applied already: A is m × k, B is k × n, C is m × n."""

    a: Operand
    b: Operand
    c: Operand
    accumulate: bool
    precision: str
    """``full``, ``split``, ``tf32``, ``bf16`` or ``fp16``: what the caller allows."""
    capability: Capability | None
    """Compute capability of the device, (9, 0) for Hopper; None in the simulator."""

    @property
    def m(self) -> int:
        return self.c.rows

    @property
    def n(self) -> int:
        return self.c.columns

    @property
    def k(self) -> int:
        return self.a.columns


@dataclass(frozen=True)
class GemmKernel:
    """One rung of the ladder: a name for reports, what it accepts, and how it is launched.

    ``launch(a, b, c, accumulate, stream)`` takes two-dimensional Numba device arrays (``a`` m × k, ``b`` k × n,
    ``c`` m × n, any strides that ``supports`` accepted), enqueues the product on ``stream`` and returns at once.
    With ``accumulate`` it adds into ``c``; otherwise it overwrites every element of ``c`` and reads none.
    """

    name: str
    summary: str
    supports: Callable[[Problem], bool]
    launch: Callable[[Any, Any, Any, bool, Any], None]
    portable: bool = False
    """Whether the simulator can run it: no inline PTX, no warp intrinsics."""
