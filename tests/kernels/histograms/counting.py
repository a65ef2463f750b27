"""Tokens of whole documents, by the counter that the product uses."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tilewright.kernels.histograms.token_counting import TokenCounter, TokenCounts
from tilewright.kernels.histograms.token_kinds import TokenKind


def counts_of(documents: Iterable[np.ndarray], kind: TokenKind) -> TokenCounts:
    """The tokens of several documents, each uint8[n]."""
    counter = TokenCounter(kind)
    for document in documents:
        counter.begin()
        counter.stretch(document, ends=True)
    return counter.take()
