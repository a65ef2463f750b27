"""A GPU's slots for batches of encoded chunks: memory, a stream, and the order in which a batch is decoded there."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import numpy as np

from tilewright.kernels.decoding import nvcomp
from tilewright.kernels.deferred import cuda
from tilewright.kernels.gpu.device_array import Memory, address
from tilewright.kernels.gpu.memory import allocating
from tilewright.kernels.gpu.transfer import (
    download_rectangle,
    pinned_bytes,
    upload_rectangle,
    upload_stream,
)
from tilewright.pipeline.decoding.tables import Areas, Section, Tables, words_for
from tilewright.pipeline.plan.decoding import NOWHERE, DecodingRoom


class Slot(Protocol):
    """Room for a batch on a device, and what decodes it there. For one batch at a time."""

    areas: Areas
    words: np.ndarray
    """int64, pinned: for the batch's tables."""
    chunks: int
    """The most chunks of a batch."""
    blocks: int
    """The most blocks."""
    parts: int
    """The most blocks of all frames of Zstandard."""
    nvcomp: int
    """What nvCOMP may decode, as a plan has it."""

    def begin(self, tables: Tables) -> None:
        """Enqueue the decoding of a batch, behind everything that lanes have sent so far. Raises DriverError."""

    def done(self) -> bool:
        """Whether the last batch is decoded, in its place, and its results are in ``words``."""

    def wait(self) -> None:
        """Wait until that is so."""

    def seconds(self) -> float:
        """How long that took from when its bytes were there. Once it is done."""


SOON_SECONDS = 0.25
"""What a run waits for code that is on disk already to be loaded."""


