"""What may be asked of a Gram matrix: every option checked by itself, and then against the matrices it is for."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import zarr

from tilewright.kernels.arguments import check_callable, check_choice, check_flag, shown
from tilewright.kernels.choices import DIVISORS
from tilewright.kernels.numbers import counted
from tilewright.pipeline.errors import OptionError, ShapeError
from tilewright.pipeline.gram.axes import (
    ALLELE_AXES,
    as_matrix,
    axes_text,
    check_summed_alike,
    of_parts,
    side_left,
    summed_axes,
)
from tilewright.pipeline.gram.masks import GivenMasks, given_masks, with_mask
from tilewright.pipeline.gram.weights import COSINE, stored_values, weights_of_axes, weights_of_lines
from tilewright.pipeline.options import MatrixRequest
from tilewright.pipeline.plan.called import Names
from tilewright.pipeline.product.banded import as_window
from tilewright.pipeline.product.fusing import is_values, stored_vectors
from tilewright.pipeline.product.request import Request
from tilewright.pipeline.store.arrays import Input, Source, name_of
from tilewright.pipeline.store.attributes import dimension_names, missing_codes, packing_of
from tilewright.pipeline.store.labels.alignment import ALIGNS, Align, Along, check_same_labels, ends_told
from tilewright.pipeline.store.new.storage import AS_IT_COMES, Storage
from tilewright.pipeline.store.region import Flattened, Masked, Section, StoredArray, base_of, unmasked
from tilewright.pipeline.store.sources.dasks import any_pending, pending_of
from tilewright.pipeline.store.sources.opening import InMemory
from tilewright.pipeline.store.sources.parts import is_series, open_matrix

Side: TypeAlias = Literal["columns", "rows"]
SIDES: tuple[Side, ...] = get_args(Side)
"""The sides of a stored matrix. A vector of the columns has one number a column."""
CENTERS = (*SIDES, "both")
ALLELES = "2pq"
"""The divisor of VanRaden's relationship matrix (2008): the sum of 2p(1 - p) of allele frequencies p."""
ADD_UP_ALLELES = (
    "Add these up first (add_up='ploidy', --add-up ploidy), or by xarray, and sum over the others alone"
)
"""What to do where alleles still lie along an axis of their own."""
MissingAs: TypeAlias = Literal["mean", "pairwise"]
MISSING_AS: tuple[MissingAs, ...] = get_args(MissingAs)
Constant: TypeAlias = Literal["error", "zero", "nan"]
CONSTANTS: tuple[Constant, ...] = get_args(Constant)

Values: TypeAlias = "Source | InMemory | Sequence[float]"
"""One number a column, or a row, as a user may give them: in memory, or a stored vector."""
Centering: TypeAlias = "bool | Values | Mapping[Side, Values]"
"""What is subtracted from a matrix, or what it is multiplied by: of the variables, of a side, or given numbers."""
Window: TypeAlias = "int | tuple[int, int] | None"
"""How far a band reaches to both sides of the diagonal, or before and behind it."""
Axes: TypeAlias = "str | int | Sequence[str | int] | None"
"""The axes that are summed over, by the names of their dimensions or by number."""
GivenMissing: TypeAlias = "float | Source | np.ndarray | Mapping[Literal['X', 'Y'], Any] | None"
"""A number that stands for missing ones, ``nan``, or masks."""
Missing: TypeAlias = "int | float | Literal['nan'] | None"
"""The number that stands for a missing element."""


SUMMED = "which are summed over"
"""Of the labels along a side, why they are compared."""

ATTRIBUTES = "attributes"
"""What stands for a missing number where its array's attributes say that."""
TOLD = (
    "of", "center", "scale", "missing", "missing_as", "divide", "weights", "window", "append", "sum_over", "align",
    "constant", "conjugated",
)  # fmt: skip
"""The options that say what a Gram matrix is."""


