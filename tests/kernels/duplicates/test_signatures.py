"""Shingles, their hashes and signatures equal those of Python's own means, and datasketch's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.duplicates import naive_shingles as naive
from tests.sampling import examples
from tilewright.kernels.choices import FORMS, HASHES, SCHEMES, SHINGLES, FormName
from tilewright.kernels.duplicates.folding import folded_documents, folding_of
from tilewright.kernels.duplicates.hashing import LOOPS
from tilewright.kernels.duplicates.minhash import EMPTY, band_keys, permutations_of, signatures_of
from tilewright.kernels.duplicates.sets import shared_counts
from tilewright.kernels.duplicates.shingles import Shingles, shingles_of
from tilewright.kernels.histograms.token_kinds import TokenKind

# A ligature and a numeral that become several letters, a mark that is put before or behind a letter, one that becomes a
# blank and a mark, and what is no UTF-8.
fragments = st.one_of(
    st.sampled_from(
        [
            "aa",
            "b ",
            "Ab",
            "\u00c4",
            "\u1e9e",
            "\ufb01",
            "\u2163",
            "\u0301",
            "\u037a",
            ", ",
            "\n",
            "\U0001f600",
        ]
    ).map(str.encode),
    st.sampled_from([b"\xff", b"\xe4\xbd", b"\xf0\x9f\x98", b"\xed\xa0\x80"]),
    st.text(max_size=3).map(lambda text: text.encode(errors="surrogatepass")),
)
documents = st.lists(st.lists(fragments, max_size=30).map(b"".join), max_size=5)
kinds = st.builds(
    TokenKind,
    st.just("shingle"),
    st.sampled_from(SHINGLES),
    st.integers(1, 9),
    st.booleans(),
    st.none() | st.sampled_from(FORMS),
)


def of(texts: list[bytes], kind: TokenKind) -> Shingles:
    data = np.frombuffer(b"".join(texts), np.uint8)
    return shingles_of(data, np.cumsum([0, *map(len, texts)]), kind)


def listed(found: Shingles) -> list[list[bytes]]:
    every = [
        found.text[start : start + length].tobytes()
        for start, length in zip(found.starts.tolist(), found.lengths.tolist(), strict=True)
    ]
    return [every[first:last] for first, last in zip(found.edges[:-1], found.edges[1:], strict=True)]


@settings(max_examples=examples(40))
@given(texts=documents, kind=kinds)
def test_shingles_and_what_two_documents_share(texts: list[bytes], kind: TokenKind) -> None:
    found = of(texts, kind)
    expected = [naive.shingles(text, kind.unit, kind.n, kind.casefold, kind.normalise) for text in texts]
    assert listed(found) == expected
    for name in HASHES:
        assert found.hashes(name).tolist() == [naive.hash_of(each, name) for row in expected for each in row]
    pairs = np.array([(i, j) for i in range(len(texts)) for j in range(len(texts))], np.int64).reshape(-1, 2)
    for (i, j), (both, either) in zip(pairs.tolist(), shared_counts(found, pairs).tolist(), strict=True):
        one, other = set(expected[i]), set(expected[j])
        assert (both, either) == (len(one & other), len(one | other))


def test_a_range_of_a_text_is_shingled_as_if_it_were_all() -> None:
    data = np.frombuffer(b"xx one two three yy", np.uint8)
    found = shingles_of(data, np.array([3, 16]), TokenKind("shingle", "word", 2))
    assert listed(found) == [[b"one two", b"two three"]]
    data = np.frombuffer(b"xx \xe4\xbdA\xc3\x84 yy\xff", np.uint8)
    found = shingles_of(data, np.array([3, 6, 8]), TokenKind("shingle", "character", 2, True))
    assert listed(found) == [["\ufffda".encode()], ["ä".encode()]]


@pytest.mark.parametrize("length", [0, 1, 3, 4, 15, 16, 17, 31, 54, 55, 56, 57, 63, 64, 65, 119, 120, 300])
def test_hashes_of_every_length_beside_others(length: int, rng: np.random.Generator) -> None:
    text = rng.integers(0, 256, 4096, np.uint8)
    lengths = np.array([length, 7, 100, length] * 5, np.uint32)  # more than go through SHA-1 at once
    starts = rng.integers(0, 3000, len(lengths)).astype(np.uint32)
    for name in HASHES:
        found = np.empty(len(lengths), np.uint32)
        LOOPS[name](text.ctypes.data, starts, lengths, found)
        assert found.tolist() == [
            naive.hash_of(text[start : start + n].tobytes(), name)
            for start, n in zip(starts.tolist(), lengths.tolist(), strict=True)
        ]


def test_shingles_with_the_same_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    found = of([b"a b c d b a", b"b c e e a", b""], TokenKind("shingle", "word", 1))
    pairs = np.array([[0, 1], [1, 0], [0, 2], [2, 2]], np.int64)
    monkeypatch.setitem(LOOPS, "xxh32", lambda text, starts, lengths, hashes: hashes.fill(7))
    assert shared_counts(found, pairs).tolist() == [[3, 5], [3, 5], [0, 4], [0, 0]]


def test_long_documents_share_what_sets_of_them_do(rng: np.random.Generator) -> None:
    """Of fewer shingles than are sorted by comparing them, and of more, many with the same hash."""
    texts = [
        b" ".join(b"%d" % number for number in rng.integers(0, 2 * length + 1, length))
        for length in (0, 1, 2, 62, 63, 64, 65, 500, 3000)
    ]
    found = of(texts, TokenKind("shingle", "word", 1))
    sets = [set(text.split()) for text in texts]
    pairs = np.array([(i, j) for i in range(len(texts)) for j in range(len(texts))], np.int64)
    expected = [[len(sets[i] & sets[j]), len(sets[i] | sets[j])] for i, j in pairs.tolist()]
    assert shared_counts(found, pairs).tolist() == expected
    hashes = found.hashes("xxh32")
    with pytest.MonkeyPatch.context() as patch:
        coarse = hashes & 0xE0000003
        patch.setitem(LOOPS, "xxh32", lambda text, starts, lengths, out: np.copyto(out, coarse))
        assert shared_counts(found, pairs).tolist() == expected


@pytest.mark.parametrize("form", [None, "NFC", "NFKD"])
@pytest.mark.parametrize("casefold", [False, True])
def test_documents_are_folded_as_python_folds_them(casefold: bool, form: FormName | None) -> None:
    """Each character that becomes another one, and its neighbour, alone and beside ASCII; words of ASCII of any
    place in those that are read eight bytes at a time."""
    kind = TokenKind("fold", "character", 1, casefold, form)
    codes = {code + d for code in np.flatnonzero(folding_of(kind).numbers).tolist() for d in (0, 1)}
    texts = [chr(code) for code in sorted(codes) if not 0xD800 <= code < 0xE000 and code < 0x110000]
    texts += ["@AZ[`az{\x7f\x00" * n + "é" * (n % 3) + "QUICK brown Fox"[n:] for n in range(16)]
    texts += ["", *(f"{''.join(texts[k : k + 9])} ABC abc" for k in range(0, len(texts), 500))]
    parts = [text.encode() for text in texts]
    data, edges = np.frombuffer(b"..." + b"".join(parts), np.uint8), 3 + np.cumsum([0, *map(len, parts)])
    folded, found = folded_documents(data, edges, kind)
    expected = [kind.folded(text).encode() for text in texts]
    assert folded.tobytes() == b"".join(expected)
    assert found.tolist() == np.cumsum([0, *map(len, expected)]).tolist()


# datasketch 2.0.0: MinHash(6, seed, hashfunc, scheme=scheme), updated with each shingle of SETS.
SETS = ([], [b"a"], [b"the quick brown fox jumps", "über die Straße".encode(), b"x" * 200])
DATASKETCH = {
    ("affine32", 1, "sha1"): [
        [3806823020, 1572361674, 3806638810, 2770589107, 943937101, 3381188218],
        [578515452, 1415949077, 2197694474, 1549177008, 236744880, 1299353482],
    ],
    ("affine32", 1, "xxh32"): [
        [2374978956, 1717916010, 3147710778, 245303571, 1369827565, 3442037914],
        [616754398, 2050988393, 2744068039, 1783958136, 1219176792, 1668007452],
    ],
    ("affine32", 42, "sha1"): [
        [2366791779, 3692131337, 2188451025, 3021779472, 549299601, 945073731],
        [678088684, 1671229236, 536158422, 1044023808, 410030722, 1522045686],
    ],
    ("affine32", 42, "xxh32"): [
        [1414805059, 3004323241, 886089521, 1247548912, 219604593, 1775929059],
        [89134740, 1474925283, 2072788446, 28720270, 1338467178, 578883213],
    ],
    ("legacy", 1, "sha1"): [
        [297616339, 2290196162, 2013617805, 1974455217, 943679155, 1389563710],
        [221035611, 900186415, 3368983836, 434003653, 564010957, 742227662],
    ],
    ("legacy", 1, "xxh32"): [
        [4280832916, 2368165605, 4009944924, 3742582317, 243114962, 1340119576],
        [541116878, 710362060, 348609187, 898590859, 359776382, 1920950887],
    ],
    ("legacy", 42, "sha1"): [
        [2372570438, 121749960, 3216407222, 521384630, 2370384115, 846960151],
        [186966786, 742563190, 875616119, 3263607250, 2294882469, 1304895743],
    ],
    ("legacy", 42, "xxh32"): [
        [3116359561, 173087815, 2757064151, 1903147942, 4277065075, 976682284],
        [1290637941, 389415071, 1310997160, 47507675, 2284014412, 373823734],
    ],
}


@pytest.mark.parametrize(("scheme", "seed", "name"), DATASKETCH)
def test_signatures_are_those_of_datasketch(scheme: str, seed: int, name: str) -> None:
    every = [shingle for each in SETS for shingle in each]
    text = np.frombuffer(b"".join(every), np.uint8)
    lengths = np.array([len(each) for each in every])
    found = Shingles(
        text,
        (np.cumsum(lengths) - lengths).astype(np.uint32),
        lengths.astype(np.uint32),
        np.cumsum([0, *map(len, SETS)]),
    )
    signatures = signatures_of(found.hashes(name), found.edges, permutations_of(scheme, 6, seed))
    assert signatures.tolist() == [[EMPTY] * 6, *DATASKETCH[scheme, seed, name]]


@given(
    rows=st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=11), max_size=4),
    scheme=st.sampled_from(SCHEMES),
    num_perm=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_signatures_of_any_hashes(rows: list[list[int]], scheme: str, num_perm: int, seed: int) -> None:
    hashes = np.array([each for row in rows for each in row], np.uint32)
    edges = np.cumsum([0, *map(len, rows)])
    found = signatures_of(hashes, edges, permutations_of(scheme, num_perm, seed))
    assert found.tolist() == [naive.signature(row, scheme, num_perm, seed) for row in rows]


@pytest.mark.parametrize(
    "x", [0, 2**61 - 2, 2**61 - 1, 2**61, 2**62 - 2, 3 * (2**61 - 1), 2**64 - 1, 2**64 - 8]
)
def test_the_remainder_by_the_prime_at_its_edges(x: int) -> None:
    permutations = permutations_of("legacy", 1, 1)
    permutations.b[:] = x
    found = signatures_of(np.zeros(1, np.uint32), np.array([0, 1]), permutations)
    assert found.tolist() == [[x % (2**61 - 1) % 2**32]]


def test_bands_have_the_same_key_where_their_rows_are_the_same() -> None:
    signatures = np.array([[1, 2, 3, 4, 9], [1, 2, 3, 5, 9], [2, 1, 3, 4, 9], [3, 4, 1, 2, 9]], np.uint32)
    keys = band_keys(signatures, 2, 2)
    assert keys.shape == (2, 4)
    assert len(set(keys[0].tolist())) == 3
    assert len(set(keys[1].tolist())) == 3
    assert keys[0, 0] == keys[0, 1]
    assert keys[1, 0] == keys[1, 2]
