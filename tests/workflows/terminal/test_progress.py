"""What people see while work runs: rates from events, lines without a terminal, a display on one."""

from __future__ import annotations

import errno
import io
import re
import sys

import pytest
from rich.console import Console

from tilewright.pipeline.events import (
    Listener,
    Notice,
    UnitAdvanced,
    UnitDone,
    WorkDone,
    WorkPlanned,
    on_waiting,
)
from tilewright.workflows import console
from tilewright.workflows.console import listening
from tilewright.workflows.terminal import progress
from tilewright.workflows.terminal.display import Display, display
from tilewright.workflows.terminal.progress import Counting, Lines, WorkProgress

PLANNED = WorkPlanned("matmul", 10, 4, "tiles", 6000, 600)


def unit(index: int) -> UnitDone:
    return UnitDone("matmul", index, "worker", 1.0, 2**20, 5 * 10**9, {})


def test_units_of_one_piece_of_work_are_counted_from_its_last_plan_on() -> None:
    counted, heard = Counting("matmul"), []
    assert str(counted) == "what earlier runs have finished, if any"
    with counted.listening(heard.append) as listener:
        listener(Notice("hello"))
        listener(PLANNED)
        listener(unit(0))
        listener(UnitDone("verify", 0, "worker", 1.0, 1, 1, {}))
        assert str(counted) == "5 of 10 tiles"
        listener(WorkPlanned("matmul", 40, 0, "tiles", 6000, 600))
        assert str(counted) == "0 of 40 tiles"
        listener(WorkPlanned("matmul", 1, 1, "tiles", 0, 0))
        assert str(counted) == "1 of 1 tile"
    assert len(heard) == 6


def test_rates_leave_out_what_an_earlier_run_did() -> None:
    work = WorkProgress(PLANNED, started=100.0)
    assert work.rates(101.0) == "4/10 tiles"
    work.add(unit(0), 102.0)
    work.add(unit(1), 104.0)
    assert work.rates(104.0) == "6/10 tiles, 512 KiB/s, 2.5 Gop/s, 8.00 s left"


@pytest.mark.parametrize(("busy", "estimate"), [(0.2, False), (0.5, True)])
def test_what_is_left_is_not_told_of_work_that_waited_for_its_workers(busy: float, estimate: bool) -> None:
    work = WorkProgress(PLANNED, started=0.0)
    work.add(
        UnitDone("matmul", 0, "worker", busy, 2**20, 5 * 10**9, {"read": busy / 2, "compute": busy / 2}), 1.0
    )
    assert ("left" in work.rates(100.0)) == estimate


def test_the_last_unit_has_nothing_left() -> None:
    work = WorkProgress(WorkPlanned("histogram", 1, 0, "pieces", 1, 0), started=0.0)
    work.add(UnitDone("histogram", 0, "worker", 1.0, 0, 0, {}), 1.0)
    assert work.rates(1.0) == "1/1 piece"


def test_of_pieces_what_is_left_is_told_by_their_bytes() -> None:
    """Also within one that is all there is, or most."""
    work = WorkProgress(WorkPlanned("histogram", 2, 0, "pieces", 100 * 2**20, 0), started=0.0)
    work.advance(UnitAdvanced("histogram", 1, 5 * 2**20), 10.0)
    assert work.rates(10.0) == "0/2 pieces, 5 MiB of 100 MiB, 512 KiB/s, 3 min 10 s left"
    work.add(UnitDone("histogram", 0, "worker", 1.0, 5 * 2**20, 0, {}), 20.0)
    assert work.rates(20.0) == "1/2 pieces, 10 MiB of 100 MiB, 512 KiB/s, 3 min 0 s left"
    work.add(UnitDone("histogram", 1, "worker", 1.0, 95 * 2**20, 0, {}), 200.0)
    assert work.rates(200.0) == "2/2 pieces, 100 MiB of 100 MiB, 512 KiB/s"


