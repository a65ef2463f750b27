"""What a product is warned of before its first tile, and who is told: `matmul`, its ``--plan-only``, `plan_matmul`, and
where there is such a thing, `dot` and `verify`."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import xarray
import zarr
from click.testing import CliRunner
from distributed import Client

import tilewright as tw
from tests.workflows.products import SIX_TILES, numbers, put, stop_at
from tilewright.pipeline.events import Caution, Event, WorkPlanned
from tilewright.pipeline.product import findings, job
from tilewright.pipeline.product.output import partial_path
from tilewright.pipeline.product.request import Request
from tilewright.workflows.cli import cli
from tilewright.workflows.dot import DotRun, timed_dot

MEGABYTE = 2**20
C_NBYTES = 96 * 64 * 4
Case = Callable[[Path, pytest.MonkeyPatch, dict[str, Any]], dict[str, Any]]
"""Makes a case in a folder: gives the arguments ``a``, ``b``, ``out`` and the options of a product of 96 × 80 and 80 ×
64 elements. The options that all cases have are its third argument."""


def plain(folder: Path, patch: pytest.MonkeyPatch, options: dict[str, Any]) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {
        "a": put(folder / "a", numbers(rng, (96, 80), "f4")),
        "b": put(folder / "b", numbers(rng, (80, 64), "f4")),
        "out": folder / "c",
    }


def with_attributes(attributes: dict[str, Any], dtype: str = "i2", **stored: Any) -> Case:
    def case(folder: Path, patch: pytest.MonkeyPatch, options: dict[str, Any]) -> dict[str, Any]:
        found = plain(folder, patch, options)
        put(folder / "other", np.ones((80, 64), dtype), attributes=attributes, **stored)
        return found | {"b": folder / "other", "dtype": "f4" if dtype != "c8" else "c8"}

    return case


def in_an_old_group(folder: Path, patch: pytest.MonkeyPatch, options: dict[str, Any]) -> dict[str, Any]:
    zarr.create_group(folder / "group", zarr_format=2)
    return plain(folder, patch, options) | {"out": folder / "group" / "c"}


def in_a_consolidated_group(
    folder: Path, patch: pytest.MonkeyPatch, options: dict[str, Any]
) -> dict[str, Any]:
    zarr.create_group(folder / "group")
    zarr.consolidate_metadata(str(folder / "group"))
    return plain(folder, patch, options) | {"out": folder / "group" / "c"}


def for_tensor_cores(folder: Path, patch: pytest.MonkeyPatch, options: dict[str, Any]) -> dict[str, Any]:
    return plain(folder, patch, options) | {"precision": "split"}


def into_a_packed_array(folder: Path, patch: pytest.MonkeyPatch, options: dict[str, Any]) -> dict[str, Any]:
    out = zarr.create_array(
        folder / "c", shape=(96, 64), chunks=(16, 16), dtype="f4", attributes={"scale_factor": 0.5}
    )
    return plain(folder, patch, options) | {"out": out}


def disk_of(patch: pytest.MonkeyPatch, out: Path, nbytes: int) -> None:
    """A disk with room for so many bytes of the growing output."""

    def usage(path: Path) -> SimpleNamespace:
        assert path.is_dir(), "which statvfs needs"
        return SimpleNamespace(free=nbytes - findings._stored_nbytes(partial_path(out)))

    patch.setattr(findings.shutil, "disk_usage", usage)


def on_a_full_disk(folder: Path, patch: pytest.MonkeyPatch, options: dict[str, Any]) -> dict[str, Any]:
    found = plain(folder, patch, options) | {"out": folder / "not" / "there" / "c"}
    patch.setattr(findings.shutil, "disk_usage", lambda path: SimpleNamespace(free=C_NBYTES - 1))
    return found


def on_a_disk_just_large_enough(
    folder: Path, patch: pytest.MonkeyPatch, options: dict[str, Any]
) -> dict[str, Any]:
    patch.setattr(findings.shutil, "disk_usage", lambda path: SimpleNamespace(free=C_NBYTES))
    return plain(folder, patch, options)


def going_on(tiles: int, free: int) -> Case:
    """A run that was stopped after some tiles, with so many bytes free."""

    def case(folder: Path, patch: pytest.MonkeyPatch, options: dict[str, Any]) -> dict[str, Any]:
        found = plain(folder, patch, options)
        stop_at(tiles, found["a"], found["b"], found["out"], **options)
        patch.setattr(findings.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        return found

    return case


def going_on_without_a_tile(
    folder: Path, patch: pytest.MonkeyPatch, options: dict[str, Any]
) -> dict[str, Any]:
    """Its chunks were lost, so that it is to be written again."""
    found = going_on(1, C_NBYTES - 1)(folder, patch, options)
    chunks = [path for path in partial_path(found["out"]).rglob("c/*/*") if path.is_file()]
    assert chunks
    for chunk in chunks:
        chunk.unlink()
    return found


def replacing(resume: bool) -> Case:
    """A stopped run of another product has left more than the disk has room for beside C; it goes first."""

    def case(folder: Path, patch: pytest.MonkeyPatch, options: dict[str, Any]) -> dict[str, Any]:
        found = plain(folder, patch, options)
        stop_at(3, found["a"], found["b"], found["out"], **options)
        (partial_path(found["out"]) / "large").write_bytes(bytes(MEGABYTE))
        disk_of(patch, found["out"], MEGABYTE)
        return found | ({"dtype": "f8"} if resume else {"resume": False})

    return case


def all_at_once(folder: Path, patch: pytest.MonkeyPatch, options: dict[str, Any]) -> dict[str, Any]:
    found = with_attributes({"scale_factor": 0.5, "_FillValue": 1})(folder, patch, options)
    found |= {"a": put(folder / "x", np.ones((96, 80), "f4"), attributes={"valid_min": 2})}
    zarr.create_group(folder / "group", zarr_format=2)
    found |= {"out": folder / "group" / "c", "precision": "tf32"}
    patch.setattr(findings.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    return found


CASES: dict[str, tuple[Case, tuple[str, ...]]] = {
    "nothing to say": (plain, ()),
    "scaled": (with_attributes({"scale_factor": 0.5}), ("B: .*scale_factor=0.5",)),
    "shifted": (with_attributes({"add_offset": 3}), ("B: .*add_offset=3",)),
    "masked integers": (with_attributes({"missing_value": -1}), ("B: .*missing_value=-1",)),
    "masked floats": (with_attributes({"_FillValue": "AAAAAICHw8A="}, "f4"), (r"B: .*_FillValue=-9999\.0",)),
    "NaN for missing": (with_attributes({"_FillValue": "AAAAAAAA+H8="}, "f4"), ()),
    "masked floats of format 2": (
        with_attributes({}, "f4", zarr_format=2, fill_value=-9999),
        (r"B: .*fill_value=-9999\.0",),
    ),
    "masked complex numbers": (with_attributes({"missing_value": 1e20}, "c8"), (r"missing_value=1e\+20",)),
    "unsigned": (with_attributes({"_Unsigned": "true"}, "i1"), ("_Unsigned='true'",)),
    "range": (with_attributes({"valid_range": [0, 9]}, "f8"), (r"valid_range=\[0, 9\]",)),
    "flags": (with_attributes({"flag_masks": [1, 2]}), (r"flag_masks=\[1, 2\]",)),
    "not understood": (
        with_attributes({"_FillValue": "nothing"}, "f4"),
        ("_FillValue cannot be understood",),
    ),
    "old group": (in_an_old_group, ()),
    "consolidated group": (in_a_consolidated_group, ()),
    "precision": (for_tensor_cores, ("precision='split' is for tensor cores",)),
    "packed output": (into_a_packed_array, (r"output: .*scale_factor=0\.5.*C is stored there",)),
    "full disk": (on_a_full_disk, ("are free on the disk of .*not/there/c.partial, and C takes 24 KiB",)),
    "disk just large enough": (on_a_disk_just_large_enough, ()),
    "going on with room for all": (going_on(3, C_NBYTES), ()),
    "going on with room for the rest": (going_on(3, C_NBYTES - 2 * 1024), ()),
    "going on with too little": (going_on(3, 1024), ("are free on the disk of ",)),
    "going on without a tile": (going_on_without_a_tile, ("are free on the disk of ",)),
    "replacing tiles of another request": (replacing(True), ()),
    "replacing all tiles": (replacing(False), ()),
    "all at once": (
        all_at_once,
        ("A: .*valid_min=2", "B: .*scale_factor=0.5, _FillValue=1", "tf32", "0 B are free"),
    ),
}


def cautions(events: list[Event]) -> list[str]:
    return [event.message for event in events if isinstance(event, Caution)]


def before_the_first_tile(events: list[Event]) -> list[Event]:
    first = next(place for place, event in enumerate(events) if isinstance(event, WorkPlanned))
    return events[:first]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_a_plan_says_what_the_run_says_before_its_first_tile(
    name: str, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_chunks: None
) -> None:
    case, patterns = CASES[name]
    shared = {"cluster": client, "device": "cpu", "device_memory": SIX_TILES}
    arguments = case(tmp_path, monkeypatch, shared)
    a, b, out = (arguments.pop(name) for name in ("a", "b", "out"))
    planned, ran, alone = ([] for _ in range(3))
    job.plan_only(Request(a, b, out, listener=planned.append, **shared, **arguments))
    tw.matmul(a, b, out, listener=ran.append, **shared, **arguments)
    told = cautions(planned)
    assert told == cautions(before_the_first_tile(ran))
    assert len(set(told)) == len(told) == len(patterns)
    for pattern in patterns:
        assert sum(bool(re.search(pattern, message)) for message in told) == 1, (pattern, told)
    # Without an output, and what an earlier run left there, a plan says the rest.
    arguments.pop("resume", None)
    tw.plan_matmul(a, b, listener=alone.append, **shared, **arguments)
    assert cautions(alone) == [
        message for message in told if message[:2] in ("A:", "B:") or message.startswith("precision")
    ]


def masked(
    path: Path, values: np.ndarray, zarr_format: Literal[2, 3], fill: float = -9999, name: str = "x"
) -> Path:
    """An array that xarray wrote, with ``fill`` where the values are NaN."""
    dimensions = ("time", "cell")[: values.ndim]
    xarray.Dataset({name: (dimensions, values)}).to_zarr(
        path,
        zarr_format=zarr_format,
        encoding={name: {"_FillValue": values.dtype.type(fill)}},
        consolidated=False,
    )
    return path / name


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_python_s_default_logging_shows_masks_of_floats(
    zarr_format: Literal[2, 3], client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The trial that found them: temperatures with one missing, stored by xarray with -9999 in its place."""
    values = np.random.default_rng(0).standard_normal((200, 30)).astype("f4")
    values[3, 4] = np.nan
    x = masked(tmp_path / "x.zarr", values, zarr_format)
    vector = masked(tmp_path / "v.zarr", values[:, 4], zarr_format)
    shared: dict[str, Any] = {"transpose_a": True}
    calls: dict[str, Callable[[], Any]] = {
        "A": lambda: tw.matmul(x, x, tmp_path / "c", cluster=client, device="cpu", **shared),
        "A again": lambda: job.plan_only(
            Request(x, x, tmp_path / "d", cluster=client, device="cpu", **shared)
        ),
        "A alone": lambda: tw.plan_matmul(x, x, device="cpu", **shared),
        "A checked": lambda: tw.verify(x, x, tmp_path / "c", cluster=client, **shared),
        "X": lambda: tw.dot(vector, vector, cluster=client, device="cpu"),
    }
    name = "fill_value" if zarr_format == 2 else "_FillValue"
    with caplog.at_level(logging.WARNING):
        for role, call in calls.items():
            caplog.clear()
            call()
            told = [
                record for record in caplog.records if f"{name}=-9999.0, by which xarray" in record.message
            ]
            assert {record.levelno for record in told} == {logging.WARNING}
            assert [record.message[0] for record in told] == (["X", "Y"] if role == "X" else ["A", "B"])


