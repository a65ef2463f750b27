"""Duplicates at the edges of what may be asked for and of what documents may be: as a comparison of every two finds
them, and signatures as datasketch's."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from tests.kernels.duplicates import naive_shingles as naive
from tests.pipeline.duplicates.test_job import DEFAULTS, check, find

E_ACUTE = ("\u00e9", "e\u0301")
HANGUL = "\ud55c\uad6d\uc5b4 \ubb38\uc11c \ud558\ub098"
SIGMA = "\u03bf\u03b4\u03bf"
TEXTS: dict[str, list[str]] = {
    "one": ["a single document"],
    "one empty": [""],
    "all the same": ["one and the same text"] * 9,
    "all empty": [""] * 5,
    "without letters": ["...", "!?!", "...", " \n\t", "--- ---", "1 2 3", "1 2 3."],
    "fewer words than a shingle": ["a", "a", "a.", "b", "a b", "b a", "a  b", "a, b!", "A B"],
    "exactly a shingle": ["a b c", "a b c.", "a b d", "c b a"],
    "a word again and again": ["a " * n for n in range(1, 9)],
    "marks apart": [f"caf{each} au lait" for each in E_ACUTE] + ["cafe au lait", "CAF\u00c9 AU LAIT"],
    "compatible": ["\ufb01ne \u2460 \u212b", "fine 1 \u00c5", "fine 1 A\u030a", "\uff46ine \u2460 \u212b"],
    "folded": ["Stra\u00dfe nach Hause", "STRASSE NACH HAUSE", "strasse nach hause", "\u0130stanbul", "i\u0307stanbul"],
    "final sigma": ["\u039f\u0394\u039f\u03a3 a b", f"{SIGMA}\u03c2 a b", f"{SIGMA}\u03c3 a b"],
    "Hangul": [HANGUL, unicodedata.normalize("NFD", HANGUL)],
    "marks in another order": ["a\u0323\u0307 b c", "a\u0307\u0323 b c"],
    "beyond the first plane": [
        "\U0001f600\U0001f601\U0001f602", "\U0001f600\U0001f601", "\U00010400\U00010401 a", "\U00010428\U00010429 a",
    ],
    "nothing in common": ["a b c d", "e f g h", "i j k l"],
    "just there": ["a b c d e f g h i j", "a b c d e f g h i k", "a b c d e k l m n o"],
}  # fmt: skip
"""By what is at an edge about them."""

ASKED: dict[str, dict[str, Any]] = {
    "usual": {},
    "least threshold": {"threshold": 5e-324, "bands": 32, "rows": 1},
    "greatest threshold": {"threshold": 1},
    "words alone": {"ngram": 1, "casefold": True, "threshold": 0.5},
    "longest shingles": {"ngram": 1000, "threshold": 1.0},
    "characters": {"shingle": "character", "ngram": 3, "threshold": 0.3},
    "folded characters": {"shingle": "character", "ngram": 2, "casefold": True, "normalise": "NFKC"},
    "NFC": {"normalise": "NFC", "casefold": True, "ngram": 1},
    "NFD": {"normalise": "NFD", "ngram": 1, "shingle": "character"},
    "NFKD": {"normalise": "NFKD", "casefold": True, "ngram": 3, "hash": "xxh32"},
    "one number": {"num_perm": 1, "bands": 1, "rows": 1, "threshold": 0.1, "scheme": "legacy"},
    "one band": {"bands": 1, "rows": 32},
    "every number a band": {"bands": 32, "rows": 1, "threshold": 0.01, "seed": 2**32 - 1},
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("asked", ASKED)
def test_edges(without_dask: Client, tmp_path: Path, asked: str) -> None:
    """Each corpus by itself, since documents of others would be in its clusters."""
    given = ASKED[asked]
    for name, texts in TEXTS.items():
        folder = tmp_path / name
        folder.mkdir()
        data = [text.encode() for text in texts]
        for place, text in enumerate(data):
            (folder / f"{place:02}.txt").write_bytes(text)
        found = find(without_dask, [folder], **given)
        check(found, data, **given)
        options = DEFAULTS | given
        about = [options[each] for each in ("shingle", "ngram", "casefold", "normalise")]
        assert found.signatures is not None
        for signature, text in zip(found.signatures, data, strict=True):
            hashes = [naive.hash_of(each, options["hash"]) for each in naive.shingles(text, *about)]
            wanted = naive.signature(hashes, options["scheme"], options["num_perm"], options["seed"])
            assert signature.tolist() == list(wanted), (name, text)
