"""What a run that fails leaves beside its output: what a later one goes on from, and nothing else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client

import tilewright as tw
from tests.pipeline.gram.naive import put
from tilewright.pipeline.errors import DamagedError, StoreError, TilewrightError, VerificationError
from tilewright.pipeline.events import Event, UnitDone, WorkPlanned
from tilewright.pipeline.product import job, kept
from tilewright.pipeline.product.output import MARK_NAME

SIDE, CHUNK = 40, 10
SMALL: Any = {"chunks": CHUNK, "device_memory": 6000}
"""By which there are four tiles."""


@pytest.fixture
def x(tmp_path: Path, rng: np.random.Generator) -> str:
    return str(put(tmp_path / "x.zarr", rng.standard_normal((SIDE, SIDE)).astype("f4"), (CHUNK, CHUNK)))


def damage(stored: str, *, below: str = "*/*") -> None:
    for piece in Path(stored).glob(f"c/{below}"):
        piece.write_bytes(b"torn")


def others(tmp_path: Path) -> list[str]:
    return sorted(name for name in os.listdir(tmp_path) if name != "x.zarr")


def interrupting(kind: type[Event]) -> Callable[[Event], None]:
    def listener(event: Event) -> None:
        if isinstance(event, kind):
            raise KeyboardInterrupt

    return listener


WORKS: dict[str, Callable[..., Any]] = {
    "matmul": lambda x, out, **options: tw.matmul(x, x, out, **options),
    "gram": tw.gram,
    "cov": tw.cov,
    "eofs": lambda x, out, **options: tw.eofs(x, out, 2, **options),
    "topk": lambda x, out, **options: tw.topk(x, None, out, 2, **options),
    "pairs": lambda x, out, **options: tw.pairs(x, None, out, above=0.5, **options),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("work", list(WORKS))
@pytest.mark.parametrize("parents", ["", "new/deep/"])
def test_damaged_input_leaves_nothing(
    work: str, parents: str, x: str, client: Client, tmp_path: Path
) -> None:
    damage(x)
    with pytest.raises(DamagedError):
        WORKS[work](x, tmp_path / f"{parents}out.zarr", cluster=client, device="cpu")
    assert others(tmp_path) == []


def test_a_folder_that_was_there_stays(x: str, client: Client, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    damage(x)
    with pytest.raises(DamagedError):
        tw.matmul(x, x, tmp_path / "new/deep/out.zarr", cluster=client, device="cpu")
    assert others(tmp_path) == ["new"]
    assert not os.listdir(tmp_path / "new")


@pytest.mark.sample(3)
@pytest.mark.parametrize("work", list(WORKS))
def test_ctrl_c_before_the_first_tile_leaves_nothing(
    work: str, x: str, client: Client, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        WORKS[work](
            x, tmp_path / "out.zarr", cluster=client, device="cpu", listener=interrupting(WorkPlanned)
        )
    assert others(tmp_path) == []


def test_what_stood_there_stays(x: str, client: Client, tmp_path: Path) -> None:
    before = np.arange(SIDE**2, dtype="f4").reshape(SIDE, SIDE)
    put(tmp_path / "out.zarr", before, (CHUNK, CHUNK))
    damage(x)
    for beta in (0, 1):
        with pytest.raises(DamagedError):
            tw.matmul(x, x, tmp_path / "out.zarr", cluster=client, device="cpu", overwrite=True, beta=beta)
        assert others(tmp_path) == ["out.zarr"]
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "out.zarr", mode="r")[...], before)


def test_finished_tiles_stay_are_named_and_gone_on_from(x: str, client: Client, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(x, whole)
    damage(x, below="3/*")
    with pytest.raises(
        StoreError, match="of 4 tiles are finished and kept, and the same command goes on there"
    ):
        tw.matmul(x, str(whole), tmp_path / "out.zarr", cluster=client, device="cpu", **SMALL)
    assert others(tmp_path) == ["out.zarr.partial", "whole"]
    shutil.rmtree(x)
    shutil.copytree(whole, x)
    run = tw.matmul(x, str(whole), tmp_path / "out.zarr", cluster=client, device="cpu", **SMALL)
    assert 0 < run.resumed < 4
    assert others(tmp_path) == ["out.zarr", "whole"]


def test_ctrl_c_behind_a_tile_keeps_it(x: str, client: Client, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        tw.matmul(
            *(x, x, tmp_path / "out.zarr"),
            cluster=client,
            device="cpu",
            listener=interrupting(UnitDone),
            **SMALL,
        )
    run = tw.matmul(x, x, tmp_path / "out.zarr", cluster=client, device="cpu", **SMALL)
    assert run.resumed > 0


def test_tiles_of_zeros_are_kept(client: Client, tmp_path: Path) -> None:
    """Of which nothing is stored but that they are finished."""
    x = str(put(tmp_path / "x.zarr", np.zeros((SIDE, SIDE), "f4"), (CHUNK, CHUNK)))
    with pytest.raises(KeyboardInterrupt):
        tw.matmul(
            *(x, x, tmp_path / "out.zarr"),
            cluster=client,
            device="cpu",
            listener=interrupting(UnitDone),
            **SMALL,
        )
    assert others(tmp_path) == ["out.zarr.partial"]
    assert tw.matmul(x, x, tmp_path / "out.zarr", cluster=client, device="cpu", **SMALL).resumed > 0


def test_a_product_that_failed_its_check_is_there_to_be_inspected(
    x: str, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise VerificationError("wrong")

    monkeypatch.setattr(job, "_verified", fail)
    with pytest.raises(VerificationError):
        tw.matmul(x, x, tmp_path / "out.zarr", cluster=client, device="cpu")
    assert others(tmp_path) == ["out.zarr.partial"]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_another_runs_folder_stays(
    when: str, x: str, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of another host, which does not see the lock, takes the folder over, before or while it is to be removed:
    it gives the other drafts folder another name first."""
    partial = tmp_path / "out.zarr.partial"
    others_drafts = partial / f"tilewright-drafts-{'0' * 32}"

    def take_over() -> None:
        for drafts in partial.glob("tilewright-drafts-*"):
            shutil.rmtree(drafts)
        others_drafts.mkdir()

    if when == "meanwhile":
        rename = os.rename

        def renamed(one: Any, other: Any) -> None:
            rename(one, other)
            if str(other).endswith(".ended") and not others_drafts.exists():
                others_drafts.mkdir()

        monkeypatch.setattr(kept.os, "rename", renamed)

    def fail(*arguments: Any, **options: Any) -> None:
        if when == "before":
            take_over()
        raise TilewrightError("no tile can be made")

    monkeypatch.setattr(job, "run_tiles", fail)
    with pytest.raises(TilewrightError, match="no tile"):
        tw.matmul(x, x, tmp_path / "out.zarr", cluster=client, device="cpu")
    assert others(tmp_path) == ["out.zarr.partial"]
    assert others_drafts.is_dir()
    assert (partial / MARK_NAME).exists()


def test_a_place_that_cannot_be_emptied_is_no_other_error(
    x: str, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no(*arguments: Any) -> None:
        raise PermissionError

    damage(x)
    monkeypatch.setattr(kept.shutil, "rmtree", no)
    with pytest.raises(DamagedError):
        tw.matmul(x, x, tmp_path / "out.zarr", cluster=client, device="cpu")
