"""Records of a WARC file, one document each: their headers are read and their texts copied by a loop, wherever a buffer
ends.

Format: ISO 28500 (WARC 1.0 and 1.1): a version, fields, an empty line, and as many bytes as Content-Length says; then
empty lines. A header that is not as most are, by a line that goes on, a name with other characters than ASCII's, or a
fault, is left to the caller.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit

from tilewright.kernels.cpu.loops import kept
from tilewright.kernels.cpu.vectors import load_byte, memcpy
from tilewright.kernels.records.json_lines import newline_from

NEXT, MORE, ODD = range(3)
"""Why a call ended: the target is full, or has as many documents as are wanted; more bytes are needed; there is a
header that the loop does not read."""

CODE, CONSUMED, FILLED, DOCUMENTS, RECORDS, PASSED, LEFT, SKIPPED, IDS = range(9)
"""Places in ``state``: one of the above; bytes of the source and of the target that are done with; documents that
ended; records that began since the beginning of the file, and how many of them hold no text; bytes of the text under
way that are not copied yet, or -1 without any; bytes to be passed over before the next header; bytes of identifiers."""
STATE_LENGTH = 9

_NAMES = (b"warc-type", b"content-length", b"content-type", b"application/http", b"HTTP/", b"WARC/")
_TYPE, _LENGTH, _CONTENT, _OVER_HTTP, _HTTP, _VERSION = range(6)
_FIRST_TYPE = 6


def packed_words(types: Sequence[str], id_field: str | None) -> tuple[np.ndarray, np.ndarray]:
    """What the loop looks for in headers, uint8, and where each begins and the last ends, int64: names in small
    letters, of ASCII alone, then the types of records that are documents, and last the name of the field that
    identifies records, if there is one."""
    words = (*_NAMES, *(each.encode() for each in types), (id_field or "").lower().encode("ascii"))
    return np.frombuffer(b"".join(words), np.uint8), np.cumsum([0, *map(len, words)])


@njit(nogil=True)
def _small(byte):  # type: ignore[no-untyped-def]
    return byte | 0x20 if 0x41 <= byte <= 0x5A else byte


@njit(nogil=True)
def _is_blank(byte):  # type: ignore[no-untyped-def]
    """As ``bytes.strip`` has it."""
    return byte == 0x20 or 0x09 <= byte <= 0x0D


@njit(nogil=True)
def _begins(lo, hi, words, edges, word):  # type: ignore[no-untyped-def]
    """Whether the bytes from address ``lo`` to ``hi`` begin with a word."""
    first = edges[word]
    n = edges[word + 1] - first
    if hi - lo < n:
        return False
    k = 0
    while k < n and load_byte(lo + k) == words[first + k]:
        k += 1
    return k == n


@njit(nogil=True)
def _is(lo, hi, words, edges, word):  # type: ignore[no-untyped-def]
    """Whether the bytes from address ``lo`` to ``hi`` are a word, in letters of any case."""
    first = edges[word]
    n = edges[word + 1] - first
    if n == 0 or hi - lo != n:
        return False
    k = 0
    while k < n and _small(load_byte(lo + k)) == words[first + k]:
        k += 1
    return k == n


@njit(nogil=True)
def _is_over_http(lo, hi, words, edges):  # type: ignore[no-untyped-def]
    """Whether a value, but for its blanks, begins with the type of HTTP's messages."""
    k = edges[_OVER_HTTP]
    while lo < hi and k < edges[_OVER_HTTP + 1]:
        byte = load_byte(lo)
        if byte != 0x20:
            if _small(byte) != words[k]:
                return False
            k += 1
        lo += 1
    return k == edges[_OVER_HTTP + 1]


@njit(nogil=True)
def _number(lo, hi):  # type: ignore[no-untyped-def]
    """The number of fewer than 19 digits that a value is, or -1."""
    if hi <= lo or hi - lo >= 19:
        return np.int64(-1)
    value = np.int64(0)
    for p in range(lo, hi):
        digit = load_byte(p) - 0x30
        if not 0 <= digit <= 9:
            return np.int64(-1)
        value = 10 * value + digit
    return value


@njit(nogil=True)
def behind_http(lo, hi):  # type: ignore[no-untyped-def]
    """Where HTTP's header ends, which ends with an empty line, in a text from address ``lo`` to ``hi``; ``lo`` where
    none does."""
    p = lo
    while p + 1 < hi:
        byte = load_byte(p)
        if byte == 0x0A and load_byte(p + 1) == 0x0A:
            return p + 2
        if (
            byte == 0x0D
            and p + 3 < hi
            and load_byte(p + 1) == 0x0A
            and load_byte(p + 2) == 0x0D
            and load_byte(p + 3) == 0x0A
        ):
            return p + 4
        p += 1
    return lo


