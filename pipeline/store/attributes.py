"""What an array's metadata say beside its shape and dtype: that its numbers are packed, what its dimensions are."""

from __future__ import annotations

import base64
import math
import re
import reprlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tilewright.kernels.arguments import shown
from tilewright.kernels.numbers import counted
from tilewright.kernels.passes.masked import Masks
from tilewright.pipeline.errors import OptionError
from tilewright.pipeline.store.arrays import name_of
from tilewright.pipeline.store.chunks import KNOWN_CODECS, codecs_for_zarr
from tilewright.pipeline.store.region import (
    Flattened,
    Masked,
    Packing,
    Section,
    StoredArray,
    unmasked,
    whole_of,
)
from tilewright.pipeline.store.sources.mapped import NETCDF_FILL, NETCDF_FILLS

SCALES = {"scale_factor": 1, "add_offset": 0}
"""The attributes of CF's conventions that say what a stored number stands for, and the values that change nothing."""

UNSIGNED = "_Unsigned"
"""The one that says whether stored integers, whatever their dtype, stand for the unsigned ones of the same bits."""

MASKS = ("_FillValue", "missing_value")
"""Those that name stored numbers which stand for missing ones."""

ZARR_FILL = "fill_value"
"""The field of an array's metadata that xarray reads as ``_FillValue`` in format 2."""

RANGES = ("valid_range", "valid_min", "valid_max")
"""Those outside of whose range stored numbers stand for missing ones."""

FLAGS = ("flag_masks", "flag_values")
"""Those that say of stored integers that they stand for sets of bits, or for one of several states."""

DESCRIBED = frozenset(["units", "standard_name", "long_name", "cell_methods", "grid_mapping"])
"""Those by which CF's conventions describe a variable: what has one, and names of its dimensions, came from netCDF, or
may have."""

DEFAULT_FILL = "netCDF's default fill value"
"""What a message calls it."""

MOST_VALUES = 100
"""The most masks that one attribute may name: every stored number is compared with each, and a longer list has another
use."""

NUMBER = re.compile(r"[+-]?((\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?|inf(inity)?|nan)", re.ASCII | re.IGNORECASE)
"""A number as a text: NaN and infinity, which JSON has not, or what somebody wrote by hand."""

DIMENSIONS = "_ARRAY_DIMENSIONS"
"""The attribute in which xarray keeps the names of dimensions in format 2; format 3 has a field for them."""

Names: TypeAlias = tuple[str | None, ...]
"""The names of an array's dimensions; None for one without."""


@dataclass
class _Reading:
    """What an array's attributes make of its stored numbers."""

    found: dict[str, Any] = field(default_factory=dict)
    """The attributes that make other numbers of them, and those that are not understood."""
    unclear: list[str] = field(default_factory=list)
    """Of these, those that should be numbers of the dtype and are not."""
    masking: list[str] = field(default_factory=list)
    """Of these, those that make missing ones of them."""
    values: set[Any] = field(default_factory=set)
    """As in `Masks`; in a set 0.0 and -0.0 are one, as they are where stored numbers are compared."""
    largest: float = 0.0
    """As in `Masks`."""
    least: Any = None
    most: Any = None
    default: Any = None
    """The fill value that netCDF gives where nobody names one; None: there is none."""


def packing(array: StoredArray) -> dict[str, Any]:
    """The attributes by which xarray and other readers of CF's conventions make other numbers of the stored ones.

    Those that change no number are left out: a scale of 1, a mask that is NaN, which is multiplied as one, or that no
    element can equal, and a range that holds every number of the dtype. In format 2 xarray writes ``_FillValue`` as
    Zarr's own ``fill_value``, and masks it. A 0 there is what others write who mean nothing by it; it counts where the
    array has xarray's names of dimensions, without which xarray opens none.
    """
    return _read(array).found


def is_unpacked(array: StoredArray) -> bool:
    """Whether an array reads as what its packed numbers stand for."""
    whole = whole_of(array)
    return isinstance(whole, Masked) and whole.packing is not None


def codecs_notice(role: str, array: StoredArray) -> str | None:
    """One sentence for the user of an array whose chunks go through zarr-python for their codecs; None for any
    other."""
    names = codecs_for_zarr(array)
    if not names:
        return None
    return (
        f"{role}: chunks of {name_of(array)}, encoded by {' and '.join(names)}, go through zarr-python, more slowly;"
        f" if it is read often, store it plain, or by {', '.join(KNOWN_CODECS[:4])}"
    )


