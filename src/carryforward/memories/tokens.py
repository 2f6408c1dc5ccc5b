# SPDX-License-Identifier: Apache-2.0
"""Memory tokens: the Recurrent Memory Transformer (RMT; Bulatov, Kuratov and Burtsev 2022, arXiv 2207.06881).

m vectors stand beside a window's tokens as embeddings of their own. In front of the window they are *read*: every token
sees them. The same vectors stand behind a full window a second time, to be *written*: they see the window, and what the
base model makes of them, its last hidden states, is the memory that the next window reads. A document's first window
reads a learned first memory.

In an encoder every position sees every other, so all memory positions stand behind the window, at positions of their
own after those of a full window: the window's tokens keep theirs. Those that are written are not seen by the others.

Shapes: B rows, m memory tokens, k size of a hidden state, e of an embedding, which is k for nearly all models.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import init
from transformers import PreTrainedConfig

from ..backbones.architectures import Architecture, architecture_of
from ..backbones.hooks import HookContext
from ..presets import COMBINED_WITH, DEFAULT_MEMORY_TOKENS
from ..windows import Span
from .base import Dependency, Memory, MemoryConfig, WindowCost, WindowRecord, WindowSize, is_int


@dataclass(frozen=True)
class TokenMemoryConfig(MemoryConfig):
    """Memory tokens, as in the Recurrent Memory Transformer. They must be trained.

    The window and twice the memory tokens must fit into the base model's positions.

    Attributes:
        memory_tokens: how many there are (m).
    """

    kind: ClassVar[str] = "tokens"
    dependency: ClassVar[Dependency] = Dependency.LAST_LAYER  # the last layer's output enters the first
    combines_with: ClassVar[tuple[str, ...] | None] = COMBINED_WITH["tokens"]

    memory_tokens: int = DEFAULT_MEMORY_TOKENS

    def __post_init__(self) -> None:
        self._require("memory_tokens", is_int(self.memory_tokens) and self.memory_tokens >= 1, "an integer from 1")

    @property
    def memory_positions(self) -> int:
        return 2 * self.memory_tokens

    @property
    def carried_positions(self) -> int:
        return self.memory_tokens

    @property
    def writes_behind(self) -> bool:
        return True

    @property
    def needs_training(self) -> bool:
        return True

    def state_shape(self, base: PreTrainedConfig, architecture: Architecture) -> tuple[int, ...]:
        """Memory tokens, size of a hidden state."""
        return self.memory_tokens, architecture.output_width(base)

    def extra_queries(self, num_layers: int) -> list[int]:
        return [self.memory_positions] * num_layers

    def flops(self, cost: WindowCost) -> float:
        count, causal = self.memory_tokens, architecture_of(cost.base).causal
        # read tokens: seen by the window and by themselves; an encoder's see the window, too
        read = count * cost.window + (count**2 / 2 if causal else count * (cost.window + count))
        written = count * (cost.window + count) + count**2 / (2 if causal else 1)
        pairs = (read + written) * cost.base.num_hidden_layers
        return 2 * cost.matrices * self.memory_positions + 4 * cost.attention_width * pairs

    def describe(self) -> str:
        return f"{self.memory_tokens} memory token{'s' * (self.memory_tokens > 1)}"

    def usage_note(self) -> str:
        return "Memory tokens must be trained; they learn to carry what a task needs."

    def build(self, base: PreTrainedConfig, architecture: Architecture, size: WindowSize) -> "TokenMemory":
        widths = architecture.output_width(base), architecture.embedding_width(base)
        std = getattr(base, "initializer_range", 0.02)
        return TokenMemory(self, *widths, base.num_hidden_layers, architecture.causal, std)


class TokenMemory(Memory):
    """Memory tokens, read in front of a window and written behind it."""

    reads_first = True
    uses_positions = True
    writes_behind = True
    holds_vectors = True

    def __init__(
        self, config: TokenMemoryConfig, width: int, embedding_width: int, num_layers: int, causal: bool, std: float
    ):
        """
        Args:
            width: of the memory tokens, which are last hidden states.
            embedding_width: of what enters the base model. If it is another one, a linear layer stands between.
            std: standard deviation of the first memory before training.
        """
        super().__init__((config.memory_tokens, width))
        self.num_layers = num_layers
        self.causal = causal
        self.first = nn.Parameter(torch.empty(self.shape))
        self.projection = None if width == embedding_width else nn.Linear(width, embedding_width, bias=False)
        init.normal_(self.first, std=std)
        if self.projection is not None:
            init.normal_(self.projection.weight, std=width**-0.5)

    @property
    def like(self) -> Tensor:
        """The first memory."""
        return self.first

    @property
    def position_shift(self) -> int | None:
        return self.shape[0] if self.causal else None

    def layers(self) -> tuple[int, ...]:
        return tuple(range(1, self.num_layers + 1))

    def read(self, state: Tensor, context: HookContext) -> None:
        if self.causal:
            context.before = self._embed(state)
        else:
            context.after = self._embed(state)

    def read_first(self, rows: int, context: HookContext) -> None:
        self.read(self.first.expand(rows, -1, -1), context)

    def entering(self, state: Tensor, started: Tensor) -> Tensor:
        return torch.where(started[:, None, None].to(state.device), state, self.first.to(state.dtype))

    def prepare_write(self, rows: int, context: HookContext) -> None:
        read = context.before if self.causal else context.after
        assert read is not None, "a window that is written was given something to read"
        context.after = read if self.causal else torch.cat([read, read], dim=1)
        context.num_unseen = self.shape[0]

    def write(self, record: WindowRecord, span: Span, previous: Tensor | None) -> Tensor:
        assert record.last_after is not None, "there are memory positions behind a window that is written"
        return record.last_after[:, -self.shape[0] :].to(self.like)

    def _embed(self, state: Tensor) -> Tensor:
        return state if self.projection is None else self.projection(state)
