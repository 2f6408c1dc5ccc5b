# SPDX-License-Identifier: Apache-2.0
"""The recurrent models, one class per head, all ordinary `PreTrainedModel`s.

Each says what a window gives out and how that becomes the call's output: logits or hidden states for every token, a
loss computed inside the window, or one vector per window for a classifier of whole documents.
"""

from typing import Any

import torch
from torch import Tensor

from ..engine import bptt, chunked_loss
from ..engine.window_batches import Cell, Reading
from ..engine.window_program import Emit
from .base import RecurrentPreTrainedModel
from .outputs import Given, spread


class TokenOutputModel(RecurrentPreTrainedModel):
    """Models that give something for every token. A subclass says what the base model gives from a position on."""

    def _outputs(self, inputs: dict[str, Any], start: int, width: int) -> Tensor:
        raise NotImplementedError

    @property
    def _num_outputs(self) -> int:
        """How many numbers that is for each."""
        return self._num_classes

    def _given(self, inputs: dict[str, Any], start: int) -> tuple[Tensor, ...]:
        return (self._outputs(inputs, start, inputs["input_ids"].shape[1]),)

    def _nll_sum(self, inputs: dict[str, Any], targets: Tensor, start: int) -> Tensor:
        return chunked_loss.nll_sum(self._outputs(inputs, start, inputs["input_ids"].shape[1]), targets)

    def _run(
        self,
        reading: Reading,
        columns: Tensor | None,
        width: int,
        num_items_in_batch: Tensor | int | None = None,
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """Read the documents; give back the outputs, [B, width, ...], if they are wanted, and the other fields.

        Args:
            columns, width: where outputs go, as `Reading.place` takes it.
        """
        given = Given(reading, columns, width)

        def start(cell: Cell) -> int:
            if self._small:
                return 0
            return reading.scored_from(cell) if reading.labels is not None else given.first[id(cell)]

        def emit(cell: Cell, scores: Tensor) -> bptt.Emission:
            begin = start(cell)
            outputs = given.of(cell, scores, begin)
            if reading.labels is None:
                return (outputs,)
            first = reading.scored_from(cell)
            return chunked_loss.nll_sum(scores[:, first - begin :], reading.targets(cell, first)), outputs

        # before the windows: afterwards their gradients take the room
        n_scored = None if reading.labels is None else reading.count_scored()
        emissions, carried = self._unroll(reading, Emit(emit, start) if reading.outputs else None)
        fields: dict[str, Any] = {"state": reading.state(*self._parts(carried))}
        if not reading.causal:
            fields["emitted"] = torch.tensor(reading.emitted())
        if n_scored is not None:
            nll_sum = sum((emitted[0] for emitted in emissions), torch.zeros((), device=carried.device))
            items = n_scored.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
            fields |= {"loss": nll_sum / items, "nll_sum": nll_sum, "n_scored": n_scored}
        if not reading.outputs:
            return None, fields
        if not emissions:  # an encoder's piece that completes no window
            return carried.new_zeros(len(reading.read), width, self._num_outputs), fields
        values = torch.cat([emitted[-1] for emitted in emissions])
        return spread(values, reading.index(given.where), len(reading.read), width), fields
