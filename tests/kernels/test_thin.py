"""Thin products are asked for by many threads at once, the first of them too."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tilewright.kernels import thin


def test_threads_that_come_first_at_once_share_one_loop(rng: np.random.Generator) -> None:
    threads = 8
    block, vectors = rng.standard_normal((40, 600)).astype("f4"), rng.standard_normal((3, 600))
    together = threading.Barrier(threads, timeout=60)

    def product(_: int) -> np.ndarray:
        out = np.zeros((40, 3))
        together.wait()
        thin.add_thin_product(block, vectors, out, np.zeros((0, 600)), np.zeros((40, 0)))
        return out

    thin._compiled_loop.cache_clear()
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(product, range(threads)))
    for out in found:
        np.testing.assert_allclose(out, block.astype("f8") @ vectors.T, rtol=1e-12, atol=1e-12)
    assert thin._compiled_loop.cache_info().misses == 1
