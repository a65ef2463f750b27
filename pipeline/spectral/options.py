"""What may be asked of eigenpairs and EOFs: every option checked by itself, then against the matrix it is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from tilewright.kernels.arguments import as_count, check_choice, check_flag, shown
from tilewright.kernels.choices import PRECISIONS
from tilewright.kernels.numbers import counted
from tilewright.kernels.tolerance import operand_roundoff
from tilewright.pipeline import config
from tilewright.pipeline.errors import DTypeError, OptionError, ShapeError
from tilewright.pipeline.gram.options import (
    Constant,
    GramRequest,
    Matrices,
    Side,
    Values,
    axis_of,
    open_matrices,
)
from tilewright.pipeline.gram.weights import stored_values, weights_of_axes
from tilewright.pipeline.options import RunRequest
from tilewright.pipeline.plan.transform import TRANSFORMED, Transform
from tilewright.pipeline.spectral.krylov import Aim
from tilewright.pipeline.store.arrays import Input, Source, name_of
from tilewright.pipeline.store.labels.alignment import Align
from tilewright.pipeline.store.region import Flattened, StoredArray, base_of, unmasked
from tilewright.pipeline.store.sources.parts import open_matrix

OVERSAMPLING = 10
"""The least number of columns of a block beyond those that are looked for. With ten more than ten, slowly decaying
spectra took an eighth fewer products than with five more, which hardly cost less each: reading takes the time."""

BLOCKS = 8
"""Of a basis, before it is cut down. More save few passes, also where the spectrum is flat."""
LEAST_BLOCKS = 3
BASIS_NBYTES = 2**31
"""What a basis and its images may take in the client's memory, where 3 blocks fit into that."""

MOST_SEED = 2**63 - 1

Method: TypeAlias = Literal["auto", "krylov", "gram"]
METHODS: tuple[Method, ...] = get_args(Method)
GRAM_SIDE = 2048
"""The longest shorter side of X for which ``auto`` forms the covariance matrix of that side. Its half product takes a
CPU about as long as the dozen passes with thin blocks that it replaces, and reads X once."""


@dataclass(frozen=True)
class Search(RunRequest):
    """What is looked for, and by which products: common to eigenpairs and EOFs."""

    k: Any = 10
    tol: Any = 1e-4
    passes: Any = 100
    """The most, over the matrix."""
    seed: Any = 0
    dtype: str | np.dtype | None = None
    scratch: Any = None
    """A local folder for thin matrices, which all workers see."""

    def checked(self) -> Search:
        """The same, once its options are found good."""
        self.check_place()
        check_choice("precision", self.precision, PRECISIONS)
        if self.scratch is not None and not config.path_text(self.scratch):
            raise OptionError(f"scratch={shown(self.scratch)} is no path; give a folder that all workers see")
        return replace(
            self,
            k=_count("k", self.k, 1, "how many are looked for, 1 or more"),
            tol=_tolerance(self.tol),
            passes=_count("passes", self.passes, 1, "1 or more"),
            seed=_count("seed", self.seed, 0, f"a whole number from 0 to {MOST_SEED}", MOST_SEED),
        )

    def aim(self, side: int, terms: int, products: int, dtype: np.dtype) -> Aim:
        """For a matrix of ``side`` rows whose products have sums of ``terms``, by so many products at most."""
        block = min(side, self.k + max(self.k, OVERSAMPLING))
        column_nbytes = 2 * side * (16 if dtype.kind == "c" else 8)
        fitting = BASIS_NBYTES // (column_nbytes * block) if side else BLOCKS
        blocks = max(LEAST_BLOCKS, min(BLOCKS, fitting))
        narrowed = operand_roundoff(self.precision, dtype) if dtype in (np.float32, np.float64) else 0.0
        return Aim(self.k, block, self.tol, products, blocks * block, self.seed, dtype, terms, narrowed)


@dataclass(frozen=True)
class EofRequest:
    """EOFs as they are asked for, by the parameters of ``tilewright.eofs``, which says what each may be."""

    x: Input
    out: Source | None
    search: Search
    of: Side = "columns"
    sum_over: Any = None
    center: Any = True
    scale: Any = False
    align: Align = "labels"
    """Of masks and weights."""
    constant: Constant = "error"
    missing: Any = None
    missing_given: Any = None
    """As in `gram.options.GramRequest`."""
    weights: Values | Mapping[str | int, Values] | None = None
    """Of the variables."""
    sample_weights: Values | None = None
    method: str = "auto"
    resume: bool = True
    verify: bool = True
    overwrite: bool = False

    def checked(self) -> EofRequest:
        check_choice("method", self.method, METHODS)
        return replace(
            self,
            search=self.search.checked(),
            center=check_flag("center", self.center),
            scale=check_flag("scale", self.scale),
            resume=check_flag("resume", self.resume),
            verify=check_flag("verify", self.verify),
            overwrite=check_flag("overwrite", self.overwrite),
        )

    def matrices(self) -> Matrices:
        """X opened, with what is made of its numbers but for the weights of the variables.

        Raises as `gram.options.open_matrices`; OptionError also where X has fewer rows or columns than EOFs are looked
        for, or a single sample.
        """
        gram = GramRequest(
            self.x,
            of=self.of,
            sum_over=self.sum_over,
            center=self.center,
            scale=self.scale,
            align=self.align,
            constant=self.constant,
            missing=self.missing,
            missing_given=self.missing_given,
            weights=self.sample_weights,
            weights_called="sample_weights",
            divide="n-1",
            divisor_is_asked=False,
        ).checked()
        matrices = open_matrices(gram)
        x = matrices.arrays["X"]
        least = min(x.shape)
        if not least:
            raise ShapeError(
                f"X ({name_of(x)}) has {x.shape[0]} rows and {x.shape[1]} columns; at least 2 samples and 1 variable"
                " are needed"
            )
        if self.search.k > least:
            raise OptionError(
                f"k={self.search.k}: {name_of(x)} has {x.shape[0]} rows and {x.shape[1]} columns, so that it has"
                f" {counted(least, 'EOF')} at most; ask for no more (k, -k)"
            )
        return matrices


