"""What is known of A and B, and which tiles depend on what of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.store.stored_arrays import CODECS, encoded
from tilewright.pipeline.events import Teller
from tilewright.pipeline.plan.inputs import Limits, StoredMatrix
from tilewright.pipeline.plan.product import plan_tiles
from tilewright.pipeline.plan.told import Corners
from tilewright.pipeline.product import inputs
from tilewright.pipeline.product.inputs import (
    Fingerprint,
    InputWatch,
    KnownContent,
    changed_parts,
    needs,
    overlaps,
)
from tilewright.pipeline.store.appearance import appearance_of
from tilewright.pipeline.store.content import content_hash, panel_content

SIDE = 12


@st.composite
def rectangles(draw: st.DrawFn) -> Corners:
    top, left = draw(st.integers(0, SIDE - 1)), draw(st.integers(0, SIDE - 1))
    return top, draw(st.integers(top + 1, SIDE)), left, draw(st.integers(left + 1, SIDE))


@given(st.lists(rectangles(), max_size=6), st.lists(rectangles(), max_size=6))
def test_overlaps_are_those_of_the_elements(wanted: list[Corners], parts: list[Corners]) -> None:
    """Parts may overlap, as those of plans with other panels do."""
    held = np.zeros((SIDE, SIDE), bool)
    for top, bottom, left, right in parts:
        held[top:bottom, left:right] = True
    expected = {
        (top, bottom, left, right): (
            bool(held[top:bottom, left:right].any()),
            bool(held[top:bottom, left:right].all()),
        )
        for top, bottom, left, right in wanted
    }
    assert overlaps(wanted, parts) == expected


def test_a_tile_of_an_empty_k_needs_nothing_and_has_it() -> None:
    assert overlaps([(0, 4, 0, 0)], []) == {(0, 4, 0, 0): (False, True)}


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
def test_tiles_need_rows_and_columns_as_they_are_stored(transposed: tuple[bool, bool]) -> None:
    m, k, n = 40, 30, 20
    a = StoredMatrix(*((k, m) if transposed[0] else (m, k)), np.dtype("f4"), (10, 10))
    b = StoredMatrix(*((n, k) if transposed[1] else (k, n)), np.dtype("f4"), (10, 10))
    a, b = (each.transposed if turned else each for each, turned in zip((a, b), transposed, strict=True))
    plan = plan_tiles(
        a, b, np.dtype("f4"), (10, 10), Limits(1, 4000), transpose_a=transposed[0], transpose_b=transposed[1]
    )
    tiles = list(plan.tiles())
    assert len(tiles) > 1
    for tile in tiles:
        (role_a, of_a), (role_b, of_b) = needs(plan, tile)
        assert (role_a, role_b) == ("A", "B")
        rows, inner = (of_a[2:], of_a[:2]) if transposed[0] else (of_a[:2], of_a[2:])
        assert (rows, inner) == ((tile.row_start, tile.row_stop), (0, k))
        columns, inner = (of_b[:2], of_b[2:]) if transposed[1] else (of_b[2:], of_b[:2])
        assert (columns, inner) == ((tile.column_start, tile.column_stop), (0, k))


LEFT, RIGHT = (0, 4, 0, 2), (0, 4, 2, 4)
PANEL = (0, 4, 0, 4)


def panel(left: int, right: int) -> Any:
    return panel_content("A", PANEL, [(LEFT, left), (RIGHT, right)])


def held(of: Any) -> Any:
    """As a later tile of the worker reports it, which found it there."""
    return type(of)(of.role, of.corners, of.digest)


def test_what_is_read_twice_and_differs_is_torn() -> None:
    known = KnownContent()
    first = known.see([panel(1, 2)])
    assert (first.fresh, first.changed, first.torn) == ({"A": {LEFT: 1, RIGHT: 2}}, {}, {})
    for again in (panel(1, 2), held(panel(1, 2))):
        seen = known.see([again])
        assert (seen.fresh, seen.changed, seen.torn) == ({}, {}, {})
    assert known.see([panel(1, 3)]).torn == {"A": [RIGHT]}
    assert known.see([held(panel(1, 3))]).torn == {"A": [PANEL]}, "by a worker whose first report was lost"


def test_a_panel_whose_parts_nobody_reported_is_known_by_its_digest() -> None:
    """Of the tile that had it read the report was lost."""
    known = KnownContent()
    assert known.see([held(panel(1, 2))]).fresh == {}
    assert known.see([panel(1, 2)]).fresh == {"A": {LEFT: 1, RIGHT: 2}}
    other = KnownContent()
    other.see([held(panel(1, 2))])
    assert other.see([panel(1, 3)]).torn == {"A": [PANEL]}


def test_what_an_earlier_run_read_otherwise_is_changed_once() -> None:
    known = KnownContent({"A": {LEFT: 1, RIGHT: 2}})
    assert known.hashes("A") == {LEFT: 1, RIGHT: 2}
    seen = known.see([panel(1, 3)])
    assert (seen.fresh, seen.changed, seen.torn) == ({"A": {RIGHT: 3}}, {"A": [RIGHT]}, {})
    assert known.hashes("A") == {LEFT: 1, RIGHT: 3}
    seen = known.see([panel(1, 3)])
    assert (seen.fresh, seen.changed, seen.torn) == ({}, {}, {})


def test_panels_of_another_plan_are_compared_where_parts_are_the_same() -> None:
    known = KnownContent({"A": {LEFT: 1, (4, 8, 0, 2): 5}})
    seen = known.see([panel_content("A", (0, 8, 0, 2), [(LEFT, 1), ((4, 8, 0, 2), 6)])])
    assert (seen.changed, seen.torn) == ({"A": [(4, 8, 0, 2)]}, {})


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3")
@pytest.mark.parametrize("codecs", sorted(CODECS))
def test_parts_are_the_same_in_whatever_chunks_and_codec(
    codecs: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    data = rng.integers(0, 9, (20, 16)).astype("i4")
    parts = [
        (corners, content_hash(data[corners[0] : corners[1], corners[2] : corners[3]]))
        for corners in [(0, 20, 0, 16), (3, 11, 5, 6), (19, 20, 15, 16)]
    ]
    array = encoded(tmp_path / "a", codecs, data, (7, 5), big=True, by_columns=True)
    assert changed_parts(array, parts) == []
    data[10, 5] += 1
    array = encoded(tmp_path / "b", codecs, data, (4, 16), big=False, by_columns=False)
    assert changed_parts(array, parts) == [(0, 20, 0, 16), (3, 11, 5, 6)]


def test_a_part_that_cannot_be_read_is_changed(tmp_path: Path) -> None:
    array = zarr.create_array(tmp_path / "a", shape=(4, 4), chunks=(2, 2), dtype="f4", compressors=None)
    array[...] = 1
    ones = content_hash(np.ones((2, 2), "f4"))
    parts = [((0, 2, 0, 2), ones), ((2, 4, 0, 2), ones)]
    (tmp_path / "a" / "c" / "1" / "0").write_bytes(b"short")
    assert changed_parts(array, parts) == [(2, 4, 0, 2)]
    (tmp_path / "a" / "c" / "1" / "0").unlink()
    assert changed_parts(array, parts) == [(2, 4, 0, 2)], "it reads as zeros now"


def test_tasks_that_compare_are_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "COMPARED_NBYTES", 64)
    monkeypatch.setattr(inputs, "MOST_COMPARED", 3)
    parts = [((0, 4, place, place + 4), place) for place in range(3)]  # 64 bytes each
    parts += [((0, 1, place, place + 1), place) for place in range(7)]
    batches = list(inputs._batches(parts, 4))
    assert [part for batch in batches for part in batch] == parts
    assert list(map(len, batches)) == [1, 1, 1, 3, 3, 1]


def test_a_repair_keeps_what_is_known_of_tiles_that_it_does_not_compute(
    client: Client, tmp_path: Path
) -> None:
    """Also where a part has changed that a larger tile once read, and whose tiles have been computed again since."""
    numbers = np.arange(32, dtype="f4").reshape(8, 4)
    a = zarr.create_array(tmp_path / "a", data=numbers, chunks=(4, 4))
    b = zarr.create_array(tmp_path / "b", data=numbers[:4], chunks=(4, 4))
    sides = [StoredMatrix(*array.shape, np.dtype("f4"), (4, 4)) for array in (a, b)]
    plan = plan_tiles(*sides, np.dtype("f4"), (4, 4), Limits(1, 10**6))
    plan = replace(plan, tile_rows=4, tile_columns=4)
    upper, lower, both, of_b = (0, 4, 0, 4), (4, 8, 0, 4), (0, 8, 0, 4), (0, 4, 0, 4)
    read = {
        "A": {
            upper: content_hash(numbers[:4]),
            lower: content_hash(numbers[4:]),
            both: content_hash(numbers + 1),
        },
        "B": {of_b: content_hash(numbers[:4])},
    }
    looks = Fingerprint("", (appearance_of(a), appearance_of(b)))
    watch = InputWatch(
        client,
        {"A": a, "B": b},
        plan,
        looks,
        Teller(lambda event: None),
        {0: None},
        read,
        "C",
        repairing=True,
    )
    watch.compare_repaired(other_panels=True)
    assert watch.hashes()["A"].keys() == {upper, lower}
    watch.compare_past(None)
    assert watch.finished == {0}
