"""Zarr arrays: open and check them, read a region into given buffers, write a region from them.

Each direction has several ways behind one function. Chunks that lie uncompressed in local files go straight between
the file and the caller's buffer, in parallel and with no copy in between; what the codecs that we know have encoded,
is read by one call and decoded by another, in shards too, as `pipeline/chunks.py` says. Everything else (rarer
codecs, remote stores), and the writing of shards, goes through zarr-python, which knows them all.
"""

from __future__ import annotations

import copy
import math
import os
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import RawIOBase
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import zarr
import zstandard
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.errors import BaseZarrError
from zarr.storage import LocalStore, MemoryStore, StorePath

from tilewright.kernels.file_rectangles import (
    ANY_LENGTH,
    LEAST_USEFUL_SHARE,
    LONG_ROW_NBYTES,
    Rectangle,
    StoredChunk,
)
from tilewright.kernels.launch import ceil_div
from tilewright.kernels.zstd import encoder_nbytes
from tilewright.pipeline.chunks import (
    METADATA_NAMES,
    DamagedChunkError,
    Extent,
    Layout,
    Zstd,
    chunk_encoder_nbytes,
    decode,
    encode,
    find_chunk,
    layout_of,
    read_bytes,
)
from tilewright.pipeline.errors import (
    DamagedError,
    DTypeError,
    ShapeError,
    StoreError,
)
from tilewright.pipeline.plan import StoredMatrix

Source: TypeAlias = "str | os.PathLike[str] | zarr.Array[Any]"
"""What a user may name an array by: a path, a URL, or an open array."""

READ_NBYTES = 4 * 2**20
"""The size that plain chunks are split into for reading: the system call is lost in it, threads stay balanced, and
one half of a GPU worker's lane holds it."""


DEFAULT_LEVEL = 0
"""Of Zstandard, in the arrays that we create compressed: zarr-python's."""

MOST_ZARR_THREADS = 32
"""That zarr-python starts for codecs in a process, unless it is told otherwise: Python's own bound."""

GROWING_CODECS = ("gzip", "zlib")
"""Codecs of numcodecs that copy what they have encoded, once they know how long it is."""

GIVEN_NAME = "_tilewright_given_name"
"""The attribute of a local store that keeps what the user called its folder, whose path we made absolute."""

SCRAP_NBYTES = 2**20
"""Rows that are read whole although only a part of each is wanted pass through this much memory, which stays cached."""


def name_of(source: Source) -> str:
    """What to call an array in messages: its path or URL."""
    if isinstance(source, zarr.Array):
        if isinstance(source.store, LocalStore):
            return str(Path(getattr(source.store, GIVEN_NAME, source.store.root)) / source.path)
        return str(source.store_path)
    return os.fspath(source)


def place_of(array: zarr.Array[Any]) -> str:
    """Where an array lies, for processes that run in other folders: its absolute path, or its URL."""
    if isinstance(array.store, LocalStore):
        return str(array.store.root.absolute() / array.path)
    return str(array.store_path)


def anchored(array: zarr.Array[Any], given: str | None = None) -> zarr.Array[Any]:
    """The array by its absolute path, which means the same to workers that run in other folders.

    given: what to call its folder, where that is absolute already. Links in the path stay: to other hosts they may lead
    elsewhere, and on purpose.
    """
    folder = array.store
    if not isinstance(folder, LocalStore):
        return array
    if given is not None:
        setattr(folder, GIVEN_NAME, given)
        return array
    if folder.root.is_absolute():
        return array
    # The caller's own array is left as it is, and the copy keeps whatever it was opened with.
    moved = copy.copy(folder)
    moved.root = folder.root.absolute()
    setattr(moved, GIVEN_NAME, str(folder.root))
    inner = copy.copy(array._async_array)
    object.__setattr__(inner, "store_path", StorePath(moved, array.path))
    return zarr.Array(inner)


def _metadata_name(array: zarr.Array[Any]) -> str:
    return METADATA_NAMES[array.metadata.zarr_format]


