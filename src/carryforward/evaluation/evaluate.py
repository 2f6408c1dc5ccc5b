# SPDX-License-Identifier: Apache-2.0
"""`carryforward evaluate`: the perplexity of a causal model, the loss of a masked language model, or the accuracy of a
classifier, one row per overlap, with and without the state.

The result is plain JSON, described in `report`. What depends on the task is in `measures`.
"""

import dataclasses
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .. import windows
from ..backbones.architectures import architecture_of, is_supported, positions_of
from ..config import RecurrentModelConfig
from ..data.corpora import default_split
from ..engine.block_size import block_tokens
from ..engine.graph_cache import FastPath
from ..models import argument_checks
from ..models.base import RecurrentPreTrainedModel
from ..models.loading import Loaded, check_window, usable_device
from ..presets import MAX_DEFAULT_WINDOW, PAPER_WINDOW
from ..settings.commands import EvaluateSettings
from ..utils.files import result_stem, write_text
from ..utils.progress import ProgressBar
from ..utils.provenance import provenance
from .flops import flops_per_token
from .measures import measure_of
from .perplexity import check_positions


def evaluate(
    name: str, settings: EvaluateSettings, *, device: str | None = None, fast_path: FastPath = "auto", seed: int = 0,
    out: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure a model at each overlap, with FLOPs and, for a recurrent model, without the state.

    Args:
        fast_path: how windows are run on a GPU; "compiled" pays off for millions of tokens.
        seed: written to the result; the evaluation itself is deterministic.
        out: a folder for predictions of classifiers. The result itself is not written.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("evaluate runs in one process: start it without torchrun.")
    device = usable_device(device)
    measure = measure_of(name, settings)
    split = default_split(settings.data, "test") if settings.split is None else settings.split
    torch.manual_seed(seed)
    loaded = measure.load(name)
    window, trained_overlap = _window_and_overlap(name, loaded.model.config, loaded.run, settings.window)
    documents = measure.load_documents(split, loaded)
    model = measure.wrap_plain(loaded, window).to(device)  # type: ignore[arg-type]
    if isinstance(model, RecurrentPreTrainedModel):
        model.fast_path = fast_path
    overlaps = settings.overlap or (trained_overlap or 0,)
    runs = [(overlap, loaded.recurrent) for overlap in overlaps]
    if loaded.recurrent and settings.control:
        runs += [(overlap, False) for overlap in overlaps]
    rows, predictions = [], []
    with ProgressBar(f"evaluating {name}", len(runs) * measure.count(documents), "tokens") as bar:
        for overlap, use_state in runs:
            begun = time.perf_counter()
            with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=settings.bf16):
                score, lines = measure.score(
                    model, documents, overlap=overlap, window=window, use_state=use_state,
                    batch_size=settings.batch_size, progress=bar.advance,
                )  # fmt: skip
            _check_finite(score, name, overlap)
            rows.append({
                "overlap": overlap,
                "use_state": use_state,
                "untrained_overlap": loaded.recurrent and overlap != trained_overlap,
                **score,
                "flops": _flops(model, overlap, use_state),
                "seconds": time.perf_counter() - begun,
            })  # fmt: skip
            predictions.append(lines)
    result = {
        "kind": "evaluation",
        "task": measure.task,
        **provenance(device),
        "seed": seed,
        "settings": {
            **{field: getattr(settings, field) for field in ("batch_size", "bf16", "reset_every")},
            "block_tokens": block_tokens(model) if isinstance(model, RecurrentPreTrainedModel) else None,
        },
        "model": _describe_model(loaded, window, trained_overlap),
        "data": measure.about(documents),
        "rows": rows,
    }
    if out is not None:
        _write_predictions(result, predictions, out)
    return result


def check(name: str, settings: EvaluateSettings) -> None:
    """Raise ValueError if the model cannot be evaluated with these settings. Reads only the config, so that several
    models can be checked before the first is scored."""
    config, run = measure_of(name, settings).describe(name)
    window, _ = _window_and_overlap(name, config, run, settings.window)
    for overlap in settings.overlap or ():
        if isinstance(config, RecurrentModelConfig):
            argument_checks.check_overlap(config, overlap)
        else:
            windows.check(window, overlap)


def _write_predictions(result: dict[str, Any], predictions: list[list[str]], folder: Path) -> None:
    """Write the predictions of each row, where there are any, to a file of JSON lines."""
    for row, lines in zip(result["rows"], predictions, strict=True):
        if lines:
            folder.mkdir(parents=True, exist_ok=True)
            parts = result["model"]["name"], result["data"]["name"], result["data"]["split"]
            arm = f"overlap-{row['overlap']}" + "-without-state" * (
                result["model"]["recurrent"] and not row["use_state"]
            )
            name = f"{result_stem(parts, (result['data'], result['settings']))}-{arm}-predictions.jsonl"
            write_text(folder / name, "".join(f"{line}\n" for line in lines))


def _check_finite(score: dict[str, Any], name: str, overlap: int) -> None:
    if not math.isfinite(score["nats"]):
        raise ArithmeticError(
            f"{name} gives no finite likelihoods at overlap {overlap}: its weights hold NaN or are far too large. "
            "Evaluate an earlier checkpoint, or train again with a smaller learning rate."
        )


def _flops(model: PreTrainedModel, overlap: int, use_state: bool) -> dict[str, float | None]:
    if not isinstance(model, RecurrentPreTrainedModel):  # a plain model of a type that is not supported
        return {"base": None, "recurrence": None, "vocabulary": None}
    return dataclasses.asdict(flops_per_token(model.config, overlap=overlap, use_state=use_state))


def _window_and_overlap(
    name: str, config: PreTrainedConfig, run: dict[str, Any] | None, window: int | None
) -> tuple[int, int | None]:
    """The window to read with, and the overlap that a recurrent model was trained at (None for a plain model)."""
    if isinstance(config, RecurrentModelConfig):
        recurrence = config.recurrence
        check_window(name, config, window)
        return recurrence.window, recurrence.overlap
    if window is None and run is not None:
        window = run.get("circumstances", {}).get("window") or run["settings"].get("window") or PAPER_WINDOW
    positions = architecture_of(config).max_positions(config) if is_supported(config) else positions_of(config)
    if window is None and positions is not None and positions <= MAX_DEFAULT_WINDOW:
        window = positions
    if window is None:
        raise ValueError(f"{name} is a plain model: say with --window how many tokens it reads at once.")
    check_positions(config, window)
    return window, None


def _describe_model(loaded: Loaded, window: int, trained_overlap: int | None) -> dict[str, Any]:
    recurrence = loaded.model.config.recurrence if loaded.recurrent else None
    return {
        "name": loaded.name,
        "base": loaded.run["settings"].get("model") if loaded.run else loaded.name,
        "recurrent": loaded.recurrent,
        "parameters": loaded.model.num_parameters(),
        "trained_overlap": trained_overlap,
        "trained_tokens": loaded.run.get("tokens") if loaded.run else None,
        "window": window,
        "recurrence": recurrence.to_dict() if recurrence else None,
    }
