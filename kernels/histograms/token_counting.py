"""Words, lines and n-grams of texts counted on the CPU: documents go in, lists of tokens with their counts come out.

`TokenCounter` takes documents whole, in stretches, or a part of one; the token at a stretch's end is kept until the
next one comes. Its loops release the interpreter lock, and several counters may be at work at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numba import njit

from tilewright.kernels.cpu.loops import kept
from tilewright.kernels.cpu.spare import give_back, take
from tilewright.kernels.cpu.vectors import LANES, high_mask, load_byte, trailing_zeros
from tilewright.kernels.errors import OptionError
from tilewright.kernels.histograms.scanning import (
    AT,
    DOCUMENT,
    DONE,
    FULL,
    MORE,
    NGRAMS,
    NO_WORD,
    PLACE,
    ROOM,
    STATE_LENGTH,
    count_ngrams_between,
    decode_characters,
    decode_documents,
    first_character,
    first_line,
    lines_of_documents,
    rows_of_byte_ngrams,
    rows_of_character_ngrams,
    rows_of_lines,
    rows_of_word_ngrams,
    rows_of_words,
    scan_lines,
    scan_words,
    step_at,
    word_end,
    words_of_documents,
)
from tilewright.kernels.histograms.tables.packed_table import NOWHERE, PackedTable
from tilewright.kernels.histograms.tables.token_table import Table
from tilewright.kernels.histograms.token_kinds import MOST_N, TokenKind, word_table
from tilewright.kernels.histograms.token_lists import Tokens
from tilewright.kernels.histograms.token_order import in_order, merged, ngram_texts_of, packed
from tilewright.kernels.histograms.tokens import CODE_BITS, CODE_MASK, REPLACEMENT
from tilewright.kernels.histograms.word_ngrams import count_word_ngrams

UNIT_BITS = {"byte": 8, "character": CODE_BITS, "word": 25}
"""Bits of a unit's number in the key of an n-gram."""
MOST_WORDS = 1 << UNIT_BITS["word"]
UNITS = 1 << 16
"""Units that are found before their n-grams are counted: as many as stay in a core's cache."""
STRIDE_NBYTES = 2**22
"""Bytes that are counted between two looks at how large the tables are."""
MOST_TABLE_NBYTES = 2**28
"""What the tables of a counter may take before it begins new ones, and keeps of the old only tokens and counts."""
MOST_KEY_BITS = 64
"""Bits of the keys of n-grams of bytes and characters that are counted in a `PackedTable`."""
FIRST_WORDS = 1 << 12
MOST_SORTED = {2: 1 << 23, 3: 1 << 23, 4: 1 << 22, 5: 1 << 22}
"""By n, the most words whose n-grams are sorted at a time: with their keys, twice, they take 160 MiB."""
ROWS_ENTRIES = 1 << 18
"""Entries of rows that are put together before they are copied."""
MOST_NUMBERED = 1 << 20
"""Different words from which on a stretch is the last before they are numbered anew: five numbers fit 128 bits."""

_NONE = np.empty(0, np.uint32)
_NO_PLACES = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class TokenCounts:
    """What documents hold, all of them together."""

    tokens: Tokens
    """A list in order."""
    counts: np.ndarray
    """int64[tokens], each more than 0."""


class MergedCounts:
    """Lists of counts in order. Those of about the same length are merged as they come, so that each token is merged a
    few times; all, once they are taken."""

    def __init__(self) -> None:
        self._lists: list[TokenCounts] = []

    def add(self, counts: TokenCounts) -> None:
        self._lists.append(counts)
        while len(self._lists) > 1 and len(self._lists[-2].counts) < 2 * len(self._lists[-1].counts):
            self._merge_last()

    def take(self) -> TokenCounts:
        """All so far as one list, which is forgotten."""
        while len(self._lists) > 1:
            self._merge_last()
        return self._lists.pop() if self._lists else TokenCounts(Tokens.none(), np.empty(0, np.int64))

    def _merge_last(self) -> None:
        a, b = self._lists[-2:]
        self._lists[-2:] = [TokenCounts(*merged(a.tokens, a.counts, b.tokens, b.counts))]