def in_words(value: Any) -> Any:
    """An option for `json`: what is an array, or names one, is only said to be given."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): in_words(one) for name, one in value.items()}
    if isinstance(value, tuple | list) and all(isinstance(one, bool | int | float | str) for one in value):
        return list(value)
    return "given"


@dataclass(frozen=True)
class GramRequest(MatrixRequest):
    """A Gram matrix as it is asked for, by the parameters of ``tilewright.gram``, which says what each may be."""

    x: Input
    out: Source | None = None
    y: Input | None = None
    """The right factor's; None: it is X."""
    of: Side = "columns"
    center: Any = False
    scale: Any = False
    missing: Any = None
    missing_given: Any = None
    """What the user said is missing, where ``missing`` stands for it in sums (`added.added_up`); None: ``missing``."""
    missing_as: MissingAs = "mean"
    divide: Any = None
    divisor_is_asked: bool = True
    """Whether ``divide`` is an option of who asks, so that messages may name it."""
    weights: Values | Mapping[str | int, Values] | None = None
    weights_called: str = "weights"
    """What the option is called by who asks."""
    window: Any = None
    append: Any = False
    counts: Source | None = None
    """Where the numbers of pairs go."""
    storage: Storage = AS_IT_COMES
    sum_over: Any = None
    align: Align = "labels"
    constant: Constant = "error"
    """What becomes of variables without any number, and of those without variance that are scaled to unit variance:
    ``error``, ``zero`` or ``nan``."""
    conjugated: Literal["left", "right"] = "left"
    """Which factor's conjugate a complex product takes."""

    def told(self) -> dict[str, Any]:
        """The options that are not as they are by themselves, for `json`: arrays by the word that they were given."""
        asked = {name: getattr(self, name) for name in TOLD}
        if self.missing_given is not None:
            asked["missing"] = self.missing_given
        usual = {each.name: each.default for each in fields(self)}
        return {
            name: in_words(value)
            for name, value in asked.items()
            if name == "of" or not (isinstance(value, type(usual[name])) and value == usual[name])
        }

    def checked(self) -> GramRequest:
        """The same, once its options are found good, but for what only `open_matrices` can tell."""
        check_choice("of", self.of, SIDES)
        check_choice("missing_as", self.missing_as, MISSING_AS)
        check_choice("constant", self.constant, CONSTANTS)
        check_choice("align", self.align, ALIGNS)
        check_callable("listener", self.listener)
        return replace(
            self,
            window=as_window(self.window),
            append=check_flag("append", self.append),
            center=_checked_sides("center", self.center, CENTERS),
            scale=_checked_sides("scale", self.scale, SIDES),
            missing=_checked_missing(self.missing),
            missing_given=_checked_missing(self.missing_given),
            divide=_checked_divisor(self.divide),
        )

    def _vectors(self) -> dict[str, Source]:
        """The stored vectors that are read, and masks, which may be held in memory, by what errors call them."""
        sides = stored_vectors({"center": self.center, "scale": self.scale}, CENTERS)
        said = self.missing if self.missing_given is None else self.missing_given
        masks = said.by_role if isinstance(said, GivenMasks) else {}
        of_roles = {f"{role or 'X'}'s mask": mask for role, mask in masks.items()}
        return {
            **sides,
            **stored_vectors({self.weights_called: self.weights}, (COSINE,)),
            **stored_vectors(of_roles),
        }

    def product(self, arrays: Mapping[str, StoredArray], **more: Any) -> Request:
        """The product of the two factors, without anything that is made of their numbers. arrays: the matrices, by
        role."""
        given = {"X": self.x} if self.y is None else {"X": self.x, "Y": self.y}
        factors = [
            # What dask computes is not opened once more, which would be computed once more.
            array
            if isinstance(array, Flattened | Masked | Section) or pending_of(array) is not None
            else given[role]
            for role, array in arrays.items()
        ]
        options: dict[str, Any] = {
            "a": factors[0],
            "b": factors[-1],
            "out": self.out,
            "transpose_a": self.of == "columns",
            "transpose_b": self.of == "rows",
            "window": self.window,
            "counts": self.counts,
            "storage": self.storage,
            "vectors": self._vectors(),
            "names": Names("X", "X" if self.y is None else "Y", "the result"),
        }
        return Request(**(self.run_options() | options | more))


