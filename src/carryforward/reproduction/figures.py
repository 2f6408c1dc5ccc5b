# SPDX-License-Identifier: Apache-2.0
"""What a recipe's results show, as figures: perplexity against FLOPs (table 2, figure 5), against window (figure 4)."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..utils.plotting import Line, draw, dress, empty, save
from .tables import BESIDE, Row, mean, split


def write(kind: str, rows: Sequence[Row], stem: Path) -> list[Path]:
    """Draw a recipe's figures beside `stem`; their paths. Needs matplotlib."""
    made, texts = {}, _by_text(rows)
    if kind == "overlaps" and texts:
        made[""] = draw({text: _lines(some) for text, some in texts.items()})
    if kind == "variants" and len({row.overlap for row in rows if not row.recurrent}) > 1:  # else all cost the same
        made[""] = draw({text: _lines(some, by_label=True) for text, some in texts.items()})
    if kind == "windows" and texts:
        made["-window"] = _against_window(texts)
        made["-flops"] = _against_flops(texts)
    paths = []
    for ending, figure in made.items():
        paths.append(stem.with_name(f"{stem.name}{ending}.png"))
        save(figure, paths[-1])
    return paths


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those of some (cost, perplexity) that no other undercuts in one without being worse in the other."""
    best: list[tuple[float, float]] = []
    for cost, perplexity in sorted(set(points)):
        if not best or perplexity < best[-1][1]:
            best.append((cost, perplexity))
    return best


def curves(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """A line for each overlap of the plain model, and for each the recurrent ones were trained at; one row a window,
    the seeds' mean."""
    found: dict[str, list[Row]] = {}
    plain, recurrent, _ = split(row for row in rows if row.matched)
    for name, some in (("plain", plain), ("recurrent", recurrent)):
        for overlap in sorted({row.overlap for row in some}):
            line = [row for row in some if row.overlap == overlap]
            found[f"{name}, overlap {overlap}"] = [
                _mean([row for row in line if row.window == window]) for window in sorted({r.window for r in line})
            ]
    return found


def _mean(rows: Sequence[Row]) -> Row:
    return replace(rows[0], perplexity=mean(rows))


def _lines(rows: Sequence[Row], by_label: bool = False) -> list[Line]:
    """For `figure.draw`: the plain model, and the recurrent ones at the overlaps they were trained at, as one line or
    each under its own name."""
    plain, recurrent, removed = split(rows)

    def points(some: Sequence[Row]) -> list[tuple[float, float, str]]:
        overlaps = sorted({row.overlap for row in some})
        at = [[row for row in some if row.overlap == overlap] for overlap in overlaps]
        return [(group[0].flops, mean(group), f"{group[0].overlap}") for group in at]

    lines = [Line("plain", False, points(plain), [])]
    if not by_label:
        return [*lines, Line("recurrent", True, points(recurrent), points(removed))]
    for label in dict.fromkeys(row.label for row in recurrent):
        own, without = ([row for row in some if row.label == label] for some in (recurrent, removed))
        lines.append(Line(label, True, points(own), points(without)))
    return lines


def _against_window(texts: dict[str, list[Row]]) -> Any:
    figure, panels = empty(len(texts))
    for axes, (text, rows) in zip(panels, texts.items(), strict=True):
        for name, line in curves(rows).items():
            if name.startswith("recurrent") or line[0].overlap == 0:
                axes.plot([row.window for row in line], [row.perplexity for row in line], label=name, **_style(line[0]))
        _finish(axes, text, "tokens in a window")
    return figure


def _against_flops(texts: dict[str, list[Row]]) -> Any:
    figure, panels = empty(len(texts))
    for axes, (text, rows) in zip(panels, texts.items(), strict=True):
        points = []
        for name, line in curves(rows).items():
            where = [(row.flops, row.perplexity) for row in line]
            points += where
            axes.plot(*zip(*where, strict=True), label=name, **_style(line[0]))
            for row in line:
                axes.annotate(f"{row.window}", (row.flops, row.perplexity), (3, 4), textcoords="offset points",
                              fontsize=7, color="#454545")  # fmt: skip
        edge = frontier(points)
        axes.step(*zip(*edge, strict=True), where="post", color="#cc79a7", linewidth=6, alpha=0.25, zorder=1,
                  label="Pareto frontier")  # fmt: skip
        axes.set_xscale("log")
        _finish(axes, text, "FLOPs per token, without the vocabulary projection; at the points: window")
    return figure


def _style(row: Row) -> dict[str, Any]:
    if row.recurrent:
        return {"color": "#0072b2", "marker": "o", "markersize": 5, "linewidth": 2, "zorder": 3}
    greys = {0: "#6b6b6b", 30: "#979797"}
    return {"color": greys.get(row.overlap, "#bdbdbd"), "marker": "s", "markersize": 4, "linestyle": (0, (4, 2))}


def _finish(axes: Any, title: str, across: str) -> None:
    dress(axes, title, across)
    axes.legend(fontsize=8.5, edgecolor="none", framealpha=0.9)


def _by_text(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """A panel for each text; those beside the main one are left to the tables."""
    shown = [row for row in rows if not row.text.startswith(BESIDE) and row.matched and math.isfinite(row.perplexity)]
    return {text: [row for row in shown if row.text == text] for text in dict.fromkeys(row.text for row in shown)}
