"""Words, lines and n-grams equal ``collections.Counter``, in whatever stretches and parts a document comes."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.histograms.counting import counts_of
from tests.kernels.histograms.naive_tokens import is_word, naive_tokens
from tests.sampling import examples
from tilewright.kernels.errors import OptionError
from tilewright.kernels.histograms import token_counting, token_order
from tilewright.kernels.histograms.tables import packed_table, radix
from tilewright.kernels.histograms.tables.token_table import Table
from tilewright.kernels.histograms.token_counting import TokenCounter, TokenCounts
from tilewright.kernels.histograms.token_kinds import MARGIN, TokenKind, any_kind_named, word_table
from tilewright.kernels.histograms.token_lists import Tokens
from tilewright.kernels.histograms.token_order import in_order, merged_by_parts
from tilewright.kernels.histograms.tokens import KINDS

PLAIN = ["word", "line", *(f"ngram:{n}{unit}" for n in (2, 5) for unit in ("", ":character", ":byte"))]
KINDS_HERE = [
    *(any_kind_named(by) for by in PLAIN),
    any_kind_named("word", casefold=True, normalise="NFKC"),
    any_kind_named("ngram:4", casefold=True),
]
OF_EVERY_KIND = pytest.mark.parametrize(
    "kind",
    [*KINDS_HERE, any_kind_named("ngram:4:character")],
    ids=lambda kind: f"{kind.name}{kind.casefold:d}",
)

# Whole and broken UTF-8, lines ended in all ways, words shorter and longer than 8, 16 and 64 bytes.
fragments = st.one_of(
    st.binary(max_size=4),
    st.text(max_size=3).map(lambda text: text.encode(errors="surrogatepass")),
    st.sampled_from(
        [b"\xf0\x9f\x92", b"\xe2\x82", b"\x80\x80", b"\xed\xa0\x80", b"aA ", b"hello ", b" ", b"\n", b"\r"]
        + [b"\r\n", b"word_1 ", b"x" * 17, b"y" * 70, b" " * 66, b"international ", b"\xef\xbf\xbd"]
        + [text.encode() for text in ("naïve", "Straße ", "हिन्दी", "\u0301", "漢字", "😀", "Ⓐ", "İ", "ﬁ")]
    ),
)
texts = st.lists(fragments, max_size=30).map(b"".join)


def as_counter(found: TokenCounts) -> Counter[bytes]:
    counter: Counter[bytes] = Counter()
    for token, count in zip(found.tokens, found.counts.tolist(), strict=True):
        counter[token] += count
    return counter


@pytest.mark.parametrize("kind", KINDS_HERE, ids=lambda kind: f"{kind.name}{kind.casefold:d}")
@settings(max_examples=8)
@given(data=texts, cuts=st.lists(st.integers(1, 90), min_size=1, max_size=5), take=st.integers(0, 3))
def test_equals_counter_however_it_is_cut(kind: TokenKind, data: bytes, cuts: list[int], take: int) -> None:
    text = np.frombuffer(data, np.uint8)
    edges = [0]
    while edges[-1] < len(data) or len(edges) < 2:
        edges.append(min(len(data), edges[-1] + cuts[len(edges) % len(cuts)]))
    expected = naive_tokens(data, kind)

    whole = TokenCounter(kind)
    whole.begin()
    whole.stretch(text, ends=True)
    assert as_counter(whole.take()) == expected

    stretched, found = TokenCounter(kind), Counter[bytes]()
    stretched.begin()
    for number, (start, stop) in enumerate(itertools.pairwise(edges)):
        stretched.stretch(text[start:stop], ends=stop == len(data))
        if number % 4 == take:
            found += as_counter(stretched.take())
    assert found + as_counter(stretched.take()) == expected

    parts = TokenCounter(kind)
    for start, stop in itertools.pairwise(edges):
        at = stop

        def more(nbytes: int) -> np.ndarray:
            nonlocal at
            behind = text[at : at + nbytes]
            at += len(behind)
            return behind

        lo = max(0, start - MARGIN)
        parts.begin()
        parts.part(text[lo:stop], start - lo, more=more)
    assert as_counter(parts.take()) == expected


@OF_EVERY_KIND
@settings(max_examples=examples(12))
@given(
    documents=st.lists(texts | st.just(b""), min_size=1, max_size=12),
    before=st.binary(max_size=3),
    stride=st.integers(1, 200) | st.just(1 << 22),
    units=st.integers(1, 20),
    table=st.sampled_from([0, 1 << 28]),
    room=st.integers(1, 6),
)
def test_documents_at_once_are_each_by_itself(
    kind: TokenKind, documents: list[bytes], before: bytes, stride: int, units: int, table: int, room: int
) -> None:
    text = np.frombuffer(before + b"".join(documents) + b"behind", np.uint8)
    edges = len(before) + np.cumsum([0, *map(len, documents)])
    expected = sum((naive_tokens(document, kind) for document in documents), Counter[bytes]())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_counting, "STRIDE_NBYTES", stride)
        patch.setattr(token_counting, "UNITS", units)
        patch.setattr(token_counting, "MOST_TABLE_NBYTES", table)
        patch.setattr(token_counting, "FIRST_WORDS", 1)
        patch.setattr(token_counting, "MOST_SORTED", dict.fromkeys(range(2, 6), room))
        counter = TokenCounter(kind)
        counter.begin()
        counter.stretch(text[:0], ends=True)
        counter.documents(text, edges)
        found = as_counter(counter.take())
        counter.documents(text, edges)
        again = as_counter(counter.take())
    assert found == again == expected


def as_counters(counter: TokenCounter) -> list[Counter[bytes]]:
    """The rows that were counted; checks that each has its entries in order."""
    tokens, rows = counter.take_rows()
    ends = np.cumsum(rows.lengths)
    assert len(rows.columns) == len(rows.values) == rows.lengths.sum()
    found = []
    for end, length in zip(ends.tolist(), rows.lengths.tolist(), strict=True):
        columns, values = rows.columns[end - length : end], rows.values[end - length : end]
        assert (np.diff(columns) > 0).all()
        assert (values > 0).all()
        row: Counter[bytes] = Counter()
        for i, n in zip(columns.tolist(), values.tolist(), strict=True):
            row[tokens[i]] += n  # several that are folded alike are one
        found.append(row)
    return found


@OF_EVERY_KIND
@settings(max_examples=examples(12))
@given(
    documents=st.lists(texts | st.just(b""), min_size=1, max_size=12),
    before=st.binary(max_size=3),
    units=st.integers(1, 20),
    entries=st.integers(1, 30),
)
def test_rows_are_of_their_documents(
    kind: TokenKind, documents: list[bytes], before: bytes, units: int, entries: int
) -> None:
    """Whole documents by one loop, and one that comes in stretches between them."""
    text = np.frombuffer(before + b"".join(documents) + b"behind", np.uint8)
    edges = len(before) + np.cumsum([0, *map(len, documents)])
    expected = [naive_tokens(document, kind) for document in documents]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_counting, "UNITS", units)
        patch.setattr(token_counting, "ROWS_ENTRIES", entries)
        counter = TokenCounter(kind, rows=True)
        counter.documents(text, edges)
        counter.begin()
        counter.stretch(text[edges[0] : edges[1]], ends=False)
        counter.stretch(text[:0], ends=True)
        counter.end_row()
        counter.documents(text, edges)
        assert as_counters(counter) == [*expected, expected[0], *expected]
        counter.documents(text, edges[:1])
        counter.documents(text, edges)
        assert as_counters(counter) == expected


@pytest.mark.parametrize("by", ["word", "line", "ngram:2", "ngram:3:byte", "ngram:4:character"])
def test_tables_grow_between_rows(by: str, rng: np.random.Generator) -> None:
    """Rows shorter and longer than those that are sorted by their digits, and of more entries than there is room for;
    the same entries and values as of each document counted by a call."""
    kind = any_kind_named(by)
    documents = [
        b"".join(b"%d\n" % number for number in rng.integers(0, 10**6, length))
        for length in rng.integers(0, 150, 300).tolist()
    ]
    data, edges = np.frombuffer(b"".join(documents), np.uint8), np.cumsum([0, *map(len, documents)])
    counter = TokenCounter(kind, rows=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_counting, "ROWS_ENTRIES", 400)
        counter.documents(data, edges)
    tokens, rows = counter.take_rows()
    for first, last in itertools.pairwise(edges.tolist()):
        counter.begin()
        counter.stretch(data[first:last], ends=True)
        counter.end_row()
    again, by_calls = counter.take_rows()
    assert list(tokens) == list(again)
    for name in ("lengths", "columns", "values"):
        np.testing.assert_array_equal(getattr(rows, name), getattr(by_calls, name))
        assert getattr(rows, name).dtype == np.int64


def test_words_without_numbers_are_refused_in_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_counting, "MOST_WORDS", token_counting.STRIDE_NBYTES + 3)
    text = np.frombuffer(b"a b c d e f", np.uint8)
    counter = TokenCounter(any_kind_named("ngram:2"), rows=True)
    with pytest.raises(OptionError, match="count them for all documents together"):
        counter.documents(text, np.array([0, len(text)]))


@pytest.mark.parametrize("by", ["word", "ngram:2", "ngram:3:byte"])
def test_tables_that_are_full_are_set_aside(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts go on in new ones, of n-grams across the border too."""
    monkeypatch.setattr(token_counting, "MOST_TABLE_NBYTES", 0)
    monkeypatch.setattr(token_counting, "STRIDE_NBYTES", 100)
    data = b" ".join(b"word%d" % (i * i % 701) for i in range(2000))
    kind = any_kind_named(by)
    assert isinstance(kind, TokenKind)
    counter = TokenCounter(kind)
    counter.begin()
    counter.stretch(np.frombuffer(data, np.uint8), ends=True)
    assert as_counter(counter.take()) == naive_tokens(data, kind)


