"""Selection: the order of the ladder, what was measured, and what a damaged memory does (nothing)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tilewright.kernels.gemm import select, tuning
from tilewright.kernels.gemm.base import GemmKernel, Operand, Problem


def problem(m: int, n: int, k: int, dtype: str = "f4", precision: str = "full") -> Problem:
    kind = np.dtype(dtype)
    a, b, c = (Operand(rows, columns, kind, (columns, 1), 128) for rows, columns in ((m, k), (k, n), (m, n)))
    return Problem(a, b, c, accumulate=False, precision=precision, capability=(9, 0))


def kernel(name: str, largest: int) -> GemmKernel:
    return GemmKernel(name, "", lambda asked: asked.m <= largest, lambda a, b, c, accumulate, stream: None)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two kernels, of which the first takes only small problems, and a memory of measurements."""
    monkeypatch.setattr(select, "ladder", lambda: (kernel("small", 100), kernel("any", 10**9)))
    path = tmp_path / "cache" / "gpu.json"
    monkeypatch.setattr(tuning, "_file", lambda: path)
    tuning._read.cache_clear()
    return path


def bucket_of(asked: Problem) -> str:
    kinds = (asked.a.dtype, asked.b.dtype, asked.c.dtype)
    return tuning.bucket(asked.m, asked.n, asked.k, kinds, asked.precision, asked.accumulate)


def test_the_first_that_takes_the_problem_is_chosen(memory: Path) -> None:
    assert select.select(problem(64, 64, 64)).name == "small"
    assert select.select(problem(101, 64, 64)).name == "any"


def test_a_precision_that_no_kernel_uses_here_falls_back_to_a_fast_full_one(
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
    tuning.remember({bucket_of(problem(64, 64, 64)): "any"})
    tuning.remember({bucket_of(problem(64, 64, 64, "f8")): "small"})
    assert select.select(problem(64, 64, 64)).name == "any"
    assert select.select(problem(33, 40, 64)).name == "any"
    assert select.select(problem(32, 64, 64)).name == "small"
    assert select.select(problem(64, 64, 64, precision="tf32")).name == "small"


def test_a_measured_kernel_that_does_not_take_the_problem_is_not_chosen(memory: Path) -> None:
    tuning.remember({bucket_of(problem(128, 64, 64)): "small"})
    assert select.select(problem(101, 64, 64)).name == "any"


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"float32": "gone"}'])
def test_a_damaged_memory_counts_as_none(memory: Path, text: str) -> None:
    memory.parent.mkdir()
    memory.write_text(text)
    assert select.select(problem(64, 64, 64)).name == "small"


def test_the_memory_is_kept_where_the_user_keeps_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning.directory() == tmp_path / "tilewright" / "gemm"
