"""What tells that a file was written to while it was in use: its length and its times.

Two looks of one process at a file compare its length, the time of its last modification, and the time of its last
change of status, which whoever writes to a file cannot set back. That also changes with the file's mode, owner or
number of hard links, and counts as a change: nothing else is left of a rewrite after which the first time was put back.
Looks of two hosts compare length and modification time alone, since each may get the rest from elsewhere. Numbers of
inodes decide nothing: file systems in user space, FAT and some network shares make them up anew.

What stays unnoticed: stores through a memory map until the system takes note of them, a single call that was writing
when the first look was taken, a change by another host that a network file system does not show yet, a second write
within one tick of a clock as coarse as FAT's, and a link that is turned to another file of the same length and times.
"""

from __future__ import annotations

import time
from collections.abc import Callable

TICK_SECONDS = 0.02
"""Longer than local file systems take to give a written file another time: up to 10 ms on Linux, the period of its
clock."""

TIME_STEPS_NS = (100, 10**3, 10**6, 10**9, 2 * 10**9)
"""To which file systems round times down: Windows shares, some servers, SFTP, FAT."""


def same_time(one: int, other: int) -> bool:
    """Whether two times of one file, nanoseconds since the epoch, differ by no more than rounding on one of two
    hosts."""
    low, high = sorted((one, other))
    return low == high or any(high // step * step == low for step in TIME_STEPS_NS)


def let_a_tick_pass(
    since: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return once files that were looked at by ``since``, as ``clock`` gives it, would get another time when written
    to."""
    left = since + TICK_SECONDS - clock()
    if left > 0:
        sleep(left)
