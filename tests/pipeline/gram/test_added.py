"""Axes that are added up before anything else is made of an array."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import dask.array
import numpy as np
import pytest
import xarray
import zarr
from click.testing import CliRunner
from distributed import Client

import tilewright as tw
from tilewright.pipeline.errors import OptionError, ShapeError
from tilewright.pipeline.events import Caution
from tilewright.pipeline.gram.added import _sums, add_block, added_up
from tilewright.pipeline.store.sources.dasks import computed_on
from tilewright.workflows.cli import cli


@pytest.fixture
def calls(tmp_path: Path, rng: np.random.Generator) -> str:
    """Of 40 variants, 13 samples, two alleles each; some are not known."""
    alleles = rng.integers(0, 2, (40, 13, 2)).astype(np.int8)
    alleles[rng.random(alleles.shape) < 0.1] = -1
    path = tmp_path / "calls.zarr" / "call_genotype"
    names = ["variants", "samples", "ploidy"]
    array = zarr.create_array(path, shape=alleles.shape, chunks=(7, 5, 1), dtype="i1", dimension_names=names)
    array[:] = alleles
    zarr.save_array(tmp_path / "calls.zarr" / "samples", np.arange(100, 113))
    return str(path)


def dosages_of(calls: str) -> np.ndarray:
    alleles = zarr.open_array(calls, mode="r")[:]
    return np.where((alleles < 0).any(axis=2), -1, alleles.sum(axis=2))


OPTIONS = {"center": "rows", "missing": -1, "divide": "2pq"}


def test_dosages_follow_from_alleles(tmp_path: Path, calls: str, client: Client) -> None:
    expected = tw.gram(dosages_of(calls), cluster=client, **OPTIONS)
    group = zarr.create_group(tmp_path / "g.zarr")
    tw.gram(calls, None, tmp_path / "g.zarr" / "c", add_up="ploidy", cluster=client, **OPTIONS)
    np.testing.assert_allclose(zarr.open_array(tmp_path / "g.zarr" / "c")[:], expected, rtol=0, atol=1e-6)
    assert group["samples"][:].tolist() == list(range(100, 113)), "coordinates go along"
    scores = tw.eofs(calls, k=2, add_up=[2], of="rows", missing=-1, cluster=client).scores
    same = tw.eofs(dosages_of(calls), k=2, of="rows", missing=-1, cluster=client).scores
    np.testing.assert_allclose(scores, same, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["i1", "f4", "i8"])
def test_a_mask_says_what_is_missing(
    dtype: str, tmp_path: Path, calls: str, rng: np.random.Generator, client: Client
) -> None:
    """sgkit's of each allele, in its own axes or some of them, whatever stands under it; of commands too."""
    alleles = zarr.open_array(calls, mode="r")[:]
    masked = alleles < 0
    alleles = np.where(masked, rng.integers(-5, 5, alleles.shape), alleles).astype(dtype)
    names = ["variants", "samples", "ploidy"]
    mask = xarray.DataArray(masked, dims=names, name="call_genotype_mask")
    mask.to_dataset().to_zarr(tmp_path / "masks.zarr", consolidated=False)
    data = xarray.DataArray(alleles, dims=names)
    options = OPTIONS | {"add_up": "ploidy", "cluster": client}
    expected = tw.gram(dosages_of(calls), cluster=client, **OPTIONS)
    of_sums = mask.any("ploidy").transpose("samples", "variants")
    for given in (mask, tmp_path / "masks.zarr" / "call_genotype_mask", {"X": masked}, of_sums):
        found = tw.gram(data, **(options | {"missing": given}))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    both = tw.gram(
        data, data[:, :3], **(options | {"missing": {"X": mask, "Y": mask[:, :3]}, "divide": None})
    )
    dosages = dosages_of(calls)
    same = tw.gram(dosages, dosages[:, :3], cluster=client, center="rows", missing=-1)
    np.testing.assert_allclose(both, same, rtol=0, atol=1e-5)
    scores = tw.eofs(data, k=2, add_up="ploidy", of="rows", missing=mask, cluster=client).scores
    same = tw.eofs(dosages_of(calls), k=2, of="rows", missing=-1, cluster=client).scores
    np.testing.assert_allclose(scores, same, rtol=0, atol=1e-4)
    if dtype == "i1":
        with pytest.raises(
            OptionError, match=r"-1 \(\d+ times\).* missing=-1 \(--missing -1\)\. Where they are no"
        ):
            tw.gram(calls, **(options | {"missing": np.zeros((13, 2), bool)}))
    with pytest.raises(OptionError, match=r"a mask of one matrix is given for two, X and Y"):
        tw.gram(data, data, **(options | {"missing": mask}))
    with pytest.raises(ShapeError, match=r"missing: .* has shape \(40, 12, 2\), and X, .*, \(40, 13, 2\)"):
        tw.gram(data, **(options | {"missing": masked[:, :12]}))


