"""All that a kernel's machine code depends on, hashed: the name under which the code is kept on disk.

A kernel is a Python function over constants that it closes over or finds in its module. Every one of them is looked at,
through device functions and intrinsics, so that a changed constant is another kernel, whether the source changed or a
test or a measurement set it. Functions of other packages are covered by the package's version.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import sys
import types
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core.types import Type

PACKAGES = (
    "tilewright",
    "numba",
    "numba-cuda",
    "llvmlite",
    "numpy",
    "cuda-bindings",
    "cuda-core",
    "ml_dtypes",
)
"""Packages whose installed versions the code depends on."""
OUTSIDE = ("numba", "numba_cuda", "llvmlite", "numpy", "cuda", "ml_dtypes", *sys.stdlib_module_names)
"""Packages whose functions are covered by the package's version."""


OWN_OPTIONS = ("inline", "forceinline", "fastmath")


class Unknown(TypeError):
    """A kernel refers to something that cannot be fingerprinted: its code is not kept."""


def fingerprint(function: Any, *more: Any) -> str:
    """A hash, 64 hexadecimal digits, of a function's code, of all that it refers to, and of ``more`` plain values.

    Raises Unknown where something that it refers to is neither a plain value, a dtype, a Numba type, an array, a
    dataclass, a module nor a function.
    """
    return _hashed(_walk((function, *more), _Walk(_bytecode, dict)))


def by_source(function: Any, *more: Any) -> str:
    """The same for a kernel of this package, in words that do not depend on the version of Python or of any library:
    functions are told apart by where their source is, and by all that they refer to.

    Together with `source_hash` it stands for all that the author wrote and all that was set since. Raises Unknown also
    where a function is not of `tilewright.kernels`, so that its source is not covered.
    """
    return _hashed(_walk((function, *more), _Walk(_place, _own_options)))


def _hashed(pieces: Iterator[str]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece.encode())
        digest.update(b"\0")
    return digest.hexdigest()


