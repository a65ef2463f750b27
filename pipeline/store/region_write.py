"""Write a region of an array, in whole stored pieces that any thread can write, each from bands of rows as they come.

Chunks in local files go straight from the caller's buffer to the file, or through the codecs that we know. Everything
else (shards, rarer codecs, remote stores) goes through zarr-python.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from io import RawIOBase
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import zarr
import zstandard
from zarr.storage import LocalStore

from tilewright.kernels.numbers import ceil_div
from tilewright.pipeline.errors import RunEndedError, StoreError
from tilewright.pipeline.plan.told import NOTHING_CHECKSUM, StoredObject
from tilewright.pipeline.store.arrays import check_in_sight, in_store, metadata_name, name_of, write_unit
from tilewright.pipeline.store.chunks import (
    ChunkLayout,
    Zstd,
    as_bytes,
    chunk_encoder_nbytes,
    draft_of,
    encode,
    encoding_of,
    layout_of,
)
from tilewright.pipeline.store.objects import NotingStore, object_path, objects_of
from tilewright.pipeline.store.region import SCRAP_NBYTES, ChunkPart, chunk_name, chunks_in
from tilewright.pipeline.store.remote.trouble import told_of
from tilewright.pipeline.transfer.checksum import checksum_of_descriptor, checksum_of_file, new_checksum
from tilewright.pipeline.transfer.files import with_remedy
from tilewright.pipeline.transfer.zstd import encoder_nbytes

DEFAULT_LEVEL = 0
"""Zstandard's level in the compressed arrays that we create: zarr-python's."""

MOST_ZARR_THREADS = 32
"""The most threads that zarr-python starts for codecs in a process by default: Python's own bound."""

GROWING_CODECS = ("gzip", "zlib", "bz2")
"""numcodecs' codecs that copy their output once they know how long it is."""


def write_region(array: zarr.Array[Any], region: Sequence[slice], data: np.ndarray) -> None:
    """Store ``data`` as ``array[region]`` in one go, from this thread.

    Raises
    ------
    StoreError
        The store refuses: a full disk, a read-only folder, a lost connection; or the array's folder went away, or is
        not seen from here.
    """
    if isinstance(array.store, LocalStore):  # else zarr would make the folders anew, with chunks but no array
        check_in_sight(name_of(array), array.store.root / array.path, metadata_name(array))
    try:
        array[tuple(region)] = data
    except MemoryError:
        raise  # the store is as it should be
    except Exception as error:
        raise StoreError(
            f"cannot write {', '.join(f'{s.start}:{s.stop}' for s in region)} of {name_of(array)}:"
            f" {f'{type(error).__name__}: {error}' if isinstance(array.store, LocalStore) else told_of(error)}"
        ) from error


Bands: TypeAlias = Iterable[np.ndarray]
"""Successive bands of rows that together make up one stored piece."""

FillFile: TypeAlias = Callable[[int, "Zstd | None"], tuple[bool, int | None]]
"""Writes all rows of a piece to a file, given by its descriptor, from the beginning, plain or compressed as given.
Returns whether it could, and the checksum of what it wrote, None where it did not sum it up."""


@dataclass(frozen=True)
class RegionWrite:
    """One stored piece of a region, ready to be written by any thread."""

    source: tuple[slice, slice]
    """Where the piece lies in the region."""
    writer: Callable[[Bands, FillFile | None], StoredObject | None]

    def write(self, bands: Bands, fill: FillFile | None = None) -> StoredObject | None:
        """Store the piece's rows: ``bands`` of the array's dtype in native byte order. Returns what is stored of them;
        None where that is in no file.

        ``fill``, if given, writes the rows where a file holds them as memory does, or that compressed by Zstandard.
        Bands are drawn for all else, and where it could not. Raises StoreError.
        """
        return self.writer(bands, fill)


def region_writes(
    array: zarr.Array[Any], region: tuple[slice, slice], drafts: str | None = None
) -> list[RegionWrite]:
    """The stored pieces that together make up ``array[region]``, each to be written once, on any threads.

    The region's edges must lie on those of the array's write units, or at its end: no piece is half of a stored object.

    drafts: the folder, below the array's, where chunks are written before they get their names, as in
    ``Output.drafts``; by default that is beside their places.
    """
    layout = layout_of(array, name_of(array))
    writer: Callable[[ChunkPart, Bands, FillFile | None], StoredObject | None]
    writer = partial(_write_through_zarr, array, region)
    if layout is not None and layout.shards is None:
        writer = partial(_write_direct, layout, drafts)
    return [
        RegionWrite((piece.target[0], piece.target[1]), partial(writer, piece))
        for piece in chunks_in(region, write_unit(array))
    ]