def counted(data: bytes, kind: TokenKind, step: int = 10**9) -> TokenCounts:
    """What a document holds that comes in stretches; checks that it is in order."""
    counter = TokenCounter(kind)
    counter.begin()
    text = np.frombuffer(data, np.uint8)
    for start in range(0, max(1, len(text)), step):
        counter.stretch(text[start : start + step], ends=start + step >= len(text))
    found = counter.take()
    assert list(found.tokens) == sorted(set(found.tokens))
    return found


@pytest.mark.parametrize("by", ["ngram:2", "ngram:3", "ngram:4", "ngram:5"])
@settings(max_examples=6)
@given(
    numbers=st.lists(st.integers(0, 40), max_size=80),
    most=st.integers(6, 12),  # more than the words that are kept for the n-grams behind them
    numbered=st.integers(1, 9),
    step=st.integers(1, 50),
)
def test_words_are_sorted_some_at_a_time(
    by: str, numbers: list[int], most: int, numbered: int, step: int
) -> None:
    """N-grams go on where the room for words is full, and where they are numbered anew; in several documents."""
    kind = any_kind_named(by)
    assert isinstance(kind, TokenKind)
    data = b" ".join(b"w%d" % number for number in numbers)
    counter = TokenCounter(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_counting, "FIRST_WORDS", 1)
        patch.setattr(token_counting, "MOST_SORTED", dict.fromkeys(range(2, 6), most))
        patch.setattr(token_counting, "MOST_NUMBERED", numbered)
        patch.setattr(token_counting, "STRIDE_NBYTES", step)
        counter = TokenCounter(kind)
        for document in (data, b"", data[: len(data) // 2]):
            counter.begin()
            counter.stretch(np.frombuffer(document, np.uint8), ends=True)
        found = counter.take()
    assert as_counter(found) == naive_tokens(data, kind) + naive_tokens(data[: len(data) // 2], kind)
    assert list(found.tokens) == sorted(set(found.tokens))


def test_numbers_of_many_words_take_more_than_64_bits(rng: np.random.Generator) -> None:
    data = b" ".join(b"w%d" % number for number in rng.integers(0, 9000, 30_000).tolist())
    for by in ("ngram:4", "ngram:5"):
        kind = any_kind_named(by)
        assert isinstance(kind, TokenKind)
        assert as_counter(counted(data, kind)) == naive_tokens(data, kind)


def test_words_that_fold_into_several_keep_their_order() -> None:
    """U+FDFA is four words with blanks between them in NFKC: n-grams of it may read as others do."""
    kind = any_kind_named("ngram:2", normalise="NFKC")
    assert isinstance(kind, TokenKind)
    folded = unicodedata.normalize("NFKC", "\ufdfa")
    text = f"\ufdfa a {folded} a صلى \ufdfa صلى b \ufdfa".encode()
    assert as_counter(counted(text, kind)) == naive_tokens(text, kind)


@pytest.mark.parametrize("by", ["ngram:2:byte", "ngram:3:byte", "ngram:3:character", "ngram:2:character"])
@settings(max_examples=10)
@given(data=texts, step=st.integers(1, 60))
def test_small_units_have_a_count_each(by: str, data: bytes, step: int) -> None:
    kind = any_kind_named(by)
    assert isinstance(kind, TokenKind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_table, "LEAST_DIRECT", 20)
        assert as_counter(counted(data * 2, kind, step)) == naive_tokens(data * 2, kind)


def test_counts_are_set_aside_before_they_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_table, "MOST_DIRECT", 64)
    monkeypatch.setattr(token_counting, "STRIDE_NBYTES", 50)
    kind = any_kind_named("ngram:3:byte")
    assert isinstance(kind, TokenKind)
    data = bytes(range(97, 123)) * 20
    assert as_counter(counted(data, kind)) == naive_tokens(data, kind)


@pytest.mark.parametrize("by", ["word", "line", "ngram:2", "ngram:3:byte", "ngram:4:character"])
def test_tables_grow_between_documents(by: str, rng: np.random.Generator) -> None:
    kind = any_kind_named(by)
    documents = [
        rng.integers(97, 123, length).astype(np.uint8).tobytes() + b" x"
        for length in rng.integers(0, 9, 30000)
    ]
    counter = TokenCounter(kind)
    counter.documents(np.frombuffer(b"".join(documents), np.uint8), np.cumsum([0, *map(len, documents)]))
    expected: Counter[bytes] = Counter()
    for document in documents:
        expected.update(naive_tokens(document, kind))
    assert as_counter(counter.take()) == expected


def test_packed_tables_grow(rng: np.random.Generator) -> None:
    for by in ("ngram:4:byte", "ngram:5:byte", "ngram:3:character", "ngram:4:character"):
        kind = any_kind_named(by)
        assert isinstance(kind, TokenKind)
        data = rng.integers(0, 256, 20_000).astype(np.uint8).tobytes()
        assert as_counter(counted(data, kind)) == naive_tokens(data, kind)


@pytest.mark.parametrize("bits", [1, 9, 10, 54, 64])
def test_keys_are_sorted_by_digits(bits: int, rng: np.random.Generator) -> None:
    keys = rng.integers(0, 1 << bits, 5000, dtype=np.uint64, endpoint=False) >> rng.integers(
        0, bits, 5000
    ).astype("u8")
    values = np.arange(len(keys), dtype=np.uint64)
    expected = np.argsort(keys, kind="stable")
    found, order = radix.sort_pairs(keys.copy(), values, bits)
    np.testing.assert_array_equal(found, keys[expected])
    np.testing.assert_array_equal(order, expected)
    np.testing.assert_array_equal(radix.sort_keys(keys.copy(), bits)[0], keys[expected])


@pytest.mark.parametrize("shape", ["random", "alike", "rising", "falling", "organ"])
def test_keys_are_sorted_whatever_their_order(shape: str, rng: np.random.Generator) -> None:
    count = 3000
    keys = {
        "random": rng.integers(0, 1 << 63, count).astype(np.uint64),
        "alike": np.full(count, 7, np.uint64),
        "rising": np.arange(count, dtype=np.uint64),
        "falling": np.arange(count, dtype=np.uint64)[::-1].copy(),
        "organ": np.concatenate([np.arange(count // 2), np.arange(count // 2)[::-1]]).astype(np.uint64),
    }[shape]
    for sort in (token_order.sort_by_keys, token_order.heap_sort):
        found, order = keys.copy(), np.arange(count)
        sort(found, order, 0, count)
        np.testing.assert_array_equal(found, np.sort(keys))
        np.testing.assert_array_equal(keys[order], found)


def test_tokens_of_one_key_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long tokens of one length whose first bytes are alike, tokens with zeros, and growing tables."""
    texts = [b"a" * n for n in range(40)] + [b"a\0" * n for n in range(9)] + [b"\0" * n for n in range(1, 20)]
    texts += [b"prefix-prefix-prefix-%05d" % n for n in range(9000)]
    table = Table(with_bytes=True)
    data = np.frombuffer(b"".join(texts), np.uint8)
    offsets = np.cumsum([0, *map(len, texts)])
    for times in (1, 2):
        table.add(data, offsets, np.full(len(texts), times))
    used = table.used
    tokens, counts, rank = in_order(
        table.bytes_used, table.starts[:used], table.lengths[:used], table.counts[:used]
    )
    assert list(tokens) == sorted(set(texts))
    assert dict(zip(tokens, counts.tolist(), strict=True)) == {
        text: 3 * n for text, n in Counter(texts).items()
    }
    assert sorted(rank.tolist()) == list(range(used))


@pytest.mark.parametrize("n", [2, 3, 5])
def test_ngrams_of_words_of_all_lengths(n: int, rng: np.random.Generator) -> None:
    """Short words are written from rows of 16 bytes, others from where they lie."""
    lengths = [*range(1, 40), 15, 16, 17, 200]
    words = [chr(ord("a") + length % 7).encode() * length for length in lengths]
    text = [words[k] for k in rng.integers(0, len(words), 5000)]
    found = counts_of([np.frombuffer(b" ".join(text), np.uint8)], any_kind_named(f"ngram:{n}"))
    expected = Counter(b" ".join(text[k : k + n]) for k in range(len(text) - n + 1))
    assert list(found.tokens) == sorted(expected)
    assert found.counts.tolist() == [expected[token] for token in sorted(expected)]


@pytest.mark.parametrize("behind", [b"", b"\xff", "ä".encode()[:1]])
def test_lines_that_are_no_utf8_are_found_at_any_place(behind: bytes) -> None:
    """Lines are looked through 64 bytes at a time; those that change go behind the others, or where there is room."""
    lines = [
        b"x" * place + piece + b"y" * (length - place) + behind
        for length in (0, 1, 60, 63, 64, 65, 130)
        for place in {0, 1, length // 2, length}
        for piece in ("ä€😀\ufffd".encode(), b"\xe2\x82", b"")
        if place <= length
    ]
    text = np.frombuffer(b"\n".join(lines), np.uint8)
    found = counts_of([text], any_kind_named("line"))
    expected = Counter(line.decode(errors="replace").encode() for line in lines)
    assert dict(zip(found.tokens, found.counts.tolist(), strict=True)) == expected


def test_word_characters_are_those_of_the_rule() -> None:
    """Where nothing but marks and numbers like ½ is at issue, they are Python's."""
    table = np.unpackbits(word_table(), bitorder="little")
    codes = [*range(0x3400), *range(0xA000, 0x11000), *range(0x1F100, 0x1F200), *range(0x16D40, 0x17000)]
    assert table[codes].tolist() == [is_word(chr(code)) for code in codes]
    for code in codes:
        character = chr(code)
        if unicodedata.category(character) not in ("Mn", "Mc", "Me", "No", "So", "Pc", "Cf", "Nl"):
            assert bool(table[code]) == (re.fullmatch(r"\w", character) is not None), hex(code)


@pytest.mark.parametrize(
    ("by", "options", "said"),
    [
        ("sentence", {}, "'ngram:N' of words"),
        ("ngram:N", {}, "no kind of histogram"),
        ("ngrams", {}, "did you mean 'ngram:2'"),
        ("ngram:1", {}, "n-grams of 1; they may have 2 to 5"),
        ("ngram:3:line", {}, "they are of word, character, byte"),
        ("line", {"casefold": True}, "casefold is for words"),
        ("byte", {"normalise": "NFC"}, "normalise is for words"),
        ("word", {"normalise": "nfc"}, "may be 'NFC', 'NFD'"),
        (b"word", {}, "no kind of histogram"),
    ],
)
def test_what_is_no_kind_is_named(by: str, options: dict, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        any_kind_named(by, **options)


def test_kinds_of_known_bins_keep_their_names() -> None:
    assert {name: any_kind_named(name) for name in KINDS} == KINDS
    assert any_kind_named("ngram:3:word") == any_kind_named("ngram:3")


@settings(max_examples=examples(40))
@given(
    lists=st.tuples(*[st.dictionaries(st.binary(max_size=9), st.integers(1, 9), max_size=30)] * 2),
    parts=st.integers(1, 9),
)
def test_lists_are_merged_by_parts(lists: tuple[dict[bytes, int], dict[bytes, int]], parts: int) -> None:
    given_lists = []
    for each in lists:
        tokens = sorted(each)
        given_lists += [Tokens.of(tokens), np.array([each[token] for token in tokens], np.int64)]
    tokens, counts = merged_by_parts(
        *given_lists, parts, lambda calls: [call() for call in calls[::-1]][::-1]
    )
    wanted = Counter(lists[0]) + Counter(lists[1])
    assert list(tokens) == sorted(wanted)
    assert counts.tolist() == [wanted[token] for token in sorted(wanted)]
    assert len(tokens.data) == sum(map(len, wanted))
