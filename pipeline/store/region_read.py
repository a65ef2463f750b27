"""Read a region of an array into given buffers, in parts that any thread can read.

One function has several ways to do it. Uncompressed chunks in local files go straight from the file to the caller's
buffer, in parallel and with no copy in between. Those encoded by codecs that we know are read by one call and decoded
by another, in shards too (`chunks.py`). Of remote stores, parts of chunks are asked for
(`byte_ranges.py`). Everything else (rarer codecs, whole remote chunks) goes through zarr-python, which knows
them all. For a GPU the same parts are described by where their bytes lie, for loops that read them from the files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any
from zipfile import BadZipFile

import numpy as np
import zarr
from zarr.abc.store import Store
from zarr.buffer import default_buffer_prototype
from zarr.core.indexing import BasicIndexer
from zarr.storage import LocalStore

from tilewright.kernels.gpu.memory import is_out_of_memory
from tilewright.pipeline.errors import DamagedError, StoreError
from tilewright.pipeline.store.arrays import (
    check_in_sight,
    is_local,
    metadata_name,
    name_of,
    out_of_sight,
    read_unit,
    write_unit,
)
from tilewright.pipeline.store.byte_ranges import ByteRanges, byte_ranges_of, lines_of
from tilewright.pipeline.store.chunks import (
    ChunkLayout,
    DamagedChunkError,
    Extent,
    as_bytes,
    decode,
    find_chunk,
    flat_bytes,
    layout_of,
    read_bytes,
)
from tilewright.pipeline.store.region import SCRAP_NBYTES, ChunkPart, chunk_name, chunks_in
from tilewright.pipeline.store.waiting import answer_of
from tilewright.pipeline.transfer.file_rectangles import (
    ANY_LENGTH,
    LEAST_USEFUL_SHARE,
    LONG_ROW_NBYTES,
    Rectangle,
    StoredChunk,
)
from tilewright.pipeline.transfer.files import NotAFileError, open_file, with_remedy

READ_NBYTES = 4 * 2**20
"""Plain chunks are read in parts of this size: the cost of a system call is lost in it, threads stay balanced, and one
half of a GPU worker's lane holds it."""


