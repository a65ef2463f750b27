"""The matrix product on one device: a ladder of kernels behind one function."""

from tilewright.kernels.gemm.product import kernel_name, matmul, prepare

__all__ = ["kernel_name", "matmul", "prepare"]
