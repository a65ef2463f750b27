"""Digits that centring loses where means are large beside deviations.

A mean is rounded to the dtype of the transform before it is subtracted. The numbers it is subtracted from are as well,
where that dtype does not hold those that are stored, or where something else was subtracted first. What a mean lost is
known, and taken from the sums; what the numbers lost is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tilewright.kernels.passes.moments import HALF_BITS, Moments
from tilewright.kernels.tolerance import unit_roundoff
from tilewright.pipeline.errors import OptionError
from tilewright.pipeline.gram.options import Matrices, Treatment, axis_of, terms
from tilewright.pipeline.gram.transforms import Made, Statistics, means_of
from tilewright.pipeline.plan.transform import Epilogue, Transform
from tilewright.pipeline.store.arrays import name_of

MOST_WRONG = 2.0**-10
"""The share of a variable's sum of squares that centring may get wrong without a word: 0.1 %."""

SHOWING = 8.0
"""Times the rounding of a variable's deviations: what its mean loses shows in these from there on."""


def with_rest_of_means(made: Made, matrices: Matrices, found: Mapping[str, Statistics]) -> Made:
    """The same, and what the means of variables lose where they are rounded, if a mean is so large beside its
    deviations that this shows: with n lines, or weights of sum n, and rests d of the means, n d dᵀ is taken from the
    sums.

    Where numbers are missing, or both sides are centred, it is no such product; nor is what numbers lose that the
    transform's dtype does not hold. Raises OptionError as `rests_of_means`.
    """
    transforms = {
        role: transform
        for role, transform in zip(matrices.arrays, made.transforms, strict=False)
        if transform is not None and matrices.treatments[role].centered
    }
    if len(transforms) < len(matrices.arrays):
        return made
    rests = rests_of_means(
        matrices,
        transforms,
        found,
        complete=made.pairwise is None
        and all(
            transform.dtype.kind != "c" and is_complete(matrices, role, found[role])
            for role, transform in transforms.items()
        ),
        known=made.epilogue is not None and made.epilogue.diagonal is not None,
        over_pairs=made.pairwise is not None and made.pairwise.centered,
    )
    if not rests:
        return made
    roles = tuple(rests)
    epilogue = replace(
        made.epilogue or Epilogue(),
        row_pairs=rests[roles[0]],
        column_pairs=rests[roles[-1]],
        pair_weight=terms(matrices.length, matrices.weights),
    )
    return replace(made, epilogue=epilogue)


def rests_of_means(
    matrices: Matrices,
    transforms: Mapping[str, Transform],
    found: Mapping[str, Statistics],
    *,
    complete: bool,
    known: bool = False,
    over_pairs: bool = False,
    linear: bool = False,
) -> dict[str, np.ndarray]:
    """What the means of variables are more than the offsets of these transforms, times their factors, by role; nothing
    where that does not show beside the deviations, or cannot be taken from what is made of the matrices.

    complete: whether it can, as `is_complete` says. known: whether variables have unit variance, and the diagonal is
    known to be 1. over_pairs: whether the means of each pair are subtracted afterwards. linear: whether it
    shows in the deviations themselves, and not only in sums of their products. Raises OptionError where more
    is lost that cannot be taken than `MOST_WRONG` of the squares of a variable, or of its products, or, of those of
    which the diagonal is known, more than rounding of sums explains: the check would find that the others are not those
    of such variables.
    """
    of, n = matrices.of, matrices.length
    rests, shows = {}, False
    for role, transform in transforms.items():
        treatment, rounding = matrices.treatments[role], unit_roundoff(transform.dtype)
        for side in treatment.centered:
            moments, offsets = found[role][side], getattr(transform, f"{side[:-1]}_offsets")
            weighted = side == of and matrices.weights is not None
            means = means_of(moments, weighted=weighted)
            varying = np.isfinite(moments.second) & ~moments.constant & (moments.count > 0)
            rest = np.zeros_like(means)
            if not over_pairs and (side == of or len(treatment.centered) == 1):
                taken = (
                    offsets if means.dtype.kind == "c" else offsets.real
                )  # of real numbers in a complex dtype
                exact = means - taken.astype(means.dtype) + _lost_in(moments, means, weighted)
                rest[varying] = exact[varying]
            of_rest = _divided(moments.weight * np.abs(rest) ** 2, moments.second, varying)
            # Those that are there with those of another line that lacks some no longer add up to 0.
            lacking = 1 - moments.count / max(1, matrices.arrays[role].shape[1 - axis_of(side)])
            of_products = 2 * np.sqrt(of_rest) * lacking
            if complete:
                shows |= bool((of_rest > (rounding if not linear else (SHOWING * rounding) ** 2)).any())
                factors = getattr(transform, f"{side[:-1]}_factors")
                rests[role] = rest if factors is None else rest * factors
                of_rest *= rounding * np.sqrt(n)  # as the sums of what is taken from them are rounded
                of_products[:] = 0
            deviations = np.sqrt(_divided(moments.second, moments.weight, varying))
            sizes = np.abs(_rounded(moments, means, offsets, treatment, side, transform.dtype))
            apart = _divided(rounding * sizes, deviations, varying)
            lost = of_rest + apart * (2 + apart)
            excess = np.maximum(lost / _most(n, transform.dtype, known), (lost + of_products) / MOST_WRONG)
            line = int(np.argmax(excess)) if len(excess) else 0
            if len(excess) and excess[line] > 1:
                wide = _rounded(moments, means, offsets, treatment, side, np.dtype(np.float64))[line] != 0
                raise OptionError(
                    f"{'scale' if treatment.scaled else 'center'}: means of {name_of(matrices.arrays[role])} are so"
                    f" large beside the deviations that, in {transform.dtype}, squares of these would be wrong by up to"
                    f" {lost[line] + of_products[line]:.1g} of them, most in {side[:-1]} {line} of mean"
                    f" {means[line]:.9g} and deviation {deviations[line]:.3g};"
                    f" {_remedy(abs(means[line]) / deviations[line], n, transform, known, complete, wide)}"
                )
    return rests if shows else {}


