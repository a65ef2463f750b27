"""What EOFs are found of: X centred, scaled and weighted, and what its means lose where they are rounded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tilewright.kernels.passes.moments import Moments
from tilewright.pipeline.errors import OptionError
from tilewright.pipeline.gram.digits import is_complete, rests_of_means
from tilewright.pipeline.gram.options import Matrices, terms
from tilewright.pipeline.gram.transforms import made_transformed
from tilewright.pipeline.plan.transform import Epilogue, Transform
from tilewright.pipeline.store.arrays import name_of
from tilewright.pipeline.store.region import is_beside_mask


@dataclass(frozen=True)
class Anomalies:
    """What is decomposed: X centred, scaled and weighted."""

    transform: Transform
    """Of X as it is stored, with the roots of weights of both sides."""
    total: float
    """The variance of all variables together."""
    degrees: float
    """What sums of squares are divided by."""
    rest: np.ndarray | None = None
    """What the offsets of variables lack of their means, times the variables' factors, where that shows beside the
    deviations: then what the transform makes of X, T, is Y + r restᵀ of the anomalies Y, with roots r of the samples'
    weights, to which the columns of Y are orthogonal. What is asked for of Y follows from that of T."""
    roots: np.ndarray | None = None
    """r, one a sample; None for ones."""
    weight: float = 0.0
    """rᵀ r."""

    @classmethod
    def of(
        cls,
        matrices: Matrices,
        moments: Mapping[str, Moments],
        weights: np.ndarray | None,
        dtype: np.dtype,
    ) -> Anomalies:
        """Of the moments of the variables, and their weights."""
        transform = made_transformed(matrices, {"X": moments}, dtype, "left").transforms[1] or Transform(
            dtype
        )
        if weights is not None:
            side = matrices.of[:-1]
            roots = np.sqrt(weights)
            factors = getattr(transform, f"{side}_factors")
            roots = roots if factors is None else factors * roots
            transform = replace(transform, **{f"{side}_factors": roots.astype(dtype)})
        found = moments[matrices.of]
        squares = found.second
        if not matrices.treatments["X"].centered:
            squares = squares + found.weight * np.abs(found.mean) ** 2
        factors = getattr(transform, f"{matrices.of[:-1]}_factors")
        if factors is not None:
            squares = squares * np.abs(factors).astype(np.float64) ** 2
        degrees = matrices.degrees(1)
        rest = None
        if matrices.treatments["X"].centered:
            complete = is_complete(matrices, "X", moments)
            rest = rests_of_means(
                matrices, {"X": transform}, {"X": moments}, complete=complete, linear=True
            ).get("X")
        roots = None if matrices.weights is None else np.sqrt(matrices.weights)
        weight = terms(matrices.length, matrices.weights)
        return cls(transform, math.fsum(squares) / degrees, degrees, rest, roots, weight)

    def unweighted(self, matrices: Matrices) -> Transform:
        """The same without weights of the samples."""
        if matrices.summed == "rows":
            return replace(self.transform, row_factors=None)
        return replace(self.transform, column_factors=None)

    def of_samples(self, block: np.ndarray) -> np.ndarray:
        """A block of samples × p without what it has of r: T of its part that is left is Y of the block, from either
        side."""
        if self.rest is None:
            return block
        if self.roots is None:
            return block - block.sum(0) / self.weight
        return block - np.outer(self.roots, self.roots @ block / self.weight)

    def of_variables(self, image: np.ndarray, block: np.ndarray | None = None) -> np.ndarray:
        """Yᴴ Y times a block of variables × p, from Tᴴ T times it; without a block Yᴴ Y itself."""
        if self.rest is None:
            return image
        part = self.rest if block is None else self.rest @ block
        return image - self.weight * np.outer(self.rest.conj(), part)

    def of_pairs_of_samples(self, image: np.ndarray) -> np.ndarray:
        """Y Yᴴ from T Tᴴ."""
        return self.of_samples(self.of_samples(image).conj().T).conj().T

    def epilogue(self, vectors: np.ndarray) -> Epilogue | None:
        """What makes Y times these vectors of T times them, without weights of the samples."""
        return None if self.rest is None else Epilogue(column_offsets=-(self.rest @ vectors))

    def vectors(self, matrices: Matrices) -> dict[str, np.ndarray]:
        """What was subtracted from each variable, and what it was multiplied by then, where it was."""
        side = matrices.of[:-1]
        found = {
            "mean": getattr(self.transform, f"{side}_offsets"),
            "factor": getattr(self.transform, f"{side}_factors"),
        }
        return {name: vector for name, vector in found.items() if vector is not None}


def check_varies(anomalies: Anomalies, matrices: Matrices, moments: Moments) -> None:
    """Raise OptionError where nothing varies: any vectors would do for EOFs of that, and mean nothing."""
    # Of one number throughout, the mean may be rounded, so that squares are left.
    varies = not matrices.treatments["X"].centered or bool(
        (moments.least != moments.most)[moments.count > 0].any()
    )
    x, kind = matrices.arrays["X"], np.finfo(anomalies.transform.dtype)
    if varies and moments.spread.any() and anomalies.total < kind.tiny:
        raise OptionError(
            f"X: the squares of what varies in {name_of(x)}, {anomalies.total:.3g}, are below what {kind.dtype} tells"
            " from 0: multiply X by a large number first, or ask for a wider dtype (dtype='float64', --dtype float64)"
        )
    if anomalies.total > 0 and varies:
        return
    there, all_ = int(moments.count.sum()), math.prod(x.shape)
    if is_beside_mask(x):
        why = (
            f" the mask leaves {there} of {all_} numbers, and it is to be True where one is missing: if it says where"
            " they are there, invert it (~mask)"
        )
    elif matrices.treatments["X"].missing is not None:
        why = f" {there} of {all_} numbers are not missing: give another number for those that are (missing, --missing)"
    elif matrices.treatments["X"].centered:
        why = (
            " each variable is one number throughout: give other data, or center=False (--no-center) for EOFs of what"
            " is there"
        )
    else:
        why = " all numbers are 0: give other data"
    raise OptionError(
        f"X: nothing varies in {name_of(x)}: the total variance of its {len(moments.mean)} variables is 0, so that"
        f" there are no EOFs;{why}"
    )
