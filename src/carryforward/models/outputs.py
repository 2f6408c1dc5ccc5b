# SPDX-License-Identifier: Apache-2.0
"""What a call returns, and how the outputs of its windows are put together."""

from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from ..config import RecurrentModelConfig
from ..engine.batch_plan import BatchPlan
from ..engine.window_batches import WindowBatch
from ..state import State
from .generation.window_cache import WindowCache


@dataclass
class RecurrentOutput(ModelOutput):
    """The output of a recurrent model.

    Attributes:
        loss: mean negative log-likelihood of the scored targets (or their sum over `num_items_in_batch`).
        logits: as in Hugging Face, in the layout of the input; None if labels were given, unless asked for.
        hidden_states: if asked for, the input of the first layer and the output of each, as the base model gives them
            (the last one after its final norm): one vector per token, from the window that gives the token's output.
        last_hidden_state: of a model without a head: one vector per token, in the layout of the input.
        nll_sum, n_scored: the sum behind the loss, in nats, and the number of its targets. Both add up over pieces.
        emitted: for encoders, the range of document tokens that each row's outputs belong to, [B, 2].
        state: how far the documents have been read, to continue from in the next call.
        past_key_values: in generation, the window's keys and values, to continue from token by token.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    nll_sum: Tensor | None = None
    n_scored: Tensor | None = None
    emitted: Tensor | None = None
    state: State | None = None
    past_key_values: WindowCache | None = None


class OutputLayout:
    """Which positions' outputs a call returns, if any, and where they go.

    Sets the output fields of the plan's window batches.

    Attributes:
        targets: the index of each output in the call's outputs [B * width], on the CPU.
    """

    def __init__(self, plan: BatchPlan, columns: Tensor | None, width: int):
        self.plan, self.width = plan, width
        batches = plan.batches if plan.outputs else []
        output_columns = plan.output_columns(columns) if batches else torch.empty(0)
        selections = [batch.select_outputs(output_columns, width) for batch in batches]
        self.targets = torch.cat([torch.empty(0, dtype=torch.long), *(targets for _, _, targets in selections)])
        if not batches:
            return
        # One transfer before the first window: the device then never waits for the host.
        indices = plan.index(torch.cat([torch.stack([rows, positions]) for rows, positions, _ in selections], dim=1))
        parts = indices.split([len(positions) for _, positions, _ in selections], dim=1)
        for batch, (_, positions, _), part in zip(batches, selections, parts, strict=True):
            batch.first_output = int(positions.min()) if len(positions) else batch.width - 1
            batch.output_rows, batch.output_positions = part

    @staticmethod
    def select(batch: WindowBatch, outputs: Tensor, start: int = 0) -> Tensor:
        """Those of a window batch's outputs [b, n - start, ...] that are returned."""
        rows, positions = batch.output_rows.to(outputs.device), batch.output_positions.to(outputs.device)
        return outputs[rows, positions - start if start else positions]

    def hidden_states(self, selected: list[Tensor], config: RecurrentModelConfig, like: Tensor) -> tuple[Tensor, ...]:
        """The hidden states of the base model's embeddings and layers, each [B, width, k], from those of each window
        batch, [n, L + 1, k]."""
        batch, base = len(self.plan.read), config.base_config
        if not selected:
            return (like.new_zeros(batch, self.width, base.hidden_size),) * (base.num_hidden_layers + 1)
        targets = self.plan.index(self.targets)
        return scatter_outputs(torch.cat(selected), targets, batch, self.width).unbind(2)


def scatter_outputs(values: Tensor, targets: Tensor, batch: int, width: int, fill: float = 0.0) -> Tensor:
    """Outputs [n, ...] at their places in a call's outputs, [B, width, ...]."""
    empty = values.new_full((batch * width, *values.shape[1:]), fill)
    return empty.index_copy(0, targets.to(values.device), values).unflatten(0, (batch, width))


def max_over_windows(plan: BatchPlan, first_tokens: list[Tensor]) -> Tensor | None:
    """The maximum over windows of their first token's vector, [B, k]: of these windows, and of earlier calls'. Readings
    that are not given out do not count."""
    batch, before = len(plan.read), plan.initial_state.summary
    parts = []
    for window_batch, vectors in zip(plan.batches, first_tokens, strict=True):
        pairs = zip(window_batch.rows, window_batch.windows, strict=True)
        remaining = [(i, row) for i, (row, window) in enumerate(pairs) if not window.is_read_again]
        while remaining:  # one window of each row at a time
            last = {row: i for i, row in remaining}
            lowest = vectors.new_full((batch, vectors.shape[1]), -torch.inf)
            rows, windows = (plan.index([*x]).to(vectors.device) for x in (last, last.values()))
            parts.append(lowest.index_copy(0, rows, vectors.index_select(0, windows)))
            remaining = [(i, row) for i, row in remaining if last[row] != i]
    if before is not None:
        parts.append(before.to(parts[0].device if parts else before.device))
    return torch.stack(parts).amax(dim=0) if parts else None


def columns_to_keep(logits_to_keep: int | Tensor, width: int) -> tuple[Tensor, int, Tensor | None]:
    """For each input column its output column or -1; the number of output columns; and their final order, if any."""
    if isinstance(logits_to_keep, Tensor):
        logits_to_keep = _listed_columns(logits_to_keep, width)
        if logits_to_keep.numel() and not -width <= int(logits_to_keep.min()) <= int(logits_to_keep.max()) < width:
            raise ValueError(f"logits_to_keep: columns are {-width} to {width - 1}, not {logits_to_keep.tolist()}.")
        listed, order = (logits_to_keep.cpu() % width).unique(return_inverse=True)
        columns = torch.full((width,), -1)
        columns[listed] = torch.arange(len(listed))
        return columns, len(listed), order
    if not isinstance(logits_to_keep, Integral) or isinstance(logits_to_keep, bool) or logits_to_keep < 0:
        raise ValueError(f"logits_to_keep={logits_to_keep!r}: give 0 for all columns, n for the last n, or a tensor.")
    count = min(int(logits_to_keep), width) or width
    return torch.arange(width).sub(width - count).clamp(min=-1), count, None


def _listed_columns(columns: Tensor, width: int) -> Tensor:
    """The numbers of the columns to keep, from a list of numbers or from a mask, as in indexing."""
    if columns.ndim != 1 or columns.is_floating_point() or columns.is_complex() or columns.is_meta:
        raise ValueError(
            f"logits_to_keep has shape {list(columns.shape)} and dtype {columns.dtype}: give column numbers, [n], or a "
            f"mask of the columns, [{width}]."
        )
    if columns.dtype != torch.bool:
        return columns.long()
    if len(columns) != width:
        raise ValueError(f"logits_to_keep is a mask of {len(columns)} columns, and input_ids has {width}.")
    return columns.nonzero()[:, 0]


def input_layout(plan: BatchPlan, state: State | None) -> tuple[Tensor | None, int]:
    """The columns of outputs: those of the input, unless an encoder reads in pieces: then they are packed."""
    if not plan.outputs:
        return None, 0
    if plan.causal or (state is None and plan.final):
        return torch.arange(plan.width), plan.width
    return None, max(end - begin for begin, end in plan.emitted())
