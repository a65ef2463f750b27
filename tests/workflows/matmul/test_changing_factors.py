"""Factors that change while they are multiplied."""

from __future__ import annotations

import itertools
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client

import tilewright as tw
from tests.workflows.products import (
    TIGHT,
    assert_product,
    zipped,
)
from tilewright.pipeline.errors import (
    StoreError,
)
from tilewright.pipeline.events import Event, UnitDone


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["the URL of a path", "an archive"])
def test_an_input_with_a_url_that_changes_meanwhile_is_named(
    kind: str,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    without_dask: Client,
    tmp_path: Path,
    small_chunks: None,
) -> None:
    a, _, a_path, b_path = factors
    url = zipped(tmp_path / "a.zip", a) if kind == "an archive" else f"file://{a_path}"

    def change(event: Event) -> None:
        if isinstance(event, UnitDone) and event.name == "matmul" and event.index == 0:
            if kind == "an archive":
                zipped(tmp_path / "new.zip", -a)
                (tmp_path / "new.zip").replace(tmp_path / "a.zip")
            else:
                zarr.open_array(a_path, mode="r+")[...] = -a

    with pytest.raises(StoreError, match=r"^A, .*a\.z.*, changed while .* kept at .*c\.zarr\.partial"):
        tw.matmul(
            url,
            b_path,
            tmp_path / "c.zarr",
            listener=change,
            cluster=without_dask,
            device="cpu",
            device_memory=TIGHT,
            verify=False,
        )


@pytest.mark.sample(1)
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("then", ["stays", "is put back"])
def test_an_input_that_changes_meanwhile_is_named_and_no_c_published(
    then: str,
    verify: bool,
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    without_dask: Client,
    tmp_path: Path,
    small_chunks: None,
) -> None:
    """Tiles of the old and the new B make up a product of neither; of which a tile is, the hashes of B know."""
    a, b, a_path, b_path = factors
    out = tmp_path / "c.zarr"
    copy = partial(shutil.copytree, dirs_exist_ok=True)  # with the times of files
    copy(b_path, tmp_path / "backup")
    options: dict[str, Any] = {
        "cluster": without_dask,
        "device": "cpu",
        "device_memory": TIGHT,
        "verify": verify,
    }
    done = itertools.count(1)

    def change(event: Event) -> None:
        if isinstance(event, UnitDone) and event.name == "matmul" and next(done) == 3:
            zarr.open_array(b_path, mode="r+")[...] = -b

    with pytest.raises(StoreError, match=r"^B, .*b\.zarr, changed while .* kept at .*c\.zarr\.partial"):
        tw.matmul(a_path, b_path, out, listener=change, **options)
    assert not out.exists()
    if then == "is put back":
        copy(tmp_path / "backup", b_path)
    run = tw.matmul(a_path, b_path, out, **options)
    assert run.resumed < run.plan.tile_count, "some tiles were of the other B"
    assert_product(zarr.open_array(out)[...], a, -b if then == "stays" else b)
