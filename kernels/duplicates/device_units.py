"""Words or characters of documents on a GPU, as `shingles.py` has them for the cores: one behind the other in a text of
their own, folded, and where each begins.

Three launches. Every thread takes `SPAN` bytes of the documents, and a block a tile of them. `WALK` counts what becomes
of them, `SCAN` adds the tiles up, and `WALK` once more writes it. Words have a blank before them: from where one begins
to the byte before another are those words, with one blank between two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba import cuda

from tilewright.kernels.duplicates.folding import AS_IT_IS, COUNT_SHIFT, FIELD, LENGTH_SHIFT, UNSETTLED
from tilewright.kernels.duplicates.signing_memory import SPAN, THREADS, TILE
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.histograms import tokens
from tilewright.kernels.histograms.tables.device_keys import BLANK, arithmetic, reading
from tilewright.kernels.histograms.tokens import CODE_BITS, CODE_MASK, REPLACEMENT
from tilewright.kernels.passes.launcher import Launcher

SCANNERS = 4 if SIMULATOR else 1024
"""Threads that add up tiles."""
OF_TILE = 16
"""Bits of the lower of two numbers in one, units below bytes, as far as a tile has them: of a byte at most three come,
and a word's blank."""
OF_TEXT = 32
"""The same of a text."""
GAPS = {"word": 1, "character": 0}
"""Bytes between two units."""


def between_function() -> Any:
    """Inside a kernel: ``between(edges, low, high, position)``, the last of these documents that begins at or before a
    position, which the first does."""
    word, _, whole = arithmetic()

    @cuda.jit(device=True, inline="always")
    def between(edges: Any, low: Any, high: Any, position: Any) -> Any:
        low, high = whole(low), whole(high)
        while low < high:
            middle = (low + high + 1) >> 1
            if whole(edges[word(middle)]) <= position:
                low = middle
            else:
                high = middle - 1
        return low

    return between


def scanning(threads: int) -> Any:
    """Inside a kernel: ``scanned(sums, thread, value)``, the sum of the values of this thread and those before it;
    afterwards ``sums``, shared memory, has those of all threads."""

    @cuda.jit(device=True, inline="always")
    def scanned(sums: Any, thread: Any, value: Any) -> Any:
        sums[thread] = value
        cuda.syncthreads()  # all values are there before they are added
        distance = 1
        while distance < threads:
            if thread >= distance:
                value += sums[thread - distance]
            cuda.syncthreads()  # all have read before anyone writes
            sums[thread] = value
            cuda.syncthreads()  # and all have written before anyone reads
            distance *= 2
        return value

    return scanned


def putting() -> tuple[Any, Any]:
    """Inside a kernel, how a thread writes the bytes of its own stretch, from ``first`` on, one behind the other: four
    at a time, which is a quarter of the stores. ``pending = put(out, out_words, first, pending, at, byte)`` for each,
    and ``put_last(out, first, pending, end)`` behind the last. What others write of a word of four stays theirs."""
    word, _, whole = arithmetic()

    @cuda.jit(device=True, inline="always")
    def put_some(out: Any, first: Any, pending: Any, begin: Any, end: Any) -> None:
        for at in range(max(first, begin), end):
            out[word(at)] = whole(pending >> word(8 * (at - begin)) & word(0xFF))

    @cuda.jit(device=True, inline="always")
    def put(out: Any, out_words: Any, first: Any, pending: Any, at: Any, byte: Any) -> Any:
        pending |= byte << word(8 * (at & 3))
        if at & 3 == 3:
            if at - 3 >= first:
                out_words[word(at >> 2)] = pending
            else:
                put_some(out, first, pending, at - 3, at + 1)
            pending = word(0)
        return pending

    @cuda.jit(device=True, inline="always")
    def put_last(out: Any, first: Any, pending: Any, end: Any) -> None:
        put_some(out, first, pending, end - (end & 3), end)

    return put, put_last


