# SPDX-License-Identifier: Apache-2.0
"""Look up groups of neighbouring positions in an archive of those that have left the recent ones.

After each window, its last queries attend to the mean keys of all groups in the archive. The groups that get most
attention, on average over queries and heads, are the far positions of the next window. InfLLM (Xiao et al. 2024, arXiv
2402.04617) looks up blocks of positions for the queries that need them; here these come after the window's start, so
the window before asks in their place. Queries and keys are compared without their positions. When the archive is full,
the oldest groups are dropped.
"""

import torch
from torch import Tensor

from ..base import WindowCost
from ..kv_history import LayerPast
from ..kv_slots import EMPTY, SlotSizes

QUERIES = 32  # of a window


class LookupSelection:
    """See the head of this file."""

    dynamic = True
    scans = False

    def choose(self, past: LayerPast) -> Tensor:
        far, lookups, sizes = past.far.clone(), past.slots.lookups, past.slots.sizes
        if lookups is None:
            return far
        groups, begin, end = (past.send(x) for x in (lookups.groups, lookups.begin, lookups.end))
        archived = begin[:, None] + torch.arange(sizes.archive // sizes.group, device=begin.device)
        inside = archived < end[:, None]
        archived = archived.clamp(max=len(groups) - 1)
        weights = self._weights(past, groups, archived, inside).masked_fill(~inside, -torch.inf)
        best = weights.sort(dim=1, descending=True, stable=True).indices[:, : sizes.far // sizes.group]
        found = archived.gather(1, best).masked_fill(~inside.gather(1, best), EMPTY).sort(dim=1).values
        sources = groups[found.clamp(min=0)].masked_fill((found == EMPTY)[..., None], EMPTY)
        far[past.send(lookups.next_readers)] = sources.flatten(1)[:, None]
        return far

    def _weights(self, past: LayerPast, groups: Tensor, archived: Tensor, inside: Tensor) -> Tensor:
        """The attention of each window's last queries to the groups in an archive [m, A], on average."""
        lookups = past.slots.lookups
        assert lookups is not None
        windows, first, last = (past.send(x) for x in (lookups.windows, lookups.first, lookups.last))
        positions = last[:, None] - torch.arange(min(QUERIES, past.slots.width), device=last.device)  # [m, t]
        asks = positions >= first[:, None]
        means = past.keys(groups[:, None]).float().mean(2)[archived]  # [m, A, h, d]
        queries = past.queries(windows, positions.clamp(min=0)).float().unflatten(1, (means.shape[2], -1))
        scores = torch.einsum("mhgtd,mahd->mhgta", queries, means) * past.scaling
        weights = scores.masked_fill(~inside[:, None, None, None], -torch.inf).softmax(-1).mean((1, 2))
        return (weights * asks[..., None]).sum(1)

    def flops(self, cost: WindowCost, sizes: SlotSizes) -> float:
        means = cost.kv_width * cost.stride
        scores = 2.0 * cost.attention_width * min(QUERIES, cost.window) * (sizes.archive // sizes.group)
        return (means + scores) * len(cost.queries)