@dataclass(frozen=True)
class Treatment:
    """What is made of one matrix's numbers, resolved against its shape and dtype."""

    centered: tuple[str, ...] = ()
    """The sides whose means are subtracted, of `SIDES`."""
    offsets: Mapping[str, np.ndarray] = field(default_factory=lambda: MappingProxyType({}))
    """By side: numbers that the user has subtracted, float64 or complex128."""
    scaled: str | None = None
    """The side whose columns, or rows, are divided by their standard deviations."""
    factors: Mapping[str, np.ndarray] = field(default_factory=lambda: MappingProxyType({}))
    """By side: numbers that the user has multiplied by, float64 or complex128."""
    missing: Missing = None
    """As in `plan.transform.Transform`."""
    missing_given: Any = None
    """What the user said is missing, such as ``attributes``, for messages."""


@dataclass(frozen=True)
class Matrices:
    """The matrices of a Gram matrix, opened, with their options resolved."""

    arrays: dict[str, StoredArray]
    """By role: ``X`` and, where two are multiplied, ``Y``, as matrices."""
    treatments: dict[str, Treatment]
    """By role."""
    of: str
    """The side of the result's variables."""
    length: int
    """Of the side that is summed over."""
    weights: np.ndarray | None = None
    """One a line of the summed side, float64."""
    divide: float | Literal["n", "n-1", "pairs"] | None = None
    pairwise: bool = False
    """Whether means, deviations and n are those over the pairs of numbers that are both there."""

    @property
    def counts_pairs(self) -> bool:
        """Whether elements are divided by their own numbers of pairs."""
        return self.pairwise or self.divide == "pairs"

    @property
    def summed(self) -> str:
        """The side that is summed over."""
        return other(self.of)

    @property
    def sides(self) -> tuple[tuple[StoredArray, Treatment], tuple[StoredArray, Treatment]]:
        """Of the left and of the right factor."""
        roles = tuple(self.arrays)
        left, right = roles[0], roles[-1]
        return (self.arrays[left], self.treatments[left]), (self.arrays[right], self.treatments[right])

    @property
    def ddof(self) -> int:
        """What the divisor of a variance is less than the number of its terms."""
        return 1 if self.divide == "n-1" else 0

    @property
    def divisor(self) -> float | None:
        """The number that the sums are divided by: with weights in place of n their sum W, and in place of n - 1 what
        ``numpy.cov(aweights=)`` has, W - (sum of the squared weights) / W. None also of what the numbers of X decide
        (`with_divisor`)."""
        if self.divide is None or not isinstance(self.divide, str):
            return self.divide
        if self.counts_pairs or self.divide == ALLELES:
            return None
        return terms(self.length, self.weights) if self.divide == "n" else self.degrees(1)

    def degrees(self, ddof: int) -> float:
        """The divisor of a variance."""
        if self.weights is None or not ddof:
            return terms(self.length, self.weights) - ddof
        whole = float(self.weights.sum())
        return whole - ddof * float((self.weights * (self.weights / whole)).sum())


def empty_caution(matrices: Matrices) -> str | None:
    """A sentence where there is nothing to sum, or to sum over; None else. Products of such matrices are defined, but
    seldom meant: most come of a selection that met nothing."""
    for role, array in matrices.arrays.items():
        for side, becomes in ((matrices.of, "has no element"), (matrices.summed, "has sums of nothing, 0")):
            along = Along(role, array, axis_of(side))
            if array.shape[along.side]:
                continue
            made = " × ".join(f"{name} {size}" for name, size in zip(along.names, along.shape, strict=True))
            made = f" ({made})" if None not in along.names else ""
            return (
                f"{along.full_name} has no {side}{made}, so that the result {becomes}: if that is not meant, look at"
                " how it was selected; in xarray, align(x, y, join='inner') keeps what both have along each axis, but"
                " for those to exclude (exclude)"
            )
    return None