def packing_notice(
    role: str, array: StoredArray, *, written: bool = False, missing: float | str | None = None
) -> str | None:
    """One sentence for the user of an array of which readers make other numbers than are stored; None for any other.

    written: it is an output, in which a product is stored. missing: the number that counts as missing, where one does:
    an array whose attributes say no more than that is read as they say; of one beside a mask only the numbers tell
    whether what they say is covered.
    """
    reading = _read(array)
    if reading.found and is_unpacked(array) and not written:  # and no range says more
        reading.found = {name: value for name, value in reading.found.items() if name in (*RANGES, *FLAGS)}
    if not reading.found:
        return None
    named = reading.values - {reading.default}
    codes = named if not reading.unclear and set(reading.found) <= set(MASKS) else set()
    if missing is not None and codes == {missing}:
        return None
    if codes and isinstance(whole_of(array), Masked) and not written:
        return None  # all of them are missing beside a mask, or another code
    doubt = ""
    if reading.unclear:
        doubt = f" ({' and '.join(reading.unclear)} cannot be understood for {array.dtype})"
    # xarray masks nothing by ranges, makes nothing of flags, and keeps both where it unpacks an array.
    passed_over = [name for name in reading.found if name in (*RANGES, *FLAGS)]
    reader = "xarray or another" if len(passed_over) < len(reading.found) else "a"
    has = (
        f"{role}: {name_of(array)} has {_texts(reading.found)}{doubt}, by which {reader} reader of CF's conventions"
        " unpacks or masks its numbers;"
    )
    if written:
        return f"{has} C is stored there as it is computed: give an array without them"
    how = "without these attributes" if passed_over else "(xarray: ds.drop_encoding().to_zarr(path))"
    if missing is not None and len(codes) == 1:
        (code,) = codes
        return (
            f"{has} here its stored numbers are multiplied as they are, and {shown(missing)} counts as missing: say"
            f" missing={shown(code)} (--missing)"
        )
    attributes = "missing='attributes' (--missing attributes)"
    if codes and missing is None:
        return (
            f"{has} here its stored numbers are multiplied as they are: to leave them out, say {attributes} to gram,"
            f" cov, corr or eofs; to multiply what they stand for, store it unpacked {how}"
        )
    unpack = ""
    if {*SCALES, UNSIGNED} & reading.found.keys():
        unpack = (
            f" say {attributes} to gram, cov, corr or eofs, or open it with xarray, which unpacks it, and give the"
            " DataArray;"
        )
    return (
        f"{has} here its stored numbers are multiplied as they are: to multiply what they stand for,{unpack}"
        f"{' or' if unpack else ''} store it unpacked {how}"
    )


def masks_of(array: StoredArray) -> Masks | None:
    """Which stored numbers of an array stand for missing ones by CF's conventions; None where none can.

    They are cast to the array's dtype, so that -9999.9, which JSON has in double precision, is the nearest number of a
    float32 array. What the dtype does not hold, such as 300 in uint8, 1e300 in float32 or 0.5 in int16, masks nothing.
    Ranges are those of stored numbers, whatever these stand for. What is no number is passed over; `packing_notice`
    names it.
    """
    reading = _read(array)
    if not reading.masking and reading.default is None:
        return None
    values = sorted(reading.values, key=lambda value: (value.real, value.imag))
    named = {name: reading.found[name] for name in reading.masking}
    if reading.default is not None:
        named[DEFAULT_FILL] = reading.default
    names = _texts(named)
    return Masks(tuple(values), reading.least, reading.most, names, reading.largest)


def missing_codes(array: StoredArray, *, as_xarray: bool = False) -> tuple[Any, ...]:
    """The stored numbers that ``_FillValue`` and ``missing_value`` say stand for missing ones, as the dtype has them,
    in order: what xarray makes NaN of. Not those beyond ranges, nor netCDF's default fill values, which it leaves.

    as_xarray: also Zarr's own fill value in format 2, which many an array has by whoever wrote it meant nothing.
    """
    attributes, dtype = array.attrs.asdict(), array.dtype.newbyteorder("=")
    reading = _Reading()
    given = {name: attributes[name] for name in MASKS if attributes.get(name) is not None}
    if as_xarray and (fill := zarr_fill(array, given | attributes)) is not None:
        given[ZARR_FILL] = fill
    turned = _is_turned(attributes.get(UNSIGNED), dtype)
    for name, value in given.items():
        _read_mask(reading, name, value, dtype, turned)
    return tuple(sorted(reading.values, key=lambda value: (value.real, value.imag)))


