"""Histograms and dot products through the pipeline on a GPU equal those of the CPU."""

from __future__ import annotations

import gzip
import os
from contextlib import ExitStack
from pathlib import Path

import dask
import numpy as np
import pytest
import zarr
import zstandard
from distributed import Client

from tests.kernels import naive
from tilewright.kernels.histograms.tokens import KINDS
from tilewright.pipeline.dot import BLOCK
from tilewright.pipeline.errors import CorpusError
from tilewright.pipeline.events import Event, Notice
from tilewright.pipeline.text.corpus import Corpus, list_corpus
from tilewright.pipeline.text.counting import count_corpus
from tilewright.pipeline.text.histogram import Histogram
from tilewright.pipeline.transfer.lane_blocks import LANE_NBYTES
from tilewright.pipeline.worker.survey import survey
from tilewright.workflows.dot import dot
from tilewright.workflows.histogram import histogram

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of many sizes, cut into pieces within characters, empty ones too."""
    rng = np.random.default_rng(5)
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "bytes").write_bytes(rng.integers(0, 256, 300_001, np.uint8).tobytes())
    (folder / "text").write_bytes("Straße — 東京 💡 ".encode() * 12_345)
    (folder / "empty").write_bytes(b"")
    for i in range(200):
        (folder / f"{i:03}").write_bytes(b"tile \xe2\x82"[: i % 8] * i)
    return folder


@pytest.mark.parametrize("by", list(KINDS))
@pytest.mark.parametrize("per_document", [False, True])
def test_histograms(client: Client, corpus: Path, by: str, per_document: bool) -> None:
    paths = sorted(corpus.iterdir())
    if per_document and by == "codepoint":
        paths = paths[-12:]  # 9 MB of counts a document
    with dask.config.set({"tilewright.piece-nbytes": 50_000}):
        found, expected = (
            histogram(paths, by=by, per_document=per_document, cluster=client, device=device)
            for device in ("cuda", "cpu")
        )
    assert found.device != "CPU"
    np.testing.assert_array_equal(found.counts, expected.counts)
    assert found.skipped == expected.skipped


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files longer than a lane's block and than a task's share, some compressed, that begin and end anywhere."""
    rng = np.random.default_rng(6)
    folder = tmp_path_factory.mktemp("large")
    text = "Übermäßig — 東京 💡 and plain words, ".encode() * 40_000
    for i, nbytes in enumerate([3 * LANE_NBYTES + 1, LANE_NBYTES, 17, 0, LANE_NBYTES + 5, 300_000]):
        data = (text * (nbytes // len(text) + 2))[i : i + nbytes]
        (folder / f"{i}.txt").write_bytes(data)
    noise = rng.integers(0, 256, 2 * LANE_NBYTES + 3, np.uint8).tobytes()
    (folder / "noise").write_bytes(noise)
    (folder / "text.zst").write_bytes(zstandard.compress(text[1:] * 12))
    (folder / "noise.gz").write_bytes(gzip.compress(noise[:5_000_001], 1))
    return folder


def on_both(
    client: Client, paths: list[Path], by: str, per_document: bool, told: list[str] | None = None
) -> None:
    """told: gets what is told of what the GPU counts more slowly."""
    notices: dict[str, list[str]] = {"cuda": [], "cpu": []}

    def counted(device: str) -> Histogram:
        def listener(event: Event) -> None:
            if isinstance(event, Notice):
                notices[device].append(event.message)

        return histogram(
            paths, by=by, per_document=per_document, cluster=client, device=device, listener=listener
        )

    found, expected = counted("cuda"), counted("cpu")
    if told is not None:
        told += [text for text in notices["cuda"] if "more slowly" in text]
    assert found.device != "CPU"
    assert found.nbytes == expected.nbytes
    assert found.skipped == expected.skipped
    np.testing.assert_array_equal(found.counts, expected.counts)


@pytest.mark.parametrize("by", list(KINDS))
@pytest.mark.parametrize("per_document", [False, True])
@pytest.mark.parametrize("compressed", [False, True])
def test_files_larger_than_a_lane(
    client: Client, large: Path, by: str, per_document: bool, compressed: bool
) -> None:
    paths = [path for path in sorted(large.iterdir()) if compressed or path.suffix not in (".gz", ".zst")]
    on_both(client, paths, by, per_document)


@pytest.mark.parametrize("by", list(KINDS))
def test_blocks_cut_within_characters(client: Client, large: Path, by: str) -> None:
    """Blocks of an odd length: thousands of cuts, hundreds of blocks of each lane, and many tasks at once."""
    with dask.config.set({"tilewright.piece-nbytes": 99_991, "tilewright.read-threads": 5}):
        on_both(client, sorted(large.iterdir()), by, False)


def test_lanes_and_tallies_are_kept(client: Client, large: Path) -> None:
    """Where there are as many as can be in use at once, runs use these and no others."""
    from tilewright.pipeline.text.gpu import lanes

    bins, threads, tasks = KINDS["bigram"].bins, 4, sum(client.nthreads().values())
    with ExitStack() as stack:
        for _ in range(2 * threads + tasks):  # for those that read, those that decompress, and the tasks' own
            stack.enter_context(lanes.borrowed_lane())
        for _ in range(tasks):
            stack.enter_context(lanes.borrowed_tally(bins))
    made = set(lanes._spare_lanes.kept()), set(lanes._spare_tallies.kept(bins))
    with dask.config.set({"tilewright.read-threads": threads, "tilewright.decompress-threads": threads}):
        for _ in range(3):
            on_both(client, [large], "bigram", False)
            assert (set(lanes._spare_lanes.kept()), set(lanes._spare_tallies.kept(bins))) == made


def test_text_that_the_gpu_has_no_room_for_is_counted_block_by_block(
    client: Client, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilewright.pipeline.text.gpu import lanes
    from tilewright.pipeline.text.gpu.texts import BLOCKS_NO_ROOM

    monkeypatch.setattr(lanes._spare_texts, "_kept", {})
    monkeypatch.setattr(lanes, "TEXT_STEP_NBYTES", 2**42)  # more than any GPU has
    told: list[str] = []
    on_both(client, sorted(large.glob("*.txt")), "bigram", False, told)
    assert lanes._spare_texts.kept() == []
    (notice,) = told
    assert notice.endswith(BLOCKS_NO_ROOM)
    monkeypatch.undo()
    on_both(client, sorted(large.glob("*.txt")), "bigram", False)
    assert lanes._spare_texts.kept()


def test_a_file_that_shrinks_fails_and_the_next_run_counts(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"abc" * LANE_NBYTES)
    corpus = list_corpus([path])
    os.truncate(path, LANE_NBYTES + 1)

    def count(corpus: Corpus) -> Histogram:
        workers = survey(client, "cuda")
        return count_corpus(
            client, corpus, KINDS["byte"], workers, per_document=False, listener=lambda _: None
        )

    with pytest.raises(CorpusError, match=f"shrank from {3 * LANE_NBYTES} to {LANE_NBYTES + 1} bytes"):
        count(corpus)
    path.write_bytes(b"abc" * LANE_NBYTES)
    found = count(list_corpus([path]))
    assert found.counts[list(b"abc")].tolist() == [LANE_NBYTES] * 3
    assert found.counts.sum() == found.nbytes == 3 * LANE_NBYTES


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint16", "float16", "float32", "float64", "complex64"])
def test_dot_products(client: Client, tmp_path: Path, rng: np.random.Generator, dtype: str) -> None:
    n = 3 * 2**20 + 7
    values = [(rng.standard_normal(n) * 50).astype(dtype) for _ in "xy"]
    for name, vector in zip("xy", values, strict=True):
        array = zarr.create_array(str(tmp_path / name), shape=(n,), chunks=(400_000,), dtype=dtype)
        array[...] = vector
    results = {dot(tmp_path / "x", tmp_path / "y", cluster=client, device="cuda").tobytes() for _ in range(3)}
    assert len(results) == 1
    result = naive.stored_dtype(dtype, dtype, n)
    (found,) = (np.frombuffer(bits, result)[0] for bits in results)
    if result.kind in "iu":
        assert found == np.vdot(*(vector.astype(result) for vector in values))
        assert found == dot(tmp_path / "x", tmp_path / "y", cluster=client, device="cpu")
    else:
        wide = [vector.astype(np.complex128) for vector in values]
        scale = float(np.sqrt(np.sum(np.abs(wide[0] * wide[1]) ** 2)))
        exact = np.vdot(*wide)
        if np.dtype(dtype) == np.float16 and abs(exact) > np.finfo(dtype).max:
            assert np.isinf(found)
        else:
            # What roundings of random sign add up to over a block, the exact product's own included.
            assert abs(found - exact) <= np.finfo(dtype).eps * np.sqrt(BLOCK) * max(scale, abs(exact))
