"""Texts out of JSON Lines: the values of some fields, with their escapes decoded, one document each.

Every line is checked to be JSON, as Python's ``json.loads(line.decode("utf-8", errors="replace"))`` checks it: what
that refuses is refused, NaN and Infinity are numbers, and of a key that stands twice the last value counts. Bytes that
are no UTF-8 are handed on as they are. Half of a surrogate pair, which Python lets stand, is no character: it becomes
U+FFFD, and is counted as lost.

No value is built but those that are wanted, and the lock is not held. Libraries that keep it (orjson, msgspec) read
with one core of a process, however many threads it has.

Strings are looked through 64 bytes at a time for what does not stand for itself, and copied in the same step. Bytes are
given by their addresses (`tilewright.kernels.cpu.vectors` says why); below ``hi`` they may be read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, uint64

from tilewright.kernels.cpu.loops import kept
from tilewright.kernels.cpu.vectors import (
    LANES,
    copy_lanes,
    line_feed_mask,
    load_byte,
    load_int,
    store_byte,
    store_int,
    string_stop_mask,
    trailing_zeros,
)

DEEPEST = 1000
"""Lists and objects within each other; Python's reader ends at about as many."""

MISSING, TEXT, NULL, NUMBER, TRUTH, OBJECT, LIST = range(7)
"""What the value of a field is."""

(
    FINE,
    NO_ROOM,
    NO_OBJECT,
    NO_VALUE,
    NO_KEY,
    NO_COLON,
    NO_COMMA,
    NO_NUMBER,
    CONTROL,
    NO_ESCAPE,
    UNENDED,
    MORE,
    TOO_DEEP,
    NO_TEXT,
    ENCODED,
) = range(15)
"""How a call ended; all from NO_OBJECT on are faults of the line."""

FAULTS = {
    NO_OBJECT: "the line is no JSON object",
    NO_VALUE: "no JSON value stands there",
    NO_KEY: "no key in quotation marks stands there",
    NO_COLON: "no colon stands behind the key",
    NO_COMMA: "no comma and no closing bracket stands there",
    NO_NUMBER: "the number is malformed",
    CONTROL: "a text holds a control character that is not escaped",
    NO_ESCAPE: "a text holds a malformed escape",
    UNENDED: "the line ends within its value",
    MORE: "other bytes stand behind the object",
    TOO_DEEP: f"lists and objects are nested more than {DEEPEST} deep",
    NO_TEXT: "the field holds no text",
    ENCODED: "it begins with bytes of another encoding than UTF-8",
}

CONSUMED, FILLED, LINES, DOCUMENTS, CODE, PLACE, FIELD, KIND, IDS_FILLED, RECORDS = range(10)
"""Places in ``state``: bytes of the source and of the target that are done with; lines; documents; how the call ended;
the offset in the source of a fault; the number of the field that holds no text, and what it holds; bytes of
identifiers; lines with an object."""
STATE_LENGTH = 10


def _meanings() -> np.ndarray:
    """uint8[256]: what a byte behind a backslash stands for, 0 where there is no such escape."""
    found = np.zeros(256, np.uint8)
    for letter, meaning in zip(b'"\\/bfnrt', b'"\\/\b\f\n\r\t', strict=True):
        found[letter] = meaning
    return found


NO_DIGIT = 1 << 16


def _digit_values() -> np.ndarray:
    """int64[256]: what a byte is worth as a hexadecimal digit, `NO_DIGIT` if it is none."""
    found = np.full(256, NO_DIGIT)
    for value, digit in enumerate(b"0123456789abcdef"):
        found[digit] = found[ord(chr(digit).upper())] = value
    return found


MEANINGS = _meanings()
DIGIT_VALUES = _digit_values()

