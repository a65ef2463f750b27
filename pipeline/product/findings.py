"""What is said of a product: before its first tile, and of what its run looks for in A, B and C while they pass.

The check proves that C is the product of the stored numbers. Whether these are the numbers that the user means, and
whether C holds anything but wrapped sums and NaN, it does not see.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path

import numpy as np
import zarr

from tilewright.kernels.gemm.base import compute_dtype
from tilewright.kernels.numbers import ceil_div, counted, format_nbytes
from tilewright.kernels.passes.contents import Contents, Sought, overflow_of
from tilewright.kernels.passes.masked import Masks
from tilewright.kernels.widths import largest_sum, largest_sum_of
from tilewright.pipeline import config
from tilewright.pipeline.check.verify import Verification
from tilewright.pipeline.errors import VerificationError
from tilewright.pipeline.plan.grid import triangle_count
from tilewright.pipeline.plan.inputs import WorkerFacts
from tilewright.pipeline.plan.product import MatmulPlan
from tilewright.pipeline.plan.sums import can_wrap_by_dtype, finished_wrap, found_wrap, planned_wrap
from tilewright.pipeline.plan.tiling import TILE_OPERATIONS
from tilewright.pipeline.plan.told import NOTHING_FOUND, Found
from tilewright.pipeline.plan.transform import missing_element, reach
from tilewright.pipeline.product.fusing import is_integral
from tilewright.pipeline.product.ledger import Past
from tilewright.pipeline.product.output import partial_path
from tilewright.pipeline.product.request import Factors
from tilewright.pipeline.store.arrays import Source, local_path, name_of
from tilewright.pipeline.store.attributes import (
    codecs_notice,
    is_unpacked,
    masked_caution,
    masks_of,
    packing_notice,
)
from tilewright.pipeline.store.region import Masked, whole_of


@dataclass(frozen=True)
class Findings:
    """What is said of a product whose tiles are computed."""

    wraps: str = "no"
    """As ``MatmulRun.wraps``."""
    masked: dict[str, int] = field(default_factory=dict)
    """As ``MatmulRun.masked``."""
    cautions: tuple[str, ...] = ()


def cautions(
    factors: Factors,
    out: Source | None,
    precision: str,
    facts: Sequence[WorkerFacts] = (),
    plan: MatmulPlan | None = None,
    finished: Collection[int] = (),
    *,
    replaced: bool = False,
) -> list[str]:
    """All that ``matmul`` warns of before its first tile: for it, and for whoever plans what it would do.

    What the arrays say is known before there are workers and a plan. So callers ask twice, first without these, and
    tell each sentence once (`Teller.warn_once`): nobody should wait for a cluster to hear of a packed array.

    out: where C goes, None where nobody said. precision: what was asked for. finished: the tiles of the plan that an
    earlier run finished, by index. replaced: what an earlier run left is still there, and goes before the first tile.
    """
    codes = [None if transform is None else transform.missing for transform in factors.fused.transforms]
    found = [
        packing_notice(name, array, missing=code)
        for name, array, code in zip(factors.names[:2], (factors.a, factors.b), codes, strict=True)
    ]
    found += map(codecs_notice, factors.names[:2], (factors.a, factors.b))
    if isinstance(out, zarr.Array):
        found += [packing_notice("output", out, written=True), codecs_notice("output", out)]
    found.append(_note_on_held(factors))
    path = local_path(out) if out is not None else None
    if facts and facts[0].device == "cpu" and precision != "full":
        found.append(
            f"precision={precision!r} is for tensor cores: on a CPU the product is computed, and checked, in full"
        )
    if path is not None and plan is not None:
        found.append(_note_on_space(path, plan, finished, replaced, factors.names.c))
    return [sentence for sentence in found if sentence]


def _note_on_held(factors: Factors) -> str | None:
    """One sentence where C is to be of a type of integers that does not hold all that its own did, and these are added
    to."""
    before = factors.before
    if before is None or factors.dtype.kind not in "iu" or np.can_cast(before.dtype, factors.dtype, "safe"):
        return None
    limits = np.iinfo(factors.dtype)
    return (
        f"output: {name_of(before)} holds {before.dtype}, and is added to as {factors.dtype}, as asked for: numbers"
        f" that are not from {limits.min} to {limits.max} wrap modulo 2^{limits.bits}"
    )


def _note_on_space(
    path: Path, plan: MatmulPlan, finished: Collection[int], replaced: bool, name: str
) -> str | None:
    """One sentence where a disk has less room than the tiles that are left would take up uncompressed."""
    left = plan.write_nbytes
    if finished:
        left -= sum(plan.tile_write_nbytes(tile) for tile in plan.tiles() if tile.index in finished)
    try:
        growing = partial_path(path)
        place = next(folder for folder in (growing, *growing.absolute().parents) if folder.is_dir())
        free = shutil.disk_usage(place).free
        if free < left and replaced:
            free += _stored_nbytes(growing)
    except (OSError, ValueError, StopIteration):  # no place to write to: whoever checks the output says so
        return None
    if free >= left:
        return None
    return (
        f"{format_nbytes(free)} are free on the disk of {growing}, and {name} takes {format_nbytes(left)} more"
        " uncompressed: unless it compresses to that, make room, or choose another path; tiles that are finished by"
        " then are kept"
    )


def _stored_nbytes(folder: Path) -> int:
    """Bytes that the files below a folder take up on its disk."""
    files = (os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)
    total = 0
    for file in files:
        with suppress(OSError):  # it went away while we looked
            total += os.lstat(file).st_blocks * 512
    return total


def wrap_note(factors: Factors) -> str | None:
    """One sentence where the dtypes of the factors and k allow sums that wrap in C's, before any element is read."""
    a, b = factors.operands
    told = planned_wrap(_what(factors), factors.sums, a, b, factors.k, finished=_is_finished(factors))
    if told is not None or not _may_leave(factors):
        return told
    products = f"sums of {counted(factors.k, 'product')} of {a} by {b}"
    return finished_wrap(factors.dtype, _reach(factors, largest_sum_of(a, b, factors.k)), products, a, b)


