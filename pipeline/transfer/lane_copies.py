"""Lanes, and copies between their pinned blocks and the device as loops outside the interpreter start them.

The loops pass on the driver's functions by address. What is copied are ``height`` rows of ``width`` bytes; they lie
side by side in a block unless a step is given. ``words`` is what `copy_words` made, and ``lane`` int64[`LANE_WORDS`],
of whose two blocks ``turn`` is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np

from tilewright.pipeline.transfer.calls import call1, call2, call4

WORDS = 16
"""The driver's CUDA_MEMCPY2D in words of 64 bits."""
FROM_KIND, FROM_HOST, FROM_DEVICE, FROM_PITCH = 2, 3, 4, 6
TO_KIND, TO_HOST, TO_DEVICE, TO_PITCH = 9, 10, 11, 13
WIDTH, HEIGHT = 14, 15
"""Indices in it: the kind of memory copied from and to, the addresses in host or device memory, and bytes from row to
row; bytes of a row, and rows. All others stay zero."""
HOST_MEMORY, DEVICE_MEMORY = 1, 2

BLOCK, EVENT, STREAM = 0, 2, 4
"""Indices in a lane: addresses of two blocks of pinned memory, handles of an event for each, handle of the stream."""
LANE_WORDS = 5


def lane_words(blocks: Sequence[np.ndarray], events: Sequence[Any], stream: Any) -> np.ndarray:
    """A lane as the loops take it, of two pinned blocks, two events and a stream, which must all outlive it."""
    places = [block.ctypes.data for block in blocks]
    return np.array([*places, *(int(event.handle) for event in events), int(stream)], np.int64)


def _copy_words(to_device: bool) -> Any:
    """The driver's description of a copy, of which only addresses and sizes are left to fill in."""
    words = np.zeros(WORDS, np.int64)
    words[FROM_KIND] = HOST_MEMORY if to_device else DEVICE_MEMORY
    words[TO_KIND] = DEVICE_MEMORY if to_device else HOST_MEMORY
    return words


def _send(
    copy: int,
    copy_rows: int,
    record: int,
    words: Any,
    lane: Any,
    turn: int,
    source: int,
    step: int,
    target: int,
    pitch: int,
    width: int,
    height: int,
) -> bool:
    """Start copying rows, ``step`` bytes apart in a block and ``pitch`` on the device, and record the block's event;
    returns whether both worked."""
    stream = lane[STREAM]
    if height == 1 or step == width == pitch:
        good = call4(copy, target, source, height * width, stream) == 0
    else:
        words[FROM_HOST], words[FROM_PITCH] = source, step
        words[TO_DEVICE], words[TO_PITCH] = target, pitch
        words[WIDTH], words[HEIGHT] = width, height
        good = call2(copy_rows, numba.int64(words.ctypes.data), stream) == 0
    return call2(record, lane[EVENT + turn], stream) == 0 and good


def _fetch(
    copy: int,
    copy_rows: int,
    wait: int,
    record: int,
    words: Any,
    lane: Any,
    turn: int,
    source: int,
    pitch: int,
    width: int,
    height: int,
) -> bool:
    """Start copying rows, ``pitch`` bytes apart on the device, to the start of a block once its last copy has passed,
    and record the block's event; returns whether all of it worked."""
    place, stream = lane[BLOCK + turn], lane[STREAM]
    good = call1(wait, lane[EVENT + turn]) == 0
    if height == 1 or pitch == width:
        good = good and call4(copy, place, source, height * width, stream) == 0
    else:
        words[FROM_DEVICE], words[FROM_PITCH] = source, pitch
        words[TO_HOST], words[TO_PITCH] = place, width
        words[WIDTH], words[HEIGHT] = width, height
        good = good and call2(copy_rows, numba.int64(words.ctypes.data), stream) == 0
    return call2(record, lane[EVENT + turn], stream) == 0 and good


def _settle(wait: int, lane: Any) -> bool:
    """Wait for the last copies of both blocks; returns whether they worked. No copy touches the blocks after that."""
    good = True
    for turn in range(2):
        good = call1(wait, lane[EVENT + turn]) == 0 and good
    return good


copy_words, send, fetch = numba.njit(_copy_words), numba.njit(_send), numba.njit(_fetch)
settle = numba.njit(_settle)
"""The same for loops to call."""
