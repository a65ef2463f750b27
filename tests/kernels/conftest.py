"""Tests compile kernels by numba-cuda itself, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="session", autouse=True)
def numba_has_its_array_operations() -> None:
    """As `tilewright.kernels.gpu.compiled` sees to; only from NumPy 2.5 on does it take time."""
    if not hasattr(np, "row_stack"):
        from tilewright.kernels.gpu.compiled import import_array_operations

        import_array_operations()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was compiled, in place of compiling it."""
    from tilewright.kernels.gpu import compiled
    from tilewright.kernels.gpu.code_cache import MachineCode

    made: list[Any] = []

    def compile_function(*asked: Any) -> MachineCode:
        made.append(asked)
        return MachineCode(f"entry{len(made)}", b"code" * len(made))

    monkeypatch.setattr(compiled, "compile_function", compile_function)
    return made
