"""A check that is begun while a GPU searches says what the whole check does, or nothing."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zarr

import tilewright as tw
from tilewright.pipeline.events import Teller
from tilewright.pipeline.neighbours import job
from tilewright.pipeline.neighbours.check import Reported, sample_of
from tilewright.pipeline.neighbours.early_check import begins_early, candidates_in, check_early, nearest_of
from tilewright.pipeline.neighbours.options import NeighbourRequest
from tilewright.pipeline.neighbours.pieces import Piece
from tilewright.pipeline.neighbours.tasks import Candidates, Work, searched_items

ITEMS, K = 300, 5
SAMPLED = (0, 7, 150, 299)
BANDS = (0, 120, 300)


def work_of(items: np.ndarray, path: Path, client: Any, **options: Any) -> Work:
    """What tasks are told of a search among these items, which are stored at ``path``."""
    zarr.create_array(path, data=items, chunks=(64, 8))
    request = NeighbourRequest(path, k=K, cluster=client, device="cpu", **options).checked()
    prepared = job.prepare(client, request, job.open_sides(request), Teller(request.listener))
    return replace(prepared.work, mutual=True, sampled=SAMPLED)


def candidates_of(work: Work) -> Candidates:
    """As tasks find them, each in a band."""
    sampled = sample_of(work, work.sampled)
    parts = [
        candidates_in(work, sampled, searched_items(work, work.a, first, stop), first, lambda: None)
        for first, stop in itertools.pairwise(BANDS)
    ]
    return nearest_of(parts[::-1])


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
@pytest.mark.parametrize("exclude_self", [False, True])
def test_what_is_right_passes_and_nothing_else(
    exclude_self: bool, metric: Any, without_dask: Any, rng: np.random.Generator, tmp_path: Path
) -> None:
    items = rng.integers(-3, 4, (ITEMS, 8)).astype("f4")  # of which many are equally near
    items[7] = 0
    items[20, 3] = np.nan
    if metric == "cosine":  # which lengths do not matter to
        items = np.ldexp(items, rng.integers(-100, 101, (ITEMS, 1)).astype(np.int32))
    options = {"metric": metric, "exclude_self": exclude_self}
    work = work_of(items, tmp_path / "x.zarr", without_dask, **options)
    assert begins_early(work)
    assert not begins_early(replace(work, mutual=False))
    assert not begins_early(replace(work, k=1000))
    found = tw.topk(tmp_path / "x.zarr", k=K, cluster=without_dask, device="cpu", **options)
    candidates = candidates_of(work)

    def checked(indices: np.ndarray, values: np.ndarray) -> Any:
        return check_early(work, [Reported(i, indices[i], values[i]) for i in SAMPLED], candidates)

    check = checked(found.indices, found.values)
    assert check is not None
    assert check.passed
    assert (check.rows, check.items, check.compared) == (len(SAMPLED), ITEMS, K * len(SAMPLED))
    for item in SAMPLED:
        for fault in ("another value", "a far one", "twice", "too few"):
            indices, values = found.indices.copy(), found.values.copy()
            if fault == "another value":
                values[item, 2] += 1
            elif fault == "a far one":
                indices[item, K - 1] = 20  # which holds a NaN
            elif fault == "twice":
                indices[item, 1], values[item, 1] = indices[item, 0], values[item, 0]
            else:
                indices[item, K - 1], values[item, K - 1] = -1, np.nan
            assert checked(indices, values) is None, fault


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
def test_many_ties_and_infinity_are_checked_early_too(
    metric: Any, without_dask: Any, rng: np.random.Generator, tmp_path: Path
) -> None:
    items = np.zeros((ITEMS, 8), "f4")
    for row in items:
        row[rng.choice(8, 2, replace=False)] = 1
    if metric == "l2":
        items[rng.choice(np.setdiff1d(np.arange(ITEMS), SAMPLED), 9, replace=False), 0] = np.inf
        items[SAMPLED[1], 2] = np.inf
    work = work_of(items, tmp_path / "x.zarr", without_dask, metric=metric)
    found = tw.topk(tmp_path / "x.zarr", k=K, cluster=without_dask, device="cpu", metric=metric, verify=False)
    reports = [Reported(i, found.indices[i], found.values[i]) for i in SAMPLED]
    assert check_early(work, reports, candidates_of(work)) is not None


def test_a_nearer_one_that_is_not_reported_is_seen(
    without_dask: Any, rng: np.random.Generator, tmp_path: Path
) -> None:
    items = rng.standard_normal((ITEMS, 8)).astype("f4")
    work = work_of(items, tmp_path / "x.zarr", without_dask, metric="dot")
    more = tw.topk(tmp_path / "x.zarr", k=K + 1, cluster=without_dask, device="cpu", metric="dot")
    candidates = candidates_of(work)
    right = [Reported(i, more.indices[i, :K], more.values[i, :K]) for i in SAMPLED]
    wrong = [Reported(i, more.indices[i, 1:], more.values[i, 1:]) for i in SAMPLED]
    assert check_early(work, right, candidates) is not None
    for place in range(len(SAMPLED)):
        mixed = [*right[:place], wrong[place], *right[place + 1 :]]
        assert check_early(work, mixed, candidates) is None


def test_what_was_begun_early_and_given_up_is_checked_by_the_same_items(
    without_dask: Any, rng: np.random.Generator, tmp_path: Path
) -> None:
    """Which tasks hold by the search's key: where bands had too many that are equally near, for instance."""
    items = rng.standard_normal((ITEMS, 8)).astype("f4")
    work = work_of(items, tmp_path / "x.zarr", without_dask, metric="dot")
    found = tw.topk(tmp_path / "x.zarr", k=K, cluster=without_dask, device="cpu", metric="dot")
    sample_of(work, work.sampled)  # as a task does
    request = NeighbourRequest(tmp_path / "x.zarr", k=K, cluster=without_dask, device="cpu").checked()
    plan: Any = SimpleNamespace(m=ITEMS, threads=1, workers=1)
    arrays = {"indices": found.indices, "values": found.values}
    kept: Any = SimpleNamespace(arrays=lambda piece: arrays, save_last=lambda: None)
    check = job._checked(without_dask, request, work, plan, kept, [Piece(0, ITEMS, ITEMS * K, 0)], None)
    assert (check.passed, check.rows) == (True, len(SAMPLED))
