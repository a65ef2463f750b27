"""Counts the changes that a process makes to the file system, and stops it right before one of them.

A change is a call that makes, opens for writing, shortens, renames or removes a file or a folder, forces one to disk,
or adds a finished piece to the record of a count.
What it is told, and what it tells, lies in memory that all processes of a case share (`Orders`).
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

ORDERS_VARIABLE = "TILEWRIGHT_CAMPAIGN_ORDERS"
"""Names the file of the orders to the processes that a case does not fork itself: those of a fork server, which are
workers."""
CLIENT, WORKER = 1, 2

PATHS = {
    "os.mkdir": ((0, 2),),
    "os.remove": ((0, 1),),
    "os.rename": ((1, 3), (0, 2)),
    "os.rmdir": ((0, 1),),
    "os.truncate": ((0, None),),
    "open": ((0, None),),
}
"""Python's audit events that are changes, and which of their arguments are a path and the folder that it starts at."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
RECORD = "/tilewright-counts.jsonl"
"""How the path of a count's record ends."""


class Orders(ctypes.Structure):
    """What the processes of a case are told."""

    _fields_ = (
        ("case", ctypes.c_int64),
        ("role", ctypes.c_int64),
        ("change", ctypes.c_int64),
        ("stopped", ctypes.c_int64),
        ("changes", ctypes.c_int64 * 3),
        ("slow_seconds", ctypes.c_double),
    )
    case: int
    """Counts start anew where it changes."""
    role: int
    """Which processes are to stop; 0: none."""
    change: int
    """Right before which of its changes, from 1 on, the first process of that role stops."""
    stopped: int
    """The id of the process that has stopped."""
    changes: Any
    """The most changes that a process of each role has made in this case."""
    slow_seconds: float
    """The most that storing a chunk, or recording a piece of a count, is delayed by, as a slow disk does it."""


def orders_at(path: Path) -> Orders:
    """The orders in a file, which is made where it is not there."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(descriptor, ctypes.sizeof(Orders))
        return Orders.from_buffer(mmap.mmap(descriptor, ctypes.sizeof(Orders)))
    finally:
        os.close(descriptor)


def log_of(orders: Path) -> Path:
    """The file with a line for each chunk that was renamed to its place."""
    return orders.with_name("stored.log")


class Changes:
    """The changes of this process, below a folder."""

    def __init__(self, path: Path, role: int) -> None:
        self.orders = orders_at(path)
        self.folder = f"{path.parent}/"
        self.role = role
        self.log = os.open(log_of(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.case, self.numbers = 0, count(1)
        # Names that processes of Tilewright keep open are no changes of its storage.
        self.own = {str(path), str(log_of(path))}

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Python's audit hook."""
        if event not in PATHS or (event == "open" and not _writes(arguments[2])):
            return
        try:
            places = [_path(arguments, *where) for where in PATHS[event]]
        except (OSError, TypeError):  # of a descriptor, or of a folder that is gone
            return
        if not any(place.startswith(self.folder) and place not in self.own for place in places):
            return
        if event == "os.rename" and "/c/" in places[0] and os.path.isdir(os.path.dirname(places[0])):
            time.sleep(random.random() * self.orders.slow_seconds)
            os.write(self.log, f"{places[0]}\n".encode())
        self.count()

    def count(self) -> None:
        """Take note of a change that is about to be made."""
        if self.case != self.orders.case:
            self.case, self.numbers = self.orders.case, count(1)
        number = next(self.numbers)
        self.orders.changes[self.role] = max(number, self.orders.changes[self.role])
        if self.orders.role == self.role and number == self.orders.change and self._is_first():
            os.kill(os.getpid(), signal.SIGSTOP)

    def _is_first(self) -> bool:
        """Whether no process of the case has stopped yet: of two that come to their change at once one would stay
        stopped, since only the other is told of."""
        fcntl.lockf(self.log, fcntl.LOCK_EX)  # of a process: forked ones share the descriptor
        try:
            first = not self.orders.stopped
            if first:
                self.orders.stopped = os.getpid()
        finally:
            fcntl.lockf(self.log, fcntl.LOCK_UN)
        return first


def _writes(flags: Any) -> bool:
    return isinstance(flags, int) and bool(flags & WRITING)


def _path(arguments: tuple[Any, ...], name: int, start: int | None) -> str:
    path = os.fsdecode(arguments[name])
    if start is not None and arguments[start] not in (-1, None) and not path.startswith("/"):
        return f"{os.readlink(f'/proc/self/fd/{arguments[start]}')}/{path}"
    return os.path.abspath(path)


def install(path: Path, role: int) -> None:
    """Have this process, and those that are forked from it, heed the orders."""
    changes = Changes(path, role)
    sys.addaudithook(changes.hear)
    force: Callable[[int], None] = os.fsync

    def counted(descriptor: int) -> None:
        changes.count()
        force(descriptor)

    write: Callable[..., int] = os.pwrite

    def counted_write(descriptor: int, data: bytes, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(RECORD):
            time.sleep(random.random() * changes.orders.slow_seconds)
            changes.count()
        return write(descriptor, data, offset)

    os.fsync, os.pwrite = counted, counted_write  # there are no events of them


if ORDERS_VARIABLE in os.environ:
    install(Path(os.environ.pop(ORDERS_VARIABLE)), WORKER)
