# SPDX-License-Identifier: Apache-2.0
"""The figure: what each cell gains on disjoint windows of the same length, and what is left with its state removed."""

from cells import CELLS, HERE, TEXTS, TRIED
from comparing import Results, baseline, interval, pairs

from carryforward.figure import COLOURS, dress, empty, save


def draw(results: Results) -> None:
    drawn, every = empty(len(TEXTS))
    drawn.set_size_inches(13, 5)
    names = [cell for cell in reversed(CELLS | TRIED) if not cell.startswith("disjoint")]
    for axes, (text, about) in zip(every, TEXTS.items(), strict=True):
        for height, cell in enumerate(names):
            _cell(axes, results, cell, text, height)
        axes.axvline(0, color="#454545", linewidth=1)
        dress(axes, about.partition(",")[0], "points of F1 against disjoint windows", "")
        axes.set_yticks(range(len(names)), names if axes is every[0] else [""] * len(names))
    every[0].plot([], [], "o", color="#454545", label="mean and 95 % interval\n(thick: three seeds)")
    every[0].plot([], [], "o", color="#454545", markerfacecolor="white", label="state removed")
    every[0].legend(fontsize=8.5, edgecolor="none", loc="center right", bbox_to_anchor=(1.0, 0.31))
    save(drawn, HERE / "figure.png")


def _cell(axes, results: Results, cell: str, text: str, height: int) -> None:
    found, plain = (results.get((name, text)) for name in (cell, baseline(cell)))
    if not found or not plain:
        axes.annotate("not measured", (0, height), (4, 0), textcoords="offset points", fontsize=8, va="center")
        return
    mean, low, high = interval(pairs(found, plain))
    colour = COLOURS[0] if cell in CELLS else COLOURS[1] if "overlapping" in cell else "#6b6b6b"
    axes.plot([low, high], [height, height], color=colour, linewidth=3 if len(found) > 1 else 1.4)
    axes.plot(mean, height, "o", color=colour, markersize=6)
    without = [(one["rows"][1], plain[seed]["rows"][0]) for seed, one in found.items()
               if len(one["rows"]) == 2 and seed in plain]  # fmt: skip
    if without:
        removed, _, _ = interval(without)
        axes.plot(removed, height, "o", color=colour, markersize=4, markerfacecolor="white", zorder=4)
