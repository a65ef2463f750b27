"""The largest eigenvalues of a Hermitian matrix that is known only by its products with thin blocks.

A block Krylov method: the space that a random block and its images under the matrix span, and in it the best pairs, by
Rayleigh and Ritz. For as many products it is more accurate than subspace iteration, by far where the spectrum decays
slowly (Musco and Musco, "Randomized Block Krylov Methods for Stronger and Faster Approximate Singular Value
Decomposition", 2015). Where the basis has as many columns as it may have, it is replaced by its leading Ritz vectors
and goes on from there (the thick restart of Wu and Simon, 2000, for blocks), which loses little. The images of all
basis vectors are kept, so that residuals are those of the products themselves and not of a recurrence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tilewright.kernels.tolerance import unit_roundoff

Product = Callable[[np.ndarray], np.ndarray]
"""The matrix times a block: n × b, as float64 or complex128."""

FLOOR = 4.0
"""Times the unit roundoff of the products and the largest eigenvalue: a residual below that is rounding. Those of
products in single precision came down to 0.5 to 2 times that."""
INNER_FLOOR = 64.0
"""The same of what is done in double precision here; those came down to 10 to 30 times that."""

ASYMMETRY = 4.0
"""Times the unit roundoff of the products, the root of the length of their sums and the length of a product: how far
y·Ax may be from Ay·x for rounding alone. Rounding errors of a sum of n terms grow as the root of n."""

DEPENDENT = 1e-10
"""A direction whose length beside the largest is below this is taken for one that the basis has already."""


class AsymmetricError(Exception):
    """y·Ax is not Ay·x: the matrix is not Hermitian."""

    def __init__(self, apart: float, allowed: float) -> None:
        super().__init__(apart, allowed)
        self.apart, self.allowed = apart, allowed
        """How far both are apart, and how far for rounding they may be, relative to the products."""


class NotFiniteError(Exception):
    """A product holds NaN or infinities."""


@dataclass(frozen=True)
class Aim:
    """What is looked for, and how far one may go for it."""

    count: int
    """How many pairs, from the largest eigenvalue down; at most the matrix's side."""
    block: int
    """Columns of a block: ``count`` or more; at most the matrix's side."""
    tolerance: float
    """A pair is good where ‖A v - λ v‖ is at most this times its |λ|, or within the rounding of the products."""
    most_products: int
    most_columns: int
    """The basis's, at least 3 blocks."""
    seed: int
    dtype: np.dtype
    """Of the products: float32, float64 or complex."""
    terms: int
    """The length of their sums."""
    operand_roundoff: float = 0.0
    """The relative error of their factors, where a precision narrows these."""

    @property
    def roundoff(self) -> float:
        """The relative error of a sum of few terms."""
        return unit_roundoff(self.dtype) + self.operand_roundoff

    @property
    def rounding(self) -> float:
        """How far two ways to find one number may be apart for rounding alone, beside the largest of the products."""
        return ASYMMETRY * (unit_roundoff(self.dtype) * float(np.sqrt(self.terms)) + self.operand_roundoff)


@dataclass(frozen=True)
class Pairs:
    """Eigenvalues and vectors, as far as they are known."""

    values: np.ndarray
    """k, descending; float64."""
    vectors: np.ndarray
    """n × k, orthonormal; float64 or complex128."""
    residuals: np.ndarray
    """‖A v - λ v‖ of each."""
    products: int
    """With blocks, that were computed."""
    floor: float
    """Residuals up to this are rounding."""
    tolerance: float

    @property
    def good(self) -> np.ndarray:
        """Which of them are as good as was asked for."""
        allowed: np.ndarray = np.maximum(self.tolerance * np.abs(self.values), self.floor)
        return self.residuals <= allowed

    @property
    def relative(self) -> np.ndarray:
        """The residuals, each beside its eigenvalue, or the floor where that is more."""
        least = self.floor / self.tolerance
        sizes = np.maximum(np.abs(self.values), least)
        return np.divide(self.residuals, sizes, out=np.zeros(len(sizes)), where=sizes > 0)


def leading_pairs(
    product: Product, side: int, aim: Aim, tell: Callable[[Pairs], None] = lambda found: None
) -> Pairs:
    """The leading eigenpairs of a Hermitian matrix of ``side`` rows.

    They are as good as was asked for, or the most products were made: `Pairs.good` says which. The sign, or the phase,
    of each vector is such that its largest component is positive. The same seed gives the same start; the rest depends
    on the products alone. ``tell`` is called after each product.

    Raises
    ------
    AsymmetricError
        Products show that the matrix is not Hermitian.
    NotFiniteError
        Products are not finite.
    """
    draw = np.random.default_rng(aim.seed)
    space = _Space.empty(side, aim)
    new = orthonormal(_drawn(draw, (side, aim.block), space.basis.dtype), space.basis[:, :0])
    products = 0
    while True:
        image = product(new)
        products += 1
        if not np.isfinite(image).all():
            raise NotFiniteError
        space.grow(new, image, aim)
        found, kept = space.ritz(aim, products)
        tell(found)
        if found.good.all() or products == aim.most_products or space.width == side:
            return found
        # The part of the last images that the basis lacks is where it grows; found before it is cut down.
        new = orthonormal(image, space.held)
        if not new.shape[1]:  # the basis holds its own images, and yet not all pairs
            room = min(aim.block, side - space.width)
            new = orthonormal(_drawn(draw, (side, room), space.basis.dtype), space.held)
        if space.width + new.shape[1] > space.basis.shape[1]:
            space.cut_down(kept)