def gather(out: np.ndarray, bands: Bands) -> None:
    """Copy bands, one below the other, into a matrix that has room for them."""
    row = 0
    for band in bands:
        out[row : row + band.shape[0]] = band
        row += band.shape[0]


def _write_direct(
    layout: ChunkLayout, drafts: str | None, piece: ChunkPart, bands: Bands, fill: FillFile | None
) -> StoredObject:
    """Write one chunk to its file, under another name first, so that a reader never meets half of it."""
    path = layout.root / layout.key(piece.chunk)
    draft = draft_of(path) if drafts is None else draft_of(layout.root / drafts / path.name)
    if not (layout.plain or layout.zstd) or not _fills(piece, layout, rows=not layout.plain):
        fill = None
    bands = _whole_rows(layout, piece, bands)
    total, checksum = new_checksum(), None
    try:
        if drafts is None:
            # Where the array is gone, or out of sight, its folders must not be made without it.
            check_in_sight(layout.name, layout.root, layout.metadata_name)
            _make_folder(path.parent, layout.root)
        with open(draft, "w+b", buffering=0) as file:
            filled = False
            if fill is not None:
                filled, checksum = fill(file.fileno(), layout.zstd)
                if filled:
                    file.seek(0, os.SEEK_END)
                    bands = _missing_rows(layout, piece)  # none if compressed: that is a whole chunk
                else:
                    file.truncate(0)
            if not filled and not layout.plain:
                bands = _encoded(layout, piece, bands)
            for band in bands:
                checksum = None  # what was filled, if anything, is not all
                data = as_bytes(np.ascontiguousarray(band))
                total.update(data)
                _write_fully(file, data)
            nbytes = file.tell()
            if not filled:
                checksum = total.intdigest()
            elif checksum is None:
                nbytes, checksum = checksum_of_descriptor(file.fileno())
        try:
            draft.replace(path)
        except FileNotFoundError:
            if not os.path.exists(draft):
                raise
            _make_folder(path.parent, layout.root)  # the first chunk there
            draft.replace(path)
    except BaseException as error:
        with suppress(OSError):  # the first error is the one to raise
            draft.unlink()
        if isinstance(error, StoreError) or not isinstance(error, OSError):
            raise  # what the bands could not give is not the store's fault
        if drafts is not None and not os.path.isdir(layout.root / drafts):
            check_in_sight(layout.name, layout.root, layout.metadata_name)
            raise RunEndedError(
                f"cannot write chunk {chunk_name(piece.chunk)} of {layout.name}: another run has taken it over, or"
                f" somebody has removed {layout.root / drafts}"
            ) from error
        raise StoreError(
            f"cannot write chunk {chunk_name(piece.chunk)} of {layout.name} to {path}: {with_remedy(error)}"
        ) from error
    return StoredObject(piece.chunk, nbytes, checksum)


def _make_folder(folder: Path, root: Path) -> None:
    """Make a folder below that of an array, which is never made: without it there is no array."""
    if folder == root:
        return
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError:
        if folder.parent == root:
            raise
        _make_folder(folder.parent, root)
        folder.mkdir(exist_ok=True)


def _fills(piece: ChunkPart, layout: ChunkLayout, *, rows: bool) -> bool:
    """Whether a piece has all columns of its chunk, and all rows too where that is asked."""
    sides = [part.stop - part.start for part in piece.inside]
    return sides[1] == layout.chunks[1] and (not rows or sides[0] == layout.chunks[0])


def _whole_rows(layout: ChunkLayout, piece: ChunkPart, bands: Bands) -> Bands:
    """A piece's bands made into those of its chunk: one at the array's edge is stored whole."""
    columns = piece.inside[1]
    for band in bands:
        yield _widened(band, layout) if columns.stop - columns.start < layout.chunks[1] else band
    yield from _missing_rows(layout, piece)


def _missing_rows(layout: ChunkLayout, piece: ChunkPart) -> Bands:
    """What the chunk has below a piece at the array's edge."""
    rows = piece.inside[0]
    missing = layout.chunks[0] - (rows.stop - rows.start)
    if missing:
        yield np.full((missing, layout.chunks[1]), layout.fill_value, layout.dtype)


def _encoded(layout: ChunkLayout, piece: ChunkPart, bands: Bands) -> Bands:
    """A whole chunk as it is stored, part by part."""
    if layout.zstd and layout.chunk_nbytes > SCRAP_NBYTES:
        yield from _compressed(layout.zstd, layout, piece, bands)
        return
    # The codecs take a chunk as a whole, so its bands are gathered first.
    chunk = np.empty(layout.chunks, layout.dtype, order="F" if layout.transposed else "C")
    gather(chunk, bands)
    with _encoding(layout, piece):
        encoded = encode(layout, chunk)
    yield encoded


