"""How a new C is stored where a caller says so: chunks, shards and codec, in either format of Zarr."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray
import zarr
from click.testing import CliRunner
from distributed import Client

import tilewright as tw
from tests.workflows.products import assert_product, put, stop_at
from tilewright.pipeline.events import Event, Notice
from tilewright.workflows.cli import cli

pytestmark = pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in:zarr.errors.ZarrUserWarning")


def opened(path: Path) -> zarr.Array[Any]:
    return zarr.open_array(path, mode="r")


def codec_of(array: zarr.Array[Any]) -> dict[str, Any]:
    """The name and the settings of what an array is compressed by, alike in both formats; empty where by nothing."""
    if not array.compressors:
        return {}
    (one,) = array.compressors
    if hasattr(one, "get_config"):
        return one.get_config()
    found = one.to_dict()
    return {"id": found["name"].removeprefix("numcodecs."), **found.get("configuration", {})}


STORED: dict[str, tuple[dict[str, Any], tuple[int, int], tuple[int, int] | None, dict[str, Any]]] = {
    "chunks alone": ({"chunks": (24, 20)}, (24, 20), None, {}),
    "one number": ({"chunks": 20, "codec": "zstd:3"}, (20, 20), None, {"id": "zstd", "level": 3}),
    "shards alone": ({"shards": "48x32", "codec": "gzip:6"}, (48, 32), (48, 32), {"id": "gzip", "level": 6}),
    "both": (
        {"chunks": "8x16", "shards": [24, 32], "codec": "blosc-zstd:5"},
        (8, 16),
        (24, 32),
        {"id": "blosc", "cname": "zstd", "clevel": 5},
    ),
    "larger than C": ({"chunks": 200, "codec": "lz4"}, (96, 64), None, {"id": "lz4"}),
    "far larger than C": ({"chunks": 10**20, "shards": 10**20}, (96, 64), (96, 64), {}),
    "plain shards": ({"chunks": 16, "shards": 64, "codec": "none"}, (16, 16), (64, 64), {}),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", STORED)
def test_c_is_stored_as_asked(
    case: str, factors: tuple[np.ndarray, np.ndarray, Path, Path], client: Client, tmp_path: Path
) -> None:
    options, chunks, shards, codec = STORED[case]
    a, b, a_path, b_path = factors
    run = tw.matmul(a_path, b_path, tmp_path / "c", cluster=client, device="cpu", **options)
    c = opened(tmp_path / "c")
    assert_product(c[:], a, b)
    assert (c.chunks, c.shards, run.plan.c_unit) == (chunks, shards, shards or chunks)
    if "codec" in options:
        found = codec_of(c)
        assert {name: getattr(found[name], "value", found[name]) for name in codec} == codec
        assert bool(found) == bool(codec)
    assert run.plan.tile_rows % c.shape[0] == 0 or run.plan.tile_rows % run.plan.c_unit[0] == 0
    assert tw.audit(tmp_path / "c").passed


@pytest.mark.parametrize(
    ("codec", "known"),
    [
        ("blosc-lz4:1", {"id": "blosc", "cname": "lz4", "clevel": 1}),
        ("lz4:7", {"id": "lz4", "acceleration": 7}),
    ],
)
def test_c_in_a_group_of_format_2(
    codec: str,
    known: dict[str, Any],
    factors: tuple[np.ndarray, np.ndarray, Path, Path],
    client: Client,
    tmp_path: Path,
) -> None:
    a, b, a_path, b_path = factors
    zarr.create_group(tmp_path / "group", zarr_format=2)
    run = {"cluster": client, "device": "cpu", "codec": codec}
    with pytest.raises(tw.OptionError, match=r"shards=16x16: C lies in a group of Zarr's format 2"):
        tw.matmul(a_path, b_path, tmp_path / "group/c", shards=16, **run)
    assert sorted(path.name for path in (tmp_path / "group").iterdir()) == [".zattrs", ".zgroup"]
    tw.matmul(a_path, b_path, tmp_path / "group/c", chunks="32x16", **run)
    c = opened(tmp_path / "group/c")
    assert_product(c[:], a, b)
    assert (c.metadata.zarr_format, c.chunks, c.shards) == (2, (32, 16), None)
    assert {name: codec_of(c)[name] for name in known} == known


def test_xarray_opens_a_sharded_c(
    factors: tuple[np.ndarray, np.ndarray, Path, Path], client: Client, tmp_path: Path
) -> None:
    a = factors[0]
    zarr.create_group(tmp_path / "group")
    named = xarray.Dataset({"a": (("time", "place"), a)}, {"place": np.arange(80.0)})
    named.to_zarr(tmp_path / "named", consolidated=False)
    tw.corr(tmp_path / "named/a", tmp_path / "group/c", cluster=client, device="cpu", chunks=16, shards=32)
    assert (opened(tmp_path / "group/c").chunks, opened(tmp_path / "group/c").shards) == ((16, 16), (32, 32))
    with xarray.open_zarr(tmp_path / "group", consolidated=False) as found:
        np.testing.assert_allclose(found["c"].values, np.corrcoef(a, rowvar=False), atol=1e-5)


def test_pair_counts_are_stored_as_c_is(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    x = rng.normal(size=(50, 30)).astype("f4")
    x[rng.random(x.shape) < 0.1] = np.nan
    options: dict[str, Any] = {"missing": "nan", "missing_as": "pairwise", "cluster": client, "device": "cpu"}
    x_path = put(tmp_path / "x", x)
    tw.cov(x_path, tmp_path / "c", counts=tmp_path / "n", chunks=10, shards=20, codec="gzip:1", **options)
    there = ~np.isnan(x)
    np.testing.assert_array_equal(opened(tmp_path / "n")[:], there.T.astype(int) @ there)
    for name in "cn":
        array = opened(tmp_path / name)
        assert (array.chunks, array.shards, codec_of(array)["id"]) == ((10, 10), (20, 20), "gzip")
    given = zarr.create_array(tmp_path / "given", shape=(30, 30), chunks=(15, 15), dtype="i8", fill_value=0)
    with pytest.raises(tw.OutputError, match="stored in pieces of 15 × 15, and C in such of 10 × 10"):
        tw.cov(x_path, tmp_path / "d", counts=given, chunks=10, **options)
    assert not (tmp_path / "d.partial").exists()


@pytest.mark.more
def test_a_stopped_run_goes_on_in_the_same_layout_alone(
    factors: tuple[np.ndarray, np.ndarray, Path, Path], client: Client, tmp_path: Path, events: list[Event]
) -> None:
    a, b, a_path, b_path = factors
    options: dict[str, Any] = {"cluster": client, "device": "cpu", "device_memory": 12_000}

    def run(**more: Any) -> tw.MatmulRun:
        return tw.matmul(a_path, b_path, tmp_path / "c", **options, **more)

    stop_at(3, a_path, b_path, tmp_path / "c", chunks=16, codec="gzip:1", **options)
    assert run(chunks=16, codec="gzip:1").resumed >= 3
    stop_at(3, a_path, b_path, tmp_path / "c", chunks=16, overwrite=True, **options)
    again = run(chunks=32, overwrite=True, listener=events.append)
    assert again.resumed == 0
    assert opened(tmp_path / "c").chunks == (32, 32)
    assert_product(opened(tmp_path / "c")[:], a, b)
    assert any("of another request" in event.message for event in events if isinstance(event, Notice))


def test_a_c_that_grows_keeps_its_layout(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    x = rng.integers(-9, 9, (20, 48)).astype("i1")
    out, array = tmp_path / "c", zarr.open_array(put(tmp_path / "x", x[:, :32]), mode="r+")
    options: dict[str, Any] = {"append": True, "cluster": client, "device": "cpu"}
    tw.gram(tmp_path / "x", out, chunks=8, shards=16, **options)
    array.append(x[:, 32:], axis=1)
    with pytest.raises(tw.OptionError, match=r"chunks given with append=True.*leave these away"):
        tw.gram(tmp_path / "x", out, chunks=4, **options)
    tw.gram(tmp_path / "x", out, **options)
    c = opened(out)
    np.testing.assert_array_equal(c[:], x.T.astype("i4") @ x)
    assert (c.shape, c.chunks, c.shards) == ((48, 48), (8, 8), (16, 16))


def test_what_cannot_be_stored_so_is_refused_first(
    factors: tuple[np.ndarray, np.ndarray, Path, Path], client: Client, tmp_path: Path
) -> None:
    a, b, a_path, b_path = factors
    given = zarr.create_array(tmp_path / "given", shape=(96, 64), chunks=(32, 32), dtype="f4")
    with pytest.raises(tw.OptionError, match=r"chunks, codec given, and C is an open array"):
        tw.matmul(a_path, b_path, given, chunks=8, codec="none", cluster=client)
    for call in (lambda: tw.matmul(a, b, shards=8), lambda: tw.gram(a, shards=8)):
        with pytest.raises(tw.OptionError, match=r"shards given, and C is returned, and not stored"):
            call()
    with pytest.raises(
        tw.PlanError,
        match=r"smaller chunks \(--chunks, and --shards where it has shards\): \d+ × \d+ and smaller ones fit",
    ):
        tw.matmul(a_path, b_path, tmp_path / "c", chunks=8000, device_memory=20_000, cluster=client)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zarr", "b.zarr", "given"]


def test_commands_take_the_same(
    factors: tuple[np.ndarray, np.ndarray, Path, Path], client: Client, tmp_path: Path
) -> None:
    _, _, a, b = factors
    shared = ["--profile", client.scheduler.address, "--device", "cpu", "--json", "-q"]
    line = [
        "matmul",
        str(a),
        str(b),
        str(tmp_path / "c"),
        "--chunks",
        "16x8",
        "--shards",
        "48x64",
        "--codec",
        "gzip:2",
    ]
    planned = CliRunner().invoke(cli, [*line, "--plan-only", *shared])
    assert json.loads(planned.stdout)["c_unit"] == [48, 64]
    assert not (tmp_path / "c").exists()
    nowhere = [word for word in line if word != str(tmp_path / "c")]
    unplaced = CliRunner().invoke(cli, ["plan", *nowhere[1:], "--device", "cpu", "--json", "-q"])
    assert json.loads(unplaced.stdout)["c_unit"] == [48, 64]
    too_wide = ["--chunks", "99999x99999", "--codec", "gzip"]
    assert CliRunner().invoke(cli, ["plan", str(a), str(b), *too_wide]).exit_code == 0, "no wider than C"
    assert CliRunner().invoke(cli, [*line, *shared]).exit_code == 0
    c = opened(tmp_path / "c")
    assert (c.chunks, c.shards, codec_of(c)["level"]) == ((16, 8), (48, 64), 2)
    ran = CliRunner().invoke(cli, ["cov", str(a), str(tmp_path / "d"), "--chunks", "30", *shared])
    assert ran.exit_code == 0, ran.stderr
    assert opened(tmp_path / "d").chunks == (30, 30)
    for option, value, told in (
        ("--chunks", "16y8", "no sides of a matrix's chunks"),
        ("--codec", "zst:3", "--codec zst:3 is unknown"),
        ("--shards", "0", "whole numbers of 1 or"),
    ):
        wrong = CliRunner().invoke(cli, ["matmul", str(a), str(b), str(tmp_path / "e"), option, value])
        assert wrong.exit_code == 2
        assert told in " ".join(wrong.stderr.split())


def test_a_repaired_c_keeps_its_layout(
    factors: tuple[np.ndarray, np.ndarray, Path, Path], client: Client, tmp_path: Path
) -> None:
    a, b, a_path, b_path = factors
    out, options = tmp_path / "c", {"cluster": client, "device": "cpu"}
    tw.matmul(a_path, b_path, out, chunks=16, shards=32, codec="gzip:3", **options)
    before = (out / "zarr.json").read_bytes()
    (out / "c/1/1").write_bytes(b"damaged")
    assert not tw.audit(out).passed
    assert tw.repair(a_path, b_path, out, **options).passed
    assert_product(opened(out)[:], a, b)
    assert (opened(out).chunks, opened(out).shards) == ((16, 16), (32, 32))
    assert json.loads((out / "zarr.json").read_bytes())["codecs"] == json.loads(before)["codecs"]
