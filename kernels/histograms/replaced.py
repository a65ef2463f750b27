"""U+FFFD that a text holds, apart from those that stand for bytes which are no UTF-8; and how many would stand for
those where no count of characters says it."""

from __future__ import annotations

import numpy as np
from numba import njit, uint64

from tilewright.kernels.cpu.loops import kept, read_only
from tilewright.kernels.cpu.vectors import LANES, ef_mask, trailing_zeros
from tilewright.kernels.histograms.host import character_at, whole_characters
from tilewright.kernels.histograms.tokens import CODE_BITS, CODE_MASK, REPLACEMENT, Kind


@kept
@njit(nogil=True)
def _written(data, edges, start, stop, found):  # type: ignore[no-untyped-def]
    base, one = np.int64(data.ctypes.data), uint64(1)
    for row in range(len(found)):
        i, last = np.int64(max(edges[row], start)), np.int64(min(edges[row + 1] - 2, stop))
        # Its first byte is no continuation, so that a character begins there, whatever stands before it.
        while i + LANES <= last:
            leads = ef_mask(base + i)
            while leads:
                place = i + trailing_zeros(leads)
                leads &= leads - one
                if data[place + 1] == 0xBF and data[place + 2] == 0xBD:
                    found[row] += 1
            i += LANES
        while i < last:
            if data[i] == 0xEF and data[i + 1] == 0xBF and data[i + 2] == 0xBD:
                found[row] += 1
            i += 1


def undecoded(
    counts: np.ndarray, kind: Kind, data: np.ndarray, edges: np.ndarray, start: int, stop: int
) -> np.ndarray:
    """How many U+FFFD in ``counts``, int64[(documents, bins)], stand for malformed bytes: int64[documents], 0 for kinds
    that do not decode.

    data, edges, start, stop: the text that was counted, as `count_host` takes it.
    """
    found = np.zeros(len(counts), np.int64)
    if kind.name != "codepoint" or not counts[:, REPLACEMENT].any():
        return found
    _written(data, edges, start, stop, found)
    return counts[:, REPLACEMENT] - found


def undecoded_rows(
    rows: np.ndarray,
    bins: np.ndarray,
    values: np.ndarray,
    kind: Kind,
    data: np.ndarray,
    edges: np.ndarray,
    first: int,
) -> dict[int, int]:
    """As `undecoded`, for counts that are not zero of rows from ``first`` on: by rows, as far as there are any."""
    if kind.name != "codepoint":
        return {}
    replaced = np.flatnonzero(bins == REPLACEMENT)
    if not len(replaced):
        return {}
    written = np.zeros(len(edges) - 1, np.int64)
    _written(data, edges, 0, len(data), written)
    lost = values[replaced] - written[rows[replaced] - first]
    return {row: each for row, each in zip(rows[replaced].tolist(), lost.tolist(), strict=True) if each}


WRITTEN = "\ufffd".encode()


@njit(nogil=True)
def _malformed(data, start, lo, hi, final):  # type: ignore[no-untyped-def]
    """How many steps of the decoder that begin in ``data[start:hi]``, of the text ``data[lo:hi]``, are no characters;
    and where the last step begins if it is cut off and the text goes on, else ``hi``.

    Well-formed text goes 64 bytes at a time.
    """
    i = start
    while i < hi and character_at(data, i, lo, hi) == 0:
        i += 1
    base = np.int64(data.ctypes.data)
    found = 0
    slow = i
    while i < hi:
        if i >= slow and i + LANES <= hi:
            _, _, _, _, size = whole_characters(base + i)
            if size:
                i += size
                continue
            slow = i + LANES
        if data[i] < 0x80:
            i += 1
            continue
        step = character_at(data, i, lo, hi)
        length = step >> CODE_BITS
        if step & CODE_MASK == REPLACEMENT and not (
            length == 3 and data[i] == 0xEF and data[i + 1] == 0xBF and data[i + 2] == 0xBD
        ):
            if i + length == hi and not final and 0xC2 <= data[i] <= 0xF4:
                return found, i
            found += 1
        i += length
    return found, hi


@kept
@njit(nogil=True)
def _of_text(data, start, final, out):  # type: ignore[no-untyped-def]
    out[0], out[1] = _malformed(data, start, 0, len(data), final)


@kept
@njit(nogil=True)
def _of_documents(data, edges, found):  # type: ignore[no-untyped-def]
    """Write how many of each document ``data[edges[d]:edges[d + 1]]``; whether there are any."""
    last = edges[-1]
    total, _ = _malformed(data, edges[0], edges[0], last, True)
    for d in range(1, len(edges) - 1):
        # Where a document begins within a character, its own text is another than that of all together.
        if edges[d] < last and data[edges[d]] & 0xC0 == 0x80:
            total += 1
    if total == 0:
        return False
    for d in range(len(found)):
        found[d], _ = _malformed(data, edges[d], edges[d], edges[d + 1], True)
    return True


def malformed_of_documents(data: np.ndarray, edges: np.ndarray, first: int) -> dict[int, int]:
    """How many U+FFFD ``errors="replace"`` puts into each document of a block, as far as there are any, by rows from
    ``first`` on. data, edges: uint8, and int64, where each begins and the last ends."""
    found = np.zeros(len(edges) - 1, np.int64)
    if not _of_documents(read_only(data), np.ascontiguousarray(edges, np.int64), found):
        return {}
    return {first + row: int(found[row]) for row in np.flatnonzero(found).tolist()}


def well_formed(
    data: np.ndarray, edges: np.ndarray, malformed: dict[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """The same documents, of which those with malformed bytes are decoded with U+FFFD in place of them: uint8, and
    int64, where each begins and the last ends. malformed: of which of them `malformed_of_documents` tells."""
    parts, done = [], int(edges[0])
    lengths = np.diff(edges)
    for document in malformed:
        start, stop = edges[document : document + 2].tolist()
        decoded = data[start:stop].tobytes().decode(errors="replace").encode()
        parts += [data[done:start], np.frombuffer(decoded, np.uint8)]
        lengths[document], done = len(decoded), stop
    parts.append(data[done : edges[-1]])
    return np.concatenate(parts), np.concatenate([[0], np.cumsum(lengths)])


class MalformedText:
    """How many U+FFFD ``errors="replace"`` puts into a text that comes in stretches."""

    def __init__(self) -> None:
        self._cut = np.empty(0, np.uint8)
        """The beginning of a character that the next stretch may end."""
        self._out = np.zeros(2, np.int64)

    @property
    def is_cut(self) -> bool:
        return len(self._cut) > 0

    def stretch(self, data: np.ndarray, start: int = 0, *, final: bool = False) -> int:
        """Those of the next stretch, ``data[start:]``, as far as they are known. ``data[:start]`` precedes the first
        stretch of a text that does not begin there; final: whether nothing follows."""
        if self.is_cut:
            data, start = np.concatenate([self._cut, data[start:]]), 0
        _of_text(read_only(data), start, final, self._out)
        count, end = self._out.tolist()
        self._cut = data[end:].copy()
        return count

    def end(self, behind: np.ndarray) -> int:
        """Those of the last stretch that were not known. behind: up to three bytes that follow, and are not counted."""
        if not self.is_cut:
            return 0
        data = np.concatenate([self._cut, behind])
        self._cut = self._cut[:0]
        step = int(character_at(data, 0, 0, len(data)))
        return int(step & CODE_MASK == REPLACEMENT and data[:3].tobytes() != WRITTEN)
