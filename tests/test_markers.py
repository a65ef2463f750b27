"""A run that asks for GPU tests and executes none fails, however it asks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import asks_for_gpu

ROOT = Path(__file__).parents[1]

TESTS = """
import pytest

@pytest.mark.gpu
def test_one():
    pass

@pytest.mark.multigpu
def test_two():
    pass

@pytest.mark.simulator
def test_pretended():
    pass

def test_host():
    pass
"""


@pytest.mark.parametrize(
    "expression",
    [
        "gpu",
        "gpu or multigpu",
        "(gpu or multigpu) and not slow",
        "not slow and (gpu)",
        "gpu and not multigpu",
        "(not gpu) and multigpu",
        "simulator or(gpu)",
    ],
)
def test_an_expression_that_asks_for_the_gpu(expression: str) -> None:
    assert asks_for_gpu(expression)


@pytest.mark.parametrize(
    "expression",
    ["", "slow", "not gpu", "not gpu and not multigpu", "slow and (not gpu and not  multigpu)", "not gpus"],
)
def test_an_expression_that_does_not(expression: str) -> None:
    assert not asks_for_gpu(expression)


@pytest.mark.parametrize(
    ("expression", "outcome"),
    [
        ("(gpu or multigpu) and not slow", "2 deselected, 2 errors"),
        ("not slow", "1 passed, 3 skipped"),
        ("not (gpu or multigpu)", "1 passed, 1 skipped, 2 deselected"),
    ],
)
def test_where_there_is_no_gpu(expression: str, outcome: str, tmp_path: Path) -> None:
    (tmp_path / "test_few.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-q"]
    result = subprocess.run(
        [*command, "-W", "ignore", "-m", expression, "test_few.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1", "NUMBA_ENABLE_CUDASIM": "0"},
        capture_output=True,
        text=True,
    )
    assert outcome in result.stdout, result.stdout + result.stderr
    assert result.returncode == (1 if "errors" in outcome else 0)
