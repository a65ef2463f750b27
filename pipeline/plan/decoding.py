"""How much of a GPU's memory is set aside so that it decodes chunks itself, and for how many at a time.

One block of Zstandard is decoded slowly there, hundreds at a time as fast as the bus brings them: so as much must be
under way as keeps a GPU busy. Literals and sequences take memory besides until they are put in their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tilewright.kernels.numbers import ceil_div

SLOTS = 4
"""Batches under way at once: while one is brought, others are decoded, and those of A and of B run side by side."""
SLOT_NBYTES = 2**27
"""Decoded bytes of a slot where memory is plenty."""
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

    @property
    def nbytes(self) -> int:
        """Device memory of all slots."""
        areas = self.stored_nbytes + self.decoded_nbytes + self.literals_nbytes + 8 * self.sequences_count
        return self.slots * (areas + (2 * self.chunks + self.blocks + self.parts) * WORDS_NBYTES)


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


def room_for(inputs: Sequence[CodedInput], device_nbytes: int) -> DecodingRoom | None:
    """The memory to be set aside of ``device_nbytes``; None where nothing is encoded, or not even one chunk fits into a
    slot."""
    if not inputs:
        return None
    largest, smallest = (extreme(given.chunk_nbytes for given in inputs) for extreme in (max, min))
    allowed = device_nbytes // MEMORY_SHARE
    nbytes = max(SLOT_NBYTES, ceil_div(largest, 256) * 256)
    while nbytes >= largest:
        room = _room(inputs, smallest, ceil_div(nbytes, 256) * 256)
        if room.nbytes <= allowed:
            return room
        nbytes = min(nbytes * 3 // 4, nbytes * allowed // room.nbytes)
    return None


def _room(inputs: Sequence[CodedInput], smallest: int, decoded: int) -> DecodingRoom:
    chunks = min(MOST_CHUNKS, ceil_div(decoded, smallest))
    in_blocks, framed = (any(given[place] for given in inputs) for place in (2, 3))
    blocks = chunks + (ceil_div(decoded, SMALLEST_BLOCK_NBYTES) + 2 * chunks if in_blocks else 0)
    parts = ceil_div(decoded, SMALLEST_PART_NBYTES) + 2 * blocks if framed else 0
    # What does not compress grows a little.
    stored = decoded + decoded // 64 + blocks * 64 + 4096
    literals, sequences = (decoded, ceil_div(decoded, NBYTES_A_SEQUENCE)) if framed else (256, 32)
    return DecodingRoom(
        SLOTS, chunks, blocks, parts, ceil_div(stored, 256) * 256, decoded, literals, sequences
    )
