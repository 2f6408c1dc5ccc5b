# SPDX-License-Identifier: Apache-2.0
"""Contexts drawn from documents, and what a model writes after them (section 5.3 of the paper).

A context ends where a window does, so that all a recurrent model knows of it while it writes is its state. Its first
token is still chosen by the context's window, from all of it, and is the first of the window that is then written.
With the state removed that token is all the new window has. A plain model is given one token too, the context's last.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from ..backbones.architectures import positions_of
from ..models.base import eval_mode
from ..models.causal_lm import RecurrentForCausalLM
from ..utils.peft import unwrapped


def draw(documents: Sequence[Any], tokens: int, count: int, *, seed: int = 0) -> np.ndarray:
    """Where contexts begin, [count, 2]: a document and a token of it, no place twice.

    Every place of every document with so many tokens behind it is as likely as any other.
    """
    room = np.array([max(len(document) - tokens + 1, 0) for document in documents], dtype=np.int64)
    ends = np.cumsum(room)
    if not len(room) or ends[-1] < count:
        there = f"only {ends[-1]:,} places for one" if len(room) and ends[-1] else "no document that is so long"
        raise ValueError(
            f"{count:,} contexts of {tokens:,} tokens were asked for, and there is {there}. Give longer documents, or "
            "ask for fewer or shorter contexts."
        )
    drawn = np.random.default_rng(seed).choice(ends[-1], count, replace=False)
    which = np.searchsorted(ends, drawn, side="right")
    return np.stack([which, drawn - (ends - room)[which]], axis=1)


def read_contexts(documents: Sequence[Any], places: np.ndarray, tokens: int) -> np.ndarray:
    """The tokens of contexts, [count, tokens]."""
    return np.stack([np.asarray(documents[i][start : start + tokens]) for i, start in places]).astype(np.int64)


def check_context(model: RecurrentForCausalLM, tokens: int) -> None:
    """A context must end with a window, or the model would see it while it writes."""
    recurrence = model.config.recurrence
    stride = recurrence.window - recurrence.overlap
    if tokens < recurrence.window or (tokens - recurrence.window) % stride:
        fitting = ", ".join(f"{recurrence.window + i * stride}" for i in range(3))
        raise ValueError(f"context_tokens={tokens}: a context must end where a window does: {fitting}, ...")


def check_room(model: PreTrainedModel, tokens: int, new_tokens: int) -> None:
    """A plain model must have positions for what it reads and writes."""
    positions = positions_of(model.config)
    if positions is not None and tokens + new_tokens > positions:
        raise ValueError(
            f"new_tokens={new_tokens}: behind {tokens} the plain model has {positions - tokens} positions left. Write "
            "fewer."
        )


def continue_greedily(
    model: PreTrainedModel, contexts: np.ndarray, new_tokens: int, *, use_state: bool = True
) -> np.ndarray:
    """What a model writes after contexts of equal length, side by side: [count, new_tokens], always the likeliest.

    The end of a text is never written, as if it were no token: all continuations are of the same length.

    Args:
        model: a recurrent causal model, or any of Hugging Face's.
        contexts: token ids, [count, tokens]; a recurrent model's must end where a window does.
        use_state: False removes a recurrent model's state.
    """
    model = unwrapped(model)
    recurrent = isinstance(model, RecurrentForCausalLM)
    if recurrent:
        check_context(model, contexts.shape[1])  # type: ignore[arg-type]
    else:
        check_room(model, contexts.shape[1], new_tokens)
    ids = torch.from_numpy(contexts).to(model.device)
    writing: Any = model
    own = writing.generation_config
    how = GenerationConfig(  # nothing of the model's own, which may forbid or force tokens, but what ends a text
        do_sample=False, num_beams=1, min_new_tokens=new_tokens, max_new_tokens=new_tokens, pad_token_id=0,
        eos_token_id=own.eos_token_id,
    )  # fmt: skip
    options = {"use_state": use_state} if recurrent else {}
    writing.generation_config = how  # given to the call, it would be filled up from the model's
    try:
        with eval_mode(model), torch.inference_mode():
            written = writing.generate(ids, attention_mask=torch.ones_like(ids), **options)
    finally:
        writing.generation_config = own
    return written[:, contexts.shape[1] :].cpu().numpy()
