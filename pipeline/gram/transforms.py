"""From options and statistics to what is made of the factors' numbers and of their sums.

There are two forms. Integers that nothing but means and variances is wanted of stay integers, so that their products
are exact, and on a GPU those of tensor cores; the sums are centred and scaled afterwards, in double precision. All else
is transformed where the panels of the factors lie: centred, scaled, weighted, and 0 where an element is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from tilewright.kernels.gemm import check
from tilewright.kernels.gemm.base import NUMPY_ELEMENTS
from tilewright.kernels.numbers import counted
from tilewright.kernels.passes.moments import Moments
from tilewright.pipeline.errors import DTypeError, OptionError
from tilewright.pipeline.gram.options import ADD_UP_ALLELES, ALLELES, SIDES, Constant, Matrices
from tilewright.pipeline.gram.places import element_told, line_told
from tilewright.pipeline.gram.statistics import Wanted, likely_code, say_missing
from tilewright.pipeline.plan.pairs import Pairwise
from tilewright.pipeline.plan.transform import Counted, Epilogue, Transform
from tilewright.pipeline.store.arrays import name_of
from tilewright.pipeline.store.attributes import dimension_names
from tilewright.pipeline.store.region import (
    Flattened,
    StoredArray,
    is_beside_mask,
    numbers_dtype,
    unmasked,
)

EXACT = 2**53
"""Integers up to this are exact in double precision."""

MOST_LOST = 2**20
"""The share of a sum of squares that centring it afterwards may take away: of the 53 bits of double precision 20 are
lost then, and 33 are left, nine more than single precision has."""

NARROW_NBYTES = 2
"""Integers of so many bytes are exact in single precision too."""

SINGLE_COUNTS = 2**24
"""Single precision counts one by one up to here."""

ZERO, NAN = "constant='zero' (--constant zero)", "constant='nan' (--constant nan)"
"""How it is asked for what lines without any number, or without variance, count as, in words."""

LEAST_SPREAD = 2.0**-480
"""Of numbers that are less apart the squares underflow, or have few digits, in double precision."""

SHOWN = 5
"""Lines that a message names."""

Statistics = Mapping[str, Moments]
"""The moments of each line, by side."""
Form = Literal["plain", "exact", "transformed"]


@dataclass(frozen=True)
class Made:
    """What a product is asked for besides its factors."""

    transforms: tuple[Transform | None, Transform | None] = (None, None)
    epilogue: Epilogue | None = None
    pairwise: Pairwise | None = None


def form_of(matrices: Matrices) -> Form:
    """How the product is formed, as far as that can be said before its numbers are known: ``plain`` where nothing is
    made of them, ``exact`` where the sums of integers are finished, ``transformed`` where the factors are."""
    integers = all(array.dtype.kind in "iu" for array in matrices.arrays.values())
    treatments = matrices.treatments.values()
    if matrices.weights is None and not any(
        each.centered or each.offsets or each.scaled or each.factors or each.missing is not None
        for each in treatments
    ):
        if any(array.dtype.kind == "c" for array in matrices.arrays.values()):
            return "transformed"
        if matrices.divide is None:
            return "plain"
        return "exact" if integers else "transformed"
    summed = matrices.summed
    for each in treatments:
        scaled = {*each.factors, *filter(None, [each.scaled])}
        if each.offsets or each.missing is not None or summed in scaled:
            return "transformed"
        if scaled and summed in each.centered:
            return "transformed"  # what is added to the sums would have to be scaled too
    return "exact" if integers and matrices.weights is None else "transformed"


def result_dtype(matrices: Matrices, form: Form, asked: Any) -> Any:
    """C's dtype, for `product.request`: what was asked for, or None, where the product is plain; float64 for exact
    sums; else the matrices' own, single precision at least, for integers of more than 16 bits double precision.

    Raises DTypeError where what is asked for holds neither floats nor complex numbers, or none that the matrices cast
    to.
    """
    if form == "plain":
        return asked
    dtypes = [numbers_dtype(array) for array in matrices.arrays.values()]
    if matrices.counts_pairs:
        return _pairs_dtype(matrices, dtypes, asked)
    return _transformed_dtype(matrices, form, dtypes, asked)


def _pairs_dtype(matrices: Matrices, dtypes: list[np.dtype], asked: Any) -> np.dtype:
    """The same where pairs are counted, in the dtype that the products are summed in: float64 where there are too many
    for float32."""
    found = _transformed_dtype(matrices, "transformed", dtypes, asked)
    if found.kind == "c":
        raise DTypeError(
            f"dtype {found}: pairs that are both there are formed of real numbers alone (missing_as='pairwise',"
            " divide='pairs'); take the real and the imaginary parts as matrices of their own"
        )
    if matrices.length > SINGLE_COUNTS and found.itemsize < np.dtype(np.float64).itemsize:
        if asked is not None:
            raise DTypeError(
                f"dtype={found}: up to {matrices.length} pairs are counted, and float32 counts to {SINGLE_COUNTS}; ask"
                " for float64"
            )
        return np.dtype(np.float64)
    return found


def _transformed_dtype(matrices: Matrices, form: Form, dtypes: list[np.dtype], asked: Any) -> np.dtype:
    if asked is not None:
        names = tuple(f"{role}: {name_of(array)}" for role, array in matrices.arrays.items())
        wanted = check.element(asked, NUMPY_ELEMENTS)
        if wanted.kind not in "fc":
            raise DTypeError(
                f"dtype={wanted}: numbers that are centred, scaled, weighted or divided are no integers; ask for a"
                " float or complex dtype, or leave dtype out"
            )
        return check.result_dtype(dtypes[0], dtypes[-1], asked, (names[0], names[-1]), NUMPY_ELEMENTS)
    if form == "exact":
        return np.dtype(np.float64)
    common = np.result_type(*dtypes)
    if common.kind not in "iu":
        return np.result_type(common, np.float32)
    narrow = all(dtype.itemsize <= NARROW_NBYTES for dtype in dtypes)
    return np.dtype(np.float32 if narrow else np.float64)


def wanted_of(matrices: Matrices, role: str, form: Form, constant: Constant = "error") -> Wanted | None:
    """What the first pass has to find of a matrix; None where it needs none. constant: as in `options.GramRequest`."""
    treatment, array = matrices.treatments[role], matrices.arrays[role]
    sides = {*treatment.centered, *filter(None, [treatment.scaled])}
    if form == "exact" and array.dtype.itemsize > NARROW_NBYTES:
        sides.add(matrices.of)  # for the largest number, which decides whether the sums are exact
    if constant == "nan" and treatment.missing is not None:
        sides.add(matrices.of)  # for those without any number
    if not sides:
        return None
    weighted = matrices.of if matrices.weights is not None else None
    return Wanted(tuple(sorted(sides)), treatment.missing, weighted, matrices.weights)


def check_lines(matrices: Matrices, role: str, found: Statistics, constant: Constant) -> None:
    """Raise OptionError for lines that have no mean, or no variance, where that is needed; it names the first few. Also
    for NaN and infinities that would leave no number in C, or that stand beside a number for missing ones.

    Lines of which a mask leaves nothing, such as places on land, need none: they count as 0. So do all lines without
    any number where constant ones do. Where those are to be NaN, that is said of variables alone: a line that is summed
    over would leave no number in all of C.

    constant: as in `options.GramRequest`.
    """
    treatment, name = matrices.treatments[role], name_of(matrices.arrays[role])
    sides = sorted({*treatment.centered, *filter(None, [treatment.scaled])})
    for side in sides:
        bad = np.flatnonzero(~np.isfinite(found[side].mean))
        # Else a variable leaves NaN in its own row and column of C alone, as NumPy has it.
        everywhere = side == matrices.summed or len(bad) == len(found[side].mean)
        if len(bad) and (everywhere or isinstance(treatment.missing, int | float)):
            raise not_finite(matrices, role, bad, side)
    for side in sides:
        if not (matrices.length if side == matrices.of else _variables(matrices, role)):
            continue
        empty = np.flatnonzero(found[side].count == 0)
        if len(empty) and not _passes(side, matrices, constant) and not is_beside_mask(matrices.arrays[role]):
            what = "present and has a weight" if matrices.weights is not None else "present"
            raise OptionError(
                f"missing={treatment.missing_given!r}: {_named(empty, side)} of {name}"
                f" {'has' if len(empty) == 1 else 'have'} no element that is {what}, and so no mean; leave them out of"
                f" {role}, or {_of_empty(matrices, side)}"
            )
    if treatment.scaled is None:
        return
    moments = found[treatment.scaled]
    far = np.flatnonzero(np.isinf(moments.second))
    if len(far):
        raise OptionError(
            f"scale: the squares of {_named(far, treatment.scaled)} of {name} exceed double precision; multiply {role}"
            " by a small number first, or give factors"
        )
    near = np.flatnonzero((moments.spread > 0) & (moments.spread < LEAST_SPREAD))
    if len(near):
        raise OptionError(
            f"scale: the squares of {_named(near, treatment.scaled)} of {name} are below double precision; multiply"
            f" {role} by a large number first, or give factors"
        )
    alike = np.flatnonzero(moments.constant)
    if len(alike) and not _passes(treatment.scaled, matrices, constant):
        raise OptionError(
            f"scale: {_named(alike, treatment.scaled)} of {name} {'is' if len(alike) == 1 else 'are'} constant, to"
            f" double precision, and cannot have unit variance; leave them out of {role}, or have them"
            f" {_counting(matrices, treatment.scaled)}"
        )


def _passes(side: str, matrices: Matrices, constant: Constant) -> bool:
    """Whether lines of a side may be constant, or without any number."""
    return constant == "zero" or (constant == "nan" and side == matrices.of)


def _counting(matrices: Matrices, side: str) -> str:
    """What such lines may count as, and how that is asked for, in words."""
    return f"count as 0 with {ZERO}" + (f", or as NaN with {NAN}" if side == matrices.of else "")


def _of_empty(matrices: Matrices, side: str) -> str:
    """How lines without any number are let pass, and what becomes of them, in words."""
    asked = f"with {ZERO}"
    if not matrices.counts_pairs:
        return f"have them {_counting(matrices, side)}"
    if side == matrices.of:
        return f"keep them {asked}: what has no pairs is NaN, and so are their rows and columns of the result"
    return f"keep them {asked}: no pair has a part in them"


def not_finite(matrices: Matrices, role: str, bad: np.ndarray, side: str) -> OptionError:
    """What to raise for lines of a side whose mean, or whose variance, is not finite."""
    treatment, array = matrices.treatments[role], matrices.arrays[role]
    missing = treatment.missing
    remedy = (
        "say what stands for a missing number (missing='nan', --missing nan, where it is NaN; missing=math.inf,"
        " --missing inf, where it is infinity), or leave them out; NaN and infinities together need a mask"
    )
    if is_beside_mask(array):
        remedy = "the mask may leave them out, or leave out the whole of what they are in"
    elif missing == "nan":
        remedy = (
            f"NaN is missing here (missing={treatment.missing_given!r}), so there are infinities or too large numbers:"
            " store NaN in their place, give a mask that leaves them out, or divide the numbers if they are right"
        )
    elif isinstance(missing, int | float):
        remedy = (
            f"missing={missing:g} names no NaN: give missing='nan' (--missing nan), or where both stand for missing"
            " numbers a mask, beside which NaN is missing too"
        )
    first = int(bad[0])
    return OptionError(
        f"{role}: {name_of(array)} holds NaN, infinities, or numbers whose squares exceed double precision, first in"
        f" {line_told(array, side, first)}{element_told(array, side, first, missing)}"
        f" ({counted(len(bad), side[:-1])} in all); {remedy}"
    )


def _named(lines: np.ndarray, side: str) -> str:
    """Some lines, in words: how many, and the first few."""
    first = ", ".join(map(str, lines[:SHOWN]))
    more = ", ..." if len(lines) > SHOWN else ""
    return f"{counted(len(lines), side[:-1])} ({first}{more})"


def with_divisor(matrices: Matrices, found: Mapping[str, Statistics]) -> Matrices:
    """The same once the divisor is known that follows from means: 2 Σ p (1 - p) of dosages of 0 to 2, whose means are
    2p. Raises OptionError for means that are none of dosages, or where nothing varies."""
    if matrices.divide != ALLELES:
        return matrices
    moments = found["X"][matrices.summed]
    there = np.flatnonzero(moments.count > 0)
    frequencies = means_of(moments)[there] / 2
    bad = there[~((frequencies >= 0) & (frequencies <= 1))]
    name = name_of(matrices.arrays["X"])
    if len(bad):
        raise OptionError(
            f"divide={ALLELES!r}: {_named(bad, matrices.summed)} of {name} {'has' if len(bad) == 1 else 'have'} means"
            f" that are not from 0 to 2, as dosages have; {_of_dosages(matrices, found['X'])}"
        )
    outside = there[(moments.least[there] < 0) | (moments.most[there] > 2)]
    if len(outside):
        raise OptionError(
            f"divide={ALLELES!r}: {_named(outside, matrices.summed)} of {name} {'has' if len(outside) == 1 else 'have'}"
            f" numbers that are not from 0 to 2, as dosages are; {_of_dosages(matrices, found['X'])}"
        )
    for side in SIDES:
        axes = _axes_of(matrices.arrays["X"], side)
        if len(axes) > 1 and moments.most.max(initial=0) <= 1:
            what = "are summed over" if side == matrices.summed else f"the {side} are made of"
            raise OptionError(
                f"divide={ALLELES!r} is of dosages from 0 to 2, and no number of {name} exceeds 1: along the axes"
                f" {' and '.join(axes)}, which {what}, lie the alleles of each dosage. {ADD_UP_ALLELES}"
            )
    divisor = float(2 * math.fsum(frequencies * (1 - frequencies)))
    if not divisor > 0:
        raise OptionError(
            f"divide={ALLELES!r}: no dosage of {name} varies, so that there is nothing to divide by"
        )
    return replace(matrices, divide=divisor)


def haplotypes_told(matrices: Matrices, found: Mapping[str, Statistics]) -> str | None:
    """A sentence about numbers of 0 and 1 alone whose means are taken for 2p, as `with_divisor` does; None where there
    are others. They may be dosages of rare alleles."""
    if matrices.divide != ALLELES or found["X"][matrices.summed].most.max(initial=0) > 1:
        return None
    return (
        f"divide={ALLELES!r} takes the means of the {matrices.summed} of X for 2p, as of dosages from 0 to 2, and no"
        f" number of {name_of(matrices.arrays['X'])} exceeds 1: where they are the alleles of haplotypes, whose means"
        " are p, the divisor is the sum of p(1 - p); give that number (divide, --divide)"
    )


def _of_dosages(matrices: Matrices, found: Statistics) -> str:
    """What to do about numbers that are no dosages: the code of a missing one that nobody named is what most are."""
    array, treatment = matrices.arrays["X"], matrices.treatments["X"]
    missing = treatment.missing
    code = likely_code(array, missing, found.values())
    if code is not None:
        return (
            f"{code} is the only number below 0: where it stands for a missing one,"
            f" {say_missing(array, missing, code)}; else give a number"
        )
    if treatment.missing_given is None:
        return "say what stands for a missing one (missing, --missing), or give a number"
    moments = found[matrices.summed]
    there = moments.count > 0
    return (
        f"beside what is missing (missing={treatment.missing_given!r}) they go from {moments.least[there].min():g} to"
        f" {moments.most[there].max():g}: mask what is no dosage, or give a number"
    )


def _axes_of(array: StoredArray, side: str) -> tuple[str, ...]:
    """The names, or numbers, of the axes that a side of a matrix was flattened from; none of a matrix as it is."""
    flat = unmasked(array)
    if not isinstance(flat, Flattened):
        return ()
    names = dimension_names(flat.array)
    return tuple(names[axis] or str(axis) for axis in (flat.rows if side == "rows" else flat.columns))


def stays_exact(matrices: Matrices, found: Mapping[str, Statistics]) -> bool:
    """Whether the sums of integers are exact in double precision, and centring them afterwards leaves enough digits.

    found: by role; nothing of a matrix whose dtype alone decides.
    """
    largest = []
    for role, array in matrices.arrays.items():
        info = np.iinfo(array.dtype)
        bound = max(-int(info.min), int(info.max))
        if matrices.of in found.get(role, {}):
            bound = int(found[role][matrices.of].largest)
        largest.append(bound)
    if matrices.length * largest[0] * largest[-1] > EXACT:
        return False
    for role, array in matrices.arrays.items():
        if array.dtype.itemsize <= NARROW_NBYTES:
            continue  # whose transformed numbers would have fewer digits
        for side in matrices.treatments[role].centered:
            moments = found[role][side]
            varying = (moments.count > 0) & (moments.second > 0)
            squares = moments.count[varying] * moments.mean[varying] ** 2
            if (squares > MOST_LOST * moments.second[varying]).any():
                return False
    return True


def made_exact(
    matrices: Matrices,
    found: Mapping[str, Statistics],
    thin: Callable[[str, np.ndarray], np.ndarray],
) -> Made:
    """The epilogue by which exact sums of integers become those of centred and scaled ones.

    With n terms in a sum, means m of the variables, and means r of the lines of the summed side, whose own mean is g:
    centring the variables takes n m mᵀ from XᵀX. Centring the other side takes t_i + t_j from its elements and adds
    r·r, where t = Xᵀ r is found in one more pass over X. Of both, t_i is Xᵀ r - n m g, and r·r - n g² is added.

    thin: finds the sums of the elements of a matrix's variables, each times a vector's, by its role.
    """
    of, summed, n = matrices.of, matrices.summed, matrices.length
    roles = tuple(matrices.arrays)
    alpha = 1.0 if matrices.divisor is None else 1 / matrices.divisor
    epilogue = Epilogue(alpha=alpha)
    centered = matrices.treatments[roles[0]].centered  # the same of both
    left, right = roles[0], roles[-1]
    across = {left: right, right: left}
    of_variables = {role: means_of(found[role][of]) for role in roles if of in centered}
    if of_variables:
        epilogue = replace(
            epilogue,
            row_pairs=of_variables[left],
            column_pairs=of_variables[right],
            pair_weight=float(n),
        )
    if summed in centered:
        lines = {role: means_of(found[role][summed]) for role in roles}
        sums = {role: thin(role, lines[across[role]]) for role in roles}
        corner = math.fsum(lines[left] * lines[right])
        if of_variables:
            grand = {role: _mean(lines[role]) for role in roles}
            sums = {role: sums[role] - n * of_variables[role] * grand[across[role]] for role in roles}
            corner -= n * grand[left] * grand[right]
        epilogue = replace(
            epilogue,
            row_offsets=-alpha * sums[left],
            column_offsets=-alpha * sums[right],
            offset=alpha * corner,
        )
    factors = {role: _factors(matrices, role, found.get(role, {})).get(of) for role in roles}
    epilogue = replace(
        epilogue,
        row_factors=factors[left],
        column_factors=factors[right],
        diagonal=_diagonal(matrices, found),
    )
    return Made(epilogue=epilogue)


def made_transformed(
    matrices: Matrices, found: Mapping[str, Statistics], dtype: np.dtype, conjugated: str
) -> Made:
    """The transforms of both factors, for a C of this dtype, and the division of their sums.

    conjugated: as in `options.GramRequest`.
    """
    divisor = matrices.divisor
    diagonal, epilogue = _diagonal(matrices, found), None
    if diagonal is not None or divisor not in (None, 1):
        epilogue = Epilogue(alpha=1 / (divisor or 1), diagonal=diagonal)
    formed = np.result_type(dtype, np.float32)
    each = {role: _transform(matrices, role, found.get(role, {}), formed) for role in matrices.arrays}
    if not any(each.values()) and all(array.dtype.kind in "iu" for array in matrices.arrays.values()):
        each = dict.fromkeys(each, Transform(formed))  # sums of integers might wrap
    roles = tuple(matrices.arrays)
    left, right = each[roles[0]], each[roles[-1]]
    if formed.kind == "c":  # C is known to be Hermitian where both are alike but for that
        left, right = (
            replace(one or Transform(formed), conjugate=side == conjugated)
            for one, side in ((left, "left"), (right, "right"))
        )
    return Made((left, right), epilogue)


def made_of_pairs(
    matrices: Matrices, found: Mapping[str, Statistics], dtype: np.dtype, constant: Constant
) -> Made:
    """The transforms of both factors, for a C of this dtype, and what is formed of the pairs that are both there.

    Variables whose means are those over pairs are shifted by about their means, integers by whole numbers, so that sums
    of small ones stay exact. Those whose deviations are, too, are scaled by powers of two, which round nothing, to
    about 1, so that their squares stay in range.

    constant: as in `options.GramRequest`.
    """
    formed = np.result_type(dtype, np.float32)
    over_pairs = matrices.pairwise and matrices.of in matrices.treatments["X"].centered
    of_each = {}
    for role, array in matrices.arrays.items():
        statistics = found.get(role, {})
        given: dict[str, np.ndarray] = {}
        scaled = matrices.treatments[role].scaled == matrices.of
        if over_pairs:
            means = means_of(statistics[matrices.of])
            given["offsets"] = np.rint(means) if array.dtype.kind in "iu" else means
            if scaled:
                given["factors"] = _powers_near(statistics[matrices.of])
        of_each[role] = _transform(matrices, role, statistics, formed, given) or Transform(formed)
    roles = tuple(of_each)
    empty = [int(empty_variables(matrices, found.get(role, {})).sum()) for role in (roles[0], roles[-1])]
    pairwise = Pairwise(
        centered=over_pairs,
        scaled=over_pairs and matrices.treatments["X"].scaled == matrices.of,
        ddof=matrices.ddof if matrices.pairwise else 0,
        constant_is_zero=constant == "zero",
        own=len(roles) == 1,
        without=(empty[0], empty[1]),
    )
    return Made((of_each[roles[0]], of_each[roles[-1]]), pairwise=pairwise)


def empty_variables(matrices: Matrices, found: Statistics) -> np.ndarray:
    """Whether each variable of a matrix has no number; none where nobody looked."""
    moments = found.get(matrices.of)
    return np.zeros(0, bool) if moments is None else moments.count == 0


def flat_variables(matrices: Matrices, role: str, found: Statistics) -> np.ndarray:
    """Whether each variable of a matrix is constant and to be divided by its deviation; none where none is."""
    if matrices.treatments[role].scaled != matrices.of:
        return np.zeros(0, bool)
    return found[matrices.of].constant


def lines_notice(
    matrices: Matrices, role: str, found: Statistics, constant: Constant, place: str = ""
) -> str | None:
    """A sentence about variables without any number, and those without variance that are scaled: how many there are,
    and what stands in the result for them. None where there are none. What is constant over pairs C says by itself.

    place: their place in the result, in words; else their rows, or columns, or both.
    """
    kinds = [(empty_variables(matrices, found), "holds no number", "hold no number")]
    if not matrices.counts_pairs:
        kinds.append((flat_variables(matrices, role, found), "is constant", "are constant"))
    told = [
        f"{_named(np.flatnonzero(lines), matrices.of)} {of_one if lines.sum() == 1 else of_more}"
        for lines, of_one, of_more in kinds
        if lines.any()
    ]
    if not told:
        return None
    lines = "rows and columns" if len(matrices.arrays) == 1 else "rows" if role == "X" else "columns"
    place = place or f"their {lines} of the result are"
    stands = "NaN" if constant == "nan" or matrices.counts_pairs else f"0, and would be NaN with {NAN}"
    return f"{name_of(matrices.arrays[role])}: {' and '.join(told)}; {place} {stands}"


def with_nan(made: Made, matrices: Matrices, found: Mapping[str, Statistics]) -> Made:
    """The same, and NaN in the rows and columns of C of variables without any number, or without variance that are
    scaled. What is added to their sums is NaN, which needs nothing of a device that centring sums does not."""
    if matrices.counts_pairs:
        return made
    roles = tuple(matrices.arrays)
    lines = {role: without_values(matrices, role, found.get(role, {})) for role in roles}
    if not any(one.any() for one in lines.values()):
        return made
    epilogue = made.epilogue or Epilogue()
    left, right = lines[roles[0]], lines[roles[-1]]
    diagonal = epilogue.diagonal
    return replace(
        made,
        epilogue=replace(
            epilogue,
            row_offsets=_nan_where(left, epilogue.row_offsets),
            column_offsets=_nan_where(right, epilogue.column_offsets),
            diagonal=None if diagonal is None else _nan_where(left, diagonal),
        ),
    )


def without_values(matrices: Matrices, role: str, found: Statistics) -> np.ndarray:
    """Whether each variable of a matrix has no number, or no variance to be divided by."""
    lines = np.zeros(_variables(matrices, role), bool)
    for some in (empty_variables(matrices, found), flat_variables(matrices, role, found)):
        if len(some):
            lines |= some
    return lines


def _nan_where(lines: np.ndarray, vector: np.ndarray | None) -> np.ndarray:
    return np.where(lines, np.nan, np.zeros(len(lines)) if vector is None else vector)


def _powers_near(moments: Moments) -> np.ndarray:
    """For each line the power of two nearest to the reciprocal of its standard deviation; 1 for constant lines."""
    with np.errstate(all="ignore"):
        size = np.sqrt(moments.second / np.maximum(moments.count, 1))
        varying = ~moments.constant & (size > 0) & np.isfinite(size)
        return np.asarray(np.exp2(-np.rint(np.log2(np.where(varying, size, 1.0)))))


def _transform(
    matrices: Matrices,
    role: str,
    found: Statistics,
    dtype: np.dtype,
    of_variables: Mapping[str, np.ndarray] | None = None,
) -> Transform | None:
    """None where nothing is made of the matrix's numbers. of_variables: ``offsets`` and ``factors`` of the variables in
    place of their means and deviations."""
    treatment, of, summed = matrices.treatments[role], matrices.of, matrices.summed
    offsets = dict(treatment.offsets)
    for side in treatment.centered:
        weighted = side == of and matrices.weights is not None
        offsets[side] = means_of(found[side], weighted=weighted)
    if len(treatment.centered) == 2:
        # Each line of the summed side has its mean of all numbers taken once: with the variables' means it goes twice.
        moments = found[of]
        whole = moments.weight.sum()
        if whole > 0:
            offsets[summed] = offsets[summed] - (moments.mean * moments.weight).sum() / whole
    factors = _factors(matrices, role, found)
    for kind, vector in (of_variables or {}).items():
        {"offsets": offsets, "factors": factors}[kind][of] = vector
    if matrices.weights is not None:
        roots = np.sqrt(matrices.weights)
        factors[summed] = roots * factors[summed] if summed in factors else roots
    if not offsets and not factors and treatment.missing is None:
        return None
    cast: dict[str, Any] = {}
    for kind, vectors in (("offsets", offsets), ("factors", factors)):
        for side, vector in vectors.items():
            with np.errstate(over="ignore", under="ignore"):
                held = vector.astype(dtype)
            bad = np.flatnonzero(np.isinf(held) & np.isfinite(vector))
            if len(bad):
                raise OptionError(
                    f"{'scale' if kind == 'factors' else 'center'}: the {kind[:-1]} of {_named(bad, side)} of"
                    f" {name_of(matrices.arrays[role])} exceeds {dtype}; ask for a wider dtype (dtype='float64')"
                )
            cast[f"{side[:-1]}_{kind}"] = held
    return Transform(dtype, missing=treatment.missing, counted=_counted(matrices.arrays[role], found), **cast)


def _counted(array: StoredArray, found: Statistics) -> Counted | None:
    """What the first pass has found of all integers of a matrix; None of other numbers, or where there was none."""
    moments = next(iter(found.values()), None)
    if moments is None or array.dtype.kind not in "iu" or moments.least.dtype.kind not in "iu":
        return None
    if not len(moments.count):
        return None
    there = int(moments.count.sum())
    return Counted(math.prod(array.shape) - there, int(moments.least.min()), int(moments.most.max()))


def _factors(matrices: Matrices, role: str, found: Statistics) -> dict[str, np.ndarray]:
    """By side: the numbers that are given, or the reciprocals of standard deviations; 0 for constant lines."""
    treatment = matrices.treatments[role]
    factors = dict(treatment.factors)
    if (side := treatment.scaled) is not None:
        moments = found[side]
        degrees: Any
        if matrices.counts_pairs:  # as many as are there, as for the products
            degrees = np.maximum(moments.count - (matrices.ddof if matrices.pairwise else 0), 0)
        elif side == matrices.of:
            degrees = matrices.degrees(matrices.ddof)
        else:
            degrees = float(_variables(matrices, role) - matrices.ddof)
        varying = ~moments.constant & (moments.count > 0)
        ratio = np.divide(degrees, moments.second, out=np.zeros(len(varying)), where=varying)
        factors[side] = np.sqrt(ratio)
    return factors


def _diagonal(matrices: Matrices, found: Mapping[str, Statistics]) -> np.ndarray | None:
    """What the diagonal of a correlation matrix holds, to the last bit: 1, but 0 for constant variables and those of
    which a mask leaves nothing, and NaN for those that hold it. None of any other matrix."""
    treatment = matrices.treatments["X"]
    of = matrices.of
    if (
        len(matrices.arrays) == 2
        or treatment.scaled != of
        or treatment.centered != (of,)
        or treatment.factors
    ):
        return None
    if not isinstance(matrices.divide, str):
        return None
    moments = found["X"][of]
    known = np.where(moments.constant | (moments.count == 0), 0.0, 1.0)
    return np.where(np.isfinite(moments.second), known, np.nan)


def means_of(moments: Moments, *, weighted: bool = False) -> np.ndarray:
    """The mean of each line, of integers from their exact sums unless their elements have weights; 0 of no elements."""
    if weighted or moments.least.dtype.kind not in "iu":
        return moments.mean
    if moments.high.any():
        pairs = zip(moments.exact_sums, moments.count.tolist(), strict=True)
        return np.array([total / count if count else 0.0 for total, count in pairs])
    return np.divide(moments.low, moments.count, out=np.zeros(len(moments.low)), where=moments.count > 0)


def _variables(matrices: Matrices, role: str) -> int:
    """How many variables a matrix has."""
    rows, columns = matrices.arrays[role].shape
    return int(columns if matrices.of == "columns" else rows)


def _mean(values: np.ndarray) -> float:
    return math.fsum(values) / len(values) if len(values) else 0.0
