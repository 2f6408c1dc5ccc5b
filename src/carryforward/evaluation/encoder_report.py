# SPDX-License-Identifier: Apache-2.0
"""Tables and the figure of encoders' results: masked tokens by distance to a border, and classes."""

import os
from collections.abc import Iterator
from itertools import cycle
from typing import Any

from ..utils.markdown import escape_markdown, markdown_table
from ..utils.plotting import COLOURS, new_figure, save_figure, style_axes
from .result_series import (
    Result,
    Row,
    Series,
    by_data,
    check_not_empty,
    cost,
    flops_text,
    number,
    overlap_text,
    with_notes,
)

_DISTANCE_NOTE = (
    "Loss in nats per masked token, by its distance to the nearest end of the window that scores it at which the "
    "document goes on; “none”: the window holds the whole document."
)
_Models = dict[str, tuple[bool, Series]]


def masked_tables(results: list[Result]) -> str:
    """For each data set, loss and accuracy of masked tokens, and the loss by distance to a border."""
    tables = []
    for title, models in by_data(results).items():
        table = _table(models, [("loss", "loss", 3), ("accuracy", "accuracy", 4)])
        tables.append(with_notes(title, table, _distance_table(models), _DISTANCE_NOTE))
    return "\n".join(tables)


def classification_tables(results: list[Result]) -> str:
    """For each data set, accuracy and macro-F1."""
    columns = [("accuracy", "accuracy", 4), ("macro-F1", "macro_f1", 4)]
    return "\n".join(with_notes(title, _table(models, columns)) for title, models in by_data(results).items())


def _table(models: _Models, columns: list[tuple[str, str, int]]) -> str:
    """A line per model and overlap; beside each value, given by title, key and digits, that without state."""
    head = ["model", "overlap", "FLOPs/token"]
    for title, *_ in columns:
        head += [title, "state removed"]
    lines = []
    for name, (_, series) in models.items():
        for overlap, (row, control) in sorted(series.items()):
            cells = [number(one, key, digits) for _, key, digits in columns for one in (row, control)]
            costs = flops_text(cost(row or control))
            lines.append([escape_markdown(name), overlap_text(overlap, row, control), costs, *cells])
    return markdown_table(head, lines)


# --- by distance to a border ---------------------------------------------------------------------------------------

_Group = tuple[int | None, int | None]  # least and greatest distance; None without a border


def _arms(models: _Models) -> Iterator[tuple[str, str, bool, Row]]:
    """Each row with the name of its model, its overlap, and whether it is a control."""
    for name, (_, series) in models.items():
        for overlap, rows in sorted(series.items()):
            for is_control, row in enumerate(rows):
                if row:
                    yield name, overlap_text(overlap, row), bool(is_control), row


def _groups(models: _Models) -> list[_Group]:
    """The groups of distances that occur, the nearest first, and those without a border last."""
    found = {(group["from"], group["to"]) for *_, row in _arms(models) for group in row["by_distance"]}
    return sorted(found, key=lambda group: (group[0] is None, group[0] or 0))


def _losses(row: Row) -> dict[_Group, float]:
    return {(one["from"], one["to"]): one["nats"] / one["targets"] for one in row["by_distance"] if one["targets"]}


def _group_text(group: _Group) -> str:
    least, greatest = group
    return "none" if least is None else f"{least}" if least == greatest else f"{least}–{greatest}"


def _distance_table(models: _Models) -> str:
    groups, lines = _groups(models), []
    for name, overlap, is_control, row in _arms(models):
        losses = _losses(row)
        state = "removed" if is_control else "yes" if row["use_state"] else "–"
        cells = [f"{losses[group]:.3f}" if group in losses else "–" for group in groups]
        lines.append([escape_markdown(name), overlap, state, *cells])
    return markdown_table(["model", "overlap", "state", *map(_group_text, groups)], lines)


def border_figure(results: list[Result], path: str | os.PathLike) -> Any:
    """Draw the loss of masked tokens by distance to a border, a line per model, overlap and state. Needs matplotlib.

    Returns:
        The matplotlib figure, which is saved to `path`.
    """
    check_not_empty(results)
    panels = by_data(results)
    figure, all_axes = new_figure(len(panels))
    for axes, (title, models) in zip(all_axes, panels.items(), strict=True):
        _draw_losses(axes, models)
        style_axes(
            axes, title, "distance to the nearest border of the window, in tokens", "loss, nats per masked token"
        )
        axes.title.set_fontsize(8.5)  # a title names documents, words and masking
        axes.legend(fontsize=8.5, edgecolor="none", framealpha=0.9)
    save_figure(figure, path)
    return figure


def _draw_losses(axes: Any, models: _Models) -> None:
    groups = [group for group in _groups(models) if group[0] is not None]
    places = {group: place for place, group in enumerate(groups)}
    colours, of_arm = cycle(COLOURS), dict[tuple[str, str], str]()
    for name, overlap, is_control, row in _arms(models):
        points = [(places[group], loss) for group, loss in sorted(_losses(row).items(), key=str) if group in places]
        points.sort()
        colour = of_arm.setdefault((name, overlap), "") or next(colours)
        of_arm[name, overlap] = colour
        label = f"{name}, overlap {overlap.replace(chr(92), '')}" + ", state removed" * is_control
        style: dict[str, Any] = {"linestyle": (0, (4, 2)), "markerfacecolor": "white"} if is_control else {}
        axes.plot(*zip(*points, strict=True) if points else ([], []), color=colour, marker="o", markersize=4.5,
                  linewidth=1.7, label=label, **style)  # fmt: skip
    axes.set_xticks(range(len(groups)), [_group_text(group) for group in groups])