@dataclass(frozen=True, eq=False)
class Rows:
    """What each of several documents holds: sparse rows, one behind the other."""

    lengths: np.ndarray
    """int64[rows]: how many different tokens each has."""
    columns: np.ndarray
    """int64: their places among the tokens, ascending within a row."""
    values: np.ndarray
    """int64, more than 0."""


@njit(nogil=True)
def _is_malformed(i, end, hi):  # type: ignore[no-untyped-def]
    """Whether the bytes from address ``i`` to ``end`` are no well-formed UTF-8; below ``hi`` others may be read."""
    while i < end:
        if i + LANES <= hi:
            high = high_mask(i)
            if high == 0:
                i += LANES
                continue
            i += trailing_zeros(high)
            if i >= end:
                break
        elif load_byte(i) < 0x80:
            i += 1
            continue
        while i < end and load_byte(i) >= 0x80:  # such characters mostly come together
            step = step_at(i, end)
            length = (step & ((1 << 31) - 1)) >> CODE_BITS
            if step & CODE_MASK == REPLACEMENT and not (
                length == 3 and load_byte(i) == 0xEF and load_byte(i + 1) == 0xBF
            ):
                return True
            i += length
    return False


@kept
@njit(nogil=True)
def _malformed(data, starts, lengths, found):  # type: ignore[no-untyped-def]
    """Say of each token whether it is no well-formed UTF-8; returns how many are not."""
    total = 0
    lo = np.int64(data.ctypes.data)
    for token in range(len(starts)):
        start = lo + starts[token]
        found[token] = _is_malformed(start, start + lengths[token], lo + len(data))
        total += found[token]
    return total


@kept
@njit(nogil=True)
def _fold_ascii(data, starts, lengths, lower, others):  # type: ignore[no-untyped-def]
    """Write ASCII's capitals as small letters, if asked to, and say of each token whether it has other characters."""
    for token in range(len(starts)):
        others[token] = False
        for i in range(starts[token], starts[token] + lengths[token]):
            byte = data[i]
            if byte >= 0x80:
                others[token] = True
            elif lower and 0x41 <= byte <= 0x5A:
                data[i] = byte | 0x20


