"""The lines of files that lie one behind the other are those that each file has by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.kernels.duplicates.device_lines import Newlines
from tilewright.pipeline.duplicates.lines_on_gpu import lines_of
from tilewright.pipeline.text.corpus import list_corpus
from tilewright.pipeline.text.gpu import chunks as gpu_chunks
from tilewright.pipeline.text.gpu.chunks import chunks_of

texts = st.lists(st.sampled_from([b"\n", b"\r", b"\r\n", b"a", b"bc"]), max_size=8).map(b"".join)


def newlines(data: bytes) -> Newlines:
    places = [place for place, byte in enumerate(data) if byte == 0x0A]
    returns = [place > 0 and data[place - 1] == 0x0D for place in places]
    return Newlines(np.array(places, np.int64), np.array(returns, np.bool_))


def lines(data: bytes) -> list[bytes]:
    """A line ends before its newline, and before a carriage return in front of that; the last needs none."""
    found = data.split(b"\n")
    ended = [line.removesuffix(b"\r") for line in found[:-1]]
    return ended + ([found[-1]] if found[-1] else [])


@given(st.lists(texts, max_size=5))
def test_lines_of_files_one_behind_the_other(files: list[bytes]) -> None:
    data = b"".join(files)
    found = lines_of(newlines(data), np.array([len(each) for each in files], np.int64))
    expected = [line for each in files for line in lines(each)]
    assert [data[a:b] for a, b in zip(found.edges[:-1], found.ends, strict=True)] == expected
    assert found.counts.tolist() == [len(lines(each)) for each in files]
    assert found.edges.tolist() == sorted(found.edges.tolist())
    assert found.edges[-1] == len(data)


@pytest.mark.parametrize("look_nbytes", [1, 2, 64])
@pytest.mark.parametrize("nbytes", [1, 7, 30, 1000])
def test_chunks_are_cut_behind_lines(
    nbytes: int, look_nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [b"one\ntwo\n\nthree and four\r\nfive", b"", b"\n\n", b"x" * 40 + b"\n", b"the end"]
    for number, data in enumerate(files):
        (tmp_path / str(number)).write_bytes(data)
    documents = list_corpus([tmp_path]).documents
    monkeypatch.setattr(gpu_chunks, "LOOK_NBYTES", look_nbytes)
    chunks = list(chunks_of(documents, nbytes))
    found = [b""] * len(files)
    for chunk in chunks:
        assert chunk
        for span in chunk:
            part = files[span.place][span.start : span.stop]
            assert span.start == len(found[span.place])
            assert part.endswith(b"\n") or span.stop == len(files[span.place])
            found[span.place] += part
    assert found == files
    longest = max(len(line) + 2 for data in files for line in lines(data))
    assert max(sum(span.stop - span.start for span in chunk) for chunk in chunks) <= nbytes + longest
    monkeypatch.setattr(gpu_chunks, "MOST_LINE_NBYTES", 20)
    if nbytes < 10 and look_nbytes < 20:
        with pytest.raises(gpu_chunks.TooLongError):
            list(chunks_of(documents, nbytes))


@pytest.mark.parametrize(("files", "most", "wanted"), [(7, 3, [3, 3, 1]), (6, 3, [3, 3]), (4, 9, [4])])
def test_chunks_have_so_many_spans_at_most(
    files: int, most: int, wanted: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(files):
        (tmp_path / str(number)).write_bytes(b"a\n")
    monkeypatch.setattr(gpu_chunks, "MOST_SPANS", most)
    chunks = list(chunks_of(list_corpus([tmp_path]).documents, 1000))
    assert [len(chunk) for chunk in chunks] == wanted
    assert [span.place for chunk in chunks for span in chunk] == list(range(files))
