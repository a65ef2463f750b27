"""Histograms against `collections.Counter`, on the host and, in a run of its own, in the simulator."""

from __future__ import annotations

import itertools
import sys
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.kernels.gpu import fake_gpu
from tilewright.kernels import DocumentOffsets, histogram
from tilewright.kernels.errors import (
    DeviceUnavailableError,
    DTypeError,
    OptionError,
    OutputError,
    ShapeError,
)
from tilewright.kernels.gpu.device_array import address
from tilewright.kernels.gpu.device_choice import SIMULATOR, cuda_available
from tilewright.kernels.histograms import host as histogram_host
from tilewright.kernels.histograms.api import KINDS, piece_counts
from tilewright.kernels.histograms.tokens import ASCII, CODEPOINT, LETTER, Kind, folded_bin

DEVICES = ["cuda"] if SIMULATOR else ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.simulator if SIMULATOR else []
few_when_simulated = settings(max_examples=8 if SIMULATOR else 60)
SHIFTS = (0, 7) if SIMULATOR else (0, 1, 7, 15)

BINS = {"byte": 256, "ascii": 128, "letter": 26, "bigram": 65536, "codepoint": 0x110000}

# Bytes at the edges of every rule of UTF-8, so that short random texts meet all of them.
EDGES = bytes.fromhex("00 41 5a 61 7a 7f 80 8f 90 9f a0 bf c0 c1 c2 df e0 e1 ec ed ee ef f0 f1 f3 f4 f5 ff")
MALFORMED = [
    b"\xc0\x80",  # overlong
    b"\xe0\x80\x80",
    b"\xe0\x9f\xbf",
    b"\xf0\x80\x80\x80",
    b"\xf0\x8f\xbf\xbf",
    b"\xed\xa0\x80",  # a surrogate
    b"\xed\xbf\xbf\xed\xa0",
    b"\xf4\x90\x80\x80",  # above U+10FFFF
    b"\xf5\x80\x80\x80",
    b"\xe2\x82",  # truncated
    b"\xf0\x9f\x98",
    b"\xf0\x9f",
    b"\xc3",
    b"\xe2\x82A",
    b"\xf0\x9f\x98\xe2\x82\xac",
    b"\x80\x80\x80\x80\x80",  # strays
    b"\xe2\x82\xac\x80",
    b"\xf0\x9f\x98\x80\x80\x80",
]
WELL_FORMED = [
    "",
    "a",
    "é",
    "€",
    "😀",
    "Zoë läuft",
    "日本語テキスト",
    "Привет, мир",
    "a€b😀c\U0010ffff\ud7ff\ue000",
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def expected(text: bytes, by: str) -> Counter[int]:
    """The slow, obvious answer."""
    if by == "byte":
        return Counter(text)
    if by == "ascii":
        return Counter(byte for byte in text if byte < 128)
    if by == "letter":
        return Counter(byte - ord("a") for byte in text.lower() if ord("a") <= byte <= ord("z"))
    if by == "bigram":
        return Counter(first * 256 + second for first, second in itertools.pairwise(text))
    return Counter(map(ord, text.decode("utf-8", errors="replace")))


def nonzero(row: Any) -> dict[int, int]:
    return {int(place): int(row[place]) for place in np.flatnonzero(row)}


def as_data(text: bytes, shift: int = 0) -> np.ndarray:
    """The text as uint8, beginning ``shift`` bytes after an aligned address."""
    buffer = np.zeros(len(text) + shift + 16, np.uint8)
    first = -buffer.ctypes.data % 16 + shift
    data = buffer[first : first + len(text)] if first + len(text) <= len(buffer) else np.empty(0, np.uint8)
    if len(data) < len(text):
        return as_data(text, shift - 16) if shift >= 16 else np.frombuffer(text, np.uint8)
    data[:] = np.frombuffer(text, np.uint8)
    return data


texts = st.one_of(
    st.binary(max_size=80),
    st.lists(st.sampled_from(list(EDGES)), max_size=60).map(bytes),
    st.lists(
        st.sampled_from(MALFORMED + [word.encode("utf-8", "surrogatepass") for word in WELL_FORMED])
    ).map(b"".join),
)


@pytest.mark.parametrize("by", KINDS)
def test_shape_and_dtype(device: str, by: str) -> None:
    data = np.frombuffer(b"Tilewright", np.uint8)
    counts = histogram(data, by=by, device=device)
    assert isinstance(counts, np.ndarray)
    assert counts.shape == (BINS[by],) == (KINDS[by].bins,)
    assert counts.dtype == np.int64
    assert histogram(data, by=by, offsets=[0, 10], device=device).shape == (1, BINS[by])


@pytest.mark.parametrize(
    ("code", "bins", "words"),
    [
        (CODEPOINT + 1, 10, "which kernels do not know"),
        (-1, 10, "which kernels do not know"),
        (LETTER, 10, "into 26"),
        (ASCII, 256, "into 128"),
        (CODEPOINT, 1 << 16, "into 1114112"),
    ],
)
def test_a_kind_whose_tokens_would_miss_its_bins_cannot_be_made(code: int, bins: int, words: str) -> None:
    with pytest.raises(ValueError, match=f"kind 'vowel' has .*code {code}.* {words}"):
        Kind("vowel", code, bins, 0, 0, "A, E, I, O, U")


def test_a_byte_has_no_bin_in_a_kind_that_is_not_known() -> None:
    unknown = {folded_bin(value, code) for value in range(256) for code in (-1, CODEPOINT + 1)}
    assert unknown == {-1}


@pytest.mark.sample(14)
@pytest.mark.parametrize("by", KINDS)
@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 255, 256, 257])
def test_lengths_and_alignments(device: str, by: str, length: int, rng: np.random.Generator) -> None:
    for shift in SHIFTS:
        text = rng.choice(np.frombuffer(EDGES, np.uint8), length).tobytes()
        assert nonzero(histogram(as_data(text, shift), by=by, device=device)) == expected(text, by)