def test_an_array_without_attributes_is_nobodys_caution(
    client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a, x = put(tmp_path / "a", np.ones((9, 9))), put(tmp_path / "x", np.ones(9), (9,))
    with caplog.at_level(logging.WARNING):
        tw.matmul(a, a, tmp_path / "c", cluster=client, device="cpu")
        tw.plan_matmul(a, a, device="cpu")
        assert tw.verify(a, a, tmp_path / "c", cluster=client).passed
        assert tw.dot(x, x, cluster=client, device="cpu") == 9
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not told


def test_the_command_plan_says_it_on_standard_error(tmp_path: Path) -> None:
    a = put(tmp_path / "a", np.ones((9, 9), "f4"), attributes={"missing_value": 1e20})
    shown = CliRunner().invoke(cli, ["plan", str(a), str(a), "--device", "cpu", "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["m"] == 9
    first, second = shown.stderr.splitlines()
    assert first.startswith(f"A: {a} has missing_value=1e+20, by which xarray")
    assert second.startswith(f"B: {a} has missing_value=1e+20, by which xarray")
    quiet = CliRunner().invoke(cli, ["plan", str(a), str(a), "--device", "cpu", "--quiet"])
    assert (quiet.exit_code, quiet.stderr) == (0, "")


def test_a_plan_tells_its_listener_that_it_waits(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the log, where somebody else listens."""
    a = put(tmp_path / "a", np.ones((9, 9)))
    asked = []
    monkeypatch.setattr(job, "on_waiting", lambda listener, *names: asked.append(listener))
    seen: list[Event] = []
    tell = seen.append
    tw.plan_matmul(a, a, cluster=client, device="cpu", listener=tell)
    assert asked == [tell]


class TestMissingNumbersOfADotProduct:
    @pytest.mark.parametrize("zarr_format", [2, 3])
    @pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
    def test_they_are_counted_and_told_of(
        self, dtype: str, zarr_format: Literal[2, 3], client: Client, tmp_path: Path
    ) -> None:
        values = np.ones(1000, dtype)
        values[::100] = np.nan
        x, y = masked(tmp_path / "x", values, zarr_format), put(tmp_path / "y", np.ones(1000, dtype), (99,))
        seen: list[Event] = []
        run = timed_dot(x, y, cluster=client, device="cpu", listener=seen.append)
        assert run.masked == {"X": 10}
        stored = zarr.open_array(x)[...]
        assert run.value == np.vdot(stored, np.ones(1000, dtype)), "the stored numbers were multiplied"
        before, after = cautions(seen)
        assert before.startswith("X: ")
        assert after.startswith(f"10 elements of X ({'fill_value' if zarr_format == 2 else '_FillValue'}=-")
        assert "stand for missing numbers" in after
        assert isinstance(seen[-1], Caution), "it is known at the end"
        assert json.loads(json.dumps(run.to_json()))["masked"] == {"X": 10}

    def test_of_both_vectors(self, client: Client, tmp_path: Path) -> None:
        x = put(
            tmp_path / "x", np.arange(100, dtype="i4"), (7,), attributes={"_FillValue": 3, "valid_max": 89}
        )
        y = put(tmp_path / "y", np.arange(100, dtype="u1"), (9,), attributes={"missing_value": [1, 2]})
        seen: list[Event] = []
        run = timed_dot(x, y, cluster=client, device="cpu", listener=seen.append)
        assert run.masked == {"X": 11, "Y": 2}
        told = cautions(seen)[-1]
        assert (
            "11 elements of X (_FillValue=3, valid_max=89) and 2 elements of Y (missing_value=[1, 2])" in told
        )

    def test_where_there_are_none_nothing_is_said_of_them(self, client: Client, tmp_path: Path) -> None:
        x = put(tmp_path / "x", np.arange(100.0), (7,), attributes={"_FillValue": -1})
        seen: list[Event] = []
        run = timed_dot(x, x, cluster=client, device="cpu", listener=seen.append)
        assert run.masked == {"X": 0, "Y": 0}
        assert all("has _FillValue=-1" in message for message in cautions(seen))
        assert len(cautions(seen)) == 2

    def test_none_are_looked_for_without_attributes(self, client: Client, tmp_path: Path) -> None:
        x = put(tmp_path / "x", np.array([1.0, np.nan]), (2,))
        run = timed_dot(x, x, cluster=client, device="cpu")
        assert run.masked == {}
        assert isinstance(run, DotRun)
