"""The benchmarks measure right answers only, and report what they measured."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tilewright.kernels.errors import OptionError
from tilewright.pipeline.errors import StoreError
from tilewright.workflows.bench import common, cub, dot, gemm
from tilewright.workflows.bench.common import (
    BenchReport,
    Contestant,
    DetailedReport,
    Row,
    WrongAnswer,
    measure,
    publish,
    significant,
)


def test_a_wrong_answer_is_not_timed() -> None:
    ran = []
    wrong = Contestant("wrong", lambda: ran.append(1), lambda: "element (0, 0) is 1, not 2")
    with pytest.raises(WrongAnswer, match="case: wrong is wrong: element"):
        measure("case", 1.0, [wrong], on_gpu=False)
    assert not ran


class Clock:
    """Time that passes only while a contestant runs."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.ran: list[str] = []
        patch.setattr(common, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def contestant(self, name: str, *seconds: float, **more: Any) -> Contestant:
        """One that takes these times in turn."""
        takes = itertools.cycle(seconds)

        def run() -> None:
            self.ran.append(name)
            self.now += next(takes)

        return Contestant(name, run, lambda: None, **more)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_contestants_take_turns_and_slow_ones_take_fewer(clock: Clock) -> None:
    several = [clock.contestant("a", 0.03125, 0.0625), clock.contestant("b", 0.25)]  # exact in binary
    rows = measure("case", 8.0, several, on_gpu=False, seconds=0.25)
    by_name = {row.contestant: row for row in rows}
    assert (by_name["a"].samples, by_name["b"].samples) == (4, 3)
    assert (by_name["a"].low, by_name["a"].high) == (0.03125, 0.0625)
    assert (by_name["a"].seconds, by_name["b"].seconds) == (0.046875, 0.25)
    assert clock.ran == ["a", "a", "b", "b", *"ababab", "a"], "after the two runs that warm each up"


def test_short_work_is_repeated_within_a_sample(clock: Clock) -> None:
    prepared: list[int] = []
    several = [
        clock.contestant("short", 2**-8),
        clock.contestant("prepared", 2**-8, prepare=lambda: prepared.append(1)),
    ]
    rows = measure("case", 8.0, several, on_gpu=False, rounds=4)
    assert [(row.seconds, row.samples) for row in rows] == [(2**-8, 4), (2**-8, 4)]
    least = math.ceil(common.LEAST_SAMPLE_SECONDS * 2**8)
    assert clock.ran.count("short") == 2 + 4 * least
    assert clock.ran.count("prepared") == len(prepared) == 2 + 4


def test_a_partial_peer_is_rated_by_its_own_work(clock: Clock) -> None:
    part = clock.contestant("part", 2**-9, peer=True, work=1.0)
    whole = clock.contestant("whole", 2**-9)
    report = BenchReport("t", "u", 1.0, {}, tuple(measure("c", 100.0, [part, whole], on_gpu=False)))
    assert report.ratio(report.rows[1]) == 100


def test_report_prints_and_plots(tmp_path: Path) -> None:
    rows = (
        Row("c 1", "peer", True, 2e12, 1.0, 0.9, 1.1, 5),
        Row("c 1", "ours", False, 2e12, 0.5, 0.4, 0.6, 5),
    )
    report = BenchReport("title", "Tflop/s", 1e12, {"gpu": "none"}, rows)
    text = str(report)
    assert "2.00" in text
    assert "4.00" in text
    assert "gpu none" in text
    found = json.loads(json.dumps(report.to_json()))
    assert [row["ratio"] for row in found["rows"]] == [1.0, 2.0]
    report.plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_what_was_measured_is_printed_where_its_plot_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (Row("c 1", "ours", False, 2e12, 0.5, 0.4, 0.6, 5),)
    report = DetailedReport(
        BenchReport("title", "Tflop/s", 1e12, {}, rows), [{"floor": float("nan")}], "more"
    )
    for as_json in (False, True):
        with pytest.raises(StoreError, match=r"cannot write .*none/p\.png"):
            publish(report, (tmp_path / "none" / "p.png", report.report.plot), as_json=as_json)
        printed = capsys.readouterr().out
        if as_json:
            found = json.loads(printed)
            assert (found["title"], found["details"]) == ("title", [{"floor": "nan"}])
        else:
            assert printed.splitlines()[-1] == "more"


@pytest.mark.parametrize(
    ("value", "text"), [(0.01234, "0.0123"), (12345.6, "12300"), (1.0, "1.00"), (0, "0")]
)
def test_significant(value: float, text: str) -> None:
    assert significant(value) == text


def test_gemm_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "LEAST_SAMPLE_SECONDS", 1e-4)
    report = gemm.run_gemm(
        [(70, 90, 80), 100],
        ["float32", "bfloat16", "int64", "int8->int32", "complex64"],
        device="cpu",
        seconds=0.02,
    )
    assert len(report.rows) == 2 * 2 * 5
    assert {row.case for row in report.rows} >= {"float32 70×90×80", "bfloat16 100", "int8->int32 100"}
    assert all(row.seconds > 0 for row in report.rows)


def test_gemm_has_the_precisions_of_each_dtype() -> None:
    found = gemm.cases([8], ["float32", "float64", "int8"], ["full", "split", "tf32"], small=True)
    assert [str(case) for case in found] == [
        *(f"float32 {kind}8" for kind in ("", "small ", "split ", "split small ", "tf32 ", "tf32 small ")),
        *(f"float64 {kind}8" for kind in ("", "small ", "split ", "split small ")),
        "int8 8",
        "int8 small 8",
    ]
    small = next(case for case in gemm.cases([8], ["float64"], ["full"], small=True) if case.small)
    a, b = small.operands()
    assert a.dtype == b.dtype == np.float64
    assert (a == np.rint(a)).all()
    assert np.abs(a).max() <= gemm.SMALL


