"""What type checkers say of a user's script: nothing where it is right, something where a name is misspelt."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

import tilewright

SCRIPT = """\
import numpy as np

import tilewright as tw
from tilewright.kernels import dot, histogram, matmul

run = tw.matmul("A.zarr", "B.zarr", "C.zarr", precision="split", device="cpu", durability="none")
kernel: str = run.kernel
seconds: float = run.seconds
with tw.open_cluster("cpu") as client:
    passed: bool = tw.verify("A.zarr", "B.zarr", "C.zarr", cluster=client).passed
names: list[str] = [device.name for device in tw.devices()]
total: complex = complex(tw.dot("x.zarr", "y.zarr"))
counts: np.ndarray = np.asarray(tw.histogram("corpus", by="letter").counts)
product: np.ndarray = matmul(np.ones((2, 2)), np.ones((2, 2)), dtype="float32")
bins: int = histogram(np.ones(2, np.uint8)).size
tw.gram("X.zarr", "G.zarr", of="rows", center=True, missing_as="pairwise")
tw.gram("X.zarr", "G.zarr", center={"rows": [1.0]}, missing=-1, divide="n-1", window=(0, 3), sum_over=["lat", 1])
tw.cov("X.zarr", out="V.zarr", chunks=(64, 64), shards="512x512", codec="zstd:3")
returned: np.ndarray = tw.matmul(np.ones((2, 2)), np.ones((2, 2)))
stored: tw.EofRun = tw.eofs("X.zarr", "E.zarr", 3, method="gram")
scores: np.ndarray = tw.eofs("X.zarr", k=3).scores
words: int = tw.histogram("corpus", by="ngram:3:character", split_on="line", on_error="report").bins
same: tuple[str, ...] = tw.duplicates("corpus", shingle="word", on_error="report").dropped
lengths: np.ndarray = tw.signals("corpus", stop_words=("und", "der"))["word_count"]
part: tw.MatmulPlan = tw.plan_matmul(tw.slice("A.zarr", (0, 10)), "B.zarr")
facts: dict[str, object] = run.to_json()
try:
    tw.audit("C.zarr", a="A.zarr", b="B.zarr", precision="split")
    tw.audit("near.zarr", "A.zarr", "B.zarr")
except tw.TilewrightError as error:
    print(error)
tw.matmull(1)  # wrong
matmul(np.ones((2, 2)), np.ones((2, 2)), stram=1)  # wrong
tw.matmul("A.zarr", "B.zarr", "C.zarr", presicion="full")  # wrong
tw.matmul("A.zarr", "B.zarr", "C.zarr", precision="ful")  # wrong
tw.gram("X.zarr", "G.zarr", of="column")  # wrong
tw.verify("A.zarr", "B.zarr", "C.zarr").pased  # wrong
run.plan.tils  # wrong
tw.eofs("X.zarr", "E.zarr", "ten")  # wrong
dot(np.ones(2), np.ones(2), device="gpu")  # wrong
tw.gram("X.zarr", "G.zarr", divide="n-2")  # wrong
tw.gram("X.zarr", "G.zarr", window="5")  # wrong
tw.cov("X.zarr", "V.zarr", scale=True)  # wrong
tw.corr("X.zarr", "R.zarr", durability="ful")  # wrong
tw.histogram("corpus", by="words")  # wrong
tw.histogram("corpus", on_error="skip")  # wrong
tw.histogram("corpus", split_on="lines")  # wrong
tw.duplicates("corpus", hash="md5")  # wrong
tw.signals("corpus", stop_words=5)  # wrong
tw.eofs("X.zarr", "E.zarr", method="svd")  # wrong
tw.eofs("X.zarr", "E.zarr").scores  # wrong
tw.matmul(np.ones((2, 2)), np.ones((2, 2))).plan  # wrong
tw.matmul("A.zarr", "B.zarr", "C.zarr").shape  # wrong
histogram(np.ones(2, np.uint8), by="word")  # wrong
tw.TilewrightErrors  # wrong
kernel + 1  # wrong
"""
Checker: TypeAlias = Callable[[Path, dict[str, str]], list[int]]
WRONG = [number for number, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith("# wrong")]


def by_mypy(script: Path, environment: dict[str, str]) -> list[int]:
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-error-summary"]
    ran = subprocess.run(
        [*command, "--cache-dir", str(script.parent / "cache"), script.name],
        cwd=script.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    return [int(found[1]) for found in re.finditer(r"^user\.py:(\d+): error: ", ran.stdout, re.MULTILINE)]


def by_pyright(script: Path, environment: dict[str, str]) -> list[int]:
    (script.parent / "pyrightconfig.json").write_text(json.dumps({"reportUnusedExpression": False}))
    ran = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", script.name],
        cwd=script.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    found = json.loads(ran.stdout)["generalDiagnostics"]
    return [entry["range"]["start"]["line"] + 1 for entry in found if entry["severity"] == "error"]


@pytest.mark.parametrize("checker", [by_mypy, by_pyright])
def test_a_users_misspelt_names_are_found_and_nothing_else(checker: Checker, tmp_path: Path) -> None:
    script = tmp_path / "user.py"
    script.write_text(SCRIPT)
    above = str(Path(tilewright.__file__).parent.parent)
    found = checker(script, {**os.environ, "PYTHONPATH": above, "MYPYPATH": above})
    assert sorted(set(found)) == WRONG