class TokenCounter:
    """Counts the tokens of one kind. Every document is begun by `begin` and ended by `end_row`."""

    def __init__(self, kind: TokenKind, *, rows: bool = False) -> None:
        """rows: whether each document has counts of its own."""
        self._kind = kind
        self._with_rows = rows
        self._taken = MergedCounts()
        self._bits = UNIT_BITS.get(kind.unit, 0)
        by_bytes = kind.unit in ("word", "line")
        self._words = Table(with_bytes=True) if by_bytes else None
        is_packed = kind.n > 1 and not by_bytes and not rows and kind.n * self._bits <= MOST_KEY_BITS
        self._packed = PackedTable(kind.n, self._bits) if is_packed else None
        self._sorts = kind.n > 1 and by_bytes and not rows
        self._sorted = _room_for_words(FIRST_WORDS if self._sorts else 0)
        self._sorted_used = 0
        self._grams = Table(with_bytes=False) if kind.n > 1 and not is_packed and not self._sorts else None
        self._letters = word_table() if kind.unit == "word" else np.empty(0, np.uint8)
        self._units = np.empty(UNITS, np.uint32) if kind.n > 1 and kind.unit != "byte" else _NONE
        self._begins = np.empty(len(self._units) + 1, np.int64)
        self._rolling = np.zeros(3, np.uint64)
        self._tail = np.empty(0, np.uint8)
        self._rows: list[Rows] = []

    @property
    def _table(self) -> Table:
        """That of what is counted."""
        table = self._grams if self._grams is not None else self._words
        assert table is not None
        return table

    def begin(self) -> None:
        """What comes next is of another document."""
        self._rolling[:] = 0
        if self._packed is not None:
            self._packed.begin()
        if self._under_way():
            self._sorted[self._sorted_used] = NO_WORD
            self._sorted_used += 1
        self._tail = self._tail[:0]

    def stretch(self, data: np.ndarray, *, ends: bool) -> int:
        """Count the next bytes, uint8, of a document, the last if it ``ends`` with them. Returns the bytes of a token
        that is under way at their end, which are kept."""
        if len(self._tail):
            data = np.concatenate([self._tail, data])
        done = self._feed(data, 0, len(data), ends)
        self._tail = data[done:].copy() if not ends and done < len(data) else data[:0]
        return len(self._tail)

    def documents(self, data: np.ndarray, edges: np.ndarray) -> None:
        """Count documents that are whole and lie one behind the other: each from one of ``edges``, int64, to the next
        in ``data``. As `begin`, `stretch` and `end_row` for each, but that short ones, of which there are millions, do
        not take turns with the interpreter's lock."""
        if self._with_rows:
            self._rows_of_documents(data, edges)
            return
        self._tail = self._tail[:0]
        lo = data.ctypes.data
        document, at = 0, lo + int(edges[0])
        while document + 1 < len(edges):
            if self._words is not None:
                document, at = self._scan_documents(lo, edges, document, at)
            elif self._kind.unit == "character":
                document, at, m, found = decode_documents(lo, edges, document, at, self._units, self._begins)
                self._count_units(self._units, 0, m, self._begins[:found])
            else:
                # Whole documents, or the next bytes of a long one.
                first = at - lo
                stop = int(np.searchsorted(edges, first + STRIDE_NBYTES, "right")) - 1
                last = int(edges[stop]) if stop > document else first + STRIDE_NBYTES
                begins = edges[document : max(stop, document + 1)]
                self._count_units(data, first, last, begins[begins >= first])
                document, at = max(document, stop), lo + last
            if self._has_enough():
                self._set_aside()

    def _scan_documents(self, lo: int, edges: np.ndarray, document: int, at: int) -> tuple[int, int]:
        """Count some of their words, or lines; the document and the place where to go on."""
        table = self._words
        assert table is not None
        where = (table.address, lo, edges, document, at, STRIDE_NBYTES)
        if self._kind.unit == "line":
            why, document, at = lines_of_documents(*where)
        else:
            words, wanted = _NONE, 0
            if self._sorts:
                words, wanted = self._sorted, len(self._sorted) - MOST_N
            letters = self._letters.ctypes.data
            why, document, at, used = words_of_documents(*where, letters, words, wanted, self._sorted_used)
            self._sorted_used = int(used)
        if why == ROOM:
            table.make_room()
        elif why == FULL:
            self._make_room_for_words()
        return int(document), int(at)

    def _rows_of_documents(self, data: np.ndarray, edges: np.ndarray) -> None:
        """Count documents each by itself."""
        self.begin()
        unit, letters, grams = self._kind.unit, self._letters.ctypes.data, self._grams
        by_address = unit != "byte"
        lo = data.ctypes.data if by_address else 0
        state = np.zeros(STATE_LENGTH, np.int64)
        state[AT] = lo + int(edges[0])
        ends = np.empty(len(edges) - 1, np.int64)
        columns, values = np.empty((2, ROWS_ENTRIES), np.uint64)
        done = 0  # documents whose rows are kept
        while True:
            rows = state, columns, values, ends
            ngrams = self._kind.n, self._bits, self._rolling, *rows
            if grams is None:
                table = self._table.address
                if unit == "line":
                    why = rows_of_lines(table, lo, edges, *rows)
                else:
                    why = rows_of_words(table, lo, edges, letters, self._units, *rows)
            elif self._words is not None:
                why = rows_of_word_ngrams(
                    self._words.address, grams.address, lo, edges, letters, self._units, *ngrams
                )
                self._check_words()
            elif unit == "character":
                why = rows_of_character_ngrams(grams.address, lo, edges, self._units, *ngrams)
            else:
                why = rows_of_byte_ngrams(grams.address, data, edges, *ngrams)
            if why == ROOM:
                assert self._words is not None
                self._words.make_room()
            elif why == NGRAMS:
                assert grams is not None
                grams.make_room()
            else:
                used, document = int(state[PLACE]), int(state[DOCUMENT])
                lengths = np.diff(ends[done:document], prepend=0)
                self._rows.append(
                    Rows(lengths, *(each[:used].astype(np.int64) for each in (columns, values)))
                )
                if why == DONE:
                    return
                done, state[PLACE] = document, 0
                if self._table.touched_used > len(columns):
                    columns, values = np.empty((2, self._table.touched_used), np.uint64)

    def part(self, data: np.ndarray, start: int, *, more: Callable[[int], np.ndarray]) -> None:
        """Count the tokens that begin in ``data[start:]``, a part of a document with some bytes before it.

        ``more(n)`` gives the document's next bytes, n of them or as many as there are.
        """
        step = STRIDE_NBYTES >> 6
        limit = len(data)
        ends = False
        if limit - start < step:
            behind = more(step)
            ends = len(behind) < step
            data = np.concatenate([data, behind])
        at = self._first(data, start)
        while True:
            at = self._feed(data, at, limit, ends)
            if ends or at >= limit:
                break
            data, at, limit = data[at:], 0, limit - at
            behind = more(step)
            ends = len(behind) < step
            data = np.concatenate([data, behind])
            step *= 4
        wanted = self._kind.n - 1
        if not wanted or not self._units_under_way():
            return
        # N-grams that begin here end with units that do not.
        while True:
            got, units = self._following(data, at, wanted, ends)
            if got == wanted or ends:
                break
            behind = more(step)
            ends = len(behind) < step
            data, at = np.concatenate([data[at:], behind]), 0
            step *= 4
        self._count_units(units[:got], 0, got)

    def end_row(self) -> None:
        """The document has ended: keep what it holds, if rows are wanted."""
        if self._with_rows:
            entries, counts = self._table.take_row()
            self._rows.append(Rows(np.array([len(entries)]), entries, counts))

    def take(self) -> TokenCounts:
        """All counts so far, which are forgotten. A document may be under way."""
        self._set_aside()
        return self._taken.take()

    def _set_aside(self) -> None:
        """Forget what the tables hold, but for its tokens and counts."""
        counts = self._counts()
        self._forget()  # before lists are merged, which takes as much memory again
        self._taken.add(counts)

    def _counts(self) -> TokenCounts:
        kind = self._kind
        if self._packed is not None:
            keys, counts = self._packed.in_order()
            nothing = np.empty(0, np.uint8), _NO_PLACES, _NO_PLACES
            texts = ngram_texts_of(keys, keys[:0], kind.n, self._bits, *nothing, joined=False)
            return TokenCounts(texts, counts)
        if self._words is not None and (self._sorts or kind.n == 1):
            used = self._words.used
            words = as_counted(
                kind,
                self._words.arena,
                self._words.starts[:used],
                self._words.lengths[:used],
                len(self._words.bytes_used),
            )
            if self._sorts:
                return TokenCounts(*count_word_ngrams(self._sorted[: self._sorted_used], kind.n, *words))
            tokens, counts, _ = in_order(*words, self._words.counts[:used])
            return TokenCounts(tokens, counts)
        tokens = self._tokens()
        tokens, counts, _ = in_order(
            tokens.data, tokens.offsets[:-1], np.diff(tokens.offsets), self._table.counts[: self._table.used]
        )
        return TokenCounts(tokens, counts)

    def _under_way(self) -> bool:
        """Whether words that are sorted are of the document that is under way."""
        used = self._sorted_used
        return used > 0 and self._sorted[used - 1] != NO_WORD

    def _units_under_way(self) -> bool:
        """Whether there were units of the document, so that n-grams go on behind them."""
        if self._packed is not None:
            return self._packed.under_way > 0
        return self._under_way() if self._sorts else int(self._rolling[2]) > 0

    def take_rows(self) -> tuple[Tokens, Rows]:
        """The rows so far, which are forgotten, and the tokens that they are of. No document is under way."""
        tokens = self._tokens()
        lengths, columns, values = (
            np.concatenate([_NO_PLACES, *(getattr(rows, name) for rows in self._rows)])
            for name in ("lengths", "columns", "values")
        )
        self._rows = []
        self._forget()
        return tokens, Rows(lengths, columns, values)

    def _first(self, data: np.ndarray, start: int) -> int:
        """Where the first token of a part may begin."""
        unit, lo = self._kind.unit, data.ctypes.data
        if start == 0 or unit == "byte":
            return start
        if unit == "line":
            return int(first_line(lo + start, lo + len(data))) - lo
        at, before = (int(found) for found in first_character(data, start))
        if unit == "character" or before < 0 or not self._letters[before >> 3] >> (before & 7) & 1:
            return at
        return int(word_end(lo + at, lo + len(data), self._letters.ctypes.data)) - lo

    def _feed(self, data: np.ndarray, at: int, limit: int, ends: bool) -> int:
        """Count the tokens that begin in ``data[at:limit]``; returns where the first begins that is not counted."""
        while at < limit:
            why, at = self._scan(data, at, min(limit, at + STRIDE_NBYTES), ends)
            if not self._with_rows and self._has_enough():
                self._set_aside()
            self._check_words()
            if why == MORE:
                break
        return at

    def _check_words(self) -> None:
        """Raises OptionError where words of which n-grams are counted may soon be more than have numbers."""
        if self._grams is None or self._words is None:
            return
        if self._words.used > MOST_WORDS - STRIDE_NBYTES:
            raise OptionError(
                f"documents of one piece have more than {self._words.used} different words, and n-grams of each"
                f" document may be of {MOST_WORDS}; count them for all documents together"
            )

    def _has_enough(self) -> bool:
        """Whether what the tables hold is to be set aside."""
        tables = (self._words, self._grams, self._packed)
        nbytes = sum(table.nbytes for table in tables if table is not None)
        if self._packed is not None and self._packed.is_full:
            return True
        if self._sorts and self._words is not None and self._words.used > MOST_NUMBERED:
            return True
        return nbytes >= MOST_TABLE_NBYTES

    def _scan(self, data: np.ndarray, at: int, limit: int, ends: bool) -> tuple[int, int]:
        unit = self._kind.unit
        if unit == "byte":
            self._count_units(data, at, limit)
            return DONE, limit
        lo = data.ctypes.data
        at, limit, hi = lo + at, lo + limit, lo + len(data)
        letters = self._letters.ctypes.data
        while True:
            m = 0
            if unit == "character":
                why, at, m = decode_characters(at, hi, limit, ends, self._units)
            else:
                table = self._words
                assert table is not None
                if unit == "line":
                    why, at = scan_lines(table.address, at, hi, limit, ends)
                elif self._sorts:
                    room = self._sorted[: len(self._sorted) - MOST_N]
                    why, at, self._sorted_used = scan_words(
                        table.address, at, hi, limit, ends, letters, room, self._sorted_used
                    )
                    if why == FULL:
                        self._make_room_for_words()
                else:
                    why, at, m = scan_words(table.address, at, hi, limit, ends, letters, self._units, 0)
                if why == ROOM:
                    table.make_room()
            if m:
                self._count_units(self._units, 0, m)
            if why in (DONE, MORE):
                return int(why), int(at) - lo

    def _make_room_for_words(self) -> None:
        """More room for words that are sorted, up to what is sorted at a time; then they are."""
        room = len(self._sorted) - MOST_N
        if room >= MOST_SORTED[self._kind.n]:
            self._set_aside()
            return
        more = _room_for_words(2 * room)
        more[: self._sorted_used] = self._sorted[: self._sorted_used]
        give_back(self._sorted)
        self._sorted = more

    def _count_units(self, units: np.ndarray, first: int, last: int, begins: np.ndarray = NOWHERE) -> None:
        """begins: as of `PackedTable.count`; none of words that are sorted."""
        if self._packed is not None:
            self._packed.count(units, first, last, begins)
            return
        if self._sorts:
            self._sorted[self._sorted_used : self._sorted_used + last - first] = units[first:last]
            self._sorted_used += last - first
            return
        table = self._grams
        assert table is not None
        begin = 0
        while first < last or begin < len(begins):
            first, begin = count_ngrams_between(
                table.address, units, first, last, begins, begin, self._kind.n, self._bits, self._rolling
            )
            if first < last:
                table.make_room()

    def _following(self, data: np.ndarray, at: int, wanted: int, ends: bool) -> tuple[int, np.ndarray]:
        """Up to ``wanted`` units from ``at`` on, without counting them, and how many were found."""
        unit = self._kind.unit
        if unit == "byte":
            units = data[at : at + wanted]
            return len(units), units
        units = np.empty(wanted, np.uint32)
        lo = data.ctypes.data
        at, hi = lo + at, lo + len(data)
        if unit == "character":
            _, _, m = decode_characters(at, hi, hi, ends, units)
            return int(m), units
        table = self._words
        assert table is not None
        m = 0
        while True:
            why, at, m = scan_words(table.address, at, hi, hi, ends, self._letters.ctypes.data, units, m)
            if why != ROOM:
                return int(m), units
            table.make_room()

    def _tokens(self) -> Tokens:
        """What is counted, in the order of its entries."""
        data, starts, lengths = np.empty(0, np.uint8), _NO_PLACES, _NO_PLACES
        if self._words is not None:
            table = self._words
            used = table.used
            data, starts, lengths = as_counted(
                self._kind,
                table.arena,
                table.starts[:used],
                table.lengths[:used],
                len(table.bytes_used),
            )
        if self._grams is None:
            return packed(data, starts, lengths)
        low, high = self._grams.keys()
        joined = self._kind.unit == "word"
        return ngram_texts_of(low, high, self._kind.n, self._bits, data, starts, lengths, joined=joined)

    def _forget(self) -> None:
        """Begin with empty tables, of the same document if one is under way."""
        words = self._words
        if self._grams is not None:
            self._grams.close()
            self._grams = Table(with_bytes=False)
        if self._packed is not None:
            self._packed = self._packed.emptied()
        if words is None:
            return
        self._words = Table(with_bytes=True)
        if not self._sorts:
            words.close()
            return
        # The last words' n-grams go on: their numbers are those of the new table.
        last = self._sorted[max(0, self._sorted_used - self._kind.n + 1) : self._sorted_used]
        ends = np.flatnonzero(last == NO_WORD)
        before = last[ends[-1] + 1 :] if len(ends) else last
        texts = [words.arena[words.starts[u] : words.starts[u] + words.lengths[u]].tobytes() for u in before]
        tokens = Tokens.of(texts)
        words.close()
        self._sorted_used = 0
        entries = self._words.add(tokens.data, tokens.offsets, np.zeros(len(texts), np.int64))
        self._count_units(entries, 0, len(entries))


