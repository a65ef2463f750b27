"""All signals of documents, but for the one that takes a compressor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilewright.kernels.histograms.replaced import malformed_of_documents, well_formed
from tilewright.kernels.signals.definitions import DUPE_N, TOP_N, share
from tilewright.kernels.signals.repeats import duplicates_of, words_of
from tilewright.kernels.signals.scanning import (
    ALPHABETIC,
    BULLET_LINES,
    CHARS,
    DIGITS,
    ELLIPSES,
    ELLIPSIS_LINES,
    HASHES,
    LETTERS,
    SPACES,
    scan,
)


def signals_of(data: np.ndarray, edges: np.ndarray, stop_words: Sequence[str]) -> dict[str, np.ndarray]:
    """The signals of the documents ``data[edges[d]:edges[d + 1]]``, uint8, by their names in `definitions.NAMES`; int64
    and float64. ``compression_ratio`` is not among them (`compressing`).
    """
    edges = np.ascontiguousarray(edges, np.int64)
    nbytes = np.diff(edges)
    undecodable = np.zeros(len(nbytes), np.int64)
    if malformed := malformed_of_documents(data, edges, 0):
        undecodable[list(malformed)] = list(malformed.values())
        data, edges = well_formed(data, edges, malformed)
    scanned = scan(data, edges)
    found, words, lines, paragraphs = scanned.found, scanned.words, scanned.lines, scanned.paragraphs
    stops, tops, dupes = words_of(data, words, tuple(dict.fromkeys(each.encode() for each in stop_words)))
    dupe_lines, dupe_paragraphs = duplicates_of(data, lines), duplicates_of(data, paragraphs)
    chars = found[:, CHARS]
    n_words, n_lines, n_paragraphs = (np.diff(each.edges) for each in (words, lines, paragraphs))
    return {
        "byte_count": nbytes,
        "char_count": chars,
        "word_count": n_words,
        "line_count": n_lines,
        "paragraph_count": n_paragraphs,
        "stop_word_count": stops[:, 0],
        "unique_stop_word_count": stops[:, 1],
        "undecodable_count": undecodable,
        # What is no white space belongs to words.
        "mean_word_length": share(chars - found[:, SPACES], n_words),
        "char_entropy": scanned.entropy,
        "hash_to_word_ratio": share(found[:, HASHES], n_words),
        "ellipsis_to_word_ratio": share(found[:, ELLIPSES], n_words),
        "frac_chars_alphabetic": share(found[:, LETTERS], chars),
        "frac_chars_digit": share(found[:, DIGITS], chars),
        "frac_chars_whitespace": share(found[:, SPACES], chars),
        "frac_chars_undecodable": share(undecodable, chars),
        "frac_words_alphabetic": share(found[:, ALPHABETIC], n_words),
        "frac_lines_end_with_ellipsis": share(found[:, ELLIPSIS_LINES], n_lines),
        "frac_lines_start_with_bullet": share(found[:, BULLET_LINES], n_lines),
        "frac_lines_dupe": share(dupe_lines[:, 0], n_lines),
        "frac_chars_dupe_lines": share(dupe_lines[:, 1], chars),
        "frac_paragraphs_dupe": share(dupe_paragraphs[:, 0], n_paragraphs),
        "frac_chars_dupe_paragraphs": share(dupe_paragraphs[:, 1], chars),
        **{f"frac_chars_top_{n}gram": share(tops[:, k], chars) for k, n in enumerate(TOP_N)},
        **{f"frac_chars_dupe_{n}grams": share(dupes[:, k], chars) for k, n in enumerate(DUPE_N)},
    }
