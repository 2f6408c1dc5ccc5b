# SPDX-License-Identifier: Apache-2.0
"""Word perplexity against what it costs: FLOPs, time and memory, one panel each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from carryforward.utils.plotting import COLOURS, Label, new_figure, place_labels, save_figure, style_axes

KINDS = ("recent", "attention", "dissimilar", "merged", "lookup")  # in this order, in these colours
GREY = "#6b6b6b"
MARKERS = "os^Dv"  # by window
WIDTH, HEIGHT = 7, 7.2  # of a panel, in inches
Result = dict[str, Any]
PANELS: tuple[tuple[str, str, Callable[[Result], float], bool], ...] = (  # key, what x is, x, is more better?
    ("flops", "million FLOPs per token", lambda r: (r["flops"]["base"] + r["flops"]["recurrence"]) / 1e6, False),
    ("tokens_per_second", "thousand tokens per second", lambda r: r["tokens_per_second"] / 1e3, True),
    ("window_peak_bytes", "memory in GB, read window by window", lambda r: r["window_peak_bytes"] / 1e9, False),
)


def draw(results: list[Result], path: Path) -> None:
    """Draw a panel for each cost that was measured of every arm. The plain windows that no other plain window beats are
    joined by a line."""
    panels = [panel for panel in PANELS if all(result.get(panel[0]) is not None for result in results)]
    figure, all_axes = new_figure(len(panels))
    figure.set_size_inches(max(len(panels), 2) * WIDTH, HEIGHT)
    drawn = [draw_panel(axes, results, *panel) for axes, (_, *panel) in zip(all_axes, panels, strict=True)]
    lines = all_axes[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=5, fontsize=9, edgecolor="none")
    figure.draw_without_rendering()  # fixes the layout, which the placing of labels depends on
    for axes, labels in zip(all_axes, drawn, strict=True):
        place_labels(axes, labels)
    save_figure(figure, path)


def draw_panel(
    axes: Any, results: list[Result], title: str, x: Callable[[Result], float], more_is_better: bool
) -> list[Label]:
    """Draw one panel; returns the labels of its points."""
    plain = [result for result in results if result["arm"]["memory"] is None]
    best = sorted(front(plain, x, more_is_better), key=x)
    style = {"color": GREY, "marker": "o", "markersize": 4}
    axes.plot(*points(plain, x), linestyle="none", alpha=0.45, label="plain, other windows and overlaps", **style)
    axes.plot(*points(best, x), linestyle=(0, (4, 2)), label="plain, the best: window/overlap", **style)
    labels = [(x(r), r["word_perplexity"], plain_label(r), GREY) for r in best]
    windows = sorted({r["arm"]["window"] for r in results if r["arm"]["memory"] is not None}, reverse=True)
    named = best_of_each_split(results)
    for (kind, window), line in carried(results).items():
        colour = COLOURS[KINDS.index(kind)]
        marker = MARKERS[windows.index(window) % len(MARKERS)]
        name = f"{kind}, windows of {window}"
        axes.plot(*points(line, x), color=colour, marker=marker, markersize=5, linewidth=1.5, label=name)
        labels += [(x(r), r["word_perplexity"], carried_label(r), colour) for r in line if r in named]
    style_axes(axes, f"Word perplexity against {title}", title)
    scale_axes(axes)
    return labels


def scale_axes(axes: Any) -> None:
    """Logarithmic axes with plain numbers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(0.08, 0.06)
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        steps = (1, 1.2, 1.4, 1.6, 1.8, 2, 2.25, 2.5, 2.75, 3, 3.5, 4, 5, 6, 7, 8)
        steps = steps if high < 3 * low else (1, 1.5, 2, 3, 4, 5, 6, 8) if high < 10 * low else (1, 2, 5)
        ticks = [step * 10**power for power in range(-3, 7) for step in steps]
        axis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high] or [low, high]))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}" if value < 1000 else f"{value:,.0f}"))


def best_of_each_split(results: list[Result]) -> list[Result]:
    """Of selections with as many recent positions and as large windows, the best one: only it is labelled."""
    best: dict[tuple[int, int, bool], Result] = {}
    for result in results:
        memory, window = result["arm"]["memory"], result["arm"]["window"]
        if memory is not None:
            key = window, memory["recent"], memory.get("far", 0) > 0
            best[key] = min(best.get(key, result), result, key=lambda r: r["word_perplexity"])
    return list(best.values())


def front(results: list[Result], x: Callable[[Result], float], more_is_better: bool) -> list[Result]:
    """Those that no other result beats at the same cost."""
    best: list[Result] = []
    for result in sorted(results, key=lambda r: (-x(r) if more_is_better else x(r), r["word_perplexity"])):
        if not best or result["word_perplexity"] < best[-1]["word_perplexity"]:
            best.append(result)
    return best


def carried(results: list[Result]) -> dict[tuple[str, int], list[Result]]:
    """Results that carry something, by kind and window, in the order of how much they carry."""
    lines: dict[tuple[str, int], list[Result]] = {}
    for kind in KINDS:
        of_kind = [r for r in results if r["arm"]["memory"] is not None and r["arm"]["kind"] == kind]
        for result in sorted(of_kind, key=carried_size):
            lines.setdefault((kind, result["arm"]["window"]), []).append(result)
    return lines


def carried_size(result: Result) -> tuple[int, int, int]:
    memory = result["arm"]["memory"]
    return -result["arm"]["window"], memory["recent"] + memory.get("far", 0), memory["recent"]


def points(results: list[Result], x: Callable[[Result], float]) -> tuple[list[float], list[float]]:
    return [x(result) for result in results], [result["word_perplexity"] for result in results]


def plain_label(result: Result) -> str:
    return f"{result['window']}/{result['arm']['overlap']}"


def carried_label(result: Result) -> str:
    memory = result["arm"]["memory"]
    return f"{memory['recent']}+{memory['far']}" if memory.get("far") else f"{memory['recent']}"
