"""The demo on a small library of its own, and its arithmetic on counts that can be checked by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr
from distributed import Client

from tilewright.pipeline.errors import CorpusError, OutputExistsError, StoreError
from tilewright.pipeline.events import Event, Notice
from tilewright.pipeline.text.sparse_counts import SparseCounts
from tilewright.workflows import demo as demos
from tilewright.workflows.demo import SimilarPair, comparable, demo, letter_pairs, most_similar


def test_pairs_of_letters_are_folded_and_all_else_is_left_out() -> None:
    counts = np.zeros((2, 256, 256), np.int64)
    for first, second, times in (("a", "b", 1), ("A", "b", 2), ("a", "B", 3), ("A", "B", 4), ("z", "Z", 5)):
        counts[1, ord(first), ord(second)] = times
    for first, second in (("a", "@"), ("@", "A"), ("[", "a"), ("z", "{"), ("a", "`")):
        counts[1, ord(first), ord(second)] = 100
    found = counts.reshape(2, 65536)
    rows, columns = np.nonzero(found)
    indptr = np.searchsorted(rows, range(3))
    pairs = letter_pairs(SparseCounts(indptr, columns.astype(np.uint32), found[rows, columns], 65536))
    assert pairs.shape == (2, 676)
    assert not pairs[0].any()
    assert pairs[1, 0 * 26 + 1] == 10
    assert pairs[1, 25 * 26 + 25] == 5
    assert pairs.sum() == 15


def test_copies_and_short_modules_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demos, "LEAST_PAIRS", 5)
    counts = np.array([[3, 3], [9, 0], [3, 3], [2, 2], [0, 5]])
    np.testing.assert_array_equal(comparable(counts), [0, 1, 4])


def test_the_most_similar_are_those_of_the_largest_cosine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demos, "MOST_SIMILAR", 2)
    counts = np.array([[1, 0], [7, 7], [1, 1], [4, 3]])
    found = most_similar(counts @ counts.T, np.array([0, 2, 3]), ["a", "skipped", "c", "d"])
    assert [(pair.first, pair.second) for pair in found] == [("c", "d"), ("a", "d")]
    assert found[0].cosine == pytest.approx(7 / (5 * 2**0.5))
    assert found[1] == SimilarPair("a", "d", pytest.approx(0.8))


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of four modules: two alike, one of another kind, one copy, and one that is a test."""
    root = tmp_path / "lib"
    (root / "package" / "tests").mkdir(parents=True)
    (root / "one.py").write_text("tile by tile and panel by panel " * 300)
    (root / "package" / "two.py").write_text("tile by tile or panel by panel " * 300)
    (root / "other.py").write_text("zugzwang quiz jazz " * 500)
    (root / "package" / "copy.py").write_text("zugzwang quiz jazz " * 500)
    (root / "package" / "tests" / "test_one.py").write_text("tile by tile " * 500)
    (root / "data.txt").write_text("no module")
    monkeypatch.setattr(demos.sysconfig, "get_path", lambda name: str(root) if name == "stdlib" else "")
    return root


@pytest.mark.usefixtures("library")
def test_the_demo_finds_what_is_alike_and_replaces_what_it_wrote(client: Client, tmp_path: Path) -> None:
    for _ in range(2):
        told: list[Event] = []
        run = demo(tmp_path / "out", cluster=client, device="cpu", listener=told.append)
        counting = [event.message.split(" on ")[0] for event in told if isinstance(event, Notice)][:2]
        assert counting == ["counting 4 files by letter", "counting 4 files by bigram"]
        assert run.modules == 4
        assert run.compared == 3
        assert (run.similar[0].first, run.similar[0].second) == ("one.py", "package/two.py")
        assert 0.95 < run.similar[0].cosine < 1
        assert all(pair.cosine < 0.5 for pair in run.similar[1:])
        assert run.run.verification is not None
        assert run.run.verification.passed
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
            "counts.zarr", "letters.png", "product.zarr"
        ]  # fmt: skip
    counts = zarr.open_array(str(tmp_path / "out" / "counts.zarr"))[...]
    product = zarr.open_array(str(tmp_path / "out" / "product.zarr"))[...]
    np.testing.assert_array_equal(product, counts @ counts.T)
    text = str(run)
    assert "one.py" in text
    assert "on CPU" in text
    for stage in ("start", "count pairs", "store", "multiply", "verify", "compare", "plot"):
        assert any(line.startswith(stage) and line.split(" s")[0].split()[-1] for line in text.splitlines())
    assert run.to_json()["similar"][0]["first"] == "one.py"


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("name", ["counts.zarr", "product.zarr", "letters.png"])
def test_what_the_demo_did_not_write_is_not_replaced(name: str, client: Client, tmp_path: Path) -> None:
    """Such as the counts that `tilewright histogram --out counts.zarr` has left in the same folder."""
    mine = tmp_path / name
    if name.endswith(".png"):
        mine.write_bytes(b"mine")
    else:
        zarr.save_array(str(mine), np.arange(6).reshape(2, 3))
    with pytest.raises(OutputExistsError, match=rf"output: .*{name} exists and .* --output"):
        demo(tmp_path, cluster=client, device="cpu")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "lib"])
    if name.endswith(".png"):
        assert mine.read_bytes() == b"mine"
    else:
        np.testing.assert_array_equal(zarr.open_array(str(mine))[...], np.arange(6).reshape(2, 3))


@pytest.mark.usefixtures("library")
def test_an_empty_name_is_not_the_working_directory(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match="output: found an empty name"):
        demo("", cluster=client, device="cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["lib"]


def test_a_python_without_sources_is_an_error(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demos.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(CorpusError, match="no source files"):
        demo(tmp_path / "out", cluster=client, device="cpu")
