"""A batch of encoded chunks as a GPU decodes it: where each chunk's stored bytes go on the device, which blocks are
decoded from where to where, which checksums are made, and where the wanted part of each chunk ends up. Arithmetic
alone; `slots.py` has it carried out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tilewright.kernels.decoding import lz4, nvcomp
from tilewright.kernels.decoding import tables as columns
from tilewright.kernels.decoding import zstd_tables as zstd
from tilewright.pipeline.decoding import headers as headers_of
from tilewright.pipeline.decoding.coding import LZ4, RAW, ZSTD, Coding
from tilewright.pipeline.decoding.decoders import FORMATS, by_nvcomp, may_decode
from tilewright.pipeline.decoding.headers import Headers
from tilewright.pipeline.plan.decoding import NOWHERE, workspace_for
from tilewright.pipeline.transfer.file_rectangles import ANY_LENGTH, Rectangle, StoredChunk

ALIGNMENT = 256
"""Of decoded chunks on the device."""
NVCOMP_WORDS = 6
"""Of a block that nvCOMP decodes, besides a half for its status."""
SLACK_NBYTES = 16
"""Stored bytes behind a batch's last, which decoders may read and do not use."""


class Areas(NamedTuple):
    """Device memory of a batch: where each area begins, at a multiple of 256 bytes, and its length."""

    stored: int
    stored_nbytes: int
    decoded: int
    decoded_nbytes: int
    literals: int
    literals_nbytes: int
    """Of blocks of Zstandard, before they are put in their places."""
    sequences: int
    sequences_count: int
    """Of the same blocks, 8 bytes each."""
    words: int
    words_count: int
    """For the tables, 8 bytes each."""
    workspace_nbytes: int = 0
    """What nvCOMP decodes with, from where literals begin; 0: it decodes nothing."""


class Section(NamedTuple):
    """A table within the words."""

    begin: int
    rows: int
    columns: int = 1

    @property
    def stop(self) -> int:
        return self.begin + self.rows * self.columns

    def of(self, words: np.ndarray) -> np.ndarray:
        flat = words[self.begin : self.stop]
        return flat if self.columns == 1 else flat.reshape(self.rows, self.columns)

    def address(self, base: int) -> int:
        return base + 8 * self.begin

    def part(self, rows: slice) -> Section:
        """Some rows of it, from one to another."""
        return Section(self.begin + rows.start * self.columns, rows.stop - rows.start, self.columns)


class Sections(NamedTuple):
    """Where each table of a batch lies in its words: first what goes to the device, then what comes back, then what
    is needed only there; ``found`` and ``statuses`` go both ways. Offsets in them count from the begin of an area."""

    parts: Section
    """Of frames of Zstandard, as `kernels.decoding.zstd` has them."""
    frames: Section
    lz4: Section
    raw: Section
    """Blocks that are moved to the decoded bytes as they are."""
    stored: Section
    """Stretches that a CRC32C behind a chunk is of."""
    decoded: Section
    """Stretches of the chunks once decoded."""
    places: Section
    written: Section
    """The CRC32C behind each chunk, where nvCOMP decodes."""
    owners: Section
    """Of each block that nvCOMP decodes, the place of its chunk; frames of Zstandard come first."""
    sources: Section
    """Addresses, unlike all other sections."""
    nbytes: Section
    rooms: Section
    targets_of_nvcomp: Section
    """Addresses."""
    found: Section
    """The bytes that it decodes each to."""
    statuses: Section
    """int32, two to a word."""
    good_frames: Section
    good_blocks: Section
    suffixes: Section
    sums: Section
    lengths: Section
    targets: Section

    @property
    def given(self) -> slice:
        """The words that go to the device."""
        return slice(0, self.good_frames.begin)

    @property
    def results(self) -> slice:
        """The words that come back."""
        return slice(self.found.begin, self.lengths.begin)


class _Given(NamedTuple):
    """The columns of a `StoredChunk` but for its path, of several."""

    offset: np.ndarray
    nbytes: np.ndarray
    rows: np.ndarray
    stride: np.ndarray
    top: np.ndarray
    left: np.ndarray
    height: np.ndarray
    width: np.ndarray
    target: np.ndarray
    pitch: np.ndarray


