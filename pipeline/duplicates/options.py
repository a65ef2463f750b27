"""What duplicates are looked for, checked before anything is listed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.kernels.arguments import as_count, check_choice, check_flag, shown
from tilewright.kernels.choices import FORMS, HASHES, PAIRS, SCHEMES, SHINGLES, FormName
from tilewright.kernels.histograms.token_kinds import UNICODE, TokenKind
from tilewright.pipeline.duplicates.bands import best_bands
from tilewright.pipeline.errors import OptionError

if TYPE_CHECKING:
    from tilewright.kernels.duplicates.signing import Signing

MOST_NGRAM = 1000
MOST_PERM = 4096
MOST_SEED = 2**32 - 1


@dataclass(frozen=True)
class Options:
    """It travels with every task."""

    threshold: float
    kind: TokenKind
    """Words or characters, and how many a shingle has."""
    num_perm: int
    bands: int
    rows: int
    seed: int
    hash: str
    scheme: str
    pairs: str
    signatures: bool
    """Whether the result has them."""

    @property
    def signing(self) -> Signing:
        """How documents are signed. It needs Numba, which a client has no use for."""
        from tilewright.kernels.duplicates.signing import Signing

        return Signing(self.kind, self.hash, self.scheme, self.num_perm, self.seed, self.bands, self.rows)

    def facts(self) -> dict[str, Any]:
        """As JSON types, with Unicode's version where that says what is a word or how texts are folded."""
        kind = self.kind
        asks_unicode = kind.unit == "word" or kind.casefold or kind.normalise is not None
        return {
            "shingle": kind.unit,
            "ngram": kind.n,
            "casefold": kind.casefold,
            "normalise": kind.normalise,
            "unicode": UNICODE if asks_unicode else None,
            "threshold": self.threshold,
            "num_perm": self.num_perm,
            "bands": self.bands,
            "rows": self.rows,
            "seed": self.seed,
            "hash": self.hash,
            "scheme": self.scheme,
        }


def options_of(
    *,
    threshold: float,
    shingle: str,
    ngram: int,
    casefold: bool,
    normalise: FormName | None,
    num_perm: int,
    bands: int | None,
    rows: int | None,
    seed: int,
    hash: str,
    scheme: str,
    pairs: str,
    signatures: bool,
) -> Options:
    """What a user says, checked.

    Raises
    ------
    OptionError
        A value that means nothing, or two that exclude each other.
    """
    limit = _threshold(threshold)
    check_choice("shingle", shingle, SHINGLES, "unit of shingles")
    n = _count("ngram", ngram, 1, MOST_NGRAM, "units of a shingle")
    casefold = check_flag("casefold", casefold)
    if normalise is not None:
        check_choice("normalise", normalise, FORMS)
    perm = _count("num_perm", num_perm, 1, MOST_PERM, "numbers of a signature")
    if (bands is None) != (rows is None):
        raise OptionError(
            f"bands={shown(bands)} and rows={shown(rows)}: give both, or neither, so that the threshold decides"
        )
    if bands is None:
        cut = best_bands(limit, perm)
    else:
        cut = (
            _count("bands", bands, 1, MOST_PERM, "bands of a signature"),
            _count("rows", rows, 1, MOST_PERM, "rows of a band"),
        )
        if cut[0] * cut[1] > perm:
            raise OptionError(
                f"bands={cut[0]} of rows={cut[1]} take {cut[0] * cut[1]} numbers, and a signature has"
                f" num_perm={perm}; give fewer, or a larger num_perm"
            )
    return Options(
        limit,
        TokenKind("shingle", shingle, n, casefold, normalise),
        perm,
        *cut,
        _count("seed", seed, 0, MOST_SEED, "seeds"),
        check_choice("hash", hash, HASHES, "hash of shingles"),
        check_choice("scheme", scheme, SCHEMES, "scheme of permutations"),
        check_choice("pairs", pairs, PAIRS, "choice of pairs"),
        check_flag("signatures", signatures),
    )


def _threshold(value: Any) -> float:
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not is_number or not 0 < value <= 1:
        raise OptionError(
            f"threshold={shown(value)} is no Jaccard index above 0 and up to 1; give one such as 0.8"
        )
    return float(value)


def _count(name: str, value: Any, least: int, most: int, what: str) -> int:
    found = as_count(value)
    if found is None or not least <= found <= most:
        raise OptionError(f"{name}={shown(value)} is no whole number of {what} from {least} to {most}")
    return found