def terms(length: int, weights: np.ndarray | None) -> float:
    """How many terms a sum has: its length, or the sum of its weights."""
    return float(length) if weights is None else float(weights.sum())


def other(side: str) -> str:
    """The other of `SIDES`."""
    return SIDES[1 - SIDES.index(side)]


def axis_of(side: str) -> int:
    """The axis of a stored matrix along which this side lies: rows are counted along the first."""
    return 1 - SIDES.index(side)


def open_matrices(request: GramRequest) -> Matrices:
    """Open the matrices and the vectors of a request whose options are checked, and check them against each other.

    Raises
    ------
    StoreError, DTypeError
        A matrix or a stored vector is not there, or holds no numbers.
    ShapeError
        A matrix has no two dimensions, or more without ``sum_over``; both have summed sides of different lengths; or a
        vector has a wrong length.
    OptionError
        An option does not fit the matrices: a code that the dtype does not hold, axes that they do not have, a divisor
        that is 0.
    """
    arrays, of, summed, x = _matrices(request)
    arrays, codes = _with_missing(request, arrays)
    axis = axis_of(other(of))
    lengths = {role: int(array.shape[axis]) for role, array in arrays.items()}
    sides = [Along(role, array, axis) for role, array in arrays.items()]
    if len(set(lengths.values())) > 1:
        raise ShapeError(
            f"{name_of(arrays['X'])} has {counted(lengths['X'], other(of)[:-1])} and {name_of(arrays['Y'])} has"
            f" {lengths['Y']}; both are summed over, so they must have equally many{ends_told(*sides)}"
        )
    if len(sides) == 2 and request.align == "labels":
        check_same_labels(sides[0], sides[1], SUMMED)
    if len(arrays) == 2:
        for name in ("center", "scale"):
            _check_no_values_of_two(name, getattr(request, name), of)
    treatments = {
        role: replace(
            _treatment(request, array, of),
            missing=codes[role],
            missing_given=_said(request, codes[role]),
        )
        for role, array in arrays.items()
    }
    weights = None
    if request.weights is not None:
        called = request.weights_called
        given = weights_of_axes(request.weights, x, summed, "summed over", request.align, called)
        weights = weights_of_lines(given, lengths["X"], other(of), arrays["X"], called)
    pairwise = request.missing_as == "pairwise"
    matrices = Matrices(arrays, treatments, of, lengths["X"], weights, request.divide, pairwise)
    if request.divide == ALLELES:
        _check_alleles(request, matrices)
    if matrices.counts_pairs:
        _check_pairs(request, matrices)
    elif request.counts is not None:
        either = ", or divide='pairs' (--divide)" if request.divisor_is_asked else ""
        raise OptionError(
            f"counts={shown(request.counts)}: numbers of pairs are counted only where elements are formed of the pairs"
            f" that are both there; ask for missing_as='pairwise' (--missing-as){either}, or leave counts"
            " (--counts) out"
        )
    divisor = matrices.divisor
    if divisor is not None and divisor <= 0 and isinstance(request.divide, str):
        raise OptionError(_nothing_to_divide_by(request, matrices))
    return matrices


def _nothing_to_divide_by(request: GramRequest, matrices: Matrices) -> str:
    """What to say where the divisor that a word means is 0 or less: how many lines there are, and how many it takes."""
    x, lines, least = matrices.arrays["X"], matrices.summed, matrices.ddof + 1
    found = f"{Along('X', x, axis_of(matrices.of)).full_name} has {counted(matrices.length, lines[:-1])}"
    if matrices.weights is not None:
        heavy = int(np.count_nonzero(matrices.weights))
        found += f", of which {heavy} {'have' if heavy != 1 else 'has'} a weight above 0"
    needed = f"; at least {least} {'are' if least > 1 else 'is'} needed"
    if not request.divisor_is_asked:
        return found + needed
    return f"divide={request.divide!r}: {found}{needed}, or a number, or None, for what to divide by (divide, --divide)"