def check_source(source: Any, role: str) -> None:
    """Raise StoreError for what names no stored array."""
    if not isinstance(source, (str, os.PathLike, zarr.Array)):
        raise StoreError(
            f"{role}: found {type(source).__module__}.{type(source).__qualname__}; it must be a path, a URL or a"
            " zarr.Array (tilewright.kernels.matmul multiplies arrays in memory)"
        )
    if isinstance(source, zarr.Array):
        return
    text = os.fspath(source)
    if not text:
        raise StoreError(f"{role}: found an empty name; it must be a path, a URL or a zarr.Array")
    if text == "~" or text.startswith("~/"):
        raise StoreError(
            f"{role}: {text} begins with a tilde, which only shells read as the home folder; pass"
            " os.path.expanduser(path), or ./~ for a folder of that name"
        )


def open_array(source: Source, *, ndim: int, role: str) -> zarr.Array[Any]:
    """Open an array for reading and check that it holds numbers in ``ndim`` dimensions.

    A relative path is made absolute, for workers that run in other folders; messages name it as it was given.

    Raises
    ------
    StoreError
        Nothing is there, it cannot be read, it is a group and no array, or ``source`` is no path at all.
    ShapeError, DTypeError
        The array has another number of dimensions, or holds no numbers.
    """
    check_source(source, role)
    name = name_of(source)
    try:
        array = _opened(source)
    except FileNotFoundError as error:
        raise StoreError(f"{role}: there is no Zarr array at {name}; give the path of an array") from error
    except (BaseZarrError, ValueError, KeyError, TypeError, AttributeError) as error:
        # zarr-python takes the form of the metadata for granted: a list for a mapping ends in an AttributeError.
        reason = f"its metadata lack {error}" if isinstance(error, KeyError) else error
        raise StoreError(
            f"{role}: {name} is not a Zarr array ({reason}); give the path of an array"
        ) from error
    except (OSError, ImportError) as error:
        raise StoreError(f"{role}: cannot open {name}: {error}") from error
    if array.ndim != ndim:
        raise ShapeError(
            f"{role}: {name} has shape {array.shape}; it must have {ndim} dimension{'s' * (ndim > 1)}"
        )
    if any(side == 0 < length for side, length in zip(array.chunks, array.shape, strict=True)):
        raise StoreError(
            f"{role}: {name} has shape {array.shape} in chunks of {array.chunks}, which hold no element; write it"
            " again in chunks of one element or more"
        )
    if array.dtype.kind not in "iufc":
        raise DTypeError(
            f"{role}: {name} holds {array.dtype}; only integers, floats and complex numbers can be used"
        )
    return array


def _opened(source: Source) -> zarr.Array[Any]:
    if isinstance(source, zarr.Array):
        return anchored(source)
    text = os.fspath(source)
    path = None if text.startswith("file://") else local_path(source)
    if path is None:
        return zarr.open_array(text, mode="r")
    # A path and no text, or zarr would take a colon in the names of the folders above for a URL's.
    return anchored(zarr.open_array(path.absolute(), mode="r"), text)


def read_unit(array: zarr.Array[Any]) -> tuple[int, ...]:
    """Sides of what is read as one piece: the chunk (within a shard, the inner chunk)."""
    return tuple(max(1, side) for side in array.chunks)


def write_unit(array: zarr.Array[Any]) -> tuple[int, ...]:
    """Sides of what is written as one object, by one writer at a time: the shard where there is one."""
    return tuple(max(1, side) for side in (array.shards or array.chunks))


def as_stored_matrix(array: zarr.Array[Any], *, transpose: bool = False) -> StoredMatrix:
    """The array's numbers for the planner, with op applied."""
    rows, columns = array.shape
    unit = read_unit(array)
    layout = _layout(array)
    plain = layout is not None and layout.plain
    stored = StoredMatrix(rows, columns, array.dtype.newbyteorder("="), (unit[0], unit[1]), plain)
    return stored.transposed if transpose else stored


def in_memory(source: Source) -> bool:
    """Whether only this process can see the data: an open array's store, or a URL, that lies in its memory."""
    if isinstance(source, zarr.Array):
        return isinstance(source.store, MemoryStore)
    return os.fspath(source).startswith("memory://")


