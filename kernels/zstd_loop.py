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

STORED_NBYTES = 2**20
"""Stored bytes that are read at a time, as much as stays in a core's cache."""
LARGEST_SPARE_NBYTES = 2**24
"""What a decoder may take up that is kept for the next file: more than windows of 8 MiB, as ``zstd -19`` makes them."""

_OUT, _IN, _POSITION, _STOP, _RESULT, _FILLED, _WHOLE, _WORDS = 0, 3, 6, 7, 8, 9, 10, 11
"""Places in the loop's words of 64 bits: libzstd's ZSTD_outBuffer and ZSTD_inBuffer (address, size and position of
each), how far the file was read and how far it is to be, what the decoder's last step returned (0 between frames),
whether it had more to say than there was room for, and whether a frame has come to its end."""
_ADDRESS, _SIZE, _USED = range(3)


class FrameError(ValueError):
    """Stored bytes that libzstd refuses; in its words."""


def _decompress(
    decoder: int, read: int, context: int, descriptor: int, memory: Any, words: Any, target: Any
) -> None:
    """Fill ``target``, uint8[n], until it is full, or nothing more is to be read, or the decoder refuses.

    decoder, read: addresses of ZSTD_decompressStream and pread. context: of the decoder. descriptor: of the file, or
    -1. memory: uint8, takes what is read. words: int64[11].
    """
    here = numba.int64(words.ctypes.data)
    words[_OUT + _ADDRESS], words[_OUT + _SIZE], words[_OUT + _USED] = target.ctypes.data, len(target), 0
    while words[_OUT + _USED] < words[_OUT + _SIZE]:
        if words[_IN + _USED] == words[_IN + _SIZE] and not words[_FILLED]:
            wanted = min(len(memory), words[_STOP] - words[_POSITION])
            if descriptor < 0 or wanted <= 0:
                return
            got = long_call4(read, descriptor, numba.int64(memory.ctypes.data), wanted, words[_POSITION])
            if got <= 0:
                return
            words[_POSITION] += got
            words[_IN + _ADDRESS], words[_IN + _SIZE], words[_IN + _USED] = memory.ctypes.data, got, 0
        words[_RESULT] = long_call3(decoder, context, here + 8 * _OUT, here + 8 * _IN)
        if words[_RESULT] < 0:  # the numbers of errors are the largest that there are
            return
        words[_WHOLE] |= int(words[_RESULT] == 0)
        words[_FILLED] = int(words[_RESULT] > 0 and words[_OUT + _USED] == words[_OUT + _SIZE])


@functools.cache
def _loop() -> Any:
    word, bytes_ = numba.int64, numba.uint8[::1]
    return compiled(_decompress, word, word, word, word, bytes_, numba.int64[::1], bytes_)


@functools.cache
def _library() -> Any:
    from zstandard import backend_cffi

    return backend_cffi


@functools.cache
def _addresses() -> tuple[int, int]:
    """Of the decoder's step, and of the system's pread; 0 where there is none."""
    ffi, lib = _library().ffi, _library().lib
    decoder = int(ffi.cast("uintptr_t", ffi.addressof(lib, "ZSTD_decompressStream")))
    pread = getattr(ctypes.CDLL(None), "pread", None) if os.name == "posix" else None
    return decoder, ctypes.cast(pread, ctypes.c_void_p).value or 0 if pread else 0


class _Decoder:
    """A decoder, and memory for stored bytes; used by one file at a time."""

    def __init__(self) -> None:
        ffi, lib = _library().ffi, _library().lib
        context = lib.ZSTD_createDCtx()
        if context == ffi.NULL:
            raise MemoryError("no memory for a decoder of Zstandard")
        self.context = ffi.gc(context, lib.ZSTD_freeDCtx)
        self.memory = np.empty(STORED_NBYTES, np.uint8)

    def begin(self, window_bits: int) -> int:
        """Forget the file before; the decoder's address."""
        ffi, lib = _library().ffi, _library().lib
        lib.ZSTD_DCtx_reset(self.context, lib.ZSTD_reset_session_and_parameters)
        lib.ZSTD_DCtx_setParameter(self.context, lib.ZSTD_d_windowLogMax, window_bits)
        return int(ffi.cast("uintptr_t", self.context))

    @property
    def nbytes(self) -> int:
        return int(_library().lib.ZSTD_sizeof_DCtx(self.context))


_spare: list[_Decoder] = []


class Frames:
    """The contents of frames one behind the other: from a file, or bytes that it is fed, or a file and then those.

    window_bits: the largest window that a frame may need, as a power of two, in bytes. path, nbytes: the file, and how
    many of its bytes are meant. What cannot be read from it, for whatever reason, has to be fed: `taken` says from
    where on.
    """

    def __init__(self, window_bits: int, path: str | None = None, nbytes: int = 0) -> None:
        decoder = None
        with contextlib.suppress(IndexError):
            decoder = _spare.pop()
        self._decoder = _Decoder() if decoder is None else decoder
        self._context = self._decoder.begin(window_bits)
        self._words = np.zeros(_WORDS, np.int64)
        self._words[_STOP] = nbytes
        self._fed: Any = None
        self._descriptor, self._close = -1, lambda: None
        if path is not None and _addresses()[1]:
            with contextlib.suppress(OSError):
                self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._close = weakref.finalize(self, os.close, self._descriptor)

    @property
    def taken(self) -> int:
        """Stored bytes that were read, or fed."""
        return int(self._words[_POSITION])

    @property
    def inside(self) -> bool:
        """Whether what was taken ends inside of a frame."""
        return bool(self._words[_RESULT])

    @property
    def whole(self) -> bool:
        """Whether a frame has come to its end."""
        return bool(self._words[_WHOLE])

    def fill(self, target: np.ndarray) -> int:
        """The next bytes into ``target``, uint8[n] side by side; how many: 0 without room, or when it has to be fed.

        Raises FrameError for bytes that are no frames, or that need a larger window.
        """
        step, read = _addresses()
        _loop()(step, read, self._context, self._descriptor, self._decoder.memory, self._words, target)
        result = int(self._words[_RESULT])
        if result < 0:
            ffi, lib = _library().ffi, _library().lib
            raise FrameError(ffi.string(lib.ZSTD_getErrorName(result % 2**64)).decode())
        return int(self._words[_OUT + _USED])

    def feed(self, data: bytes | memoryview) -> None:
        """The stored bytes behind those taken, all of which must be used up; they may change when `fill` returns 0.

        The file is not read any more.
        """
        self._close()
        self._descriptor = -1
        self._fed = np.frombuffer(data, np.uint8)
        self._words[_IN : _IN + 3] = self._fed.ctypes.data, len(self._fed), 0
        self._words[_POSITION] += len(self._fed)

    def close(self) -> None:
        """Nothing more is wanted. One that is dropped otherwise closes its file too."""
        self._close()
        self._descriptor, self._fed = -1, None
        self._words[:] = 0
        if self._decoder.nbytes <= LARGEST_SPARE_NBYTES:
            _spare.append(self._decoder)
