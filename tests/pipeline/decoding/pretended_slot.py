"""A slot whose device is host memory: it does to a batch what its tables say, by device code compiled for the CPU, and
in nvCOMP's place by libzstd and LZ4, which check what they read."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import google_crc32c
import lz4.block
import numpy as np
import xxhash
import zstandard

from tilewright.kernels.decoding import nvcomp, zstd_host
from tilewright.kernels.decoding import tables as columns
from tilewright.kernels.gpu.driver_error import DriverError
from tilewright.pipeline.decoding.tables import Areas, Tables, words_for
from tilewright.pipeline.plan.decoding import NOWHERE


def memory_at(place: int, nbytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(place), np.uint8)


def aligned(nbytes: int) -> np.ndarray:
    memory = np.zeros(nbytes + 256, np.uint8)
    begin = -memory.ctypes.data % 256
    return memory[begin : begin + nbytes]


class PretendedSlot:
    """refuse: whether the GPU refuses every batch. busy: how often it is asked in vain whether it is done. nvcomp: what
    it may decode, as a plan has it."""

    def __init__(
        self, chunks: int, nbytes: int, *, refuse: bool = False, busy: int = 0, nvcomp: int = NOWHERE
    ) -> None:
        self.chunks, self._refuse, self._busy = chunks, refuse, busy
        self.blocks, self.parts, self.nvcomp = 1000, 1000, nvcomp
        self._asked = 0
        count = words_for(chunks, self.blocks, self.parts)
        self.words = np.zeros(count, np.int64)
        self._memory = [aligned(size // 8 * 8) for size in (2 * nbytes + 8192, nbytes, nbytes)]
        (stored, decoded, literals), sequences = self._memory, nbytes
        self.areas = Areas(
            *(stored.ctypes.data, len(stored), decoded.ctypes.data, len(decoded)),
            *(literals.ctypes.data, len(literals), 0, sequences, 0, count, 2**30),
        )
        self.batches: list[tuple[int, ...]] = []
        self.device: np.ndarray | None = None
        """What it writes to, which somebody has to hold."""
        self.by_nvcomp: list[tuple[str, bytes, int]] = []
        """What it was given: formats, blocks, and what each has to decode to."""
        self.sound: list[bool] = []
        """Which of these were sound."""
        self.nvcomp_fails: Callable[[int], tuple[int, int]] | None = None
        """From what a block decodes to, the length and the status that nvCOMP gives instead."""
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
        self._decode_by_nvcomp(tables)
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

    def _decode_by_nvcomp(self, tables: Tables) -> None:
        sections, words, first = tables.sections, tables.words, 0
        statuses = sections.statuses.of(words).view(np.int32)
        for form, count in tables.nvcomp:
            for number in range(first, first + count):
                source, nbytes, room, target, owner = (
                    int(section.of(words)[number])
                    for section in (
                        sections.sources,
                        sections.nbytes,
                        sections.rooms,
                        sections.targets_of_nvcomp,
                        sections.owners,
                    )
                )
                data = memory_at(source, nbytes).tobytes()
                if tables.coding.suffix:
                    begin, length = sections.stored.of(words)[owner].tolist()
                    checksum = google_crc32c.value(self._memory[0][begin : begin + length].tobytes())
                    if checksum != sections.written.of(words)[owner]:
                        data = nvcomp.HARMLESS[form]
                self.by_nvcomp.append((form, data, room))
                found = decoded_on_host(form, data, room)
                self.sound.append(found is not None)
                if found is None:
                    continue
                assert len(found) <= room
                memory_at(target, len(found))[:] = np.frombuffer(found, np.uint8)
                sections.found.of(words)[number], statuses[number] = len(found), nvcomp.SUCCESS
                if self.nvcomp_fails is not None:
                    sections.found.of(words)[number], statuses[number] = self.nvcomp_fails(len(found))
            first += count

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


def decoded_on_host(form: str, data: bytes, room: int) -> bytes | None:
    """What a block decodes to, by the library of its format; None where that refuses it."""
    try:
        if form == "zstd":
            return bytes(zstandard.ZstdDecompressor().decompress(data, max_output_size=room))
        return bytes(lz4.block.decompress(data, uncompressed_size=room))
    except (zstandard.ZstdError, lz4.block.LZ4BlockError):
        return None


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