def few_tiles_note(plan: MatmulPlan, past: Past | None = None) -> str | None:
    """Why C has fewer tiles than were asked for; None where that is by default, or there are as many.

    past: what an earlier run left of it, if the plan goes on with that."""
    asked, count = config.get("tiles"), plan.tile_count
    if asked <= config.DEFAULT_TILES or 2 * count >= asked:  # "about" so many
        return None
    rows, columns = plan.c_unit
    units = ceil_div(plan.m, rows) * ceil_div(plan.n, columns)
    if plan.symmetric:
        units = triangle_count(ceil_div(plan.n, columns))
    if past is not None and plan.geometry == past.geometry:
        why = "an earlier run began with these (--no-resume begins anew)"
    elif plan.operations // TILE_OPERATIONS < asked:
        billions = f"{TILE_OPERATIONS / 1e9:.0f} billion"
        why = f"a tile of less than {billions} operations takes no time that a stop could cost"
    elif units < asked:
        why = (
            f"no tile is smaller than a stored piece of C, {rows} × {columns}; smaller chunks of A along its rows and"
            " of B along its columns give smaller ones"
        )
    else:
        why = "a grid of more tiles would leave workers idle for longer, or read much more"
    return f"tilewright.tiles asks for {asked} tiles, and C is cut into {count}: {why}"


def _may_leave(factors: Factors) -> bool:
    """Whether what becomes of the sums of integers, for some values that the factors' types hold, may be beyond C's."""
    epilogue = factors.fused.epilogue
    if epilogue is None or factors.dtype.kind not in "iu" or not is_integral(epilogue):
        return False
    ends = _reach(factors, largest_sum_of(*factors.operands, factors.k))
    return finished_wrap(factors.dtype, ends, "", *factors.operands) is not None


def _reach(factors: Factors, most: int) -> tuple[int, int]:
    """What sums of up to so much in absolute value may become; without what C held."""
    assert factors.fused.epilogue is not None
    signed = any(dtype.kind == "i" for dtype in factors.operands)
    return reach(factors.fused.epilogue, -most if signed else 0, most)


def _what(factors: Factors) -> str:
    """What of a product may wrap, for a message."""
    return "the sums, before their epilogue," if _is_finished(factors) else factors.names.c


def _is_finished(factors: Factors) -> bool:
    return factors.fused.epilogue is not None


