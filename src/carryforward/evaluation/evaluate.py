# SPDX-License-Identifier: Apache-2.0
"""The job behind `carryforward evaluate`: a model and a corpus in, a result with one row per overlap out.

The result is plain JSON; `report` says what is in it.
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
from ..backbones.architectures import is_supported, positions_of
from ..config import RecurrentModelConfig
from ..data.corpora import open_corpus, usual_split
from ..data.documents import Documents, tokenise
from ..engine.graph_cache import FastPath
from ..models import argument_checks
from ..models.add_recurrence import add_recurrence
from ..models.base import RecurrentPreTrainedModel
from ..models.loading import Loaded, check_window, describe_causal, load_causal, usable_device
from ..settings import EvaluateSettings
from ..utils import console
from ..utils.provenance import provenance
from .flops import flops_per_token
from .perplexity import Perplexity, check_positions, perplexity

_AT_ONCE = 1024  # a plain model with more positions must be told how many to use


def evaluate(
    name: str, settings: EvaluateSettings, *, device: str | None = None, fast_path: FastPath = "auto", seed: int = 0
) -> dict[str, Any]:
    """Perplexity of a model at each overlap, beside what it costs and, for a recurrent one, what the state is worth.

    Args:
        fast_path: how windows are run on a GPU; "compiled" pays for millions of tokens.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("evaluate runs in one process: start it without torchrun.")
    device = usable_device(device)
    split = usual_split(settings.data, "test") if settings.split is None else settings.split
    torch.manual_seed(seed)  # nothing here is random; said in the result all the same
    loaded = load_causal(name)
    window, trained = _reading(name, loaded.model.config, loaded.run, settings.window)
    documents = _documents(settings, split, loaded.tokenizer)
    targets = int((documents.lengths - 1).clip(min=0).sum())
    reader = _reader(loaded, window).to(device)  # type: ignore[arg-type]
    if isinstance(reader, RecurrentPreTrainedModel):
        reader.fast_path = fast_path
    overlaps = settings.overlap or (trained or 0,)
    runs = [(overlap, True) for overlap in overlaps]
    if loaded.recurrent and settings.control:
        runs += [(overlap, False) for overlap in overlaps]
    rows = []
    with console.Bar(f"evaluating {name}", len(runs) * targets, "tokens") as bar:
        for overlap, use_state in runs:
            begun = time.perf_counter()
            with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=settings.bf16):
                score = perplexity(
                    reader, documents, overlap=overlap, window=window, use_state=use_state and loaded.recurrent,
                    reset_every=settings.reset_every, batch_size=settings.batch_size, progress=bar.advance,
                )  # fmt: skip
            if not math.isfinite(score.nats):
                raise ArithmeticError(
                    f"{name} gives no finite likelihoods at overlap {overlap}: its weights hold NaN or are far too "
                    "large. Evaluate an earlier checkpoint, or train again with a smaller learning rate."
                )
            told = {"overlap": overlap, "use_state": use_state and loaded.recurrent,
                    "untrained_overlap": loaded.recurrent and overlap != trained}  # fmt: skip
            cost = {"flops": _flops(loaded, window, overlap, use_state), "seconds": time.perf_counter() - begun}
            rows.append({**told, **dataclasses.asdict(score), **_ratios(score), **cost})
    return {
        "kind": "evaluation",
        **provenance(device),
        "seed": seed,
        "settings": {one: getattr(settings, one) for one in ("batch_size", "bf16", "reset_every")},
        "model": _about_model(loaded, window, trained),
        "data": documents.about(),
        "rows": rows,
    }


def check(name: str, settings: EvaluateSettings) -> None:
    """Refuse a model that cannot be evaluated so, by its config alone: before others are scored for hours."""
    config, run = describe_causal(name)
    window, _ = _reading(name, config, run, settings.window)
    for overlap in settings.overlap or ():
        if isinstance(config, RecurrentModelConfig):
            argument_checks.overlap(config, overlap)
        else:
            windows.check(window, overlap)


def _documents(settings: EvaluateSettings, split: str, tokenizer: Any) -> Documents:
    checksums = None if settings.checksums is None else Path(settings.checksums)
    corpus = open_corpus(settings.data, split, text_field=settings.text_field, checksums=checksums)
    documents = tokenise(corpus, tokenizer, max_tokens=settings.max_document_tokens)
    if not (documents.lengths > 1).any():
        raise ValueError(
            f"{settings.data}, split {split!r}: no document has a second token to predict. Give longer documents."
        )
    return documents


def _flops(loaded: Loaded, window: int, overlap: int, use_state: bool) -> dict[str, float | None]:
    if not loaded.recurrent and not is_supported(loaded.model.config):
        return {"base": None, "recurrence": None, "vocabulary": None}
    return dataclasses.asdict(flops_per_token(loaded.model.config, window, overlap, use_state=use_state))


def _ratios(score: Perplexity) -> dict[str, float | None]:
    """JSON knows neither infinity nor NaN: what has no number is null."""
    names = ("word_perplexity", "token_perplexity", "bits_per_byte")
    return {name: value if math.isfinite(value := getattr(score, name)) else None for name in names}


def _reader(loaded: Loaded, window: int) -> PreTrainedModel:
    """A plain model inside a recurrent one, whose state is never used: its windows are then run as fast as those of
    others. As it is where its type is not supported."""
    if loaded.recurrent or not is_supported(loaded.model.config):
        return loaded.model
    return add_recurrence(loaded.model, window=window, insert_at=1)


def _reading(
    name: str, config: PreTrainedConfig, run: dict[str, Any] | None, window: int | None
) -> tuple[int, int | None]:
    """The window, and the overlap a recurrent model was trained at."""
    if isinstance(config, RecurrentModelConfig):
        recurrence = config.recurrence
        check_window(name, config, window)
        return recurrence.window, recurrence.overlap
    if window is None and run is not None:
        window = run.get("circumstances", {}).get("window") or run["settings"].get("window") or 300
    positions = positions_of(config)
    if window is None and positions is not None and positions <= _AT_ONCE:
        window = positions
    if window is None:
        raise ValueError(f"{name} is a plain model: say with --window how many tokens it reads at once.")
    check_positions(config, window)
    return window, None


def _about_model(loaded: Loaded, window: int, trained: int | None) -> dict[str, Any]:
    recurrence = loaded.model.config.recurrence if loaded.recurrent else None
    return {
        "name": loaded.name,
        "base": loaded.run["settings"].get("model") if loaded.run else loaded.name,
        "recurrent": loaded.recurrent,
        "parameters": loaded.model.num_parameters(),
        "trained_overlap": trained,
        "trained_tokens": loaded.run.get("tokens") if loaded.run else None,
        "window": window,
        "recurrence": dataclasses.asdict(recurrence) if recurrence else None,
    }