def packing_of(array: StoredArray) -> Packing | None:
    """What the stored real numbers stand for by ``scale_factor``, ``add_offset`` and ``_Unsigned``; None where they are
    what they are. Raises OptionError for a scale or an offset that is no finite number."""
    attributes, dtype = array.attrs.asdict(), array.dtype.newbyteorder("=")
    turned = _is_turned(attributes.get(UNSIGNED), dtype)
    given = dict(SCALES)
    for name in SCALES:
        if attributes.get(name) is None:
            continue
        numbers = _numbers(attributes[name])
        if (
            len(numbers) != 1
            or isinstance(numbers[0], complex | None)
            or not math.isfinite(_as_float(numbers[0]))
        ):
            raise OptionError(
                f"{name_of(array)} has {_texts({name: attributes[name]})}, which is no finite number, so that nobody"
                " knows what its numbers stand for; mend that attribute"
            )
        given[name] = numbers[0]
    plain = all(given[name] == value for name, value in SCALES.items())
    if (plain and not turned) or dtype.kind not in "iuf":
        return None
    scale, offset = (_as_float(given[name]) for name in SCALES)
    return Packing(scale, offset, turned)


def zarr_fill(array: StoredArray, given: Mapping[str, Any]) -> Any:
    """Zarr's fill value in format 2, where that says anything that the attributes do not; else None."""
    fill = array.metadata.fill_value if array.metadata.zarr_format == 2 else None
    fill = fill.item() if isinstance(fill, np.generic) else fill
    if fill is None or (fill == 0 and DIMENSIONS not in given) or given.get(MASKS[0]) == fill:
        return None
    return fill


def masked_caution(found: Mapping[str, int], masks: Mapping[str, Masks], result: str) -> str | None:
    """One sentence about stored numbers that stand for missing ones and were multiplied as numbers; None where there
    were none.

    found: for each role, such as ``A``, how many there were. masks: for each of these roles, what was looked for.
    result: what they are in now.
    """
    told = [
        f"{counted(count, 'element')} of {role} ({masks[role].names})"
        for role, count in found.items()
        if count
    ]
    if not told:
        return None
    every = [masks[role] for role, count in found.items() if count]
    named = any(name in each.names for each in every for name in (*MASKS, ZARR_FILL))
    cures = ["say missing='attributes' (--missing attributes)"] if named else []
    defaults = {value for each in every if DEFAULT_FILL in each.names for value in each.values}
    if not named and len(defaults) == 1:
        (default,) = defaults
        cures.append(f"say missing={default} (--missing {default})")
    cure = " or ".join(cures) or "give a mask (missing, --missing)"
    return (
        f"{' and '.join(told)} stand for missing numbers, and went into {result} as the numbers that are stored: to"
        f" leave them out, {cure} to gram, cov, corr or eofs, or store NaN or 0 in their place"
    )


_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 60
_SHOWN.maxlevel = 3


def _texts(attributes: Mapping[str, Any]) -> str:
    """Attributes for a message: they are anybody's, so of what is long or deep only the beginning."""
    return ", ".join(f"{name}={_SHOWN.repr(value)}" for name, value in attributes.items())


def _read(array: StoredArray) -> _Reading:
    attributes, dtype = array.attrs.asdict(), array.dtype.newbyteorder("=")
    given = {name: value for name, value in attributes.items() if name != ZARR_FILL and value is not None}
    if (fill := zarr_fill(array, given)) is not None:
        given[ZARR_FILL] = fill
    reading = _Reading()
    for name, plain in SCALES.items():
        if name in given and _numbers(given[name]) != [plain]:
            reading.found[name] = given[name]
    turned = _is_turned(given.get(UNSIGNED), dtype)
    if turned:
        reading.found[UNSIGNED] = given[UNSIGNED]
    for name in (*MASKS, ZARR_FILL):
        if name in given:
            _read_mask(reading, name, given[name], dtype, turned)
    if dtype.kind != "c":
        _read_ranges(reading, {name: given[name] for name in RANGES if name in given}, dtype, turned)
    if dtype.kind in "iu":
        reading.found |= {name: given[name] for name in FLAGS if name in given}
    default = _default_fill(array, given)
    if default is not None:
        reading.values.add(default)
        reading.largest = max(reading.largest, float(abs(default)))
        reading.default = default
    return reading


