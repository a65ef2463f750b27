"""In how many blocks a kernel is launched."""

from __future__ import annotations

import pytest

from tilewright.kernels.gpu.launch import ceil_div


@pytest.mark.parametrize(
    ("a", "b", "groups"), [(0, 5, 0), (1, 5, 1), (5, 5, 1), (6, 5, 2), (2**40, 3, 366503875926)]
)
def test_ceil_div(a: int, b: int, groups: int) -> None:
    assert ceil_div(a, b) == groups
