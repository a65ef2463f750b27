"""XXH3 of parts of a panel on a GPU: the 64-bit hash that libxxhash gives for the same numbers, row after row.

The method is that of Yann Collet's specification (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, XXH3,
large inputs, seed 0). It cuts its input into blocks of 1 KiB and keeps eight sums, its lanes. What a block adds to them
is a sum over its words, each multiplied by a key of its place, so threads form it in any order. Only what is done
between two blocks, to scramble the lanes, is one step after the other, of six dependent instructions. So most warps of
a block of threads add up the next 64 KiB of a part, while one warp scrambles its way through those before.

Nothing waits, and no device memory is taken: where the parts lie is read from pinned host memory, and their hashes are
written there. A panel is read once more, at the memory's speed, some sixty times that of the bus that brought it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import xxhash
from numba import cuda

from tilewright.kernels.gemm.base import Variant
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.passes.launcher import Launcher
from tilewright.kernels.passes.xxh3_host import (
    BLOCK_NBYTES,
    FEW_NBYTES,
    LANES,
    PRIME32_1,
    PRIME64_1,
    PRIME_LAST,
    SECRET,
    STRIPE_NBYTES,
    STRIPES,
)
from tilewright.kernels.passes.xxh3_host import INITIAL as INITIAL_LANES

PAIR_NBYTES = 16
"""What a thread adds of a stripe: two words, each of which goes to the lane of the other as well."""
PAIRS = STRIPE_NBYTES // PAIR_NBYTES
AT_ONCE = 2 if SIMULATOR else 64
"""Blocks of a part that are added up at once, by so many groups of four threads."""
SUMS = (2, (AT_ONCE + 1) * LANES)
"""What they add up lies here until it is scrambled into the lanes. The row at the end is read ahead, and not used."""
ADDERS = AT_ONCE * PAIRS
SCRAMBLERS = LANES if SIMULATOR else 32
"""A warp of which a thread for each lane works."""
THREADS = ADDERS + SCRAMBLERS
MOST_BLOCKS = 1056
"""Eight for each of 132 multiprocessors: what is left is dealt to them in turn."""

UNITS = (1, 2, 4, 8, 16)
"""Bytes that are loaded at once: rows and their lengths and places in memory are multiples of it."""
AHEAD = {1: 1, 2: 2, 4: 4, 8: 8, 16: 8}
"""Stripes that a thread loads before it uses the first, by unit."""

WORD = 2**64 - 1


def _words(first: int, count: int) -> list[int]:
    """So many words of the secret, from a byte on."""
    return [int.from_bytes(SECRET[first + 8 * i : first + 8 * i + 8], "little") for i in range(count)]


SCRAMBLING, LAST, MERGING, INITIAL = STRIPES, STRIPES + LANES, STRIPES + 2 * LANES, STRIPES + 3 * LANES
KEYS = np.array(
    [
        *_words(0, STRIPES + LANES),  # those of stripe s begin at s; the last eight scramble
        *_words(len(SECRET) - STRIPE_NBYTES - 7, LANES),  # of the last stripe
        *_words(11, LANES),
        *INITIAL_LANES.tolist(),
    ],
    np.uint64,
)
"""What words are combined with: by stripes, by lanes from `SCRAMBLING`, `LAST` and `MERGING` on; from `INITIAL` on, the
lanes' first values."""
KEY_COUNT = int(KEYS.size)


@dataclass(frozen=True)
class Table:
    """Parts of one panel, as the kernel gets them."""

    unit: int
    """Of `UNITS`: the bytes that it loads at once."""
    pitch: int
    """Units from one row to the next."""
    parts: np.ndarray
    """uint64, a row for each part: its first unit, its units a row, its rows, the first word of its result."""
    words: int
    """Of all results: one of a part, or the bytes of one that has few."""

    @property
    def dtype(self) -> np.dtype:
        """Of what the kernel loads."""
        return np.dtype(f"u{min(self.unit, 8)}")


