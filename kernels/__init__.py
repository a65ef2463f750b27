"""What runs on one device: arrays in, arrays out. Knows no Dask and no Zarr.

The public functions are bound here, at import: ``histogram`` and ``dot`` are also the names of the modules
that define them, and Python binds a submodule's name only when it is first loaded, so this order lets
``from tilewright.kernels import histogram`` always mean the function.
"""

from tilewright.kernels.dots.api import dot
from tilewright.kernels.gemm import matmul
from tilewright.kernels.histograms.api import DocumentOffsets, histogram

__all__ = ["DocumentOffsets", "dot", "histogram", "matmul"]
