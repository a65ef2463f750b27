"""How much of a GPU's memory is set aside so that it decodes chunks itself, and for how many at a time.

One block of Zstandard is decoded slowly there, hundreds at a time as fast as the bus brings them: so as much must be
under way as keeps a GPU busy. Literals and sequences take memory besides until they are put in their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tilewright.kernels.numbers import ceil_div

SLOTS = 4
"""Batches under way at once: while one is brought, others are decoded, and those of A and of B run side by side."""
SLOT_NBYTES = 2**27
"""Decoded bytes of a slot where memory is plenty."""
NVCOMP_SLOTS = 8
"""Where nvCOMP decodes, which takes each frame slowly, and a thousand at once as fast as the bus. More slots rather
than larger ones: a batch is not decoded before all of it is there."""
LEAST_SHARE_NBYTES = 2**25
"""Decoded bytes of a batch, at least, where there are so many: one costs the host half a millisecond."""
MOST_CHUNKS = 2**11
"""Of a slot, where chunks are small."""
MEMORY_SHARE = 12
"""At most this part of the memory that a plan has is set aside."""
SMALLEST_BLOCK_NBYTES = 2**15
"""Blosc's blocks are not expected to be smaller; where they are, the cores decode them."""
SMALLEST_PART_NBYTES = 2**13
"""The same of Zstandard's, which are 128 KiB mostly."""
NBYTES_A_SEQUENCE = 5
"""The fewest decoded bytes of a sequence that there is room for: of integers of 8 bytes, each takes one."""
WORDS_NBYTES = 128
"""What tables take on the device for a block or a part, and a block's share of a chunk's."""


WORKSPACE_SIXTEENTHS = 49
WORKSPACE_A_FRAME_NBYTES = 2**13
"""What nvCOMP decodes frames of Zstandard with, sixteenths of a byte for each decoded one, and bytes for each frame: a
little more than what nvCOMP 6.0 says. Blocks of LZ4 take none."""

NOWHERE, CHECKED, EVERYWHERE = range(3)
"""Which chunks nvCOMP may decode: none; those whose stored bytes have a checksum, which is compared before; all."""


class DecodingRoom(NamedTuple):
    """The memory of each slot, in bytes, and what a batch in it may have."""

    slots: int
    chunks: int
    blocks: int
    parts: int
    stored_nbytes: int
    decoded_nbytes: int
    literals_nbytes: int
    sequences_count: int
    nvcomp: int = NOWHERE
    """NOWHERE, CHECKED or EVERYWHERE."""
    workspace_nbytes: int = 0
    """What nvCOMP decodes with; it lies where literals and sequences do."""

    @property
    def scratch_nbytes(self) -> int:
        """Of literals and sequences, or of nvCOMP's workspace."""
        return max(self.literals_nbytes + 8 * self.sequences_count, self.workspace_nbytes)

    @property
    def nbytes(self) -> int:
        """Device memory of all slots."""
        areas = self.stored_nbytes + self.decoded_nbytes + self.scratch_nbytes
        return self.slots * (areas + (2 * self.chunks + self.blocks + self.parts) * WORDS_NBYTES)


def workspace_for(count: int, nbytes: Any) -> Any:
    """What nvCOMP decodes so many frames with, to so many bytes together: a number, or an array of them."""
    return -(-nbytes * WORKSPACE_SIXTEENTHS // 16) + count * WORKSPACE_A_FRAME_NBYTES


class CodedInput(NamedTuple):
    """What a plan has to know of an input that a GPU may decode."""

    name: str
    """Of its codec, for people."""
    chunk_nbytes: int
    """Decoded."""
    in_blocks: bool
    """Whether a chunk has many blocks that are encoded each by itself."""
    framed: bool
    """Whether they may be frames of Zstandard."""


def room_for(inputs: Sequence[CodedInput], device_nbytes: int, nvcomp: int = NOWHERE) -> DecodingRoom | None:
    """The memory to be set aside of ``device_nbytes``; None where nothing is encoded, or not even one chunk fits into a
    slot. nvcomp: what it may decode."""
    if not inputs:
        return None
    largest, smallest = (extreme(given.chunk_nbytes for given in inputs) for extreme in (max, min))
    allowed = device_nbytes // MEMORY_SHARE
    nbytes = max(SLOT_NBYTES, ceil_div(largest, 256) * 256)
    while nbytes >= largest:
        room = _room(inputs, smallest, ceil_div(nbytes, 256) * 256, nvcomp)
        if room.nbytes <= allowed:
            return room
        nbytes = min(nbytes * 3 // 4, nbytes * allowed // room.nbytes)
    return None


def _room(inputs: Sequence[CodedInput], smallest: int, decoded: int, nvcomp: int) -> DecodingRoom:
    chunks = min(MOST_CHUNKS, ceil_div(decoded, smallest))
    in_blocks, framed = (any(given[place] for given in inputs) for place in (2, 3))
    blocks = chunks + (ceil_div(decoded, SMALLEST_BLOCK_NBYTES) + 2 * chunks if in_blocks else 0)
    parts = ceil_div(decoded, SMALLEST_PART_NBYTES) + 2 * blocks if framed else 0
    # What does not compress grows a little.
    stored = decoded + decoded // 64 + blocks * 64 + 4096
    literals, sequences = (decoded, ceil_div(decoded, NBYTES_A_SEQUENCE)) if framed else (256, 32)
    workspace = workspace_for(blocks, decoded) if framed and nvcomp != NOWHERE else 0
    return DecodingRoom(
        SLOTS if nvcomp == NOWHERE else NVCOMP_SLOTS,
        chunks,
        blocks,
        parts,
        ceil_div(stored, 256) * 256,
        decoded,
        literals,
        sequences,
        nvcomp,
        ceil_div(workspace, 256) * 256,
    )