@dataclass(frozen=True)
class Tables:
    """A batch, ready to be decoded once its rectangles have been brought to the device."""

    numbers: tuple[int, ...]
    """Of its chunks."""
    refused: tuple[int, ...]
    """Chunks that were to be in it, and are not."""
    rectangles: tuple[Rectangle, ...]
    """One a chunk: its stored bytes, and where on the device they go."""
    coding: Coding
    words: np.ndarray
    """int64, of all sections."""
    sections: Sections
    owners: np.ndarray
    """int64: of each frame, and then of each block of LZ4, the place of its chunk in `numbers`; nvCOMP's are not there
    but in a section."""
    nvcomp: tuple[tuple[str, int], ...]
    """What it decodes: formats, as `kernels.decoding.nvcomp` calls them, and how many blocks of each."""
    promised: np.ndarray
    """int64: the bytes that each of these has to decode to."""
    expected: np.ndarray
    """int64[chunks, 3]: the kind of checksum, its value, and the CRC32C behind the chunk or -1."""
    matrix: int
    """The address that places are counted from, in numbers."""
    most_place: int
    """Elements of the largest place."""

    @property
    def count(self) -> int:
        return len(self.numbers)

    @property
    def summed(self) -> bool:
        """Whether any chunk has a checksum of its decoded bytes."""
        return bool((self.expected[:, 0] != headers_of.NO_SUM).any())

    def failed(self) -> list[int]:
        """The chunks that are not what they should be, once `words` has the results."""
        if not self.numbers:
            return []
        sections, words = self.sections, self.words
        good = np.ones(self.count, bool)
        decoded = np.concatenate([sections.good_frames.of(words), sections.good_blocks.of(words)])
        good[self.owners[decoded != 1]] = False
        statuses = sections.statuses.of(words).view(np.int32)[: len(self.promised)]
        wrong = (statuses != nvcomp.SUCCESS) | (sections.found.of(words) != self.promised)
        good[sections.owners.of(words)[wrong]] = False
        kinds, values, suffixes = self.expected.T
        if self.coding.suffix:
            good &= sections.suffixes.of(words) == suffixes
        if self.summed:
            good &= (kinds == headers_of.NO_SUM) | ((sections.sums.of(words) & 0xFFFFFFFF) == values)
        return [self.numbers[place] for place in np.flatnonzero(~good)]


def words_for(count: int, most_blocks: int, most_parts: int) -> int:
    """The words that the tables of a batch of so many chunks, blocks and parts take at most."""
    chunk_words = 2 * columns.SUM_WORDS + columns.PLACE_WORDS + 3
    block_words = max(zstd.FRAME_WORDS, lz4.WORDS, columns.COPY_WORDS, NVCOMP_WORDS) + 1
    return count * chunk_words + most_blocks * block_words + most_parts * (zstd.BLOCK_WORDS + 2)


