"""Arrays that workers do not see: a job that reads them fails, and what is named from the client's folder is seen."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client

import tilewright as tw
from tilewright.pipeline.errors import StoreError


@pytest.fixture(scope="module")
def distant(processes: Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client whose workers are processes that run in another folder."""
    (before,) = set(processes.run(os.getcwd).values())
    processes.run(os.chdir, str(tmp_path_factory.mktemp("elsewhere")))
    yield processes
    processes.run(os.chdir, before)


def put(name: str, data: np.ndarray, compressed: bool = False) -> zarr.Array[Any]:
    array = zarr.create_array(
        name, shape=data.shape, chunks=(16,) * data.ndim, dtype=data.dtype, compressors="auto" if compressed else None
    )  # fmt: skip
    array[...] = data
    return zarr.open_array(name, mode="r")


@pytest.mark.parametrize("open_ones", [False, True])
def test_relative_paths_are_those_of_the_client(
    open_ones: bool, distant: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    a, v = np.arange(32 * 32, dtype="f8").reshape(32, 32), np.ones(64)
    arrays: list[Any] = [put("a", a), put("v", v)]
    left, vector = arrays if open_ones else ("a", "v")
    assert tw.dot(vector, vector, cluster=distant, device="cpu") == 64
    run = tw.matmul(left, left, "c", cluster=distant, device="cpu")
    np.testing.assert_array_equal(zarr.open_array("c")[...], a @ a)
    assert run.verification is not None
    assert run.verification.passed
    assert tw.verify(left, left, "c", cluster=distant).passed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c", "v"]


@pytest.mark.parametrize("compressed", [False, True])
def test_a_folder_that_was_moved_away_fails_the_job(
    compressed: bool, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read as zeros the product would be zeros too, and pass its verification, which reads as many."""
    monkeypatch.chdir(tmp_path)
    a, v = put("a", np.ones((32, 32)), compressed), put("v", np.ones(64), compressed)
    for name in ("a", "v"):
        (tmp_path / name).rename(tmp_path / f"{name}.moved")
    with pytest.raises(StoreError, match=f"v: there is no Zarr array at {tmp_path}/v on .*all workers see"):
        tw.dot(v, v, cluster=client, device="cpu")
    with pytest.raises(StoreError, match=f"a: there is no Zarr array at {tmp_path}/a on .*all workers see"):
        tw.matmul(a, a, "c", cluster=client, device="cpu")
    assert not (tmp_path / "c").exists()