def walk_function(unit: str, folds: bool, writes: bool) -> Callable[..., None]:
    """The plain function of the kernel that goes over documents.

    data: uint8, of which documents take the first ``stop`` bytes. edges: int64[documents + 1], where each begins, and
    ``stop``; ends: int64[documents], where each ends, at the next one's edge or before it. letters: `word_table`, of
    words alone. numbers, folded: `Folding`, where texts are folded. sums: uint32[blocks * THREADS], of each thread what
    becomes of those of its tile before it; totals: uint64[blocks], of each tile. Without ``writes`` these two are
    written, and ``others``, uint8[documents], is set to 1 where a document has a character that is `UNSETTLED`. With
    ``writes``, ``totals`` is as `SCAN` leaves it, and written are out, uint8, the units, whose memory is also
    out_words, uint32; places, uint32, where each begins, and one more would; unit_edges, int64, which is the first of a
    document that begins before ``stop``. Block: THREADS, a tile each; shared memory: 2 KiB.
    """
    word, _, whole = arithmetic()
    step_from, is_letter, follows_letter, _ = reading()
    character_at = cuda.jit(device=True, inline="always")(tokens.character_at)
    between, scanned = between_function(), scanning(THREADS)
    put, put_last = putting()
    of_words = unit == "word"

    def walk(
        data: Any, edges: Any, ends: Any, documents: Any, stop: Any, letters: Any, numbers: Any, folded: Any,
        sums: Any, totals: Any, others: Any, out: Any, out_words: Any, places: Any, unit_edges: Any,
    ) -> None:  # fmt: skip
        found = cuda.shared.array(2, numba.int64)
        added = cuda.shared.array(THREADS, numba.uint32)
        thread = whole(cuda.threadIdx.x)
        tile = whole(cuda.blockIdx.x)
        if thread < 2:
            found[thread] = between(edges, 0, documents, min(tile * TILE + thread * (TILE - 1), stop - 1))
        cuda.syncthreads()  # the tile's first and last document are known
        a = tile * TILE + thread * SPAN
        b = min(a + SPAN, stop)
        nbytes, units = whole(0), whole(0)
        document = whole(0)
        if a < b:
            document = whole(between(edges, whole(found[0]), whole(found[1]), a))
        if writes:
            before, of_thread = word(totals[word(tile)]), whole(sums[word(tile * THREADS + thread)])
            nbytes = whole(before >> word(OF_TEXT)) + (of_thread >> OF_TILE)
            units = whole(before & word((1 << OF_TEXT) - 1)) + (of_thread & ((1 << OF_TILE) - 1))
            if tile == 0 and thread == 0:
                every = word(totals[word(whole(cuda.gridDim.x))])
                # Where another would begin.
                places[every & word((1 << OF_TEXT) - 1)] = whole(every >> word(OF_TEXT)) + (
                    1 if of_words else 0
                )
            if a < b:
                empty = document  # or the one that begins here, and empty ones before it
                while empty >= 0 and whole(edges[word(empty)]) == a:
                    unit_edges[word(empty)] = units
                    empty -= 1
        first, pending = nbytes, word(0)
        i = a
        while i < b:
            lo, hi = whole(edges[word(document)]), whole(ends[word(document)])
            if writes and lo == i and lo > a:
                unit_edges[word(document)] = units
            end = min(b, hi)
            inside = False
            if i < end and i > lo:
                while i < end and whole(data[word(i)]) >= 0x80 and whole(character_at(data, i, lo, hi)) == 0:
                    i += 1
                if of_words and i < end:
                    inside = follows_letter(data, i, lo, hi, letters)
            while i < end:
                step = step_from(data, i, hi)
                code, length = step & CODE_MASK, step >> CODE_BITS
                counts = True
                if of_words:
                    counts = is_letter(step, letters)
                    if counts and not inside:
                        if writes:
                            pending = put(out, out_words, first, pending, nbytes, word(BLANK))
                            places[word(units)] = nbytes + 1
                        nbytes += 1
                        units += 1
                    inside = counts
                if counts:
                    bytes_of, count, size = word(0xBDBFEF), whole(1), whole(3)  # U+FFFD
                    stored = of_words or code != REPLACEMENT
                    if stored:
                        size = length
                    if folds:
                        number = whole(numbers[word(code)])
                        if number == UNSETTLED:
                            if not writes:
                                others[word(document)] = 1
                        elif number != AS_IT_IS:
                            bytes_of = word(folded[word(number)])
                            size = whole(bytes_of >> word(LENGTH_SHIFT) & word(FIELD))
                            count = whole(bytes_of >> word(COUNT_SHIFT))
                            stored = False
                    if writes:
                        for k in range(size):
                            byte = whole(bytes_of >> word(8 * k) & word(0xFF))
                            if stored:
                                byte = whole(data[word(i + k)])
                            pending = put(out, out_words, first, pending, nbytes + k, word(byte))
                            if not of_words and byte & 0xC0 != 0x80:
                                places[word(units)] = nbytes + k
                                units += 1
                    elif not of_words:
                        units += count
                    nbytes += size
                i += length
            document += 1
            i = max(i, whole(edges[word(document)]))  # what ends a document is passed over
        if writes:
            put_last(out, first, pending, nbytes)
        else:
            mine = numba.uint32(nbytes << OF_TILE | units)
            through = scanned(added, thread, mine)
            sums[word(tile * THREADS + thread)] = through - mine
            if thread == THREADS - 1:
                through = whole(through)
                totals[word(tile)] = word(through >> OF_TILE) << word(OF_TEXT) | word(
                    through & ((1 << OF_TILE) - 1)
                )

    return walk


