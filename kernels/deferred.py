"""Modules that are imported on first use; ``numba`` and ``cuda``, which is ``numba.cuda``, are such.

A process that works on the CPU alone never uses ``cuda``, which saves it 0.3 s and, with CUDA's bindings, 70 MB. One
that multiplies floating point there also saves Numba's 0.1 s and, with its compiler, 100 MB. Host code that CPU and GPU
share imports both from here. Modules with kernels or compiled loops of their own import Numba itself, since its
compiler reads a function's globals, and are themselves imported only where they are needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class Deferred:
    """A module that is imported when something of it is first asked for."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self._module), name)
        setattr(self, name, value)  # later look-ups cost nothing
        return value


if TYPE_CHECKING:
    import numba
    from numba import cuda
else:
    numba = Deferred("numba")
    cuda = Deferred("numba.cuda")

__all__ = ["Deferred", "cuda", "numba"]
