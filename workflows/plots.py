"""Plots of histograms, drawn by Matplotlib's Agg canvas directly: no display, no state between plots."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tilewright.kernels.histograms.token_lists import most_frequent
from tilewright.kernels.numbers import counted
from tilewright.pipeline.errors import OptionError
from tilewright.pipeline.text.histogram import FEW_BINS, Histogram, printable
from tilewright.pipeline.text.saved_counts import place_of, write_whole

BARS = {"counts": "occurrences", "percent": "share in percent", "probability": "probability"}
"""What the bars' heights can be, and the label of their axis."""
TOKENS = {
    "byte": "byte",
    "ascii": "character",
    "letter": "letter",
    "bigram": "pair of bytes",
    "codepoint": "character",
}
MOST_LABELLED = 40
"""With more bars than this, not every bar gets a label."""
MOST_BARS = 60
"""Of histograms with many bins, the most frequent ones are drawn."""
COLOUR = "#2f6f9f"


def plot_histogram(
    histogram: Histogram, path: str | Path, *, bars: str = "counts", overwrite: bool = False
) -> None:
    """Draw the bins of the whole corpus as bars and write a PNG; it appears when it is whole, or not at all.

    Parameters
    ----------
    bars
        What the bars' heights are: ``counts``, ``percent`` or ``probability`` of what was counted.
    overwrite
        Replace what stands there.

    Raises
    ------
    OptionError
        ``bars`` is none of these.
    OutputExistsError
        Something stands there and ``overwrite`` is false.
    StoreError
        The file cannot be written.
    """
    if bars not in BARS:
        raise OptionError(f"bars={bars!r} is not known; they may be {', '.join(BARS)}")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown, names = _shown(histogram)
    heights = _heights(histogram.totals, bars)[shown]
    figure = Figure(figsize=(max(6.4, min(16.0, 1.5 + 0.3 * len(shown))), 4.8), dpi=144, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = np.arange(len(shown))
    width = 0.8 if len(shown) <= MOST_LABELLED else 1.0
    drawn = axes.bar(places, heights, width=width, color=COLOUR, zorder=2)
    axes.set_ylabel(BARS[bars])
    axes.set_xlabel(TOKENS.get(histogram.by) or _axis(histogram.by))
    axes.grid(axis="y", color="0.88", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    if len(shown) <= MOST_LABELLED:
        axes.set_xticks(places, names)
    elif histogram.tokens is None and histogram.bins <= FEW_BINS:
        marked = range(0, histogram.bins, 16)
        axes.set_xticks(marked, [f"{place:#04x}" for place in marked])
    else:
        axes.set_xticks(places, names, rotation=90, fontsize=7)
    if histogram.by == "letter":
        texts = {"counts": _short, "percent": "{:.1f}".format, "probability": "{:.3f}".format}[bars]
        axes.bar_label(drawn, [texts(height) for height in heights], fontsize=6.5, padding=2, color="0.3")
    axes.set_title(
        f"{histogram.by} histogram of {counted(len(histogram.documents), 'document')},"
        f" {int(histogram.totals.sum()):,} counted",
        loc="left",
        fontsize=11,
    )
    write_whole(place_of(path), lambda draft: figure.savefig(draft, format="png"), overwrite=overwrite)


def _shown(histogram: Histogram) -> tuple[np.ndarray, list[str]]:
    """The bins to draw, in order, and their labels: every bin where they are few, else the most frequent."""
    if histogram.tokens is not None:
        shown = most_frequent(histogram.totals, MOST_BARS)
    elif histogram.bins <= FEW_BINS:
        shown = np.arange(histogram.bins)
    else:
        shown = np.sort(most_frequent(histogram.totals, MOST_BARS))
    # A dollar sign would start a formula.
    return shown, [printable(histogram.label(int(place))).replace("$", r"\$") for place in shown]


def _axis(by: str) -> str:
    """What a bar is, of tokens."""
    ngram, n, unit = [*by.split(":"), "word"][:3] if ":" in by else (by, "", "")
    return f"{n} adjacent {unit}s" if ngram == "ngram" else ngram


def _heights(totals: np.ndarray, bars: str) -> np.ndarray:
    if bars == "counts":
        return totals
    whole = max(1, int(totals.sum()))
    return totals / whole * (100.0 if bars == "percent" else 1.0)


def _short(value: float) -> str:
    """A count in a few characters: 950, 12k, 3.4M."""
    for suffix in ("", "k", "M", "G", "T"):
        if value < 1000 or suffix == "T":
            return f"{value:.3g}{suffix}"
        value /= 1000
    raise AssertionError("unreachable: T returns")
