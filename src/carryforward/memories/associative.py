# SPDX-License-Identifier: Apache-2.0
"""A matrix in every layer: the Associative Recurrent Memory Transformer (ARMT; Rodkin et al. 2024, arXiv 2407.04841).

m learned memory tokens stand behind a full window and see it. What a layer makes of each of them becomes a key k, a
value v and a gate β, which are added to the layer's matrix A and normaliser z by a delta rule:

    v̄ = A φ(k) / (zᵀφ(k) + ε)            what the matrix holds at this key so far
    γ = 1 - zᵀφ(k) / ‖φ(k)‖²              how much of the key is new to the normaliser, from 0 to 1
    A + Σ β (v - v̄) ⊗ φ(k),  z + Σ γ φ(k)   sums over the memory tokens, all from the same A and z

In the next window, every position's input x of the layer is replaced by x + A φ(q) / (zᵀφ(q) + ε), where q = W_q x.
Since the projection to values starts at zero, so does the matrix, and a new model computes what its base model does.

φ is DPFP (Schlag, Irie and Schmidhuber 2021, arXiv 2102.11174) with ν = 3: of r = [relu(x), relu(-x)], the products of
r and r rotated by 1 to ν places, scaled to length 1. As in the authors' code, no gradient flows through γ.

Shapes: B rows, n positions, m memory tokens, k hidden size, d size of a key, D = 2 ν d features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional, init
from transformers import PreTrainedConfig

from ..backbones.architectures import Architecture, architecture_of
from ..backbones.hooks import HookContext
from ..presets import COMBINED_WITH, DEFAULT_KEY_SIZE, DEFAULT_MEMORY_TOKENS
from ..windows import Span
from .base import Dependency, Memory, MemoryConfig, WindowCost, WindowRecord, WindowSize, is_int

EPSILON = 1e-5
ROLLS = 3  # ν


@dataclass(frozen=True)
class AssociativeMemoryConfig(MemoryConfig):
    """A matrix in every layer, written by memory tokens, as in the Associative Recurrent Memory Transformer. It must be
    trained; before that the model computes what its base model does.

    The window and the memory tokens must fit into the base model's positions.

    Attributes:
        memory_tokens: how many tokens behind a full window write to the matrices (m).
        key_size: size of keys and queries (d); the matrices have six times as many rows.
    """

    kind: ClassVar[str] = "associative"
    dependency: ClassVar[Dependency] = Dependency.SAME_LAYER_OUTPUT
    combines_with: ClassVar[tuple[str, ...] | None] = COMBINED_WITH["associative"]

    memory_tokens: int = DEFAULT_MEMORY_TOKENS
    key_size: int = DEFAULT_KEY_SIZE

    def __post_init__(self) -> None:
        for name in ("memory_tokens", "key_size"):
            self._require(name, is_int(getattr(self, name)) and getattr(self, name) >= 1, "an integer from 1")

    @property
    def memory_positions(self) -> int:
        return self.memory_tokens

    @property
    def carried_positions(self) -> int:
        return 0

    @property
    def writes_behind(self) -> bool:
        return True

    @property
    def needs_training(self) -> bool:
        return True

    @property
    def features(self) -> int:
        """Features of a key, D."""
        return 2 * ROLLS * self.key_size

    def state_shape(self, base: PreTrainedConfig, architecture: Architecture) -> tuple[int, ...]:
        """Layers, features, hidden size and one more: the matrix and, as its last column, the normaliser."""
        return base.num_hidden_layers, self.features, base.hidden_size + 1

    def extra_queries(self, num_layers: int) -> list[int]:
        return [self.memory_tokens] * num_layers

    def flops(self, cost: WindowCost) -> float:
        count, width, layers = self.memory_tokens, cost.base.hidden_size, cost.base.num_hidden_layers
        columns = self.features * (width + 1)  # the matrix and its normaliser
        causal = architecture_of(cost.base).causal
        pairs = count * cost.window + count**2 / (2 if causal else 1)
        read = 2 * (cost.window + count) * (width * self.key_size + columns)
        write = 2 * count * (width * (self.key_size + width + 1) + 2 * columns)  # projections; what is there; update
        return 2 * cost.matrices * count + layers * (4 * cost.attention_width * pairs + read + write)

    def describe(self) -> str:
        return f"a matrix in every layer, with {self.features} features"

    def usage_note(self) -> str:
        return "Associative memory must be trained; it learns to look up what earlier windows said."

    def build(self, base: PreTrainedConfig, architecture: Architecture, size: WindowSize) -> "AssociativeMemory":
        shape, std = self.state_shape(base, architecture), getattr(base, "initializer_range", 0.02)
        return AssociativeMemory(self, shape, architecture.embedding_width(base), std)


class AssociativeMemory(Memory):
    """Memory tokens, and for every layer the projections to and from its matrix."""

    uses_previous = True
    uses_positions = True
    writes_behind = True
    reads_every_token = True

    def __init__(self, config: AssociativeMemoryConfig, shape: tuple[int, ...], embedding_width: int, std: float):
        """
        Args:
            shape: of one row's state, (L, D, k + 1).
            embedding_width: of what enters the base model.
            std: standard deviation of the memory tokens before training.
        """
        super().__init__(shape)
        layers, _, columns = shape
        self.tokens = nn.Parameter(torch.empty(config.memory_tokens, embedding_width))
        self.associations = nn.ModuleList(Association(columns - 1, config.key_size) for _ in range(layers))
        init.normal_(self.tokens, std=std)

    @property
    def like(self) -> Tensor:
        """The memory tokens."""
        return self.tokens

    def layers(self) -> tuple[int, ...]:
        return ()

    def layer_modules(self) -> Sequence[nn.Module]:
        return [*self.associations]

    def read(self, state: Tensor, context: HookContext) -> None:
        """Let every layer's input pass through its matrix."""
        for layer, (association, matrix) in enumerate(zip(self.associations, state.unbind(1), strict=True), start=1):
            add: Callable[[Tensor], Tensor] = partial(association, matrix=matrix)  # type: ignore[assignment]
            context.layer_inputs[layer] = add

    def prepare_write(self, rows: int, context: HookContext) -> None:
        context.after = self.tokens.expand(rows, -1, -1)
        context.num_unseen = len(self.tokens)

    def write(self, record: WindowRecord, span: Span, previous: Tensor | None) -> Tensor:
        before = [None] * self.shape[0] if previous is None else previous.unbind(1)
        parts = zip(self.associations, record.layer_after, before, strict=True)
        matrices = [association.update(tokens, matrix) for association, tokens, matrix in parts]  # type: ignore[operator]
        return torch.stack([matrix.to(self.like) for matrix in matrices], dim=1)