@pytest.mark.sample(4)
@pytest.mark.skipif(SIMULATOR, reason="too long a text for the simulator")
@pytest.mark.parametrize("by", KINDS)
@pytest.mark.parametrize("length", [1023, 1024, 1025, 1031, 100_003])
def test_long_texts_take_the_fast_path(device: str, by: str, length: int, rng: np.random.Generator) -> None:
    for bytes_used in (b"e", b"The quick brown fox. ", EDGES, bytes(range(256))):
        text = rng.choice(np.frombuffer(bytes_used, np.uint8), length).tobytes()
        for shift in (0, 3):
            assert nonzero(histogram(as_data(text, shift), by=by, device=device)) == expected(text, by)


@few_when_simulated
@given(text=texts, by=st.sampled_from(sorted(KINDS)))
def test_any_text(device: str, text: bytes, by: str) -> None:
    assert nonzero(histogram(np.frombuffer(text, np.uint8), by=by, device=device)) == expected(text, by)


@pytest.mark.parametrize("text", MALFORMED, ids=bytes.hex)
def test_malformed_utf8_counts_as_python_replaces(device: str, text: bytes) -> None:
    for wrapped in (b"x" + text + b"y", text, text + text, "€".encode() + text + b"\xbf")[
        : 2 if SIMULATOR else 4
    ]:
        counts = histogram(np.frombuffer(wrapped, np.uint8), by="codepoint", device=device)
        assert nonzero(counts) == expected(wrapped, "codepoint")


TAILS = [b"", b"\x7f", b"\x80", b"\xbf", b"\xc2", b"\x80\x80", b"\x80\x41", b"\xbf\xbf\xbf"]


@pytest.mark.skipif(
    SIMULATOR, reason="the decoder is the same text; half a million short texts are for the host"
)
def test_every_two_byte_text_with_every_tail(device: str) -> None:
    # One document, in which the "A" behind each text ends whatever it has begun.
    pairs = [bytes([first, second]) for first in range(256) for second in range(256)]
    text = b"".join(pair + tail + b"A" for tail in TAILS for pair in pairs)
    counts = histogram(np.frombuffer(text, np.uint8), by="codepoint", device=device)
    assert nonzero(counts) == expected(text, "codepoint")


