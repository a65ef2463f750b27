"""Read a region of an array into given buffers, in parts that any thread can read.

One function has several ways to do it. Uncompressed chunks in local files go straight from the file to the caller's
buffer, in parallel and with no copy in between. Those encoded by codecs that we know are read by one call and decoded
by another, in shards too (`chunks.py`). Of remote stores, parts of chunks are asked for, and the chunks of a shard
together (`byte_ranges.py`). Everything else (rarer codecs) goes through zarr-python, which knows them all. For a GPU
the same parts are described by where their bytes lie, for loops that read them from the files.

An array of more dimensions that is seen as a matrix (`region.Flattened`) takes the same ways where its chunks are
rectangles of that matrix. Where they are not, a part of a region is a rectangle of whole chunks, as far as they lie in
the region: they are read one after the other, each once, and what is wanted of each is put where it belongs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any, NamedTuple, TypeAlias
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
    is_plain,
    metadata_name,
    name_of,
    out_of_sight,
    part_unit,
    read_unit,
    write_unit,
)
from tilewright.pipeline.store.byte_ranges import ByteRanges, byte_ranges_of, lines_of
from tilewright.pipeline.store.chunks import (
    ChunkLayout,
    DamagedChunkError,
    Extent,
    as_array,
    as_bytes,
    decode,
    find_chunk,
    flat_bytes,
    layout_of,
    matrix_order,
    read_bytes,
)
from tilewright.pipeline.store.region import (
    SCRAP_NBYTES,
    ChunkPart,
    Flattened,
    HeldMask,
    Masked,
    Section,
    StoredArray,
    base_of,
    chunk_name,
    chunks_in,
    pieces_of_whole,
    unmasked,
)
from tilewright.pipeline.store.remote.opening import is_at_server
from tilewright.pipeline.store.remote.trouble import Kind, trouble_of
from tilewright.pipeline.store.sources.dasks import check_computed
from tilewright.pipeline.store.sources.mapped import MappedStore
from tilewright.pipeline.store.sources.mapping import copy_box
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

Wanted: TypeAlias = "Sequence[tuple[tuple[slice, ...], np.ndarray]]"
"""What is wanted of one chunk: boxes of it, and for each the array of its shape that it goes to, of any strides."""


@dataclass(frozen=True)
class RegionRead:
    """One part of a region, ready to be read by any thread."""

    target: tuple[slice, ...]
    """Where the part goes in the region."""
    read: Callable[[np.ndarray], None]
    """Fills an array of the part's shape; raises StoreError naming the array, the chunk and the file, or its subclass
    DamagedError where reading again cannot help."""
    path: str | None = None
    """The file that the part is read from, without zarr-python; None where that is another way, or needs another one,
    or holds other arrays too."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.target)


def region_reads(
    array: StoredArray,
    region: Sequence[slice],
    *,
    in_loops: bool = False,
) -> list[RegionRead]:
    """The parts that together make up ``array[region]``, to be read in any order, on any threads.

    Parameters
    ----------
    array
        One- or two-dimensional, or seen as a matrix.
    region
        One slice for each dimension, with explicit start and stop inside the array and no step.

    Chunks that lie plain in files are split into parts of about `READ_NBYTES`, so that a few large chunks still keep
    many threads busy. What has to be decoded is read a chunk at a time.

    The buffer that a part is read into has the array's dtype in native byte order and contiguous rows, which may lie
    further apart.
    """
    if isinstance(array, Section):
        return region_reads(array.array, array.within(region), in_loops=in_loops)
    check_computed(array)
    if isinstance(array, Masked):
        return [
            RegionRead(part.target, partial(_read_masked, array, region, part))
            for part in region_reads(array.array, region, in_loops=in_loops)
        ]
    layout = layout_of(array, name_of(array))
    if layout is None and isinstance(array, Flattened):
        return _flattened_reads(array, region, in_loops)
    pieces = _pieces(array, layout, region)
    indexes: dict[str, np.ndarray] = {}
    if layout is None:
        read = _reader(base_of(array), in_loops)
        unit = read_unit(array)
        return [RegionRead(piece.target, partial(_read_block, read, region, unit, piece)) for piece in pieces]
    if layout.plain:
        return [read for piece in pieces for read in _plain_reads(layout, indexes, piece)]
    return [read for piece in pieces for read in _coded_reads(layout, indexes, piece, in_loops)]


