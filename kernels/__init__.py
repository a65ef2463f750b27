"""What runs on one device: arrays in, arrays out. Knows no file, no Dask and no Zarr.

The public functions are imported on first use, so that a module of this layer costs what itself imports.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright.kernels.dots.api import dot as dot
    from tilewright.kernels.gemm.product import matmul as matmul
    from tilewright.kernels.histograms.api import DocumentOffsets as DocumentOffsets
    from tilewright.kernels.histograms.api import histogram as histogram

_HOME = {
    "DocumentOffsets": "tilewright.kernels.histograms.api",
    "dot": "tilewright.kernels.dots.api",
    "histogram": "tilewright.kernels.histograms.api",
    "matmul": "tilewright.kernels.gemm.product",
}

__all__ = ["DocumentOffsets", "dot", "histogram", "matmul"]


if not TYPE_CHECKING:  # a type checker takes it for every name, misspelt ones too

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(
                f"module 'tilewright.kernels' has no attribute {name!r}; it has {', '.join(__all__)}"
            )
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
