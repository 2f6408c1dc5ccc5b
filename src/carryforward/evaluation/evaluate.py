# SPDX-License-Identifier: Apache-2.0
"""`carryforward evaluate`: the perplexity of a causal model, the loss of a masked language model, or the accuracy of a
classifier, one row per overlap, with and without the state.

The result is plain JSON, described in `report`. What depends on the task is in `measures`.
"""

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .. import windows
from ..backbones.architectures import architecture_of, is_supported, positions_of
from ..config import RecurrentModelConfig
from ..data.corpora import default_split
from ..distributed.journal import Journal
from ..distributed.processes import ALONE, Processes
from ..distributed.work_map import WorkMap
from ..engine.block_size import block_tokens
from ..engine.graph_cache import FastPath
from ..memories.vector import VectorMemoryConfig
from ..models import argument_checks
from ..models.add_recurrence import add_recurrence
from ..models.base import RecurrentPreTrainedModel
from ..models.loading import Loaded, check_window, usable_device
from ..models.model_files import version_of
from ..presets import MAX_DEFAULT_WINDOW, PAPER_WINDOW
from ..settings.commands import EvaluateSettings
from ..utils.files import result_stem, write_text
from ..utils.provenance import provenance
from . import report
from .flops import flops_per_token
from .measures import measure_of
from .perplexity import check_positions


def evaluate(
    name: str,
    settings: EvaluateSettings,
    *,
    device: str | None = None,
    fast_path: FastPath = "auto",
    seed: int = 0,
    processes: Processes = ALONE,
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure a model at each overlap, with FLOPs and, for a recurrent model, without the state.

    Args:
        fast_path: how windows are run on a GPU; "compiled" pays off for millions of tokens.
        seed: written to the result; the evaluation itself is deterministic.
        processes: of the command; they divide the documents, and each gets the whole result.
        out: a folder for the result, its table and figure. If the work is stopped, the same call continues it.
    """
    device = usable_device(processes.device(device))
    measure = measure_of(name, settings)
    split = default_split(settings.data, "test") if settings.split is None else settings.split
    torch.manual_seed(seed)
    loaded = measure.load(name)
    window, trained_overlap = window_and_overlap(name, loaded.model.config, loaded.run, settings.window)
    documents = processes.first_alone(lambda: measure.load_documents(split, loaded))
    model = wrap_plain(loaded.model, window, loaded.tokenizer if measure.special_tokens else None)
    model.to(device)  # type: ignore[arg-type]
    if isinstance(model, RecurrentPreTrainedModel):
        model.fast_path = fast_path
    overlaps = settings.overlap or (trained_overlap or 0,)
    runs = [(overlap, loaded.recurrent) for overlap in overlaps]
    if loaded.recurrent and settings.control:
        runs += [(overlap, False) for overlap in overlaps]
    used = {
        **{field: getattr(settings, field) for field in ("batch_size", "bf16", "reset_every", "bos")},
        "block_tokens": block_tokens(model) if isinstance(model, RecurrentPreTrainedModel) else None,
    }
    data = measure.identity(documents)
    identity = [name, version_of(name), used, window, *data, device.partition(":")[0], torch.__version__]
    journal = None if out is None else Journal(out, identity)
    rows, predictions = [], []
    with processes.progress_bar(f"evaluating {name}", len(runs) * measure.count(documents), "tokens") as progress:
        for overlap, use_state in runs:
            begun = time.perf_counter()
            work_map = WorkMap(processes, journal, f"overlap {overlap}, use_state {use_state}")
            with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=settings.bf16):
                score, lines = measure.score(
                    model, documents, overlap=overlap, window=window, use_state=use_state,
                    batch_size=settings.batch_size, progress=progress, work_map=work_map,
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
        "processes": processes.count,
        "settings": used,
        "model": _describe_model(loaded, window, trained_overlap),
        "data": measure.about(documents),
        "rows": rows,
    }
    if journal is not None:
        processes.first(lambda: report.save([result], journal.out))
        processes.first(lambda: _write_predictions(result, predictions, journal.out))
        processes.first(journal.delete)
    return result


def check(name: str, settings: EvaluateSettings) -> None:
    """Raise ValueError if the model cannot be evaluated with these settings. Reads only the config, so that several
    models can be checked before the first is scored."""
    config, run = measure_of(name, settings).describe(name)
    window, _ = window_and_overlap(name, config, run, settings.window)
    for overlap in settings.overlap or ():
        if isinstance(config, RecurrentModelConfig):
            argument_checks.check_overlap(config, overlap)
        else:
            windows.check(window, overlap)


def _write_predictions(result: dict[str, Any], predictions: list[list[str]], folder: Path) -> None:
    """Write the predictions of each row, where there are any, to a file of JSON lines."""
    for row, lines in zip(result["rows"], predictions, strict=True):
        if lines:
            parts = result["model"]["name"], result["data"]["name"], result["data"]["split"]
            is_control = result["model"]["recurrent"] and not row["use_state"]
            arm = f"overlap-{row['overlap']}{'-without-state' * is_control}"
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


def wrap_plain(model: PreTrainedModel, window: int, tokenizer: Any = None) -> PreTrainedModel:
    """Wrap a plain model of a supported type as a recurrent model, to run its windows on the same fast path. The state
    of the wrapper is never used.

    Args:
        tokenizer: of an encoder, which puts special tokens around every window.
    """
    if isinstance(model, RecurrentPreTrainedModel) or not is_supported(model.config):
        return model
    return add_recurrence(model, window=window, memory=VectorMemoryConfig(insert_at=1), tokenizer=tokenizer)


def window_and_overlap(
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
