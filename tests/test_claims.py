"""What README.md and docs/performance.md say of GPUs and of peers is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import fsspec.config
import numpy as np
import pytest

from tilewright.kernels.bfloat16 import BFLOAT16
from tilewright.kernels.float8 import E4M3
from tilewright.kernels.gemm.base import Operand, Problem
from tilewright.kernels.gemm.check import result_dtype
from tilewright.kernels.gemm.exact.whole_floats import fits
from tilewright.kernels.gemm.select import ladder, select
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.workflows.bench import cublas, gemm_peers, io

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
CAPABILITIES = ((7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0))
TENSOR_CORES = re.compile("wgmma|mma|tensor_core")
"""How kernels for tensor cores are named, and no others."""
REDUCED = ("tf32", "bf16", "fp16", "split")


def stated() -> dict[str, set[tuple[int, int]]]:
    """README's table: what is multiplied, and the capabilities of `CAPABILITIES` that have kernels for it."""
    rows = re.findall(r"^  \| ([^|]*[a-z][^|]*) \| ([\d., ]+?)( or later)? \|$", README, re.M)
    found = {}
    for products, numbers, later in rows:
        named = {(int(major), int(minor)) for major, minor in re.findall(r"(\d+)\.(\d+)", numbers)}
        found[products] = {each for each in CAPABILITIES if each in named or (later and each >= min(named))}
    return found


def cases(products: str) -> list[tuple[np.dtype, str]]:
    """Dtypes and precisions of a row."""
    kinds = {"bfloat16": BFLOAT16, "float8": E4M3} | {
        name: np.dtype(name) for name in ("float16", "float32", "float64", "complex64", "complex128")
    }
    if products == "integers":
        return [(np.dtype(sign + str(bits)), "full") for sign in ("int", "uint") for bits in (8, 16, 32, 64)]
    precisions = [name for name in REDUCED if f"`{name}`" in products] or ["full"]
    named = [kinds[name] for name in re.findall(r"\b\w+\b", products) if name in kinds]
    return [(dtype, precision) for dtype in named for precision in precisions]


def problem(dtype: np.dtype, precision: str, capability: tuple[int, int], side: int = 4096) -> Problem:
    operand, c = (Operand(side, side, each, (side, 1), 128) for each in (dtype, result_dtype(dtype, dtype)))
    return Problem(operand, operand, c, False, precision, capability)


@pytest.mark.skipif(SIMULATOR, reason="the simulator has only the portable kernels")
def test_tensor_cores_are_used_where_the_readme_says() -> None:
    rows = stated()
    (whole,) = [products for products in rows if "whole numbers" in products]
    fitting = {each for each in CAPABILITIES if fits(problem(np.dtype(np.float64), "full", each, side=8192))}
    assert rows.pop(whole) == fitting
    told = {(dtype, precision) for products in rows for dtype, precision in cases(products)}
    assert len(rows) == 6
    assert len(told) == 2 + 1 + len(REDUCED) + 1 + 2 + 2 + 8
    for products, capabilities in rows.items():
        for dtype, precision in cases(products):
            able = {
                capability
                for capability in CAPABILITIES
                for kernel in ladder()
                if TENSOR_CORES.search(kernel.name) and kernel.supports(problem(dtype, precision, capability))
            }
            assert able == capabilities, f"{dtype}, {precision}"


@pytest.mark.skipif(SIMULATOR, reason="the simulator has only the portable kernels")
@pytest.mark.parametrize("capability", [each for each in CAPABILITIES if each < (8, 0)])
def test_elsewhere_ordinary_kernels_multiply(capability: tuple[int, int]) -> None:
    float32 = np.dtype(np.float32)
    in_full = select(problem(float32, "full", capability))
    for precision in REDUCED:
        assert select(problem(float32, precision, capability)) is in_full
    for dtype in (np.dtype(np.float16), BFLOAT16):
        assert select(problem(dtype, "full", capability)).portable


def test_the_page_names_the_settings_that_are_searched() -> None:
    (text,) = re.findall(r"^\*\*Peers\.\*\*.*?\n\n", PERFORMANCE, re.M | re.S)
    text = " ".join(text.split())
    assert f"in pieces of {gemm_peers.PIECE} rows or columns" in text
    assert f"{cublas.WORKSPACE_NBYTES >> 20} MiB of workspace" in text
    assert {8: "eight"}[cublas.LT_CANDIDATES] in text
    assert len(cublas.LAYOUTS) == 4
    assert "all four layouts" in text
    assert "default, its tensor-op and its autotune algorithm" in text
    assert [*cublas.ALGORITHMS.values()] == [-1, 99, 999]
    assert set(io.KVIKIO_TASKS) == {None, 1 << 20, 16 << 20}
    assert "tasks of 1, 4 and 16 MiB" in text


def test_the_environment_names_an_endpoint_as_the_readme_says() -> None:
    (name, value), *more = re.findall(r"`(FSSPEC_\w+)='([^']*)'`", README)
    assert not more
    found: dict[str, object] = {}
    fsspec.config.set_conf_env(found, {name: value})
    assert found == {"s3": {"endpoint_url": "https://minio.example"}}
