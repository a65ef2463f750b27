"""A report says what the run was, in a page that needs nothing but itself."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from click.testing import CliRunner
from distributed import Client

import tilewright as tw
from tests.pipeline.report.runs import plan_of, run_of
from tests.workflows.products import put
from tilewright.pipeline.report.figures import floor_of, rates_of
from tilewright.pipeline.report.pictures import cells_of, nbytes_ticks, time_label, time_ticks
from tilewright.workflows.cli import cli
from tilewright.workflows.report import write_report

EMPTY_TAGS = {"meta", "link", "br"}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
in_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no chromium here (apt-get install chromium)"
)


class Page(HTMLParser):
    """What is in a page; a tag that is not closed, or closed twice, is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in EMPTY_TAGS:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def data_in(page: str) -> dict[str, Any]:
    (found,) = re.findall(
        r'<script type="application/json" id="tilewright-report">(.*?)</script>', page, re.S
    )
    loaded: dict[str, Any] = json.loads(found)
    return loaded


def test_a_report_of_a_product_has_its_numbers(
    tmp_path: Path, rng: np.random.Generator, client: Client
) -> None:
    a = put(tmp_path / "a <&\"'.zarr", rng.standard_normal((96, 80)))
    run = tw.matmul(a, a, tmp_path / "c.zarr", transpose_b=True, cluster=client, device="cpu")
    page = run.to_html()
    parsed, data = Page(page), data_in(page)
    assert data["run"] == json.loads(json.dumps(run.to_json()))
    assert data["run"]["names"] == {"A": str(a), "B": str(a), "C": str(tmp_path / "c.zarr")}
    text = " ".join(parsed.texts)
    assert str(a) in text, "names are shown as they are"
    assert str(run.verification) in text
    assert f"{run.plan.tile_count} tile" in text
    rates = {rate["stage"]: rate for rate in data["rates"]}
    assert rates["read"]["amount"] == run.read_nbytes
    assert rates["compute"]["amount"] == run.operations
    assert rates["compute"]["busy_seconds"] == pytest.approx(run.stages["compute"])
    (worker,) = data["run"]["timeline"]["workers"].values()
    assert worker["tiles"] == run.plan.tile_count
    for name, thread in worker["threads"].items():
        assert thread["seconds"] == pytest.approx(sum(busy[name] for busy in run.workers.values()), abs=1e-6)
    phases = [phase["name"] for phase in data["run"]["timeline"]["phases"] if phase["name"] != "between"]
    assert phases == ["opening", "matmul", "verify", "publishing"]
    assert data["versions"]["tilewright"] == tw.__version__
    made = re.compile(r"Made \S+Z\.")  # in the second in which each was
    assert made.sub("", run._repr_html_()) in made.sub("", page)


def test_a_report_is_escaped_and_needs_no_network() -> None:
    bad = "</script><script>alert(1)</script><!--&quot;\"'"
    run = run_of(plan_of((3, 4)), [f"tcp://{bad}"], say=bad)
    run = replace(run, names={"A": bad, "B": "b", "C": "c"}, device=bad, kernel=bad)
    page = run.to_html()
    parsed = Page(page)
    assert page.count("<script") == 1, "that of the data"
    assert "<!--" not in page
    assert data_in(page)["run"]["names"]["A"] == bad
    assert any(bad in text for text in parsed.texts)
    assert not [value for name, value in parsed.attributes if name in ("src", "href") and value != "data:,"]
    assert "url(" not in page
    assert "@import" not in page


