# SPDX-License-Identifier: Apache-2.0
"""The job behind `carryforward horizon`: how far back a state helps, where in a window, and how deep in a document.

The result is plain JSON. Gains are nats per token: what the state's removal costs.

    {"kind": "horizon", "commit": "...", ..., "model": "runs/a", "window": 300, "overlap": 0, "data": {...},
     "depths": [{"windows": 0, "nats": 3.2, "gain": 0.0}, ...], "tokens": 90000,
     "positions": [{"from": 0, "to": 10, "gain": 0.3, "tokens": 3000}, ...], "windows": [...]}
"""

import json
from collections.abc import Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import windows
from ..data.corpora import open_corpus, usual_split
from ..data.documents import tokenise
from ..models.loading import load_causal, need_state, usable_device
from ..settings import HorizonSettings
from ..utils import console
from ..utils.files import write_json
from ..utils.markdown import markdown_table
from ..utils.plotting import COLOURS, dress, empty, left_out, save
from ..utils.provenance import provenance
from .token_losses import deep_windows, horizon, token_losses

DEPTHS = (0, 1, 2, 4, 8)
_POSITIONS = 30  # points of the figure
_WINDOWS = (1, 2, *(2**power + 1 for power in range(1, 31)))  # each stretch as long as all before it


def survey(name: str, settings: HorizonSettings, *, device: str | None = None) -> dict[str, Any]:
    """Measure a recurrent model's state on a corpus."""
    need_state(name)
    device = usable_device(device)
    loaded = load_causal(name)
    model: Any = loaded.model.to(device)  # type: ignore[arg-type]
    depths = tuple(sorted({0, *(settings.depth or DEPTHS)}))
    split = settings.split or usual_split(settings.data, "validation")
    corpus = open_corpus(settings.data, split, text_field=settings.text_field)
    documents = tokenise(corpus, loaded.tokenizer, max_tokens=settings.max_document_tokens)
    ends, stride = deep_windows(model, documents, depths)
    total = len(depths) * len(ends) * stride + 2 * int((documents.lengths - 1).clip(min=0).sum())
    with (
        console.Bar(f"measuring {name}", total, "tokens") as bar,
        torch.autocast(device.split(":")[0], torch.bfloat16, enabled=settings.bf16),
    ):
        shared: dict[str, Any] = {"batch_size": settings.batch_size, "progress": bar.advance}
        nats, tokens = horizon(model, documents, depths, **shared)
        with_state, without = (token_losses(model, documents, use_state=use, **shared) for use in (True, False))
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
        **_where(gains, recurrence.window, recurrence.overlap),
    }  # fmt: skip


def _where(gains: list[np.ndarray], window: int, overlap: int) -> dict[str, list[dict[str, Any]]]:
    """Gains by position among the tokens that a window adds, and by its number in the document; the first has none."""
    positions, numbers, values = [], [], []
    for gain in gains:
        for number, one in enumerate(windows.schedule(len(gain), window, overlap)):
            if number:
                values.append(gain[one.score_from : one.score_to])
                positions.append(np.arange(one.score_to - one.score_from))
                numbers.append(np.full(one.score_to - one.score_from, number))
    if not values:
        raise ValueError(f"no document is longer than a window of {window} tokens: no state is ever used.")
    where, which, found = (np.concatenate(parts) for parts in (positions, numbers, values))
    step = max((window - overlap) // _POSITIONS, 1)
    return {
        "positions": _means(where, found, range(0, window - overlap + step, step)),
        "windows": _means(which, found, _WINDOWS),
    }


def _means(where: np.ndarray, values: np.ndarray, borders: Any) -> list[dict[str, Any]]:
    means = []
    for start, stop in pairwise(borders):
        inside = values[(where >= start) & (where < stop)]
        if len(inside):
            means.append({"from": start, "to": stop, "gain": float(inside.mean()), "tokens": len(inside)})
    return means


def markdown(result: dict[str, Any]) -> str:
    """Gains by depth, as a table."""
    where = f"{result['data']['name']}, {result['data']['split']}, {result['tokens']:,} tokens"
    rows = [[f"{one['windows']}", f"{one['nats']:.4f}", f"{one['gain']:.4f}"] for one in result["depths"]]
    table = markdown_table(["windows back", "nats per token", "gain"], rows, words=0)
    return f"{result['model']} on {where}, windows of {result['window']}:\n\n{table}"


def write(results: list[dict[str, Any]], folder: Path) -> None:
    """Write horizon.json and, where there is matplotlib, horizon.png; other models that are there already stay."""
    known = folder / "horizon.json"
    before = json.loads(known.read_text()) if known.exists() else []
    measured = {_about(one) for one in results}
    results = [*(one for one in before if _about(one) not in measured), *results]
    write_json(folder / "horizon.json", results)
    with left_out(folder / "horizon.png"):
        draw(results, folder / "horizon.png")


def _about(result: dict[str, Any]) -> tuple[str, str]:
    return result["model"], json.dumps(result.get("data"), sort_keys=True)


def draw(results: list[dict[str, Any]], path: Path, colours: Sequence[str] = COLOURS) -> None:
    """Three panels: gain against how far back the state reaches, position in the window, and window number."""
    drawn, (far, place, number) = empty(3)
    for result, colour in zip(results, cycle(colours), strict=False):
        style = {"color": colour, "marker": "o", "markersize": 4, "linewidth": 1.8, "label": result["model"]}
        far.plot([one["windows"] for one in result["depths"]], [one["gain"] for one in result["depths"]], **style)
        for axes, points in ((place, result["positions"]), (number, result["windows"])):
            axes.plot([one["from"] for one in points], [one["gain"] for one in points], **style)
    titles = {far: "windows that the state comes from", place: "position in the window", number: "number of the window"}
    for axes, title in titles.items():
        dress(axes, f"Gain against {title}", title, "gain in nats per token")
        axes.axhline(0, color="#454545", linewidth=0.8)
    number.set_xscale("log")
    for axes, what, name in ((far, "depths", "windows"), (number, "windows", "from")):  # whole windows only
        ticks = sorted({one[name] for result in results for one in result[what]})
        axes.set_xticks(ticks, map(str, ticks))
        axes.set_xticks([], minor=True)
    far.legend(fontsize=8.5, edgecolor="none")
    save(drawn, path)
