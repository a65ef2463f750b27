"""How a piece of large plain documents is counted on a GPU: all of it is brought there as one text, then counted in one
go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import lru_cache, partial
from typing import Any

import numpy as np

from tilewright.kernels.cpu.loops import usable_cores
from tilewright.kernels.gpu.memory import is_out_of_memory
from tilewright.kernels.histograms.token_kinds import TokenKind
from tilewright.kernels.histograms.tokens import Kind
from tilewright.kernels.numbers import format_nbytes
from tilewright.pipeline.text.corpus import Piece, check_as_listed
from tilewright.pipeline.text.formats.sources import Remark, Remarks
from tilewright.pipeline.text.gpu.lanes import (
    MOST_TOKENS_NBYTES,
    Tally,
    Text,
    TokenTally,
    borrowed_lane,
    borrowed_table,
    borrowed_text,
    prepare,
)
from tilewright.pipeline.text.sparse_pieces import Entries
from tilewright.pipeline.threads import run_all
from tilewright.pipeline.transfer import file_upload

_bringing = threading.Lock()
"""Texts whose tokens are counted come one after the other: while the GPU counts one, another is brought. Side by side
they would be there at the same time, and the bus idle while both are counted."""

Run = Callable[[Sequence[Callable[[], Any]]], list[Any]]
"""Makes calls on the threads of the process that read, and returns what each does."""


_SMALLER = "a smaller tilewright.piece-nbytes makes pieces smaller"
_BY_BLOCKS = "counted block by block, more slowly, with all that came in a piece with it"
_BY_CORES = "counted on the cores of the GPU's worker, with all that came in a piece with it"
_NO_ROOM = "the GPU has no room for the piece"
_NOT_READ = "not all of it could be read at once"
BLOCKS_NO_ROOM = f"{_BY_BLOCKS}: {_NO_ROOM} ({_SMALLER})"
BLOCKS_NOT_READ = f"{_BY_BLOCKS}: {_NOT_READ}"
CORES_NO_ROOM = (
    f"{_BY_CORES}: {_NO_ROOM} and a table of its tokens, or the host for a list of them ({_SMALLER})"
)
CORES_NOT_READ = f"{_BY_CORES}: {_NOT_READ}"
CORES_TOO_LONG = f"{_BY_CORES}: a piece of more than {format_nbytes(MOST_TOKENS_NBYTES)} ({_SMALLER})"
"""What is told of the first file of a piece that is not counted at once. The same of all, so that it is told once a
run."""


def count_text(
    piece: Piece, kind: Kind, tally: Tally, run: Run, threads: int, neighbours: int, left: Remarks
) -> Entries | None:
    """Count a piece by a kind with bins. left: gets what is to be told where it is not.

    Returns None, with nothing added to the tally, where not all could be read or the GPU has no room for it. Counting
    it block by block then says what is wrong, or works and takes longer.
    """
    name = piece.documents[0].name
    with ExitStack() as stack:
        try:
            text = stack.enter_context(borrowed_text(piece, kind))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            left[BLOCKS_NO_ROOM] = Remark(1, name)
            return None
        try:
            moves = _brought(text, tally, run, threads, neighbours)
            clock = time.perf_counter()
            if moves is None:
                left[BLOCKS_NOT_READ] = Remark(1, name)
                return None
            nbytes = text.count(tally)
            # While the GPU counts. The loop that read the files does not look at their times.
            check_as_listed(piece.documents)
            counts = tally.read()
            bins = np.flatnonzero(counts)
            values = counts[bins]
            seconds = _seconds(moves, clock)
        finally:
            tally.settle()  # no copy to the text's memory is under way when another takes it
    return Entries(np.zeros_like(bins), bins, values, None, nbytes, *seconds, unknown(kind))


def count_tokens(
    piece: Piece, kind: TokenKind, run: Run, threads: int, neighbours: int, left: Remarks
) -> Entries | None:
    """Count the tokens of a piece, whose lists as many threads put in order as there are cores for each neighbour.
    left: gets what is to be told where they are not counted.

    Returns None where not all could be read, and where the GPU has no room for it: then the cores count it, or say what
    is wrong.
    """
    name = piece.documents[0].name
    if piece.nbytes > MOST_TOKENS_NBYTES:
        left[CORES_TOO_LONG] = Remark(1, name)
        return None
    prepare(kind)
    try:
        found = _tokens_of(piece, kind, run, threads, neighbours)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        left[CORES_NO_ROOM] = Remark(1, name)
        return None
    if found is None:
        left[CORES_NOT_READ] = Remark(1, name)
    return found


def _tokens_of(piece: Piece, kind: TokenKind, run: Run, threads: int, neighbours: int) -> Entries | None:
    with ordering_table(kind, neighbours) as tally, borrowed_text(piece, kind) as text:
        try:
            with _bringing:
                moves = _brought(text, tally, run, threads, neighbours)
            clock = time.perf_counter()
            if moves is None:
                return None
            nbytes = text.count_tokens(tally)
            check_as_listed(piece.documents)
            lost, found = tally.counter.lost, tally.counter.take()
            seconds = _seconds(moves, clock)
        finally:
            tally.settle()
    told = {0: lost} if lost else {}
    return Entries(None, None, found.counts, found.tokens, nbytes, *seconds, told)


def ordering_table(kind: TokenKind, neighbours: int) -> AbstractContextManager[TokenTally]:
    """A table of this process for one task, whose tokens this worker's share of the host's cores puts in order.
    neighbours: workers on this host, this one included."""
    cores = max(1, usable_cores() // neighbours)
    return borrowed_table(kind, partial(run_all, _ordering_threads(cores)), cores)


@lru_cache(maxsize=1)
def _ordering_threads(count: int) -> ThreadPoolExecutor:
    """Threads that put lists of tokens in order: not those that read, which bring the next text meanwhile."""
    return ThreadPoolExecutor(count, thread_name_prefix="tilewright-text-order")


def _brought(
    text: Text, tally: Tally | TokenTally, run: Run, threads: int, neighbours: int
) -> list[tuple[float, float]] | None:
    """Bring a text to the GPU, for a tally that counts what is there. Returns the seconds of reading and of waiting of
    each thread; None where not all could be read."""
    upload = text.upload(threads, neighbours)
    file_upload.prepare()

    def move() -> tuple[float, float]:
        with borrowed_lane() as lane:
            return lane.move(upload)

    try:
        moves = run([move] * min(threads, upload.blocks))
    finally:
        tally.follow_uploads()
    return None if upload.failed() else moves


def _seconds(moves: Sequence[tuple[float, float]], clock: float) -> tuple[float, float]:
    """Of reading, and of counting, of a text that was brought and then counted from ``clock`` on."""
    waited = sum(waiting for _, waiting in moves)
    return sum(reading for reading, _ in moves), waited + time.perf_counter() - clock


def unknown(kind: Kind) -> dict[int, int] | None:
    """`Entries.lost` of a GPU, whose kernels do not tell a U+FFFD that was written from one that stands for others."""
    return None if kind.name == "codepoint" else {}
