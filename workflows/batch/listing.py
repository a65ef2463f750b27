"""The jobs that were submitted from here, and how they stand."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

from tilewright.pipeline.errors import ClusterError, OptionError, StoreError
from tilewright.workflows.batch import slurm
from tilewright.workflows.batch.folder import JobFolder, Submitted, job_folders, jobs_folder

MOST_TAIL_NBYTES = 4096
USER = re.compile(r"://[^/@\s]*@")
"""A name and a password in a URL."""


@dataclass(frozen=True)
class JobRow:
    """One job."""

    job: str
    state: str
    command: str
    """With its arguments, but without passwords."""
    begun: float
    last: str
    """The last line that its command has said."""
    folder: str
    status: int | None

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.begun))
        last = f"\n    {self.last}" if self.last else ""
        return f"{self.job}  {when}  {self.state}\n    {self.command}{last}\n    {self.folder}"


@dataclass(frozen=True)
class Jobs:
    rows: tuple[JobRow, ...]
    folder: str

    def to_json(self) -> dict[str, Any]:
        return {"jobs": [vars(row) for row in self.rows]}

    def __str__(self) -> str:
        return "\n".join(map(str, self.rows)) or f"no jobs in {self.folder}"


def jobs() -> Jobs:
    """All jobs, the newest first. Raises OptionError for a wrong setting."""
    rows = []
    for folder in job_folders():
        try:
            submitted = folder.submitted()
        except StoreError:  # of another release, or just being written
            continue
        rows.append(_row(folder, submitted))
    return Jobs(tuple(sorted(rows, key=lambda row: -row.begun)), str(jobs_folder()))


def folder_of(job: str) -> JobFolder:
    """The folder of a job, by its number; the newest, where Slurm counts anew.

    Raises
    ------
    OptionError
        There is no job of that number.
    """
    for folder in reversed(list(job_folders())):
        try:
            if folder.submitted().job == job:
                return folder
        except StoreError:
            continue
    raise OptionError(
        f"there is no job {job} in {jobs_folder()}; tilewright jobs lists those that were submitted from here"
        " (tilewright.jobs-folder)"
    )


def _row(folder: JobFolder, submitted: Submitted) -> JobRow:
    progress = folder.progress()
    status = None
    if submitted.job is None:
        state = "not submitted"
    elif progress is not None and progress.phase == "ended":
        status = progress.status
        state = "finished" if status == 0 else f"ended with exit status {status}"
        state += f" ({progress.reason})" if progress.reason else ""
    else:
        state = _state(submitted.job)
        if progress is not None and progress.phase == "stopped":
            status = progress.status
        if progress is not None and submitted.profile.tries > 1:
            state += f", try {progress.attempt} of {submitted.profile.tries}"
    last = _last_line(folder)
    if progress is not None and progress.reason and progress.reason in last:
        last = ""
    words = USER.sub("://...@", " ".join(submitted.words))
    return JobRow(
        submitted.job or "-",
        state,
        f"tilewright {words}",
        submitted.begun,
        last,
        str(folder.path),
        status,
    )


def _state(job: str) -> str:
    try:
        look = slurm.look_at(job)
    except ClusterError as error:
        return f"unknown ({error})"
    if look.queued:
        return f"queued ({look.why()})"
    meaning = slurm.ENDED.get(look.state, "")
    named = look.state.lower().replace("_", " ") or "unknown to Slurm"
    return f"{named} ({meaning})" if meaning else f"{named} on {look.nodes}" if look.nodes else named


def _last_line(folder: JobFolder) -> str:
    try:
        with folder.log.open("rb") as log:
            size = log.seek(0, 2)
            log.seek(max(0, size - MOST_TAIL_NBYTES))
            lines = log.read().decode(errors="replace").split("\n")
    except FileNotFoundError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
