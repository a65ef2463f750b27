"""What every fuzz test asserts of a call, and the values that nobody should pass.

A call ends in a result or in one of our errors, whose message is one line; and whatever it was given, the files around
it are what they were, but for a finished result that was asked for.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import psutil
from hypothesis import strategies as st

from tilewright.pipeline.errors import TilewrightError

BUILT_IN = (ValueError, TypeError, OSError, RuntimeError, MemoryError, ArithmeticError)
"""What an error of ours is beside ours, so that code which expects Python's own catches it."""

POOLS = (
    "Dask-Offload",
    "asyncio_",
    "zarr_io",
    "zarr_pool",
    "ThreadPoolExecutor",
    "Dask-Default",
    "Dask-Callback",
    "Profile",
    "IO loop",
    "fsspecIO",
    "Profiler",
    "tilewright-",
)
"""What the names of threads hold that libraries start on first use and keep for the process."""

TRACKER = "multiprocessing.resource_tracker"
"""The process that Python starts beside the first lock or memory that processes share, for as long as it lives."""

TRACEBACK = "Traceback (most recent call last)"

END_SECONDS = 10
"""How long a thread may take to end behind the call that started it."""


class Made:
    """A value that is made anew for each case, and shows in a failing example by its name."""

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self.name = name
        self.make = make

    def __repr__(self) -> str:
        return self.name


def made(value: Any) -> Any:
    return value.make() if isinstance(value, Made) else value


def outcome(call: Callable[[], Any]) -> Any:
    """The call's result, or the error of ours that it raised. Any other error is the test's."""
    try:
        return call()
    except TilewrightError as raised:
        error = raised
    check_message(str(error))
    assert isinstance(error, BUILT_IN), type(error)
    return error


def check_message(message: str) -> None:
    assert message.strip(), "a message is empty"
    assert len(message.splitlines()) == 1, f"a message of several lines: {message!r}"
    assert TRACEBACK not in message
    assert "not foreseen" not in message


def tree(folder: Path) -> dict[str, Any]:
    """Everything below a folder, by its path there: what it is, and of files the digest of the contents."""
    found: dict[str, Any] = {}
    waiting = [folder]
    while waiting:
        with os.scandir(waiting.pop()) as listing:
            for entry in listing:
                facts = entry.stat(follow_symlinks=False)
                name = os.path.relpath(entry.path, folder)
                if stat.S_ISDIR(facts.st_mode):
                    found[name] = "folder"
                    if facts.st_mode & stat.S_IRUSR:
                        waiting.append(Path(entry.path))
                elif stat.S_ISREG(facts.st_mode):
                    found[name] = _digest(entry.path, facts)
                else:
                    found[name] = stat.S_IFMT(facts.st_mode)
    return found


_digests: dict[tuple[Any, ...], bytes] = {}


