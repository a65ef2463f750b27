"""``cuda``: the module ``numba.cuda``, imported when something of it is first asked for.

A process that works on the CPU alone never asks, and does without the 0.3 s and the 70 MB that it takes with CUDA's
bindings. This is the door for host code that CPU and GPU share. Modules with kernels in them import Numba's module
itself, since a kernel's globals are read by its compiler, and are imported where a GPU is met.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numba import cuda
else:

    class _Deferred:
        def __getattr__(self, name: str) -> Any:
            value = getattr(importlib.import_module("numba.cuda"), name)
            setattr(self, name, value)  # from now on it costs nothing to ask
            return value

    cuda = _Deferred()

__all__ = ["cuda"]
