"""Large compressed files, decompressed by several threads: cut into parts that can be read without what is before them,
and put together in their order.

Where a file cannot be cut, where a part turns out not to be one, and where anything is wrong, all is decompressed from
the beginning by `decompress.reader`, as if nobody had tried, and what was given out before is passed over. So what
comes out, and which errors, does not depend on how many threads there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

import numpy as np

from tilewright.pipeline.text.formats import decompress
from tilewright.pipeline.text.formats.cuts import CUTTERS, Buffer, Cutter, Decoded, Part, Unfit, use_again

LARGE_NBYTES = 2**22
"""Files of so many stored bytes are worth it."""
HELD_NBYTES = 2**30
"""What parts of one file that are under way may take, but for a single one."""
_WRITTEN = {"gzip": "bgzip writes", decompress.ZSTD: "pzstd writes", "xz": "xz -T0 writes"}


def by_one_thread(codec: str) -> str:
    """What is told of a large file that several threads were to decompress."""
    parts = _WRITTEN.get(codec, "others have")
    return f"decompressed by one thread: it is no {codec} of parts that can be read by themselves, as {parts} them"


def reader(
    codec: str,
    stored: Callable[[], Iterator[decompress.Stored]],
    serial: Callable[[], decompress.Fill],
    threads: int,
    window_nbytes: int,
    alone: Callable[[], None] = lambda: None,
) -> decompress.Fill:
    """A `decompress.Fill` as `decompress.reader` gives, by several threads.

    stored: gives the file's bytes from the beginning, block by block. serial: gives a reader of one thread. alone: is
    called at the end of a file that one thread had to decompress.
    """
    return _Fill(codec, stored, serial, threads, window_nbytes, alone).fill


class _Fill:
    """Gives out the contents of parts, and what a reader of one thread gives once there are none that fit."""

    def __init__(
        self,
        codec: str,
        stored: Callable[[], Iterator[decompress.Stored]],
        serial: Callable[[], decompress.Fill],
        threads: int,
        window_nbytes: int,
        alone: Callable[[], None],
    ) -> None:
        self._codec, self._window_nbytes, self._make, self._alone = codec, window_nbytes, serial, alone
        self._buffer = Buffer(stored())
        self._blocks = _blocks(CUTTERS[codec](window_nbytes), self._buffer, threads)
        self._block, self._done = np.empty(0, np.uint8), 0
        self._given = 0
        self._serial: decompress.Fill | None = None
        self._told = False

    def fill(self, target: np.ndarray) -> int:
        if not len(target):
            return 0
        while self._serial is None and self._done == len(self._block):
            use_again(self._block)
            self._block, self._done = self._block[:0].copy(), 0
            try:
                block = next(self._blocks, None)
            except Unfit:
                self._serial = self._by_one_thread()
                break
            if block is None:
                return 0
            self._block, self._done = block, 0
        if self._serial is not None:
            got = self._serial(target)
            if not got and not self._told:
                self._told = True
                self._alone()
            return got
        count = min(len(target), len(self._block) - self._done)
        target[:count] = self._block[self._done : self._done + count]
        self._done += count
        self._given += count
        return count

    def _by_one_thread(self) -> decompress.Fill:
        """A reader that goes on where this one stands."""
        if not self._buffer.start and self._codec != decompress.ZSTD:  # whose files are best read by a loop
            return decompress.reader(self._codec, self._buffer.everything(), self._window_nbytes)
        serial, left = self._make(), self._given
        scratch = np.empty(min(left, decompress.BLOCK_NBYTES), np.uint8)
        while left:
            got = serial(scratch[: min(left, len(scratch))])
            if not got:
                raise decompress.MalformedError("it is not what it was when it was read before")
            left -= got
        return serial


def _blocks(cutter: Cutter, buffer: Buffer, threads: int) -> Iterator[np.ndarray]:
    """The contents, block by block. Raises Unfit where one thread has to do it."""
    pool = _pool(threads)
    under_way: deque[tuple[Part, Future[Decoded | None]]] = deque()
    parts = cutter.parts(buffer)
    part, held = next(parts, None), 0
    try:
        while True:
            while part is not None and (
                not under_way or (len(under_way) < threads + 2 and held + part.held_nbytes <= HELD_NBYTES)
            ):
                under_way.append((part, pool.submit(_decoded, cutter.decode, part)))
                held += part.held_nbytes
                part = next(parts, None)
            if not under_way:
                cutter.check_end()
                return
            first, asked = under_way.popleft()
            held -= first.held_nbytes
            found = asked.result()
            if found is None and cutter.may_join and under_way:
                # Where the next seemed to begin lies in the middle of this one.
                following, later = under_way.popleft()
                held -= following.held_nbytes
                later.cancel()
                data = first.data + following.data
                found = _decoded(cutter.decode, Part(first.start, data, len(data)))
            if found is None or not cutter.accepts(found):
                raise Unfit
            yield from (block for block in found.blocks if len(block))
    finally:
        for _, asked in under_way:
            asked.cancel()


def _decoded(decode: Callable[[Part], Decoded], part: Part) -> Decoded | None:
    """What a part holds; None where it is none."""
    try:
        return decode(part)
    except Unfit:
        return None


@lru_cache(maxsize=2)
def _pool(threads: int) -> ThreadPoolExecutor:
    """Shared by all files of a process, so that no more threads decompress than it has cores for."""
    return ThreadPoolExecutor(threads, thread_name_prefix="tilewright-text-decompress")
