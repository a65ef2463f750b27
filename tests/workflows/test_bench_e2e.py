"""What stands beside the whole job in its benchmark: floors from rates of the bytes that were moved."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zarr

from tilewright.workflows.bench import e2e


@pytest.mark.parametrize("block", [64, 1000, 2**20])
@pytest.mark.parametrize("written", [0.0, 0.5])
def test_the_floor_of_storage_counts_the_bytes_that_were_moved(
    block: int, written: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on by a second whenever it is asked."""
    seconds = count()
    monkeypatch.setattr(e2e, "STORAGE_BLOCK_NBYTES", block)
    monkeypatch.setattr(e2e, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))
    array = zarr.create_array(
        tmp_path / "a.zarr", shape=(50, 30), chunks=(20, 10), dtype="f4", compressors=None
    )
    array[...] = 1
    stored = 3 * 3 * 20 * 10 * 4
    readers, writers = 7, 5
    share = -(-written * stored // writers)
    assert e2e._storage_rate(tmp_path, tmp_path, written, readers, writers) == stored + writers * share
    assert [path.name for path in tmp_path.iterdir()] == ["a.zarr"]


def test_the_floor_of_a_codec_counts_the_elements_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as many chunks, by as many cores, as it says; the clock goes on by a second whenever it is asked."""
    seconds = count()
    monkeypatch.setattr(e2e, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))
    monkeypatch.setattr(e2e, "usable_cores", lambda: 3)
    monkeypatch.setattr(e2e, "CODED_NBYTES", 2000)
    array = zarr.create_array(tmp_path / "a.zarr", shape=(15, 30), chunks=(20, 10), dtype="f4")
    array[...] = np.random.default_rng(0).standard_normal((15, 30))
    assert e2e.codec_rates(tmp_path / "a.zarr") == (3 * 3 * 800, 3 * 3 * 800)


def test_a_row_has_its_quartiles() -> None:
    row = e2e._row("case", "ours", False, 1.0, [4.0, 1.0, 2.0, 3.0, 9.0])
    assert (row.low, row.seconds, row.high, row.samples) == (2.0, 3.0, 4.0, 5)
