"""Decompression of Zstandard frames straight into their destination, in bounded memory.

The decoder is the libzstd that python-zstandard bundles, called through its CFFI module. python-zstandard's own readers
do not say whether a frame has ended, so a checksum that is cut off after the last byte would go unnoticed.

Method: the streaming interface of libzstd (zstd.h, `ZSTD_decompressStream`); it says after each step whether a frame
has ended.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from tilewright.kernels.cpu.loops import Allowance
from tilewright.pipeline.transfer.files import READ_FLAGS

WINDOW_BITS = 27
"""The largest window, 128 MiB as a power of two, which takes as much memory; ``zstd --long=31`` writes larger ones."""
STORED_NBYTES = 2**20
"""Stored bytes that are read at a time, as much as stays in a core's cache."""
LARGEST_SPARE_NBYTES = 2**24
"""The largest decoder that is kept for the next file: enough for windows of 8 MiB, as ``zstd -19`` writes them."""

IN_STEPS_NBYTES = 256 << 20
"""What a process decompresses step by step, with turns at the interpreter's lock, before it loads the loop."""
in_steps = Allowance(IN_STEPS_NBYTES)

OUT, IN, POSITION, STOP, RESULT, FILLED, WHOLE, WORDS = 0, 3, 6, 7, 8, 9, 10, 11
"""Indices in the 64-bit words that hold the state: libzstd's ZSTD_outBuffer and ZSTD_inBuffer (address, size and
position of each), how far the file was read and where reading stops, what the decoder's last step returned (0 between
frames), whether it filled the output and has more to give, and whether a frame has ended."""
ADDRESS, SIZE, USED = range(3)


class FrameError(ValueError):
    """libzstd refuses the stored bytes; the message is its own."""


@functools.cache
def library() -> Any:
    from zstandard import backend_cffi

    return backend_cffi


def encoder_nbytes(level: int, nbytes: int) -> int:
    """The most memory of an encoder that compresses ``nbytes`` bytes, given in stretches, to one frame: tables and
    window. 4 MiB at the default level, 700 MiB at the highest, 22."""
    ffi, lib = library().ffi, library().lib
    settings = lib.ZSTD_createCCtxParams()
    if settings == ffi.NULL:
        raise MemoryError("no memory for the settings of Zstandard")
    settings = ffi.gc(settings, lib.ZSTD_freeCCtxParams)
    lib.ZSTD_CCtxParams_init(settings, level)
    lib.ZSTD_CCtxParams_setParameter(settings, lib.ZSTD_c_srcSizeHint, max(1, min(nbytes, 2**31 - 1)))
    return int(lib.ZSTD_estimateCStreamSize_usingCCtxParams(settings))


Decompress: TypeAlias = Callable[[int, int, np.ndarray, np.ndarray, int, int], None]
"""Decompresses to an address until nbytes are filled, the input ends or the decoder refuses. Arguments: the decoder's
address, the file's descriptor or -1, memory for stored bytes (uint8), words (int64[11]), the address, and nbytes."""


def decompress_in_steps(
    context: int, descriptor: int, memory: np.ndarray, words: np.ndarray, place: int, nbytes: int
) -> None:
    """A `Decompress` in Python, one call for each step of the decoder; it needs no compiler."""
    ffi, lib = library().ffi, library().lib
    here = words.ctypes.data
    decoder = ffi.cast("ZSTD_DCtx *", context)
    out = ffi.cast("ZSTD_outBuffer *", here + 8 * OUT)
    stored = ffi.cast("ZSTD_inBuffer *", here + 8 * IN)
    words[OUT : OUT + 3] = place, nbytes, 0
    while words[OUT + USED] < nbytes:
        used_up = words[IN + USED] == words[IN + SIZE] and not words[FILLED]
        if used_up and not _read_on(descriptor, memory, words):
            return
        result = lib.ZSTD_decompressStream(decoder, out, stored)
        words[RESULT] = result if result < 2**63 else result - 2**64
        if words[RESULT] < 0:  # libzstd's errors are the largest size_t values
            return
        words[WHOLE] |= int(result == 0)
        words[FILLED] = int(result > 0 and words[OUT + USED] == nbytes)


def _read_on(descriptor: int, memory: np.ndarray, words: np.ndarray) -> bool:
    """Read the next stored bytes of a file; returns whether there were any."""
    wanted = min(len(memory), int(words[STOP] - words[POSITION]))
    if descriptor < 0 or wanted <= 0:
        return False
    try:
        got = os.preadv(descriptor, [memory[:wanted].data], int(words[POSITION]))
    except OSError:
        return False  # whoever feeds the rest reads it again, and says what is wrong
    words[POSITION] += got
    words[IN : IN + 3] = memory.ctypes.data, got, 0
    return got > 0


