"""Nearest neighbours and pairs of stored matrices: results, resuming, refusals, the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from click.testing import CliRunner
from distributed import Client
from numpy.testing import assert_array_equal

import tilewright as tw
from tests.kernels.neighbours import naive
from tests.workflows.products import Stopped, put
from tests.workflows.test_interrupt import STOP_AFTER, interrupted
from tilewright.kernels.neighbours import order
from tilewright.pipeline.events import Event, Notice, UnitDone
from tilewright.pipeline.neighbours import job
from tilewright.workflows.cli import METRICS, cli
from tilewright.workflows.neighbours import search

ITEMS, WIDTH = 1400, 8
"""Three blocks of the least number of items."""


def whole_numbers(rng: np.random.Generator, dtype: str, rows: int = ITEMS) -> np.ndarray:
    """Of which sums are exact, so that NumPy says what the answer is; some rows are there twice, one is zero."""
    found = rng.integers(0 if dtype.startswith("u") else -3, 4, (rows, WIDTH)).astype(dtype)
    found[rows // 2] = found[3]
    found[5] = 0
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("dtype", "metric", "of", "of_two"),
    [
        ("float32", "cosine", "rows", False),
        ("float16", "l2", "columns", True),
        ("int8", "dot", "columns", False),
        ("uint8", "l2", "rows", True),
    ],
)
def test_neighbours_are_those_of_all_values(
    client: Client, tmp_path: Path, rng: np.random.Generator, dtype: str, metric: Any, of: Any, of_two: bool
) -> None:
    a = whole_numbers(rng, dtype)
    b = whole_numbers(rng, dtype, 600) if of_two else a
    if a.dtype.kind == "f":
        a[7, 2] = np.nan
    turned = (lambda array: array.T) if of == "columns" else (lambda array: array)
    left = put(tmp_path / "a.zarr", np.ascontiguousarray(turned(a)), chunks=(300, 300))
    right = put(tmp_path / "b.zarr", np.ascontiguousarray(turned(b)), chunks=(77, 131)) if of_two else None
    options: dict[str, Any] = {"metric": metric, "of": of, "cluster": client, "device": "cpu"}
    run = tw.topk(left, right, tmp_path / "o.zarr", 4, exclude_self=not of_two, **options)
    keys, values = naive.exact_keys(a, b, metric)
    wanted = naive.nearest(keys, values, 4, not of_two)
    with xr.open_zarr(tmp_path / "o.zarr", consolidated=True) as stored:
        assert_array_equal(stored.indices, wanted.indices)
        assert_array_equal(stored["values"], wanted.values)
        assert stored.indices.dims == ("row", "neighbour")
        assert stored.attrs["tilewright"]["verification"]["passed"]
    assert run.nan_rows == (1 if a.dtype.kind == "f" else 0)
    assert run.incomplete_rows == run.nan_rows
    assert run.verification is not None
    assert run.verification.rows == 64
    assert "64 of 1400 items, drawn at random" in str(run)
    assert json.loads(json.dumps(run.to_json()))["plan"]["k"] == 4

    below = 0.5 if metric == "cosine" else 2
    pairs = tw.pairs(left, right, tmp_path / "p.zarr", below=below, **options)
    wanted_pairs = naive.pairs(values, None, below, once=not of_two)
    with xr.open_zarr(tmp_path / "p.zarr") as stored:
        for name, theirs in zip(("row", "column", "value"), wanted_pairs, strict=True):
            assert_array_equal(stored[name], theirs)
    assert isinstance(pairs, tw.PairsRun)
    assert pairs.count == len(wanted_pairs.row)
    counted = tw.pairs(left, right, below=below, count_only=True, **options)
    assert isinstance(counted, tw.PairsRun)
    assert counted.count == pairs.count
    assert counted.verification is None


@pytest.mark.more
def test_the_answer_depends_neither_on_workers_nor_on_memory(
    client: Client, processes: Client, rng: np.random.Generator, tmp_path: Path
) -> None:
    x = rng.standard_normal((ITEMS, 60)).astype(np.float32)
    path = put(tmp_path / "x.zarr", x, chunks=(200, 60))
    options: dict[str, Any] = {"k": 7, "metric": "l2", "device": "cpu", "exclude_self": True}
    wanted = tw.topk(path, cluster=client, **options)
    for cluster, memory in ((processes, None), (client, "600KiB"), (processes, "100KiB")):
        found = tw.topk(path, cluster=cluster, device_memory=memory, verify=False, **options)
        assert_array_equal(found.indices, wanted.indices)
        assert found.values.tobytes() == wanted.values.tobytes()
    narrow = job.plan_only(
        search.NeighbourRequest(path, k=7, cluster=client, device="cpu", device_memory="100KiB")
    )
    assert narrow.depth < narrow.width, "items were read in parts"


def of_any_length(x: np.ndarray, rng: np.random.Generator, most: int) -> np.ndarray:
    """Numbers near 1, of which each row is multiplied by a power of two, so that all stay normal numbers."""
    exponents = rng.integers(-most, most + 1, len(x))
    exponents[::3] = 0
    return np.ldexp(x, exponents[:, np.newaxis].astype(np.int32)).astype(x.dtype)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("dtype", "most"), [("f4", 100), ("f8", 950)])
@pytest.mark.parametrize("of", ["rows", "columns"])
@pytest.mark.parametrize("memory", [None, "100KiB"])
def test_lengths_do_not_matter_to_cosines(
    client: Client,
    rng: np.random.Generator,
    tmp_path: Path,
    dtype: str,
    most: int,
    of: Any,
    memory: str | None,
) -> None:
    """To the bit, whether items are read as a whole or in parts; their products leave the range of the dtype."""
    x, y = (rng.standard_normal((rows, 60)).astype(dtype) for rows in (300, 70))
    x[5] = 0
    turned = (lambda array: array.T) if of == "columns" else (lambda array: array)
    paths = {
        name: put(tmp_path / name, np.ascontiguousarray(turned(array)), chunks=(60, 60))
        for name, array in {
            "x": x, "y": y, "long x": of_any_length(x, rng, most), "long y": of_any_length(y, rng, most),
        }.items()
    }  # fmt: skip
    options: dict[str, Any] = {"metric": "cosine", "of": of, "cluster": client, "device": "cpu"}
    wanted = tw.topk(paths["x"], paths["y"], k=6, **options)
    found = tw.topk(paths["long x"], paths["long y"], k=6, device_memory=memory, **options)
    assert_array_equal(found.indices, wanted.indices)
    assert found.values.tobytes() == wanted.values.tobytes()
    near = tw.pairs(paths["x"], above=0.2, **options)
    run = tw.pairs(paths["long x"], out=tmp_path / "p.zarr", above=0.2, device_memory=memory, **options)
    assert run.verification is not None
    assert run.verification.passed
    assert run.verification.unchecked == 0
    pairs = xr.open_zarr(tmp_path / "p.zarr")
    assert len(near.row) > 100
    for name in ("row", "column", "value"):
        assert pairs[name].to_numpy().tobytes() == getattr(near, name).tobytes()


@pytest.mark.parametrize(
    ("dtype", "length"),
    [
        *(("f2", length) for length in (1e-7, 1e-3, 3e4)),
        *(("f4", length) for length in (1e-44, 1e-40, 1e-21, 1e-19, 1e19, 1e38)),
        *(("f8", length) for length in (1e-322, 1e-300, 1e-155, 1e154, 1e308)),
    ],
)
def test_cosines_of_items_of_any_length(
    client: Client, rng: np.random.Generator, dtype: str, length: float
) -> None:
    """Subnormal ones too: the cosines are those of the numbers as they are stored, beside items of length 1 as well."""
    x = rng.uniform(-1, 1, (40, 9))
    x[::2] *= length
    x = x.astype(dtype)
    wide = np.asarray(x, np.longdouble)
    wide /= np.maximum(np.abs(wide).max(1, keepdims=True), np.finfo(np.longdouble).tiny)
    sizes = np.sqrt((wide**2).sum(1, keepdims=True))
    wide /= np.where(sizes == 0, 1, sizes)
    exact = np.asarray(wide @ wide.T, np.float64)
    found = tw.topk(x, k=40, metric="cosine", cluster=client, device="cpu")
    at = np.take_along_axis(exact, found.indices, axis=1)
    np.testing.assert_allclose(found.values, at, rtol=0, atol=1e-6 if dtype != "f8" else 1e-15)
    assert (np.sort(found.indices) == np.arange(40)).all()


def test_without_out_arrays_come_back(client: Client, rng: np.random.Generator) -> None:
    x = whole_numbers(rng, "float32", 90)
    keys, values = naive.exact_keys(x, x, "cosine")
    found = tw.topk(x, k=90, metric="cosine", cluster=client, device="cpu")
    assert_array_equal(found.indices, naive.nearest(keys, values, 90, False).indices)
    pairs = tw.pairs(x, above=0.9, metric="cosine", cluster=client, device="cpu")
    assert isinstance(pairs, tw.Pairs)
    assert_array_equal(pairs.row, naive.pairs(values, 0.9, None, True).row)
    nothing = tw.pairs(x, above=1e9, cluster=client, device="cpu")
    assert isinstance(nothing, tw.Pairs)
    assert len(nothing.value) == 0


def test_names_and_coordinates_are_carried_over(
    client: Client, rng: np.random.Generator, tmp_path: Path
) -> None:
    data = xr.DataArray(rng.random((30, 4)), dims=("doc", "feature"), coords={"doc": np.arange(30) * 7})
    data.to_dataset(name="x").to_zarr(tmp_path / "g.zarr", consolidated=False)
    tw.topk(tmp_path / "g.zarr" / "x", out=tmp_path / "o.zarr", k=2, cluster=client, device="cpu")
    with xr.open_zarr(tmp_path / "o.zarr") as stored:
        assert stored.indices.dims == ("doc", "neighbour")
        assert_array_equal(stored.doc, np.arange(30) * 7)


class Stopping:
    """A listener that stops a search behind its first block."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Notice):
            self.said.append(event.message)
        if isinstance(event, UnitDone) and event.name in ("topk", "pairs"):
            raise Stopped


