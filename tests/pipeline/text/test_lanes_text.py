"""The text of a piece on a device, which host memory pretends to be: what comes where, and what is counted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.gpu.pretended_driver import BLOCK, Driver, run
from tests.pipeline.text.test_counting import dense, naive_counts
from tests.sampling import examples
from tilewright.kernels.histograms.tokens import KINDS
from tilewright.pipeline.text.corpus import Piece, cut_pieces, list_corpus
from tilewright.pipeline.text.gpu import lanes
from tilewright.pipeline.transfer.file_upload import Upload
from tilewright.pipeline.worker import tasks
from tilewright.pipeline.worker.survey import free_what_is_over


class HostTally:
    """Counts by Python what a tally would have the GPU count."""

    stream = None

    def __init__(self, bins: int) -> None:
        self.counts = np.zeros(bins, np.int64)


def count(
    data: np.ndarray, lo: int, hi: int, start: int, stop: int, kind: Any, counts: np.ndarray, _: Any
) -> None:
    assert lo <= start <= stop <= hi <= len(data)

    def until(end: int) -> np.ndarray:
        """Tokens that begin before ``end``: kinds of one byte or two."""
        return dense(naive_counts(data[lo : min(end + kind.after, hi)].tobytes(), kind.name), kind.bins)

    counts += until(stop) - until(start)


@pytest.mark.sample(2)
@pytest.mark.parametrize("by", ["byte", "letter", "bigram"])
@settings(deadline=None, max_examples=examples(40))
@given(data=st.data())
def test_every_token_is_counted_once(
    tmp_path_factory: pytest.TempPathFactory, by: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    lengths = data.draw(
        st.lists(st.sampled_from([0, 1, 2, 255, 256, 257, 1000, 2500]), min_size=1, max_size=5)
    )
    rng = np.random.default_rng(sum(lengths))
    texts = [rng.integers(96, 100, length, np.uint8).tobytes() for length in lengths]
    for i, text in enumerate(texts):
        (folder / f"{i:03}").write_bytes(text)
    kind = KINDS[by]
    tally: Any = HostTally(kind.bins)
    nbytes = 0
    driver = Driver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "address", lambda memory: memory.ctypes.data)
        patch.setattr(
            lanes, "Upload", lambda wanted, _, threads: Upload(wanted, BLOCK, threads, driver.functions)
        )
        patch.setattr(lanes, "add_counts", count)
        for piece in cut_pieces(
            list_corpus([folder]).documents, data.draw(st.sampled_from([300, 1000, 10**6]))
        ):
            nbytes += one(piece, kind, tally)
    assert nbytes == sum(lengths)
    expected = sum(
        (dense(naive_counts(text, by), kind.bins) for text in texts), np.zeros(kind.bins, np.int64)
    )
    np.testing.assert_array_equal(tally.counts, expected)


def one(piece: Piece, kind: Any, tally: Any) -> int:
    begin, end, place = lanes._spans(piece, kind)[-1]
    text = lanes.Text(piece, kind, np.full(max(1, place + end - begin), 97, np.uint8))
    upload = text.upload(2, 1)
    run(upload, 2)
    assert upload.failed() == []
    return text.count(tally)


def test_a_document_that_became_shorter_is_not_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"x" * 3000)
    (document,) = list_corpus([tmp_path]).documents
    (tmp_path / "a").write_bytes(b"x" * 2999)
    driver = Driver()
    monkeypatch.setattr(lanes, "address", lambda memory: memory.ctypes.data)
    monkeypatch.setattr(
        lanes, "Upload", lambda wanted, _, threads: Upload(wanted, BLOCK, threads, driver.functions)
    )
    text = lanes.Text(Piece(0, (document,), 0, 3000), KINDS["byte"], np.zeros(3000, np.uint8))
    upload = text.upload(1, 1)  # names the text's memory by its address alone
    run(upload, 1)
    assert upload.failed() == [0]


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is the host's."""
    monkeypatch.setattr(lanes.cuda, "current_context", lambda: None)
    monkeypatch.setattr(lanes.cuda, "device_array", np.empty)
    monkeypatch.setattr(lanes._spare_texts, "_kept", {})


FREEING = pytest.mark.parametrize(
    "free", [partial(free_what_is_over, "cuda"), tasks.release_memory], ids=["survey", "release"]
)


@FREEING
def test_another_job_finds_the_memory_of_texts_free(
    free: Callable[[], None], pretended_gpu: None, tmp_path: Path
) -> None:
    (tmp_path / "a").write_bytes(b"text")
    (piece,) = cut_pieces(list_corpus([tmp_path]).documents, 2**20)
    with lanes.borrowed_text(piece, KINDS["byte"]) as text:
        with lanes.borrowed_text(piece, KINDS["byte"]):
            pass
        assert len(lanes._spare_texts.kept()) == 1
        free()
        assert lanes._spare_texts.kept() == []
        assert text._data.size == lanes.TEXT_STEP_NBYTES, "what a task has in hand stays"
    assert len(lanes._spare_texts.kept()) == 1
    free()
    assert lanes._spare_texts.kept() == []
