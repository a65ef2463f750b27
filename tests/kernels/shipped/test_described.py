"""What usual jobs need of a GPU that is not there: each in a process of its own, which has no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.workflows.kernels.usual import GPUS

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")

SCRIPT = """
import json, sys
from tilewright.kernels.shipped.described import describe
from tilewright.workflows.kernels import usual

describe(usual.gpus_of(tuple(json.loads(sys.argv[1])))[0])
found = {}
for job in usual.usual_jobs():
    if len(sys.argv) > 2 and job.name not in sys.argv[2:]:
        continue
    kernels = usual.kernels_of([job])
    found[job.name] = {key: needed.kernel.py_func.__qualname__ for key, needed in kernels.items()}
json.dump(found, sys.stdout)
"""


def usual_kernels(capability: tuple[int, int], seed: str, *jobs: str) -> dict[str, dict[str, str]]:
    """By job, of these or of all, the functions of the kernels it asks for first, by what they are shipped under."""
    words = [sys.executable, "-c", SCRIPT, json.dumps(capability), *jobs]
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        cwd=root,
        env={"PATH": "", "PYTHONPATH": str(root), "PYTHONHASHSEED": seed, "HOME": str(root)},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, str]] = json.loads(done.stdout)
    return found


def test_hoppers_products_are_on_its_tensor_cores() -> None:
    """Also their passes: the planes of operands, the look at what they hold, and the mirror image."""
    jobs = "matmul float64", "histograms", "decoding"
    found = usual_kernels((9, 0), "1", *jobs)
    functions = set(found["matmul float64"].values())
    assert {name.partition(".")[0] for name in functions} >= {
        "kernel_function",
        "contents_function",
        "transpose_function",
        "plan_function",
        "pass_function",
        "reset_function",
    }
    assert set(found["decoding"].values()) >= {"_entropy_function.<locals>.entropy_kernel"}
    assert "clear_large" in found["histograms"].values()
    assert "texts_function.<locals>.texts" in found["histograms"].values()
    assert "" not in functions


@pytest.mark.slow
def test_another_process_asks_for_the_same() -> None:
    jobs = "matmul float64", "histograms", "decoding"
    assert usual_kernels((9, 0), "2", *jobs) == usual_kernels((9, 0), "1", *jobs)


@pytest.mark.slow
@pytest.mark.parametrize("capability", GPUS)
def test_every_job_needs_kernels_on_every_gpu(capability: tuple[int, int]) -> None:
    counts = {job: len(kernels) for job, kernels in usual_kernels(capability, "1").items()}
    assert counts.pop("hashes") == 0, "products have asked for them"
    assert min(counts.values()) > 0, counts
    assert sum(counts.values()) > 150