def _said(request: GramRequest, code: Missing) -> Any:
    """What is missing, in the user's words where it was one."""
    if request.missing_given is not None:
        return "mask" if isinstance(request.missing_given, GivenMasks) else request.missing_given
    return request.missing if isinstance(request.missing, str) else code


def _check_alleles(request: GramRequest, matrices: Matrices) -> None:
    """Raise OptionError where no allele frequencies follow from what is centred."""
    treatment = matrices.treatments["X"]
    if len(matrices.arrays) > 1 or treatment.centered != (matrices.summed,) or matrices.weights is not None:
        raise OptionError(
            f"divide={ALLELES!r} is the sum of 2p(1 - p) over the {matrices.summed} of X, whose means are 2p: centre"
            f" those alone (center={matrices.summed!r}, --center {matrices.summed}), of one matrix, without weights"
        )
    if matrices.pairwise:
        raise OptionError(
            f"divide={ALLELES!r} is one number for all elements, and missing_as='pairwise' divides each by its own:"
            " leave one of them out"
        )
    x = base_of(matrices.arrays["X"])
    named = [name for name in dimension_names(x) if name in ALLELE_AXES]
    if named:
        raise OptionError(
            f"divide={ALLELES!r} is of dosages, whose means are 2p, and {name_of(x)} has an axis {named[0]!r}, along"
            " which the alleles of each dosage lie; of alleles by themselves the means are p, and the divisor is the"
            f" sum of p(1 - p). {ADD_UP_ALLELES}; or give a number"
        )


def _check_pairs(request: GramRequest, matrices: Matrices) -> None:
    """Raise OptionError for what does not go with elements that are divided by their own numbers of pairs."""
    asked = "missing_as='pairwise'" if matrices.pairwise else "divide='pairs'"
    if request.missing is None:
        raise OptionError(
            f"{asked}: nobody said what stands for a missing number, so that all pairs are there; give missing"
            " (--missing), as a number or 'nan'"
        )
    if matrices.weights is not None:
        raise OptionError(f"{asked}: pairs are counted and have no weights; leave weights (--weights) out")
    if not matrices.pairwise:
        return
    if request.divide is not None and not isinstance(request.divide, str):
        raise OptionError(
            f"{asked} divides each element by its own number of pairs, not by {request.divide}; divide may be 'n' or"
            " 'pairs', which are that number, or 'n-1'"
        )
    treatment, of = matrices.treatments["X"], matrices.of
    if len(treatment.centered) == 2:
        raise OptionError(
            f"{asked} beside center='both': a pair of {of} has no means of {matrices.summed}; centre one of the two"
        )
    if of in treatment.centered and matrices.summed in treatment.factors:
        raise OptionError(
            f"{asked} beside center={shown(request.center)} and factors of the {matrices.summed}: once these are"
            f" multiplied, what was subtracted is not the means over pairs any more; leave the factors of the"
            f" {matrices.summed} (scale, --scale) out, or give what to subtract, as numbers"
        )
    if treatment.scaled == of and of not in treatment.centered:
        raise OptionError(
            f"{asked} beside scale={shown(request.scale)}: deviations over pairs are from the means over these; centre"
            f" the {of} too (center=True, --center), or give factors"
        )


