"""Every signal against its definition in plain Python."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.kernels.signals import naive_signals as naive
from tilewright.kernels.signals.api import signals_of
from tilewright.kernels.signals.definitions import BULLETS, COUNTS, NAMES, RATIOS, STOP_WORDS

HERE = tuple(name for name in NAMES if name != "compression_ratio")


def check(documents: list[bytes], stop_words: tuple[str, ...] = STOP_WORDS) -> None:
    edges = np.cumsum([0, *map(len, documents)])
    data = np.frombuffer(b"".join(documents), np.uint8)
    found = signals_of(data, edges, stop_words)
    assert set(found) == set(HERE)
    for name in HERE:
        expected = [naive.signals(each, stop_words)[name] for each in documents]
        assert found[name].dtype == (np.int64 if name in COUNTS else np.float64)
        if name == "char_entropy":
            assert found[name].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
        else:
            assert found[name].tolist() == expected, (name, documents)


PARTS = [
    *("a", "b", "the", "to", "The", "12", "٣", "²", "好", "語言", "é", "e\u0301", "ǅ", "𝔘", "🙂"),
    *(".", "..", "...", "....", "…", "#", "##", "-", "* ", "• ", "–", "\u200b", "_"),
    *(" ", "  ", "\t", "\n", "\n\n", "\r\n", "\r", "\r\n\r\n", "\n \n", "\x0b", "\x0c", "\x1c", "\x85", "\xa0"),
    *("\u2028", "\u2029", "\u3000", "\ufffd", "\x00"),
]  # fmt: skip
MALFORMED = [b"\xff", b"\xc3", b"\xe4\xbd", b"\xf0\x90\x80", b"\xed\xa0\x80", b"\x80", b"\xef\xbf"]
pieces = st.sampled_from([each.encode() for each in PARTS]) | st.sampled_from(MALFORMED)
documents = st.lists(st.lists(pieces, max_size=40).map(b"".join) | st.binary(max_size=20), max_size=4)
repetitive = st.lists(st.sampled_from(["a", "b", "bb"]), max_size=60).map(" ".join).map(str.encode)


@given(documents)
@example([b""])
@example([b" \n\t\r\n "])
@example([b"a\r\nb", b"\n", b"a\r\n\r\nb\r\n", b"\r", b"\na", b"...\n\r... \n"])
@example([b"\xe4\xbd", b"\xa0", b"\xe4\xbd\xa0"])
def test_signals_are_those_of_plain_python(texts: list[bytes]) -> None:
    check(texts)


@given(st.lists(repetitive, max_size=3))
@example([b"a a a a a a a a a a a a a a a a a a a a a a a a a"])
@example([b"a b a b a b a b a b a b", b"a b"])
def test_repetitions_of_words_are_those_of_plain_python(texts: list[bytes]) -> None:
    check(texts)


def prose(seed: int, words: int) -> bytes:
    """A text of some length, in which passages come again."""
    chance = random.Random(seed)
    vocabulary = [
        *("the", "of", "and", "with", "Wort", "слово", "言葉", "x...", "#tag", "3.14", "naïve"),
        *(f"w{k}" for k in range(200)),
    ]
    text: list[str] = []
    while len(text) < words:
        if text and chance.random() < 0.05:
            start = chance.randrange(len(text))
            text += text[start : start + chance.randrange(1, 30)]
        else:
            text.append(chance.choice(vocabulary))
        if chance.random() < 0.1:
            text[-1] += chance.choice(["\n", "…\n", "\n\n", "\r\n- ", " \n\n* "])
    return " ".join(text).encode()


@pytest.mark.more
def test_texts_of_some_length() -> None:
    check([prose(1, 3000), b"", prose(2, 40), prose(1, 3000)])
    line = b"a line that is there again\n"
    check([line * 300, (line + b"\n") * 50])


@pytest.mark.more
def test_many_different_words_make_room() -> None:
    many = " ".join(f"word-number-{k:07}" for k in range(9000)).encode()
    check([many, many[:2000] + b"\n" + many[:2000]])


@given(st.lists(st.sampled_from(["und", "好", "é", "a", "the"]), unique=True), repetitive)
def test_stop_words_are_those_that_are_given(stop_words: list[str], text: bytes) -> None:
    check([text, "und 好 好 das é\ncafé".encode()], tuple(stop_words))


def test_names_and_lists_are_those_that_are_documented() -> None:
    assert set(NAMES) == set(naive.signals(b""))
    assert not set(COUNTS) & set(RATIOS)
    assert tuple(BULLETS) == naive.BULLETS
    assert STOP_WORDS == naive.STOP_WORDS
