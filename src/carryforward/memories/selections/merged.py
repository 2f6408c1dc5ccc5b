# SPDX-License-Identifier: Apache-2.0
"""Average neighbours: a far slot holds the mean of the keys and of the values of `group` positions, by default four.

Compressive Transformer (Rae et al. 2020, arXiv 1911.05507) with mean pooling, on keys and values instead of layers'
outputs. Keys are averaged at one position. The oldest averages are dropped.
"""

from torch import Tensor

from ..base import WindowCost
from ..kv_history import LayerPast
from ..kv_slots import SlotSizes


class MergedSelection:
    """See the head of this file."""

    dynamic = False
    scans = False

    def choose(self, past: LayerPast) -> Tensor:
        raise AssertionError("which positions are averaged does not depend on their contents")

    def flops(self, cost: WindowCost, sizes: SlotSizes) -> float:
        return 2.0 * cost.kv_width * sizes.far * sizes.merged * len(cost.queries)
