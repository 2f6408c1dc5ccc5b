# SPDX-License-Identifier: Apache-2.0
"""Keep the positions whose keys are least like the others.

KeyDiff (Park et al. 2025, arXiv 2504.15364): the keys kept, in each head, are those with the lowest cosine similarity
to the mean of all candidates' normalised keys. Keys are compared without their positions. In the first layer, those of
a rotary model are then equal for equal tokens. Similarities are rounded, so that position decides between these, and
not the numerical error of a rotation, which depends on where windows and calls begin.
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..base import WindowCost
from ..kv_history import LayerPast
from ..kv_slots import EMPTY, SlotSizes
from .base import keep_best

DECIMALS = 4  # of similarities


class DissimilarSelection:
    """See the head of this file."""

    dynamic = True
    scans = True

    def choose(self, past: LayerPast) -> Tensor:
        heads = past.key.shape[1]
        far = past.far.expand(-1, heads, -1).clone()
        for step in past.slots.steps:
            readers, candidates = past.send(step.readers), past.send(step.candidates)
            own = far[readers.clamp(min=0)].masked_fill((readers == EMPTY)[:, None, None], EMPTY)
            every = torch.cat([own, candidates[:, None].expand(-1, heads, -1)], dim=2)
            keys = normalize(past.keys(every).float(), dim=-1) * (every != EMPTY)[..., None]
            mean = normalize(keys.sum(2, keepdim=True), dim=-1)
            scores = -(keys * mean).sum(-1).round(decimals=DECIMALS)
            far[past.send(step.next_readers)] = keep_best(every, scores, past.slots.sizes.far)
        return far

    def flops(self, cost: WindowCost, sizes: SlotSizes) -> float:
        compared = sizes.far + cost.stride
        return 6.0 * cost.kv_width * compared * len(cost.queries)
