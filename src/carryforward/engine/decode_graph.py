# SPDX-License-Identifier: Apache-2.0
"""One more token in every row of a `window_cache`, captured as a CUDA graph: on a GPU a token is little work in many
small kernels, as a window is. What it reads and writes are the cache's own buffers, which stay in place."""

from typing import Any

import torch
from torch import Tensor

from ..backbones import hooks
from . import cuda_graphs


def mode(model: Any) -> tuple:
    """What a recorded step depends on that may change between two tokens."""
    weight = model.recurrence.weight
    device = weight.device.type
    autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return *autocast, model.training, weight.dtype, next(model.parameters()).data_ptr()


class DecodeGraph:
    """One more token in every row of a `WindowCache`, as a recording that reads and writes its buffers."""

    def __init__(self, cache: Any, model: Any, column: Tensor):
        device = model.device
        self.column = column.to(device).clone()
        self.rows = torch.arange(len(column), device=device)
        self.position = torch.zeros(len(column), 1, dtype=torch.long, device=device)
        self.new = torch.ones_like(self.position)
        self.seen = torch.zeros(len(column), dtype=torch.bool, device=device)
        self.last = torch.zeros(1, dtype=torch.long, device=device)  # kept: a recording does not own what it reads
        self.counts: list[int] = []
        self._refresh(cache)

        def step() -> Tensor:  # its effects are the same however often it is run
            carry = hooks.HookContext()
            carry.held, carry.seen = cache._held(), self.seen
            return cache._run(model, self.rows, self.column, self.position, self.new == 0, carry, self.last)

        self.mode = mode(model)
        with cuda_graphs.uncached_autocast(device):
            cuda_graphs.warm_up(step, times=1)  # nothing is compiled
            self.logits, self.replay = cuda_graphs.record(step, None)

    def _refresh(self, cache: Any) -> None:
        """Where rows stand, after they were moved by other means."""
        self.position.copy_(torch.tensor(cache._position)[:, None])
        self.seen.copy_(torch.tensor([cache._sees_state(row) for row in range(cache._batch)]))
        self.stale = False

    def __call__(self, cache: Any, column: Tensor, new: list[int]) -> Tensor:
        if self.stale:
            self._refresh(cache)
        if new != self.counts:
            self.new.copy_(torch.tensor(new)[:, None])
            self.counts = new
        self.column.copy_(column)
        self.replay()
        self.position += self.new
        return self.logits.clone()
