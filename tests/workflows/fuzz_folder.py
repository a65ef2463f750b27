"""The folder in which commands and functions are given wrong arguments: arrays that can be multiplied, and much that
cannot."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import zarr

import tilewright as tw
from tilewright.pipeline.cluster import cluster as cluster_module


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that holds the working directory, ``here``, of all cases."""
    outer = tmp_path_factory.mktemp("fuzz")
    here = outer / "here"
    here.mkdir()
    before = os.getcwd()
    os.chdir(here)
    _fill(here)
    # What a case may wait for: a scheduler that does not answer, and another attempt at a task that fails.
    seconds, cluster_module.CONNECT_SECONDS = cluster_module.CONNECT_SECONDS, 0.2  # type: ignore[assignment]
    with dask.config.set({"tilewright.retries": 0}):
        yield outer
    cluster_module.CONNECT_SECONDS = seconds
    os.chdir(before)


def _fill(here: Path) -> None:
    def save(name: str, array: np.ndarray, **options: Any) -> None:
        stored = zarr.create_array(here / name, shape=array.shape, dtype=array.dtype, **options)
        stored[...] = array

    rng = np.random.default_rng(0)
    save("A.zarr", rng.random((6, 5)), chunks=(4, 2), compressors=None)
    save("B.zarr", rng.random((5, 4)), chunks=(2, 4))
    save("C.zarr", np.zeros((6, 4)), chunks=(3, 4))
    save("I.zarr", np.arange(30, dtype=np.int8).reshape(6, 5), chunks=(6, 5))
    save("big-endian.zarr", np.arange(30, dtype=">i4").reshape(6, 5), chunks=(6, 5), zarr_format=2)
    save("x.zarr", rng.random(7), chunks=(3,))
    save("one.zarr", np.ones((1, 1, 1)), chunks=(1, 1, 1))
    save("scalar.zarr", np.ones(()), chunks=())
    save("empty.zarr", np.ones((6, 0)), chunks=(6, 1))
    save("none.zarr", np.ones((0, 4)), chunks=(1, 4))
    save("bool.zarr", np.ones((6, 5), bool), chunks=(6, 5))
    save("date.zarr", np.zeros((6, 5), "datetime64[s]"), chunks=(6, 5), zarr_format=2)
    tw.topk(here / "A.zarr", out=here / "near.zarr", k=2, device="cpu", listener=lambda event: None)
    zarr.create_group(here / "group.zarr").create_array("inner", shape=(6, 5), dtype="f4", chunks=(6, 5))
    (here / "text.txt").write_text("Some words. Ünd noch mehr.\n" * 50)
    (here / "junk.bin").write_bytes(rng.bytes(500))
    for suffix in (".gz", ".bz2", ".xz", ".zst"):
        (here / f"junk{suffix}").write_bytes(rng.bytes(300))
    (here / "folder").mkdir()
    (here / "folder" / "a.txt").write_text("aaa")
    (here / "folder" / "bare").mkdir()
    os.mkfifo(here / "folder" / "pipe")
    os.mkfifo(here / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
    (here / os.fsdecode(b"folder/\xff\xfe.txt")).write_text("b")
    os.symlink("loop", here / "loop")
    os.symlink("nowhere", here / "dangling")
    os.symlink("A.zarr", here / "link.zarr")
    for name, content in PROFILES.items():
        (here / name).write_bytes(content)


PROFILES = {
    "good.yaml": b"profiles: {mine: {kind: local}}",
    "list.yaml": b"- 1\n- 2\n",
    "text.yaml": b"word",
    "nothing.yaml": b"",
    "binary.yaml": bytes(range(256)),
    "deep.yaml": b"[" * 400,
    "tabs.yaml": b"profiles:\n\t- a: b\n\t c",
    "date.yaml": b"profiles: {a: {kind: 2001-99-99}}",
    "alias.yaml": b"&a [*a]",
    "python.yaml": b"!!python/object/apply:os.system ['true']",
    "no-mapping.yaml": b"profiles: [local]",
    "no-kind.yaml": b"profiles: {mine: {}}",
    "null.yaml": b"profiles: {mine: null, ~: {kind: local}}",
    "numbers.yaml": b"profiles: {1: {kind: local}, [1, 2]: {kind: local}}",
    "kind.yaml": b"profiles: {mine: {kind: [local]}}",
}
"""Files of profiles."""
