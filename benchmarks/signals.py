"""How fast one core finds quality signals of documents, beside datatrove's Gopher filters, which check some of them.

    python benchmarks/signals.py FILE ... [--nbytes N] [--document-nbytes N] [--rounds N]

Documents are the lines of the files, joined until each has about ``--document-nbytes``, each an object of a file of
JSON lines. Figures are bytes of text for each second of CPU time, in alternation. Ours is what a task does
(`measure_piece`): it reads, decodes, and finds all signals. datatrove's quality and repetition filters, with thresholds
that no document reaches so that each computes all of its signals, are given the texts; once with its own words, which
are spaCy's, and once with ``str.split`` in their place. With these its numbers and ours are compared, except where it
takes two n-grams for one that have the same letters in other words.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.kernels.signals.definitions import DUPE_N, TOP_N
from tilewright.pipeline.signals.options import options_of
from tilewright.pipeline.signals.tasks import measure_piece
from tilewright.pipeline.text.corpus import cut_pieces, list_corpus
from tilewright.pipeline.text.formats.reading import reading_of

PIECE_NBYTES = 32 << 20
PEER_DOCUMENTS = 400
"""Documents that datatrove is given, of many times as many: it takes that much longer."""
NEVER = 1e9


def documents_of(files: list[Path], nbytes: int, document_nbytes: int) -> list[str]:
    documents, here, total = [], b"", 0
    for path in files:
        for line in path.read_bytes().split(b"\n"):
            here += line + b"\n"
            if len(here) >= document_nbytes:
                documents.append(here.decode(errors="replace"))
                total += len(here)
                here = b""
                if total >= nbytes:
                    return documents
    return documents


def ours(path: Path) -> tuple[float, dict[str, np.ndarray]]:
    """Seconds of CPU time, and the signals of all documents of the file."""
    reading, options = reading_of(field="text"), options_of(None)
    pieces = list(cut_pieces(list_corpus([path], reading=reading).documents, PIECE_NBYTES))
    start = time.process_time()
    found = [measure_piece(piece, options, reading, "stop")[0].columns for piece in pieces]
    seconds = time.process_time() - start
    return seconds, {name: np.concatenate([each[name] for each in found]) for name in found[0]}


def filters(split: bool) -> list[Any]:
    """datatrove's, none of which drops a document."""
    from datatrove.pipeline.filters import gopher_quality_filter, gopher_repetition_filter

    if split:
        for module in (gopher_quality_filter, gopher_repetition_filter):
            module.split_into_words = lambda text, language: text.split()
    quality = gopher_quality_filter.GopherQualityFilter(
        min_doc_words=None, max_doc_words=None, min_avg_word_length=None, max_avg_word_length=None,
        max_symbol_word_ratio=NEVER, max_bullet_lines_ratio=NEVER, max_ellipsis_lines_ratio=NEVER,
        max_non_alpha_words_ratio=-NEVER, min_stop_words=-1,
    )  # fmt: skip
    repetition = gopher_repetition_filter.GopherRepetitionFilter(
        NEVER, NEVER, NEVER, NEVER, [(n, NEVER) for n in TOP_N], [(n, NEVER) for n in DUPE_N]
    )
    return [quality, repetition]


def by_datatrove(texts: list[str], given: list[Any]) -> float:
    from datatrove.data import Document

    documents = [Document(text=text, id=str(place)) for place, text in enumerate(texts)]
    start = time.process_time()
    for document in documents:
        assert all(each.filter(document) is True for each in given)
    return time.process_time() - start


def compare(texts: list[str], found: dict[str, np.ndarray]) -> int:
    """Our signals of these texts with what datatrove's functions say of their words, lines and paragraphs; how many are
    not compared, since n-grams of other words become the same text."""
    from datatrove.pipeline.filters import gopher_repetition_filter as peer

    ambiguous = 0
    for place, text in enumerate(texts):
        words, expected = text.split(), {}
        for n in DUPE_N:
            grams = {tuple(words[k : k + n]) for k in range(len(words) - n + 1)}
            if len({"".join(gram) for gram in grams}) < len(grams):
                ambiguous += 1
            else:
                expected[f"frac_chars_dupe_{n}grams"] = peer.find_all_duplicate(words, n)
        for n in TOP_N:
            if joined := peer.get_n_grams(words, n):
                expected[f"frac_chars_top_{n}gram"] = peer.find_top_duplicate(joined)
        lines = [line for line in re.split("\n+", text) if line.strip()]
        repeated, expected["frac_chars_dupe_lines"] = peer.find_duplicates(lines)
        for name, chars in expected.items():
            np.testing.assert_allclose(found[name][place], chars / len(text), rtol=1e-12, err_msg=name)
        assert found["frac_lines_dupe"][place] == repeated / max(1, len(lines))
    return ambiguous


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--nbytes", type=int, default=64 << 20)
    parser.add_argument("--document-nbytes", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    documents = documents_of(given.files, given.nbytes, given.document_nbytes)
    some = documents[:PEER_DOCUMENTS]
    nbytes, peer_nbytes = (sum(len(each.encode()) for each in part) for part in (documents, some))
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "documents.jsonl")
        path.write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
        _, found = ours(path)  # compiled, and its pages read
        for _ in range(given.rounds):
            rates.setdefault("ours", []).append(nbytes / ours(path)[0])
            if find_spec("datatrove") and find_spec("spacy"):
                rates.setdefault("datatrove", []).append(peer_nbytes / by_datatrove(some, filters(False)))
        for _ in range(given.rounds if len(rates) > 1 else 0):
            spent = by_datatrove(some, filters(True))
            rates.setdefault("datatrove, str.split", []).append(peer_nbytes / spent)
        if len(rates) > 1:
            skipped = compare(some, found)
            print(f"signals of {len(some)} documents are datatrove's; {skipped} are ambiguous there")
    shown = ", ".join(
        f"{name} {max(each) / 1e6:.3g} (least {min(each) / 1e6:.3g})" for name, each in rates.items()
    )
    print(
        f"{len(documents)} documents of {given.document_nbytes} bytes: {shown} MB a CPU second;"
        f" load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