def sought_in(factors: Factors) -> tuple[Sought, Sought, Sought]:
    """What to look for in A, in B and in C: the range of integers only where their sums might wrap."""
    extent = can_wrap_by_dtype(factors.sums, *factors.operands, factors.k) or _may_leave(factors)
    masks = masks_in(factors)
    return (
        Sought(extent, masks.get("A")),
        Sought(extent, masks.get("B")),
        Sought(not_finite=factors.dtype.kind in "fc"),
    )


def masks_in(factors: Factors) -> dict[str, Masks]:
    """For each factor, ``A`` or ``B``, the stored numbers that stand for missing ones and are multiplied as numbers:
    not those that its transform knows as missing."""
    found = {}
    for (role, array), transform in zip(factors.roles.items(), factors.fused.transforms, strict=True):
        masks = masks_of(array)
        if masks is None or is_unpacked(array):  # of which codes are missing, and stored ranges say nothing
            continue
        known = None
        if transform is not None:
            known = missing_element(transform, array.dtype.newbyteorder("="))
        whole = whole_of(array)
        missing = whole.codes if isinstance(whole, Masked) else ()
        values = tuple(
            value for value in masks.values if (known is None or value != known) and value not in missing
        )
        if values or masks.least is not None or masks.most is not None:
            found[role] = replace(masks, values=values)
    return found


def found_of(factors: Factors, pieces: Iterable[Found]) -> Found:
    """What was found of a product, by what was found of its tiles. At B, where that is A, nobody looked."""
    found = reduce(Found.merged, pieces, NOTHING_FOUND)
    return replace(found, b=found.a) if factors.symmetric else found


@contextmanager
def telling_of_wrapped_sums(factors: Factors, pieces: Callable[[], Iterable[Found]]) -> Iterator[None]:
    """A block that checks C, of floats of which the check knows no sums that wrapped, as it does of integers: where C
    fails it and they may have, that is said, and no memory suspected. pieces: as for `found_of`."""
    try:
        yield
    except VerificationError as error:
        told = _wraps(factors, found_of(factors, pieces())) if factors.dtype.kind in "fc" else None
        if told is None:
            raise
        raise VerificationError(f"{factors.names.c} failed its check: {told}") from error


def findings_of(factors: Factors, found: Found) -> Findings:
    """What was found in the factors, in words."""
    wraps = _wraps(factors, found)
    masks = masks_in(factors)
    masked = {role: {"A": found.a, "B": found.b}[role].masked for role in masks}
    names = factors.names
    told = {names.of(role): count for role, count in masked.items()}  # one array that is both is told of once
    of = {names.of(role): each for role, each in masks.items()}
    cautions = (wraps, masked_caution(told, of, names.c))
    return Findings("possible" if wraps else "no", masked, tuple(filter(None, cautions)))


def _wraps(factors: Factors, found: Found) -> str | None:
    """A sentence where sums may have wrapped."""
    most = [_largest(contents) for contents in (found.a, found.b)]
    if None in most:  # not looked at, since nothing that the types hold could wrap; or there is nothing in it
        return None
    one, other = (size or 0 for size in most)
    finished = _is_finished(factors)
    told = found_wrap(
        _what(factors), factors.sums, *factors.operands, factors.k, one, other, finished=finished
    )
    if told is not None or not _may_leave(factors):
        return told
    ends = _reach(factors, largest_sum(factors.k, one, other))
    what = f"sums of {counted(factors.k, 'product')} of numbers up to {one} by such up to {other}"
    return finished_wrap(factors.dtype, ends, what, *factors.operands)


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
    told = _Marked.of(factors, shape)
    if found.c.not_finite <= told.most and (verification is None or told.explains(verification)):
        return None
    (rows, columns), names = shape, factors.names
    size = math.prod(shape) if factors.band is None else factors.band.size(shape)
    held = f"{names.c}'s {size} elements" + ("" if factors.band is None else " in the band")
    share = _share(found.c.not_finite, size)
    counts = (found.c.nan, "NaN"), (found.c.infinite, "infinite")
    kinds = ", ".join(f"{count} {name}" for count, name in counts if count)
    if (pairwise := factors.fused.pairwise) is not None:
        down, across = pairwise.without
        if factors.band is None and found.c.not_finite <= down * columns + across * rows - down * across:
            return None  # of variables without any number, which are told of
        return (
            f"{share} of {held} are not finite ({kinds}): too few pairs are both there, a variable"
            f" is constant over them, or {names.either} holds NaN or infinity that is not known as missing"
        )
    text = f"{share} of {held} are not finite ({kinds})"
    if verification is None:
        hint = (
            f"with a check, which was not asked for, the run would say where in {names.both} they come from"
        )
        overflow = _overflow(factors, found) if found.c.infinite else ""
        return f"{text}; {overflow + '; ' if overflow else ''}{hint}"
    causes = _special(factors, verification, shape, told)
    special_rows, special_columns = verification.special_rows, verification.special_columns
    explained = special_rows * columns + special_columns * rows - special_rows * special_columns
    if found.c.not_finite > explained:
        causes.append(f"sums overflow {factors.dtype}")
        if overflow := _overflow(factors, found):
            causes[-1] += f" ({overflow})"
    return f"{text}: {' and '.join(causes)}"


