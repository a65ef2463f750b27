"""EOFs whose run was stopped: what passes have found is not found again, and the result is that of a run in one go."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from distributed import Client, LocalCluster

import tilewright as tw
from tests.pipeline.gram.naive import put
from tests.workflows.products import Stopped
from tilewright.pipeline.errors import OptionError
from tilewright.pipeline.events import Event, Notice, UnitDone, WorkDone, WorkPlanned
from tilewright.pipeline.product.output import partial_path
from tilewright.workflows.cli import cli

SHAPES = {"variables": (60, 24), "samples": (24, 60)}
"""Of X, by the side on which the iteration runs."""


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


def case(folder: Path, rng: np.random.Generator, shape: tuple[int, int], client: Client) -> dict[str, Any]:
    """A spectrum that takes some steps."""
    x = rng.standard_normal(shape) * np.sqrt(1 / np.arange(1, shape[1] + 1))
    return {
        "x": put(folder / "x.zarr", x, (20, 15)),
        "k": 2,
        "method": "krylov",
        "tol": 1e-6,
        "cluster": client,
        "device": "cpu",
    }


class Listening:
    """Which passes were made; and a stop in one of them, once it has stored something."""

    def __init__(self, stop_in: str = "") -> None:
        self.made: list[str] = []
        self.said: list[str] = []
        self._stop_in = stop_in

    def __call__(self, event: Event) -> None:
        if isinstance(event, Notice):
            self.said.append(event.message)
        if isinstance(event, UnitDone) and event.name == self._stop_in:
            raise Stopped
        if isinstance(event, WorkDone) and ("pass" in event.name or event.name == "statistics"):
            self.made.append(event.name)


def stored(out: Path) -> dict[str, np.ndarray]:
    return {name: array[:] for name, array in zarr.open_group(out, mode="r").arrays()}


def check_same(one: Path, other: Path) -> None:
    left, right = stored(one), stored(other)
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], name)


@pytest.mark.parametrize(
    ("side", "scratch"),
    [
        ("variables", False),
        pytest.param("samples", True, marks=pytest.mark.slow),
        pytest.param("samples", False, marks=pytest.mark.slow),
        pytest.param("variables", True, marks=pytest.mark.slow),
    ],
)
def test_a_stop_costs_the_pass_under_way(
    client: Client, tmp_path: Path, rng: np.random.Generator, side: str, scratch: bool
) -> None:
    """In every pass in turn, one run after another; the bits are those of a run in one go."""
    options = case(tmp_path, rng, SHAPES[side], client)
    whole = Listening()
    first = tw.eofs(out=tmp_path / "whole.zarr", listener=whole, **options)
    products = [name for name in whole.made if name.startswith("eofs, pass") and ":" not in name]
    assert len(products) == first.passes - 1 >= 5
    if scratch:
        (tmp_path / "scratch").mkdir()
        options["scratch"] = tmp_path / "scratch"
    out = tmp_path / "out.zarr"
    for number, name in enumerate(products, 2):
        listening = Listening(stop_in=name)
        with pytest.raises(Stopped):
            tw.eofs(out=out, listener=listening, **options)
        made = [one for one in listening.made if one == "statistics" or one in products]
        # What the stopped run before it had under way, and nothing else.
        assert made == (["statistics"] if number == 2 else [f"eofs, pass {number - 1}"])
        assert not out.exists()
    run = tw.eofs(out=out, **options)
    assert (run.passes, run.resumed) == (first.passes, first.passes - 1)
    check_same(out, tmp_path / "whole.zarr")
    assert run.verification is not None
    left = {"x.zarr", "whole.zarr", "out.zarr"} | ({"scratch"} if scratch else set())
    assert {each.name for each in tmp_path.iterdir()} == left
    if scratch:
        assert not list((tmp_path / "scratch").iterdir())


@pytest.mark.sample(1)
@pytest.mark.parametrize("side", SHAPES)
def test_the_covariance_matrix_is_formed_once(
    client: Client, tmp_path: Path, rng: np.random.Generator, side: str
) -> None:
    options = case(tmp_path, rng, SHAPES[side], client) | {"method": "gram"}
    first = tw.eofs(out=tmp_path / "whole.zarr", **options)
    out = tmp_path / "out.zarr"
    with pytest.raises(Stopped):
        tw.eofs(out=out, listener=Listening(stop_in=f"eofs, pass {first.passes}"), **options)
    listening = Listening()
    run = tw.eofs(out=out, listener=listening, **options)
    assert run.resumed == first.passes - 1
    assert any("an earlier run left passes over X" in text for text in listening.said)
    check_same(out, tmp_path / "whole.zarr")
    assert f"({run.resumed} of an earlier run)" in str(run)


def stopped(options: dict[str, Any], out: Path, name: str = "eofs, pass 5") -> Path:
    """A run that was stopped in its third step; the folder of what it has kept."""
    with pytest.raises(Stopped):
        tw.eofs(out=out, listener=Listening(stop_in=name), **options)
    kept = partial_path(out) / "thin" / "passes"
    assert (kept / "step-000000.npz").is_file()
    return kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "goes_on"), [({"seed": 3}, False), ({"resume": False}, False), ({"tol": 1e-3}, True)]
)
def test_another_run_begins_anew(
    client: Client, tmp_path: Path, rng: np.random.Generator, other: dict[str, Any], goes_on: bool
) -> None:
    """With other options, or where that is asked for; with another tolerance it goes on."""
    options = case(tmp_path, rng, (60, 24), client)
    out = tmp_path / "out.zarr"
    stopped(options, out)
    assert (tw.eofs(out=out, **(options | other)).resumed > 0) == goes_on


def test_other_numbers_begin_anew(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    options = case(tmp_path, rng, (60, 24), client)
    out = tmp_path / "out.zarr"
    stopped(options, out)
    array = zarr.open_array(options["x"], mode="r+")
    array[:20, :15] = 1
    run = tw.eofs(out=out, **options)
    assert run.resumed == 0
    np.testing.assert_allclose(
        run.values, np.linalg.eigvalsh(np.cov(array[...], rowvar=False))[::-1][:2], rtol=1e-6
    )


SLOW = pytest.mark.slow


@pytest.mark.more
@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("torn", "step-000000.npz"),
        *(pytest.param("torn", name, marks=SLOW) for name in "uv"),
        pytest.param("gone", "moments.npz", marks=SLOW),
        *(
            pytest.param("torn", name, marks=SLOW)
            for name in ("moments.npz", "under-way.json", "request.json")
        ),
        *(pytest.param("gone", name, marks=SLOW) for name in ("step-000000.npz", "under-way.json", "u")),
    ],
)
def test_what_is_damaged_is_found_again(
    client: Client, tmp_path: Path, rng: np.random.Generator, name: str, how: str
) -> None:
    options = case(tmp_path, rng, (60, 24), client)
    tw.eofs(out=tmp_path / "whole.zarr", **options)
    out = tmp_path / "out.zarr"
    kept = stopped(options, out)
    path = kept.parent / name / "c" / "0" / "0" if name in ("u", "v") else kept / name
    if how == "gone":
        path.unlink()
    else:
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
    tw.eofs(out=out, **options)
    check_same(out, tmp_path / "whole.zarr")


def test_an_error_in_what_was_asked_leaves_nothing(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    x = rng.standard_normal((30, 20))
    x[3, 4] = np.nan
    path = put(tmp_path / "x.zarr", x, (10, 10))
    with pytest.raises(OptionError, match="holds NaN, infinities"):
        tw.eofs(path, tmp_path / "out.zarr", 2, cluster=client)
    assert [each.name for each in tmp_path.iterdir()] == ["x.zarr"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("side", SHAPES)
@pytest.mark.parametrize("method", ["gram", "krylov"])
def test_a_plan_is_what_is_done(
    client: Client, tmp_path: Path, rng: np.random.Generator, side: str, method: str
) -> None:
    """Of the products that were made, each is one of those that were planned."""
    options = case(tmp_path, rng, SHAPES[side], client) | {"method": method}
    command = [
        "eofs",
        str(options["x"]),
        str(tmp_path / "out.zarr"),
        "-k",
        "2",
        "--method",
        method,
        "--device",
        "cpu",
    ]
    planned = CliRunner().invoke(cli, [*command, "--plan-only", "--json", "--quiet"])
    assert planned.exit_code == 0, planned.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["x.zarr"]
    plan = json.loads(planned.stdout)
    assert (plan["method"], plan["side"], plan["k"]) == (method, side, 2)
    assert plan["pass_nbytes"] == 60 * 24 * 8
    told: list[Event] = []
    run = tw.eofs(out=tmp_path / "out.zarr", listener=told.append, **options)
    assert plan["least_passes"] <= run.passes <= plan["most_passes"]
    tiles = {each["tile_count"] for each in plan["products"].values()}
    made = {
        event.total
        for event in told
        if isinstance(event, WorkPlanned) and event.name.startswith("eofs, pass") and ":" not in event.name
    }
    assert made <= tiles
    text = CliRunner().invoke(cli, [*command, "--plan-only", "--quiet"]).stdout
    assert f"passes over X: {plan['least_passes']}" in text


def test_a_plan_tells_what_would_be_refused_or_kept(
    tmp_path: Path, rng: np.random.Generator, client: Client
) -> None:
    options = case(tmp_path, rng, (60, 24), client)
    out = tmp_path / "out.zarr"
    command = [
        "eofs",
        str(options["x"]),
        str(out),
        "-k",
        "2",
        "--method",
        "krylov",
        "--device",
        "cpu",
        "--plan-only",
    ]
    stopped(options, out)
    assert (
        "an earlier run left passes, which would not be made again" in CliRunner().invoke(cli, command).stderr
    )
    tw.eofs(out=out, **options)
    assert "without --plan-only this would be refused" in CliRunner().invoke(cli, command).stderr
