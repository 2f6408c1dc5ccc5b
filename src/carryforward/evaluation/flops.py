# SPDX-License-Identifier: Apache-2.0
"""FLOPs per scored token, counted as in the paper's tables, for every supported base model.

The paper's column is 2 (12 L k² + L T k) T / (T − o), for L layers of width k, windows of T tokens and an overlap of o.
A multiply-add is two operations. Counted are the matrices of the layers and attention over the causal triangle;
embeddings, norms, biases, the vocabulary projection and the recurrence are not. Here the matrices are those of the
model itself, built on the meta device, so that grouped queries and gated feed-forward networks are counted correctly.
The vocabulary projection and the recurrence are counted too, as numbers of their own.

FLOPs are computed from shapes: nothing is measured, and masked scores that a kernel computes are not counted.
"""

import dataclasses
import functools
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from .. import windows
from ..backbones.architectures import architecture_of
from ..config import RecurrenceConfig, RecurrentModelConfig
from ..memories.base import WindowCost
from ..models import argument_checks
from ..utils.checks import check_flag


@dataclass(frozen=True)
class Flops:
    """Operations per scored token of a document long enough that its ends do not matter.

    Attributes:
        base: the layers' matrices and attention: the paper's column.
        recurrence: the memories: computing what is carried, and attention to it.
        vocabulary: the projection to the vocabulary of a causal model; 0 for an encoder, whose config names no head.
    """

    base: float
    recurrence: float
    vocabulary: float


def flops_per_token(
    config: PreTrainedConfig,
    window: int | None = None,
    overlap: int | None = None,
    *,
    recurrence: RecurrenceConfig | None = None,
    use_state: bool = True,
) -> Flops:
    """FLOPs to score one token.

    The cost of a window of T tokens is divided by the T − o tokens that it scores. An encoder's special tokens count in
    T but are not scored. Layers with a sliding window attend only within it. OPT-350m's projections between embeddings
    and layers count as embeddings.

    Args:
        config: of a base model or a recurrent model.
        window, overlap: by default those of the recurrence; without one, `window` is required and `overlap` is 0.
        recurrence: a recurrence that is added to the base model.
        use_state: False counts a recurrent model whose state is removed.

    Example:
        >>> from transformers import GPT2Config
        >>> f"{flops_per_token(GPT2Config(), window=300).base:.4g}"  # the paper prints 1.75e8
        '1.754e+08'
    """
    check_flag("use_state", use_state)
    base, recurrence, window, overlap = _resolve(config, window, overlap, recurrence)
    matrices = _matrices(_json(base))
    per_window = 2 * matrices.layers * window + sum(_attention(base, window))
    prefix, suffix = (len(recurrence.prefix), len(recurrence.suffix)) if recurrence else (0, 0)
    stride = windows.check(window, overlap, prefix, suffix) - overlap
    memory = _memory_flops(base, recurrence, overlap) if recurrence and use_state else 0.0
    return Flops(
        base=per_window / stride,
        recurrence=memory / stride,
        vocabulary=2.0 * matrices.vocabulary,  # only scored positions are projected
    )


def _resolve(
    config: PreTrainedConfig, window: int | None, overlap: int | None, recurrence: RecurrenceConfig | None
) -> tuple[PreTrainedConfig, RecurrenceConfig | None, int, int]:
    """The base model's config, the recurrence if any (with the given window), window and overlap."""
    if isinstance(config, RecurrentModelConfig):
        if recurrence is not None:
            raise ValueError("config is a recurrent model's and has a recurrence: leave `recurrence` out.")
        config, recurrence = config.base_config, config.recurrence
    if not isinstance(config, PreTrainedConfig):
        raise ValueError(f"config is a {type(config).__name__}; a model's config is expected (model.config).")
    architecture_of(config)  # refuses unsupported models
    for name, value in (("window", window), ("overlap", overlap)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ValueError(f"{name}={value!r} must be an integer.")
    if recurrence is None:
        if window is None:
            raise ValueError("window is missing: a base model's config does not have one. Give window=...")
        return config, None, window, overlap or 0
    if window is not None:
        recurrence = dataclasses.replace(recurrence, window=window)
    # Refuse a recurrence that does not fit the model, or cannot run at this overlap, as the model itself would.
    overlap = argument_checks.check_overlap(RecurrentModelConfig(base_config=config, recurrence=recurrence), overlap)
    return config, recurrence, recurrence.window, overlap


def _attention(base: PreTrainedConfig, window: int) -> list[float]:
    """For each layer, FLOPs of attention over one window: scores and weighted sums, 4 per query, key and dimension."""
    _, size = architecture_of(base).kv_heads(base)
    width = base.num_attention_heads * size  # need not be the hidden size
    return [4 * width * pairs for pairs in _pairs(base, window)]


def _pairs(base: PreTrainedConfig, window: int) -> list[float]:
    """For each layer, the number of pairs of query and key in one window."""
    architecture = architecture_of(base)
    pairs: list[float] = []
    for sliding_window in architecture.sliding_windows(base):
        seen = min(sliding_window or window, window)
        if architecture.causal:  # T² / 2, as in the paper, less the pairs beyond a sliding window
            pairs.append(seen * window - seen**2 / 2)
        else:  # a sliding window reaches `seen` tokens to either side
            seen = min(seen, window - 1)
            pairs.append((2 * seen + 1) * window - seen * (seen + 1))
    return pairs


def _memory_flops(base: PreTrainedConfig, recurrence: RecurrenceConfig, overlap: int) -> float:
    """FLOPs of all memories in a window that receives a state and passes one on."""
    cost = _window_cost(base, recurrence, overlap)
    return sum(memory.flops(cost) for memory in recurrence.memories)


def _window_cost(base: PreTrainedConfig, recurrence: RecurrenceConfig, overlap: int) -> WindowCost:
    """The sizes that the memories' FLOPs depend on."""
    capacity = recurrence.window - len(recurrence.prefix) - len(recurrence.suffix)
    extra = [memory.extra_queries(base.num_hidden_layers) for memory in recurrence.memories]
    return WindowCost(
        base=base,
        window=recurrence.window,
        pooled=recurrence.pooled(capacity, overlap),
        queries=[recurrence.window + sum(layer) for layer in zip(*extra, strict=True)],
        projections=_matrices(_json(base)).attention,
    )


@dataclass(frozen=True)
class _Matrices:
    """Numbers of weights that a token is multiplied with: in all layers, in each attention module, in the head."""

    layers: int
    attention: tuple[int, ...]
    vocabulary: int


@functools.lru_cache(maxsize=32)
def _matrices(config_json: str) -> _Matrices:
    """Count a model's matrices on the meta device, where they take no memory."""
    config = AutoConfig.for_model(**json.loads(config_json))
    architecture = architecture_of(config)
    with torch.device("meta"):
        model: Any = (AutoModelForCausalLM if architecture.causal else AutoModel).from_config(config)
    layers = architecture.layer_list(model.base_model)
    return _Matrices(
        layers=sum(map(_weights, layers)),
        attention=tuple(_weights(layer.get_submodule(architecture.attention)) for layer in layers),
        vocabulary=model.get_output_embeddings().weight.numel() if architecture.causal else 0,
    )


def _weights(module: nn.Module) -> int:
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear | Conv1D))


def _json(config: PreTrainedConfig) -> str:
    """A config as a cache key. Quantisation is left out: it does not change the shapes."""
    fields = {name: value for name, value in config.to_dict().items() if name != "quantization_config"}
    return json.dumps(fields, sort_keys=True, default=str)
