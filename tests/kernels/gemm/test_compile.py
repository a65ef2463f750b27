"""Every kernel of the ladder becomes machine code, for an older GPU and for Hopper, where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from numba import cuda

from tests.kernels.gemm.machine_code import assemble, assert_no_spills
from tilewright.kernels.gemm.base import GemmKernel, Variant
from tilewright.kernels.gemm.select import ladder
from tilewright.kernels.gpu.device_choice import SIMULATOR

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")

TARGETS = ((8, 0), (9, 0))
SEEN_TO = {
    "exact-integer-mma",
    "tf32-wgmma",
    "fp16-wgmma",  # as bf16-wgmma, but for the type
    "float16-wgmma",
    "bfloat16-wgmma",  # as float16-wgmma
    "double_tensor_core",  # its last variant takes the assembler ten seconds
}
"""Rungs whose own tests compile the first variant, or one like it, in every run, or whose twin is compiled."""


def chosen(kernel: GemmKernel) -> list[Variant]:
    """All variants of a portable kernel (each dtype), else the first and the last; its own tests know which matter."""
    found = list(kernel.variants())
    return found if kernel.portable or len(found) < 2 else [found[0], found[-1]]


def is_quick(kernel: GemmKernel, variant: Variant, place: int, turn: int) -> bool:
    if kernel.name in SEEN_TO and (place == 0 or kernel.name == "double_tensor_core"):
        return False
    if variant.minimum > TARGETS[0]:
        return place == 0
    return place % (8 if kernel.portable else 2) == turn


def cases() -> list[object]:
    """Each variant for each GPU that runs it; in every run a part of them, by turns for the one and the other: an
    eighth of the portable ones, and of a Hopper kernel the first, unless its own tests see to that.
    """
    return [
        pytest.param(
            variant,
            target,
            id=f"{variant.name} sm_{target[0]}{target[1]}",
            marks=() if is_quick(kernel, variant, place, turn) else pytest.mark.slow,
        )
        for kernel in ([] if SIMULATOR else ladder())
        for place, variant in enumerate(chosen(kernel))
        for turn, target in enumerate(TARGETS)
        if target >= variant.minimum
    ]


def test_every_kernel_names_its_variants() -> None:
    assert [kernel.name for kernel in ladder() if not list(kernel.variants())] == []


@pytest.mark.sample(2)
@pytest.mark.parametrize(("variant", "target"), cases())
def test_compiles_without_spilling(variant: Variant, target: tuple[int, int], tmp_path: Path) -> None:
    # Warpgroup instructions exist only in the architecture-specific feature set, sm_90a.
    specific = variant.minimum >= (9, 0)
    text, _ = cuda.compile_ptx(
        variant.function, variant.signature, cc=(*target, "a") if specific else target, **variant.options
    )
    assert ".entry" in text
    report = assemble(text, f"sm_{target[0]}{target[1]}{'a' if specific else ''}", tmp_path)
    assert_no_spills(report)