@pytest.mark.parametrize("symmetric", [False, True])
def test_each_tile_has_the_colour_of_its_worker(symmetric: bool) -> None:
    plan = plan_of((5, 5), symmetric=symmetric)
    run = run_of(plan, ["v", "w"], skipped=2)
    assert run.timeline is not None
    cells = cells_of(plan, run.timeline.computed_by)
    assert cells.counts.sum() == plan.tile_count == (15 if symmetric else 25)
    for tile in plan.tiles():
        assert cells.workers[tile.i, tile.j] == run.timeline.computed_by[tile.index]
    page = Page(run.to_html())
    rectangles = [value for name, value in page.attributes if name == "class"]
    drawn = {kind: rectangles.count(kind) for kind in ("tw-w0", "tw-w1", "tw-earlier")}
    made = plan.tile_count - 2
    assert drawn == {"tw-w0": -(-made // 2), "tw-w1": made // 2, "tw-earlier": 2}


def test_what_is_too_much_to_draw_is_added_up_and_that_is_said() -> None:
    plan = plan_of((130, 70))
    run = run_of(plan, [f"w{number:03}" for number in range(60)], tile_seconds=0.01)
    page = run.to_html()
    assert run.timeline is not None
    cells = cells_of(plan, run.timeline.computed_by)
    assert cells.shape == (64, 64)
    assert cells.counts.sum() == plan.tile_count
    assert "Each cell is 2 × 1.1 tiles" in page
    assert "Each row is the mean of up to 3 workers" in page
    assert "And 10 more workers with" in page
    tiles = [worker["tiles"] for worker in data_in(page)["run"]["timeline"]["workers"].values()]
    assert (len(tiles), sum(tiles)) == (60, plan.tile_count)


def test_floors_are_what_each_stage_alone_takes() -> None:
    run = run_of(plan_of((4, 4)), ["v", "w"])  # 8 s, planned for four workers
    assert {rate.stage: rate.floor_seconds for rate in rates_of(run)} == pytest.approx(
        {"read": 2.0, "compute": 3.0, "write": 0.4}
    )
    assert floor_of(run) == ("compute", pytest.approx(3.0))
    assert [rate.rate for rate in rates_of(run)] == pytest.approx([800 / 0.5, 8000 / 0.75, 400 / 0.1])


def test_a_run_that_found_all_done_has_a_report() -> None:
    page = tw.MatmulRun.of_nothing(plan_of((2, 2))).to_html()
    Page(page)
    assert "Nothing was left to do" in page


@pytest.mark.parametrize(
    ("seconds", "labels"),
    [
        (0.0021, ["0.0000 s", "0.0005 s", "0.0010 s", "0.0015 s", "0.0020 s"]),
        (9.0, ["0 s", "1 s", "2 s"]),
        (1000.0, ["0 min", "2 min", "4 min"]),
        (100_000.0, ["0 h", "5 h", "10 h"]),
    ],
)
def test_times_on_axes_are_round_and_of_one_unit(seconds: float, labels: list[str]) -> None:
    ticks = time_ticks(seconds)
    found = [time_label(tick, ticks[1]) for tick in ticks]
    assert found[: len(labels)] == labels
    assert len(ticks) <= 11
    assert ticks[-1] <= seconds < ticks[-1] + ticks[1]


def test_bytes_on_axes_are_powers_of_two() -> None:
    assert nbytes_ticks(461 * 2**20) == [128 * 2**20 * place for place in range(5)]
    assert nbytes_ticks(0) == [0.0, 1.0]


@pytest.mark.slow
def test_a_million_tiles_are_a_small_page_in_seconds() -> None:
    plan = plan_of((1000, 1000))
    run = run_of(plan, [f"tcp://10.0.0.{number}:34567" for number in range(64)], tile_seconds=0.1)
    start = time.perf_counter()
    page = run.to_html()
    seconds = time.perf_counter() - start
    assert len(page.encode()) < 5_000_000
    assert seconds < 10
    workers = data_in(page)["run"]["timeline"]["workers"].values()
    assert sum(worker["tiles"] for worker in workers) == 10**6
    assert sum(worker["threads"]["load"]["spans"] for worker in workers) == 10**6
    assert sum(worker["threads"]["compute"]["seconds"] for worker in workers) == pytest.approx(
        75_000, rel=1e-6
    )


def test_reports_are_refused_before_anything_is_computed(tmp_path: Path, rng: np.random.Generator) -> None:
    a = put(tmp_path / "a.zarr", rng.standard_normal((8, 8)))
    (tmp_path / "there.html").write_text("mine")
    product = ["matmul", str(a), str(a), str(tmp_path / "c.html"), "--device", "cpu", "-q", "--report"]
    for words, status, said in (
        ([str(tmp_path / "r.pdf")], 2, "ends in '.pdf'"),
        ([str(tmp_path / "r.html"), "--plan-only"], 2, "--report tells of a run"),
        ([str(tmp_path / "there.html")], 1, "exists"),
        ([str(tmp_path / "nowhere" / "r.html")], 1, "there is no folder"),
        ([str(tmp_path / "c.html"), "--overwrite"], 1, "is where C goes"),
        ([str(tmp_path / "a.zarr" / "r.html")], 1, "lies in the array"),
    ):
        result = CliRunner().invoke(cli, [*product, *words])
        assert (result.exit_code, said in result.stderr) == (status, True), result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"a.zarr", "there.html"}


def test_a_report_that_cannot_be_written_says_that_the_product_is(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    a = put(tmp_path / "a.zarr", rng.standard_normal((8, 8)))
    run = tw.matmul(a, a, tmp_path / "c.zarr", device="cpu")
    (tmp_path / "r.html").write_text("another's, since it was looked at")
    with pytest.raises(tw.OutputExistsError, match=r"^--report: .*exists.*; the product is finished"):
        write_report(run.report(), str(tmp_path / "r.html"), overwrite=False)


def test_commands_write_reports(tmp_path: Path, rng: np.random.Generator) -> None:
    x = put(tmp_path / "x.zarr", rng.standard_normal((40, 24)))
    page, data = tmp_path / "r.html", tmp_path / "r.json"
    shared = ["--device", "cpu", "-q", "--json", "--report"]
    made = CliRunner().invoke(cli, ["corr", str(x), str(tmp_path / "c.zarr"), *shared, str(page)])
    assert made.exit_code == 0, made.stderr
    told = data_in(page.read_text(encoding="utf-8"))
    assert told["run"] == json.loads(made.stdout)
    assert "statistics" in [phase["name"] for phase in told["run"]["timeline"]["phases"]]
    made = CliRunner().invoke(
        cli, ["matmul", str(x), str(x), str(tmp_path / "d.zarr"), "--transpose-a", *shared, str(data)]
    )
    assert made.exit_code == 0, made.stderr
    assert json.loads(data.read_text(encoding="utf-8"))["run"] == json.loads(made.stdout)


@pytest.mark.more
@in_browser
def test_a_browser_shows_a_report(tmp_path: Path) -> None:
    run = run_of(
        plan_of((12, 9)), [f"tcp://10.0.0.{number}:4567" for number in range(3)], say="a <b>caution</b>"
    )
    (tmp_path / "r.html").write_text(run.to_html(), encoding="utf-8")
    browser = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    browser += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1080,1600", "--hide-scrollbars"]
    url = (tmp_path / "r.html").as_uri()
    dumped = subprocess.run(
        [*browser, "--dump-dom", url], capture_output=True, text=True, timeout=60, check=True
    )
    assert "CONSOLE" not in dumped.stderr
    assert dumped.stdout.count("<svg") == 5, "floors, timeline, tiles, panels, memory"
    assert dumped.stdout.count('class="tw-w0"') == 36
    assert "a &lt;b&gt;caution&lt;/b&gt;" in dumped.stdout
    picture = tmp_path / "r.png"
    subprocess.run([*browser, f"--screenshot={picture}", url], capture_output=True, timeout=60, check=True)
    image = matplotlib.image.imread(picture)[:, :, :3]
    assert image.shape == (1600, 1080, 3)
    rows = image.std(axis=(1, 2)) > 0.01
    assert rows.mean() > 0.5, "text or pictures on most lines"
    for colour in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00), (0xC9, 0x74, 0x1C)):  # two workers, multiplying
        shown = np.abs(image - np.array(colour) / 255).max(axis=2) < 0.02
        assert shown.mean() > 0.001, colour
