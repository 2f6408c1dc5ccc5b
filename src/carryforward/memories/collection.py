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
from .base import Memory, MemoryConfig, Rerotate, Rotation, WindowRecord
from .links import WindowLinks

StateByKind = dict[str, Tensor]  # the state of each memory, [B, *shape]


class Memories(nn.Module):
    """The memories of a model, by kind. Calling it computes the state that a window passes on."""

    def __init__(
        self, configs: Sequence[MemoryConfig], base: PreTrainedConfig, architecture: Architecture, window: int
    ):
        super().__init__()
        self.kinds = [config.kind for config in configs]
        for config in configs:
            self.add_module(config.kind, config.build(base, architecture, window))

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
    def layers(self) -> list[int]:
        """The layers that receive something from a state, counted from 1."""
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

    def read(self, state: StateByKind, context: HookContext) -> None:
        """Add what a window receives to the hooks' context."""
        for kind, memory in self.items():
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

    def shift_positions(self, positions: Tensor, prefix_lengths: Tensor | int) -> Tensor | None:
        """Where learned positions of a window with a state are; None where the base model counts by itself."""
        for memory in self:
            shifted = memory.shift_positions(positions, prefix_lengths)
            if shifted is not None:
                return shifted
        return None

    def forward(
        self,
        layer_outputs: Sequence[Tensor],
        window_kv: Sequence[KV],
        span: Span,
        previous: StateByKind | None,
        rerotate: Rerotate,
        prefix_lengths: Tensor | None = None,
    ) -> Tensor:
        """The flat state that a window passes on, [B, m]; see `WindowRecord` and `Memory.write`."""
        record = WindowRecord(layer_outputs, window_kv, rerotate, prefix_lengths)
        parts = [
            memory.write(record, span, None if previous is None else previous[kind]).flatten(1)
            for kind, memory in self.items()
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
