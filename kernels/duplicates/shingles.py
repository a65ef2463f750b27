"""Shingles of documents: every n adjacent words or characters of one, as a range of the bytes of a text.

Words are those of ``by="word"`` (`tilewright.kernels.histograms.token_kinds`), with one blank between two; characters
are those of the text as it is decoded, U+FFFD for what cannot be. Either is folded first where that is asked for. A
document that has fewer than n of them, but one at least, is a single shingle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numba import njit

from tilewright.kernels.cpu.loops import kept, read_only
from tilewright.kernels.cpu.vectors import load_word, store_byte, store_word
from tilewright.kernels.duplicates.folding import folded_documents
from tilewright.kernels.duplicates.hashing import LOOPS
from tilewright.kernels.histograms.replaced import malformed_of_documents, well_formed
from tilewright.kernels.histograms.scanning import DONE, FULL, scan_words
from tilewright.kernels.histograms.tables.token_table import Table
from tilewright.kernels.histograms.token_counting import as_counted
from tilewright.kernels.histograms.token_kinds import TokenKind, word_table

SLACK = 8
"""Bytes that are copied at a time."""


@dataclass(frozen=True, eq=False)
class Shingles:
    """Those of several documents. Shingle k is the bytes of ``text`` from ``starts[k]`` on, ``lengths[k]`` of them."""

    text: np.ndarray
    """uint8: the documents' words or characters."""
    starts: np.ndarray
    lengths: np.ndarray
    """uint32[shingles], in the order in which they stand, a shingle as often as it occurs."""
    edges: np.ndarray
    """int64[documents + 1]: those of document d are from ``edges[d]`` to ``edges[d + 1]``."""

    def hashes(self, name: str) -> np.ndarray:
        """uint32[shingles], by a function of `choices.HASHES`."""
        found = np.empty(len(self.starts), np.uint32)
        LOOPS[name](self.text.ctypes.data, self.starts, self.lengths, found)
        return found


@kept
@njit(nogil=True)
def _scan_documents(table, lo, edges, first, at, letters, units, m, unit_edges):  # type: ignore[no-untyped-def]
    """Put the entries of the documents' words from address ``at`` in document ``first`` on into ``units`` from place m
    on, and where each document's end into ``unit_edges``.

    Returns why it stopped, in which document, where there, and the place behind the last unit.
    """
    for document in range(first, len(edges) - 1):
        hi = lo + edges[document + 1]
        if at < hi:
            why, at, m = scan_words(table, at, hi, hi, True, letters, units, m)
            if why != DONE:
                return why, document, at, m
        at = hi
        unit_edges[document + 1] = m
    return DONE, len(edges) - 1, at, m


@kept
@njit(nogil=True)
def _join_words(units, data, starts, lengths, text, places):  # type: ignore[no-untyped-def]
    """Write words with a blank behind each to the address ``text``, and where each begins, and the end, to ``places``.

    Words lie at the address ``data``. Both have `SLACK` more bytes than are used.
    """
    at = 0
    for k in range(len(units)):
        places[k] = at
        start = data + starts[units[k]]
        n = lengths[units[k]]
        for i in range(0, n, SLACK):
            store_word(text + at + i, load_word(start + i))
        at += n
        store_byte(text + at, 0x20)
        at += 1
    places[len(units)] = at


@kept
@njit(nogil=True)
def _place_characters(data, edges, places, unit_edges):  # type: ignore[no-untyped-def]
    """Write where each character of the documents begins, and the end, to ``places``, and which is the first of each
    document, and how many there are, to ``unit_edges``; returns how many. The text is well-formed."""
    m = 0
    for document in range(len(edges) - 1):
        unit_edges[document] = m
        for i in range(edges[document], edges[document + 1]):
            # What is written behind the last character is written over, by the next or the end.
            places[m] = i
            m += data[i] & 0xC0 != 0x80
    unit_edges[len(edges) - 1] = m
    places[m] = edges[len(edges) - 1]
    return m


@kept
@njit(nogil=True)
def _place_shingles(places, unit_edges, gap, n, starts, lengths, edges):  # type: ignore[no-untyped-def]
    """Write the shingles of units that begin at ``places``, each with ``gap`` bytes behind it; returns how many."""
    k = 0
    edges[0] = 0
    for document in range(len(unit_edges) - 1):
        first = unit_edges[document]
        last = unit_edges[document + 1]
        if first < last:
            for unit in range(first, max(first, last - n) + 1):
                starts[k] = places[unit]
                lengths[k] = places[min(unit + n, last)] - gap - places[unit]
                k += 1
        edges[document + 1] = k
    return k


def shingles_of(data: np.ndarray, edges: np.ndarray, kind: TokenKind) -> Shingles:
    """The shingles of the documents ``data[edges[d]:edges[d + 1]]``, uint8, all together below 4 GiB.

    kind: of words or characters, ``n`` of them a shingle, and how words and texts are folded.
    """
    texts = _words if kind.unit == "word" else _characters
    text, places, unit_edges, gap = texts(data, edges, kind)
    units, documents = len(places) - 1, len(edges) - 1
    starts, lengths = np.empty(units, np.uint32), np.empty(units, np.uint32)
    found = np.empty(documents + 1, np.int64)
    count = _place_shingles(places, unit_edges, gap, kind.n, starts, lengths, found)
    return Shingles(text, starts[:count], lengths[:count], found)


Units = tuple[np.ndarray, np.ndarray, np.ndarray, int]
"""A text; where its units begin and where the last ends, uint32; which are the first of each document, int64; the bytes
that follow each unit."""


def _words(data: np.ndarray, edges: np.ndarray, kind: TokenKind) -> Units:
    table, letters = Table(with_bytes=True), word_table()
    # Two words have a byte between them, or a document's edge.
    units = np.empty(max(1, (len(data) + len(edges)) // 2 + 1), np.uint32)
    unit_edges = np.zeros(len(edges), np.int64)
    lo, document, m = data.ctypes.data, 0, 0
    at = lo + int(edges[0])
    while True:
        why, document, at, m = _scan_documents(
            table.address, lo, edges, document, at, letters.ctypes.data, units, m, unit_edges
        )
        if why == DONE:
            break
        assert why != FULL
        table.make_room()
    units = units[:m]
    used = table.used
    words, starts, lengths = as_counted(
        replace(kind, n=1), table.bytes_used, table.starts[:used], table.lengths[:used]
    )
    words = np.concatenate([words, np.zeros(SLACK, np.uint8)])
    text = np.empty(int(lengths[units].sum()) + m + SLACK, np.uint8)
    places = np.empty(m + 1, np.uint32)
    _join_words(units, words.ctypes.data, starts, lengths, text.ctypes.data, places)
    return text, places, unit_edges, 1


def _characters(data: np.ndarray, edges: np.ndarray, kind: TokenKind) -> Units:
    edges = np.ascontiguousarray(edges, np.int64)
    if malformed := malformed_of_documents(data, edges, 0):
        data, edges = well_formed(data, edges, malformed)
    if kind.casefold or kind.normalise:
        data, edges = folded_documents(data, edges, kind)
    places, unit_edges = np.empty(int(edges[-1] - edges[0]) + 1, np.uint32), np.empty(len(edges), np.int64)
    units = _place_characters(read_only(data), edges, places, unit_edges)
    return data, places[: units + 1], unit_edges, 0
