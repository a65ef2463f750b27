"""Factors, naive checks and deliberate stops that the tests of products share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import strategies as st
from zarr.storage import ZipStore

import tilewright as tw
from tests.kernels import naive
from tests.pipeline.store.stored_arrays import CODECS, encoded
from tilewright.pipeline.events import Event, Notice, UnitDone, WorkPlanned
from tilewright.pipeline.product import output as outputs
from tilewright.pipeline.store import region_write
from tilewright.pipeline.worker import engines, write_stage

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


def check_precision(run: tw.MatmulRun, precision: str, refused: bool, told: list[Event] | None) -> None:
    """One that narrows factors is for products of floats that have it; a CPU does not need it, and says so. told: what
    a CPU said."""
    sums = np.dtype(run.plan.sum_dtype)
    formed = sums if sums.kind in "iu" else np.dtype(run.plan.c_dtype)
    allowed = {"full": "*", "split": ("f4", "f8", "c8", "c16")}.get(precision, ("f4",))
    assert refused != (allowed == "*" or formed in [np.dtype(name) for name in allowed])
    if told is not None:
        said = [
            event.message
            for event in told
            if isinstance(event, Notice) and "for tensor cores" in event.message
        ]
        assert bool(said) == (precision != "full" and not refused), said


def stored_somehow(draw: Callable[..., Any], path: Path, data: np.ndarray, most: int) -> zarr.Array[Any]:
    """An array of either format, with any codecs, order of elements and of bytes, with or without shards; no piece of
    it has more than ``most`` rows or columns."""
    codecs = draw(st.sampled_from(sorted(CODECS)), label="codecs")
    sharded = draw(st.booleans(), label="sharded") if codecs.startswith("3") else False
    chunks = [draw(st.integers(1, most // 2 if sharded else most)) for _ in range(2)]
    shards = tuple(draw(st.integers(1, most // side)) * side for side in chunks) if sharded else None
    big, by_columns = draw(st.booleans(), label="big-endian"), draw(st.booleans(), label="by columns")
    return encoded(path, codecs, data, (chunks[0], chunks[1]), big=big, by_columns=by_columns, shards=shards)


TIGHT = 8_000
"""Device memory that cuts the 96 × 64 product into many tiles of a few panels each."""
SIX_TILES = 14_000
"""The same, into six."""


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


def stop_before_the_check(*factors_and_out: Path, **options: Any) -> list[Path]:
    """A run whose tiles are all finished and that is stopped then; the files of C's chunks."""

    def stop(event: Event) -> None:
        if isinstance(event, WorkPlanned) and event.name == "verify":
            raise Stopped

    with pytest.raises(Stopped):
        tw.matmul(*factors_and_out, listener=stop, **options)
    growing = outputs.partial_path(factors_and_out[-1])
    return sorted(path for path in (growing / "c").rglob("*") if path.is_file())


def zipped(path: Path, data: np.ndarray) -> str:
    """The name of an array in a ZIP file."""
    with ZipStore(path, mode="w") as file:
        zarr.create_array(file, shape=data.shape, chunks=(16, 16), dtype=data.dtype)[...] = data
    return f"zip://::{path}"
