"""Keys of 64 bits sorted by their digits, the lowest first, so many bits as they have: some ten passes over memory, in
order, where comparing them would miss the cache or guess wrong at each step."""

from __future__ import annotations

import numpy as np
from numba import njit, uint64

from tilewright.kernels.cpu.loops import kept
from tilewright.kernels.cpu.spare import give_back, take
from tilewright.kernels.numbers import ceil_div

DIGIT_BITS = 9
"""Places that are written to at the same time, 2 to the power of: a line of each fits the first cache."""


@njit(nogil=True)
def _digits(keys, passes):  # type: ignore[no-untyped-def]
    """How often each digit occurs, int64[(passes, digits)]."""
    mask = uint64((1 << DIGIT_BITS) - 1)
    times = np.zeros((passes, 1 << DIGIT_BITS), np.int64)
    for place in range(len(keys)):
        key = keys[place]
        for digit in range(passes):
            times[digit, (key >> uint64(digit * DIGIT_BITS)) & mask] += 1
    return times


@njit(nogil=True)
def _to_places(times, total):  # type: ignore[no-untyped-def]
    """Make of how often each value of a digit occurs where its first key goes. Returns whether all have the same."""
    place = 0
    for value in range(len(times)):
        here = times[value]
        if here == total:
            return True
        times[value] = place
        place += here
    return False


@kept
@njit(nogil=True)
def sort_by_digits(keys, other, passes):  # type: ignore[no-untyped-def]
    """Sort keys, uint64, by way of another array of the same length. Returns whether the result lies there."""
    mask = uint64((1 << DIGIT_BITS) - 1)
    times = _digits(keys, passes)
    moved = False
    for digit in range(passes):
        places = times[digit]
        if _to_places(places, len(keys)):
            continue
        shift = uint64(digit * DIGIT_BITS)
        for at in range(len(keys)):
            key = keys[at]
            value = (key >> shift) & mask
            other[places[value]] = key
            places[value] += 1
        keys, other = other, keys
        moved = not moved
    return moved


@kept
@njit(nogil=True)
def _sort_pairs(keys, values, other, other_values, passes):  # type: ignore[no-untyped-def]
    """As `sort_by_digits`, with a value beside each key."""
    mask = uint64((1 << DIGIT_BITS) - 1)
    times = _digits(keys, passes)
    moved = False
    for digit in range(passes):
        places = times[digit]
        if _to_places(places, len(keys)):
            continue
        shift = uint64(digit * DIGIT_BITS)
        for at in range(len(keys)):
            key = keys[at]
            value = (key >> shift) & mask
            to = places[value]
            other[to] = key
            other_values[to] = values[at]
            places[value] = to + 1
        keys, other = other, keys
        values, other_values = other_values, values
        moved = not moved
    return moved


def sort_keys(keys: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys, uint64, of so many bits, in order; they may lie where they were, or in another array. Returns that with
    them, and the one whose contents are of no use any more."""
    other = take(len(keys), keys.dtype)
    moved = sort_by_digits(keys, other, ceil_div(bits, DIGIT_BITS))
    return (other, keys) if moved else (keys, other)


def sort_pairs(keys: np.ndarray, values: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys, as above, and the values, of 64 bits, beside them: those of equal keys keep their order. They lie where
    they were, or both in other arrays."""
    other, other_values = take(len(keys), keys.dtype), take(len(values), values.dtype)
    if _sort_pairs(keys, values, other, other_values, ceil_div(bits, DIGIT_BITS)):
        return other, other_values
    give_back(other, other_values)
    return keys, values
