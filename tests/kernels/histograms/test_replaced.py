"""U+FFFD that a text holds, told apart from those that stand for malformed bytes."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tilewright.kernels.cpu.vectors import LANES
from tilewright.kernels.histograms.host import count_host
from tilewright.kernels.histograms.replaced import WRITTEN, undecoded
from tilewright.kernels.histograms.tokens import kind_named

PIECES = st.sampled_from(
    [WRITTEN, WRITTEN[:1], WRITTEN[:2], WRITTEN[1:], b"plain", b"-" * LANES, "é漢".encode()]
)


@given(pieces=st.lists(PIECES, max_size=60), cuts=st.lists(st.integers(0, 4000), max_size=4))
def test_those_of_malformed_bytes_are_counted_apart(pieces: list[bytes], cuts: list[int]) -> None:
    text = b"".join(pieces)
    edges = sorted([0, len(text), *(cut % (len(text) + 1) for cut in cuts)])
    documents = [text[low:high] for low, high in itertools.pairwise(edges)]
    kind = kind_named("codepoint")
    data, places = np.frombuffer(text, np.uint8), np.array(edges, np.int64)
    counts = count_host(data, kind, places, 0, len(text))
    found = undecoded(counts, kind, data, places, 0, len(text))
    wanted = [part.decode(errors="replace").count("\ufffd") - part.count(WRITTEN) for part in documents]
    assert found.tolist() == wanted