@pytest.mark.sample(1)
@pytest.mark.parametrize("what", ["topk", "pairs"])
def test_a_stopped_search_goes_on(
    client: Client, rng: np.random.Generator, tmp_path: Path, what: str
) -> None:
    path = put(tmp_path / "x.zarr", whole_numbers(rng, "float32"), chunks=(100, 8))
    options: dict[str, Any] = {"metric": "cosine", "cluster": client, "device": "cpu"}
    options |= {"k": 3} if what == "topk" else {"above": 0.9}
    call, out = getattr(tw, what), tmp_path / "o.zarr"
    with pytest.raises(Stopped):
        call(path, out=out, listener=Stopping(), **options)
    assert not out.exists()
    again = call(path, out=out, **options)
    assert 1 <= again.resumed < 3
    anew = call(path, out=tmp_path / "n.zarr", resume=False, **options)
    assert anew.resumed == 0
    for name in ("indices", "values") if what == "topk" else ("row", "column", "value"):
        one, other = (zarr.open_group(place, mode="r")[name][...] for place in (out, tmp_path / "n.zarr"))  # type: ignore[index]
        assert_array_equal(one, other)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["n.zarr", "o.zarr", "x.zarr"]


def test_other_numbers_are_searched_anew(client: Client, rng: np.random.Generator, tmp_path: Path) -> None:
    path, out = put(tmp_path / "x.zarr", whole_numbers(rng, "float32"), chunks=(100, 8)), tmp_path / "o.zarr"
    with pytest.raises(Stopped):
        tw.topk(path, out=out, k=3, cluster=client, device="cpu", listener=Stopping())
    zarr.open_array(path)[0] = 9
    assert tw.topk(path, out=out, k=3, cluster=client, device="cpu").resumed == 0


