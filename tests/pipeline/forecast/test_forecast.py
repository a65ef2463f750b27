"""What is said of a run before it is made follows from rates that there are, and from no others."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from click.testing import CliRunner

from tests.pipeline.report.runs import plan_of, run_of
from tests.workflows.products import put
from tilewright.pipeline.forecast import measure
from tilewright.pipeline.forecast import rates as module
from tilewright.pipeline.forecast.counts import USUAL, count_forecast
from tilewright.pipeline.forecast.forecast import Disk, Foreseen, disk_at, forecast_of
from tilewright.pipeline.forecast.published import CLUSTER_START_SECONDS, START_SECONDS
from tilewright.pipeline.forecast.rates import (
    Rates,
    kind_of,
    kind_of_count,
    kind_of_search,
    remember,
    remember_count,
    remember_measured,
    remember_search,
    remembered,
)
from tilewright.pipeline.forecast.workload import Workload
from tilewright.pipeline.neighbours.plan import Asked, plan_neighbours
from tilewright.workflows.cli import cli

PLAN = plan_of((4, 4))  # for four workers
WORK = Workload.of_product(PLAN)


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
    forecast = forecast_of(WORK, [kept], None, None)
    assert forecast.seconds == pytest.approx(run.seconds) == 4.0
    assert forecast.limit == "compute"
    assert forecast.floors == pytest.approx({"load": 2.0, "compute": 3.0, "write": 0.4})
    assert "one run of its kind" in str(Foreseen(PLAN, forecast))
    slower = replace(kept, operations=kept.operations / 2 if kept.operations else None)
    both = forecast_of(WORK, [kept, slower], None, None)
    assert (both.least_seconds, both.most_seconds) == pytest.approx((4.0, 8.0))
    assert "about 6.00 s ± 33% for the tiles, by the rates of the last 2 runs" in str(Foreseen(PLAN, both))
    assert not remembered(kind_of(PLAN, "another GPU", "full"))
    small = replace(kept, work=PLAN.operations // 101, operations=1.0)
    assert forecast_of(WORK, [small], None, None).seconds is None, (
        "a hundredth of the work is mostly its start"
    )
    assert forecast_of(WORK, [small, kept], None, None).seconds == forecast.seconds


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
    forecast = forecast_of(WORK, kept, None, None)
    assert (forecast.least_seconds, forecast.most_seconds, forecast.runs) == (0.1, 0.3, 3)
    assert "less than a second for the tiles" in str(Foreseen(PLAN, forecast))
    assert forecast_of(WORK, kept[:2], None, None).seconds != forecast.seconds, "half of them is not most"
    smaller = [replace(rates, work=PLAN.operations - 1) for rates in kept]
    assert forecast_of(WORK, smaller, None, None).runs == 1, (
        "who knows what a larger one takes beside its start"
    )


def test_chunks_that_do_not_line_up_are_read_as_they_are_decoded() -> None:
    """The plan told of 37 TiB decoded for 75 GiB used, and the forecast of the time for these."""
    plan = replace(PLAN, decoded_nbytes=5 * PLAN.read_nbytes)
    assert Workload.of_product(plan).read_nbytes == 5 * WORK.read_nbytes
    rates = Rates(PLAN.operations, PLAN.read_nbytes / 4, None)
    forecast = forecast_of(Workload.of_product(plan), [], (rates, rates), None)
    assert (forecast.floors["load"], forecast.limit) == (20.0, "load")


def test_by_measured_rates_it_takes_from_the_longest_part_to_all_of_them() -> None:
    slow = Rates(PLAN.operations / 10, PLAN.read_nbytes / 4, None)
    fast = Rates(PLAN.operations / 8, PLAN.read_nbytes / 2, None)
    forecast = forecast_of(WORK, [], (slow, fast), None)
    assert (forecast.least_seconds, forecast.most_seconds, forecast.runs) == (8.0, 14.0, 0)
    assert forecast.floors == {"load": 3.0, "compute": 9.0, "write": None}
    text = str(Foreseen(PLAN, forecast))
    assert (
        "from 8.00 s to 14 s for the tiles without writing C, by rates of reading and multiplying that were measured"
        " here; that, the start and the check of C come on top" in text
    )
    assert "±" not in text, "writing may take longer than all that is known"
    assert (
        "multiplying; alone, and at once on all workers: reading 3.00 s, multiplying 9.00 s, writing not known"
        in text
    )
    assert "if writing C does not take longer, more or faster devices shorten it" in text
    nothing = forecast_of(replace(WORK, disk_nbytes=0, write_nbytes=0), [], (slow, fast), None)
    assert "about 11 s ± 27% for the tiles, by rates that were measured here" in str(Foreseen(PLAN, nothing))
    quick = tuple(Rates(1e3 * PLAN.operations, None, None) for _ in range(2))
    short = forecast_of(WORK, [], (quick[0], quick[1]), None)
    assert "less than a second for the tiles without writing C; " in str(Foreseen(PLAN, short))
    shared = forecast_of(WORK, [], (slow, fast), None, machines=4)
    assert shared.least_seconds == 2.0


def test_without_rates_nothing_is_said_of_the_time() -> None:
    forecast = forecast_of(WORK, [], None, Disk("/data", PLAN.write_nbytes - 1024))
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


GIB4 = ["--device-memory", "4GiB"]


WHOLE_JOBS = [
    # Of one GPU, of two and of four, with all memory and with 4 GiB; least and most seconds of all runs recorded.
    ("f4", 32768, 1, [], 1.46, 1.54), ("f4", 32768, 2, [], 0.81, 0.90), ("f4", 32768, 4, [], 0.50, 0.61),
    ("f4", 32768, 1, GIB4, 1.49, 1.89), ("f4", 32768, 4, GIB4, 0.68, 0.72),
    ("AtA f4", 32768, 1, [], 0.84, 0.84), ("AtA f4", 32768, 4, [], 0.46, 0.47),
    ("f8", 32768, 1, [], 1.31, 1.35), ("f8", 32768, 2, [], 0.75, 0.99), ("f8", 32768, 4, [], 0.67, 0.71),
    ("f8", 32768, 1, GIB4, 2.16, 2.17), ("f8", 32768, 4, GIB4, 0.83, 0.89),
    ("AtA f8", 32768, 1, [], 0.82, 0.83), ("AtA f8", 32768, 4, [], 0.59, 0.60),
    ("i8", 32768, 1, [], 0.71, 0.94), ("i8", 32768, 2, [], 0.60, 0.85), ("i8", 32768, 4, [], 0.66, 0.76),
    ("i8", 32768, 1, GIB4, 2.33, 2.37), ("i8", 32768, 4, GIB4, 1.17, 1.18),
    ("f4", 65536, 1, [], 11.2, 11.5), ("f4", 65536, 2, [], 5.70, 5.79), ("f4", 65536, 4, [], 3.01, 3.25),
    ("f4", 65536, 1, GIB4, 12.8, 13.3), ("f4", 65536, 4, GIB4, 3.56, 3.80),
    ("AtA f4", 65536, 1, [], 5.75, 5.75), ("AtA f4", 65536, 4, [], 2.11, 2.11),
    ("f8", 65536, 1, [], 9.81, 10.0), ("f8", 65536, 2, [], 5.20, 5.20), ("f8", 65536, 4, [], 2.88, 3.03),
    ("f8", 65536, 1, GIB4, 14.7, 14.7), ("f8", 65536, 4, GIB4, 6.52, 6.52),
]  # fmt: skip
"""What docs/performance.md has of H200s, "The whole job" and other hosts: tiles alone, in a cluster that is up."""


@pytest.mark.parametrize(("of", "side", "workers", "more", "least", "most"), WHOLE_JOBS)
def test_products_on_gpus_took_what_is_estimated(
    tmp_path: Path, of: str, side: int, workers: int, more: list[str], least: float, most: float
) -> None:
    """And of floats the command, with start and check, is told to within a half."""
    *whole, dtype = of.split()
    for name in "ab":
        zarr.create_array(
            tmp_path / name, shape=(side, side), chunks=(4096, 4096), dtype=dtype, compressors=None
        )
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    product = [a, a, "--transpose-a"] if whole else [a, b]
    forecast = forecast_by("plan", *product, "--gpu", "h200", "--workers", str(workers), *more)
    assert (forecast["source"], forecast["workers"]) == ("published", workers)
    assert forecast["least_seconds"] <= least <= most <= forecast["most_seconds"]
    slowest = 4 if dtype != "i8" else 7
    assert forecast["most_seconds"] <= slowest * forecast["least_seconds"], "what says anything says nothing"
    assert forecast["command_seconds"][0] > forecast["least_seconds"] + 1
    assert forecast["command_seconds"][1] <= 3 * forecast["command_seconds"][0]


def test_several_workers_share_the_check(tmp_path: Path) -> None:
    """At worst one did all of it, so that a command on eight GPUs took 59 s ± 75%; and of one array A was counted once,
    though it is read as both factors."""
    zarr.create_array(tmp_path / "a", shape=(65536, 65536), chunks=(4096, 4096), dtype="f4", compressors=None)
    words = ["plan", str(tmp_path / "a"), str(tmp_path / "a"), "--gpu", "h100", "--workers"]
    tiles, command = {}, {}
    for workers in ("1", "8"):
        found = forecast_by(*words, workers)
        tiles[workers], command[workers] = found["most_seconds"], found["command_seconds"][1]
    checks = {name: command[name] - tiles[name] for name in tiles}
    assert checks["8"] - START_SECONDS[1] - CLUSTER_START_SECONDS[1] == pytest.approx(
        (checks["1"] - START_SECONDS[1]) / 4.5
    )
    own = forecast_by(*words, "1", "--transpose-a")
    assert own["command_seconds"][1] - own["most_seconds"] == pytest.approx(checks["1"])


def test_products_of_encoded_chunks_took_what_is_estimated(tmp_path: Path) -> None:
    """ "Compressed chunks", of 4096²: on hosts of 32 cores and of 16."""
    zarr.create_array(tmp_path / "a", shape=(32768, 32768), chunks=(4096, 4096), dtype="f4")
    forecast = forecast_by("plan", str(tmp_path / "a"), str(tmp_path / "a"), "--gpu", "h200")
    assert forecast["least_seconds"] <= 1.97 <= 2.67 <= forecast["most_seconds"]


@pytest.mark.parametrize(
    ("rows", "width", "job", "with_check"),
    [(400_000, 384, 0.569, 0.891), (200_000, 768, 0.372, 0.728)],
)
def test_searches_on_a_gpu_took_what_is_estimated(
    tmp_path: Path, rows: int, width: int, job: float, with_check: float
) -> None:
    """ "Nearest neighbours" on an H100, in a process that is up."""
    forecast = forecast_of_search(tmp_path, rows, width)
    assert forecast["least_seconds"] <= job <= forecast["most_seconds"]
    least, most = forecast["command_seconds"]
    assert least - START_SECONDS[0] <= with_check <= most - START_SECONDS[1]


def test_a_command_that_searches_took_what_is_estimated(tmp_path: Path) -> None:
    """10^6 × 384 on an H100, the whole command: 4.4 and 4.6 s, without its check 3.5 and 3.1."""
    least, most = forecast_of_search(tmp_path, 10**6, 384)["command_seconds"]
    assert least <= 4.4 <= 4.6 <= most <= 1.6 * least
    least, most = forecast_of_search(tmp_path, 10**6, 384, "--no-verify")["command_seconds"]
    assert least <= 3.5 <= most


@pytest.mark.parametrize("method", ["gram", "krylov"])
def test_a_command_that_finds_eofs_has_a_start(tmp_path: Path, method: str) -> None:
    """It was null, and a small job was told to take as long on four GPUs as on one, which start processes."""
    a = tmp_path / "a"
    zarr.create_array(a, shape=(4000, 3000), chunks=(1000, 1000), dtype="f4", compressors=None)
    words = [
        "eofs",
        str(a),
        str(tmp_path / "o"),
        "-k",
        "3",
        "--method",
        method,
        "--plan-only",
        "--gpu",
        "h100",
    ]
    one = forecast_by(*words)
    least, most = one["command_seconds"]
    assert least >= one["least_seconds"] + START_SECONDS[0]
    assert most >= one["most_seconds"] + START_SECONDS[1]
    several = forecast_by(*words, "--workers", "4")["command_seconds"]
    assert several[0] > least + 0.9 * CLUSTER_START_SECONDS[0]
    unchecked = forecast_by(*words, "--no-verify")["command_seconds"]
    assert unchecked[0] < least
    assert unchecked[1] < most
    passes = 1 if method == "gram" else 100
    assert unchecked[1] == pytest.approx(passes * one["most_seconds"] + START_SECONDS[1])
    told = CliRunner().invoke(cli, words).stdout
    assert "; with the start and the check the command takes " in told


def forecast_of_search(tmp_path: Path, rows: int, width: int, *more: str) -> dict[str, Any]:
    a = tmp_path / "a"
    zarr.create_array(
        a, shape=(rows, width), chunks=(50_000, width), dtype="f2", compressors=None, overwrite=True
    )
    return forecast_by(
        "topk", str(a), str(tmp_path / "o"), "--exclude-self", "--plan-only", "--gpu", "h100", *more
    )


def forecast_by(*words: str) -> dict[str, Any]:
    made = CliRunner().invoke(cli, [*words, "-q", "--json"])
    assert made.exit_code == 0, made.output
    found: dict[str, Any] = json.loads(made.stdout)["forecast"]
    return found


def test_what_was_never_measured_is_less_sure(tmp_path: Path) -> None:
    """Nor is it where the numbers decide; and a rate that is given is taken."""
    zarr.create_array(tmp_path / "a", shape=(32768, 32768), chunks=(4096, 4096), dtype="f4", compressors=None)
    zarr.create_array(tmp_path / "i", shape=(32768, 32768), chunks=(4096, 4096), dtype="i8", compressors=None)

    def spread(name: str, *more: str) -> float:
        forecast = forecast_by("plan", str(tmp_path / name), str(tmp_path / name), *more)
        return float(forecast["most_seconds"] / forecast["least_seconds"])

    assert (
        spread("a", "--gpu", "h200") < 1.6 < spread("a", "--gpu", "a100") < 3.2 < spread("i", "--gpu", "h200")
    )
    given = forecast_by("plan", str(tmp_path / "a"), str(tmp_path / "a"), "--rate", "1P", "--gpu", "h100")
    assert given["source"] == "given"
    assert given["floors"]["compute"] == pytest.approx(2 * 32768**3 / 1e15)
    on_cpus = forecast_by("plan", str(tmp_path / "a"), str(tmp_path / "a"), "--rate", "1t", "--device", "cpu")
    assert on_cpus["least_seconds"] == pytest.approx(2 * 32768**3 / 1e12)
    assert on_cpus["command_seconds"] is None


def test_of_cores_a_gpu_says_nothing(tmp_path: Path) -> None:
    """The search fell to the cores, and was timed by the peak of the GPU, a hundred times too fast."""
    zarr.create_array(tmp_path / "a", shape=(9000, 64), chunks=(900, 64), dtype="f4", compressors=None)
    words = [str(tmp_path / "a"), str(tmp_path / "o"), "-k", "2000", "--plan-only", "--gpu", "h100"]
    found = forecast_by("topk", *words)
    assert (found["source"], found["seconds"], found["device_nbytes"]) == ("none", None, 0)
    assert "time            not known: cores do this work" in CliRunner().invoke(cli, ["topk", *words]).stdout
    assert forecast_by("topk", *words, "--rate", "1T")["source"] == "given"


@pytest.mark.more
def test_searches_and_eofs_say_it_too(tmp_path: Path, rng: np.random.Generator, cache: Path) -> None:
    a = put(tmp_path / "a.zarr", rng.standard_normal((300, 40)).astype("f4"))
    for words in (
        ["topk", "-k", "3"],
        ["pairs", "--above", "0.5"],
        ["pairs", "--above", "0.5", "--count-only"],
    ):
        command, *options = words
        out = [] if "--count-only" in options else [str(tmp_path / "o")]
        made = CliRunner().invoke(
            cli, [command, str(a), *out, *options, "--plan-only", "--device", "cpu", "-q"]
        )
        assert made.exit_code == 0, made.output
        first = [line.split()[0] for line in made.stdout.splitlines()[:5]]
        assert first == ["time", "limit", "disk", "memory", "verdict"]
        assert "less than a second for the blocks" in made.stdout
    for method, units in (
        ("gram", "3 passes over X"),
        ("krylov", "mean pass over X, of which it takes 4 to 100"),
    ):
        words = [
            "eofs",
            str(a),
            str(tmp_path / "o"),
            "-k",
            "2",
            "--method",
            method,
            "--plan-only",
            "--device",
            "cpu",
        ]
        made = CliRunner().invoke(cli, [*words, "-q"])
        assert made.exit_code == 0, made.output
        assert f"for the {units}" in made.stdout
        assert forecast_by(*words)["disk_nbytes"] == 2 * (300 + 40) * 4


def test_more_dimensions_are_read_for_it_too(tmp_path: Path, rng: np.random.Generator, cache: Path) -> None:
    """Of maps nothing was measured, and so nothing said."""
    a = tmp_path / "a"
    zarr.create_array(a, shape=(40, 6, 8), chunks=(9, 6, 8), dtype="f4")[:] = rng.standard_normal((40, 6, 8))
    words = ["cov", str(a), str(tmp_path / "c"), "--sum-over", "0", "--plan-only", "--device", "cpu"]
    found = forecast_by(*words)
    assert found["source"] == "measured"
    assert found["floors"]["load"] > 0


def test_a_search_like_an_earlier_one_takes_as_long(cache: Path) -> None:
    asked = Asked(10**6, 10**6, 384, True, 10, 0.0, True, (4, 4), 4, 4, (1, 1))
    plan = plan_neighbours(asked, metric="dot", dtype="float32", workers=2, threads=3, worker_nbytes=2**33)
    assert (plan.sharing, plan.operations) == (6, 2 * 10**12 * 384)
    remember_search(plan, "CPU", "full", {"read": 12.0, "compute": 60.0}, 15.0)
    (kept,) = remembered(kind_of_search(plan, "CPU", "full"))
    forecast = forecast_of(Workload.of_search(plan), [kept], None, None)
    assert forecast.seconds == pytest.approx(15.0)
    assert forecast.floors == pytest.approx({"load": 2.0, "compute": 10.0, "write": None})
    assert "for the blocks, by the rates of the one run of its kind" in str(Foreseen(plan, forecast))
    assert not remembered(kind_of_search(replace(plan, k=11), "CPU", "full"))


def test_a_short_run_says_little_of_ten_times_as_many_points() -> None:
    """Which are a hundred times the work: a first run of 4 s, mostly start, had it take 6 min 30 s, and it took 9 s."""
    run = run_of(PLAN, ["a", "b", "c", "d"])
    run = replace(
        run, read_nbytes=PLAN.read_nbytes, write_nbytes=PLAN.write_nbytes, operations=PLAN.operations
    )
    short = Rates.of(run)
    more = replace(WORK, operations=100 * WORK.operations, read_nbytes=10 * WORK.read_nbytes)
    rates = Rates(more.operations / 10, None, None)
    measured = forecast_of(more, [short], (rates, rates), None)
    assert (measured.source, measured.seconds) == ("measured", 10.0)
    alone = forecast_of(more, [short], None, None)
    assert (alone.least_seconds, alone.most_seconds) == pytest.approx((4.0, 300.0 * 4 / 3))
    assert "± 98% for the tiles, by the rates of the one run" in alone.time()
    assert "by how much more it may be off" in alone.time()
    long = replace(short, operations=PLAN.operations / 300, seconds=400.0)
    assert forecast_of(more, [short, long], (rates, rates), None).runs == 1
    within = forecast_of(more, [long], None, None)
    assert within.least_seconds is not None
    assert within.most_seconds is not None
    assert within.most_seconds < 1.05 * within.least_seconds, "little of that was its start"
    twice = forecast_of(replace(WORK, operations=2 * WORK.operations), [short], (rates, rates), None)
    assert (twice.source, twice.least_seconds, twice.most_seconds) == ("runs", 4.0, pytest.approx(8.0))


def test_a_count_like_an_earlier_one_takes_as_long(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the bytes that are left; of nothing else it is known how long it takes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_bytes(b"some words\n" * 1000)
    words = ["histogram", "text", "--by", "byte", "--device", "cpu", "--plan-only"]
    made = CliRunner().invoke(cli, [*words, "-q", "--out", "counts.csv"])
    assert made.exit_code == 0, made.output
    assert (
        "time            about a second or less for the pieces, by usual rates, of 20 to 500 MB"
        in made.stdout
    )
    assert "disk            at most 2 KiB for the counts, less where it is compressed; " in made.stdout
    remember_count(kind_of_count("byte", "CPU", 1, per_document=False, plain=True), 5500, 1, 20.0)
    found = forecast_by(*words)
    assert (found["source"], found["runs"]) == ("runs", 1)
    assert (found["least_seconds"], found["most_seconds"]) == pytest.approx((25.0, 40.0)), (
        "15 s may be the start"
    )
    made = CliRunner().invoke(cli, [*words, "-q"])
    assert "about 32 s ± 23% for the pieces, by the rates of the one run of its kind" in made.stdout
    assert "the start of the workers comes on top" in made.stdout


def test_a_first_count_is_foreseen_by_usual_rates(cache: Path) -> None:
    """A short run, mostly its start, said 65 s of what took one, and of a thousand times as much nothing."""
    words, letters = USUAL["tokens"], USUAL["bytes"]
    small = Workload.of_count(2**21, 4, 1, on_host=True, disk_nbytes=0)
    large = Workload.of_count(2**31, 64, 1, on_host=True, disk_nbytes=0)
    short = Rates(None, 2**21 / 5.0, None, ratio=1.0, work=2**21, seconds=5.0)
    for earlier in ([], [short]):
        found = count_forecast(large, earlier, words, 2)
        assert found.source == "usual"
        assert found.least_seconds == pytest.approx(2**31 / 80e6 / 2)
        assert found.most_seconds == pytest.approx(2**31 / 4e6 / 2)
        assert found.time().startswith("from 13 s to 4 min 28 s for the pieces, by usual rates")
        assert count_forecast(small, earlier, letters, 2).most_seconds == pytest.approx(2**21 / 20e6 / 2)
    first = replace(short, work=2**24, seconds=24.0, read_nbytes=2**24 / 24)
    assert count_forecast(large, [short, first], words, 2).source == "usual", (
        "it compiled, for who knows how long"
    )
    long = replace(short, work=2**24, seconds=80.0, read_nbytes=2**24 / 80)
    found = count_forecast(large, [short, first, long], words, 2)
    assert (found.source, found.runs) == ("runs", 1)
    assert found.most_seconds == pytest.approx(80.0 * 128)
    quick = Rates(None, None, None, work=2**22, seconds=0.4)
    assert count_forecast(small, [short, quick], words, 2).most_seconds == 0.4
    on_gpu = replace(small, on_host=False)
    assert count_forecast(on_gpu, [], words, 2).source == "none"


def test_names_are_for_plans_alone(tmp_path: Path) -> None:
    a = put(tmp_path / "a.zarr", np.ones((8, 8)))
    for words in (["topk", a, "o"], ["gram", a, "o"], ["eofs", a, "o"], ["matmul", a, a, "o"]):
        made = CliRunner().invoke(cli, [*map(str, words), "--gpu", "h100"])
        assert made.exit_code == 2
        assert "--gpu without --plan-only" in made.stderr
        made = CliRunner().invoke(cli, [*map(str, words), "--plan-only", "--gpu", "h100", "--device", "cpu"])
        assert (made.exit_code, "beside --device cpu" in made.stderr) == (1, True)
        made = CliRunner().invoke(
            cli, [*map(str, words), "--plan-only", "--workers", "2", "--profile", "cpu"]
        )
        assert (made.exit_code, "--workers 2 beside a cluster ('cpu')" in made.stderr) == (1, True)
    large = ["--gpu", "h100", "--device-memory", "100GB"]
    made = CliRunner().invoke(cli, ["plan", str(a), str(a), *large])
    assert (made.exit_code, "has 74.5 GiB; give at most that" in made.stderr) == (1, True)
    for wrong in ("", "T", "nan", "-1", "1e400", "5 0"):
        made = CliRunner().invoke(cli, ["plan", str(a), str(a), "--rate", wrong])
        assert made.exit_code == 2, made.output


def test_a_run_without_rates_keeps_no_plan_from_measuring(
    tmp_path: Path, rng: np.random.Generator, cache: Path
) -> None:
    """One that was too short says nothing of a larger one, nor was there none."""
    a = tmp_path / "a.zarr"
    put(a, rng.standard_normal((64, 48)).astype("f4"))
    words = ["plan", str(a), str(a), "--transpose-b", "--device", "cpu"]
    operations = json.loads(CliRunner().invoke(cli, [*words, "-q", "--json"]).stdout)["operations"]
    run = replace(run_of(PLAN, ["a"]), operations=operations // 10, seconds=0.28)
    kind = kind_of(PLAN, "CPU", "full").replace("; 4; ", "; 1; ")
    remember(run, "full")
    kept = json.loads(cache.read_text())
    kept["kinds"] = {kind: kept["kinds"][kind_of(PLAN, "CPU", "full")]}
    cache.write_text(json.dumps(kept))
    (short,) = remembered(kind)
    assert (short.ratio, short.seconds, short.is_like(operations)) == (None, 0.28, True)
    found = forecast_by(*words)
    assert (found["source"], found["runs"]) == ("measured", 0)
    assert found["floors"]["compute"] > 0
    kept["kinds"][kind] += [asdict(Rates(1e6, 1e6, 1e6, 1.0, operations, 2.0))]
    cache.write_text(json.dumps(kept))
    assert forecast_by(*words)["source"] == "runs", "it is this kind that the plan is of"
    text = forecast_of(WORK, [replace(short, work=PLAN.operations // 10)], None, None).time()
    assert "has been timed" not in text
    assert "about as large and of 1 s or more, has left its rates on this host" in text


@pytest.mark.sample(1)
@pytest.mark.parametrize("command", ["plan", "topk"])
def test_rates_of_small_products_are_not_kept_for_large_ones(
    tmp_path: Path, rng: np.random.Generator, cache: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Of 12 columns it is mostly that of calls, and was taken for that of any product of the same dtypes."""
    monkeypatch.setattr(measure, "SIDE", 32)

    def compute(rows: int) -> float:
        a = tmp_path / f"a{rows}"
        if not a.exists():
            put(a, rng.standard_normal((rows, 20)).astype("f4"))
        other = [str(a), "--transpose-b"] if command == "plan" else [str(tmp_path / "o"), "--plan-only"]
        return float(forecast_by(command, str(a), *other, "--device", "cpu")["floors"]["compute"])

    compute(12)
    assert not cache.exists()
    compute(300)
    kept = json.loads(cache.read_text())["kinds"]
    ((name, _),) = kept.items()
    remember_measured(name.removesuffix("; measured"), 1.0, 1.0)
    assert compute(300) > 1e5, "an operation a second, once it is kept"
    assert compute(12) < 1, "which says nothing of a small one either"


def test_commands_say_it_first(
    tmp_path: Path, rng: np.random.Generator, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "SIDE", 32)
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