SPAN_NBYTES = 40
_KIND, _BEGIN, _END, _WRITTEN, _LOST = range(0, SPAN_NBYTES, 8)
"""Where the numbers of a value lie in ``spans``: what it is; its first address, and that behind it (of a text without
its quotation marks); and of a text that was decoded where that ends, and how many of its characters were lost."""


@njit(nogil=True)
def _is_blank(byte):  # type: ignore[no-untyped-def]
    return byte == 0x20 or byte == 0x09 or byte == 0x0D or byte == 0x0A


@njit(nogil=True)
def _fault(place, code):  # type: ignore[no-untyped-def]
    """What functions return that return an address otherwise."""
    return -(place << 8 | code)


@njit(nogil=True)
def _hexadecimal(i):  # type: ignore[no-untyped-def]
    """The number that the four digits at ``i`` make, `NO_DIGIT` or more where one of them is none."""
    return (
        DIGIT_VALUES[uint64(load_byte(i))] << 12
        | DIGIT_VALUES[uint64(load_byte(i + 1))] << 8
        | DIGIT_VALUES[uint64(load_byte(i + 2))] << 4
        | DIGIT_VALUES[uint64(load_byte(i + 3))]
    )


@njit(nogil=True)
def _unended_digits(i, stop):  # type: ignore[no-untyped-def]
    """The fault of an escape at ``i`` for whose digits the line is too short."""
    for j in range(i + 2, stop):
        if DIGIT_VALUES[uint64(load_byte(j))] == NO_DIGIT:
            return _fault(i, NO_ESCAPE)
    return _fault(stop, UNENDED)


@njit(nogil=True)
def _string_end(i, stop, hi):  # type: ignore[no-untyped-def]
    """Where the string whose first character is at ``i`` has its closing quotation mark, or a `_fault`; and whether it
    holds escapes."""
    escaped = False
    while i < stop:
        if i + LANES <= hi:
            stops = string_stop_mask(i)
            if stops == 0:
                i += LANES
                continue
            i += trailing_zeros(stops)
            if i >= stop:
                break
        byte = load_byte(i)
        if byte == 0x22:
            return i, escaped
        if byte < 0x20:
            return _fault(i, CONTROL), escaped
        if byte != 0x5C:
            i += 1
            continue
        escaped = True
        while byte == 0x5C:
            if i + 1 >= stop:
                return _fault(stop, UNENDED), escaped
            byte = load_byte(i + 1)
            if byte == 0x75:
                if i + 6 > stop:
                    return _unended_digits(i, stop), escaped
                if _hexadecimal(i + 2) >= NO_DIGIT:
                    return _fault(i, NO_ESCAPE), escaped
                i += 6
            else:
                if MEANINGS[uint64(byte)] == 0:
                    return _fault(i, NO_ESCAPE), escaped
                i += 2
            if i >= stop:
                return _fault(stop, UNENDED), escaped
            byte = load_byte(i)
    return _fault(stop, UNENDED), escaped