# Reading ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RegionRead:
    """One part of a region, ready to be read by any thread."""

    target: tuple[slice, ...]
    """Where the part goes in the region."""
    read: Callable[[np.ndarray], None]
    """Fills an array of the part's shape; raises StoreError naming the array, the chunk and the file: DamagedError
    where reading it again cannot help."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.target)


def region_reads(
    array: zarr.Array[Any],
    region: Sequence[slice],
    most_nbytes: int = READ_NBYTES,
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
    most_nbytes
        Chunks that lie plain in files are split into parts of about this size, so that a few large chunks still
        keep many threads busy. What has to be decoded comes a chunk at a time.

    The buffer that a part is read into has the array's dtype in native byte order, and the elements of a row side
    by side; its rows may lie further apart.
    """
    layout = _layout(array)
    pieces = _chunks_in(region, read_unit(array))
    if layout is None:
        return [
            RegionRead(piece.target, partial(_read_through_zarr, array, region, piece)) for piece in pieces
        ]
    indexes: dict[str, np.ndarray] = {}
    if layout.plain:
        return [read for piece in pieces for read in _plain_reads(layout, indexes, piece, most_nbytes)]
    return [read for piece in pieces for read in _coded_reads(layout, indexes, piece, in_loops)]


@dataclass(frozen=True)
class FilePart:
    """The part of one chunk that a region wants, where a loop outside the interpreter can take it from its file."""

    source: Rectangle | StoredChunk
    """Where it lies, plain or compressed by Zstandard, and where it goes on the device."""
    reads: Callable[[], list[RegionRead]]
    """The same by the way that any region takes."""


def region_uploads(
    array: zarr.Array[Any], region: Sequence[slice], address: int, pitch: int
) -> tuple[list[FilePart], list[RegionRead]]:
    """The parts that together make up ``array[region]``, those first that loops can take from files: for one array,
    they are all plain, or all compressed.

    array, region: two-dimensional, as `region_reads` has them. address, pitch: of the region's place on the device, and
    the bytes from one row to the next there.
    """
    layout = _layout(array)
    if layout is None or not (layout.plain or layout.zstd):
        return [], region_reads(array, region)
    indexes: dict[str, np.ndarray] = {}
    found: list[FilePart] = []
    others: list[RegionRead] = []
    for piece in _chunks_in(region, read_unit(array)):
        if layout.plain:
            reads = partial(_plain_reads, layout, indexes, piece, READ_NBYTES)
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
    layout: Layout, piece: _Piece, path: str, extent: Extent | None, address: int, pitch: int
) -> Rectangle | StoredChunk:
    """A piece of a chunk that lies plain, or compressed, in a file: in all of it, or in a part."""
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
    layout: Layout, indexes: dict[str, np.ndarray], piece: _Piece, in_loops: bool = False
) -> list[RegionRead]:
    return [RegionRead(piece.target, partial(_read_direct, layout, indexes, piece, in_loop=in_loops))]


def _plain_reads(
    layout: Layout, indexes: dict[str, np.ndarray], piece: _Piece, most_nbytes: int
) -> list[RegionRead]:
    return [
        RegionRead(part.target, partial(_read_direct, layout, indexes, part))
        for part in _split(piece, layout.dtype.itemsize, most_nbytes)
    ]