def test_rows_and_columns_are_those_of_the_sums(tmp_path: Path, calls: str, client: Client) -> None:
    """So the variants of a chromosome, or some of the samples, are taken of calls."""
    window = {"of": "rows", "missing": -1, "missing_as": "pairwise", "window": 5, "constant": "zero"}
    expected = tw.corr(dosages_of(calls)[7:29], cluster=client, **window)
    for given in (tw.slice(calls, rows=(7, 29)), f"{calls}[7:29]", f"{calls}[7:29,...,:]"):
        found = tw.corr(given, add_up="ploidy", cluster=client, **window)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    words = [
        "gram",
        calls,
        str(tmp_path / "g.zarr"),
        "--add-up",
        "ploidy",
        "--columns",
        "2:9",
        "--center",
        "rows",
    ]
    result = CliRunner().invoke(cli, [*words, "--missing", "-1", "--divide", "2pq", "--device", "cpu"])
    assert result.exit_code == 0, result.stderr
    expected = tw.gram(dosages_of(calls)[:, 2:9], cluster=client, **OPTIONS)
    np.testing.assert_allclose(zarr.open_array(tmp_path / "g.zarr")[:], expected, rtol=0, atol=1e-6)
    with pytest.raises(
        OptionError, match=r"X: .* added up over 0 has 3 axes, 1, 2, 3, and rows and columns are"
    ):
        tw.gram(tw.slice(np.ones((2, 3, 4, 5)), rows=":1"), add_up=0, sum_over=1, cluster=client)


@pytest.mark.more
def test_the_command_has_it_too(tmp_path: Path, calls: str) -> None:
    words = [
        "--add-up",
        "ploidy",
        "--center",
        "rows",
        "--missing",
        "-1",
        "--divide",
        "2pq",
        "--device",
        "cpu",
        "-q",
    ]
    out = str(tmp_path / "c")
    made = CliRunner().invoke(cli, ["gram", calls, out, *words, "--plan-only"])
    assert made.exit_code == 0, made.output
    assert "13 × 13" in made.stdout
    assert re.search(r"shared memory +1.02 KiB more, once for all workers: .* what is added up", made.stdout)
    made = CliRunner().invoke(cli, ["gram", calls, out, *words, "--plan-only", "--json"])
    assert json.loads(made.stdout)["copies_nbytes"] == 40 * 13 * 2, "in int16, of X that is A and B"
    made = CliRunner().invoke(cli, ["gram", calls, out, *words])
    assert made.exit_code == 0, made.output
    np.testing.assert_allclose(
        zarr.open_array(out)[:], tw.gram(dosages_of(calls), **OPTIONS), rtol=0, atol=1e-6
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("axes", "missing", "says"),
    [
        ("samples", None, None),
        ("nothing", None, r"^add_up='nothing' is no axis of .*call_genotype; its axes are 0 \('variants'\)"),
        (["samples", "ploidy"], None, r"leaves 1 of the 3 axes of .* two at least are left"),
        ([], None, r"leaves 3 of the 3 axes"),
        (
            "ploidy",
            True,
            r"beside add_up \(--add-up\): a sum is missing where a part of it is",
        ),
        ("ploidy", "mask.zarr", r"^missing='mask.zarr' is neither a number nor .*names no stored"),
    ],
)
def test_axes_are_named(calls: str, axes: object, missing: object, says: str | None) -> None:
    if says is None:
        np.testing.assert_array_equal(
            tw.gram(calls, add_up=axes), (found := zarr.open_array(calls)[:].sum(1, dtype=int)).T @ found
        )
        return
    with pytest.raises(OptionError, match=says):
        tw.gram(calls, add_up=axes, missing=missing)


