"""What stands beside the whole job in its benchmark: floors from rates of the bytes that were moved."""

from __future__ import annotations

import sys
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


@pytest.mark.parametrize(("compressed", "gram"), [(False, False), (True, False), (False, True)])
def test_one_process_is_a_peer_whose_product_is_right(tmp_path: Path, compressed: bool, gram: bool) -> None:
    case = e2e.Case(50, "float32", 20, 1, None, "full", compressed=compressed, gram=gram)
    e2e.write_inputs(tmp_path / "in", case)
    assert e2e.multiply_alone(tmp_path / "in", tmp_path / "c.zarr", case, False) > 0
    a, b, c = (
        zarr.open_array(path, mode="r") for path in (*case.factors(tmp_path / "in"), tmp_path / "c.zarr")
    )
    left = a[...].T if gram else a[...]
    assert c.chunks == (20, 20)
    assert bool(c.compressors) == compressed
    np.testing.assert_allclose(c[...], left.astype(np.float64) @ b[...], rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("gram", [False, True])
def test_one_worker_stands_beside_both_peers(tmp_path: Path, gram: bool) -> None:
    case = e2e.Case(48, "int32", 16, 1, None, "small", repeats=2, peer_repeats=2, gram=gram)
    ((rows, details, _),) = e2e.run_e2e([case], tmp_path, gpu=False)
    assert [(row.contestant, row.peer, row.samples) for row in rows] == [
        ("tilewright", False, 2),
        ("dask.array + NumPy", True, 2),
        ("one process, NumPy", True, 2),
    ]
    assert details["peer_memory_nbytes"] > 0
    assert not list(tmp_path.iterdir())


def test_one_process_multiplies_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NumPy for CuPy: A has left the pinned memory before B takes it, and the pool is given back."""
    freed: list[bool] = []

    class Got(np.ndarray):
        def get(self, out: np.ndarray) -> np.ndarray:
            out[...] = self
            return out

    cupy = SimpleNamespace(
        asarray=lambda source, *, blocking: np.array(source) if blocking else source,
        matmul=lambda a, b: (a @ b).view(Got),
        get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=lambda: freed.append(True)),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupyx", SimpleNamespace(empty_pinned=np.empty))
    case = e2e.Case(30, "float64", 20, 1, None, "full")
    e2e.write_inputs(tmp_path / "in", case)
    e2e.multiply_alone(tmp_path / "in", tmp_path / "c.zarr", case, True)
    a, b, c = (zarr.open_array(tmp_path / name, mode="r") for name in ("in/a.zarr", "in/b.zarr", "c.zarr"))
    np.testing.assert_allclose(c[...], np.asarray(a[...]) @ np.asarray(b[...]))
    assert freed == [True]
