"""Kernels compiled before anybody needs them, where there need be no GPU: which, and into what."""
