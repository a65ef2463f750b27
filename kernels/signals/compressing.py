"""How many bytes zlib makes of each of many documents.

``zlib.compress`` takes and gives back the interpreter's lock for each, and makes a compressor anew, which takes longer
than to compress a short text. So a loop calls the functions of the library that Python itself uses, by their addresses,
and begins anew with one compressor. A Python that was built with the library inside may not let others see these
functions: there, documents are given to ``zlib.compress`` one by one, with the same result.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from tilewright.kernels.cpu.loops import kept
from tilewright.kernels.cpu.vectors import load_half, store_half, store_int
from tilewright.kernels.signals.definitions import COMPRESSION_LEVEL

_OK, _STREAM_END, _FINISH = 0, 1, 4
"""Of zlib.h."""
_OUTPUT_NBYTES = 2**16
"""Where what is compressed goes, to be counted: as much as stays in a core's cache."""


class _Stream(ctypes.Structure):
    """zlib.h's ``z_stream``."""

    _fields_ = (
        ("next_in", ctypes.c_void_p),
        ("avail_in", ctypes.c_uint),
        ("total_in", ctypes.c_ulong),
        ("next_out", ctypes.c_void_p),
        ("avail_out", ctypes.c_uint),
        ("total_out", ctypes.c_ulong),
        ("msg", ctypes.c_char_p),
        ("state", ctypes.c_void_p),
        ("zalloc", ctypes.c_void_p),
        ("zfree", ctypes.c_void_p),
        ("opaque", ctypes.c_void_p),
        ("data_type", ctypes.c_int),
        ("adler", ctypes.c_ulong),
        ("reserved", ctypes.c_ulong),
    )


_NEXT_IN, _AVAIL_IN = _Stream.next_in.offset, _Stream.avail_in.offset
_NEXT_OUT, _AVAIL_OUT = _Stream.next_out.offset, _Stream.avail_out.offset


def _caller(count: int) -> Any:
    """An intrinsic that calls the function at an address, of a pointer and ``count`` ints, which returns one."""

    def call(typing: Any, function: Any, stream: Any, *numbers: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(number, [pointer, *[number] * count])
            target = builder.inttoptr(arguments[0], kind.as_pointer())
            given = [builder.inttoptr(arguments[1], pointer)]
            given += [builder.trunc(each, number) for each in arguments[2:]]
            return builder.sext(builder.call(target, given), ir.IntType(64))

        return types.int64(types.int64, types.int64, *[types.int64] * count), build

    if count:
        return intrinsic(lambda typing, function, stream, number: call(typing, function, stream, number))
    return intrinsic(lambda typing, function, stream: call(typing, function, stream))


_call = _caller(0)
_call_with = _caller(1)


@kept
@njit(nogil=True)
def _compress(data, edges, deflate, reset, stream, output, room, found):  # type: ignore[no-untyped-def]
    """Write how many bytes are made of what lies from address ``data + edges[d]`` to ``data + edges[d + 1]`` to
    ``found``, int64[documents]; returns how many documents there were until one failed.

    deflate, reset, stream: addresses of zlib's functions and of a stream that has been begun; what is compressed goes
    to the address ``output``, ``room`` bytes at a time.
    """
    for document in range(len(found)):
        if _call(reset, stream) != _OK:
            return document
        store_int(stream + _NEXT_IN, data + edges[document])
        store_half(stream + _AVAIL_IN, edges[document + 1] - edges[document])
        total = 0
        status = _OK
        while status == _OK:
            store_int(stream + _NEXT_OUT, output)
            store_half(stream + _AVAIL_OUT, room)
            status = _call_with(deflate, stream, _FINISH)
            total += room - np.int64(load_half(stream + _AVAIL_OUT))
        if status != _STREAM_END:
            return document
        found[document] = total
    return len(found)


@dataclass(frozen=True)
class _Library:
    """The zlib that Python uses."""

    functions: ctypes.CDLL

    @property
    def deflate(self) -> int:
        return _address(self.functions.deflate)

    @property
    def reset(self) -> int:
        return _address(self.functions.deflateReset)

    def begin(self, stream: _Stream) -> None:
        version = self.functions.zlibVersion()
        size = ctypes.sizeof(stream)
        if status := self.functions.deflateInit_(ctypes.byref(stream), COMPRESSION_LEVEL, version, size):
            raise MemoryError(f"zlib has no memory for a compressor: deflateInit gives {status}")

    def end(self, stream: _Stream) -> None:
        self.functions.deflateEnd(ctypes.byref(stream))


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def _library() -> _Library | None:
    """None where its functions are not to be found, or may be those of another one."""
    try:
        functions = ctypes.CDLL(getattr(zlib, "__file__", None))
        functions.zlibVersion.restype = ctypes.c_char_p
        functions.deflateInit_.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_int]
        library = _Library(functions)
        if functions.zlibVersion() != zlib.ZLIB_RUNTIME_VERSION.encode():
            return None
        if not (library.deflate and library.reset and functions.deflateEnd):
            return None
    except (OSError, AttributeError):
        return None
    return library


def compressed_nbytes(data: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Bytes that ``zlib.compress(document, COMPRESSION_LEVEL)`` makes of each of the documents
    ``data[edges[d]:edges[d + 1]]``, uint8, each below 4 GiB: int64[documents]."""
    library = _library()
    if library is None:
        return _by_python(data, edges)
    found = np.empty(len(edges) - 1, np.int64)
    output = np.empty(_OUTPUT_NBYTES, np.uint8)
    stream = _Stream()
    library.begin(stream)
    try:
        done = _compress(
            data.ctypes.data,
            np.ascontiguousarray(edges, np.int64),
            library.deflate,
            library.reset,
            ctypes.addressof(stream),
            output.ctypes.data,
            len(output),
            found,
        )
    finally:
        library.end(stream)
    if done < len(found):
        reason = stream.msg.decode() if stream.msg else "no reason given"
        raise zlib.error(f"zlib does not compress document {done} of a block: {reason}")
    return found


def _by_python(data: np.ndarray, edges: np.ndarray) -> np.ndarray:
    lengths = (
        len(zlib.compress(data[start:stop].data, COMPRESSION_LEVEL))
        for start, stop in itertools.pairwise(edges.tolist())
    )
    return np.fromiter(lengths, np.int64, len(edges) - 1)
