"""Neighbours and pairs of stored matrices on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client
from numpy.testing import assert_array_equal

import tilewright as tw
from tests.kernels.neighbours import naive
from tests.workflows.products import put
from tests.workflows.test_neighbours import of_any_length, whole_numbers
from tilewright.kernels.neighbours import order
from tilewright.pipeline.events import Notice
from tilewright.pipeline.neighbours import job


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "metric"),
    [
        (dtype, metric)
        for dtype in ("float16", "float32", "int8")
        for metric in order.METRICS
        if (dtype, metric) != ("int8", "cosine")  # which is float64, and found by the cores
    ],
)
@pytest.mark.parametrize("memory", [None, "1MiB"])
def test_neighbours_are_those_of_all_values(
    client: Client, tmp_path: Path, rng: np.random.Generator, dtype: str, metric: Any, memory: str | None
) -> None:
    """Of whole numbers, whose sums no order rounds; with little memory B is streamed."""
    x = whole_numbers(rng, dtype)
    path = put(tmp_path / "x.zarr", x, chunks=(300, 8))
    options: dict[str, Any] = {"metric": metric, "cluster": client, "device": "cuda", "device_memory": memory}
    keys, values = naive.exact_keys(x, x, metric)
    found = tw.topk(path, k=5, exclude_self=True, **options)
    wanted = naive.nearest(keys, values, 5, True)
    assert_array_equal(found.indices, wanted.indices)
    np.testing.assert_allclose(found.values, wanted.values, rtol=1e-6)
    above = float(np.quantile(values, 0.999))
    pairs = tw.pairs(path, above=above, **options)
    wanted_pairs = naive.pairs(values, above, None, True)
    assert_array_equal(pairs.row, wanted_pairs.row)
    assert_array_equal(pairs.column, wanted_pairs.column)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["full", "tf32", "bf16"])
@pytest.mark.parametrize("rows", [700, 40_000])
def test_lengths_do_not_matter_to_cosines(
    client: Client, tmp_path: Path, rng: np.random.Generator, precision: Any, rows: int
) -> None:
    """To the bit, of many rows compared once each pair too, since powers of two round nothing."""
    x = rng.standard_normal((rows, 64)).astype(np.float32)
    x[5] = 0
    paths = [
        put(tmp_path / name, array, chunks=(4096, 64))
        for name, array in (("x", x), ("long", of_any_length(x, rng, 100)))
    ]
    options: dict[str, Any] = {
        "metric": "cosine",
        "cluster": client,
        "device": "cuda",
        "precision": precision,
    }
    wanted, found = (tw.topk(path, k=5, exclude_self=True, **options) for path in paths)
    assert_array_equal(found.indices, wanted.indices)
    assert found.values.tobytes() == wanted.values.tobytes()
    above = float(np.quantile(wanted.values, 0.9))
    near, pairs = (tw.pairs(path, above=above, **options) for path in paths)
    assert len(near.row)
    for one, other in zip(pairs, near, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("compressors", ["auto", None])
@pytest.mark.parametrize("width", [64, 61])
@pytest.mark.parametrize("metric", order.METRICS)
def test_the_check_is_done_while_the_gpu_searches(
    client: Client,
    tmp_path: Path,
    rng: np.random.Generator,
    metric: Any,
    width: int,
    compressors: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So nothing is compared once more after it; however rows are stored, in which way they reach the GPU."""
    monkeypatch.setattr(job, "check_reported", None)
    path, x = tmp_path / "x.zarr", rng.standard_normal((40_000, width)).astype(np.float16)
    zarr.create_array(path, data=x, chunks=(4096, width), compressors=compressors)
    options: dict[str, Any] = {"metric": metric, "cluster": client, "device": "cuda"}
    run = tw.topk(path, k=7, exclude_self=True, out=tmp_path / "near.zarr", **options)
    assert (run.verification.passed, run.verification.compared) == (True, 7 * 64)


@pytest.mark.multigpu
@pytest.mark.parametrize("equal", [False, True], ids=["different", "equal"])
def test_gpus_share_the_pairs_of_items(tmp_path: Path, rng: np.random.Generator, equal: bool) -> None:
    """Each compares a band with all items before it; where too many are equally near, each item with all."""
    x = rng.standard_normal((140_000, 64)).astype(np.float16)
    if equal:
        x[:70_000] = x[0]
    path = put(tmp_path / "x.zarr", x, chunks=(4096, 64))
    alone = tw.topk(path, k=7, exclude_self=True, device="cuda")
    told: list[Any] = []
    options: dict[str, Any] = {"cluster": "cuda", "device": "cuda", "listener": told.append}
    together = tw.topk(path, k=7, exclude_self=True, **options)
    assert_array_equal(together.indices, alone.indices)
    assert_array_equal(together.values, alone.values)
    texts = [event.message for event in told if isinstance(event, Notice)]
    assert ("too many items are equally near: each is compared with all" in texts) == equal
