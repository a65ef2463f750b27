"""The files by which a terminal and a job know of each other: in a folder of the job's own, which its nodes see too.

``job.json`` says what was submitted, ``script`` is what sbatch got, ``log`` and ``result`` are what the command
printed, and ``state.json`` is what the job says of itself. ``scheduler.log`` and ``workers.log`` hold what Dask has to
say. The folder is its owner's alone: arguments of a command may hold secrets.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tilewright.pipeline import config
from tilewright.pipeline.errors import StoreError
from tilewright.workflows.batch.profile import BatchProfile

VERSION = 1
"""Of the files."""
INSIDE_PROFILE = "job"
INSIDE_TRY = "TILEWRIGHT_JOB_TRY"
"""Which try of the job it is, from 1."""


@dataclass(frozen=True)
class Submitted:
    """What was submitted."""

    words: tuple[str, ...]
    """The command and its arguments, as they were given."""
    profile: BatchProfile
    folder: str
    """Where it was given, and runs."""
    begun: float
    """Seconds since the epoch."""
    job: str | None = None
    """Slurm's number; none as long as sbatch has not answered."""

    @property
    def command(self) -> str:
        return self.words[0]


@dataclass(frozen=True)
class Progress:
    """What a job says of itself."""

    phase: str
    """``started``, ``stopping``, ``queued again``, ``ended``; or ``stopped``: it was asked to end, and Slurm knows
    whether it starts again, as it does by itself where a node has failed."""
    attempt: int
    """Which try it is, from 1."""
    reason: str = ""
    """Why it stopped or ended; empty where the command itself ended."""
    status: int | None = None
    """The exit status of the command, where it has ended."""


class JobFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.script = path / "script"
        self.log = path / "log"
        """What the command prints on standard error, and Slurm says of the job."""
        self.result = path / "result"
        """What the command prints on standard output."""
        self.profiles = path / "cluster.yaml"
        """The way to the job's scheduler, as a profile."""
        self._submitted = path / "job.json"
        self._state = path / "state.json"

    def scheduler_file(self, attempt: int) -> Path:
        """A try never finds the address of the one before."""
        return self.path / f"scheduler-{attempt}.json"

    def stop_file(self, attempt: int) -> Path:
        """Is there once a task of a try was asked to end."""
        return self.path / f"stop-{attempt}"

    def certificate(self, attempt: int) -> Path:
        """Of a try's own making, as is the key."""
        return self.path / f"certificate-{attempt}.pem"

    def key(self, attempt: int) -> Path:
        return self.path / f"key-{attempt}.pem"

    def remove_certificates(self) -> None:
        """Those of all tries; what cannot be removed stays, and opens nothing once its try is over."""
        for pattern in ("certificate-*.pem", "key-*.pem"):
            for path in self.path.glob(pattern):
                with suppress(OSError):
                    path.unlink()

    def dask_log(self, who: str) -> Path:
        return self.path / f"{who}.log"

    def write_submitted(self, submitted: Submitted) -> None:
        self._write(self._submitted, {"version": VERSION} | asdict(submitted))

    def submitted(self) -> Submitted:
        """Raises StoreError where it cannot be read."""
        found = self._read(self._submitted)
        try:
            if found.pop("version") != VERSION:
                raise ValueError("it is of another release")
            profile = found.pop("profile")
            profile = BatchProfile(**profile | {"extra": tuple(profile["extra"])})
            return Submitted(**found | {"words": tuple(found["words"]), "profile": profile})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"{self._submitted} says of no job of ours: {error}") from error

    def number(self, job: str) -> None:
        """Note Slurm's number of the job."""
        self.write_submitted(replace(self.submitted(), job=job))

    def write_progress(self, progress: Progress) -> None:
        self._write(self._state, asdict(progress))

    def progress(self) -> Progress | None:
        """None where the job has not begun, or its file is just on its way here."""
        try:
            return Progress(**self._read(self._state))
        except (StoreError, TypeError):
            return None

    def _write(self, path: Path, content: dict[str, Any]) -> None:
        """In one step, since others read at any time."""
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        beside.replace(path)

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StoreError(f"cannot read {path}: {error}") from error
        if not isinstance(found, dict):
            raise StoreError(f"{path} says of no job of ours: {type(found).__name__}")
        return found


def jobs_folder() -> Path:
    """Where the folders of jobs lie."""
    chosen = config.path_of("jobs-folder")
    if chosen is not None:
        return Path(chosen).absolute()
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state).absolute() / "tilewright" / "jobs"


def name_of(command: str, begun: float) -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(begun))}-{command}"


def make_folder(command: str, begun: float) -> JobFolder:
    """A new folder for a job. Raises StoreError where none can be made."""
    parent, name = jobs_folder(), name_of(command, begun)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for count in range(1, 1000):  # several jobs of one second
            path = parent / (name if count == 1 else f"{name}-{count}")
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
                return JobFolder(path)
    except OSError as error:
        raise StoreError(
            f"cannot make a folder for the job in {parent}: {error.strerror}; it has to be one that the nodes see too:"
            " set tilewright.jobs-folder to one (DASK_TILEWRIGHT__JOBS_FOLDER)"
        ) from error
    raise StoreError(f"{parent} has a thousand jobs of this second; wait for the next one")


def job_folders() -> Iterator[JobFolder]:
    """All that there are, the oldest first."""
    parent = jobs_folder()
    if parent.is_dir():
        for path in sorted(parent.iterdir()):
            if (path / "job.json").is_file():
                yield JobFolder(path)
