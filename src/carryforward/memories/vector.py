# SPDX-License-Identifier: Apache-2.0
"""The paper's memory: a window is pooled into a vector, which enters the next window as one more key and value.

Equation 1 and the feed-forward network of section 3.1, with the alternatives that its authors tried.

Shapes: B rows, T positions, P pooled positions, L layers, k hidden size, S slots, G states (1, or one per insertion
layer), m what is pooled at a position (k, or G times k where each insertion layer pools the one below it).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import init
from transformers import PreTrainedConfig

from ..backbones.architectures import Architecture, architecture_of
from ..backbones.hooks import HookContext
from ..presets import PAPER_WINDOW
from ..windows import Span
from .base import Dependency, Memory, MemoryConfig, WindowCost, WindowRecord, WindowSize, is_int

Pooling = Literal["mean", "max", "attention"]
PooledLayers = Literal["all", "last", "below"]


@dataclass(frozen=True)
class VectorMemoryConfig(MemoryConfig):
    """A pooled vector, the paper's memory. The defaults are those of the paper's language models.

    Attributes:
        slots: vectors carried. "mean" and "max" pool as many equal stretches; "attention" has as many keys.
        pooling: how the positions of a window become a vector: "mean" (equation 1), "max", or "attention" with
            learned fixed keys.
        pooled_layers: "all" layers' outputs, mixed with learned softmax weights (equation 1); the "last" one's; or, for
            each insertion layer, the output of the layer "below" it, which is its own input: each then has a state.
        hidden_sizes: hidden layers of the feed-forward network.
        residual: add the pooled vectors to the network's output, which starts at zero. Before training, the carried
            vectors are then hidden states, which the layer above the pooled one can read.
        insert_at: the layer that the state enters (ℓ_ins, counted from 1), a list of layers, or "all" (from the second
            on if the layers below are pooled).
        state_per_layer: with several insertion layers, give each a feed-forward network and a state of its own.
        init_std: standard deviation of the last linear layer's weights (and of attention pooling's keys) at the start.
    """

    kind: ClassVar[str] = "vector"
    dependency: ClassVar[Dependency] = Dependency.LAST_LAYER  # the last layer's output enters an earlier layer

    slots: int = 1
    pooling: Pooling = "mean"
    pooled_layers: PooledLayers = "all"
    hidden_sizes: tuple[int, ...] = (200, 200, 200)
    residual: bool = False
    insert_at: int | tuple[int, ...] | Literal["all"] = 2
    state_per_layer: bool = False
    init_std: float = 0.02

    def __post_init__(self) -> None:
        self._require("hidden_sizes", isinstance(self.hidden_sizes, list | tuple), "a list of integers")
        object.__setattr__(self, "hidden_sizes", tuple(self.hidden_sizes))
        if isinstance(self.insert_at, list):
            object.__setattr__(self, "insert_at", tuple(self.insert_at))
        self._require("slots", is_int(self.slots) and self.slots >= 1, "an integer of at least 1")
        for name, choices in (("pooling", get_args(Pooling)), ("pooled_layers", get_args(PooledLayers))):
            self._require(name, getattr(self, name) in choices, "one of " + ", ".join(map(repr, choices)))
        self._require("hidden_sizes", all(is_int(n) and n >= 1 for n in self.hidden_sizes), "positive integers")
        layers: tuple[Any, ...] = self.insert_at if isinstance(self.insert_at, tuple) else (self.insert_at,)
        valid = self.insert_at == "all" or (
            bool(layers) and all(is_int(n) and n >= 1 for n in layers) and len(set(layers)) == len(layers)
        )
        self._require("insert_at", valid, 'a layer number from 1, a list of different ones, or "all"')
        if self.pooled_layers == "below":
            self._require("insert_at", 1 not in layers, "at least 2 with pooled_layers='below': no layer is below 1")
        for name in ("residual", "state_per_layer"):
            self._require(name, isinstance(getattr(self, name), bool), "True or False")
        std: Any = self.init_std
        number = isinstance(std, int | float) and not isinstance(std, bool)
        self._require("init_std", number and 0 <= std < math.inf, "a finite number, 0 or more")

    def min_capacity(self, overlap: int, size: WindowSize) -> int:
        return self.slots + max(overlap - size.overlap, 0)  # see `RecurrenceConfig.pooled`

    def default_window(self, usable: int) -> int:
        return min(PAPER_WINDOW, usable)

    @property
    def needs_training(self) -> bool:
        return not self.residual

    def check_base(self, base: PreTrainedConfig) -> None:
        depth, layers = base.num_hidden_layers, self.insertion_layers(base.num_hidden_layers)
        if not layers:
            raise ValueError(f"pooled_layers='below': {base.model_type} has a single layer, none below it. Use 'all'.")
        missing = [layer for layer in layers if layer > depth]
        if missing:
            raise ValueError(
                f"insert_at={self.insert_at!r}: {base.model_type} has {depth} layers, counted from 1, so layer "
                f"{missing[0]} does not exist. Use a number from 1 to {depth}, a list of them, or 'all'."
            )

    @property
    def separate(self) -> bool:
        """Whether each insertion layer has a network and a state of its own."""
        return self.state_per_layer or self.pooled_layers == "below"

    def insertion_layers(self, num_layers: int) -> tuple[int, ...]:
        """The layers that the state enters, counted from 1, in order."""
        if self.insert_at == "all":
            return tuple(range(2 if self.pooled_layers == "below" else 1, num_layers + 1))
        layers: Any = (self.insert_at,) if isinstance(self.insert_at, int) else self.insert_at
        return tuple(sorted(layers))

    def state_shape(self, base: PreTrainedConfig, architecture: Architecture) -> tuple[int, ...]:
        """States (1, or one per insertion layer), slots, hidden size."""
        groups = len(self.insertion_layers(base.num_hidden_layers)) if self.separate else 1
        return groups, self.slots, base.hidden_size

    def extra_queries(self, num_layers: int) -> list[int]:
        layers = self.insertion_layers(num_layers)
        return [self.slots * (layer in layers) for layer in range(1, num_layers + 1)]

    def flops(self, cost: WindowCost) -> float:
        size, width = cost.base.hidden_size, cost.attention_width
        layers = self.insertion_layers(cost.base.num_hidden_layers)
        pooled_layers = {"all": cost.base.num_hidden_layers, "last": 1, "below": len(layers)}[self.pooled_layers]
        streams = len(layers) if self.pooled_layers == "below" else 1
        keys = self.slots if self.pooling == "attention" else 0
        network = sum(a * b for a, b in pairwise((size, *self.hidden_sizes, size)))
        networks = len(layers) if self.separate else 1
        seen_by_slots = self.slots / 2 if architecture_of(cost.base).causal else self.slots + cost.window
        return sum(
            (
                2 * pooled_layers * cost.pooled * size,
                4 * keys * cost.pooled * size * streams,  # attention pooling: scores, and weighted sums
                2 * network * self.slots * networks,
                # A slot passes the whole attention module (`backbones.hooks`), though its query's output is dropped.
                sum(2 * cost.projections[layer - 1] * self.slots for layer in layers),
                4 * width * self.slots * cost.window * len(layers),  # every query sees every slot: no triangle
                4 * width * self.slots * seen_by_slots * len(layers),  # the slots' own queries
            )
        )

    def describe(self) -> str:
        vectors = "1 pooled vector" if self.slots == 1 else f"{self.slots} pooled vectors"
        return f"{vectors} a window (the paper's memory)"

    def usage_note(self) -> str:
        return "A pooled vector must be trained; its gain grows slowly with the number of training tokens."

    def build(self, base: PreTrainedConfig, architecture: Architecture, size: WindowSize) -> "VectorMemory":
        return VectorMemory(self, base.num_hidden_layers, base.hidden_size)


class VectorMemory(Memory):
    """Pools the outputs of all layers over a window (z) and maps them to the carried vectors (h_prev)."""

    holds_vectors = True

    def __init__(self, config: VectorMemoryConfig, num_layers: int, hidden_size: int):
        insertion_layers = config.insertion_layers(num_layers)
        groups = len(insertion_layers) if config.separate else 1
        width = hidden_size * (len(insertion_layers) if config.pooled_layers == "below" else 1)  # m
        super().__init__((groups, config.slots, hidden_size), token_width=width)
        self.config = config
        self.insertion_layers = insertion_layers
        below = [layer - 2 for layer in insertion_layers]
        self.pooled_layers = {"all": [*range(num_layers)], "last": [num_layers - 1], "below": below}[
            config.pooled_layers
        ]  # counted from 0
        if config.pooled_layers == "all":
            self.layer_logits = nn.Parameter(torch.empty(num_layers))  # α of equation 1
        if config.pooling == "attention":
            self.keys = nn.Parameter(torch.empty(config.slots, width))
        self.networks = nn.ModuleList(_feed_forward(hidden_size, config.hidden_sizes) for _ in range(groups))
        self._init_parameters()

    def _init_parameters(self) -> None:
        """α = 0; linear layers as in PyTorch; the last one N(0, init_std), or 0 if residual."""
        if self.config.pooled_layers == "all":
            init.zeros_(self.layer_logits)
        if self.config.pooling == "attention":
            init.normal_(self.keys, std=self.config.init_std)
        for network in self.networks:
            *inner, last = [layer for layer in network.children() if isinstance(layer, nn.Linear)]
            for layer in inner:
                bound = layer.in_features**-0.5
                init.uniform_(layer.weight, -bound, bound)
                init.uniform_(layer.bias, -bound, bound)
            init.normal_(last.weight, std=0.0 if self.config.residual else self.config.init_std)
            init.zeros_(last.bias)

    @property
    def like(self) -> Tensor:
        """The last linear layer's weight."""
        return self.networks[0][-1].weight  # type: ignore[index]

    @property
    def layer_weights(self) -> Tensor:
        """w = softmax(α) of equation 1, [L], if all layers are pooled."""
        return self.layer_logits.softmax(dim=0)

    def layers(self) -> tuple[int, ...]:
        return self.insertion_layers

    def read(self, state: Tensor, context: HookContext) -> None:
        """Insert the vectors: one state for all insertion layers, or one each."""
        groups = state.shape[1]
        for i, layer in enumerate(self.insertion_layers):
            context.add_slots(layer, state[:, i if groups > 1 else 0])

    def write(self, record: WindowRecord, span: Span, previous: Tensor | None) -> Tensor:
        device = self.like.device
        start = record.start(span, device)
        first = start if isinstance(start, int) else 0
        layers = [_positions(record.layer_outputs[i], first, span.stop).to(device) for i in self.pooled_layers]
        slots = None if isinstance(start, int) else _slot_of_position(start, span.stop, self.config.slots)
        return self.feed_forward(self.pool(layers, slots))

    def token_features(self, layer_outputs: Sequence[Tensor]) -> Tensor:
        return self.mix([layer_outputs[i].to(self.like) for i in self.pooled_layers])

    def write_tokens(self, features: Tensor, record: WindowRecord, span: Span, previous: Tensor | None) -> Tensor:
        return self.feed_forward(self.pool_mixed(features[:, : span.stop]))

    def pool(self, layers: Sequence[Tensor], slots: Tensor | None = None) -> Tensor:
        """Equation 1 and its alternatives: the pooled layers, each [B, P, k], to z, [B, S, m].

        Args:
            slots: if rows differ, the slot of each position, -1 for none, [B, P].
        """
        if self.config.pooling == "mean":
            # The mean over positions first: the same number as mixing first, without a mix of P x k.
            return self.mix([self._pool_stretches(h, slots) for h in layers])
        return self.pool_mixed(self.mix(layers), slots)

    def pool_mixed(self, mixed: Tensor, slots: Tensor | None = None) -> Tensor:
        """The same from layers that are mixed already, [B, P, m]."""
        if self.config.pooling != "attention":
            return self._pool_stretches(mixed, slots)
        scores = mixed @ self.keys.to(mixed.dtype).T / mixed.shape[-1] ** 0.5  # [B, P, S]
        if slots is not None:
            scores = scores.masked_fill(slots[..., None] < 0, -torch.inf)
        return scores.softmax(dim=1).transpose(1, 2) @ mixed

    def _pool_stretches(self, x: Tensor, slots: Tensor | None) -> Tensor:
        mean, count = self.config.pooling == "mean", self.config.slots
        if slots is None:
            return _pool_equal_stretches(x, count, _mean if mean else torch.amax)
        members = [slots[..., None] == slot for slot in range(count)]
        if not mean:
            return torch.stack([x.masked_fill(~inside, -torch.inf).amax(dim=1) for inside in members], dim=1)
        return torch.stack([_mean(x.masked_fill(~inside, 0), 1, inside.sum(dim=1)) for inside in members], dim=1)

    def mix(self, layers: Sequence[Tensor]) -> Tensor:
        """Σ w_ℓ h^(ℓ) with w = softmax(α); or the layers concatenated if they are not mixed."""
        if self.config.pooled_layers != "all":
            return torch.cat(list(layers), dim=-1)
        first, *others = self.layer_weights.to(layers[0].dtype).unbind()
        total = first * layers[0]
        for weight, layer in zip(others, layers[1:], strict=True):
            total = torch.addcmul(total, weight, layer)
        return total

    def feed_forward(self, z: Tensor) -> Tensor:
        """h_prev, [B, G, S, k], from what was pooled, [B, S, m]."""
        parts = z.to(self.like.dtype).split(self.like.shape[0], dim=-1)  # one for all networks, or one for each
        inputs = parts if len(parts) > 1 else parts * len(self.networks)
        outputs = [network(x) for network, x in zip(self.networks, inputs, strict=True)]
        if self.config.residual:
            outputs = [x + out for x, out in zip(inputs, outputs, strict=True)]
        # Under autocast a network's output has lower precision; the state keeps that of the weights.
        return torch.stack(outputs, dim=1).to(self.like.dtype)


