"""Texts out of JSON Lines: the values of some fields, with their escapes decoded, one document each.

Every line is checked to be JSON, as Python's ``json.loads(line.decode("utf-8", errors="replace"))`` checks it: what
that refuses is refused, NaN and Infinity are numbers, and of a key that stands twice the last value counts. Bytes that
are no UTF-8 are handed on as they are. Half of a surrogate pair, which Python lets stand, is no character: it becomes
U+FFFD, and is counted as lost.

No value is built but those that are wanted, and the lock is not held. Libraries that keep it (orjson, msgspec) read
with one core of a process, however many threads it has.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int64, njit, uint64

from tilewright.kernels.cpu.loops import kept
from tilewright.kernels.cpu.vectors import (
    LANES,
    backslash_mask,
    copy_bytes,
    feed_mask,
    string_mask,
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


@kept
@njit(nogil=True)
def _string_end(data, words, skip, i, stop):  # type: ignore[no-untyped-def]
    """Where the string whose first character is at ``i`` has its closing quotation mark, times two, and one more if it
    holds escapes; minus a fault's code, in the lower 8 bits, and its place above them."""
    escaped = 0
    quote = uint64(0x2222222222222222)
    backslash = uint64(0x5C5C5C5C5C5C5C5C)
    ones = uint64(0x0101010101010101)
    high = uint64(0x8080808080808080)
    blank = uint64(0x2020202020202020)
    address = data.ctypes.data
    while i < stop:
        edge = i
        if i + LANES <= stop:
            mask = string_mask(address + i)
            if mask == 0:
                i += LANES
                continue
            i += trailing_zeros(mask)
            edge = i + 1
        elif (i - skip) & 7 == 0:
            while i + 8 <= stop:
                w = words[uint64((i - skip) >> 3)]
                q = w ^ quote
                b = w ^ backslash
                # The lowest hit is a real one; a borrow may only add hits above it.
                hits = ((q - ones) & ~q) | ((b - ones) & ~b) | ((w - blank) & ~w)
                if hits & high:
                    break
                i += 8
            if i >= stop:
                break
        # What was found; or to the end of this word, byte by byte. An unsigned place spares the look whether it counts
        # from the end.
        edge = max(edge, min(stop, i + 8 - ((i - skip) & 7)))
        while i < edge:
            byte = data[uint64(i)]
            if byte == 0x22:
                return i * 2 + escaped
            if byte < 0x20:
                return -(i << 8 | CONTROL)
            if byte != 0x5C:
                i += 1
                continue
            escaped = 1
            if i + 1 >= stop:
                return -(stop << 8 | UNENDED)
            byte = data[i + 1]
            if byte == 0x75:
                for j in range(i + 2, i + 6):
                    if j >= stop:
                        return -(stop << 8 | UNENDED)
                    digit = data[j]
                    if not (0x30 <= digit <= 0x39 or 0x41 <= digit <= 0x46 or 0x61 <= digit <= 0x66):
                        return -(i << 8 | NO_ESCAPE)
                i += 6
            elif (
                byte == 0x22
                or byte == 0x5C
                or byte == 0x2F
                or byte == 0x62
                or byte == 0x66
                or byte == 0x6E
                or byte == 0x72
                or byte == 0x74
            ):
                i += 2
            else:
                return -(i << 8 | NO_ESCAPE)
    return -(stop << 8 | UNENDED)


@kept
@njit(nogil=True)
def _hexadecimal(data, i):  # type: ignore[no-untyped-def]
    value = 0
    for j in range(i, i + 4):
        digit = int(data[j])
        if digit >= 0x61:
            digit -= 0x61 - 10
        elif digit >= 0x41:
            digit -= 0x41 - 10
        else:
            digit -= 0x30
        value = value << 4 | digit
    return value


