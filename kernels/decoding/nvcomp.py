"""NVIDIA's nvCOMP, where its wheel is installed: batches of blocks decoded by its C interface, on a stream.

It trusts what it reads: damaged blocks of Zstandard make it access memory that is not its own, and damaged ones of LZ4
are called sound (docs/experiments.md). So it may be given only blocks whose bytes are known to be what was written
(`guarding.py`), or those of someone who vouches for them.

Interface: the batched functions of nvcomp/zstd.h and nvcomp/lz4.h of nvCOMP 6.0, alike but for their names. Options are
passed by value, 64 bytes each, whose first word says what decodes and whose other bytes are zero by default.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tilewright.kernels.gpu.driver_error import checked

PACKAGE = "nvidia.libnvcomp"
"""Of the wheels nvidia-libnvcomp-cu12 and nvidia-libnvcomp-cu13."""
FILE = "lib64/libnvcomp.so.6"
MAJOR = 6
"""Another one's functions may take other arguments."""

BY_KERNELS = 2
"""What decodes: CUDA's cores. Of what the other one, in hardware, reads damaged it is said that it is sound."""
OPTIONS_NBYTES = 64
SUCCESS = 0
STATUS_NBYTES = 4
DECODERS = {"zstd": "Zstd", "lz4": "LZ4"}
"""Formats, and what nvCOMP's functions call them."""


class NvcompError(RuntimeError):
    """nvCOMP is not there, or cannot be used, or refuses a call; the message says why."""


class Options(ctypes.Structure):
    """Of every format."""

    _fields_ = (
        ("backend", ctypes.c_int),
        ("rest", ctypes.c_char * (OPTIONS_NBYTES - ctypes.sizeof(ctypes.c_int))),
    )


class Properties(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("cudart_version", ctypes.c_uint32))


class Blocks(NamedTuple):
    """Addresses, on the device, of a batch's tables, a number a block: 8 bytes each, but for statuses, which are int32.
    The last two are written."""

    sources: int
    nbytes: int
    rooms: int
    """How much memory there is for what each decodes to."""
    targets: int
    found: int
    """The bytes that each was decoded to."""
    statuses: int


_SIZE, _POINTER = ctypes.c_size_t, ctypes.c_void_p
_WORKSPACE = (_SIZE, _SIZE, Options, ctypes.POINTER(_SIZE), _SIZE, _POINTER)
_DECODE = (*(_POINTER,) * 4, _SIZE, _POINTER, _SIZE, _POINTER, Options, _POINTER, _POINTER)


class Library:
    """The functions of a loaded library. All of its work is on the calling thread's current device."""

    def __init__(self, path: Path) -> None:
        """Raises NvcompError where it does not load, or is another version."""
        try:
            library = ctypes.CDLL(str(path), ctypes.RTLD_LOCAL)
            self._text = library.nvcompGetStatusString
            self._text.argtypes, self._text.restype = (ctypes.c_int,), ctypes.c_char_p
            properties = library.nvcompGetProperties
            properties.argtypes = (ctypes.POINTER(Properties),)
            self._functions = {
                (form, purpose): _declared(library, f"nvcompBatched{name}Decompress{purpose}", arguments)
                for form, name in DECODERS.items()
                for purpose, arguments in (("GetTempSize", _WORKSPACE), ("Async", _DECODE))
            }
        except (OSError, AttributeError) as error:
            raise NvcompError(f"{path} does not load: {error}") from None
        found = Properties()
        self._check("nvcompGetProperties", properties(ctypes.byref(found)))
        self.version = found.version // 1000, found.version % 1000 // 100, found.version % 100
        self.cuda_major = found.cudart_version // 1000
        """The driver has to support this CUDA."""
        if self.version[0] != MAJOR:
            raise NvcompError(f"{path} is nvCOMP {self.version[0]}; only {MAJOR} can be used")

    def workspace_nbytes(self, form: str, count: int, most_nbytes: int, total_nbytes: int) -> int:
        """Device memory that decoding a batch takes besides. most_nbytes, total_nbytes: of decoded blocks."""
        found = _SIZE()
        call = self._functions[form, "GetTempSize"]
        options = Options(BY_KERNELS)
        status = call(count, most_nbytes, options, ctypes.byref(found), total_nbytes, None)
        self._check(call.__name__, status)
        return found.value

    def decode(
        self, form: str, count: int, blocks: Blocks, workspace: int, workspace_nbytes: int, stream: int
    ) -> None:
        """Enqueue the decoding of a batch. workspace: an address on the device, a multiple of 8. stream: its handle.
        Raises NvcompError."""
        call = self._functions[form, "Async"]
        status = call(
            blocks.sources,
            blocks.nbytes,
            blocks.rooms,
            blocks.found,
            count,
            workspace,
            workspace_nbytes,
            blocks.targets,
            Options(BY_KERNELS),
            blocks.statuses,
            stream,
        )
        self._check(call.__name__, status)

    def _check(self, name: str, status: int) -> None:
        if status != SUCCESS:
            text = self._text(status)
            raise NvcompError(f"{name}: {status}, {text.decode() if text else 'no such status is known'}")


def _declared(library: Any, name: str, arguments: tuple[Any, ...]) -> Any:
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, ctypes.c_int
    return function


def path() -> Path:
    """The library's file. Raises NvcompError where no wheel has brought it."""
    try:
        found = importlib.util.find_spec(PACKAGE)
    except ModuleNotFoundError:  # nothing at all is called nvidia
        found = None
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        file = Path(folder) / FILE
        if file.is_file():
            return file
    raise NvcompError(f"there is no {PACKAGE} with {FILE}; the extras cu12 and cu13 bring it")


@functools.cache
def _library() -> Library:
    return Library(path())


def library() -> Library:
    """The library, loaded once. Raises NvcompError."""
    return _library()


def driver_major() -> int:
    """Of the CUDA that the driver supports."""
    from cuda.bindings import driver

    return int(checked("cuDriverGetVersion", driver.cuDriverGetVersion())) // 1000


def usable(workspace_for: Callable[[int, int], int], driver: Callable[[], int] = driver_major) -> Library:
    """The library, where the driver can run it, and it needs no more memory on the current GPU than is set aside.
    Raises NvcompError.

    workspace_for: of numbers of frames of Zstandard and of decoded bytes, the memory that is set aside.
    """
    found = library()
    if (major := driver()) < found.cuda_major:
        raise NvcompError(
            f"nvCOMP is built for CUDA {found.cuda_major}, and the driver supports {major}; install the extra cu{major}"
        )
    for count, nbytes in ((1, 2**16), (2**10, 2**16), (2**7, 2**20), (8, 2**24)):
        needed = found.workspace_nbytes("zstd", count, nbytes, count * nbytes)
        if needed > workspace_for(count, count * nbytes):
            raise NvcompError(
                f"nvCOMP wants {needed} bytes to decode {count} frames of {nbytes}, more than is set aside"
            )
    return found


HARMLESS = {
    "zstd": bytes.fromhex("28b52ffd 20 01 090000 78"),
    "lz4": bytes.fromhex("10 78"),
}
"""Of each format a sound block, of one byte: one segment that says so and a block that is stored as it is; one literal.
What stands in for a block that must not be read."""
HARMLESS_PLACES = {"zstd": 0, "lz4": 16}
"""Where each lies among `harmless`."""


def harmless() -> np.ndarray:
    """All of them, for a device: uint8."""
    memory = np.zeros(32, np.uint8)
    for form, data in HARMLESS.items():
        place = HARMLESS_PLACES[form]
        memory[place : place + len(data)] = np.frombuffer(data, np.uint8)
    return memory
