"""What whole commands load on a GPU is what is shipped for their jobs, and small ones compile nothing else.

They run by a driver whose GPU is pretended (``pretended_cuda.c``): nothing is computed, but all that a GPU would load
is asked for as ever. The lists of `usual_jobs` are made without any of that, from plans alone, so this is what keeps
both from drifting apart.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr

from tests.kernels.shipped.test_described import usual_kernels
from tilewright.kernels.gpu.device_choice import SIMULATOR

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator loads no machine code")

HERE = Path(__file__).resolve().parent
CAPABILITY = 9, 0

LISTED = """
import json, os, sys

from tilewright.kernels.gpu import compiled
from tilewright.kernels.gpu.code_cache import MachineCode

loaded, others = {}, []
load = compiled.CompiledKernel._load


def noted(kernel, device):
    loaded[kernel.shipped_key()] = kernel.py_func.__qualname__
    return load(kernel, device)


compiled.CompiledKernel._load = noted
compiled.compile_function = lambda function, *rest: MachineCode(function.__name__, b"code")

from numba.core.dispatcher import Dispatcher
from numba.cuda.dispatcher import CUDADispatcher

for kind in (Dispatcher, CUDADispatcher):
    def compile(self, signature, kind=kind, before=kind.compile):
        others.append(f"{self.py_func.__module__}.{self.py_func.__qualname__}")
        return before(self, signature)
    kind.compile = compile

from tilewright.workflows.cli import cli

try:
    cli.main(sys.argv[2:], standalone_mode=False)
finally:
    with open(sys.argv[1], "w") as file:
        json.dump([loaded, others], file)
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the driver in it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no compiler of C")
    folder = tmp_path_factory.mktemp("driver")
    library = folder / "libcuda.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", library, HERE / "pretended_cuda.c", "-ldl"], check=True
    )
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Matrices of zeros, which make products that check, and texts."""
    for name in ("float32", "int64", "float16"):
        for matrix in "ab":
            zeros = np.zeros((512, 512), name)
            zarr.create_array(tmp_path / f"{name}-{matrix}.zarr", data=zeros, chunks=(256, 256))
    zarr.create_array(tmp_path / "x.zarr", data=np.zeros(65536, "f4"), chunks=(8192,))
    (tmp_path / "texts").mkdir()
    for number in range(40):
        (tmp_path / "texts" / f"{number}.txt").write_text("some letters " * 30)
    return tmp_path


def listed(driver: Path, folder: Path, *words: str) -> tuple[dict[str, str], list[str]]:
    """The kernels that a command loads, by what they are shipped under, and all that Numba compiled beside them."""
    out = folder / "listed.json"
    root = HERE.parents[2]
    done = subprocess.run(
        [sys.executable, "-c", LISTED, out, *words, "--device", "cuda", "--quiet"],
        cwd=folder,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(root),
            "HOME": str(folder),
            "LD_LIBRARY_PATH": str(driver),
            "TILEWRIGHT_CODE_CACHE": "off",
            "TILEWRIGHT_SHIPPED_KERNELS": "off",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    loaded, others = json.loads(out.read_text())
    return loaded, others


@pytest.mark.parametrize(
    ("words", "jobs"),
    [
        (("matmul", "float32-a.zarr", "float32-b.zarr", "c.zarr"), ("matmul float32",)),
        (("demo",), ("histograms", "matmul int64")),
        pytest.param(
            *(("gram", "float32-a.zarr", "c.zarr"), ("matmul float32",)), marks=pytest.mark.more, id="gram"
        ),
        pytest.param(
            *(("matmul", "int64-a.zarr", "int64-b.zarr", "c.zarr"), ("matmul int64",)),
            marks=pytest.mark.more,
            id="int64",
        ),
        pytest.param(
            *(("matmul", "float16-a.zarr", "float16-b.zarr", "c.zarr", "--no-verify"), ("matmul float16",)),
            marks=pytest.mark.more,
            id="float16",
        ),
        pytest.param(("dot", "x.zarr", "x.zarr"), ("dot",), marks=pytest.mark.more, id="dot"),
        pytest.param(
            *(("histogram", "texts", "--by", "codepoint", "--per-document"), ("histograms",)),
            marks=pytest.mark.more,
            id="codepoint",
        ),
    ],
)
def test_all_that_a_small_command_loads_is_shipped(
    words: tuple[str, ...], jobs: tuple[str, ...], driver: Path, folder: Path
) -> None:
    """And its host compiles no loop of its own."""
    loaded, others = listed(driver, folder, *words)
    assert loaded
    shipped = {key for kernels in usual_kernels(CAPABILITY, "1", *jobs).values() for key in kernels}
    assert {key: name for key, name in loaded.items() if key not in shipped} == {}
    assert others == []
