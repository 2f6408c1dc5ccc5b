# SPDX-License-Identifier: Apache-2.0
"""The figure: each cell's F1 against disjoint windows of the same length, and the same with its state removed."""

from typing import Any

from cells import CELLS, HERE, TEXTS, VARIANTS
from comparison import Gains, Interval, Results, Seeds, baseline, f1

from carryforward.utils.plotting import COLOURS, new_figure, save_figure, style_axes

GROUPS = {COLOURS[0]: "main cells", COLOURS[1]: "overlap", "#6b6b6b": "variants of the vector"}


def draw(results: Results, gains: Gains) -> None:
    figure, panels = new_figure(len(TEXTS))
    figure.set_size_inches(13, 5)
    names = [cell for cell in reversed(CELLS | VARIANTS) if cell != baseline(cell)]
    for axes, (text, about) in zip(panels, TEXTS.items(), strict=True):
        for height, cell in enumerate(names):
            if (cell, text) in gains:
                _cell(axes, cell, results[cell, text], results[baseline(cell), text], gains[cell, text], height)
            else:
                axes.annotate("not measured", (0, height), (4, 0), textcoords="offset points", fontsize=8, va="center")
        axes.axvline(0, color="#454545", linewidth=1)
        title = about.partition(", trained")[0].partition(", joined")[0]
        style_axes(axes, title, "F1 against disjoint windows of the same length", "")
        axes.set_yticks(range(len(names)), names if axes is panels[0] else [""] * len(names))
    panels[0].plot([], [], "o-", color="#454545", linewidth=3, label="95 % interval, three seeds")
    panels[0].plot([], [], "o-", color="#454545", linewidth=1.4, label="one seed")
    panels[0].plot([], [], "o", color="#454545", markersize=4, markerfacecolor="white", label="state removed")
    for colour, name in GROUPS.items():
        panels[0].plot([], [], "s", color=colour, label=name)
    figure.legend(fontsize=9, edgecolor="none", loc="outside lower center", ncols=6)
    save_figure(figure, HERE / "figure.png")


def _cell(axes: Any, cell: str, seeds: Seeds, plain: Seeds, gain: Interval, height: int) -> None:
    mean, low, high = gain
    main, overlapping, variant = GROUPS
    colour = main if cell in CELLS else overlapping if "overlapping" in cell else variant
    axes.plot([low, high], [height, height], color=colour, linewidth=3 if len(seeds) > 1 else 1.4)
    axes.plot(mean, height, "o", color=colour, markersize=6)
    if all(len(one["rows"]) == 2 for one in seeds.values()):
        removed = f1(seeds, row=1).mean() - f1(plain).mean()
        axes.plot(removed, height, "o", color=colour, markersize=4, markerfacecolor="white", zorder=4)
