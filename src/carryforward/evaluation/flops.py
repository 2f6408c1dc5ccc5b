# SPDX-License-Identifier: Apache-2.0
"""FLOPs per scored token, counted as in the paper's tables, for every supported base model.

The paper's column is 2 (12 L k² + L T k) T / (T − o), for L layers of width k, windows of T tokens and an overlap of o.
A multiply-add is two operations. Counted are the matrices of the layers and attention over the causal triangle;
embeddings, norms, biases, the vocabulary projection and the recurrence are not. Here the matrices are those of the
model itself, which reads one token on the meta device while PyTorch counts: grouped queries, gated feed-forward
networks and the experts that a token is sent to are counted as they are. The vocabulary projection and the recurrence
are counted too, as numbers of their own.

FLOPs are computed from shapes: nothing is measured, and masked scores that a kernel computes are not counted.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from .. import windows
from ..backbones.architectures import Architecture, architecture_of
from ..backbones.hooks import maskless_attention
from ..backbones.observation import observe
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


@dataclass(frozen=True)
class StateSize:
    """How large the state of one row is.

    Attributes:
        positions: carried positions, which a window attends to.
        bytes: of all that is carried.
    """

    positions: int
    bytes: int


def state_size(
    config: PreTrainedConfig,
    window: int | None = None,
    *,
    recurrence: RecurrenceConfig | None = None,
    dtype: torch.dtype = torch.float32,
) -> StateSize:
    """The size of a recurrent model's state.

    Args:
        config: of a base model or a recurrent model.
        window: by default that of the recurrence.
        recurrence: a recurrence that is added to the base model.
        dtype: the precision of states, which is the model's.
    """
    base, recurrence, *_ = _resolve(config, window, None, recurrence)
    if recurrence is None:
        return StateSize(0, 0)
    architecture = architecture_of(base)
    numbers = sum(math.prod(memory.state_shape(base, architecture)) for memory in recurrence.memories)
    return StateSize(sum(memory.carried_positions for memory in recurrence.memories), numbers * dtype.itemsize)


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
    and layers count as embeddings. Where windows see their right neighbours, those that are read again count twice.

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
    group = recurrence.window_group if recurrence and use_state else None
    scored = stride * group.advance / group.size if group else stride  # tokens per window that runs
    return Flops(
        base=per_window / scored,
        recurrence=memory / scored,
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
    widths = _matrices(_json(base)).attention_widths
    return [4 * width * pairs for width, pairs in zip(widths, _pairs(base, window), strict=True)]


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
        matrices=_matrices(_json(base)).layers,
        projections=_matrices(_json(base)).attention,
        stride=capacity - overlap,
    )


@dataclass(frozen=True)
class _Matrices:
    """Numbers of weights that a token is multiplied with: in all layers, in each attention module, in the head; and for
    each layer the width of attention, heads times the size of a key (or half of a key and a value together)."""

    layers: int
    attention: tuple[int, ...]
    attention_widths: tuple[float, ...]
    vocabulary: int


@functools.lru_cache(maxsize=32)
def _matrices(config_json: str) -> _Matrices:
    """Count a model's matrices on the meta device, where they take no memory."""
    config = AutoConfig.for_model(**json.loads(config_json))
    architecture = architecture_of(config)
    with torch.device("meta"):
        model: Any = (AutoModelForCausalLM if architecture.causal else AutoModel).from_config(config)
    model.requires_grad_(False)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")  # the only one whose shapes do not depend on the token
    backbone = architecture.backbone_of(model)
    layers = architecture.layers_in_order(backbone)
    try:
        modules, widths = _observe_token(backbone, architecture)
        counted = [[module / 2 - 2 * width for module in pair] for pair, width in zip(modules, widths, strict=True)]
    except (RuntimeError, NotImplementedError):  # it looks at numbers, and on the meta device there are none
        _check_linear(layers, config.model_type)
        widths = [config.num_attention_heads * architecture.kv_heads(config)[1]] * len(layers)
        counted = [[_weights(layer), _weights(layer.get_submodule(architecture.attention))] for layer in layers]
    return _Matrices(
        layers=round(sum(layer for layer, _ in counted)),
        attention=tuple(round(attention) for _, attention in counted),
        attention_widths=tuple(widths),
        vocabulary=model.get_output_embeddings().weight.numel() if architecture.causal else 0,
    )


def _observe_token(backbone: Any, architecture: Architecture) -> tuple[list[tuple[int, int]], list[float]]:
    """What PyTorch counts while a model reads one token: for each layer the FLOPs of all of it and of its attention
    module, in which attention to the one token takes 4 times its width; and these widths. Of a mixture of experts only
    those run that a token is sent to."""
    token = torch.zeros(1, 1, dtype=torch.long, device="meta")
    with maskless_attention(), FlopCounterMode(display=False) as counter:
        observation = observe(backbone, token, architecture.own_attention, attention_mask=torch.ones_like(token))
    counts = counter.get_flop_counts()
    widths = [call.query.shape[1] * (call.key.shape[3] + call.value.shape[3]) / 2 for call in observation.attention]
    order, modules = architecture.order or range(len(widths)), []
    for item in order:
        path = f"{type(backbone).__name__}.{architecture.layers}.{item}"
        calls = [*order].count(item)  # of a module that computes several layers
        modules.append((sum(counts[path].values()) // calls,
                        sum(counts[f"{path}.{architecture.attention}"].values()) // calls))  # fmt: skip
    return modules, widths


def _check_linear(layers: Iterable[nn.Module], model_type: str) -> None:
    """Refuse layers with matrices other than those of linear layers: how many of them a token meets is not known."""
    for layer in layers:
        linear = {module.weight for module in layer.modules() if isinstance(module, nn.Linear | Conv1D)}
        if any(parameter.ndim > 1 and parameter not in linear for parameter in layer.parameters()):
            raise ValueError(
                f"FLOPs of a model of type {model_type!r} cannot be counted from its config: which of its matrices a "
                "token is multiplied with depends on the token."
            )


def _weights(module: nn.Module) -> int:
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear | Conv1D))


def _json(config: PreTrainedConfig) -> str:
    """A config as a cache key. Quantisation is left out: it does not change the shapes."""
    fields = {name: value for name, value in config.to_dict().items() if name != "quantization_config"}
    return json.dumps(fields, sort_keys=True, default=str)
