"""Weights as they are given: for each line of a side, or along some of its axes, such as areas along latitudes; and all
numbers of which there is one a line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import zarr

from tilewright.kernels.arguments import host_array, shown
from tilewright.pipeline.errors import OptionError, ShapeError, StoreError
from tilewright.pipeline.gram.axes import axes_text, axis_named, broadcast_weights
from tilewright.pipeline.product.fusing import is_values, read_vector
from tilewright.pipeline.store.arrays import name_of, open_array
from tilewright.pipeline.store.attributes import dimension_names
from tilewright.pipeline.store.coordinates import along_axis
from tilewright.pipeline.store.labels.alignment import Align, Along, check_same_labels
from tilewright.pipeline.store.region import StoredArray
from tilewright.pipeline.store.region_read import read_region
from tilewright.pipeline.store.sources.xarrays import is_data_array

COSINE = "cos"
"""In place of the weights of an axis: the cosines of its latitudes."""
RIGHT_ANGLE = 90
ANGLE_ROUNDING = 1e-6
"""What a pole may lie beyond that, as a share of it, in coordinates of single precision."""
DEGREES = frozenset(
    [
        "degrees_north",
        "degree_north",
        "degrees_N",
        "degree_N",
        "degreesN",
        "degreeN",
        "degrees",
        "degree",
        "deg",
        "°",
    ]
)
"""The units of latitudes by CF's conventions, and those that UDUNITS has for the same."""
RADIANS = frozenset(["radians", "radian", "rad"])


def stored_values(name: str, value: Any, words: str = "") -> np.ndarray:
    """A vector that a user gives, in memory or stored: float64, or complex128.

    words: what else the argument may be, for a text that names no array.
    """
    try:
        found = read_vector(name, value)
    except StoreError as error:
        if not words or not isinstance(value, str) or "://" in value or os.path.lexists(value):
            raise
        raise OptionError(
            f"{name}={shown(value)} is unknown, and names no stored array; it may be {words}"
        ) from error
    return found.astype(np.complex128 if found.dtype.kind == "c" else np.float64)


def weights_of_axes(
    weights: Any,
    x: zarr.Array[Any],
    axes: tuple[int, ...],
    what: str,
    align: Align = "labels",
    called: str = "weights",
) -> Any:
    """Weights that are given by axis, as those of the side that consists of these axes; others as they are.

    what: these axes are, in words. called: the option, in messages. Raises OptionError or ShapeError.
    """
    if not isinstance(weights, Mapping):
        if isinstance(weights, str) and weights == COSINE and not os.path.lexists(weights):
            option = f" (--weights lat={COSINE})" if called == "weights" else ""
            raise OptionError(
                f"{called}={COSINE!r} is said of an axis: give its name or number too, as {{'lat': {COSINE!r}}}"
                f"{option}; the axes of {name_of(x)} that are {what} are {', '.join(map(str, axes))}"
            )
        if _is_word(weights):
            raise OptionError(
                f"{called}={shown(weights)} names no stored array; give the path of one, or weights by axis, as"
                f" {{'lat': {COSINE!r}}}, the cosines of its latitudes; the axes of {name_of(x)} are {axes_text(x)},"
                f" and {what} {'are' if len(axes) > 1 else 'is'} {', '.join(map(str, axes))}"
            )
        return _of_all_axes(weights, x, axes, align, called)
    if not weights:
        raise OptionError(f"{called}: the mapping is empty; its keys may be axes that are {what}")
    found = {}
    for key, value in weights.items():
        axis = axis_named(x, key, called)
        if axis not in axes or axis in found:
            wrong = "given twice" if axis in found else f"not {what}"
            raise OptionError(
                f"{called}: axis {shown(key)} of {name_of(x)} is {wrong}; its axes are {axes_text(x)}, and {what}"
                f" {'are' if len(axes) > 1 else 'is'} {', '.join(map(str, axes))}"
            )
        if not is_values(value):
            raise OptionError(
                f"{called}[{key!r}]={shown(value)} is no array; give one number for each of its places"
            )
        if isinstance(value, str) and value == COSINE:
            values = _cosines(x, axis, called)
        else:
            words = f"{COSINE!r}, for the cosines of latitudes, or one number for each place of that axis"
            values = stored_values(f"{called}[{key!r}]", value, words)
        if len(values) != x.shape[axis]:
            raise ShapeError(
                f"{called}[{key!r}]: found {len(values)} numbers; that axis of {name_of(x)} has {x.shape[axis]} places"
            )
        if align == "labels" and (labelled := _labelled(value, called)) is not None:
            check_same_labels(
                Along("X", x, axis), Along(f"{called}[{key!r}]", labelled, 0), "which have weights"
            )
        if values.dtype.kind == "c":
            raise OptionError(
                f"{called}[{key!r}] holds complex numbers; weights must be finite numbers of 0 or more"
            )
        found[axis] = values
    return broadcast_weights(x, axes, found)