def _matrices(request: GramRequest) -> tuple[dict[str, StoredArray], str, tuple[int, ...], zarr.Array[Any]]:
    """The matrices by their roles, the side of the variables, the axes of X that are summed over, and X as stored.

    Raises as `open_matrices`.
    """
    given = {"X": request.x} if request.y is None else {"X": request.x, "Y": request.y}
    # Beside another array a vector is one variable, such as a climate index beside a field.
    line = None if request.y is None else "columns" if request.sum_over is not None else request.of
    found = {role: open_matrix(source, role, or_more=True, series=line) for role, source in given.items()}
    cuts = {role: array for role, array in found.items() if isinstance(array, Section)}
    if cuts and request.append:
        raise OptionError(
            f"append=True beside some rows or columns of {' and '.join(cuts)}: what came to a matrix is found behind"
            " what it had; append to the result of whole matrices"
        )
    later = [f"{role}, {name_of(array)}" for role, array in found.items() if any_pending([array])]
    if later and request.append:
        raise OptionError(
            f"append=True beside what dask has to compute first: {' and '.join(later)}. What came to an array is told"
            " by comparing what it holds with what was read of it, where it is stored; store it (xarray: .to_zarr), and"
            " append to the result of that"
        )
    opened = {role: base_of(array) for role, array in found.items()}
    x = opened["X"]
    if request.sum_over is None:
        for role, array in opened.items():
            if array.ndim > 2:
                raise ShapeError(
                    f"{role}: {name_of(array)} has shape {array.shape}; it must have 2 dimensions, or sum_over"
                    f" (--sum-over) must say which of its axes are summed over: {axes_text(array)}{of_parts(array)}"
                )
        return found, request.of, (axis_of(other(request.of)),), x
    lines = [role for role, array in opened.items() if is_series(array)]
    axes = {
        role: (0,) if role in lines and len(lines) < len(opened) else summed_axes(array, request.sum_over)
        for role, array in opened.items()
    }
    of = side_left(x, axes["X"])
    if request.of == "rows" and (of == "columns" or x.ndim > 2):
        raise OptionError(
            f"of='rows' and sum_over={shown(request.sum_over)} contradict each other: "
            + (
                "X has its rows along the axis that is summed over; leave one of them out"
                if x.ndim == 2
                else f"X has {x.ndim} dimensions, and sum_over alone says which are the variables; leave of out"
            )
        )
    if "Y" in opened and not cuts:  # of a part the lengths are compared once it is cut out
        check_summed_alike(x, opened["Y"], list(axes.values()))
    matrices = {role: as_matrix(array, axes[role], of) for role, array in opened.items()}
    return {role: _cut(array, cuts.get(role)) for role, array in matrices.items()}, of, axes["X"], x


def _cut(array: StoredArray, section: Section | None) -> StoredArray:
    """The rows and columns of a matrix that a section of the array beneath it has; None: all."""
    if section is None:
        return array
    assert not isinstance(array, Section), "matrices are whole"
    turned = isinstance(array, Flattened) and array.rows == (1,)
    rows, columns = (section.columns, section.rows) if turned else (section.rows, section.columns)
    return Section(array, rows, columns)


def _with_missing(
    request: GramRequest, arrays: dict[str, StoredArray]
) -> tuple[dict[str, StoredArray], dict[str, Missing]]:
    """The matrices, beside what says of their elements that they are missing, and the number that stands for these: of
    the array as it is then read. Raises as `masks.with_mask` and `_code`."""
    missing = request.missing
    masks = missing.of(tuple(arrays)) if isinstance(missing, GivenMasks) else {}
    made: dict[str, StoredArray] = {}
    codes: dict[str, Missing] = {}
    for role, array in arrays.items():
        view: zarr.Array[Any] | Flattened | Masked = unmasked(array)
        code: Missing = None
        if role in masks:
            view = with_mask(unmasked(array), masks[role], role, request.align)
            view = replace(view, codes=missing_codes(array))
        elif missing is not None and not isinstance(missing, GivenMasks):
            view, code = _with_codes(missing, unmasked(array), role)
        made[role] = Section(view, array.rows, array.columns) if isinstance(array, Section) else view
        codes[role] = view.missing if isinstance(view, Masked) else code
    return made, codes