def scan_function() -> Callable[..., None]:
    """The plain function of the kernel that adds up tiles.

    totals: uint64[tiles + 1], where what becomes of each tile is replaced by what becomes of those before it; the last
    is of all. unit_edges gets the number of all units for documents that begin at ``stop`` or end there. One block:
    SCANNERS; shared memory: 8 KiB.
    """
    word, _, whole = arithmetic()
    scanned = scanning(SCANNERS)

    def scan(totals: Any, tiles: Any, edges: Any, documents: Any, stop: Any, unit_edges: Any) -> None:
        added = cuda.shared.array(SCANNERS, numba.uint64)
        thread = whole(cuda.threadIdx.x)
        share = (tiles + SCANNERS - 1) // SCANNERS
        first, last = min(thread * share, tiles), min((thread + 1) * share, tiles)
        mine = word(0)
        for tile in range(first, last):
            mine = word(mine + word(totals[word(tile)]))
        before = word(word(scanned(added, thread, numba.uint64(mine))) - mine)
        for tile in range(first, last):
            here = word(totals[word(tile)])
            totals[word(tile)] = before
            before = word(before + here)
        every = word(added[SCANNERS - 1])
        if thread == 0:
            totals[word(tiles)] = every
        for document in range(thread, documents + 1, SCANNERS):
            if whole(edges[word(document)]) >= stop:
                unit_edges[word(document)] = whole(every & word((1 << OF_TEXT) - 1))

    return scan


BYTES, WORDS = numba.types.Array(numba.uint8, 1, "C"), numba.types.Array(numba.uint32, 1, "C")
PLACES, SUMS = numba.types.Array(numba.int64, 1, "C"), numba.types.Array(numba.uint64, 1, "C")
_NUMBERS, _NUMBER = numba.types.Array(numba.uint16, 1, "C"), numba.int64

WALK = Launcher(
    walk_function,
    lambda unit, folds, writes: numba.void(
        *(BYTES, PLACES, PLACES, _NUMBER, _NUMBER, BYTES, _NUMBERS, SUMS),
        *(WORDS, SUMS, BYTES, BYTES, WORDS, WORDS, PLACES),
    ),
)
SCAN = Launcher(scan_function, lambda: numba.void(SUMS, _NUMBER, PLACES, _NUMBER, _NUMBER, PLACES))
