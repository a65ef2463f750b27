"""Which processes stand still. One that is at work, or idles on an event loop, takes some time of a processor each
second; one that is stopped, or waits for a disk, takes none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

STEP_SECONDS = 2.0
"""The most that one look counts for: where this process itself stood still, it has seen nobody do so."""

UTIME, STIME = 11, 12
"""Places among the facts of a process, of its processor time in its own code and in the system's."""


def facts_of(pid: int) -> list[str]:
    """State, parent and so on of a process, as Linux tells them behind its name; none of one that is gone, nor where
    the system has no such files."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return told.rpartition(")")[2].split()  # the name may hold anything


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP."""
    return facts_of(pid)[:1] in (["T"], ["t"])


class Standstill:
    """For how long processes have taken no processor time, as far as was looked."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: the seconds, since whenever."""
        self._clock = clock
        self._looked = clock()
        self._taken: dict[int, int] = {}
        self._quiet: dict[int, float] = {}

    def look(self, pids: Iterable[int]) -> dict[int, float]:
        """Seconds that each of these stands still by now, 0 for those that do not, or that have just been met. Those
        that have ended are left out, and all where this system does not tell."""
        now = self._clock()
        step, self._looked = min(now - self._looked, STEP_SECONDS), now
        taken = {pid: ticks for pid in pids if (ticks := _ticks_of(pid)) is not None}
        self._quiet = {
            pid: self._quiet.get(pid, 0.0) + step if self._taken.get(pid) == ticks else 0.0
            for pid, ticks in taken.items()
        }
        self._taken = taken
        return dict(self._quiet)


def _ticks_of(pid: int) -> int | None:
    """The processor time of all threads of a process; None where it has ended, or that cannot be told."""
    facts = facts_of(pid)
    if not facts or facts[0] in "ZX":
        return None
    return int(facts[UTIME]) + int(facts[STIME])
