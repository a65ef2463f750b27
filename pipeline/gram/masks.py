"""Masks that are given in place of a number that stands for a missing one: which array they are for, along which of its
axes they lie, and what reads as missing beside them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr

from tilewright.kernels.arguments import shown
from tilewright.pipeline.errors import DTypeError, OptionError, ShapeError, StoreError
from tilewright.pipeline.gram.axes import axes_text
from tilewright.pipeline.store.arrays import name_of, open_array
from tilewright.pipeline.store.attributes import dimension_names
from tilewright.pipeline.store.labels.alignment import Align, Along, check_same_labels
from tilewright.pipeline.store.region import Flattened, HeldMask, Masked, base_of
from tilewright.pipeline.store.sources.dasks import lazy_of, pending_of
from tilewright.pipeline.store.sources.opening import holds_bool, is_given_array
from tilewright.pipeline.store.sources.parts import open_part
from tilewright.pipeline.store.sources.slices import sliced_name

HELD_ELEMENTS = 2**23
"""Masks of up to so many elements, a megabyte of bits, go along with every task; larger ones are read where they are
stored."""


@dataclass(frozen=True)
class GivenMasks:
    """Masks as they are given: one for all matrices, by the role ``""``, or one for each of some of them."""

    by_role: Mapping[str, Any]

    def of(self, roles: tuple[str, ...]) -> dict[str, Any]:
        """The masks of these matrices. Raises OptionError for roles that there are not, or for one mask of two
        matrices."""
        if "" in self.by_role:
            if len(roles) > 1:
                raise OptionError(
                    "missing: a mask of one matrix is given for two, X and Y; give {'X': mask, 'Y': mask}, or one of"
                    " them"
                )
            return {roles[0]: self.by_role[""]}
        wrong = [role for role in self.by_role if role not in roles]
        if wrong:
            raise OptionError(
                f"missing: a mask is given for {shown(wrong[0])}; there {'are' if len(roles) > 1 else 'is'}"
                f" {' and '.join(roles)}"
            )
        return dict(self.by_role)


def given_masks(value: Any) -> GivenMasks | None:
    """What was given as masks; None for what is no mask. Raises OptionError for what no mask can be."""
    if isinstance(value, Mapping):
        bad = [role for role, mask in value.items() if not _may_be_mask(mask)]
        if bad or not value:
            found = f"[{bad[0]!r}]={shown(value[bad[0]])} is no mask" if bad else ": the mapping is empty"
            raise OptionError(
                f"missing{found}; give for X, or Y, an array of bool, or the path of a stored one"
            )
        return GivenMasks(dict(value))
    return GivenMasks({"": value}) if _may_be_mask(value) else None


def _may_be_mask(value: Any) -> bool:
    """Whether an argument is, or names, an array, and no single number."""
    if is_given_array(value):
        return len(value.shape) > 0
    return isinstance(value, str | os.PathLike | zarr.Array | list | tuple)


def with_mask(array: zarr.Array[Any] | Flattened, given: Any, role: str, align: Align = "labels") -> Masked:
    """A matrix beside its mask, which is opened as every array is.

    Raises
    ------
    OptionError
        Nothing is stored under the name that is given, or it is no array; or its coordinates are not the array's.
    StoreError
        What is stored there cannot be read.
    DTypeError
        It holds no bool.
    ShapeError
        It has neither the array's shape nor one that broadcasts to it.
    """
    mask, axes = _beside(array, given, role, align)
    # An array of dask has its numbers once there is a cluster.
    small = mask.size <= HELD_ELEMENTS and pending_of(mask) is None
    return Masked(array, HeldMask.of(_read(mask) != 0) if small else mask, axes)


def laid_along(array: zarr.Array[Any], given: Any, role: str, align: Align) -> Any:
    """The mask of an array, as one of dask's that broadcasts to it. Raises as `with_mask`."""
    mask, axes = _beside(array, given, role, align)
    lazy = lazy_of(mask).transpose(tuple(np.argsort(axes))) != 0
    return lazy[tuple(slice(None) if axis in axes else None for axis in range(array.ndim))]


def _beside(
    array: zarr.Array[Any] | Flattened, given: Any, role: str, align: Align
) -> tuple[zarr.Array[Any], tuple[int, ...]]:
    """A mask, and the axis of the stored array for each of its own."""
    mask = _opened(given)
    called = "the mask" if isinstance(given, np.ndarray | list | tuple) else name_of(mask)
    if not holds_bool(mask):
        raise DTypeError(
            f"missing: {called} holds {mask.dtype}; a mask holds bool, True where an element of {role} is"
            " missing: compare it (mask != 0), or store it so"
        )
    axes = _axes(mask, called, base_of(array), role)
    if align == "labels":
        for number, axis in enumerate(axes):
            if mask.shape[number] == base_of(array).shape[axis]:
                sides = Along(role, base_of(array), axis), Along("the mask", mask, number)
                check_same_labels(*sides, "along which the mask lies")
    return mask, axes


def _opened(given: Any) -> zarr.Array[Any]:
    if isinstance(given, list | tuple):
        try:
            given = np.asarray(given)
        except ValueError as error:
            raise OptionError(f"missing={shown(given)} is no array; give a mask of bool") from error
    try:
        part = sliced_name(given)
        return (
            open_array(given, ndim=1, role="missing", or_more=True)
            if part is None
            else open_part(part, "missing")
        )
    except StoreError as error:
        if not isinstance(given, str | os.PathLike) or _is_something(os.fsdecode(given)):
            raise
        raise OptionError(
            f"missing={shown(given)} is neither a number nor 'nan' nor 'attributes', and names no stored mask"
        ) from error


def _is_something(name: str) -> bool:
    """Whether a name is that of a file, or what is in one, or a URL."""
    return "://" in name or any(
        map(os.path.exists, (name, name.rpartition("::")[0], name.rpartition("[")[0]))
    )


def _read(mask: zarr.Array[Any]) -> np.ndarray:
    try:
        return np.asarray(mask[...])
    except Exception as error:  # codecs and servers may raise anything
        raise StoreError(f"missing: cannot read {name_of(mask)}: {error}") from error


def _axes(mask: zarr.Array[Any], called: str, array: zarr.Array[Any], role: str) -> tuple[int, ...]:
    """The array's axis for each axis of the mask: by the names of dimensions where all of the mask's are the array's,
    else the last ones, as NumPy broadcasts."""
    axes = tuple(range(array.ndim - mask.ndim, array.ndim))
    names, ours = dimension_names(mask), dimension_names(array)
    if None not in names and len({*names}) == len(names) and {*names} <= {*ours}:
        axes = tuple(ours.index(name) for name in names)
    if mask.ndim > array.ndim or any(
        side not in (1, array.shape[axis]) for side, axis in zip(mask.shape, axes, strict=True)
    ):
        raise ShapeError(
            f"missing: {called} has shape {tuple(mask.shape)}, and {role}, {name_of(array)}, {array.shape}; a"
            " mask has the same, or broadcasts to it along its last axes or those of its dimensions' names: the axes of"
            f" {role} are {axes_text(array)}"
        )
    return axes
