"""The whole job: Zarr in, Zarr out, against NumPy; and what happens when it is stopped, fails, or is lied to."""

from __future__ import annotations

import asyncio
import builtins
import errno
import fcntl
import functools
import io
import itertools
import json
import logging
import os
import re
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import dask.array
import numpy as np
import pytest
import zarr
from distributed import Client, LocalCluster
from distributed.scheduler import KilledWorker
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.zip import ZipFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import Delta, Zstd
from zarr.codecs import Crc32cCodec
from zarr.storage import FsspecStore, LoggingStore, MemoryStore, ZipStore

import tilewright as tw
from tests.kernels import naive
from tests.pipeline.store.stored_arrays import CODECS, encoded
from tilewright.pipeline.check import verify as check
from tilewright.pipeline.cluster import submit
from tilewright.pipeline.errors import (
    ClusterError,
    CorpusError,
    DamagedError,
    DTypeError,
    OptionError,
    OutputError,
    OutputExistsError,
    PlanError,
    RunEndedError,
    ShapeError,
    StoreError,
    TaskError,
    VerificationError,
)
from tilewright.pipeline.events import Caution, Event, Notice, Span, UnitDone, WorkPlanned, describe
from tilewright.pipeline.plan import tiling
from tilewright.pipeline.plan.told import STAGES, THREADS, Product
from tilewright.pipeline.product import findings, job, ledger
from tilewright.pipeline.product import output as outputs
from tilewright.pipeline.product.request import Request
from tilewright.pipeline.store import region_read, region_write
from tilewright.pipeline.transfer import checksum
from tilewright.pipeline.worker import engines, stream, tasks, units, write_stage
from tilewright.pipeline.worker.survey import survey
from tilewright.pipeline.worker.units import HostUnit, Loading

DTYPES = ["i1", "i4", "i8", "u2", "u8", "f2", "f4", "f8", "c8", "c16"]