@pytest.mark.slow
def test_a_killed_search_goes_on(rng: np.random.Generator, tmp_path: Path) -> None:
    put(tmp_path / "x.zarr", whole_numbers(rng, "float32", 5000), chunks=(100, 8))
    command = ["topk", "x.zarr", "o.zarr", "--metric", "l2"]
    result = interrupted(*command, cwd=tmp_path, INTERRUPT_BY="SIGKILL")
    assert result.returncode == -9, result.stderr
    run = tw.topk(tmp_path / "x.zarr", out=tmp_path / "o.zarr", metric="l2")
    assert run.resumed >= STOP_AFTER - 1  # the last is written while the next is searched


def test_a_fault_does_not_pass_the_check(
    client: Client, rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is wrong with the rows that are drawn."""
    path = put(tmp_path / "x.zarr", whole_numbers(rng, "float32", 40), chunks=(100, 8))
    request = search.NeighbourRequest(path, k=5, metric="cosine", cluster=client, device="cpu").checked()
    sides = search.job.open_sides(request)
    prepared = job.prepare(client, request, sides, job.Teller(request.listener))
    found = tw.topk(path, k=5, metric="cosine", cluster=client, device="cpu")

    def checked(indices: np.ndarray, values: np.ndarray) -> Any:
        reported = [job.Reported(i, indices[i], values[i]) for i in range(40)]
        return job.check_reported(client, prepared.work, reported, 2, lambda event: None)

    assert checked(*found).passed
    for name, (place, index, value) in {
        "not in order": ((9, [1, 0, 2, 3, 4]), None, None),
        "nearer": ((9, slice(None)), -1, np.nan),
        "times as far": ((9, 4), None, 0.123),
        "twice": ((9, 1), found.indices[9, 0], None),
    }.items():
        indices, values = found.indices.copy(), found.values.copy()
        if name == "not in order":
            indices[9], values[9] = indices[place], values[place]
            if values[9, 0] == values[9, 1]:
                name = "order"
        else:
            if index is not None:
                indices[place] = index
            if value is not None:
                values[place] = value
        check = checked(indices, values)
        assert name in check.cause
        assert not check.passed


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of matrices to which none of its tests adds anything."""
    folder = tmp_path_factory.mktemp("refusing")
    put(folder / "x.zarr", np.ones((60, 8), np.float32))
    put(folder / "b.zarr", np.ones((50, 8), np.float32))
    put(folder / "wide.zarr", np.ones((50, 9), np.float32))
    put(folder / "i.zarr", np.ones((60, 8), np.int64))
    put(folder / "c.zarr", np.ones((60, 8), np.complex64))
    put(folder / "one.zarr", np.ones((1, 8), np.float32))
    zarr.create_group(folder / "two", zarr_format=2)
    return folder


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"k": 61}, tw.OptionError, r"k=61: A, .*x\.zarr, has 60 rows; ask for 60 at most"),
        ({"k": 60, "exclude_self": True}, tw.OptionError, r"none is its own neighbour .* 59 at most"),
        ({"k": 0}, tw.OptionError, r"k=0: how many neighbours"),
        ({"metric": "manhattan"}, tw.OptionError, r"metric='manhattan'.*dot.*cosine.*l2"),
        ({"b": "wide.zarr"}, tw.ShapeError, r"has 8 columns and wide\.zarr has 9; rows that are compared"),
        ({"b": "b.zarr", "exclude_self": True}, tw.OptionError, r"two matrices"),
        ({"a": "i.zarr", "metric": "cosine"}, tw.OptionError, r"products of int64 may exceed 64 bits"),
        ({"a": "c.zarr"}, tw.DTypeError, r"holds complex64"),
        ({"out": "b.zarr"}, tw.OutputExistsError, r"b\.zarr exists, and is nothing that would be replaced"),
        # As where a user means B, and has left the output out.
        ({"out": "b.zarr", "overwrite": True}, tw.OutputExistsError, r"nothing that would be replaced"),
        ({"out": "two/o.zarr"}, tw.StoreError, r"lies in a group of Zarr's format 2"),
        (
            {"a": "one.zarr", "k": 1, "exclude_self": True},
            tw.OptionError,
            r"has 1 row, and none .* none is a neighbour",
        ),
        ({"out": "x.zarr/o.zarr"}, tw.OutputError, r"one inside the other"),
        ({"device_memory": 100}, tw.PlanError, r"--device-memory"),
        ({"pairs": True}, tw.OptionError, r"neither above nor below"),
        ({"pairs": True, "above": 1, "below": 2}, tw.OptionError, r"both above and below"),
        ({"pairs": True, "above": float("nan")}, tw.OptionError, r"above=nan: no value is on either side"),
        ({"pairs": True, "below": "near"}, tw.OptionError, r"below='near' is no number"),
        *(
            (
                {"pairs": True, "metric": metric} | threshold,
                tw.OptionError,
                f"{which} pair has such a value by metric='{metric}', since {words}",
            )
            for metric, threshold, which, words in [
                (
                    "cosine",
                    {"above": 90},
                    "no",
                    r"a cosine is a number from -1 to 1.* give more than -1, and 1 at most",
                ),
                ("cosine", {"above": -1}, "every", "a cosine"),
                ("cosine", {"below": 1}, "every", r"a cosine.* give -1 or more, and less than 1"),
                ("cosine", {"below": -1.5}, "no", "a cosine"),
                ("cosine", {"above": float("inf")}, "no", "a cosine"),
                ("l2", {"below": -1}, "no", "a distance is 0 or more; give 0 or more$"),
                ("l2", {"below": float("inf")}, "every", "a distance"),
                ("l2", {"above": 0}, "every", "a distance is 0 or more; give more than 0$"),
            ]
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    client: Client,
    refusing: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    error: Any,
    words: str,
) -> None:
    monkeypatch.chdir(refusing)
    before = sorted(refusing.rglob("*"))
    given = {"a": "x.zarr", "out": "o.zarr", "cluster": client, "device": "cpu"} | options
    call = tw.pairs if given.pop("pairs", False) else tw.topk
    with pytest.raises(error, match=words):
        call(**given)
    assert sorted(refusing.rglob("*")) == before


