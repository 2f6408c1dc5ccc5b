# SPDX-License-Identifier: Apache-2.0
"""The job behind `carryforward evaluate`: a model and a corpus in, a result with one row per overlap out.

The result is plain JSON; `report` says what is in it.
"""

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch

from . import console
from .data.corpora import open_corpus
from .data.documents import Documents, tokenise
from .evaluation import perplexity
from .flops import flops_per_token
from .loading import Loaded, load_causal
from .provenance import provenance


def evaluate(
    name: str,
    data: str,
    *,
    split: str = "test",
    overlaps: tuple[int, ...] = (),
    window: int | None = None,
    control: bool = True,
    reset_every: int | None = None,
    text_field: str = "text",
    checksums: Path | None = None,
    max_document_tokens: int | None = None,
    batch_size: int = 8,
    bf16: bool = False,
    device: str | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Perplexity of a model at each overlap, beside what it costs and, for a recurrent one, what the state is worth.

    Args:
        overlaps: by default the one the model was trained at.
        window: for a plain model; by default the one it was trained with.
        control: score a recurrent model without its state as well.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)  # nothing here is random; said in the result all the same
    loaded = load_causal(name)
    window, trained = _reading(loaded, window)
    corpus = open_corpus(data, split, text_field=text_field, checksums=checksums)
    documents = tokenise(corpus, loaded.tokenizer, max_tokens=max_document_tokens)
    loaded.model.to(device)  # type: ignore[arg-type]
    overlaps = overlaps or (trained or 0,)
    runs = [(overlap, True) for overlap in overlaps]
    if loaded.recurrent and control:
        runs += [(overlap, False) for overlap in overlaps]
    rows = []
    total = len(runs) * int((documents.lengths - 1).clip(min=0).sum())
    with console.Bar(f"evaluating {name}", total, "tokens") as bar:
        for overlap, use_state in runs:
            begun = time.perf_counter()
            with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=bf16):
                score = perplexity(
                    loaded.model, documents, overlap=overlap, window=None if loaded.recurrent else window,
                    use_state=use_state, reset_every=reset_every, batch_size=batch_size, progress=bar.advance,
                )  # fmt: skip
            flops = flops_per_token(loaded.model.config, window, overlap, use_state=use_state)
            rows.append(
                {
                    "overlap": overlap,
                    "use_state": use_state and loaded.recurrent,
                    "untrained_overlap": loaded.recurrent and overlap != trained,
                    **dataclasses.asdict(score),
                    "word_perplexity": score.word_perplexity,
                    "token_perplexity": score.token_perplexity,
                    "bits_per_byte": score.bits_per_byte,
                    "flops": dataclasses.asdict(flops),
                    "seconds": time.perf_counter() - begun,
                }
            )
    settings = {"batch_size": batch_size, "bf16": bf16, "reset_every": reset_every}
    return {
        "kind": "evaluation",
        **provenance(device),
        "seed": seed,
        "settings": settings,
        "model": _about_model(loaded, window, trained),
        "data": _about_data(documents, max_document_tokens),
        "rows": rows,
    }


def _reading(loaded: Loaded, window: int | None) -> tuple[int, int | None]:
    """The window, and the overlap a recurrent model was trained at."""
    if loaded.recurrent:
        recurrence = loaded.model.config.recurrence
        if window not in (None, recurrence.window):
            raise ValueError(
                f"--window {window}: {loaded.name} reads {recurrence.window} tokens at once. Leave it out."
            )
        return recurrence.window, recurrence.overlap
    if window is None and loaded.run is not None:
        window = loaded.run["settings"]["window"] or 300
    if window is None:
        raise ValueError(f"{loaded.name} is a plain model: say with --window how many tokens it reads at once.")
    positions = getattr(loaded.model.config, "max_position_embeddings", None)
    if positions is not None and window > positions:
        raise ValueError(f"--window {window}: {loaded.name} has {positions} positions. Use {positions} or less.")
    return window, None


def _about_model(loaded: Loaded, window: int, trained: int | None) -> dict[str, Any]:
    recurrence = loaded.model.config.recurrence if loaded.recurrent else None
    return {
        "name": loaded.name,
        "base": loaded.run["settings"]["model"] if loaded.run else loaded.name,
        "recurrent": loaded.recurrent,
        "parameters": loaded.model.num_parameters(),
        "trained_overlap": trained,
        "trained_tokens": loaded.run.get("tokens") if loaded.run else None,
        "window": window,
        "recurrence": dataclasses.asdict(recurrence) if recurrence else None,
    }


def _about_data(documents: Documents, max_tokens: int | None) -> dict[str, Any]:
    return {
        "name": documents.name,
        "split": documents.split,
        "key": documents.key,
        "documents": len(documents),
        "tokens": int(documents.lengths.sum()),
        "words": int(documents.words.sum()),
        "bytes": int(documents.bytes.sum()),
        "line_ends": int(documents.line_ends.sum()),
        "max_tokens": max_tokens,
    }
