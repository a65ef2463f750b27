"""How fast one core counts text, by every kind and of every form, from files in the page cache, in alternation with its
peers.

    python benchmarks/text_kinds.py FILE ... [--by KIND ...] [--form FORM ...] [--nbytes N] [--rounds R]

Each figure is bytes of text for each second of CPU time, system time of reading included, so that other work on the
machine delays it less than it would a clock; but what shares the caches with it makes it dearer. Ours is what a task
does with its pieces (`count_piece`) and what the collecting process does with what they hold, until all tokens stand
in order. Peers count the same in the ways that they have, where they are installed: NumPy, Python's
``collections.Counter``, polars, and datatrove, whose words are spaCy's. Slow ones are given less of the file.

Forms are files that are made of each FILE beside it, in a temporary folder, and counted by byte: JSON lines with a
field of some 4 KiB each, beside polars and datatrove's reader, which only add up how long the texts are; .zst beside
``zstd -dc``, and .gz beside ``gzip -dc`` and rapidgzip on one thread, which only decompress.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import re
import resource
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from tilewright.kernels.histograms.token_kinds import TokenKind, any_kind_named
from tilewright.kernels.histograms.tokens import Kind
from tilewright.pipeline.text.blocks import USUAL
from tilewright.pipeline.text.corpus import cut_pieces, list_corpus
from tilewright.pipeline.text.counting import count_piece
from tilewright.pipeline.text.documents import width_of
from tilewright.pipeline.text.formats.reading import Reading
from tilewright.pipeline.text.totals import total_for

PIECE_NBYTES = 32 << 20
SLOW_NBYTES = 4 << 20
"""What peers count that take longer than a second for the rest."""
SLOWEST_NBYTES = 1 << 18
LEAST_NBYTES = 1 << 20
"""Of a piece, of which there is one before anything is timed."""
DOCUMENT_NBYTES = 4 << 10
KINDS = (
    *("byte", "bigram", "codepoint", "word", "line"),
    *(
        "ngram:2",
        "ngram:3",
        "ngram:5",
        "ngram:3:character",
        "ngram:5:character",
        "ngram:3:byte",
        "ngram:5:byte",
    ),
)
FORMS = ("jsonl", "zst", "gz")

Count = Callable[[Path, Kind | TokenKind, int], int]
"""Counts so many bytes of a file, and returns how many these were."""


def ours(path: Path, kind: Kind | TokenKind, nbytes: int, reading: Reading = USUAL) -> int:
    total = total_for(1, kind.bins if isinstance(kind, Kind) else None, per_document=False, allowed=2 << 30)
    done = 0
    piece_nbytes = min(PIECE_NBYTES, max(nbytes, LEAST_NBYTES))
    for piece in cut_pieces(list_corpus([path], reading=reading).documents, piece_nbytes):
        if done >= nbytes:
            break
        part, _ = count_piece(piece, kind, "cpu", False, PIECE_NBYTES, 1, reading=reading)
        rows, columns = np.divmod(part.cells, width_of(kind, part.tokens))
        total.add(np.zeros_like(rows), columns, part.values.astype(np.int64), part.tokens)
        done += part.nbytes
    total.result()
    return done


def by_numpy(path: Path, kind: Kind | TokenKind, nbytes: int) -> int:
    """By ``bincount``, of five bytes by ``unique``."""
    data = np.fromfile(path, np.uint8, nbytes)
    n = {"byte": 1, "bigram": 2}.get(kind.name) or kind.n  # type: ignore[union-attr]
    keys = data
    for k in range(1, n):
        keys = keys[:-1].astype(np.uint64) << 8 | data[k:]
    if n > 3:
        np.unique(keys, return_counts=True)
    else:
        np.bincount(keys.astype(np.int64) if n > 1 else keys, minlength=256**n)
    return len(data)


def by_counter(path: Path, kind: Kind | TokenKind, nbytes: int) -> int:
    data = path.read_bytes()[:nbytes]
    if kind.name == "line":
        Counter(data.splitlines())
    elif kind.name == "codepoint":
        Counter(data.decode(errors="replace"))
    else:
        assert isinstance(kind, TokenKind)
        units: Any = data
        if kind.unit != "byte":
            text = data.decode(errors="replace")
            units = re.findall(r"\w+", text) if kind.unit == "word" else text
        if kind.n == 1:
            Counter(units)
        elif kind.unit == "word":
            Counter(zip(*(units[k:] for k in range(kind.n)), strict=False))
        else:
            Counter(units[k : k + kind.n] for k in range(len(units) - kind.n + 1))
    return len(data)


def by_polars(path: Path, kind: Kind | TokenKind, nbytes: int) -> int:
    import polars as pl

    assert isinstance(kind, TokenKind)
    data = path.read_bytes()[:nbytes]
    text = data.decode(errors="replace")
    if kind.name == "line":
        tokens = pl.Series("token", text.splitlines())
    elif kind.unit == "word":
        words = pl.Series("token", text.splitlines()).str.extract_all(r"\w+").explode().drop_nulls()
        tokens = words
    else:
        tokens = pl.Series("token", list(text))
    frame = pl.DataFrame({"token": tokens})
    if kind.n > 1:
        blank = " " if kind.unit == "word" else ""
        parts = [pl.col("token").shift(-k) for k in range(kind.n)]
        frame = frame.select(pl.concat_str(parts, separator=blank).alias("token"))
    frame.group_by("token").len()
    return len(data)


def by_datatrove(path: Path, kind: Kind | TokenKind, nbytes: int) -> int:
    from datatrove.utils.text import ngrams
    from datatrove.utils.word_tokenizers import load_word_tokenizer

    assert isinstance(kind, TokenKind)
    data = path.read_bytes()[:nbytes]
    words = load_word_tokenizer("eng").word_tokenize(data.decode(errors="replace"))  # others are remembered
    Counter(words if kind.n == 1 else ngrams(words, kind.n))
    return len(data)


def peers_of(kind: Kind | TokenKind) -> dict[str, tuple[Count, int | None]]:
    """Contestants, and how much of a file each is given; None for all."""
    found: dict[str, tuple[Count, int | None]] = {}
    unit, n = (kind.unit, kind.n) if isinstance(kind, TokenKind) else (kind.name, 1)
    if unit in ("byte", "bigram"):
        found["NumPy"] = by_numpy, SLOW_NBYTES if n > 2 else None
    if unit != "bigram" and (unit, n) != ("byte", 1):
        found["Counter"] = by_counter, SLOW_NBYTES
    if unit in ("word", "line", "character") and find_spec("polars"):
        found["polars"] = by_polars, SLOW_NBYTES
    if unit == "word" and find_spec("datatrove") and find_spec("spacy"):
        found["datatrove"] = by_datatrove, SLOWEST_NBYTES
    return found


def made(form: str, data: bytes, folder: Path) -> Path:
    """The text as a file of a form."""
    if form == "zst":
        path = folder / "text.zst"
        path.write_bytes(zstandard.compress(data))
    elif form == "gz":
        path = folder / "text.gz"
        path.write_bytes(gzip.compress(data, 6))
    else:
        path = folder / "text.jsonl"
        with path.open("w") as file:
            for start in range(0, len(data), DOCUMENT_NBYTES):
                text = data[start : start + DOCUMENT_NBYTES].decode(errors="replace")
                file.write(json.dumps({"id": start, "text": text}, ensure_ascii=False) + "\n")
    return path


def jsonl_by_polars(path: Path, kind: Kind | TokenKind, nbytes: int) -> int:
    import polars as pl

    total: int = pl.read_ndjson(path, schema={"text": pl.String})["text"].str.len_bytes().sum()
    return total


def jsonl_by_datatrove(path: Path, kind: Kind | TokenKind, nbytes: int) -> int:
    from datatrove.pipeline.readers import JsonlReader

    reader = JsonlReader(str(path.parent), glob_pattern=path.name)
    return sum(len(document.text.encode()) for document in reader.run())


def by_command(*command: str) -> Count:
    def count(path: Path, kind: Kind | TokenKind, nbytes: int) -> int:
        subprocess.run([*command, str(path)], stdout=subprocess.DEVNULL, check=True)
        return nbytes

    return count


def gz_by_rapidgzip(path: Path, kind: Kind | TokenKind, nbytes: int) -> int:
    import rapidgzip

    done = 0
    with rapidgzip.open(str(path), parallelization=1) as file:
        while block := file.read(4 << 20):
            done += len(block)
    return done


def readers_of(form: str) -> dict[str, Count]:
    if form == "zst":
        return {"zstd -dc": by_command("zstd", "-dcq")}
    if form == "gz":
        found: dict[str, Count] = {"gzip -dc": by_command("gzip", "-dc")}
        return found | ({"rapidgzip": gz_by_rapidgzip} if find_spec("rapidgzip") else {})
    found = {"polars": jsonl_by_polars} if find_spec("polars") else {}
    return found | ({"datatrove": jsonl_by_datatrove} if find_spec("datatrove") else {})


def cpu_seconds() -> float:
    """Of this process, and of those that it started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def rate(count: Count, path: Path, kind: Kind | TokenKind, nbytes: int) -> float:
    start = cpu_seconds()
    done = count(path, kind, nbytes)
    return done / (cpu_seconds() - start)


