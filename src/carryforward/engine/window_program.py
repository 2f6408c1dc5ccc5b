# SPDX-License-Identifier: Apache-2.0
"""The windows of one call of a model, as `bptt` unrolls them: which rows run together, and where their states go."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import bptt
from .cuda_graphs import Result, Work
from .graph_cache import Call
from .window_batches import Cell, Reading


@dataclass(frozen=True)
class Emit:
    """What windows give out, where that is not their loss.

    Attributes:
        of: makes it, from a cell and what the model gave for it (`_given`).
        start: the first position of a cell from which on something is wanted.
    """

    of: Callable[..., bptt.Emission]
    start: Callable[[Cell], int] = lambda cell: 0


class Program(bptt.Program):
    """One call's windows, for `bptt.unroll`. Without `emit` a window gives the summed loss of its targets."""

    def __init__(
        self,
        model: Any,
        reading: Reading,
        emit: Emit | None,
        graph_cache: Call | None = None,
        setting: tuple = (),
        window: Callable[[Work], Result] | None = None,
    ):
        """
        Args:
            setting: what the memory of a window depends on beside its shape.
            window: runs a window, if not the model's own way.
        """
        self.model = model
        self.reading = reading
        self.emit = emit
        self.graph_cache = graph_cache
        self.setting = setting
        self.window = window or model._window
        self.cells: list[Cell | None] = [*reading.cells]
        self.inputs = [reading.tokens] if reading.labels is None else [reading.tokens, reading.labels]

    def idle(self) -> None:
        """Wait for the other ranks: as many cells as the one with the most, those beyond our own without effect."""
        most = torch.tensor(len(self.cells), device=self.model.device)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        self.cells += [None] * (int(most) - len(self.cells))

    def kind(self, cell: Cell | None) -> tuple:
        if cell is None:
            return ()
        weight = self.model.recurrence.weight
        autocast = torch.is_autocast_enabled(weight.device.type)
        settings = self.emit is None, autocast, weight.dtype, self.reading.masked(cell), *self.setting
        return len(cell.rows), cell.width, cell.has_state, *settings

    def gathered(self) -> list[Tensor | None]:
        return [] if self.graph_cache is None else self.graph_cache.gathered()

    def advance(self, cell: Cell | None, table: Tensor, head: bool) -> tuple[bptt.Emission, Tensor]:
        reading, model = self.reading, self.model
        if cell is None:
            ids = reading.tokens.new_zeros(1, 1)
            return (model.base(input_ids=ids, use_cache=False).logits.sum() * 0,), table
        pooled = reading.pooled(cell) if reading.use_state else {}
        if not head and not pooled:
            return (), table
        everyone = len(cell.rows) == len(table)
        carried = None
        if cell.has_state:
            carried = table if everyone else table.index_select(0, reading.index(cell.rows))
            if any(cell.cut):
                carried = torch.where(reading.index(cell.cut)[:, None], carried.detach(), carried)
        start, targets = 0, None
        if head:
            start = reading.scored_from(cell) if self.emit is None else self.emit.start(cell)
            targets = reading.targets(cell, start) if self.emit is None else None
        outputs = head and self.emit is not None
        work = Work(
            *reading.inputs(cell), *reading.fronts(cell), carried, targets, start, outputs, tuple(pooled),
            self.kind(cell),
        )  # fmt: skip
        emitted, states = self.window(work) if self.graph_cache is None else self.graph_cache.run(work, table)
        if self.emit is not None and head:
            emitted = self.emit.of(cell, *emitted)
        for new, done in zip(states, pooled.values(), strict=True):
            if len(done) < len(table):
                rows = reading.index([cell.rows[i] for i in done])
                new = table.index_copy(0, rows, new.index_select(0, reading.index(done)))
            table = new
        return emitted, table
