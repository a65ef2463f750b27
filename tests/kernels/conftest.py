"""Tests compile kernels by numba-cuda itself, too."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture(scope="session", autouse=True)
def numba_has_its_array_operations() -> None:
    """As `tilewright.kernels.gpu.compiled` sees to; only from NumPy 2.5 on does it take time."""
    if not hasattr(np, "row_stack"):
        from tilewright.kernels.gpu.compiled import import_array_operations

        import_array_operations()
