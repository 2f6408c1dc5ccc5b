# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations per scored token, counted as in the paper's tables, for every supported base model.

The paper's column is 2 (12 L k² + L T k) T / (T − o): a multiply-add is two operations; the matrices of the layers and
attention count, attention averaged over the causal triangle; embeddings, norms, biases, the vocabulary projection and
the recurrence do not. Here the matrices are counted in the model itself, built without memory, so that grouped
queries and gated feed-forward networks come out right, and what the paper leaves out is counted beside its column.

This is arithmetic on shapes: nothing is measured, and what a kernel computes in vain (masked scores) is not counted.
"""

import dataclasses
import functools
import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from .. import windows
from ..backbones.architectures import architecture_of
from ..config import RecurrenceConfig, RecurrentModelConfig
from ..models import argument_checks


@dataclass(frozen=True)
class Flops:
    """Operations per scored token of a document long enough that its ends do not matter.

    Attributes:
        base: the layers' matrices and attention: the paper's column.
        recurrence: pooling, feed-forward network, and what inserted slots and kept keys cost the layers they enter.
        vocabulary: the projection to the vocabulary of a causal model. 0 for an encoder: its config names no head.
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
    """What it costs to score one token.

    A window of T tokens is paid for by the T − o tokens it scores; an encoder's special tokens count in T and are
    never scored. Layers with a sliding window attend to no more than that. OPT-350m's projections between its
    embeddings and its layers are taken for a part of the embeddings.

    Args:
        config: of a base model, or of a recurrent one.
        window, overlap: those of a recurrent model by default; for a base model, `recurrence`'s, or no overlap.
        recurrence: to be added to a base model.
        use_state: False counts a recurrent model whose state is removed.

    Example:
        >>> from transformers import GPT2Config
        >>> f"{flops_per_token(GPT2Config(), window=300).base:.4g}"  # the paper prints 1.75e8
        '1.754e+08'
    """
    base, recurrence, window, overlap = _resolve(config, window, overlap, recurrence)
    matrices = _matrices(_json(base))
    per_window = 2 * matrices.layers * window + sum(_attention(base, window))
    prefix, suffix = (len(recurrence.prefix), len(recurrence.suffix)) if recurrence else (0, 0)
    stride = windows.check(window, overlap, prefix, suffix) - overlap
    carried = _recurrence(base, recurrence, overlap) if recurrence and use_state else {}
    return Flops(
        base=per_window / stride,
        recurrence=sum(carried.values()) / stride,
        vocabulary=2.0 * matrices.vocabulary,  # only scored positions are projected
    )


def _resolve(
    config: PreTrainedConfig, window: int | None, overlap: int | None, recurrence: RecurrenceConfig | None
) -> tuple[PreTrainedConfig, RecurrenceConfig | None, int, int]:
    """The base model's config, the recurrence if any (with the window asked for), window and overlap."""
    if isinstance(config, RecurrentModelConfig):
        if recurrence is not None:
            raise ValueError("config is a recurrent model's and has a recurrence: leave `recurrence` out.")
        config, recurrence = config.base_config, config.recurrence
    if not isinstance(config, PreTrainedConfig):
        raise ValueError(f"config is a {type(config).__name__}; a model's config is expected (model.config).")
    architecture_of(config)  # refuses what is not supported
    for name, value in (("window", window), ("overlap", overlap)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ValueError(f"{name}={value!r} must be an integer.")
    if recurrence is None:
        if window is None:
            raise ValueError("window is missing: a base model's config does not say how many tokens are read at once.")
        return config, None, window, overlap or 0
    if window is not None:
        recurrence = dataclasses.replace(recurrence, window=window)
    # A recurrence that does not fit the model, or cannot be run at this overlap, is refused as the model itself would.
    overlap = argument_checks.overlap(RecurrentModelConfig(base_config=config, recurrence=recurrence), overlap)
    return config, recurrence, recurrence.window, overlap


def _attention(base: PreTrainedConfig, window: int) -> list[float]:
    """Scores and mixes of every layer over one window: four operations per query, key and dimension of the heads."""
    return [4 * _width(base) * pairs for pairs in _pairs(base, window)]


def _pairs(base: PreTrainedConfig, window: int) -> list[float]:
    """For each layer, how many pairs of query and key one window has."""
    architecture = architecture_of(base)
    pairs: list[float] = []
    for reach in architecture.reaches(base):
        seen = min(reach or window, window)
        if architecture.causal:  # the paper's triangle, T² / 2; a sliding window cuts its tip off
            pairs.append(seen * window - seen**2 / 2)
        else:  # a sliding window reaches `seen` tokens to either side
            seen = min(seen, window - 1)
            pairs.append((2 * seen + 1) * window - seen * (seen + 1))
    return pairs


def _recurrence(base: PreTrainedConfig, recurrence: RecurrenceConfig, overlap: int) -> dict[str, float]:
    """What a window that receives a state and passes one on costs beyond the base model, part by part."""
    size, slots, window = base.hidden_size, recurrence.slots, recurrence.window
    entered = recurrence.insertion_layers(base.num_hidden_layers)
    projections = _matrices(_json(base)).attention
    sources = {"all": base.num_hidden_layers, "last": 1, "below": len(entered)}
    pooled_layers = sources[recurrence.pooled_layers] if slots else 0
    streams = len(entered) if recurrence.pooled_layers == "below" else 1
    room = window - len(recurrence.prefix) - len(recurrence.suffix)
    positions = recurrence.pooled(room, overlap)
    keys = slots if recurrence.pooling == "attention" else 0
    network = sum(a * b for a, b in pairwise((size, *recurrence.hidden_sizes, size)))
    networks = len(entered) if recurrence.separate else 1
    seen_by_slots = slots / 2 if architecture_of(base).causal else slots + window
    return {
        "pool": 2 * pooled_layers * positions * size,
        "keys": 4 * keys * positions * size * streams,  # attention pooling: scores, and mixes by them
        "network": 2 * network * slots * networks,
        # A slot passes the whole attention module (`insertion`), queries too, though nobody reads what they give.
        "project": sum(2 * projections[layer - 1] * slots for layer in entered),
        "attend": 4 * _width(base) * slots * window * len(entered),  # every query sees every slot: no triangle
        "unread": 4 * _width(base) * slots * seen_by_slots * len(entered),  # the slots' own queries
        # Keys and values that are kept cost nothing but being looked at, by the slots' queries too.
        "kept": 4 * _width(base) * recurrence.seen * (window * base.num_hidden_layers + slots * len(entered)),
    }


def _width(base: PreTrainedConfig) -> int:
    """Heads × their size, which need not be the hidden size."""
    _, size = architecture_of(base).heads(base)
    return base.num_attention_heads * size


@dataclass(frozen=True)
class _Matrices:
    """Weights that a token is multiplied with: in all layers, in each layer's attention module, in the head."""

    layers: int
    attention: tuple[int, ...]
    vocabulary: int


@functools.lru_cache(maxsize=32)
def _matrices(config_json: str) -> _Matrices:
    """Count a model's matrices on the meta device, where they take neither memory nor time to fill."""
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
    """A config as a key of the cache; how weights are stored says nothing about their number."""
    fields = {name: value for name, value in config.to_dict().items() if name != "quantization_config"}
    return json.dumps(fields, sort_keys=True, default=str)
