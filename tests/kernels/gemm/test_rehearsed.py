"""Every kernel of the ladder, launched without a GPU: host code asks for configurations, memory and kernels as ever.

A process describes one GPU (`tilewright.kernels.shipped.described`); nothing is compiled.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.workflows.kernels.usual import GPUS

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator has the portable kernels alone")

SCRIPT = """
import itertools, json, sys
import numpy as np
from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.kernels.float8 import FLOAT8
from tilewright.kernels.gpu.recording import Rehearsal
from tilewright.kernels.shipped.described import DescribedArray, describe
from tilewright.workflows.kernels import usual

describe(usual.gpus_of(tuple(json.loads(sys.argv[1])))[0])

from tilewright.kernels.gemm.product import describe as problem_of
from tilewright.kernels.gemm.select import ladder

def array(shape, dtype, by_columns):
    itemsize = np.dtype(dtype).itemsize
    strides = (itemsize, shape[0] * itemsize) if by_columns else None
    return DescribedArray(shape, strides, dtype)

SIDES = (1, 4000, 4000), (300, 200, 77), (2048, 2048, 4096), (4096, 4096, 4100), (4097, 4097, 9000)
pairs = [(dtype, dtype, dtype) for dtype in (*usual.DTYPES, BFLOAT16)]
pairs += [("i1", "i1", "i4"), ("i4", "i4", "i8"), ("f2", "f2", "f4")]
pairs += [(a, b, "f4") for a, b in itertools.product(FLOAT8, repeat=2)]
launched = {}
for sides, dtypes, layouts in itertools.product(SIDES, pairs, itertools.product((False, True), repeat=3)):
    m, n, k = sides
    a, b, c = map(array, ((m, k), (k, n), (m, n)), dtypes, layouts)
    for kernel, precision in itertools.product(ladder(), ("full", "split", "tf32", "bf16", "fp16")):
        if not kernel.supports(problem_of(a, b, c, precision=precision)):
            continue
        halves = (False, True) if kernel.halves and m == n else (False,)
        for lower, accumulate in itertools.product(halves, (False, True)):
            kernel.launch(a, b, c, accumulate, Rehearsal(0), **({"lower": True} if lower else {}))
            launched[kernel.name] = launched.get(kernel.name, 0) + 1
json.dump(launched, sys.stdout)
"""
TENSOR_CORES = {
    "exact-integer-mma",
    "split-residues-mma",
    "split-complex-tensor_core",
    "split-float32-mma",
    "float16-mma",
    "bfloat16-mma",
    "float8-mma",
}
HOPPER = {
    "exact-integer-wgmma",
    "split-residues-wgmma",
    "split-float32-wgmma",
    "float16-wgmma",
    "bfloat16-wgmma",
    "tf32-wgmma",
    "float8-wgmma",
}


@pytest.mark.parametrize("capability", GPUS)
def test_every_kernel_can_be_launched(capability: tuple[int, int]) -> None:
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(capability)],
        capture_output=True,
        text=True,
        cwd=root,
        env={"PATH": "", "PYTHONPATH": str(root), "HOME": str(root)},
    )
    assert done.returncode == 0, done.stderr
    launched: dict[str, int] = json.loads(done.stdout)
    wanted = TENSOR_CORES | {"warp-tiled", "skinny"} | (HOPPER if capability == (9, 0) else set())
    assert wanted <= set(launched), (wanted - set(launched), launched)
