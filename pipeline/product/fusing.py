"""What a product does besides multiplying, checked before the first tile: transforms of its factors, the epilogue of
its sums, and which dtypes follow from them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import zarr

from tilewright.kernels.arguments import host_array, shown
from tilewright.kernels.gemm import check
from tilewright.kernels.gemm.base import NUMPY_ELEMENTS
from tilewright.kernels.widths import SUM_DTYPES, largest_sum_of
from tilewright.pipeline.errors import (
    DTypeError,
    OptionError,
    OutputError,
    ShapeError,
    StoreError,
    TilewrightError,
)
from tilewright.pipeline.plan.inputs import accumulator_dtype
from tilewright.pipeline.plan.pairs import Pairwise
from tilewright.pipeline.plan.transform import TRANSFORMED, Epilogue, Fused, Transform, reach
from tilewright.pipeline.product.ledger import FILE_NAME, read_journal
from tilewright.pipeline.store import arrays as store
from tilewright.pipeline.store.arrays import Source
from tilewright.pipeline.store.journal import FileJournal
from tilewright.pipeline.store.region import StoredArray
from tilewright.pipeline.store.region_read import read_region

Vector: TypeAlias = "Source | np.ndarray | Sequence[float]"
"""An array of one dimension, a list, or the path of a stored array."""

VECTORS = {
    "row_factors": "row_scale",
    "column_factors": "column_scale",
    "row_pairs": "row_pairs",
    "column_pairs": "column_pairs",
    "row_offsets": "row_offset",
    "column_offsets": "column_offset",
}
"""The vectors of an epilogue, and what callers know them by."""
NUMBERS = ("alpha", "beta", "offset", "pair_weight")

LARGE_DTYPES = (np.dtype(np.int64), np.dtype(np.uint64), np.dtype(np.float64), np.dtype(np.complex128))
"""What errors about the dtype of C may say to ask for, if it is not refused in its turn."""

Remedy: TypeAlias = "Callable[[], str]"
"""What an error says to do, found out where there is one."""


@dataclass(frozen=True)
class Sums:
    """The dtypes of a product: of C, and of what a tile is summed in."""

    result: np.dtype
    sums: np.dtype


@dataclass(frozen=True)
class AskedOfSums:
    """What the dtypes of a product follow from, besides the one that is asked for."""

    operands: tuple[np.dtype, np.dtype]
    names: tuple[str, str]
    """What errors call the factors."""
    k: int
    shape: tuple[int, int]
    """Of C."""
    epilogue: Epilogue | None = None
    before: zarr.Array[Any] | None = None
    """What C held, if that is added to."""


def checked_sums(asked: AskedOfSums, wanted: Any) -> tuple[Sums, Epilogue | None]:
    """The dtypes of a product where C is to be of ``wanted``, or of what is usual where that is None, and its epilogue
    as `_checked_epilogue` has it.

    Raises DTypeError, OptionError, OutputError or ShapeError. Where another dtype would do, an error about dtypes names
    one that is not refused in its turn.
    """
    _check_apart_from_dtypes(asked)
    return _checked(asked, wanted, lambda: _dtype_that_does(asked, wanted))


def _checked(asked: AskedOfSums, wanted: Any, remedy: Remedy) -> tuple[Sums, Epilogue | None]:
    dtypes = _sums_of(asked, wanted, remedy)
    return dtypes, _checked_epilogue(asked.epilogue, asked.shape, dtypes, asked.before, remedy)


def _dtype_that_does(asked: AskedOfSums, refused: Any) -> str:
    """Which other dtype to ask for, in words."""

    def found(wanted: Any) -> np.dtype | None:
        try:
            return _checked(asked, wanted, lambda: "")[0].result
        except TilewrightError:
            return None

    if refused is not None and (usual := found(None)) is not None:
        return f"leave dtype out for {usual}"
    held = () if asked.before is None else (asked.before.dtype.newbyteorder("="),)
    allowed = [dtype for dtype in (*held, *LARGE_DTYPES) if found(dtype) is not None]
    integers = [dtype for dtype in allowed if dtype.kind in "iu"][:1]
    others = [dtype for dtype in allowed if dtype.kind in "fc"][:1]
    told = [
        f"dtype={dtype.name!r} if no number exceeds {np.iinfo(dtype).max}"
        if asked.before is not None and not np.can_cast(asked.before.dtype, dtype, "safe")
        else f"dtype={dtype.name!r}"
        for dtype in integers
    ]
    of_integers = all(dtype.kind in "iu" for dtype in asked.operands)
    told += [f"dtype={dtype.name!r}{', which rounds' if of_integers else ''}" for dtype in others]
    return f"pass {', or '.join(told)}"


def checked_transform(transform: Transform | None, array: StoredArray, role: str) -> Transform | None:
    """A transform whose vectors fit the array, contiguous and of its dtype. Raises DTypeError, ShapeError or
    OptionError."""
    if transform is None:
        return None
    stored, dtype = array.dtype.newbyteorder("="), np.dtype(transform.dtype)
    if dtype not in TRANSFORMED or (stored.kind == "c" and dtype.kind != "c"):
        allowed = [one.name for one in TRANSFORMED if one.kind == "c" or stored.kind != "c"]
        raise DTypeError(
            f"{role}: {store.name_of(array)} holds {stored}, which is not transformed to {dtype}; allowed are"
            f" {', '.join(allowed)}"
        )
    held: dict[str, Any] = {}
    for name, side in zip(
        ("row_offsets", "column_offsets", "row_factors", "column_factors"), (0, 1, 0, 1), strict=True
    ):
        vector = getattr(transform, name)
        if vector is not None:
            held[name] = _vector(vector, array.shape[side], dtype, f"{role}'s {name}")
    _check_finite(f"{role}'s offset", transform.offset)
    return replace(transform, dtype=dtype, **held)


def _check_apart_from_dtypes(asked: AskedOfSums) -> None:
    """What no dtype of C would help about, before an error may name one. Raises ShapeError, OptionError or
    OutputError."""
    epilogue = asked.epilogue
    if epilogue is None:
        return
    for name in NUMBERS:
        _check_finite(name, getattr(epilogue, name))
    for name, told in VECTORS.items():
        if (vector := getattr(epilogue, name)) is not None:
            _check_length(np.asarray(vector), asked.shape[0 if name.startswith("row") else 1], told)
    if epilogue.diagonal is not None and asked.shape[0] != asked.shape[1]:
        raise ShapeError(f"diagonal is given for a C of {asked.shape[0]} × {asked.shape[1]}, which has none")
    if not epilogue.beta:
        return
    if asked.before is None:
        raise OptionError(
            "beta is not 0, and there is no C to add to: leave beta out, or name one that exists"
        )
    if asked.before.shape != asked.shape:
        raise OutputError(
            f"output: {store.name_of(asked.before)} has shape {asked.before.shape}, and op(A) op(B), which is added to"
            f" it, {asked.shape}"
        )


def _check_length(found: np.ndarray, length: int, name: str) -> None:
    if found.ndim != 1 or len(found) != length:
        shape = "one number" if found.ndim == 0 else " × ".join(map(str, found.shape))
        raise ShapeError(
            f"{name} has {shape} elements; it needs one dimension of {length}, one for each line"
        )


def _vector(vector: Any, length: int, dtype: np.dtype, name: str) -> np.ndarray:
    found = np.asarray(vector)
    _check_length(found, length, name)
    if found.dtype.kind not in "iufc" or not np.can_cast(found.dtype, dtype, "same_kind"):
        raise DTypeError(f"{name} holds {found.dtype}, which does not cast to {dtype} within its kind")
    return np.ascontiguousarray(found, dtype)


def _check_range(name: str, found: np.ndarray, result: np.dtype, remedy: Remedy) -> None:
    """Raise DTypeError for integers that C's type does not hold: they would wrap before anything is made of them."""
    limits = np.iinfo(result)
    least, most = (int(found.min()), int(found.max())) if found.size else (0, 0)
    if least < limits.min or most > limits.max:
        raise DTypeError(
            f"{name} holds integers from {least} to {most}, and C, {result}, those from {int(limits.min)} to"
            f" {int(limits.max)}; {remedy()}"
        )


