"""Reports of counts, searches and EOFs: what events told, added up, in the same kind of page as a product's."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tests.pipeline.report.test_page import Page, data_in
from tests.workflows.products import put
from tilewright.pipeline.events import Event, Notice, Span, UnitDone, WorkDone, WorkPlanned
from tilewright.pipeline.report.work_page import WorkReport
from tilewright.pipeline.report.works import WorkRecorder
from tilewright.workflows.cli import cli
from tilewright.workflows.report import write_report


def recorded(workers: int, *, read: float, pause: float = 0.0) -> WorkRecorder:
    """Each worker counts a piece of a second, of which it reads for a share; the rest of the time is a pause."""
    clock: Iterator[float] = count(1000.0, (1.0 + pause) / 6)  # begin, planned, said, done, end
    heard: list[Event] = []
    recorder = WorkRecorder(heard.append, clock=lambda: next(clock))
    recorder(WorkPlanned("histogram", workers + 2, 2, "pieces", 700 * workers, 0))
    for place in range(workers):
        span = Span(f"w{place}", "piece", 1000.0, 1001.0)
        stages = {"read": read, "count": 1.0 - read}
        recorder(UnitDone("histogram", place, span.worker, 1.0, 700, 0, stages, (span,)))
    recorder(Notice("said <b>"))
    recorder(WorkDone("histogram", 1.0))
    assert len(heard) == workers + 3
    return recorder


def report_of(recorder: WorkRecorder, **more: Any) -> WorkReport:
    return WorkReport("histogram", ["a <&", "b", "c", "d", "e"], {"device": "CPU"}, "told", recorder, **more)


def test_names_that_are_no_text_are_shown_and_kept(tmp_path: Path) -> None:
    """Names of files are bytes, and those of others than UTF-8 are no characters: a page is written all the same."""
    name, shown = os.fsdecode(b"corpus\xff"), "corpus?"
    report = WorkReport("histogram", [name], {"device": "CPU"}, f"told of {name}", recorded(1, read=0.25))
    for place in ("page.html", "data.json"):
        write_report(report, str(tmp_path / place), overwrite=False)
    page = (tmp_path / "page.html").read_text("utf-8")
    assert f"histogram of {shown}" in " ".join(Page(page).texts)
    assert f"told of {shown}" in report.to_fragment()
    assert data_in(page)["inputs"] == json.loads((tmp_path / "data.json").read_text())["inputs"] == [name]


def test_parts_are_added_up() -> None:
    report = report_of(recorded(3, read=0.25))
    page, data = Page(report.to_html()), report.to_json()
    (part,) = data["parts"]
    assert part["stages"] == {"read": 0.75, "count": 2.25}
    assert (part["done"], part["earlier"], part["total"], part["nbytes"]) == (3, 2, 5, 2100)
    assert part["workers"] == {"w0": 1, "w1": 1, "w2": 1}
    assert {
        name: told["threads"]["piece"]["seconds"] for name, told in data["timeline"]["workers"].items()
    } == {f"w{place}": pytest.approx(1.0) for place in range(3)}
    assert data_in(report.to_html()) == json.loads(report.to_text()) == data
    text = " ".join(page.texts)
    assert "histogram of a <&, b, c and 2 others" in text
    assert "2 of them by earlier runs" in text
    assert "said <b>" in text


@pytest.mark.parametrize(
    ("read", "pause", "limit"),
    [
        (0.9, 0.0, "reading took 90% of the workers' busy time: only if that gets faster, the work does"),
        (0.4, 0.0, "counting took 60% of the workers' busy time, and no one stage limits it"),
        (0.4, 4.0, "workers had nothing to do for 80% of the time: the work is small, or"),
    ],
)
def test_what_limited_it_is_said(read: float, pause: float, limit: str) -> None:
    assert report_of(recorded(2, read=read, pause=pause)).limit.startswith(limit)


def test_work_that_found_all_done_has_a_report() -> None:
    report = report_of(WorkRecorder(lambda event: None))
    assert report.limit == "nothing was left to do"
    assert "Timeline" not in report.to_html()


def test_passes_of_a_product_are_one_part() -> None:
    recorder = WorkRecorder(lambda event: None)
    for number in (1, 2):
        name = f"eofs, pass {number}"
        recorder(WorkPlanned(name, 4, 0, "tiles", 8, 8))
        recorder(UnitDone(name, 0, "w", 1.0, 5, 7, {"compute": 1.0}))
        recorder(WorkDone(name, 1.0))
    (part,) = recorder.parts.values()
    assert (part.name, part.times, part.total, part.done) == ("eofs, passes", 2, 8, 2)
    assert (part.nbytes, part.operations) == (10, 14)


def test_every_command_that_works_writes_a_report(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "x.zarr", rng.standard_normal((24, 12)).astype("f4"))
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("the same words in both of them")
    Path("texts/b.txt").write_text("the same words in both of them")
    cpu = ["--device", "cpu"]
    for name, words, parts in (
        ("histogram", ["texts", "--by", "word", *cpu], {"histogram"}),
        ("eofs", ["x.zarr", "e.zarr", "-k", "2", *cpu], {"statistics", "eofs, passes"}),
        ("topk", ["x.zarr", "n.zarr", "-k", "2", *cpu], {"topk"}),
        ("pairs", ["x.zarr", "p.zarr", "--above", "1", *cpu], {"pairs"}),
        ("duplicates", ["texts"], {"signatures"}),
        ("signals", ["texts"], {"signals"}),
    ):
        page = f"{name}.html"
        made = CliRunner().invoke(cli, [name, *words, "-q", "--json", "--report", page])
        assert made.exit_code == 0, made.stderr
        data = data_in(Path(page).read_text(encoding="utf-8"))
        assert data["work"] == name
        assert parts <= {part["name"] for part in data["parts"]}
        assert all(part["done"] + part["earlier"] == part["total"] for part in data["parts"]), name
        assert data["timeline"]["workers"], name
        printed = json.loads(made.stdout)
        for fact, value in data["result"].items():
            if value is not None:
                assert printed[fact] == value, (name, fact)


def test_reports_are_refused_before_anything_is_done(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "x.zarr", rng.standard_normal((8, 6)))
    Path("a.json").write_text("text")
    for words, why in (
        (["histogram", "a.json", "--report", "a.json", "--overwrite"], "--report: "),
        (
            ["histogram", "a.json", "--out", "b.json", "--report", "b.json"],
            "--report b.json is where what is counted goes",
        ),
        (["duplicates", "a.json", "--report", "nowhere/r.html"], "--report: there is no folder nowhere"),
        (
            ["topk", "x.zarr", "n.zarr", "--report", "x.zarr/r.html"],
            "--report x.zarr/r.html lies in the array",
        ),
        (["eofs", "x.zarr", "e.zarr", "--report", "a.json"], "--report: a.json exists"),
    ):
        made = CliRunner().invoke(cli, [*words, "-q"])
        assert made.exit_code == 1
        assert re.match(f"error: {re.escape(why)}", made.stderr), made.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"x.zarr", "a.json"}
    assert Path("a.json").read_text() == "text"
    made = CliRunner().invoke(cli, ["histogram", "a.json", "--plan-only", "--report", "r.html"])
    assert made.exit_code == 2
