# SPDX-License-Identifier: Apache-2.0
"""How far positions are chosen from those that leave the recent ones: the interface of a selection.

What a window sees is decided by the windows before it: by keys, and by queries of tokens before its first one. So no
window sees what its own tokens asked for. Equal scores are decided by position: the earlier one is kept.

Shapes: m windows of a step; h heads with keys of size d; F far slots; C positions that leave.
"""

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..base import WindowCost
from ..kv_slots import EMPTY, SlotSizes

if TYPE_CHECKING:
    from ..kv_history import LayerPast


class Selection(Protocol):
    """A way to select far positions.

    Attributes:
        dynamic: it depends on the contents (`choose`), not on positions alone.
        scans: what it selects after a window depends on what it selected before.
    """

    dynamic: bool
    scans: bool

    def choose(self, past: "LayerPast") -> Tensor:
        """The sources of the far slots of all readers in a layer, [n, 1 or h, F], in the order of positions."""
        ...

    def flops(self, cost: WindowCost, sizes: SlotSizes) -> float:
        """Operations of selecting after one window, in all layers."""
        ...


def keep_best(candidates: Tensor, scores: Tensor, count: int) -> Tensor:
    """Of candidates [m, h, F + C], in the order of positions, those with the highest scores, [m, h, count]: in the same
    order, behind empty ones if there are too few."""
    scores = scores.masked_fill(candidates == EMPTY, -torch.inf)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    kept = candidates.gather(-1, best)
    order = torch.where(kept == EMPTY, EMPTY, best).argsort(dim=-1, stable=True)
    return kept.gather(-1, order)