def numbers(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    kind = np.dtype(dtype)
    if kind.kind in "iu":
        return rng.integers(np.iinfo(kind).min, np.iinfo(kind).max, shape, dtype=kind, endpoint=True)
    values = rng.standard_normal(shape)
    return (values + 1j * rng.standard_normal(shape) if kind.kind == "c" else values).astype(kind)


def put(path: Path, data: np.ndarray, chunks: tuple[int, ...] = (16, 16), **options: Any) -> Path:
    array = zarr.create_array(path, shape=data.shape, chunks=chunks, dtype=data.dtype, **options)
    array[...] = data
    return path


def assert_product(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    assert c.dtype == naive.stored_dtype(a.dtype, b.dtype, a.shape[1])
    if c.dtype.kind in "iu":
        np.testing.assert_array_equal(c, np.matmul(a.astype(c.dtype), b.astype(c.dtype)))
        return
    wide = np.complex128 if c.dtype.kind == "c" else np.float64
    exact = np.matmul(a.astype(wide), b.astype(wide))
    scale = np.matmul(np.abs(a.astype(wide)), np.abs(b.astype(wide)))
    k = a.shape[1]
    bound = (k + 2) * np.finfo(np.float32 if c.dtype == np.float16 else c.dtype).eps * scale
    if c.dtype == np.float16:
        bound = bound + np.finfo(np.float16).eps * np.abs(exact) + 1e-7
    assert (np.abs(c - exact) <= bound).all()


def stored_somehow(draw: Callable[..., Any], path: Path, data: np.ndarray, most: int) -> zarr.Array[Any]:
    """An array of either format, with any codecs, order of elements and of bytes, with or without shards; no piece of
    it has more than ``most`` rows or columns."""
    codecs = draw(st.sampled_from(sorted(CODECS)), label="codecs")
    sharded = draw(st.booleans(), label="sharded") if codecs.startswith("3") else False
    chunks = [draw(st.integers(1, most // 2 if sharded else most)) for _ in range(2)]
    shards = tuple(draw(st.integers(1, most // side)) * side for side in chunks) if sharded else None
    big, by_columns = draw(st.booleans(), label="big-endian"), draw(st.booleans(), label="by columns")
    return encoded(path, codecs, data, (chunks[0], chunks[1]), big=big, by_columns=by_columns, shards=shards)


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3")
@settings(max_examples=6)
@given(data=st.data())
def test_the_stored_product_is_numpys(
    client: Client, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    draw = data.draw
    m, n, k = (draw(st.integers(1, 60), label=name) for name in "mnk")
    a_dtype, b_dtype = draw(
        st.sampled_from(
            [(d, d) for d in DTYPES] + [("i2", "i8"), ("u1", "i1"), ("u4", "u1"), ("u1", "f4"), ("f4", "c16")]
        )
    )
    transposed = draw(st.booleans()), draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    folder = tmp_path_factory.mktemp("product")
    factors = []
    for name, shape, dtype, transpose in zip(
        "ab", ((m, k), (k, n)), (a_dtype, b_dtype), transposed, strict=True
    ):
        values = numbers(rng, shape[::-1] if transpose else shape, dtype)
        array = stored_somehow(draw, folder / name, values, 25)
        files = [
            path for path in sorted((folder / name).rglob("*")) if path.name[0].isdigit() and path.is_file()
        ]
        for lost in draw(st.sets(st.sampled_from(files), max_size=2)) if files else ():
            lost.unlink()  # reads as the fill value, 7
        values = np.asarray(array[...]).astype(dtype)
        factors.append(values.T if transpose else values)
    a, b = factors
    # Pieces of our own, so that small data still makes many tiles.
    before = np.full((m, n), 7, naive.stored_dtype(a.dtype, b.dtype, k))
    out = stored_somehow(draw, folder / "c", before, 30)
    with np.errstate(over="ignore"):
        run = tw.matmul(
            folder / "a", folder / "b", out, transpose_a=transposed[0], transpose_b=transposed[1], cluster=client,
            device="cpu", device_memory=draw(st.sampled_from([24_000, 40_000, 10**7])),
        )  # fmt: skip
        assert_product(np.asarray(out[...]).astype(before.dtype), a, b)
    assert run.verification is not None
    assert run.verification.passed


@pytest.mark.sample(2)
@pytest.mark.parametrize("a_dtype", ["i1", "u1", "i2", "u2", "i4", "u4"])
@pytest.mark.parametrize("b_dtype", ["i1", "u1", "u2", "i4"])
def test_sums_of_small_integers_do_not_wrap(
    a_dtype: str, b_dtype: str, client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Extremes included: of 32 bits by others, sums of a few products fit into 64 bits."""
    k = 1 if {"i4", "u4"} & {a_dtype, b_dtype} else 2000
    a, b = numbers(rng, (9, k), a_dtype), numbers(rng, (k, 8), b_dtype)
    for row, value in enumerate((np.iinfo(a_dtype).min, np.iinfo(a_dtype).max)):
        a[row] = value
    for column, value in enumerate((np.iinfo(b_dtype).min, np.iinfo(b_dtype).max)):
        b[:, column] = value
    run = tw.matmul(
        put(tmp_path / "a", a), put(tmp_path / "b", b), tmp_path / "c", cluster=client, device="cpu"
    )
    found = zarr.open_array(tmp_path / "c")[...]
    assert (found.astype(object) == a.astype(object) @ b.astype(object)).all()
    assert found.dtype == run.plan.c_dtype == naive.stored_dtype(a_dtype, b_dtype, k)
    assert run.verification is not None
    assert run.verification.passed
    assert run.verification.modulus_bits == 8 * found.dtype.itemsize


def test_the_default_dtype_follows_from_dtypes_and_k_alone(client: Client, tmp_path: Path) -> None:
    zeros = put(tmp_path / "zeros", np.zeros((3, 131072), "i1"), (3, 4096))
    short = put(tmp_path / "short", np.zeros((3, 131071), "i1"), (3, 4096))
    for path, expected in ((zeros, "int64"), (short, "int32")):
        options: dict[str, Any] = {"transpose_b": True, "device": "cpu"}
        assert tw.plan_matmul(path, path, **options).c_dtype == expected
        planned = job.plan_only(Request(path, path, tmp_path / "c", cluster=client, **options))
        assert planned.c_dtype == expected
        tw.matmul(path, path, tmp_path / "c", cluster=client, overwrite=True, **options)
        assert zarr.open_array(tmp_path / "c").dtype == expected


def test_numpys_dtype_is_had_by_asking_for_it(client: Client, tmp_path: Path) -> None:
    a = np.full((4, 100), 100, "i1")
    path = put(tmp_path / "a", a)
    run = tw.matmul(path, path, tmp_path / "c", transpose_b=True, dtype="int8", cluster=client, device="cpu")
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "c")[...], a @ a.T)
    assert "C is int8, as asked for: 100 products of int8 by int8 could reach 1638400" in str(run)
    given = zarr.create_array(tmp_path / "given", shape=(4, 4), chunks=(4, 4), dtype="i1")
    with pytest.raises(OutputError, match=r"holds int8; the result is int32.*or pass dtype='int8'"):
        tw.matmul(path, path, given, transpose_b=True, cluster=client, device="cpu")
    tw.matmul(path, path, given, transpose_b=True, dtype="int8", cluster=client, device="cpu")
    np.testing.assert_array_equal(given[...], a @ a.T)


def test_factors_reach_the_kernel_as_they_are_stored(
    client: Client, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Widened to C's dtype before, int8 would take four times the memory, and no tensor core."""
    seen = set()
    original = units.matmul

    def recording(a: Any, b: Any, *, out: Any, **options: Any) -> Any:
        seen.add((a.dtype.name, b.dtype.name, out.dtype.name))
        return original(a, b, out=out, **options)

    monkeypatch.setattr(units, "matmul", recording)
    for a_dtype, b_dtype, expected in (("i1", "i1", "int32"), ("u1", "i2", "int32"), ("i2", "i2", "int64")):
        seen.clear()
        a, b = numbers(rng, (40, 60), a_dtype), numbers(rng, (60, 30), b_dtype)
        paths = put(tmp_path / f"a{a_dtype}{b_dtype}", a), put(tmp_path / f"b{a_dtype}{b_dtype}", b)
        tw.matmul(*paths, tmp_path / "c", overwrite=True, cluster=client, device="cpu")
        assert seen == {(a.dtype.name, b.dtype.name, expected)}


@pytest.mark.parametrize(("m", "k", "n"), [(4, 0, 5), (0, 3, 4), (4, 3, 0), (0, 0, 0), (1, 1, 1)])
def test_empty_sides(m: int, k: int, n: int, client: Client, tmp_path: Path) -> None:
    a, b = np.ones((m, k), "f4"), np.ones((k, n), "f4")
    run = tw.matmul(
        put(tmp_path / "a", a), put(tmp_path / "b", b), tmp_path / "c", cluster=client, device="cpu"
    )
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "c")[...], a @ b)
    assert run.verification is not None
    assert run.verification.passed


@pytest.fixture
def factors(tmp_path: Path, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, Path, Path]:
    a, b = numbers(rng, (96, 80), "f4"), numbers(rng, (80, 64), "f4")
    return a, b, put(tmp_path / "a.zarr", a), put(tmp_path / "b.zarr", b)


def many_tiles(folder: Path) -> zarr.Array[Any]:
    return zarr.create_array(
        folder / "given.zarr", shape=(96, 64), chunks=(16, 16), dtype="f4", fill_value=99
    )


TIGHT = 8_000
"""Device memory that cuts the 96 × 64 product into many tiles of a few panels each."""


def order_by_sides(
    a: np.ndarray,
    b: np.ndarray,
    out: np.ndarray,
    *,
    accumulate: bool,
    transpose_a: bool,
    transpose_b: bool,
    **_: Any,
) -> None:
    """Products whose sums have an order of their own for any sides that are given, as BLAS's may have."""
    a, b = a.T if transpose_a else a, b.T if transpose_b else b
    if not accumulate:
        out[...] = 0
    for step in np.random.default_rng([*out.shape, len(b)]).permutation(len(b)):
        out += np.outer(a[:, step], b[step])


def test_tiles_panels_and_workers_do_not_change_a_bit(
    tmp_path: Path, rng: np.random.Generator, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same tiles for any number of workers; with others for some; with others for each of 1, 2 and 4."""
    products = []
    for (m, k, n), chunk, memory, grids, least in [
        ((96, 80, 64), 16, TIGHT, 1, 4),
        ((192, 96, 160), 8, 32_000, 2, 6),
        ((96, 80, 64), 16, 60_000, 3, 1),
    ]:
        a, b = (numbers(rng, shape, "f4") for shape in ((m, k), (k, n)))
        paths = [
            put(tmp_path / f"{name}{grids}", data, (chunk, chunk)) for name, data in (("a", a), ("b", b))
        ]
        plans = [
            tw.plan_matmul(*paths, device="cpu", device_memory=memory, workers=workers)
            for workers in (1, 2, 4)
        ]
        assert len({plan.grid for plan in plans}) >= grids
        assert min(plan.tile_count for plan in plans) >= least
        assert min(plan.panel_count for plan in plans) > 1
        cells = {(plan.cell_rows, plan.cell_columns) for plan in plans}
        assert len(cells) == 1
        if grids > 1:
            assert (plans[0].tile_rows, plans[0].tile_columns) not in cells
        products.append((grids, a, b, paths, memory))
    kernels = units.matmul, order_by_sides
    results: dict[tuple[int, int], set[bytes]] = {}
    for workers in (1, 2, 3, 4):
        with (
            LocalCluster(n_workers=workers, processes=False, dashboard_address=":0") as cluster,
            Client(cluster) as own,
        ):
            for (grids, a, b, paths, memory), (which, kernel) in itertools.product(
                products, enumerate(kernels)
            ):
                monkeypatch.setattr(units, "matmul", kernel)
                out = tmp_path / f"c{workers}{grids}{which}"
                run = tw.matmul(*paths, out, cluster=own, device="cpu", device_memory=memory, verify=False)
                assert run.plan.workers == workers
                c = zarr.open_array(out)[...]
                assert_product(c, a, b)
                results.setdefault((grids, which), set()).add(c.tobytes())
    assert {case: len(found) for case, found in results.items()} == dict.fromkeys(results, 1)


@pytest.mark.parametrize("kernel", [units.matmul, order_by_sides], ids=["BLAS", "order by sides"])
def test_memory_that_gives_the_same_panels_does_not_change_a_bit(
    kernel: Callable[..., Any],
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the same cells, where tiles are made of them: then other tiles do not matter."""
    monkeypatch.setattr(units, "matmul", kernel)
    a, b, *paths = factors
    alike: dict[tuple[int, ...], dict[tuple[int, int], int]] = {}
    for memory in (12_000, 16_000, 24_000, 32_000, 60_000):
        plan = tw.plan_matmul(*paths, device="cpu", device_memory=memory)
        same = plan.panel_depth, plan.k_parts, plan.cell_rows, plan.cell_columns
        alike.setdefault(same, {})[plan.grid] = memory
    memories = max(alike.values(), key=len)
    assert len(memories) >= 2, "the memory should change the tiles, and nothing else"
    results = set()
    for grid, memory in memories.items():
        run = tw.matmul(*paths, tmp_path / f"c{memory}", cluster=client, device="cpu", device_memory=memory)
        assert run.plan.grid == grid
        c = zarr.open_array(tmp_path / f"c{memory}")[...]
        assert_product(c, a, b)
        results.add(c.tobytes())
    assert len(results) == 1


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("given", "options"),
    [
        (False, {"compressors": None}),
        (False, {"compressors": zarr.codecs.ZstdCodec()}),
        (True, {"compressors": None}),
        (True, {"shards": (32, 32)}),
        (True, {"shards": (32, 32), "compressors": None}),
        (True, {"zarr_format": 2, "compressors": Zstd(), "order": "F"}),
        (True, {"zarr_format": 2, "compressors": Zstd(), "filters": [Delta(dtype="f4")]}),
    ],
    ids=["plain", "compressed", "given", "sharded", "plain shards", "by columns", "filtered"],
)
def test_every_stored_piece_is_written_once(
    given: bool,
    options: dict[str, Any],
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted as files that get the name of a stored piece, whoever writes them, and as files opened to be written."""
    a, b, a_path, b_path = factors
    out, a_path = tmp_path / "c", put(tmp_path / "coded", a, **{} if given else options)
    target = zarr.create_array(out, shape=(96, 64), chunks=(16, 16), dtype="f4", **options) if given else out
    named: list[Path] = []
    opened: list[Path] = []
    replace_file, open_file = os.replace, io.open

    def naming(source: Any, name: Any, **how: Any) -> None:
        replace_file(source, name, **how)
        named.append(Path(name))

    def opening(file: Any, mode: str = "r", *how: Any, **more: Any) -> Any:
        if isinstance(file, str | os.PathLike) and set(mode) & set("wax+"):
            opened.append(Path(file))
        return open_file(file, mode, *how, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", naming)
        patch.setattr(io, "open", opening)  # pathlib's
        patch.setattr(builtins, "open", opening)
        run = tw.matmul(a_path, b_path, target, cluster=client, device="cpu", device_memory=24_000)
    assert run.plan.tile_count > 1
    unit = run.plan.c_unit
    assert unit == ((32, 32) if "shards" in options else (16, 16))
    growing = out if given else outputs.partial_path(out)
    stored = {path.relative_to(out) for path in out.rglob("*") if path.is_file() and path.name[0].isdigit()}
    assert len(stored) == (96 // unit[0]) * (64 // unit[1])
    kept = {growing / path for path in stored}
    assert sorted(path for path in named if path in kept) == sorted(kept)
    drafts = [path for path in opened if path.is_relative_to(growing) and path.name[0].isdigit()]
    assert len(drafts) == len(set(drafts)) == len(kept)
    assert not set(drafts) & kept
    assert_product(zarr.open_array(out)[...], a, b)


def test_each_shard_of_an_open_array_has_one_writer_that_writes_it_whole(
    factors: tuple[np.ndarray, np.ndarray, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that write chunks of one shard each write all of it, and the later puts back what the earlier replaced."""
    a, b, a_path, b_path = factors
    out = zarr.create_array(
        tmp_path / "given.zarr", shape=(96, 64), chunks=(8, 8), shards=(16, 24), dtype="f4", fill_value=99
    )
    written: list[tuple[int, int, tuple[int, ...]]] = []

    def noting(top: int, left: int, data: np.ndarray) -> np.ndarray:
        written.append((top, left, data.shape))
        return data

    intercept_writes(monkeypatch, noting)
    with (
        LocalCluster(n_workers=2, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as own,
    ):
        run = tw.matmul(a_path, b_path, out, cluster=own, device="cpu", device_memory=TIGHT)
    shards = [(top, left, (16, min(24, 64 - left))) for top in range(0, 96, 16) for left in range(0, 64, 24)]
    assert sorted(written) == shards
    assert run.plan.c_unit == (16, 24)
    assert 3 < run.plan.tile_count <= len(shards)
    assert all(tile.row_start % 16 == 0 and tile.column_start % 24 == 0 for tile in run.plan.tiles())
    assert_product(out[...], a, b)


def intercept_writes(
    patch: pytest.MonkeyPatch, through: Callable[[int, int, np.ndarray], np.ndarray]
) -> None:
    """Let every stored piece of C pass ``through(first row, first column, data)`` on its way to the store."""
    original = region_write.region_writes

    def intercepted(array: Any, region: Any, drafts: Any = None) -> list[region_write.RegionWrite]:
        def wrap(piece: region_write.RegionWrite) -> region_write.RegionWrite:
            top, left = (whole.start + part.start for whole, part in zip(region, piece.source, strict=True))

            def write(bands: region_write.Bands, fill: region_write.FillFile | None) -> Any:
                return piece.write([through(top, left, np.concatenate([band.copy() for band in bands]))])

            return region_write.RegionWrite(piece.source, write)

        return [wrap(piece) for piece in original(array, region, drafts)]

    for module in (write_stage, engines):
        patch.setattr(module, "region_writes", intercepted)


class Stopped(KeyboardInterrupt):
    """Ctrl-C, from a listener, at a tile of our choosing."""


def stop_after(count: int) -> Any:
    seen = iter(range(1, 10**6))

    def listener(event: Event) -> None:
        if isinstance(event, UnitDone) and event.name == "matmul" and next(seen) == count:
            raise Stopped

    return listener


def stop_at(count: int, a: Path, b: Path, out: Path, **options: Any) -> None:
    """A run that ends by Ctrl-C as this many tiles are stored."""
    with pytest.raises(Stopped):
        tw.matmul(a, b, out, listener=stop_after(count), **options)


def test_a_stopped_run_goes_on_where_it_stood(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    events: list[Event],
) -> None:
    a, b, a_path, b_path = factors
    out = tmp_path / "c.zarr"
    stop_at(3, a_path, b_path, out, cluster=client, device="cpu", device_memory=TIGHT)
    assert not out.exists()
    assert outputs.partial_path(out).exists()
    run = tw.matmul(
        a_path, b_path, out, cluster=client, device="cpu", device_memory=TIGHT, listener=events.append
    )
    assert run.resumed == 3
    computed = [event for event in events if isinstance(event, UnitDone) and event.name == "matmul"]
    assert len(computed) == run.plan.tile_count - 3
    planned = next(event for event in events if isinstance(event, WorkPlanned))
    assert (planned.done, planned.total) == (3, run.plan.tile_count)
    assert_product(zarr.open_array(out)[...], a, b)
    assert not outputs.partial_path(out).exists()
    assert not list(out.rglob(ledger.FILE_NAME)), "the record has no business in the finished product"


def test_c_gets_the_names_of_dimensions_and_keeps_them_when_a_run_goes_on(
    client: Client, tmp_path: Path, small_chunks: None, rng: np.random.Generator
) -> None:
    """Without them xarray opens no group that C is in."""
    group = zarr.create_group(tmp_path / "g.zarr")
    old = zarr.create_group(tmp_path / "old.zarr", zarr_format=2)
    a, b, out = tmp_path / "g.zarr" / "a", tmp_path / "old.zarr" / "b", tmp_path / "g.zarr" / "c"
    options: dict[str, Any] = {"shape": (96, 96), "chunks": (16, 16), "dtype": "f4"}
    group.create_array("a", dimension_names=("x", "y"), **options)[...] = numbers(rng, (96, 96), "f4")
    old.create_array("b", attributes={"_ARRAY_DIMENSIONS": ["z", "y"]}, **options)[...] = 1
    more: dict[str, Any] = {"cluster": client, "device": "cpu", "device_memory": TIGHT, "transpose_b": True}
    stop_at(3, a, b, out, **more)
    assert tw.matmul(a, b, out, **more).resumed == 3
    for name, array in group.arrays():
        assert array.metadata.dimension_names == {"a": ("x", "y"), "c": ("x", "z")}[name]
    tw.matmul(a, a, out, overwrite=True, **more)
    assert zarr.open_array(out).metadata.dimension_names == ("x", "x_2")


def test_a_disk_with_less_room_than_c_may_take_is_told_of_before_the_first_tile(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    small_chunks: None,
    events: list[Event],
) -> None:
    """Of a run that goes on, what is left to write counts."""
    _, _, a, b = factors
    out = tmp_path / "c.zarr"
    more: dict[str, Any] = {"cluster": client, "device": "cpu", "device_memory": TIGHT}
    free = 96 * 64 * 4  # bytes, which all of C just fits into
    monkeypatch.setattr(findings.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))

    def told() -> list[tuple[int, str]]:
        return [
            (place, event.message)
            for place, event in enumerate(events)
            if isinstance(event, Notice) and "are free" in event.message
        ]

    tw.matmul(a, b, out, listener=events.append, **more)
    assert not told()
    events.clear()
    free -= 1
    tw.matmul(a, b, out, overwrite=True, listener=events.append, **more)
    ((place, message),) = told()
    assert place < next(i for i, event in enumerate(events) if isinstance(event, WorkPlanned))
    assert f"24 KiB are free on the disk of {out}.partial, and C takes 24 KiB more" in message
    stop_at(3, a, b, out, overwrite=True, **more)
    events.clear()
    assert tw.matmul(a, b, out, overwrite=True, listener=events.append, **more).resumed == 3
    assert not told()


def test_an_output_in_a_group_of_format_2_is_told_of(
    client: Client, tmp_path: Path, events: list[Event]
) -> None:
    a = put(tmp_path / "a", np.ones((3, 3)))
    zarr.create_group(tmp_path / "g", zarr_format=2)
    tw.matmul(a, a, tmp_path / "g" / "c", cluster=client, device="cpu", listener=events.append)
    assert any("group of Zarr format 2" in event.message for event in events if isinstance(event, Notice))


@pytest.mark.parametrize("verify", [True, False])
def test_where_an_earlier_run_finished_every_tile_no_rest_is_spoken_of(
    verify: bool,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    events: list[Event],
) -> None:
    _, _, a, b = factors
    more: dict[str, Any] = {"cluster": client, "device": "cpu", "verify": verify}
    stop_at(1, a, b, tmp_path / "c", **more)
    assert tw.matmul(a, b, tmp_path / "c", listener=events.append, **more).resumed == 1
    left = "only the check is left" if verify else "none is left to compute"
    assert Notice(f"an earlier run finished 1 of 1 tile; {left}") in events


@pytest.mark.parametrize("protocol", ["file", "local"])
def test_a_url_of_a_local_path_is_that_path(
    protocol: str, factors: tuple[np.ndarray, np.ndarray, Path, Path], client: Client, tmp_path: Path
) -> None:
    """Its folders are made, and what is read at it may be such a URL too."""
    a, b, a_path, b_path = factors
    left, right, out = (f"{protocol}://{path}" for path in (a_path, b_path, tmp_path / "new" / "c.zarr"))
    tw.matmul(left, right, out, cluster=client, device="cpu")
    assert_product(zarr.open_array(tmp_path / "new" / "c.zarr")[...], a, b)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["c.zarr"]


def test_a_growing_array_of_another_dtype_is_not_gone_on_with(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    events: list[Event],
) -> None:
    a, b, a_path, b_path = factors
    out = tmp_path / "c.zarr"
    stop_at(3, a_path, b_path, out, cluster=client, device="cpu", device_memory=TIGHT)
    metadata = outputs.partial_path(out) / "zarr.json"
    metadata.write_text(metadata.read_text().replace('"float32"', '"float64"'))
    run = tw.matmul(
        a_path, b_path, out, cluster=client, device="cpu", device_memory=TIGHT, listener=events.append
    )
    assert run.resumed == 0
    assert_product(zarr.open_array(out)[...], a, b)
    assert any("no more what it was; it starts anew" in e.message for e in events if isinstance(e, Notice))


@pytest.mark.sample(2)
@pytest.mark.parametrize("what", ["record", "metadata", "chunk"])
def test_one_failed_read_loses_no_finished_tile(
    what: str,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    monkeypatch: pytest.MonkeyPatch,
    events: list[Event],
) -> None:
    a, b, a_path, b_path = factors
    out = tmp_path / "c.zarr"
    growing = outputs.partial_path(out)
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "device_memory": TIGHT}
    stop_at(3, a_path, b_path, out, **options)
    real = {
        "read_bytes": Path.read_bytes,
        "open_array": zarr.open_array,
        "open_file": checksum.open_file,
    }

    def failing(name: str, path: Any, *arguments: Any, **more: Any) -> Any:
        if str(path).startswith(str(growing)):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real[name](path, *arguments, **more)

    with monkeypatch.context() as patch:
        owner, name = {
            "record": (Path, "read_bytes"),
            "metadata": (zarr, "open_array"),
            "chunk": (checksum, "open_file"),
        }[what]
        patch.setattr(owner, name, lambda *arguments, **more: failing(name, *arguments, **more))
        with pytest.raises(StoreError, match=r"c\.zarr\.partial.*Stale file handle; .*--no-resume"):
            tw.matmul(a_path, b_path, out, **options)
        if what == "record":
            job.plan_only(Request(a_path, b_path, out, listener=events.append, **options))
            assert any("this would be refused: output: cannot read" in str(event) for event in events)
    assert tw.matmul(a_path, b_path, out, **options).resumed == 3
    assert_product(zarr.open_array(out)[...], a, b)


def test_a_record_of_tiles_that_the_plan_does_not_have_is_not_gone_on_with(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    events: list[Event],
) -> None:
    a, b, a_path, b_path = factors
    out = tmp_path / "c.zarr"
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "device_memory": TIGHT}
    stop_at(3, a_path, b_path, out, **options)
    tile_count = tw.plan_matmul(a_path, b_path, device="cpu", device_memory=TIGHT).tile_count
    with (outputs.partial_path(out) / ledger.FILE_NAME).open("a") as record:
        record.write(ledger.sealed({"tile": tile_count, "objects": []}) + "\n")
    run = tw.matmul(a_path, b_path, out, listener=events.append, **options)
    assert (run.resumed, run.plan.tile_count) == (0, tile_count)
    assert any("it starts anew" in event.message for event in events if isinstance(event, Notice))
    assert_product(zarr.open_array(out)[...], a, b)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("damage", "compressed", "verify"),
    [  # every pair of any two
        (damage, compressed, bool(place % 2) == compressed)
        for place, damage in enumerate(["gone", "short", "empty", "half"])
        for compressed in (False, True)
    ],
)
def test_a_finished_tile_whose_chunk_is_lost_is_computed_again(
    damage: str,
    compressed: bool,
    verify: bool,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    events: list[Event],
) -> None:
    """Read as it is it would be zeros, which only a verification notices, or keep every later run from its end."""
    a, b, a_path, b_path = factors
    compressors = zarr.codecs.ZstdCodec() if compressed else None  # as A is, so is C
    zarr.create_array(
        a_path, shape=a.shape, chunks=(16, 16), dtype=a.dtype, compressors=compressors, overwrite=True
    )[...] = a
    out = tmp_path / "c.zarr"
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "device_memory": TIGHT, "verify": False}
    stop_at(3, a_path, b_path, out, **options)
    chunk = next(path for path in sorted((outputs.partial_path(out) / "c").rglob("*")) if path.is_file())
    data = chunk.read_bytes()
    if damage == "gone":
        chunk.unlink()
    else:
        chunk.write_bytes(data[: {"short": -1, "empty": 0, "half": len(data) // 2}[damage]])
    run = tw.matmul(a_path, b_path, out, listener=events.append, **options | {"verify": verify})
    assert run.resumed == 2
    assert any(isinstance(event, Notice) and "1 tile of an earlier run" in event.message for event in events)
    assert_product(zarr.open_array(out)[...], a, b)


def test_a_changed_bit_of_a_finished_tile_that_no_check_would_notice_is_put_right(
    factors: tuple[np.ndarray, np.ndarray, Path, Path], client: Client, tmp_path: Path, small_chunks: None
) -> None:
    """The least one of a float: an error far below what rounding may add up to."""
    *_, a_path, b_path = factors
    out = tmp_path / "c.zarr"
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "device_memory": TIGHT}
    stop_at(3, a_path, b_path, out, **options)
    chunk = next(path for path in sorted((outputs.partial_path(out) / "c").rglob("*")) if path.is_file())
    data = chunk.read_bytes()
    chunk.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    run = tw.matmul(a_path, b_path, out, **options)
    assert run.resumed == 2
    assert (out / chunk.relative_to(outputs.partial_path(out))).read_bytes() == data
    assert tw.audit(out).passed


@pytest.mark.parametrize("vectors", ["along", "sent"])
def test_finished_tiles_that_cannot_be_read_are_computed_again(
    vectors: str,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    monkeypatch: pytest.MonkeyPatch,
    events: list[Event],
) -> None:
    """They are damaged behind the look that a run has at what it keeps."""
    if vectors == "sent":
        monkeypatch.setattr(check, "SENT_NBYTES", 0)
    a, b, a_path, b_path = factors
    a_path, out = put(tmp_path / "coded.zarr", a, compressors=zarr.codecs.ZstdCodec()), tmp_path / "c.zarr"
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "device_memory": TIGHT}
    chunks = stop_before_the_check(a_path, b_path, out, **options)

    def damage(event: Event) -> None:
        events.append(event)
        if [one.name for one in events if isinstance(one, WorkPlanned)] == ["matmul", "verify"]:
            for chunk in (chunks[0], chunks[-1]):
                chunk.write_bytes(bytes(chunk.stat().st_size))

    run = tw.matmul(a_path, b_path, out, listener=damage, **options)
    told = [event.message for event in events if isinstance(event, Notice)]
    assert any("2 of 16 tiles are bad" in text and "are computed once more" in text for text in told)
    assert run.resumed == run.plan.tile_count - 2
    tiles = list(run.plan.tiles())
    assert run.write_nbytes == sum(run.plan.tile_write_nbytes(tile) for tile in (tiles[0], tiles[-1]))
    assert_product(zarr.open_array(out)[...], a, b)


@pytest.mark.sample(2)
@pytest.mark.parametrize("vectors", ["along", "sent"])
@pytest.mark.parametrize("role", "ab")
def test_a_factor_that_the_check_cannot_read_is_named_and_the_product_goes_on(
    role: str,
    vectors: str,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B is read for what is sent along with the rest of the check, A by that."""
    if vectors == "sent":
        monkeypatch.setattr(check, "SENT_NBYTES", 0)
    a, b, a_path, b_path = factors
    out = tmp_path / "c.zarr"
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "device_memory": TIGHT}
    folder = {"a": a_path, "b": b_path}[role]
    victim = max((path for path in (folder / "c").rglob("*") if path.is_file()), key=str)
    good, times = victim.read_bytes(), victim.stat()

    def damage_before_the_check(event: Event) -> None:
        if isinstance(event, WorkPlanned) and event.name == "verify":
            victim.write_bytes(good[:-1])

    with pytest.raises(DamagedError, match=rf"chunk \(.* of .*{folder.name} cannot be read") as raised:
        tw.matmul(a_path, b_path, out, listener=damage_before_the_check, **options)
    assert raised.type is DamagedError
    victim.write_bytes(good)
    os.utime(victim, ns=(times.st_atime_ns, times.st_mtime_ns))  # a factor that was written since is another
    run = tw.matmul(a_path, b_path, out, **options)
    assert run.resumed == run.plan.tile_count
    assert_product(zarr.open_array(out)[...], a, b)


def stop_before_the_check(*factors_and_out: Path, **options: Any) -> list[Path]:
    """A run whose tiles are all finished and that is stopped then; the files of C's chunks."""

    def stop(event: Event) -> None:
        if isinstance(event, WorkPlanned) and event.name == "verify":
            raise Stopped

    with pytest.raises(Stopped):
        tw.matmul(*factors_and_out, listener=stop, **options)
    growing = outputs.partial_path(factors_and_out[-1])
    return sorted(path for path in (growing / "c").rglob("*") if path.is_file())


def test_a_chunk_that_is_restored_while_others_are_looked_for_is_told_of_by_the_error_that_it_was(
    factors: tuple[np.ndarray, np.ndarray, Path, Path], client: Client, tmp_path: Path, small_chunks: None
) -> None:
    a, b, a_path, b_path = factors
    a_path, out = put(tmp_path / "coded.zarr", a, compressors=zarr.codecs.ZstdCodec()), tmp_path / "c.zarr"
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "device_memory": TIGHT}
    chunk, *_ = stop_before_the_check(a_path, b_path, out, **options)
    data = chunk.read_bytes()

    def restore(event: Event) -> None:
        if isinstance(event, WorkPlanned) and event.name in ("verify", "audit"):
            chunk.write_bytes(bytes(len(data)) if event.name == "verify" else data)

    with pytest.raises(DamagedError, match="cannot be read") as caught:
        tw.matmul(a_path, b_path, out, listener=restore, **options)
    assert "second time" not in str(caught.value)
    assert caught.value.__cause__ is not caught.value, "who goes to the root of it would never arrive"
    run = tw.matmul(a_path, b_path, out, **options)
    assert run.resumed == run.plan.tile_count
    assert_product(zarr.open_array(out)[...], a, b)


@pytest.mark.sample(2)
@pytest.mark.parametrize("other", ["went on", "began anew", "finished"])
def test_what_counts_is_the_record_once_the_output_is_locked(
    other: str,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between reading the record and locking the output another run may have come and gone."""
    a, b, a_path, b_path = factors
    out, twice = tmp_path / "c.zarr", put(tmp_path / "twice.zarr", 2 * b)
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "device_memory": TIGHT, "verify": False}
    stop_at(3, a_path, b_path, out, **options)
    real = outputs.resume_output

    def late(path: Path, overwrite: bool) -> outputs.Output | None:
        monkeypatch.setattr(job, "resume_output", real)
        stop_at(5, a_path, b_path if other == "went on" else twice, out, **options)
        return real(path, overwrite)

    def last(path: Path, overwrite: bool) -> outputs.Output | None:
        monkeypatch.setattr(job, "resume_output", real)
        tw.matmul(a_path, b_path, out, **options)
        return real(path, overwrite)

    monkeypatch.setattr(job, "resume_output", last if other == "finished" else late)
    if other == "finished":
        with pytest.raises(OutputExistsError, match=r"c\.zarr exists; choose another path"):
            tw.matmul(a_path, b_path, out, **options)
    else:
        run = tw.matmul(a_path, b_path, out, **options)
        assert run.resumed == (8 if other == "went on" else 0)
    assert_product(zarr.open_array(out)[...], a, b)
    assert not outputs.partial_path(out).exists()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("memory", "pieces"), [(10**6, 1), (2_000, 3)], ids=["more", "less"])
def test_a_stopped_run_goes_on_with_other_memory(
    memory: int,
    pieces: int,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
) -> None:
    a, b, a_path, b_path = factors
    out = tmp_path / "c.zarr"
    stop_at(3, a_path, b_path, out, cluster=client, device="cpu", device_memory=TIGHT)
    begun = zarr.open_array(outputs.partial_path(out)).chunks
    anew = tw.matmul(a_path, b_path, tmp_path / "d.zarr", cluster=client, device="cpu", device_memory=memory)
    assert anew.plan.c_unit != begun, "a C begun with this memory has other chunks"
    run = tw.matmul(a_path, b_path, out, cluster=client, device="cpu", device_memory=memory)
    assert run.resumed == 3 * pieces
    assert zarr.open_array(out).chunks == begun
    assert all(
        tile % unit == 0 for tile, unit in zip(run.plan.geometry, zarr.open_array(out).chunks, strict=False)
    ), "no chunk has two writers"
    assert_product(zarr.open_array(out)[...], a, b)


def test_a_changed_input_starts_anew(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    events: list[Event],
) -> None:
    _, b, a_path, b_path = factors
    out = tmp_path / "c.zarr"
    stop_at(3, a_path, b_path, out, cluster=client, device="cpu", device_memory=TIGHT)
    changed = np.full((96, 80), 2, "f4")
    zarr.open_array(a_path, mode="r+")[...] = changed
    run = tw.matmul(
        a_path, b_path, out, cluster=client, device="cpu", device_memory=TIGHT, listener=events.append
    )
    assert run.resumed == 0
    told = [event.message for event in events if isinstance(event, Notice)]
    assert any("A holds other numbers in" in text and "3 of 3 finished tiles" in text for text in told)
    assert_product(zarr.open_array(out)[...], changed, b)


@pytest.mark.parametrize("transposed", ["transpose_a", "transpose_b"])
def test_a_stopped_product_is_not_gone_on_with_as_that_of_a_transpose(
    transposed: str, client: Client, tmp_path: Path, small_chunks: None, rng: np.random.Generator
) -> None:
    """Of square factors all else is the same: the files, the plan and the growing array."""
    a, b = numbers(rng, (64, 64), "f4"), numbers(rng, (64, 64), "f4")
    a_path, b_path, out = put(tmp_path / "a", a), put(tmp_path / "b", b), tmp_path / "c"
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "device_memory": TIGHT, "verify": False}
    stop_at(3, a_path, b_path, out, **options)
    run = tw.matmul(a_path, b_path, out, **options | {transposed: True})
    assert run.resumed == 0
    expected = (a.T, b) if transposed == "transpose_a" else (a, b.T)
    assert_product(zarr.open_array(out)[...], *expected)


def test_what_is_asked_for_decides_whether_a_run_goes_on(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Precision and dtype, and not the device: a CPU goes on with a GPU's tiles, whatever precision was asked for."""
    *_, a_path, b_path = factors
    (facts,) = survey(client, "cpu")[:1]
    digests: list[str] = []

    def stop(stopped: job.Job, *_: Any, **__: Any) -> Any:
        digests.append(stopped.inputs.digest)
        raise Stopped

    monkeypatch.setattr(job, "_attempt", stop)

    def digest(device: str, **options: Any) -> str:
        monkeypatch.setattr(job, "survey", lambda *_, **__: [replace(facts, device=device)])
        with pytest.raises(Stopped):
            tw.matmul(a_path, b_path, tmp_path / "c.zarr", cluster=client, **options)
        return digests.pop()

    requests: list[dict[str, Any]] = [{}, {"precision": "tf32"}, {"precision": "split"}, {"dtype": "f8"}]
    on_gpu = [digest("cuda", **request) for request in requests]
    assert on_gpu == [digest("cuda", **request) for request in requests]
    assert len({*on_gpu}) == len(requests)
    assert on_gpu == [digest("cpu", **request) for request in requests]


def zipped(path: Path, data: np.ndarray) -> str:
    """The name of an array in a ZIP file."""
    with ZipStore(path, mode="w") as file:
        zarr.create_array(file, shape=data.shape, chunks=(16, 16), dtype=data.dtype)[...] = data
    return f"zip://::{path}"


def test_tiles_of_another_archive_are_replaced(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    events: list[Event],
) -> None:
    a, b, _, b_path = factors
    first, second = zipped(tmp_path / "1.zip", a), zipped(tmp_path / "2.zip", -a)
    out = tmp_path / "c.zarr"
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "device_memory": TIGHT, "verify": False}
    with pytest.raises(Stopped):
        tw.matmul(first, b_path, out, listener=stop_after(3), **options)
    run = tw.matmul(second, b_path, out, listener=events.append, **options)
    assert run.resumed == 0
    told = [event.message for event in events if isinstance(event, Notice)]
    assert any("it lies elsewhere" in text for text in told)
    assert any("A holds other numbers in" in text for text in told)
    assert_product(zarr.open_array(out)[...], -a, b)


@pytest.mark.parametrize("kind", ["the URL of a path", "an archive"])
def test_an_input_with_a_url_that_changes_meanwhile_is_named(
    kind: str,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
) -> None:
    a, _, a_path, b_path = factors
    url = zipped(tmp_path / "a.zip", a) if kind == "an archive" else f"file://{a_path}"

    def change(event: Event) -> None:
        if isinstance(event, UnitDone) and event.name == "matmul" and event.index == 0:
            if kind == "an archive":
                zipped(tmp_path / "new.zip", -a)
                (tmp_path / "new.zip").replace(tmp_path / "a.zip")
            else:
                zarr.open_array(a_path, mode="r+")[...] = -a

    with pytest.raises(StoreError, match=r"^A, .*a\.z.*, changed while .* kept at .*c\.zarr\.partial"):
        tw.matmul(
            url,
            b_path,
            tmp_path / "c.zarr",
            listener=change,
            cluster=client,
            device="cpu",
            device_memory=TIGHT,
            verify=False,
        )


@pytest.mark.sample(2)
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("then", ["stays", "is put back"])
def test_an_input_that_changes_meanwhile_is_named_and_nothing_is_published(
    then: str,
    verify: bool,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
) -> None:
    """Tiles of the old and the new B make up a product of neither; of which a tile is, the hashes of B know."""
    a, b, a_path, b_path = factors
    out = tmp_path / "c.zarr"
    copy = partial(shutil.copytree, dirs_exist_ok=True)  # with the times of files
    copy(b_path, tmp_path / "backup")
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "device_memory": TIGHT, "verify": verify}
    done = itertools.count(1)

    def change(event: Event) -> None:
        if isinstance(event, UnitDone) and event.name == "matmul" and next(done) == 3:
            zarr.open_array(b_path, mode="r+")[...] = -b

    with pytest.raises(StoreError, match=r"^B, .*b\.zarr, changed while .* kept at .*c\.zarr\.partial"):
        tw.matmul(a_path, b_path, out, listener=change, **options)
    assert not out.exists()
    if then == "is put back":
        copy(tmp_path / "backup", b_path)
    run = tw.matmul(a_path, b_path, out, **options)
    assert run.resumed < run.plan.tile_count, "some tiles were of the other B"
    assert_product(zarr.open_array(out)[...], a, -b if then == "stays" else b)


def test_what_a_dead_client_left_under_way_is_not_written_over_a_new_run(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its workers go on with a tile that they have begun, and the next run may have other inputs for the same C."""
    _, b, a_path, b_path = factors
    out = tmp_path / "c.zarr"
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "device_memory": TIGHT, "verify": False}
    products: list[Product] = []

    def die(client: Client, product: Product, *arguments: Any) -> Any:
        products.append(product)
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr("tilewright.pipeline.product.job.run_tiles", die)
        with pytest.raises(Stopped):
            tw.matmul(a_path, b_path, out, **options)
    (past,) = products
    writing, go_on = threading.Event(), threading.Event()
    save, close = HostUnit.save, stream.TileEngine.close

    def held_save(unit: HostUnit, *arguments: Any) -> Any:
        if unit is engine.unit:
            writing.set()
            assert go_on.wait(30)
        return save(unit, *arguments)

    def told_close(ended: stream.TileEngine, **how: Any) -> None:
        if ended is engine:
            go_on.set()
        close(ended, **how)

    def listener(event: Event) -> None:
        if isinstance(event, UnitDone) and event.index == first.index:
            go_on.set()
            thread.join(30)

    monkeypatch.setattr(HostUnit, "save", held_save)
    monkeypatch.setattr(stream.TileEngine, "close", told_close)
    late: list[BaseException] = []

    def multiply() -> None:
        try:
            engine.multiply(first)
        except BaseException as error:
            late.append(error)

    with engines.engine_for(past, "a worker") as engine:
        first = next(past.plan.tiles())
        thread = threading.Thread(target=multiply)
        thread.start()
        assert writing.wait(30)
        changed = np.full((96, 80), 2, "f4")
        zarr.open_array(a_path, mode="r+")[...] = changed
        tw.matmul(a_path, b_path, out, listener=listener, **options)
        thread.join(30)
    assert [type(error) for error in late] == [RunEndedError]
    assert_product(zarr.open_array(out)[...], changed, b)
    with pytest.raises(CancelledError), engines.engine_for(past, "a worker"):
        pass


@pytest.mark.sample(2)
@pytest.mark.parametrize(("at", "kept"), [("begun", None), ("third tile", "3 of"), ("check", "16 of")])
def test_a_run_whose_scheduler_is_lost_says_what_is_kept(
    at: str,
    kept: str | None,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    tmp_path: Path,
    small_chunks: None,
) -> None:
    *_, a_path, b_path = factors
    tiles = itertools.count(1)
    cluster = LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0")
    with cluster, Client(cluster) as own:

        def lose(event: Event) -> None:
            if isinstance(event, WorkPlanned):
                now = "begun" if event.name == "matmul" else "check"
            else:
                now = "third tile" if isinstance(event, UnitDone) and next(tiles) == 3 else ""
            if now == at:
                own.close()

        options: dict[str, Any] = {"cluster": own, "device": "cpu", "device_memory": TIGHT}
        with pytest.raises(ClusterError, match="run it again") as told:
            tw.matmul(a_path, b_path, tmp_path / "c.zarr", listener=lose, **options)
    said = str(told.value)
    if kept is None:
        assert "kept" not in said
    else:
        assert said.endswith(f"; {kept} 16 tiles are finished and kept, and the same command goes on there")


def test_a_run_says_that_it_has_lost_a_worker(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    tmp_path: Path,
    small_chunks: None,
) -> None:
    a, b, *paths = factors
    told: list[str] = []
    tiles = itertools.count(1)
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0")
    with cluster, Client(cluster) as own:

        def listener(event: Event) -> None:
            if isinstance(event, Caution):
                told.append(event.message)
            if isinstance(event, UnitDone) and next(tiles) == 3:
                (process,) = own.run(os.getpid, workers=[event.worker]).values()
                os.kill(process, signal.SIGKILL)
                killed.append(event.worker)
                until = time.monotonic() + 30
                while event.worker in own.nthreads():
                    assert time.monotonic() < until
                    time.sleep(0.01)

        killed: list[str] = []
        run = tw.matmul(
            *paths, tmp_path / "c.zarr", cluster=own, device="cpu", device_memory=TIGHT, listener=listener
        )
    (text,) = told
    what = r"(, with no tile under way there|; \d tiles? that it had under way (is|are) computed again)"
    assert re.fullmatch(f"matmul: worker {killed[0]} was lost{what}", text)
    assert run.workers_lost == 1
    assert run.to_json()["workers_lost"] == 1
    assert "16 tiles; 1 worker lost\n" in str(run)
    assert_product(zarr.open_array(tmp_path / "c.zarr")[...], a, b)


def test_a_tile_that_takes_down_its_workers_says_what_to_change(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def deadly(*_: Any) -> None:
        raise KilledWorker("tile", SimpleNamespace(address="tcp://last:1"), 3)

    monkeypatch.setattr(tasks, "multiply_tile", deadly)
    with pytest.raises(TaskError, match=r"took down .*, and give them more memory, or the plan less \(--d"):
        tw.matmul(*factors[2:], tmp_path / "c.zarr", cluster=client, device="cpu")


def test_no_resume_computes_every_tile(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    events: list[Event],
) -> None:
    """In a new array: what the tiles of the run before held is wrong, and as long as it should be."""
    a, b, a_path, b_path = factors
    a_path = put(tmp_path / "plain.zarr", a, compressors=None)
    out = tmp_path / "c.zarr"
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "device_memory": TIGHT, "verify": False}
    stop_at(3, a_path, b_path, out, **options)
    chunks = [path for path in (outputs.partial_path(out) / "c").rglob("*") if path.is_file()]
    for chunk in chunks:
        chunk.write_bytes(np.full(chunk.stat().st_size // 4, 77, "f4").tobytes())
    run = tw.matmul(a_path, b_path, out, resume=False, listener=events.append, **options)
    assert run.resumed == 0
    computed = [event for event in events if isinstance(event, UnitDone) and event.name == "matmul"]
    assert len(computed) == run.plan.tile_count
    assert len(chunks) >= 3
    assert_product(zarr.open_array(out)[...], a, b)


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Counts how often each tile was tried."""
    counts: dict[int, int] = {}
    original = stream.TileEngine.multiply

    def counting(engine: stream.TileEngine, tile: Any, **more: Any) -> Any:
        counts[tile.index] = counts.get(tile.index, 0) + 1
        return original(engine, tile, **more)

    monkeypatch.setattr(stream.TileEngine, "multiply", counting)
    return counts


@pytest.mark.parametrize("failures", [1, 3])
def test_a_failing_write_is_tried_again(
    failures: int,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    attempts: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b, a_path, b_path = factors
    left = iter(range(failures))

    def failing(top: int, start: int, data: np.ndarray) -> np.ndarray:
        if top == 16 and start == 0 and next(left, None) is not None:
            raise StoreError("injected: the disk had a moment")
        return data

    intercept_writes(monkeypatch, failing)
    tw.matmul(a_path, b_path, tmp_path / "c", cluster=client, device="cpu", device_memory=TIGHT)
    assert sorted(attempts.values())[-2:] == [1, failures + 1], (
        "one tile was tried again, as often as it failed"
    )
    assert_product(zarr.open_array(tmp_path / "c")[...], a, b)


@pytest.mark.parametrize("error", [StoreError("injected: gone"), RuntimeError("injected: a bug")])
def test_a_read_that_never_works_ends_the_run_and_keeps_what_was_done(
    error: Exception,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    attempts: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b, a_path, b_path = factors
    out = tmp_path / "c"
    original = region_read.region_reads

    def failing(array: Any, region: Any) -> Any:
        if array.shape == (96, 80) and region[0].stop == 96:
            raise error
        return original(array, region)

    with monkeypatch.context() as patch:
        patch.setattr(units, "region_reads", failing)
        expected = StoreError if isinstance(error, StoreError) else TaskError
        with pytest.raises(expected, match="injected"):
            tw.matmul(a_path, b_path, out, cluster=client, device="cpu", device_memory=TIGHT)
    assert max(attempts.values()) == 4, "the first try and three retries"
    assert not out.exists()
    attempts.clear()
    run = tw.matmul(a_path, b_path, out, cluster=client, device="cpu", device_memory=TIGHT)
    assert run.resumed > 0
    assert len(attempts) == run.plan.tile_count - run.resumed
    assert_product(zarr.open_array(out)[...], a, b)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_disk_that_is_full_ends_the_run_and_keeps_what_was_done(
    compressed: bool,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    attempts: dict[int, int],
    events: list[Event],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks that no room is left for fail however often they are tried, after the first bytes of them were written."""
    a, b, _, b_path = factors
    a_path = put(tmp_path / "coded", a, compressors=zarr.codecs.ZstdCodec() if compressed else None)
    out = tmp_path / "c"
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "device_memory": TIGHT}
    left, lock, write = [6_000], threading.Lock(), region_write._write_fully

    def filling(file: Any, data: memoryview) -> None:
        with lock:
            room = left[0]
            left[0] -= data.nbytes
        if room < data.nbytes:
            write(file, data[: max(0, room)])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(region_write, "_write_fully", filling)
        with pytest.raises(StoreError, match=r"cannot write chunk .* of .*c\.partial.*No space left") as told:
            tw.matmul(a_path, b_path, out, **options)
    assert not isinstance(told.value, DamagedError)
    assert max(attempts.values()) == 4, "the first try and three retries"
    assert not out.exists()
    growing = outputs.partial_path(out)
    assert not list(growing.rglob("*.partial")), "halves of chunks would take up room for nothing"
    attempts.clear()
    run = tw.matmul(a_path, b_path, out, listener=events.append, **options)
    assert 0 < run.resumed < run.plan.tile_count
    assert len(attempts) == run.plan.tile_count - run.resumed
    assert not any("lost stored pieces" in event.message for event in events if isinstance(event, Notice))
    assert_product(zarr.open_array(out)[...], a, b)


@pytest.fixture
def worker_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What Dask's workers report; their logger keeps it from pytest, and we what tasks of ours fail with."""
    monkeypatch.setattr(logging.getLogger("distributed.worker"), "handlers", [caplog.handler])
    monkeypatch.setattr(logging.getLogger("distributed.worker"), "filters", [])
    return caplog


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "damage", "found"),
    [
        ({"compressors": None}, "cut", "it has 1023 bytes"),
        ({"compressors": Crc32cCodec()}, "bit", "checksum"),
        ({}, "cut", "Zstd"),
        ({"compressors": Crc32cCodec(), "shards": (32, 80)}, "bit", r"in shard .*checksum"),
        ({"filters": [Delta(dtype="f4")], "compressors": None, "zarr_format": 2}, "cut", "ValueError"),
        ({"filters": [Delta(dtype="f4")], "compressors": Zstd(), "zarr_format": 2}, "cut", "RuntimeError"),
    ],
)
def test_a_damaged_chunk_is_read_once_and_ends_the_run_that_keeps_what_was_done(
    options: dict[str, Any],
    damage: str,
    found: str,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    attempts: dict[int, int],
    worker_log: pytest.LogCaptureFixture,
    events: list[Event],
) -> None:
    a, _, _, b_path = factors
    a_path, out = put(tmp_path / "damaged", a, **options), tmp_path / "c"
    victim = max((path for path in a_path.rglob("*[0-9]") if path.is_file()), key=str)  # of the last rows
    good = victim.read_bytes()
    victim.write_bytes(good[:-1] if damage == "cut" else good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
    for _ in range(2):
        attempts.clear()
        with pytest.raises(DamagedError, match=rf"(?s)chunk \([45], .*damaged cannot be read \(.*{found}"):
            tw.matmul(
                a_path,
                b_path,
                out,
                cluster=client,
                device="cpu",
                device_memory=TIGHT,
                listener=events.append,
            )
        assert max(attempts.values()) == 1
    assert "Compute Failed" not in worker_log.text
    assert engines._engines == {}
    first, second = (event for event in events if isinstance(event, WorkPlanned))
    assert first.done == 0 < second.done


@pytest.mark.parametrize("work", ["verify", "dot"])
def test_other_work_reads_a_damaged_chunk_once_too(
    work: str,
    client: Client,
    tmp_path: Path,
    worker_log: pytest.LogCaptureFixture,
) -> None:
    side = {"verify": (32, 32), "dot": (32,)}[work]
    array = zarr.create_array(tmp_path / "a", shape=side, chunks=(8,) * len(side), dtype="f8")
    array[...] = 1
    victim = max((path for path in (tmp_path / "a" / "c").rglob("*") if path.is_file()), key=str)
    victim.write_bytes(victim.read_bytes()[:-1])
    function: Callable[..., Any] = getattr(tw, work)
    with pytest.raises(DamagedError, match=r"chunk \(3.* of .*a cannot be read"):
        function(*[array] * (len(side) + 1), cluster=client)
    assert "Compute Failed" not in worker_log.text


def test_what_cannot_be_read_for_a_moment_is_read_again(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    attempts: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b, a_path, b_path = factors
    left, original = iter(range(2)), region_read.read_bytes

    def failing(descriptor: int, offset: int, nbytes: int) -> bytes:
        if next(left, None) is not None:
            raise OSError(errno.EIO, "injected: the network had a moment")
        return original(descriptor, offset, nbytes)

    monkeypatch.setattr(region_read, "read_bytes", failing)
    tw.matmul(a_path, b_path, tmp_path / "c", cluster=client, device="cpu", device_memory=TIGHT)
    assert max(attempts.values()) in (2, 3), "one tile failed twice, or two of them once"
    assert_product(zarr.open_array(tmp_path / "c")[...], a, b)


def test_a_wrong_product_is_never_published(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, _, a_path, b_path = factors

    def lying(top: int, left: int, data: np.ndarray) -> np.ndarray:
        if top == 32 and left == 16:
            data = data.copy()
            data[3, 5] += 1
        return data

    with monkeypatch.context() as patch:
        intercept_writes(patch, lying)
        with pytest.raises(VerificationError, match=r"row 35, columns"):
            tw.matmul(a_path, b_path, tmp_path / "c", cluster=client, device="cpu", device_memory=TIGHT)
    assert not (tmp_path / "c").exists()
    run = tw.matmul(a_path, b_path, tmp_path / "c", cluster=client, device="cpu", device_memory=TIGHT)
    assert run.resumed == 0, "tiles of a product that failed its check are not taken over"


def test_nothing_is_left_on_the_workers(
    factors: tuple[np.ndarray, np.ndarray, Path, Path], client: Client, tmp_path: Path, small_chunks: None
) -> None:
    _, _, a_path, b_path = factors
    tw.matmul(a_path, b_path, tmp_path / "c", cluster=client, device="cpu", device_memory=TIGHT)
    with pytest.raises(Stopped):
        tw.matmul(
            a_path,
            b_path,
            tmp_path / "d",
            cluster=client,
            device="cpu",
            device_memory=TIGHT,
            listener=stop_after(1),
        )
    import threading

    assert engines._engines == {}
    names = [thread.name for thread in threading.enumerate()]
    stages = (
        "tilewright-read",
        "tilewright-write",
        "tilewright-load",
        "tilewright-compute",
        "tilewright-verify",
    )
    assert not [name for name in names if name.startswith(stages)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["f4", "i8", "f2", "c16"])
def test_a_small_c_is_summed_over_parts_of_k_in_order(
    dtype: str, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, events: list[Event]
) -> None:
    """In whatever order the parts come: the first first, the last first, and as it happens."""
    monkeypatch.setattr(tiling, "SPLIT_NBYTES", 1000)
    monkeypatch.setattr(tiling, "TILE_OPERATIONS", 1000)
    a, b = numbers(rng, (20, 3000), dtype), numbers(rng, (3000, 30), dtype)
    paths = put(tmp_path / "a", a, (20, 50)), put(tmp_path / "b", b, (50, 30))
    plan = tw.plan_matmul(*paths, device="cpu", device_memory=400_000)
    assert plan.k_parts > 2
    turn, came, sums = threading.Condition(), list[int](), dict[int, np.ndarray]()
    multiply = stream.TileEngine.multiply

    def in_turn(engine: stream.TileEngine, tile: Any, part: int, wanted: list[int]) -> Any:
        report = multiply(engine, tile, part)
        assert report.partial is not None
        with turn:
            if wanted:
                assert turn.wait_for(lambda: wanted[len(came)] == part, 60)
            came.append(part)
            sums[part] = report.partial.copy()
            turn.notify_all()
        return report

    results = set()
    orders = [list(range(plan.k_parts)), list(range(plan.k_parts))[::-1], []]
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=plan.k_parts, processes=False, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as own,
    ):
        for number, wanted in enumerate(orders):
            came.clear()
            monkeypatch.setattr(stream.TileEngine, "multiply", partialmethod(in_turn, wanted=wanted))
            run = tw.matmul(
                *paths,
                tmp_path / f"c{number}",
                cluster=own,
                device="cpu",
                device_memory=400_000,
                listener=events.append,
            )
            assert run.plan.geometry == plan.geometry
            assert run.plan.read_nbytes == a.nbytes + b.nbytes
            assert came == (wanted or came)
            c = zarr.open_array(tmp_path / f"c{number}")[...]
            assert_product(c, a, b)
            results.add(c.tobytes())
    in_order, backwards = (
        functools.reduce(np.add, [sums[part] for part in order]).astype(c.dtype) for order in orders[:2]
    )
    assert results == {in_order.tobytes()}
    # Of float16 the sums are float32: rounded, they hardly differ.
    assert dtype in ("i8", "f2") or in_order.tobytes() != backwards.tobytes()
    done = [event for event in events if isinstance(event, UnitDone) and event.name == "matmul"]
    assert len(done) == len(orders), "one tile a run, however many parts it has"


def test_a_failing_part_of_k_ends_the_run(
    client: Client,
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    worker_log: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tiling, "SPLIT_NBYTES", 1000)
    monkeypatch.setattr(tiling, "TILE_OPERATIONS", 1000)
    a = numbers(rng, (20, 3000), "f4")
    path = put(tmp_path / "a", a, (20, 50), compressors=None)
    victim = tmp_path / "a" / "c" / "0" / "40"
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(DamagedError, match=r"chunk \(0, 40\)"):
        tw.matmul(
            path, path, tmp_path / "c", transpose_b=True, cluster=client, device="cpu", device_memory=400_000
        )
    assert "Compute Failed" not in worker_log.text, "it came back through the sum that needs it"
    assert not (tmp_path / "c").exists()
    assert engines._engines == {}


@pytest.fixture
def cut_along_k(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> tuple[np.ndarray, Path, dict[str, Any]]:
    """A, its path and the options of a product A Aᵀ whose only tile is summed over many parts of k."""
    monkeypatch.setattr(tiling, "SPLIT_NBYTES", 1000)
    monkeypatch.setattr(tiling, "TILE_OPERATIONS", 1000)
    a = numbers(rng, (20, 3000), "f4")
    path = put(tmp_path / "a", a, (20, 50), compressors=None)
    return a, path, {"transpose_b": True, "device": "cpu", "device_memory": 400_000}


@pytest.mark.parametrize("failing", ["part", "sum"])
def test_a_failing_part_of_k_or_sum_of_parts_is_tried_again_with_the_same_bits(
    failing: str,
    cut_along_k: tuple[np.ndarray, Path, dict[str, Any]],
    client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The parts are kept until the sum is stored: a second sum begins with what the first began with."""
    a, path, options = cut_along_k
    undisturbed = tw.matmul(path, path, tmp_path / "c", cluster=client, **options)
    multiply, store_sum = stream.TileEngine.multiply, engines.store_sum
    tries: Counter[str] = Counter()

    def counted(engine: stream.TileEngine, tile: Any, part: int) -> Any:
        tries[f"part {part}"] += 1
        if failing == "part" and tries["part 1"] == part == 1:
            raise StoreError("injected: the disk had a moment")
        return multiply(engine, tile, part)

    def counted_sum(product: Product, tile: Any, parts: Any) -> int:
        tries["sum"] += 1
        return store_sum(product, tile, parts)

    def failing_write(top: int, left: int, data: np.ndarray) -> np.ndarray:
        if failing == "sum" and tries["sum"] == 1:
            raise StoreError("injected: the disk had a moment")
        return data

    monkeypatch.setattr(stream.TileEngine, "multiply", counted)
    monkeypatch.setattr(tasks, "store_sum", counted_sum)
    intercept_writes(monkeypatch, failing_write)
    run = tw.matmul(path, path, tmp_path / "d", cluster=client, **options)
    assert run.plan.k_parts == undisturbed.plan.k_parts > 1
    again = "part 1" if failing == "part" else "sum"
    assert tries == {again: 2} | {
        name: 1 for name in ("sum", *(f"part {part}" for part in range(run.plan.k_parts))) if name != again
    }
    found = zarr.open_array(tmp_path / "d")[...]
    assert_product(found, a, a.T)
    assert found.tobytes() == zarr.open_array(tmp_path / "c")[...].tobytes()


def test_a_finished_sum_of_parts_is_kept_by_a_run_that_goes_on(
    cut_along_k: tuple[np.ndarray, Path, dict[str, Any]],
    client: Client,
    tmp_path: Path,
    events: list[Event],
) -> None:
    """By its stored bytes: they are recorded with it as with any tile."""
    a, path, options = cut_along_k
    stop_before_the_check(path, path, tmp_path / "c", cluster=client, **options)
    run = tw.matmul(path, path, tmp_path / "c", cluster=client, listener=events.append, **options)
    assert run.plan.k_parts > 1
    assert run.resumed == run.plan.tile_count == 1
    assert not any(isinstance(event, UnitDone) and event.name == "matmul" for event in events)
    assert_product(zarr.open_array(tmp_path / "c")[...], a, a.T)


def test_what_appears_at_the_output_meanwhile_is_not_replaced(
    factors: tuple[np.ndarray, np.ndarray, Path, Path], client: Client, tmp_path: Path
) -> None:
    _, _, a_path, b_path = factors

    def appear(event: Event) -> None:
        if isinstance(event, UnitDone) and not (tmp_path / "c").exists():
            put(tmp_path / "c", np.zeros((3, 3)))

    with pytest.raises(OutputExistsError, match="exists"):
        tw.matmul(a_path, b_path, tmp_path / "c", cluster=client, device="cpu", listener=appear)
    assert zarr.open_array(tmp_path / "c").shape == (3, 3)
    run = tw.matmul(a_path, b_path, tmp_path / "c", cluster=client, device="cpu", overwrite=True)
    assert run.resumed == run.plan.tile_count, "the work was not lost"
    assert (run.operations, run.write_nbytes) == (0, 0)
    assert "op/s" not in str(run)


def test_an_old_product_that_cannot_be_removed_is_a_notice(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    events: list[Event],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b, a_path, b_path = factors
    out = put(tmp_path / "c", np.zeros((3, 3)))

    def busy(folder: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(outputs.shutil, "rmtree", busy)
    tw.matmul(
        a_path, b_path, out, cluster=client, device="cpu", overwrite=True, listener=events.append
    )  # fmt: skip
    assert_product(zarr.open_array(out)[...], a, b)
    assert not list(out.rglob(ledger.FILE_NAME))
    assert any(isinstance(event, Notice) and "is left at" in event.message for event in events)


def test_what_a_run_that_was_killed_behind_its_rename_leaves_in_c_does_no_harm(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b, a_path, b_path = factors
    out, unlink = tmp_path / "c.zarr", Path.unlink

    def killed(path: Path, missing_ok: bool = False) -> None:
        if path.parent == out:
            raise KeyboardInterrupt
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            tw.matmul(a_path, b_path, out, cluster=client, device="cpu")
    assert {outputs.MARK_NAME, ledger.FILE_NAME} < set(os.listdir(out))
    assert not outputs.partial_path(out).exists()
    assert_product(zarr.open_array(out)[...], a, b)
    assert tw.verify(a_path, b_path, out, cluster=client).passed
    gram = tw.matmul(out, out, tmp_path / "d.zarr", transpose_a=True, cluster=client, device="cpu")
    assert gram.verification is not None
    assert gram.verification.passed
    with pytest.raises(OutputExistsError, match="exists"):
        tw.matmul(a_path, b_path, out, cluster=client, device="cpu")
    tw.matmul(a_path, b_path, out, cluster=client, device="cpu", overwrite=True)
    assert sorted(os.listdir(out)) == ["c", outputs.CHECKSUMS_NAME, "zarr.json"]


def test_a_worker_that_outlives_its_client_writes_nothing_into_the_next_run(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    tmp_path: Path,
    small_chunks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stands still while its client dies, B is written anew, and the next run begins; then it goes on."""
    a, b, a_path, b_path = factors
    out, locks, ended = tmp_path / "c.zarr", [], threading.Event()
    options: dict[str, Any] = {"device": "cpu", "device_memory": TIGHT, "verify": False}
    real, write = job.create_output, region_write.RegionWrite.write

    def locked(*args: Any, **kwargs: Any) -> outputs.Output:
        output = real(*args, **kwargs)
        locks.append(output.lock)
        return output

    async def unreached(place: str, run: str) -> None:
        """The next run's cluster is another."""

    def next_run() -> None:
        put(b_path, -b, overwrite=True)
        stop_at(2, a_path, b_path, out, **options)
        ended.set()

    def stopped(piece: region_write.RegionWrite, *args: Any) -> Any:
        monkeypatch.setattr(region_write.RegionWrite, "write", write)
        fcntl.flock(locks[0], fcntl.LOCK_UN)  # as the client dies
        thread = threading.Thread(target=next_run)
        thread.start()
        thread.join()
        return piece.write(*args)

    monkeypatch.setattr(job, "create_output", locked)
    monkeypatch.setattr(tasks, "end_past_runs", unreached)
    monkeypatch.setattr(region_write.RegionWrite, "write", stopped)
    with pytest.raises(ClusterError, match="another run has taken it over"):
        tw.matmul(a_path, b_path, out, **options)
    assert ended.is_set()
    assert tw.matmul(a_path, b_path, out, **options).resumed == 2
    assert_product(zarr.open_array(out)[...], a, -b)
    assert sorted(path.name for path in out.iterdir()) == ["c", outputs.CHECKSUMS_NAME, "zarr.json"]


def test_halves_of_chunks_of_a_killed_run_are_swept(
    factors: tuple[np.ndarray, np.ndarray, Path, Path], client: Client, tmp_path: Path, small_chunks: None
) -> None:
    _, _, a_path, b_path = factors
    out = tmp_path / "c.zarr"
    stop_at(3, a_path, b_path, out, cluster=client, device="cpu", device_memory=TIGHT)
    (outputs.partial_path(out) / "c" / f"0.{'0' * 32}.partial").write_text("half")
    assert tw.matmul(a_path, b_path, out, cluster=client, device="cpu", device_memory=TIGHT).resumed == 3
    assert not list(out.rglob("*.partial"))


def test_halves_of_chunks_of_a_killed_worker_are_swept(
    factors: tuple[np.ndarray, np.ndarray, Path, Path], client: Client, tmp_path: Path, small_chunks: None
) -> None:
    _, _, a_path, b_path = factors
    out = tmp_path / "c.zarr"

    def killed(event: Event) -> None:
        if isinstance(event, UnitDone) and event.name == "matmul":
            (outputs.partial_path(out) / "c" / f"0.{event.index:032x}.partial").write_text("half")

    tw.matmul(a_path, b_path, out, cluster=client, device="cpu", device_memory=TIGHT, listener=killed)
    assert not list(out.rglob("*.partial"))


def test_a_tile_that_comes_behind_the_end_is_answered(
    factors: tuple[np.ndarray, np.ndarray, Path, Path], client: Client, tmp_path: Path
) -> None:
    _, _, a_path, b_path = factors
    seen: list[stream.TileEngine] = []
    original = stream.TileEngine.__init__

    def keep(engine: stream.TileEngine, *args: Any) -> None:
        seen.append(engine)
        original(engine, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream.TileEngine, "__init__", keep)
        run = tw.matmul(a_path, b_path, tmp_path / "c", cluster=client, device="cpu")
    with pytest.raises(CancelledError):
        seen[0].multiply(next(run.plan.tiles()))


def test_a_run_that_is_given_up_ends_beside_the_workers_loop(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    monkeypatch: pytest.MonkeyPatch,
    worker_log: pytest.LogCaptureFixture,
) -> None:
    """What its tiles read is waited for, which may take long; heartbeats go on. Its tiles end without a word."""
    _, _, a_path, b_path = factors
    reading, ending, go_on = threading.Event(), threading.Event(), threading.Event()
    answered: list[bool] = []
    loading, close = HostUnit.loading, stream.TileEngine.close

    def held(call: Callable[[], Any]) -> Any:
        reading.set()
        assert go_on.wait(60)
        return call()

    def held_loading(unit: HostUnit, array: Any, region: Any, *where: Any) -> Loading:
        found = loading(unit, array, region, *where)
        side = 0 if array.shape == (96, 80) else 1
        if region[side].start == 0:  # of the first tile
            return found
        return replace(found, calls=[partial(held, call) for call in found.calls])

    def told_close(engine: stream.TileEngine, **how: Any) -> None:
        ending.set()
        close(engine, **how)

    def listener(event: Event) -> None:
        if isinstance(event, UnitDone):
            assert reading.wait(60)
            raise Stopped

    def look() -> None:
        assert ending.wait(60)
        try:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), client.loop.asyncio_loop).result(5)
            answered.append(True)
        finally:
            go_on.set()

    def computing(dask_worker: Any) -> int:
        return len(dask_worker.active_threads)

    # As if the workers were to hear of that later: it goes to the scheduler, and the end to each of them.
    monkeypatch.setattr(submit, "cancel", lambda client, futures: None)
    monkeypatch.setattr(HostUnit, "loading", held_loading)
    monkeypatch.setattr(stream.TileEngine, "close", told_close)
    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        with pytest.raises(Stopped):
            tw.matmul(
                a_path,
                b_path,
                tmp_path / "c",
                cluster=client,
                device="cpu",
                device_memory=TIGHT,
                listener=listener,
            )
        looking.result()
    assert answered == [True]
    assert (engines._engines, engines._stopped) == ({}, {})
    until = time.monotonic() + 30
    while any(client.run(computing).values()):
        assert time.monotonic() < until
    assert "Compute Failed" not in worker_log.text


@pytest.mark.parametrize(
    ("name", "value"), [("retries", "nonsense"), ("share-panels", "nonsense"), ("tiles", None)]
)
def test_a_wrong_setting_is_found_before_anything_is_made(
    name: str,
    value: Any,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    events: list[Event],
) -> None:
    _, _, a_path, b_path = factors
    with (
        dask.config.set({f"tilewright.{name}": value}),
        pytest.raises(OptionError, match=f"tilewright.{name}"),
    ):
        tw.matmul(
            a_path, b_path, tmp_path / "out" / "c", cluster=client, device="cpu", listener=events.append
        )
    assert not (tmp_path / "out").exists()
    assert events == []


def test_a_worker_that_cannot_stop_keeps_nobody_from_ending(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    a, b, a_path, b_path = factors
    monkeypatch.setattr(
        "tilewright.pipeline.product.job._sharing", lambda facts: frozenset({"tcp://here:1", "tcp://here:2"})
    )
    close = HostUnit.close

    def fail(unit: HostUnit) -> None:
        close(unit)
        raise RuntimeError("injected: the GPU is gone")

    monkeypatch.setattr(HostUnit, "close", fail)
    tw.matmul(a_path, b_path, tmp_path / "c", cluster=client, device="cpu", verify=False)
    assert_product(zarr.open_array(tmp_path / "c")[...], a, b)
    assert (engines._engines, engines._stopped) == ({}, {})
    assert "stop_run" in caplog.text
    assert "the GPU is gone" in caplog.text


def test_overflow_to_infinity_is_an_answer(client: Client, tmp_path: Path, events: list[Event]) -> None:
    path = put(tmp_path / "a", np.full((20, 20), 200, "f2"))
    run = tw.matmul(path, path, tmp_path / "c", cluster=client, device="cpu", listener=events.append)
    assert np.isinf(zarr.open_array(tmp_path / "c")[...]).all()
    assert run.verification is not None
    assert not run.verification.conclusive
    assert any(isinstance(event, Notice) and "unverified" in event.message for event in events)


def test_a_wider_result_can_be_asked_for(client: Client, tmp_path: Path) -> None:
    a = np.full((4, 100), 2**30, "i4")
    path = put(tmp_path / "a", a)
    tw.matmul(path, path, tmp_path / "c", transpose_b=True, dtype="int64", cluster=client, device="cpu")
    np.testing.assert_array_equal(
        zarr.open_array(tmp_path / "c")[...], np.full((4, 4), 100 * 2**60 % 2**64, "u8").view("i8")
    )


class TestBadInput:
    """Each mistake gets one clear error, before anything is written."""

    def check(self, tmp_path: Path, error: type[Exception], match: str, *args: Any, **options: Any) -> None:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(error, match=match) as caught:
            tw.matmul(*args, **options)
        assert isinstance(caught.value, tw.TilewrightError)
        assert sorted(tmp_path.rglob("*")) == before, "something was written"

    def test_missing(self, client: Client, tmp_path: Path) -> None:
        a = put(tmp_path / "a", np.ones((2, 2)))
        self.check(tmp_path, StoreError, "B: there is no", a, tmp_path / "b", tmp_path / "c", cluster=client)

    def test_inner_sides_with_a_hint(self, client: Client, tmp_path: Path) -> None:
        a, b = put(tmp_path / "a", np.ones((2, 3))), put(tmp_path / "b", np.ones((4, 3)))
        self.check(
            tmp_path, ShapeError, r"3 columns.*4 rows.*transposing B", a, b, tmp_path / "c", cluster=client
        )

    def test_output_exists(self, client: Client, tmp_path: Path) -> None:
        a = put(tmp_path / "a", np.ones((2, 2)))
        put(tmp_path / "c", np.ones((3, 3)))
        self.check(tmp_path, OutputExistsError, "overwrite", a, a, tmp_path / "c", cluster=client)

    def test_output_is_an_input(self, client: Client, tmp_path: Path) -> None:
        a, b = put(tmp_path / "a", np.ones((2, 2))), put(tmp_path / "b", np.ones((2, 2)))
        self.check(tmp_path, OutputError, "also A", a, b, a, cluster=client, overwrite=True)
        self.check(
            tmp_path, OutputError, "also B", a, b, tmp_path / "." / "b", cluster=client, overwrite=True
        )

    def test_a_group_is_not_replaced(self, client: Client, tmp_path: Path) -> None:
        put(tmp_path / "group" / "a", np.ones((2, 2)))
        zarr.open_group(tmp_path / "group", mode="a")
        a = put(tmp_path / "a", np.ones((2, 2)))
        self.check(
            tmp_path,
            OutputExistsError,
            "not a Zarr array",
            a,
            a,
            tmp_path / "group",
            cluster=client,
            overwrite=True,
        )

    def test_output_and_input_one_inside_the_other(self, client: Client, tmp_path: Path) -> None:
        a = put(tmp_path / "a", np.ones((2, 2)))
        self.check(tmp_path, OutputError, "inside the other", a, a, a / "inner", cluster=client)

    def test_the_output_would_grow_where_an_input_lies(self, client: Client, tmp_path: Path) -> None:
        a = put(tmp_path / "a", np.ones((2, 2)))
        b = put(tmp_path / "c.partial", np.ones((2, 2)))
        inner = put(tmp_path / "d.partial" / "inner", np.ones((2, 2)))
        self.check(
            tmp_path, OutputError, "would grow at .*where B lies", a, b, tmp_path / "c", cluster=client
        )
        self.check(tmp_path, OutputError, "where A lies", inner, a, tmp_path / "d", cluster=client)
        assert (zarr.open_array(b)[...] == 1).all()

    def test_an_open_output_is_an_input(
        self, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        put(tmp_path / "a", np.ones((2, 2)))
        out = zarr.open_array(tmp_path / "a", mode="r+")
        self.check(tmp_path, OutputError, "also A", "a", "a", out, cluster=client)

    @pytest.mark.parametrize("named", ["path", "file", "local", "open"])
    @pytest.mark.parametrize("inside", ["", "/within"])
    def test_an_output_by_url_is_an_input(
        self, client: Client, tmp_path: Path, named: str, inside: str
    ) -> None:
        """Replacing what is there would remove the factor before it is read."""
        b = put(tmp_path / "b", np.ones((2, 2)))
        put(tmp_path / "a", np.ones((2, 2)))
        a: Any = {"path": tmp_path / "a", "open": zarr.open_array(f"local://{tmp_path}/a", mode="r")}.get(
            named
        )
        a = f"{named}://{tmp_path}/a" if a is None else a
        out = f"simplecache::file://{tmp_path}/a{inside}"
        match = "one inside the other" if inside else "also A"
        self.check(tmp_path, OutputError, match, a, b, out, cluster=client, overwrite=True)
        assert (zarr.open_array(tmp_path / "a")[...] == 1).all()

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_a_link_is_no_place_for_an_output(self, client: Client, tmp_path: Path, overwrite: bool) -> None:
        a = put(tmp_path / "a", np.ones((2, 2)))
        put(tmp_path / "old", np.zeros((2, 2)))
        for name, target in (("link", "old"), ("broken", "nowhere")):
            (tmp_path / name).symlink_to(target)
            self.check(
                tmp_path, OutputExistsError, f"is a link to {target}; name what it leads to", a, a, tmp_path / name,
                cluster=client, overwrite=overwrite,
            )  # fmt: skip

    @pytest.mark.parametrize(
        ("name", "match"),
        [
            ("", "empty name"),
            ("~/c", "begins with a tilde"),
            ("x" * 300, "cannot look at x+: .*too long"),
            ("x" * 250, "cannot look at x+: .*too long.*partial"),  # it grows under a longer one
            ("a\0b", "is no path: it has a null byte"),
            ("file/c", "cannot look at file/c: .*Not a directory"),
        ],
    )
    def test_names_that_no_output_can_have(
        self, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, match: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        a = put(tmp_path / "a", np.ones((2, 2)))
        (tmp_path / "file").write_text("no folder")
        for overwrite in (False, True):
            self.check(
                tmp_path, StoreError, f"output: .*{match}", a, a, name, cluster=client, overwrite=overwrite
            )

    def test_a_growing_output_of_another_run_or_of_somebody_else(
        self, client: Client, tmp_path: Path
    ) -> None:
        a = put(tmp_path / "a", np.ones((2, 2)))
        growing = put(tmp_path / "c.partial", np.ones((2, 2)))
        self.check(tmp_path, OutputExistsError, "holds something else", a, a, tmp_path / "c", cluster=client)
        (growing / outputs.MARK_NAME).touch()  # as runs of ours do
        lock = outputs.lock_folder(growing)
        self.check(
            tmp_path, OutputExistsError, "another run is writing", a, a, tmp_path / "c", cluster=client
        )
        os.close(lock)
        tw.matmul(a, a, tmp_path / "c", cluster=client, device="cpu")
        (tmp_path / "d.partial").mkdir()
        (tmp_path / "d.partial" / "thesis.txt").write_text("ten years of work")
        self.check(tmp_path, OutputExistsError, "holds something else", a, a, tmp_path / "d", cluster=client)

    def test_a_result_that_zarr_cannot_store(self, client: Client, tmp_path: Path) -> None:
        a = put(tmp_path / "a", np.ones((2, 2), "f4"))
        self.check(
            tmp_path, DTypeError, "zarr-python has no such type", a, a, tmp_path / "c", cluster=client, dtype="bfloat16"
        )  # fmt: skip

    def test_types_that_a_message_allows_are_taken(self, client: Client, tmp_path: Path) -> None:
        a = put(tmp_path / "a", np.ones((2, 2), "u1"))
        with pytest.raises(DTypeError) as raised:
            tw.matmul(a, a, tmp_path / "c", cluster=client, dtype="quad")
        for dtype in str(raised.value).partition("allowed are ")[2].split(", "):
            assert tw.plan_matmul(a, a, dtype=dtype, device="cpu").m == 2

    def test_memory_too_small(self, client: Client, tmp_path: Path) -> None:
        a = put(tmp_path / "a", np.ones((20, 20)))
        self.check(
            tmp_path, PlanError, "no tile fits into 64 B.*needs", a, a, tmp_path / "c", cluster=client, device="cpu",
            device_memory=64,
        )  # fmt: skip

    @pytest.mark.parametrize("kind", ["zarr's", "fsspec's", "wrapped"])
    def test_arrays_that_tasks_do_not_share(self, client: Client, tmp_path: Path, kind: str) -> None:
        """As A, B, C or output, of a product; of its check and of dot, what would not be there in another process."""

        def put_in_memory(name: str, values: np.ndarray) -> zarr.Array[Any]:
            place = {"zarr's": MemoryStore(), "fsspec's": f"memory://{name}"}.get(
                kind, LoggingStore(MemoryStore(), log_level="ERROR")
            )
            array = zarr.create_array(place, data=values, overwrite=True)
            assert isinstance(array, zarr.Array)
            return array

        a, match = put(tmp_path / "a", np.ones((3, 3))), "this process's memory"
        hidden = put_in_memory("hidden", np.zeros((3, 3)))
        out = tmp_path / "c"
        self.check(tmp_path, StoreError, f"A: .*{match}", hidden, a, out, cluster=client)
        self.check(tmp_path, StoreError, f"B: .*{match}", a, hidden, out, cluster=client)
        self.check(tmp_path, StoreError, f"output: .*{match}", a, a, hidden, cluster=client)
        self.check(tmp_path, StoreError, f"output: .*{match}", a, a, "memory://c.zarr", cluster=client)
        product = put_in_memory("product", np.full((3, 3), 3.0))
        x, y = put(tmp_path / "x", np.ones(3), (3,)), put_in_memory("y", np.ones(3))
        if kind != "fsspec's":  # is pickled along with every task, which is enough for those who only read
            assert tw.verify(a, a, product, cluster=client).passed
            assert tw.dot(x, y, cluster=client, device="cpu") == 3
            return
        for role, factors in {"A": (hidden, a, a), "B": (a, hidden, a), "C": (a, a, product)}.items():
            with pytest.raises(StoreError, match=f"{role}: .*{match}"):
                tw.verify(*factors, cluster=client)
        for role, vectors in {"X": (y, x), "Y": (x, y)}.items():
            with pytest.raises(StoreError, match=f"{role}: .*{match}"):
                tw.dot(*vectors, cluster=client, device="cpu")

    @pytest.mark.parametrize("mode", ["w", "a"])
    def test_zip_files_that_tasks_would_write_to(self, client: Client, tmp_path: Path, mode: Any) -> None:
        """Nor those that they would open in a mode for writing: what is in them stays as it is."""
        a, file = put(tmp_path / "a", np.ones((3, 3))), tmp_path / "file.zip"
        store = ZipStore(file, mode=mode)
        inside = zarr.create_array(store, name="inside", data=np.ones((3, 3)))
        x = zarr.create_array(store, name="x", data=np.ones(3))
        out = tmp_path / "c"
        wrapped = zarr.open_array(LoggingStore(store, log_level="ERROR"), path="inside")
        for array in (inside, wrapped):
            match = "output: .*ZIP file.* one writer alone"
            self.check(tmp_path, StoreError, match, a, a, array, cluster=client)
            self.check(tmp_path, StoreError, match, a, a, array, cluster=client, verify=False)
            match = f"ZIP file that is open in mode '{mode}'"
            self.check(tmp_path, StoreError, f"A: .*{match}", array, a, out, cluster=client)
            self.check(tmp_path, StoreError, f"B: .*{match}", a, array, out, cluster=client)
            with pytest.raises(StoreError, match=f"C: .*{match}"):
                tw.verify(a, a, array, cluster=client)
        with pytest.raises(StoreError, match=f"X: .*{match}"):
            tw.dot(x, x, cluster=client, device="cpu")
        store.close()
        with ZipStore(file, mode="r") as stored:
            for name in ("inside", "x"):
                assert (zarr.open_array(stored, path=name)[...] == 1).all()

    @pytest.mark.parametrize(
        "name", ["c.zip", "c.zarr.zip", "{}/c.zip/", "file://{}/c.zip", "memory://c.zip"]
    )
    def test_a_name_of_a_zip_file_is_no_output(
        self, client: Client, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It would be a folder of that name."""
        monkeypatch.chdir(tmp_path)
        a, match = (
            put(tmp_path / "a", np.ones((3, 3))),
            r"output: .*zip/? names a ZIP file, which one writer alone",
        )
        self.check(tmp_path, StoreError, match, a, a, name.format(tmp_path), cluster=client)

    def test_a_zip_file_by_its_url_is_no_output(self, client: Client, tmp_path: Path) -> None:
        a = put(tmp_path / "a", np.ones((3, 3)))
        name = f"zip://c::{tmp_path / 'file.zip'}"
        self.check(tmp_path, StoreError, r"output: zip://c.*one writer alone", a, a, name, cluster=client)
        file = ZipFileSystem(tmp_path / "file.zip", mode="a")
        out = zarr.create_array(
            FsspecStore(AsyncFileSystemWrapper(file, asynchronous=True)), data=np.ones((3, 3))
        )
        assert isinstance(out, zarr.Array)
        self.check(tmp_path, StoreError, r"output: .*one writer alone", a, a, out, cluster=client)
        self.check(tmp_path, StoreError, r"A: .*open in mode 'a'", out, a, tmp_path / "c", cluster=client)


def test_factors_in_zip_files_that_are_open_for_reading(client: Client, tmp_path: Path) -> None:
    file = tmp_path / "file.zip"
    with ZipStore(file, mode="w") as store:
        for name, shape in (("a", (40, 40)), ("x", (40,))):
            zarr.create_array(store, name=name, data=np.ones(shape))
    with ZipStore(file, mode="r") as store:
        a, x = (zarr.open_array(store, path=name, mode="r") for name in "ax")
        for factor in (a, f"zip://a::{file}"):
            assert tw.matmul(
                a, factor, tmp_path / "c", cluster=client, device="cpu", overwrite=True
            ).verification
            assert tw.verify(factor, a, tmp_path / "c", cluster=client).passed
        assert tw.dot(x, x, cluster=client, device="cpu") == 40


def test_a_run_is_json_and_says_where_time_went(
    factors: tuple[np.ndarray, np.ndarray, Path, Path], client: Client, tmp_path: Path, events: list[Event]
) -> None:
    _, _, a, b = factors
    run = tw.matmul(a, b, tmp_path / "c", cluster=client, device="cpu", listener=events.append)
    loaded = json.loads(json.dumps(run.to_json()))
    assert loaded["verification"]["passed"] is True
    assert set(loaded["stages"]) == set(STAGES)
    assert set(loaded["workers"]) == set(client.nthreads())
    assert any(isinstance(event, Notice) and "CPU" in event.message for event in events)
    assert isinstance(run, tw.MatmulRun)


def test_packed_factors_are_multiplied_as_they_are_stored_and_told_of(
    client: Client, tmp_path: Path, events: list[Event]
) -> None:
    plain = put(tmp_path / "plain", np.full((3, 3), 7, "i2"))
    packed = put(
        tmp_path / "packed", np.full((3, 3), 5, "i2"), attributes={"scale_factor": 0.5, "_FillValue": -1}
    )
    x = put(tmp_path / "x", np.full(3, 5), (3,), attributes={"add_offset": 1})

    def told() -> list[str]:
        found = [
            event.message
            for event in events
            if isinstance(event, Caution) and "stored numbers" in event.message
        ]
        events.clear()
        return found

    tw.matmul(plain, packed, tmp_path / "c", cluster=client, device="cpu", listener=events.append)
    assert (zarr.open_array(tmp_path / "c")[...] == 105).all()
    (notice,) = told()
    assert f"B: {packed} has scale_factor=0.5, _FillValue=-1" in notice
    assert tw.verify(packed, plain, tmp_path / "c", cluster=client, listener=events.append).passed
    assert told()[0].startswith("A: ")
    assert tw.dot(x, x, cluster=client, device="cpu", listener=events.append) == 75
    assert [notice[:2] for notice in told()] == ["X:", "Y:"]


def test_dask_arrays_are_to_be_stored_first(tmp_path: Path) -> None:
    path = put(tmp_path / "a", np.ones((3, 3)))
    with pytest.raises(
        StoreError, match=r"B: found dask\.array.*\.Array; .*store it first with \.to_zarr\(path\)"
    ):
        tw.matmul(path, dask.array.ones((3, 3)), tmp_path / "c")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [5, None, np.ones((3, 3)), b"path"])
def test_what_is_no_path_is_named(wrong: Any, tmp_path: Path) -> None:
    path = put(tmp_path / "a", np.ones((3, 3)))
    kind = type(wrong).__name__
    with pytest.raises(StoreError, match=rf"A: found .*{kind}; it must be a path"):
        tw.matmul(wrong, path, tmp_path / "c")
    with pytest.raises(StoreError, match=rf"output: found .*{kind}; it must be a path"):
        tw.matmul(path, path, wrong)
    with pytest.raises(CorpusError, match=r"named by one path or several"):
        tw.histogram([5])  # type: ignore[list-item]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("memory", "dtype"), [("40KiB", "f4"), ("100KiB", "f4"), ("100KiB", "i8"), ("300KiB", "c16")]
)
def test_chunks_of_c_are_smaller_where_memory_holds_no_others(
    client: Client, tmp_path: Path, rng: np.random.Generator, dtype: str, memory: str
) -> None:
    a, b = numbers(rng, (700, 90), dtype), numbers(rng, (90, 500), dtype)
    paths = put(tmp_path / "a", a, (100, 30)), put(tmp_path / "b", b, (30, 100))
    plan = tw.plan_matmul(*paths, device="cpu", device_memory=memory)
    assert plan.device_peak_nbytes <= plan.device_limit_nbytes
    run = tw.matmul(*paths, tmp_path / "c", cluster=client, device="cpu", device_memory=memory)
    stored = zarr.open_array(tmp_path / "c")
    assert stored.chunks == run.plan.c_unit == plan.c_unit
    assert_product(stored[...], a, b)
    given = zarr.create_array(tmp_path / "given", shape=(700, 500), chunks=(700, 500), dtype=dtype)
    with pytest.raises(PlanError, match=r"open zarr.Array of smaller chunks \(from Python\): \d+ × \d+ and"):
        tw.matmul(*paths, given, cluster=client, device="cpu", device_memory=memory)


def test_every_panel_and_every_tile_leaves_a_span(
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    events: list[Event],
) -> None:
    _, _, a, b = factors
    before = time.time()
    run = tw.matmul(
        a, b, tmp_path / "c", cluster=client, device="cpu", device_memory=TIGHT, listener=events.append
    )
    after = time.time()
    done = [event for event in events if isinstance(event, UnitDone) and event.name == "matmul"]
    assert len(done) == run.plan.tile_count > 3
    threads: dict[str, list[Span]] = {name: [] for name in THREADS}
    first = min(done, key=lambda event: event.spans[0].begin)
    for event in done:
        names = [span.stage for span in event.spans]
        panels = run.plan.panel_count
        prepared = int(event is first)  # what multiplies is made ready while its first panels are read
        assert [names.count(name) for name in THREADS] == [panels, panels + prepared, 1]
        assert {span.worker for span in event.spans} == {event.worker}
        for span in event.spans:
            threads[span.stage].append(span)
            assert before <= span.begin <= span.end <= after
        for name, stages in THREADS.items():
            seconds = sum(span.end - span.begin for span in event.spans if span.stage == name)
            assert seconds == pytest.approx(sum(event.stages[stage] for stage in stages), abs=1e-5)
        text = json.dumps(describe(event))
        assert json.loads(text)["stages"] == dict(event.stages)
        assert "spans" not in text, "a log has a line a tile, not one a panel"
    ordered = sorted(threads["compute"], key=lambda span: span.begin)  # one product at a time
    assert all(first.end <= second.begin + 1e-3 for first, second in itertools.pairwise(ordered))
    assert all(seconds <= run.seconds for busy in run.workers.values() for seconds in busy.values())
    (busy,) = run.workers.values()
    assert busy["load"] == pytest.approx(run.stages["read"] + run.stages["upload"], abs=1e-3)


def test_parts_of_k_keep_the_spans_of_who_computed_them(
    client: Client,
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    events: list[Event],
) -> None:
    monkeypatch.setattr(tiling, "SPLIT_NBYTES", 1000)
    monkeypatch.setattr(tiling, "TILE_OPERATIONS", 1000)
    a = numbers(rng, (20, 3000), "f4")
    path = put(tmp_path / "a", a, (20, 50))
    run = tw.matmul(
        path, path, tmp_path / "c", transpose_b=True, cluster=client, device="cpu", device_memory=400_000,
        listener=events.append,
    )  # fmt: skip
    assert run.plan.k_parts > 1
    (done,) = [event for event in events if isinstance(event, UnitDone) and event.name == "matmul"]
    names = [span.stage for span in done.spans]
    assert names.count("load") == names.count("compute") - 1 == run.plan.panel_count
    assert names.count("write") == run.plan.k_parts + 1, "each part's sum, and the tile"


@pytest.mark.parametrize(
    ("stages", "workers", "says"),
    [
        (
            (3.0, 1.0, 9.5, 0.5, 2.5),
            {"w": {"load": 4.0, "compute": 9.5, "write": 3.0}},
            "compute 95%, write 30% (download 5%, write 25%); compute limits it and the others wait for it",
        ),
        (
            (18.0, 0.0, 6.0, 0.0, 2.0),
            {
                "v": {"load": 8.5, "compute": 3.0, "write": 1.0},
                "w": {"load": 9.5, "compute": 3.0, "write": 1.0},
            },
            "load 90%, compute 30%, write 10%; load limits it and the others wait for it (85% to 95% on each",
        ),
        ((2.0, 0.0, 6.0, 0.0, 2.0), {"w": {}}, "compute is busiest, and waits for the others too"),
        (
            (0.04, 0.0, 0.01, 0.0, 0.01),
            {"w": {}},
            "load 0%, compute 0%, write 0%; nearly all of it went elsewhere, as to other tasks of the workers",
        ),
        ((0.0,) * 5, {}, "nothing was left to do"),
    ],
)
def test_a_run_names_the_thread_that_limits_it(
    stages: tuple[float, ...], workers: dict[str, dict[str, float]], says: str, tmp_path: Path
) -> None:
    a = put(tmp_path / "a", np.ones((4, 4)))
    planned = tw.plan_matmul(a, a, device="cpu", workers=max(1, len(workers)))
    run = tw.MatmulRun(
        planned,
        "CPU",
        "BLAS",
        10.0,
        dict(zip(STAGES, stages, strict=True)),
        0,
        0,
        0,
        0,
        workers,
        0,
        None,
    )
    assert says in str(run)


@pytest.mark.sample(2)
@pytest.mark.parametrize("precision", ["split", "tf32", "bf16", "fp16"])
def test_a_precision_of_tensor_cores_means_full_on_a_cpu(
    precision: str, client: Client, tmp_path: Path, rng: np.random.Generator, events: list[Event]
) -> None:
    a, b = numbers(rng, (50, 60), "f4"), numbers(rng, (60, 40), "f4")
    paths = put(tmp_path / "a", a), put(tmp_path / "b", b)
    run = tw.matmul(
        *paths, tmp_path / "c", cluster=client, device="cpu", precision=precision, listener=events.append
    )
    assert [
        event.message for event in events if isinstance(event, Notice) and "precision" in event.message
    ] == [
        f"precision={precision!r} is for tensor cores: on a CPU the product is computed, and checked, in full"
    ]
    full = tw.matmul(*paths, tmp_path / "d", cluster=client, device="cpu")
    assert run.verification is not None
    assert full.verification is not None
    assert run.verification.tolerance == full.verification.tolerance
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "c")[...], zarr.open_array(tmp_path / "d")[...])