class Association(nn.Module):
    """One layer's projections. A matrix [B, D, k + 1] holds A, transposed, and z as its last column."""

    def __init__(self, width: int, key_size: int):
        super().__init__()
        self.query = nn.Linear(width, key_size, bias=False)
        self.key = nn.Linear(width, key_size, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 1)
        for projection in (self.query, self.key, self.gate):
            init.uniform_(projection.weight, -(width**-0.5), width**-0.5)
        init.zeros_(self.gate.bias)
        init.zeros_(self.value.weight)

    def forward(self, hidden: Tensor, matrix: Tensor) -> Tensor:
        """A layer's input [B, n, k] with what the matrix holds at its queries added."""
        found, _ = _look_up(features(self.query(hidden.to(self.query.weight))), matrix)
        return hidden + found.to(hidden)

    def update(self, tokens: Tensor, matrix: Tensor | None) -> Tensor:
        """The matrix after memory tokens [B, m, k] were written to it; None is one of zeros."""
        tokens = tokens.to(self.value.weight)
        keys, values, gates = features(self.key(tokens)), self.value(tokens), self.gate(tokens).sigmoid()
        if matrix is None:
            return keys.mT @ torch.cat([gates * values, torch.ones_like(gates)], dim=-1)
        found, weight = _look_up(keys, matrix)
        new = (1 - weight / keys.square().sum(dim=-1, keepdim=True)).clamp(0, 1).detach()
        return matrix + keys.mT @ torch.cat([gates * (values - found), new.to(gates.dtype)], dim=-1)


def _look_up(keys: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """What a matrix [B, D, k + 1] holds at keys [B, n, D], [B, n, k], and zᵀφ, [B, n, 1]."""
    both = keys @ matrix.to(keys.dtype)
    found, weight = both[..., :-1], both[..., -1:]
    return found / (weight + EPSILON), weight


def features(x: Tensor) -> Tensor:
    """φ of keys [..., d], [..., D]: DPFP, of length 1."""
    parts = torch.cat([x, -x], dim=-1).relu()
    products = [parts * parts.roll(shift, dims=-1) for shift in range(1, ROLLS + 1)]
    return functional.normalize(torch.cat(products, dim=-1), dim=-1)
