"""``numba`` and ``cuda``, which is ``numba.cuda``: imported when something of them is first asked for.

A process that works on the CPU alone never asks for ``cuda``, and does without the 0.3 s and the 70 MB that it takes
with CUDA's bindings; one that multiplies floating point there does without Numba's 0.1 s and, with its compiler, 100 MB
too. This is the door for host code that CPU and GPU share. Modules with kernels or compiled loops of their own import
Numba itself, since a function's globals are read by its compiler, and are imported where they are needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numba
    from numba import cuda
else:

    class _Deferred:
        def __init__(self, module: str) -> None:
            self._module = module

        def __getattr__(self, name: str) -> Any:
            value = getattr(importlib.import_module(self._module), name)
            setattr(self, name, value)  # from now on it costs nothing to ask
            return value

    numba = _Deferred("numba")
    cuda = _Deferred("numba.cuda")

__all__ = ["cuda", "numba"]
