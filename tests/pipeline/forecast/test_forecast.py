"""What is said of a run before it is made follows from rates that there are, and from no others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tests.pipeline.report.runs import plan_of, run_of
from tests.workflows.products import put
from tilewright.pipeline.forecast import rates as module
from tilewright.pipeline.forecast.forecast import Disk, Foreseen, disk_at, forecast_of
from tilewright.pipeline.forecast.rates import Rates, kind_of, remember, remember_measured, remembered
from tilewright.workflows.cli import cli

PLAN = plan_of((4, 4))  # for four workers


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tilewright" / "rates.json"


def test_a_run_like_an_earlier_one_takes_as_long(cache: Path) -> None:
    run = run_of(PLAN, ["a", "b", "c", "d"])
    run = replace(
        run, read_nbytes=PLAN.read_nbytes, write_nbytes=PLAN.write_nbytes, operations=PLAN.operations
    )
    kind = kind_of(PLAN, "CPU", "full")
    assert remembered(kind) == []
    remember(run, "full")
    (kept,) = remembered(kind)
    assert kept == Rates.of(run)
    forecast = forecast_of(PLAN, [kept], None, None)
    assert forecast.seconds == pytest.approx(run.seconds) == 4.0
    assert forecast.limit == "compute"
    assert forecast.floors == pytest.approx({"load": 2.0, "compute": 3.0, "write": 0.4})
    assert "one run of its kind" in str(Foreseen(PLAN, forecast))
    slower = replace(kept, operations=kept.operations / 2 if kept.operations else None)
    both = forecast_of(PLAN, [kept, slower], None, None)
    assert (both.least_seconds, both.most_seconds) == pytest.approx((4.0, 8.0))
    assert "about 6.00 s ± 33% for the tiles, by the rates of the last 2 runs" in str(Foreseen(PLAN, both))
    assert not remembered(kind_of(PLAN, "another GPU", "full"))
    small = replace(kept, work=PLAN.operations // 101, operations=1.0)
    assert forecast_of(PLAN, [small], None, None).seconds is None, (
        "a hundredth of the work is mostly its start"
    )
    assert forecast_of(PLAN, [small, kept], None, None).seconds == forecast.seconds


def test_few_runs_are_kept_and_none_that_waited(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_RUNS", 2)
    monkeypatch.setattr(module, "MOST_KINDS", 2)
    remember(replace(run_of(PLAN, ["a"]), seconds=10_000.0), "full")
    assert not cache.exists(), "it waited for something else"
    run = run_of(PLAN, ["a"])
    for precision in ("full", "tf32", "full", "full", "fp16"):
        remember(run, precision)
    found = [len(remembered(kind_of(PLAN, "CPU", precision))) for precision in ("full", "tf32", "fp16")]
    assert found == [2, 0, 1]
    cache.write_text("{damaged")
    assert not remembered(kind_of(PLAN, "CPU", "full"))
    remember(run, "full")
    assert len(remembered(kind_of(PLAN, "CPU", "full"))) == 1


def test_a_small_one_takes_as_long_as_most_do_and_not_as_the_first(cache: Path) -> None:
    """The first of a kind compiles, and was the only one that took long enough for its rates to be kept."""
    run = replace(run_of(PLAN, ["a", "b", "c", "d"]), operations=PLAN.operations)
    for seconds in (2.9, 0.2, 0.3, 0.1):
        remember(replace(run, seconds=seconds), "full")
    kept = remembered(kind_of(PLAN, "CPU", "full"))
    assert [rates.operations is None for rates in kept] == [False, True, True, True]
    forecast = forecast_of(PLAN, kept, None, None)
    assert (forecast.least_seconds, forecast.most_seconds, forecast.runs) == (0.1, 0.3, 3)
    assert "less than a second for the tiles" in str(Foreseen(PLAN, forecast))
    assert forecast_of(PLAN, kept[:2], None, None).seconds != forecast.seconds, "half of them is not most"
    smaller = [replace(rates, work=PLAN.operations - 1) for rates in kept]
    assert forecast_of(PLAN, smaller, None, None).runs == 1, (
        "who knows what a larger one takes beside its start"
    )


def test_by_measured_rates_it_takes_from_the_longest_part_to_all_of_them() -> None:
    slow = Rates(PLAN.operations / 10, PLAN.read_nbytes / 4, None)
    fast = Rates(PLAN.operations / 8, PLAN.read_nbytes / 2, None)
    forecast = forecast_of(PLAN, [], (slow, fast), None)
    assert (forecast.least_seconds, forecast.most_seconds, forecast.runs) == (8.0, 14.0, 0)
    assert forecast.floors == {"load": 3.0, "compute": 9.0, "write": None}
    text = str(Foreseen(PLAN, forecast))
    assert "about 11 s ± 27% for the tiles, by rates that were measured here" in text
    assert "multiplying; alone, and at once on all workers: reading 3.00 s, multiplying 9.00 s" in text
    shared = forecast_of(PLAN, [], (slow, fast), None, machines=4)
    assert shared.least_seconds == 2.0


def test_without_rates_nothing_is_said_of_the_time() -> None:
    forecast = forecast_of(PLAN, [], None, Disk("/data", PLAN.write_nbytes - 1024))
    assert forecast.seconds is None
    assert not forecast.fits
    text = str(Foreseen(PLAN, forecast))
    assert text.startswith("time            not known: no run of its kind")
    assert "verdict         it may not fit the disk: 1 KiB are lacking in /data" in text
    assert "\n\nproduct  " in text, "the plan's own terms come below"


def test_the_disk_is_that_of_the_next_folder_above(tmp_path: Path) -> None:
    found = disk_at(tmp_path / "new" / "c.zarr")
    assert found is not None
    assert found.folder == str(tmp_path)
    assert found.free_nbytes > 0


def test_commands_say_it_first(tmp_path: Path, rng: np.random.Generator, cache: Path) -> None:
    a = put(tmp_path / "a.zarr", rng.standard_normal((64, 48)))
    product = [str(a), str(a), str(tmp_path / "c.zarr"), "--transpose-b", "--device", "cpu", "-q"]
    made = CliRunner().invoke(cli, ["matmul", *product, "--plan-only"])
    assert made.exit_code == 0, made.output
    lines = made.stdout.splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["time", "limit", "disk", "memory", "verdict"]
    assert "less than a second" in lines[0]
    assert str(tmp_path) in lines[2]
    assert not (tmp_path / "c.zarr").exists()
    kept = json.loads(cache.read_text())["kinds"]
    ((kind, rates),) = kept.items()
    remember_measured(kind.removesuffix("; measured"), 1.0, 1.0)  # an operation a second, from now on
    made = CliRunner().invoke(
        cli, ["plan", str(a), str(a), "--transpose-b", "--device", "cpu", "-q", "--json"]
    )
    assert made.exit_code == 0, made.output
    found = json.loads(made.stdout)
    assert found["forecast"]["floors"]["compute"] == found["operations"]
    assert found["forecast"]["source"] == "measured"
    assert found["forecast"]["disk"] is None
    assert 0 < rates[0] <= rates[1]
