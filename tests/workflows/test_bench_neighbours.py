"""The benchmark of nearest neighbours: right answers are timed, wrong ones are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from tilewright.workflows.bench import neighbours
from tilewright.workflows.cli import cli


@pytest.mark.more
def test_the_benchmark() -> None:
    words = ["-n", "300", "--width", "16", "-k", "3", "--seconds", "0.01", "--device", "cpu", "--json", "-q"]
    result = CliRunner().invoke(cli, ["bench", "neighbours", *words])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    names = [row["contestant"] for row in rows]
    assert {"NumPy, argpartition", "tilewright (CPU)", "BLAS, products alone"} <= set(names)
    assert names[-2:] == ["tilewright, verified", "tilewright"]


def test_more_neighbours_than_rows() -> None:
    result = CliRunner().invoke(cli, ["bench", "neighbours", "-n", "3", "-k", "4", "--device", "cpu"])
    assert result.exit_code == 1
    assert "there are 3 rows" in result.stderr


def test_wrong_neighbours_are_found(rng: np.random.Generator) -> None:
    x = rng.standard_normal((50, 8))
    judge = neighbours.Judge(x, 5)
    right = np.argsort(-(x @ x.T), axis=1)[:, :5]
    assert judge(right) is None
    wrong = right.copy()
    wrong[:, 0] = wrong[:, 1]
    assert judge(wrong) == "the recall is 0.8000"
    assert judge(right[:, :4]) == "there are neighbours of shape (50, 4)"
