"""What a product's run looks for in A, B and C while they pass, and what it says of it.

The check proves that C is the product of the stored numbers. Whether these are the numbers that the user means, and
whether C holds anything but wrapped sums and NaN, it does not see.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zarr

from tilewright.kernels.contents import Contents, Sought
from tilewright.kernels.masked import Masks
from tilewright.pipeline.attributes import masked_caution, masks_of
from tilewright.pipeline.product import Found
from tilewright.pipeline.store import name_of
from tilewright.pipeline.sums import can_wrap_by_dtype, found_wrap
from tilewright.pipeline.verify import Verification


@dataclass(frozen=True)
class Factors:
    """A product's factors, and the type of its result."""

    a: zarr.Array[Any]
    b: zarr.Array[Any]
    dtype: np.dtype
    """C's."""
    k: int

    @property
    def roles(self) -> dict[str, zarr.Array[Any]]:
        return {"A": self.a, "B": self.b}

    @property
    def dtypes(self) -> tuple[np.dtype, np.dtype]:
        """Of A and of B."""
        return self.a.dtype.newbyteorder("="), self.b.dtype.newbyteorder("=")


@dataclass(frozen=True)
class Findings:
    """What is said of a finished product."""

    wraps: str = "no"
    """As ``MatmulRun.wraps``."""
    masked: dict[str, int] = field(default_factory=dict)
    """As ``MatmulRun.masked``."""
    cautions: tuple[str, ...] = ()


def sought_in(factors: Factors) -> tuple[Sought, Sought, Sought]:
    """What to look for in A, in B and in C: the range of integers only where their sums might wrap."""
    extent = can_wrap_by_dtype(factors.dtype, *factors.dtypes, factors.k)
    return (
        Sought(extent, masks_of(factors.a)),
        Sought(extent, masks_of(factors.b)),
        Sought(not_finite=factors.dtype.kind in "fc"),
    )


def findings_of(
    factors: Factors, found: Found, shape: tuple[int, int], verification: Verification | None
) -> Findings:
    """What a run found, in words. shape: C's. verification: of the product, if it was verified."""
    cautions = []
    wraps = _wraps(factors, found)
    if wraps:
        cautions.append(wraps)
    masks = {role: masks for role, array in factors.roles.items() if (masks := masks_of(array)) is not None}
    masked = {role: {"A": found.a, "B": found.b}[role].masked for role in masks}
    if missing := masked_caution(masked, masks, "C"):
        cautions.append(missing)
    if found.c.not_finite:
        cautions.append(_not_finite(factors, found, shape, verification))
    return Findings("possible" if wraps else "no", masked, tuple(cautions))


def _wraps(factors: Factors, found: Found) -> str | None:
    """A sentence where sums may have wrapped."""
    most = [_largest(contents) for contents in (found.a, found.b)]
    if None in most:  # not looked at, since nothing that the types hold could wrap; or there is nothing in it
        return None
    return found_wrap("C", factors.dtype, *factors.dtypes, factors.k, *(size or 0 for size in most))


def _largest(contents: Contents) -> int | None:
    """The largest absolute value of the integers; None where nobody looked."""
    if contents.least is None or contents.most is None:
        return None
    return max(abs(contents.least), abs(contents.most))


def _not_finite(
    factors: Factors, found: Found, shape: tuple[int, int], verification: Verification | None
) -> str:
    """How much of C is not finite, and why."""
    size = math.prod(shape)
    kinds = [
        f"{count} {name}" for count, name in ((found.c.nan, "NaN"), (found.c.infinite, "infinite")) if count
    ]
    text = f"{found.c.not_finite / size:.2%} of C's {size} elements are not finite ({', '.join(kinds)})"
    causes = []
    if verification is not None:
        causes = [
            f"{role}, {name_of(array)}, holds NaN or infinity in {count} of its {total} {lines}"
            for role, array, lines, count, total in (
                ("A", factors.a, "rows", verification.special_rows, shape[0]),
                ("B", factors.b, "columns", verification.special_columns, shape[1]),
            )
            if count
        ]
    for role, array, contents in (("A", factors.a, found.a), ("B", factors.b, found.b)):
        masks = masks_of(array)
        if contents.masked and masks is not None and _overflows(masks, factors.dtype):
            causes.append(f"products of what stands for missing numbers in {role} ({masks.names}) overflow")
    if causes:
        return f"{text}: {' and '.join(causes)}"
    if verification is not None:
        return f"{text}, though A and B hold neither NaN nor infinity: sums overflow {factors.dtype}"
    return f"{text}; with a check, which was not asked for, the run would say which of A and B they come from"


def _overflows(masks: Masks, dtype: np.dtype) -> bool:
    """Whether two of such numbers multiplied are too large for a type."""
    largest = max((abs(value) for value in masks.values), default=0.0)
    with np.errstate(over="ignore"):
        return bool(float(largest) * float(largest) > float(np.finfo(dtype).max))