def _default_fill(array: StoredArray, given: Mapping[str, Any]) -> Any:
    """netCDF's default fill value, where nobody names another: of a variable of netCDF, and of floats that were one, as
    their attributes tell. No other float is so large, while integers may be."""
    if MASKS[0] in given:
        return None
    if NETCDF_FILL in given or array.dtype.kind != "f" or not DESCRIBED & given.keys():
        return given.get(NETCDF_FILL)
    return (
        NETCDF_FILLS.get(array.dtype.newbyteorder("=").str[1:])
        if None not in dimension_names(array)
        else None
    )


def _is_turned(said: Any, dtype: np.dtype) -> bool:
    """Whether ``_Unsigned`` makes unsigned integers of signed ones, or signed ones of unsigned."""
    word = str(said).lower() if isinstance(said, str | bool) else ""
    return (dtype.kind, word) in (("i", "true"), ("u", "false"))


def _read_mask(reading: _Reading, name: str, value: Any, dtype: np.dtype, turned: bool) -> None:
    """Add what ``_FillValue`` or its like says."""
    numbers = _numbers(value)
    if dtype.kind == "c" and name == MASKS[0] and len(numbers) == 2 and None not in numbers:
        numbers = [complex(_as_float(numbers[0]), _as_float(numbers[1]))]
    if not 0 < len(numbers) <= MOST_VALUES or None in numbers:
        reading.found[name] = value
        reading.unclear.append(name)
        return
    kept = [cast for number in numbers if (cast := _cast(number, dtype, turned)) is not None]
    if kept:
        reading.values.update(kept)
        reading.largest = max(reading.largest, *(float(abs(number)) for number in kept))
        reading.masking.append(name)
        reading.found[name] = numbers[0] if isinstance(value, str) else value


def _read_ranges(reading: _Reading, given: dict[str, Any], dtype: np.dtype, turned: bool) -> None:
    """Add what the valid ranges say, and take out the masks beyond them, which the range masks already."""
    whole = _ends(dtype, turned)
    least, most = whole
    for name, value in given.items():
        numbers = _numbers(value)
        pair = {
            "valid_range": numbers,
            "valid_min": [*numbers, math.inf],
            "valid_max": [-math.inf, *numbers],
        }[name]
        ends = _range(pair, dtype, turned) if len(pair) == 2 else None
        if ends is None or max(least, ends[0]) > min(most, ends[1]):
            reading.found[name] = value
            reading.unclear.append(name)
        elif ends != whole:
            least, most = max(least, ends[0]), min(most, ends[1])
            reading.masking.append(name)
            reading.found[name] = value
    if (least, most) == whole:
        return
    if turned:
        reading.least, reading.most = _wrapped(least, dtype), _wrapped(most, dtype)
        reading.values = {value for value in reading.values if least <= _turned(value, dtype) <= most}
        return
    reading.least = least if least != whole[0] else None
    reading.most = most if most != whole[1] else None
    reading.values = {value for value in reading.values if least <= value <= most}


def _numbers(value: Any) -> list[Any]:
    """The Python numbers of an attribute, of a list one for each item; None in the place of what is no number."""
    return [_number(each) for each in (value if isinstance(value, list | tuple) else [value])]


def _number(value: Any) -> Any:
    """An attribute's int, float or complex, also where it is written as a text, as xarray writes the ``_FillValue`` of
    floats in format 3: their eight bytes in base64. None for anything else."""
    if isinstance(value, int | float | complex) and not isinstance(value, bool):
        return value
    if not isinstance(value, str):
        return None
    if NUMBER.fullmatch(value):
        try:
            return int(value)
        except ValueError:
            return float(value)
    try:
        return struct.unpack("<d", base64.b64decode(value, validate=True))[0]
    except (ValueError, struct.error):
        return None


def _as_float(number: int | float) -> float:
    try:
        return float(number)
    except OverflowError:  # of an int
        return math.inf if number > 0 else -math.inf