def _pieces(array: StoredArray, layout: ChunkLayout | None, region: Sequence[slice]) -> Iterator[ChunkPart]:
    """The parts of a region that each lie in one chunk, or in several that are read at once.

    Of an array that is one plain chunk as a whole it is the region itself; where its elements lie in another order,
    what is held at once is bounded by the rectangles in which it is planned.
    """
    if layout is None or not layout.whole:
        yield from chunks_in(region, part_unit(array))
        return
    yield from pieces_of_whole(region, None if layout.plain else read_unit(array))


def _chunk_unit(array: zarr.Array[Any]) -> tuple[int, ...]:
    """Sides of a stored array's chunks as `_reader` counts them."""
    whole = isinstance(array.store, MappedStore) and array.store.mapped.whole
    return tuple(max(1, side) for side in array.shape) if whole else read_unit(array)


Reader: TypeAlias = "Callable[[Sequence[tuple[tuple[int, ...], Wanted]]], None]"
"""Reads what is wanted of chunks, which are named by their indices."""


def _reader(array: zarr.Array[Any], in_loops: bool) -> Reader:
    """What reads parts of an array's chunks, in the way that suits it; threads may share one."""
    layout = layout_of(array, name_of(array))
    if layout is not None:
        return partial(_each, partial(_read_direct, layout, {}, in_loop=in_loops))
    ranges = None if is_local(array) else byte_ranges_of(array, name_of(array))
    if ranges is None:
        return partial(_each, partial(_read_through_zarr, array))
    return partial(_read_ranges, array, ranges)


def _each(
    read: Callable[[tuple[int, ...], Wanted], None], chunks: Sequence[tuple[tuple[int, ...], Wanted]]
) -> None:
    """Read chunks one after the other."""
    for chunk, wanted in chunks:
        read(chunk, wanted)


def _read_piece(
    read: Callable[[tuple[int, ...], Wanted], None], piece: ChunkPart, target: np.ndarray
) -> None:
    read(piece.chunk, [(piece.inside, target)])


def _read_block(
    read: Reader, region: Sequence[slice], unit: tuple[int, ...], piece: ChunkPart, target: np.ndarray
) -> None:
    """Read a piece of a region that consists of parts of several chunks."""
    place = [
        slice(whole.start + part.start, whole.start + part.stop)
        for whole, part in zip(region, piece.target, strict=True)
    ]
    read([(part.chunk, [(part.inside, target[part.target])]) for part in chunks_in(place, unit)])


def _flattened_reads(view: Flattened, region: Sequence[slice], in_loops: bool) -> list[RegionRead]:
    """As `region_reads`, of a matrix of which chunks are no rectangles."""
    array, layout = view.array, layout_of(view.array, name_of(view))
    read = _reader(array, in_loops)
    reads = []
    for target in _flattened_targets(view, region):
        part = [
            slice(whole.start + inside.start, whole.start + inside.stop)
            for whole, inside in zip(region, target, strict=True)
        ]
        path = None
        if layout is not None:
            first, last = view.touched(part, _chunk_unit(array) if layout.whole else write_unit(array))
            path = layout.own_file(first, stored=True) if first == last else None
        reads.append(RegionRead(target, partial(_read_flattened, view, read, part), path))
    return reads


