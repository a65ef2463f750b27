"""The quality signals of a document: their names, in the order of tables, and what of a text they speak of.

A text is decoded as ``bytes.decode("utf-8", errors="replace")`` has it. **Words** are what ``str.split()`` finds,
**lines** what ``str.splitlines()`` would by line feeds and carriage returns alone (``bytes.splitlines``), those with
nothing but white space left out, and **paragraphs** runs of lines with none of those between them. Letters are
``str.isalpha``, digits ``str.isdecimal``, white space ``str.isspace``. A share of nothing is 0.

Repetitions are counted as datatrove's Gopher filters count them: a line, paragraph or n-gram is a duplicate where the
same one stood before it in the document.
"""

from __future__ import annotations

import functools
import sys

import numpy as np

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
"""Gopher's, of which an English text has at least two."""
BULLETS = "-*•‣⁃⁌⁍∙○●◘◦⦾⦿"
"""What a line begins with that is an item of a list."""
TOP_N = (2, 3, 4)
"""Words of the n-grams of which the most frequent one is looked at."""
DUPE_N = (5, 6, 7, 8, 9, 10)
"""Words of the n-grams of which duplicates are looked at."""
COMPRESSION_LEVEL = 1
"""Of zlib. Higher ones take up to four times as long, and tell what is repetitive from what is not no better."""

COUNTS = (
    "byte_count",
    "char_count",
    "word_count",
    "line_count",
    "paragraph_count",
    "stop_word_count",
    "unique_stop_word_count",
    "undecodable_count",
)
"""Signals that are whole numbers."""
RATIOS = (
    "mean_word_length",
    "char_entropy",
    "compression_ratio",
    "hash_to_word_ratio",
    "ellipsis_to_word_ratio",
    "frac_chars_alphabetic",
    "frac_chars_digit",
    "frac_chars_whitespace",
    "frac_chars_undecodable",
    "frac_words_alphabetic",
    "frac_lines_end_with_ellipsis",
    "frac_lines_start_with_bullet",
    "frac_lines_dupe",
    "frac_chars_dupe_lines",
    "frac_paragraphs_dupe",
    "frac_chars_dupe_paragraphs",
    *(f"frac_chars_top_{n}gram" for n in TOP_N),
    *(f"frac_chars_dupe_{n}grams" for n in DUPE_N),
)
"""Signals that are floats."""
NAMES = COUNTS + RATIOS

LETTER, DIGIT, SPACE, BULLET = 1, 2, 4, 8
"""Bits of `class_table`."""


@functools.cache
def class_table() -> np.ndarray:
    """uint8[0x110000]: what each code point is."""
    table = np.zeros(sys.maxunicode + 1, np.uint8)
    characters = list(map(chr, range(len(table))))
    for bit, is_one in ((LETTER, str.isalpha), (DIGIT, str.isdecimal), (SPACE, str.isspace)):
        table[np.fromiter(map(is_one, characters), np.bool_, len(table))] |= bit
    table[[ord(each) for each in BULLETS]] |= BULLET
    table.flags.writeable = False
    return table


def share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """float64: a part of a whole, 0 where that is nothing."""
    return part / np.maximum(whole, 1)