def _cast(number: Any, dtype: np.dtype, turned: bool) -> Any:
    """The number as elements of the dtype have it, as a Python number; None where none of them can equal it."""
    if dtype.kind == "c":
        parts = [
            _cast(part, np.dtype(f"f{dtype.itemsize // 2}"), False) for part in (number.real, number.imag)
        ]
        return complex(*parts) if None not in parts else None
    if isinstance(number, complex):
        return None
    if dtype.kind == "f":
        with np.errstate(over="ignore", under="ignore"):
            cast = float(dtype.type(_as_float(number)))
        lost = (math.isinf(cast) or cast == 0) and cast != number
        return None if lost or math.isnan(cast) else cast
    if number != number or number in (math.inf, -math.inf) or number != int(number):
        return None
    stored = int(number)
    least, most = _ends(dtype, False)
    if turned:
        meant_least, meant_most = _ends(dtype, True)
        return _wrapped(stored, dtype) if min(least, meant_least) <= stored <= max(most, meant_most) else None
    return stored if least <= stored <= most else None


def _ends(dtype: np.dtype, turned: bool) -> tuple[Any, Any]:
    """The least and the largest number that elements can stand for: infinities for floats."""
    if dtype.kind == "f":
        return -math.inf, math.inf
    info = np.iinfo(_other_sign(dtype) if turned else dtype)
    return int(info.min), int(info.max)


def _other_sign(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"{'u' if dtype.kind == 'i' else 'i'}{dtype.itemsize}")


def _wrapped(number: int, dtype: np.dtype) -> int:
    """The integer of the dtype that has the same bits."""
    least, _ = _ends(dtype, False)
    return (number - least) % 2 ** (8 * dtype.itemsize) + least


def _turned(stored: int, dtype: np.dtype) -> int:
    """What a stored integer stands for where the dtype's sign is not what it says."""
    return _wrapped(stored, _other_sign(dtype))


def _range(pair: list[Any], dtype: np.dtype, turned: bool) -> tuple[Any, Any] | None:
    """The least and the largest number within a range that elements can stand for; None where it holds none, or has
    ends that are no numbers."""
    if any(number is None or isinstance(number, complex) or number != number for number in pair):
        return None
    least, most = _ends(dtype, turned)
    if dtype.kind == "f":
        with np.errstate(over="ignore", under="ignore"):
            low, high = (float(dtype.type(_as_float(number))) for number in pair)
        return (low, high) if low <= high and low < math.inf and high > -math.inf else None
    low, high = pair
    low = least if low == -math.inf else low
    high = most if high == math.inf else high
    if math.inf in (low, -high):
        return None
    low, high = math.ceil(low), math.floor(high)
    if turned:
        # Numbers of the stored type, as CF has them, or of the one that is meant.
        stored_least, stored_most = _ends(dtype, False)
        low, high = (
            _turned(end, dtype) if stored_least <= end <= stored_most else end for end in (low, high)
        )
    low, high = max(low, least), min(high, most)
    return (low, high) if low <= high else None


def dimension_names(array: StoredArray) -> Names:
    """The names of an array's dimensions. Axes that are flattened into one have theirs joined, such as ``lat_lon``; of
    those without one, ``axis_`` and the number."""
    array = unmasked(array)
    if isinstance(array, Flattened):
        named = dimension_names(array.array)
        return tuple(
            "_".join(named[axis] or f"axis_{axis}" for axis in axes) if len(axes) > 1 else named[axes[0]]
            for axes in (array.rows, array.columns)
        )
    metadata = array.metadata
    found = metadata.dimension_names if metadata.zarr_format == 3 else array.attrs.get(DIMENSIONS)
    if not isinstance(found, list | tuple) or len(found) != array.ndim:
        return (None,) * array.ndim
    return tuple(name if isinstance(name, str) else None for name in found)


def product_names(a: StoredArray, b: StoredArray, transpose_a: bool, transpose_b: bool) -> Names | None:
    """What the dimensions of C = op(A) op(B) are called: as the rows of op(A) and the columns of op(B); None where
    neither has a name.

    Without names xarray cannot open a group that C is in, nor with two that are the same, as those of a Gram matrix
    would be: the second gets ``_2`` appended.
    """
    rows = side_name(a, int(transpose_a))
    columns = side_name(b, int(not transpose_b))
    if rows is None and columns is None:
        return None
    return rows, f"{columns}_2" if columns is not None and rows == columns else columns


