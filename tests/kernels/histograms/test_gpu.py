"""The fast histogram kernels on a real GPU, at every edge of theirs, and their machine code where there is
none."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import cuda

from tests.kernels.gemm.machine_code import assemble, assert_no_spills
from tilewright.kernels import DocumentOffsets, histogram
from tilewright.kernels.errors import OptionError, OutputError, ShapeError
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.histograms.api import KINDS, piece_counts
from tilewright.kernels.histograms.host import count_host
from tilewright.kernels.histograms.portable import KERNELS, launch_portable
from tilewright.kernels.histograms.select import _portions

if SIMULATOR:
    pytest.skip("the simulator runs no PTX", allow_module_level=True)

from tilewright.kernels.histograms import bytes as histogram_bytes
from tilewright.kernels.histograms import documents as histogram_documents
from tilewright.kernels.histograms import wide as histogram_wide
from tilewright.kernels.histograms.documents import GROUP, GROUPS, HALF, LARGE, MIN_SLICE, OVERHEAD

CHUNK = GROUPS * GROUP * HALF * 16
"""Bytes that a warp counts before its counters of eight bits could overflow."""
ROUND = histogram_bytes.THREADS * histogram_bytes.UNROLL * 16
"""Bytes that a block takes at a time."""
ENGLISH = (
    b"It was the best of times, it was the worst of times; \xe2\x80\x9cit was the age of wisdom\xe2\x80\x9d, "
    b"it was the epoch of incredulity \xe2\x80\x94 na\xc3\xafve, \xf0\x9f\x98\x80. "
)


def host(data: np.ndarray, by: str, offsets: Any = None) -> np.ndarray:
    bounds = np.array([0, len(data)]) if offsets is None else np.asarray(offsets)
    return count_host(data, KINDS[by], bounds, int(bounds[0]), int(bounds[-1]))


def text_of(kind: str, length: int, rng: np.random.Generator) -> np.ndarray:
    if kind == "uniform":
        return rng.integers(0, 256, length, dtype=np.uint8)
    if kind == "one letter":
        return np.full(length, ord("e"), np.uint8)
    if kind == "runs":
        return np.repeat(rng.integers(96, 100, length // 50 + 1, dtype=np.uint8), 50)[:length]
    if kind == "chinese":
        return np.frombuffer(("天地玄黃宇宙洪荒" * (length // 24 + 1)).encode()[:length], np.uint8)
    if kind == "russian":
        return np.frombuffer(("Привет, мир! " * (length // 20 + 1)).encode()[:length], np.uint8)
    if kind == "malformed":
        edges = np.frombuffer(bytes.fromhex("417f808f909fa0bfc0c1c2dfe0e1ecedeeeff0f1f3f4f5ff"), np.uint8)
        return rng.choice(edges, length)
    return np.frombuffer((ENGLISH * (length // len(ENGLISH) + 1))[:length], np.uint8)


def test_portions() -> None:
    offsets = np.cumsum([2, 1, 9, 0, 5, 10, 30, 2])
    documents = DocumentOffsets(offsets)
    assert list(_portions(documents, 9)) == [
        (0, 1, False),
        (1, 2, True),
        (2, 4, False),
        (4, 5, True),
        (5, 6, True),
        (6, 7, False),
    ]
    assert list(_portions(documents, 100)) == [(0, 7, False)]
    assert list(_portions(DocumentOffsets(offsets[:1]), 9)) == []


TEXTS = ["uniform", "one letter", "runs", "chinese", "russian", "malformed", "english"]


@pytest.mark.gpu
@pytest.mark.parametrize("by", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_block_boundaries_and_unaligned_starts(text: str, by: str, rng: np.random.Generator) -> None:
    data = text_of(text, 3 * ROUND + 40, rng)
    held = cuda.to_device(data)
    for length, shift in itertools.product(
        [0, 1, 15, 16, 17, 16383, 16384, 16385, ROUND - 1, ROUND, ROUND + 1, 3 * ROUND + 1], [0, 1, 13, 16]
    ):
        counts = histogram(held[shift : shift + length], by=by)
        assert not isinstance(counts, np.ndarray)
        want = host(data[shift : shift + length], by)[0]
        np.testing.assert_array_equal(counts.copy_to_host(), want, err_msg=f"length {length}, shift {shift}")


@pytest.mark.gpu
@pytest.mark.parametrize("by", ["byte", "bigram", "codepoint"])
@pytest.mark.parametrize("text", TEXTS)
def test_counters_that_fill_many_times(text: str, by: str, rng: np.random.Generator) -> None:
    data = text_of(text, 50_000_003, rng)
    np.testing.assert_array_equal(histogram(cuda.to_device(data), by=by).copy_to_host(), host(data, by)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("by", KINDS)
def test_pieces_on_the_device(by: str, rng: np.random.Generator) -> None:
    data = np.concatenate(
        [text_of("english", 5000, rng), text_of("chinese", 5000, rng), text_of("uniform", 999, rng)]
    )
    held, kind = cuda.to_device(data), KINDS[by]
    total = np.zeros(kind.bins, np.int64)
    cuts = sorted({0, len(data), *rng.integers(0, len(data), 40).tolist()})
    for start, stop in itertools.pairwise(cuts):
        first, last = max(0, start - kind.before), min(len(data), stop + kind.after)
        counts = piece_counts(held[first:last], by=by, start=start - first, stop=stop - first)
        total += counts.copy_to_host()
    np.testing.assert_array_equal(total, host(data, by)[0])


LENGTHS = {
    "tiny": [3] * 5000,
    "empty": [0] * 300,
    "pages": [4096] * 3000,
    "edges": [
        edge + more
        for edge in (16, 256, 1024, CHUNK, 2 * CHUNK, LARGE, LARGE + OVERHEAD, MIN_SLICE, 10 * LARGE)
        for more in (-1, 0, 1, 15)
    ],
    "one large among small": [10] * 100 + [5_000_000] + [0, 1, 7] * 100,
    "two far too large": [100, 16 << 20, 0, (16 << 20) + 1, 5000, 3],
    "large": [LARGE + 1] * 50,
    "two": [1, 1],
}


@pytest.mark.gpu
@pytest.mark.parametrize("by", ["byte", "ascii", "letter"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("text", ["uniform", "one letter", "english"])
def test_documents_of_every_length(text: str, lengths: str, by: str, rng: np.random.Generator) -> None:
    offsets = np.cumsum([5, *LENGTHS[lengths]])
    data = text_of(text, int(offsets[-1]) + 20, rng)
    rows = histogram(cuda.to_device(data), by=by, offsets=offsets).copy_to_host()
    np.testing.assert_array_equal(rows, host(data, by, offsets))


@pytest.mark.gpu
@pytest.mark.parametrize("by", ["byte", "letter"])
def test_documents_of_mixed_lengths_in_any_order(by: str, rng: np.random.Generator) -> None:
    lengths = np.exp(rng.uniform(0, np.log(300_000), 800)).astype(int)
    offsets = np.cumsum([0, *lengths])
    data = text_of("english", int(offsets[-1]), rng)
    rows = histogram(cuda.to_device(data), by=by, offsets=cuda.to_device(offsets)).copy_to_host()
    np.testing.assert_array_equal(rows, host(data, by, offsets))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lengths", "by"),
    [
        (lengths, by)
        for by in ("byte", "ascii", "letter", "bigram")
        for lengths, each in LENGTHS.items()
        if by != "bigram" or len(each) < 1000  # whose rows take half a megabyte each
    ],
)
def test_kept_offsets_and_given_outputs(lengths: str, by: str, rng: np.random.Generator) -> None:
    offsets = np.cumsum([5, *LENGTHS[lengths]])
    data = text_of("english", int(offsets[-1]) + 20, rng)
    held, kept, want = cuda.to_device(data), DocumentOffsets(cuda.to_device(offsets)), host(data, by, offsets)
    out = cuda.to_device(np.full(want.shape, -77))
    for stream in (None, cuda.stream(), cuda.stream()):
        out.copy_to_device(np.full(want.shape, -77))
        assert histogram(held, by=by, offsets=kept, out=out, stream=stream) is out
        cuda.synchronize()
        np.testing.assert_array_equal(out.copy_to_host(), want)


@pytest.mark.gpu
@pytest.mark.parametrize("by", KINDS)
def test_one_document_into_a_given_output(by: str, rng: np.random.Generator) -> None:
    data = text_of("english", 100_001, rng)
    out = cuda.to_device(np.full(KINDS[by].bins, -77))
    assert histogram(cuda.to_device(data), by=by, out=out) is out
    np.testing.assert_array_equal(out.copy_to_host(), host(data, by)[0])


@pytest.mark.gpu
def test_offsets_change_as_soon_as_the_call_returns(rng: np.random.Generator) -> None:
    """More calls under way than there are pinned buffers, each with offsets of its own in one host array."""
    data = text_of("uniform", 5_000_000, rng)
    held, stream = cuda.to_device(data), cuda.stream()
    offsets, rows, wanted = np.zeros(20_001, np.int64), [], []
    for turn in range(10):
        offsets[:] = np.sort(rng.integers(0, len(data), len(offsets)))
        rows.append(histogram(held, offsets=offsets, stream=stream if turn % 2 else None))
        wanted.append(offsets.copy())
        offsets[:] = 0
    cuda.synchronize()
    for found, places in zip(rows, wanted, strict=True):
        np.testing.assert_array_equal(found.copy_to_host(), host(data, "byte", places))


@pytest.mark.gpu
def test_device_outputs_that_are_refused() -> None:
    held = cuda.to_device(np.zeros(100, np.uint8))
    for out, words in (
        (cuda.device_array(257, np.int64)[1:], "multiple of 16"),
        (cuda.device_array(512, np.int64)[::2], "contiguous"),
        (cuda.device_array((1, 256), np.int64), "int64"),
        (np.zeros(256, np.int64), "device array"),
    ):
        with pytest.raises(OutputError, match=words):
            histogram(held, out=out)
    both = cuda.device_array(256, np.int64)
    with pytest.raises(OutputError, match="overlaps"):
        histogram(both.view(np.uint8)[:64], out=both)


@pytest.mark.gpu
@pytest.mark.parametrize("by", ["bigram", "codepoint"])
def test_wide_kinds_of_large_and_small_documents(by: str, rng: np.random.Generator) -> None:
    offsets = np.cumsum([2, 7, 0, 1 << 20, 3, 5000, (1 << 20) + 3, 1, 1])
    data = text_of("english", int(offsets[-1]) + 9, rng)
    rows = histogram(cuda.to_device(data), by=by, offsets=offsets).copy_to_host()
    np.testing.assert_array_equal(rows, host(data, by, offsets))


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("by", ["byte", "ascii", "letter"])
def test_lower_rungs(name: str, by: str, rng: np.random.Generator) -> None:
    data = text_of("english", 100_001, rng)
    counts = cuda.to_device(np.zeros((1, KINDS[by].bins), np.int64))
    offsets = cuda.to_device(np.array([0, len(data)]))
    launch_portable(name, cuda.to_device(data), offsets, 0, len(data), KINDS[by], counts, 0)
    np.testing.assert_array_equal(counts.copy_to_host(), host(data, by))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("by", ["byte", "letter", "bigram", "codepoint"])
def test_more_than_four_thousand_million_equal_bytes(by: str) -> None:
    length = (1 << 32) + 5
    held = cuda.device_array(length, np.uint8)
    from numba.cuda.cudadrv.driver import device_memset

    device_memset(held, ord("e"), length)
    counts = histogram(held, by=by).copy_to_host()
    place = {"byte": 0x65, "letter": 4, "bigram": 0x6565, "codepoint": 0x65}[by]
    assert {int(bin_): int(counts[bin_]) for bin_ in np.flatnonzero(counts)} == {
        place: length - (by == "bigram")
    }


@pytest.mark.gpu
def test_other_libraries_arrays_and_streams(rng: np.random.Generator) -> None:
    cupy = pytest.importorskip("cupy")
    data = rng.integers(0, 256, 1_000_000, dtype=np.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        held = cupy.asarray(data)
        counts = histogram(held, stream=stream)
        rows = histogram(held, offsets=[0, 10, 1_000_000], stream=stream)
        first, both = cupy.asarray(counts).get(), cupy.asarray(rows).get()
    np.testing.assert_array_equal(first, np.bincount(data, minlength=256))
    np.testing.assert_array_equal(both.sum(axis=0), first)


@pytest.mark.gpu
def test_device_arrays_that_are_refused() -> None:
    held = cuda.to_device(np.zeros(100, np.uint8))
    with pytest.raises(ShapeError, match="stride of 2"):
        histogram(held[::2])
    with pytest.raises(OptionError, match="cpu"):
        histogram(held, device="cpu")


@pytest.mark.gpu
def test_text_against_counter() -> None:
    text = ENGLISH * 500
    held = cuda.to_device(np.frombuffer(text, np.uint8))
    counts = histogram(held, by="codepoint").copy_to_host()
    assert {int(i): int(counts[i]) for i in np.flatnonzero(counts)} == Counter(map(ord, text.decode()))
    counts = histogram(held, by="bigram").copy_to_host()
    assert {int(i): int(counts[i]) for i in np.flatnonzero(counts)} == Counter(
        a * 256 + b for a, b in itertools.pairwise(text)
    )


SOURCES: dict[str, tuple[Callable[..., None], Any, dict[str, Any]]] = {
    "bytes": (
        histogram_bytes.source(histogram_bytes.THREADS, histogram_bytes.UNROLL),
        histogram_bytes.SIGNATURE,
        {},
    ),
    "documents": (
        histogram_documents.source(),
        histogram_documents.SIGNATURE,
        {"launch_bounds": histogram_documents.LAUNCH_BOUNDS},
    ),
    "bigrams": (histogram_wide.bigram_source(), histogram_wide.BIGRAM_SIGNATURE, {}),
    "codepoints": (
        histogram_wide.codepoint_source(),
        histogram_wide.CODEPOINT_SIGNATURE,
        {"launch_bounds": histogram_wide.CODEPOINT_BOUNDS},
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SOURCES)
def test_compiles_without_spilling(name: str, tmp_path: Path) -> None:
    function, signature, options = SOURCES[name]
    text, _ = cuda.compile_ptx(function, signature.args, cc=(9, 0), **options)
    assert "ld.global.v4" in text
    assert re.search(r"(red|atom)\.shared\.add\.u32", text)
    assert_no_spills(assemble(text, "sm_90", tmp_path))
