# SPDX-License-Identifier: Apache-2.0
"""Keep the positions to which the last token before the next window attends most.

TOVA (Oren et al. 2024, "Transformers are Multi-State RNNs", arXiv 2401.06104): the positions kept are those with the
highest attention weights from the last token, on average over the heads of a layer. TOVA drops one position after each
token; here a window's worth is dropped after each window, and sinks and recent positions are never dropped.
"""

import torch
from torch import Tensor

from ..base import WindowCost
from ..kv_history import LayerPast
from ..kv_slots import EMPTY, SelectionStep, SlotSizes
from .base import keep_best


class AttentionSelection:
    """See the head of this file."""

    dynamic = True
    scans = True

    def choose(self, past: LayerPast) -> Tensor:
        far, slots = past.far.clone(), past.slots.sizes
        begin = slots.sinks
        for step in past.slots.steps:
            weights = self._weights(past, step, far)
            readers, candidates, columns = (past.send(x) for x in (step.readers, step.candidates, step.columns))
            own = far[readers.clamp(min=0)].masked_fill((readers == EMPTY)[:, None, None], EMPTY)
            scores = torch.cat([weights[:, begin : begin + slots.far], weights.gather(1, columns.clamp(min=0))], dim=1)
            every = torch.cat([own, candidates[:, None]], dim=2)
            far[past.send(step.next_readers)] = keep_best(every, scores[:, None], slots.far)
        return far

    def _weights(self, past: LayerPast, step: SelectionStep, far: Tensor) -> Tensor:
        """The attention of each window's last token to slots and to the window itself, [m, S + T]."""
        windows, readers, last = (past.send(x) for x in (step.windows, step.readers, step.last))
        seen, visible = past.seen_keys(readers, far)
        keys = torch.cat([seen, past.key[windows]], dim=2)  # [m, h, S + T, d]
        inside = torch.arange(past.key.shape[2], device=last.device) <= last[:, None]
        query = past.query[windows, :, last]  # [m, heads of queries, d]
        query = query.unflatten(1, (keys.shape[1], -1))  # heads that share keys
        scores = torch.einsum("mhgd,mhsd->mhgs", query.float(), keys.float()) * past.scaling
        hidden = ~torch.cat([visible, inside], dim=1)[:, None, None]
        return scores.masked_fill(hidden, -torch.inf).softmax(-1).mean((1, 2))

    def flops(self, cost: WindowCost, sizes: SlotSizes) -> float:
        return 2.0 * cost.attention_width * (sizes.total + cost.window) * len(cost.queries)