def side_name(array: StoredArray, side: int) -> str | None:
    """The name of a matrix's side. Of some of its rows or columns it says which: in one group xarray opens no two
    lengths of a dimension."""
    name = dimension_names(array)[side]
    if name is None or not isinstance(array, Section) or array.shape[side] == array.array.shape[side]:
        return name
    first, last = (array.rows, array.columns)[side]
    return f"{name}_{first}_{last}"


FLATTENED = "flattened"
"""The attribute of C that says of which axes its sides are made, for those that are made of more than one."""


class SideNames(NamedTuple):
    """What a side of C is called there."""

    name: str | None
    levels: tuple[str, ...] = ()
    """What the axes are called that it is flattened from; of a side that is one axis none."""

    @property
    def every(self) -> tuple[str, ...]:
        return (*self.levels, *(() if self.name is None else (self.name,)))


def product_sides(
    a: StoredArray, b: StoredArray, transpose_a: bool, transpose_b: bool
) -> tuple[SideNames, SideNames]:
    """What the sides of C = op(A) op(B) are called, where nothing else has these names: as `product_names` has it, and
    the axes of flattened ones as X calls them, but no two alike, so that of a field by itself the second side's are
    ``lat_2`` and ``lon_2``."""
    names = product_names(a, b, transpose_a, transpose_b) or (None, None)
    taken = {name for name in names if name is not None}
    rows, columns = (
        SideNames(name, distinct_levels(factor, side, taken) if name is not None else ())
        for name, (factor, side) in zip(names, sides_of(a, b, transpose_a, transpose_b), strict=True)
    )
    return rows, columns


def sides_of(
    a: StoredArray, b: StoredArray, transpose_a: bool, transpose_b: bool
) -> tuple[tuple[StoredArray, int], tuple[StoredArray, int]]:
    """The sides of A and of B that those of C = op(A) op(B) are."""
    return (a, int(transpose_a)), (b, int(not transpose_b))


def distinct_levels(array: StoredArray, side: int, taken: set[str], ending: str = "") -> tuple[str, ...]:
    """The names of the axes that a side is flattened from, with an ending, and ``_2`` for each time that one is taken.
    They are added to those that are. None of a side that is one axis."""
    found = []
    for axis in (made_of(array, side) or {}).get("dimensions", ()):
        level = f"{axis}{ending}"
        while level in taken:
            level += "_2"
        taken.add(level)
        found.append(level)
    return tuple(found)


def flattened_sides(
    a: StoredArray,
    b: StoredArray,
    transpose_a: bool,
    transpose_b: bool,
    called: Sequence[SideNames] | None = None,
) -> dict[str, Any] | None:
    """The attributes of C = op(A) op(B) by which a reader can take its flattened sides apart; None where no side is
    made of more than one axis.

    `FLATTENED` has what `made_of` says of each such dimension of C, by its name, and as ``levels`` what its axes are
    called among those of C. called: its names, if not those of `product_sides`.
    """
    made = [made_of(*side) for side in sides_of(a, b, transpose_a, transpose_b)]
    if made == [None, None]:
        return None
    called = called or product_sides(a, b, transpose_a, transpose_b)
    found = {
        one.name: of_side | {"levels": list(one.levels)}
        for one, of_side in zip(called, made, strict=True)
        if one.name is not None and of_side is not None
    }
    return {FLATTENED: found} if found else None


def made_of(array: StoredArray, side: int) -> dict[str, Any] | None:
    """What a side of a matrix, its rows (0) or columns (1), is made of: the names and lengths of several axes, the last
    one fastest; and where only some of their places are taken, the first and the last + 1. None where it is one
    axis."""
    places = (array.rows, array.columns)[side] if isinstance(array, Section) else None
    array = unmasked(array)
    if not isinstance(array, Flattened):
        return None
    axes = (array.rows, array.columns)[side]
    if len(axes) < 2:
        return None
    base, names = array.array, dimension_names(array.array)
    shape = [int(base.shape[axis]) for axis in axes]
    made = {"dimensions": [names[axis] or f"axis_{axis}" for axis in axes], "shape": shape}
    return made if places in (None, (0, math.prod(shape))) else made | {"places": list(places)}
