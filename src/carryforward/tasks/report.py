# SPDX-License-Identifier: Apache-2.0
"""The table and the figure of a result of `carryforward memory-tasks`."""

from pathlib import Path
from typing import Any

from ..utils.markdown import escape_markdown, markdown_table
from ..utils.plotting import COLOURS, new_figure, save_figure, skip_without_matplotlib, style_axes
from .score import CONTROLS

_GREYS = ("#6b6b6b", "#a3a3a3")


def markdown(result: dict[str, Any]) -> str:
    """A sentence on what was done, and a table of accuracy by size."""
    training, model = result["training"], result["model"]
    about = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in result["about"].items())
    trained = "not trained"
    if training is not None:
        trained = f"{training['steps']:,} steps in {training['seconds']:,.0f} s ({training['stopped']})"
    heading = f"{result['task']} ({about}): {model['carries']}; {model['parameters']:,} parameters; {trained}"
    whole, scores = result["whole_answers"], result["scores"]
    right = ["right", "95 %"] if whole else ["symbols right", "sequences right", "95 %"]
    length = ["tokens"] * (result["unit"] != "tokens")
    header = [result["unit"], *length, "windows", *right, *scores[0]["controls"]]
    table = markdown_table(header, [_row(score, whole, bool(length)) for score in scores], text_columns=0)
    note = f"By chance {100 * result['chance']:.2g} % are right. Each row: {scores[0]['samples']:,} documents."
    return f"{escape_markdown(heading)}\n\n{table}\n\n{note}"


def _row(score: dict[str, Any], whole: bool, has_length: bool) -> list[str]:
    counts = [score["size"], *[score["length"]] * has_length, score["windows"]]
    right = [f"{score['whole']:.1%}", "{:.1%} to {:.1%}".format(*score["interval"])]
    if not whole:
        right = [f"{score['by_token']:.1%}", *right]
    controls = [f"{accuracy(control, whole):.1%}" for control in score["controls"].values()]
    return [*(f"{count:,}" for count in counts), *right, *controls]


def accuracy(score: dict[str, Any], whole_answers: bool) -> float:
    """The accuracy that a task is judged by: of whole answers, or of their tokens."""
    return score["whole" if whole_answers else "by_token"]


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw accuracy by size, by depth if the task has depths, and the training."""
    panels = [_draw_sizes]
    panels += [_draw_depths] * any(score["by_depth"] for score in result["scores"])
    panels += [_draw_training] * bool(result["training"] and result["training"]["validations"])
    with skip_without_matplotlib(path):
        figure, all_axes = new_figure(len(panels))
        for panel, axes in zip(panels, all_axes, strict=True):
            panel(axes, result)
        save_figure(figure, path)


def _draw_sizes(axes: Any, result: dict[str, Any]) -> None:
    scores, whole = result["scores"], result["whole_answers"]
    sizes = [score["size"] for score in scores]
    values = [100 * accuracy(score, whole) for score in scores]
    axes.plot(sizes, values, color=COLOURS[0], marker="o", markersize=5, linewidth=1.9, label="with memory", zorder=4)
    if whole:
        low, high = zip(*(score["interval"] for score in scores), strict=True)
        axes.vlines(sizes, [100 * one for one in low], [100 * one for one in high], color=COLOURS[0], linewidth=1.2)
    controls = [name for name in CONTROLS if name in scores[0]["controls"]]
    for name, colour, style in zip(controls, _GREYS, ("-", "--"), strict=False):
        line = [100 * accuracy(score["controls"][name], whole) for score in scores]
        axes.plot(sizes, line, color=colour, linestyle=style, marker="o", markersize=3.5, linewidth=1.4, label=name)
    axes.axhline(100 * result["chance"], color="#454545", linewidth=0.8, linestyle=":", label="chance")
    trained = _trained_size(result)
    if trained is not None and trained < max(sizes):
        axes.axvspan(min(sizes), trained, color=COLOURS[0], alpha=0.08, linewidth=0, label="trained on")
    what = "answers" if whole else "symbols"
    style_axes(axes, f"{result['task']}: {what} that are right", f"size of a document in {result['unit']}", "per cent")
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45 if max(sizes) > 9999 else 0)
    axes.set_xticks([], minor=True)
    axes.set_ylim(-3, 103)
    axes.legend(fontsize=8.5, edgecolor="none", framealpha=0.9)


def _trained_size(result: dict[str, Any]) -> int | None:
    """The largest size that was trained on; None if nothing was."""
    return max((stage["size"] for stage in (result["training"] or {"stages": []})["stages"]), default=None)


def _draw_depths(axes: Any, result: dict[str, Any]) -> None:
    """A map of accuracy by size and by how deep in the document the fact stands."""
    scores = [score for score in result["scores"] if score["by_depth"]]
    parts = len(scores[0]["by_depth"])
    grid = [[100 * one["by_depth"][part]["whole"] if one["by_depth"][part]["samples"] else float("nan")
             for one in scores] for part in range(parts)]  # fmt: skip
    axes.imshow(grid, cmap="Blues", vmin=0, vmax=130, aspect="auto")  # dark cells stay readable
    for part, row in enumerate(grid):
        for column, value in enumerate(row):
            axes.text(column, part, "–" if value != value else f"{value:.0f}", ha="center", va="center", fontsize=8)
    style_axes(axes, "By where the fact stands: per cent right", f"size of a document in {result['unit']}", "")
    axes.grid(False)
    axes.set_xticks(range(len(scores)), [f"{score['size']:,}" for score in scores], rotation=45 * (len(scores) > 7))
    edges = [f"{100 * part // parts} to {100 * (part + 1) // parts} %" for part in range(parts)]
    axes.set_yticks(range(parts), edges)
    axes.set_ylabel("share of the document before it")


def _draw_training(axes: Any, result: dict[str, Any]) -> None:
    training = result["training"]
    sizes = list(dict.fromkeys(one["size"] for one in training["validations"]))
    for number, size in enumerate(sizes):
        points = [one for one in training["validations"] if one["size"] == size]
        colour = COLOURS[number % len(COLOURS)]
        axes.plot([one["step"] for one in points], [100 * one["accuracy"] for one in points], color=colour, marker="o",
                  markersize=3, linewidth=1.5, label=f"{size:,}")  # fmt: skip
    style_axes(axes, "Training: validation documents of each stage", "step", "per cent right")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(-3, 103)
    axes.legend(title=result["unit"], fontsize=8.5, title_fontsize=8.5, edgecolor="none", framealpha=0.9)
