# SPDX-License-Identifier: Apache-2.0
"""What a call gives back, and where it comes from: which positions of its windows are given out, and how these are put
together again."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from ..engine.window_batches import Cell, Reading
from ..state import State
from .window_cache import WindowCache


@dataclass
class RecurrentOutput(ModelOutput):
    """What a recurrent model gives back.

    Attributes:
        loss: mean negative log-likelihood of the scored targets (or their sum over `num_items_in_batch`).
        logits: as in Hugging Face, in the layout of the input; None when labels were given, unless asked for.
        last_hidden_state: of a model without a head: one vector per token, in the layout of the input.
        nll_sum, n_scored: the sum behind the loss, in nats, and the number of its targets. Both add up over pieces.
        emitted: for encoders, the document tokens [from, to) that each row's outputs stand for, [B, 2].
        state: where the documents stand, to go on with in the next call.
        past_key_values: in generation, the window's keys and values, to go on with token by token.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    nll_sum: Tensor | None = None
    n_scored: Tensor | None = None
    emitted: Tensor | None = None
    state: State | None = None
    past_key_values: WindowCache | None = None


class Given:
    """Which positions' outputs a call gives out, if any, and where they go.

    Attributes:
        first: the first such position of each cell, by its id; the last one there is where nothing is given out, since
            outputs have a shape.
        where: the index of each in the call's outputs [B * width], on the CPU.
    """

    def __init__(self, reading: Reading, columns: Tensor | None, width: int):
        cells = reading.cells if reading.outputs else []
        place = reading.place(columns) if cells else torch.empty(0)
        found = [reading.given(cell, place, width) for cell in cells]
        pairs = [(id(cell), positions) for cell, (_, positions, _) in zip(cells, found, strict=True)]
        last = {id(cell): cell.width - 1 for cell in cells}
        self.first = {i: int(positions.min()) if len(positions) else last[i] for i, positions in pairs}
        self.where = torch.cat([torch.empty(0, dtype=torch.long), *(where for _, _, where in found)])
        # on the device before the first window: nothing there waits for the host then
        chosen = [torch.stack([rows, positions]) for rows, positions, _ in found]
        together = reading.index(torch.cat(chosen, dim=1)) if chosen else torch.empty(2, 0)
        parts = together.split([len(positions) for _, positions in pairs], dim=1)
        self._chosen = {i: part for (i, _), part in zip(pairs, parts, strict=False)}

    def of(self, cell: Cell, outputs: Tensor, start: int = 0) -> Tensor:
        """Those of a cell's outputs [b, n - start, ...] that are given out."""
        rows, positions = self._chosen[id(cell)].to(outputs.device)
        return outputs[rows, positions - start if start else positions]


def spread(values: Tensor, where: Tensor, batch: int, width: int, elsewhere: float = 0.0) -> Tensor:
    """Outputs [n, ...] in the places of a call's, [B, width, ...]."""
    empty = values.new_full((batch * width, *values.shape[1:]), elsewhere)
    return empty.index_copy(0, where.to(values.device), values).unflatten(0, (batch, width))


def summarise(reading: Reading, firsts: list[Tensor]) -> Tensor | None:
    """The maximum over windows of their first token's vectors, [B, k]: of these windows, and of those before."""
    batch, before = len(reading.read), reading.before.summary
    parts = []
    for cell, first in zip(reading.cells, firsts, strict=True):
        lowest = first.new_full((batch, first.shape[1]), -torch.inf)
        parts.append(lowest.index_copy(0, reading.index(cell.rows).to(first.device), first))
    if before is not None:
        parts.append(before.to(parts[0].device if parts else before.device))
    return torch.stack(parts).amax(dim=0) if parts else None


def columns_to_keep(logits_to_keep: int | Tensor, width: int) -> tuple[Tensor, int, Tensor | None]:
    """For each input column its output column or -1; the number of output columns; and how to order them at last."""
    if isinstance(logits_to_keep, Tensor):
        if logits_to_keep.numel() and not -width <= int(logits_to_keep.min()) <= int(logits_to_keep.max()) < width:
            raise ValueError(f"logits_to_keep: columns are {-width} to {width - 1}, not {logits_to_keep.tolist()}.")
        listed, order = (logits_to_keep.cpu() % width).unique(return_inverse=True)
        columns = torch.full((width,), -1)
        columns[listed] = torch.arange(len(listed))
        return columns, len(listed), order
    if logits_to_keep < 0:
        raise ValueError(f"logits_to_keep={logits_to_keep}: give 0 for all columns, n for the last n, or a tensor.")
    kept = min(logits_to_keep, width) or width
    return torch.arange(width).sub(width - kept).clamp(min=-1), kept, None


def columns_of(reading: Reading, state: State | None) -> tuple[Tensor | None, int]:
    """Outputs have the layout of the input, unless an encoder reads in pieces: then they stand one behind the other."""
    if not reading.outputs:
        return None, 0
    if reading.causal or (state is None and reading.final):
        return torch.arange(reading.width), reading.width
    return None, max(end - begin for begin, end in reading.emitted())