def compare(
    what: str, path: Path, kind: Kind | TokenKind, contestants: dict[str, tuple[Count, int]], rounds: int
) -> None:
    """Time them by turns, and print the best rate of each."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for count, _ in contestants.values():
        count(path, kind, 1)  # what is imported and compiled is, and pages are read
    for _ in range(rounds):
        for name, (count, nbytes) in contestants.items():
            rates[name].append(rate(count, path, kind, nbytes))
    best = ", ".join(f"{name} {max(found) / 1e9:.4f}" for name, found in rates.items())
    print(f"{what}: {best} GB a CPU second; load {os.getloadavg()[0]:.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--by", nargs="*", default=KINDS)
    parser.add_argument("--form", nargs="*", default=FORMS, choices=FORMS)
    parser.add_argument("--nbytes", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["POLARS_MAX_THREADS"] = "1"
    names = [name for name in ("numpy", "polars", "datatrove", "rapidgzip") if find_spec(name)]
    print("Python", platform.python_version(), *(f"{name} {version(name)}" for name in names))
    for path in options.files:
        for by in options.by:
            kind = any_kind_named(by)
            contestants: dict[str, tuple[Count, int]] = {"ours": (ours, options.nbytes)}
            contestants |= {
                name: (count, min(most or options.nbytes, options.nbytes))
                for name, (count, most) in peers_of(kind).items()
            }
            compare(f"{path.name}, {by}", path, kind, contestants, options.rounds)
        with path.open("rb") as file:
            data = file.read(options.nbytes)
        for form in options.form:
            with tempfile.TemporaryDirectory() as folder:
                file_of_form = made(form, data, Path(folder))
                reading = Reading(fields=("text",)) if form == "jsonl" else USUAL

                def read(path: Path, kind: Kind | TokenKind, nbytes: int, reading: Reading = reading) -> int:
                    return ours(path, kind, nbytes, reading)

                contestants = {"ours": (read, len(data))}
                contestants |= {name: (count, len(data)) for name, count in readers_of(form).items()}
                compare(
                    f"{path.name}, {form}", file_of_form, any_kind_named("byte"), contestants, options.rounds
                )


if __name__ == "__main__":
    main()