def table_of(address: int, pitch: int, parts: Sequence[tuple[int, int, int]]) -> Table:
    """The table of parts of a panel that begins at this address, its rows ``pitch`` bytes apart. parts: the first byte,
    the rows and the bytes of a row of each."""
    given = np.array(parts, np.int64).reshape(-1, 3)
    first, rows, width = given.T
    nbytes = rows * width
    one = (rows == 1) | (width == pitch)  # its rows follow each other: as one
    width = np.where(one, nbytes, width)
    bits = UNITS[-1] | address | (0 if one.all() else pitch)
    bits |= int(np.bitwise_or.reduce(first, initial=0)) | int(np.bitwise_or.reduce(width, initial=0))
    unit = bits & -bits  # the largest power of two that divides them all
    words = np.where(nbytes > FEW_NBYTES, 1, -(-nbytes // 8))
    columns = first // unit, width // unit, np.where(one, 1, rows), np.cumsum(words) - words
    return Table(unit, pitch // unit, np.stack(columns, axis=1).astype(np.uint64), int(words.sum()))


def hashes_from(table: Table, results: np.ndarray) -> list[int]:
    """The hashes of a table's parts. results: uint64, `Table.words` of them at least, as the kernel left them."""
    _, width, rows, places = (column.astype(np.int64) for column in table.parts.T)
    nbytes = rows * width * table.unit
    hashes = results[np.minimum(places, max(0, table.words - 1))].tolist() if table.words else [0] * len(rows)
    for part in np.flatnonzero(nbytes <= FEW_NBYTES):
        few = results[places[part] :].view(np.uint8)[: nbytes[part]]
        hashes[part] = xxhash.xxh3_64_intdigest(few.tobytes())
    return hashes


@functools.cache
def _arithmetic() -> tuple[Any, Any]:
    """Inside a kernel: numbers as words of 64 bits, whose overflow is lost, and a sum plus the product of a word's
    halves. The simulator runs kernels as Python, where NumPy's words would warn of that."""
    if SIMULATOR:

        def as_word(value: Any) -> int:
            return int(value) & WORD

        def add_product(added: int, keyed: int) -> int:
            return (added + (keyed & 0xFFFFFFFF) * (keyed >> 32)) & WORD

        return as_word, add_product
    from tilewright.kernels.ptx.integers import multiply_add_wide

    u32, u64 = numba.uint32, numba.uint64

    @cuda.jit(device=True, inline="always")
    def add_halves_product(added: Any, keyed: Any) -> Any:
        return multiply_add_wide(u32(keyed), u32(keyed >> u64(32)), added)

    return u64, add_halves_product


def _pair_loader(unit: int) -> Any:
    """Inside a kernel: the two words of a part that begin at a unit of it. panel: in units, or for units of 16 bytes in
    words. offset: of the unit in the panel. column: of it in its row; width, gap: units of a row, and from its end to
    the next one's begin."""
    word, _ = _arithmetic()
    if unit == PAIR_NBYTES:
        if SIMULATOR:

            def load_pair(panel: Any, index: int) -> tuple[int, int]:
                return word(panel[index]), word(panel[index + 1])

        else:
            from tilewright.kernels.ptx.memory import load_pair

        @cuda.jit(device=True, inline="always")
        def load_aligned(panel: Any, offset: Any, column: Any, width: Any, gap: Any) -> Any:
            return load_pair(panel, offset * word(2))

        return load_aligned
    a_word, bits = 8 // unit, 8 * unit

    @cuda.jit(device=True, inline="always")
    def load(panel: Any, offset: Any, column: Any, width: Any, gap: Any) -> Any:
        first, second = word(0), word(0)
        for i in range(2 * a_word):
            value = word(panel[offset]) << word(i % a_word * bits)
            if i < a_word:
                first |= value
            else:
                second |= value
            offset, column = offset + word(1), column + word(1)
            if column == width:
                offset, column = offset + gap, word(0)
        return first, second

    return load


def xxh3_function(unit: int) -> Any:
    """The plain function of the kernel that hashes parts of a panel.

    panel: flat, of words of ``unit`` bytes (of 8 where that is 16), read. pitch: units from one row to the next. parts:
    count × 4, as `Table` has them. results: uint64, written: a word for each part, or its bytes if it has at most
    `FEW_NBYTES`, by way of ``few``, which is the same memory in the panel's words. Parts are dealt to the blocks in
    turn. Block: THREADS; shared memory: 8.5 KiB.
    """
    word, add_product = _arithmetic()
    load = _pair_loader(unit)
    ahead = AHEAD[unit]
    held_words = 2 * ahead
    block_units, stripe_units, pair_units = (
        nbytes // unit for nbytes in (BLOCK_NBYTES, STRIPE_NBYTES, PAIR_NBYTES)
    )
    few_units = max(1, 8 // unit)
    """Of a word of a result."""
    parts_of_unit = max(1, unit // 8)
    i32, u64 = numba.int32, numba.uint64

    @cuda.jit(device=True, inline="always")
    def folded(x: Any, y: Any) -> Any:
        """The two halves of the product of two words, combined."""
        half = word(32)
        mask = word(0xFFFFFFFF)
        low = word((x & mask) * (y & mask))
        crossed = word((x >> half) * (y & mask))
        middle = word(word((low >> half) + (crossed & mask)) + (x & mask) * (y >> half))
        high = word(word((crossed >> half) + (middle >> half)) + (x >> half) * (y >> half))
        return high ^ word((middle << half) | (low & mask))

    def xxh3_kernel(panel: Any, pitch: Any, parts: Any, results: Any, few: Any) -> None:
        keys = cuda.shared.array(KEY_COUNT, u64)
        sums = cuda.shared.array(SUMS, u64)
        lanes = cuda.shared.array(LANES, u64)
        held = cuda.local.array(held_words, u64)
        constants = cuda.const.array_like(KEYS)
        thread = i32(cuda.threadIdx.x)
        place = thread
        while place < KEY_COUNT:
            keys[place] = constants[place]
            place += THREADS
        cuda.syncthreads()  # the keys are in before any thread reads them
        number = i32(cuda.blockIdx.x)
        while number < parts.shape[0]:
            begin, width = word(parts[number, 0]), word(parts[number, 1])
            units, result = word(width * word(parts[number, 2])), word(parts[number, 3])
            gap = word(word(pitch) - width)
            nbytes = word(units * word(unit))
            if nbytes <= word(FEW_NBYTES):
                at = word(thread)
                while at < units:
                    offset = word(begin + at // width * word(pitch) + at % width)
                    for i in range(parts_of_unit):
                        target = word((result * word(few_units) + at * word(parts_of_unit)) + word(i))
                        few[target] = panel[word(offset * word(parts_of_unit) + word(i))]
                    at += word(THREADS)
            else:
                # Blocks behind each of which the lanes are scrambled; one more, of 1 to 1024 bytes, is the last.
                blocks = word((nbytes - word(1)) // word(BLOCK_NBYTES))
                last_stripes = word((nbytes - word(1)) % word(BLOCK_NBYTES) // word(STRIPE_NBYTES))
                waves = word(blocks // word(AT_ONCE) + word(1))
                # Unsigned: Numba would test signed indices for wrap-around at every access.
                pair = word(thread % PAIRS)
                lane = word(min(thread - ADDERS, LANES - 1) if thread >= ADDERS else 0)
                value = word(keys[word(INITIAL) + lane])
                # By so much a stripe begins further on than the one before.
                down, across = word(stripe_units) // width, word(stripe_units) % width
                step = word(down * word(pitch) + across)
                wave = word(0)
                while wave <= waves:
                    block = word(wave * word(AT_ONCE) + word(thread // PAIRS))
                    if thread < ADDERS and block <= blocks:
                        stripes = word(STRIPES) if block < blocks else last_stripes
                        at = word(block * word(block_units) + pair * word(pair_units))
                        column = at % width
                        offset = word(begin + at // width * word(pitch) + column)
                        first, second = word(0), word(0)
                        stripe = word(0)
                        while stripe < stripes:
                            for i in range(ahead):
                                if stripe + word(i) < stripes:
                                    one, other = load(panel, offset, column, width, gap)
                                    held[2 * i], held[2 * i + 1] = one, other
                                    offset, column = word(offset + step), word(column + across)
                                    if column >= width:
                                        offset, column = word(offset + gap), word(column - width)
                            for i in range(ahead):
                                if stripe + word(i) < stripes:
                                    one, other = word(held[2 * i]), word(held[2 * i + 1])
                                    key = word(stripe + word(i) + word(2) * pair)
                                    first = add_product(word(first + other), one ^ word(keys[key]))
                                    next_key = word(keys[key + word(1)])
                                    second = add_product(word(second + one), other ^ next_key)
                            stripe += word(ahead)
                        if block == blocks:  # the last 64 bytes once more, with other keys
                            at = word(units - word(stripe_units) + pair * word(pair_units))
                            column = at % width
                            offset = word(begin + at // width * word(pitch) + column)
                            one, other = load(panel, offset, column, width, gap)
                            key = word(word(LAST) + word(2) * pair)
                            first = add_product(word(first + other), one ^ word(keys[key]))
                            second = add_product(word(second + one), other ^ word(keys[key + word(1)]))
                        target = word(word(thread // PAIRS * LANES) + word(2) * pair)
                        sums[wave % word(2), target] = first
                        sums[wave % word(2), target + word(1)] = second
                    if thread >= ADDERS and wave > word(0):
                        before = word((wave - word(1)) % word(2))
                        left = word(blocks - (wave - word(1)) * word(AT_ONCE))
                        scrambled = i32(min(left, word(AT_ONCE)))
                        key = word(keys[word(SCRAMBLING) + lane])
                        added = word(sums[before, lane])
                        for i in range(scrambled):
                            value = word(value + added)
                            # Loaded while the lane is scrambled.
                            added = word(sums[before, word((i + 1) * LANES) + lane])
                            value = word((value ^ (value >> word(47)) ^ key) * word(PRIME32_1))
                        if left < word(AT_ONCE):
                            value = word(value + added)
                    # The sums are in before they are scrambled into the lanes, and those are done with the sums before
                    # others are written there.
                    cuda.syncthreads()
                    wave += word(1)
                if thread >= ADDERS:
                    lanes[lane] = value
                cuda.syncthreads()  # the lanes are in before they are merged
                if thread == ADDERS:
                    merged = word(nbytes * word(PRIME64_1))
                    for i in range(LANES // 2):
                        one = word(lanes[2 * i]) ^ word(keys[MERGING + 2 * i])
                        other = word(lanes[2 * i + 1]) ^ word(keys[MERGING + 2 * i + 1])
                        merged = word(merged + folded(one, other))
                    merged = word((merged ^ (merged >> word(37))) * word(PRIME_LAST))
                    results[result] = merged ^ (merged >> word(32))
            number += i32(cuda.gridDim.x)

    return xxh3_kernel


def signature(unit: int) -> Any:
    u64 = numba.uint64
    units = numba.types.Array(numba.from_dtype(np.dtype(f"u{min(unit, 8)}")), 1, "C")
    return numba.void(units, u64, numba.types.Array(u64, 2, "C"), numba.types.Array(u64, 1, "C"), units)


KERNELS = Launcher(xxh3_function, signature)


def enqueue_hashes(panel: Any, table: Table, parts: Any, results: Any, few: Any, stream: Any) -> None:
    """Enqueue the hashing of a table's parts, for `hashes_from`.

    panel: device memory, flat, of ``table.dtype``. parts: ``table.parts``; results, few: at least ``table.words`` words
    of 8 bytes, which are written, as uint64 and as ``table.dtype``: both in memory that the device can access.
    """
    if len(table.parts):
        grid = min(MOST_BLOCKS, len(table.parts))
        KERNELS.enqueue((table.unit,), grid, THREADS, stream, panel, table.pitch, parts, results, few)


def variants() -> Iterable[Variant]:
    """What tests compile to machine code."""
    for unit in UNITS:
        yield KERNELS.variant(f"xxh3 by {unit} bytes", unit)