class Compiling:
    """The kernels that decode, being compiled on a thread of their own: that takes ten seconds, once for each machine,
    in which the cores decode."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._compile, name="tilewright-decoders", daemon=True)
        self._thread.start()
        self._thread.join(SOON_SECONDS)

    def _compile(self) -> None:
        from tilewright.kernels.decoding import launching

        try:
            cuda.current_context()  # attaches the thread to the GPU
            launching.prepare()
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        """Whether they can be launched. Raises what compiling raised."""
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()
        self.done()


class GpuSlot:
    """A `Slot` of the current GPU."""

    def __init__(self, room: DecodingRoom) -> None:
        """Raises NvcompError where nvCOMP is to decode and is not there."""
        from tilewright.kernels.decoding import checksums, guarding, launching, placing, zstd

        self._checksums, self._launching, self._placing = checksums, launching, placing
        self._guarding = guarding
        self.chunks, self.blocks, self.parts = room.chunks, room.blocks, room.parts
        self.nvcomp = room.nvcomp
        if room.nvcomp != NOWHERE:
            self._library = nvcomp.library()
            self._harmless = cuda.to_device(nvcomp.harmless())
        words = words_for(room.chunks, room.blocks, room.parts)
        nbytes = (room.stored_nbytes, room.decoded_nbytes, room.scratch_nbytes, 8 * words)
        with allocating("memory for decoding chunks on the GPU", sum(nbytes), on_gpu=True):
            self._memory = [cuda.device_array(max(size, 256), np.uint8) for size in nbytes]
        with allocating("pinned memory for tables of chunks", 8 * words, on_gpu=False):
            self.words = pinned_bytes(8 * words).view(np.int64)
        places = [address(memory) for memory in self._memory]
        sequences = places[2] + room.literals_nbytes
        self.areas = Areas(
            *(places[0], nbytes[0], places[1], nbytes[1], places[2], room.literals_nbytes),
            *(sequences, room.sequences_count, places[3], words, room.workspace_nbytes),
        )
        self._constants = cuda.to_device(zstd.constants())
        self._crc_tables = cuda.to_device(checksums.crc_tables())
        self._stream = cuda.stream()
        self._sent = cuda.event(timing=False)
        self._begun, self._done = cuda.event(), cuda.event()

    def begin(self, tables: Tables) -> None:
        stream, sections, areas = self._stream, tables.sections, self.areas
        self._sent.record(upload_stream())
        self._sent.wait(stream)
        self._begun.record(stream)
        self._copy(tables, sections.given, to_device=True)
        stored = _flat(areas.stored, areas.stored_nbytes, 1)
        decoded = _flat(areas.decoded, areas.decoded_nbytes, 1)
        if tables.coding.suffix:
            self._checksums.crc32c(
                stored,
                self._table(sections.stored),
                self._crc_tables,
                self._table(sections.suffixes, np.uint64),
                tables.count,
                stream,
            )
        longest = int(sections.raw.of(tables.words)[:, 2].max(initial=0))
        self._placing.copy(stored, decoded, self._table(sections.raw), sections.raw.rows, longest, stream)
        self._launching.decode_zstd(
            stored,
            _flat(areas.stored, areas.stored_nbytes, 4),
            self._table(sections.parts),
            self._table(sections.frames),
            self._constants,
            _flat(areas.literals, areas.literals_nbytes, 1),
            _flat(areas.literals, areas.literals_nbytes, 4),
            _flat(areas.sequences, 8 * areas.sequences_count, 8),
            self._table(sections.lengths),
            self._table(sections.targets),
            decoded,
            self._table(sections.good_frames),
            stream,
        )
        good = self._table(sections.good_blocks)
        self._launching.decode_lz4(stored, self._table(sections.lz4), decoded, good, stream)
        if tables.nvcomp:
            self._decode_by_nvcomp(tables)
        if tables.summed:
            words = _flat(areas.decoded, areas.decoded_nbytes, 8)
            sums = self._table(sections.sums, np.uint64)
            self._checksums.xxh64(words, decoded, self._table(sections.decoded), sums, tables.count, stream)
        numbers = tables.coding.numbers
        unit = 1 if numbers.shuffled else numbers.unit
        self._placing.place(
            numbers,
            _flat(areas.decoded, areas.decoded_nbytes, unit),
            _flat(tables.matrix, 2**62, numbers.unit),
            self._table(sections.places),
            tables.count,
            tables.most_place,
            stream,
        )
        self._copy(tables, sections.results, to_device=False)
        self._done.record(stream)

    def _decode_by_nvcomp(self, tables: Tables) -> None:
        """Behind our own kernels, whose literals and sequences it overwrites."""
        sections, areas, first = tables.sections, self.areas, 0
        for form, count in tables.nvcomp:
            mine = slice(first, first + count)
            sources, nbytes = sections.sources.part(mine), sections.nbytes.part(mine)
            if tables.coding.suffix:
                self._guarding.guard(
                    self._table(sections.suffixes, np.uint64),
                    self._table(sections.written),
                    self._table(sections.owners.part(mine)),
                    self._table(sources),
                    self._table(nbytes),
                    address(self._harmless) + nvcomp.HARMLESS_PLACES[form],
                    len(nvcomp.HARMLESS[form]),
                    self._stream,
                )
            blocks = nvcomp.Blocks(
                sources=sources.address(areas.words),
                nbytes=nbytes.address(areas.words),
                rooms=sections.rooms.part(mine).address(areas.words),
                targets=sections.targets_of_nvcomp.part(mine).address(areas.words),
                found=sections.found.part(mine).address(areas.words),
                statuses=sections.statuses.address(areas.words) + nvcomp.STATUS_NBYTES * first,
            )
            self._library.decode(
                form, count, blocks, areas.literals, areas.workspace_nbytes, int(self._stream)
            )
            first += count

    def _copy(self, tables: Tables, part: slice, *, to_device: bool) -> None:
        words = tables.words[part].reshape(1, -1)
        place = self.areas.words + 8 * part.start
        if to_device:
            upload_rectangle(words, place, words.nbytes, self._stream)
        else:
            download_rectangle(place, words.nbytes, words, self._stream)

    def _table(self, section: Section, dtype: Any = np.int64) -> Memory:
        place = section.address(self.areas.words)
        shape: tuple[int, ...] = (section.rows, section.columns)
        strides: tuple[int, ...] = (8 * section.columns, 8)
        if section.columns == 1:
            shape, strides = shape[:1], (8,)
        return Memory(place, shape, strides, np.dtype(dtype), self._stream, False)

    def done(self) -> bool:
        return bool(self._done.query())

    def wait(self) -> None:
        self._stream.synchronize()

    def seconds(self) -> float:
        return float(cuda.event_elapsed_time(self._begun, self._done)) / 1e3


def _flat(place: int, nbytes: int, item: int) -> Memory:
    return Memory(place, (nbytes // item,), (item,), np.dtype(f"u{item}"), None, False)
