"""What a terminal shows of a job: that it waits and why, that it runs, what its command says, and how it ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import click

from tilewright.pipeline.errors import ClusterError
from tilewright.workflows.batch import slurm
from tilewright.workflows.batch.folder import JobFolder, Progress
from tilewright.workflows.batch.slurm import Look

LOOK_SECONDS = 0.5
"""How often the job's files are looked at."""
ASK_SECONDS = 5.0
"""How often Slurm is asked: its controller serves the whole site."""
SETTLE_SECONDS = 10.0
"""How long the job's last words may take on their way from its node, once Slurm says that it has ended."""


@dataclass
class Follower:
    """Follows one job."""

    folder: JobFolder
    job: str
    tries: int
    say: Callable[[str], None]
    """Shows a line."""
    show: Callable[[bytes], None]
    """Shows what the job's command has said."""
    look_at: Callable[[str], Look] = slurm.look_at
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _said: tuple[object, ...] = ()
    _shown: int = 0
    _look: Look = slurm.UNKNOWN

    def follow(self) -> int:
        """The exit status of the command, once the job has ended.

        Raises
        ------
        ClusterError
            Slurm has ended the job, and its command could say nothing more.
        """
        ask_at = self.clock()
        gone_at: float | None = None
        attempt = 0
        while True:
            progress = self.folder.progress()
            begun = progress is not None and progress.attempt > attempt and progress.phase != "queued again"
            if begun or self.clock() >= ask_at:
                self._ask()
                ask_at = self.clock() + ASK_SECONDS
            if progress is not None and begun:
                attempt = progress.attempt
                where = f" on {self._look.nodes}" if self._look.nodes else ""
                tries = f" (try {attempt} of {self.tries})" if attempt > 1 else ""
                self._once((attempt,), f"job {self.job} has started{where}{tries}")
            elif self._look.queued and (progress is None or progress.phase != "ended"):
                line = f"job {self.job} is queued{self._again(attempt)}: {self._look.why()}{self._start()}"
                self._once((attempt, self._look.reason), line)
            self._show_log()
            if progress is not None and progress.status is not None and self._is_over(progress):
                return progress.status
            if self._look.ended or self._look == slurm.UNKNOWN:
                gone_at = self.clock() if gone_at is None else gone_at
                if self.clock() - gone_at >= SETTLE_SECONDS:
                    raise ClusterError(self._ended())
            else:
                gone_at = None
            self.sleep(LOOK_SECONDS)

    def _is_over(self, progress: Progress) -> bool:
        if progress.phase == "stopped":
            return self._look.ended or self._look == slurm.UNKNOWN
        return progress.phase == "ended"

    def _ask(self) -> None:
        try:
            self._look = self.look_at(self.job)
        except ClusterError as error:
            if self._look == slurm.UNKNOWN:
                self._look = Look("UNANSWERED")
            self._once((str(error),), f"{error}; it is asked again")

    def _again(self, attempt: int) -> str:
        return f" again (try {attempt + 1} of {self.tries})" if attempt else ""

    def _start(self) -> str:
        return f"; it may start at {self._look.start}" if self._look.start else ""

    def _once(self, what: tuple[object, ...], line: str) -> None:
        """Show a line unless the one before was about the same."""
        if what != self._said:
            self._said = what
            self.say(line)

    def _show_log(self) -> None:
        try:
            with self.folder.log.open("rb") as log:
                log.seek(self._shown)
                new = log.read()
        except FileNotFoundError:  # it has not started
            return
        new = new[: new.rfind(b"\n") + 1]  # whole lines
        if new:
            self._shown += len(new)
            self.show(new)

    def _ended(self) -> str:
        state = self._look.state
        if not state:
            return (
                f"job {self.job}: Slurm knows it no longer, and it has left no word of its end in {self.folder.path};"
                " the same command goes on with what is finished"
            )
        meaning = slurm.ENDED.get(state, "")
        see = f"see {self.folder.log}"
        if not self.folder.log.exists():
            see = f"it has written nothing; its nodes have to see {self.folder.path} (tilewright.jobs-folder)"
        why = f": {meaning}" if meaning else ""
        return f"job {self.job}: Slurm ended it as {state}{why}; {see}; the same command goes on with what is finished"


def follow(folder: JobFolder, *, quiet: bool) -> int:
    """Follow a job on this terminal: its command's notices go to standard error, and its result to standard output.
    Gives the exit status of the command, and raises as `Follower.follow`."""
    submitted = folder.submitted()
    if submitted.job is None:
        raise ClusterError(f"{folder.path}: its job was never submitted")

    def show(text: bytes) -> None:
        _copy(text, sys.stderr)

    follower = Follower(
        folder,
        submitted.job,
        submitted.profile.tries,
        (lambda line: None) if quiet else (lambda line: click.echo(line, err=True)),
        show,
    )
    status = follower.follow()
    _copy(_content(folder.result), sys.stdout)
    return status


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _copy(text: bytes, stream: IO[str] | None) -> None:
    if stream is not None:
        click.echo(text.decode(errors="replace"), file=stream, nl=False)
