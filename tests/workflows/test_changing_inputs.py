"""What is written to while it is counted or multiplied ends `histogram` and `dot` with an error that names it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from distributed import Client
from zarr.storage import MemoryStore, ZipStore

import tilewright as tw
from tests.pipeline.store.test_file_changes import MOMENTS, At, another_with_its_time, rewrite, with_its_time
from tilewright.pipeline import dot as dotting
from tilewright.pipeline.errors import DamagedError, DocumentError, StoreError
from tilewright.workflows import histogram as counting
from tilewright.workflows.cli import cli

N = 20_000
CHUNK = 1000


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that there are pieces left when the first is done."""
    monkeypatch.setattr(dotting, "BLOCK", 64)
    with dask.config.set({"tilewright.piece-nbytes": 2**15}):
        yield


@pytest.fixture
def vectors(tmp_path: Path, rng: np.random.Generator) -> list[np.ndarray]:
    values = [rng.integers(-100, 100, N) for _ in "xy"]
    for name, vector in zip("xy", values, strict=True):
        store(tmp_path / f"{name}.zarr", vector)
    return values


def store(place: Any, vector: np.ndarray, **options: Any) -> None:
    zarr.create_array(place, shape=vector.shape, chunks=(CHUNK,), dtype=vector.dtype, **options)[...] = vector


def put_a_chunk(name: str, way: Callable[[Path, bytes], None], path: Path) -> None:
    """The contents of another chunk, of the same length, in a way."""
    chunk = path / "c" / name
    other = chunk.read_bytes()
    way(chunk, bytes(reversed(other)))


def fill(path: Path) -> None:
    zarr.open_array(path, mode="r+")[...] = 1


def append(path: Path) -> None:
    with (path / "c" / "0").open("ab") as chunk:
        chunk.write(b"more")


def truncate(path: Path) -> None:
    chunk = path / "c" / "15"
    chunk.write_bytes(chunk.read_bytes()[:-1])


def grow(path: Path) -> None:
    zarr.open_array(path, mode="r+").append(np.ones(CHUNK, np.int64))


CHANGES: dict[str, Callable[[Path], object]] = {
    "rewritten": fill,
    "a chunk appended to": append,
    "a chunk truncated": truncate,
    "grown": grow,
    "a chunk rewritten": partial(put_a_chunk, "0", rewrite),
    "a chunk rewritten, time put back": partial(put_a_chunk, "0", partial(with_its_time, rewrite)),
    "a chunk replaced, time put back": partial(put_a_chunk, "0", another_with_its_time),
    "a chunk removed": lambda path: (path / "c" / "9").unlink(),
    "removed": shutil.rmtree,
}


@pytest.mark.sample(4)
@pytest.mark.usefixtures("vectors", "small_blocks")
@pytest.mark.parametrize("role", "XY")
@pytest.mark.parametrize("moment", list(MOMENTS))
@pytest.mark.parametrize("change", list(CHANGES))
def test_a_vector_that_changes_while_it_is_multiplied_is_named(
    client: Client, tmp_path: Path, change: str, moment: str, role: str
) -> None:
    path = tmp_path / f"{role.lower()}.zarr"
    listener = At(MOMENTS[moment], partial(CHANGES[change], path))
    said = rf"^{role}, {path}, changed while X and Y were multiplied.*; let"
    if change == "removed":
        said += rf"|^{path}: there is no Zarr array"  # where a worker is the first to see it
    with pytest.raises(StoreError, match=said):
        tw.dot(tmp_path / "x.zarr", tmp_path / "y.zarr", cluster=client, device="cpu", listener=listener)
    assert listener.done


@pytest.mark.usefixtures("small_blocks")
def test_both_vectors_are_named_and_an_archive_is_compared_too(
    client: Client, tmp_path: Path, vectors: list[np.ndarray]
) -> None:
    x = tmp_path / "x.zip"
    with ZipStore(x, mode="w") as archive:
        store(archive, vectors[0])
    y = tmp_path / "y.zarr"

    def change() -> None:
        append(y)
        another_with_its_time(x, x.read_bytes())

    with pytest.raises(StoreError, match=rf"^X, .*x\.zip, and Y, {y}, changed while"):
        tw.dot(
            zarr.open_array(ZipStore(x, mode="r"), mode="r"),
            y,
            cluster=client,
            device="cpu",
            listener=At(MOMENTS["when all are read"], change),
        )


@pytest.mark.usefixtures("small_blocks")
def test_vectors_that_others_read_are_multiplied(
    client: Client, tmp_path: Path, vectors: list[np.ndarray]
) -> None:
    """Also where a vector is both factors, or lies in memory."""
    x, y = vectors
    dot = partial(tw.dot, cluster=client, device="cpu")
    for moment in MOMENTS.values():
        listener = At(moment, lambda: zarr.open_array(tmp_path / "x.zarr", mode="r")[...])
        assert dot(tmp_path / "x.zarr", tmp_path / "y.zarr", listener=listener) == np.vdot(x, y)
        assert listener.done
    assert dot(tmp_path / "x.zarr", tmp_path / "x.zarr") == np.vdot(x, x)
    memory = MemoryStore()
    store(memory, y)
    assert dot(tmp_path / "x.zarr", zarr.open_array(memory)) == np.vdot(x, y)


@pytest.mark.usefixtures("vectors", "small_blocks")
def test_a_chunk_that_was_damaged_before_is_called_so(client: Client, tmp_path: Path) -> None:
    truncate(tmp_path / "x.zarr")
    with pytest.raises(DamagedError, match=r"x\.zarr.* chunk") as told:
        tw.dot(tmp_path / "x.zarr", tmp_path / "y.zarr", cluster=client, device="cpu")
    assert "changed while" not in str(told.value)


@pytest.mark.parametrize("per_document", [False, True])
def test_a_corpus_that_changes_is_named_to_callers(
    client: Client, tmp_path: Path, per_document: bool
) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"text")
    listener = At(MOMENTS["when all are read"], lambda: path.write_bytes(b"text and more"))
    with pytest.raises(DocumentError, match=rf"^{path} grew from 4 to 13 bytes after the corpus was listed"):
        tw.histogram(path, cluster=client, device="cpu", per_document=per_document, listener=listener)


@pytest.mark.parametrize("out", ["counts.csv", "counts.json", "counts.zarr"])
def test_the_command_says_it_in_one_line_and_leaves_no_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    """A log that grows, as logs do, between the listing and the end."""
    folder, outputs = tmp_path / "corpus", tmp_path / "outputs"
    folder.mkdir()
    outputs.mkdir()
    (folder / "log").write_bytes(b"a line\n")

    def grown(*arguments: Any, **options: Any) -> Any:
        with (folder / "log").open("ab") as log:
            log.write(b"another\n")
        return survey(*arguments, **options)

    survey = counting.survey
    monkeypatch.setattr(counting, "survey", grown)
    words = ["histogram", str(folder), "--device", "cpu", "--out", str(outputs / out)]
    result = CliRunner().invoke(cli, [*words, "--plot", str(outputs / "counts.png"), "--json"])
    assert result.exit_code == 1
    assert not result.stdout
    (line,) = [line for line in result.stderr.splitlines() if "error" in line]
    assert (
        f"{folder / 'log'} grew from 7 to 15 bytes after the corpus was listed; count it when nothing" in line
    )
    assert not list(outputs.iterdir())
