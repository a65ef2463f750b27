"""A GPU runs kernels that came with an installation, and none of them is compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

JOB = "matmul float16"

MULTIPLY = """
import numpy as np
import zarr
import tilewright as tw
from tilewright.kernels.gpu import compiled


def refuse(function, *rest):
    raise AssertionError(f"{function.__name__} is compiled")


compiled.compile_function = refuse
rng = np.random.default_rng(1)
a, b = (rng.integers(-3, 4, (512, 512)).astype(np.float16) for _ in range(2))
for name, matrix in (("a.zarr", a), ("b.zarr", b)):
    zarr.create_array(name, data=matrix, chunks=(256, 256), overwrite=True)
tw.matmul("a.zarr", "b.zarr", "c.zarr", device="cuda", verify=False)
np.testing.assert_array_equal(zarr.open_array("c.zarr")[:], (a.astype("f4") @ b.astype("f4")).astype("f2"))
"""


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | environment,
        text=True,
        capture_output=True,
        timeout=600,
    )


@pytest.mark.gpu
def test_a_product_by_shipped_kernels_compiles_nothing(tmp_path: Path) -> None:
    from numba import cuda

    version = "{}.{}".format(*cuda.get_current_device().compute_capability)
    packs = tmp_path / "packs"
    how = ("--into", str(packs), "--capability", version, "--job", JOB, "--quiet")
    made = run(tmp_path, "-m", "tilewright", "kernels", *how)
    assert made.returncode == 0, made.stderr
    caches = {"TILEWRIGHT_CODE_CACHE": "off"}
    done = run(tmp_path, "-c", MULTIPLY, TILEWRIGHT_SHIPPED_KERNELS=str(packs), **caches)
    assert done.returncode == 0, done.stderr
    without = run(
        tmp_path, "-c", MULTIPLY.replace("c.zarr", "d.zarr"), TILEWRIGHT_SHIPPED_KERNELS="off", **caches
    )
    assert "is compiled" in without.stderr