@kept
@njit(nogil=True)
def texts_of_records(  # type: ignore[no-untyped-def]
    data, start, stop, final, reads, most_header, http, words, edges,
    target, gap, separator, ends, numbers, ids, id_ends, state,
):  # fmt: skip
    """Copy the texts of the records in ``data[start:stop]`` to the target, one behind the other. With ``final`` nothing
    follows; without ``reads`` every header is left to the caller. most_header, http: the most bytes of a header, and
    within how many of a text HTTP's ends.

    data: uint8. words, edges: `packed_words`. target: uint8, written; behind each document stand ``gap`` bytes of the
    value ``separator``. ends, numbers: int64, as long as documents are wanted, written: where each ends, behind its
    separator, and which record it is, counted from 1. ids: uint8, written, as long as what is read, or empty; id_ends:
    int64, as long as ``ends``, written: where the identifiers of the records that are read here end there, -1 - that
    where one has none. The record that is under way when the loop is called was read before; its document, if it ends,
    is the first. state: int64[STATE_LENGTH], of which RECORDS, PASSED, LEFT and SKIPPED go on from call to call.
    """
    base = np.int64(data.ctypes.data)
    out = np.int64(target.ctypes.data)
    room = len(target) - gap
    filled = 0
    documents = 0
    i = start
    code = NEXT
    state[IDS] = 0
    while documents < len(ends) and filled <= room:
        if state[SKIPPED] > 0:
            step = min(state[SKIPPED], stop - i)
            state[SKIPPED] -= step
            i += step
            if state[SKIPPED] > 0:
                code = MORE
                break
        if state[LEFT] >= 0:
            step = min(state[LEFT], min(stop - i, room - filled))
            memcpy(out + filled, base + i, step)
            filled += step
            i += step
            state[LEFT] -= step
            if state[LEFT] > 0:
                if filled < room:
                    code = MORE
                break
            for _ in range(gap):
                target[filled] = separator
                filled += 1
            ends[documents] = filled
            numbers[documents] = state[RECORDS]
            documents += 1
            state[LEFT] = -1
            continue
        if not reads:
            code = ODD
            break
        # Empty lines.
        while i < stop and (data[i] == 0x0A or (data[i] == 0x0D and i + 1 < stop and data[i + 1] == 0x0A)):
            i += 1 if data[i] == 0x0A else 2
        line = i
        newline = newline_from(data, line, stop)
        if newline < 0 or not _begins(base + line, base + newline, words, edges, _VERSION):
            code = ODD if newline >= 0 or final or stop - i > most_header else MORE
            break
        length = np.int64(-1)
        counted = False
        over_http = False
        id_first = np.int64(-1)
        id_last = np.int64(-1)
        while True:
            line = newline + 1
            newline = newline_from(data, line, stop)
            if newline < 0 or newline + 1 - i > most_header:
                code = ODD if newline >= 0 or final or stop - i > most_header else MORE
                break
            if newline == line or (newline == line + 1 and data[line] == 0x0D):
                break
            colon = line
            is_odd = data[line] == 0x20 or data[line] == 0x09
            while colon < newline and data[colon] != 0x3A:
                is_odd |= data[colon] >= 0x80
                colon += 1
            if is_odd or colon == newline:
                code = ODD
                break
            key = base + line
            key_end = base + colon
            while key < key_end and _is_blank(load_byte(key)):
                key += 1
            while key < key_end and _is_blank(load_byte(key_end - 1)):
                key_end -= 1
            value = base + colon + 1
            value_end = base + newline
            while value < value_end and _is_blank(load_byte(value)):
                value += 1
            while value < value_end and _is_blank(load_byte(value_end - 1)):
                value_end -= 1
            if _is(key, key_end, words, edges, _LENGTH):
                length = _number(value, value_end)
            if _is(key, key_end, words, edges, _TYPE):
                counted = False
                for kind in range(_FIRST_TYPE, len(edges) - 2):
                    counted |= _is(value, value_end, words, edges, kind)
            if _is(key, key_end, words, edges, _CONTENT):
                over_http = _is_over_http(value, value_end, words, edges)
            if _is(key, key_end, words, edges, len(edges) - 2):
                id_first = value
                id_last = value_end
        if code != NEXT:
            break
        if length < 0:
            code = ODD
            break
        body = newline + 1
        skipped = np.int64(0)
        if counted and over_http:
            head = min(length, http)
            if stop - body < head and not final:
                code = MORE
                break
            lo = base + body
            hi = lo + min(head, stop - body)
            if _begins(lo, hi, words, edges, _HTTP):
                skipped = behind_http(lo, hi) - lo
        state[RECORDS] += 1
        i = body
        if not counted:
            state[PASSED] += 1
            state[SKIPPED] = length
            continue
        state[SKIPPED] = skipped
        state[LEFT] = length - skipped
        if len(ids):
            n = max(0, id_last - id_first)
            memcpy(np.int64(ids.ctypes.data) + state[IDS], id_first, n)
            state[IDS] += n
            id_ends[documents] = state[IDS] if id_first >= 0 else -1 - state[IDS]
    state[CODE] = code
    state[CONSUMED] = i
    state[FILLED] = filled
    state[DOCUMENTS] = documents
