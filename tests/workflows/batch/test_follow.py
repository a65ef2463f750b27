"""What a terminal shows of a job, and with which status it ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tilewright.pipeline.errors import ClusterError
from tilewright.workflows.batch.folder import JobFolder, Progress
from tilewright.workflows.batch.follow import ASK_SECONDS, LOOK_SECONDS, SETTLE_SECONDS, Follower
from tilewright.workflows.batch.slurm import UNKNOWN, Look

RUNNING = Look("RUNNING", "None", "", "c[1-2]")


class Story:
    """What happens to a job while it is followed: each step is what Slurm says from then on, or something done."""

    def __init__(self, folder: Path, *steps: Look | ClusterError | Callable[[JobFolder], object]) -> None:
        self.folder = JobFolder(folder)
        self.steps = iter(steps)
        self.says: Look | ClusterError = UNKNOWN
        self.now = 0.0
        self.lines: list[str] = []
        self.asked = 0
        self.go_on()
        self.follower = Follower(
            self.folder, "7", 3, self.lines.append, self.show, self.look_at, lambda: self.now, self.sleep
        )

    def show(self, text: bytes) -> None:
        self.lines += text.decode().splitlines()

    def look_at(self, job: str) -> Look:
        assert job == "7"
        self.asked += 1
        if isinstance(self.says, ClusterError):
            raise self.says
        return self.says

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now % ASK_SECONDS == 0:
            self.go_on()

    def go_on(self) -> None:
        for step in self.steps:
            if isinstance(step, Look | ClusterError):
                self.says = step
                return
            step(self.folder)


def noted(phase: str, attempt: int, status: int | None = None) -> Callable[[JobFolder], object]:
    return lambda folder: folder.write_progress(Progress(phase, attempt, "", status))


def said(text: str) -> Callable[[JobFolder], object]:
    def append(folder: JobFolder) -> None:
        with folder.log.open("a") as log:
            log.write(text)

    return append


def test_a_job_is_shown_from_its_queue_to_its_end(tmp_path: Path) -> None:
    story = Story(
        tmp_path,
        Look("PENDING", "Priority", "2026-11-25T16:00:00"),
        Look("PENDING", "Priority", "2026-11-25T16:00:00"),
        Look("PENDING", "Resources"),
        noted("started", 1),
        RUNNING,
        said("1 of 9 tiles\n2 of "),
        RUNNING,
        said("9 tiles\nhalf a line"),
        noted("ended", 1, 0),
        RUNNING,
    )
    assert story.follower.follow() == 0
    assert story.lines == [
        "job 7 is queued: Priority: other jobs come first; it may start at 2026-11-25T16:00:00",
        "job 7 is queued: Resources: its nodes, cores or GPUs are in use",
        "job 7 has started on c[1-2]",
        "1 of 9 tiles",
        "2 of 9 tiles",
    ]
    assert story.asked <= story.now / ASK_SECONDS + 2, "Slurm's controller serves others too"


def test_a_job_that_is_queued_again_is_followed_on(tmp_path: Path) -> None:
    story = Story(
        tmp_path,
        noted("started", 1),
        RUNNING,
        noted("queued again", 1),
        Look("PENDING", "BeginTime"),
        noted("started", 2),
        RUNNING,
        noted("ended", 2, 5),
        RUNNING,
    )
    assert story.follower.follow() == 5, "the command's own status"
    started, again, last = story.lines
    assert started == "job 7 has started on c[1-2]"
    assert again.startswith("job 7 is queued again (try 2 of 3): BeginTime: its time to start has not come; ")
    assert last == "job 7 has started on c[1-2] (try 2 of 3)"


def test_a_job_that_was_stopped_may_be_started_again_by_slurm(tmp_path: Path) -> None:
    """As when a node has failed; one that was cancelled is not."""
    steps = [
        noted("started", 1),
        RUNNING,
        noted("stopped", 1, 143),
        Look("COMPLETING"),
        Look("PENDING", "BeginTime"),
    ]
    story = Story(tmp_path, *steps, noted("started", 2), RUNNING, noted("ended", 2, 0), RUNNING)
    assert story.follower.follow() == 0
    assert story.lines[-1] == "job 7 has started on c[1-2] (try 2 of 3)"
    (tmp_path / "cancelled").mkdir()
    steps = [noted("started", 1), RUNNING, noted("stopped", 1, 143), Look("COMPLETING"), Look("CANCELLED")]
    assert Story(tmp_path / "cancelled", *steps).follower.follow() == 143


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ("TIMEOUT", "its time was up before it had stopped"),
        ("OUT_OF_MEMORY", "raise mem in the profile"),
        ("CANCELLED", "it was cancelled"),
        ("FAILED", "ended it as FAILED; it has written nothing; its nodes have to see "),
    ],
)
def test_an_end_without_a_word_is_told_once_it_may_have_come(tmp_path: Path, state: str, why: str) -> None:
    story = Story(tmp_path, noted("started", 1), RUNNING, Look(state))
    with pytest.raises(ClusterError, match=why) as told:
        story.follower.follow()
    assert state in str(told.value)
    assert "the same command goes on" in str(told.value)
    assert ASK_SECONDS + SETTLE_SECONDS <= story.now <= ASK_SECONDS + SETTLE_SECONDS + 2 * LOOK_SECONDS


def test_an_end_without_a_word_names_the_log(tmp_path: Path) -> None:
    story = Story(tmp_path, said("no module\n"), noted("started", 1), RUNNING, Look("FAILED"))
    with pytest.raises(ClusterError, match=r"as FAILED; see .*/log; the same command"):
        story.follower.follow()


def test_the_last_word_may_come_behind_the_end(tmp_path: Path) -> None:
    story = Story(
        tmp_path, noted("started", 1), RUNNING, Look("COMPLETED"), noted("ended", 1, 0), Look("COMPLETED")
    )
    assert story.follower.follow() == 0


def test_a_job_that_slurm_has_forgotten_has_ended(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="knows it no longer"):
        Story(tmp_path, UNKNOWN).follower.follow()
    story = Story(tmp_path, noted("ended", 2, 143), UNKNOWN)
    assert story.follower.follow() == 143


def test_a_controller_that_does_not_answer_ends_nothing(tmp_path: Path) -> None:
    story = Story(
        tmp_path,
        ClusterError("squeue could not ask for it: timed out"),
        *[ClusterError("squeue could not ask for it: timed out")] * 6,
        noted("started", 1),
        RUNNING,
        ClusterError("squeue could not ask for it: timed out"),
        noted("ended", 1, 0),
        RUNNING,
    )
    assert story.follower.follow() == 0
    assert story.lines == [
        "squeue could not ask for it: timed out; it is asked again",
        "job 7 has started on c[1-2]",
        "squeue could not ask for it: timed out; it is asked again",
    ]
