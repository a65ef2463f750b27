"""New lines of X added to a Gram matrix that is there: C holds the sums over those that it was made of, which its
record counts, and gets those over the lines that came to X since.

So nothing is added twice: C and its record change places with the new ones in one step, and a run that finds all of X
in C has nothing to do. Only sums can be added to: means, deviations and numbers of pairs change with every line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import zarr

from tilewright.kernels.gemm import check
from tilewright.kernels.gemm.base import NUMPY_ELEMENTS
from tilewright.kernels.numbers import counted
from tilewright.pipeline.errors import DTypeError, OptionError, OutputError, ShapeError
from tilewright.pipeline.gram.options import GramRequest, Matrices, axis_of
from tilewright.pipeline.gram.transforms import Made
from tilewright.pipeline.plan.transform import Epilogue, Transform
from tilewright.pipeline.product.audit import GRAM, record_of
from tilewright.pipeline.product.ledger import Past
from tilewright.pipeline.product.output import is_array_folder
from tilewright.pipeline.product.request import Request
from tilewright.pipeline.store.arrays import local_path, name_of, open_array
from tilewright.pipeline.store.content import content_hash
from tilewright.pipeline.store.region import Section, StoredArray
from tilewright.pipeline.store.region_read import read_region

COMPARED_PARTS = 8
"""Parts of the lines that are in C already whose numbers are compared with what was read then."""


def check_can_append(request: GramRequest) -> None:
    """Raise OutputError for a place where C cannot be replaced in one step, and OptionError beside a band."""
    out: Any = request.out
    if isinstance(out, zarr.Array) or local_path(out) is None:
        raise OutputError(
            f"output: append=True adds to what is stored, and {name_of(out)} would be written in place, where a run"
            " that is stopped would have added to a part of it: give the path of a local array, which is replaced in"
            " one step"
        )
    if request.window is not None:
        raise OptionError(
            "append=True beside window (--window): a band is computed anew; leave one of them out"
        )


def check_adds_lines(request: GramRequest, matrices: Matrices) -> None:
    """Raise OptionError for what no lines can be added to."""
    if (why := not_additive(request, matrices)) is not None:
        raise OptionError(
            f"append=True beside {why}, which changes with every line that comes, and with it all of the result;"
            " keep the plain sums, those of gram, and make the rest of them, or give gram numbers to subtract and to"
            " divide by"
        )


def not_additive(request: GramRequest, matrices: Matrices) -> str | None:
    """The option by which C is no sum over lines; None where it is one."""
    if any(each.centered for each in matrices.treatments.values()):
        return "centring by means of X itself"
    if any(each.scaled for each in matrices.treatments.values()):
        return "scaling by deviations of X itself"
    if matrices.pairwise:
        return "missing_as='pairwise'"
    if isinstance(request.divide, str):
        return f"divide={request.divide!r}"
    if request.constant == "nan" and any(each.missing is not None for each in matrices.treatments.values()):
        return "constant='nan'"  # a variable may get its first number
    return None


def recorded(request: GramRequest, matrices: Matrices, first: int = 0) -> dict[str, Any]:
    """What the record of C says of the lines that are in it, and of what was made of them; nothing of a band.

    first: the first line of those that this run adds, where the record's hashes begin.
    """
    if request.window is not None:
        return {}
    axis = axis_of(matrices.summed)
    variables = [int(array.shape[1 - axis]) for array, _ in matrices.sides]
    return {
        GRAM: {
            "lines": matrices.length,
            "first": first,
            "made": _made_digest(request, matrices, variables),
            "along": _along_digest(matrices, matrices.length),
            "sums": not_additive(request, matrices) is None,
        }
    }


def _made_digest(request: GramRequest, matrices: Matrices, variables: Sequence[int]) -> str:
    """Of what is made of the numbers of a line and of their sums, alike for all lines. variables: how many of them, the
    first ones, of the left and of the right factor."""
    found: list[Any] = [matrices.of, request.conjugated, request.divide, matrices.weights is not None]
    if not_additive(request, matrices) is not None:
        found += [matrices.pairwise, request.constant]
        found += [[each.centered, each.scaled] for each in matrices.treatments.values()]
    counts = dict(zip("XY", (variables[0], variables[-1]), strict=True))
    for role, each in matrices.treatments.items():
        vectors = [
            _vector_digest(None if (vector := kind.get(matrices.of)) is None else vector[: counts[role]])
            for kind in (each.offsets, each.factors)
        ]
        along = [matrices.summed in kind for kind in (each.offsets, each.factors)]
        found.append([role, each.missing, vectors, along])
    return hashlib.sha256(json.dumps(found, default=str).encode()).hexdigest()


def _along_digest(matrices: Matrices, lines: int) -> str:
    """Of the numbers that are given for each of the first lines."""
    found = [_vector_digest(None if matrices.weights is None else matrices.weights[:lines])]
    for each in matrices.treatments.values():
        for kind in (each.offsets, each.factors):
            vector = kind.get(matrices.summed)
            found.append(_vector_digest(None if vector is None else vector[:lines]))
    return "".join(found)


def _vector_digest(vector: np.ndarray | None) -> str:
    return "" if vector is None else hashlib.sha256(vector.tobytes()).hexdigest()


def held_at(out: Any) -> zarr.Array[Any] | None:
    """The C to add to; None where there is none."""
    path = local_path(out)
    if path is None or not is_array_folder(path):
        return None
    return open_array(path, ndim=2, role="output")


def check_made_alike(request: GramRequest, matrices: Matrices, c: zarr.Array[Any]) -> None:
    """Raise OptionError where C was made by other options, and OutputError where nobody knows."""
    _, known = record_of_gram(c, name_of(c))
    if not known.get("sums", True) and not_additive(request, matrices) is None:
        raise _no_record(name_of(c))
    if known["made"] != _made_digest(request, matrices, c.shape):
        raise OptionError(
            f"append=True: {name_of(c)} was made by other options than these, so that nothing can be added to it; give"
            " the same, or another output"
        )


def check_lines_alike(matrices: Matrices, known: Mapping[str, Any], path: str) -> None:
    """Raise OptionError where C was made with other numbers of its lines. known: what its record says of them."""
    lines = int(known["lines"])
    if matrices.length >= lines and known["along"] != _along_digest(matrices, lines):
        raise OptionError(
            f"append=True: {path} was made with other weights, or other numbers, of the {lines} {matrices.summed} that"
            " are in it; give the same for these, and those of the new ones behind them"
        )


def has_all(request: GramRequest, matrices: Matrices, c: zarr.Array[Any]) -> bool:
    """Whether C has all of X in it already: as many lines and variables, of the same numbers and options. Raises as
    `appending`."""
    path = name_of(c)
    past, known = record_of_gram(c, path)
    axis = axis_of(matrices.summed)
    variables = tuple(int(array.shape[1 - axis]) for array, _ in matrices.sides)
    if c.shape != variables or int(known["lines"]) != matrices.length:
        return False
    check_made_alike(request, matrices, c)
    check_lines_alike(matrices, known, path)
    check_same_numbers(matrices, past, known, path)
    return True


def appending(
    request: GramRequest, matrices: Matrices, plain: Request, made: Made, c: zarr.Array[Any]
) -> Request:
    """The product that adds the lines that C lacks, none of them where it has all.

    made: what is made of all lines.

    Raises
    ------
    OutputError
        C has no record of what is in it, or not of this X; or X has fewer lines than are in it.
    OptionError
        It was made with other numbers of the lines that are in it.
    ShapeError
        X has other variables.
    DTypeError
        C's integers do not hold the sums over so many lines, and nobody asked for them.
    """
    path = name_of(c)
    past, known = record_of_gram(c, path)
    if not known.get("sums", True):
        raise _no_record(path)
    lines, length = int(known["lines"]), matrices.length
    axis = axis_of(matrices.summed)
    variables = tuple(int(array.shape[1 - axis]) for array, _ in matrices.sides)
    if c.shape != variables:
        raise ShapeError(
            f"append=True: {path} is {c.shape[0]} × {c.shape[1]}, of other variables than the"
            f" {' and '.join(map(str, dict.fromkeys(variables)))} {matrices.of} of {names_of(matrices)}; lines are"
            " added to the same ones"
        )
    check_lines_alike(matrices, known, path)
    if length < lines:
        raise OutputError(
            f"append=True: {path} has {counted(lines, matrices.summed[:-1])} in it, and {names_of(matrices)} {length}:"
            f" it is of another X, or some were taken out of that; compute it anew (overwrite=True without append)"
        )
    _check_width(request, matrices, c)
    check_same_numbers(matrices, past, known, path)
    sections: dict[str, StoredArray] = {
        role: _lines_of(array, axis, lines, length) for role, array in matrices.arrays.items()
    }
    left, *_, right = [*sections.values()] * 2
    epilogue = made.epilogue or Epilogue()
    return replace(
        plain,
        a=left,
        b=right,
        dtype=c.dtype.newbyteorder("="),
        transforms=_of_lines(made.transforms, matrices, slice(lines, length)),
        epilogue=replace(epilogue, beta=1),
        before=plain.out,
        overwrite=True,
        even=bool(past.request.get("symmetric")),
        recorded=recorded(request, matrices, lines),
    )


def names_of(matrices: Matrices) -> str:
    return " and ".join(dict.fromkeys(name_of(array) for array in matrices.arrays.values()))


def record_of_gram(c: zarr.Array[Any], path: str) -> tuple[Past, Mapping[str, Any]]:
    """The record of a finished C, and what it says of the lines in it. Raises OutputError where there is none."""
    past, finished = record_of(c)
    known = past.request.get(GRAM) if past is not None and finished else None
    if past is None or known is None:
        raise _no_record(path)
    return past, known


def _no_record(path: str) -> OutputError:
    return OutputError(
        f"append=True: {path} has no record of which lines are in it: it was not made by tilewright gram, or by options"
        " that lines cannot be added to; compute it anew (overwrite=True without append)"
    )


def _lines_of(array: StoredArray, axis: int, first: int, stop: int) -> Section:
    """The lines of a matrix from one on."""
    assert not isinstance(array, Section), "matrices are whole"
    spans = [(0, int(side)) for side in array.shape]
    spans[axis] = first, stop
    return Section(array, spans[0], spans[1])


def _of_lines(
    transforms: tuple[Transform | None, Transform | None], matrices: Matrices, lines: slice
) -> tuple[Transform | None, Transform | None]:
    """The transforms of some lines; one of both factors stays one."""
    side = matrices.summed[:-1]
    made: dict[int, Transform] = {}

    def of(transform: Transform | None) -> Transform | None:
        if transform is None:
            return None
        if id(transform) not in made:
            vectors = {name: getattr(transform, name) for name in (f"{side}_offsets", f"{side}_factors")}
            some = {name: vector[lines] for name, vector in vectors.items() if vector is not None}
            made[id(transform)] = replace(transform, **some)
        return made[id(transform)]

    return of(transforms[0]), of(transforms[1])


def _check_width(request: GramRequest, matrices: Matrices, c: zarr.Array[Any]) -> None:
    """Raise DTypeError where C's integers are narrower than the sums over all lines may need."""
    held = c.dtype.newbyteorder("=")
    if held.kind not in "iu" or request.dtype is not None:
        return
    (left, _), (right, _) = matrices.sides
    names = f"X: {name_of(left)}", f"X: {name_of(right)}"
    natural = check.result_dtype(
        left.dtype.newbyteorder("="),
        right.dtype.newbyteorder("="),
        None,
        names,
        NUMPY_ELEMENTS,
        k=matrices.length,
    )
    if not np.can_cast(natural, held, "safe"):
        raise DTypeError(
            f"append=True: {name_of(c)} holds {held}, and sums over {matrices.length} {matrices.summed} need"
            f" {natural}: compute it anew with dtype={natural.name!r} (overwrite=True without append), or pass"
            f" dtype={held.name!r} if they fit all the same"
        )


def check_same_numbers(matrices: Matrices, past: Past, known: Mapping[str, Any], path: str) -> None:
    """Raise OutputError where some parts of X are no more what they were when C was made of them."""
    axis = axis_of(matrices.summed)
    for (array, _), role in zip(matrices.sides, "AB", strict=True):
        parts = sorted(past.read.get(role, {}).items())
        for corners, expected in parts[:: max(1, len(parts) // COMPARED_PARTS)]:
            spans = [slice(*corners[:2]), slice(*corners[2:])]
            first = int(known["first"])
            spans[axis] = slice(spans[axis].start + first, spans[axis].stop + first)
            inside = all(part.stop <= side for part, side in zip(spans, array.shape, strict=True))
            if not inside or content_hash(read_region(array, spans)) != expected:
                raise OutputError(
                    f"append=True: {path} was made of other numbers than {name_of(array)} holds in rows"
                    f" {spans[0].start} to {spans[0].stop - 1}, columns {spans[1].start} to {spans[1].stop - 1}: only"
                    " lines that came behind the others are added; compute it anew (overwrite=True without append)"
                )
