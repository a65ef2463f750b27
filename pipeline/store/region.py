"""A region of an array as the parts of chunks that it touches: shared by reading and writing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tilewright.kernels.numbers import ceil_div

SCRAP_NBYTES = 2**20
"""Size of the buffer through which whole rows pass where only a part of each is wanted: it stays in cache."""


@dataclass(frozen=True)
class ChunkPart:
    """The part of one chunk that a region wants."""

    chunk: tuple[int, ...]
    inside: tuple[slice, ...]
    """Where it lies in the chunk."""
    target: tuple[slice, ...]
    """Where it goes in the region."""


def chunks_in(region: Sequence[slice], chunks: tuple[int, ...]) -> Iterator[ChunkPart]:
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
        yield from (ChunkPart((i,), (inside,), (target,)) for i, inside, target in axes[0])
        return
    for i, inside_rows, target_rows in axes[0]:
        for j, inside_columns, target_columns in axes[1]:
            yield ChunkPart((i, j), (inside_rows, inside_columns), (target_rows, target_columns))


def chunk_name(piece: ChunkPart) -> str:
    return "(" + ", ".join(map(str, piece.chunk)) + ")"
