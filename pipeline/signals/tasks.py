"""What a task makes of the documents of a piece: a row of signals for each."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from tilewright.kernels.signals.definitions import COMPRESSION_LEVEL, COUNTS, NAMES, share
from tilewright.pipeline.reduce import end_if_given_up
from tilewright.pipeline.signals.options import Options
from tilewright.pipeline.store.waiting import reading_while
from tilewright.pipeline.text.corpus import Piece, reading_ahead
from tilewright.pipeline.text.documents import Rows, are_files, joined, rows_of
from tilewright.pipeline.text.formats.reading import Reading
from tilewright.pipeline.text.formats.sources import Found, LeftOut, Remarks
from tilewright.pipeline.text.pieces import without_bad_files
from tilewright.pipeline.text.whole.texts import AS_BYTES, BLOCK_NBYTES, LONGER, MOST_NBYTES, Texts, texts_of

COMPRESSOR = f"zlib {zlib.ZLIB_RUNTIME_VERSION}, level {COMPRESSION_LEVEL}"
UNKNOWN = -1
"""A count that was not taken; a share is NaN."""
TOO_LONG = f"{LONGER}, with no signals but byte_count: split it (split_on)"


@dataclass(frozen=True, eq=False)
class Measured:
    """The documents of a piece, in the order in which they stand there."""

    rows: Rows | None
    """None where they are the piece's files."""
    columns: dict[str, np.ndarray]
    """int64 and float64, by the names of signals."""
    compressor: str
    """What ``compression_ratio`` was made by."""
    remarks: Remarks
    left_out: dict[int, LeftOut]
    """`Found.left_out`."""
    bad: dict[int, str] = field(default_factory=dict)
    """Files that cannot be read, by their places in the piece, and why; all else is of the piece without them."""


def no_columns() -> dict[str, np.ndarray]:
    return {name: np.empty(0, np.int64 if name in COUNTS else np.float64) for name in NAMES}


def measure_piece(
    piece: Piece, options: Options, reading: Reading, on_error: str, most_nbytes: int = MOST_NBYTES
) -> tuple[Measured, dict[str, float]]:
    """Read the documents of a piece and find their signals; the busy seconds of both. most_nbytes: the longest document
    that has signals.

    Raises
    ------
    CorpusError
        A file cannot be read, decompressed or split, and ``on_error`` is "stop".
    """
    read = partial(_measured, options=options, reading=reading, most_nbytes=most_nbytes)
    measured, bad = without_bad_files(piece, read, AS_BYTES, reading, on_error, BLOCK_NBYTES)
    assert measured is not None  # pieces hold whole files
    documents, stages = measured
    return replace(documents, bad=bad), stages


def _measured(
    piece: Piece, options: Options, reading: Reading, most_nbytes: int
) -> tuple[Measured, dict[str, float]]:
    check = end_if_given_up()
    with reading_while(check), reading_ahead(piece):
        return _measured_by(piece, options, reading, most_nbytes, check)


def _measured_by(
    piece: Piece, options: Options, reading: Reading, most_nbytes: int, check: Callable[[], None]
) -> tuple[Measured, dict[str, float]]:
    found = Found(True)
    parts = [no_columns()]
    stages = {"read": 0.0, "measure": 0.0}
    clock = time.perf_counter()
    for texts in texts_of(piece, reading, found, check, too_long=TOO_LONG, most_nbytes=most_nbytes):
        read = time.perf_counter()
        stages["read"] += read - clock
        parts.append(_columns_of(texts, options))
        clock = time.perf_counter()
        stages["measure"] += clock - read
    columns = {name: np.concatenate([part.pop(name) for part in parts]) for name in NAMES}
    rows = rows_of(found, 0, {}) if piece.documents else joined([])
    if rows.lost.any():  # what a decoder has replaced before loops saw the text
        known = columns["char_count"] != UNKNOWN
        columns["undecodable_count"] += np.where(known, rows.lost, 0)
        shares = share(columns["undecodable_count"], columns["char_count"])
        columns["frac_chars_undecodable"] = np.where(known, shares, np.nan)
    files = None if are_files(rows, len(piece.documents)) else rows
    return Measured(files, columns, COMPRESSOR, found.remarks, found.left_out), stages


def _columns_of(texts: Texts, options: Options) -> dict[str, np.ndarray]:
    from tilewright.kernels.signals.api import signals_of
    from tilewright.kernels.signals.compressing import compressed_nbytes

    if texts.data is None:
        nothing = {name: np.full(1, UNKNOWN) if name in COUNTS else np.full(1, np.nan) for name in NAMES}
        return nothing | {"byte_count": np.diff(texts.edges)}
    found = signals_of(texts.data, texts.edges, options.stop_words)
    return found | {"compression_ratio": np.diff(texts.edges) / compressed_nbytes(texts.data, texts.edges)}
