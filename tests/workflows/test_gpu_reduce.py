"""Histograms and dot products through the pipeline on a GPU equal those of the CPU."""

from __future__ import annotations

from pathlib import Path

import dask
import numpy as np
import pytest
import zarr
from distributed import Client

from tilewright.kernels.histogram_tokens import KINDS
from tilewright.pipeline.dot import BLOCK
from tilewright.workflows.dot import dot
from tilewright.workflows.histogram import histogram

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of many sizes, cut into pieces within characters, empty ones too."""
    rng = np.random.default_rng(5)
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "bytes").write_bytes(rng.integers(0, 256, 300_001, np.uint8).tobytes())
    (folder / "text").write_bytes("Straße — 東京 💡 ".encode() * 12_345)
    (folder / "empty").write_bytes(b"")
    for i in range(200):
        (folder / f"{i:03}").write_bytes(b"tile \xe2\x82"[: i % 8] * i)
    return folder


@pytest.mark.parametrize("by", list(KINDS))
@pytest.mark.parametrize("per_document", [False, True])
def test_histograms(client: Client, corpus: Path, by: str, per_document: bool) -> None:
    paths = sorted(corpus.iterdir())
    if per_document and by == "codepoint":
        paths = paths[-12:]  # 9 MB of counts a document
    with dask.config.set({"tilewright.piece-nbytes": 50_000}):
        found, expected = (
            histogram(paths, by=by, per_document=per_document, cluster=client, device=device)
            for device in ("cuda", "cpu")
        )
    assert found.device != "CPU"
    np.testing.assert_array_equal(found.counts, expected.counts)
    assert found.skipped == expected.skipped


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint16", "float16", "float32", "float64", "complex64"])
def test_dot_products(client: Client, tmp_path: Path, rng: np.random.Generator, dtype: str) -> None:
    n = 3 * 2**20 + 7
    values = [(rng.standard_normal(n) * 50).astype(dtype) for _ in "xy"]
    for name, vector in zip("xy", values, strict=True):
        array = zarr.create_array(str(tmp_path / name), shape=(n,), chunks=(400_000,), dtype=dtype)
        array[...] = vector
    results = {dot(tmp_path / "x", tmp_path / "y", cluster=client, device="cuda").tobytes() for _ in range(3)}
    assert len(results) == 1
    (found,) = (np.frombuffer(result, dtype)[0] for result in results)
    if np.dtype(dtype).kind in "iu":
        assert found == np.vdot(*values)
    else:
        wide = [vector.astype(np.complex128) for vector in values]
        scale = float(np.sqrt(np.sum(np.abs(wide[0] * wide[1]) ** 2)))
        exact = np.vdot(*wide)
        if np.dtype(dtype) == np.float16 and abs(exact) > np.finfo(dtype).max:
            assert np.isinf(found)
        else:
            # What roundings of random sign add up to over a block, the exact product's own included.
            assert abs(found - exact) <= np.finfo(dtype).eps * np.sqrt(BLOCK) * max(scale, abs(exact))
