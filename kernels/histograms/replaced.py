"""U+FFFD that a text holds, apart from those that stand for bytes which are no UTF-8."""

from __future__ import annotations

import numpy as np
from numba import njit

from tilewright.kernels.cpu.loops import kept
from tilewright.kernels.histograms.tokens import REPLACEMENT, Kind


@kept
@njit(nogil=True)
def _written(data, edges, start, stop, found):  # type: ignore[no-untyped-def]
    for row in range(len(found)):
        low = max(edges[row], start)
        high = edges[row + 1]
        # Its first byte is no continuation, so that a character begins there, whatever stands before it.
        for i in range(low, min(high - 2, stop)):
            if data[i] == 0xEF and data[i + 1] == 0xBF and data[i + 2] == 0xBD:
                found[row] += 1


def undecoded(
    counts: np.ndarray, kind: Kind, data: np.ndarray, edges: np.ndarray, start: int, stop: int
) -> np.ndarray:
    """How many U+FFFD in ``counts``, int64[(documents, bins)], stand for malformed bytes: int64[documents], 0 for kinds
    that do not decode.

    data, edges, start, stop: the text that was counted, as `count_host` takes it.
    """
    found = np.zeros(len(counts), np.int64)
    if kind.name != "codepoint" or not counts[:, REPLACEMENT].any():
        return found
    _written(data, edges, start, stop, found)
    return counts[:, REPLACEMENT] - found


def undecoded_rows(
    rows: np.ndarray,
    bins: np.ndarray,
    values: np.ndarray,
    kind: Kind,
    data: np.ndarray,
    edges: np.ndarray,
    first: int,
) -> dict[int, int]:
    """As `undecoded`, for counts that are not zero of rows from ``first`` on: by rows, as far as there are any."""
    if kind.name != "codepoint":
        return {}
    replaced = np.flatnonzero(bins == REPLACEMENT)
    if not len(replaced):
        return {}
    written = np.zeros(len(edges) - 1, np.int64)
    _written(data, edges, 0, len(data), written)
    lost = values[replaced] - written[rows[replaced] - first]
    return {row: each for row, each in zip(rows[replaced].tolist(), lost.tolist(), strict=True) if each}
