"""What all matrix-product kernels of the ladder share: the `Problem` they are given and their record, `GemmKernel`.

``select.py`` walks the records and takes the first whose ``supports`` accepts the problem. A kernel never
sees a transpose flag: ``op(A)`` and ``op(B)`` arrive as views whose strides say how they lie in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.kernels.deferred import numba
from tilewright.kernels.elements import numba_type
from tilewright.kernels.float8 import FLOAT8

Capability = tuple[int, int]

INTEGERS = tuple(np.dtype(code) for code in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"))
FLOATS = (BFLOAT16, *(np.dtype(code) for code in ("f2", "f4", "f8")))
COMPLEX = tuple(np.dtype(code) for code in ("c8", "c16"))
ELEMENTS = INTEGERS + FLOATS + COMPLEX
"""Every element type that a product can have."""
FACTORS = ELEMENTS + FLOAT8
"""Every element type that can be multiplied: float8 gives float32."""
NUMPY_ELEMENTS = tuple(dtype for dtype in ELEMENTS if dtype != BFLOAT16)
"""Those that NumPy has itself, and Zarr."""


PLANES_NBYTES = 2 << 30
"""What the planes of both operands of one panel of k may take, where operands are written anew for the tensor cores.
More k in a panel means fewer passes over C."""

_COMPUTE = {
    np.dtype(narrow): np.dtype(wide)
    for narrow, wide in {"i1": "i4", "i2": "i4", "u1": "u4", "u2": "u4", "f2": "f4"}.items()
} | {BFLOAT16: np.dtype(np.float32)}


def compute_dtype(result: np.dtype) -> np.dtype:
    """The type in which products are formed and added up.

    The result's own, except where a wider one costs nothing: 8- and 16-bit integers in 32 bits, which wraps
    to the same answer in the end, and float16 and bfloat16 in float32, rounded once, which is more accurate.
    """
    return _COMPUTE.get(result, result)


@dataclass(frozen=True)
class Operand:
    """How one matrix lies in memory. Strides are in elements; a row-major matrix has strides (columns, 1).

    Strides may be larger than a row, zero (a broadcast operand) or negative: ``supports`` must look at them.
    """

    rows: int
    columns: int
    dtype: np.dtype
    strides: tuple[int, int]
    alignment: int
    """The largest power of two, at most 128, that divides the address of the first element (bytes)."""

    @property
    def row_major(self) -> bool:
        """Whether the elements of a row are contiguous (a single column counts as both)."""
        return self.strides[1] == 1 or self.columns == 1

    @property
    def column_major(self) -> bool:
        return self.strides[0] == 1 or self.rows == 1


@dataclass(frozen=True)
class Problem:
    """C = op(A) op(B) (+ C when ``accumulate``), with op applied: A is m × k, B is k × n, C is m × n."""

    a: Operand
    b: Operand
    c: Operand
    accumulate: bool
    precision: str
    """``full``, ``split``, ``tf32``, ``bf16`` or ``fp16``: what the caller allows."""
    capability: Capability | None
    """Compute capability of the device, (9, 0) for Hopper; None in the simulator."""
    model: str | None = None
    """The name of the device, for what was measured on its like (`tuning`); None where that is not asked."""

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
class Variant:
    """One specialisation of a kernel, with what is needed to compile it without a GPU."""

    name: str
    function: Any
    """The plain Python function, for ``numba.cuda.compile_ptx``."""
    signature: Any
    minimum: Capability = (8, 0)
    """The lowest compute capability it is written for."""
    options: dict[str, Any] = field(default_factory=dict)
    """More keyword arguments of ``compile_ptx``, such as ``launch_bounds``."""


@functools.cache
def strided_signature(a: np.dtype, b: np.dtype, c: np.dtype) -> Any:
    """``kernel(a, b, c, accumulate)`` over matrices of any strides: one compilation serves every layout."""
    arrays = [numba.types.Array(numba_type(dtype), 2, "A") for dtype in (a, b, c)]
    return numba.void(*arrays, numba.boolean)


def no_variants() -> Iterable[Variant]:
    return ()


@dataclass(frozen=True)
class GemmKernel:
    """One rung of the ladder: a name for reports, what it accepts, and how it is launched.

    ``launch(a, b, c, accumulate, stream)`` takes two-dimensional Numba device arrays (``a`` m × k, ``b`` k ×
    n, ``c`` m × n, any strides that ``supports`` accepted), enqueues the product on ``stream`` and returns at
    once. With ``accumulate`` it adds into ``c``; otherwise it overwrites every element of ``c`` and reads
    none. It is never called with m, n or k = 0.

    Where ``halves`` is set it also takes ``lower=True``: only elements on and below the diagonal of a square ``c`` are
    wanted, the others may get any numbers, and blocks that lie above the diagonal as a whole are left out.
    """

    name: str
    summary: str
    supports: Callable[[Problem], bool]
    launch: Callable[..., None]
    portable: bool = False
    """Whether the simulator can run it: no inline PTX, no warp intrinsics."""
    recordable: bool = False
    """Whether ``launch`` looks at addresses only modulo `recording.ALIGNMENT`, or through `recording.Found`, and
    launches with `enqueue` alone, so that its launches can be recorded once and replayed for other arrays of the same
    layout."""
    halves: bool = False
    """Whether ``launch`` takes ``lower``, and then saves half of the work."""
    variants: Callable[[], Iterable[Variant]] = no_variants
    """Every specialisation worth compiling in a test, without a GPU."""