def _flattened_targets(view: Flattened, region: Sequence[slice]) -> Iterator[tuple[slice, ...]]:
    """Where the parts of such a region go in it."""
    item = view.dtype.itemsize
    rows, columns = view.unit
    if not is_plain(view):
        yield from (piece.target for piece in chunks_in(region, (rows, columns)))
        return
    # Of plain chunks a part may be any rectangle: of rows too long for one, some lines of the columns' first axis.
    line = math.prod(view.sides[1].lengths[1:])
    columns = max(min(line, columns), min(columns, READ_NBYTES // max(1, item * line) * line))
    for piece in chunks_in(region, (rows, columns)):
        yield from (part.target for part in _split(piece, item))


def _read_flattened(view: Flattened, read: Reader, region: Sequence[slice], target: np.ndarray) -> None:
    wanted: dict[tuple[int, ...], list[tuple[tuple[slice, ...], np.ndarray]]] = {}
    for box in view.boxes(region):
        block = view.block(target, box)
        for piece in chunks_in(box.region, _chunk_unit(view.array)):
            wanted.setdefault(piece.chunk, []).append((piece.inside, block[piece.target]))
    read(list(wanted.items()))


def _read_masked(array: Masked, region: Sequence[slice], part: RegionRead, target: np.ndarray) -> None:
    """Read a part of a region, and put what stands for a missing element wherever the mask, or a code, says so."""
    stored = array.array.dtype.newbyteorder("=")
    held = target if target.dtype == stored else np.empty(target.shape, stored)
    part.read(held)
    known = array.holds_code(held)
    array.read_as(held, target)
    ends = zip(region, part.target, strict=True)
    where = [slice(whole.start + inside.start, whole.start + inside.stop) for whole, inside in ends]
    gone = np.empty(target.shape, bool)
    boxes = list(array.boxes(where, gone))
    found = _mask_parts(array.mask, {_key(extent): extent for _, extent in boxes})
    for view, extent in boxes:
        view[...] = array.laid_along(found[_key(extent)])
    gone |= known
    target[gone] = np.nan if array.missing == "nan" else array.missing


def _key(extent: Sequence[slice]) -> tuple[int, ...]:
    return tuple(edge for part in extent for edge in (part.start, part.stop))


def _mask_parts(
    mask: zarr.Array[Any] | HeldMask, wanted: dict[tuple[int, ...], tuple[slice, ...]]
) -> dict[tuple[int, ...], np.ndarray]:
    """Parts of a mask, each chunk of it read once."""
    if isinstance(mask, HeldMask):
        whole = mask.whole()
        return {key: whole[extent] for key, extent in wanted.items()}
    parts = {
        key: np.empty([one.stop - one.start for one in extent], mask.dtype) for key, extent in wanted.items()
    }
    pieces: dict[tuple[int, ...], list[tuple[tuple[slice, ...], np.ndarray]]] = {}
    for key, extent in wanted.items():
        for piece in chunks_in(extent, _chunk_unit(mask)):
            pieces.setdefault(piece.chunk, []).append((piece.inside, parts[key][piece.target]))
    _reader(mask, in_loops=False)(list(pieces.items()))
    return {key: part != 0 for key, part in parts.items()}


def read_targets(array: StoredArray, region: Sequence[slice]) -> list[tuple[slice, ...]]:
    """Where the parts of `region_reads` go in the region, by whatever way they are read."""
    if isinstance(array, Section):
        return read_targets(array.array, array.within(region))
    array = unmasked(array)
    layout = layout_of(array, name_of(array))
    if layout is None and isinstance(array, Flattened):
        return list(_flattened_targets(array, region))
    pieces = _pieces(array, layout, region)
    if layout is not None and layout.plain:
        return [part.target for piece in pieces for part in _split(piece, layout.dtype.itemsize)]
    return [piece.target for piece in pieces]


def reads_parts(array: StoredArray) -> bool:
    """Whether a part of a chunk is read alone; if not, the whole chunk is read, and decoded, for any part of it."""
    base, array = base_of(array), unmasked(array)
    if is_local(array):
        return is_plain(array)
    ranges = byte_ranges_of(base, name_of(array))
    if ranges is None or ranges.layout.codecs:
        return False
    return not isinstance(array, Flattened) or matrix_order(ranges.layout, array) == ()


class FilePart(NamedTuple):
    """The part of a chunk that a region needs, where a loop outside the interpreter can read it from its file."""

    source: Rectangle | StoredChunk
    """Where it lies, plain or compressed by Zstandard, and where it goes on the device."""
    reads: Callable[[], list[RegionRead]]
    """The same part read the ordinary way."""


def region_uploads(
    array: StoredArray, region: Sequence[slice], address: int, pitch: int, *, coded: bool = False
) -> tuple[list[FilePart], list[RegionRead]]:
    """The parts that make up ``array[region]``: those that loops can read from files, of one array all plain or all
    compressed, and the others.

    array, region: two-dimensional, as `region_reads` has them. address, pitch: where the region goes on the device, and
    the bytes from one row to the next there. coded: whether the device decodes what it can (``ChunkLayout.coding``).
    """
    if isinstance(array, Section):
        return region_uploads(array.array, array.within(region), address, pitch, coded=coded)
    layout = layout_of(array, name_of(array))
    if layout is None or not (layout.plain or layout.zstd or (coded and layout.coding)):
        return [], region_reads(array, region)
    indexes: dict[str, np.ndarray] = {}
    found: list[FilePart] = []
    others: list[RegionRead] = []
    pieces = chunks_in(region, read_unit(array)) if layout.mapped is None else _pieces(array, layout, region)
    if layout.whole:  # a thread to each part of it, as to each chunk of others
        pieces = (part for piece in pieces for part in _split(piece, layout.dtype.itemsize))
    plainly = layout.plain
    reads_of = _plain_reads if plainly else _coded_reads
    for piece in pieces:
        reads = partial(reads_of, layout, indexes, piece)
        path = f"{layout.root}/{layout.file_name(piece.chunk)}"
        extent: Extent | None = None
        if layout.shards is not None or layout.mapped is not None:
            extent = _extent_in_shard(layout, path, piece.chunk, indexes)
            if extent is None or (plainly and extent[1] != layout.chunk_nbytes):
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
    read = partial(_read_direct, layout, indexes, in_loop=in_loops)
    return [RegionRead(piece.target, partial(_read_piece, read, piece), layout.own_file(piece.chunk))]


def _plain_reads(layout: ChunkLayout, indexes: dict[str, np.ndarray], piece: ChunkPart) -> list[RegionRead]:
    path = layout.own_file(piece.chunk)
    read = partial(_read_direct, layout, indexes)
    return [
        RegionRead(part.target, partial(_read_piece, read, part), path)
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


def read_region(array: StoredArray, region: Sequence[slice]) -> np.ndarray:
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
    chunk: tuple[int, ...],
    wanted: Wanted,
    *,
    in_loop: bool = False,
) -> None:
    """indexes: of the shards opened for this region so far, shared by its parts. in_loop: threads are many, so what can
    be done without the interpreter's lock is."""
    file_name = layout.file_name(chunk)
    path = layout.root / file_name
    try:
        descriptor = open_file(path)
    except FileNotFoundError:
        # A chunk that was never written holds the fill value, but no chunk is found either where the array is out of
        # sight. Checked each time: it costs less than the fill, and the array may go away while it is read.
        check_in_sight(layout.name, layout.root, layout.metadata_name)
        _fill(wanted, layout.fill_value)
        return
    except NotAFileError as error:
        message = _unreadable(layout.place(chunk), layout.name, file_name, layout.shards is not None, error)
        raise DamagedError(message) from error
    except OSError as error:
        raise _not_read(layout, chunk, path, error) from error
    try:
        extent = find_chunk(layout, descriptor, chunk, indexes)
        if extent is None:
            _fill(wanted, layout.fill_value)
        elif layout.plain or layout.whole:
            _read_part(descriptor, extent, layout, wanted)
        elif not (
            layout.zstd
            and layout.chunk_nbytes > SCRAP_NBYTES
            and _decompressed(path, extent, layout, wanted, in_loop)
        ):
            _decode_part(layout, read_bytes(descriptor, *extent), wanted)
    except DamagedChunkError as error:
        message = _unreadable(layout.place(chunk), layout.name, file_name, layout.shards is not None, error)
        raise DamagedError(message) from error
    except OSError as error:
        raise _not_read(layout, chunk, path, error) from error
    finally:
        os.close(descriptor)


def _not_read(layout: ChunkLayout, chunk: tuple[int, ...], path: Path, error: OSError) -> StoreError:
    name = chunk_name(layout.place(chunk))
    return StoreError(f"cannot read chunk {name} of {layout.name} from {path}: {with_remedy(error)}")


def _fill(wanted: Wanted, value: Any) -> None:
    for _, target in wanted:
        target[...] = value


def _decompressed(path: Path, extent: Extent, layout: ChunkLayout, wanted: Wanted, in_loop: bool) -> bool:
    """Decompress the wanted part of a Zstandard chunk; returns whether all of the chunk was sound. If not, the ordinary
    way says what is wrong.

    It takes a megabyte of rows at a time, so that neither the stored nor the decoded chunk lies in memory as a whole.
    That is also faster, for large chunks by half: all of it stays in the core's cache.
    """
    from tilewright.pipeline.transfer import zstd

    offset, nbytes = extent
    decompress = zstd.decompress_in_steps
    if in_loop and not zstd.in_steps.takes(layout.chunk_nbytes):
        from tilewright.pipeline.transfer.zstd_loop import decompress
    frames = zstd.Frames(zstd.WINDOW_BITS, str(path), nbytes, offset, decompress)
    try:
        filled = all(frames.fill(band) == len(band) for band in _bands_into(layout, wanted))
        return filled and frames.ended(nbytes)
    except zstd.FrameError:
        return False
    finally:
        frames.close()


def _bands_into(layout: ChunkLayout, wanted: Wanted) -> Iterator[np.ndarray]:
    """Buffers, uint8, to be filled with a chunk's bytes in order; what is wanted of each is then copied to where it
    goes."""
    if _in_place(layout, wanted):
        yield flat_bytes(wanted[0][1])
        return
    row_nbytes = layout.chunk_nbytes // layout.chunks[0]
    step = max(1, SCRAP_NBYTES // row_nbytes)
    scrap = np.empty((min(step, layout.chunks[0]), *layout.chunks[1:]), layout.dtype)
    for row in range(0, layout.chunks[0], step):
        band = scrap[: layout.chunks[0] - row]
        yield flat_bytes(band)
        for (lines, *across), target in wanted:
            first, last = max(row, lines.start), min(row + len(band), lines.stop)
            if first < last:
                found = band[(slice(first - row, last - row), *across)]
                target[first - lines.start : last - lines.start] = found


DAMAGED = "restore the chunk, or write the array again"
NOT_ANSWERED = "see that the storage answers, and lets you read, and run it again"
"""What to do about a chunk that cannot be read."""


def _unreadable(
    chunk: tuple[int, ...], name: str, file_name: str, sharded: bool, error: Exception, advice: str = DAMAGED
) -> str:
    kind = "" if isinstance(error, DamagedChunkError | NotAFileError) else f"{type(error).__name__}: "
    return (
        f"chunk {chunk_name(chunk)} of {name} cannot be read ({'in shard ' * sharded}{name}/{file_name}):"
        f" {kind}{error}; {advice}"
    )


def _decode_part(layout: ChunkLayout, data: Any, wanted: Wanted) -> None:
    """Decode what is wanted of a chunk from its stored bytes: in place where the whole chunk goes to contiguous memory,
    else by way of a copy."""
    room = flat_bytes(wanted[0][1]) if _in_place(layout, wanted) else None
    decoded = decode(layout.codecs, data, layout.chunk_nbytes, room)
    if room is not None and np.may_share_memory(decoded, room):
        return
    chunk = as_array(decoded, layout)
    for inside, target in wanted:
        target[...] = chunk[inside]


def _in_place(layout: ChunkLayout, wanted: Wanted) -> bool:
    """Whether a whole chunk is wanted in one place, laid out as it was encoded."""
    target = wanted[0][1]
    return bool(
        len(wanted) == 1
        and target.shape == layout.chunks
        and target.flags.c_contiguous
        and target.dtype == layout.dtype
        and not layout.transposed
    )


def _read_part(descriptor: int, extent: tuple[int, int], layout: ChunkLayout, wanted: Wanted) -> None:
    """What is wanted from its open file of one chunk that is not encoded: plain, or only in another order."""
    offset, found = extent
    if found != layout.chunk_nbytes:
        raise DamagedChunkError(f"it has {found} bytes and an uncompressed chunk has {layout.chunk_nbytes}")
    order = layout.order or tuple(range(len(layout.chunks)))
    sides = [layout.chunks[axis] for axis in order]
    for inside, target in wanted:
        in_rows = layout.plain and target.flags.c_contiguous and target.shape[1:] == layout.chunks[1:]
        if layout.whole and not in_rows:
            box = [inside[axis] for axis in order]
            copy_box(descriptor, offset, layout.dtype, sides, box, target.transpose(order))
        else:
            _read_box(descriptor, offset, layout.chunks, inside, target)


def _read_box(
    descriptor: int, offset: int, sides: tuple[int, ...], inside: Sequence[slice], target: np.ndarray
) -> None:
    """A box of a plain array, which lies at an offset of an open file, into ``target``, in as few calls as its shape
    allows. ``sides``: the array's."""
    row_nbytes = math.prod(sides[1:]) * target.itemsize
    start = offset + inside[0].start * row_nbytes
    whole = target.shape[1:] == sides[1:]
    width_nbytes = math.prod(target.shape[1:]) * target.itemsize
    if whole and target.flags.c_contiguous:
        _read_fully(descriptor, start, as_bytes(target))
    elif target.ndim > 1 and (
        row_nbytes > SCRAP_NBYTES
        or (target.ndim == 2 and width_nbytes >= LONG_ROW_NBYTES)
        or width_nbytes < LEAST_USEFUL_SHARE * row_nbytes
    ):
        for row in range(target.shape[0]):
            _read_box(descriptor, start + row * row_nbytes, sides[1:], inside[1:], target[row])
    else:
        # Rows are contiguous in the file: one call reads many whole ones, one copy picks out what is wanted.
        step = max(1, SCRAP_NBYTES // row_nbytes)
        scrap = np.empty((min(step, target.shape[0]), *sides[1:]), target.dtype)
        for row in range(0, target.shape[0], step):
            band = scrap[: min(step, target.shape[0] - row)]
            _read_fully(descriptor, start + row * row_nbytes, as_bytes(band))
            target[row : row + step] = band[(slice(None), *inside[1:])]


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
    # From zarr 3.2 on the array has its grid; metadata of format 2 warn whoever asks them for it.
    grid: Any = inner._chunk_grid if hasattr(inner, "_chunk_grid") else array.metadata.chunk_grid
    whole = BasicIndexer(part, array.shape, grid)
    found: Coroutine[Any, Any, Any]
    found = inner._get_selection(whole, prototype=default_buffer_prototype(), out=target)
    return found


def _read_through_zarr(array: zarr.Array[Any], chunk: tuple[int, ...], wanted: Wanted) -> None:
    if len(wanted) > 1:  # it is asked for once
        inside = _around([box for box, _ in wanted])
        held = np.empty([part.stop - part.start for part in inside], array.dtype.newbyteorder("="))
        _read_through_zarr(array, chunk, [(inside, held)])
        _pick(held, inside, wanted)
        return
    ((inside, out),) = wanted
    part = tuple(
        slice(index * side + want.start, index * side + want.stop)
        for index, side, want in zip(chunk, read_unit(array), inside, strict=True)
    )
    with _reading(array, chunk):
        # zarr decodes into the target itself: no second copy of the chunk's part is made.
        wrapped: Any = out
        target = default_buffer_prototype().nd_buffer.from_ndarray_like(wrapped)
        answer_of(_selection(array, part, target), f"chunk {chunk_name(chunk)} of {name_of(array)}")
        if _may_be_missing(array, out):
            _check_there(array)


@contextmanager
def _reading(array: zarr.Array[Any], chunk: tuple[int, ...]) -> Iterator[None]:
    """Raise what reading a chunk raises as an error that names it."""
    try:
        yield
    except Exception as error:
        # From 3.3 on zarr asks for the chunks of a shard together, and raises in a group what a store answers.
        answered = isinstance(error, ExceptionGroup)
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, (StoreError, CancelledError)) or is_out_of_memory(error):
            raise error  # the array is out of sight, nobody needs it any more, or the chunk may be sound
        unit = zip(chunk, read_unit(array), write_unit(array), strict=True)
        file_name = array.metadata.encode_chunk_key(
            tuple(place * side // whole for place, side, whole in unit)
        )
        damaged = not answered and _is_damage(error, array.store)
        advice = DAMAGED if damaged else NOT_ANSWERED
        message = _unreadable(chunk, name_of(array), file_name, array.shards is not None, error, advice)
        trouble = trouble_of(error)
        if not damaged and is_at_server(name_of(array)) and trouble.kind is not Kind.OTHER:
            where = f"{'in shard ' * (array.shards is not None)}{name_of(array)}/{file_name}"
            message = f"chunk {chunk_name(chunk)} of {name_of(array)} cannot be read ({where}): {trouble}"
        # What a remote store gave may have been cut short on its way.
        raise (DamagedError if damaged and is_local(array) else StoreError)(message) from error


def _around(boxes: Sequence[tuple[slice, ...]]) -> tuple[slice, ...]:
    """The least box that holds some others."""
    return tuple(
        slice(min(part.start for part in parts), max(part.stop for part in parts))
        for parts in zip(*boxes, strict=True)
    )


def _pick(held: np.ndarray, around: Sequence[slice], wanted: Wanted) -> None:
    """Copy what is wanted of a chunk from the box of it that is held."""
    for box, goes_to in wanted:
        within = (
            slice(part.start - whole.start, part.stop - whole.start)
            for part, whole in zip(box, around, strict=True)
        )
        goes_to[...] = held[tuple(within)]


def _read_ranges(
    array: zarr.Array[Any], ranges: ByteRanges, chunks: Sequence[tuple[tuple[int, ...], Wanted]]
) -> None:
    """Read what is wanted of some chunks of a store that is not local, and no more of plain ones than must be."""
    layout = ranges.layout
    around = {chunk: _around([box for box, _ in wanted]) for chunk, wanted in chunks}
    lines = {} if layout.codecs else {chunk: lines_of(layout, box) for chunk, box in around.items()}
    item = layout.dtype.itemsize
    asked: dict[tuple[int, ...], tuple[int, int] | None] = dict.fromkeys(around)
    for chunk, (stretch, _, _) in lines.items():
        asked[chunk] = stretch.start * item, stretch.stop * item
    with _reading(array, chunks[0][0]):
        found, there = ranges.read(asked)
    for chunk, wanted in chunks:
        data = found[chunk]
        with _reading(array, chunk):
            if data is None:
                _fill(wanted, layout.fill_value)
            elif layout.codecs:
                _decode_part(layout, data, wanted)
            else:
                _, shape, picked = lines[chunk]
                box = around[chunk]
                order = layout.order or tuple(range(len(box)))
                part = data.view(layout.dtype).reshape(shape)[picked]
                part = part.reshape([box[axis].stop - box[axis].start for axis in order])
                _pick(part.transpose(np.argsort(order)), box, wanted)
    if not there:
        with _reading(array, chunks[0][0]):
            _check_there(array)


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


def _may_be_missing(array: zarr.Array[Any], read: np.ndarray) -> bool:
    """Whether zarr may have read missing chunks, of which it does not say so: they read as the fill value. Parts of
    nothing else are rare, so only these cost a question to the store."""
    fill = array.fill_value if array.fill_value is not None else 0

    def is_fill(part: np.ndarray) -> Any:
        return (part == fill) | ((part != part) & (fill != fill))  # NaN is a fill value too

    return bool(is_fill(read[(0,) * read.ndim]) and np.all(is_fill(read)))


def _check_there(array: zarr.Array[Any]) -> None:
    """Raise StoreError where chunks are missing since the array itself is gone."""
    name = metadata_name(array)
    if isinstance(array.store, LocalStore):
        check_in_sight(name_of(array), array.store.root / array.path, name)
    elif not answer_of(array.store.exists(f"{array.path}/{name}".lstrip("/")), f"{name_of(array)}/{name}"):
        raise out_of_sight(name_of(array), str(array.store_path), f"{name}: not found")