@njit(nogil=True)
def _read_string(i, stop, hi, to, to_hi):  # type: ignore[no-untyped-def]
    """Write the characters of the string whose first is at ``i`` to the address ``to``, where there is room for what it
    takes until ``stop``; as far as ``to_hi`` other bytes may be written behind them.

    Returns as `_string_end`; where the characters end; and how many were halves of pairs.
    """
    lost = 0
    while i < stop:
        if i + LANES <= hi and to + LANES <= to_hi:
            stops = string_stop_mask(i)
            copy_lanes(to, i)
            if stops == 0:
                i += LANES
                to += LANES
                continue
            k = trailing_zeros(stops)
            i += k
            to += k
            if i >= stop:
                break
        byte = load_byte(i)
        if byte == 0x22:
            return i, to, lost
        if byte < 0x20:
            return _fault(i, CONTROL), to, lost
        if byte != 0x5C:
            store_byte(to, byte)
            i += 1
            to += 1
            continue
        while byte == 0x5C:
            if i + 1 >= stop:
                return _fault(stop, UNENDED), to, lost
            byte = load_byte(i + 1)
            if byte != 0x75:
                meaning = MEANINGS[uint64(byte)]
                if meaning == 0:
                    return _fault(i, NO_ESCAPE), to, lost
                store_byte(to, np.int64(meaning))
                to += 1
                i += 2
            else:
                if i + 6 > stop:
                    return _unended_digits(i, stop), to, lost
                code = _hexadecimal(i + 2)
                if code >= NO_DIGIT:
                    return _fault(i, NO_ESCAPE), to, lost
                i += 6
                if 0xD800 <= code < 0xE000:
                    low = np.int64(0)
                    if code < 0xDC00 and i + 6 <= stop and load_byte(i) == 0x5C and load_byte(i + 1) == 0x75:
                        low = _hexadecimal(i + 2)
                    if 0xDC00 <= low < 0xE000:
                        code = 0x10000 + ((code - 0xD800) << 10 | (low - 0xDC00))
                        i += 6
                    else:
                        code = np.int64(0xFFFD)
                        lost += 1
                to = _store_character(to, code)
            if i >= stop:
                return _fault(stop, UNENDED), to, lost
            byte = load_byte(i)
    return _fault(stop, UNENDED), to, lost


@njit(nogil=True)
def _store_character(to, code):  # type: ignore[no-untyped-def]
    """Write a code point in UTF-8; returns where it ends."""
    if code < 0x80:
        store_byte(to, code)
        return to + 1
    if code < 0x800:
        store_byte(to, 0xC0 | code >> 6)
        store_byte(to + 1, 0x80 | code & 0x3F)
        return to + 2
    if code < 0x10000:
        store_byte(to, 0xE0 | code >> 12)
        store_byte(to + 1, 0x80 | code >> 6 & 0x3F)
        store_byte(to + 2, 0x80 | code & 0x3F)
        return to + 3
    store_byte(to, 0xF0 | code >> 18)
    store_byte(to + 1, 0x80 | code >> 12 & 0x3F)
    store_byte(to + 2, 0x80 | code >> 6 & 0x3F)
    store_byte(to + 3, 0x80 | code & 0x3F)
    return to + 4


@njit(nogil=True)
def _is_word(i, stop, word):  # type: ignore[no-untyped-def]
    if i + len(word) > stop:
        return False
    for j in range(len(word)):  # noqa: SIM110 (Numba)
        if load_byte(i + j) != word[j]:
            return False
    return True


@njit(nogil=True)
def _digits_end(i, stop):  # type: ignore[no-untyped-def]
    while i < stop and 0x30 <= load_byte(i) <= 0x39:
        i += 1
    return i


@njit(nogil=True)
def _number_end(i, stop):  # type: ignore[no-untyped-def]
    """Where the number that begins at ``i`` ends, or -1."""
    if load_byte(i) == 0x2D:
        i += 1
        if i < stop and load_byte(i) == 0x49:
            return i + 8 if _is_word(i, stop, INFINITY) else -1
    end = _digits_end(i, stop)
    if end == i:
        return -1
    if load_byte(i) == 0x30:
        end = i + 1  # a zero stands alone
    i = end
    if i < stop and load_byte(i) == 0x2E:
        end = _digits_end(i + 1, stop)
        if end == i + 1:
            return -1
        i = end
    if i < stop and (load_byte(i) == 0x65 or load_byte(i) == 0x45):
        j = i + 1
        if j < stop and (load_byte(j) == 0x2B or load_byte(j) == 0x2D):
            j += 1
        end = _digits_end(j, stop)
        if end == j:
            return -1
        i = end
    return i


INFINITY = np.frombuffer(b"Infinity", np.uint8)
NAN = np.frombuffer(b"NaN", np.uint8)
TRUE = np.frombuffer(b"true", np.uint8)
FALSE = np.frombuffer(b"false", np.uint8)
NOTHING = np.frombuffer(b"null", np.uint8)


