"""What `prepare` leaves to be done: nothing is compiled, loaded or allocated by the product that follows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tilewright.kernels import matmul
from tilewright.kernels.gemm import product, scratch
from tilewright.kernels.gemm.product import prepare
from tilewright.kernels.gpu import launch

pytestmark = pytest.mark.gpu

CASES = [
    ("f4", "full", (1000, 700, 900), False),
    ("f4", "full", (64, 64, 200_000), False),
    ("f4", "split", (1000, 700, 900), False),
    ("f4", "split", (1000, 700, 900), True),
    ("f4", "tf32", (1000, 700, 900), True),
    ("f4", "bf16", (1001, 701, 901), False),
    ("f2", "full", (1001, 701, 901), False),
    ("f8", "full", (1001, 701, 901), False),
    ("f8", "full", (3, 50_000, 40), False),
    ("c16", "full", (513, 300, 301), True),
    ("i1", "full", (1000, 700, 900), True),
    ("i4", "full", (1000, 700, 900), False),
    ("i8", "full", (1001, 701, 901), True),
    ("i8", "full", (30, 20, 10), False),
    ("u2", "full", (17, 5, 3), False),
]
"""Dtype, precision, sides m, n and k, and whether A is stored transposed."""


@pytest.mark.parametrize("accumulate", [False, True], ids=["written", "added"])
@pytest.mark.parametrize(("dtype", "precision", "sides", "transposed"), CASES)
def test_a_product_that_was_prepared_finds_everything_ready(
    dtype: str,
    precision: str,
    sides: tuple[int, int, int],
    transposed: bool,
    accumulate: bool,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from numba import cuda

    m, n, k = sides
    item = np.dtype(dtype)
    a, b = (rng.integers(-3, 4, sides).astype(item) for sides in ((m, k), (k, n)))
    kept = np.full((m, n), 5, item)
    on_gpu = [cuda.to_device(np.ascontiguousarray(x)) for x in (a.T if transposed else a, b, kept)]
    options: dict[str, Any] = {
        "accumulate": accumulate,
        "transpose_a": transposed,
        "precision": precision,
        "stream": cuda.stream(),
    }
    used: list[Any] = []
    launched: list[str] = []
    found, start = launch._prepared, launch.start_kernel

    def note(kernel: Any, device: int) -> Any:
        used.append(kernel)
        return found(kernel, device)

    def note_launch(name: str, *rest: Any) -> None:
        launched.append(name)
        start(name, *rest)

    monkeypatch.setattr(launch, "_prepared", note)
    monkeypatch.setattr(launch, "start_kernel", note_launch)
    product._recorded.cache_clear()
    scratch.release()

    prepare(*on_gpu, **options)

    ready, room = set(used), {key: buffer.size for key, buffer in scratch._buffers.items()}
    assert ready
    assert not launched
    assert (on_gpu[2].copy_to_host() == kept).all(), "nothing was multiplied"
    used.clear()
    matmul(on_gpu[0], on_gpu[1], out=on_gpu[2], **options)
    options["stream"].synchronize()
    assert launched
    assert set(used) <= ready
    assert {key: buffer.size for key, buffer in scratch._buffers.items()} == room
    wide = np.result_type(item, np.int64 if item.kind in "iu" else np.float64)
    wanted = (a.astype(wide) @ b.astype(wide) + 5 * accumulate).astype(item)
    assert np.array_equal(on_gpu[2].copy_to_host(), wanted), "small integers: no precision rounds them"