def test_a_sum_is_missing_where_a_part_is() -> None:
    block = np.array([[[1, 2], [2, -1]], [[-1, -1], [0, 0]]], np.int8)
    assert add_block(block, (2,), -1, np.dtype(np.int16)).tolist() == [[3, -32768], [-32768, 0]]
    assert add_block(block, (2,), None, np.dtype(np.int16)).tolist() == [[3, 1], [-2, 0]]
    floats = np.array([[1.5, np.nan], [-9, 1], [2, 3]], np.float32)
    np.testing.assert_array_equal(
        add_block(floats, (1,), -9, np.dtype(np.float32)), np.float32([np.nan, np.nan, 5])
    )


@pytest.mark.parametrize(
    ("dtype", "count", "sums"),
    [
        ("i1", 255, "i2"),
        ("i1", 256, "i4"),
        ("?", 32767, "i2"),
        ("u2", 2, "i4"),
        ("i4", 2, "i8"),
        ("u8", 1, "i8"),
        ("f2", 2, "f4"),
        (">f8", 2, "f8"),
    ],
)
def test_sums_have_a_type_that_holds_them(dtype: str, count: int, sums: str) -> None:
    assert _sums(np.dtype(dtype), count) == np.dtype(sums)


def xarray_of(calls: str) -> xarray.DataArray:
    array = zarr.open_array(calls)
    lazy = dask.array.from_array(array[:], chunks=array.chunks)
    return xarray.DataArray(lazy, dims=["variants", "samples", "ploidy"])


def test_what_dask_makes_of_calls_is_added_up(calls: str, client: Client) -> None:
    """Not the zeros that its memory holds until it is computed."""
    some = xarray_of(calls).isel(samples=slice(2, 9))
    found = tw.gram(some, add_up="ploidy", cluster=client, **OPTIONS)
    expected = tw.gram(dosages_of(calls)[:, 2:9], cluster=client, **OPTIONS)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.more
def test_messages_and_attributes_say_what_was_given(tmp_path: Path, calls: str, client: Client) -> None:
    alleles = zarr.open_array(calls)
    alleles[[6, 9]] = -1
    asked = {"add_up": "ploidy", "cluster": client}
    with pytest.raises(OptionError, match=r"^missing=-1: 2 rows \(6, 9\) of .* have no element"):
        tw.corr(calls, of="rows", missing=-1, **asked)
    floats = np.where(alleles[:] < 0, -9.0, alleles[:])
    with pytest.raises(OptionError, match=r"^missing=-9: 2 rows \(6, 9\) of "):
        tw.corr(floats, add_up=2, of="rows", missing=-9, cluster=client)
    tw.gram(calls, None, tmp_path / "c", missing=np.int8(-1), **asked)
    said = zarr.open_array(tmp_path / "c").attrs.asdict()
    assert said["tilewright"]["options"]["missing"] == -1
    assert "missing=-1" in said["history"]
    tw.eofs(calls, tmp_path / "e", k=1, missing=np.int8(-1), constant="zero", **asked)
    said = zarr.open_group(tmp_path / "e").attrs.asdict()
    assert said["tilewright_eofs"]["missing"] == -1
    assert "missing=-1" in said["history"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("code", "missing", "says"),
    [
        (-1, -2, r": -1 \(1 time\), .* say missing=-1 .* -2 may fill up"),
        (
            -1,
            None,
            r"alleles below 0 .* the 70 in \[7:14, 0:5, 0:2\]: -1 \(1 time\), the first at \[8, 3, 1\]. -1",
        ),
        (
            -2,
            -1,
            r": -2 \(1 time\), .* \(mixed ploidy\): leave these samples out, .* calls.where\(calls >= 0, -1\)",
        ),
    ],
)
def test_alleles_below_0_are_refused(
    tmp_path: Path, calls: str, client: Client, code: int, missing: int | None, says: str
) -> None:
    array = zarr.open_array(calls)
    array[:] = np.abs(array[:])
    array[8, 3, 1] = code
    for made in (tw.gram, tw.corr, tw.eofs):
        more = {"k": 1} if made is tw.eofs else {}
        with pytest.raises(OptionError, match=says):
            made(
                calls, out=tmp_path / "c", of="rows", add_up="ploidy", missing=missing, cluster=client, **more
            )
        assert not (tmp_path / "c").exists()
    with pytest.raises(OptionError, match=says):
        tw.gram(xarray_of(calls), add_up="ploidy", missing=missing, cluster=client)
    with pytest.raises(OptionError, match="alleles below 0"):
        tw.gram(array[:], add_up=2, missing=missing, cluster=client)


