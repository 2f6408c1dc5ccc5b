# SPDX-License-Identifier: Apache-2.0
"""The windows of one call as the program that `bptt` unrolls: which rows run together, and where their states go."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..windows import Span
from . import bptt
from .batch_plan import BatchPlan
from .graph_cache import GraphSession
from .run_policy import RunPolicy
from .window_batches import WindowBatch
from .window_model import RunWindow, ShapeKey, WindowInputs, WindowModel


@dataclass(frozen=True)
class OutputSpec:
    """What windows give out, if not their loss.

    Attributes:
        make: makes it, from a window batch and what the model's `run_window` returned for it.
        start: the first position of a window batch from which on outputs are needed.
        record_attention: whether attention to the state is recorded too.
        hidden_states: whether the hidden states of all layers are given out too.
    """

    make: Callable[..., bptt.Outputs]
    start: Callable[[WindowBatch], int] = lambda batch: 0
    record_attention: bool = False
    hidden_states: bool = False


class WindowProgram(bptt.Program):
    """One call's window batches, for `bptt.unroll`. Without `outputs` a window gives the summed loss of its targets."""

    def __init__(
        self,
        model: WindowModel,
        plan: BatchPlan,
        outputs: OutputSpec | None,
        policy: RunPolicy,
        run_window: RunWindow,
        session: GraphSession | None = None,
    ):
        self.model = model
        self.plan = plan
        self.outputs = outputs
        self.policy = policy
        self.run_window = run_window
        self.session = session
        self.batches: list[WindowBatch | None] = [*plan.batches]
        self.inputs = [plan.tokens] if plan.labels is None else [plan.tokens, plan.labels]
        self._policy_key = policy.training, len(policy.trainable)

    def pad_to_longest_rank(self) -> None:
        """Add empty steps, so that all ranks run as many windows as the one with the most."""
        most = torch.tensor(len(self.batches), device=self.model.device)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        self.batches += [None] * (int(most) - len(self.batches))

    @property
    def _gives_hidden_states(self) -> bool:
        return self.outputs is not None and self.outputs.hidden_states

    def shape_key(self, batch: WindowBatch | None) -> ShapeKey:
        if batch is None:
            return ()
        like = self.model.memory.like
        autocast = torch.is_autocast_enabled(like.device.type)
        kinds = self.outputs is None, self._gives_hidden_states
        settings = *kinds, autocast, like.dtype, batch.masked, *self._policy_key
        return len(batch.rows), batch.width, batch.has_state, *settings

    def accumulated_gradients(self) -> list[Tensor | None]:
        return [] if self.session is None else self.session.accumulated_gradients()

    def run(self, batch: WindowBatch | None, state: Tensor, with_outputs: bool) -> tuple[bptt.Outputs, Tensor]:
        if batch is None:
            return (self.model.run_empty(),), state
        spans = self._spans(batch)
        if not with_outputs and not spans:
            return (), state
        start, targets = 0, None
        if with_outputs:
            start = batch.first_scored if self.outputs is None else self.outputs.start(batch)
            targets = batch.targets(start) if self.outputs is None else None
        window = WindowInputs(
            *batch.inputs(),
            *batch.prefix_inputs(),
            state=self._entering(batch, state),
            begins=self.plan.use_state and not batch.has_state,
            links=batch.links(),
            targets=targets,
            start=start,
            outputs=with_outputs and self.outputs is not None,
            record_attention=self.outputs is not None and self.outputs.record_attention,
            hidden_states=self._gives_hidden_states,
            spans=tuple(spans),
            depth=batch.depth,
            shape_key=self.shape_key(batch),
        )
        outputs, new_states = self.run_window(window, state)
        if self.outputs is not None and with_outputs:
            outputs = self.outputs.make(batch, *outputs)
        for new, rows in zip(new_states, spans.values(), strict=True):
            state = self._updated(batch, state, new, rows)
        return outputs, state

    def is_needed(self, batch: WindowBatch | None) -> bool:
        return batch is not None and self.plan.continues(batch) and bool(self._spans(batch))

    def _spans(self, batch: WindowBatch) -> dict[Span, list[int]]:
        return batch.state_spans() if self.plan.use_state else {}

    def add_final_state(self, batch: WindowBatch | None, final: Tensor, state: Tensor) -> Tensor:
        rows = [] if batch is None else batch.final_rows
        if not rows:
            return final
        index = self.plan.index(rows)
        return final.index_copy(0, index, state.index_select(0, index))

    def _entering(self, batch: WindowBatch, state: Tensor) -> Tensor | None:
        """The state that enters, [R, m]; unless in a block, one row for each window."""
        if not batch.entering:
            return None
        plan = self.plan
        entering = (
            state if batch.entering == [*range(len(state))] else state.index_select(0, plan.index(batch.entering))
        )
        if any(batch.detach) and not batch.is_block:  # in a block, links detach
            entering = torch.where(plan.index(batch.detach)[:, None], entering.detach(), entering)
        return entering

    def _updated(self, batch: WindowBatch, state: Tensor, new: Tensor, windows: list[int]) -> Tensor:
        """The state of all rows after these windows of a batch have passed on theirs: of a block only these, [W, m]."""
        rows = [batch.rows[i] for i in windows]
        if rows == [*range(len(state))]:
            return new
        if not batch.is_block:
            new = new.index_select(0, self.plan.index(windows))
        return state.index_copy(0, self.plan.index(rows), new)