@pytest.mark.skipif(SIMULATOR, reason="the decoder is the same text")
def test_characters_that_end_with_their_document(device: str) -> None:
    # Every kind of lead byte before every kind of second one, at the edges of what each lead allows.
    firsts = bytes.fromhex("41 80 bf c1 c2 df e0 e1 ed ef f0 f3 f4 f5")
    seconds = bytes.fromhex("41 7f 80 8f 90 9f a0 bf c2")
    chosen = [bytes([first, second]) + tail for first in firsts for second in seconds for tail in TAILS]
    offsets = np.cumsum([0] + [len(document) for document in chosen])
    data = np.frombuffer(b"".join(chosen), np.uint8)
    counts = np.zeros(BINS["codepoint"], np.int64)
    for first in range(0, len(chosen), 16):  # rows of 9 MB: sixteen documents at a time
        rows = histogram(data, by="codepoint", offsets=offsets[first : first + 17], device=device)
        counts += rows.sum(axis=0)
    want: Counter[int] = Counter()
    for document in chosen:
        want += expected(document, "codepoint")
    assert nonzero(counts) == want


def cut_and_count(device: str, text: bytes, by: str, cuts: list[int]) -> np.ndarray:
    """The sum of the counts of pieces, each read with the margins that its kind asks for."""
    kind = KINDS[by]
    edges = [0, *sorted(cuts), len(text)]
    total = np.zeros(kind.bins, np.int64)
    for start, stop in itertools.pairwise(edges):
        first, last = max(0, start - kind.before), min(len(text), stop + kind.after)
        piece = np.frombuffer(text[first:last], np.uint8)
        total += piece_counts(piece, by=by, start=start - first, stop=stop - first, device=device)
    return total


@few_when_simulated
@given(data=st.data(), text=texts, by=st.sampled_from(["byte", "letter", "bigram", "codepoint"]))
def test_cuts_never_matter(device: str, data: st.DataObject, text: bytes, by: str) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=4))
    assert nonzero(cut_and_count(device, text, by, cuts)) == expected(text, by)


@pytest.mark.sample(1)
@pytest.mark.parametrize("by", ["bigram", "codepoint"])
def test_every_cut_of_multibyte_text(device: str, by: str) -> None:
    for text in [
        *MALFORMED[:: 6 if SIMULATOR else 1],
        "€😀é".encode() if SIMULATOR else "a€b😀c日é".encode(),
        b"\xe2\x82\xac\xf0\x9f\x98\xf0\x9f\x98\x80\x80\xc3",
    ]:
        for cut in range(len(text) + 1):
            assert nonzero(cut_and_count(device, text, by, [cut])) == expected(text, by), (text, cut)


@few_when_simulated
@given(documents=st.lists(texts, max_size=6), by=st.sampled_from(["byte", "ascii", "letter", "bigram"]))
@example(documents=[], by="byte")
@example(documents=[b"", b"", b"a", b""], by="bigram")
@example(documents=[b"ab", b"cd"], by="bigram")
def test_documents_have_rows_of_their_own(device: str, documents: list[bytes], by: str) -> None:
    offsets = np.cumsum([3] + [len(document) for document in documents])
    data = np.frombuffer(b"xyz" + b"".join(documents) + b"tail", np.uint8)
    rows = histogram(data, by=by, offsets=offsets, device=device)
    assert rows.shape == (len(documents), BINS[by])
    assert [nonzero(row) for row in rows] == [expected(document, by) for document in documents]


def test_no_character_reaches_over_a_document_edge(device: str) -> None:
    text = "é€😀".encode()
    offsets = list(range(len(text) + 1))
    rows = histogram(np.frombuffer(text, np.uint8), by="codepoint", offsets=offsets, device=device)
    assert [nonzero(row) for row in rows] == [{0xFFFD: 1}] * len(text)


