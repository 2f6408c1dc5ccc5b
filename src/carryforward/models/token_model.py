# SPDX-License-Identifier: Apache-2.0
"""Models with an output for every token: logits or hidden states, and a loss that is computed inside the window."""

from typing import Any

import torch
from torch import Tensor

from ..engine import bptt
from ..engine.batch_plan import BatchPlan
from ..engine.loss import nll_sum as window_nll
from ..engine.window_batches import WindowBatch
from ..engine.window_model import WindowInputs
from ..engine.window_program import OutputSpec
from ..windows import IGNORE
from .base import RecurrentPreTrainedModel
from .outputs import OutputLayout, scatter_outputs


class TokenOutputModel(RecurrentPreTrainedModel):
    """A model with an output for every token. A subclass says what the base model outputs from a position on."""

    def _token_outputs(self, inputs: dict[str, Any], start: int, width: int) -> tuple[Tensor, Any]:
        """The outputs of positions from `start` to `width`, [b, width - start, ...], and what the base model gave."""
        raise NotImplementedError

    @property
    def _output_size(self) -> int:
        """Numbers per token."""
        return self._num_classes

    def _window_outputs(self, inputs: dict[str, Any], start: int) -> tuple[Tensor, ...]:
        values, outputs = self._token_outputs(inputs, start, inputs["input_ids"].shape[1])
        return values, *self._hidden_states(inputs, outputs, start)

    def probe_outputs(self, ids: Tensor) -> dict[str, Any]:
        return {"targets": torch.full_like(ids, IGNORE)}

    def _window_loss(self, inputs: dict[str, Any], window: WindowInputs) -> Tensor:
        assert window.targets is not None
        values, _ = self._token_outputs(inputs, window.start, window.ids.shape[1])
        return window_nll(values, window.targets)

    def _read_documents(
        self,
        plan: BatchPlan,
        columns: Tensor | None,
        width: int,
        num_items_in_batch: Tensor | int | None = None,
        hidden_states: bool = False,
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """Run a plan: the outputs, [B, width, ...], if they are needed, and the other fields of the result.

        Args:
            columns, width: where outputs go, as in `BatchPlan.output_columns`.
            hidden_states: whether the result has the hidden states of all layers.
        """
        layout = OutputLayout(plan, columns, width)

        def start(batch: WindowBatch) -> int:
            if self._capturable_outputs:
                return 0
            return batch.first_output if plan.labels is None else min(batch.first_scored, batch.first_output)

        def make(batch: WindowBatch, scores: Tensor, *hidden: Tensor) -> bptt.Outputs:
            begin = start(batch)
            outputs = tuple(layout.select(batch, values, begin) for values in (scores, *hidden))
            if plan.labels is None:
                return outputs
            first = batch.first_scored
            return window_nll(scores[:, first - begin :], batch.targets(first)), *outputs

        # Counted before the windows run: afterwards gradients occupy the memory.
        n_scored = None if plan.labels is None else plan.count_scored()
        spec = OutputSpec(make, start, hidden_states=hidden_states) if plan.outputs else None
        results, flat = self._run(plan, spec)
        fields: dict[str, Any] = {"state": self._state(plan, flat)}
        if not plan.causal:
            fields["emitted"] = torch.tensor(plan.emitted())
        if n_scored is not None:
            nll_sum = sum((outputs[0] for outputs in results), torch.zeros((), device=flat.device))
            items = n_scored.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
            fields |= {"loss": nll_sum / items, "nll_sum": nll_sum, "n_scored": n_scored}
        if not plan.outputs:
            return None, fields
        if hidden_states:
            fields["hidden_states"] = layout.hidden_states([outputs[-1] for outputs in results], self.config, flat)
        if not results:  # a piece of a document that completes no window of an encoder
            return flat.new_zeros(len(plan.read), width, self._output_size), fields
        values = torch.cat([outputs[plan.labels is not None] for outputs in results])
        return scatter_outputs(values, plan.index(layout.targets), len(plan.read), width), fields