def _with_codes(
    missing: Any, array: zarr.Array[Any] | Flattened, role: str
) -> tuple[zarr.Array[Any] | Flattened | Masked, Missing]:
    """A matrix of which a number is missing, ``"nan"``, or what its attributes name, and the number. What the
    attributes name is missing beside the number too, as it is where xarray opens the array."""
    floats = array.dtype.kind in "fc"
    if missing == ATTRIBUTES:
        named, packing = missing_codes(array, as_xarray=True), packing_of(array)
        if packing is not None:
            return Masked.by_codes(array, named, packing), None
        if not named and not floats:
            raise OptionError(
                f"missing={ATTRIBUTES!r}: {role}, {name_of(array)}, has no _FillValue or missing_value that"
                f" {array.dtype} holds, nor scale_factor or add_offset; give the number that stands for a missing"
                " element (--missing)"
            )
        if not named or (len(named) == 1 and not floats):
            return array, "nan" if floats else int(named[0])
        return Masked.by_codes(array, named), None
    code = _code(missing, array, role)
    others = tuple(one for one in missing_codes(array) if one != code)
    if not others:
        return array, code
    every = others if code is None or code == "nan" else (code, *others)
    return Masked.by_codes(array, every), None


def _checked_sides(name: str, value: Any, words: tuple[str, ...]) -> Any:
    """``center`` or ``scale``: a truth value, a word, or values, or those by side in a mapping."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, Mapping):
        wrong = [key for key in value if key not in SIDES]
        if wrong or not value:
            found = f"names {shown(wrong[0])}" if wrong else "is empty"
            raise OptionError(f"{name}: the mapping {found}; its keys may be 'columns' and 'rows'")
        if bad := [side for side in value if not is_values(value[side])]:
            raise OptionError(
                f"{name}[{bad[0]!r}]={shown(value[bad[0]])} is no array; give one number for each of the {bad[0]}"
            )
        return dict(value)
    if is_values(value):
        return value
    raise OptionError(
        f"{name}={shown(value)} is unknown; it may be True, False, {', '.join(map(repr, words))}, or one number a"
        " column or row"
    )


def _checked_missing(value: Any) -> Any:
    if value is None or isinstance(value, GivenMasks):
        return value
    if isinstance(value, str) and value.lower() == "nan":
        return "nan"
    if isinstance(value, str) and value == ATTRIBUTES and not os.path.lexists(value):
        return value
    if (found := given_masks(value)) is not None:
        return found
    if isinstance(value, np.ndarray):
        value = value[()]
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise OptionError(
            f"missing={shown(value)} is neither a number, nor 'nan', nor a mask; give what stands for a missing"
            " element, or an array of bool that is True where one is missing"
        )
    return "nan" if number != number else number


def _checked_divisor(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, str):
        check_choice("divide", value, DIVISORS, "number and no word that is known")
        return value
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise OptionError(
            f"divide={shown(value)} is no number; it may be a number, 'n', 'n-1', 'pairs' or '2pq'"
        )
    try:
        divisor = float(number)
    except OverflowError:
        divisor = math.inf
    if divisor == 0 or not math.isfinite(divisor) or not math.isfinite(1 / divisor):
        raise OptionError(
            f"divide={shown(value)}: sums cannot be divided by that; give a finite number other than 0"
        )
    return divisor


def _check_no_values_of_two(name: str, value: Any, of: str) -> None:
    """Raise OptionError for numbers of the variables where there are two matrices with variables of their own."""
    own = isinstance(value, Mapping) and of in value
    if own or (is_values(value) and not (isinstance(value, str) and value in CENTERS)):
        if isinstance(value, Mapping) and not own:
            return
        raise OptionError(
            f"{name}: numbers of one matrix are given for two, X and Y; give {name}=True, which finds those of each, or"
            f" {{{other(of)!r}: values}}, which both share"
        )


def _treatment(request: GramRequest, array: StoredArray, of: str) -> Treatment:
    """What is made of a matrix's numbers, but for those that are missing."""
    centered, offsets = _sides_of("center", request.center, array, of)
    scaled, factors = _sides_of("scale", request.scale, array, of)
    if scaled and any(side != scaled[0] for side in (*centered, *offsets)):
        asked = shown(request.center) if centered else f"{{{other(scaled[0])!r}: values}}"
        raise OptionError(
            f"scale={shown(request.scale)} beside center={asked}: the deviations of the"
            f" {scaled[0]} once {other(scaled[0])} are centred are not found in one pass over X; give them as factors"
            f" ({{{scaled[0]!r}: values}})"
        )
    return Treatment(centered, offsets, scaled[0] if scaled else None, factors)