@pytest.mark.more
def test_alleles_above_1_are_told_of(calls: str, client: Client) -> None:
    """Allele 2 of a variant that has three counted as two doses, without a word."""
    array = zarr.open_array(calls)

    def told(given: Any, axis: object = "ploidy", **options: Any) -> list[str]:
        said: list[Any] = []
        tw.cov(given, add_up=axis, of="rows", missing=-1, cluster=client, listener=said.append, **options)
        return [event.message for event in said if isinstance(event, Caution)]

    assert not told(calls)
    array[3, 2, 1], array[3, 12, :], array[39, 0, 0] = 2, 3, 2
    (message,) = told(calls)
    assert "call_genotype has 4 elements above 1, in 2 of its 40 variants, and each is added up" in message
    assert "allele 2 counts as two doses" in message
    (message,) = told(array[:], 2)
    assert "4 elements above 1, in 2 of the 40 lines along its first axis" in message
    for made, more in ((tw.gram, {}), (tw.eofs, {"k": 1})):
        said: list[Any] = []
        made(calls, add_up="ploidy", missing=-1, cluster=client, listener=said.append, **more)
        assert sum("elements above 1" in getattr(event, "message", "") for event in said) == 1
    whole = xarray_of(calls)
    assert not told(whole.where(whole <= 1, 1)), "as it says"
    assert not told(xarray.DataArray(array[:], dims=("variants", "samples", "alleles")), "alleles"), "counts"


def test_what_was_written_since_is_added_up(calls: str, client: Client) -> None:
    """The sums of an earlier call were taken, as long as they lay in memory: dask's name of them is the same."""
    kept: list[Any] = []  # which holds them there
    array = zarr.open_array(calls)
    for value in (0, 1):
        array[...] = value
        array[0] = 0
        added, _ = added_up(calls, "ploidy", None, "X")
        kept.append(added)
        assert not computed_on(client, [added])
        assert added[1:].min() == added[1:].max() == 2 * value


def test_other_integers_may_be_below_0(client: Client) -> None:
    anomalies = np.arange(-30, 30, dtype=np.int16).reshape(5, 6, 2)
    found = anomalies.sum(2, dtype=int)
    np.testing.assert_array_equal(tw.gram(anomalies, add_up=2, cluster=client), found.T @ found)


@pytest.mark.parametrize(
    ("shape", "names", "says"),
    [
        ((9, 13, 20), ["variants", "samples", "ploidy"], r"axis 2 \('ploidy'\) are .*--add-up ploidy\)"),
        ((9, 13, 4), None, r"axis 2 are .*\(add_up=2, --add-up 2\)"),
        ((9, 13, 20), None, None),
    ],
)
def test_a_third_axis_may_be_one_to_add_up(
    shape: tuple[int, ...], names: list[str] | None, says: str | None
) -> None:
    array = zarr.create_array({}, shape=shape, dtype="i1", dimension_names=names)
    with pytest.raises(ShapeError, match=r"sum_over \(--sum-over\) must say") as error:
        tw.gram(array)
    assert ("add_up" in str(error.value)) == (says is not None)
    if says is not None:
        error.match(says)
