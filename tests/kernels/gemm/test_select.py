"""Selection: the order of the ladder, what was measured, and what a damaged memory does (nothing)."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tilewright.kernels.gemm import select, tuning
from tilewright.kernels.gemm.base import GemmKernel, Operand, Problem

MODEL = "NVIDIA H100 80GB HBM3"


def problem(m: int, n: int, k: int, dtype: str = "f4", precision: str = "full") -> Problem:
    kind = np.dtype(dtype)
    a, b, c = (Operand(rows, columns, kind, (columns, 1), 128) for rows, columns in ((m, k), (k, n), (m, n)))
    return Problem(a, b, c, accumulate=False, precision=precision, capability=(9, 0), model=MODEL)


def kernel(name: str, largest: int) -> GemmKernel:
    return GemmKernel(name, "", lambda asked: asked.m <= largest, lambda a, b, c, accumulate, stream: None)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two kernels, of which the first takes only small problems, and a memory of measurements."""
    monkeypatch.setattr(select, "ladder", lambda: (kernel("small", 100), kernel("any", 10**9)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning._known.cache_clear()
    return tmp_path / "tilewright" / "gemm" / "NVIDIA-H100-80GB-HBM3.json"


def bucket_of(asked: Problem) -> str:
    kinds = (asked.a.dtype, asked.b.dtype, asked.c.dtype)
    return tuning.bucket(asked.m, asked.n, asked.k, kinds, asked.precision, asked.accumulate)


def test_the_first_that_takes_the_problem_is_chosen(memory: Path) -> None:
    assert select.select(problem(64, 64, 64)).name == "small"
    assert select.select(problem(101, 64, 64)).name == "any"


def test_a_precision_without_a_kernel_here_uses_a_fast_full_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def only(precision: str, portable: bool = False) -> GemmKernel:
        def supports(asked: Problem) -> bool:
            return portable or (asked.precision == precision and asked.m >= 100)

        return GemmKernel(precision or "any", "", supports, lambda *arguments: None, portable)

    monkeypatch.setattr(select, "ladder", lambda: (only("tf32"), only("full"), only("", portable=True)))
    monkeypatch.setattr(tuning, "preferred", lambda asked: None)
    assert select.select(problem(200, 64, 64, precision="tf32")).name == "tf32"
    assert select.select(problem(200, 64, 64, precision="bf16")).name == "full"
    assert select.select(problem(20, 64, 64, precision="bf16")).name == "any"


def test_a_sum_of_nothing_goes_to_the_kernel_that_promises_zeros(memory: Path) -> None:
    assert select.select(problem(64, 64, 0)).name == "tiled"


def test_a_measurement_is_preferred_and_speaks_for_its_power_of_two(memory: Path) -> None:
    tuning.remember(MODEL, {bucket_of(problem(64, 64, 64)): "any"})
    tuning.remember(MODEL, {bucket_of(problem(64, 64, 64, "f8")): "small"})
    assert select.select(problem(64, 64, 64)).name == "any"
    assert select.select(problem(33, 40, 64)).name == "any"
    assert select.select(problem(32, 64, 64)).name == "small"
    assert select.select(problem(64, 64, 64, precision="tf32")).name == "small"


def test_another_model_of_the_same_capability_has_a_memory_of_its_own(memory: Path) -> None:
    asked = problem(64, 64, 64)
    assert tuning.remember(MODEL, {bucket_of(asked): "any"}) == memory
    assert select.select(asked).name == "any"
    assert select.select(dataclasses.replace(asked, model="NVIDIA H200")).name == "small"
    assert select.select(dataclasses.replace(asked, model=None)).name == "small"


MEASURE = """
import sys
from tilewright.kernels.gemm import tuning
tuning._known(tuning._file(sys.argv[1]))  # as a product asks before anything is measured
for line in sys.stdin:
    tuning.remember(sys.argv[1], {line.strip(): "any"})
    print("kept", flush=True)
"""


def test_processes_keep_each_others_measurements(memory: Path) -> None:
    """One after the other, and at once."""
    asked = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    running = [subprocess.Popen([sys.executable, "-c", MEASURE, MODEL], **asked) for _ in range(3)]
    first = running[0]
    first.stdin.write("first\n")
    first.stdin.flush()
    assert first.stdout.readline() == "kept\n"
    names = [[f"{number} {turn}" for turn in range(30)] for number in range(3)]
    for process, mine in zip(running, names, strict=True):
        process.stdin.write("".join(name + "\n" for name in mine))
        process.stdin.flush()
    for process in running:
        process.communicate(timeout=120)
        assert process.returncode == 0
    assert set(json.loads(memory.read_text())) == {"first", *itertools.chain(*names)}
    assert sorted(path.suffix for path in memory.parent.iterdir()) == [".json", ".lock"]


def test_a_measured_kernel_that_does_not_take_the_problem_is_not_chosen(memory: Path) -> None:
    tuning.remember(MODEL, {bucket_of(problem(128, 64, 64)): "small"})
    assert select.select(problem(101, 64, 64)).name == "any"


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"float32": "gone"}'])
def test_a_damaged_memory_counts_as_none(memory: Path, text: str) -> None:
    memory.parent.mkdir(parents=True)
    memory.write_text(text)
    assert select.select(problem(64, 64, 64)).name == "small"


def test_the_memory_is_kept_where_the_user_keeps_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning.directory() == tmp_path / "tilewright" / "gemm"


def test_a_user_without_a_home_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "~")  # what Python takes for the home of a user whom nothing gives one
    assert tuning.directory() is None
    assert tuning.preferred(problem(64, 64, 64)) is None
    assert tuning.remember(MODEL, {bucket_of(problem(64, 64, 64)): "any"}) is None
