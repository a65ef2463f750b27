"""What an array's metadata say beside its shape and dtype: that its numbers are packed, what its dimensions are."""

from __future__ import annotations

from typing import Any, TypeAlias

import zarr

from tilewright.pipeline.store import name_of

SCALES = {"scale_factor": 1, "add_offset": 0}
"""The attributes of CF's conventions that say what a stored number stands for, and the values that change nothing."""

MASKS = ("_FillValue", "missing_value")
"""Those that name a stored integer which stands for a missing one."""

DIMENSIONS = "_ARRAY_DIMENSIONS"
"""The attribute in which xarray keeps the names of dimensions in format 2; format 3 has a field for them."""

Names: TypeAlias = tuple[str | None, ...]
"""The names of an array's dimensions; None for one without."""


def packing(array: zarr.Array[Any]) -> dict[str, Any]:
    """The attributes by which xarray and other readers of CF's conventions make other numbers of the stored ones.

    In format 2 xarray writes ``_FillValue`` as Zarr's own ``fill_value``, and masks it; 0 is what others write who mean
    nothing by it. A mask of floats is left out: it is NaN almost always, which is multiplied as one.
    """
    attributes = array.attrs.asdict()
    found = {name: attributes[name] for name, plain in SCALES.items() if attributes.get(name, plain) != plain}
    if array.dtype.kind in "iu":
        found |= {name: attributes[name] for name in MASKS if name in attributes}
        if array.metadata.zarr_format == 2 and "_FillValue" not in found and array.metadata.fill_value:
            found["fill_value"] = int(array.metadata.fill_value)
    return found


def packing_notice(role: str, array: zarr.Array[Any]) -> str | None:
    """One sentence for the user of an array of packed numbers; None for any other."""
    if not (found := packing(array)):
        return None
    said = ", ".join(f"{name}={value!r}" for name, value in found.items())
    return (
        f"{role}: {name_of(array)} has {said}, by which xarray unpacks or masks its numbers; here its stored numbers"
        " are multiplied as they are: to multiply what they stand for, store it unpacked (xarray:"
        " ds.drop_encoding().to_zarr(path))"
    )


def dimension_names(array: zarr.Array[Any]) -> Names:
    """The names of an array's dimensions."""
    metadata = array.metadata
    found = metadata.dimension_names if metadata.zarr_format == 3 else array.attrs.get(DIMENSIONS)
    if not isinstance(found, list | tuple) or len(found) != array.ndim:
        return (None,) * array.ndim
    return tuple(name if isinstance(name, str) else None for name in found)


def product_names(
    a: zarr.Array[Any], b: zarr.Array[Any], transpose_a: bool, transpose_b: bool
) -> Names | None:
    """What the dimensions of C = op(A) op(B) are called: as the rows of op(A) and the columns of op(B); None where
    neither has a name.

    Without names xarray cannot open a group that C is in, nor with two that are the same, as those of a Gram matrix
    would be: the second gets ``_2`` appended.
    """
    rows = dimension_names(a)[int(transpose_a)]
    columns = dimension_names(b)[int(not transpose_b)]
    if rows is None and columns is None:
        return None
    return rows, f"{columns}_2" if columns is not None and rows == columns else columns
