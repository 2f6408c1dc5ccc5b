# SPDX-License-Identifier: Apache-2.0
"""Keys and values inside a block: in every layer, each window takes those of its neighbour in the same call.

A `LayerLink` is called by the attention of one layer with the keys and values of all windows of the block. It holds
tensors and sizes only, and the sizes are the same in all layers, so that one compilation serves them all.

Shapes: P windows, the first F of which receive nothing; R rows of the entering state; W states that leave; heads with
keys of size d; K recent positions, then S carried positions in all: sinks, then recent.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..backbones.attention import KV
from ..backbones.rotations import rotate_keys
from ..backbones.split_windows import split_windows
from .links import WindowLinks, detached_where, gather_previous, gather_sources


class LayerLink:
    """Connects the windows of a block in one layer.

    Attributes:
        leaving: output: the keys and values that leave the block, [W, 2, heads, S, d].
    """

    leaving: Tensor

    def __init__(self, links: WindowLinks, state: Tensor | None, sinks: int, recent: int, dtype: torch.dtype):
        """
        Args:
            state: the keys and values that enter the block, [R, 2, heads, S, d].
            dtype: the precision of states.
        """
        self.links = links
        self.state = state
        self.sinks = sinks
        self.recent = recent
        self.dtype = dtype

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> tuple[KV, KV, KV | None]:
        """The keys and values of the first windows, of the others, each [P - F, heads, T, d], and the carried ones that
        these see, each [P - F, heads, S, d]."""
        *keys, leaving_keys = self._receive(key, side=0)
        *values, leaving_values = self._receive(value, side=1)
        self.leaving = torch.stack([leaving_keys, leaving_values], dim=1)
        first, others, past = zip(keys, values, strict=True)
        return first, others, past if len(past[0]) else None

    def _receive(self, x: Tensor, side: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of keys (side 0) or values (side 1): those of the first windows, those of the others, what the others see of
        their past, and what leaves the block."""
        links, entering = self.links, None if self.state is None else self.state[:, side]
        stop = min(links.next_start, x.shape[2])  # no window receives anything of a block whose windows are all short
        begin = min(links.next_start - self.recent, stop)
        first, others, recent = split_windows(x, links.num_first, begin, stop)
        recent = pad(recent, (0, 0, 0, self.recent - recent.shape[2]))
        recent = self._move_recent(recent.to(self.dtype), side)
        entering_recent = None if entering is None else entering[:, :, self.sinks :]
        past = gather_previous(recent.to(x.dtype), entering_recent, links)
        past = detached_where(past, links.detach)
        leaving = recent.index_select(0, links.last.to(x.device))
        if not self.sinks:
            return first, others, past, leaving
        starts = links.starts
        start = starts if isinstance(starts, int) else starts[: links.num_first]
        sinks = select_positions(first, start, self.sinks)
        sinks = self._move_sinks(sinks.to(self.dtype), side)
        # In the precision of states: the gradients of all windows of a document are added up here.
        entering_sinks = None if entering is None else entering[:, :, : self.sinks]
        seen = detached_where(gather_sources(sinks, entering_sinks, links.first), links.detach_first)
        left = detached_where(gather_sources(sinks, entering_sinks, links.last_first), links.last_detach_first)
        return first, others, torch.cat([seen.to(past.dtype), past], dim=2), torch.cat([left, leaving], dim=2)

    def _move_recent(self, x: Tensor, side: int) -> Tensor:
        """Move the recent positions of every window [P, heads, K, d] to where the window after it sees them."""
        raise NotImplementedError

    def _move_sinks(self, x: Tensor, side: int) -> Tensor:
        """Move the sinks of every first window [F, heads, S - K, d] to where all windows see them."""
        raise NotImplementedError


class RotaryLink(LayerLink):
    """For rotary positions: keys are re-rotated."""

    def __init__(
        self, *args, recent_rotation: tuple[Tensor, Tensor], sink_rotation: tuple[Tensor, Tensor], **kwargs
    ) -> None:
        """
        Args:
            recent_rotation, sink_rotation: cosine and sine, each [1 or P, d].
        """
        super().__init__(*args, **kwargs)
        self.recent_rotation = recent_rotation
        self.sink_rotation = sink_rotation

    def _move_recent(self, x: Tensor, side: int) -> Tensor:
        return x if side else _rotate(x, *self.recent_rotation)

    def _move_sinks(self, x: Tensor, side: int) -> Tensor:
        return x if side else _rotate(x, *self.sink_rotation)


class LearnedLink(LayerLink):
    """For learned positions: keys and values are moved by differences of position offsets."""

    def __init__(self, *args, first_shift: Tensor, other_shift: Tensor, **kwargs) -> None:
        """
        Args:
            first_shift, other_shift: for first windows, and for others, which stand behind what is carried,
                [1 or P, 2, heads, K, d].
        """
        super().__init__(*args, **kwargs)
        self.first_shift = first_shift
        self.other_shift = other_shift

    def _move_recent(self, x: Tensor, side: int) -> Tensor:
        is_first = (torch.arange(len(x), device=x.device) < self.links.num_first)[:, None, None, None]
        first, other = (shift[:, side].to(x.device) for shift in (self.first_shift, self.other_shift))
        return (x + torch.where(is_first, first, other)).to(self.dtype)

    def _move_sinks(self, x: Tensor, side: int) -> Tensor:
        return x  # they stand at a document's first positions, as in its first window


def _rotate(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate keys [n, heads, positions, d] by angles [1 or n, d]."""
    cos, sin = (x.to(keys.device)[:, None, None] for x in (cos, sin))
    return rotate_keys(keys, cos, sin)


def select_positions(x: Tensor, begin: int | Tensor, count: int) -> Tensor:
    """`count` positions of [..., T, d] from `begin` on.

    With a beginning for each row, [B, 1]: of each row of keys or values [B, heads, T, d], or, for each row, of position
    offsets [L, 2, heads, T, d]. Windows that are too short get any number: no other window follows them.
    """
    if isinstance(begin, int):
        part = x[..., begin : begin + count, :]
        return pad(part, (0, 0, 0, count - part.shape[-2]))
    index = begin.to(x.device) + torch.arange(count, device=x.device)  # [B, count]
    index = index.clamp(max=x.shape[-2] - 1)
    if x.ndim > 4:
        return x[..., index, :].movedim(-3, 0)
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