def test_neighbours_that_stand_there_are_replaced_if_asked_for(client: Client, tmp_path: Path) -> None:
    path = put(tmp_path / "x.zarr", np.eye(9, dtype=np.float32))
    options: dict[str, Any] = {"out": tmp_path / "o.zarr", "cluster": client, "device": "cpu"}
    tw.topk(path, k=2, **options)
    with pytest.raises(tw.OutputExistsError, match=r"o\.zarr exists; .* \(--overwrite\)"):
        tw.topk(path, k=3, **options)
    tw.topk(path, k=3, overwrite=True, **options)
    assert zarr.open_array(tmp_path / "o.zarr/indices").shape == (9, 3)
    with pytest.raises(tw.OutputExistsError, match="nothing that would be replaced"):
        tw.pairs(path, above=0.5, overwrite=True, **options)


def test_pairs_that_the_disk_does_not_hold_are_refused(
    client: Client, rng: np.random.Generator, tmp_path: Path
) -> None:
    path = put(tmp_path / "x.zarr", whole_numbers(rng, "float32", 50), chunks=(50, 8))
    request = search.NeighbourRequest(path, above=0.5, out=tmp_path / "o.zarr").checked()
    plan = tw.NeighbourPlan(
        **(job.plan_only(request).to_json() | {"output_nbytes": 2**70, "expected_pairs": 2**60})
    )
    with pytest.raises(
        tw.OutputError, match=r"about 1152921504606846976 pairs, by a sample, .*above.*--count-only"
    ):
        job.check_room(tmp_path / "o.zarr", request, plan)


