# SPDX-License-Identifier: Apache-2.0
"""Figures with matplotlib: the style of all, and the figure of perplexity against FLOPs."""

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any

from .files import atomic_write
from .install import install_hint

logger = logging.getLogger(__name__)
Point = tuple[float, float, str]  # FLOPs, perplexity, label


@dataclass
class Line:
    """A model's points in the perplexity-FLOPs figure.

    Attributes:
        control: the points of the same model with its state removed.
    """

    name: str
    recurrent: bool
    points: list[Point]
    control: list[Point]


def perplexity_figure(panels: dict[str, list[Line]], measure: str = "word perplexity") -> Any:
    """Return a figure of perplexity, or another measure, against FLOPs, with a panel for each title."""
    figure, all_axes = new_figure(len(panels))
    labels = [
        _draw_panel(axes, title, lines, measure) for axes, (title, lines) in zip(all_axes, panels.items(), strict=True)
    ]
    figure.draw_without_rendering()  # fixes the layout, which the placing of labels depends on
    for axes, texts in zip(all_axes, labels, strict=True):
        place_labels(axes, texts)
        starred = any("*" in text for _, _, text, _ in texts)
        title = "at the points: overlap" + ", * not trained at it" * starred
        axes.legend(title=title, fontsize=8.5, title_fontsize=8.5, alignment="left", edgecolor="none", framealpha=0.9)
    return figure


def new_figure(columns: int) -> tuple[Any, Any]:
    """Return a new figure and its axes, which are side by side."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"figures need matplotlib: {install_hint('figures')}") from error
    figure = Figure(figsize=(7.2 * columns, 4.6), dpi=160, layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False)[0]


@contextmanager
def skip_without_matplotlib(path: str | os.PathLike) -> Iterator[None]:
    """Log a warning instead of raising if matplotlib, or another library for the figure `path`, is not installed."""
    try:
        yield
    except ImportError as error:
        logger.warning("%s is not drawn: %s", path, error)


def save_figure(figure: Any, path: str | os.PathLike) -> None:
    """Write a figure atomically."""
    with atomic_write(path) as temporary:
        figure.savefig(temporary)


def style_axes(axes: Any, title: str, xlabel: str, ylabel: str = "word perplexity") -> None:
    """Set the title and axis labels, and the grid and frame that all figures share."""
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.grid(True, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # distinguishable for the colour-blind
_GREYS = ("#6b6b6b", "#979797", "#454545")
Label = tuple[float, float, str, str]  # x, y, text, colour


def _draw_panel(axes: Any, title: str, lines: list[Line], measure: str) -> list[Label]:
    """Draw the lines of one data set; return the labels of their points, which are the overlaps."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    labels: list[Label] = []
    colours = {True: cycle(COLOURS), False: cycle(_GREYS)}
    hollow = {"marker": "o", "markersize": 4, "markerfacecolor": "white", "linestyle": "none"}
    has_control = False
    for line in lines:
        colour = next(colours[line.recurrent])
        style = {"linewidth": 1.9, "zorder": 3} if line.recurrent else {"linewidth": 1.5, "linestyle": (0, (4, 2))}
        axes.plot(*_columns(line.points), color=colour, marker="o", markersize=4.5, label=line.name, **style)
        axes.plot(*_columns(line.control), color=colour, zorder=4, **hollow)
        has_control |= bool(line.control)
        labels += [(x, y, text, colour) for x, y, text in line.points]
    if has_control:
        axes.plot([], [], color="#454545", label="state removed", **hollow)
    axes.set_xscale("log")
    axes.margins(0.07, 0.09)
    low, high = axes.get_xlim()
    if high < 1.5 * low:  # otherwise tiny differences would fill the panel
        middle = math.sqrt(low * high)
        low, high = axes.set_xlim(middle / 1.25, middle * 1.25)
    steps = (1, 1.5, 2, 3, 4, 5, 6, 8) if high < 10 * low else (1, 3) if high < 300 * low else (1,)
    ticks = [step * 10**power for power in range(3, 19) for step in steps]
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high] or [low, high]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _format_power(x)))
    style_axes(axes, title, "FLOPs per token, without the vocabulary projection", measure)
    return labels


def place_labels(axes: Any, labels: list[Label]) -> None:
    """Write each label beside its point, where it covers the fewest labels, points and lines."""
    scale = 72 / axes.figure.dpi  # to points of 1/72 inch
    obstacles: list[tuple[float, float, float]] = []  # x, y, the cost of covering it
    for line in axes.lines:
        points = [tuple(point) for point in axes.transData.transform(line.get_xydata()) * scale]
        obstacles += [(x, y, 30.0) for x, y in points]
        if line.get_linestyle() != "None":
            for (x, y), (to_x, to_y) in pairwise(points):
                steps = int(math.hypot(to_x - x, to_y - y) / 2) + 1
                obstacles += [(x + (to_x - x) * i / steps, y + (to_y - y) * i / steps, 2.0) for i in range(steps)]
    placed: list[tuple[float, float, float]] = []  # x, y, half the width
    for x, y, text, colour in labels:
        at_x, at_y = axes.transData.transform((x, y)) * scale
        half = 2.4 * len(text) + 1
        best = (math.inf, 0.0, 0.0)
        for distance in (9, 13, 18):
            for angle in range(0, 360, 30):
                dx, dy = (distance + half - 3) * math.cos(math.radians(angle)), distance * math.sin(math.radians(angle))
                cost = distance / 3 + sum(
                    weight for ox, oy, weight in obstacles if abs(ox - at_x - dx) < half + 2 and abs(oy - at_y - dy) < 6
                )
                cost += sum(
                    100
                    for ox, oy, other in placed
                    if abs(ox - at_x - dx) < half + other + 1 and abs(oy - at_y - dy) < 9
                )
                best = min(best, (cost, dx, dy))
        _, dx, dy = best
        placed.append((at_x + dx, at_y + dy, half))
        axes.annotate(text, (x, y), (dx, dy), textcoords="offset points", color=colour, fontsize=8,
                      ha="center", va="center_baseline", zorder=5)  # fmt: skip


def _columns(points: list[Point]) -> tuple[list[float], list[float]]:
    return [x for x, _, _ in points], [y for _, y, _ in points]


def _format_power(value: float) -> str:
    power = math.floor(math.log10(value) + 1e-9)
    return rf"${value / 10**power:.3g}\cdot10^{{{power}}}$"