def _check_finite(name: str, value: Any) -> None:
    number = isinstance(value, int | float | complex | np.number) and not isinstance(value, bool)
    try:
        finite = number and math.isfinite(value.real) and math.isfinite(value.imag)
    except OverflowError:  # an integer beyond all floats
        finite = False
    if not finite:
        raise OptionError(f"{name}={shown(value)}: it must be a finite number")


def _checked_epilogue(
    epilogue: Epilogue | None,
    shape: tuple[int, int],
    dtypes: Sums,
    before: zarr.Array[Any] | None,
    remedy: Remedy,
) -> Epilogue | None:
    """An epilogue whose vectors fit C, contiguous and of the dtype that C's needs. Raises DTypeError, ShapeError,
    OptionError, or OutputError about what C held before."""
    if epilogue is None:
        return None
    result = dtypes.result
    kind = {"c": np.complex128, "f": np.float64}.get(result.kind, result)
    held: dict[str, Any] = {}
    for name, told in VECTORS.items():
        vector = getattr(epilogue, name)
        if vector is None:
            continue
        found = np.asarray(vector)
        if result.kind != "c" and found.dtype.kind == "c":
            raise DTypeError(f"{told} holds {found.dtype}, and C {result}; {remedy()}")
        if result.kind in "iu":
            if found.dtype.kind not in "iu":
                raise DTypeError(f"{told} holds {found.dtype}, and C {result}; {remedy()}")
            _check_range(told, found, result, remedy)
            found = found.astype(result)
        held[name] = _vector(found, shape[0 if name.startswith("row") else 1], np.dtype(kind), told)
    for name in NUMBERS:
        value = getattr(epilogue, name)
        if result.kind != "c" and isinstance(value, complex | np.complexfloating):
            raise OptionError(f"{name}={shown(value)} is complex, and C {result}; {remedy()}")
        if result.kind in "iu" and int(value) != value:
            raise OptionError(f"{name}={shown(value)} is a fraction, and C {result}; {remedy()}")
        held[name] = int(value) if result.kind in "iu" else value.item() if hasattr(value, "item") else value
    if epilogue.diagonal is not None:
        held["diagonal"] = _vector(epilogue.diagonal, shape[0], np.dtype(kind), "diagonal")
    if epilogue.beta and before is not None:
        _check_before(before, result, remedy)
    return replace(epilogue, **held)