def test_the_command(rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = whole_numbers(rng, "float32", 100)
    put(Path("x.zarr"), x)
    runner = CliRunner()

    def ran(*words: str) -> Any:
        result = runner.invoke(cli, [*words, "--device", "cpu", "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    assert ran("topk", "x.zarr", "o.zarr", "--plan-only")["k"] == 10
    assert not Path("o.zarr").exists()
    assert (
        ran("topk", "x.zarr", "o.zarr", "-k", "3", "--metric", "cosine", "--exclude-self")["out"] == "o.zarr"
    )
    values = naive.exact_keys(x, x, "cosine")[1]
    count = len(naive.pairs(values, 0.9, None, True).row)
    words = ["--metric", "cosine", "--above", "0.9"]
    assert ran("pairs", "x.zarr", "p.zarr", *words)["count"] == count
    assert ran("pairs", "x.zarr", "--count-only", *words)["count"] == count
    of_two = ran("topk", "x.zarr", "x.zarr", "t.zarr", "--columns", "-k", "8")
    assert of_two["plan"]["m"] == 8
    assert runner.invoke(cli, ["topk", "x.zarr"]).exit_code == 2
    assert METRICS == order.METRICS


def test_a_gpu_that_finds_none_is_no_silent_matter(tmp_path: Path) -> None:
    """Rows of float64 are compared on the cores."""
    path = put(tmp_path / "x.zarr", np.ones((9, 4)))
    facts = [job.WorkerFacts("cuda", "H100", 2**30, None, 1)]
    told: list[Event] = []
    request = search.NeighbourRequest(path, k=2, listener=told.append)
    sides = job.open_sides(request)
    assert job.device_for(facts, request, sides, job.Teller(told.append)) == ("cpu", "CPU")
    assert [str(event) for event in told if isinstance(event, Notice) and "k=2" in event.message]
    request = search.NeighbourRequest(path, k=2, device="cuda")
    with pytest.raises(tw.DeviceUnavailableError, match=r"4 numbers of float64, k=2.*--device cpu"):
        job.device_for(facts, request, sides, job.Teller(told.append))
