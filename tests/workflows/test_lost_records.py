"""What a stopped run left, of which somebody has removed, damaged or altered a part: that is said, and as much is kept
as can be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client

import tilewright as tw
from tests.workflows.products import SIX_TILES, assert_product, numbers, put, stop_at
from tilewright.pipeline.errors import OutputExistsError
from tilewright.pipeline.events import Event, Notice
from tilewright.pipeline.product import ledger
from tilewright.pipeline.product import output as outputs
from tilewright.pipeline.store.journal import twin_of

DONE = 3


def damage_head(path: Path) -> None:
    path.write_bytes(b"\0" * 512 + path.read_bytes()[512:])


def empty(path: Path) -> None:
    path.write_bytes(b"")


LOSSES: dict[str, tuple[list[str], Callable[[Path], None], bool, str]] = {
    "record removed": (["record"], Path.unlink, True, "is missing; its copy is used"),
    "record damaged": (["record"], damage_head, True, "is damaged; its copy is used"),
    "record emptied": (["record"], empty, True, "is damaged; its copy is used"),
    "copy removed": (["copy"], Path.unlink, True, ""),
    "copy damaged": (["copy"], damage_head, True, ""),
    "mark removed": (["mark"], Path.unlink, True, "has lost its mark, tilewright-output, which is put back"),
    "record and mark removed": (["record", "mark"], Path.unlink, True, "is missing; its copy is used"),
    "both removed": (["record", "copy"], Path.unlink, False, "partial without a record of finished tiles"),
    "both damaged": (["record", "copy"], damage_head, False, "a record of finished tiles that is damaged"),
}
"""What is lost, how, whether all tiles are kept, and what is said."""
IN_OTHER_WAYS = {"record removed", "record emptied", "copy damaged"}
"""Whose parts are lost, or damaged, in the others too."""


def stopped(
    client: Client, folder: Path, rng: np.random.Generator
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[Path, Path, Path], dict[str, Any]]:
    """Two factors, their paths and that of a product of which `DONE` tiles are finished, and how it was asked for."""
    a, b = numbers(rng, (96, 80), "f4"), numbers(rng, (80, 64), "f4")
    paths = put(folder / "a", a), put(folder / "b", b), folder / "c.zarr"
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "device_memory": SIX_TILES}
    stop_at(DONE, *paths, **options)
    return (a, b), paths, options


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "loss",
    [pytest.param(loss, marks=pytest.mark.slow) if loss in IN_OTHER_WAYS else loss for loss in LOSSES],
)
def test_what_is_lost_of_the_record_is_said_and_made_up_for(
    loss: str,
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    rng: np.random.Generator,
    events: list[Event],
) -> None:
    (a, b), (*factors, out), options = stopped(client, tmp_path, rng)
    growing = outputs.partial_path(out)
    record = growing / ledger.FILE_NAME
    files = {"record": record, "copy": twin_of(record), "mark": growing / outputs.MARK_NAME}
    which, act, kept, said = LOSSES[loss]
    for name in which:
        act(files[name])
    run = tw.matmul(*factors, out, listener=events.append, **options)
    told = [event.message for event in events if isinstance(event, Notice)]
    assert run.resumed == (DONE if kept else 0)
    if said:
        assert any(said in line and "\n" not in line for line in told), told
    assert any("starts anew" in line for line in told) is not kept
    assert_product(zarr.open_array(out)[...], a, b)
    assert sorted(path.name for path in out.iterdir()) == ["c", outputs.CHECKSUMS_NAME, "zarr.json"]


def test_a_folder_without_mark_and_record_is_not_ours(
    client: Client, tmp_path: Path, small_chunks: None, rng: np.random.Generator
) -> None:
    a = put(tmp_path / "a", numbers(rng, (96, 96), "f4"))
    out, options = tmp_path / "c.zarr", {"cluster": client, "device": "cpu", "device_memory": SIX_TILES}
    stop_at(DONE, a, a, out, **options)
    growing = outputs.partial_path(out)
    record = growing / ledger.FILE_NAME
    for path in (record, twin_of(record), growing / outputs.MARK_NAME):
        path.unlink()
    with pytest.raises(OutputExistsError, match="holds something else; move it away"):
        tw.matmul(a, a, out, **options)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "change", ["fill_value", "codecs", "shape", "chunk_key_encoding", "attributes", "dimension_names"]
)
def test_metadata_of_a_growing_array_that_were_altered_are_noticed(
    change: str,
    client: Client,
    tmp_path: Path,
    small_chunks: None,
    rng: np.random.Generator,
    events: list[Event],
) -> None:
    """By them the finished chunks would mean other numbers. What users add to an array means nothing for it."""
    (a, b), (*factors, out), options = stopped(client, tmp_path, rng)
    path = outputs.partial_path(out) / "zarr.json"
    metadata = json.loads(path.read_text())
    metadata[change] = {
        "fill_value": 5.0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "big"}}],
        "shape": [96, 128],
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "attributes": {"title": "mine"},
        "dimension_names": ["x", "y"],
    }[change]
    path.write_text(json.dumps(metadata))
    run = tw.matmul(*factors, out, listener=events.append, **options)
    users = change in ledger.METADATA_OF_USERS
    assert run.resumed == (DONE if users else 0)
    told = [event.message for event in events if isinstance(event, Notice)]
    assert users or any(f"it starts anew ({change} is " in line for line in told), told
    found = zarr.open_array(out)
    assert found.fill_value == 0
    assert_product(found[...], a, b)
