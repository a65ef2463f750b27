"""Device code for what Zstandard's entropy coders share: bits of a stream, tables of states, trees of symbols.

Method: RFC 8878, 4.1 and 4.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tilewright.kernels.deferred import numba

MOST_TREE_BITS = 11
WEIGHT_LOG = 6


class Codes(NamedTuple):
    """The device code, compiled by one compiler; what each takes and does is said where it is written."""

    below: Any
    stream_end: Any
    read_norm: Any
    build_table: Any
    read_weights: Any
    plan_tree: Any


def codes(jit: Callable[[Any], Any]) -> Codes:
    """The device code. jit: compiles a function that others call."""
    i64, u64 = numba.int64, numba.uint64

    @jit
    def high_bit(value: Any) -> Any:
        """The number of the highest bit that is set, of a positive number."""
        found = i64(0)
        while value > 1:
            value >>= 1
            found += 1
        return found

    @jit
    def forward(stored: Any, at: Any, stop: Any, count: Any) -> Any:
        """``count`` bits, at most 16, from a bit's place in bytes on, upwards; zeros behind ``stop``, in bytes."""
        found = i64(0)
        first = at >> 3
        for place in range(3):
            if first + place < stop:
                found |= i64(stored[first + place]) << i64(8 * place)
        return (found >> (at & 7)) & ((i64(1) << count) - 1)

    @jit
    def held_bits(words: Any, at: Any) -> Any:
        """The 64 bits of memory from which reading downwards goes on at a bit's place, and the first one's place."""
        base = ((at + 31) >> 5 << 5) - 64
        if base < 0:
            base = i64(0)
        word = base >> 5
        return u64(words[word]) | (u64(words[word + 1]) << u64(32)), base

    @jit
    def below(words: Any, at: Any, low: Any, count: Any) -> Any:
        """The ``count`` bits, at most 32, below a place, with zeros below ``low``."""
        if count == 0 or at <= low:
            return i64(0)
        held, base = held_bits(words, at)
        short = i64(0)
        begin = at - count
        if begin < low:
            short, begin = low - begin, low
        value = i64((held >> u64(begin - base)) & ((u64(1) << u64(at - begin)) - u64(1)))
        return value << short

    @jit
    def stream_end(stored: Any, begin: Any, nbytes: Any) -> Any:
        """Where reading a stream downwards begins: below the highest bit set in its last byte; -1 if there is none."""
        if nbytes < 1:
            return i64(-1)
        last = i64(stored[begin + nbytes - 1])
        if last == 0:
            return i64(-1)
        return 8 * (begin + nbytes - 1) + high_bit(last)

    @jit
    def read_norm(stored: Any, at: Any, stop: Any, most_log: Any, most: Any, norm: Any) -> Any:
        """A table's distribution: the number of symbols, the table's log, and where the bytes behind it begin; the
        first is -1 where it is none."""
        place = 8 * at
        log = forward(stored, place, stop, i64(4)) + 5
        place += 4
        if log > most_log:
            return i64(-1), log, at
        left = i64(1) << log
        count = i64(0)
        while left > 0:
            if count >= most or place > 8 * stop:
                return i64(-1), log, at
            bits = high_bit(left + 1) + 1
            value = forward(stored, place, stop, bits)
            place += bits
            mask = (i64(1) << (bits - 1)) - 1
            threshold = (i64(1) << bits) - 1 - (left + 1)
            if value & mask < threshold:
                place -= 1
                value &= mask
            elif value > mask:
                value -= threshold
            share = value - 1
            left -= 1 if share < 0 else share
            norm[count] = share
            count += 1
            if share == 0:
                again = i64(3)
                while again == 3:
                    again = forward(stored, place, stop, i64(2))
                    place += 2
                    for _ in range(again):
                        if count >= most:
                            return i64(-1), log, at
                        norm[count] = 0
                        count += 1
                    if place > 8 * stop:
                        return i64(-1), log, at
        behind = (place + 7) >> 3
        if left != 0 or behind > stop:
            return i64(-1), log, at
        return count, log, behind

    @jit
    def build_table(norm: Any, count: Any, log: Any, table: Any, first: Any, following: Any) -> Any:
        """Fill a table from a distribution: for each state its symbol, the bits to read, and what to add to them.
        following: scratch, of each symbol. Whether the distribution fills the table."""
        size = i64(1) << log
        high = size
        for symbol in range(count):
            following[symbol] = norm[symbol]
            if norm[symbol] == -1:
                high -= 1
                if high < 0:
                    return False
                table[first + high] = symbol
                following[symbol] = 1
        step, place = (size >> 1) + (size >> 3) + 3, i64(0)
        for symbol in range(count):
            for _ in range(norm[symbol]):
                table[first + place] = symbol
                place = (place + step) & (size - 1)
                while place >= high and high > 0:
                    place = (place + step) & (size - 1)
        if place != 0:
            return False
        for state in range(size):
            symbol = i64(table[first + state]) & 255
            number = i64(following[symbol])
            following[symbol] += 1
            if number < 1:
                return False
            bits = log - high_bit(number)
            table[first + state] = symbol | (bits << 8) | (((number << bits) - size) << 16)
        return True

    @jit
    def read_weights(
        stored: Any, words: Any, at: Any, stop: Any, weights: Any, norm: Any, table: Any, following: Any
    ) -> Any:
        """The weights that a tree is made of: how many there are, or -1, and where the bytes behind them begin."""
        if at >= stop:
            return i64(-1), at
        head = i64(stored[at])
        at += 1
        if head >= 128:
            count = head - 127
            nbytes = (count + 1) >> 1
            if at + nbytes > stop:
                return i64(-1), at
            for place in range(count):
                both = i64(stored[at + (place >> 1)])
                weights[place] = both & 15 if place & 1 else both >> 4
            return count, at + nbytes
        behind = at + head
        if head < 2 or behind > stop:
            return i64(-1), at
        symbols, log, begin = read_norm(stored, at, behind, i64(WEIGHT_LOG), i64(MOST_TREE_BITS + 2), norm)
        if symbols < 0 or not build_table(norm, symbols, log, table, i64(0), following):
            return i64(-1), at
        place = stream_end(stored, begin, behind - begin)
        low = 8 * begin
        if place < low + 2 * log:
            return i64(-1), at
        both = below(words, place, low, 2 * log)
        place -= 2 * log
        one, other = both >> log, both & ((i64(1) << log) - 1)
        count = i64(0)
        while count < 254:
            entry = i64(table[one])
            weights[count] = entry & 255
            count += 1
            bits = (entry >> 8) & 255
            one = (entry >> 16) + below(words, place, low, bits)
            place -= bits
            if place < low:
                weights[count] = i64(table[other]) & 255
                return count + 1, behind
            one, other = other, one
        return i64(-1), at

    @jit
    def plan_tree(weights: Any, count: Any, starts: Any, ranks: Any) -> Any:
        """The bits of a tree's longest code, and where each symbol's entries begin in its table; -1 for weights that
        make no tree. The last symbol's weight, which is not stored, is added."""
        total = i64(0)
        for symbol in range(count):
            weight = i64(weights[symbol])
            if weight > MOST_TREE_BITS:
                return i64(-1)
            if weight > 0:
                total += i64(1) << (weight - 1)
        if total == 0:
            return i64(-1)
        bits = high_bit(total) + 1
        left = (i64(1) << bits) - total
        last = high_bit(left)
        if bits > MOST_TREE_BITS or left != i64(1) << last:
            return i64(-1)
        weights[count] = last + 1
        for weight in range(MOST_TREE_BITS + 2):
            ranks[weight] = 0
        for symbol in range(count + 1):
            weight = i64(weights[symbol])
            if weight > 0:
                ranks[weight] += 1 << (weight - 1)
        begin = i64(0)  # from the longest codes on, which have the least weight
        for weight in range(1, MOST_TREE_BITS + 2):
            here = i64(ranks[weight])
            ranks[weight] = begin
            begin += here
        if begin != i64(1) << bits:
            return i64(-1)
        for symbol in range(count + 1):
            weight = i64(weights[symbol])
            if weight > 0:
                starts[symbol] = ranks[weight]
                ranks[weight] += 1 << (weight - 1)
        return bits

    return Codes(below, stream_end, read_norm, build_table, read_weights, plan_tree)
