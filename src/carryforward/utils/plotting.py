# SPDX-License-Identifier: Apache-2.0
"""The perplexity-FLOPs figure: lines in, a matplotlib figure out. What the lines mean is `report`'s."""

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any

from .files import atomic_write

logger = logging.getLogger(__name__)
Point = tuple[float, float, str]  # FLOPs, perplexity, label


@dataclass
class Line:
    """One model's points, and those of its control with the state removed."""

    name: str
    recurrent: bool
    points: list[Point]
    removed: list[Point]


def draw(panels: dict[str, list[Line]]) -> Any:
    """A panel for each title, side by side."""
    drawn, every = empty(len(panels))
    labels = [_panel(axes, title, lines) for axes, (title, lines) in zip(every, panels.items(), strict=True)]
    drawn.draw_without_rendering()  # settles where everything is, which labels must know
    for axes, texts in zip(every, labels, strict=True):
        _place(axes, texts)
        starred = any("*" in text for _, _, text, _ in texts)
        title = "at the points: overlap" + ", * not trained at it" * starred
        axes.legend(title=title, fontsize=8.5, title_fontsize=8.5, alignment="left", edgecolor="none", framealpha=0.9)
    return drawn


def empty(count: int) -> tuple[Any, Any]:
    """A figure with so many panels side by side, and these."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figure needs matplotlib: pip install carryforward[figures]") from error
    drawn = Figure(figsize=(7.2 * count, 4.6), dpi=160, layout="constrained")
    return drawn, drawn.subplots(1, count, squeeze=False)[0]


@contextmanager
def left_out(path: str | os.PathLike) -> Iterator[None]:
    """Without matplotlib a figure is left out, and what it would have shown is not lost."""
    try:
        yield
    except ImportError as error:
        logger.warning("%s is left out: %s", path, error)


def save(drawn: Any, path: str | os.PathLike) -> None:
    """Write a figure, whole or not at all."""
    with atomic_write(path) as beside:
        drawn.savefig(beside)


def dress(axes: Any, title: str, across: str, up: str = "word perplexity") -> None:
    """What every panel has: a title, what is shown against what, a quiet grid."""
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.grid(True, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # told apart by the colour-blind too
_GREYS = ("#6b6b6b", "#979797", "#454545")
_Label = tuple[float, float, str, str]  # x, y, text, colour


def _panel(axes: Any, title: str, models: list[Line]) -> list[_Label]:
    """Draw one data set; give back the overlaps to be written at its points."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    labels: list[_Label] = []
    colours = {True: cycle(COLOURS), False: cycle(_GREYS)}
    hollow = {"marker": "o", "markersize": 4, "markerfacecolor": "white", "linestyle": "none"}
    controls = False
    for line in models:
        colour = next(colours[line.recurrent])
        style = {"linewidth": 1.9, "zorder": 3} if line.recurrent else {"linewidth": 1.5, "linestyle": (0, (4, 2))}
        axes.plot(*_columns(line.points), color=colour, marker="o", markersize=4.5, label=line.name, **style)
        axes.plot(*_columns(line.removed), color=colour, zorder=4, **hollow)
        controls |= bool(line.removed)
        labels += [(x, y, text, colour) for x, y, text in line.points]
    if controls:
        axes.plot([], [], color="#454545", label="state removed", **hollow)
    axes.set_xscale("log")
    axes.margins(0.07, 0.09)
    low, high = axes.get_xlim()
    if high < 1.5 * low:  # else a difference of a thousandth would fill the panel
        middle = math.sqrt(low * high)
        low, high = axes.set_xlim(middle / 1.25, middle * 1.25)
    steps = (1, 1.5, 2, 3, 4, 5, 6, 8) if high < 10 * low else (1, 3) if high < 300 * low else (1,)
    ticks = [step * 10**power for power in range(3, 19) for step in steps]
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high] or [low, high]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _power(x)))
    dress(axes, title, "FLOPs per token, without the vocabulary projection")
    return labels


def _place(axes: Any, labels: list[_Label]) -> None:
    """Write each label beside its point where it covers the least: other labels, points, lines."""
    scale = 72 / axes.figure.dpi  # everything in points, 1/72 inch
    obstacles: list[tuple[float, float, float]] = []  # x, y, how bad it is to cover
    for line in axes.lines:
        places = [tuple(place) for place in axes.transData.transform(line.get_xydata()) * scale]
        obstacles += [(x, y, 30.0) for x, y in places]
        if line.get_linestyle() != "None":
            for (x, y), (to_x, to_y) in pairwise(places):
                steps = int(math.hypot(to_x - x, to_y - y) / 2) + 1
                obstacles += [(x + (to_x - x) * i / steps, y + (to_y - y) * i / steps, 2.0) for i in range(steps)]
    taken: list[tuple[float, float, float]] = []  # x, y, half the width
    for x, y, text, colour in labels:
        at_x, at_y = axes.transData.transform((x, y)) * scale
        half = 2.4 * len(text) + 1
        best = (math.inf, 0.0, 0.0)
        for reach in (9, 13, 18):
            for angle in range(0, 360, 30):
                dx, dy = (reach + half - 3) * math.cos(math.radians(angle)), reach * math.sin(math.radians(angle))
                cost = reach / 3 + sum(
                    bad for ox, oy, bad in obstacles if abs(ox - at_x - dx) < half + 2 and abs(oy - at_y - dy) < 6
                )
                cost += sum(
                    100 for ox, oy, o in taken if abs(ox - at_x - dx) < half + o + 1 and abs(oy - at_y - dy) < 9
                )
                best = min(best, (cost, dx, dy))
        _, dx, dy = best
        taken.append((at_x + dx, at_y + dy, half))
        axes.annotate(text, (x, y), (dx, dy), textcoords="offset points", color=colour, fontsize=8,
                      ha="center", va="center_baseline", zorder=5)  # fmt: skip


def _columns(points: list[Point]) -> tuple[list[float], list[float]]:
    return [x for x, _, _ in points], [y for _, y, _ in points]


def _power(value: float) -> str:
    power = math.floor(math.log10(value) + 1e-9)
    return rf"${value / 10**power:.3g}\cdot10^{{{power}}}$"
