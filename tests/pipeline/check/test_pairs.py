"""The check of elements over their own pairs, by rows drawn at random: what passes, what is seen, what may escape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client

from tests.pipeline.gram import naive
from tilewright.pipeline.check import pairs
from tilewright.pipeline.check.pairs import LEAST_ROWS, drawn_rows, verify_pairs
from tilewright.pipeline.check.verify import Sample, Verification
from tilewright.pipeline.errors import DamagedError, DamagedProductError
from tilewright.pipeline.plan.pairs import Pairwise, combined
from tilewright.pipeline.plan.transform import Fused, Transform, transformed

M, K, TILE = 120, 90, 30
WHOLE = slice(None)
CUTS = [0, 30, 60, 90, 120]
KINDS = [
    Pairwise(ddof=1),
    Pairwise(centered=True, ddof=1),
    Pairwise(centered=True, scaled=True, own=True),
    Pairwise(centered=True, scaled=True, constant_is_zero=True, own=True),
]


@dataclass(frozen=True)
class Case:
    """X, what is formed of it, and C as it should be."""

    x: zarr.Array[Any]
    fused: Fused
    c: np.ndarray
    folder: Path

    def verified(self, client: Client, c: np.ndarray, seed: int | None = None) -> Verification:
        path = self.folder / "c.zarr"
        zarr.create_array(path, shape=c.shape, chunks=(20, 20), dtype=c.dtype, overwrite=True)[...] = c
        return self.again(client, seed)

    def again(self, client: Client, seed: int | None = None) -> Verification:
        """Of the C that was stored last."""
        stored = zarr.open_array(self.folder / "c.zarr", mode="r")
        return verify_pairs(
            client, self.x, self.x, stored, self.fused, self.c.dtype, transposed=(True, False),
            cuts=(CUTS, CUTS), depth=32, seed=seed,
        )  # fmt: skip


def a_case(folder: Path, rng: np.random.Generator, made: Pairwise, dtype: str) -> Case:
    formed = np.dtype(dtype)
    x = rng.standard_normal((K, M)) * 10 + 3
    x[rng.random(x.shape) < 0.3] = np.nan
    x[:, 5] = np.where(np.arange(K) < 3, x[:, 5], np.nan)  # which has few pairs
    x[:, 7] = np.where(np.arange(K) < 50, 2.0, np.nan)
    x[:, 8] = np.where(np.arange(K) < 50, np.nan, 4.0)  # which have none, and are constant
    x = x.astype(formed)
    transform = Transform(formed, column_offsets=np.nanmean(x, axis=0), missing="nan")
    sums = {
        forms: np.asarray(
            transformed(transform, x, WHOLE, WHOLE, forms[0]).T
            @ transformed(transform, x, WHOLE, WHOLE, forms[1])
        )
        for forms in made.forms
    }
    path = naive.put(folder / "x.zarr", x, (32, 25))
    c = combined(made, sums, WHOLE, WHOLE, formed)
    return Case(zarr.open_array(path, mode="r"), Fused((transform, transform), pairwise=made), c, folder)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("made", KINDS, ids=str)
def test_right_and_wrong_results(
    made: Pairwise, dtype: str, client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    case = a_case(tmp_path, rng, made, dtype)
    found = case.verified(client, case.c)
    assert found.passed, str(found)
    assert found.largest_error < found.tolerance / 3
    assert found.sampled is not None
    assert (found.sampled.drawn, found.sampled.rows, found.sampled.every_tile) == (LEAST_ROWS, M, True)
    assert found.unchecked < LEAST_ROWS * M / 10
    assert "32 of 120 rows, drawn at random, computed anew: an error in all rows of a tile is seen" in str(
        found
    )
    assert found.chance_to_escape(10) == pytest.approx(1 - 32 / 120)
    row, column = 62, 95
    for wrong in (case.c[row, column] * 1.01 + 1e-2, np.nan, np.inf):
        c = case.c.copy()
        c[60:90, column] = np.where(np.arange(60, 90) == column, c[60:90, column], wrong)
        found = case.verified(client, c)
        assert not found.passed, wrong
        assert set(found.wrong) <= {(row, row + 1, 90, 120) for row in range(60, 90)}
        assert found.worst is not None
        assert found.worst[1:] == (column, column + 1)
        assert "verification failed" in str(found)
    c = case.c.copy()
    assert np.isnan(c[7, 8])
    c[:, 8] = np.where(np.isnan(c[:, 8]), 0.5, c[:, 8])  # a number where there are no pairs
    seed = next(seed for seed in range(99) if 7 in drawn_rows(M, CUTS, M, np.random.default_rng(seed)))
    assert not case.verified(client, c, seed).passed


@pytest.mark.more
def test_an_error_in_all_rows_of_a_tile_never_escapes(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    """And one in a single row as often as is said."""
    case = a_case(tmp_path, rng, KINDS[1], "f8")
    alone, whole = case.c.copy(), case.c.copy()
    alone[50, 20] += 1
    whole[90:, 60:90] += 1
    missed = 0
    for seed in range(6):
        assert not case.verified(client, whole, seed).passed
        missed += case.verified(client, alone, seed).passed
    assert 2 <= missed <= 6  # of 6 with a chance of 0.73 each


def test_tasks_and_blocks_may_be_small(
    client: Client, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Smaller than chunks, and than the rows that are drawn: the same is seen."""
    case = a_case(tmp_path, rng, KINDS[2], "f8")
    wrong = case.c.copy()
    wrong[:, 100] += 0.5
    for sums, read, block, lines in ((20_000, 3_000, 500, 2**20), (10**6, 10**6, 2**10, 3 * K * 8)):
        for name, nbytes in (
            ("SUMS_NBYTES", sums),
            ("READ_NBYTES", read),
            ("BLOCK_NBYTES", block),
            ("LINES_NBYTES", lines),
        ):
            monkeypatch.setattr(pairs, name, nbytes)
        found = case.verified(client, case.c)
        assert found.passed
        assert found.sampled is not None
        few = lines < 2**20
        assert found.sampled == Sample(3 if few else LEAST_ROWS, M, not few)
        assert ("all rows of a tile" in str(found)) != few
        assert str(found).startswith("verified in part in ")
        assert not case.verified(client, wrong).passed


