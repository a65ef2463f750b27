"""Into how many bands of how many rows a signature is cut, so that documents of a Jaccard index above a threshold agree
in one of them (Rajaraman and Ullman, "Mining of Massive Datasets", chapter 3).

Two documents of Jaccard index s agree in all of a band's r rows with a chance of about s^r, and in one of b bands with
1 - (1 - s^r)^b.
"""

from __future__ import annotations

RECALL = 0.99
"""The least share of pairs just at the threshold that are to be compared: what is not is missed, and what is compared
in vain costs little, since most documents of a corpus have no shingle in common."""


def chance(s: float, bands: int, rows: int) -> float:
    """That documents of Jaccard index ``s`` agree in a band."""
    return float(1 - (1 - s**rows) ** bands)


def best_bands(threshold: float, num_perm: int) -> tuple[int, int]:
    """The bands and rows, together at most ``num_perm``: as many rows, which keep what is not near from being compared,
    as leave pairs at the threshold a chance of `RECALL`; one where none do."""
    for rows in range(num_perm, 1, -1):
        bands = num_perm // rows
        if chance(threshold, bands, rows) >= RECALL:
            return bands, rows
    return num_perm, 1
