# SPDX-License-Identifier: Apache-2.0
"""Accuracy by size, by distance, and in training."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from arms import BUNDLED, GIVEN, KINDS, PEER

from carryforward.tasks.report import accuracy
from carryforward.utils.plotting import COLOURS, new_figure, save_figure, style_axes

Result = dict[str, Any]
Points = list[tuple[float, float]]


def draw_lengths(results: Sequence[Result], path: Path, unit: str) -> None:
    """A panel for each task: accuracy by size, a thin line for each seed, and where training ended."""
    settings = list(dict.fromkeys(one["arm"]["setting"] for one in results))
    figure, all_axes = new_figure(len(settings))
    for axes, setting in zip(all_axes, settings, strict=True):
        some = [one for one in results if one["arm"]["setting"] == setting]
        for result in some:
            points = [(score["size"], 100 * accuracy(score, result["whole_answers"])) for score in result["scores"]]
            add_line(axes, points, title_in_words(result), dashed=result["arm"]["label"].startswith(GIVEN))
        longest = max(some[0]["arm"]["training"]["sizes"])
        axes.axvline(longest, color="#6b6b6b", linewidth=1, linestyle="--")
        axes.text(longest, 1.01, "trained up to here ", transform=axes.get_xaxis_transform(), fontsize=8, ha="center")
        axes.axhline(100 * some[0]["chance"], color="#6b6b6b", linewidth=0.8, linestyle=":", label="chance")
        finish(axes, f"{setting.replace('-', ': ', 1)}\n", unit)
        axes.set_xscale("log", base=2 if unit == "tokens" else 10)
        sizes = sorted({score["size"] for one in some for score in one["scores"]})
        axes.set_xticks(sizes, [f"{size // 1024} k" if size >= 1024 else f"{size}" for size in sizes])
        axes.minorticks_off()
    save_figure(figure, path)


def draw_distances(results: Sequence[Result], path: Path, layers: int) -> None:
    """A panel for each task and number of pairs: accuracy by windows between question and pair, the mean of seeds."""
    with_distances = [one for one in results if one["distances"]]
    panels = list(dict.fromkeys((one["arm"]["setting"], size) for one in with_distances for size in one["distances"]))
    figure, all_axes = new_figure(len(panels))
    for axes, (setting, size) in zip(all_axes, panels, strict=True):
        some = [one for one in with_distances if one["arm"]["setting"] == setting and size in one["distances"]]
        for label in dict.fromkeys(one["arm"]["label"] for one in some):
            add_line(
                axes, mean_distances([one["distances"][size] for one in some if one["arm"]["label"] == label]), label
            )
        axes.axvline(layers, color="#6b6b6b", linewidth=1, linestyle="--", label="as many as layers")
        finish(axes, f"{setting.replace('-', ': ', 1)}, {size} pairs", "windows back")
    save_figure(figure, path)


def mean_distances(runs: Sequence[dict[str, dict[str, Any]]]) -> Points:
    """Windows back and per cent right, of the samples of all runs together."""
    distances = sorted({int(distance) for run in runs for distance in run})
    points = []
    for distance in distances:
        scores = [run[str(distance)] for run in runs if str(distance) in run]
        points.append((distance, 100 * sum(one["right"] for one in scores) / sum(one["samples"] for one in scores)))
    return points


def draw_depths(results: Iterable[Result], path: Path, about: str) -> None:
    """Validation accuracy in training, a line for each BPTT depth."""
    figure, (axes,) = new_figure(1)
    for number, result in enumerate(results):
        longest = max(one["size"] for one in result["training"]["validations"])
        points = [(one["step"], 100 * one["accuracy"]) for one in result["training"]["validations"]
                  if one["size"] == longest]  # fmt: skip
        label = f"{result['arm']['label'].replace('-', ' ')}, {longest} symbols"
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.6, label=label)
    finish(axes, f"Training: {about}", "step")
    save_figure(figure, path)


def title_in_words(result: Result) -> str:
    """A model's kind of memory and, if it has one, its base model."""
    base, label = result["arm"]["model"].get("base"), result["arm"]["label"]
    if base is None:
        return label
    name = "bundled" if base == BUNDLED else result["settings"]["base"]
    return f"{label.removeprefix(f'{base}-')}, {name}"


def add_line(axes: Any, points: Points, title: str, *, dashed: bool = False) -> None:
    """A line in the colour of its kind of memory, named once."""
    kind = next(kind for kind in (*KINDS, PEER) if kind in title.split(",")[0])
    named = title in axes.get_legend_handles_labels()[1]
    style = {"color": COLOURS[(*KINDS, PEER).index(kind)], "marker": "o", "markersize": 3.5, "linewidth": 1.4}
    line = "--" if dashed else "-"
    axes.plot(*zip(*sorted(points), strict=True), linestyle=line, label=None if named else title, **style)


def finish(axes: Any, title: str, xlabel: str) -> None:
    style_axes(axes, title, xlabel, "right, in per cent")
    axes.set_ylim(-3, 103)
    axes.legend(fontsize=8.5, edgecolor="none", framealpha=0.9)