def _up(nbytes: np.ndarray, to: int) -> np.ndarray:
    return -(-nbytes // to) * to


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Where each of some stretches begins that lie one behind the other."""
    begins: np.ndarray = np.cumsum(lengths) - lengths
    return begins


def _fitting(needed: np.ndarray, kept: np.ndarray, room: int) -> np.ndarray:
    """Which of the chunks that are kept have room, one behind the other."""
    found: np.ndarray = kept & (np.cumsum(np.where(kept, needed, 0)) <= room)
    return found


def tables_of(
    numbers: Sequence[int],
    chunks: Sequence[StoredChunk],
    headers: Headers,
    coding: Coding,
    areas: Areas,
    matrix: int,
    words: np.ndarray,
    may: int = NOWHERE,
) -> Tables:
    """The tables of a batch of chunks, as far as they can be decoded and there is room.

    numbers, chunks: alike. headers: of these chunks. matrix: an address that no place lies before, and from which all
    are whole numbers away. words: int64, ``areas.words_count`` of them, at least as many as `words_for` says; written.
    may: what nvCOMP may decode.
    """
    rows, blocks, parts = headers.chunks, headers.blocks, headers.parts
    owners, kinds = blocks[:, headers_of.CHUNK], blocks[:, headers_of.KIND]
    part_owners = np.repeat(owners, blocks[:, headers_of.PARTS])
    kept = rows[:, headers_of.STORED_NBYTES] != headers_of.REFUSED
    stored_nbytes = np.where(kept, rows[:, headers_of.STORED_NBYTES], 0)
    given = np.array([chunk[1:] for chunk in chunks], np.int64).reshape(-1, len(_Given._fields))
    of = _Given(*given.T)
    decoded_nbytes = of.rows * of.stride
    encoded = parts[:, headers_of.PART_KIND] == zstd.ENCODED
    literals = np.where(encoded, parts[:, headers_of.PART_LITERALS], 0)
    sequences = np.where(encoded, parts[:, headers_of.PART_COUNT], 0)
    part_blocks = np.repeat(np.arange(len(blocks)), blocks[:, headers_of.PARTS])
    rooms = blocks[:, headers_of.ROOM]
    library = np.zeros(len(blocks), bool)
    if may_decode(may, coding):
        library = by_nvcomp(kinds, rooms, _total(sequences, part_blocks, len(blocks)))
    ours = ~library[part_blocks]
    literals, sequences = literals * ours, sequences * ours
    kept = _fitting(stored_nbytes, kept, areas.stored_nbytes - SLACK_NBYTES)
    kept = _fitting(_up(decoded_nbytes, ALIGNMENT), kept, areas.decoded_nbytes)
    frames_nbytes = np.where(library & (kinds == ZSTD), workspace_for(1, rooms), 0)
    kept = _fitting(_total(frames_nbytes, owners, len(rows)), kept, areas.workspace_nbytes)
    kept = _fitting(_total(literals, part_owners, len(rows)), kept, areas.literals_nbytes)
    kept = _fitting(_total(sequences, part_owners, len(rows)), kept, areas.sequences_count)
    begins = _starts(np.where(kept, stored_nbytes, 0))
    decoded_begins = _starts(np.where(kept, _up(decoded_nbytes, ALIGNMENT), 0))

    mine, my_parts = kept[owners], kept[part_owners] & ours
    frames, lz4s, raws = (mine & ~library & (kinds == kind) for kind in (ZSTD, LZ4, RAW))
    by_format = [np.flatnonzero(mine & library & (kinds == kind)) for kind in FORMATS]
    chosen = np.concatenate(by_format)
    count, places_in = int(kept.sum()), np.flatnonzero(kept).tolist()
    sections = _laid_out(count, len(parts), int(frames.sum()), int(lz4s.sum()), int(raws.sum()), len(chosen))
    words = words[: sections.targets.stop]

    # Parts keep their numbers, by which they name each other.
    table = sections.parts.of(words)
    table[:, zstd.SOURCE] = begins[part_owners] + parts[:, headers_of.PART_OFFSET]
    table[:, zstd.NBYTES] = parts[:, headers_of.PART_NBYTES]
    # Of chunks that are not in the batch nothing is read: they are empty.
    table[:, zstd.KIND] = np.where(my_parts, parts[:, headers_of.PART_KIND], zstd.RAW)
    table[:, zstd.LITERAL_NBYTES] = np.where(my_parts, parts[:, headers_of.PART_LITERALS], 0)
    for column, known in (
        (zstd.TREE, headers_of.PART_TREE),
        (zstd.LENGTHS, headers_of.PART_LENGTHS),
        (zstd.OFFSETS, headers_of.PART_OFFSETS),
        (zstd.MATCHES, headers_of.PART_MATCHES),
    ):
        table[:, column] = parts[:, known]
    table[:, zstd.LITERALS] = _starts(np.where(my_parts, literals, 0))
    table[:, zstd.SEQUENCES] = _starts(np.where(my_parts, sequences, 0))
    table[:, zstd.COUNT] = np.where(my_parts, sequences, 0)

    from_, nbytes = begins[owners] + blocks[:, headers_of.OFFSET], blocks[:, headers_of.NBYTES]
    to, room = decoded_begins[owners] + blocks[:, headers_of.TARGET], rooms
    firsts = blocks[:, headers_of.FIRST_PART], blocks[:, headers_of.PARTS]
    sections.frames.of(words)[...] = np.stack([*firsts, to, room], axis=1)[frames]
    sections.lz4.of(words)[...] = np.stack([from_, nbytes, to, room], axis=1)[lz4s]
    sections.raw.of(words)[...] = np.stack([from_, to, nbytes], axis=1)[raws]
    sections.stored.of(words)[...] = np.stack([begins, stored_nbytes], axis=1)[kept]
    sections.decoded.of(words)[...] = np.stack([decoded_begins, decoded_nbytes], axis=1)[kept]
    sections.places.of(words)[...] = _places(of, rows, coding, decoded_begins, matrix)[kept]
    # A file that holds one chunk alone and has changed meanwhile is not decoded.
    files_nbytes = np.where(of.nbytes == ANY_LENGTH, stored_nbytes + 4 * coding.suffix, ANY_LENGTH)
    places = zip(
        places_in,
        rows[kept, headers_of.STORED].tolist(),
        files_nbytes[kept].tolist(),
        stored_nbytes[kept].tolist(),
        (areas.stored + begins[kept]).tolist(),
        strict=True,
    )
    rectangles = tuple(
        Rectangle(chunks[place].path, offset, file_nbytes, 1, width, width, target, width)
        for place, offset, file_nbytes, width, target in places
    )
    place_of = np.cumsum(kept) - 1
    if len(chosen):
        sections.written.of(words)[...] = rows[kept, headers_of.SUFFIX]
        sections.owners.of(words)[...] = place_of[owners[chosen]]
        sections.sources.of(words)[...] = areas.stored + from_[chosen]
        sections.nbytes.of(words)[...] = nbytes[chosen]
        sections.rooms.of(words)[...] = rooms[chosen]
        sections.targets_of_nvcomp.of(words)[...] = areas.decoded + to[chosen]
        # What it does not write must not look like success, of an earlier batch perhaps.
        sections.found.of(words)[...] = sections.statuses.of(words)[...] = -1
    return Tables(
        numbers=tuple(numbers[place] for place in places_in),
        refused=tuple(numbers[place] for place in np.flatnonzero(~kept).tolist()),
        rectangles=rectangles,
        coding=coding,
        words=words,
        sections=sections,
        owners=place_of[np.concatenate([owners[frames], owners[lz4s]])],
        nvcomp=tuple(
            (form, len(found)) for form, found in zip(FORMATS.values(), by_format, strict=True) if len(found)
        ),
        promised=rooms[chosen],
        expected=rows[kept][:, [headers_of.SUM, headers_of.SUM_VALUE, headers_of.SUFFIX]],
        matrix=matrix,
        most_place=int((of.height * of.width)[kept].max(initial=0)) // _item(coding),
    )


def _total(values: np.ndarray, owners: np.ndarray, count: int) -> np.ndarray:
    """The sums of values that belong together."""
    totals = np.zeros(count, np.int64)
    np.add.at(totals, owners, values)
    return totals


def _laid_out(count: int, parts: int, frames: int, lz4s: int, raws: int, library: int) -> Sections:
    shapes = (
        (parts, zstd.BLOCK_WORDS),
        (frames, zstd.FRAME_WORDS),
        (lz4s, lz4.WORDS),
        (raws, columns.COPY_WORDS),
        (count, columns.SUM_WORDS),
        (count, columns.SUM_WORDS),
        (count, columns.PLACE_WORDS),
        (count if library else 0, 1),
        (library, 1),
        (library, 1),
        (library, 1),
        (library, 1),
        (library, 1),
        (library, 1),
        (-(-library // 2), 1),
        (frames, 1),
        (lz4s, 1),
        (count, 1),
        (count, 1),
        (parts, 1),
        (parts, 1),
    )
    begins = _starts(np.array([math.prod(shape) for shape in shapes]))
    return Sections(*(Section(begin, *shape) for begin, shape in zip(begins.tolist(), shapes, strict=True)))


def _item(coding: Coding) -> int:
    return coding.numbers.unit * coding.numbers.parts


def _places(of: _Given, rows: np.ndarray, coding: Coding, sources: np.ndarray, matrix: int) -> np.ndarray:
    """The table of places, of all chunks; ``sources`` and ``matrix`` are what both sides are counted from."""
    item, unit = _item(coding), coding.numbers.unit
    one = np.ones_like(sources)
    sides = rows[:, headers_of.BLOCK_NBYTES]
    table: np.ndarray = np.stack(
        [
            sources,
            of.rows * of.stride,
            of.top,
            of.left // item,
            of.height,
            of.width // item,
            one if coding.by_columns else of.stride // item,
            of.rows if coding.by_columns else one,
            (of.target - matrix) // unit,
            of.pitch // unit,
            rows[:, headers_of.SHUFFLE],
            np.maximum(1, rows[:, headers_of.ELEMENT]),
            np.where(sides > 0, sides, np.maximum(1, of.rows * of.stride)),
        ],
        axis=1,
    )
    return table
