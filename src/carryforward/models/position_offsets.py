# SPDX-License-Identifier: Apache-2.0
"""Position offsets: the average contribution of each learned position to keys and values.

If positions are learned vectors, a key encodes the position of its token. Carried to the next window, it must encode a
position further back. To a good approximation a layer's keys and values are a sum of what the token and what its
position contribute. The mean over many texts, position by position, shows the latter: keys and values are moved from
one position to another by the difference of two means.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer
from transformers.utils import logging

from ..backbones import attention
from ..backbones.hooks import HookContext
from ..backbones.modes import eval_mode
from ..data.documents import load_documents
from ..data.tokenization import check_tokenizer, token_array
from ..memories.kv import KVMemoryConfig
from ..memories.kv_memory import KVMemory
from ..settings.recurrence import PYTHON_DOCS
from ..utils.checks import check_callable, check_count
from ..utils.peft import get_recurrent_model
from ..utils.progress import ProgressBar, ProgressCallback
from . import argument_checks
from .base import RecurrentPreTrainedModel

logger = logging.get_logger(__name__)

ROWS = 128  # stretches of text: more do not improve what is read
MIN_ROWS = 16  # with fewer, carried keys and values are read badly
_BATCH = 8


def needs_position_offsets(model: RecurrentPreTrainedModel) -> bool:
    """Whether keys and values are carried, positions are learned, and their offsets were never measured or trained."""
    return not model.memory.ready


def built_in_documents(model: RecurrentPreTrainedModel, tokenizer: Any = None) -> Sequence[Any]:
    """Token ids of the built-in text, with a model's own tokenizer: the one given, or the one saved beside it."""
    name = model.base.name_or_path
    try:
        if tokenizer is None and name:
            tokenizer = AutoTokenizer.from_pretrained(name)
            check_tokenizer(tokenizer, model._vocabulary)  # of a folder without one, transformers makes an empty one
    except (OSError, ValueError):
        tokenizer = None
    if tokenizer is None:
        raise ValueError(
            f"{model.config.base_config.model_type} has learned positions: carried keys and values can be read only "
            "after measuring position offsets on some text. Give documents=... (texts or token ids) or tokenizer=..., "
            "or use memory='vector'."
        )
    logger.warning(
        "Position offsets are measured on the built-in text, Python's documentation in English. For other languages or "
        "domains give documents=..."
    )
    return load_documents(PYTHON_DOCS, "train", tokenizer)


@torch.no_grad()
def measure_position_offsets(
    model: RecurrentPreTrainedModel,
    documents: Sequence[Any],
    *,
    rows: int = ROWS,
    progress: ProgressCallback | None = None,
) -> None:
    """Measure the position offsets of a model that carries keys and values and has learned positions.

    No weight of the base model changes. Models with rotary positions need no offsets and are left as they are.

    Args:
        documents: token ids of texts, without special tokens, in the language the model is to read.
        rows: how many stretches of them are read.
        progress: called with the rows done and all rows; by default a progress bar on a terminal.
    """
    model = get_recurrent_model(model)
    if not isinstance(model, RecurrentPreTrainedModel):
        raise ValueError(f"model is a {type(model).__name__}: add recurrence first (add_recurrence(model)).")
    check_count("rows", rows)
    check_callable("progress", progress, optional=True)
    memory = model.memory.get(KVMemoryConfig.kind)
    if not isinstance(memory, KVMemory) or memory.position_offsets is None:
        return
    attention.use_wrapped_attention(model.backbone.config)
    prefix = model.config.recurrence.prefix
    texts = _stretches(documents, memory.position_offsets.shape[-2] - len(prefix), rows)
    argument_checks.check_vocabulary(torch.from_numpy(texts), None, model._vocabulary, "documents")
    if len(texts) < min(rows, MIN_ROWS):
        logger.warning(
            "Position offsets are measured on only %d stretches of %d tokens: carried keys and values will be read "
            "badly. Give text for %d.", len(texts), texts.shape[1], ROWS,
        )  # fmt: skip
    total = torch.zeros(memory.position_offsets.shape, dtype=torch.float64)  # on the CPU: some devices lack float64
    bar = ProgressBar("measuring position offsets", len(texts), "rows", library=True, callback=progress)
    with eval_mode(model), bar:
        for begin in range(0, len(texts), _BATCH):
            batch = torch.from_numpy(texts[begin : begin + _BATCH]).to(model.device)
            front = torch.tensor(prefix, dtype=torch.long, device=batch.device).expand(len(batch), -1)
            context = HookContext()
            context.record_kv = True
            model.backbone(input_ids=torch.cat([front, batch], dim=1), hook_context=context, return_dict=True)
            for layer, pair in enumerate(context.take_window_kv()):
                for i, tensor in enumerate(pair):
                    total[layer, i] += tensor.sum(0, dtype=torch.float32).cpu()
            bar.update(begin + len(batch))
    memory.position_offsets.copy_(total / len(texts))


def _stretches(documents: Sequence[Any], length: int, rows: int) -> np.ndarray:
    """Rows of `length` tokens, from the middle of documents all over the corpus, joined where they are short."""
    try:
        count = min(len(documents), rows)
        chosen = [token_array(documents[i * len(documents) // count], "documents") for i in range(count)]
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError("documents must be a list of token ids for each text, as `tokenise` returns.") from error
    share = -(-rows * length // max(count, 1))
    middles = [text[max((len(text) - share) // 2, 0) :][:share] for text in chosen]
    joined = np.concatenate([np.empty(0, np.int64), *middles])
    if len(joined) < length:
        raise ValueError(
            f"documents have {len(joined):,} tokens. At least {length:,} are needed, those of a window and of what is "
            f"carried; {rows * length:,} are better. Give more text."
        )
    return joined[: len(joined) // length * length].reshape(-1, length)[:rows]