@kept
@njit(nogil=True)
def _unescape(data, start, stop, target, filled):  # type: ignore[no-untyped-def]
    """Write the characters of a valid string without its quotation marks; returns where they end, and how many were
    halves of pairs."""
    i = start
    lost = 0
    source, place, room = data.ctypes.data, target.ctypes.data, len(target)
    while i < stop:
        while i + LANES <= stop and filled + LANES <= room:
            # What is copied too much is written over.
            copy_bytes(place + filled, source + i, LANES)
            mask = backslash_mask(source + i)
            if mask:
                plain = trailing_zeros(mask)
                i += plain
                filled += plain
                break
            i += LANES
            filled += LANES
        shift = uint64(filled - i)
        here = uint64(i)
        edge = uint64(stop)
        while here < edge and data[here] != 0x5C:
            target[here + shift] = data[here]
            here += uint64(1)
        filled += int64(here) - i
        i = int64(here)
        if i == stop:
            break
        byte = data[i + 1]
        if byte != 0x75:
            if byte == 0x62:
                byte = np.uint8(0x08)
            elif byte == 0x66:
                byte = np.uint8(0x0C)
            elif byte == 0x6E:
                byte = np.uint8(0x0A)
            elif byte == 0x72:
                byte = np.uint8(0x0D)
            elif byte == 0x74:
                byte = np.uint8(0x09)
            target[filled] = byte
            filled += 1
            i += 2
            continue
        code = _hexadecimal(data, i + 2)
        i += 6
        if 0xD800 <= code < 0xDC00 and i + 6 <= stop and data[i] == 0x5C and data[i + 1] == 0x75:
            low = _hexadecimal(data, i + 2)
            if 0xDC00 <= low < 0xE000:
                code = 0x10000 + ((code - 0xD800) << 10 | (low - 0xDC00))
                i += 6
        if 0xD800 <= code < 0xE000:
            code = 0xFFFD
            lost += 1
        if code < 0x80:
            target[filled] = code
            filled += 1
        elif code < 0x800:
            target[filled] = 0xC0 | code >> 6
            target[filled + 1] = 0x80 | code & 0x3F
            filled += 2
        elif code < 0x10000:
            target[filled] = 0xE0 | code >> 12
            target[filled + 1] = 0x80 | code >> 6 & 0x3F
            target[filled + 2] = 0x80 | code & 0x3F
            filled += 3
        else:
            target[filled] = 0xF0 | code >> 18
            target[filled + 1] = 0x80 | code >> 12 & 0x3F
            target[filled + 2] = 0x80 | code >> 6 & 0x3F
            target[filled + 3] = 0x80 | code & 0x3F
            filled += 4
    return filled, lost


@kept
@njit(nogil=True)
def _is_word(data, i, stop, word):  # type: ignore[no-untyped-def]
    if i + len(word) > stop:
        return False
    for j in range(len(word)):  # noqa: SIM110 (Numba)
        if data[i + j] != word[j]:
            return False
    return True


@kept
@njit(nogil=True)
def _digits_end(data, i, stop):  # type: ignore[no-untyped-def]
    while i < stop and 0x30 <= data[i] <= 0x39:
        i += 1
    return i


@kept
@njit(nogil=True)
def _number_end(data, i, stop):  # type: ignore[no-untyped-def]
    """Where the number that begins at ``i`` ends, or -1."""
    if data[i] == 0x2D:
        i += 1
        if i < stop and data[i] == 0x49:
            return i + 8 if _is_word(data, i, stop, INFINITY) else -1
    end = _digits_end(data, i, stop)
    if end == i:
        return -1
    if data[i] == 0x30:
        end = i + 1  # a zero stands alone
    i = end
    if i < stop and data[i] == 0x2E:
        end = _digits_end(data, i + 1, stop)
        if end == i + 1:
            return -1
        i = end
    if i < stop and (data[i] == 0x65 or data[i] == 0x45):
        j = i + 1
        if j < stop and (data[j] == 0x2B or data[j] == 0x2D):
            j += 1
        end = _digits_end(data, j, stop)
        if end == j:
            return -1
        i = end
    return i


