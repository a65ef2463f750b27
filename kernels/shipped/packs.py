"""Files of machine code that come with an installation, one for each compute capability: read, never written, by those
who launch; made by ``tilewright kernels``.

A wheel has them beside this module. ``TILEWRIGHT_SHIPPED_KERNELS`` names another folder, or is ``off``. A file says
what source the code was made from; where that is not this package's to the byte, none of it is used. What a kernel is
kept under (`fingerprint.by_source`) depends on that source and on every constant that the kernel refers to, and not on
who compiled it: a launch packs arguments as this package does, and the code was looked at, when the file was made, for
where it takes them (`tilewright.kernels.shipped.abi`). So it serves with any version of Numba, Python and NVIDIA's
libraries. The driver must be of the compilers' major version or a later one.

The form: `MAGIC`, the length of the head in eight bytes, little-endian, and its SHA-256; that, `Head` in JSON; the
kernels, each compressed by itself.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilewright.kernels.gpu import user_cache
from tilewright.kernels.gpu.code_cache import MachineCode

ENVIRONMENT = "TILEWRIGHT_SHIPPED_KERNELS"
MAGIC = b"tilewright kernels 2\n"
LENGTH_NBYTES, SUM_NBYTES = 8, 32
DRIVER_MAJOR = 1000
"""What a driver's version is a major version times, plus ten times the minor one."""
LEVEL = 19
"""Zstandard's, of each kernel."""

_begun = time.time()
"""When this process loaded this module, as it does before any kernel."""
CLOCK_SECONDS = 0.02
"""What a file system's times may be behind."""

Capability = tuple[int, int]


@dataclass(frozen=True)
class Entry:
    """Where one kernel is."""

    offset: int
    """From the end of the head."""
    nbytes: int
    """Compressed."""
    name: str
    """In its machine code."""
    layout: str
    """How it takes its arguments, as `struct` writes it."""
    checksum: str
    """SHA-256 of its machine code."""


@dataclass(frozen=True)
class Head:
    """What a file says of itself."""

    source: str
    """`fingerprint.source_hash` of the package that the code was made from."""
    linker: tuple[int, int]
    """The version of nvJitLink that made it."""
    kernels: Mapping[str, Entry]


@dataclass(frozen=True)
class Pack:
    """A file that is whole as far as its head."""

    path: Path
    start: int
    """Where the kernels begin."""
    head: Head


def directory() -> Path | None:
    """Where the files are; None where none are to be used."""
    return user_cache.chosen(ENVIRONMENT, lambda: Path(__file__).resolve().parent)


def file_name(capability: Capability) -> str:
    return "{}.{}.kernels".format(*capability)


@functools.cache
def opened(folder: Path, capability: Capability) -> Pack | None:
    """The file for GPUs of a compute capability; None where there is none, or no whole one."""
    path = folder / file_name(capability)
    try:
        with open(path, "rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                return None
            length = int.from_bytes(file.read(LENGTH_NBYTES), "little")
            start = len(MAGIC) + LENGTH_NBYTES + SUM_NBYTES
            if length > path.stat().st_size - start:
                return None
            expected, data = file.read(SUM_NBYTES), file.read(length)
        if hashlib.sha256(data).digest() != expected:
            return None
        told = json.loads(data)
        kernels = {key: Entry(*entry) for key, entry in told["kernels"].items()}
        head = Head(told["source"], tuple(told["linker"]), kernels)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Pack(path, start + length, head)


def usable(capability: Capability) -> Pack | None:
    """The file for GPUs of a compute capability if it was made from this package's source, by compilers whose code the
    driver here can be expected to load, and nothing in this process asks for other code; else None."""
    folder = directory()
    pack = None if folder is None else opened(folder, capability)
    return pack if pack is not None and why_not(pack.head) is None else None


@functools.cache
def _source() -> str | None:
    """Of what this process runs; None where that is not known, since files have changed since it was begun."""
    from tilewright.kernels.gpu import fingerprint

    times = [path.stat() for path in fingerprint.source_files()]
    if any(max(one.st_mtime, one.st_ctime) > _begun - CLOCK_SECONDS for one in times):
        return None
    return fingerprint.source_hash()


def why_not(head: Head) -> str | None:
    """Why nothing of a file is used in this process; None where it is."""
    from tilewright.kernels.gpu import fingerprint

    if _source() is None:
        return (
            "files of tilewright.kernels are newer than this process, which may run what was in them before"
        )
    if head.source != _source():
        return "it was made from another source of tilewright.kernels"
    if (asks := other_code()) is not None:
        return asks
    driver, least = fingerprint.driver_version(), head.linker[0] * DRIVER_MAJOR
    if driver and driver < least:  # where there is none, nothing is loaded
        of = f"{driver // DRIVER_MAJOR}.{driver % DRIVER_MAJOR // 10}"
        return f"it was made by CUDA {head.linker[0]}.{head.linker[1]}, and the driver here is of CUDA {of}"
    return None


DEFAULT_OPT = 3
"""Numba's level of optimization unless ``NUMBA_OPT`` says otherwise."""


def other_code() -> str | None:
    """What in this process asks for other code than files have; None where nothing does."""
    from numba.cuda.core import config

    if config.CUDA_DEBUGINFO_DEFAULT:
        return "NUMBA_CUDA_DEBUGINFO asks for code with information for debuggers"
    if config.OPT != DEFAULT_OPT:
        return f"NUMBA_OPT asks for optimization {config.OPT}, and files are made with {DEFAULT_OPT}"
    return None


def load(pack: Pack, key: str, layout: str) -> MachineCode | None:
    """The code that a file has under a key, for arguments that lie so; None where it has none that is whole."""
    import zstandard

    entry = pack.head.kernels.get(key)
    if entry is None or entry.layout != layout:
        return None
    try:
        with open(pack.path, "rb") as file:
            file.seek(pack.start + entry.offset)
            cubin = zstandard.ZstdDecompressor().decompress(file.read(entry.nbytes))
    except (OSError, zstandard.ZstdError):
        return None
    if hashlib.sha256(cubin).hexdigest() != entry.checksum:
        return None
    return MachineCode(entry.name, cubin)


def write(
    path: Path, source: str, linker: tuple[int, int], kernels: Mapping[str, tuple[MachineCode, str]]
) -> None:
    """Make a file of kernels, each under its key with the layout of its arguments, in one step."""
    import zstandard

    compressor = zstandard.ZstdCompressor(level=LEVEL)
    entries: dict[str, Any] = {}
    bodies, offset = [], 0
    for key, (code, layout) in sorted(kernels.items()):
        body = compressor.compress(code.cubin)
        checksum = hashlib.sha256(code.cubin).hexdigest()
        entries[key] = tuple(asdict(Entry(offset, len(body), code.entry, layout, checksum)).values())
        bodies.append(body)
        offset += len(body)
    head = json.dumps({"source": source, "linker": linker, "kernels": entries}).encode()
    length, checksum_of_head = len(head).to_bytes(LENGTH_NBYTES, "little"), hashlib.sha256(head).digest()
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".draft", delete=False) as draft:
        try:
            draft.write(MAGIC + length + checksum_of_head + head + b"".join(bodies))
            draft.close()
            os.chmod(draft.name, 0o644)
            os.replace(draft.name, path)
        except BaseException:
            os.unlink(draft.name)
            raise
    opened.cache_clear()