def _feed_forward(size: int, hidden_sizes: Sequence[int]) -> nn.Sequential:
    sizes = [size, *hidden_sizes]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], size))


def _pool_equal_stretches(x: Tensor, slots: int, pool: Callable[..., Tensor]) -> Tensor:
    """Pool as many equal stretches of positions as there are slots, [B, P, m] to [B, S, m].

    If they cannot be equal, the older ones have one position more. Slices are few: the gradient of a slice is as large
    as the whole.
    """
    length = x.shape[1]
    if length < slots:  # the end of a document: some positions then fill several slots
        return x[:, torch.arange(slots, device=x.device) * length // slots]
    size, longer = divmod(length, slots)
    if not longer:
        return pool(x.unflatten(1, (slots, size)), dim=2)
    older, newer = x.split([longer * (size + 1), (slots - longer) * size], dim=1)
    halves = older.unflatten(1, (longer, size + 1)), newer.unflatten(1, (slots - longer, size))
    return torch.cat([pool(half, dim=2) for half in halves], dim=1)


def _slot_of_position(starts: Tensor, stop: int, slots: int) -> Tensor:
    """The same stretches if every row starts at its own position, [B, 1]: the slot of every position up to `stop`, -1
    before the start, [B, stop]."""
    position = torch.arange(stop, device=starts.device) - starts
    size, longer = (stop - starts) // slots, (stop - starts) % slots
    older = longer * (size + 1)
    slot = torch.where(position < older, position // (size + 1), longer + (position - older) // size)
    return torch.where(position < 0, -1, slot)


def _mean(x: Tensor, dim: int, count: Tensor | None = None) -> Tensor:
    """The mean, divided last: then the gradient is one number that is broadcast, not written out."""
    exact = torch.promote_types(x.dtype, torch.float32)  # a sum may exceed the range of float16
    return (x.sum(dim=dim, dtype=exact) / (x.shape[dim] if count is None else count)).to(x.dtype)


def _positions(x: Tensor, start: int, stop: int) -> Tensor:
    """Positions of [B, T, k]; all of them without a slice, whose gradient is as large as the whole."""
    return x if (start, stop) == (0, x.shape[1]) else x[:, start:stop]
