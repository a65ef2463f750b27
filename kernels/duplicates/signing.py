"""Signatures of documents and the keys of their bands: how they are wanted, what they are, and how cores make them.

A GPU makes the same (`device_signing.py`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from tilewright.kernels.duplicates.minhash import Permutations, band_keys, permutations_of, signatures_of
from tilewright.kernels.duplicates.shingles import shingles_of
from tilewright.kernels.histograms.token_kinds import TokenKind


@dataclass(frozen=True)
class Signing:
    """How documents are signed."""

    kind: TokenKind
    """Words or characters, and how many a shingle has."""
    hash: str
    """One of `choices.HASHES`."""
    scheme: str
    """One of `choices.SCHEMES`."""
    num_perm: int
    seed: int
    bands: int
    rows: int

    @property
    def permutations(self) -> Permutations:
        return _permutations(self.scheme, self.num_perm, self.seed)


@functools.lru_cache(maxsize=8)
def _permutations(scheme: str, count: int, seed: int) -> Permutations:
    return permutations_of(scheme, count, seed)


@dataclass(frozen=True, eq=False)
class Signs:
    """Of some documents."""

    shingled: np.ndarray
    """bool: whether it has shingles."""
    keys: np.ndarray
    """uint64[(bands, documents)]: two documents agree in a band where its keys are the same."""
    signatures: np.ndarray | None
    """uint32[(documents, num_perm)], where they are wanted."""
    others: int = 0
    """Documents that the cores signed though a GPU was to."""


def sign_on_cores(data: np.ndarray, edges: np.ndarray, signing: Signing, *, signatures: bool) -> Signs:
    """Sign the documents ``data[edges[d]:edges[d + 1]]``, uint8. signatures: whether they are wanted themselves."""
    shingles = shingles_of(data, edges, signing.kind)
    each = signatures_of(shingles.hashes(signing.hash), shingles.edges, signing.permutations)
    keys = band_keys(each, signing.bands, signing.rows)
    return Signs(np.diff(shingles.edges) > 0, keys, each if signatures else None)
