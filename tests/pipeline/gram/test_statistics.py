"""The streamed passes over stored matrices: every element once, whatever the chunks, codecs, pieces and workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import zarr
from distributed import Client, LocalCluster
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.gram import naive
from tilewright.kernels.passes.moments import Moments, moments_of
from tilewright.pipeline.errors import StoreError
from tilewright.pipeline.events import Event, UnitDone, WorkPlanned
from tilewright.pipeline.gram.options import SIDES, axis_of
from tilewright.pipeline.gram.statistics import Wanted, find_statistics, pieces, thin_product
from tilewright.pipeline.store.arrays import open_array


def ignore(event: Event) -> None:
    pass


def stored(path: Path, x: np.ndarray, chunks: tuple[int, int], **options: Any) -> zarr.Array:
    return open_array(naive.put(path, x, chunks, **options), ndim=2, role="X")


def assert_same(found: Moments, expected: Moments) -> None:
    np.testing.assert_array_equal(found.count, expected.count)
    np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-12)
    np.testing.assert_allclose(found.second, expected.second, rtol=1e-11)
    np.testing.assert_array_equal(found.least, expected.least)
    np.testing.assert_array_equal(found.most, expected.most)
    assert found.exact_sums == expected.exact_sums


@settings(max_examples=8)
@given(data=st.data())
def test_every_element_is_looked_at_once(
    client: Client, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = draw(st.integers(1, 50)), draw(st.integers(1, 50))
    x = rng.integers(0, 9, shape).astype(draw(st.sampled_from(["i1", "f4", "i8"])))
    chunks = draw(st.integers(8, 60)), draw(st.integers(8, 60))
    codec = draw(st.sampled_from([None, "auto"]))
    array = stored(tmp_path_factory.mktemp("x") / "x.zarr", x, chunks, compressors=codec)
    sides = draw(st.sampled_from([("columns",), ("rows",), SIDES]))
    missing = draw(st.sampled_from([None, 4]))
    weighted = draw(st.sampled_from([None, *sides]))
    weights = rng.random(shape[1 - axis_of(weighted)]) if weighted else None
    wanted = Wanted(sides, missing, weighted, weights)
    told: list[Event] = []
    with dask.config.set({"tilewright.piece-nbytes": draw(st.sampled_from([1500, 2**20]))}):
        found = find_statistics(client, array, wanted, told.append)
        (planned,) = (event for event in told if isinstance(event, WorkPlanned))
        assert planned.nbytes == x.nbytes
        assert sum(event.nbytes for event in told if isinstance(event, UnitDone)) == x.nbytes
        vector = rng.random(shape[1 - axis_of(sides[0])])
        lines = x if sides[0] == "rows" else x.T
        np.testing.assert_allclose(
            thin_product(client, array, sides[0], vector, ignore), lines @ vector, rtol=1e-12
        )
    assert set(found) == set(sides)
    for side in sides:
        own = weights if side == weighted else None
        assert_same(found[side], moments_of(x, 1 - axis_of(side), missing, own))


@pytest.mark.parametrize("codec", [None, "auto"])
def test_pieces_are_whole_chunks_where_parts_cannot_be_read(tmp_path: Path, codec: str | None) -> None:
    array = stored(tmp_path / "x.zarr", np.zeros((70, 90), "f4"), (30, 20), compressors=codec)
    with dask.config.set({"tilewright.piece-nbytes": 1300}):
        for sides in (("columns",), ("rows",), SIDES):
            found = list(pieces(array, sides))
            seen = np.zeros(array.shape, int)
            for rows, columns in found:
                seen[rows, columns] += 1
                if codec is not None:
                    assert rows.start % 30 == 0
                    assert columns.start % 20 == 0
                else:
                    assert (rows.stop - rows.start) * (columns.stop - columns.start) * 4 <= 1300
            assert (seen == 1).all()


def test_bits_do_not_depend_on_the_number_of_workers(tmp_path: Path, rng: np.random.Generator) -> None:
    x = rng.standard_normal((200, 30)).astype("f4")
    array = stored(tmp_path / "x.zarr", x, (16, 8))
    results = []
    with dask.config.set({"tilewright.piece-nbytes": 2000}):
        for workers in (1, 3):
            options = {"n_workers": workers, "processes": False, "dashboard_address": ":0"}
            with LocalCluster(**options) as cluster, Client(cluster) as client:
                found = find_statistics(client, array, Wanted(SIDES), ignore)
                thin = thin_product(client, array, "columns", np.sqrt(np.arange(200.0)), ignore)
            results.append(
                [found[side].mean for side in SIDES] + [found[side].second for side in SIDES] + [thin]
            )
    for one, other in zip(*results, strict=True):
        assert one.tobytes() == other.tobytes()


def test_a_damaged_chunk_is_told(client: Client, tmp_path: Path) -> None:
    array = stored(tmp_path / "x.zarr", np.ones((8, 8)), (4, 4))
    (tmp_path / "x.zarr" / "c" / "1" / "0").write_bytes(b"damaged")
    with pytest.raises(StoreError, match=r"x\.zarr"):
        find_statistics(client, array, Wanted(SIDES), ignore)