def checked_pairwise(
    pairwise: Pairwise | None,
    transforms: tuple[Transform | None, Transform | None],
    epilogue: Epilogue | None,
) -> Pairwise | None:
    """What is formed pair by pair, of factors that are known to have missing numbers. Raises DTypeError or
    OptionError."""
    if pairwise is None:
        return None
    if epilogue is not None:
        raise OptionError(
            "elements that are formed pair by pair have no epilogue besides; leave one of them out"
        )
    for role, transform in zip("AB", transforms, strict=True):
        if transform is None:
            raise OptionError(
                f"{role} has no transform, so that nobody knows which of its numbers are missing"
            )
        if transform.dtype.kind == "c":
            raise DTypeError(
                f"{role} is multiplied as {transform.dtype}: pairs are formed of real numbers, float32 or float64"
            )
    return pairwise


def _check_before(before: zarr.Array[Any], result: np.dtype, remedy: Remedy) -> None:
    if not np.can_cast(before.dtype, result, "same_kind"):
        raise OutputError(
            f"output: {store.name_of(before)} holds {before.dtype}, which does not cast to {result}, the dtype of what"
            f" is added to it; {remedy()}, or convert it first"
        )


def _sums_of(asked: AskedOfSums, wanted: Any, remedy: Remedy) -> Sums:
    """The dtypes of a product, where C is to be of ``wanted`` if that is not None. What is added to an existing C keeps
    its dtype, if nobody asked for another and the product casts to it.

    Integers are summed exactly, in the type that holds their sums, whatever floats C holds; which it does by default
    where the epilogue is not of integers alone. Where it is, C holds by default what that makes of any sums. Raises
    DTypeError, or OutputError where no type of integers holds both what C held and what is added to it.
    """
    epilogue, before, operands, names, k = asked.epilogue, asked.before, asked.operands, asked.names, asked.k
    natural = check.result_dtype(*operands, None, names, NUMPY_ELEMENTS, k=k)
    if epilogue is not None and wanted is None and before is not None and epilogue.beta:
        held = before.dtype.newbyteorder("=")
        wanted = held if np.can_cast(natural, held, "same_kind") and held in NUMPY_ELEMENTS else None
    if epilogue is None or natural.kind not in "iu":
        result = check.result_dtype(*operands, wanted, names, NUMPY_ELEMENTS, k=k, remedy=remedy)
        return Sums(result, accumulator_dtype(result))
    if wanted is None:
        result = np.dtype(np.float64)
        if is_integral(epilogue):
            result = _holding(epilogue, natural, operands, k, before, remedy)
    else:
        result = check.result_dtype(*operands, wanted, names, NUMPY_ELEMENTS, k=k, remedy=remedy)
    return Sums(result, natural if result.kind == "f" else accumulator_dtype(result))


