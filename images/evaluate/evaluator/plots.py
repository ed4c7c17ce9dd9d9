"""The report's plots, as SVG that stands inside a page: real text, the page's fonts, no two ids alike."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from evaluator.pairs import Pair
from refit.statistics import Interval

INK, QUIET, GRID = "#1f2933", "#6b7785", "#e4e8ec"
CANDIDATE, CHAMPION, GOOD, BAD = "#2563c9", "#98a2b0", "#1a8754", "#c2372e"
UNREADABLE = "unreadable"

# Texts come from the data: a dollar sign in a label is a dollar sign, not mathematics.
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.parse_math": False,
    "text.color": INK,
    "axes.labelcolor": QUIET,
    "axes.edgecolor": GRID,
    "xtick.color": QUIET,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


def scores(pair: Pair, labels: tuple[str, str]) -> str:
    """Both accuracies with their intervals, on one scale from 0 to 100 %."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": "scores"}):
        figure, axes = _axes(7.4, 1.55)
        for row, (interval, colour) in enumerate([(pair.champion, CHAMPION), (pair.candidate, CANDIDATE)]):
            _range(axes, row, interval, colour, scale=100, form="{:.1f} %")
        axes.set_yticks([0, 1], list(reversed(labels)))
        axes.set_xlim(0, 100)
        axes.set_xticks(range(0, 101, 20), [f"{tick} %" for tick in range(0, 101, 20)])
        axes.set_ylim(-0.55, 1.75)
        return _svg(figure, "scores")


def difference(pair: Pair, needed: float) -> str:
    """The paired difference with its interval, beside the line that it must stay right of."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": "difference"}):
        figure, axes = _axes(7.4, 1.25)
        interval = pair.difference
        colour = GOOD if interval.low > needed else BAD if interval.high < needed else QUIET
        _range(axes, 0, interval, colour, scale=100, form="{:+.1f}")
        reach = max(5.0, *(abs(x) * 118 for x in (interval.low, interval.high, needed) if math.isfinite(x)))
        axes.axvspan(-reach, needed * 100, color=BAD, alpha=0.06, lw=0)
        axes.axvspan(needed * 100, reach, color=GOOD, alpha=0.06, lw=0)
        axes.axvline(needed * 100, color=INK, lw=1, ls=(0, (4, 3)))
        axes.set_xlim(-reach, reach)
        axes.set_ylim(-0.6, 0.75)
        axes.set_yticks([])
        axes.xaxis.set_major_formatter(lambda tick, _: f"{tick:+g}" if tick else "0")
        axes.set_xlabel("points, candidate minus champion")
        return _svg(figure, "difference")


def domains(parts: Mapping[str, Pair]) -> str:
    """Both accuracies in each domain, as bars with their intervals."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": "domains"}):
        figure, axes = _axes(7.4, 0.75 + 0.62 * len(parts))
        for row, pair in enumerate(reversed(list(parts.values()))):
            for shift, interval, colour in ((0.17, pair.candidate, CANDIDATE), (-0.17, pair.champion, CHAMPION)):
                if interval.known:
                    error = [[(interval.value - interval.low) * 100], [(interval.high - interval.value) * 100]]
                    axes.barh(row + shift, interval.value * 100, height=0.3, color=colour)
                    axes.errorbar(interval.value * 100, row + shift, xerr=error, color=INK, lw=1.1, capsize=2.5)
        axes.set_yticks(range(len(parts)), [f"{name} ({pair.items})" for name, pair in reversed(list(parts.items()))])
        axes.set_xlim(0, 100)
        axes.set_xticks(range(0, 101, 20), [f"{tick} %" for tick in range(0, 101, 20)])
        return _svg(figure, "domains")


def confusion(counts: Mapping[str, Mapping[str, int]], labels: Sequence[str], name: str, colour: str) -> str:
    """Right label by row, answered label by column; the last column is what could not be read.

    `labels` are the columns of both sides, so that two matrices stand comparably beside each other.
    """
    rows = [label for label in labels if label in counts]
    columns = [*labels, ""]
    known = {label for label in columns if label}
    table = np.zeros((len(rows), len(columns)))
    for index, label in enumerate(rows):
        for said, items in counts[label].items():
            # A label that nobody asked for is as unreadable for the program behind as no label.
            table[index, columns.index(said if said in known else "")] += items
    share = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    with mpl.rc_context({**STYLE, "svg.hashsalt": name, "font.size": 10}):
        figure, axes = _axes(3.9, 1.1 + 0.42 * len(rows))
        axes.grid(visible=False)
        shades = mpl.colors.LinearSegmentedColormap.from_list(name, ["#ffffff", colour])
        # Cells as shapes: an image inside the SVG would be data that the page's own policy does not load.
        axes.pcolormesh(share, cmap=shades, vmin=0, vmax=1, edgecolors=GRID, linewidth=1)
        for (row, column), count in np.ndenumerate(table):
            if count:
                ink = "#ffffff" if share[row, column] > 0.55 else INK
                axes.text(column + 0.5, row + 0.5, f"{count:.0f}", ha="center", va="center", color=ink)
        axes.invert_yaxis()
        axes.xaxis.tick_top()
        axes.set_xticks(
            np.arange(len(columns)) + 0.5, [*labels, UNREADABLE], rotation=30, ha="left", rotation_mode="anchor"
        )
        axes.set_yticks(np.arange(len(rows)) + 0.5, rows)
        return _svg(figure, name)


def _axes(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="x", color=GRID, lw=1)
    axes.set_axisbelow(True)
    return figure, axes


def _range(axes: Any, row: float, interval: Interval, colour: str, *, scale: float, form: str) -> None:
    if not interval.known:
        axes.text(0, row, "not measured", color=QUIET, va="center")
        return
    low, value, high = (scale * x for x in (interval.low, interval.value, interval.high))
    axes.plot([low, high], [row, row], color=colour, lw=7, alpha=0.3, solid_capstyle="round")
    axes.plot([value], [row], "o", ms=9, color=colour, mec="#ffffff", mew=1.2)
    axes.text(value, row + 0.26, form.format(value), color=INK, ha="center", va="bottom", weight="bold")


def _svg(figure: Figure, name: str) -> str:
    sink = io.StringIO()
    figure.savefig(sink, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Type": None})
    text = sink.getvalue()
    text = text[text.index("<svg") :]
    # Every plot has a "figure_1": in one page they need names of their own.
    for mark in (' id="', "url(#", 'href="#'):
        text = text.replace(mark, f"{mark}{name}-")
    return text
