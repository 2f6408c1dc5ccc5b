# SPDX-License-Identifier: Apache-2.0
"""`carryforward evaluate`: the perplexity of a model on a corpus, one row per overlap.

The result is plain JSON, described in `report`.
"""

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .. import windows
from ..backbones.architectures import is_supported, positions_of
from ..config import RecurrentModelConfig
from ..data.corpora import default_split
from ..data.documents import Documents, load_documents
from ..distributed.journal import Journal
from ..distributed.processes import ALONE, Processes
from ..distributed.work_map import WorkMap
from ..engine.block_size import block_tokens
from ..engine.graph_cache import FastPath
from ..memories.vector import VectorMemoryConfig
from ..models import argument_checks
from ..models.add_recurrence import add_recurrence
from ..models.base import RecurrentPreTrainedModel
from ..models.loading import Loaded, check_window, describe_causal, load_causal, usable_device
from ..models.model_files import version_of
from ..presets import MAX_DEFAULT_WINDOW, PAPER_WINDOW
from ..settings.commands import EvaluateSettings
from ..utils.provenance import provenance
from . import report
from .flops import flops_per_token
from .perplexity import Perplexity, check_positions, perplexity


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
    """Measure the perplexity of a model at each overlap, with FLOPs and, for a recurrent model, without the state.

    Args:
        fast_path: how windows are run on a GPU; "compiled" pays off for millions of tokens.
        seed: written to the result; the evaluation itself is deterministic.
        processes: of the command; they divide the documents, and each gets the whole result.
        out: a folder for the result, its table and figure. If the work is stopped, the same call continues it.
    """
    device = usable_device(processes.device(device))
    split = default_split(settings.data, "test") if settings.split is None else settings.split
    torch.manual_seed(seed)
    loaded = load_causal(name)
    window, trained_overlap = window_and_overlap(name, loaded.model.config, loaded.run, settings.window)
    documents = processes.first_alone(lambda: _documents(settings, split, loaded.tokenizer))
    model = wrap_plain(loaded.model, window).to(device)  # type: ignore[arg-type]
    if isinstance(model, RecurrentPreTrainedModel):
        model.fast_path = fast_path
    overlaps = settings.overlap or (trained_overlap or 0,)
    runs = [(overlap, loaded.recurrent) for overlap in overlaps]
    if loaded.recurrent and settings.control:
        runs += [(overlap, False) for overlap in overlaps]
    targets = int((documents.lengths - 1).clip(min=0).sum())
    used = {
        **{field: getattr(settings, field) for field in ("batch_size", "bf16", "reset_every", "bos")},
        "block_tokens": block_tokens(model) if isinstance(model, RecurrentPreTrainedModel) else None,
    }
    identity = [name, version_of(name), used, window, documents.key, device.partition(":")[0], torch.__version__]
    journal = None if out is None else Journal(out, identity)
    rows = []
    with processes.progress_bar(f"evaluating {name}", len(runs) * targets, "tokens") as progress:
        for overlap, use_state in runs:
            begun = time.perf_counter()
            work_map = WorkMap(processes, journal, f"overlap {overlap}, use_state {use_state}")
            with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=settings.bf16):
                score = perplexity(
                    model, documents, overlap=overlap, window=window, use_state=use_state,
                    reset_every=settings.reset_every, batch_size=settings.batch_size, progress=progress,
                    work_map=work_map,
                )  # fmt: skip
            _check_finite(score, name, overlap)
            rows.append({
                "overlap": overlap,
                "use_state": use_state,
                "untrained_overlap": loaded.recurrent and overlap != trained_overlap,
                **dataclasses.asdict(score),
                **_ratios(score),
                "flops": _flops(loaded, window, overlap, use_state),
                "seconds": time.perf_counter() - begun,
            })  # fmt: skip
    result = {
        "kind": "evaluation",
        **provenance(device),
        "seed": seed,
        "processes": processes.count,
        "settings": used,
        "model": _describe_model(loaded, window, trained_overlap),
        "data": documents.about(),
        "rows": rows,
    }
    if journal is not None:
        processes.first(lambda: report.save([result], journal.out))
        processes.first(journal.delete)
    return result


def check(name: str, settings: EvaluateSettings) -> None:
    """Raise ValueError if the model cannot be evaluated with these settings. Reads only the config, so that several
    models can be checked before the first is scored."""
    config, run = describe_causal(name)
    window, _ = window_and_overlap(name, config, run, settings.window)
    for overlap in settings.overlap or ():
        if isinstance(config, RecurrentModelConfig):
            argument_checks.check_overlap(config, overlap)
        else:
            windows.check(window, overlap)


def _documents(settings: EvaluateSettings, split: str, tokenizer: Any) -> Documents:
    checksums = None if settings.checksums is None else Path(settings.checksums)
    return load_documents(
        settings.data, split, tokenizer, text_field=settings.text_field, checksums=checksums,
        max_tokens=settings.max_document_tokens, bos=settings.bos, require_targets=True,
    )  # fmt: skip


def _check_finite(score: Perplexity, name: str, overlap: int) -> None:
    if not math.isfinite(score.nats):
        raise ArithmeticError(
            f"{name} gives no finite likelihoods at overlap {overlap}: its weights hold NaN or are far too large. "
            "Evaluate an earlier checkpoint, or train again with a smaller learning rate."
        )


def _flops(loaded: Loaded, window: int, overlap: int, use_state: bool) -> dict[str, float | None]:
    if not loaded.recurrent and not is_supported(loaded.model.config):
        return {"base": None, "recurrence": None, "vocabulary": None}
    return dataclasses.asdict(flops_per_token(loaded.model.config, window, overlap, use_state=use_state))


def _ratios(score: Perplexity) -> dict[str, float | None]:
    """Perplexities and bits per byte; None (null) where text was not counted, and for infinity, which JSON has not."""
    values = {name: getattr(score, name) for name in ("word_perplexity", "token_perplexity", "bits_per_byte")}
    return {name: value if value is not None and math.isfinite(value) else None for name, value in values.items()}


def wrap_plain(model: PreTrainedModel, window: int) -> PreTrainedModel:
    """Wrap a plain model of a supported type as a recurrent model, to run its windows on the same fast path. The state
    of the wrapper is never used."""
    if isinstance(model, RecurrentPreTrainedModel) or not is_supported(model.config):
        return model
    return add_recurrence(model, window=window, memory=VectorMemoryConfig(insert_at=1))


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
    positions = positions_of(config)
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
