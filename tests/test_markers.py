"""A run that asks for GPU tests and executes none fails, however it asks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import conftest
from tests.conftest import asks_for_gpu
from tests.sampling import sample
from tilewright.kernels.cpu import loops

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


def run_pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A run with our hooks, in a process of its own that finds no GPU."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-q", *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1", "NUMBA_ENABLE_CUDASIM": "0"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("expression", "outcome"),
    [
        ("(gpu or multigpu) and not slow", "2 deselected, 2 errors"),
        ("not slow", "1 passed, 3 skipped"),
        pytest.param("not (gpu or multigpu)", "1 passed, 1 skipped, 2 deselected", marks=pytest.mark.slow),
    ],
)
def test_where_there_is_no_gpu(expression: str, outcome: str, tmp_path: Path) -> None:
    (tmp_path / "test_few.py").write_text(TESTS)
    result = run_pytest(tmp_path, "-W", "ignore", "-m", expression, "test_few.py")
    assert outcome in result.stdout, result.stdout + result.stderr
    assert result.returncode == (1 if "errors" in outcome else 0)


PLUGIN = """
def pytest_addoption(parser):
    parser.addoption("--timeout", type=float)

def pytest_configure(config):
    config.addinivalue_line("markers", "timeout")
"""
"""What `tests.conftest` needs of pytest-timeout, in whose place it is loaded where that is not installed."""

LIMITED = """
import pytest

@pytest.fixture(autouse=True)
def told(request):
    found = request.node.get_closest_marker("timeout")
    print("limits:", found and (found.args, found.kwargs), end="; ")

def test_usual():
    pass

@pytest.mark.slow
def test_slow():
    pass
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("options", "limits"),
    [
        (
            ("-p", "timeout"),
            "((300,), {'method': 'thread'}) ((1800,), {'method': 'thread'})",
        ),
        (("-p", "timeout", "--timeout", "7"), "None None"),
        (("-p", "no:timeout"), "None None"),
    ],
    ids=["installed", "given", "missing"],
)
def test_each_test_has_a_limit_where_the_plugin_for_it_is_there(
    options: tuple[str, ...], limits: str, tmp_path: Path
) -> None:
    """Unless the command line gives one; without the plugin there is neither a limit nor an error."""
    (tmp_path / "timeout.py").write_text(PLUGIN)
    (tmp_path / "test_limited.py").write_text(LIMITED)
    strictly = "-W", "error", "--strict-config", "--strict-markers", "-o", "markers=slow"
    result = run_pytest(tmp_path, "-s", *strictly, *options, "test_limited.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert " ".join(re.findall(r"limits: (.*?); ", result.stdout)) == limits


@pytest.mark.parametrize(("cores", "processes"), [(1, 2), (2, 3), (4, 5), (16, 20)])
def test_auto_means_more_processes_than_cores_but_in_the_simulator(
    cores: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    monkeypatch.setattr(loops, "usable_cores", lambda: cores)
    monkeypatch.setattr(conftest, "SIMULATOR", False)
    assert conftest.pytest_xdist_auto_num_workers() == processes
    monkeypatch.setattr(conftest, "SIMULATOR", True)
    assert conftest.pytest_xdist_auto_num_workers() is None
    monkeypatch.setattr(conftest, "SIMULATOR", False)
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "7")
    assert conftest.pytest_xdist_auto_num_workers() is None


def test_a_sample_has_every_value_before_it_has_one_twice() -> None:
    cases = [{"a": a, "b": b} for a in range(3) for b in range(4)]
    for size in range(1, 15):
        chosen = sample(cases, size)
        assert len(chosen) == min(size, 12)
        assert len({cases[number]["a"] for number in chosen}) == min(size, 3)
        assert len({cases[number]["b"] for number in chosen}) == min(size, 4)


def test_as_few_cases_as_have_all_values() -> None:
    cases = [{"a": a, "b": b} for a in range(3) for b in range(4)]
    chosen = sample(cases, None)
    assert len(chosen) == 4
    assert {cases[number]["a"] for number in chosen} == {0, 1, 2}
    assert {cases[number]["b"] for number in chosen} == {0, 1, 2, 3}
    assert sample([{"a": number} for number in range(7)], None) == set(range(7))
    assert sample([], None) == set()


def test_a_sample_of_one_parameter_is_spread() -> None:
    assert sample([{"a": number} for number in range(11)], 3) == {0, 5, 10}
    assert sample([], 3) == set()


def test_cases_that_are_not_in_the_sample_are_slow(tmp_path: Path) -> None:
    """And what cases cover elsewhere is not covered here."""
    (tmp_path / "test_cases.py").write_text(
        "import pytest\n"
        "@pytest.mark.sample(2)\n"
        "@pytest.mark.parametrize('number', range(5))\n"
        "def test_one(number): print('one', number, end='; ')\n"
        "\n"
        "@pytest.mark.sample(3)\n"
        "@pytest.mark.parametrize('number', range(3))\n"
        "@pytest.mark.parametrize('place', ['here', pytest.param('gpu', marks=pytest.mark.gpu)])\n"
        "@pytest.mark.parametrize('more', [False, True])\n"
        "def test_two(more, place, number): print('two', place, number, end='; ')\n"
        "\n"
        "@pytest.mark.parametrize('number', range(3))\n"
        "@pytest.mark.parametrize('place', ['here', pytest.param('gpu', marks=pytest.mark.gpu)])\n"
        "@pytest.mark.parametrize('more', [False, True])\n"
        "def test_three(more, place, number): print('three', number, more, end='; ')\n"
        "\n"
        "@pytest.mark.every_case\n"
        "@pytest.mark.parametrize('number', range(3))\n"
        "@pytest.mark.parametrize('more', [False, True])\n"
        "def test_four(more, number): print('four', end='; ')\n"
    )
    result = run_pytest(tmp_path, "-W", "ignore", "-s", "-m", "not slow", "test_cases.py")
    assert "14 passed, 9 skipped, 12 deselected" in result.stdout, result.stdout + result.stderr
    assert re.findall(r"one (\d);", result.stdout) == ["0", "4"]
    assert sorted(re.findall(r"two here (\d);", result.stdout)) == ["0", "1", "2"]
    three = re.findall(r"three (\d) (\w+);", result.stdout)
    assert sorted(number for number, _ in three) == ["0", "1", "2"]
    assert {more for _, more in three} == {"True", "False"}
    assert result.stdout.count("four; ") == 6