def _drawn(draw: np.random.Generator, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    found: np.ndarray = draw.standard_normal(shape).astype(dtype)
    if dtype.kind == "c":
        found += 1j * draw.standard_normal(shape)
    return found


def orthonormal(block: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """An orthonormal basis of what a block has beside an orthonormal basis: n × b or, where it has less, narrower.

    Projected twice, which is enough (Giraud, Langou and Rozložník, 2005).
    """
    lengths = np.linalg.norm(block, axis=0)
    block = np.divide(block, lengths, out=np.zeros_like(block), where=lengths > 0)
    for _ in range(2):
        block = block - basis @ (basis.conj().T @ block)
    directions, sizes, _ = np.linalg.svd(block, full_matrices=False)
    room = block.shape[0] - basis.shape[1]
    new: np.ndarray = directions[:, sizes > DEPENDENT][:, :room]
    for _ in range(2):
        new = np.linalg.qr(new - basis @ (basis.conj().T @ new))[0]
    return new


@dataclass
class _Space:
    """A basis, its images, and what is known of both. Of the arrays, the first ``width`` columns are in use."""

    basis: np.ndarray
    """n × d, orthonormal, by columns."""
    images: np.ndarray
    """n × d: the matrix times the basis."""
    inner: np.ndarray
    """d × d: the basis by its images."""
    width: int = 0

    @classmethod
    def empty(cls, side: int, aim: Aim) -> _Space:
        wide = np.dtype(np.complex128 if aim.dtype.kind == "c" else np.float64)
        most = min(side, aim.most_columns)
        shape = side, most
        return cls(
            np.empty(shape, wide, order="F"), np.empty(shape, wide, order="F"), np.zeros((most, most), wide)
        )

    @property
    def held(self) -> np.ndarray:
        """The basis."""
        return self.basis[:, : self.width]

    def grow(self, new: np.ndarray, image: np.ndarray, aim: Aim) -> None:
        """Take in a block and its image. Raises AsymmetricError where they differ from the others by more than
        rounding."""
        old, wide = slice(0, self.width), slice(0, self.width + new.shape[1])
        added = slice(old.stop, wide.stop)
        self.basis[:, added], self.images[:, added] = new, image
        self.width = wide.stop
        down = self.held.conj().T @ image
        across = new.conj().T @ self.images[:, wide]
        _check_symmetric(down, across.conj().T, self.images[:, wide], aim)
        mean = (down + across.conj().T) / 2
        self.inner[wide, added] = mean
        self.inner[added, wide] = mean.conj().T

    def ritz(self, aim: Aim, products: int) -> tuple[Pairs, np.ndarray]:
        """The best pairs in the space, and the coordinates of those that are kept where it is cut down."""
        values, coordinates = np.linalg.eigh(self.inner[: self.width, : self.width])
        values, coordinates = values[::-1], coordinates[:, ::-1]
        leading, best = coordinates[:, : aim.count], values[: aim.count]
        vectors = self.held @ leading
        apart = self.images[:, : self.width] @ leading - vectors * best
        rounding = FLOOR * aim.roundoff + INNER_FLOOR * unit_roundoff(np.float64)
        floor = rounding * float(np.abs(values).max(initial=0.0))
        found = Pairs(
            best,
            vectors * phases(vectors),
            np.linalg.norm(apart, axis=0),
            products,
            floor,
            aim.tolerance,
        )
        return found, coordinates[:, : max(aim.block, aim.most_columns - 2 * aim.block)]

    def cut_down(self, kept: np.ndarray) -> None:
        """Go on with the vectors of these coordinates: d × fewer, orthonormal."""
        wide, fewer = slice(0, self.width), slice(0, kept.shape[1])
        self.basis[:, fewer] = self.basis[:, wide] @ kept
        self.images[:, fewer] = self.images[:, wide] @ kept
        self.inner[fewer, fewer] = kept.conj().T @ self.inner[wide, wide] @ kept
        self.width = fewer.stop


def _check_symmetric(one: np.ndarray, other: np.ndarray, images: np.ndarray, aim: Aim) -> None:
    """Raise AsymmetricError where y·Ax and Ay·x differ by more than rounding, for x of the last block and y of the
    basis.

    one, other: both, d × b. images: those of the basis, of which the longest says how large rounding errors may be. For
    the first block, which is random, all are about as long, and none is as long as the matrix could make it.
    """
    length = float(np.linalg.norm(images, axis=0).max(initial=0.0))
    apart = float(np.abs(one - other).max(initial=0.0)) / length if length else 0.0
    if apart > aim.rounding:
        raise AsymmetricError(apart, aim.rounding)


def phases(vectors: np.ndarray) -> np.ndarray:
    """What each column is multiplied by so that its largest component is real and positive: of those that are equally
    large, to six digits, the first.

    >>> phases(np.array([[0.6, -0.6], [-0.8, 0.8]])).tolist()
    [-1.0, 1.0]
    """
    if not vectors.size:
        return np.ones(vectors.shape[1], vectors.dtype)
    sizes = np.abs(vectors)
    places = np.argmax(sizes >= (1 - 1e-6) * sizes.max(0), axis=0)
    largest = vectors[places, np.arange(vectors.shape[1])]
    length = np.abs(largest)
    found: np.ndarray = np.divide(largest.conj(), length, out=np.ones_like(largest), where=length > 0)
    return found