@dataclass(frozen=True)
class RegionRead:
    """One part of a region, ready to be read by any thread."""

    target: tuple[slice, ...]
    """Where the part goes in the region."""
    read: Callable[[np.ndarray], None]
    """Fills an array of the part's shape; raises StoreError naming the array, the chunk and the file, or its subclass
    DamagedError where reading again cannot help."""
    path: str | None = None
    """The file that the part is read from, without zarr-python; None where that is another way, or needs another
    one."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.target)


def region_reads(
    array: zarr.Array[Any],
    region: Sequence[slice],
    *,
    in_loops: bool = False,
) -> list[RegionRead]:
    """The parts that together make up ``array[region]``, to be read in any order, on any threads.

    Parameters
    ----------
    array
        One- or two-dimensional.
    region
        One slice for each dimension, with explicit start and stop inside the array and no step.

    Chunks that lie plain in files are split into parts of about `READ_NBYTES`, so that a few large chunks still keep
    many threads busy. What has to be decoded is read a chunk at a time.

    The buffer that a part is read into has the array's dtype in native byte order and contiguous rows, which may lie
    further apart.
    """
    layout = layout_of(array, name_of(array))
    pieces = chunks_in(region, read_unit(array))
    if layout is None:
        ranges = None if is_local(array) else byte_ranges_of(array, name_of(array))
        return [
            RegionRead(piece.target, partial(_read_through_zarr, array, region, piece, ranges))
            for piece in pieces
        ]
    indexes: dict[str, np.ndarray] = {}
    if layout.plain:
        return [read for piece in pieces for read in _plain_reads(layout, indexes, piece)]
    return [read for piece in pieces for read in _coded_reads(layout, indexes, piece, in_loops)]


def read_targets(array: zarr.Array[Any], region: Sequence[slice]) -> list[tuple[slice, ...]]:
    """Where the parts of `region_reads` go in the region, by whatever way they are read."""
    layout = layout_of(array, name_of(array))
    pieces = chunks_in(region, read_unit(array))
    if layout is not None and layout.plain:
        return [part.target for piece in pieces for part in _split(piece, layout.dtype.itemsize)]
    return [piece.target for piece in pieces]


def reads_parts(array: zarr.Array[Any]) -> bool:
    """Whether a part of a chunk is read alone; if not, the whole chunk is read, and decoded, for any part of it."""
    if is_local(array):
        layout = layout_of(array, name_of(array))
        return layout is not None and layout.plain
    ranges = byte_ranges_of(array, name_of(array))
    return ranges is not None and not ranges.layout.codecs


@dataclass(frozen=True)
class FilePart:
    """The part of a chunk that a region needs, where a loop outside the interpreter can read it from its file."""

    source: Rectangle | StoredChunk
    """Where it lies, plain or compressed by Zstandard, and where it goes on the device."""
    reads: Callable[[], list[RegionRead]]
    """The same part read the ordinary way."""


def region_uploads(
    array: zarr.Array[Any], region: Sequence[slice], address: int, pitch: int
) -> tuple[list[FilePart], list[RegionRead]]:
    """The parts that make up ``array[region]``: those that loops can read from files, of one array all plain or all
    compressed, and the others.

    array, region: two-dimensional, as `region_reads` has them. address, pitch: where the region goes on the device, and
    the bytes from one row to the next there.
    """
    layout = layout_of(array, name_of(array))
    if layout is None or not (layout.plain or layout.zstd):
        return [], region_reads(array, region)
    indexes: dict[str, np.ndarray] = {}
    found: list[FilePart] = []
    others: list[RegionRead] = []
    for piece in chunks_in(region, read_unit(array)):
        if layout.plain:
            reads = partial(_plain_reads, layout, indexes, piece)
        else:
            reads = partial(_coded_reads, layout, indexes, piece)
        path = f"{layout.root}/{layout.file_name(piece.chunk)}"
        extent: Extent | None = None
        if layout.shards is not None:
            extent = _extent_in_shard(layout, path, piece.chunk, indexes)
            if extent is None or (layout.plain and extent[1] != layout.chunk_nbytes):
                others += reads()
                continue
        source = _source_of(layout, piece, path, extent, address, pitch)
        found.append(FilePart(source, reads))
    return found, others


def _source_of(
    layout: ChunkLayout, piece: ChunkPart, path: str, extent: Extent | None, address: int, pitch: int
) -> Rectangle | StoredChunk:
    """Where a piece of a plain or compressed chunk lies. The chunk is the whole file, or ``extent`` of it."""
    item = layout.dtype.itemsize
    row_nbytes = layout.chunks[1] * item
    (rows, columns), (down, across) = piece.inside, piece.target
    height, width = rows.stop - rows.start, (columns.stop - columns.start) * item
    target = address + down.start * pitch + across.start * item
    if not layout.plain:
        offset, nbytes = (0, ANY_LENGTH) if extent is None else extent
        return StoredChunk(
            path=path,
            offset=offset,
            nbytes=nbytes,
            rows=layout.chunks[0],
            stride=row_nbytes,
            top=rows.start,
            left=columns.start * item,
            height=height,
            width=width,
            target=target,
            pitch=pitch,
        )
    begin, length = (0, layout.chunk_nbytes) if extent is None else (extent[0], ANY_LENGTH)
    return Rectangle(
        path=path,
        offset=begin + rows.start * row_nbytes + columns.start * item,
        file_nbytes=length,
        rows=height,
        width=width,
        stride=row_nbytes,
        target=target,
        pitch=pitch,
    )


def _coded_reads(
    layout: ChunkLayout, indexes: dict[str, np.ndarray], piece: ChunkPart, in_loops: bool = False
) -> list[RegionRead]:
    path = f"{layout.root}/{layout.file_name(piece.chunk)}"
    return [RegionRead(piece.target, partial(_read_direct, layout, indexes, piece, in_loop=in_loops), path)]


def _plain_reads(layout: ChunkLayout, indexes: dict[str, np.ndarray], piece: ChunkPart) -> list[RegionRead]:
    path = f"{layout.root}/{layout.file_name(piece.chunk)}"
    return [
        RegionRead(part.target, partial(_read_direct, layout, indexes, part), path)
        for part in _split(piece, layout.dtype.itemsize)
    ]


def _extent_in_shard(
    layout: ChunkLayout, path: str, chunk: tuple[int, ...], indexes: dict[str, np.ndarray]
) -> tuple[int, int] | None:
    """Where a chunk lies in its shard; None where it is missing or cannot be found: reading it says why."""
    try:
        descriptor = open_file(path)
    except OSError:
        return None
    try:
        return find_chunk(layout, descriptor, chunk, indexes)
    except (OSError, DamagedChunkError):
        return None
    finally:
        os.close(descriptor)


def read_region(array: zarr.Array[Any], region: Sequence[slice]) -> np.ndarray:
    """``array[region]`` in native byte order, read by this thread alone. Raises as its parts do."""
    out = np.empty([part.stop - part.start for part in region], array.dtype.newbyteorder("="))
    for part in region_reads(array, region):
        part.read(out[part.target])
    return out


def _split(piece: ChunkPart, itemsize: int) -> Iterator[ChunkPart]:
    """A piece cut along its first axis into pieces of about `READ_NBYTES`, at least one row each."""
    inside, target = piece.inside[0], piece.target[0]
    row_nbytes = itemsize
    for part in piece.inside[1:]:
        row_nbytes *= part.stop - part.start
    step = max(1, READ_NBYTES // row_nbytes)
    if step >= inside.stop - inside.start:
        yield piece
        return
    for start in range(0, inside.stop - inside.start, step):
        stop = min(start + step, inside.stop - inside.start)
        yield ChunkPart(
            piece.chunk,
            (slice(inside.start + start, inside.start + stop), *piece.inside[1:]),
            (slice(target.start + start, target.start + stop), *piece.target[1:]),
        )


def _read_direct(
    layout: ChunkLayout,
    indexes: dict[str, np.ndarray],
    piece: ChunkPart,
    target: np.ndarray,
    *,
    in_loop: bool = False,
) -> None:
    """indexes: of the shards opened for this region so far, shared by its parts. in_loop: threads are many, so what can
    be done without the interpreter's lock is."""
    file_name = layout.file_name(piece.chunk)
    path = layout.root / file_name
    try:
        descriptor = open_file(path)
    except FileNotFoundError:
        # A chunk that was never written holds the fill value, but no chunk is found either where the array is out of
        # sight. Checked each time: it costs less than the fill, and the array may go away while it is read.
        check_in_sight(layout.name, layout.root, layout.metadata_name)
        target[...] = layout.fill_value
        return
    except NotAFileError as error:
        message = _unreadable(piece, layout.name, file_name, layout.shards is not None, error)
        raise DamagedError(message) from error
    except OSError as error:
        raise StoreError(
            f"cannot read chunk {chunk_name(piece)} of {layout.name} from {path}: {with_remedy(error)}"
        ) from error
    try:
        extent = find_chunk(layout, descriptor, piece.chunk, indexes)
        if extent is None:
            target[...] = layout.fill_value
        elif layout.plain:
            _read_part(descriptor, extent, layout, piece, target)
        elif not (
            layout.zstd
            and layout.chunk_nbytes > SCRAP_NBYTES
            and _decompressed(path, extent, layout, piece, target, in_loop)
        ):
            _decode_part(layout, read_bytes(descriptor, *extent), piece, target)
    except DamagedChunkError as error:
        message = _unreadable(piece, layout.name, file_name, layout.shards is not None, error)
        raise DamagedError(message) from error
    except OSError as error:
        raise StoreError(
            f"cannot read chunk {chunk_name(piece)} of {layout.name} from {path}: {with_remedy(error)}"
        ) from error
    finally:
        os.close(descriptor)


