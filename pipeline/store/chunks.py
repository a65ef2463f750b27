"""Where an array's chunks lie in local files, and how a chunk's bytes become elements and elements become bytes.

This bypasses zarr-python: one system call for a chunk's bytes, on the caller's thread, and one numcodecs decoder
straight into the destination. (Zstandard's chunks above 1 MiB go through `transfer/zstd.py` instead, see `region_read`,
and on the way to a GPU through `transfer/zstd_chunks.py`.) The encoding is taken from zarr-python's metadata objects;
an array that is stored in any other way has no ``ChunkLayout`` and is left to zarr-python.
"""

from __future__ import annotations

import math
import os
import re
import struct
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numcodecs
import numcodecs.blosc
import numpy as np
import zarr
import zstandard
from isal.igzip_lib import DECOMP_GZIP, DECOMP_ZLIB, IgzipDecompressor
from zarr.codecs import BytesCodec, ShardingCodec, TransposeCodec
from zarr.storage import LocalStore

from tilewright.kernels.decoding.numbers import Numbers
from tilewright.kernels.gpu.memory import is_out_of_memory
from tilewright.pipeline.decoding.coding import BLOSC, FORMS, RAW, Coding
from tilewright.pipeline.store.region import Flattened, Masked, Section, StoredArray
from tilewright.pipeline.store.sources.mapped import Mapped, MappedStore
from tilewright.pipeline.transfer.zstd import encoder_nbytes

KNOWN_CODECS = ("zstd", "blosc", "lz4", "gzip", "zlib", "crc32c")
"""Bytes-to-bytes codecs, by numcodecs' names. Zarr's format 3 has some under these names, and the rest, as zarr-python
writes them, under these with the prefix ``numcodecs.``."""

ELEMENTWISE = ("delta", "fixedscaleoffset", "astype", "quantize", "bitround", "packbits")
"""Filters of elements, in the order in which they lie in a chunk."""

FILTERS = ("shuffle", "fletcher32", "bz2", "crc32", "adler32", "jenkins_lookup3", *ELEMENTWISE)
"""numcodecs' others that need no more of a chunk than its bytes: slower than those above, and as fast here as they are.
Format 3 has them under these names with the prefix, and HDF5 the first two."""

MISSING = 2**64 - 1
"""Offset and length, in a shard's index, of an inner chunk that was never written."""

MOST_CODED_NBYTES = 2**31 - 2**20
"""The largest chunk that may be decoded on a GPU, so that no length in a chunk comes near 32 bits."""

BLOSC_BLOCK_NBYTES = 2**20
"""The largest block that Blosc chooses by default; its codecs encode each block separately."""
MOST_ZSTD_LEVEL = 22
"""libzstd's highest level, which Blosc's level 9 asks for."""

DRAFT_NAME = re.compile(r"\.[0-9a-f]{32}\.partial$")
"""How the name of a chunk or metadata file ends while it is being written."""

DRAFTS_NAME = re.compile(r"tilewright-drafts-[0-9a-f]{32}(\.ended)?")
"""The folder, in a growing array, where one run writes chunks before they get their names; with the ending, one that is
being removed."""

METADATA_NAMES = {2: ".zarray", 3: "zarr.json"}
"""The file that marks a folder as an array, by Zarr's format."""

Extent: TypeAlias = "tuple[int, int]"
"""Offset and length, in bytes, of a chunk in its file."""


class DamagedChunkError(ValueError):
    """Stored bytes that are not a valid chunk of the array."""


class Zstd(NamedTuple):
    """Zstandard's compression parameters, as libzstd has them."""

    level: int
    checksum: bool


@dataclass(frozen=True)
class Shards:
    """Chunks that share a file, with an index of their positions before or after them."""

    counts: tuple[int, ...]
    """Chunks along each side of a shard."""
    index_first: bool
    index_codecs: tuple[Any, ...]
    """As ``ChunkLayout.codecs``."""

    @property
    def index_nbytes(self) -> int:
        return 16 * math.prod(self.counts) + 4 * len(self.index_codecs)


