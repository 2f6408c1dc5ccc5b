# SPDX-License-Identifier: Apache-2.0
"""Keys and values from the position at which they were made to the one at which a window sees them.

In between, in a state, they have none: rotary keys are rotated to position 0, learned ones are less their position's
offset. `nowhere` is the target or origin that means that.

Shapes: n readers, h heads with keys of size d, w slots. Positions are [n, 1, w], or [n, h, w] if heads differ.
"""

from typing import Protocol

import torch
from torch import Tensor

from ..backbones.rotations import rotate_keys
from .base import Rotation

Positions = Tensor | int


class LayerMove(Protocol):
    """Moves keys (side 0) or values (side 1) of a layer, [n, h, w, d], to other positions.

    `detached` names slots, [n, 1 or h, w], whose contents are detached (truncated BPTT). What a window makes of them is
    its own work: it still trains the positions at which it puts them.
    """

    def __call__(
        self, x: Tensor, side: int, origins: Positions, targets: Positions, detached: Tensor | None = None
    ) -> Tensor: ...

    def unplaced(self, queries: Tensor, positions: Tensor) -> Tensor:
        """Remove the rotation from queries at positions of their windows. Learned positions stay in them."""
        ...


class Move(Protocol):
    """What a model's positions have in common in all layers."""

    nowhere: int

    def of_layer(self, layer: int) -> LayerMove:
        """How keys and values of a layer, counted from 0, are moved."""
        ...


class RotaryMove:
    """Re-rotates keys; values have no position."""

    nowhere = 0

    def __init__(self, rotation: Rotation, reach: int, device: torch.device):
        """
        Args:
            reach: no position is moved further than this, in either direction.

        The tables of cosines and sines begin with the distance -reach, each [2 reach + 1, L, d].
        """
        self.reach = reach
        # Only distances back: some models rotate otherwise if any position lies beyond those that they were trained on.
        cos, sin = rotation(torch.arange(reach + 1, device=device)[:, None])
        self.cos, self.sin = (torch.cat([forward[1:].flip(0), x]) for forward, x in ((cos, cos), (-sin, sin)))

    def of_layer(self, layer: int) -> LayerMove:
        return _RotaryLayerMove(self.cos[:, layer], self.sin[:, layer], self.reach)


class _RotaryLayerMove:
    def __init__(self, cos: Tensor, sin: Tensor, reach: int):
        self.cos, self.sin, self.reach = cos, sin, reach

    def __call__(
        self, x: Tensor, side: int, origins: Positions, targets: Positions, detached: Tensor | None = None
    ) -> Tensor:
        x = _detached_where(x, detached)
        if side:
            return x
        back = torch.as_tensor(origins - targets + self.reach, device=x.device)
        cos, sin = (table.to(x.device)[back] for table in (self.cos, self.sin))
        return rotate_keys(x, cos, sin)

    def unplaced(self, queries: Tensor, positions: Tensor) -> Tensor:
        return self(queries, 0, positions, 0)


class LearnedMove:
    """Adds the difference of two position offsets, [L, 2, h, positions, d]."""

    nowhere = -1

    def __init__(self, offsets: Tensor):
        self.offsets = offsets

    def of_layer(self, layer: int) -> LayerMove:
        return _LearnedLayerMove(self.offsets[layer])


class _LearnedLayerMove:
    def __init__(self, offsets: Tensor):
        self.offsets = offsets

    def __call__(
        self, x: Tensor, side: int, origins: Positions, targets: Positions, detached: Tensor | None = None
    ) -> Tensor:
        offsets = self.offsets[side].transpose(0, 1).to(x.device)  # [positions, h, d]
        offsets = torch.cat([offsets.new_zeros(1, *offsets.shape[1:]), offsets])  # that of nowhere comes first
        there, here = (self._of(offsets, positions) for positions in (targets, origins))
        x, here = (_detached_where(values, detached) for values in (x, here))
        return x + (there - here)

    def _of(self, offsets: Tensor, positions: Positions) -> Tensor:
        """Position offsets at positions [n, 1 or h, w]: [n, h, w, d]."""
        return offsets[positions + 1][:, None] if isinstance(positions, int) else take(offsets, positions + 1)

    def unplaced(self, queries: Tensor, positions: Tensor) -> Tensor:
        return queries


def _detached_where(x: Tensor, detached: Tensor | None) -> Tensor:
    """x [n, h, w, d], detached in the slots that are named."""
    return x if detached is None else torch.where(detached.to(x.device)[..., None], x.detach(), x)


def take(x: Tensor, index: Tensor) -> Tensor:
    """Of x [N, h, d] those at an index [n, 1, w], or, for each head, at [n, h, w]: [n, h, w, d]."""
    heads, index = x.shape[1], index.to(x.device)
    if index.shape[1] == 1:
        return x.index_select(0, index.flatten()).view(len(index), index.shape[2], *x.shape[1:]).transpose(1, 2)
    index = index * heads + torch.arange(heads, device=index.device)[:, None]
    return x.flatten(0, 1).index_select(0, index.flatten()).view(*index.shape, x.shape[2])
