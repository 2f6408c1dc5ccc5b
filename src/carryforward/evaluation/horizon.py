# SPDX-License-Identifier: Apache-2.0
"""`carryforward horizon`: how much the state helps by its reach in windows, position in the window and window number.

A gain is the loss without the state minus the loss with it, in nats per token. The result is plain JSON:

    {"kind": "horizon", "commit": "...", ..., "model": "runs/a", "window": 300, "overlap": 0, "data": {...},
     "depths": [{"windows": 0, "nats": 3.2, "gain": 0.0}, ...], "tokens": 90000,
     "positions": [{"from": 0, "to": 10, "gain": 0.3, "tokens": 3000}, ...], "windows": [...]}
"""

import json
from collections.abc import Iterable, Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import windows
from ..config import RecurrenceConfig
from ..data.corpora import default_split
from ..data.documents import load_documents
from ..models.loading import load_causal, need_state, usable_device
from ..settings.commands import HorizonSettings
from ..utils.files import write_json
from ..utils.markdown import escape_markdown, markdown_table
from ..utils.parsing import read_json
from ..utils.plotting import COLOURS, new_figure, save_figure, skip_without_matplotlib, style_axes
from ..utils.progress import ProgressBar
from ..utils.provenance import provenance
from .token_losses import deep_windows, loss_by_depth, token_losses

DEPTHS = (0, 1, 2, 4, 8)  # in windows
FAR_DEPTHS = (16, 32)  # as well, for memories that reach further back than one window, if documents are long enough
_POSITION_BINS = 30
_WINDOW_BINS = (1, 2, *(2**power + 1 for power in range(1, 31)))  # edges; each bin is as wide as all before it


def horizon(name: str, settings: HorizonSettings, *, device: str | None = None) -> dict[str, Any]:
    """Measure the gain from the state of a recurrent model on a corpus."""
    need_state(name)
    device = usable_device(device)
    loaded = load_causal(name)
    model: Any = loaded.model.to(device)  # type: ignore[arg-type]
    split = settings.split or default_split(settings.data, "validation")
    documents = load_documents(
        settings.data, split, loaded.tokenizer, text_field=settings.text_field, max_tokens=settings.max_document_tokens
    )
    chosen = settings.depth or default_depths(model.config.recurrence, int(documents.lengths.max(initial=0)))
    depths = tuple(sorted({0, *chosen}))
    ends, stride = deep_windows(model, documents, depths)
    total = len(depths) * len(ends) * stride + 2 * int((documents.lengths - 1).clip(min=0).sum())
    with (
        ProgressBar(f"measuring {name}", total, "tokens") as bar,
        torch.autocast(device.split(":")[0], torch.bfloat16, enabled=settings.bf16),
    ):
        kwargs: dict[str, Any] = {"batch_size": settings.batch_size, "progress": bar.advance}
        nats, tokens = loss_by_depth(model, documents, depths, **kwargs)
        with_state, without = (token_losses(model, documents, use_state=use, **kwargs) for use in (True, False))
    gains = [a - b for a, b in zip(without, with_state, strict=True)]
    recurrence = model.config.recurrence
    return {
        "kind": "horizon",
        **provenance(device),
        "settings": {"batch_size": settings.batch_size, "bf16": settings.bf16},
        "model": name,
        "window": recurrence.window,
        "overlap": recurrence.overlap,
        "data": documents.about(),
        "depths": [{"windows": depth, "nats": nats[depth], "gain": nats[0] - nats[depth]} for depth in depths],
        "tokens": tokens,
        **_mean_gains(gains, recurrence.window, recurrence.overlap),
    }


def default_depths(recurrence: RecurrenceConfig, longest: int) -> tuple[int, ...]:
    """The depths that are measured unless others are given.

    Args:
        longest: tokens of the longest document.
    """
    if not recurrence.needs_history:
        return DEPTHS
    stride = recurrence.window - recurrence.overlap
    return DEPTHS + tuple(depth for depth in FAR_DEPTHS if recurrence.window + depth * stride < longest)


