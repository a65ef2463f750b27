"""From PTX to machine code where there is no GPU, and what the assembler says of registers and spills.

CUDA's assembler comes with the test dependencies, in the version of the compiler that wrote the PTX: an older one
refuses it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cuda import pathfinder

from tilewright.kernels.gemm.base import Variant


def ptxas() -> str:
    """The assembler: beside the compiler in the environment, else the one on PATH. Fails the test without any."""
    find = getattr(pathfinder, "find_nvidia_binary_utility", None)
    found = (find("ptxas") if find is not None else None) or shutil.which("ptxas")
    if found is None:
        pytest.fail(
            "ptxas is missing; install the test dependencies: pip install -e '.[test]'", pytrace=False
        )
    return str(found)


def assemble(text: str, architecture: str, folder: Path) -> str:
    """What ``ptxas -v`` says of PTX ``text`` for ``architecture`` (such as ``sm_90a``); fails if it is refused."""
    source = folder / "kernel.ptx"
    source.write_text(text)
    done = subprocess.run(
        [ptxas(), "-v", f"-arch={architecture}", str(source), "-o", str(folder / "kernel.cubin")],
        capture_output=True,
        text=True,
        check=False,
    )
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    return report


def assert_no_spills(report: str) -> None:
    """Nothing that should be a register lies in local memory."""
    spills = [int(size) for size in re.findall(r"(\d+) bytes spill", report)]
    assert spills, f"ptxas said nothing of spills:\n{report}"
    assert not any(spills), report


def sampled(variants: list[Variant], step: int) -> list[Any]:
    """Every variant as a test case; all but each ``step``-th are marked slow: a compilation takes seconds."""
    return [
        pytest.param(variant, id=variant.name, marks=() if place % step == 0 else pytest.mark.slow)
        for place, variant in enumerate(variants)
    ]