@dataclass(frozen=True)
class ChunkLayout:
    """An array in local files whose chunks can be read without zarr."""

    name: str
    root: Path
    metadata_name: str
    """The file below ``root`` that marks it as an array."""
    key: Callable[[tuple[int, ...]], str]
    """A file's name from the grid index of its chunk, or of its shard."""
    chunks: tuple[int, ...]
    dtype: np.dtype
    """As stored, including the byte order."""
    fill_value: Any
    codecs: tuple[Any, ...] = ()
    """numcodecs' codecs for a chunk's bytes, in the order of encoding."""
    order: tuple[int, ...] = ()
    """The axes of a chunk as its elements lie, the last one fastest; empty: as the array has them."""
    shards: Shards | None = None
    flattened: Flattened | None = None
    """The array that is seen as a matrix, where ``chunks`` are those of the matrix."""
    mapped: Mapped | None = None
    """Where chunks lie in a file that is no Zarr; one that holds the whole array plain counts as one chunk."""

    @property
    def whole(self) -> bool:
        """Whether there is one chunk, the whole array, of which any part is read alone."""
        return self.mapped is not None and self.mapped.whole

    @property
    def transposed(self) -> bool:
        """Whether the elements of a chunk lie in another order than the array's: of a matrix, column by column."""
        return self.order not in ((), tuple(range(len(self.chunks))))

    @property
    def plain(self) -> bool:
        """Whether a chunk's bytes are its elements, row by row, just as in memory."""
        return not self.codecs and not self.transposed and self.dtype.isnative

    @property
    def zstd(self) -> Zstd | None:
        """How a chunk was compressed, if Zstandard is all that keeps it from being `plain`; else None."""
        if len(self.codecs) != 1 or self.codecs[0].codec_id != "zstd":
            return None
        if not replace(self, codecs=()).plain:
            return None
        # numcodecs lowers any higher level, which format 2 may have, to the highest.
        return Zstd(min(self.codecs[0].level, zstandard.MAX_COMPRESSION_LEVEL), self.codecs[0].checksum)

    @property
    def coding(self) -> Coding | None:
        """How a chunk of a matrix is encoded, where a GPU may decode it; None where it is plain, or is encoded by what
        only cores undo."""
        names = [codec.codec_id for codec in self.codecs]
        suffix = names[-1:] == ["crc32c"]
        names = names[: len(names) - suffix]
        if self.plain or self.whole or len(self.chunks) != 2 or len(names) > 1:
            return None
        if (
            not set(names) <= set(FORMS)
            or self.dtype.kind not in "iufcb"
            or self.chunk_nbytes > MOST_CODED_NBYTES
        ):
            return None
        form = FORMS[names[0]] if names else RAW
        numbers = Numbers.of(self.dtype, shuffled=form == BLOSC)
        return Coding(form, suffix, numbers, self.transposed)

    @property
    def chunk_nbytes(self) -> int:
        return math.prod(self.chunks) * self.dtype.itemsize

    def place(self, chunk: tuple[int, ...]) -> tuple[int, ...]:
        """The indices of a chunk in the array that is stored, also where that is seen as a matrix."""
        if self.flattened is None:
            return chunk
        view = self.flattened
        parts = [side.place(index) for side, index in zip(view.sides, chunk, strict=True)]
        found = dict(zip(view.rows + view.columns, parts[0] + parts[1], strict=True))
        return tuple(found[axis] for axis in range(len(found)))

    def file_name(self, chunk: tuple[int, ...]) -> str:
        """The file that holds a chunk, below ``root``."""
        chunk = self.place(chunk)
        if self.shards is not None:
            chunk = tuple(place // count for place, count in zip(chunk, self.shards.counts, strict=True))
        return self.key(chunk)

    def own_file(self, chunk: tuple[int, ...], *, stored: bool = False) -> str | None:
        """The path of a chunk's file, where no other array has parts at the same places of it. stored: the chunk, or
        shard, is named by its indices in the array that is stored."""
        if self.mapped is not None and self.mapped.variable:
            return None
        return f"{self.root}/{self.key(chunk) if stored else self.file_name(chunk)}"


def layout_of(array: StoredArray, name: str) -> ChunkLayout | None:
    """How to read the array's files without zarr; None where its codecs or its store need zarr, where it is seen as a
    matrix and its chunks are no rectangles of that, where a mask is read beside it, or
    where it is a section of another."""
    if isinstance(array, Masked | Section):
        return None
    if isinstance(array, Flattened):
        return _of_matrix(layout_of(array.array, name), array)
    if isinstance(array.store, MappedStore):
        return _of_mapped(encoding_of(array, name, Path()), array.store.mapped)
    if not isinstance(array.store, LocalStore):
        return None
    return encoding_of(array, name, array.store.root / array.path)


def coding_of(array: StoredArray) -> tuple[Coding, int] | None:
    """How an array's chunks are encoded, and what each decodes to, in bytes; None where no GPU may decode them."""
    if isinstance(array, Section):
        return coding_of(array.array)
    layout = layout_of(array, "")
    coding = None if layout is None else layout.coding
    return None if layout is None or coding is None else (coding, layout.chunk_nbytes)


def _of_mapped(layout: ChunkLayout | None, mapped: Mapped) -> ChunkLayout | None:
    """The layout of an array in a file that is no Zarr."""
    if layout is None:
        return None
    folder, file = os.path.split(mapped.path)
    return replace(
        layout,
        root=Path(folder),
        metadata_name=file,
        key=lambda chunk: file,
        chunks=mapped.shape if mapped.whole else layout.chunks,
        fill_value=mapped.fill,
        mapped=mapped,
    )


def _of_matrix(layout: ChunkLayout | None, view: Flattened) -> ChunkLayout | None:
    """The layout of an array's chunks as those of the matrix that it is seen as; None where they are no rectangles of
    that."""
    rows, columns = view.sides
    if layout is None or not (layout.whole or (rows.is_regular and columns.is_regular)):
        return None
    order = matrix_order(layout, view)
    chunks = view.shape if layout.whole else view.unit
    return None if order is None else replace(layout, chunks=chunks, order=order, flattened=view)


def matrix_order(layout: ChunkLayout, view: Flattened) -> tuple[int, ...] | None:
    """In which order the elements of an array's chunks lie for the matrix that it is seen as: ``()`` row by row,
    ``(1, 0)`` column by column, None neither. layout: the array's own."""

    def long(axes: Sequence[int]) -> list[int]:
        return [axis for axis in axes if layout.chunks[axis] > 1]

    found = long(layout.order or range(len(layout.chunks)))
    if found == long(view.rows + view.columns):
        return ()
    return (1, 0) if found == long(view.columns + view.rows) else None


def encoding_of(array: zarr.Array[Any], name: str, root: Path) -> ChunkLayout | None:
    """How the array's chunks are encoded, in whatever store; None where its codecs need zarr."""
    metadata: Any = array.metadata
    layout = ChunkLayout(
        name=name,
        root=root,
        metadata_name=METADATA_NAMES[metadata.zarr_format],
        key=metadata.encode_chunk_key,
        chunks=array.chunks,
        dtype=array.dtype,
        fill_value=array.fill_value if array.fill_value is not None else 0,
    )
    if metadata.zarr_format == 2:
        codecs = (*(metadata.filters or ()), *filter(None, [metadata.compressor]))
        if any(codec.codec_id not in (*KNOWN_CODECS, *FILTERS) for codec in codecs):
            return None
        order = tuple(reversed(range(array.ndim))) if metadata.order == "F" else ()
        return replace(layout, codecs=codecs, order=order)
    chain: Sequence[Any] = metadata.codecs
    if len(chain) == 1 and isinstance(chain[0], ShardingCodec):
        index = _with_codecs(replace(layout, dtype=np.dtype(np.uint64)), chain[0].index_codecs)
        if index is None or not index.dtype.isnative or index.transposed:
            return None
        if any(codec.codec_id != "crc32c" for codec in index.codecs):
            return None  # the index would have no fixed size
        counts = tuple(whole // part for whole, part in zip(array.shards or (), array.chunks, strict=True))
        first = _plain_value(chain[0].index_location) == "start"
        layout = replace(layout, shards=Shards(counts, first, index.codecs))
        chain = chain[0].codecs
    return _with_codecs(layout, chain)


def codecs_for_zarr(array: StoredArray) -> list[str]:
    """The names of the codecs by which the chunks of an array are encoded that only zarr-python reads, each once; none
    where they are read without it, as far as that depends on codecs."""
    if isinstance(array, Masked | Section):
        return codecs_for_zarr(array.array)
    stored = array.array if isinstance(array, Flattened) else array
    if encoding_of(stored, "", Path()) is not None:
        return []
    metadata: Any = stored.metadata
    if metadata.zarr_format == 2:
        names = [codec.codec_id for codec in (*(metadata.filters or ()), metadata.compressor) if codec]
    else:
        chain: Sequence[Any] = metadata.codecs
        if len(chain) == 1 and isinstance(chain[0], ShardingCodec):
            chain = (*chain[0].codecs, *chain[0].index_codecs)
        names = [str(codec.to_dict()["name"]) for codec in chain if not isinstance(codec, BytesCodec)]
    return list(dict.fromkeys(names))


def _with_codecs(layout: ChunkLayout, chain: Sequence[Any]) -> ChunkLayout | None:
    """The layout of chunks encoded by a chain of format 3's codecs; None where one of them is not known."""
    codecs = []
    for codec in chain:
        if isinstance(codec, TransposeCodec):
            before = layout.order or tuple(range(len(layout.chunks)))
            layout = replace(layout, order=tuple(before[axis] for axis in codec.order))
        elif isinstance(codec, BytesCodec):
            little = _plain_value(codec.endian) in (None, "little")  # single bytes have no order
            layout = replace(layout, dtype=layout.dtype.newbyteorder("<" if little else ">"))
        else:
            known = _of_numcodecs(codec)
            if known is None:
                return None
            codecs.append(known)
    layout = replace(layout, codecs=tuple(codecs))
    elementwise = [codec for codec in codecs if codec.codec_id in ELEMENTWISE]
    if not elementwise:
        return layout
    # zarr-python gives these an array of the dtype that they say, in whatever order it lies.
    decoded = getattr(elementwise[0], "decode_dtype", getattr(elementwise[0], "dtype", layout.dtype))
    alike = not layout.transposed and layout.dtype.isnative and decoded == layout.dtype
    return layout if alike else None


def _of_numcodecs(codec: Any) -> Any:
    """numcodecs' codec for a bytes-to-bytes codec of format 3; None where it is not known."""
    description = codec.to_dict()
    name = description["name"]
    known = name.removeprefix("numcodecs.")
    if known not in KNOWN_CODECS and (known not in FILTERS or known == name):
        return None
    settings = dict(description.get("configuration", {}))
    if isinstance(settings.get("shuffle"), str):  # format 3 has names for it
        settings["shuffle"] = getattr(numcodecs.blosc, settings["shuffle"].upper())
    return numcodecs.get_codec({"id": known, **settings})


def chunk_encoder_nbytes(array: zarr.Array[Any]) -> int:
    """The most bytes that encoding one of an array's chunks takes besides the chunk in memory and as stored:
    Zstandard's tables and window, by its level or by Blosc's. Other known codecs take little."""
    chunk_nbytes = math.prod(array.chunks) * array.dtype.itemsize
    most = 0
    for compressor in array.compressors:
        codec: Any = compressor if hasattr(compressor, "codec_id") else _of_numcodecs(compressor)
        if codec is None:
            continue
        if codec.codec_id == "zstd":
            most = max(most, encoder_nbytes(codec.level, chunk_nbytes))
        elif codec.codec_id == "blosc" and codec.cname == "zstd":
            level = 2 * codec.clevel - 1 if codec.clevel < 8 else MOST_ZSTD_LEVEL  # as Blosc asks for it
            block_nbytes = min(chunk_nbytes, codec.blocksize or BLOSC_BLOCK_NBYTES)
            most = max(most, encoder_nbytes(level, block_nbytes))
    return most


def _plain_value(choice: Any) -> Any:
    """The value of a choice: an enumeration's member up to zarr 3.1, a plain value later."""
    return getattr(choice, "value", choice)


def find_chunk(
    layout: ChunkLayout, descriptor: int, chunk: tuple[int, ...], indexes: dict[str, np.ndarray]
) -> Extent | None:
    """Where a chunk lies in its open file; None: it was never written.

    indexes: of the shards opened so far, by file name; this shard's is added. Threads may share it: at worst two of
    them read the same index. Raises DamagedChunkError for a shard whose index is invalid, OSError as reading does.
    """
    stored_nbytes = os.fstat(descriptor).st_size
    if layout.mapped is not None:
        found = layout.mapped.extent(layout.place(chunk))
        if found is not None and sum(found) > stored_nbytes:
            raise DamagedChunkError(f"it lies up to byte {sum(found)}, and the file has {stored_nbytes}")
        return found
    if layout.shards is None:
        return 0, stored_nbytes
    name = layout.file_name(chunk)
    index = indexes.get(name)
    if index is None:
        index = indexes[name] = _read_index(layout.shards, descriptor, stored_nbytes)
    extent = extent_in(layout.shards, index, layout.place(chunk))
    if extent is not None and sum(extent) > stored_nbytes:
        raise DamagedChunkError(
            f"the shard's index says bytes {extent[0]} to {sum(extent)}, and the file has {stored_nbytes}"
        )
    return extent


def extent_in(shards: Shards, index: np.ndarray, chunk: tuple[int, ...]) -> Extent | None:
    """Where a chunk lies in its shard, by the shard's index; None: it was never written."""
    inside = tuple(place % count for place, count in zip(chunk, shards.counts, strict=True))
    offset, nbytes = (int(number) for number in index[inside])
    return None if offset == nbytes == MISSING else (offset, nbytes)


def _read_index(shards: Shards, descriptor: int, stored_nbytes: int) -> np.ndarray:
    """Offset and length of every chunk of a shard: uint64, the shard's counts × 2."""
    nbytes = shards.index_nbytes
    if stored_nbytes < nbytes:
        raise DamagedChunkError(f"the shard has {stored_nbytes} bytes and its index alone {nbytes}")
    data = read_bytes(descriptor, 0 if shards.index_first else stored_nbytes - nbytes, nbytes)
    return decode_index(shards, data)


def decode_index(shards: Shards, data: Any) -> np.ndarray:
    """The index of a shard from its stored bytes, as `_read_index` has it. Raises DamagedChunkError."""
    decoded = decode(shards.index_codecs, data, 16 * math.prod(shards.counts), None)
    return decoded.view("<u8").reshape(*shards.counts, 2)


def read_bytes(descriptor: int, offset: int, nbytes: int) -> bytes:
    """A stretch of a file, read by as many calls as it takes: one may return less than was asked for."""
    found = os.pread(descriptor, nbytes, offset)
    while len(found) < nbytes:
        more = os.pread(descriptor, nbytes - len(found), offset + len(found))
        if not more:
            raise OSError(f"the file ended at byte {offset + len(found)} while it was being read")
        found += more
    return found


def as_array(data: np.ndarray, layout: ChunkLayout) -> np.ndarray:
    """A chunk's decoded bytes, uint8, as an array with the array's axes: a view."""
    elements = data.view(layout.dtype)
    if not layout.order:
        return elements.reshape(layout.chunks)
    return elements.reshape([layout.chunks[axis] for axis in layout.order]).transpose(
        np.argsort(layout.order)
    )


def as_bytes(part: np.ndarray) -> memoryview:
    return flat_bytes(part).data


def flat_bytes(part: np.ndarray) -> np.ndarray:
    """The bytes of contiguous elements: uint8, no copy."""
    return part.reshape(-1).view(np.uint8)


def decode(codecs: Sequence[Any], data: Any, nbytes: int, room: np.ndarray | None) -> np.ndarray:
    """Decode one chunk: uint8, exactly ``nbytes`` of them, in ``room`` or in new memory.

    codecs: in the order of encoding. data: the chunk as stored. room: ``nbytes`` of contiguous uint8, which may be
    overwritten even if the chunk is then returned in other memory. Raises DamagedChunkError for what does not decode,
    fails its checksum, or has another length; errors that say memory ran out pass through (`is_out_of_memory`).
    """
    try:
        for codec in reversed(codecs[1:]):
            _stated_nbytes(codec, data)
            data = _decoded(codec, data)
        if codecs:
            data = _decode_last(codecs[0], data, nbytes, room)
    except DamagedChunkError:
        raise
    except Exception as error:  # every codec has exceptions of its own
        if is_out_of_memory(error):
            raise  # the chunk may be sound
        raise DamagedChunkError(f"{type(error).__name__}: {error}") from error
    decoded = np.frombuffer(data, np.uint8)
    if decoded.nbytes != nbytes:
        raise DamagedChunkError(_length(decoded.nbytes, nbytes))
    return decoded


def _decode_last(codec: Any, data: Any, nbytes: int, room: np.ndarray | None) -> Any:
    """Decode into given memory only if the data states in advance that it fills it: numcodecs does not report the
    length afterwards."""
    if codec.codec_id not in _STATED_NBYTES:
        return _decoded(codec, data)  # allocates its output, whatever it is given
    stated = _stated_nbytes(codec, data)
    if stated is not None and stated > nbytes:
        raise DamagedChunkError(_length(stated, nbytes))
    if stated is not None and stated < nbytes:
        return codec.decode(data)  # the first of several frames, or too short
    return codec.decode(data, out=np.empty(nbytes, np.uint8) if room is None else room)


def _decoded(codec: Any, data: Any) -> Any:
    inflated = _INFLATED.get(codec.codec_id)
    return codec.decode(data) if inflated is None else _inflate(data, inflated)


_INFLATED = {"zlib": DECOMP_ZLIB, "gzip": DECOMP_GZIP}
"""Codecs whose chunks, as most of HDF5's and NetCDF's are, ISA-L decompresses in less than half of the time that zlib
takes, to which numcodecs leaves them. It compares checksums, too."""


def _inflate(data: Any, flag: int) -> bytes:
    """As numcodecs' decoders do: of zlib one stream, of gzip all members, and zeros behind them are left out."""
    found: list[bytes] = []
    while True:
        member = IgzipDecompressor(flag=flag)
        found.append(member.decompress(data))
        if not member.eof:
            others = ", or other bytes follow its last member" if len(found) > 1 else ""
            raise DamagedChunkError(f"it was cut short{others}")
        data = member.unused_data.lstrip(b"\0")
        if flag != DECOMP_GZIP or not data:
            return found[0] if len(found) == 1 else b"".join(found)


def encode(layout: ChunkLayout, chunk: np.ndarray) -> np.ndarray:
    """Encode a whole chunk: uint8, as stored. Converts to the stored dtype; raises what codecs raise."""
    data: Any = np.ascontiguousarray(chunk.transpose(layout.order) if layout.order else chunk, layout.dtype)
    for codec in layout.codecs:
        data = codec.encode(data)
    return np.frombuffer(data, np.uint8)


def _length(found: int, expected: int) -> str:
    return f"it decodes to {found} bytes and a chunk has {expected}"


def _stated_nbytes(codec: Any, data: Any) -> int | None:
    """The decoded length that encoded data states; None where the data, or its codec, states none."""
    stated = _STATED_NBYTES.get(codec.codec_id)
    return None if stated is None else stated(data)


def _zstd_nbytes(data: Any) -> int | None:
    """The first frame's content size. None where it states none: numcodecs insists on filling memory that it is
    given."""
    nbytes: int = zstandard.frame_content_size(data)
    return None if nbytes < 0 else nbytes


def _blosc_nbytes(data: Any) -> int:
    """Blosc 1's header: bytes decoded, block size, bytes encoded. Its decoder does not check the last of them, so it is
    checked here."""
    decoded, _, encoded = struct.unpack_from("<III", data, 4)
    if encoded != len(data):
        raise DamagedChunkError(f"it has {len(data)} bytes and says that it has {encoded}")
    return int(decoded)


def _lz4_nbytes(data: Any) -> int:
    """numcodecs stores the decoded length before the block."""
    return int(struct.unpack_from("<I", data)[0])


_STATED_NBYTES: dict[str, Callable[[Any], int | None]] = {
    "zstd": _zstd_nbytes,
    "blosc": _blosc_nbytes,
    "lz4": _lz4_nbytes,
}
"""For each codec that can decode into given memory, how to find the decoded length in advance."""


def draft_of(path: Path) -> Path:
    """A new name for a chunk while it is being written, as `DRAFT_NAME` says."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")


def new_drafts_name() -> str:
    """A name for the folder of a run's unfinished chunks that no other run has had, as `DRAFTS_NAME` says."""
    return f"tilewright-drafts-{uuid.uuid4().hex}"
