"""Decompression of Zstandard frames by a loop that does not hold the interpreter's lock.

python-zstandard releases the lock for each step of the decoder, and asks a Python object for more stored bytes. Where
dozens of threads decompress, one a core, getting the lock back takes 50 µs, while all others wait for their turns. So
the loop itself reads the file and calls the decoder by address, and returns when the output is full. The decoder is the
libzstd that python-zstandard bundles, found through its CFFI module.

Method: the streaming interface of libzstd (zstd.h, `ZSTD_decompressStream`); it says after each step whether a frame
has ended.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

import numba
import numpy as np

from tilewright.kernels.cpu.loops import compiled
from tilewright.pipeline.transfer.calls import long_call3, long_call4
from tilewright.pipeline.transfer.zstd import (
    ADDRESS,
    FILLED,
    IN,
    OUT,
    POSITION,
    RESULT,
    SIZE,
    STOP,
    USED,
    WHOLE,
    library,
)


def _read_on(read: int, descriptor: int, memory: Any, words: Any) -> bool:
    """Read the next stored bytes of a file; returns whether there were any."""
    wanted = min(len(memory), words[STOP] - words[POSITION])
    if descriptor < 0 or wanted <= 0:
        return False
    got = long_call4(read, descriptor, numba.int64(memory.ctypes.data), wanted, words[POSITION])
    if got <= 0:
        return False
    words[POSITION] += got
    words[IN + ADDRESS], words[IN + SIZE], words[IN + USED] = memory.ctypes.data, got, 0
    return True


compiled_read_on = numba.njit(_read_on)


def _decompress(
    decoder: int, read: int, context: int, descriptor: int, memory: Any, words: Any, place: int, nbytes: int
) -> None:
    """Decompress to ``place`` until ``nbytes`` are filled, the input ends or the decoder refuses.

    decoder, read: addresses of ZSTD_decompressStream and pread. context: the decoder's address. descriptor: the file's,
    or -1. memory: uint8, for stored bytes. words: int64[11].
    """
    here = numba.int64(words.ctypes.data)
    words[OUT + ADDRESS], words[OUT + SIZE], words[OUT + USED] = place, nbytes, 0
    while words[OUT + USED] < words[OUT + SIZE]:
        used_up = words[IN + USED] == words[IN + SIZE] and not words[FILLED]
        if used_up and not compiled_read_on(read, descriptor, memory, words):
            return
        words[RESULT] = long_call3(decoder, context, here + 8 * OUT, here + 8 * IN)
        if words[RESULT] < 0:  # libzstd's errors are the largest size_t values
            return
        words[WHOLE] |= int(words[RESULT] == 0)
        words[FILLED] = int(words[RESULT] > 0 and words[OUT + USED] == words[OUT + SIZE])


compiled_decompress = numba.njit(_decompress)
"""The same for other loops to call."""


@functools.cache
def _loop() -> Any:
    word = numba.int64
    return compiled(_decompress, word, word, word, word, numba.uint8[::1], numba.int64[::1], word, word)


@functools.cache
def addresses() -> tuple[int, int]:
    """Of ZSTD_decompressStream, and of the system's pread (0 where there is none)."""
    ffi, lib = library().ffi, library().lib
    decoder = int(ffi.cast("uintptr_t", ffi.addressof(lib, "ZSTD_decompressStream")))
    pread = getattr(ctypes.CDLL(None), "pread", None) if os.name == "posix" else None
    return decoder, ctypes.cast(pread, ctypes.c_void_p).value or 0 if pread else 0


def decompress(
    context: int, descriptor: int, memory: np.ndarray, words: np.ndarray, place: int, nbytes: int
) -> None:
    """The loop, as `tilewright.pipeline.transfer.zstd.Frames` calls it."""
    step, read = addresses()
    _loop()(step, read, context, descriptor if read else -1, memory, words, place, nbytes)
