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

from tilewright.kernels.gemm.base import compute_dtype
from tilewright.kernels.passes.contents import Contents, Sought, overflow_of
from tilewright.kernels.passes.masked import Masks
from tilewright.pipeline.plan.sums import can_wrap_by_dtype, found_wrap
from tilewright.pipeline.plan.told import Found
from tilewright.pipeline.product.verify import Verification
from tilewright.pipeline.store.arrays import name_of
from tilewright.pipeline.store.attributes import masked_caution, masks_of


@dataclass(frozen=True)
class Factors:
    """A product's factors, and the type of its result."""

    a: zarr.Array[Any]
    b: zarr.Array[Any]
    dtype: np.dtype
    """C's."""
    k: int
    transposed: tuple[bool, bool] = (False, False)
    """Whether A, and B, is multiplied by its transpose."""
    symmetric: bool = False
    """Whether B is A, by its transpose."""

    @property
    def roles(self) -> dict[str, zarr.Array[Any]]:
        return {"A": self.a, "B": self.b}

    @property
    def dtypes(self) -> tuple[np.dtype, np.dtype]:
        """Of A and of B."""
        return self.a.dtype.newbyteorder("="), self.b.dtype.newbyteorder("=")


@dataclass(frozen=True)
class Findings:
    """What is said of a product whose tiles are computed."""

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


def findings_of(factors: Factors, found: Found) -> Findings:
    """What was found in the factors, in words."""
    wraps = _wraps(factors, found)
    masks = {role: masks for role, array in factors.roles.items() if (masks := masks_of(array)) is not None}
    masked = {role: {"A": found.a, "B": found.b}[role].masked for role in masks}
    cautions = (wraps, masked_caution(masked, masks, "C"))
    return Findings("possible" if wraps else "no", masked, tuple(filter(None, cautions)))


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


def not_finite_caution(
    factors: Factors, found: Found, shape: tuple[int, int], verification: Verification | None
) -> str | None:
    """One sentence about elements of C that are not finite, and why they are not; None where all are.

    shape: C's. verification: of the product, None where nobody asked for it: then nobody knows which factors hold NaN
    or infinity.
    """
    if not found.c.not_finite:
        return None
    (rows, columns), size = shape, math.prod(shape)
    counts = (found.c.nan, "NaN"), (found.c.infinite, "infinite")
    kinds = ", ".join(f"{count} {name}" for count, name in counts if count)
    text = f"{_share(found.c.not_finite, size)} of C's {size} elements are not finite ({kinds})"
    if verification is None:
        hint = "with a check, which was not asked for, the run would say which of A and B they come from"
        overflow = _overflow(factors, found) if found.c.infinite else ""
        return f"{text}; {overflow + '; ' if overflow else ''}{hint}"
    causes = _special(factors, verification, shape)
    special_rows, special_columns = verification.special_rows, verification.special_columns
    explained = special_rows * columns + special_columns * rows - special_rows * special_columns
    if found.c.not_finite > explained:
        causes.append(f"sums overflow {factors.dtype}")
        if overflow := _overflow(factors, found):
            causes[-1] += f" ({overflow})"
    return f"{text}: {' and '.join(causes)}"


def _special(factors: Factors, verification: Verification, shape: tuple[int, int]) -> list[str]:
    """What of each factor holds NaN or infinity, as it is stored."""
    told = []
    sides = (
        ("A", verification.special_rows, shape[0], ("rows", "columns")[factors.transposed[0]]),
        ("B", verification.special_columns, shape[1], ("columns", "rows")[factors.transposed[1]]),
    )
    for (role, count, total, lines), dtype in zip(sides, factors.dtypes, strict=True):
        if not count or (role == "B" and factors.symmetric):
            continue
        large = ""
        if dtype.kind in "fc" and np.finfo(dtype).max > np.finfo(compute_dtype(factors.dtype)).max:
            large = f", or numbers too large for {compute_dtype(factors.dtype)},"
        name = name_of(factors.roles[role])
        told.append(f"{role}, {name}, holds NaN or infinity{large} in {count} of its {total} {lines}")
    return told


def _overflow(factors: Factors, found: Found) -> str:
    """A clause about numbers that stand for missing ones and whose products may be too large for C; empty where there
    are none."""
    roles = []
    for (role, array), contents in zip(factors.roles.items(), (found.a, found.b), strict=True):
        masks = masks_of(array)
        if contents.masked and masks is not None and _may_overflow(masks, factors):
            roles.append(f"{role} ({masks.names})")
    return f"as those of what stands for missing numbers in {' and '.join(roles)} may" if roles else ""


def _may_overflow(masks: Masks, factors: Factors) -> bool:
    """Whether k products of two such numbers may be too large for C. Of numbers beyond a valid range nobody knows how
    large they are."""
    if masks.least is not None or masks.most is not None:
        return True
    limit = min(overflow_of(factors.dtype), float(np.finfo(factors.dtype).max))
    return factors.k * masks.largest**2 > limit


def _share(count: int, size: int) -> str:
    """A share of a whole in per cent."""
    share = f"{count / size:.2%}"
    return "less than 0.01%" if share == "0.00%" else share
