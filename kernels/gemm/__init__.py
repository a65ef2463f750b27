"""The matrix product on one device: a ladder of kernels behind one function, `product.matmul`."""