def _holding(
    epilogue: Epilogue,
    natural: np.dtype,
    operands: tuple[np.dtype, np.dtype],
    k: int,
    before: zarr.Array[Any] | None,
    remedy: Remedy,
) -> np.dtype:
    """The smallest type, of no fewer numbers than that of the sums, that holds all that an epilogue of integers makes
    of them; the widest of its kind where none does, or that of what C held if the factors cast to it. before: integers
    that are added. Raises OutputError where that type would not hold them by themselves."""
    most = largest_sum_of(*operands, k)
    least, most = reach(epilogue, -most if "i" in (operands[0].kind, operands[1].kind) else 0, most)
    if epilogue.beta and before is not None:
        limits = np.iinfo(before.dtype) if before.dtype != np.bool_ else None
        held = (int(limits.min), int(limits.max)) if limits is not None else (0, 1)
        ends = [int(epilogue.beta.real) * end for end in held]
        least, most = least + min(ends), most + max(ends)
    wide = (
        dtype
        for dtype in SUM_DTYPES
        if np.can_cast(natural, dtype, "safe")
        and np.iinfo(dtype).min <= least
        and most <= np.iinfo(dtype).max
    )
    widest = np.dtype(f"{natural.kind}8")
    found = next(wide, widest)
    if before is None or not epilogue.beta or np.can_cast(before.dtype, found, "safe"):
        return found
    if all(np.can_cast(operand, before.dtype, "same_kind") for operand in operands):
        return before.dtype.newbyteorder("=")
    raise OutputError(
        f"output: {store.name_of(before)} holds {before.dtype}, and no type of integers holds that and sums of products"
        f" of {operands[0]} by {operands[1]}, which may be negative; {remedy()}"
    )


def is_integral(epilogue: Epilogue) -> bool:
    """Whether what becomes of integers are integers."""
    numbers = (getattr(epilogue, name) for name in NUMBERS)
    vectors = (getattr(epilogue, name) for name in (*VECTORS, "diagonal"))
    return all(
        not isinstance(value, complex | np.complexfloating) and math.isfinite(value) and int(value) == value
        for value in numbers
    ) and all(np.asarray(vector).dtype.kind in "iu" for vector in vectors if vector is not None)


def mirrored(fused: Fused, *, complex_sums: bool, even: bool = False) -> str:
    """How a product of a matrix by its own transpose is mirrored: ``symmetric``, ``hermitian``, or, where transforms or
    the epilogue make its halves differ, empty. even: whether what C held is mirrored so."""
    one, other = fused.transforms
    if (one is None) != (other is None):
        return ""
    hermitian = False
    if one is not None and other is not None:
        alike = (
            one is other or replace(one, conjugate=False).digest() == replace(other, conjugate=False).digest()
        )
        if not alike:
            return ""
        hermitian = complex_sums and one.conjugate != other.conjugate
    epilogue = fused.epilogue
    if epilogue is not None:
        if epilogue.beta and not even:  # nobody knows whether what C held was symmetric
            return ""
        pairs = (
            (getattr(epilogue, f"row_{name}"), getattr(epilogue, f"column_{name}"))
            for name in ("factors", "pairs", "offsets")
        )
        if not all(_same_vector(*pair) for pair in pairs):
            return ""
        if hermitian and not _is_real(epilogue):
            return ""
    return "hermitian" if hermitian else "symmetric"