def is_complete(matrices: Matrices, role: str, found: Statistics) -> bool:
    """Whether the sums are those of centred variables, each of all lines or of none, so that what means lost is a
    product: variables of no lines are 0."""
    treatment, of, summed = matrices.treatments[role], matrices.of, matrices.summed
    if treatment.centered != (of,) or treatment.offsets or summed in treatment.factors:
        return False
    lines = matrices.length if matrices.weights is None else int(np.count_nonzero(matrices.weights))
    count = found[of].count
    return bool(((count == lines) | (count == 0)).all())


def _divided(one: np.ndarray, other: np.ndarray, where: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.divide(one, other, out=np.zeros(len(one)), where=where)


def _lost_in(moments: Moments, means: np.ndarray, weighted: bool) -> np.ndarray:
    """What the means are more than these numbers of double precision, `means_of` the same moments, say."""
    if weighted or moments.least.dtype.kind not in "iu":
        return moments.rest
    count = np.maximum(moments.count, 1)
    # Of sums that 64 bits hold; whole numbers near the means times the counts are then held, too.
    short = np.abs(means) * count < 2.0**62
    whole = np.where(short, means, 0.0).astype(np.int64)
    total = np.where(short, (moments.high << HALF_BITS) + moments.low, 0)
    lost: np.ndarray = np.where(short, (total - whole * count) / count - (means - whole), 0.0)
    sums = moments.exact_sums if not short.all() else []
    for line in np.flatnonzero(~short & (moments.weight * means**2 > moments.second)):
        mean = int(means[line])
        lost[line] = (sums[line] - mean * int(count[line])) / int(count[line]) - (means[line] - mean)
    return lost


def _rounded(
    moments: Moments,
    means: np.ndarray,
    offsets: np.ndarray,
    treatment: Treatment,
    side: str,
    dtype: np.dtype,
) -> np.ndarray:
    """How large the numbers of each line are when they are rounded to this dtype before its mean is subtracted; 0 where
    they are not."""
    stored = moments.least.dtype
    if stored.kind in "iu":
        largest = np.maximum(
            np.abs(moments.least.astype(np.float64)), np.abs(moments.most.astype(np.float64))
        )
        held = largest <= 1 / unit_roundoff(dtype)
    else:
        held = np.full(len(means), _part_nbytes(stored) <= _part_nbytes(dtype))
    # Those of rows are subtracted first, which rounds what is about as large as the columns' offsets.
    after_others = side == "columns" and (len(treatment.centered) == 2 or bool(treatment.offsets))
    return np.where(held, offsets if after_others else 0.0, means)


def _part_nbytes(dtype: np.dtype) -> int:
    return dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize


def _most(n: int, dtype: np.dtype, known: bool) -> float:
    """The share of its sum of squares that a variable may lose."""
    return min(MOST_WRONG, 2 * n * unit_roundoff(dtype)) if known else MOST_WRONG


def _remedy(ratio: float, n: int, transform: Transform, known: bool, complete: bool, rounded: bool) -> str:
    """What to do, in words, where a mean is so many times its deviation. complete: whether what means lose can be taken
    from the sums. rounded: whether numbers are rounded in double precision, too."""
    wide = np.result_type(transform.dtype, np.float64)
    apart = unit_roundoff(wide) * ratio
    lost = apart * (2 + apart) if rounded else 0.0 if complete else apart**2
    if wide != transform.dtype and lost <= _most(n, wide, known):
        return f"ask for a wider dtype (dtype={wide.name!r}, --dtype {wide.name})"
    return "no wider dtype helps: subtract a number near the mean before the numbers are stored"
