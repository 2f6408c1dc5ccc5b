# SPDX-License-Identifier: Apache-2.0
"""How the keys and values of a layer stand in a state, whose layers are all alike.

A state has the most heads and the longest keys of any layer; the rest is filled with zeros. Numbers that turn together
stand half the rotated part of a key apart (`rotations.rotate_keys`), also where the model turns neighbours, or rotates
less in this layer than in others. Queries are put the same way, so scores stay what they are: zeros add nothing, and
the order does not matter.

Shapes: h heads with keys of size d, of which r are rotated; in a state H, D and R.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .rotations import halves_first, neighbours_first


@dataclass(frozen=True)
class KVLayout:
    """The layout of one layer.

    Attributes:
        heads, key_size, value_size, rotated: of the layer.
        state_heads, state_size, state_rotated: of a state.
        neighbours: neighbouring numbers of a key turn together.
        repeats: the layer caches so many times fewer heads, and repeats them for its attention function.
    """

    heads: int
    key_size: int
    value_size: int
    rotated: int
    state_heads: int
    state_size: int
    state_rotated: int
    neighbours: bool = False
    repeats: int = 1

    @property
    def is_plain(self) -> bool:
        """Whether keys and values stand in a state as they are."""
        own = (self.heads, self.key_size, self.value_size, self.rotated)
        return (
            not self.neighbours
            and self.repeats == 1
            and own == (self.state_heads, self.state_size, self.state_size, self.state_rotated)
        )

    def keys(self, x: Tensor) -> Tensor:
        """Keys [B, h, n, d], or queries [B, g h, n, d], as in a state: [B, H, n, D] or [B, g H, n, D]."""
        if self.neighbours:
            x = halves_first(x, self.rotated)
        missing = (self.state_rotated - self.rotated) // 2
        if missing:
            half = self.rotated // 2
            parts = pad(x[..., :half], (0, missing)), pad(x[..., half : self.rotated], (0, missing))
            x = torch.cat([*parts, x[..., self.rotated :]], dim=-1)
        return self._filled(x)

    def values(self, x: Tensor) -> Tensor:
        """Values [B, h, n, d'] as in a state, [B, H, n, D]."""
        return self._filled(x)

    def layer_keys(self, x: Tensor) -> Tensor:
        """The keys of the layer, [B, h, n, d], from those of a state."""
        x = x[:, : self.heads]
        missing = (self.state_rotated - self.rotated) // 2
        if missing:
            half, middle = self.rotated // 2, self.state_rotated // 2
            x = torch.cat([x[..., :half], x[..., middle : middle + half], x[..., self.state_rotated :]], dim=-1)
        x = x[..., : self.key_size]
        return neighbours_first(x, self.rotated) if self.neighbours else x

    def layer_values(self, x: Tensor) -> Tensor:
        """The values of the layer, [B, h, n, d'], from those of a state."""
        return x[:, : self.heads, :, : self.value_size]

    def cached(self, kv: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values as the layer caches them, [B, h / repeats, n, d], from those of a state."""
        heads = self.heads // self.repeats
        return self.layer_keys(kv[0])[:, :heads], self.layer_values(kv[1])[:, :heads]

    def from_cache(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as in a state, from those that the layer has cached."""
        keys, values = (x.repeat(1, self.repeats, 1, 1) for x in (keys, values))
        return self.keys(keys), self.values(values)

    def layer_output(self, x: Tensor, query_heads: int) -> Tensor:
        """The attention output of the layer, [B, n, g h, d'], from that over keys and values of a state."""
        return x[:, :, :query_heads, : self.value_size]

    def _filled(self, x: Tensor) -> Tensor:
        """x [B, g h, n, d] with zeros for what is missing of [B, g H, n, D]."""
        groups = x.shape[1] // self.heads
        missing = (self.state_size - x.shape[-1], groups * (self.state_heads - self.heads))
        return pad(x, (0, missing[0], 0, 0, 0, missing[1])) if any(missing) else x
