"""Counts stored as Zarr: whole or not at all, also beside another run that writes the same array."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import tracemalloc
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import zarr

from tilewright.pipeline.errors import OptionError, OutputExistsError, StoreError
from tilewright.pipeline.product import output as outputs
from tilewright.pipeline.text.histogram import Histogram
from tilewright.pipeline.text.saved_counts import (
    check_outputs,
    makes_array,
    save_histogram,
    store_counts,
    write_whole,
)
from tilewright.workflows.console import print_result

COUNTS = np.arange(256).reshape(2, 128)


def test_what_another_run_begins_behind_it_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.zarr"
    release, others = outputs.Output.release, []

    def then_another(output: outputs.Output) -> None:
        monkeypatch.setattr(outputs.Output, "release", release)
        release(output)
        others.append(
            outputs.create_output(path, (4,), np.dtype("i8"), (4,), compressed=True, overwrite=True)
        )  # fmt: skip

    monkeypatch.setattr(outputs.Output, "release", then_another)
    store_counts(COUNTS, path, {"by": "ascii"})
    np.testing.assert_array_equal(zarr.open_array(path)[...], COUNTS)
    others[0].publish()
    others[0].release()
    assert zarr.open_array(path).shape == (4,)


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(output: outputs.Output) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outputs.Output, "publish", full)
    with pytest.raises(StoreError, match=r"cannot write .*f\.zarr: No space left"):
        store_counts(COUNTS, tmp_path / "f.zarr", {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("overwrite", [True, False])
def test_a_file_takes_only_a_name_that_is_free(
    links: bool, overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every file system: some have no hard links."""

    def none(*arguments: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    def write(draft: Path) -> None:
        draft.write_text("whole")

    if not links:
        monkeypatch.setattr(os, "link", none)
    path = tmp_path / "f.csv"
    write_whole(path, write, overwrite=overwrite)
    assert path.read_text() == "whole"
    path.write_text("mine")
    if overwrite:
        write_whole(path, write, overwrite=True)
        assert path.read_text() == "whole"
    else:
        with pytest.raises(OutputExistsError, match=r"f\.csv exists; choose another path, or .*--overwrite"):
            write_whole(path, write, overwrite=False)
        assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_run_left_of_a_file_is_removed(tmp_path: Path) -> None:
    path, left = tmp_path / "f[1].csv", tmp_path / ".f[1].csv.4194305.partial"
    others = [
        tmp_path / name for name in (".f1.csv.7.partial", ".f[1].csv.mine.partial", "f[1].csv.7.partial")
    ]
    for each in (left, *others):
        each.write_text("half")
    written: list[Path] = []

    def write(draft: Path) -> None:
        """Another run writes the same output meanwhile, and leaves this one's file alone."""
        written.append(draft)
        draft.write_text("whole")
        if len(written) == 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "getpid", lambda: 4194306)
                write_whole(path, write, overwrite=True)
            assert draft.is_file()
            assert not written[1].exists()

    write_whole(path, write, overwrite=True)
    assert path.read_text() == "whole"
    assert sorted(tmp_path.iterdir()) == sorted([path, *others])
    with left.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        write_whole(path, Path.touch, overwrite=True)
        assert left.exists()


def test_a_name_taken_for_a_file_without_hard_links_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*arguments: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    def broken(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "link", none)
    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(StoreError, match="Input/output error"):
        write_whole(tmp_path / "f.csv", Path.touch, overwrite=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_counts_as_large_as_memory_are_stored_without_another_copy(tmp_path: Path) -> None:
    """Half of this process's memory may be full of them."""
    counts = np.zeros((200, 2**16), np.int64)
    counts[:, ::50] = 1
    names = tuple(map(str, range(len(counts))))
    found = Histogram("bigram", counts, names, skipped=0, nbytes=0, device="CPU", seconds=0.0)
    save_histogram(found, tmp_path / "f.zarr")  # imports, and starts threads
    tracemalloc.start()
    try:
        save_histogram(found, tmp_path / "f.zarr", overwrite=True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    stored = zarr.open_array(tmp_path / "f.zarr")
    assert dict(stored.attrs) == {k: v for k, v in found.to_json().items() if k not in ("counts", "tokens")}
    np.testing.assert_array_equal(stored[...], counts)
    assert peak < counts.nbytes // 2


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("printed", [True, False])
@pytest.mark.parametrize("shape", [(32, 2**13), (2000, 128)])
def test_counts_as_large_as_memory_become_json_without_another_copy(
    shape: tuple[int, int], printed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither as Python numbers nor as text are all of them in memory at once."""
    monkeypatch.setattr("tilewright.pipeline.text.histogram.JSON_COUNTS", 2**13)
    counts = np.zeros(shape, np.int64)
    counts[:, ::50] = 2**40
    names = tuple(map(str, range(len(counts))))
    found = Histogram("bigram", counts, names, skipped=0, nbytes=0, device="CPU", seconds=0.5)
    target = tmp_path / "f.json"

    def save() -> None:
        if not printed:
            save_histogram(found, target)
            return
        with target.open("w") as file, redirect_stdout(file):
            print_result(found, as_json=True)

    tracemalloc.start()
    try:
        save()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert target.read_text() == json.dumps(found.to_json()) + "\n" * printed
    assert peak < counts.nbytes // 2


@pytest.mark.parametrize("by", ["letter", "bigram"])
@pytest.mark.parametrize("at_once", [1, 7, 2**17])
def test_json_in_pieces_is_the_text_that_it_is_in_one(
    by: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilewright.pipeline.text.histogram.JSON_COUNTS", at_once)
    for counts in (np.arange(5), np.arange(15).reshape(3, 5), np.arange(2).reshape(2, 1)):
        found = Histogram(by, counts, ("a", "\udcff"), skipped=0, nbytes=0, device="CPU", seconds=0.5)
        assert "".join(found.json_pieces()) == json.dumps(found.to_json())


def test_counts_that_would_grow_over_something_else_are_refused_at_once(
    tmp_path: Path,
) -> None:
    mine = tmp_path / "h.zarr.partial"
    mine.mkdir()
    (mine / "mine").touch()
    with pytest.raises(OutputExistsError, match="holds something else"):
        check_outputs([], tmp_path / "h.zarr", None, overwrite=True)
    check_outputs([], tmp_path / "h.csv", None, overwrite=True)


@pytest.mark.parametrize(("out", "plot"), [("h.feather", None), (None, "h.gif")])
def test_from_python_an_ending_that_says_no_format_is_an_option_error(
    out: str | None, plot: str | None
) -> None:
    with pytest.raises(OptionError, match="the ending says the format"):
        check_outputs([], out, plot, overwrite=False)


def test_an_array_is_replaced_by_counts_that_are_one_and_by_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    zarr.create_array(path, shape=(3,), dtype="f4")
    check_outputs([], path, None, overwrite=True, arrays=makes_array("byte", per_document=False))
    with pytest.raises(OutputExistsError, match=r"exists; choose another path, or ask to overwrite"):
        check_outputs([], path, None, overwrite=False, arrays=True)
    for by, per_document in (("word", False), ("codepoint", True)):
        with pytest.raises(OutputExistsError, match="would be replaced, being an array, where a group is"):
            check_outputs([], path, None, overwrite=True, arrays=makes_array(by, per_document=per_document))
