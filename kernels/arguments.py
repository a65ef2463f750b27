"""The checks of arguments by their kind: true or false, one of several words, a whole number, a function, an array.

Each returns the value as the code behind it wants it, or raises an error that names the argument.
"""

from __future__ import annotations

import inspect
import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from tilewright.kernels.errors import DTypeError, OptionError, OutputError
from tilewright.kernels.gpu.memory import allocating
from tilewright.kernels.words import did_you_mean, in_one_line

Word = TypeVar("Word", bound=str)

MOST_SHOWN = 80
"""Characters of a value that a message shows: an array's or a graph's text may have thousands."""


def taken_by(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Of arguments by their names, such as a function's ``locals()`` before it does anything, those that another one,
    or a dataclass, names too."""
    return {name: given[name] for name in inspect.signature(function).parameters if name in given}


def shown(value: Any) -> str:
    """A value as messages show it: its ``repr``, in one line, cut where it is long; its type where it has none."""
    try:
        text = in_one_line(repr(value))
    except Exception:  # some classes' fails, as that of an object that is closed
        return f"an object of {type(value).__module__}.{type(value).__qualname__}"
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


def check_flag(name: str, value: Any) -> bool:
    """A truth value, Python's or NumPy's. Numbers are none, nor are texts: "no" would count as true."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise OptionError(f"{name}={shown(value)} is neither true nor false; pass True or False")


def check_choice(name: str, value: Any, choices: Sequence[Word], what: str = "") -> Word:
    """One of several words. what: what it is none of, in the message; without it the word is unknown."""
    # An array, for example, cannot be compared with a word.
    if isinstance(value, str) and value in choices:
        return str(value)  # type: ignore[return-value]
    found = f"no {what}" if what else "unknown"
    raise OptionError(
        f"{name}={shown(value)} is {found}; it may be {', '.join(map(repr, choices))}{did_you_mean(value, choices)}"
    )


def as_count(value: Any) -> int | None:
    """A whole number, Python's or NumPy's; None for anything else, truth values and floats among them."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        return None
    return operator.index(value)


def check_callable(name: str, value: Any) -> None:
    if not callable(value):
        raise OptionError(f"{name}={shown(value)} cannot be called; pass a function of one argument")


def host_array(name: str, value: Any) -> np.ndarray:
    """``numpy.asarray`` of what may be anything.

    Raises DTypeError for what NumPy makes no array of, and OptionError for a masked array, whose mask would be
    dropped.
    """
    if _is_masked(value):
        raise OptionError(
            f"{name} is a masked array, whose mask would be ignored; pass {name}.filled(0), or another value for what"
            f" is missing, or {name}.data for the numbers beneath the mask"
        )
    try:
        return np.asarray(value)
    except MemoryError:
        raise
    except Exception as error:  # whatever an object of another library has to say
        raise DTypeError(
            f"{name} is no array that NumPy understands: {error}; pass an array of numbers"
        ) from None


def _is_masked(value: Any) -> bool:
    """NumPy imports its masked arrays where they are first named, which an ordinary array need not wait for."""
    return type(value) is not np.ndarray and isinstance(value, np.ma.MaskedArray)


def new_host_array(what: str, shape: tuple[int, ...], dtype: np.dtype, *, zeros: bool = False) -> np.ndarray:
    """``numpy.empty``, or ``numpy.zeros``, of a result whose shape follows from arguments. what: begins the message.

    Raises DeviceMemoryError where this process cannot have so much.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    with allocating(what, nbytes, on_gpu=False):
        if nbytes > sys.maxsize:
            raise MemoryError("more bytes than addresses")  # to NumPy a wrong shape
        return np.zeros(shape, dtype) if zeros else np.empty(shape, dtype)


def check_host_out(out: Any, beside: str) -> None:
    """Raise OutputError for an output that is no NumPy array, or has a mask. beside: what it has to be of one kind
    with, such as "a and b are"."""
    if not isinstance(out, np.ndarray):
        raise OutputError(f"out is {type(out).__name__}; it must be a NumPy array, as {beside}")
    if _is_masked(out):
        raise OutputError("out is a masked array, whose mask would not change; pass out.data")