@pytest.mark.skipif(SIMULATOR, reason="too long a text for the simulator")
@pytest.mark.parametrize("by", KINDS)
def test_small_and_large_documents_over_several_threads(
    by: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(histogram_host, "JOB_NBYTES", 5000)
    monkeypatch.setattr(histogram_host, "cpu_threads", lambda: 3)
    lengths = [0, 10, 4990, 1, 20_000, 3, 3, 60_001, 0, 0, 5000, 2500, 2500, 1, 0]
    offsets = np.cumsum([0, *lengths])
    data = rng.choice(np.frombuffer(EDGES, np.uint8), offsets[-1])
    rows = histogram(data, by=by, offsets=offsets, device="cpu")
    for row, start, stop in zip(rows, offsets, offsets[1:], strict=False):
        assert nonzero(row) == expected(data[start:stop].tobytes(), by)


@pytest.mark.skipif(SIMULATOR, reason="host threads")
def test_many_callers_at_once(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histogram_host, "JOB_NBYTES", 4096)
    data = rng.integers(0, 256, 100_000, dtype=np.uint8)
    want = np.bincount(data, minlength=256)
    results: list[Any] = [None] * 6

    def call(place: int) -> None:
        results[place] = histogram(data, device="cpu")

    threads = [threading.Thread(target=call, args=(place,)) for place in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        np.testing.assert_array_equal(result, want)


def test_skipped(device: str) -> None:
    text = "naïve café".encode()
    data = np.frombuffer(text, np.uint8)
    assert KINDS["ascii"].skipped(int(histogram(data, by="ascii", device=device).sum()), len(text)) == 4
    assert KINDS["letter"].skipped(int(histogram(data, by="letter", device=device).sum()), len(text)) == 5
    assert KINDS["byte"].skipped(int(histogram(data, by="byte", device=device).sum()), len(text)) == 0
    assert KINDS["bigram"].skipped(int(histogram(data, by="bigram", device=device).sum()), len(text)) == 0


def test_strided_offsets(device: str) -> None:
    data = np.arange(40, dtype=np.uint8)
    offsets = np.array([0, 99, 10, 99, 30, 99])[::2]
    rows = histogram(data, offsets=offsets, device=device)
    assert [int(row.sum()) for row in rows] == [10, 20]


def test_strided_host_data_is_counted_as_it_reads(device: str) -> None:
    data = np.arange(200, dtype=np.uint8)
    assert nonzero(histogram(data[::-3], device=device)) == Counter(data[::-3].tolist())


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"by": "word"}, OptionError, ["'word'", "'bigram'", "'letter'"]),
        ({"by": ["byte"]}, OptionError, ["['byte']", "'bigram'"]),
        ({"data": np.zeros(3, np.int64)}, DTypeError, ["int64", "uint8"]),
        ({"data": np.zeros((2, 2), np.uint8)}, ShapeError, ["2 dimensions"]),
        ({"offsets": [0, 11]}, ShapeError, ["11", "10"]),
        ({"offsets": [-1, 5]}, ShapeError, ["-1"]),
        ({"offsets": [0, 5, 4, 6]}, ShapeError, ["entry 2 (4)", "entry 1 (5)"]),
        ({"offsets": [0.0, 1.5]}, DTypeError, ["float64"]),
        ({"offsets": []}, ShapeError, ["documents + 1"]),
        ({"offsets": [[0, 1]]}, ShapeError, ["(1, 2)"]),
        ({"device": "tpu"}, OptionError, ["'tpu'", "'cpu'"]),
    ],
)
def test_bad_arguments(
    device: str, arguments: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    call = {"data": np.zeros(10, np.uint8), "device": device} | arguments
    with pytest.raises(error) as caught:
        histogram(call.pop("data"), **call)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("by", ["byte", "letter", "bigram"])
def test_out_is_overwritten_and_returned(device: str, by: str) -> None:
    data = np.frombuffer(b"To be, or not to be", np.uint8)
    for offsets in (None, [0, 19], [0, 5, 5, 13, 19], [3]):
        want = histogram(data, by=by, offsets=offsets, device=device)
        out = np.full(want.shape, 77)
        assert histogram(data, by=by, offsets=offsets, out=out, device=device) is out
        np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("by", ["byte", "bigram"])
def test_offsets_that_are_checked_once(device: str, by: str) -> None:
    data = np.frombuffer(b"To be, or not to be", np.uint8)
    places = np.array([1, 5, 5, 13, 19])
    offsets = DocumentOffsets(places)
    assert (len(offsets), offsets.start, offsets.stop, offsets.longest) == (4, 1, 19, 8)
    assert offsets.at_least(6) == [2, 3]
    want = histogram(data, by=by, offsets=places, device=device)
    places[:] = 99  # they were copied
    for _ in range(2):
        np.testing.assert_array_equal(histogram(data, by=by, offsets=offsets, device=device), want)
    with pytest.raises(ShapeError, match="19"):
        histogram(data[:18], by=by, offsets=offsets, device=device)
    with pytest.raises(ValueError, match="read-only"):
        offsets.host[0] = 3


@pytest.mark.parametrize("offsets", [[0, 5, 4, 6], [-1, 5], [0.0, 1.5], [], [[0, 1]]])
def test_offsets_that_are_refused(offsets: Any) -> None:
    with pytest.raises((ShapeError, DTypeError)):
        DocumentOffsets(offsets)


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (np.zeros(255, np.int64), ["int64[255]", "int64[256]"]),
        (np.zeros((1, 256), np.int64), ["int64[1, 256]"]),
        (np.zeros(256, np.int32), ["int32[256]"]),
        (np.zeros(512, np.int64)[::2], ["strides of (16,)", "contiguous"]),
        ([0] * 256, ["list", "NumPy array"]),
        (np.broadcast_to(np.int64(0), (256,)), ["strides"]),
        (np.frombuffer(bytes(2048), np.int64), ["read-only"]),
    ],
)
def test_outputs_that_are_refused(device: str, out: Any, words: list[str]) -> None:
    with pytest.raises(OutputError) as caught:
        histogram(np.zeros(10, np.uint8), out=out, device=device)
    for word in words:
        assert word in str(caught.value)


