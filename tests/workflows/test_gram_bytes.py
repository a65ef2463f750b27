"""Relationship matrices of dosages with missing ones, which a CPU multiplies as bytes where few are missing."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright as tw
from tests.pipeline.gram import naive
from tests.sampling import examples
from tilewright.kernels.cpu import byte_integer
from tilewright.pipeline.plan.centred import MOST_MISSING

needs_vnni = pytest.mark.skipif(
    not byte_integer.available(),
    reason=f"this CPU lacks one of {', '.join(byte_integer.FEATURES)}, or Numba is told not to use it",
)
KERNEL = "products of bytes, centred"
TOLERANCE = 1e-6
"""Of the largest element."""
_places = itertools.count()


def dosages(
    rng: np.random.Generator, variants: int, samples: int, share: float, *, apart: bool = False
) -> np.ndarray:
    """variants × samples, a share of them missing, -1; ``apart``: as many as all of some samples and variants have."""
    x = rng.binomial(2, rng.uniform(0.05, 0.5, (variants, 1)), (variants, samples)).astype("i1")
    x[rng.random(x.shape) < share] = -1
    if apart:
        x[: variants // 30, : samples // 2] = -1
        x[:, samples // 3] = np.where(rng.random(variants) < 0.5, -1, x[:, samples // 3])
    x[:, :2] = np.abs(x[:, :2])  # so that each variant has a mean
    return x


def expected(x: np.ndarray) -> np.ndarray:
    """VanRaden's first, of samples: what is missing as the mean of its variant."""
    there = x >= 0
    mean = np.where(there, x, 0).sum(1, dtype="f8") / there.sum(1)
    z = np.where(there, x - mean[:, np.newaxis], 0.0)
    result: np.ndarray = z.T @ z / (2 * (mean / 2 * (1 - mean / 2)).sum())
    return result


def computed(
    folder: Path, x: np.ndarray, chunks: tuple[int, int], client: Any, *, of: str = "columns", **options: Any
) -> tuple[np.ndarray, tw.MatmulRun]:
    place = folder / str(next(_places))
    side = "rows" if of == "columns" else "columns"
    path = naive.put(
        place / "x.zarr", x if of == "columns" else x.T, chunks if of == "columns" else chunks[::-1]
    )
    run = tw.gram(
        path, place / "c.zarr", of=of, center=side, missing=-1, divide="2pq", device="cpu", cluster=client,
        **options,
    )  # fmt: skip
    return zarr.open_array(place / "c.zarr")[...], run


@pytest.mark.parametrize("of", ["columns", "rows"])
@settings(max_examples=examples(10))
@given(
    sides=st.tuples(st.integers(2, 90), st.integers(3, 120)),
    chunk=st.tuples(st.integers(5, 60), st.integers(5, 60)),
    share=st.sampled_from([0.0, 0.01, 0.05, 0.3]),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_matrix_is_numpys(
    of: str,
    sides: tuple[int, int],
    chunk: tuple[int, int],
    share: float,
    seed: int,
    client: Client,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    rng = np.random.default_rng(seed)
    x = dosages(rng, *sides, share)
    x[0, :2] = 0, 2  # something varies
    found, run = computed(tmp_path_factory.mktemp("gram"), x, chunk, client, of=of)
    wanted = expected(x)
    assert found.dtype == np.float32
    assert np.abs(found - wanted).max() <= TOLERANCE * np.abs(wanted).max()
    assert found.tobytes() == found.T.copy().tobytes()
    if byte_integer.available():
        assert (run.kernel == KERNEL) == ((x < 0).mean() <= MOST_MISSING)


@needs_vnni
@pytest.mark.parametrize("of", ["columns", "rows"])
def test_bits_depend_neither_on_tiles_nor_on_cells(
    of: str, client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    """In one tile, and in several, of chunks that cut blocks of lines anywhere."""
    x = dosages(rng, 700, 230, 0.02, apart=True)
    wanted = expected(x)
    results = {}
    for memory in ("600KB", "300KB"):
        found, run = computed(tmp_path, x, (100, 23), client, of=of, device_memory=memory)
        assert run.kernel == KERNEL
        assert (run.plan.panel_depth, run.plan.k_parts) == (100, 1)
        assert np.abs(found - wanted).max() <= TOLERANCE * np.abs(wanted).max()
        results[run.plan.tile_count] = found.tobytes()
    assert len(results) == 2
    assert len(set(results.values())) == 1


def test_what_follows_from_the_numbers_is_said_in_the_plan_of_a_run(
    client: Client, tmp_path: Path, rng: np.random.Generator
) -> None:
    for share, as_bytes in ((0.02, True), (0.5, False)):
        _, run = computed(tmp_path, dosages(rng, 80, 60, share), (40, 60), client)
        assert run.plan.as_bytes == as_bytes
