"""The benchmark of counting a corpus checks every contestant, and rates each by the text that it counted."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tests.pipeline.text.test_counting import dense, naive_counts
from tilewright.kernels.histograms.tokens import KINDS
from tilewright.workflows.bench import corpus
from tilewright.workflows.bench.common import WrongAnswer
from tilewright.workflows.bench.corpus import (
    make_text,
    peer_counts,
    run_corpus,
    started_processes,
    write_corpus,
)
from tilewright.workflows.cli import cli


@pytest.fixture(autouse=True)
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "UNIT_NBYTES", 1 << 16)


@pytest.mark.parametrize("nbytes", [1, 2, 3, 10])
def test_the_least_text_has_its_length(nbytes: int) -> None:
    assert len(corpus.make_text(nbytes)) == nbytes


def test_the_text_reads_like_prose() -> None:
    text = make_text(200_001)
    assert len(text) == 200_001
    assert text[: 1 << 16] == text[1 << 16 : 2 << 16]
    frequent = [byte for byte, _ in Counter(text.lower()).most_common(3)]
    assert frequent[0] == ord(" ")
    assert ord("e") in frequent
    assert b"\n" in text


@pytest.mark.parametrize("storage", ["plain", "zstd"])
@pytest.mark.parametrize("by", list(KINDS))
def test_the_peer_counts_what_ours_counts(tmp_path: Path, storage: str, by: str) -> None:
    text = "Zeile für Zeile\n".encode() * 50
    write_corpus(tmp_path / "texts", text, 2, storage)
    for path in (tmp_path / "texts").iterdir():
        found = peer_counts(str(path), by, gpu=False)
        np.testing.assert_array_equal(found, dense(naive_counts(text, by), KINDS[by].bins))


@pytest.mark.slow
def test_every_case_has_ours_the_peer_and_its_floors(tmp_path: Path) -> None:
    report, details = run_corpus(
        tmp_path,
        nbytes=600_000,
        file_nbytes=200_000,
        kinds=("byte", "bigram"),
        repeats=1,
        peer_nbytes=300_000,
    )
    assert "in 3 files" in report.title
    assert len(report.rows) == 2 * 2 * 2
    for row in report.rows:
        assert row.work == (400_000 if row.peer else 600_000)
        assert row.seconds > 0
        assert row.samples == (2 if row.peer else 1)
    assert [set(detail["floors"]) for detail in details] == [{"read", "count"}] * 2 + [
        {"decompress", "count"}
    ] * 2
    assert all(seconds > 0 for detail in details for seconds in detail["floors"].values())
    assert details[2]["stored_nbytes"] < details[0]["stored_nbytes"] == 600_000
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("there", [False, True])
def test_kvikio_reads_for_a_peer_what_needs_no_decoding(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "find_spec", lambda name: object() if there else None)
    both = ["dask.delayed + CuPy", "dask.delayed + CuPy + KvikIO"][: 1 + there]
    assert corpus.peer_names("plain", "byte", gpu=True) == both
    assert corpus.peer_names("plain", "bigram", gpu=True) == both
    assert corpus.peer_names("zstd", "byte", gpu=True) == both[:1]
    assert corpus.peer_names("plain", "codepoint", gpu=True) == both[:1]
    assert corpus.peer_names("plain", "byte", gpu=False) == ["dask.delayed + NumPy"]


def test_a_peer_that_reads_to_the_gpu_counts_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With NumPy for CuPy, and for KvikIO a reader into given memory."""

    class CuFile:
        def __init__(self, path: str, flags: str) -> None:
            assert flags == "r"
            self.path = path

        def __enter__(self) -> CuFile:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def read(self, data: np.ndarray) -> int:
            data[...] = np.fromfile(self.path, np.uint8)
            return len(data)

    cupy = SimpleNamespace(empty=np.empty, asarray=lambda data: data.view(Got), bincount=np.bincount)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "kvikio", SimpleNamespace(CuFile=CuFile))
    (tmp_path / "text").write_bytes(b"\xff\x00abba" * 9)
    for by in ("byte", "letter", "bigram"):
        monkeypatch.setattr(
            cupy, "bincount", lambda data, minlength: np.bincount(data, minlength=minlength).view(Got)
        )
        found = peer_counts(str(tmp_path / "text"), by, True, True)
        np.testing.assert_array_equal(found, peer_counts(str(tmp_path / "text"), by, False))


class Got(np.ndarray):
    """An array with CuPy's way to the host."""

    def get(self) -> np.ndarray:
        return self.view(np.ndarray)


@pytest.mark.slow
def test_processes_of_a_floor_have_all_started_before_they_work() -> None:
    before = set(multiprocessing.active_children())
    with started_processes(3) as pool:
        started = {process.pid for process in set(multiprocessing.active_children()) - before}
        modules = list(pool.map(is_imported, [corpus.__name__] * 12))
    assert len(started) == 3
    assert {pid for pid, _ in modules} <= started
    assert all(there for _, there in modules)


def is_imported(module: str) -> tuple[int, bool]:
    return os.getpid(), module in sys.modules


def test_wrong_counts_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Any, **options: Any) -> np.ndarray:
        return np.zeros(256, np.int64)

    monkeypatch.setattr(corpus, "_peer", wrong)
    with pytest.raises(
        WrongAnswer, match=r"byte, plain, 1 worker, dask\.delayed \+ NumPy is wrong: bin \d+ is 0, not"
    ):
        run_corpus(tmp_path, nbytes=10_000, storages=("plain",))


def test_the_command_prints_json_and_plots(tmp_path: Path) -> None:
    plot = tmp_path / "corpus.png"
    words = "bench corpus --nbytes 64KiB --file-nbytes 32KiB --kind letter --storage plain --repeats 1 --json"
    result = CliRunner().invoke(cli, [*words.split(), "--folder", str(tmp_path), "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [row["contestant"] for row in found["rows"]] == ["tilewright", "dask.delayed + NumPy"]
    assert set(found["details"][0]["stages_per_worker"]) == {"read", "count"}
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.png"]
