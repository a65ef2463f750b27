"""Quality signals by Python alone, as slow as they are obvious."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Sequence

BULLETS = tuple("-*•‣⁃⁌⁍∙○●◘◦⦾⦿")
STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")


def undecodable(document: bytes) -> int:
    """How many U+FFFD stand for what is no UTF-8."""
    return document.decode(errors="replace").count("\ufffd") - document.decode(errors="ignore").count(
        "\ufffd"
    )


def lines_of(text: str) -> tuple[list[str], list[str]]:
    """Lines that are not blank, and paragraphs."""
    lines, paragraphs, under_way = [], [], ""
    for ended in text.encode("utf-8", "surrogatepass").splitlines(keepends=True):
        whole = ended.decode("utf-8", "surrogatepass")
        line = whole.removesuffix("\n").removesuffix("\r")
        if line.strip():
            lines.append(line)
            under_way += whole
        elif under_way:
            paragraphs.append(under_way)
            under_way = ""
    if under_way:
        paragraphs.append(under_way)
    return lines, [each.removesuffix("\n").removesuffix("\r") for each in paragraphs]


def repeated(parts: Sequence[str]) -> tuple[int, int]:
    """How many are the same as an earlier one, and their characters."""
    again = [part for place, part in enumerate(parts) if part in parts[:place]]
    return len(again), sum(map(len, again))


def top(words: list[str], n: int) -> int:
    """Characters of all occurrences of the most frequent n-gram, with blanks between its words."""
    grams = [" ".join(words[k : k + n]) for k in range(len(words) - n + 1)]
    if not grams:
        return 0
    (gram, count), *_ = Counter(grams).most_common(1)
    return len(gram) * count


def duplicated(words: list[str], n: int) -> int:
    """Characters of n-grams that stood there before, none of which overlap."""
    known, chars, place = set(), 0, 0
    while place + n <= len(words):
        gram = tuple(words[place : place + n])
        if gram in known:
            chars += sum(map(len, gram))
            place += n
        else:
            known.add(gram)
            place += 1
    return chars


def signals(document: bytes, stop_words: Sequence[str] = STOP_WORDS, lost: int = 0) -> dict[str, float]:
    text = document.decode(errors="replace")
    words = text.split()
    lines, paragraphs = lines_of(text)
    (dupe_lines, line_chars), (dupe_paragraphs, paragraph_chars) = repeated(lines), repeated(paragraphs)
    stops = [word for word in words if word in stop_words]
    n_chars, n_words, n_lines, n_paragraphs = (len(each) or 1 for each in (text, words, lines, paragraphs))
    return {
        "byte_count": len(document),
        "char_count": len(text),
        "word_count": len(words),
        "line_count": len(lines),
        "paragraph_count": len(paragraphs),
        "stop_word_count": len(stops),
        "unique_stop_word_count": len(set(stops)),
        "undecodable_count": undecodable(document) + lost,
        "mean_word_length": sum(map(len, words)) / n_words,
        "char_entropy": sum(k / n_chars * math.log2(n_chars / k) for k in Counter(text).values()),
        "compression_ratio": len(document) / len(zlib.compress(document, 1)),
        "hash_to_word_ratio": text.count("#") / n_words,
        "ellipsis_to_word_ratio": (text.count("...") + text.count("…")) / n_words,
        "frac_chars_alphabetic": sum(map(str.isalpha, text)) / n_chars,
        "frac_chars_digit": sum(map(str.isdecimal, text)) / n_chars,
        "frac_chars_whitespace": sum(map(str.isspace, text)) / n_chars,
        "frac_chars_undecodable": (undecodable(document) + lost) / n_chars,
        "frac_words_alphabetic": sum(any(map(str.isalpha, word)) for word in words) / n_words,
        "frac_lines_end_with_ellipsis": sum(line.rstrip().endswith(("...", "…")) for line in lines) / n_lines,
        "frac_lines_start_with_bullet": sum(line.lstrip().startswith(BULLETS) for line in lines) / n_lines,
        "frac_lines_dupe": dupe_lines / n_lines,
        "frac_chars_dupe_lines": line_chars / n_chars,
        "frac_paragraphs_dupe": dupe_paragraphs / n_paragraphs,
        "frac_chars_dupe_paragraphs": paragraph_chars / n_chars,
        **{f"frac_chars_top_{n}gram": top(words, n) / n_chars for n in (2, 3, 4)},
        **{f"frac_chars_dupe_{n}grams": duplicated(words, n) / n_chars for n in range(5, 11)},
    }
