"""Texts that lie end to end, copied to where documents are counted."""

from __future__ import annotations

from numba import njit

from tilewright.kernels.cpu.loops import kept


@kept
@njit(nogil=True)
def gather(data, edges, first, done, target, gap, separator, ends):  # type: ignore[no-untyped-def]
    """Copy texts from ``first`` on, of which ``done`` bytes were copied before, until the target is full or as many
    have ended as ``ends`` has room for.

    data: uint8; text i is ``data[edges[i]:edges[i + 1]]``. target: uint8, written; behind each text stand ``gap`` bytes
    of the value ``separator``. ends: int64, written: where each text ends, behind its separator. Returns how many bytes
    were written, how many texts ended, and how much of the next was copied.
    """
    room = len(target) - gap
    filled = 0
    count = 0
    while count < len(ends) and filled <= room:
        begin = edges[first + count] + done
        length = min(edges[first + count + 1] - begin, room - filled)
        target[filled : filled + length] = data[begin : begin + length]
        filled += length
        if begin + length < edges[first + count + 1]:
            return filled, count, done + length
        for _ in range(gap):
            target[filled] = separator
            filled += 1
        ends[count] = filled
        count += 1
        done = 0
    return filled, count, 0
