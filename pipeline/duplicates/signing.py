"""What a task makes of the documents of a piece: the digest of each text, its signature, and the signature's bands."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from tilewright.pipeline.duplicates.options import Options
from tilewright.pipeline.reduce import end_if_given_up
from tilewright.pipeline.store.waiting import reading_while
from tilewright.pipeline.text.corpus import Piece, reading_ahead
from tilewright.pipeline.text.documents import Rows, are_files, joined, rows_of
from tilewright.pipeline.text.formats.reading import Reading
from tilewright.pipeline.text.formats.sources import Found, LeftOut, Remarks
from tilewright.pipeline.text.pieces import without_bad_files
from tilewright.pipeline.text.whole.texts import AS_BYTES, BLOCK_NBYTES, LONGER, texts_of

if TYPE_CHECKING:
    from tilewright.kernels.duplicates.minhash import Permutations


TOO_LONG = f"{LONGER}, compared as a whole and not by its shingles: split it (split_on)"


@dataclass(frozen=True, eq=False)
class Signed:
    """The documents of a piece, in the order in which they stand there."""

    rows: Rows | None
    """None where they are the piece's files."""
    digests: np.ndarray
    """uint64[(documents, 2)]."""
    nbytes: np.ndarray
    """int64: the length of each text, decoded."""
    shingled: np.ndarray
    """bool: whether it has shingles."""
    keys: np.ndarray
    """uint64[(bands, documents)]: two documents agree in a band where its keys are the same."""
    signatures: np.ndarray | None
    """uint32[(documents, num_perm)], where they are wanted."""
    remarks: Remarks
    left_out: dict[int, LeftOut]
    """`Found.left_out`."""
    bad: dict[int, str] = field(default_factory=dict)
    """Files that cannot be read, by their places in the piece, and why; all else is of the piece without them."""


@lru_cache(maxsize=8)
def _permutations(scheme: str, count: int, seed: int) -> Permutations:
    from tilewright.kernels.duplicates.minhash import permutations_of

    return permutations_of(scheme, count, seed)


def sign_piece(
    piece: Piece, options: Options, reading: Reading, on_error: str
) -> tuple[Signed, dict[str, float]]:
    """Read the documents of a piece and form their signatures; the busy seconds of both.

    Raises
    ------
    CorpusError
        A file cannot be read, decompressed or split, and ``on_error`` is "stop".
    """
    signed, bad = without_bad_files(
        piece, partial(_signed, options=options, reading=reading), AS_BYTES, reading, on_error, BLOCK_NBYTES
    )
    assert signed is not None  # pieces hold whole files
    documents, stages = signed
    return replace(documents, bad=bad), stages


def _signed(piece: Piece, options: Options, reading: Reading) -> tuple[Signed, dict[str, float]]:
    check = end_if_given_up()
    with reading_while(check), reading_ahead(piece):
        return _signed_by(piece, options, reading, check)


def _signed_by(
    piece: Piece, options: Options, reading: Reading, check: Callable[[], None]
) -> tuple[Signed, dict[str, float]]:
    from tilewright.kernels.duplicates.minhash import band_keys, signatures_of
    from tilewright.kernels.duplicates.shingles import shingles_of

    permutations = _permutations(options.scheme, options.num_perm, options.seed)
    found = Found(True)
    digests, nbytes, shingled = (
        [np.empty((0, 2), np.uint64)],
        [np.empty(0, np.int64)],
        [np.empty(0, np.bool_)],
    )
    keys = [np.empty((options.bands, 0), np.uint64)]
    signatures = [np.empty((0, options.num_perm), np.uint32)]
    stages = {"read": 0.0, "sign": 0.0}
    clock = time.perf_counter()
    for texts in texts_of(piece, reading, found, check, too_long=TOO_LONG):
        read = time.perf_counter()
        stages["read"] += read - clock
        lengths = np.diff(texts.edges)
        data, edges = texts.data, texts.edges
        if data is None:
            data, edges = np.empty(0, np.uint8), np.zeros(2, np.int64)
        shingles = shingles_of(data, edges, options.kind)
        each = signatures_of(shingles.hashes(options.hash), shingles.edges, permutations)
        digests.append(texts.digests)
        nbytes.append(lengths)
        shingled.append(np.diff(shingles.edges) > 0)
        keys.append(band_keys(each, options.bands, options.rows))
        if options.signatures:
            signatures.append(each)
        clock = time.perf_counter()
        stages["sign"] += clock - read
    rows = rows_of(found, 0, {}) if piece.documents else joined([])
    return (
        Signed(
            None if are_files(rows, len(piece.documents)) else rows,
            np.concatenate(digests),
            np.concatenate(nbytes),
            np.concatenate(shingled),
            np.concatenate(keys, axis=1),
            np.concatenate(signatures) if options.signatures else None,
            found.remarks,
            found.left_out,
        ),
        stages,
    )
