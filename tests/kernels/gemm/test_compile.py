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
QUICK = {("register-blocked float32", (8, 0)), ("tiled int8 a_by_rows=True b_by_rows=True", (9, 0))}
"""Compiled in every run. Rungs for the newer instructions have tests of their own, each of which compiles one variant,
or a twin of theirs has."""


def chosen(kernel: GemmKernel) -> list[Variant]:
    """All variants of a portable kernel (each dtype), else the first and the last; its own tests know which matter."""
    found = list(kernel.variants())
    return found if kernel.portable or len(found) < 2 else [found[0], found[-1]]


def cases() -> list[object]:
    """Each variant for each GPU that runs it."""
    return [
        pytest.param(
            variant,
            target,
            id=f"{variant.name} sm_{target[0]}{target[1]}",
            marks=() if (variant.name, target) in QUICK else pytest.mark.slow,
        )
        for kernel in ([] if SIMULATOR else ladder())
        for variant in chosen(kernel)
        for target in TARGETS
        if target >= variant.minimum
    ]


def test_every_kernel_names_its_variants() -> None:
    found = {kernel.name: {variant.name for variant in chosen(kernel)} for kernel in ladder()}
    assert all(found.values()), found
    assert {name for name, _ in QUICK} <= set().union(*found.values())


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