def _digest(path: str, facts: os.stat_result) -> bytes:
    """Of a file's contents; of one that has not been written since, as it was."""
    key = (path, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
    if key not in _digests:
        with open(path, "rb") as file:
            _digests[key] = hashlib.blake2b(file.read(), digest_size=8).digest()
    return _digests[key]


def check_tree(before: dict[str, Any], folder: Path, *results: str) -> None:
    """Nothing below a folder has changed, and nothing is new but what lies at or below ``results``."""

    def others(found: dict[str, Any]) -> dict[str, Any]:
        return {
            name: what
            for name, what in found.items()
            if not any(PurePath(result) in (PurePath(name), *PurePath(name).parents) for result in results)
        }

    before, after = others(before), others(tree(folder))
    assert after == before, (
        f"new: {sorted(after.keys() - before.keys())}, gone: {sorted(before.keys() - after.keys())}, changed:"
        f" {sorted(name for name in before.keys() & after.keys() if before[name] != after[name])}"
    )


class Left:
    """Which threads and processes a call leaves behind, beside the pools of libraries."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._processes = _processes()

    def check(self) -> None:
        until = time.monotonic() + END_SECONDS
        while (left := self._left()) and time.monotonic() < until:
            time.sleep(0.01)
        assert not left, f"left behind: {left}"

    def _left(self) -> list[str]:
        threads = [
            thread.name
            for thread in set(threading.enumerate()) - self._threads
            if not any(pool in thread.name for pool in POOLS)
        ]
        return threads + sorted(_processes() - self._processes)


def _processes() -> set[str]:
    """The children of this process and theirs, each by its number and its command."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            command = " ".join(child.cmdline())
            if TRACKER not in command:
                found.add(f"process {child.pid}: {command}")
    return found


class Bytes:
    """A path that is bytes."""

    def __fspath__(self) -> bytes:
        return b"A.zarr"


class Failing:
    """Whatever one asks of it fails."""

    def __fspath__(self) -> str:
        raise RuntimeError("no path\nof two lines")

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        raise RuntimeError("no array\nof two lines")

    def __bool__(self) -> bool:
        raise RuntimeError("neither true nor false")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not comparable")

    __hash__ = None  # type: ignore[assignment]


class Number:
    """NumPy's and Python's protocols for numbers, by an object that is none."""

    def __index__(self) -> int:
        return 1

    def __float__(self) -> float:
        return 1.0

    def __int__(self) -> int:
        return 1


def _nested() -> list[Any]:
    nested: list[Any] = []
    nested.append(nested)
    return nested


def _generator() -> Iterable[Any]:
    yield "A.zarr"
    yield 5


ODD_NAMES = (
    "",
    " ",
    "-",
    "~",
    "~/A.zarr",
    "~nobody/A.zarr",
    ".",
    "..",
    "/",
    "//",
    "./",
    "...",
    "\0",
    "A.zarr\0",
    "\ud800",
    "\udcff.zarr",
    "a\nb",
    "a\rb.zarr",
    "\x1b[31mred",
    "\u2028",
    "n" * 255,
    "n" * 256,
    "n" * 5000,
    "n/" * 3000,
    "ä" * 127 + ".zarr",
    "::",
    "://",
    "a::b",
    "::A.zarr",
    "A.zarr::",
    "zip://::",
    "zip://a::A.zarr",
    "zip://a::junk.bin",
    "simplecache::A.zarr",
    "file://",
    "file:///",
    "file://A.zarr",
    "file:A.zarr",
    "local://",
    "memory://",
    "memory://a",
    "nope://a",
    "reference://",
    "dir::A.zarr",
    "http://",
    "http://[",
    "http://127.0.0.1:1/A.zarr",
    "s3://",
    "data:,",
    "?",
    "*",
    "%s",
    "{}",
    "$HOME",
    "C.zarr.partial",
    "C.zip",
    "nothing/deeper/C.zarr",
    "text.txt/C.zarr",
    "A.zarr/C.zarr",
    "loop/C.zarr",
    "dangling",
    "dangling/C.zarr",
    "../outside/../A.zarr",
    "None",
    "True",
    "0",
    "CON",
)
"""Names that mean something to somebody, or cannot be names."""

JUNK_VALUES = (
    None,
    True,
    False,
    0,
    1,
    -1,
    7,
    2**31,
    2**63,
    Made("10**5000", lambda: 10**5000),
    0.0,
    2.5,
    float("nan"),
    float("inf"),
    1j,
    b"",
    b"A.zarr",
    (),
    [],
    {},
    set(),
    ["a", 5],
    [[1, 2], [3]],
    {"a": 1},
    object(),
    object,
    len,
    int,
    ...,
    NotImplemented,
    range(3),
    slice(None),
    memoryview(b"ab"),
    bytearray(b"ab"),
    np.int64(3),
    np.float32(2.5),
    np.bool_(True),
    np.str_("A.zarr"),
    np.datetime64("2020-01-01"),
    np.array(1),
    np.array([1, 2]),
    np.array(["a", "b"]),
    np.array([None, 1], dtype=object),
    np.dtype(np.int32),
    np.dtype([("a", np.int32), ("b", np.float32)]),
    Path("A.zarr"),
    PurePath("nowhere"),
    Bytes(),
    Made("failing object", Failing),
    Number(),
    Made("nested list", _nested),
    Made("generator", _generator),
    Made("iterator", lambda: iter(["A.zarr"])),
)
"""Values of types that few arguments take."""

names = st.one_of(
    st.sampled_from(ODD_NAMES),
    st.text(max_size=12).filter(lambda text: not text.startswith("/") and ".." not in text),
)
"""Texts that name nothing; none of them is outside of the test's own folder, where a result would be left."""

junk = st.one_of(st.sampled_from(JUNK_VALUES), names, st.integers(), st.floats(), st.binary(max_size=6))
"""Any value of any type."""
