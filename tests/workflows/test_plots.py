"""Plots: every kind draws, the bars are what was asked for, and failures leave nothing."""

from __future__ import annotations

from pathlib import Path

import matplotlib.axes
import matplotlib.image
import numpy as np
import pytest

from tilewright.kernels.histograms.token_lists import Tokens
from tilewright.kernels.histograms.tokens import KINDS
from tilewright.pipeline.errors import OptionError, StoreError
from tilewright.pipeline.text.histogram import LABELS, Histogram
from tilewright.pipeline.text.sparse_counts import SparseCounts
from tilewright.workflows import plots
from tilewright.workflows.plots import plot_histogram


def histogram(by: str, rows: int | None, rng: np.random.Generator) -> Histogram:
    bins = KINDS[by].bins
    counts = np.zeros((rows or 1, bins), np.int64)
    counts[:, : min(bins, 300)] = rng.integers(0, 10**6, (rows or 1, min(bins, 300)))
    return Histogram(by, counts if rows else counts[0], ("text",), 0, int(counts.sum()), "CPU", 1.0)


@pytest.mark.sample(1)
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


@pytest.mark.more
def test_an_empty_histogram_draws(tmp_path: Path) -> None:
    for by in ("letter", "bigram"):
        counts = np.zeros(KINDS[by].bins, np.int64)
        plot_histogram(Histogram(by, counts, ("text",), 0, 0, "CPU", 0.0), tmp_path / f"{by}.png")
        assert (tmp_path / f"{by}.png").is_file()


@pytest.mark.sample(1)
@pytest.mark.parametrize("ending", plots.PLOT_ENDINGS)
def test_the_ending_says_the_format_and_the_same_counts_draw_the_same(tmp_path: Path, ending: str) -> None:
    begins = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[ending]
    counts = np.arange(26)
    for name in "ab":
        found = Histogram("letter", counts, ("text",), 0, 9, "CPU", 1.0)
        plot_histogram(found, tmp_path / f"{name}{ending}", log=True)
    data = (tmp_path / f"a{ending}").read_bytes()
    assert data.startswith(begins)
    assert data == (tmp_path / f"b{ending}").read_bytes()


def counted_words(texts: list[str]) -> Histogram:
    """Words of each text, counted here."""
    words = sorted({word for text in texts for word in text.split()})
    rows = [[text.split().count(word) for word in words] for text in texts]
    entries = [(place, count) for row in rows for place, count in enumerate(row) if count]
    counts = SparseCounts(
        np.cumsum([0, *(np.count_nonzero(row) for row in rows)]),
        np.array([place for place, _ in entries], np.uint32),
        np.array([count for _, count in entries], np.uint8),
        len(words),
    )
    tokens = Tokens.of([word.encode() for word in words])
    names = tuple(f"{number}.txt" for number in range(len(texts)))
    return Histogram("word", counts, names, 0, 99, "CPU", 1.0, tokens=tokens)


@pytest.mark.sample(1)
@pytest.mark.parametrize("heat_map", plots.MAPS)
@pytest.mark.parametrize("log", [False, True])
def test_heat_maps_show_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heat_map: str, log: bool
) -> None:
    drawn: dict[str, np.ndarray] = {}
    show = matplotlib.axes.Axes.imshow

    def seen(axes: matplotlib.axes.Axes, values: np.ndarray, **options: object) -> object:
        drawn["values"] = np.ma.filled(values, 0)
        return show(axes, values, **options)

    monkeypatch.setattr(matplotlib.axes.Axes, "imshow", seen)
    found = counted_words(["a a b", "a a b", "c", "a c c 中"])
    plot_histogram(found, tmp_path / "f.svg", heat_map=heat_map, log=log)
    counts = np.asarray(found.counts)
    if heat_map == "documents":
        lengths = np.linalg.norm(counts, axis=1)
        expected = counts @ counts.T / np.outer(lengths, lengths)
    else:
        order = [0, 2, 1, 3]  # the most frequent first, of equal ones the first
        expected = (counts / counts.sum(axis=1, keepdims=True))[:, order]
    np.testing.assert_allclose(drawn["values"], expected)


@pytest.mark.more
def test_what_is_left_out_is_said() -> None:
    totals = np.array([5, 0, 3, 2, 10])
    assert plots._left_out(totals, np.arange(5)) == []
    assert plots._left_out(totals, np.array([0, 1, 2, 3, 4])) == []
    assert plots._left_out(totals, np.array([0, 4])) == [
        "the 2 most frequent; 2 more, 25.0% of what was counted, are left out"
    ]
    many = Histogram("letter", np.ones((70, 26), np.int64), tuple(map(str, range(70))), 0, 9, "CPU", 1.0)
    rows, said = plots._rows_shown(many)
    assert len(rows) == plots.MOST_ROWS
    assert said == ["the 60 longest of 70 documents"]


def test_labels_are_drawn_by_fonts_that_have_them_or_escaped() -> None:
    have = {plots.FIRST_FONT: "aé\N{DOTTED CIRCLE}\u0301", "One": "中", "Two": "b"}
    fonts = (lambda family: frozenset(map(ord, have[family])), lambda: ("One", "Two"))
    assert plots.with_fonts(["é", "a"], *fonts) == (["é", "a"], [plots.FIRST_FONT])
    labels, families = plots.with_fonts(["é中", "\u6587", "a\u6587\U0001f600", "\u0301"], *fonts)
    assert labels == ["é中", "U+6587", r"a\u6587\U0001f600", "\N{DOTTED CIRCLE}\u0301"]
    assert families == [plots.FIRST_FONT, "One"]


@pytest.mark.filterwarnings("error:Glyph")
def test_any_character_draws(tmp_path: Path) -> None:
    counts = np.zeros(KINDS["codepoint"].bins, np.int64)
    counts[[*map(ord, "aé中あ😀$\\"), 0x301, 0x10FFFF, 0xE000, 0xFFFD, 10]] = 1
    plot_histogram(Histogram("codepoint", counts, ("text",), 0, 9, "CPU", 1.0), tmp_path / "f.png")


def test_failures_leave_nothing(tmp_path: Path, rng: np.random.Generator) -> None:
    counted = histogram("letter", None, rng)
    with pytest.raises(OptionError, match=r"bars='heights'.*counts, percent, probability"):
        plot_histogram(counted, tmp_path / "f.png", bars="heights")
    with pytest.raises(OptionError, match=r"heat_map='rows'.*documents or tokens"):
        plot_histogram(counted, tmp_path / "f.png", heat_map="rows")
    with pytest.raises(OptionError, match="takes counts of each document"):
        plot_histogram(counted, tmp_path / "f.png", heat_map="tokens")
    with pytest.raises(OptionError, match=r"ends in '.gif'"):
        plot_histogram(counted, tmp_path / "f.gif")
    with pytest.raises(StoreError, match=r"cannot write .*f.png"):
        plot_histogram(counted, tmp_path / "nowhere" / "f.png")
    assert not list(tmp_path.iterdir())


def test_every_kind_has_labels_for_its_bins_and_its_axis() -> None:
    assert set(LABELS) == set(plots.TOKENS) == set(KINDS)
