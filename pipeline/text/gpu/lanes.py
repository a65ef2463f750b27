"""Text from files to counts on a GPU, through lanes that each carry one block while the next is read.

A lane is what one reading thread needs: two blocks of pinned memory, two on the device, a stream. A thread fills one
block while the other is copied and counted, and waits only for the block it is about to fill. All lanes of a task add
to one tally: counts that stay on the device until the task has read everything. Plain text of large files takes a
shorter way: all lanes of a task fill one text on the device, by loops without the interpreter's lock and on one stream,
and it is counted in one launch. Lines of such files come in chunks (`chunks.py`). All of these are made once and kept
by the process (`transfer/lane.py`). Only texts, up to 512 MiB (of tokens 1.5 GiB) for each of a worker's threads, or
two of 128 MiB for each chunk, and tables of tokens are freed when another job begins, since its plan is made from what
is free, and the rest when that is a product, whose plan counts no pinned memory but its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numba import cuda

from tilewright.kernels.gpu.device_array import address
from tilewright.kernels.gpu.lock_keeping import LockKeepingStream
from tilewright.kernels.gpu.transfer import download, pinned_bytes, upload_stream
from tilewright.kernels.histograms.device_token_counting import DeviceCounter, Run
from tilewright.kernels.histograms.device_token_counting import prepare as prepare_tokens
from tilewright.kernels.histograms.device_tokens import AFTER
from tilewright.kernels.histograms.offsets import DocumentOffsets
from tilewright.kernels.histograms.select import add_counts, clear, count_on_device
from tilewright.kernels.histograms.tables.device_keys import MOST_TEXT_NBYTES
from tilewright.kernels.histograms.token_kinds import TokenKind
from tilewright.kernels.histograms.tokens import Kind
from tilewright.kernels.numbers import round_up
from tilewright.pipeline.text.blocks import EXTRA_NBYTES, Block, with_margins
from tilewright.pipeline.text.corpus import Piece
from tilewright.pipeline.text.gpu.room import TEXT_STEP_NBYTES
from tilewright.pipeline.text.sparse_pieces import reading_on
from tilewright.pipeline.transfer.file_rectangles import ANY_LENGTH, Rectangle
from tilewright.pipeline.transfer.file_upload import Upload
from tilewright.pipeline.transfer.lane import Lane, Spares, untimed_event
from tilewright.pipeline.transfer.lane_blocks import LANE_NBYTES, move_nbytes

MOST_TOKENS_NBYTES = MOST_TEXT_NBYTES - 2**20
"""The most text whose tokens are counted at once: keys of their table say where in a text they stand, margins
included."""


class CountingLane(Lane):
    """A lane with two blocks on the device and a stream, which counts what lies in them."""

    def __init__(self, nbytes: int = LANE_NBYTES) -> None:
        """nbytes: of a block, but for its margins."""
        self.stream = cuda.stream()
        host = [pinned_bytes(nbytes + EXTRA_NBYTES) for _ in range(2)]
        self._device = [cuda.device_array(nbytes + EXTRA_NBYTES, np.uint8) for _ in range(2)]
        super().__init__(host)
        self._all = untimed_event()
        self.waited = 0.0
        """Seconds that `buffer` spent waiting for the device."""
        self._keeping = LockKeepingStream(self.stream)

    def move(self, upload: Upload) -> tuple[float, float]:
        """Take part in an upload until nothing is left to move; returns seconds of reading and of waiting for the
        device."""
        return upload.run(self.to_gpu)

    def all_given(self) -> Any:
        """The event that all work given to this lane so far is done; valid until the next call."""
        self._keeping.record(self._all)
        return self._all

    def _wait(self, event: Any) -> None:
        self._keeping.wait(event)

    def buffer(self) -> np.ndarray:
        """The block to fill next, uint8[nbytes + EXTRA_NBYTES], once the device is done with it."""
        start = time.perf_counter()
        block = self.block()
        self.waited += time.perf_counter() - start
        return block

    def add(self, block: Block, kind: Kind, tally: Tally) -> None:
        """Copy a block that lies in the last buffer, and add its counts, as one text, to the tally; returns before that
        is done."""
        device = self._upload(block)
        add_counts(device, 0, len(block.data), block.start, block.stop, kind, tally.counts, self._keeping)
        self._keeping.record(self.passed)

    def rows(self, block: Block, kind: Kind) -> np.ndarray:
        """Counts of a block that lies in the last buffer: int64[(documents, bins)]; for a stretch, int64[(1, bins)]."""
        device = self._upload(block)
        edges = np.array([0, len(block.data)]) if block.edges is None else block.edges
        offsets = DocumentOffsets.once(edges)
        counts = count_on_device(device, offsets, block.start, block.stop, kind, self.stream)
        return download(counts, self.stream)

    def _upload(self, block: Block) -> Any:
        return self.bring(block.data)

    def bring(self, data: np.ndarray) -> Any:
        """Have the stream copy what lies in the last buffer to the device, where it stays until the next buffer but one
        is asked for; returns where it is."""
        device = self._device[self._turn]
        if len(data):
            self._keeping.copy_to_device(data, device)
        self._keeping.record(self.passed)
        return device


class Text:
    """A piece's plain documents on the device: part of one document, with margins, or whole ones side by side."""

    ALIGNMENT = 256
    """Alignment of documents that are counted one by one."""

    def __init__(self, piece: Piece, kind: Kind | TokenKind, memory: Any) -> None:
        self._piece, self._kind, self._data = piece, kind, memory
        self._spans = _spans(piece, kind)

    def upload(self, threads: int, neighbours: int) -> Upload:
        """The upload that lanes carry out. threads: lanes at work at once; neighbours: workers on this host, this one
        included."""
        base = address(self._data)
        wanted = [
            (document.path, *span) for document, span in zip(self._piece.documents, self._spans, strict=True)
        ]
        return Upload(
            [
                Rectangle(
                    path,
                    begin,
                    ANY_LENGTH,
                    1,
                    end - begin,
                    end - begin,
                    base + place,
                    end - begin,
                )
                for path, begin, end, place in wanted
                if end > begin
            ],
            move_nbytes(threads, neighbours),
            threads,
        )

    def count(self, tally: Tally) -> int:
        """Add its counts to the tally, after all that the tally follows; returns the number of bytes counted."""
        piece, kind = self._piece, self._kind
        assert isinstance(kind, Kind)
        if piece.is_part:
            ((begin, end, _),) = self._spans
            self._add(tally, 0, end - begin, piece.start - begin, piece.stop - begin)
            return piece.stop - piece.start
        if not kind.after:  # no token spans documents
            self._add(tally, 0, piece.nbytes, 0, piece.nbytes)
        else:
            for _, length, place in self._spans:
                self._add(tally, place, place + length, place, place + length)
        return piece.nbytes

    def count_tokens(self, tally: TokenTally) -> int:
        """Have the tally count its tokens; returns the number of bytes counted, once they are."""
        piece, spans = self._piece, self._spans
        begin, end, place = spans[-1]
        edges = np.array([*(place for _, _, place in spans), place + end - begin])
        start, stop = (piece.start - begin, piece.stop - begin) if piece.is_part else (0, int(edges[-1]))

        def reader(place: int) -> Callable[[int], np.ndarray]:
            number = int(np.searchsorted(edges, place, "right")) - 1
            return reading_on(piece.documents[number], spans[number][0] + place - spans[number][2])

        tally.counter.count(self._data, edges, start, stop, reader)
        return stop - start

    def _add(self, tally: Tally, lo: int, hi: int, start: int, stop: int) -> None:
        assert isinstance(self._kind, Kind)
        add_counts(self._data, lo, hi, start, stop, self._kind, tally.counts, tally.stream)