@dataclass(frozen=True)
class _Marked:
    """Rows and columns of C in which an epilogue puts NaN, of which somebody has told: those of variables without
    values."""

    rows: int
    columns: int
    most: int
    """Elements of C in them, of a band those that are in it."""

    @classmethod
    def of(cls, factors: Factors, shape: tuple[int, int]) -> _Marked:
        epilogue = factors.fused.epilogue
        down, across = (
            np.zeros(side, bool) if offsets is None or offsets.dtype.kind in "iu" else np.isnan(offsets)
            for side, offsets in zip(
                shape,
                (None, None) if epilogue is None else (epilogue.row_offsets, epilogue.column_offsets),
                strict=True,
            )
        )
        if not (down.any() or across.any()):
            return cls(0, 0, 0)
        before, after = shape if factors.band is None else factors.band
        row = np.arange(shape[0])
        first, stop = np.clip(row - before, 0, shape[1]), np.clip(row + after + 1, 0, shape[1])
        others = np.concatenate([[0], np.cumsum(across)])  # of the columns before each
        most = np.where(down, stop - first, others[stop] - others[first])
        return cls(int(down.sum()), int(across.sum()), int(most.sum()))

    def explains(self, verification: Verification) -> bool:
        """Whether no other row or column holds what leaves no number in it."""
        return verification.special_rows <= self.rows and verification.special_columns <= self.columns


def _special(
    factors: Factors, verification: Verification, shape: tuple[int, int], marked: _Marked
) -> list[str]:
    """What of each factor holds NaN or infinity, as it is stored, and in how many lines the epilogue puts NaN."""
    told = []
    sides = (
        ("A", verification.special_rows, marked.rows, shape[0], ("rows", "columns")[factors.transposed[0]]),
        (
            "B",
            verification.special_columns,
            marked.columns,
            shape[1],
            ("columns", "rows")[factors.transposed[1]],
        ),
    )
    for (role, special, without, total, lines), dtype in zip(sides, factors.operands, strict=True):
        if role == "B" and factors.symmetric:
            continue
        if without:
            told.append(f"{without} {lines} of {factors.names.of(role)} have no value (constant='nan')")
        count = special - without
        if count <= 0:
            continue
        large = ""
        if dtype.kind in "fc" and np.finfo(dtype).max > np.finfo(compute_dtype(factors.dtype)).max:
            large = f", or numbers too large for {compute_dtype(factors.dtype)},"
        name = f"{factors.names.of(role)}, {name_of(factors.roles[role])},"
        told.append(f"{name} holds NaN or infinity{large} in {count} of its {total} {lines}")
    return told


def _overflow(factors: Factors, found: Found) -> str:
    """A clause about numbers that stand for missing ones and whose products may be too large for C; empty where there
    are none."""
    roles = []
    every = masks_in(factors)
    for role, contents in zip(factors.roles, (found.a, found.b), strict=True):
        masks = every.get(role)
        if contents.masked and masks is not None and _may_overflow(masks, factors):
            roles.append(f"{factors.names.of(role)} ({masks.names})")
    told = " and ".join(dict.fromkeys(roles))
    return f"as those of what stands for missing numbers in {told} may" if roles else ""


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
