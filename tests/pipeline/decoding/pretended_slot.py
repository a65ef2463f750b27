"""A slot whose device is host memory: it does to a batch what its tables say, by device code compiled for the CPU."""

from __future__ import annotations

import ctypes
from typing import Any

import google_crc32c
import numpy as np
import xxhash

from tilewright.kernels.decoding import tables as columns
from tilewright.kernels.decoding import zstd_host
from tilewright.kernels.gpu.driver_error import DriverError
from tilewright.pipeline.decoding.tables import Areas, Tables, words_for


def memory_at(place: int, nbytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(place), np.uint8)


def aligned(nbytes: int) -> np.ndarray:
    memory = np.zeros(nbytes + 256, np.uint8)
    begin = -memory.ctypes.data % 256
    return memory[begin : begin + nbytes]


class PretendedSlot:
    """refuse: whether the GPU refuses every batch. busy: how often it is asked in vain whether it is done."""

    def __init__(self, chunks: int, nbytes: int, *, refuse: bool = False, busy: int = 0) -> None:
        self.chunks, self._refuse, self._busy = chunks, refuse, busy
        self.blocks, self.parts = 1000, 1000
        self._asked = 0
        count = words_for(chunks, self.blocks, self.parts)
        self.words = np.zeros(count, np.int64)
        self._memory = [aligned(size // 8 * 8) for size in (2 * nbytes + 8192, nbytes, nbytes)]
        (stored, decoded, literals), sequences = self._memory, nbytes
        self.areas = Areas(
            *(stored.ctypes.data, len(stored), decoded.ctypes.data, len(decoded)),
            *(literals.ctypes.data, len(literals), 0, sequences, 0, count),
        )
        self.batches: list[tuple[int, ...]] = []
        self.device: np.ndarray | None = None
        """What it writes to, which somebody has to hold."""
        self.wrong: tuple[int, ...] = ()
        """Frames, or blocks, of the next batches that the GPU does not get right."""

    def begin(self, tables: Tables) -> None:
        if self._refuse:
            raise DriverError("the driver is not there", 999)
        self._asked = self._busy
        self.batches.append(tables.numbers)
        sections, words = tables.sections, tables.words
        stored, decoded, literals = self._memory
        words[sections.results] = -1
        for begin, to, nbytes in sections.raw.of(words).tolist():
            decoded[to : to + nbytes] = stored[begin : begin + nbytes]
        parts, frames = sections.parts.of(words), sections.frames.of(words)
        if len(frames):
            sections.good_frames.of(words)[:] = zstd_host.decode_frames(
                stored, parts, frames, len(literals), self.areas.sequences_count, decoded
            )
        blocks = sections.lz4.of(words)
        if len(blocks):
            sections.good_blocks.of(words)[:] = zstd_host.decode_lz4(stored, blocks, decoded)
        for wrong in self.wrong:
            section = sections.good_frames if len(frames) else sections.good_blocks
            section.of(words)[wrong] = 0
        for place in range(tables.count):
            if tables.coding.suffix:
                begin, nbytes = sections.stored.of(words)[place].tolist()
                checksum = google_crc32c.value(stored[begin : begin + nbytes].tobytes())
                sections.suffixes.of(words)[place] = checksum
            begin, nbytes = sections.decoded.of(words)[place].tolist()
            data = decoded[begin : begin + nbytes].tobytes()
            sections.sums.of(words).view(np.uint64)[place] = xxhash.xxh64_intdigest(data)
        for row in sections.places.of(words):
            self._place(row, tables)

    def _place(self, row: np.ndarray, tables: Tables) -> None:
        numbers = tables.coding.numbers
        item = numbers.unit * numbers.parts
        source, nbytes = int(row[columns.SOURCE]), int(row[columns.CHUNK_NBYTES])
        data = self._memory[1][source : source + nbytes]
        if row[columns.SHUFFLE]:
            data = _unshuffled(data, row)
        elements = data.reshape(-1, item)
        if numbers.swapped:
            elements = elements.reshape(-1, numbers.unit)[:, ::-1].reshape(-1, item)
        for line in range(int(row[columns.HEIGHT])):
            first = (int(row[columns.TOP]) + line) * int(row[columns.ROW_STEP])
            across = int(row[columns.LEFT]) + np.arange(int(row[columns.WIDTH]))
            found = elements[first + across * int(row[columns.COLUMN_STEP])]
            to = (int(row[columns.TARGET]) + line * int(row[columns.PITCH])) * numbers.unit
            memory_at(tables.matrix + to, found.size)[:] = found.reshape(-1)

    def done(self) -> bool:
        self._asked -= 1
        return self._asked < 0

    def wait(self) -> None:
        self._asked = 0

    def seconds(self) -> float:
        return 0.001


def _unshuffled(data: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Blosc's shuffling undone, block by block."""
    element, side = int(row[columns.ELEMENT]), int(row[columns.BLOCK_NBYTES])
    out = data.copy()
    for begin in range(0, len(data), side):
        block = data[begin : begin + side]
        count = len(block) // element
        whole = block[: count * element]
        if row[columns.SHUFFLE] == columns.BYTES:
            out[begin : begin + len(whole)] = whole.reshape(element, count).T.reshape(-1)
        elif count % 8 == 0:
            bits: Any = np.unpackbits(whole.reshape(element * 8, count // 8), axis=1, bitorder="little")
            out[begin : begin + len(whole)] = np.packbits(bits.T, axis=1, bitorder="little").reshape(-1)
    return out