def _spans(piece: Piece, kind: Kind | TokenKind) -> list[tuple[int, int, int]]:
    """For each document the first byte wanted, the end, and the offset in the text."""
    if piece.is_part:
        begin, end = with_margins(piece, kind)
        if isinstance(kind, TokenKind):
            end = min(piece.documents[0].nbytes, end + AFTER)
        return [(begin, end, 0)]
    spans, place = [], 0
    for document in piece.documents:
        spans.append((0, document.nbytes, place))
        place += document.nbytes
        if kind.after:
            place = round_up(place, Text.ALIGNMENT)
    return spans


class _Following:
    """What is counted on a stream that waits for texts."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._keeping = LockKeepingStream(stream)
        self._uploads, self._uploaded = LockKeepingStream(upload_stream()), untimed_event()

    def follow_uploads(self) -> None:
        """Make reading the counts, and adding to them, wait for everything sent to texts so far."""
        self._uploads.record(self._uploaded)
        self._keeping.follow(self._uploaded)

    def settle(self) -> None:
        """Wait until all that it follows is done."""
        self.stream.synchronize()


class Tally(_Following):
    """Counts on the device, to which a task's lanes or its text add, and pinned memory to copy them back to."""

    def __init__(self, bins: int) -> None:
        super().__init__(cuda.stream())
        self.counts = cuda.device_array(bins, np.int64)
        self._host: np.ndarray = pinned_bytes(8 * bins).view(np.int64)

    def clear(self) -> None:
        """Set all counts to zero; lanes may add once it returns."""
        clear(self.counts, self.stream)
        self.stream.synchronize()

    def follow(self, lane: CountingLane) -> None:
        """Make reading the counts wait for all work given to the lane so far."""
        self._keeping.follow(lane.all_given())

    def read(self) -> np.ndarray:
        """The counts, int64[bins], including those of every lane that the tally follows; valid until the next task."""
        self.counts.copy_to_host(self._host, stream=self.stream)
        self.stream.synchronize()
        return self._host


