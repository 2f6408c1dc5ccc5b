# SPDX-License-Identifier: Apache-2.0
"""The figure: what each cell gains on disjoint windows of the same length, and what is left with its state removed."""

from typing import Any

from cells import CELLS, HERE, TEXTS, TRIED
from comparing import Gains, Interval, Results, Seeds, baseline, f1

from carryforward.utils.plotting import COLOURS, dress, empty, save

COLOURED = {COLOURS[0]: "main cells", COLOURS[1]: "overlap", "#6b6b6b": "the vector otherwise"}


def draw(results: Results, gains: Gains) -> None:
    drawn, every = empty(len(TEXTS))
    drawn.set_size_inches(13, 5)
    names = [cell for cell in reversed(CELLS | TRIED) if cell != baseline(cell)]
    for axes, (text, about) in zip(every, TEXTS.items(), strict=True):
        for height, cell in enumerate(names):
            if (cell, text) in gains:
                _cell(axes, cell, results[cell, text], results[baseline(cell), text], gains[cell, text], height)
            else:
                axes.annotate("not measured", (0, height), (4, 0), textcoords="offset points", fontsize=8, va="center")
        axes.axvline(0, color="#454545", linewidth=1)
        dress(axes, about.partition(", trained")[0].partition(", joined")[0], "F1 against disjoint windows as long", "")
        axes.set_yticks(range(len(names)), names if axes is every[0] else [""] * len(names))
    every[0].plot([], [], "o-", color="#454545", linewidth=3, label="95 % interval, three seeds")
    every[0].plot([], [], "o-", color="#454545", linewidth=1.4, label="one seed")
    every[0].plot([], [], "o", color="#454545", markersize=4, markerfacecolor="white", label="state removed")
    for colour, name in COLOURED.items():
        every[0].plot([], [], "s", color=colour, label=name)
    drawn.legend(fontsize=9, edgecolor="none", loc="outside lower center", ncols=6)
    save(drawn, HERE / "figure.png")


def _cell(axes: Any, cell: str, found: Seeds, plain: Seeds, gain: Interval, height: int) -> None:
    mean, low, high = gain
    main, overlapping, tried = COLOURED
    colour = main if cell in CELLS else overlapping if "overlapping" in cell else tried
    axes.plot([low, high], [height, height], color=colour, linewidth=3 if len(found) > 1 else 1.4)
    axes.plot(mean, height, "o", color=colour, markersize=6)
    if all(len(one["rows"]) == 2 for one in found.values()):
        removed = f1(found, row=1).mean() - f1(plain).mean()
        axes.plot(removed, height, "o", color=colour, markersize=4, markerfacecolor="white", zorder=4)