class _Walk:
    """How a walk tells code and the options of device functions apart, and what it has seen."""

    def __init__(
        self,
        of_code: Callable[[types.FunctionType, _Walk], Iterator[str]],
        options: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        self.of_code, self.options = of_code, options
        self.seen: dict[int, tuple[int, Any]] = {}
        """The number and the object, by its id."""


@functools.cache
def surroundings() -> tuple[str, ...]:
    """What all kernels of a process depend on: versions, Numba's settings, and the source of this package."""
    from cuda.bindings import nvjitlink, nvvm
    from numba.cuda.core import config

    told = [f"python {sys.version_info[:3]}", f"source {source_hash()}"]
    for name in PACKAGES:
        try:
            told.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            told.append(f"{name} absent")
    for library in (nvvm, nvjitlink):
        try:
            told.append(f"{library.__name__} {library.version()}")
        except RuntimeError as error:  # the library is not installed: the driver links
            told.append(f"{library.__name__} {type(error).__name__}")
    told.append(f"opt {config.OPT} debug {config.CUDA_DEBUGINFO_DEFAULT} driver {driver_version()}")
    return tuple(told)


def driver_version() -> int:
    """Of CUDA, that the driver here knows: 13050 is 13.5; 0 where there is none."""
    from cuda.bindings import driver

    try:
        status, version = driver.cuDriverGetVersion()
    except RuntimeError:  # no driver here, so nothing that it could have linked
        return 0
    return int(version) if status == driver.CUresult.CUDA_SUCCESS else 0


def source_files(folder: Path | None = None) -> list[Path]:
    """Every Python file of `tilewright.kernels`, and of a folder elsewhere whose code calls these."""
    kernels = Path(__file__).resolve().parents[1]
    files = sorted(kernels.rglob("*.py"))
    if folder is not None and not (folder := folder.resolve()).is_relative_to(kernels):
        files += sorted(folder.glob("*.py"))
    return files


@functools.cache
def source_hash(folder: Path | None = None) -> str:
    """A hash of `source_files`."""
    digest = hashlib.sha256()
    for file in source_files(folder):
        digest.update(f"{file.parent.name}/{file.name}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _walk(value: Any, walk: _Walk) -> Iterator[str]:
    """Strings that tell ``value`` apart from every other; the same in every process."""
    kind = type(value)
    if value is None or value is ... or kind in (bool, int, float, complex, str, bytes, range, slice):
        yield f"{kind.__name__} {value!r}"
        return
    if isinstance(value, np.dtype):
        yield f"{kind.__name__} {value!r}"
        return
    if isinstance(value, np.generic):  # whose text is another in NumPy 1
        yield f"{kind.__name__} {value.tobytes().hex()}"
        return
    if isinstance(value, Type):
        yield f"numba {value}"
        return
    if isinstance(value, ir.Type):
        yield f"llvm {value}"
        return
    if isinstance(value, ir.InlineAsm):
        yield f"asm {value.function_type} {value.asm!r} {value.constraint!r} {value.side_effect}"
        return
    # Constants are yielded in full wherever they are met: whether two equal ones are one object depends on whether
    # Python compiled the module just now or read it from its own cache.
    if isinstance(value, np.ndarray):
        yield f"array {value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
        return
    if isinstance(value, tuple):
        yield f"tuple of {len(value)}"
        for item in value:
            yield from _walk(item, walk)
        return
    if isinstance(value, frozenset):
        yield f"frozenset of {len(value)}"
        for item in sorted(value, key=repr):
            yield from _walk(item, walk)
        return
    if isinstance(value, types.CodeType):
        yield from _code(value, walk)
        return
    seen = walk.seen
    if id(value) in seen:
        yield f"again {seen[id(value)][0]}"
        return
    seen[id(value)] = len(seen), value  # kept alive, so that its number is not given to another
    if isinstance(value, list):
        yield f"list of {len(value)}"
        for item in value:
            yield from _walk(item, walk)
    elif isinstance(value, dict):
        yield f"dict of {len(value)}"
        for name in sorted(value, key=repr):
            yield from _walk(name, walk)
            yield from _walk(value[name], walk)
    elif isinstance(value, set):
        yield f"set of {len(value)}"
        for item in sorted(value, key=repr):
            yield from _walk(item, walk)
    elif isinstance(value, enum.Enum):
        yield f"enum {kind.__qualname__}.{value.name}"
    elif isinstance(value, type):
        yield f"class {value.__module__}.{value.__qualname__}"
    elif isinstance(value, types.ModuleType):
        yield f"module {value.__name__}"
    elif isinstance(value, functools.partial):
        yield "partial"
        yield from _walk((value.func, value.args, value.keywords), walk)
    elif hasattr(value, "py_func"):  # a device function
        yield "device function"
        yield from _walk((value.py_func, walk.options(value.targetoptions)), walk)
    elif hasattr(value, "_defn"):  # an intrinsic
        yield "intrinsic"
        yield from _walk(value._defn, walk)
    elif isinstance(value, types.FunctionType):
        yield from _function(value, walk)
    elif dataclasses.is_dataclass(value):
        yield f"{kind.__module__}.{kind.__qualname__}"
        for field in dataclasses.fields(value):
            yield from _walk(getattr(value, field.name), walk)
    elif _outside(value):
        yield f"outside {value.__module__}.{value.__name__}"
    else:
        raise Unknown(f"a kernel refers to {value!r} of {kind}, which does not tell what it is")


def _outside(value: Any) -> bool:
    """Whether a value is a named object, such as a function, of a package that is covered by its version."""
    package = str(getattr(value, "__module__", "")).partition(".")[0]
    return package in OUTSIDE and bool(getattr(value, "__name__", ""))


def _function(function: types.FunctionType, walk: _Walk) -> Iterator[str]:
    yield f"function {function.__module__}.{function.__qualname__}"
    if str(function.__module__).partition(".")[0] in OUTSIDE:
        return
    yield from walk.of_code(function, walk)
    yield from _walk((function.__defaults__, function.__kwdefaults__), walk)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield f"closure {name}"
        try:
            held = cell.cell_contents
        except ValueError:  # bound later: an empty cell
            yield "nothing"
            continue
        yield from _walk(held, walk)
    names = _names(function.__code__)
    for name in sorted(names):
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        yield f"global {name}"
        yield from _walk(value, walk)
        own = isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] not in OUTSIDE
        for attribute in sorted(names) if own else ():
            if hasattr(value, attribute):
                yield f"attribute {attribute}"
                yield from _walk(getattr(value, attribute), walk)


def _own_options(options: dict[str, Any]) -> dict[str, Any]:
    """Those of a device function that this package's source sets: Numba adds others, such as whether there is a linker
    that optimizes."""
    return {name: options.get(name) for name in OWN_OPTIONS}


def _bytecode(function: types.FunctionType, walk: _Walk) -> Iterator[str]:
    return _code(function.__code__, walk)


def _place(function: types.FunctionType, walk: _Walk) -> Iterator[str]:
    """Where a function is in the source of `tilewright.kernels`."""
    code = function.__code__
    if code.co_name == "<lambda>":
        raise Unknown(f"{function.__qualname__} in line {code.co_firstlineno} may be one of several there")
    if (file := _file_of_source(code.co_filename)) is None:
        raise Unknown(f"{function.__module__}.{function.__qualname__} is not of this package's kernels")
    yield f"source {file} {code.co_firstlineno} {code.co_qualname}"


@functools.cache
def _file_of_source(path: str) -> str | None:
    """The name of one of `source_files`, from this package's folder on; None of any other file."""
    file, kernels = Path(path).resolve(), Path(__file__).resolve().parents[1]
    return str(file.relative_to(kernels)) if file.is_relative_to(kernels) else None


def _code(code: types.CodeType, walk: _Walk) -> Iterator[str]:
    yield f"code {code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars} {code.co_cellvars}"
    for constant in code.co_consts:
        yield from _walk(constant, walk)


def _names(code: types.CodeType) -> set[str]:
    """The names that a function and the functions within it look up in their module, or as attributes."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return found