INFINITY = np.frombuffer(b"Infinity", np.uint8)
NAN = np.frombuffer(b"NaN", np.uint8)
TRUE = np.frombuffer(b"true", np.uint8)
FALSE = np.frombuffer(b"false", np.uint8)
NOTHING = np.frombuffer(b"null", np.uint8)


@kept
@njit(nogil=True)
def _key_at(data, start, stop, escaped, keys, key_edges, scratch):  # type: ignore[no-untyped-def]
    """The number of the wanted key that stands there, or -1."""
    length = stop - start
    source, begin = data, start
    if escaped:
        if length > len(scratch):
            return -1
        length, _ = _unescape(data, start, stop, scratch, 0)
        source, begin = scratch, 0
    for k in range(len(key_edges) - 1):
        if key_edges[k + 1] - key_edges[k] != length:
            continue
        same = True
        for j in range(length):
            if source[begin + j] != keys[key_edges[k] + j]:
                same = False
                break
        if same:
            return k
    return -1


@kept
@njit(nogil=True)
def _object(data, words, skip, start, stop, keys, key_edges, spans, stack, scratch):  # type: ignore[no-untyped-def]
    """Check that a line is a JSON object, and find the wanted values.

    Returns 0; or a fault's code, in the lower 8 bits, and its place above them. ``spans``, int64[(keys, 3)], gets what
    each value is, with 16 more if it holds escapes, and where it begins and ends (a text without its quotation marks).
    """
    for k in range(len(key_edges) - 1):
        spans[k, 0] = MISSING
    depth = 0
    wanted = -1  # the number of the key whose value comes next, at the top
    # What may come next: 0 a value, 1 a value or the end of a list, 2 a key or the end of an object, 3 a key, 4 a comma
    # or an end.
    state = 0
    i = start
    while True:
        while i < stop and (data[i] == 0x20 or data[i] == 0x09 or data[i] == 0x0D or data[i] == 0x0A):
            i += 1
        if i >= stop:
            return stop << 8 | UNENDED
        byte = data[i]
        if state == 2 or state == 3:
            if byte == 0x7D and state == 2:
                depth -= 1
                if depth == 1 and wanted >= 0:
                    spans[wanted, 2] = i + 1
                    wanted = -1
                i += 1
                state = 4
                if depth == 0:
                    break
                continue
            if byte != 0x22:
                return i << 8 | NO_KEY
            end = _string_end(data, words, skip, i + 1, stop)
            if end < 0:
                return -end
            if depth == 1:
                wanted = _key_at(data, i + 1, end >> 1, end & 1, keys, key_edges, scratch)
            i = (end >> 1) + 1
            while i < stop and (data[i] == 0x20 or data[i] == 0x09 or data[i] == 0x0D or data[i] == 0x0A):
                i += 1
            if i >= stop:
                return stop << 8 | UNENDED
            if data[i] != 0x3A:
                return i << 8 | NO_COLON
            i += 1
            state = 0
            continue
        if state == 4:
            if byte == 0x2C:
                i += 1
                state = 3 if stack[depth - 1] == OBJECT else 0
                continue
            if byte != (0x7D if stack[depth - 1] == OBJECT else 0x5D):
                return i << 8 | NO_COMMA
            depth -= 1
            i += 1
            if depth == 1 and wanted >= 0:
                spans[wanted, 2] = i
                wanted = -1
            if depth == 0:
                break
            continue
        if state == 1 and byte == 0x5D:
            depth -= 1
            i += 1
            if depth == 1 and wanted >= 0:
                spans[wanted, 2] = i
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
            if depth == len(stack):
                return i << 8 | TOO_DEEP
            if found:
                spans[wanted, 0] = kind
                spans[wanted, 1] = i
            stack[depth] = kind
            depth += 1
            i += 1
            state = 2 if kind == OBJECT else 1
            continue
        if depth == 0:
            return i << 8 | (ENCODED if byte >= 0x80 or byte == 0 else NO_OBJECT)
        begin = i
        if byte == 0x22:
            end = _string_end(data, words, skip, i + 1, stop)
            if end < 0:
                return -end
            if found:
                spans[wanted, 0] = TEXT + 16 * (end & 1)
                spans[wanted, 1] = i + 1
                spans[wanted, 2] = end >> 1
            i = (end >> 1) + 1
        else:
            if byte == 0x2D or 0x30 <= byte <= 0x39:
                kind = NUMBER
                i = _number_end(data, i, stop)
                if i < 0:
                    return begin << 8 | NO_NUMBER
            elif byte == 0x74 and _is_word(data, i, stop, TRUE):
                kind = TRUTH
                i += 4
            elif byte == 0x66 and _is_word(data, i, stop, FALSE):
                kind = TRUTH
                i += 5
            elif byte == 0x6E and _is_word(data, i, stop, NOTHING):
                kind = NULL
                i += 4
            elif byte == 0x4E and _is_word(data, i, stop, NAN):
                kind = NUMBER
                i += 3
            elif byte == 0x49 and _is_word(data, i, stop, INFINITY):
                kind = NUMBER
                i += 8
            else:
                return begin << 8 | NO_VALUE
            if found:
                spans[wanted, 0] = kind
                spans[wanted, 1] = begin
                spans[wanted, 2] = i
        if found:
            wanted = -1
        state = 4
    while i < stop:
        if not (data[i] == 0x20 or data[i] == 0x09 or data[i] == 0x0D or data[i] == 0x0A):
            return i << 8 | MORE
        i += 1
    return 0