def test_gemm_notices_one_wrong_element(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(a: np.ndarray, b: np.ndarray, out: np.ndarray, **options: object) -> None:
        np.matmul(a, b, out=out)
        out[-1, -1] += 0.01

    monkeypatch.setattr(gemm, "matmul", wrong)
    with pytest.raises(WrongAnswer, match=r"element \(99, 99\)"):
        gemm.run_gemm([100], ["float32"], device="cpu")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtypes": ["string"]}, "'string' is unknown"),
        ({"precisions": ["half"]}, "'half' is unknown"),
        ({"tune": True, "device": "cpu"}, "this runs on the CPU"),
    ],
)
def test_gemm_names_mistakes(options: dict, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        gemm.run_gemm([8], **options)


def test_gemm_measures_nothing_that_could_not_be_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "resolve_device", lambda device: "cuda")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "~")  # what Python takes for the home of a user whom nothing gives one
    with pytest.raises(OptionError, match="set XDG_CACHE_HOME"):
        gemm.run_gemm([8], tune=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", dot.DTYPES)
@pytest.mark.parametrize("nbytes", [1 << 12, 3 * dot.UNIT_NBYTES + 4096])
def test_dot_vectors_have_a_finite_product_that_the_reference_finds(name: str, nbytes: int) -> None:
    dtype = np.dtype(name)
    units = dot._units(dtype, nbytes)
    length = nbytes // dtype.itemsize
    assert [unit.nbytes for unit in units] == [dot.UNIT_NBYTES] * 2
    x, y = (np.resize(unit, length) for unit in units)
    if dtype.kind in "iu":
        want = (x.astype("u8") * y.astype("u8")).sum(dtype="u8").astype(dtype)
    else:
        want = np.vdot(x.astype("c16" if dtype.kind == "c" else "f8"), y.astype("c16"))
        want = want if dtype.kind == "c" else want.real
        assert 1 < abs(want) < np.finfo(dtype).max / 4
    own, wide = dot._judges(*units, length)
    right = np.asarray(want).astype(dtype)[()]
    assert own(right) is None
    assert wide(right) is None
    assert wide(right + np.asarray(max(1, abs(right) // 100), dtype)) is not None
    if dtype.kind in "fc":
        assert wide(right * dtype.type(np.inf)) is not None
        assert wide(right * dtype.type(np.nan)) is not None


def test_the_spread_of_halves_shrinks_with_their_number() -> None:
    unit = dot.UNIT_NBYTES // 2
    for length in (1, unit, 64 * unit, 1000 * unit):
        spread = float(dot._spread(length, unit))
        deviation = spread**2 * max(1, length / unit) * min(length, unit) ** 0.5
        assert deviation <= dot.HALF_SPREAD
        assert spread == 1 or deviation > dot.HALF_SPREAD / 4


@pytest.mark.more
def test_every_dtype_is_measured_on_the_cpu() -> None:
    report = dot.run_dot(nbytes=1 << 12, device="cpu", rounds=3, seconds=0.001)
    assert {row.case for row in report.rows} == set(dot.DTYPES)


def test_cub_is_compiled_for_each_dtype_with_its_types(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What nvcc is given: the types as definitions, and the conjugate for complex numbers alone."""
    ran: list[list[str]] = []

    def run(command: list[str], **options: Any) -> None:
        ran.append(command)
        raise OSError("no compiler here")

    monkeypatch.setattr(cub.shutil, "which", lambda name: "/usr/bin/nvcc")
    monkeypatch.setattr(cub.subprocess, "run", run)
    cub._library.cache_clear()
    for name in dot.DTYPES:
        x = np.zeros(4, name)
        assert cub.dot_product(x, x, (9, 0)) is None
    cub._library.cache_clear()
    assert [("-DCONJUGATE" in command) for command in ran] == [
        np.dtype(name).kind == "c" for name in dot.DTYPES
    ]
    assert all("-arch=sm_90" in command for command in ran)
    assert set(cub.DOT_TYPES) == set(dot.DTYPES)


@pytest.mark.parametrize("name", sorted(cub.DOT_TYPES))
def test_sums_of_cub_come_back_in_the_vectors_dtype(name: str) -> None:
    """As a fake of the compiled function adds them up, in the type that it was compiled for."""
    dtype = np.dtype(name)
    kind = cub.DOT_TYPES[name][2]
    x = (np.arange(1, 9) if dtype.kind != "c" else np.arange(1, 9) * (1 + 2j)).astype(dtype)
    wide = (
        np.vdot(x.astype(kind), x.astype(kind))
        if dtype.kind == "c"
        else (x.astype(kind) ** 2).sum(dtype=kind)
    )
    kept = cub._Kept(
        SimpleNamespace(copy_to_host=lambda: np.array([wide], kind)), None, lambda f: f[0].astype(dtype)
    )
    own, _ = dot._judges(x, x, len(x))
    assert own(kept.copy_to_host()) is None


def test_the_four_channels_of_cub_add_up() -> None:
    rows = np.arange(4 * 256, dtype=np.uint32).reshape(4, 256)
    kept = cub._Kept(SimpleNamespace(copy_to_host=lambda: rows), None, cub._added)
    np.testing.assert_array_equal(kept.copy_to_host(), rows[0] + rows[1] + rows[2] + rows[3])
