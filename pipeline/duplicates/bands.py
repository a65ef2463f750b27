"""Into how many bands of how many rows a signature is cut, so that documents of a Jaccard index above a threshold agree
in one of them (Rajaraman and Ullman, "Mining of Massive Datasets", chapter 3).

Two documents of Jaccard index s agree in all of a band's r rows with a chance of about s^r, and in one of b bands with
1 - (1 - s^r)^b.
"""

from __future__ import annotations

import numpy as np

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(96)
"""Of a rule that is exact for polynomials of a degree below 192; the curves are steep, but smooth."""


def chance(s: float, bands: int, rows: int) -> float:
    """That documents of Jaccard index ``s`` agree in a band."""
    return float(1 - (1 - s**rows) ** bands)


def best_bands(threshold: float, num_perm: int) -> tuple[int, int]:
    """The bands and rows, together at most ``num_perm``, for which the chances of agreeing below the threshold and of
    not agreeing above it, both integrated over s, have the least sum, as in datasketch's ``MinHashLSH``."""
    below = (_NODES + 1) / 2 * threshold
    above = threshold + (_NODES + 1) / 2 * (1 - threshold)
    best, found = np.inf, (1, 1)
    for bands in range(1, num_perm + 1):
        rows = np.arange(1, num_perm // bands + 1)[:, None]
        false_positive = (1 - (1 - below**rows) ** bands) @ _WEIGHTS * threshold / 2
        false_negative = (1 - above**rows) ** bands @ _WEIGHTS * (1 - threshold) / 2
        error = false_positive + false_negative
        place = int(np.argmin(error))
        if error[place] < best:
            best, found = float(error[place]), (bands, place + 1)
    return found