def _sides_of(
    name: str, value: Any, array: StoredArray, of: str
) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
    """The sides of which something is found, and the numbers that are given, by side."""
    if value is False:
        return (), {}
    if value is True:
        return (of,), {}
    if isinstance(value, str) and value in SIDES:
        return (value,), {}
    if isinstance(value, str) and value == "both" and name == "center":
        return SIDES, {}
    if isinstance(value, Mapping):
        return (), {
            side: _vector(f"{name}[{side!r}]", given, array, (side,)) for side, given in value.items()
        }
    rows, columns = array.shape
    if rows == columns:
        raise OptionError(
            f"{name}: X has as many rows as columns, {rows}, so that numbers might be of either; say"
            f" {name}={{'columns': values}} or {name}={{'rows': values}}"
        )
    words = ", ".join(map(repr, CENTERS if name == "center" else SIDES))
    found = _vector(name, value, array, SIDES, f"True, False, {words}, or one number a column or row")
    return (), {SIDES[0] if len(found) == columns else SIDES[1]: found}


def _vector(name: str, value: Any, array: StoredArray, sides: tuple[str, ...], words: str = "") -> np.ndarray:
    """Numbers as float64 or complex128, of one of these sides' lengths."""
    found = stored_values(name, value, words)
    lengths = {side: int(array.shape[axis_of(side)]) for side in sides}
    if len(found) not in lengths.values():
        allowed = " or ".join(f"{length}, one for each of the {side}" for side, length in lengths.items())
        raise ShapeError(f"{name}: found {len(found)} numbers; {name_of(array)} needs {allowed}")
    if not np.isfinite(found).all():
        place = int(np.flatnonzero(~np.isfinite(found))[0])
        raise OptionError(f"{name}: number {place} is {found[place]}; all must be finite")
    if found.dtype.kind == "c" and array.dtype.kind != "c":
        raise OptionError(
            f"{name}: complex numbers are given for {name_of(array)}, which holds {array.dtype}"
        )
    return found


def _code(missing: Any, array: StoredArray, role: str) -> Missing:
    """The number that stands for missing elements as the array's dtype has it."""
    dtype = array.dtype.newbyteorder("=")
    if missing == "nan":
        if dtype.kind in "iu":
            raise OptionError(
                f"missing='nan': {role}, {name_of(array)}, holds {dtype}, which has no NaN; give the integer that"
                " stands for a missing element"
            )
        return "nan"
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        if not math.isfinite(missing) or missing != int(missing) or not bounds.min <= missing <= bounds.max:
            raise OptionError(
                f"missing={missing}: {role}, {name_of(array)}, holds {dtype}, which has no such number; it may be a"
                f" whole number from {bounds.min} to {bounds.max}"
            )
        return int(missing)
    real = np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype
    with np.errstate(over="ignore", under="ignore"):
        try:
            code = float(real.type(missing))
        except OverflowError:
            code = math.inf
    if math.isinf(code) and not (isinstance(missing, float) and math.isinf(missing)):
        raise OptionError(
            f"missing={shown(missing)}: {role}, {name_of(array)}, holds {dtype}, which has no such number; give the"
            " number that is stored"
        )
    return code