@pytest.mark.parametrize("start", [0.0, 30.0])
def test_what_starting_takes_is_not_told_of_the_rest(start: float) -> None:
    """Four workers start for ``start`` seconds and read 1 MiB a second each from then on, in pieces of 5 MiB."""
    work = WorkProgress(WorkPlanned("histogram", 100, 0, "pieces", 500 * 2**20, 0), started=0.0)
    for index in range(0, 20, 4):
        for worker in range(4):
            now = start + 5 * (index // 4 + 1) + 0.2 * worker
            work.add(UnitDone("histogram", index + worker, "worker", 5.0, 5 * 2**20, 0, {}), now)
    left = 400 / 4
    told = work.rates(now + 2).split(", ")
    assert told[:2] == ["20/100 pieces", "100 MiB of 500 MiB"]
    minutes, seconds = re.match(r"(?:(\d+) min )?(\d+) s left", told[3]).groups()  # type: ignore[union-attr]
    assert 60 * int(minutes or 0) + int(seconds) == pytest.approx(left - 2, rel=0.2)


def test_lines_are_rare_and_notices_are_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    lines = Lines()
    said = "a notice that is longer than the eighty columns of many a terminal: still one line [not markup]"
    lines(Notice(said))
    lines(PLANNED)
    for index, time in enumerate([1.0, 8.0, 11.0, 12.0, 25.0]):
        now[0] = time
        lines(unit(index))
    lines(WorkDone("matmul", 25.0))
    out, err = capsys.readouterr()
    assert not out
    notice, first, second = err.splitlines()
    assert notice == said
    assert first.startswith("matmul: 7/10 tiles")
    assert second.startswith("matmul: 9/10 tiles")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE])
def test_a_log_that_is_full_does_not_end_the_work(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr(progress.click, "echo", refuse)
    if number == errno.EPIPE:
        with pytest.raises(OSError, match="refused"):
            Lines()(Notice("nobody listens"))
    else:
        Lines()(Notice("no room"))


def test_a_closed_standard_error_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with listening() as listener:
        listener(Notice("nowhere to go"))


def test_a_terminal_gets_a_display_that_leaves_nothing_but_notices() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with display(console) as shown:
        listener = Display(shown)
        listener(PLANNED)
        listener(unit(0))
        (task,) = shown.tasks
        assert (task.completed, task.total) == (5, 10)
        listener(Notice("said"))
        shown.refresh()
        assert "5/10 tiles" in out.getvalue()
        listener(WorkDone("matmul", 1.0))
        assert not shown.tasks
    assert "said\n" in out.getvalue()


def test_work_that_begins_anew_is_shown_once() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with display(console) as shown:
        listener = Display(shown)
        listener(PLANNED)
        listener(unit(0))
        listener(WorkPlanned("matmul", 30, 0, "tiles", 6000, 600))
        (task,) = shown.tasks
        assert (task.completed, task.total) == (0, 30)


def test_only_a_terminal_gets_a_display(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[type] = []

    def as_told(listener: Listener) -> Listener:
        told.append(type(listener))
        return listener

    monkeypatch.setattr(console, "as_told", as_told)
    with listening():
        assert told == [Lines]
    monkeypatch.setattr(console.sys.stderr, "isatty", lambda: True)
    with listening() as listener:
        assert told == [Lines, Display]
        listener(Notice("said"))
    assert "said" in capsys.readouterr().err


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with listening(quiet=True) as listener:
        listener(Notice("said"))
    assert capsys.readouterr() == ("", "")
    with listening() as listener:
        listener(Notice("said"))
    assert capsys.readouterr() == ("", "said\n")


def test_quiet_keeps_waiting_out_of_the_log_too(caplog: pytest.LogCaptureFixture) -> None:
    """Python prints what is logged where nobody has said what becomes of it."""
    with listening(quiet=True) as listener:
        on_waiting(listener, "histogram", "ends it")("no worker has been there for 10 s")
    assert not caplog.messages