@njit(nogil=True)
def _key_at(start, stop, escaped, hi, keys, key_edges, wanted, scratch, scratch_nbytes):  # type: ignore[no-untyped-def]
    """The number of the wanted key that stands there, or -1."""
    length = stop - start
    if escaped:
        if length > scratch_nbytes:
            return -1
        _, end, _ = _read_string(start, stop + 1, hi, scratch, scratch + scratch_nbytes)
        start = scratch
        length = end - start
    for k in range(wanted):
        key = load_int(key_edges + 8 * k)
        if load_int(key_edges + 8 * k + 8) - key != length:
            continue
        same = True
        for j in range(length):
            if load_byte(start + j) != load_byte(keys + key + j):
                same = False
                break
        if same:
            return k
    return -1


@njit(nogil=True)
def _object(  # type: ignore[no-untyped-def]
    start, stop, hi, keys, key_edges, wanted_keys, spans, stack, stack_nbytes, scratch, scratch_nbytes, to, to_hi
):  # fmt: skip
    """Check that a line is a JSON object, and find the wanted values.

    Returns 0; or a fault's code, in the lower 8 bits, and its address above them. ``spans`` gets what is known of each
    value. Where ``to`` is not 0, the first one is decoded there if it is a text.
    """
    for k in range(wanted_keys):
        store_int(spans + SPAN_NBYTES * k + _KIND, MISSING)
    depth = 0
    wanted = -1  # the number of the key whose value comes next, at the top
    span = spans
    # What may come next: 0 a value, 1 a value or the end of a list, 2 a key or the end of an object, 3 a key, 4 a comma
    # or an end.
    state = 0
    i = start
    while True:
        while i < stop and _is_blank(load_byte(i)):
            i += 1
        if i >= stop:
            return stop << 8 | UNENDED
        byte = load_byte(i)
        if state == 2 or state == 3:
            if byte == 0x7D and state == 2:
                depth -= 1
                if depth == 1 and wanted >= 0:
                    store_int(span + _END, i + 1)
                    wanted = -1
                i += 1
                state = 4
                if depth == 0:
                    break
                continue
            if byte != 0x22:
                return i << 8 | NO_KEY
            end, escaped = _string_end(i + 1, stop, hi)
            if end < 0:
                return -end
            if depth == 1:
                wanted = _key_at(
                    i + 1, end, escaped, hi, keys, key_edges, wanted_keys, scratch, scratch_nbytes
                )
                span = spans + SPAN_NBYTES * max(wanted, 0)
            i = end + 1
            while i < stop and _is_blank(load_byte(i)):
                i += 1
            if i >= stop:
                return stop << 8 | UNENDED
            if load_byte(i) != 0x3A:
                return i << 8 | NO_COLON
            i += 1
            state = 0
            continue
        if state == 4:
            in_object = load_byte(stack + depth - 1) == OBJECT
            if byte == 0x2C:
                i += 1
                state = 3 if in_object else 0
                continue
            if byte != (0x7D if in_object else 0x5D):
                return i << 8 | NO_COMMA
            depth -= 1
            i += 1
            if depth == 1 and wanted >= 0:
                store_int(span + _END, i)
                wanted = -1
            if depth == 0:
                break
            continue
        if state == 1 and byte == 0x5D:
            depth -= 1
            i += 1
            if depth == 1 and wanted >= 0:
                store_int(span + _END, i)
                wanted = -1
            state = 4
            if depth == 0:
                break
            continue
        # A value.
        found = depth == 1 and wanted >= 0
        if byte == 0x7B or byte == 0x5B:
            kind = OBJECT if byte == 0x7B else LIST
            if depth == 0 and kind == LIST:
                return i << 8 | NO_OBJECT
            if depth == stack_nbytes:
                return i << 8 | TOO_DEEP
            if found:
                store_int(span + _KIND, kind)
                store_int(span + _BEGIN, i)
            store_byte(stack + depth, kind)
            depth += 1
            i += 1
            state = 2 if kind == OBJECT else 1
            continue
        if depth == 0:
            return i << 8 | (ENCODED if byte >= 0x80 or byte == 0 else NO_OBJECT)
        begin = i
        if byte == 0x22:
            begin = i + 1
            kind = TEXT
            if found and wanted == 0 and to:
                i, written, lost = _read_string(begin, stop, hi, to, to_hi)
                store_int(span + _WRITTEN, written)
                store_int(span + _LOST, lost)
            else:
                i, _ = _string_end(begin, stop, hi)
            if i < 0:
                return -i
            if found:
                store_int(span + _KIND, kind)
                store_int(span + _BEGIN, begin)
                store_int(span + _END, i)
            i += 1
        else:
            if byte == 0x2D or 0x30 <= byte <= 0x39:
                kind = NUMBER
                i = _number_end(i, stop)
                if i < 0:
                    return begin << 8 | NO_NUMBER
            elif byte == 0x74 and _is_word(i, stop, TRUE):
                kind = TRUTH
                i += 4
            elif byte == 0x66 and _is_word(i, stop, FALSE):
                kind = TRUTH
                i += 5
            elif byte == 0x6E and _is_word(i, stop, NOTHING):
                kind = NULL
                i += 4
            elif byte == 0x4E and _is_word(i, stop, NAN):
                kind = NUMBER
                i += 3
            elif byte == 0x49 and _is_word(i, stop, INFINITY):
                kind = NUMBER
                i += 8
            else:
                return begin << 8 | NO_VALUE
            if found:
                store_int(span + _KIND, kind)
                store_int(span + _BEGIN, begin)
                store_int(span + _END, i)
        if found:
            wanted = -1
        state = 4
    while i < stop:
        if not _is_blank(load_byte(i)):
            return i << 8 | MORE
        i += 1
    return 0