class Decoder:
    """A decoder, and memory for stored bytes; used by one file at a time."""

    def __init__(self) -> None:
        ffi, lib = library().ffi, library().lib
        context = lib.ZSTD_createDCtx()
        if context == ffi.NULL:
            raise MemoryError("no memory for a decoder of Zstandard")
        self.context = ffi.gc(context, lib.ZSTD_freeDCtx)
        self.memory = np.empty(STORED_NBYTES, np.uint8)

    def begin(self, window_bits: int) -> int:
        """Reset for another file; returns the decoder's address."""
        ffi, lib = library().ffi, library().lib
        lib.ZSTD_DCtx_reset(self.context, lib.ZSTD_reset_session_and_parameters)
        lib.ZSTD_DCtx_setParameter(self.context, lib.ZSTD_d_windowLogMax, window_bits)
        return int(ffi.cast("uintptr_t", self.context))

    @property
    def nbytes(self) -> int:
        return int(library().lib.ZSTD_sizeof_DCtx(self.context))


_spare: list[Decoder] = []


def take_decoder() -> Decoder:
    """A decoder for the caller alone, until `give_back`. Raises MemoryError."""
    with contextlib.suppress(IndexError):
        return _spare.pop()
    return Decoder()


def give_back(decoder: Decoder) -> None:
    """Keep it for the next file, unless a large window made it large."""
    if decoder.nbytes <= LARGEST_SPARE_NBYTES:
        _spare.append(decoder)


class Frames:
    """The contents of consecutive frames: from a file, from bytes that are fed, or from a file and then those.

    window_bits: the largest window that a frame may need, as a power of two, in bytes. path, nbytes, offset: the file,
    how many of its bytes to read, and from where. What cannot be read from it, whatever the reason, has to be fed,
    beginning at `taken`. decompress: does the work.
    """

    def __init__(
        self,
        window_bits: int,
        path: str | None = None,
        nbytes: int = 0,
        offset: int = 0,
        decompress: Decompress = decompress_in_steps,
    ) -> None:
        self._decompress = decompress
        self._decoder = take_decoder()
        self._context = self._decoder.begin(window_bits)
        self._words = np.zeros(WORDS, np.int64)
        self._words[POSITION], self._words[STOP] = offset, offset + nbytes
        self._offset = offset
        self._fed: Any = None
        self._closed = False
        self._descriptor, self._close = -1, lambda: None
        if path is not None:
            with contextlib.suppress(OSError):
                self._descriptor = os.open(path, READ_FLAGS)
                self._close = weakref.finalize(self, os.close, self._descriptor)

    @property
    def descriptor(self) -> int:
        """The file's, while it is read from; else -1."""
        return self._descriptor

    @property
    def taken(self) -> int:
        """How many stored bytes were read or fed."""
        return int(self._words[POSITION]) - self._offset

    @property
    def inside(self) -> bool:
        """Whether the bytes taken so far end inside a frame."""
        return bool(self._words[RESULT])

    def ended(self, nbytes: int) -> bool:
        """Whether the contents end after ``nbytes`` stored bytes, the last frame's checksum (if it has one) among
        them."""
        more = self.fill(np.empty(1, np.uint8))
        return not more and self.taken == nbytes and not self.inside

    @property
    def whole(self) -> bool:
        """Whether at least one frame has ended."""
        return bool(self._words[WHOLE])

    def fill(self, target: np.ndarray) -> int:
        """Decompress into ``target``, contiguous uint8[n]. Returns how many bytes: 0 if n = 0, or if it has to be fed.

        Raises FrameError for bytes that are no frames, or that need a larger window.
        """
        room = target.ctypes.data, len(target)
        self._decompress(self._context, self._descriptor, self._decoder.memory, self._words, *room)
        result = int(self._words[RESULT])
        if result < 0:
            ffi, lib = library().ffi, library().lib
            raise FrameError(ffi.string(lib.ZSTD_getErrorName(result % 2**64)).decode())
        return int(self._words[OUT + USED])

    def feed(self, data: bytes | memoryview) -> None:
        """Give the next stored bytes, once those before are used up. They may change as soon as `fill` returns 0.

        The file is no longer read.
        """
        self._close()
        self._descriptor = -1
        self._fed = np.frombuffer(data, np.uint8)
        self._words[IN : IN + 3] = self._fed.ctypes.data, len(self._fed), 0
        self._words[POSITION] += len(self._fed)

    def close(self) -> None:
        """Close the file and give the decoder back; only the first call does. If this is never called, the file is
        closed with the object."""
        if self._closed:
            return  # the decoder may be another's by now
        self._closed = True
        self._close()
        self._descriptor, self._fed = -1, None
        self._words[:] = 0
        give_back(self._decoder)