@kept
@njit(nogil=True)
def newline_from(data, words, skip, i, stop):  # type: ignore[no-untyped-def]
    """Where the first newline in ``data[i:stop]`` stands, or -1."""
    newline = uint64(0x0A0A0A0A0A0A0A0A)
    ones = uint64(0x0101010101010101)
    high = uint64(0x8080808080808080)
    address = data.ctypes.data
    while i + LANES <= stop:
        mask = feed_mask(address + i)
        if mask:
            return i + trailing_zeros(mask)
        i += LANES
    while i < stop and (i - skip) & 7:
        if data[i] == 0x0A:
            return i
        i += 1
    while i + 8 <= stop:
        w = words[uint64((i - skip) >> 3)] ^ newline
        if (w - ones) & ~w & high:
            break
        i += 8
    while i < stop:
        if data[i] == 0x0A:
            return i
        i += 1
    return -1


@kept
@njit(nogil=True)
def texts_of_lines(  # type: ignore[no-untyped-def]
    data, words, skip, start, stop, final, keys, key_edges, fields, target, gap, separator, most,
    ends, numbers, lost, ids, id_ends, spans, stack, scratch, without, state,
):  # fmt: skip
    """Write the texts of the fields of whole lines in ``data[start:stop]`` to the target, one document each.

    It ends before a line whose texts have no room in the target (NO_ROOM), before one that would make more than
    ``most`` documents, at one with a fault, and where no whole line is left: with ``final`` the last needs no newline.

    Parameters
    ----------
    data, words, skip
        uint8; ``data[skip:]`` as aligned 64-bit words.
    keys, key_edges
        The wanted keys, uint8 end to end; int64, where each begins and the last ends. The first ``fields`` of them are
        texts; one more, if there is one, is the identifier.
    target
        uint8, written. Behind each document stand ``gap`` bytes of the value ``separator``.
    ends, numbers, lost
        int64[most], written: where each document ends, behind its separator; its line, 0 being the first of the call;
        how many characters of it were lost.
    ids, id_ends
        uint8, int64[most], written, if there is one key more than fields: the identifiers of the documents, in UTF-8,
        and where each ends. It is the text, or another value as it is written, and nothing where there is none.
    spans, stack, scratch
        int64[(keys, 3)], uint8[DEEPEST], uint8 of six times the longest key: memory to work in.
    without
        int64[(keys, 2)], added to: the lines whose object lacks each key, and those that hold null there.
    state
        int64[STATE_LENGTH], written.
    """
    state[:] = 0
    i = start
    filled = 0
    documents = 0
    line = 0
    while i < stop and documents + fields <= most:
        edge = newline_from(data, words, skip, i, stop)
        if edge < 0:
            if not final:
                break
            edge = stop
        first = i
        while first < edge and (data[first] == 0x20 or data[first] == 0x09 or data[first] == 0x0D):
            first += 1
        if first == edge:
            line += 1
            i = min(edge + 1, stop)
            continue
        # Texts only get shorter when their escapes are decoded, and each has two quotation marks.
        if filled + (edge - i) + fields * gap > len(target):
            state[CODE] = NO_ROOM
            break
        fault = _object(data, words, skip, first, edge, keys, key_edges, spans, stack, scratch)
        if fault == 0:
            for k in range(fields):
                kind = spans[k, 0] & 15
                if kind > NULL:
                    fault = spans[k, 1] << 8 | NO_TEXT
                    state[FIELD] = k
                    state[KIND] = kind
                    break
        if fault != 0:
            state[CODE] = fault & 255
            state[PLACE] = (fault >> 8) - i
            break
        wants_id = len(key_edges) - 1 > fields
        id_start = state[IDS_FILLED]
        if wants_id:
            if (
                id_start + spans[fields, 2] - spans[fields, 1] > len(ids)
                and (spans[fields, 0] & 15) != MISSING
            ):
                state[CODE] = NO_ROOM
                break
            if spans[fields, 0] & 15 == TEXT:
                state[IDS_FILLED], _ = _unescape(data, spans[fields, 1], spans[fields, 2], ids, id_start)
            elif spans[fields, 0] > NULL:
                for j in range(spans[fields, 1], spans[fields, 2]):
                    ids[state[IDS_FILLED]] = data[j]
                    state[IDS_FILLED] += 1
        for k in range(fields):
            lost[documents] = 0
            if spans[k, 0] == TEXT:
                length = spans[k, 2] - spans[k, 1]
                copy_bytes(target.ctypes.data + filled, data.ctypes.data + spans[k, 1], length)
                filled += length
            elif spans[k, 0] & 15 == TEXT:
                filled, lost[documents] = _unescape(data, spans[k, 1], spans[k, 2], target, filled)
            for _ in range(gap):
                target[filled] = separator
                filled += 1
            ends[documents] = filled
            numbers[documents] = line
            id_ends[documents] = state[IDS_FILLED]
            documents += 1
        for k in range(len(key_edges) - 1):
            if spans[k, 0] == MISSING:
                without[k, 0] += 1
            elif spans[k, 0] == NULL:
                without[k, 1] += 1
        state[RECORDS] += 1
        line += 1
        i = min(edge + 1, stop)
    state[CONSUMED] = i
    state[FILLED] = filled
    state[LINES] = line
    state[DOCUMENTS] = documents


def words_of(data: np.ndarray) -> tuple[np.ndarray, int]:
    """``data[skip:]``, uint8, as aligned 64-bit words, and skip."""
    skip = min(-data.ctypes.data % 8, len(data))
    return data[skip : skip + (len(data) - skip) // 8 * 8].view(np.uint64), skip


def packed_keys(keys: list[str]) -> tuple[Any, Any]:
    """The keys for `texts_of_lines`."""
    encoded = [key.encode("utf-8", "surrogateescape") for key in keys]
    edges = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    return np.frombuffer(b"".join(encoded), np.uint8), edges
