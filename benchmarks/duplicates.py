"""How fast one core forms MinHash signatures of documents, beside datasketch, which checks them.

    python benchmarks/duplicates.py FILE ... [--shingle word|character] [--ngram N] [--nbytes N] [--document-nbytes N]

Documents are the lines of the files, joined until each has about ``--document-nbytes``, a line of one file each.
Figures are bytes of text for each second of CPU time, in alternation. Ours is what a task does (`sign_piece`): it
reads, finds shingles, hashes them, takes minima under 128 permutations, and forms digests and the keys of bands.
datasketch is given shingles that were made before, untimed, and calls ``MinHash.update_batch`` once a document. The
signatures of both are compared.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tilewright.kernels.choices import HASHES, SCHEMES, SHINGLES
from tilewright.kernels.duplicates.shingles import shingles_of
from tilewright.pipeline.duplicates.options import Options, options_of
from tilewright.pipeline.duplicates.signing import Signed, sign_piece
from tilewright.pipeline.text.corpus import cut_pieces, list_corpus
from tilewright.pipeline.text.formats.reading import Reading

PIECE_NBYTES = 32 << 20
PEER_DOCUMENTS = 400
"""Documents that datasketch is given, of many times as many: it takes that much longer."""


def documents_of(files: list[Path], nbytes: int, document_nbytes: int) -> list[bytes]:
    documents, here, total = [], b"", 0
    for path in files:
        for line in path.read_bytes().split(b"\n"):
            here += line + b" "
            if len(here) >= document_nbytes:
                documents.append(here)
                total += len(here)
                here = b""
                if total >= nbytes:
                    return documents
    return documents


def ours(path: Path, options: Options) -> tuple[float, list[Signed]]:
    """Seconds of CPU time, and the signatures of all lines of the file."""
    reading = Reading(split_on="line")
    pieces = list(cut_pieces(list_corpus([path], reading=reading).documents, PIECE_NBYTES))
    start = time.process_time()
    found = [sign_piece(piece, options, reading, "stop")[0] for piece in pieces]
    return time.process_time() - start, found


def by_datasketch(shingles: list[list[bytes]], options: Options) -> tuple[float, np.ndarray]:
    from datasketch import MinHash

    given: dict[str, Any] = {"num_perm": options.num_perm, "seed": options.seed, "scheme": options.scheme}
    if options.hash == "xxh32":
        given["hashfunc"] = xxhash.xxh32_intdigest
    start = time.process_time()
    rows = []
    for each in shingles:
        signature = MinHash(**given)
        signature.update_batch(each)
        rows.append(signature.hashvalues)
    return time.process_time() - start, np.array(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--shingle", nargs="+", choices=SHINGLES, default=list(SHINGLES))
    parser.add_argument("--ngram", type=int, default=5)
    parser.add_argument("--nbytes", type=int, default=64 << 20)
    parser.add_argument("--document-nbytes", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    documents = documents_of(given.files, given.nbytes, given.document_nbytes)
    nbytes, peer_nbytes = sum(map(len, documents)), sum(map(len, documents[:PEER_DOCUMENTS]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lines.txt")
        path.write_bytes(b"".join(document + b"\n" for document in documents))
        for shingle in given.shingle:
            for name in HASHES:
                for scheme in SCHEMES:
                    options = options_of(
                        threshold=0.8, shingle=shingle, ngram=given.ngram, casefold=False, normalise=None,
                        num_perm=128, bands=None, rows=None, seed=1, hash=name, scheme=scheme, pairs="all",
                        signatures=True,
                    )  # fmt: skip
                    compare(path, documents, options, nbytes, peer_nbytes, given.rounds)


def compare(
    path: Path, documents: list[bytes], options: Options, nbytes: int, peer_nbytes: int, rounds: int
) -> None:
    some = documents[:PEER_DOCUMENTS]
    found = shingles_of(
        np.frombuffer(b"".join(some), np.uint8), np.cumsum([0, *map(len, some)]), options.kind
    )
    every = [
        found.text[start : start + length].tobytes()
        for start, length in zip(found.starts.tolist(), found.lengths.tolist(), strict=True)
    ]
    shingles = [every[first:last] for first, last in zip(found.edges[:-1], found.edges[1:], strict=True)]
    ours(path, options)  # compiled, and its pages read
    rates: list[float] = []
    peers: list[float] = []
    for _ in range(rounds):
        seconds, signed = ours(path, options)
        rates.append(nbytes / seconds)
        if find_spec("datasketch"):
            seconds, expected = by_datasketch(shingles, options)
            peers.append(peer_nbytes / seconds)
            mine = np.concatenate([part.signatures for part in signed if part.signatures is not None])
            np.testing.assert_array_equal(mine[: len(expected)], expected)
    peer = f", datasketch {max(peers) / 1e9:.4f}" if peers else ""
    what = f"{options.kind.n} {options.kind.unit}s, {options.hash}, {options.scheme}"
    print(
        f"{len(documents)} documents, {what}: ours {max(rates) / 1e9:.4f}{peer} GB a CPU second;"
        f" load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
