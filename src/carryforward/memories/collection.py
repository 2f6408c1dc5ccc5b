# SPDX-License-Identifier: Apache-2.0
"""All memories of a model side by side, with their states joined to one tensor.

BPTT and CUDA graphs see one flat state [B, m] and need not know its parts.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..backbones.architectures import Architecture
from ..backbones.attention import KV
from ..backbones.hooks import HookContext
from ..windows import Span
from .base import Memory, MemoryConfig, Rerotate, Rotation, WindowRecord, WindowSize
from .links import WindowLinks

StateByKind = dict[str, Tensor]  # the state of each memory, [B, *shape]


class Memories(nn.Module):
    """The memories of a model, by kind. Calling it computes the state that a window passes on."""

    def __init__(
        self, configs: Sequence[MemoryConfig], base: PreTrainedConfig, architecture: Architecture, size: WindowSize
    ):
        super().__init__()
        self.kinds = [config.kind for config in configs]
        for config in configs:
            self.add_module(config.kind, config.build(base, architecture, size))

    @property
    def like(self) -> Tensor:
        """A tensor with the device and precision of states: that of the first memory."""
        return next(iter(self)).like

    @property
    def _placement(self) -> dict[str, Any]:
        """The device and precision of states. New tensors are not made from `like`, which FSDP may shard."""
        return {"device": self.like.device, "dtype": self.like.dtype}

    def __iter__(self) -> Iterator[Memory]:
        return (getattr(self, kind) for kind in self.kinds)

    def get(self, kind: str) -> Memory | None:
        """The memory of a kind, if the model has it."""
        return getattr(self, kind) if kind in self.kinds else None

    def items(self) -> Iterator[tuple[str, Memory]]:
        return zip(self.kinds, self, strict=True)

    @property
    def ready(self) -> bool:
        """Whether a model can read what is carried."""
        return all(memory.ready for memory in self)

    @property
    def records_kv(self) -> bool:
        return any(memory.records_kv for memory in self)

    @property
    def wraps_attention(self) -> bool:
        """Whether the base model needs the attention functions of `backbones.attention`."""
        return self.records_kv or any(memory.uses_positions for memory in self)

    @property
    def reads_first(self) -> bool:
        return any(memory.reads_first for memory in self)

    @property
    def reads_every_token(self) -> bool:
        return any(memory.reads_every_token for memory in self)

    @property
    def reads_again(self) -> bool:
        """Whether generation, which reads token by token, must read a full window again to write its state."""
        return any(memory.needs_history or memory.writes_behind for memory in self)

    @property
    def vector_kind(self) -> str | None:
        """The kind of the memory whose state consists of vectors; None if there is none."""
        return next((kind for kind, memory in self.items() if memory.holds_vectors), None)

    @property
    def layers(self) -> list[int]:
        """The layers in which a window attends to a state, counted from 1."""
        return sorted({layer for memory in self for layer in memory.layers()})

    @property
    def sizes(self) -> list[int]:
        """Numbers in each memory's state, of one row."""
        return [math.prod(memory.shape) for memory in self]

    @property
    def state_bytes(self) -> int:
        """Bytes of one row's state."""
        return sum(self.sizes) * self.like.element_size()

    def initial(self, batch: int) -> StateByKind:
        """The state before a document's first window. No window reads it."""
        return {kind: torch.zeros(batch, *memory.shape, **self._placement) for kind, memory in self.items()}

    def flatten(self, state: StateByKind) -> Tensor:
        """One tensor [B, m] with all memories' states."""
        return torch.cat([state[kind].flatten(1).to(**self._placement) for kind in self.kinds], dim=1)

    def unflatten(self, flat: Tensor) -> StateByKind:
        """The states by kind, from [B, m]."""
        parts = flat.split(self.sizes, dim=1)
        return {
            kind: part.reshape(len(flat), *memory.shape)
            for (kind, memory), part in zip(self.items(), parts, strict=True)
        }

    @property
    def needs_history(self) -> bool:
        return any(memory.needs_history for memory in self)

    def read(self, state: StateByKind, context: HookContext) -> None:
        """Add what a window receives to the hooks' context."""
        for kind, memory in self.items():
            memory.read(state[kind], context)

    def read_first(self, rows: int, context: HookContext) -> None:
        """The same for documents' first windows; see `Memory.read_first`."""
        for memory in self:
            memory.read_first(rows, context)

    def entering(self, state: StateByKind, started: Sequence[bool]) -> StateByKind:
        """The states that windows read; see `Memory.entering`."""
        rows = torch.tensor(started)
        return {kind: memory.entering(state[kind], rows) for kind, memory in self.items()}

    def prepare_write(self, rows: int, context: HookContext) -> None:
        """Add to the hooks' context what windows need that pass their state on."""
        for memory in self:
            memory.prepare_write(rows, context)

    def read_tokens(self, state: StateByKind, context: HookContext) -> None:
        """As `read`, for tokens in the middle of a window: only of memories that every token passes through."""
        for kind, memory in self.items():
            if memory.reads_every_token:
                memory.read(state[kind], context)

    def read_after(self, state: StateByKind, context: HookContext, tokens: Sequence[int], rotation: Rotation) -> None:
        """As `read`, after so many tokens of each row's document; see `Memory.read_after`."""
        for kind, memory in self.items():
            if memory.needs_history:
                memory.read_after(state[kind], context, tokens, rotation)
            else:
                memory.read(state[kind], context)

    def read_block(
        self, state: StateByKind | None, context: HookContext, links: WindowLinks, rotation: Rotation
    ) -> None:
        """Connect the windows of a block; see `Memory.read_block`."""
        for kind, memory in self.items():
            memory.read_block(None if state is None else state[kind], context, links, rotation)

    def write_block(self, context: HookContext) -> Tensor:
        """The flat states that leave a block, [W, m]."""
        return torch.cat([memory.write_block(context).flatten(1) for memory in self], dim=1)

    @property
    def position_shift(self) -> int | None:
        """How many positions later the tokens of windows with a state stand; see `Memory.position_shift`."""
        return next((shift for memory in self if (shift := memory.position_shift) is not None), None)

    def position_shifts(self, tokens: Sequence[int]) -> list[int] | None:
        """The same for each of some windows; see `Memory.position_shifts`."""
        return next((shifts for memory in self if (shifts := memory.position_shifts(tokens)) is not None), None)

    def forward(
        self,
        layer_outputs: Sequence[Tensor],
        window_kv: Sequence[KV],
        span: Span,
        previous: StateByKind | None,
        rerotate: Rerotate,
        prefix_lengths: Tensor | None = None,
        layer_after: Sequence[Tensor] = (),
        last_after: Tensor | None = None,
    ) -> Tensor:
        """The flat state that a window passes on, [B, m]; see `WindowRecord` and `Memory.write`."""
        record = WindowRecord(layer_outputs, window_kv, rerotate, prefix_lengths, layer_after, last_after)
        parts = [
            memory.write(record, span, None if previous is None else previous[kind]).flatten(1)
            for kind, memory in self.items()
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
