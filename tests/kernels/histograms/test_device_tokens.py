"""Tokens counted on a GPU equal those that the CPU counts, and ``collections.Counter``: in the simulator, on a GPU, and
as machine code where there is neither."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.gemm.machine_code import assemble, assert_no_spills, sampled
from tests.kernels.histograms.counting import counts_of
from tests.kernels.histograms.naive_tokens import naive_tokens
from tests.sampling import examples
from tilewright.kernels.gpu.compiled import compiling_for
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.histograms.replaced import malformed_of_documents
from tilewright.kernels.histograms.token_counting import TokenCounts
from tilewright.kernels.histograms.token_kinds import TABLE_NBYTES, TokenKind, any_kind_named

EVERY_BIT = 2**64 - 1
NAMES = [
    "word",
    "line",
    "ngram:2",
    "ngram:3",
    "ngram:5",
    *(f"ngram:{n}:{unit}" for n in (2, 3, 5) for unit in ("character", "byte")),
]

pytest_device = pytest.mark.parametrize(
    "device",
    [pytest.param("simulator", marks=pytest.mark.simulator), pytest.param("gpu", marks=pytest.mark.gpu)],
)

# Whole and broken UTF-8, lines ended in all ways, tokens at the lengths where keys change and where spans end.
fragments = st.one_of(
    st.binary(max_size=4),
    st.text(max_size=3).map(lambda text: text.encode(errors="surrogatepass")),
    st.sampled_from(
        [
            b"\xf0\x9f\x92",
            b"\xe2\x82",
            b"\x80\x80",
            b"\xed\xa0\x80",
            b"aA ",
            b"sevenAB ",
            b"eightABC ",
            b" ",
            b"\n",
        ]
        + [b"\r", b"\r\n", b"word_1 ", b"x" * 17, b"y" * 40, b"international ", b"\xef\xbf\xbd"]
        + [text.encode() for text in ("naïve", "Straße ", "हिन्दी", "\u0301", "漢字", "😀", "Ⓐ", "İ", "ﬁ")]
    ),
)
texts = st.lists(fragments, max_size=12).map(b"".join)


def kind_of(by: str, **options: Any) -> TokenKind:
    kind = any_kind_named(by, **options)
    assert isinstance(kind, TokenKind)
    return kind


def counted(documents: list[bytes], kind: TokenKind, **options: Any) -> tuple[TokenCounts, int]:
    """What a GPU counts of documents, and how many malformed sequences they have."""
    from numba import cuda

    from tilewright.kernels.histograms.device_token_counting import DeviceCounter

    data = np.frombuffer(b"".join(documents), np.uint8)
    edges = np.cumsum([0, *map(len, documents)])

    def reader(place: int) -> Callable[[int], np.ndarray]:
        rest = data[place : edges[np.searchsorted(edges, place, "right")]]

        def more(nbytes: int) -> np.ndarray:
            nonlocal rest
            first, rest = rest[:nbytes], rest[nbytes:]
            return first

        return more

    counter = DeviceCounter(kind, **options)
    counter.begin(lambda calls: [call() for call in calls], 4)
    text = cuda.to_device(np.append(data, np.uint8(0)))
    counter.count(text, edges, 0, len(data), reader)
    lost = counter.lost
    return counter.take(), lost


def expected(documents: list[bytes], kind: TokenKind) -> Counter[bytes]:
    return sum((naive_tokens(data, kind) for data in documents), Counter())


def as_counter(found: TokenCounts) -> Counter[bytes]:
    assert list(found.tokens) == sorted(set(found.tokens))
    assert (found.counts > 0).all()
    return Counter(dict(zip(found.tokens, found.counts.tolist(), strict=True)))


def assert_counted(documents: list[bytes], kind: TokenKind, **options: Any) -> None:
    found, lost = counted(documents, kind, **options)
    assert as_counter(found) == expected(documents, kind)
    if kind.decodes:
        data, edges = np.frombuffer(b"".join(documents), np.uint8), np.cumsum([0, *map(len, documents)])
        assert lost == sum(malformed_of_documents(data, edges, 0).values())


@pytest_device
@pytest.mark.parametrize("by", NAMES)
@settings(max_examples=examples(8), deadline=None, suppress_health_check=list(HealthCheck))
@given(documents=st.lists(texts, min_size=1, max_size=4), folded=st.booleans())
def test_equals_counter(device: str, by: str, documents: list[bytes], folded: bool) -> None:
    options = {"casefold": True, "normalise": "NFKC"} if folded and kind_of(by).unit == "word" else {}
    assert_counted(documents, kind_of(by, **options))


@pytest_device
@pytest.mark.parametrize("by", ["word", "line", "ngram:3", "ngram:3:character"])
@settings(max_examples=examples(6), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    documents=st.lists(texts, min_size=1, max_size=3),
    hash_mask=st.sampled_from([0, 1, 0xFFFF << 48, EVERY_BIT]),
    slots=st.sampled_from([1, 2, 16]),
    longest=st.sampled_from([0, 1, 8, 30]),
)
def test_tokens_collide_have_no_room_and_are_long(
    device: str, by: str, documents: list[bytes], hash_mask: int, slots: int, longest: int
) -> None:
    """With one hash for all tokens, in a table of fewer slots than there are tokens, with most of them too long."""
    if by.endswith("character"):
        longest = 30  # whatever their number, n-grams are not long
    assert_counted(documents, kind_of(by), hash_mask=hash_mask, slots=slots, longest=longest)


@pytest_device
@pytest.mark.parametrize("by", ["word", "line", "ngram:2", "ngram:3:byte"])
def test_texts_without_tokens_and_tokens_beyond_tiles(device: str, by: str) -> None:
    from tilewright.kernels.histograms.device_tokens import LONGEST, TILE

    kind = kind_of(by)
    for documents in ([b""], [b"", b"ab", b"", b""], [b"."], [b"\n\n"], [b"\r", b"\n"]):
        assert_counted(documents, kind)
    long = b"x" * (3 * TILE + 5)
    assert_counted([b"a " + long + b" b", long, long + b"y"], kind)
    if device == "gpu":
        assert_counted([b"a " + b"z" * (LONGEST + by_more) + b" b" for by_more in (-1, 0, 1, 10**6)], kind)


def large_texts(rng: np.random.Generator) -> dict[str, list[bytes]]:
    """Some MB: natural, of several scripts, and noise, in documents that end anywhere."""
    ranks = rng.zipf(1.2, 2_000_000) % 300_000
    words = [b"%x" % (rank * 2654435761 % 2**32) for rank in range(300_000)]
    english = b" ".join([words[rank] for rank in ranks.tolist()])
    codes = rng.choice([ord("\n"), 0x20, *range(0x4E00, 0x4F00), *range(0x430, 0x450), 0x301, 0x1F600], 10**6)
    scripts = "".join(map(chr, codes.tolist())).encode()
    edges = bytes.fromhex("0a0d20417f808f909fa0bfc0c1c2dfe0e1ecedeeeff0f1f3f4f5ff")
    noise = bytes(rng.choice(np.frombuffer(edges, np.uint8), 10**6))
    return {
        "english": [english[:1_000_003], b"", english[1_000_003:]],
        "scripts": [scripts[place : place + 77_777] for place in range(0, len(scripts), 77_777)],
        "noise": [noise[:10], noise[10:]],
        "zeros": [bytes(5_000_000)],
    }


@pytest.mark.gpu
@pytest.mark.parametrize("by", [*NAMES, "ngram:4:character"])
def test_equals_the_cpu(by: str, rng: np.random.Generator) -> None:
    kind = kind_of(by)
    for name, documents in large_texts(rng).items():
        found, lost = counted(documents, kind)
        wanted = counts_of([np.frombuffer(data, np.uint8) for data in documents], kind)
        assert list(found.tokens) == list(wanted.tokens), name
        np.testing.assert_array_equal(found.counts, wanted.counts, name)
        if kind.decodes:
            data, edges = np.frombuffer(b"".join(documents), np.uint8), np.cumsum([0, *map(len, documents)])
            assert lost == sum(malformed_of_documents(data, edges, 0).values()), name


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1, 2**8, 2**12, 2**18])
@pytest.mark.parametrize("hash_mask", [EVERY_BIT, 0xFF, 0xFFFF << 48])
def test_full_tables_and_colliding_hashes_equal_the_cpu(
    slots: int, hash_mask: int, rng: np.random.Generator
) -> None:
    kind = kind_of("word")
    documents = [b" ".join(b"token%d" % number for number in rng.integers(0, 30_000, 100_000).tolist())]
    found, _ = counted(documents, kind, slots=slots, hash_mask=hash_mask)
    assert as_counter(found) == Counter(documents[0].split())


@pytest.mark.gpu
def test_a_counter_takes_what_is_planned() -> None:
    from tilewright.kernels.histograms.device_token_counting import DeviceCounter

    assert DeviceCounter(kind_of("word")).nbytes <= TABLE_NBYTES


@pytest.mark.skipif(SIMULATOR, reason="the simulator's tables are small")
def test_what_is_planned_has_room_for_the_most_blocks() -> None:
    from tilewright.kernels.histograms.device_token_counting import SLOTS
    from tilewright.kernels.histograms.device_tokens import MOST_BLOCKS, left_slots

    assert 16 * (SLOTS + left_slots(MOST_BLOCKS)) + 2**21 <= TABLE_NBYTES


def compiled_variants() -> list[Any]:
    if SIMULATOR:
        return []
    from tilewright.kernels.histograms.device_tokens import variants

    return sampled(list(variants()), 6)


@pytest.mark.more
@pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("variant", compiled_variants())
def test_becomes_machine_code(variant: Any, tmp_path: Path) -> None:
    from numba import cuda

    with compiling_for((9, 0)):
        text, _ = cuda.compile_ptx(variant.function, variant.signature, cc=(9, 0))
    report = assemble(text, "sm_90", tmp_path)
    assert_no_spills(report)
    assert " 0 bytes stack frame" in report
    assert ".f64" not in text, "words and numbers with a sign become floats together"
