# SPDX-License-Identifier: Apache-2.0
"""One decoding step, captured as a CUDA graph: one more token in every row of a `WindowCache`.

On a GPU a token is little work in many small kernels, as a window is. What the step reads and writes are the cache's
own buffers, which stay in place.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from . import cuda_graphs
from .window_model import WindowModel


class StepCache(Protocol):
    """What a decoding step needs of a cache."""

    positions: list[int]

    def rows_with_state(self) -> list[bool]: ...

    def run_step(
        self, model: Any, rows: Tensor, column: Tensor, positions: Tensor, ended: Tensor, with_state: Tensor
    ) -> Tensor: ...


def decode_key(model: WindowModel) -> tuple:
    """What a captured step depends on that may change between two tokens."""
    like = model.memory.like
    device = like.device.type
    autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    training: bool = model.training  # type: ignore[attr-defined]
    return *autocast, training, like.dtype, next(iter(model.parameters())).data_ptr()


class DecodeGraph:
    """A captured decoding step that reads and writes the buffers of a cache."""

    def __init__(self, cache: StepCache, model: WindowModel, column: Tensor):
        device = model.device
        self.column = column.to(device).clone()
        self.rows = torch.arange(len(column), device=device)[:, None]
        self.position = torch.zeros(len(column), 1, dtype=torch.long, device=device)
        self.new = torch.ones_like(self.position)
        self.with_state = torch.zeros(len(column), dtype=torch.bool, device=device)
        self.counts: list[int] = []
        self._refresh(cache)

        def step() -> Tensor:  # idempotent: running it again changes nothing
            return cache.run_step(model, self.rows, self.column, self.position, self.new == 0, self.with_state)

        self.key = decode_key(model)
        with cuda_graphs.uncached_autocast(device):
            cuda_graphs.warm_up(step, times=1)  # nothing is compiled
            self.logits, self.replay = cuda_graphs.capture(step, None)

    def _refresh(self, cache: StepCache) -> None:
        """Copy the rows' positions, after they moved by other means."""
        self.position.copy_(torch.tensor(cache.positions)[:, None])
        self.with_state.copy_(torch.tensor(cache.rows_with_state()))
        self.stale = False

    def __call__(self, cache: StepCache, column: Tensor, new: list[int]) -> Tensor:
        """The logits after one more column of tokens.

        Args:
            new: for each row 1, or 0 if it has ended and reads nothing.
        """
        if self.stale:
            self._refresh(cache)
        if new != self.counts:
            self.new.copy_(torch.tensor(new)[:, None])
            self.counts = new
        self.column.copy_(column)
        self.replay()
        self.position += self.new
        return self.logits.clone()
