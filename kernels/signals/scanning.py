"""The loop that goes over the characters of documents once: what kinds of characters there are, how evenly they are
used, and where words, lines and paragraphs lie.

Texts are given by addresses (`tilewright.kernels.cpu.vectors` says why) and are well-formed UTF-8.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from tilewright.kernels.cpu.loops import kept
from tilewright.kernels.cpu.vectors import load_byte
from tilewright.kernels.histograms.scanning import step_at
from tilewright.kernels.histograms.tokens import CODE_BITS, CODE_MASK
from tilewright.kernels.signals.definitions import BULLET, DIGIT, LETTER, SPACE, class_table

CHARS, LETTERS, DIGITS, SPACES, HASHES, ELLIPSES, ALPHABETIC, ELLIPSIS_LINES, BULLET_LINES = range(9)
"""Columns of what is counted: characters, those of a class, number signs, ellipses, words with a letter, and lines that
end or begin so."""
COLUMNS = 9
_ELLIPSIS = 0x2026


@dataclass(frozen=True, eq=False)
class Spans:
    """The words, lines or paragraphs of documents. Number k is ``lengths[k]`` bytes from ``starts[k]`` on."""

    starts: np.ndarray
    lengths: np.ndarray
    """int64, in bytes."""
    chars: np.ndarray
    """int64, in characters."""
    edges: np.ndarray
    """int64[documents + 1]: those of document d are from ``edges[d]`` to ``edges[d + 1]``."""


@njit(nogil=True)
def _entropy(counts, used, total):  # type: ignore[no-untyped-def]
    """Bits of a character, of which there are ``total``. Sets the counts at ``used`` to 0 again."""
    bits = 0.0
    for code in used:
        bits += counts[code] / total * np.log2(total / counts[code])
        counts[code] = 0
    return bits


@kept
@njit(nogil=True)
def _scan(base, edges, classes, counts, used, found, entropy, words, lines, paragraphs, ends):  # type: ignore[no-untyped-def]
    """Look at the documents from ``base + edges[d]`` to ``base + edges[d + 1]``.

    classes: the address of `class_table`. counts: uint32[0x110000], zeros, and zeros again at the end. used: int32, as
    long as the different characters may be. found: int64[(documents, COLUMNS)], zeros. entropy: float64[documents].
    words, lines, paragraphs: int64[(3, n)], written: starts, lengths, characters. ends: int64[(3, documents + 1)].
    """
    word = 0
    line = 0
    paragraph = 0
    for document in range(len(edges) - 1):
        p = base + edges[document]
        hi = base + edges[document + 1]
        chars = 0
        letters = 0
        digits = 0
        spaces = 0
        hashes = 0
        ellipses = 0
        alphabetic = 0
        distinct = 0
        dots = 0  # of an ellipsis that is under way
        word_start = np.int64(-1)  # where the word under way begins, or that there is none
        word_chars = 0
        has_letter = 0
        line_start = p
        line_chars = 0  # characters before the line
        tail = 0  # dots, up to an ellipsis, that the line ends in so far, but for white space
        was_dot = False
        first = np.int64(-1)  # the class of the line's first character that is no white space
        paragraph_start = np.int64(-1)
        paragraph_chars = 0
        paragraph_end = p
        paragraph_end_chars = 0
        while p <= hi:
            at = p
            code = np.int64(10)  # the end of the text ends what is under way, as a line's end does
            if p < hi:
                code = load_byte(p)
                if code < 0x80:
                    p += 1
                else:
                    step = step_at(p, hi)
                    code = step & CODE_MASK
                    p += step >> CODE_BITS
                chars += 1
                if counts[code] == 0:
                    used[distinct] = code
                    distinct += 1
                counts[code] += 1
            else:
                p += 1
            kind = load_byte(classes + code)
            if not kind & SPACE:
                letters += kind & LETTER
                digits += (kind & DIGIT) >> 1
                if word_start < 0:
                    word_start = at
                    word_chars = chars - 1
                    has_letter = 0
                has_letter |= kind & LETTER
                if first < 0:
                    first = kind
                if code == 0x2E:
                    tail = tail + 1 if was_dot else 1
                    was_dot = True
                    dots += 1
                    if dots == 3:
                        ellipses += 1
                        dots = 0
                else:
                    tail = 0
                    was_dot = False
                    dots = 0
                    if code == _ELLIPSIS:
                        tail = 3
                        ellipses += 1
                    elif code == 0x23:
                        hashes += 1
                continue
            was_dot = False
            dots = 0
            here = chars  # characters before this one, or before the end
            if at < hi:
                spaces += 1
                here = chars - 1
            if word_start >= 0:
                words[0, word] = word_start - base
                words[1, word] = at - word_start
                words[2, word] = here - word_chars
                word += 1
                alphabetic += has_letter
                word_start = np.int64(-1)
            if code != 10 and code != 13:
                continue
            # Between a carriage return and its line feed lies a line with nothing in it, which is none.
            if first >= 0:
                lines[0, line] = line_start - base
                lines[1, line] = at - line_start
                lines[2, line] = here - line_chars
                line += 1
                if tail >= 3:
                    found[document, ELLIPSIS_LINES] += 1
                if first & BULLET:
                    found[document, BULLET_LINES] += 1
                if paragraph_start < 0:
                    paragraph_start = line_start
                    paragraph_chars = line_chars
                paragraph_end = at
                paragraph_end_chars = here
            if paragraph_start >= 0:
                is_feed = code == 10 and at > base + edges[document] and load_byte(at - 1) == 13
                if at == hi or (first < 0 and not (is_feed and line_start == at)):
                    paragraphs[0, paragraph] = paragraph_start - base
                    paragraphs[1, paragraph] = paragraph_end - paragraph_start
                    paragraphs[2, paragraph] = paragraph_end_chars - paragraph_chars
                    paragraph += 1
                    paragraph_start = np.int64(-1)
            line_start = p
            line_chars = chars
            tail = 0
            first = np.int64(-1)
        found[document, CHARS] = chars
        found[document, LETTERS] = letters
        found[document, DIGITS] = digits
        found[document, SPACES] = spaces
        found[document, HASHES] = hashes
        found[document, ELLIPSES] = ellipses
        found[document, ALPHABETIC] = alphabetic
        entropy[document] = _entropy(counts, used[:distinct], chars)
        ends[0, document + 1] = word
        ends[1, document + 1] = line
        ends[2, document + 1] = paragraph


@dataclass(frozen=True, eq=False)
class Scanned:
    """What is known of documents once their characters have been looked at."""

    found: np.ndarray
    """int64[(documents, COLUMNS)]."""
    entropy: np.ndarray
    """float64[documents]."""
    words: Spans
    lines: Spans
    paragraphs: Spans


def scan(data: np.ndarray, edges: np.ndarray) -> Scanned:
    """Look at the documents ``data[edges[d]:edges[d + 1]]``, uint8, of well-formed UTF-8."""
    documents, classes = len(edges) - 1, class_table()
    found, entropy = np.zeros((documents, COLUMNS), np.int64), np.empty(documents)
    # Two words, lines or paragraphs have a byte between them, or a document's edge. Pages that are not written to take
    # no memory.
    most = (len(data) + documents) // 2 + 1
    words, lines, paragraphs = (np.empty((3, most), np.int64) for _ in range(3))
    ends = np.zeros((3, documents + 1), np.int64)
    _scan(
        data.ctypes.data,
        edges,
        classes.ctypes.data,
        np.zeros(len(classes), np.uint32),
        np.empty(min(len(data), len(classes)) + 1, np.int32),
        found,
        entropy,
        words,
        lines,
        paragraphs,
        ends,
    )
    spans = [
        Spans(each[0, : end[-1]], each[1, : end[-1]], each[2, : end[-1]], end)
        for each, end in zip((words, lines, paragraphs), ends, strict=True)
    ]
    return Scanned(found, entropy, *spans)