def _decompressed(
    path: Path, extent: Extent, layout: ChunkLayout, piece: ChunkPart, target: np.ndarray, in_loop: bool
) -> bool:
    """Decompress the wanted part of a Zstandard chunk; returns whether all of the chunk was sound. If not, the ordinary
    way says what is wrong.

    It takes a megabyte of rows at a time, so that neither the stored nor the decoded chunk lies in memory as a whole.
    That is also faster, for large chunks by half: all of it stays in the core's cache.
    """
    from tilewright.pipeline.transfer import zstd

    offset, nbytes = extent
    decompress = zstd.decompress_in_steps
    if in_loop:
        from tilewright.pipeline.transfer.zstd_loop import decompress
    frames = zstd.Frames(zstd.WINDOW_BITS, str(path), nbytes, offset, decompress)
    try:
        filled = all(frames.fill(band) == len(band) for band in _bands_into(target, layout, piece))
        return filled and frames.ended(nbytes)
    except zstd.FrameError:
        return False
    finally:
        frames.close()


def _bands_into(target: np.ndarray, layout: ChunkLayout, piece: ChunkPart) -> Iterator[np.ndarray]:
    """Buffers, uint8, to be filled with a chunk's bytes in order; the wanted part of each is then copied into the
    target."""
    if _in_place(layout, target):
        yield flat_bytes(target)
        return
    inside, columns = piece.inside[0], (*piece.inside[1:], slice(None))[0]
    row_nbytes = layout.chunk_nbytes // layout.chunks[0]
    step = max(1, SCRAP_NBYTES // row_nbytes)
    scrap = np.empty((min(step, layout.chunks[0]), *layout.chunks[1:]), layout.dtype)
    for row in range(0, layout.chunks[0], step):
        band = scrap[: layout.chunks[0] - row]
        yield flat_bytes(band)
        first, last = max(row, inside.start), min(row + len(band), inside.stop)
        if first < last:
            target[first - inside.start : last - inside.start] = band[first - row : last - row, ...][
                ..., columns
            ]


DAMAGED = "restore the chunk, or write the array again"
NOT_ANSWERED = "see that the storage answers, and lets you read, and run it again"
"""What to do about a chunk that cannot be read."""


def _unreadable(
    piece: ChunkPart, name: str, file_name: str, sharded: bool, error: Exception, advice: str = DAMAGED
) -> str:
    kind = "" if isinstance(error, DamagedChunkError | NotAFileError) else f"{type(error).__name__}: "
    return (
        f"chunk {chunk_name(piece)} of {name} cannot be read ({'in shard ' * sharded}{name}/{file_name}):"
        f" {kind}{error}; {advice}"
    )


def _decode_part(layout: ChunkLayout, data: Any, piece: ChunkPart, target: np.ndarray) -> None:
    """Decode the wanted part of a chunk from its stored bytes: in place where the whole chunk goes to contiguous
    memory, else by way of a copy."""
    in_place = _in_place(layout, target)
    decoded = decode(layout.codecs, data, layout.chunk_nbytes, flat_bytes(target) if in_place else None)
    if in_place and np.may_share_memory(decoded, target):
        return
    chunk = decoded.view(layout.dtype).reshape(layout.chunks, order="F" if layout.transposed else "C")
    target[...] = chunk[piece.inside]


def _in_place(layout: ChunkLayout, target: np.ndarray) -> bool:
    """Whether the target is a whole chunk, laid out as it was encoded."""
    return bool(
        target.shape == layout.chunks
        and target.flags.c_contiguous
        and target.dtype == layout.dtype
        and not layout.transposed
    )


def _read_part(
    descriptor: int, extent: tuple[int, int], layout: ChunkLayout, piece: ChunkPart, target: np.ndarray
) -> None:
    """The wanted part of one plain chunk from its open file into ``target``, in as few calls as its shape allows."""
    item = layout.dtype.itemsize
    offset, found = extent
    if found != layout.chunk_nbytes:
        raise DamagedChunkError(f"it has {found} bytes and an uncompressed chunk has {layout.chunk_nbytes}")
    if target.ndim == 1:
        _read_fully(descriptor, offset + piece.inside[0].start * item, as_bytes(target))
        return
    rows, columns = piece.inside
    row_nbytes = layout.chunks[1] * item
    start = offset + rows.start * row_nbytes
    width = columns.stop - columns.start
    if width == layout.chunks[1] and target.flags.c_contiguous:
        _read_fully(descriptor, start, as_bytes(target))
    elif width * item >= LONG_ROW_NBYTES or width < LEAST_USEFUL_SHARE * layout.chunks[1]:
        for row in range(target.shape[0]):
            _read_fully(descriptor, start + row * row_nbytes + columns.start * item, as_bytes(target[row]))
    else:
        # Rows are contiguous in the file: one call reads many whole ones, one copy picks out what is wanted.
        step = max(1, SCRAP_NBYTES // row_nbytes)
        scrap = np.empty((min(step, target.shape[0]), layout.chunks[1]), layout.dtype)
        for row in range(0, target.shape[0], step):
            band = scrap[: min(step, target.shape[0] - row)]
            _read_fully(descriptor, start + row * row_nbytes, as_bytes(band))
            target[row : row + step] = band[:, columns]


def _read_fully(descriptor: int, offset: int, left: memoryview) -> None:
    """Read until the buffer is full: one call may give less than was asked for."""
    while left:
        got = os.preadv(descriptor, [left], offset)
        if got == 0:
            raise OSError(f"the file ended at byte {offset} while it was being read")
        offset, left = offset + got, left[got:]


def _selection(array: zarr.Array[Any], part: tuple[slice, ...], target: Any) -> Coroutine[Any, Any, Any]:
    """Reads a part of an array into ``target``, a buffer of zarr's. Its own function for that, `get_basic_selection`,
    waits for the answer without looking whether anybody still needs it."""
    inner: Any = array.async_array
    grid = getattr(
        inner, "_chunk_grid", array.metadata.chunk_grid
    )  # from zarr 3.2 on the metadata's is another kind
    whole = BasicIndexer(part, array.shape, grid)
    reading: Coroutine[Any, Any, Any] = inner._get_selection(
        whole, prototype=default_buffer_prototype(), out=target
    )
    return reading


def _read_through_zarr(
    array: zarr.Array[Any],
    region: Sequence[slice],
    piece: ChunkPart,
    ranges: ByteRanges | None,
    out: np.ndarray,
) -> None:
    part = tuple(
        slice(want.start + target.start, want.start + target.stop)
        for want, target in zip(region, piece.target, strict=True)
    )
    try:
        if ranges is None or not _read_ranges(ranges, piece, out):
            # zarr decodes into the target itself: no second copy of the chunk's part is made.
            wrapped: Any = out
            target = default_buffer_prototype().nd_buffer.from_ndarray_like(wrapped)
            answer_of(_selection(array, part, target), f"chunk {chunk_name(piece)} of {name_of(array)}")
        _check_not_missed(array, out)
    except (StoreError, CancelledError):
        raise  # the array is out of sight, or nobody needs it any more
    except Exception as error:
        if is_out_of_memory(error):
            raise  # the chunk may be sound
        place = (p.start // side for p, side in zip(part, write_unit(array), strict=True))
        file_name = array.metadata.encode_chunk_key(tuple(place))
        damaged = _is_damage(error, array.store)
        advice = DAMAGED if damaged else NOT_ANSWERED
        message = _unreadable(piece, name_of(array), file_name, array.shards is not None, error, advice)
        # What a remote store gave may have been cut short on its way.
        raise (DamagedError if damaged and is_local(array) else StoreError)(message) from error


def _read_ranges(ranges: ByteRanges, piece: ChunkPart, target: np.ndarray) -> bool:
    """Read the wanted part of a chunk, and no more of it than must be; returns whether that was done. If not, all of
    the chunk is wanted."""
    layout = ranges.layout
    if layout.codecs:
        data = ranges.chunk(piece.chunk)
        if data is None:
            target[...] = layout.fill_value
        else:
            _decode_part(layout, data, piece, target)
        return True
    lines, across = lines_of(layout, piece)
    length = layout.chunks[0 if layout.transposed else -1]
    if lines.stop - lines.start > 1:
        start, stop, width = lines.start * length, lines.stop * length, length
    else:
        start, stop = lines.start * length + across.start, lines.start * length + across.stop
        across, width = slice(None), stop - start
    item = layout.dtype.itemsize
    if layout.shards is None and (stop - start) * item == layout.chunk_nbytes:
        return False
    data = ranges.part(piece.chunk, start * item, stop * item)
    if data is None:
        target[...] = layout.fill_value
        return True
    found = data.view(layout.dtype).reshape(-1, width)[:, across]
    target[...] = found.T if layout.transposed else found.reshape(target.shape)
    return True


def _is_damage(error: Exception, store: Store) -> bool:
    """Whether an error of zarr's is about a chunk's bytes, rather than about getting them.

    Its class does not tell: Zstandard, Blosc, LZ4 and most checksums raise RuntimeError, as Python does where the
    system has no thread left; gzip and bz2 raise OSError, as reading the file does; servers' libraries have errors of
    their own. So it is told by where the error comes from: a store, or numcodecs and the libraries below that, which
    only decode what they are given.
    """
    modules = {str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)}
    if isinstance(error, BadZipFile) or any(module.startswith("numcodecs.") for module in modules):
        return True
    if isinstance(error, (OSError, RuntimeError)) or type(store).__module__ in modules:
        return False
    return not any(module.startswith("zarr.storage.") for module in modules)


def _check_not_missed(array: zarr.Array[Any], read: np.ndarray) -> None:
    """Raise StoreError where zarr may have read missing chunks, and the array itself is gone.

    zarr does not say that a chunk is missing: it reads as the fill value. Parts of nothing else are rare, so only these
    cost a question to the store.
    """
    fill = array.fill_value if array.fill_value is not None else 0

    def is_fill(part: np.ndarray) -> Any:
        return (part == fill) | ((part != part) & (fill != fill))  # NaN is a fill value too

    if not (is_fill(read[(0,) * read.ndim]) and np.all(is_fill(read))):
        return
    name = metadata_name(array)
    if isinstance(array.store, LocalStore):
        check_in_sight(name_of(array), array.store.root / array.path, name)
    elif not answer_of(array.store.exists(f"{array.path}/{name}".lstrip("/")), f"{name_of(array)}/{name}"):
        raise out_of_sight(name_of(array), str(array.store_path), f"{name}: not found")