def test_a_sample_of_many_rows_says_with_which_chance_an_error_is_seen() -> None:
    """It was said to escape with a chance of 1, which 0.996 is rounded to."""
    assert str(Sample(32, 8000, True)) == (
        "32 of 8000 rows, drawn at random, computed anew: an error in all rows of a tile is seen, one in a single row"
        " is seen with a chance of 0.004"
    )
    assert str(Sample(3, 100, False)).endswith(
        " anew: an error in a single row is seen with a chance of 0.03"
    )


def test_what_cannot_be_decoded_is_named(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    case = a_case(tmp_path, rng, KINDS[0], "f8")
    assert case.verified(client, case.c).passed
    for error, folder in ((DamagedError, "x.zarr"), (DamagedProductError, "c.zarr")):
        chunks = list((tmp_path / folder / "c").glob("*/*"))
        kept = [chunk.read_bytes() for chunk in chunks]
        for chunk in chunks:
            chunk.write_bytes(b"damaged")
        with pytest.raises(error, match=folder):
            case.again(client)
        for chunk, data in zip(chunks, kept, strict=True):
            chunk.write_bytes(data)


def test_infinity_leaves_no_number(client: Client, tmp_path: Path, rng: np.random.Generator) -> None:
    case = a_case(tmp_path, rng, KINDS[1], "f8")
    x = case.x[...]
    x[3, 40] = np.inf
    path = naive.put(tmp_path / "infinite.zarr", x, (32, 25))
    case = replace(case, x=zarr.open_array(path, mode="r"))
    c = case.c.copy()
    c[40], c[:, 40] = np.nan, np.nan
    assert case.verified(client, c).passed
    c[:, 40] = 1.0
    assert not case.verified(client, c).passed


@pytest.mark.parametrize("starts", [[0, 5, 10], [0, 100], [0, 1, 2, 3], list(range(0, 500, 5))])
def test_rows_are_drawn_of_every_stretch(starts: list[int], rng: np.random.Generator) -> None:
    m = starts[-1]
    rows = drawn_rows(m, starts, m, rng)
    assert len(rows) >= min(m, LEAST_ROWS)
    assert len(set(rows.tolist())) == len(rows)
    for first, stop in pairwise(starts):
        assert ((rows >= first) & (rows < stop)).any()
    assert len(drawn_rows(m, starts, 2, rng)) == min(2, m)