def _compressed(zstd: Zstd, layout: ChunkLayout, piece: ChunkPart, bands: Bands) -> Bands:
    """The chunk as one Zstandard frame, a megabyte at a time, as its bands are drawn."""
    with _encoding(layout, piece):
        compressor = zstandard.ZstdCompressor(level=zstd.level, write_checksum=zstd.checksum)
        chunker = compressor.chunker(size=layout.chunk_nbytes, chunk_size=SCRAP_NBYTES)
    for band in bands:
        with _encoding(layout, piece):
            parts = list(chunker.compress(as_bytes(np.ascontiguousarray(band, layout.dtype))))
        yield from (np.frombuffer(part, np.uint8) for part in parts)
    with _encoding(layout, piece):
        parts = list(chunker.finish())
    yield from (np.frombuffer(part, np.uint8) for part in parts)


@contextmanager
def _encoding(layout: ChunkLayout, piece: ChunkPart) -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise  # the store is as it should be
    except Exception as error:  # every codec has exceptions of its own
        raise StoreError(
            f"cannot encode chunk {chunk_name(piece.chunk)} of {layout.name}: {type(error).__name__}: {error}"
        ) from error


def _widened(band: np.ndarray, layout: ChunkLayout) -> np.ndarray:
    whole = np.full((band.shape[0], layout.chunks[1]), layout.fill_value, layout.dtype)
    whole[:, : band.shape[1]] = band
    return whole


def _write_fully(file: RawIOBase, left: memoryview) -> None:
    while left:
        left = left[file.write(left) :]


def _write_through_zarr(
    array: zarr.Array[Any], region: Sequence[slice], piece: ChunkPart, bands: Bands, fill: FillFile | None
) -> StoredObject | None:
    place = tuple(
        slice(whole.start + part.start, whole.start + part.stop)
        for whole, part in zip(region, piece.target, strict=True)
    )
    # A shard is written as a whole, so its bands are gathered first.
    whole = np.empty([part.stop - part.start for part in place], array.dtype.newbyteorder("="))
    gather(whole, bands)
    if not isinstance(array.store, LocalStore):
        return _write_noted(array, place, piece, whole)
    write_region(array, place, whole)
    path = object_path(array, piece.chunk)
    try:
        return StoredObject(piece.chunk, *checksum_of_file(path))
    except FileNotFoundError:  # zarr stores no object that would hold only the fill value
        return StoredObject(piece.chunk, 0, NOTHING_CHECKSUM)
    except OSError as error:
        raise StoreError(f"cannot read back {path}, which was just written: {with_remedy(error)}") from error


def _write_noted(
    array: zarr.Array[Any], place: Sequence[slice], piece: ChunkPart, data: np.ndarray
) -> StoredObject | None:
    """Write to a store other than a folder. Returns what is stored of it where such are kept account of."""
    if objects_of(array) is None:
        write_region(array, place, data)
        return None
    noting = NotingStore(array.store)
    key = f"{array.path}/{array.metadata.encode_chunk_key(piece.chunk)}".lstrip("/")
    write_region(in_store(array, noting), place, data)
    return StoredObject(piece.chunk, *noting.noted[key])


def encoders_nbytes(output: zarr.Array[Any] | None, piece_nbytes: int, threads: int) -> int:
    """Memory of encoders, besides their input and output, where ``threads`` threads write stored pieces of
    ``piece_nbytes`` to ``output`` (None: to a compressed array that we create)."""
    if output is None:
        return threads * (encoder_nbytes(DEFAULT_LEVEL, piece_nbytes) + SCRAP_NBYTES)
    each = chunk_encoder_nbytes(output)
    encoding = encoding_of(output, name_of(output), Path())
    codecs = encoding.codecs if encoding is not None else ()
    # A piece is in memory a third time where it is joined from its encoded chunks, or encoded twice, or by a codec that
    # copies its output.
    thrice = output.shards is not None or len(codecs) > 1 or any(c.codec_id in GROWING_CODECS for c in codecs)
    gathered = threads * piece_nbytes if thrice else 0
    if output.shards is not None:  # zarr-python encodes a shard's chunks by threads of its own
        chunks_each = math.prod(map(ceil_div, output.shards, output.chunks))
        threads = min(threads * min(chunks_each, zarr.config.get("async.concurrency")), MOST_ZARR_THREADS)
    return gathered + (threads * (each + SCRAP_NBYTES) if each else 0)
