"""How a pass over device memory is compiled and launched: one kernel for each dtype, or each combination of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tilewright.kernels.gemm.base import Variant
from tilewright.kernels.gpu.compiled import compile_kernel
from tilewright.kernels.gpu.device_choice import SIMULATOR, current_device
from tilewright.kernels.gpu.launch import enqueue


class Launcher:
    """The kernels of one pass.

    function: of what tells the kernels apart, dtypes mostly, the plain function of one. signature: of the same, its
    Numba signature.
    """

    def __init__(self, function: Callable[..., Any], signature: Callable[..., Any]) -> None:
        self._function, self._signature = function, signature
        self.kernel = functools.cache(self._compiled)
        """Of the same, the kernel, which is compiled at its first launch."""

    def _compiled(self, *of: Any) -> Any:
        return compile_kernel(self._function(*of), self._signature(*of))

    def prepare(self, *of: Any) -> None:
        """Compile and load a kernel on the current GPU; nothing is launched."""
        if not SIMULATOR:
            self.kernel(*of).function(current_device())

    def enqueue(
        self, of: tuple[Any, ...], grid: int | tuple[int, ...], block: Any, stream: Any, *arguments: Any
    ) -> None:
        enqueue(self.kernel(*of), grid, block, stream, 0, *arguments)

    def variant(self, name: str, *of: Any) -> Variant:
        """One of them as tests compile it to machine code."""
        return Variant(name, self._function(*of), self._signature(*of))