def _extent_in_shard(
    layout: Layout, path: str, chunk: tuple[int, ...], indexes: dict[str, np.ndarray]
) -> tuple[int, int] | None:
    """Where a chunk lies in its shard; None where it is not there, or cannot be found: reading it says why."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return find_chunk(layout, descriptor, chunk, indexes)
    except (OSError, DamagedChunkError):
        return None
    finally:
        os.close(descriptor)


def read_region(array: zarr.Array[Any], region: Sequence[slice]) -> np.ndarray:
    """``array[region]`` in native byte order, read by this thread alone. Raises as the parts of it do."""
    out = np.empty([part.stop - part.start for part in region], array.dtype.newbyteorder("="))
    for part in region_reads(array, region):
        part.read(out[part.target])
    return out


@dataclass(frozen=True)
class _Piece:
    """The part of one chunk that a region wants."""

    chunk: tuple[int, ...]
    inside: tuple[slice, ...]
    """Where it lies in the chunk."""
    target: tuple[slice, ...]
    """Where it goes in the region."""


def _layout(array: zarr.Array[Any]) -> Layout | None:
    return layout_of(array, name_of(array))


def _chunks_in(region: Sequence[slice], chunks: tuple[int, ...]) -> Iterator[_Piece]:
    """The chunks that a region touches, in row order; none for an empty region."""
    if any(part.stop <= part.start for part in region):
        return
    axes = []
    for part, side in zip(region, chunks, strict=True):
        axis = []
        for index in range(part.start // side, ceil_div(part.stop, side)):
            first, last = max(part.start, index * side), min(part.stop, (index + 1) * side)
            inside = slice(first - index * side, last - index * side)
            axis.append((index, inside, slice(first - part.start, last - part.start)))
        axes.append(axis)
    if len(axes) == 1:
        yield from (_Piece((i,), (inside,), (target,)) for i, inside, target in axes[0])
        return
    for i, inside_rows, target_rows in axes[0]:
        for j, inside_columns, target_columns in axes[1]:
            yield _Piece((i, j), (inside_rows, inside_columns), (target_rows, target_columns))


def _split(piece: _Piece, itemsize: int, most_nbytes: int) -> Iterator[_Piece]:
    """A piece cut along its first axis into pieces of about ``most_nbytes``, at least one row each."""
    inside, target = piece.inside[0], piece.target[0]
    row_nbytes = itemsize
    for part in piece.inside[1:]:
        row_nbytes *= part.stop - part.start
    step = max(1, most_nbytes // row_nbytes)
    for start in range(0, inside.stop - inside.start, step):
        stop = min(start + step, inside.stop - inside.start)
        yield _Piece(
            piece.chunk,
            (slice(inside.start + start, inside.start + stop), *piece.inside[1:]),
            (slice(target.start + start, target.start + stop), *piece.target[1:]),
        )


def _read_direct(
    layout: Layout,
    indexes: dict[str, np.ndarray],
    piece: _Piece,
    target: np.ndarray,
    *,
    in_loop: bool = False,
) -> None:
    """indexes: of the shards that were opened for this region, shared by its parts. in_loop: whether threads are many,
    and what can be done without the interpreter's lock is."""
    file_name = layout.file_name(piece.chunk)
    path = layout.root / file_name
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        # A chunk that was never written holds the fill value, but an array that is out of sight has no chunk at all.
        # Asked each time: it costs less than the fill, and the array may go away while it is read.
        _check_in_sight(layout.name, layout.root, layout.metadata_name)
        target[...] = layout.fill_value
        return
    except OSError as error:
        raise StoreError(
            f"cannot read chunk {_chunk_name(piece)} of {layout.name} from {path}: {error}"
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
            f"cannot read chunk {_chunk_name(piece)} of {layout.name} from {path}: {error}"
        ) from error
    finally:
        os.close(descriptor)


def _decompressed(
    path: Path, extent: Extent, layout: Layout, piece: _Piece, target: np.ndarray, in_loop: bool
) -> bool:
    """Whether the wanted part of one of Zstandard's chunks is there, and all of the chunk was sound; else the ordinary
    way says what is wrong.

    It goes through a megabyte of its rows, so that neither what is stored nor what is decoded lies in memory as a
    whole. That is also faster, for large chunks by half: all of it stays in the core's cache.
    """
    from tilewright.kernels import zstd

    offset, nbytes = extent
    decompress = zstd.decompress_in_steps
    if in_loop:
        from tilewright.kernels.zstd_loop import decompress
    frames = zstd.Frames(zstd.WINDOW_BITS, str(path), nbytes, offset, decompress)
    try:
        filled = all(frames.fill(band) == len(band) for band in _bands_into(target, layout, piece))
        return filled and frames.ended(nbytes)
    except zstd.FrameError:
        return False
    finally:
        frames.close()


