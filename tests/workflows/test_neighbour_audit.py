"""What is wrong with stored neighbours and pairs is found, and named; what is right passes."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright as tw
from tests.workflows.products import put
from tilewright.pipeline.events import UnitDone, WorkDone, WorkPlanned
from tilewright.pipeline.neighbours import group
from tilewright.workflows.cli import cli

ITEMS, WIDTH, K = 60, 7, 4
"""Few enough for all items to be drawn, so that any damage is found."""
MADE: dict[str, Callable[..., Any]] = {
    "near": lambda: tw.topk("a.zarr", out="near", k=K, exclude_self=True, device="cpu"),
    "between": lambda: tw.topk("a.zarr", "b.zarr", "between", K, metric="l2", device="cpu"),
    "pairs": lambda: tw.pairs("a.zarr", out="pairs", above=0.4, metric="cosine", device="cpu"),
    "across": lambda: tw.pairs("a.zarr", "b.zarr", "across", below=3, metric="l2", device="cpu"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Groups of each kind, in chunks of 16 rows or pairs, beside what they are of."""
    folder = tmp_path_factory.mktemp("made")
    rng = np.random.default_rng(39)
    put(folder / "a.zarr", rng.standard_normal((ITEMS, WIDTH)).astype("f4"))
    put(folder / "b.zarr", rng.standard_normal((ITEMS - 20, WIDTH)).astype("f4"))
    put(folder / "short.zarr", np.ones((ITEMS - 1, WIDTH), "f4"))
    put(folder / "wide.zarr", np.ones((ITEMS, WIDTH + 1), "f4"))
    put(folder / "whole.zarr", np.ones((ITEMS, WIDTH), "i1"))
    put(folder / "alike.zarr", rng.standard_normal((ITEMS, WIDTH)).astype("f4"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for make in MADE.values():
            make()
        for name in MADE:
            rechunked(folder / name)
    return folder


def rechunked(path: Path) -> None:
    """Write the arrays of a group in small chunks, as its owner may."""
    for name, array in list(zarr.open_group(path, use_consolidated=False).arrays()):
        data, attributes = array[:], dict(array.attrs)
        chunks = (16, *data.shape[1:])
        zarr.create_array(
            path / name, data=data, chunks=chunks, overwrite=True, attributes=attributes, compressors=None
        )


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of all of it, as the working directory."""
    folder = tmp_path / "here"
    shutil.copytree(made, folder)
    monkeypatch.chdir(folder)
    return folder


def audited(name: str, *inputs: Any, **options: Any) -> tw.NeighbourAudit:
    found = tw.audit(name, *inputs, **options)
    assert isinstance(found, tw.NeighbourAudit)
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MADE)
def test_what_was_stored_passes_and_nothing_is_written(here: Path, name: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in here.rglob("*")}
    events: list[Any] = []
    found = audited(name, listener=events.append)
    assert found.passed, str(found)
    assert (found.by, found.bad, found.name) == ("items", (), name)
    assert found.check is not None
    assert found.check.rows == found.check.items == ITEMS
    arrays = [array for _, array in zarr.open_group(name, use_consolidated=False).arrays()]
    assert found.objects == sum(array.nchunks for array in arrays)
    assert found.nbytes == sum(array.nbytes for array in arrays)
    assert "all 60 items compared with all of B anew" in str(found)
    assert {path: path.stat().st_mtime_ns for path in here.rglob("*")} == before
    of_look = [event for event in events if getattr(event, "name", "") == "audit"]
    assert isinstance(of_look[0], WorkPlanned)
    assert isinstance(of_look[-1], WorkDone)
    assert sum(event.nbytes for event in of_look if isinstance(event, UnitDone)) == found.nbytes
    given = audited(name, here / "a.zarr", *([here / "b.zarr"] if name in ("between", "across") else []))
    assert given.passed


def test_of_many_items_a_sample_is_compared(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    x = rng.standard_normal((300, 8)).astype("f4")
    tw.topk(x, out=tmp_path / "near", k=3, device="cpu")
    found = audited(os.fspath(tmp_path / "near"), x, cluster=client)
    assert found.passed
    assert "64 of 300 items, drawn at random" in str(found)
    assert "faults in 5 % of items escape with a chance of 0.038" in str(found)
    with pytest.raises(tw.StoreError, match=r"^A: .*names it so; give A as it is found from here: a\)$"):
        tw.audit(tmp_path / "near")  # the name of an array in memory opens nothing


def swapped(name: str, column: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        array = zarr.open_array(path / name, mode="r+")
        data = array[:]
        data[20, [column, column + 1]] = data[20, [column + 1, column]]
        array[:] = data

    return change


def put_in(name: str, place: Any, value: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        zarr.open_array(path / name, mode="r+")[place] = value

    return change


def both_swapped(path: Path) -> None:
    swapped("indices", 1)(path)
    swapped("values", 1)(path)


def another_neighbour(path: Path) -> None:
    """One that is no neighbour, in place of the last."""
    array = zarr.open_array(path / "indices", mode="r+")
    here = array[20].tolist()
    array[20, K - 1] = next(other for other in range(ITEMS - 20) if other not in [*here, 20])


def cut(path: Path) -> None:
    file = sorted((path / "values").glob("c/**/1/0"))[0]
    file.write_bytes(file.read_bytes()[:-3])


def cut_pairs(path: Path) -> None:
    file = path / "column" / "c" / "1"
    file.write_bytes(file.read_bytes()[:-3])


def without_pair(path: Path, place: int = 20) -> None:
    for name in ("row", "column", "value"):
        data = np.delete(zarr.open_array(path / name)[:], place)
        zarr.create_array(path / name, data=data, chunks=(16,), overwrite=True)


def exchanged(first: int) -> Callable[[Path], None]:
    """Two pairs in each other's place."""

    def change(path: Path) -> None:
        for name in ("row", "column", "value"):
            array = zarr.open_array(path / name, mode="r+")
            array[first : first + 2] = array[first : first + 2][::-1].copy()

    return change


NEIGHBOURS = [
    (
        "near",
        put_in("values", (20, 1), 1e3),
        "values/c/1/0",
        "of item 20, neighbours 0 and 1 are not in order",
    ),
    ("near", put_in("values", (20, 0), 1e3), "", "item 20 and item .* times as far from the exact one"),
    (
        "near",
        put_in("values", (20, 3), np.nan),
        "values/c/1/0",
        "of item 20, neighbour 3 is .*, and its value nan",
    ),
    (
        "near",
        put_in("indices", (20, 1), ITEMS),
        "indices/c/1/0",
        "of item 20, 60 is a neighbour, and B has 60",
    ),
    ("near", put_in("indices", (20, 1), -2), "indices/c/1/0", "of item 20, -2 is a neighbour"),
    (
        "near",
        put_in("indices", (20, 1), -1),
        "indices/c/1/0",
        "of item 20, neighbour 1 is missing, and not the next",
    ),
    ("near", put_in("indices", (20, 3), -1), "values/c/1/0", "of item 20, neighbour 3 is -1, and its value"),
    ("near", put_in("indices", (20, 1), 20), "indices/c/1/0", "of item 20, it is its own neighbour"),
    ("between", put_in("indices", 20, [3, 3, 1, 2]), "indices/c/1/0", "of item 20, 3 is a neighbour twice"),
    (
        "between",
        put_in("indices", (20, 1), 40),
        "indices/c/1/0",
        "of item 20, 40 is a neighbour, and B has 40",
    ),
    ("between", swapped("indices", 1), "", "item 20 and item .* times as far from the exact one"),
    ("between", both_swapped, "values/c/1/0", "of item 20, neighbours 1 and 2 are not in order"),
    ("near", another_neighbour, "", "item 20 and item .* times as far from the exact one"),
    ("near", cut, "values/c/1/0", "it cannot be decoded"),
    ("pairs", cut_pairs, "column/c/1", "it cannot be decoded"),
    ("pairs", without_pair, "", "item .* lacks a pair beyond the threshold"),
    ("pairs", put_in("value", 20, 0.9999), "", "times as far from the exact one"),
    ("pairs", put_in("value", 20, np.nan), "value/c/1", "has no value"),
    ("pairs", put_in("row", 20, -3), "row/c/1", "-3 is none of 60 items"),
    ("pairs", put_in("column", 20, ITEMS), "column/c/1", "60 is none of 60 items"),
    ("pairs", put_in("column", 20, 0), "column/c/1", "is not of an item and a later one"),
    ("across", put_in("column", 20, 40), "column/c/1", "40 is none of 40 items"),
    ("across", exchanged(20), "row/c/1", "follows .*, and pairs are in order"),
    ("across", exchanged(15), "row/c/1", "follows .*, and pairs are in order"),
    ("across", without_pair, "", "item .* lacks a pair beyond the threshold"),
]


@pytest.mark.sample(8)
@pytest.mark.parametrize(("name", "damage", "file", "reason"), NEIGHBOURS)
def test_a_damage_is_named(
    here: Path, name: str, damage: Callable[[Path], None], file: str, reason: str
) -> None:
    damage(here / name)
    found = audited(name)
    assert not found.passed
    text = str(found)
    assert text.startswith("audit failed: ")
    if file:
        assert [one.file for one in found.bad] == [file]
        (bad,) = found.bad
        assert (bad.rows[0], bad.rows[1] - bad.rows[0]) == (16, min(16, bad.rows[1] - 16))
        assert found.check is None
        assert text.endswith("no item was compared anew")
        pattern, said = reason, bad.reason
    else:
        assert found.bad == ()
        assert found.check is not None
        assert text.endswith("all 60 items compared with all of B anew")
        pattern, said = reason, found.check.cause
    assert re.search(pattern, said), said
    assert said in text


def test_a_matrix_that_has_the_shape_and_other_numbers_fails(here: Path) -> None:
    found = audited("near", "alike.zarr")
    assert not found.passed
    assert "times as far from the exact one as rounding may make it" in str(found)


@pytest.mark.parametrize(
    ("inputs", "error", "told"),
    [
        (
            ("near", "short.zarr"),
            tw.ShapeError,
            r"short.zarr has shape \(59, 7\), and near .* \(60, 7\); give",
        ),
        (
            ("pairs", "wide.zarr"),
            tw.ShapeError,
            r"wide.zarr has shape \(60, 8\), and pairs .* \(60, 7\); give",
        ),
        (("near", "whole.zarr"), tw.DTypeError, "values: near has float32, .* of int8 stores int64; give"),
        (("near", "a.zarr", "b.zarr"), tw.OptionError, "a.zarr with itself, and B, b.zarr, .*; leave B out"),
        (("across", "b.zarr", "b.zarr"), tw.OptionError, "A and B are one array, b.zarr; give both"),
        (("across", "none.zarr"), tw.StoreError, "^A: there is no Zarr array at none.zarr"),
    ],
)
def test_other_matrices_are_refused(
    here: Path, inputs: tuple[str, ...], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told) as raised:
        tw.audit(*inputs)
    assert "\n" not in str(raised.value)


def test_options_of_products_are_refused(here: Path) -> None:
    with pytest.raises(
        tw.OptionError, match=r"precision: near holds neighbours or pairs, .* leave precision out"
    ):
        tw.audit("near", precision="tf32")
    with pytest.raises(tw.OptionError, match="transpose_b: near holds"):
        tw.audit("near", transpose_b=True)


def attributes_changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = path / "zarr.json"
    whole = json.loads(file.read_text())
    change(whole["attributes"])
    file.write_text(json.dumps(whole))


def test_groups_that_say_less_are_audited_by_what_is_given(here: Path) -> None:
    attributes_changed(here / "near", lambda said: said["tilewright"].pop("shapes"))
    with pytest.raises(
        tw.ShapeError, match=r"near has indices of shape \(60, 4\).*59 items of A, short.zarr"
    ):
        tw.audit("near", "short.zarr")
    attributes_changed(here / "near", lambda said: said.pop("tilewright"))
    with pytest.raises(tw.StoreError, match=r"A: near does not name what it was made of; give that"):
        tw.audit("near")
    assert tw.audit("near", "a.zarr").passed
    attributes_changed(here / "near", lambda said: said[group.KINDS["topk"]].update(metric="far"))
    with pytest.raises(tw.StoreError, match=r"C: the attribute tilewright_neighbours of near .*metric='far'"):
        tw.audit("near", "a.zarr")
    attributes_changed(here / "near", lambda said: said.update({group.KINDS["topk"]: 7}))
    with pytest.raises(tw.StoreError, match=r"C: the attribute tilewright_neighbours of near is 7"):
        tw.audit("near", "a.zarr")
    shutil.rmtree(here / "pairs" / "column")
    with pytest.raises(tw.StoreError, match="column: there is no Zarr array at pairs/column"):
        tw.audit("pairs")
    without_pair(here / "across")
    zarr.create_array(here / "across" / "row", data=np.arange(9), overwrite=True)
    with pytest.raises(tw.ShapeError, match=r"across has arrays of different lengths \(row 9, column"):
        tw.audit("across")


def test_a_matrix_that_moved_is_given(here: Path) -> None:
    (here / "a.zarr").rename(here / "moved.zarr")
    with pytest.raises(tw.StoreError, match=r"^A: .* at a.zarr, .*\(near names it so; give A as it is found"):
        tw.audit("near")
    assert tw.audit("near", "moved.zarr").passed
    assert tw.audit("across", "moved.zarr").passed, "B is found by its name"


def test_neighbours_of_a_part_are_compared_with_that_part(here: Path) -> None:
    part = tw.slice("a.zarr", rows=(5, 45))
    tw.topk(part, "a.zarr", "part", 2, device="cpu")
    assert tw.audit("part").passed
    with pytest.raises(tw.ShapeError, match=r"A: a.zarr has shape \(60, 7\), and part"):
        tw.audit("part", "a.zarr", "b.zarr")


def test_nothing_is_audited_too(here: Path) -> None:
    put(here / "none.zarr", np.ones((0, WIDTH), "f4"))
    tw.topk("none.zarr", "a.zarr", "empty", K, device="cpu")
    tw.pairs("a.zarr", out="few", above=np.inf, device="cpu")
    for name in ("empty", "few"):
        found = audited(name)
        assert found.passed
        assert (found.objects, found.nbytes) == (0, 0)
    tw.pairs("a.zarr", out="all", above=-np.inf, device="cpu")
    found = audited("all")
    assert found.passed
    assert found.check is not None
    assert found.check.compared == ITEMS * (ITEMS - 1) // 2


@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_all_that_a_search_stores_passes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Ties, NaN, infinities, columns, any dtype."""
    folder = tmp_path_factory.mktemp("any")
    m, n, width = (data.draw(st.integers(1, 12), label=label) for label in ("m", "n", "width"))
    dtype = data.draw(st.sampled_from(["f2", "f4", "f8", "i1", "u2"]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    a, b = rng.integers(0, 3, (m, width)).astype(dtype), rng.integers(0, 3, (n, width)).astype(dtype)
    if a.dtype.kind == "f":
        a[rng.random(a.shape) < 0.05] = np.nan
        b[rng.random(b.shape) < 0.05] = np.inf
    columns = data.draw(st.booleans())
    left, right = (
        put(folder / name, np.ascontiguousarray(x.T if columns else x), chunks=(5, 5))
        for name, x in (("a", a), ("b", b))
    )
    options: dict[str, Any] = {
        "metric": data.draw(st.sampled_from(["dot", "cosine", "l2"])),
        "of": "columns" if columns else "rows",
        "device": "cpu",
    }
    one = data.draw(st.booleans())
    inputs = (left,) if one else (left, right)
    items = m if one else n
    tw.topk(left, None if one else right, folder / "near", data.draw(st.integers(1, items)), **options)
    thresholds = {"dot": st.integers(-1, 4), "cosine": st.sampled_from([-0.5, 0, 1]), "l2": st.integers(1, 4)}
    above = data.draw(thresholds[options["metric"]])
    tw.pairs(left, None if one else right, folder / "pairs", above=above, **options)
    for name in ("near", "pairs"):
        found = tw.audit(folder / name, *inputs)
        assert found.passed, str(found)


def test_the_command_prints_the_outcome_and_says_it_by_its_status(here: Path) -> None:
    def run(*line: str) -> Any:
        return CliRunner().invoke(cli, ["audit", "-q", *line])

    good = run("near")
    assert good.exit_code == 0, good.stderr
    assert good.stdout.startswith("audited 8 stored objects of near by items in ")
    for line in (
        ("across", "a.zarr", "b.zarr"),
        ("across", "--a", "a.zarr", "--b", "b.zarr"),
        ("near", "a.zarr"),
    ):
        assert run(*line).exit_code == 0
    put_in("values", (20, 0), 1e3)(here / "near")
    bad = run("near", "--json")
    assert bad.exit_code == 1
    outcome = json.loads(bad.stdout)
    assert (outcome["passed"], outcome["by"], outcome["check"]["passed"]) == (False, "items", False)
    assert outcome["check"]["escape_probability"]["0.05"] == 0
    twice = run("near", "a.zarr", "--a", "a.zarr")
    assert twice.exit_code == 2
    assert "A or B is given twice" in twice.stderr
    wrong = run("near", "none.zarr")
    assert (wrong.exit_code, wrong.stdout) == (1, "")