def test_an_output_over_the_text_is_refused(device: str) -> None:
    out = np.zeros(256, np.int64)
    with pytest.raises(OutputError, match="overlaps"):
        histogram(out.view(np.uint8)[:100], out=out, device=device)


@pytest.mark.skipif(SIMULATOR, reason="its arrays are NumPy's")
@pytest.mark.parametrize("nbytes", [0, 10])
def test_an_output_is_checked_also_for_an_empty_text(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of it is written, by stores of 16 bytes on the current device."""
    fake_gpu.install(monkeypatch)
    data, begin = fake_gpu.Array(0x700000000000 if nbytes else 0, (nbytes,), "u1"), 0x710000000000
    with pytest.raises(OutputError, match=r"0x710000000008, which is no multiple of 16"):
        histogram(data, offsets=[0, 0, 0], out=fake_gpu.Array(begin + 8, (2, 256), "i8"))
    monkeypatch.setattr(
        sys.modules[piece_counts.__module__], "device_index", lambda array: int(address(array) >= begin)
    )
    with pytest.raises(OutputError, match=r"out lies on GPU 1 and data .*on GPU 0"):
        histogram(data, offsets=[0, 0, 0], out=fake_gpu.Array(begin, (2, 256), "i8"))


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 11)])
def test_piece_outside_its_data(device: str, start: int, stop: int) -> None:
    with pytest.raises(OptionError, match=f"start={start}"):
        piece_counts(np.zeros(10, np.uint8), start=start, stop=stop, device=device)


@pytest.mark.skipif(cuda_available(), reason="there is a GPU, or the simulator")
def test_cuda_without_a_gpu_is_an_error() -> None:
    with pytest.raises(DeviceUnavailableError, match="auto"):
        histogram(np.zeros(10, np.uint8), device="cuda")