def _mean_gains(gains: list[np.ndarray], window: int, overlap: int) -> dict[str, list[dict[str, Any]]]:
    """Mean gain by position among the tokens that a window scores, and by window number. First windows are left out:
    they receive no state.

    Args:
        gains: of each document, [N] for its N tokens.
    """
    positions, numbers, values = [], [], []
    for gain in gains:
        for number, span in enumerate(windows.schedule(len(gain), window, overlap)):
            if number:
                values.append(gain[span.score_from : span.score_to])
                positions.append(np.arange(span.score_to - span.score_from))
                numbers.append(np.full(span.score_to - span.score_from, number))
    if not values:
        raise ValueError(f"no document is longer than a window of {window} tokens: no state is ever used.")
    all_positions, all_numbers, all_gains = (np.concatenate(parts) for parts in (positions, numbers, values))
    step = max((window - overlap) // _POSITION_BINS, 1)
    return {
        "positions": _bin_means(all_positions, all_gains, range(0, window - overlap + step, step)),
        "windows": _bin_means(all_numbers, all_gains, _WINDOW_BINS),
    }


def _bin_means(x: np.ndarray, gains: np.ndarray, edges: Iterable[int]) -> list[dict[str, Any]]:
    """Mean gain in each bin [from, to) of x; empty bins are left out."""
    means = []
    for start, stop in pairwise(edges):
        inside = gains[(x >= start) & (x < stop)]
        if len(inside):
            means.append({"from": start, "to": stop, "gain": float(inside.mean()), "tokens": len(inside)})
    return means


def markdown(result: dict[str, Any]) -> str:
    """A table of gains by depth."""
    name, split = (escape_markdown(result["data"][key]) for key in ("name", "split"))
    data = f"{name}, {split}, {result['tokens']:,} tokens"
    rows = [[f"{depth['windows']}", f"{depth['nats']:.4f}", f"{depth['gain']:.4f}"] for depth in result["depths"]]
    table = markdown_table(["windows back", "nats per token", "gain"], rows, text_columns=0)
    return f"{escape_markdown(result['model'])} on {data}, windows of {result['window']}:\n\n{table}"


def write(results: list[dict[str, Any]], folder: Path) -> None:
    """Write horizon.json and, if matplotlib is installed, horizon.png. Results of other models in the file are kept."""
    path = folder / "horizon.json"
    earlier = read_earlier(folder)
    folder.mkdir(parents=True, exist_ok=True)
    replaced = {_model_and_data(result) for result in results}
    results = [*(result for result in earlier if _model_and_data(result) not in replaced), *results]
    write_json(path, results)
    with skip_without_matplotlib(folder / "horizon.png"):
        draw(results, folder / "horizon.png")


_PANELS = {"depths": "windows", "positions": "from", "windows": "from"}  # what each panel shows, and its x axis


def read_earlier(folder: Path) -> list[dict[str, Any]]:
    """The results in horizon.json; none if there is no such file."""
    path, remedy = folder / "horizon.json", "Move it away, or use another --out."
    if not path.exists():
        return []
    results = read_json(path, remedy)
    if not isinstance(results, list) or not all(isinstance(one, dict) and _can_be_drawn(one) for one in results):
        raise ValueError(f"{path} is damaged: it is not a list of results of `carryforward horizon`. {remedy}")
    return results


def _can_be_drawn(result: dict[str, Any]) -> bool:
    try:
        points = [(point[x], point["gain"]) for panel, x in _PANELS.items() for point in result[panel]]
    except (KeyError, TypeError):
        return False
    numbers = [number for point in points for number in point]
    return isinstance(result.get("model"), str) and all(type(number) in (int, float) for number in numbers)


def _model_and_data(result: dict[str, Any]) -> tuple[str, str]:
    return result["model"], json.dumps(result.get("data"), sort_keys=True)


def draw(results: list[dict[str, Any]], path: Path, colours: Sequence[str] = COLOURS) -> None:
    """Draw gains in three panels: by depth, by position in the window and by window number; one line per model."""
    figure, (by_depth, by_position, by_number) = new_figure(3)
    for result, colour in zip(results, cycle(colours), strict=False):
        style = {"color": colour, "marker": "o", "markersize": 4, "linewidth": 1.8, "label": result["model"]}
        for axes, (points, x) in zip((by_depth, by_position, by_number), _PANELS.items(), strict=True):
            axes.plot([point[x] for point in result[points]], [point["gain"] for point in result[points]], **style)
    titles = {
        by_depth: "windows that the state comes from",
        by_position: "position in the window",
        by_number: "number of the window",
    }
    for axes, title in titles.items():
        style_axes(axes, f"Gain against {title}", title, "gain in nats per token")
        axes.axhline(0, color="#454545", linewidth=0.8)
    by_number.set_xscale("log")
    by_depth.set_xscale("symlog", base=2, linthresh=1)  # depths are 0 and, as a rule, powers of two
    by_depth.set_xlim(left=-0.2)
    for axes, points, x in ((by_depth, "depths", "windows"), (by_number, "windows", "from")):  # ticks at whole windows
        ticks = sorted({point[x] for result in results for point in result[points]})
        axes.set_xticks(ticks, map(str, ticks))
        axes.set_xticks([], minor=True)
    by_depth.legend(fontsize=8.5, edgecolor="none")
    save_figure(figure, path)
