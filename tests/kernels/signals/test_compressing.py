"""Lengths of compressed documents are those of ``zlib.compress``."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampling import examples
from tilewright.kernels.signals import compressing
from tilewright.kernels.signals.compressing import compressed_nbytes
from tilewright.kernels.signals.definitions import COMPRESSION_LEVEL

texts = st.binary(max_size=300) | st.text("ab \n", max_size=300).map(str.encode) | st.just(b"")


def check(documents: list[bytes], before: bytes = b"") -> None:
    data = np.frombuffer(before + b"".join(documents), np.uint8)
    edges = len(before) + np.cumsum([0, *map(len, documents)])
    found = compressed_nbytes(data, edges)
    assert found.dtype == np.int64
    assert found.tolist() == [len(zlib.compress(each, COMPRESSION_LEVEL)) for each in documents]


@settings(max_examples=examples(30))
@given(st.lists(texts, max_size=12), st.binary(max_size=3))
def test_lengths_are_those_of_zlib(documents: list[bytes], before: bytes) -> None:
    check(documents, before)


def test_long_documents_and_those_that_grow(rng: np.random.Generator) -> None:
    """Of more output than there is room for at a time, and with what came before it forgotten."""
    noise = rng.integers(0, 256, 300_000, np.uint8).tobytes()
    letters = rng.integers(97, 101, 300_000, np.uint8).tobytes()
    check([noise, letters, noise, b"a" * 400_000, letters[:70_000], b"", noise[:1]])


def test_the_library_is_that_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another version than Python's, or with its functions hidden, it is not used; what Python makes is the same."""
    compressing._library.cache_clear()
    try:
        monkeypatch.setattr(zlib, "ZLIB_RUNTIME_VERSION", "0.9")
        assert compressing._library() is None
        check([b"", b"abc", b"a" * 100])
        compressing._library.cache_clear()
        monkeypatch.setattr(zlib, "__file__", "/nowhere/zlib.so", raising=False)
        assert compressing._library() is None
    finally:
        compressing._library.cache_clear()
