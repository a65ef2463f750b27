"""A command's process ends at once, unless a tool is in it whose own end is that of Python."""

from __future__ import annotations

import pytest

from tilewright.workflows.terminal.ending import TOOLS


@pytest.mark.parametrize(
    ("library", "is_a_tool"),
    [
        (
            "/opt/nvidia/nsight-compute/2025.3.1/target/linux-desktop-glibc_2_11_3-x64/libcuda-injection.so",
            True,
        ),
        ("/usr/local/cuda-13.0/compute-sanitizer/libInterceptorInjectionTarget.so", True),
        ("/usr/local/cuda-13.0/compute-sanitizer/libsanitizer-collection.so", True),
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.580.1", False),
        (
            "/usr/lib/python3/dist-packages/numpy/_core/_multiarray_umath.cpython-312-x86_64-linux-gnu.so",
            False,
        ),
    ],
)
def test_tools_are_known_by_their_libraries(library: str, is_a_tool: bool) -> None:
    line = f"7f2c3a000000-7f2c3a021000 r-xp 00000000 08:01 1234 {library}\n"
    assert bool(TOOLS.search(line)) == is_a_tool
