"""Plots: every kind draws, the bars are what was asked for, and failures leave nothing."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from tilewright.kernels.histograms.tokens import KINDS
from tilewright.pipeline.errors import OptionError, StoreError
from tilewright.pipeline.text.histogram import LABELS, Histogram
from tilewright.workflows import plots
from tilewright.workflows.plots import plot_histogram


def histogram(by: str, rows: int | None, rng: np.random.Generator) -> Histogram:
    bins = KINDS[by].bins
    counts = np.zeros((rows or 1, bins), np.int64)
    counts[:, : min(bins, 300)] = rng.integers(0, 10**6, (rows or 1, min(bins, 300)))
    return Histogram(by, counts if rows else counts[0], ("text",), 0, int(counts.sum()), "CPU", 1.0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("by", list(KINDS))
@pytest.mark.parametrize("rows", [None, 3])
def test_every_kind_draws(tmp_path: Path, rng: np.random.Generator, by: str, rows: int | None) -> None:
    bars = list(plots.BARS)[(list(KINDS).index(by) + bool(rows)) % len(plots.BARS)]  # each in turn
    plot_histogram(histogram(by, rows, rng), tmp_path / "f.png", bars=bars)
    image = matplotlib.image.imread(tmp_path / "f.png")
    blue = np.abs(image[:, :, :3] - np.array([0x2F, 0x6F, 0x9F]) / 255).max(axis=2) < 0.02
    assert blue.mean() > 0.05  # the bars
    assert [path.name for path in tmp_path.iterdir()] == ["f.png"]


def test_heights_are_what_they_are_called() -> None:
    totals = np.array([1, 0, 3])
    np.testing.assert_array_equal(plots._heights(totals, "counts"), totals)
    np.testing.assert_allclose(plots._heights(totals, "percent"), [25, 0, 75])
    np.testing.assert_allclose(plots._heights(totals, "probability"), [0.25, 0, 0.75])
    np.testing.assert_array_equal(plots._heights(np.zeros(2, np.int64), "percent"), [0, 0])


def test_an_empty_histogram_draws(tmp_path: Path) -> None:
    for by in ("letter", "bigram"):
        counts = np.zeros(KINDS[by].bins, np.int64)
        plot_histogram(Histogram(by, counts, ("text",), 0, 0, "CPU", 0.0), tmp_path / f"{by}.png")
        assert (tmp_path / f"{by}.png").is_file()


def test_failures_leave_nothing(tmp_path: Path, rng: np.random.Generator) -> None:
    counted = histogram("letter", None, rng)
    with pytest.raises(OptionError, match=r"bars='heights'.*counts, percent, probability"):
        plot_histogram(counted, tmp_path / "f.png", bars="heights")
    with pytest.raises(StoreError, match=r"cannot write .*f.png"):
        plot_histogram(counted, tmp_path / "nowhere" / "f.png")
    assert not list(tmp_path.iterdir())


def test_every_kind_has_labels_for_its_bins_and_its_axis() -> None:
    assert set(LABELS) == set(plots.TOKENS) == set(KINDS)
