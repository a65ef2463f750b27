"""Zstandard's frames to their contents by a loop that does not hold the interpreter's lock.

python-zstandard lets go of the lock for each step of the decoder, and asks a Python object for more stored bytes. Where
a thread on each of dozens of cores decompresses, getting the lock back takes 50 µs, and all others wait for their turns
meanwhile. So the loop reads the file and calls the decoder by address, and returns when memory is full. The decoder is
the libzstd that python-zstandard brings along, by its module for CFFI.

Method: the streaming interface of libzstd (zstd.h, `ZSTD_decompressStream`); it says after each step whether a frame
has come to its end.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import weakref
from typing import Any

import numba
import numpy as np

from tilewright.kernels.calls import long_call3, long_call4
from tilewright.kernels.host_loops import compiled

WINDOW_BITS = 27
"""How far back, 128 MiB, data may refer, which takes as much memory; ``zstd --long=31`` writes more."""
STORED_NBYTES = 2**20
"""Stored bytes that are read at a time, as much as stays in a core's cache."""
LARGEST_SPARE_NBYTES = 2**24
"""What a decoder may take up that is kept for the next file: more than windows of 8 MiB, as ``zstd -19`` makes them."""

OUT, IN, POSITION, STOP, RESULT, FILLED, WHOLE, WORDS = 0, 3, 6, 7, 8, 9, 10, 11
"""Places in the loop's words of 64 bits: libzstd's ZSTD_outBuffer and ZSTD_inBuffer (address, size and position of
each), how far the file was read and how far it is to be, what the decoder's last step returned (0 between frames),
whether it had more to say than there was room for, and whether a frame has come to its end."""
ADDRESS, SIZE, USED = range(3)


class FrameError(ValueError):
    """Stored bytes that libzstd refuses; in its words."""


def _read_on(read: int, descriptor: int, memory: Any, words: Any) -> bool:
    """The next stored bytes of a file; whether there are any."""
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
    """Fill so many bytes at an address until they are full, or nothing more is to be read, or the decoder refuses.

    decoder, read: addresses of ZSTD_decompressStream and pread. context: of the decoder. descriptor: of the file, or
    -1. memory: uint8, takes what is read. words: int64[11].
    """
    here = numba.int64(words.ctypes.data)
    words[OUT + ADDRESS], words[OUT + SIZE], words[OUT + USED] = place, nbytes, 0
    while words[OUT + USED] < words[OUT + SIZE]:
        used_up = words[IN + USED] == words[IN + SIZE] and not words[FILLED]
        if used_up and not compiled_read_on(read, descriptor, memory, words):
            return
        words[RESULT] = long_call3(decoder, context, here + 8 * OUT, here + 8 * IN)
        if words[RESULT] < 0:  # the numbers of errors are the largest that there are
            return
        words[WHOLE] |= int(words[RESULT] == 0)
        words[FILLED] = int(words[RESULT] > 0 and words[OUT + USED] == words[OUT + SIZE])


compiled_decompress = numba.njit(_decompress)
"""The same for loops that do more than this. Numba's disk cache looks at their files alone: who changes something here
changes something there too."""


@functools.cache
def _loop() -> Any:
    word = numba.int64
    return compiled(_decompress, word, word, word, word, numba.uint8[::1], numba.int64[::1], word, word)


@functools.cache
def library() -> Any:
    from zstandard import backend_cffi

    return backend_cffi


@functools.cache
def addresses() -> tuple[int, int]:
    """Of the decoder's step, and of the system's pread; 0 where there is none."""
    ffi, lib = library().ffi, library().lib
    decoder = int(ffi.cast("uintptr_t", ffi.addressof(lib, "ZSTD_decompressStream")))
    pread = getattr(ctypes.CDLL(None), "pread", None) if os.name == "posix" else None
    return decoder, ctypes.cast(pread, ctypes.c_void_p).value or 0 if pread else 0


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
        """Forget the file before; the decoder's address."""
        ffi, lib = library().ffi, library().lib
        lib.ZSTD_DCtx_reset(self.context, lib.ZSTD_reset_session_and_parameters)
        lib.ZSTD_DCtx_setParameter(self.context, lib.ZSTD_d_windowLogMax, window_bits)
        return int(ffi.cast("uintptr_t", self.context))

    @property
    def nbytes(self) -> int:
        return int(library().lib.ZSTD_sizeof_DCtx(self.context))


_spare: list[Decoder] = []


def take_decoder() -> Decoder:
    """One for this thread alone, until `give_back`. Raises MemoryError."""
    with contextlib.suppress(IndexError):
        return _spare.pop()
    return Decoder()


def give_back(decoder: Decoder) -> None:
    """It serves the next one, unless a large window made it large."""
    if decoder.nbytes <= LARGEST_SPARE_NBYTES:
        _spare.append(decoder)


class Frames:
    """The contents of frames one behind the other: from a file, or bytes that it is fed, or a file and then those.

    window_bits: the largest window that a frame may need, as a power of two, in bytes. path, nbytes: the file, and how
    many of its bytes are meant. What cannot be read from it, for whatever reason, has to be fed: `taken` says from
    where on.
    """

    def __init__(self, window_bits: int, path: str | None = None, nbytes: int = 0) -> None:
        self._decoder = take_decoder()
        self._context = self._decoder.begin(window_bits)
        self._words = np.zeros(WORDS, np.int64)
        self._words[STOP] = nbytes
        self._fed: Any = None
        self._descriptor, self._close = -1, lambda: None
        if path is not None and addresses()[1]:
            with contextlib.suppress(OSError):
                self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._close = weakref.finalize(self, os.close, self._descriptor)

    @property
    def taken(self) -> int:
        """Stored bytes that were read, or fed."""
        return int(self._words[POSITION])

    @property
    def inside(self) -> bool:
        """Whether what was taken ends inside of a frame."""
        return bool(self._words[RESULT])

    @property
    def whole(self) -> bool:
        """Whether a frame has come to its end."""
        return bool(self._words[WHOLE])

    def fill(self, target: np.ndarray) -> int:
        """The next bytes into ``target``, uint8[n] side by side; how many: 0 without room, or when it has to be fed.

        Raises FrameError for bytes that are no frames, or that need a larger window.
        """
        step, read = addresses()
        room = target.ctypes.data, len(target)
        _loop()(step, read, self._context, self._descriptor, self._decoder.memory, self._words, *room)
        result = int(self._words[RESULT])
        if result < 0:
            ffi, lib = library().ffi, library().lib
            raise FrameError(ffi.string(lib.ZSTD_getErrorName(result % 2**64)).decode())
        return int(self._words[OUT + USED])

    def feed(self, data: bytes | memoryview) -> None:
        """The stored bytes behind those taken, all of which must be used up; they may change when `fill` returns 0.

        The file is not read any more.
        """
        self._close()
        self._descriptor = -1
        self._fed = np.frombuffer(data, np.uint8)
        self._words[IN : IN + 3] = self._fed.ctypes.data, len(self._fed), 0
        self._words[POSITION] += len(self._fed)

    def close(self) -> None:
        """Nothing more is wanted. One that is dropped otherwise closes its file too."""
        self._close()
        self._descriptor, self._fed = -1, None
        self._words[:] = 0
        give_back(self._decoder)
