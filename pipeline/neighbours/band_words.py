"""The words that bands of items have found, those of one behind those of another: in memory of this process that the
workers of its host write to, so that no bytes pass through Dask, or as workers elsewhere send them."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.kernels.numbers import format_nbytes
from tilewright.pipeline.cluster.here.worker import memory_limit
from tilewright.pipeline.store.sources.mapped import sight_of
from tilewright.pipeline.store.sources.memory import NamelessFile, free_nbytes

logger = logging.getLogger(__name__)

WORD = np.dtype(np.uint64)
MEMORY_SHARE = 0.25
"""Of what this process may take, at most for words."""
MADV_POPULATE_WRITE = 23
"""Linux's, from 5.14 on; `mmap` does not name it."""


@dataclass(frozen=True)
class WordsPlace:
    """Where the words of a band go, for its task."""

    path: str
    sight: tuple[str, int, int]
    """Of the file, as `sight_of` has it: another host may have another by that name."""
    first: int
    """The row that its first is."""
    rows: int
    kept: int
    """Words of a row."""

    def open(self) -> np.ndarray | None:
        """The memory, (rows, kept), with all its pages there, which takes a while; None where it is not this host's, or
        may not be opened. What is in it stays: a copy of the task may have been quicker."""
        if sight_of(self.path) != self.sight:
            return None
        begin, nbytes = self.first * self.kept * WORD.itemsize, self.rows * self.kept * WORD.itemsize
        lead = begin % mmap.ALLOCATIONGRANULARITY
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            logger.debug("words of a band are sent: %s", error)
            return None
        try:
            pages = mmap.mmap(descriptor, lead + nbytes, mmap.MAP_SHARED, offset=begin - lead)
        except OSError as error:
            logger.debug("words of a band are sent: %s", error)
            return None
        finally:
            os.close(descriptor)
        _populate(pages)
        return np.frombuffer(pages, WORD, self.rows * self.kept, lead).reshape(self.rows, self.kept)


def _populate(pages: mmap.mmap) -> None:
    """Have all pages there, whatever they hold, without the interpreter's lock, which MAP_POPULATE would hold. Where
    the system does not know how, each comes once it is written to."""
    address = np.frombuffer(pages, np.uint8).ctypes.data
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(len(pages)), MADV_POPULATE_WRITE)


class BandWords:
    """The words of all bands of a search."""

    def __init__(self, rows: Sequence[int], kept: int, *, shared: bool) -> None:
        """rows: of each band. kept: words of a row. shared: whether workers are processes of their own."""
        self.rows, self._kept = tuple(rows), kept
        self._firsts = [sum(rows[:place]) for place in range(len(rows))]
        self._file: NamelessFile | None = None
        self._words: np.ndarray | None = None
        self.sent = ""
        """Why words that were to be shared are sent through the cluster; empty where they are not."""
        shape, nbytes = (sum(rows), kept), sum(rows) * kept * WORD.itemsize
        free = free_nbytes()
        room = (
            MEMORY_SHARE * memory_limit()
        )  # what a container may take, which no free memory of the host says
        if not shared or not nbytes:
            return
        room = int(room if free is None else min(room, free))
        if nbytes > room:
            self.sent = f"they come to {format_nbytes(nbytes)}, and {format_nbytes(room)} may be shared here"
            return
        try:
            self._file = NamelessFile(nbytes, "tilewright-words")
            pages = mmap.mmap(self._file.descriptor, nbytes)
        except OSError as error:
            self.sent = f"no memory is shared here: {error}"
            self.close()
            return
        self._words = np.frombuffer(pages, WORD).reshape(shape)

    def place(self, band: int) -> WordsPlace | None:
        """Where a band's words go; None where they are to be sent."""
        if self._file is None or (sight := sight_of(self._file.path)) is None:
            return None
        return WordsPlace(self._file.path, sight, self._firsts[band], self.rows[band], self._kept)

    def put(self, band: int, words: np.ndarray) -> None:
        """Those that were sent."""
        if len(self.rows) == 1:
            self._words = words
            return
        if self._words is None:
            self._words = np.empty((sum(self.rows), self._kept), WORD)
        first = self._firsts[band]
        self._words[first : first + self.rows[band]] = words

    @property
    def words(self) -> np.ndarray:
        """All of them, (all rows, kept), once each band's are there."""
        assert self._words is not None
        return self._words

    def close(self) -> None:
        """Give the memory back: nobody has it open any more, nor is to open it."""
        self._words = None
        if self._file is not None:
            self._file.close()
            self._file = None
