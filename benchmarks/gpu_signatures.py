"""How fast a GPU forms MinHash signatures of documents, beside all cores of its host.

    python benchmarks/gpu_signatures.py [--shingle word|character] [--nbytes N] [--document-nbytes N] [--json F]

The text is that of `gpu_tokens.py`, in lines of about ``--document-nbytes``, which are the documents, or with
``--json-lines`` hold them in a field. ``--nbytes`` of it lie in files of ``--file-nbytes``, hard links to one, so that
they stay in the page cache.

For each way to form signatures: the rate of the kernels alone, over a block in device memory, with the keys of bands
brought back; the rate of the pass over all files (`sign_piece`), in which threads read them and the GPU splits and
signs them (with ``--json-lines`` the threads split them, too); and the seconds of the whole search, on the GPU (profile
``local``) and on all cores (profile ``cpu``, of a part of the files). Rates are the best of the rounds; the share of
the floor is that of the bus. Signatures of the two devices are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from gpu_tokens import BUS_NBYTES, make_text

import tilewright as tw
from tilewright.kernels.choices import HASHES, SCHEMES, SHINGLES
from tilewright.kernels.cpu.loops import usable_cores
from tilewright.kernels.duplicates.signing import sign_on_cores
from tilewright.pipeline.duplicates.options import Options, options_of
from tilewright.pipeline.duplicates.signing import sign_piece
from tilewright.pipeline.text.corpus import Piece, list_corpus
from tilewright.pipeline.text.formats.reading import Reading, reading_of

UNIT_NBYTES = 1 << 26
COMPARED_NBYTES = 1 << 22
"""What the cores sign too, to compare."""


def lines_of(nbytes: int, document_nbytes: int) -> bytes:
    text = np.frombuffer(make_text(nbytes).replace(b"\n", b" "), np.uint8).copy()
    blanks = np.flatnonzero(text == 0x20)
    text[blanks[np.searchsorted(blanks, np.arange(document_nbytes, len(text) - 100, document_nbytes))]] = 0x0A
    text[-1] = 0x0A
    return text.tobytes()


def as_json_lines(text: bytes) -> bytes:
    lines = [line.decode(errors="replace") for line in text.splitlines()]
    return "".join(json.dumps({"text": line}, ensure_ascii=False) + "\n" for line in lines).encode()


def files_of(folder: Path, given: argparse.Namespace) -> list[Path]:
    unit = lines_of(min(UNIT_NBYTES, given.file_nbytes), given.document_nbytes)
    if given.json_lines:
        unit = as_json_lines(unit)
    name = "{:03}.jsonl" if given.json_lines else "{:03}.txt"
    first = folder / name.format(0)
    with first.open("wb") as file:
        for _ in range(max(1, given.file_nbytes // len(unit))):
            file.write(unit)
    paths = [first]
    for number in range(1, max(1, given.nbytes // given.file_nbytes)):
        paths.append(folder / name.format(number))
        os.link(first, paths[-1])
    return paths


def kernels(data: np.ndarray, options: Options, rounds: int) -> dict[str, float]:
    """GB/s over a text that lies in device memory, once its signatures were compared."""
    from numba import cuda

    from tilewright.kernels.duplicates.device_signing import DeviceSigner

    edges = np.concatenate([[0], np.flatnonzero(data == 0x0A) + 1])
    signer, stream, text = DeviceSigner(options.signing), cuda.stream(), cuda.to_device(data)
    some = np.searchsorted(edges, COMPARED_NBYTES)
    found = signer.sign(text, data, edges[: some + 1], stream, signatures=True)
    wanted = sign_on_cores(data, edges[: some + 1], options.signing, signatures=True)
    assert found.signatures is not None
    assert (found.signatures == wanted.signatures).all()
    assert (found.keys == wanted.keys).all()
    best = np.inf
    for turn in range(rounds + 1):
        start = time.perf_counter()
        signer.sign(text, data, edges, stream, signatures=False)
        if turn:
            best = min(best, time.perf_counter() - start)
    return {"kernel_gb_s": len(data) / best / 1e9}


def whole_pass(paths: list[Path], options: Options, reading: Reading, rounds: int, threads: int) -> float:
    """GB/s of stored bytes, of signing all documents of the files on the GPU."""
    documents = list_corpus(paths, reading=reading).documents
    nbytes = sum(document.nbytes for document in documents)
    best = 0.0
    for _ in range(rounds):
        start = time.perf_counter()
        signed, stages = sign_piece(Piece(0, documents, 0, nbytes), options, reading, "stop", "cuda", threads)
        seconds = time.perf_counter() - start
        best = max(best, nbytes / seconds / 1e9)
        told = ", ".join(f"{name} {spent / threads:.3f} s a thread" for name, spent in stages.items())
        print(f"    pass: {seconds:.3f} s; {told}; {len(signed.nbytes)} documents", flush=True)
    return best


def searched(paths: list[Path], asked: dict[str, Any], **where: Any) -> float:
    found = tw.duplicates(paths, **asked, **where)
    print(f"    whole search, {where['device']}: {found.seconds:.3f} s", flush=True)
    return found.nbytes / found.seconds / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shingle", nargs="*", choices=SHINGLES, default=SHINGLES)
    parser.add_argument("--hash", nargs="*", choices=HASHES, default=HASHES)
    parser.add_argument("--scheme", nargs="*", choices=SCHEMES, default=SCHEMES[:1])
    parser.add_argument("--ngram", type=int, default=5)
    parser.add_argument("--nbytes", type=int, default=8 << 30)
    parser.add_argument("--file-nbytes", type=int, default=1 << 27)
    parser.add_argument("--document-nbytes", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=usable_cores(), help="that read; default: every core")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json-lines", action="store_true", help="documents are a field of JSON lines")
    parser.add_argument("--no-search", action="store_true", help="leave the whole search out")
    parser.add_argument("--no-cpu", action="store_true", help="leave the cores out")
    parser.add_argument("--json", type=Path, help="where the figures go, too")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gpu-signatures-"))
    rows = []
    try:
        paths = files_of(folder, given)
        how: dict[str, Any] = {"field": "text"} if given.json_lines else {"split_on": "line"}
        data = np.fromfile(paths[0], np.uint8)
        for shingle in given.shingle:
            for name in given.hash:
                for scheme in given.scheme:
                    asked = {"shingle": shingle, "ngram": given.ngram, "hash": name, "scheme": scheme}
                    options = options_of(
                        threshold=0.8, casefold=False, normalise=None, num_perm=128, bands=None, rows=None,
                        seed=1, pairs="all", signatures=False, **asked,
                    )  # fmt: skip
                    row: dict[str, Any] = dict(asked)
                    row |= kernels(data, options, given.rounds)
                    row["pass_gb_s"] = whole_pass(
                        paths, options, reading_of(**how), given.rounds, given.threads
                    )
                    row["of_floor"] = row["pass_gb_s"] * 1e9 / BUS_NBYTES
                    some = paths[: max(1, len(paths) // 16)]
                    if not given.no_search:
                        row["search_gb_s"] = searched(paths, asked | how, device="cuda", cluster="local")
                    if not given.no_cpu:
                        row["cores_gb_s"] = searched(some, asked | how, device="cpu", cluster="cpu")
                    rows.append(row)
                    print(row, flush=True)
    finally:
        shutil.rmtree(folder)
    print(
        f"\n{'shingle':11}{'hash':7}{'scheme':10}{'kernels':>9}{'pass':>8}{'search':>8}{'cores':>8}  GB/s  of floor"
    )
    for row in rows:
        print(
            f"{row['shingle']:11}{row['hash']:7}{row['scheme']:10}{row['kernel_gb_s']:9.1f}{row['pass_gb_s']:8.2f}"
            f"{row.get('search_gb_s', 0):8.2f}{row.get('cores_gb_s', 0):8.2f}      {row['of_floor']:8.1%}"
        )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
