"""How fast one core counts text by every kind, from files in the page cache, in alternation with its peers.

    python benchmarks/text_kinds.py FILE ... [--by KIND ...] [--nbytes N] [--rounds R]

Each figure is bytes of text for each second of CPU time, system time of reading included, so that other work on the
machine delays it less than it would a clock. Ours is what a task does with its pieces (`count_piece`) and what the
collecting process does with what they hold. Peers: `numpy.bincount` for bytes and pairs; Python's
``collections.Counter``; polars where it is installed.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.kernels.histograms.token_kinds import TokenKind, any_kind_named
from tilewright.kernels.histograms.tokens import Kind
from tilewright.pipeline.text.corpus import cut_pieces, list_corpus
from tilewright.pipeline.text.counting import count_piece
from tilewright.pipeline.text.totals import total_for

PIECE_NBYTES = 32 << 20
SLOW_NBYTES = 16 << 20
"""What peers count that take longer than a second for the rest."""
KINDS = ("byte", "bigram", "codepoint", "word", "line", "ngram:3", "ngram:3:character", "ngram:3:byte")


def ours(path: Path, kind: Kind | TokenKind, nbytes: int) -> tuple[int, Any]:
    """Bytes counted, and the counts: an array, or tokens with theirs."""
    total = total_for(1, kind.bins if isinstance(kind, Kind) else None, per_document=False, allowed=2 << 30)
    done = 0
    for piece in cut_pieces(list_corpus([path]).documents, PIECE_NBYTES):
        if done >= nbytes:
            break
        part, _ = count_piece(piece, kind, "cpu", False, PIECE_NBYTES, 1)
        total.add(*part.entries(kind), part.values, part.tokens)
        done += part.nbytes
    counts, tokens = total.result()
    return done, counts if tokens is None else (tokens, counts)


def by_bincount(path: Path, kind: Kind | TokenKind, nbytes: int) -> tuple[int, Any]:
    data = np.fromfile(path, np.uint8, nbytes)
    if kind.name == "byte":
        return len(data), np.bincount(data, minlength=256)
    pairs = data[:-1].astype(np.uint16) << 8 | data[1:]
    return len(data), np.bincount(pairs, minlength=1 << 16)


def by_counter(path: Path, kind: Kind | TokenKind, nbytes: int) -> tuple[int, Any]:
    data = path.read_bytes()[:nbytes]
    if kind.name == "line":
        return len(data), Counter(data.splitlines())
    text = data.decode(errors="replace")
    return len(data), Counter(text if kind.name == "codepoint" else re.findall(r"\w+", text))


def by_polars(path: Path, kind: Kind | TokenKind, nbytes: int) -> tuple[int, Any]:
    import polars as pl

    data = path.read_bytes()[:nbytes]
    lines = pl.Series("text", data.decode(errors="replace").splitlines())
    frame = pl.DataFrame({"text": lines})
    column = pl.col("text").str.extract_all(r"\w+").explode() if kind.name == "word" else pl.col("text")
    return len(data), frame.select(column.alias("token")).group_by("token").len()


def peers_of(by: str) -> dict[str, Callable[..., tuple[int, Any]]]:
    peers: dict[str, Callable[..., tuple[int, Any]]] = {}
    if by in ("byte", "bigram"):
        peers["numpy.bincount"] = by_bincount
    if by in ("codepoint", "word", "line"):
        peers["Counter"] = by_counter
    if by in ("word", "line") and find_spec("polars"):
        peers["polars"] = by_polars
    return peers


def rate(count: Callable[..., tuple[int, Any]], path: Path, kind: Kind | TokenKind, nbytes: int) -> float:
    start = time.process_time()
    done, _ = count(path, kind, nbytes)
    return done / (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--by", nargs="+", default=KINDS)
    parser.add_argument("--nbytes", type=int, default=128 << 20)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["POLARS_MAX_THREADS"] = "1"
    for path in options.files:
        for by in options.by:
            kind = any_kind_named(by)
            ours(path, kind, 1)  # compiled, and its pages read
            contestants = {"ours": ours} | peers_of(by)
            rates: dict[str, list[float]] = {name: [] for name in contestants}
            for _ in range(options.rounds):
                for name, count in contestants.items():
                    slow = name in ("Counter", "polars")
                    rates[name].append(rate(count, path, kind, SLOW_NBYTES if slow else options.nbytes))
            best = ", ".join(f"{name} {max(found) / 1e9:.3f}" for name, found in rates.items())
            load = os.getloadavg()[0]
            print(f"{path.name}, {by}: {best} GB a CPU second; load {load:.1f}", flush=True)


if __name__ == "__main__":
    main()
