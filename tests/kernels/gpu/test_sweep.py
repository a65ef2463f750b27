"""Sweeps find the fastest shape, keep refused ones apart, and pass on every other failure."""

from __future__ import annotations

from pathlib import Path

import pytest
from numba import cuda

from tilewright.kernels.errors import OptionError
from tilewright.kernels.gpu import sweep as module
from tilewright.kernels.gpu.sweep import Sweep, SweepPoint, sweep


class FakeTimer:
    """A clock on which (blocks, threads) takes 1000 / (blocks * threads) seconds."""

    shape = (1, 1)

    def __init__(self, stream: object) -> None:
        pass

    def __enter__(self) -> FakeTimer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def seconds(self) -> float:
        return 1000 / (FakeTimer.shape[0] * FakeTimer.shape[1])


def launch(blocks: int, threads: int) -> None:
    if threads > 1024:
        raise RuntimeError("cuLaunchKernel: CUDA_ERROR_INVALID_VALUE")
    FakeTimer.shape = (blocks, threads)


def test_finds_the_fastest_and_keeps_the_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "CUDATimer", FakeTimer)
    found = sweep(launch, [1, 4, 2], (width for width in (128, 2048)), title="example")
    assert len(found.points) == 6
    assert found.best == SweepPoint(4, 128, 1000 / 512)
    assert [point.seconds for point in found.points if point.threads == 2048] == [None] * 3
    lines = str(found).splitlines()
    assert lines[0] == "example"
    assert lines[1].split()[-3:] == ["1", "2", "4"]
    assert lines[2].split() == ["128", "7812500.0", "3906250.0", "1953125.0*"]
    assert lines[3].split() == ["2048", "-", "-", "-"]
    assert found.to_json()["points"][0] == {"blocks": 1, "threads": 128, "seconds": 1000 / 128}
    found.plot(tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_other_failures_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CUDATimer", FakeTimer)

    def broken(blocks: int, threads: int) -> None:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    with pytest.raises(RuntimeError, match="ILLEGAL_ADDRESS"):
        sweep(broken, [1], [32])


def test_nothing_could_be_launched() -> None:
    with pytest.raises(OptionError, match="fewer threads"):
        _ = Sweep("none", (SweepPoint(1, 4096, None),)).best


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    @cuda.jit
    def nothing() -> None:
        pass

    found = sweep(lambda blocks, threads: nothing[blocks, threads](), [1, 16], [32, 1024, 4096], repeats=2)
    times = {point.threads: point.seconds for point in found.points}
    assert times[4096] is None
    assert (times[32] or 0) > 0