def _is_word(weights: Any) -> bool:
    """Whether this text is the name of nothing that is there, and no path or URL: it may be meant for an axis."""
    if not isinstance(weights, str) or not weights:
        return False
    return not any(mark in weights for mark in "/.:[") and not os.path.lexists(weights)


def _of_all_axes(weights: Any, x: zarr.Array[Any], axes: tuple[int, ...], align: Align, called: str) -> Any:
    """Weights of several axes at once, such as areas of latitudes and longitudes, as those of the side that consists of
    these; others as they are. Raises ShapeError where they are of other places."""
    if len(axes) < 2 or not is_values(weights):
        return weights
    if not isinstance(weights, str | os.PathLike | zarr.Array) and not is_data_array(weights):
        found: Any = host_array(called, weights)
    else:
        found = open_array(weights, ndim=1, or_more=True, role=called)
    if len(found.shape) < 2:
        return weights
    shape = tuple(x.shape[axis] for axis in axes)
    if tuple(found.shape) != shape:
        raise ShapeError(
            f"{called} has shape {tuple(found.shape)}; give one number for each of the {' × '.join(map(str, shape))}"
            f" places of axes {', '.join(map(str, axes))} of {name_of(x)}, in that order, or weights by axis"
        )
    if not isinstance(found, zarr.Array):
        return found.reshape(-1)
    if align == "labels":
        for side, axis in enumerate(axes):
            check_same_labels(Along("X", x, axis), Along(called, found, side), "which have weights")
    return read_region(found, tuple(slice(0, side) for side in shape)).reshape(-1)


def _labelled(value: Any, called: str) -> zarr.Array[Any] | None:
    """A vector that may have coordinates: a DataArray, or one that is stored; None for any other."""
    if is_data_array(value) or isinstance(value, os.PathLike | zarr.Array):
        return open_array(value, ndim=1, role=called)
    return open_array(value, ndim=1, role=called) if isinstance(value, str) and value != COSINE else None


def _cosines(x: zarr.Array[Any], axis: int, called: str) -> np.ndarray:
    """The cosines of the coordinates of an axis, which are latitudes, in degrees unless their units say otherwise.
    Raises OptionError where there are none, or they are no latitudes."""
    name = dimension_names(x)[axis]
    said = f"{called}: {COSINE!r} is for the latitudes of axis {axis} of {name_of(x)}"
    if name is None:
        raise OptionError(f"{said}, which has no name by which they would be found; give one number for each")
    found = along_axis(x, axis)
    if found is None:
        raise OptionError(
            f"{said}, and it has no coordinates {name} of that length beside it; give one number for each"
        )
    if found.values.dtype.kind not in "iuf":
        raise OptionError(f"{said}, and the coordinates {name} are no real numbers; give one number for each")
    units = found.attributes.get("units") or "degrees"
    if units not in DEGREES | RADIANS:
        raise OptionError(
            f"{said}, and the coordinates {name} have units={shown(units)}; latitudes are in degrees_north or radians:"
            " mend that attribute, or give one number for each"
        )
    angles = found.values.astype(np.float64)
    latitudes = np.rad2deg(angles) if units in RADIANS else angles
    unknown = np.flatnonzero(np.isnan(latitudes))
    if len(unknown):
        raise OptionError(
            f"{said}, and the coordinates {name} hold NaN, first at place {unknown[0]} ({len(unknown)} of"
            f" {len(latitudes)}); mend them, or give one number for each"
        )
    if not (np.abs(latitudes) <= RIGHT_ANGLE * (1 + ANGLE_ROUNDING)).all():
        raise OptionError(
            f"{said}, and the coordinates {name} are not all from -90 to 90 degrees (units={units!r})"
        )
    return np.maximum(np.cos(np.deg2rad(latitudes)), 0.0)


def weights_of_lines(
    value: Any, length: int, summed: str, array: StoredArray, called: str = "weights"
) -> np.ndarray:
    """One weight for each of the lines that are summed over. called: the option, in messages. Raises ShapeError or
    OptionError."""
    if not is_values(value):
        raise OptionError(f"{called}={shown(value)} is no array; give one number for each of the {summed}")
    found = stored_values(called, value)
    if len(found) != length:
        raise ShapeError(
            f"{called}: found {len(found)} numbers; {name_of(array)} needs {length}, one for each of the {summed},"
            " which are summed over"
        )
    bad = (
        np.flatnonzero(~(np.isfinite(found) & (found >= 0))) if found.dtype.kind == "f" else np.zeros(1, int)
    )
    if len(bad):
        raise OptionError(
            f"{called}: number {bad[0]} is {found[bad[0]]}; weights must be finite numbers of 0 or more"
        )
    whole = found.sum()
    if not whole > 0 or not np.isfinite(whole):
        raise OptionError(f"{called}: they add up to {whole}; their sum must be finite and more than 0")
    if whole < np.finfo(np.float64).tiny:
        raise OptionError(
            f"{called}: they add up to {whole}, which is below double precision; multiply them by a number"
        )
    return found
