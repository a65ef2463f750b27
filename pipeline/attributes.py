"""What an array's metadata say beside its shape and dtype: that its numbers are packed."""

from __future__ import annotations

from typing import Any

import zarr

from tilewright.pipeline.store import name_of

SCALES = {"scale_factor": 1, "add_offset": 0}
"""The attributes of CF's conventions that say what a stored number stands for, and the values that change nothing."""

MASKS = ("_FillValue", "missing_value")
"""Those that name a stored integer which stands for a missing one."""


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