@njit(nogil=True)
def _line_feed(i, stop, hi):  # type: ignore[no-untyped-def]
    """Where the first line feed from ``i`` to ``stop`` stands, or ``stop``."""
    while i < stop:
        if i + LANES <= hi:
            feeds = line_feed_mask(i)
            if feeds:
                return min(i + trailing_zeros(feeds), stop)
            i += LANES
        else:
            if load_byte(i) == 0x0A:
                return i
            i += 1
    return stop


@kept
@njit(nogil=True)
def newline_from(data, i, stop):  # type: ignore[no-untyped-def]
    """Where the first newline in ``data[i:stop]`` stands, or -1."""
    lo = np.int64(data.ctypes.data)
    found = _line_feed(lo + i, lo + stop, lo + len(data)) - lo
    return found if found < stop else -1


@kept
@njit(nogil=True)
def texts_of_lines(  # type: ignore[no-untyped-def]
    data, start, stop, final, keys, key_edges, fields, target, gap, separator, most,
    ends, numbers, lost, ids, id_ends, spans, stack, scratch, without, state,
):  # fmt: skip
    """Write the texts of the fields of whole lines in ``data[start:stop]`` to the target, one document each.

    It ends before a line whose texts have no room in the target (NO_ROOM), before one that would make more than
    ``most`` documents, at one with a fault, and where no whole line is left: with ``final`` the last needs no newline.

    Parameters
    ----------
    data
        uint8.
    keys, key_edges
        The wanted keys, uint8 end to end; int64, where each begins and the last ends. The first ``fields`` of them are
        texts; one more, if there is one, is the identifier.
    target
        uint8, written, behind the last document too. Behind each document stand ``gap`` bytes of the value
        ``separator``.
    ends, numbers, lost
        int64[most], written: where each document ends, behind its separator; its line, 0 being the first of the call;
        how many characters of it were lost.
    ids, id_ends
        uint8, int64[most], written, if there is one key more than fields: the identifiers of the documents, in UTF-8,
        and where each ends. It is the text, or another value as it is written, and nothing where there is none.
    spans, stack, scratch
        int64[(keys, 5)], uint8[DEEPEST], uint8 of six times the longest key: memory to work in.
    without
        int64[(keys, 2)], added to: the lines whose object lacks each key, and those that hold null there.
    state
        int64[STATE_LENGTH], written.
    """
    state[:] = 0
    lo = np.int64(data.ctypes.data)
    hi = lo + len(data)
    to = np.int64(target.ctypes.data)
    to_hi = to + len(target)
    id_to = np.int64(ids.ctypes.data)
    key_count = len(key_edges) - 1
    span_0 = np.int64(spans.ctypes.data)
    i = lo + start
    end = lo + stop
    filled = 0
    documents = 0
    line = 0
    while i < end and documents + fields <= most:
        edge = _line_feed(i, end, hi)
        if edge == end and not final:
            break
        first = i
        while first < edge and _is_blank(load_byte(first)):
            first += 1
        if first == edge:
            line += 1
            i = min(edge + 1, end)
            continue
        # Texts only get shorter when their escapes are decoded, and each has two quotation marks.
        if filled + (edge - i) + fields * gap > len(target):
            state[CODE] = NO_ROOM
            break
        fault = _object(
            first, edge, hi, keys.ctypes.data, key_edges.ctypes.data, key_count, span_0, stack.ctypes.data,
            len(stack), np.int64(scratch.ctypes.data), len(scratch), to + filled if fields == 1 else 0, to_hi,
        )  # fmt: skip
        if fault == 0:
            for k in range(fields):
                kind = spans[k, 0]
                if kind > NULL:
                    fault = spans[k, 1] << 8 | NO_TEXT
                    state[FIELD] = k
                    state[KIND] = kind
                    break
        if fault != 0:
            state[CODE] = fault & 255
            state[PLACE] = (fault >> 8) - i
            break
        if key_count > fields and spans[fields, 0] != MISSING:
            id_filled = state[IDS_FILLED]
            begin = spans[fields, 1]
            length = spans[fields, 2] - begin
            if id_filled + length > len(ids):
                state[CODE] = NO_ROOM
                break
            if spans[fields, 0] == TEXT:
                _, id_end, _ = _read_string(
                    begin, begin + length + 1, hi, id_to + id_filled, id_to + len(ids)
                )
                state[IDS_FILLED] = id_end - id_to
            elif spans[fields, 0] > NULL:
                for j in range(length):
                    ids[id_filled + j] = load_byte(begin + j)
                state[IDS_FILLED] += length
        for k in range(fields):
            lost[documents] = 0
            if spans[k, 0] == TEXT:
                if fields == 1:
                    filled = spans[k, 3] - to
                    lost[documents] = spans[k, 4]
                else:
                    _, written, lost[documents] = _read_string(
                        spans[k, 1], spans[k, 2] + 1, hi, to + filled, to_hi
                    )
                    filled = written - to
            for _ in range(gap):
                target[filled] = separator
                filled += 1
            ends[documents] = filled
            numbers[documents] = line
            id_ends[documents] = state[IDS_FILLED]
            documents += 1
        for k in range(key_count):
            if spans[k, 0] == MISSING:
                without[k, 0] += 1
            elif spans[k, 0] == NULL:
                without[k, 1] += 1
        state[RECORDS] += 1
        line += 1
        i = min(edge + 1, end)
    state[CONSUMED] = i - lo
    state[FILLED] = filled
    state[LINES] = line
    state[DOCUMENTS] = documents


def packed_keys(keys: list[str]) -> tuple[Any, Any]:
    """The keys for `texts_of_lines`."""
    encoded = [key.encode("utf-8", "surrogateescape") for key in keys]
    edges = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    return np.frombuffer(b"".join(encoded), np.uint8), edges