class TokenTally(_Following):
    """A table of tokens on the device, to which a task's text adds."""

    def __init__(self, kind: TokenKind) -> None:
        self.counter = DeviceCounter(kind)
        super().__init__(self.counter.stream)


_prepared: set[str] = set()
_preparing = threading.Lock()


def prepare(kind: Kind | TokenKind) -> None:
    """Compile and load the kernels of a kind, once in a process, before many threads launch them at the same time.

    Otherwise each would compile them for itself, and one could launch a copy that has not been allowed the shared
    memory it needs yet.
    """
    with _preparing:
        if kind.name in _prepared:
            return
        cuda.current_context()
        if isinstance(kind, TokenKind):
            prepare_tokens(kind)
            _prepared.add(kind.name)
            return
        stream = cuda.stream()
        text = cuda.to_device(np.zeros(2, np.uint8), stream=stream)
        for edges in ([0, 2], [0, 1, 2]):
            count_on_device(text, DocumentOffsets.once(np.array(edges)), 0, 2, kind, stream)
        stream.synchronize()
        _prepared.add(kind.name)


@contextmanager
def borrowed_text(piece: Piece, kind: Kind | TokenKind) -> Iterator[Text]:
    """Device memory for the text of a piece of plain documents."""
    begin, end, place = _spans(piece, kind)[-1]
    with borrowed_memory(place + end - begin) as memory:
        yield Text(piece, kind, memory)


@contextmanager
def borrowed_memory(nbytes: int) -> Iterator[Any]:
    """Device memory of this process for a text of so many bytes, uint8, of a multiple of `TEXT_STEP_NBYTES`."""
    cuda.current_context()
    memory = _spare_texts.take()
    if memory is None or memory.size < nbytes:
        memory = None  # freed before more is allocated
        memory = cuda.device_array(round_up(max(1, nbytes), TEXT_STEP_NBYTES), np.uint8)
    try:
        yield memory
    finally:
        _spare_texts.put(memory)


def free_texts() -> None:
    """Free the memory of texts that no task has in hand, once Numba frees what it has queued."""
    _spare_texts.free()


_spare_texts: Spares[Any] = Spares(lambda: None, pinned=False)
_spare_lanes = Spares(CountingLane)
_spare_tallies = Spares(Tally)
_spare_tables = Spares(TokenTally, pinned=False)


@contextmanager
def borrowed_lane(*nbytes: int) -> Iterator[CountingLane]:
    """A lane of this process for one thread; blocks still being counted when it is returned delay only the next
    borrower. nbytes: of a block, if not `LANE_NBYTES`."""
    cuda.current_context()  # attaches the thread to the GPU: pool threads are not attached
    lane = _spare_lanes.take(*nbytes)
    lane.waited = 0.0
    try:
        yield lane
    finally:
        _spare_lanes.put(lane, *nbytes)


@contextmanager
def borrowed_tally(bins: int) -> Iterator[Tally]:
    """A tally of this process for one task, all zero."""
    cuda.current_context()
    tally = _spare_tallies.take(bins)
    tally.clear()
    try:
        yield tally
    finally:
        tally.settle()  # after a failure, earlier blocks are still being counted
        _spare_tallies.put(tally, bins)


@contextmanager
def borrowed_table(kind: TokenKind, run: Run, parts: int) -> Iterator[TokenTally]:
    """A table of this process for one task, empty. run, parts: as of `DeviceCounter.begin`."""
    cuda.current_context()
    tally = _spare_tables.take(kind)
    tally.counter.begin(run, parts)
    try:
        yield tally
    finally:
        tally.settle()
        _spare_tables.put(tally, kind)
