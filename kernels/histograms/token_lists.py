"""Lists of tokens. This module needs no Numba; `token_order.py` puts lists in order and merges them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokens, one behind the other.

    Those of a histogram are all different, and in the order of their bytes, which for text is that of its code points.
    """

    data: np.ndarray
    """uint8: their bytes, one behind the other."""
    offsets: np.ndarray
    """int64[tokens + 1]: where each begins in ``data``."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, place: int) -> bytes:
        return self.data[self.offsets[place] : self.offsets[place + 1]].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        return (self[place] for place in range(len(self)))

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes + self.offsets.nbytes)

    @classmethod
    def of(cls, tokens: list[bytes]) -> Tokens:
        """These tokens."""
        offsets = np.zeros(len(tokens) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, tokens), np.int64, len(tokens)), out=offsets[1:])
        return cls(np.frombuffer(b"".join(tokens), np.uint8), offsets)

    def between(self, first: int, last: int) -> Tokens:
        """Those from one place to another, of the same memory if these are all."""
        if first == 0 and last == len(self):
            return self
        offsets = self.offsets[first : last + 1]
        return Tokens(self.data[offsets[0] : offsets[-1]], offsets - offsets[0])

    def chosen(self, which: np.ndarray) -> Tokens:
        """Some of them, in their order. which: bool[tokens]."""
        lengths = np.diff(self.offsets)
        offsets = np.zeros(np.count_nonzero(which) + 1, np.int64)
        np.cumsum(lengths[which], out=offsets[1:])
        return Tokens(self.data[np.repeat(which, lengths)], offsets)

    @classmethod
    def none(cls) -> Tokens:
        return cls(np.empty(0, np.uint8), np.zeros(1, np.int64))


def joined(lists: Sequence[Tokens]) -> Tokens:
    """Lists one behind the other."""
    if len(lists) == 1:
        return lists[0]
    ends = np.cumsum([0, *(len(each.data) for each in lists)]).tolist()
    offsets = [each.offsets[1:] + end for each, end in zip(lists, ends, strict=False)]
    data = np.concatenate([np.empty(0, np.uint8), *(each.data for each in lists)])
    return Tokens(data, np.concatenate([np.zeros(1, np.int64), *offsets]))


def most_frequent(counts: np.ndarray, most: int) -> np.ndarray:
    """The places of the ``most`` largest counts, the largest first, of equal ones the first first; none of 0."""
    occupied = np.flatnonzero(counts) if (counts == 0).any() else np.arange(len(counts))
    if len(occupied) > most > 0:
        least = np.partition(counts[occupied], len(occupied) - most)[len(occupied) - most]
        occupied = occupied[counts[occupied] >= least]
    order: Any = np.argsort(-counts[occupied], kind="stable")[:most]
    return occupied[order]


def encoding_of(by: str) -> str:
    """How tokens of a kind are written as text: n-grams of bytes with the character of its number for each byte."""
    return "latin-1" if by.endswith(":byte") else "utf-8"


def in_ascending_order(tokens: Tokens) -> bool:
    """Whether each token comes after the one before it."""
    before: bytes | None = None
    for token in tokens:
        if before is not None and before >= token:
            return False
        before = token
    return True
