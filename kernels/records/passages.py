"""Passages of a text, one document each: its lines, or its paragraphs, cut wherever a buffer ends."""

from __future__ import annotations

from numba import njit

from tilewright.kernels.cpu.loops import kept
from tilewright.kernels.cpu.vectors import memcpy
from tilewright.kernels.records.json_lines import newline_from

LINE, PARAGRAPH = range(2)
"""What a passage is. A line ends before its newline, and before a carriage return in front of that; the last needs no
newline, unless it is empty. Paragraphs consist of lines, and lines with nothing but spaces and tabs stand between
them."""

CONSUMED, FILLED, DOCUMENTS, LINES, INSIDE = range(5)
"""Places in ``state``: bytes of the source and of the target that are done with; documents that ended; newlines before
what is next, since the beginning of the text; whether a passage has begun and not ended."""
BEGUN = 5
"""The line in which the passage under way began, counted from 0."""
STATE_LENGTH = 6


@kept
@njit(nogil=True)
def cut_passages(  # type: ignore[no-untyped-def]
    data, start, stop, final, what, target, gap, separator, most, ends, numbers, state
):  # fmt: skip
    """Copy the passages in ``data[start:stop]`` to the target, one behind the other, without what ends them.

    It ends where the target is full, ``most`` documents have ended, or nothing is left of which one can tell what it
    is: a carriage return may end a line, and spaces may stand between paragraphs. With ``final`` nothing follows.

    data: uint8. what: LINE or PARAGRAPH. target: uint8, written;
    behind each document stand ``gap`` bytes of the value ``separator``. ends, numbers: int64[most], written: where each
    document ends, behind its separator, and its first line, counted from 0. state: int64[STATE_LENGTH], of which LINES,
    INSIDE and BEGUN go on from call to call.
    """
    room = len(target) - gap
    filled = 0
    documents = 0
    i = start
    while documents < most:
        if not state[INSIDE]:
            if what == PARAGRAPH:
                j = i
                while j < stop and (data[j] == 0x20 or data[j] == 0x09 or data[j] == 0x0D or data[j] == 0x0A):
                    if data[j] == 0x0A:
                        state[LINES] += 1
                        i = j + 1
                    j += 1
                if j == stop:
                    if final:
                        i = stop
                    break
            elif i == stop:
                break
            state[INSIDE] = 1
            state[BEGUN] = state[LINES]
        newline = newline_from(data, i, stop)
        end = stop if newline < 0 else newline
        text_end = end
        if end > i and data[end - 1] == 0x0D and (newline >= 0 or not final):
            text_end = end - 1  # it may belong to what ends the line
        length = min(text_end - i, room - filled)
        if length > 0:
            memcpy(target.ctypes.data + filled, data.ctypes.data + i, length)
            filled += length
            i += length
        if i < text_end:
            break  # no room
        if newline < 0 and not final:
            break
        if what == PARAGRAPH and newline >= 0:
            j = newline + 1
            while j < stop and (data[j] == 0x20 or data[j] == 0x09 or data[j] == 0x0D):
                j += 1
            if j == stop and not final:
                break
            if j < stop and data[j] != 0x0A:  # the paragraph goes on
                while i <= newline and filled < room:
                    target[filled] = data[i]
                    filled += 1
                    i += 1
                if i <= newline:
                    break
                state[LINES] += 1
                continue
        # The passage ends here; with nothing to come, a carriage return belongs to it.
        if filled > room:
            break
        for _ in range(gap):
            target[filled] = separator
            filled += 1
        room = len(target) - gap
        ends[documents] = filled
        numbers[documents] = state[BEGUN]
        documents += 1
        state[INSIDE] = 0
        i = end
        if newline >= 0:
            i = newline + 1
            state[LINES] += 1
    state[CONSUMED] = i
    state[FILLED] = filled
    state[DOCUMENTS] = documents
