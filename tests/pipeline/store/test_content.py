"""Hashes of numbers: the same wherever they lie in memory, and however they were stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash
import zarr

from tilewright.pipeline.store import content
from tilewright.pipeline.store.content import chunks_text, content_hash, panel_content


@pytest.mark.parametrize("dtype", ["u1", "i2", "f4", "f8", "c16", ml_dtypes.bfloat16])
@pytest.mark.parametrize("band_nbytes", [1, 100, 2**18])
def test_a_hash_is_of_the_numbers_row_after_row(
    dtype: Any, band_nbytes: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "COPIED_NBYTES", band_nbytes)
    monkeypatch.setattr(content, "LONG_ROW_NBYTES", 100)
    buffer = rng.integers(0, 100, (37, 53)).astype(dtype)
    for rows, columns in [
        (slice(0, 37), slice(0, 53)),
        (slice(3, 20), slice(7, 30)),
        (slice(5, 6), slice(1, 2)),
    ]:
        block = buffer[rows, columns]
        assert content_hash(block) == xxhash.xxh3_64_intdigest(block.tobytes())
        changed = block.copy()
        changed[-1, -1] += 1
        assert content_hash(changed) != content_hash(block)


def test_signs_of_zero_and_bits_of_nan_count() -> None:
    """They go into C."""
    zero = np.zeros((2, 2), "f4")
    assert content_hash(zero) != content_hash(-zero)


@pytest.mark.parametrize("dtype", ["i1", "i2", "f4", "f8", "c16"])
def test_numbers_in_other_places_are_others(dtype: str, rng: np.random.Generator) -> None:
    block = rng.permutation(120).reshape(10, 12).astype(dtype)
    elements = block.copy()
    elements[[2, 7], [3, 5]] = elements[[7, 2], [5, 3]]
    negative = block.copy()
    negative[4, 6] *= -1
    changed = [
        block[[0, 1, 3, 2, *range(4, 10)]],
        block[:, [1, 0, *range(2, 12)]],
        elements,
        np.roll(block, 1, axis=0),
        np.roll(block, 1, axis=1),
        np.roll(block.ravel(), 1).reshape(block.shape),
        block[::-1, ::-1],
        negative,
    ]
    hashes = {content_hash(np.ascontiguousarray(other)) for other in [block, *changed]}
    assert len(hashes) == 1 + len(changed)


def test_the_digest_of_a_panel_does_not_depend_on_the_order_of_reading() -> None:
    parts = [((0, 2, 0, 4), 2**64 - 1), ((2, 4, 0, 4), 7)]
    one, other = panel_content("A", (0, 4, 0, 4), parts), panel_content("A", (0, 4, 0, 4), parts[::-1])
    assert one == other
    assert one.digest != panel_content("A", (0, 4, 0, 4), [parts[0], ((2, 4, 0, 4), 8)]).digest
    assert one.digest != panel_content("A", (0, 4, 0, 4), [parts[0], ((2, 3, 0, 4), 7)]).digest


def test_chunks_are_named_as_they_are_stored(tmp_path: Path) -> None:
    array = zarr.create_array(tmp_path / "a", shape=(8, 8), chunks=(2, 4), dtype="f4")
    assert chunks_text(array, (2, 4, 0, 4)) == "chunk (1, 0)"
    assert chunks_text(array, (3, 7, 0, 5)) == "chunks (1, 0) to (3, 1)"
    sharded = zarr.create_array(tmp_path / "b", shape=(8, 8), chunks=(2, 2), shards=(4, 4), dtype="f4")
    assert chunks_text(sharded, (6, 8, 0, 4)) == "shard (1, 0)"