def _same_vector(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    if one is None or other is None:
        return one is other
    return one is other or (one.dtype == other.dtype and one.tobytes() == other.tobytes())


def _is_real(epilogue: Epilogue) -> bool:
    """Whether it makes real numbers of real ones."""
    vectors = (getattr(epilogue, name) for name in (*VECTORS, "diagonal"))
    return all(np.imag(getattr(epilogue, name)) == 0 for name in NUMBERS) and all(
        not np.any(np.imag(vector)) for vector in vectors if vector is not None
    )


def opened_before(before: Source | None, epilogue: Epilogue | None) -> zarr.Array[Any] | None:
    """What C held, if that is added to. Raises StoreError where there is no such array."""
    if before is None or epilogue is None or not epilogue.beta:
        return None
    try:
        return store.open_array(before, ndim=2, role="output")
    except StoreError as error:
        raise StoreError(
            f"{error}; beta={shown(epilogue.beta)} adds to what C holds, so there must be one"
        ) from error


def epilogue_of(out: Any, *, alpha: Any = 1, beta: Any = 0, **vectors: Vector | None) -> Epilogue | None:
    """The epilogue that a caller asks for; None where C is to be the product alone.

    vectors: by the names of `matmul`. Raises OptionError, DTypeError, ShapeError, or StoreError for paths of vectors;
    where what ``out`` holds is to be added to, OptionError without one, and OutputError where it is no local path.
    """
    for name, value in (("alpha", alpha), ("beta", beta)):
        _check_finite(name, value)
    names = {told: name for name, told in VECTORS.items()}
    held: dict[str, Any] = {
        names[told]: read_vector(told, vector) for told, vector in vectors.items() if vector is not None
    }
    if alpha == 1 and beta == 0 and not held:
        return None
    if beta != 0 and out is None:
        raise OptionError(
            f"beta={shown(beta)} without out: there is no C to add to; give out, the path of an array that holds it"
        )
    if beta != 0:
        store.check_source(out, "output")
    if beta != 0 and (isinstance(out, zarr.Array) or store.local_path(out) is None):
        raise OutputError(
            f"output: beta={shown(beta)} adds to what C holds, and {store.name_of(out)} would be written in place,"
            " where a run that is stopped would have added to a part of it: give the path of a local array, which is"
            " replaced in one step"
        )
    return Epilogue(alpha=alpha, beta=beta, **held)


def is_values(value: Any) -> bool:
    """Whether an argument is, or names, one number a line; arrays of other libraries, as xarray's, are taken by what
    NumPy makes of them."""
    given = isinstance(value, str | os.PathLike | zarr.Array | np.ndarray | list | tuple)
    return given or (hasattr(value, "__array__") and getattr(value, "ndim", 0) > 0)


def stored_vectors(given: Mapping[str, Any], words: Sequence[str] = ()) -> dict[str, Source]:
    """Those of the arguments that name stored vectors, or are open ones, also by the sides or axes of a mapping, by
    what errors call them. words: texts that name none."""
    found: dict[str, Source] = {}
    for name, value in given.items():
        by_side = (
            {f"{name}[{side!r}]": each for side, each in value.items()} if isinstance(value, Mapping) else {}
        )
        for called, each in (by_side or {name: value}).items():
            if isinstance(each, str | os.PathLike | zarr.Array) and each not in words:
                found[called] = each
    return found


def read_vector(name: str, vector: Any) -> np.ndarray:
    """The numbers of an array, a list, or of a Zarr array that is open or at a path. Raises OptionError, DTypeError,
    ShapeError, or StoreError."""
    if isinstance(vector, str | os.PathLike | zarr.Array):
        stored = store.open_array(vector, ndim=1, role=name)
        found = read_region(stored, (slice(0, stored.shape[0]),))
    elif is_values(vector):
        found = host_array(name, vector)
    else:
        raise OptionError(
            f"{name}={shown(vector)}: give an array of one dimension, or the path of a Zarr array of that"
        )
    if found.ndim != 1:
        raise ShapeError(f"{name} has {found.ndim} dimensions, shape {found.shape}; it needs one")
    if found.dtype.kind not in "iufc" or found.dtype.newbyteorder("=") not in NUMPY_ELEMENTS:
        raise DTypeError(f"{name} holds {found.dtype}; it needs numbers: integers, floats or complex ones")
    return found.astype(found.dtype.newbyteorder("="))


def check_not_added(out: Path, inputs: Any, digest_with: Callable[[Any], str]) -> None:
    """Raise OutputError where C is what the very same command has made of it: a run of that which was killed once C had
    its name, before it was done.

    inputs: how A and B look. digest_with: the digest of the product, if C held what looked so before.
    """
    record = read_journal(FileJournal(out / FILE_NAME))
    if record is None or "before" not in record.request:
        return
    if record.inputs == inputs and record.digest == digest_with(record.request["before"]):
        raise OutputError(
            f"output: {out} holds the sum already: a run of this command was killed just after it had replaced C, and"
            f" nothing is added twice. To add once more, remove {out / FILE_NAME} and run it again"
        )
