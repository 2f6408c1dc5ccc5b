# SPDX-License-Identifier: Apache-2.0
"""Keys and values inside a block: in every layer, each window takes those of its neighbours in the same call.

A `LayerLink` is called by the attention of one layer with the keys and values of all windows of the block. It holds
tensors and sizes only, and the sizes are the same in all layers, so that one compilation serves them all.

Shapes: P windows, the first F of which receive nothing, and the first A of these see no other window; R rows of the
entering state; W states that leave; heads with keys of size d; K recent positions, then S carried positions in all:
sinks, then recent; N positions of a right neighbour, 0 if windows have none.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..backbones.attention import KV
from ..backbones.rotations import rotate_keys
from ..backbones.split_windows import split_windows
from .links import WindowLinks, detached_where, gather_previous, gather_sources

# What keys and values are moved by, [1 or P, 2, heads, n, d]: in documents' first windows, and in the others, whose
# tokens stand behind what is carried.
Shifts = tuple[Tensor, Tensor]


class LayerLink:
    """Connects the windows of a block in one layer.

    Attributes:
        leaving: output: the keys and values that leave the block, [W, 2, heads, S, d].
    """

    leaving: Tensor

    def __init__(
        self, links: WindowLinks, state: Tensor | None, sinks: int, recent: int, right: int, dtype: torch.dtype
    ):
        """
        Args:
            state: the keys and values that enter the block, [R, 2, heads, S, d].
            right: positions of a right neighbour that a window sees.
            dtype: the precision of states.
        """
        self.links = links
        self.state = state
        self.sinks = sinks
        self.recent = recent
        self.right = right
        self.dtype = dtype

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> tuple[KV, KV, KV | None]:
        """The keys and values of the windows that see no other, of the others, each [P - A, heads, T, d], and of what
        these see beside their own, each [P - A, heads, S + N, d]."""
        *keys, leaving_keys = self._receive(key, side=0)
        *values, leaving_values = self._receive(value, side=1)
        self.leaving = torch.stack([leaving_keys, leaving_values], dim=1)
        alone, others, seen = zip(keys, values, strict=True)
        return alone, others, seen if len(seen[0]) else None

    def _receive(self, x: Tensor, side: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of keys (side 0) or values (side 1): those of the windows that see no other, those of the others, what the
        others see beside their own, and what leaves the block."""
        links, entering = self.links, None if self.state is None else self.state[:, side]
        alone, others, recent, front = self._split(x)
        recent = self._move_recent(recent.to(self.dtype), side)
        entering_recent = None if entering is None else entering[:, :, self.sinks :]
        seen = detached_where(gather_previous(recent.to(x.dtype), entering_recent, links), links.detach)
        leaving = recent.index_select(0, links.last.to(x.device))
        if self.sinks:
            sinks = self._move_sinks(front[: links.num_first, :, : self.sinks].to(self.dtype), side)
            # In the precision of states: the gradients of all windows of a document are added up here.
            entering_sinks = None if entering is None else entering[:, :, : self.sinks]
            first = detached_where(gather_sources(sinks, entering_sinks, links.first), links.detach_first)
            left = detached_where(gather_sources(sinks, entering_sinks, links.last_first), links.last_detach_first)
            seen, leaving = torch.cat([first.to(seen.dtype), seen], dim=2), torch.cat([left, leaving], dim=2)
        if links.next is not None:
            following = gather_sources(front[:, :, : self.right], None, links.next)
            following = self._move_right(following.to(self.dtype), side)
            seen = torch.cat([seen, following.to(seen.dtype)], dim=2)
        return alone, others, seen, leaving

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys or values [P, heads, T, d] of the windows that see no other and of the others, the recent positions of
        all windows, and the first document positions of those of which some are seen: of documents' first windows, or,
        with right neighbours, of all."""
        links, starts, count = self.links, self.links.starts, max(self.sinks, self.right)
        stop = min(links.next_start, x.shape[2])  # no window receives anything of a block whose windows are all short
        recent_range = min(links.next_start - self.recent, stop), stop
        if self.right and isinstance(starts, int):
            alone, others, recent, front = split_windows(x, links.num_alone, recent_range, (starts, starts + count))
        else:
            alone, others, recent = split_windows(x, links.num_alone, recent_range)
            source, rows = (x, len(x)) if self.right else (alone, links.num_first)
            front = select_positions(source, starts if isinstance(starts, int) else starts[:rows], count)
        return alone, others, pad(recent, (0, 0, 0, self.recent - recent.shape[2])), front

    def _move_recent(self, x: Tensor, side: int) -> Tensor:
        """Move the recent positions of every window [P, heads, K, d] to where the window after it sees them."""
        raise NotImplementedError

    def _move_sinks(self, x: Tensor, side: int) -> Tensor:
        """Move the sinks of every first window [F, heads, S - K, d] to where all windows see them."""
        raise NotImplementedError

    def _move_right(self, x: Tensor, side: int) -> Tensor:
        """Move the first positions of right neighbours [P - A, heads, N, d] to where their left neighbours see them."""
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

    def _move_right(self, x: Tensor, side: int) -> Tensor:
        """As far forward as recent positions are moved back, from the start of a window to that of the next."""
        cos, sin = (part if len(part) == 1 else part[self.links.num_alone :] for part in self.recent_rotation)
        return x if side else _rotate(x, cos, -sin)


class LearnedLink(LayerLink):
    """For learned positions: keys and values are moved by differences of position offsets."""

    def __init__(self, *args, recent_shifts: Shifts, right_shifts: Shifts | None, **kwargs) -> None:
        """
        Args:
            recent_shifts: of recent positions, by the window whose they are.
            right_shifts: of a right neighbour's first positions, by the window that sees them.
        """
        super().__init__(*args, **kwargs)
        self.recent_shifts = recent_shifts
        self.right_shifts = right_shifts

    def _move_recent(self, x: Tensor, side: int) -> Tensor:
        return self._shifted(x, side, self.recent_shifts, begin=0)

    def _move_sinks(self, x: Tensor, side: int) -> Tensor:
        return x  # they stand at a document's first positions, as in its first window

    def _move_right(self, x: Tensor, side: int) -> Tensor:
        assert self.right_shifts is not None, "windows have right neighbours"
        return self._shifted(x, side, self.right_shifts, begin=self.links.num_alone)

    def _shifted(self, x: Tensor, side: int, shifts: Shifts, begin: int) -> Tensor:
        """Keys or values of all windows from `begin` on, moved: those of first windows, and of the others."""
        number = torch.arange(begin, begin + len(x), device=x.device)[:, None, None, None]
        first, other = (shift[:, side].to(x.device) for shift in shifts)
        first, other = (shift if len(shift) == 1 else shift[begin:] for shift in (first, other))
        return (x + torch.where(number < self.links.num_first, first, other)).to(self.dtype)


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
