"""Plots of histograms, drawn by Matplotlib's Agg canvas directly: no display, no state between plots."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.kernels.histograms.token_lists import most_frequent
from tilewright.kernels.numbers import counted
from tilewright.pipeline.errors import OptionError
from tilewright.pipeline.report.style import PROGRAM
from tilewright.pipeline.text.histogram import FEW_BINS, Histogram, printable
from tilewright.pipeline.text.saved_counts import PLOT_ENDINGS, check_ending, place_of, suffix_of, write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
FIRST_FONT = "DejaVu Sans"
"""Comes with Matplotlib."""
NO_TEXT_FONTS = ("Last Resort", "STIXSize", "cm")
"""How the names of fonts begin that have frames for all characters, or other signs under the codes of letters."""
MOST_FAMILIES = 8
"""Fonts of one plot at most."""


MOST_ROWS = 60
"""Of more documents, those with most counted are in a heat map."""
MAPS = ("documents", "tokens")
METADATA: dict[str, dict[str, Any]] = {
    ".png": {"Software": PROGRAM},
    ".svg": {"Creator": PROGRAM, "Date": None},
    ".pdf": {"Creator": PROGRAM, "CreationDate": None},
}
"""By format: what made it, so that no later count takes it for a text; and no time, so that the same counts give the
same file."""


Labels = tuple[list[str], list[str]]
"""Texts, and the families of fonts that draw them."""


def plot_histogram(
    histogram: Histogram,
    path: str | Path,
    *,
    bars: str = "counts",
    log: bool = False,
    heat_map: str | None = None,
    overwrite: bool = False,
) -> None:
    """Draw the bins of the whole corpus as bars, or documents as a heat map, and write a PNG, SVG or PDF, by the ending
    of its name; it appears when it is whole, or not at all.

    Parameters
    ----------
    bars
        What the bars' heights are: ``counts``, ``percent`` or ``probability`` of what was counted.
    log
        A logarithmic scale.
    heat_map
        Of counts per document instead: ``documents``, the cosine of the angle between the counts of every two, or
        ``tokens``, of what was counted in each the share of each of the bins that are most frequent.
    overwrite
        Replace what stands there.

    Raises
    ------
    OptionError
        ``bars`` or ``heat_map`` is none of these, the ending is none of the three, or there are no counts per document.
    OutputExistsError
        Something stands there and ``overwrite`` is false.
    StoreError
        The file cannot be written.
    """
    if bars not in BARS:
        raise OptionError(f"bars={bars!r} is not known; they may be {', '.join(BARS)}")
    if heat_map is not None and heat_map not in MAPS:
        raise OptionError(f"heat_map={heat_map!r} is not known; it may be of {' or '.join(MAPS)}")
    if heat_map is not None and histogram.counts.ndim == 1:
        raise OptionError(
            "a heat map takes counts of each document: count with per_document (--per-document)"
        )
    place = place_of(path)
    check_ending(place, PLOT_ENDINGS)
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ending = suffix_of(place)
    with rc_context({"svg.hashsalt": "tilewright"}):
        figure = Figure(dpi=144, layout="constrained")
        FigureCanvasAgg(figure)
        if heat_map is None:
            _draw_bars(figure, histogram, bars, log=log)
        elif heat_map == "documents":
            _draw_similarities(figure, histogram, log=log)
        else:
            _draw_tokens(figure, histogram, log=log)
        write_whole(
            place,
            lambda draft: figure.savefig(draft, format=ending[1:], metadata=METADATA[ending]),
            overwrite=overwrite,
        )


def _draw_bars(figure: Figure, histogram: Histogram, bars: str, *, log: bool) -> None:
    shown = _shown(histogram)
    names, families = _names(histogram, shown)
    heights = _heights(histogram.totals, bars)[shown]
    figure.set_size_inches(max(6.4, min(16.0, 1.5 + 0.3 * len(shown))), 4.8)
    axes = figure.add_subplot()
    places = np.arange(len(shown))
    width = 0.8 if len(shown) <= MOST_LABELLED else 1.0
    drawn = axes.bar(places, heights, width=width, color=COLOUR, zorder=2)
    axes.set_ylabel(BARS[bars])
    axes.set_xlabel(TOKENS.get(histogram.by) or _axis(histogram.by))
    axes.grid(axis="y", color="0.88", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    if log and heights.any():
        axes.set_yscale("log")
        axes.set_ylim(bottom=heights[heights > 0].min() / 2)  # the least has a bar, too
    if len(shown) <= MOST_LABELLED:
        axes.set_xticks(places, names, family=families)
    elif histogram.tokens is None and histogram.bins <= FEW_BINS:
        marked = range(0, histogram.bins, 16)
        axes.set_xticks(marked, [f"{place:#04x}" for place in marked])
    else:
        axes.set_xticks(places, names, rotation=90, fontsize=7, family=families)
    if histogram.by == "letter":
        texts = {"counts": _short, "percent": "{:.1f}".format, "probability": "{:.3f}".format}[bars]
        axes.bar_label(drawn, [texts(height) for height in heights], fontsize=6.5, padding=2, color="0.3")
    axes.set_title(
        "\n".join([_title(histogram), *_left_out(histogram.totals, shown)]), loc="left", fontsize=11
    )


def _draw_similarities(figure: Figure, histogram: Histogram, *, log: bool) -> None:
    """Documents x documents."""
    rows, above = _rows_shown(histogram)
    counts = [histogram.counts[int(row)].astype(np.float64) for row in rows]
    lengths = np.array([np.linalg.norm(each) for each in counts])
    lengths[lengths == 0] = 1
    values = np.array([[one @ other for other in counts] for one in counts]) / np.outer(lengths, lengths)
    names, families = with_fonts([_plain(histogram.documents[row]) for row in rows.tolist()])
    _draw_map(figure, values, (names, families), (names, families), "cosine of counts", log=log, upper=1.0)
    figure.axes[0].set_title("\n".join([_title(histogram), *above]), loc="left", fontsize=11)


def _draw_tokens(figure: Figure, histogram: Histogram, *, log: bool) -> None:
    """Documents x bins."""
    rows, above = _rows_shown(histogram)
    totals = histogram.totals
    shown = most_frequent(totals, MOST_BARS)
    if histogram.tokens is None:
        shown = np.sort(shown)
    counts = [histogram.counts[int(row)] for row in rows]
    values = np.array([each[shown] / max(1, int(each.sum())) for each in counts]).reshape(
        len(rows), len(shown)
    )
    documents = with_fonts([_plain(histogram.documents[row]) for row in rows.tolist()])
    _draw_map(figure, values, documents, _names(histogram, shown), "share of its document", log=log)
    lines = [_title(histogram), *above, *_left_out(totals, shown)]
    figure.axes[0].set_title("\n".join(lines), loc="left", fontsize=11)
    figure.axes[0].set_xlabel(TOKENS.get(histogram.by) or _axis(histogram.by))


def _draw_map(
    figure: Figure,
    values: np.ndarray,
    rows: Labels,
    columns: Labels,
    meaning: str,
    *,
    log: bool,
    upper: float | None = None,
) -> None:
    from matplotlib.colors import LogNorm, Normalize

    figure.set_size_inches(min(20.0, 4.5 + 0.16 * len(columns[0])), min(14.0, 3.0 + 0.16 * len(rows[0])))
    axes = figure.add_subplot()
    positive = values[values > 0]
    norm = Normalize(0, upper)
    if log and len(positive):
        norm = LogNorm(positive.min(), max(positive.max(), positive.min() * 1.01))
    shown = np.ma.masked_less_equal(values, 0) if log else values
    axes.set_facecolor("0.92")  # of what is masked
    if values.size:
        image = axes.imshow(shown, aspect="auto", interpolation="nearest", norm=norm, cmap="viridis")
        figure.colorbar(image, label=meaning, fraction=0.05)
    axes.set_yticks(range(len(rows[0])), rows[0], fontsize=7, family=rows[1])
    axes.set_xticks(range(len(columns[0])), columns[0], rotation=90, fontsize=7, family=columns[1])


def _rows_shown(histogram: Histogram) -> tuple[np.ndarray, list[str]]:
    """The documents of a heat map, in their order, and a line about those that are left out."""
    sums = np.asarray(histogram.counts.sum(axis=1))
    rows = np.sort(np.argsort(-sums, kind="stable")[:MOST_ROWS])
    if len(rows) == len(sums):
        return rows, []
    return rows, [f"the {len(rows)} longest of {counted(len(sums), 'document')}"]


def _title(histogram: Histogram) -> str:
    documents = histogram.document_count or len(histogram.documents)
    return f"{histogram.by} histogram of {counted(documents, 'document')}, {int(histogram.totals.sum()):,} counted"


def _left_out(totals: np.ndarray, shown: np.ndarray) -> list[str]:
    """A line about bins that occur and are not drawn, if there are any."""
    occur, drawn = np.count_nonzero(totals), np.count_nonzero(totals[shown])
    if drawn == occur:
        return []
    share = 1 - int(totals[shown].sum()) / int(totals.sum())
    return [
        f"the {drawn} most frequent; {occur - drawn:,} more, {share:.1%} of what was counted, are left out"
    ]


def _shown(histogram: Histogram) -> np.ndarray:
    """The bins to draw, in order: every bin where they are few, else the most frequent."""
    if histogram.tokens is not None:
        return most_frequent(histogram.totals, MOST_BARS)
    if histogram.bins <= FEW_BINS:
        return np.arange(histogram.bins)
    return np.sort(most_frequent(histogram.totals, MOST_BARS))


def _names(histogram: Histogram, shown: np.ndarray) -> Labels:
    return with_fonts([_plain(histogram.label(int(place))) for place in shown])


def _plain(text: str) -> str:
    # A dollar sign would start a formula.
    return printable(text).replace("$", r"\$")


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


def with_fonts(
    labels: Sequence[str],
    characters_of: Callable[[str], frozenset[int]] | None = None,
    others: Callable[[], Sequence[str]] | None = None,
) -> Labels:
    """Labels as they can be drawn, and the families of fonts that it takes: what no font has stands as an escape,
    ``\\u4e2d``, and as ``U+4E2D`` where it is the whole label. A mark that combines stands on a dotted circle.

    characters_of, others: what characters a family has, and which there are beside the first; of the fonts that are
    installed, without them.
    """
    characters_of, others = characters_of or _characters_of, others or _others
    wanted = {ord(character) for label in labels for character in label}
    families, missing = [FIRST_FONT], wanted - characters_of(FIRST_FONT)
    for family in others() if missing else ():
        if len(families) == MOST_FAMILIES or not missing:
            break
        if found := missing & characters_of(family):
            families.append(family)
            missing -= found
    return [_escaped(label, missing) for label in labels], families


def _escaped(label: str, missing: set[int]) -> str:
    if len(label) == 1 and ord(label) in missing:
        return f"U+{ord(label):04X}"
    text = "".join(_escape(ord(each)) if ord(each) in missing else each for each in label)
    return f"\N{DOTTED CIRCLE}{text}" if unicodedata.combining(text[:1] or " ") else text


def _escape(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


@cache
def _others() -> tuple[str, ...]:
    """The families of all other fonts for text."""
    from matplotlib.font_manager import fontManager

    names: Iterable[str] = (font.name for font in fontManager.ttflist if font.style == "normal")
    return tuple(
        sorted({name for name in names if name != FIRST_FONT and not name.startswith(NO_TEXT_FONTS)})
    )


@cache
def _characters_of(family: str) -> frozenset[int]:
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return frozenset(get_font(findfont(FontProperties(family=[family]))).get_charmap())
