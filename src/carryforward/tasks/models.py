# SPDX-License-Identifier: Apache-2.0
"""Small models from scratch, for tasks with symbols of their own."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig, PreTrainedModel

from ..memories.kinds import MemoryChoice
from ..models.add_recurrence import add_recurrence
from ..models.causal_lm import RecurrentForCausalLM
from ..settings.memory_tasks import BACKBONES
from ..utils.checks import check_count
from .base import TRAIN, Task, sample_seed

LAYERS, WIDTH, HEADS = 4, 128, 4
_MAX_POSITIONS = 4096  # of rotary models, which have no table of them


def make_model(
    task: Task,
    memory: MemoryChoice | None = None,
    *,
    backbone: str = "llama",
    layers: int = LAYERS,
    width: int = WIDTH,
    heads: int = HEADS,
    seed: int = 0,
    **recurrence: Any,
) -> RecurrentForCausalLM:
    """A new recurrent model with the vocabulary and the window of a task.

    Args:
        memory: what passes from a window to the next, as for `add_recurrence`.
        backbone: the architecture: "llama" or "gpt2".
        seed: of its weights.
        **recurrence: further arguments of `add_recurrence`, such as `reach` and `bptt_windows`.
    """
    if task.vocabulary is None or task.window is None:
        raise ValueError(f"{task.name} is a task in words: use a pretrained model, with add_recurrence.")
    base = make_base(len(task.vocabulary), backbone=backbone, layers=layers, width=width, heads=heads, seed=seed)
    documents = task.samples(task.train_sizes[-1], 64, sample_seed(TRAIN, seed)).input_ids.tolist()
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # memories are initialised at random
        model = add_recurrence(base, memory=memory, window=task.window, documents=documents, **recurrence)
    assert isinstance(model, RecurrentForCausalLM)
    return model


def make_base(
    vocabulary: int,
    *,
    backbone: str = "llama",
    layers: int = LAYERS,
    width: int = WIDTH,
    heads: int = HEADS,
    seed: int = 0,
) -> PreTrainedModel:
    """A new causal language model, without recurrence."""
    for name, value in {"layers": layers, "width": width, "heads": heads}.items():
        check_count(name, value)
    if width % (2 * heads):
        raise ValueError(f"width={width} must be a multiple of twice the {heads} heads. Change one of them.")
    config: PreTrainedConfig
    if backbone == "llama":
        config = LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
            num_attention_heads=heads, max_position_embeddings=_MAX_POSITIONS, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
    elif backbone == "gpt2":
        config = GPT2Config(
            vocab_size=vocabulary, n_embd=width, n_layer=layers, n_head=heads, n_positions=1024, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
    else:
        raise ValueError(f"backbone={backbone!r} must be one of {', '.join(BACKBONES)}.")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config)
