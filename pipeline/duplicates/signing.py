"""What a task makes of the documents of a piece: the digest of each text, its signature, and the signature's bands."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tilewright.pipeline.duplicates.options import Options
from tilewright.pipeline.reduce import end_if_given_up
from tilewright.pipeline.store.waiting import reading_while
from tilewright.pipeline.text.blocks import turn_to_read
from tilewright.pipeline.text.corpus import Piece, reading_ahead
from tilewright.pipeline.text.documents import Rows, are_files, joined, rows_of
from tilewright.pipeline.text.formats.reading import Reading
from tilewright.pipeline.text.formats.sources import Found, LeftOut, Remarks, add_remarks
from tilewright.pipeline.text.pieces import run_shares, text_threads, without_bad_files
from tilewright.pipeline.text.whole.documents import whole_shares
from tilewright.pipeline.text.whole.texts import (
    AS_BYTES,
    BLOCK_NBYTES,
    LARGE_BLOCK_NBYTES,
    LONGER,
    Texts,
    texts_of,
)

if TYPE_CHECKING:
    from tilewright.kernels.duplicates.signing import Signs


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
    key_parts: tuple[np.ndarray, ...]
    """uint64[(bands, documents of the part)], one part beside the other: two documents agree in a band where its keys
    are the same. They are put together once, with those of all other pieces."""
    signatures: np.ndarray | None
    """uint32[(documents, num_perm)], where they are wanted."""
    remarks: Remarks
    left_out: dict[int, LeftOut]
    """`Found.left_out`."""
    others: int = 0
    """Documents that the cores signed though a GPU was to: it cannot fold all of their characters."""
    bad: dict[int, str] = field(default_factory=dict)
    """Files that cannot be read, by their places in the piece, and why; all else is of the piece without them."""

    @property
    def keys(self) -> np.ndarray:
        """All ``key_parts``, uint64[(bands, documents)]."""
        return np.concatenate(self.key_parts, axis=1)


def sign_piece(
    piece: Piece, options: Options, reading: Reading, on_error: str, device: str = "cpu", threads: int = 1
) -> tuple[Signed, dict[str, float]]:
    """Read the documents of a piece and form their signatures; the busy seconds of both.

    device: ``cuda``, where so many threads read and a GPU forms them, or ``cpu``, where the task's own does both.

    Raises
    ------
    CorpusError
        A file cannot be read, decompressed or split, and ``on_error`` is "stop".
    """
    sign = partial(_signed, options=options, reading=reading, device=device, threads=threads)
    signed, bad = without_bad_files(piece, sign, AS_BYTES, reading, on_error, BLOCK_NBYTES)
    assert signed is not None  # pieces hold whole files
    documents, stages = signed
    return replace(documents, bad=bad), stages


class _Part:
    """What one thread finds of its share of a piece."""

    def __init__(self, options: Options) -> None:
        self._keeps = options.signatures
        self.found = Found(True)
        self.digests, self.nbytes, self.shingled = (
            [np.empty((0, 2), np.uint64)],
            [np.empty(0, np.int64)],
            [np.empty(0, np.bool_)],
        )
        self.keys = [np.empty((options.bands, 0), np.uint64)]
        self.signatures = [np.empty((0, options.num_perm), np.uint32)]
        self.others = 0
        self.stages = {"read": 0.0, "sign": 0.0}

    def add(self, texts: Texts, signs: Signs) -> None:
        self.digests.append(texts.digests)
        self.nbytes.append(np.diff(texts.edges))
        self.add_signs(signs)

    def add_signs(self, signs: Signs) -> None:
        self.shingled.append(signs.shingled)
        self.keys.append(signs.keys)
        self.others += signs.others
        if signs.signatures is not None and self._keeps:
            self.signatures.append(signs.signatures)


def _signed(
    piece: Piece, options: Options, reading: Reading, device: str, threads: int
) -> tuple[Signed, dict[str, float]]:
    check = end_if_given_up()
    if device != "cuda":
        shares = [replace(piece, first=0)]
        parts = [_on_cores(shares[0], options, reading, check)]
    else:
        from tilewright.pipeline.duplicates.on_gpu import prepare

        prepare(options.signing)
        left: Remarks = {}
        part = _lines_on_gpu(piece, options, reading, threads, check, left)
        if part is not None:
            return _joined(piece, options, [replace(piece, first=0)], [part])
        shares = whole_shares(piece, threads)
        # In large steps: between two of them the many threads that read take turns at the interpreter.
        reading = replace(
            reading, threads=max(1, threads // max(1, len(shares))), buffer_nbytes=LARGE_BLOCK_NBYTES
        )
        parts = run_shares([partial(_on_gpu, share, options, reading) for share in shares], threads, check)
        if parts:
            add_remarks(parts[0].found.remarks, left)
    return _joined(piece, options, shares, parts)


def _lines_on_gpu(
    piece: Piece, options: Options, reading: Reading, threads: int, check: Callable[[], None], left: Remarks
) -> _Part | None:
    """What is found of a piece whose documents are lines of large plain files; None of any other, and where these have
    to be read block by block, of which ``left`` gets what is to be told."""
    from tilewright.pipeline.duplicates import lines_on_gpu

    if not lines_on_gpu.fit(piece, reading):
        return None
    signed = lines_on_gpu.sign_lines(
        piece, options.signing, text_threads(threads), threads, check, left, signatures=options.signatures
    )
    if signed is None:
        return None
    part = _Part(options)
    part.found, chunks = signed
    for chunk in chunks:
        part.digests.append(chunk.digests)
        part.nbytes.append(chunk.lengths)
        for signs in chunk.signs:
            part.add_signs(signs)
        part.stages["read"] += chunk.reading
        part.stages["sign"] += chunk.signing
    return part


def _on_cores(share: Piece, options: Options, reading: Reading, check: Callable[[], None]) -> _Part:
    from tilewright.kernels.duplicates.signing import sign_on_cores

    def sign(texts: Texts) -> Signs:
        return sign_on_cores(*_held(texts), options.signing, signatures=options.signatures)

    part = _Part(options)
    with reading_while(check), reading_ahead(share):
        _sign_all(part, texts_of(share, reading, part.found, check, too_long=TOO_LONG), sign)
    return part


def _on_gpu(share: Piece, options: Options, reading: Reading, check: Callable[[], None]) -> _Part:
    from tilewright.kernels.duplicates.signing import sign_on_cores
    from tilewright.pipeline.duplicates.on_gpu import NO_ROOM, borrowed_signer

    part = _Part(options)
    with (
        reading_while(check),
        reading_ahead(share),
        borrowed_signer(options.signing, signatures=options.signatures) as signer,
        turn_to_read(share),
    ):

        def sign(texts: Texts) -> Signs:
            if texts.data is None:
                return sign_on_cores(*_held(texts), options.signing, signatures=options.signatures)
            return signer.sign(texts.data, texts.edges, in_block=texts.in_block)

        texts = texts_of(
            share,
            reading,
            part.found,
            check,
            too_long=TOO_LONG,
            block_nbytes=LARGE_BLOCK_NBYTES,
            memory=signer.buffer,
        )
        _sign_all(part, texts, sign)
        if signer.by_cores:
            part.found.remark(NO_ROOM, share.documents[0].name)
    return part


def _held(texts: Texts) -> tuple[np.ndarray, np.ndarray]:
    """The texts and their edges; of one that is too long, those of an empty one."""
    if texts.data is None:
        return np.empty(0, np.uint8), np.zeros(2, np.int64)
    return texts.data, texts.edges


def _sign_all(part: _Part, blocks: Iterable[Texts], sign: Callable[[Texts], Signs]) -> None:
    clock = time.perf_counter()
    for texts in blocks:
        read = time.perf_counter()
        part.stages["read"] += read - clock
        part.add(texts, sign(texts))
        clock = time.perf_counter()
        part.stages["sign"] += clock - read


def _joined(
    piece: Piece, options: Options, shares: Sequence[Piece], parts: Sequence[_Part]
) -> tuple[Signed, dict[str, float]]:
    """What was found of a piece, from what was of its shares."""
    remarks: Remarks = {}
    left_out: dict[int, LeftOut] = {}
    for share, part in zip(shares, parts, strict=True):
        add_remarks(remarks, part.found.remarks)
        left_out |= {share.first + place: each for place, each in part.found.left_out.items()}
    rows = joined([])
    if piece.documents:
        rows = joined(
            [rows_of(part.found, share.first, {}) for share, part in zip(shares, parts, strict=True)]
        )
    wanted = [each for part in parts for each in part.signatures]
    return (
        Signed(
            None if are_files(rows, len(piece.documents)) else rows,
            np.concatenate([each for part in parts for each in part.digests]),
            np.concatenate([each for part in parts for each in part.nbytes]),
            np.concatenate([each for part in parts for each in part.shingled]),
            tuple(each for part in parts for each in part.keys),
            np.concatenate(wanted) if options.signatures else None,
            remarks,
            left_out,
            sum(part.others for part in parts),
        ),
        {stage: sum(part.stages[stage] for part in parts) for stage in ("read", "sign")},
    )