def variable_weights(
    given: Values | Mapping[str | int, Values], x: StoredArray, of: str, align: Align = "labels"
) -> np.ndarray:
    """One for each variable, 0 or more; those that are given by axis are multiplied. Raises ShapeError or
    OptionError."""
    name, variables = name_of(x), int(x.shape[axis_of(of)])
    view, axis = unmasked(x), axis_of(of)
    axes = (view.rows, view.columns)[axis] if isinstance(view, Flattened) else (axis,)
    along = weights_of_axes(given, base_of(x), axes, "of the variables", align)
    found = stored_values("weights", along)
    if len(found) != variables:
        raise ShapeError(
            f"weights: found {len(found)} numbers; {name} needs {variables}, one for each variable (sample_weights are"
            " of the side that is summed over)"
        )
    if found.dtype.kind != "f" or not (np.isfinite(found) & (found >= 0)).all():
        raise OptionError(f"weights: found {_first_bad(found)}; weights must be finite numbers of 0 or more")
    if not found.any():
        raise OptionError("weights: all are 0, so that nothing is left of X; give some that are more than 0")
    return found


def _first_bad(found: np.ndarray) -> str:
    if found.dtype.kind != "f":
        return "complex numbers"
    place = int(np.flatnonzero(~(np.isfinite(found) & (found >= 0)))[0])
    return f"{found[place]} as number {place}"


def open_hermitian(source: Input, k: int) -> StoredArray:
    """Open a square matrix. Raises StoreError, DTypeError, ShapeError, or OptionError where it has no k rows."""
    array = open_matrix(source, "G")
    rows, columns = array.shape
    if rows != columns:
        raise ShapeError(
            f"G: {name_of(array)} has {rows} rows and {columns} columns; only a square matrix has eigenvalues (of any"
            " other, tilewright.eofs finds singular vectors)"
        )
    if k > rows:
        raise OptionError(
            f"k={k}: {name_of(array)} has {counted(rows, 'row')}, and as many eigenvalues; ask for no more (k, -k)"
        )
    return array


def product_dtype(stored: np.dtype, asked: Any, role: str, name: str) -> np.dtype:
    """What a matrix is multiplied in: what is asked for; else its own dtype, single precision for float16 and for
    integers of at most 16 bits, and double precision for others.

    >>> product_dtype(np.dtype("i2"), None, "X", "x.zarr"), product_dtype(np.dtype("i4"), None, "X", "x.zarr")
    (dtype('float32'), dtype('float64'))
    """
    stored = stored.newbyteorder("=")
    natural = np.result_type(stored, np.float32)
    if asked is None:
        return natural
    try:
        dtype = np.dtype(asked)
    except MemoryError:
        raise
    except Exception:  # whatever an object of another library has to say
        dtype = np.dtype(np.void)
    allowed = [one for one in TRANSFORMED if one.kind == "c" or stored.kind != "c"]
    if dtype not in allowed:
        raise DTypeError(
            f"dtype={shown(asked)}: {role}, {name}, holds {stored}, and is multiplied as one of"
            f" {', '.join(one.name for one in allowed)}"
        )
    return dtype


def without_effect(transform: Transform, stored: np.dtype) -> bool:
    """Whether it makes nothing else of numbers of a dtype."""
    same = Transform(transform.dtype)
    return transform.dtype == stored.newbyteorder("=") and transform.digest() == same.digest()


def _count(name: str, value: Any, least: int, what: str, most: int | None = None) -> int:
    found = as_count(value)
    if found is None or found < least or (most is not None and found > most):
        raise OptionError(f"{name}={shown(value)}: it must be {what}")
    return found


def _tolerance(value: Any) -> float:
    number = value.item() if isinstance(value, np.generic) else value
    real = isinstance(number, int | float) and not isinstance(number, bool)
    if not real or not 0 < number < 1:
        raise OptionError(
            f"tol={shown(value)}: it must be a number between 0 and 1: the most that a residual may be beside its"
            " eigenvalue"
        )
    return float(number)
