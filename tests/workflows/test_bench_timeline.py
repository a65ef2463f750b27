"""The timeline draws what spans say: a lane a thread, a row a worker, a panel a case."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from click.testing import CliRunner

from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.events import Span, UnitDone
from tilewright.pipeline.report.timeline import Recorder, Timeline
from tilewright.workflows.bench.timeline import COLOURS, plot_timelines
from tilewright.workflows.cli import cli

SPANS = (
    Span("tcp://b", "load", 100.5, 101.5),
    Span("tcp://a", "load", 100.0, 101.0),
    Span("tcp://a", "compute", 101.0, 104.0),
    Span("tcp://a", "load", 101.0, 103.0),
    Span("tcp://a", "write", 104.0, 105.0),
)


def recorded(begin: float, seconds: float, spans: Iterable[Span]) -> tuple[str, Timeline]:
    """A run as it is recorded from the event of its only unit."""
    times = iter([begin, begin + seconds])
    recorder = Recorder(lambda event: None, clock=lambda: next(times))
    recorder(UnitDone("matmul", 0, "tcp://a", 1.0, 0, 0, {}, tuple(spans)))
    return "case", recorder.timeline()


def shares(path: Path) -> dict[str, float]:
    """How much of a picture has each thread's colour."""
    image = matplotlib.image.imread(path)[:, :, :3]
    colours = {name: [int(code[i : i + 2], 16) / 255 for i in (1, 3, 5)] for name, code in COLOURS.items()}
    return {
        name: float((np.abs(image - np.array(colour)).max(axis=2) < 0.02).mean())
        for name, colour in colours.items()
    }


def test_the_areas_are_as_the_durations(tmp_path: Path) -> None:
    plot_timelines([recorded(100.0, 6.0, SPANS)], tmp_path / "t.png")
    found = shares(tmp_path / "t.png")  # with the legend's, which are alike
    assert found["write"] > 0.005
    assert found["load"] > 2 * found["write"]
    assert found["compute"] > 1.5 * found["write"]
    assert found["load"] > found["compute"]
    assert [path.name for path in tmp_path.iterdir()] == ["t.png"]


def test_many_spans_are_not_hidden_by_their_edges(tmp_path: Path) -> None:
    many = tuple(Span("a", "compute", i * 1e-3, (i + 1) * 1e-3) for i in range(10_000))
    plot_timelines([recorded(0.0, 10.0, many)], tmp_path / "t.png")
    assert shares(tmp_path / "t.png")["compute"] > 0.05


def test_nothing_to_draw_and_nowhere_to_write(tmp_path: Path) -> None:
    plot_timelines([recorded(0.0, 1.0, ())], tmp_path / "t.png")
    with pytest.raises(StoreError, match="nowhere"):
        plot_timelines([recorded(100.0, 6.0, SPANS)], tmp_path / "nowhere" / "t.png")
    assert [path.name for path in tmp_path.iterdir()] == ["t.png"]


@pytest.mark.slow
def test_the_benchmark_draws_its_last_run_of_each_case(tmp_path: Path) -> None:
    place = tmp_path / "matrices"
    place.mkdir()
    words = "bench e2e --n 200 --n 300 --chunk 100 --workers 1 --repeats 1 --no-peer --device cpu --json"
    result = CliRunner().invoke(
        cli, [*words.split(), "--folder", str(place), "--timeline", str(tmp_path / "t.png")]
    )
    assert result.exit_code == 0, result.output
    details = json.loads(result.stdout)["details"]
    assert [detail["case"][:15] for detail in details] == ["float32 n = 200", "float32 n = 300"]
    assert [detail["read_nbytes"] for detail in details] == [2 * 4 * 200**2, 2 * 4 * 300**2]
    assert all(
        20 * 2**20 < detail["memory_nbytes"] < 2**30 for detail in details
    )  # a worker's process, in bytes
    assert min(shares(tmp_path / "t.png").values()) > 0.0005
    assert not list(place.iterdir())