def _room_for_words(count: int) -> np.ndarray:
    """uint32: with room for a boundary between documents, and for the words with which the last n-grams end."""
    return take(count + MOST_N, np.uint32)


def as_counted(
    kind: TokenKind, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray, used: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Words as they are folded, lines and n-grams of characters as they are decoded, in the same form as they are
    given: their bytes, and where each begins there, and how long it is.

    Those that change are put behind the others: into ``data[used:]``, which may be written, if they have room there.
    """
    chosen = np.empty(len(starts), np.bool_)
    if kind.unit in ("line", "character"):
        if not _malformed(data, starts, lengths, chosen):
            return data, starts, lengths
    elif not kind.casefold and kind.normalise is None:
        return data, starts, lengths
    else:
        data = data[:used].copy()
        _fold_ascii(data, starts, lengths, kind.casefold, chosen)
    starts, lengths = starts.copy(), lengths.copy()
    used = len(data) if used is None or kind.unit == "word" else used
    texts, place = [], used
    for token in np.flatnonzero(chosen).tolist():
        text = data[starts[token] : starts[token] + lengths[token]].tobytes().decode(errors="replace")
        changed = (kind.folded(text) if kind.unit == "word" else text).encode()
        starts[token], lengths[token] = place, len(changed)
        texts.append(changed)
        place += len(changed)
    behind = np.frombuffer(b"".join(texts), np.uint8)
    if place <= len(data):
        data[used:place] = behind
        return data, starts, lengths
    return np.concatenate([data[:used], behind]), starts, lengths