def _bands_into(target: np.ndarray, layout: Layout, piece: _Piece) -> Iterator[np.ndarray]:
    """A chunk's bytes, uint8, stretch by stretch, to be filled; what is wanted of each is then put into the target."""
    if _in_place(layout, target):
        yield _flat_bytes(target)
        return
    inside, columns = piece.inside[0], (*piece.inside[1:], slice(None))[0]
    row_nbytes = layout.chunk_nbytes // layout.chunks[0]
    step = max(1, SCRAP_NBYTES // row_nbytes)
    scrap = np.empty((min(step, layout.chunks[0]), *layout.chunks[1:]), layout.dtype)
    for row in range(0, layout.chunks[0], step):
        band = scrap[: layout.chunks[0] - row]
        yield _flat_bytes(band)
        first, last = max(row, inside.start), min(row + len(band), inside.stop)
        if first < last:
            target[first - inside.start : last - inside.start] = band[first - row : last - row, ...][
                ..., columns
            ]


def _check_in_sight(name: str, root: Path, metadata_name: str) -> None:
    """Raise StoreError where this host does not have the array's own file, so that what it lacks tells nothing."""
    try:
        os.stat(f"{root}/{metadata_name}")
    except OSError as error:
        raise _out_of_sight(name, str(root), f"{metadata_name}: {error.strerror}") from error


def _out_of_sight(name: str, place: str, found: str) -> StoreError:
    return StoreError(
        f"{name}: there is no Zarr array at {place} on {socket.gethostname()} ({found}), so it is neither read nor"
        " written there; put it on storage that all workers see under the same path, and leave it there until the"
        " work is done"
    )


def _unreadable(piece: _Piece, name: str, file_name: str, sharded: bool, error: Exception) -> str:
    kind = "" if isinstance(error, DamagedChunkError) else f"{type(error).__name__}: "
    return (
        f"chunk {_chunk_name(piece)} of {name} cannot be read ({'in shard ' * sharded}{name}/{file_name}):"
        f" {kind}{error}; restore the chunk, or write the array again"
    )


def _chunk_name(piece: _Piece) -> str:
    return "(" + ", ".join(map(str, piece.chunk)) + ")"


def _decode_part(layout: Layout, data: bytes, piece: _Piece, target: np.ndarray) -> None:
    """The wanted part of one chunk from its stored bytes: decoded in its place where it is wanted whole, and side by
    side; else copied from where it was decoded."""
    in_place = _in_place(layout, target)
    decoded = decode(layout.codecs, data, layout.chunk_nbytes, _flat_bytes(target) if in_place else None)
    if in_place and np.may_share_memory(decoded, target):
        return
    chunk = decoded.view(layout.dtype).reshape(layout.chunks, order="F" if layout.transposed else "C")
    target[...] = chunk[piece.inside]


def _in_place(layout: Layout, target: np.ndarray) -> bool:
    """Whether a whole chunk is wanted as it was encoded."""
    return bool(
        target.shape == layout.chunks
        and target.flags.c_contiguous
        and target.dtype == layout.dtype
        and not layout.transposed
    )


def _read_part(
    descriptor: int, extent: tuple[int, int], layout: Layout, piece: _Piece, target: np.ndarray
) -> None:
    """The wanted part of one plain chunk from its open file into ``target``, in as few calls as its shape allows."""
    item = layout.dtype.itemsize
    offset, found = extent
    if found != layout.chunk_nbytes:
        raise DamagedChunkError(f"it has {found} bytes and an uncompressed chunk has {layout.chunk_nbytes}")
    if target.ndim == 1:
        _read_fully(descriptor, offset + piece.inside[0].start * item, _as_bytes(target))
        return
    rows, columns = piece.inside
    row_nbytes = layout.chunks[1] * item
    start = offset + rows.start * row_nbytes
    width = columns.stop - columns.start
    if width == layout.chunks[1] and target.flags.c_contiguous:
        _read_fully(descriptor, start, _as_bytes(target))
    elif width * item >= LONG_ROW_NBYTES or width < LEAST_USEFUL_SHARE * layout.chunks[1]:
        for row in range(target.shape[0]):
            _read_fully(descriptor, start + row * row_nbytes + columns.start * item, _as_bytes(target[row]))
    else:
        # Whole rows lie one behind the other in the file: one call reads many, one copy picks out what is wanted.
        step = max(1, SCRAP_NBYTES // row_nbytes)
        scrap = np.empty((min(step, target.shape[0]), layout.chunks[1]), layout.dtype)
        for row in range(0, target.shape[0], step):
            band = scrap[: min(step, target.shape[0] - row)]
            _read_fully(descriptor, start + row * row_nbytes, _as_bytes(band))
            target[row : row + step] = band[:, columns]


def _as_bytes(part: np.ndarray) -> memoryview:
    return _flat_bytes(part).data


def _flat_bytes(part: np.ndarray) -> np.ndarray:
    """The bytes of elements that lie side by side: uint8, no copy."""
    return part.reshape(-1).view(np.uint8)


def _read_fully(descriptor: int, offset: int, left: memoryview) -> None:
    """Read until the buffer is full: one call may give less than was asked for."""
    while left:
        got = os.preadv(descriptor, [left], offset)
        if got == 0:
            raise OSError(f"the file ended at byte {offset} while it was being read")
        offset, left = offset + got, left[got:]


def _read_through_zarr(
    array: zarr.Array[Any], region: Sequence[slice], piece: _Piece, out: np.ndarray
) -> None:
    part = tuple(
        slice(want.start + target.start, want.start + target.stop)
        for want, target in zip(region, piece.target, strict=True)
    )
    try:
        # zarr decodes into the target itself: no second copy of the chunk's part is made.
        wrapped: Any = out
        target = default_buffer_prototype().nd_buffer.from_ndarray_like(wrapped)
        array.get_basic_selection(part, out=target)
        _check_not_missed(array, out)
    except (MemoryError, StoreError):
        raise  # the chunk is as it should be, or the array is out of sight
    except Exception as error:
        place = (p.start // side for p, side in zip(part, write_unit(array), strict=True))
        file_name = array.metadata.encode_chunk_key(tuple(place))
        message = _unreadable(piece, name_of(array), file_name, array.shards is not None, error)
        # What a remote store raises may be about anything; and codecs raise RuntimeError, as Python does where the
        # system has no thread left.
        damaged = is_local(array) and not isinstance(error, (OSError, RuntimeError))
        raise (DamagedError if damaged else StoreError)(message) from error


def _check_not_missed(array: zarr.Array[Any], read: np.ndarray) -> None:
    """Raise StoreError where what zarr has read may be of chunks that are missing, and the array is not there either.

    zarr does not say that a chunk is missing. Chunks of nothing but the fill value are rare, so that they alone cost a
    question to the store.
    """
    fill = array.fill_value if array.fill_value is not None else 0

    def is_fill(part: np.ndarray) -> Any:
        return (part == fill) | ((part != part) & (fill != fill))  # not a number is that too

    if not (is_fill(read[(0,) * read.ndim]) and np.all(is_fill(read))):
        return
    name = _metadata_name(array)
    if isinstance(array.store, LocalStore):
        _check_in_sight(name_of(array), array.store.root / array.path, name)
    elif not sync(array.store.exists(f"{array.path}/{name}".lstrip("/"))):
        raise _out_of_sight(name_of(array), str(array.store_path), f"{name}: not found")


# Writing ------------------------------------------------------------------------------------------------------


def write_region(array: zarr.Array[Any], region: Sequence[slice], data: np.ndarray) -> None:
    """Store ``data`` as ``array[region]`` in one go, from this thread.

    Raises
    ------
    StoreError
        The store refuses: a full disk, a read-only folder, a lost connection; or the array's folder went away, or is
        not seen from here.
    """
    if isinstance(
        array.store, LocalStore
    ):  # zarr would make the folders anew, and chunks of no array in them
        _check_in_sight(name_of(array), array.store.root / array.path, _metadata_name(array))
    try:
        array[tuple(region)] = data
    except MemoryError:
        raise  # the store is as it should be
    except Exception as error:
        raise StoreError(
            f"cannot write {', '.join(f'{s.start}:{s.stop}' for s in region)} of {name_of(array)}:"
            f" {type(error).__name__}: {error}"
        ) from error


Bands: TypeAlias = Iterable[np.ndarray]
"""Stretches of rows, one behind the other, that together make up one stored piece."""

Fill: TypeAlias = Callable[[int, "Zstd | None"], bool]
"""Writes all rows of a piece to a file, by its descriptor, from the file's beginning on, as they are or compressed so;
False: it could not."""


@dataclass(frozen=True)
class RegionWrite:
    """One stored piece of a region, ready to be written by any thread."""

    source: tuple[slice, slice]
    """Where the piece lies in the region."""
    writer: Callable[[Bands, Fill | None], None]

    def write(self, bands: Bands, fill: Fill | None = None) -> None:
        """Store the piece's rows: ``bands`` of the array's dtype in native byte order.

        Where the rows lie in a file as they lie in memory, or that compressed by Zstandard, ``fill``, if given, is to
        write them; bands are drawn elsewhere, and where it could not. Raises StoreError.
        """
        self.writer(bands, fill)


def region_writes(array: zarr.Array[Any], region: tuple[slice, slice]) -> list[RegionWrite]:
    """The stored pieces that together make up ``array[region]``, each to be written once, on any threads.

    The region's edges lie on the array's write units, or at its end: a piece is never half of a stored object.
    """
    layout = _layout(array)
    writer: Callable[[_Piece, Bands, Fill | None], None] = partial(_write_through_zarr, array, region)
    if layout is not None and layout.shards is None:
        writer = partial(_write_direct, layout)
    return [
        RegionWrite((piece.target[0], piece.target[1]), partial(writer, piece))
        for piece in _chunks_in(region, write_unit(array))
    ]


def stored_nbytes(array: zarr.Array[Any], region: tuple[slice, slice]) -> int | None:
    """Bytes that the chunks, or shards, of a region take up as they are stored; None where one that ``region_writes``
    stored is missing, or empty, or is plain and has another length.

    It reads no data. 0 where the array is remote. What zarr-python writes it leaves out where all is the fill value, so
    that nothing is missing where chunks of such an array (sharded, or encoded by rarer codecs) are.
    """
    if not isinstance(array.store, LocalStore):
        return 0
    layout, folder = _layout(array), array.store.root / array.path
    plain = layout is not None and layout.plain
    least: int | None = None
    if layout is not None and layout.shards is None:
        least = layout.chunk_nbytes if plain else 1
    total = 0
    for piece in _chunks_in(region, write_unit(array)):
        try:
            nbytes = (folder / array.metadata.encode_chunk_key(piece.chunk)).stat().st_size
        except OSError:
            nbytes = 0
        if least is not None and (nbytes != least if plain else nbytes < least):
            return None
        total += nbytes
    return total


def gather(out: np.ndarray, bands: Bands) -> None:
    """Put bands one behind the other into a matrix that has room for them."""
    row = 0
    for band in bands:
        out[row : row + band.shape[0]] = band
        row += band.shape[0]


def _write_direct(layout: Layout, piece: _Piece, bands: Bands, fill: Fill | None) -> None:
    """One chunk to its file: under another name first, so that a reader never meets half of it."""
    path = layout.root / layout.key(piece.chunk)
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")  # as DRAFT_NAME in output.py says
    if not (layout.plain or layout.zstd) or not _fills(piece, layout, rows=not layout.plain):
        fill = None
    bands = _whole_rows(layout, piece, bands)
    try:
        # Where the array went away, or is not seen, its folders must not come, or come back, without it.
        _check_in_sight(layout.name, layout.root, layout.metadata_name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(draft, "wb", buffering=0) as file:
            if fill is not None:
                if fill(file.fileno(), layout.zstd):
                    file.seek(0, os.SEEK_END)
                    bands = _missing_rows(layout, piece)  # none of what is compressed
                else:
                    file.truncate(0)
                    fill = None
            if fill is None and not layout.plain:
                bands = _encoded(layout, piece, bands)
            for band in bands:
                _write_fully(file, band)
        draft.replace(path)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if isinstance(error, StoreError) or not isinstance(error, OSError):
            raise  # what the bands could not give is not the store's fault
        raise StoreError(
            f"cannot write chunk {_chunk_name(piece)} of {layout.name} to {path}: {error}"
        ) from error


def _fills(piece: _Piece, layout: Layout, *, rows: bool) -> bool:
    """Whether a piece has all columns of its chunk, and all rows too where that is asked."""
    sides = [part.stop - part.start for part in piece.inside]
    return sides[1] == layout.chunks[1] and (not rows or sides[0] == layout.chunks[0])


def _whole_rows(layout: Layout, piece: _Piece, bands: Bands) -> Bands:
    """A piece's bands as those of the chunk: one at the edge is stored whole."""
    columns = piece.inside[1]
    for band in bands:
        yield _widened(band, layout) if columns.stop - columns.start < layout.chunks[1] else band
    yield from _missing_rows(layout, piece)


def _missing_rows(layout: Layout, piece: _Piece) -> Bands:
    """What the chunk has below a piece at the array's edge."""
    rows = piece.inside[0]
    missing = layout.chunks[0] - (rows.stop - rows.start)
    if missing:
        yield np.full((missing, layout.chunks[1]), layout.fill_value, layout.dtype)


def _encoded(layout: Layout, piece: _Piece, bands: Bands) -> Bands:
    """A whole chunk as it is stored, stretch by stretch."""
    if layout.zstd and layout.chunk_nbytes > SCRAP_NBYTES:
        yield from _compressed(layout.zstd, layout, piece, bands)
        return
    # The codecs take a chunk as a whole, so its bands are gathered first.
    chunk = np.empty(layout.chunks, layout.dtype, order="F" if layout.transposed else "C")
    gather(chunk, bands)
    with _encoding(layout, piece):
        encoded = encode(layout, chunk)
    yield encoded


def _compressed(zstd: Zstd, layout: Layout, piece: _Piece, bands: Bands) -> Bands:
    """One frame of Zstandard's, a megabyte at a time, as the chunk's bands are drawn."""
    with _encoding(layout, piece):
        compressor = zstandard.ZstdCompressor(level=zstd.level, write_checksum=zstd.checksum)
        chunker = compressor.chunker(size=layout.chunk_nbytes, chunk_size=SCRAP_NBYTES)
    for band in bands:
        with _encoding(layout, piece):
            parts = list(chunker.compress(_as_bytes(np.ascontiguousarray(band, layout.dtype))))
        yield from (np.frombuffer(part, np.uint8) for part in parts)
    with _encoding(layout, piece):
        parts = list(chunker.finish())
    yield from (np.frombuffer(part, np.uint8) for part in parts)


@contextmanager
def _encoding(layout: Layout, piece: _Piece) -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise  # the store is as it should be
    except Exception as error:  # every codec has exceptions of its own
        raise StoreError(
            f"cannot encode chunk {_chunk_name(piece)} of {layout.name}: {type(error).__name__}: {error}"
        ) from error


def _widened(band: np.ndarray, layout: Layout) -> np.ndarray:
    whole = np.full((band.shape[0], layout.chunks[1]), layout.fill_value, layout.dtype)
    whole[:, : band.shape[1]] = band
    return whole


def _write_fully(file: RawIOBase, band: np.ndarray) -> None:
    left = _as_bytes(np.ascontiguousarray(band))
    while left:
        left = left[file.write(left) :]


def _write_through_zarr(
    array: zarr.Array[Any], region: Sequence[slice], piece: _Piece, bands: Bands, fill: Fill | None
) -> None:
    place = tuple(
        slice(whole.start + part.start, whole.start + part.stop)
        for whole, part in zip(region, piece.target, strict=True)
    )
    # A shard is written as a whole, so its bands are gathered first.
    whole = np.empty([part.stop - part.start for part in place], array.dtype.newbyteorder("="))
    gather(whole, bands)
    write_region(array, place, whole)


def is_local(array: zarr.Array[Any]) -> bool:
    """Whether an array's chunks are files of this host."""
    return isinstance(array.store, LocalStore)


def local_path(target: Source) -> Path | None:
    """The path that a target names on a local disk; None for URLs and open arrays."""
    if isinstance(target, zarr.Array):
        return None
    text = os.fspath(target)
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    return None if "://" in text or "::" in text else Path(text)


def is_compressed(array: zarr.Array[Any]) -> bool:
    return bool(array.compressors)


def encoders_nbytes(output: zarr.Array[Any] | None, piece_nbytes: int, threads: int) -> int:
    """What encoders take up, besides what they encode and what becomes of it, where so many threads write stored pieces
    of ``output``, of so many bytes each; None: of an array that we create, compressed."""
    if output is None:
        return threads * (encoder_nbytes(DEFAULT_LEVEL, piece_nbytes) + SCRAP_NBYTES)
    each = chunk_encoder_nbytes(output)
    layout = _layout(output)
    codecs = layout.codecs if layout is not None else ()
    # Put together from what came of its chunks, or encoded twice, or by what grows its result and then copies it, a
    # piece is there a third time.
    thrice = output.shards is not None or len(codecs) > 1 or any(c.codec_id in GROWING_CODECS for c in codecs)
    gathered = threads * piece_nbytes if thrice else 0
    if output.shards is not None:  # whose chunks zarr-python encodes by threads of its own
        chunks_each = math.prod(map(ceil_div, output.shards, output.chunks))
        threads = min(threads * min(chunks_each, zarr.config.get("async.concurrency")), MOST_ZARR_THREADS)
    return gathered + (threads * (each + SCRAP_NBYTES) if each else 0)
