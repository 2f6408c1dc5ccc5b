# SPDX-License-Identifier: Apache-2.0
"""Figures of a recipe's results: perplexity against FLOPs (table 2, figure 5) and against the window (figure 4)."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..utils.plotting import Line, new_figure, perplexity_figure, save_figure, style_axes
from .tables import WIKITEXT, Row, mean, split


def write(kind: str, rows: Sequence[Row], stem: Path) -> list[Path]:
    """Draw a recipe's figures next to `stem` and return their paths. Needs matplotlib."""
    figures, texts = {}, _by_text(rows)
    if kind == "overlaps" and texts:
        figures[""] = perplexity_figure({text: _lines(text_rows) for text, text_rows in texts.items()})
    if kind == "variants" and len({row.overlap for row in rows if not row.recurrent}) > 1:  # else all cost the same
        figures[""] = perplexity_figure({text: _lines(text_rows, by_label=True) for text, text_rows in texts.items()})
    if kind == "windows" and texts:
        figures["-window"] = _against_window(texts)
        figures["-flops"] = _against_flops(texts)
    paths = []
    for suffix, figure in figures.items():
        paths.append(stem.with_name(f"{stem.name}{suffix}.png"))
        save_figure(figure, paths[-1])
    return paths


def pareto_frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (cost, perplexity) points that no other point beats in one without being worse in the other."""
    best: list[tuple[float, float]] = []
    for cost, perplexity in sorted(set(points)):
        if not best or perplexity < best[-1][1]:
            best.append((cost, perplexity))
    return best


def curves(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """A curve for each overlap of the plain model and for each that a recurrent one was trained at, by its name. Each
    has one row per window, the mean of the seeds."""
    lines: dict[str, list[Row]] = {}
    plain, recurrent, _ = split(row for row in rows if row.matched)
    for name, model_rows in (("plain", plain), ("recurrent", recurrent)):
        for overlap in sorted({row.overlap for row in model_rows}):
            line = [row for row in model_rows if row.overlap == overlap]
            lines[f"{name}, overlap {overlap}"] = [
                _mean([row for row in line if row.window == window]) for window in sorted({r.window for r in line})
            ]
    return lines


def _mean(rows: Sequence[Row]) -> Row:
    return replace(rows[0], perplexity=mean(rows))


def _lines(rows: Sequence[Row], by_label: bool = False) -> list[Line]:
    """Lines for `perplexity_figure`: the plain model, and the recurrent ones at the overlaps they were trained at, as
    one line or, `by_label`, one line per cell."""
    plain, recurrent, removed = split(rows)

    def points(line: Sequence[Row]) -> list[tuple[float, float, str]]:
        groups = [[row for row in line if row.overlap == overlap] for overlap in sorted({row.overlap for row in line})]
        return [(group[0].flops, mean(group), f"{group[0].overlap}") for group in groups]

    lines = [Line("plain", False, points(plain), [])]
    if not by_label:
        return [*lines, Line("recurrent", True, points(recurrent), points(removed))]
    for label in dict.fromkeys(row.label for row in recurrent):
        own, control = ([row for row in line if row.label == label] for line in (recurrent, removed))
        lines.append(Line(label, True, points(own), points(control)))
    return lines


def _against_window(texts: dict[str, list[Row]]) -> Any:
    figure, panels = new_figure(len(texts))
    for axes, (text, rows) in zip(panels, texts.items(), strict=True):
        for name, line in curves(rows).items():
            if name.startswith("recurrent") or line[0].overlap == 0:
                axes.plot([row.window for row in line], [row.perplexity for row in line], label=name, **_style(line[0]))
        _finish(axes, text, "tokens in a window")
    return figure


def _against_flops(texts: dict[str, list[Row]]) -> Any:
    figure, panels = new_figure(len(texts))
    for axes, (text, rows) in zip(panels, texts.items(), strict=True):
        points = []
        for name, line in curves(rows).items():
            line_points = [(row.flops, row.perplexity) for row in line]
            points += line_points
            axes.plot(*zip(*line_points, strict=True), label=name, **_style(line[0]))
            for row in line:
                axes.annotate(f"{row.window}", (row.flops, row.perplexity), (3, 4), textcoords="offset points",
                              fontsize=7, color="#454545")  # fmt: skip
        frontier = pareto_frontier(points)
        axes.step(*zip(*frontier, strict=True), where="post", color="#cc79a7", linewidth=6, alpha=0.25, zorder=1,
                  label="Pareto frontier")  # fmt: skip
        axes.set_xscale("log")
        _finish(axes, text, "FLOPs per token, without the vocabulary projection; at the points: window")
    return figure


def _style(row: Row) -> dict[str, Any]:
    if row.recurrent:
        return {"color": "#0072b2", "marker": "o", "markersize": 5, "linewidth": 2, "zorder": 3}
    greys = {0: "#6b6b6b", 30: "#979797"}
    return {"color": greys.get(row.overlap, "#bdbdbd"), "marker": "s", "markersize": 4, "linestyle": (0, (4, 2))}


def _finish(axes: Any, title: str, xlabel: str) -> None:
    style_axes(axes, title, xlabel)
    axes.legend(fontsize=8.5, edgecolor="none", framealpha=0.9)


def _by_text(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows to draw, by text. WikiText is in the tables only."""
    shown = [row for row in rows if not row.text.startswith(WIKITEXT) and row.matched and math.isfinite(row.perplexity)]
    return {text: [row for row in shown if row.text == text] for text in dict.fromkeys(row.text for row in shown)}
