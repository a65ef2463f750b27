"""Histograms on the CPU: the twin of every kind that the GPU counts.

Each core counts into several tables and adds them up at the end: two equal bytes in a row would otherwise
wait for each other's store (the reason for ``numpy.bincount``'s 0.26 GB/s). A thread keeps its tables. The functions
release the interpreter lock and share nothing, so several threads, also a Dask worker's, may call them at once; Numba's
own ``parallel=True`` may not be entered by two threads under its default threading layer.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit, uint32, uint64

from tilewright.kernels.arguments import new_host_array
from tilewright.kernels.cpu.loops import cpu_threads, kept
from tilewright.kernels.cpu.vectors import (
    LANES,
    below_90_mask,
    below_a0_mask,
    continuation_mask,
    e0_mask,
    ed_mask,
    f0_mask,
    f4_mask,
    high_mask,
    lead_2_mask,
    lead_3_mask,
    lead_4_mask,
    load_byte,
    load_word,
    trailing_zeros,
)
from tilewright.kernels.histograms import tokens
from tilewright.kernels.histograms.tokens import BIGRAM, CODEPOINT, Kind
from tilewright.kernels.numbers import ceil_div

TABLES = 8
"""Tables of a core: one for each byte of a 64-bit load, so that a store is eight loads away from the next."""
PAIRS = 1 << 16
"""Entries of each of the two tables that pairs of bytes are counted in."""
LARGE = 1 << 19
"""Bytes from which on these are worth being cleared and added up."""
SMALL = 1024
"""Bytes below which clearing and adding up the tables would cost more than they save."""
JOB_NBYTES = 4 << 20
"""What one thread takes at a time, as far as documents allow."""
MAX_PIECE_NBYTES = 1 << 30
"""The most that is counted before the tables are added up: an entry of 32 bits can never overflow."""

ROWS_ENTRIES = 1 << 18
"""Entries of sparse rows that are put together before they are copied."""

folded_bin = kept(njit(nogil=True)(tokens.folded_bin))
character_at = kept(njit(nogil=True)(tokens.character_at))


@kept
@njit(nogil=True)
def _bytes(data, words, skip, start, stop, tables, counts):  # type: ignore[no-untyped-def]
    """Add the bytes ``data[start:stop]`` to ``counts`` (int64[256]).

    ``words`` is ``data[skip:]`` as aligned 64-bit words; ``tables`` is scratch, uint32[2 * 65536], all zero before and
    after. Of long texts pairs of bytes are counted, half as many as bytes: the tables fit a core's second cache.
    """
    i = start
    if stop - start >= SMALL:
        while (i - skip) & 7:
            counts[data[i]] += 1
            i += 1
        first = (i - skip) >> 3
        last = (stop - skip) >> 3
        if stop - start >= LARGE:
            for j in range(uint64(first), uint64(last)):
                _count_pairs(words[j], tables)
            _drain_pairs(tables, counts)
        else:
            for j in range(uint64(first), uint64(last)):
                _count_word(words[j], tables)
            _drain(tables, counts)
        i = skip + last * 8
    while i < stop:
        counts[data[i]] += 1
        i += 1


@njit(nogil=True)
def _count_word(w, tables):  # type: ignore[no-untyped-def]
    """Count eight bytes, each in a table of its own."""
    low = uint64(0xFF)
    tables[w & low] += uint32(1)
    tables[uint64(256) + ((w >> uint64(8)) & low)] += uint32(1)
    tables[uint64(512) + ((w >> uint64(16)) & low)] += uint32(1)
    tables[uint64(768) + ((w >> uint64(24)) & low)] += uint32(1)
    tables[uint64(1024) + ((w >> uint64(32)) & low)] += uint32(1)
    tables[uint64(1280) + ((w >> uint64(40)) & low)] += uint32(1)
    tables[uint64(1536) + ((w >> uint64(48)) & low)] += uint32(1)
    tables[uint64(1792) + (w >> uint64(56))] += uint32(1)


@njit(nogil=True)
def _count_pairs(w, tables):  # type: ignore[no-untyped-def]
    """Count eight bytes as four pairs, neighbours in different tables."""
    low, other = uint64(0xFFFF), uint64(PAIRS)
    tables[w & low] += uint32(1)
    tables[other + ((w >> uint64(16)) & low)] += uint32(1)
    tables[(w >> uint64(32)) & low] += uint32(1)
    tables[other + (w >> uint64(48))] += uint32(1)


@kept
@njit(nogil=True)
def _drain(tables, counts):  # type: ignore[no-untyped-def]
    """Add the ``TABLES`` tables of 256 to ``counts`` and clear them."""
    for value in range(256):
        total = np.int64(0)
        for table in range(TABLES):
            total += np.int64(tables[table * 256 + value])
            tables[table * 256 + value] = uint32(0)
        counts[value] += total


@kept
@njit(nogil=True)
def _drain_pairs(tables, counts):  # type: ignore[no-untyped-def]
    """Add both bytes of the pairs in two tables to ``counts`` and clear the tables."""
    for high in range(256):
        total = np.int64(0)
        for low in range(256):
            pair = high << 8 | low
            times = np.int64(tables[pair]) + np.int64(tables[PAIRS + pair])
            tables[pair] = uint32(0)
            tables[PAIRS + pair] = uint32(0)
            counts[low] += times
            total += times
        counts[high] += total


@kept
@njit(nogil=True)
def _bigrams(data, words, skip, start, stop, limit, tables, counts):  # type: ignore[no-untyped-def]
    """Add the pairs that begin in ``data[start:stop]`` and end before ``limit`` to ``counts``
    (int64[65536]). ``tables`` is as of `_bytes`."""
    last = min(stop, limit - 1)
    i = start
    if last - i >= LARGE:
        while (i - skip) & 7:
            counts[int(data[i]) << 8 | data[i + 1]] += 1
            i += 1
        # Pairs that begin at even bytes have one table, those at odd bytes the other; the second byte is on top.
        low = uint64(0xFFFF)
        other = uint64(PAIRS)
        j = uint64((i - skip) >> 3)
        w = words[j]
        end = uint64(min((last - skip) >> 3, len(words) - 1))
        while j < end:
            following = words[j + uint64(1)]
            x = w >> uint64(8) | following << uint64(56)
            tables[w & low] += uint32(1)
            tables[other + (x & low)] += uint32(1)
            tables[(w >> uint64(16)) & low] += uint32(1)
            tables[other + ((x >> uint64(16)) & low)] += uint32(1)
            tables[(w >> uint64(32)) & low] += uint32(1)
            tables[other + ((x >> uint64(32)) & low)] += uint32(1)
            tables[w >> uint64(48)] += uint32(1)
            tables[other + (x >> uint64(48))] += uint32(1)
            w = following
            j += uint64(1)
        i = skip + np.int64(end) * 8
        for first in range(256):
            for second in range(256):
                pair = second << 8 | first
                counts[first << 8 | second] += np.int64(tables[pair]) + np.int64(tables[PAIRS + pair])
                tables[pair] = uint32(0)
                tables[PAIRS + pair] = uint32(0)
    while i < last:
        counts[int(data[i]) << 8 | data[i + 1]] += 1
        i += 1


@njit(nogil=True)
def whole_characters(here):  # type: ignore[no-untyped-def]
    """Where the characters are of the 64 bytes at an address, of which the first begins one: masks of those of one to
    four bytes, and how many bytes they take together. No bytes where some of them are no well-formed UTF-8.

    A character that begins in the last three bytes is left out; the others end within the 64.
    """
    high = high_mask(here)
    if high == 0:
        return ~uint64(0), uint64(0), uint64(0), uint64(0), 64
    begin = (uint64(1) << uint64(61)) - uint64(1)
    follow = continuation_mask(here)
    two = lead_2_mask(here) & begin
    three = lead_3_mask(here) & begin
    four = lead_4_mask(here) & begin
    size = 61 + trailing_zeros(~(follow >> uint64(61)))
    owned = ~uint64(0) >> uint64(64 - size)
    one = uint64(1)
    wanted = (two | three | four) << one | (three | four) << uint64(2) | four << uint64(3)
    bad = wanted & ~follow | follow & ~wanted & owned | high & begin & ~(follow | two | three | four)
    if three:
        low = below_a0_mask(here)
        bad |= (e0_mask(here) & begin) << one & low | (ed_mask(here) & begin) << one & ~low
    if four:
        low = below_90_mask(here)
        bad |= (f0_mask(here) & begin) << one & low | (f4_mask(here) & begin) << one & ~low
    return ~high & owned, two, three, four, 0 if bad else size


@kept
@njit(nogil=True)
def _codepoints(data, start, stop, lo, hi, tables, counts):  # type: ignore[no-untyped-def]
    """Add the characters that begin in ``data[start:stop]`` of the document ``data[lo:hi]`` to ``counts``.

    ``counts`` is int64[0x110000]; ``tables`` as of `_bytes`. Text goes 64 bytes at a time, characters of one length
    after those of another; a block that is no well-formed UTF-8 goes by `character_at`.
    """
    i = start
    while i < stop and character_at(data, i, lo, hi) == 0:
        i += 1
    base = np.int64(data.ctypes.data)
    one = uint64(1)
    drained, in_pairs = stop - start >= SMALL, stop - start >= LARGE
    slow = i
    while i < stop:
        if i >= slow and i + LANES <= stop:
            here = base + i
            ascii, two, three, four, size = whole_characters(here)
            if size == LANES and ascii == ~uint64(0) and drained:
                for k in range(0, LANES, 8):
                    if in_pairs:
                        _count_pairs(load_word(here + k), tables)
                    else:
                        _count_word(load_word(here + k), tables)
                i += LANES
                continue
            if size:
                while ascii:
                    counts[load_byte(here + trailing_zeros(ascii))] += 1
                    ascii &= ascii - one
                while two:
                    p = here + trailing_zeros(two)
                    two &= two - one
                    counts[(load_byte(p) & 0x1F) << 6 | load_byte(p + 1) & 0x3F] += 1
                while three:
                    p = here + trailing_zeros(three)
                    three &= three - one
                    code = (
                        (load_byte(p) & 0x0F) << 12 | (load_byte(p + 1) & 0x3F) << 6 | load_byte(p + 2) & 0x3F
                    )
                    counts[code] += 1
                while four:
                    p = here + trailing_zeros(four)
                    four &= four - one
                    code = (load_byte(p) & 0x07) << 18 | (load_byte(p + 1) & 0x3F) << 12
                    counts[code | (load_byte(p + 2) & 0x3F) << 6 | load_byte(p + 3) & 0x3F] += 1
                i += size
                continue
            slow = i + LANES
        if data[i] < 0x80:
            counts[data[i]] += 1
            i += 1
        else:
            character = character_at(data, i, lo, hi)
            counts[character & tokens.CODE_MASK] += 1
            i += character >> tokens.CODE_BITS
    if in_pairs:
        _drain_pairs(tables, counts)
    elif drained:
        _drain(tables, counts)


@kept
@njit(nogil=True)
def _documents(data, words, skip, offsets, first, last, start, stop, code, tables, counts):  # type: ignore[no-untyped-def]
    """Add the tokens of documents first .. last-1 that begin in ``data[start:stop]`` to their rows of
    ``counts``.

    ``counts`` is int64[(rows, bins)], its row 0 standing for document ``first``.
    """
    scratch = np.zeros(256, np.int64)
    for document in range(first, last):
        row = counts[document - first]
        lo = offsets[document]
        hi = offsets[document + 1]
        begin = max(lo, start)
        end = min(hi, stop)
        if begin >= end:
            continue
        if code == BIGRAM:
            _bigrams(data, words, skip, begin, end, hi, tables, row)
        elif code == CODEPOINT:
            _codepoints(data, begin, end, lo, hi, tables, row)
        elif code == tokens.BYTE:
            _bytes(data, words, skip, begin, end, tables, row)
        else:
            scratch[:] = 0
            _bytes(data, words, skip, begin, end, tables, scratch)
            for value in range(256):
                target = folded_bin(value, code)
                if target >= 0:
                    row[target] += scratch[value]


_of_this_thread = threading.local()


def _tables() -> np.ndarray:
    """Scratch of this thread, uint32[2 * PAIRS], all zero."""
    tables: np.ndarray | None = getattr(_of_this_thread, "tables", None)
    if tables is None:
        tables = _of_this_thread.tables = np.zeros(2 * PAIRS, np.uint32)
    return tables


def count_host(data: Any, kind: Kind, offsets: Any, start: int, stop: int) -> Any:
    """Counts, int64[(documents, kind.bins)], of the tokens that begin in ``data[start:stop]``.

    ``data`` is uint8[n], C-contiguous; ``offsets`` is int64[documents + 1], ascending, within 0 .. n. Runs of
    small documents and pieces of large ones are counted by up to `cpu_threads` threads.
    """
    offsets = np.ascontiguousarray(offsets, np.int64)
    shape = len(offsets) - 1, kind.bins
    counts = new_host_array(f"a histogram of {shape[0]} × {shape[1]}", shape, np.dtype(np.int64), zeros=True)
    # Read-only views, whatever came: one type to compile for.
    data, offsets = data.view(), offsets.view()
    data.flags.writeable = offsets.flags.writeable = False
    skip = -data.ctypes.data % 8 if len(data) else 0
    words = data[skip : skip + max(0, len(data) - skip) // 8 * 8].view(np.uint64)

    def count(job: Job) -> tuple[Job, Any]:
        rows = counts[job.first : job.last]
        if job.shared:
            rows = np.zeros_like(rows)
        tables = _tables()
        _documents(
            data, words, skip, offsets, job.first, job.last, job.start, job.stop, kind.code, tables, rows
        )
        return job, rows

    threads = cpu_threads()
    jobs = _jobs(offsets, start, stop, threads)
    if min(threads, len(jobs)) <= 1:
        results = [count(job) for job in jobs]
    else:
        with ThreadPoolExecutor(min(threads, len(jobs))) as pool:
            results = list(pool.map(count, jobs))
    for job, rows in results:
        if job.shared:
            counts[job.first : job.last] += rows
    return counts


@kept
@njit(nogil=True)
def _collect(data, words, skip, offsets, first, last, code, tables, counts, found, lengths, columns, values):  # type: ignore[no-untyped-def]
    """Count documents first .. last-1 one after the other in ``counts``, int64[bins], all zero before and after, and
    put what each holds behind one another into ``columns`` and ``values``, the bins ascending.

    ``found`` has room for the bins of one document; ``columns`` and ``values`` for one more entry than they get.
    Returns the first document for which there is no room, and where the last entry ends.
    """
    place = 0
    scratch = np.zeros(256, np.int64)
    for document in range(first, last):
        lo = offsets[document]
        hi = offsets[document + 1]
        if place + min(hi - lo, len(counts)) >= len(columns):
            return document, place
        held = 0
        if code < BIGRAM:
            of_bytes = counts if code == tokens.BYTE else scratch
            _bytes(data, words, skip, lo, hi, tables, of_bytes)
            if code != tokens.BYTE:
                for value in range(256):
                    target = folded_bin(value, code)
                    if target >= 0:
                        counts[target] += scratch[value]
                    scratch[value] = 0
            # What is zero is written over: which are, no processor foresees.
            for bin_ in range(len(counts)):
                columns[place + held] = bin_
                values[place + held] = counts[bin_]
                held += counts[bin_] != 0
                counts[bin_] = 0
            lengths[document - first] = held
            place += held
            continue
        if code == BIGRAM:
            _bigrams(data, words, skip, lo, hi, hi, tables, counts)
        else:
            _codepoints(data, lo, hi, lo, hi, tables, counts)
        if hi - lo >= len(counts) // 16:
            for bin_ in range(len(counts)):
                if counts[bin_]:
                    columns[place + held] = bin_
                    values[place + held] = counts[bin_]
                    counts[bin_] = 0
                    held += 1
        else:
            # The document says which bins they are: looking at all of them would take longer.
            i = lo
            while i < (hi - 1 if code == BIGRAM else hi):
                if code == BIGRAM:
                    bin_ = np.int64(data[i]) << 8 | data[i + 1]
                    i += 1
                elif data[i] < 0x80:
                    bin_ = np.int64(data[i])
                    i += 1
                else:
                    character = character_at(data, i, lo, hi)
                    bin_ = np.int64(character & tokens.CODE_MASK)
                    i += character >> tokens.CODE_BITS
                if counts[bin_]:
                    found[held] = bin_
                    values[place + held] = counts[bin_]
                    counts[bin_] = 0
                    held += 1
            order = np.argsort(found[:held])
            taken = values[place : place + held].copy()
            for k in range(held):
                columns[place + k] = found[order[k]]
                values[place + k] = taken[order[k]]
        lengths[document - first] = held
        place += held
    return last, place


def count_rows(data: Any, kind: Kind, offsets: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What each document holds: how many bins are not zero, int64[documents], and document after document which these
    are, ascending, and their counts, int64.

    ``data`` and ``offsets`` are as of `count_host`, and all documents are counted whole, by this thread.
    """
    offsets, data = np.ascontiguousarray(offsets, np.int64).view(), data.view()
    data.flags.writeable = offsets.flags.writeable = False
    skip = -data.ctypes.data % 8 if len(data) else 0
    words = data[skip : skip + max(0, len(data) - skip) // 8 * 8].view(np.uint64)
    counts, tables = np.zeros(kind.bins, np.int64), _tables()
    longest = int(np.diff(offsets).max(initial=0))
    room = max(ROWS_ENTRIES, min(longest, kind.bins))
    columns, values = np.empty((2, room + 1), np.int64)
    found = np.empty(max(1, min(longest, kind.bins)), np.int64)
    documents, done = len(offsets) - 1, 0
    lengths = np.zeros(documents, np.int64)
    parts = [(np.empty(0, np.int64), np.empty(0, np.int64))]
    while done < documents:
        given = (data, words, skip, offsets, done, documents, kind.code, tables)
        until, place = _collect(*given, counts, found, lengths[done:], columns, values)
        done = int(until)
        parts.append((columns[:place].copy(), values[:place].copy()))
    return lengths, np.concatenate([each for each, _ in parts]), np.concatenate([each for _, each in parts])


@dataclass(frozen=True)
class Job:
    """What one thread does at a time: several whole documents, or a piece of one."""

    first: int
    last: int
    """Documents first .. last - 1."""
    start: int
    stop: int
    """Positions of the buffer whose tokens are counted."""
    shared: bool
    """Whether other jobs count other pieces of the same document, so that this one needs a row of its own."""


def _jobs(offsets: Any, start: int, stop: int, threads: int) -> list[Job]:
    """Cut documents into jobs of JOB_NBYTES or so; a larger document gives at most one per thread, or per GiB."""
    jobs = []
    documents = len(offsets) - 1
    first = 0
    while first < documents:
        goal = max(int(offsets[first]), start) + JOB_NBYTES
        last = min(int(np.searchsorted(offsets, goal, side="right")) - 1, documents)
        if last > first:
            begin, end = max(int(offsets[first]), start), min(int(offsets[last]), stop)
            jobs.append(Job(first, last, begin, end, shared=False))
            first = last
            continue
        begin, end = max(int(offsets[first]), start), min(int(offsets[first + 1]), stop)
        length = min(max(JOB_NBYTES, ceil_div(end - begin, threads)), MAX_PIECE_NBYTES)
        cuts = range(begin, end, length)
        jobs.extend(Job(first, first + 1, cut, min(cut + length, end), shared=len(cuts) > 1) for cut in cuts)
        first += 1
    return jobs
