# SPDX-License-Identifier: Apache-2.0
"""Keys and values carried from one window to the next, where all of them come from the window before.

What is carried then never depends on how far a document was read, needs no mask, and can be captured. `kv_history` has
the memory that reaches further back. Windows may see their right neighbours, too; these need a mask, since a document's
last window may be short.

Shapes: B rows, L layers, heads with keys of size d, S carried positions: sinks, then recent.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..backbones.hooks import HookContext
from ..windows import Span
from .base import Memory, Rotation, WindowRecord
from .kv_links import LayerLink, LearnedLink, RotaryLink, Shifts, select_positions
from .links import WindowLinks

if TYPE_CHECKING:
    from .kv import KVMemoryConfig


class KVMemory(Memory):
    """Selects the positions to carry, and moves their keys and values to where they stand before the next window.

    Rotary positions are relative: keys are re-rotated. Learned positions are vectors added to the input: the base model
    gives the window's tokens later ones, and carried keys and values are moved by the difference of two position
    offsets, the average contribution of a position to keys and values. Offsets are measured (`models.position_offsets`)
    and trained with the rest.
    """

    records_kv = True
    uses_previous = True

    def __init__(self, config: "KVMemoryConfig", shape: tuple[int, ...], window: int, learned_positions: bool):
        """
        Args:
            shape: of one row's keys and values, (L, 2, heads, S, d).
        """
        super().__init__(shape)
        assert config.recent is not None, "the config is not resolved"
        assert config.sinks is not None, "the config is not resolved"
        self.recent, self.sinks, self.carried = config.recent, config.sinks, config.carried
        self.right = config.right
        *sides, _, size = shape
        offsets = torch.zeros(*sides, window + config.extra_positions, size)
        self.position_offsets = nn.Parameter(offsets) if learned_positions else None
        self._measured = False

    @property
    def ready(self) -> bool:
        """Position offsets are measured, or not needed."""
        if not self._measured:
            self._measured = self.position_offsets is None or bool(self.position_offsets.any())
        return self._measured

    def layers(self) -> tuple[int, ...]:
        return tuple(range(1, self.shape[0] + 1))

    def read(self, state: Tensor, context: HookContext) -> None:
        """Give every layer its keys and values, each [B, heads, S, d]."""
        pairs = (both.unbind(1) for both in state.unbind(1))
        for layer, (keys, values) in enumerate(pairs, start=1):
            context.add_past_kv(layer, (keys, values))

    def read_block(self, state: Tensor | None, context: HookContext, links: WindowLinks, rotation: Rotation) -> None:
        """Connect the windows of a block in every layer."""
        context.num_first, context.past_visible = links.num_alone, self._visible(links)
        entering = [None] * self.shape[0] if state is None else state.unbind(1)
        for layer, moves in enumerate(self._moves(links, rotation)):
            link: type[LayerLink] = RotaryLink if self.position_offsets is None else LearnedLink
            context.links[layer + 1] = link(
                links, entering[layer], self.sinks, self.recent, self.right, self.like.dtype, **moves
            )  # fmt: skip

    def _visible(self, links: WindowLinks) -> Tensor | None:
        """Which positions of its neighbours each window of a block sees, [P - A, S + N]; None: all that are carried."""
        if links.num_right is None:
            return None
        number = torch.arange(len(links.num_right), device=links.num_right.device)[:, None]
        left = (number >= links.num_first).expand(-1, self.carried)
        right = torch.arange(self.right, device=number.device) < links.num_right[:, None]
        return torch.cat([left, right], dim=1)[links.num_alone :]

    def write_block(self, context: HookContext) -> Tensor:
        links = [context.links[layer] for layer in self.layers()]
        return torch.stack([link.leaving.to(self.like.device) for link in links], dim=1)  # type: ignore[attr-defined]

    def _moves(self, links: WindowLinks, rotation: Rotation) -> list[dict[str, Any]]:
        """For each layer, how keys and values are moved from their window to where its neighbours see them."""
        start, begin = links.starts, links.next_start - self.recent
        if self.position_offsets is None:
            one_window, carried = rotation(links.next_start - start), rotation(self.carried)
            return [
                {"recent_rotation": (one_window[0][:, layer], one_window[1][:, layer]),
                 "sink_rotation": (carried[0][:, layer], carried[1][:, layer])}
                for layer in range(self.shape[0])
            ]  # fmt: skip
        seen_at = start + self.sinks
        by_layer = self._shifts(((begin, seen_at), (begin + self.carried, seen_at)), self.recent)
        if links.next is None:
            return [{"recent_shifts": shifts, "right_shifts": None} for shifts in by_layer]
        front = start + self.carried  # of a right neighbour: it stands behind what it sees on its left
        seen_behind = links.next_start, links.next_start + self.carried
        right_by_layer = self._shifts(((front, seen_behind[0]), (front, seen_behind[1])), self.right)
        pairs = zip(by_layer, right_by_layer, strict=True)
        return [{"recent_shifts": recent, "right_shifts": right} for recent, right in pairs]

    def _shifts(self, moves: Sequence[tuple[int | Tensor, int | Tensor]], count: int) -> list[Shifts]:
        """For each layer, what keys and values of `count` positions are moved by from one position to another: the
        first move is that of documents' first windows, the second that of the others."""
        assert self.position_offsets is not None, "positions are learned"
        select = partial(select_positions, self.position_offsets, count=count)
        shifts = [select(begin=there) - select(begin=here) for here, there in moves]
        first, other = ((shift if shift.ndim == 6 else shift[None]).unbind(1) for shift in shifts)
        return list(zip(first, other, strict=True))

    @property
    def position_shift(self) -> int | None:
        return None if self.position_offsets is None else self.carried

    def write(self, record: WindowRecord, span: Span, previous: Tensor | None) -> Tensor:
        start = record.start(span, self.like.device)
        recent = self._recent(record, start, span.next_start, previous is not None)
        if not self.sinks:
            return recent
        if previous is not None:
            sinks = previous[..., : self.sinks, :]
        else:
            count = min(self.sinks, span.next_start - start) if isinstance(start, int) else self.sinks
            sinks = self._move(record, start, count, start, has_state=False)
            sinks = pad(sinks, (0, 0, 0, self.sinks - sinks.shape[-2]))
        return torch.cat([sinks, recent], dim=-2)

    def write_tokens(self, features: Tensor, record: WindowRecord, span: Span, previous: Tensor | None) -> Tensor:
        return self.write(record, span, previous)  # a cache holds keys and values anyway

    def _recent(self, record: WindowRecord, start: int | Tensor, next_start: int, has_state: bool) -> Tensor:
        """The most recent positions before the next window's start."""
        begin = next_start - self.recent
        begin = max(begin, start) if isinstance(start, int) else begin
        count = next_start - begin
        recent = self._move(record, begin, count, start + self.carried - count, has_state)
        missing = self.recent - count  # only at a document's end, where no window follows
        return pad(recent, (0, 0, missing, 0)) if missing else recent

    def _move(self, record: WindowRecord, begin: int | Tensor, count: int, to: int | Tensor, has_state: bool) -> Tensor:
        """Keys and values [B, L, 2, heads, count, d] of positions from `begin` on, moved to positions from `to` on."""
        # A window with a state stands behind the carried positions. (Rotary windows always count as if they did.)
        behind = 0 if not has_state and self.position_offsets is not None else self.carried
        # One stack of all layers: the state is large, and every pass over it costs time.
        tensors = [select_positions(x, begin, count).to(self.like.device) for pair in record.window_kv for x in pair]
        pairs = torch.stack(tensors, dim=1).unflatten(1, (-1, 2))
        position = begin + behind
        if self.position_offsets is None:
            return record.rerotate(pairs.to(self.like.dtype), position - to)
        there, here = (select_positions(self.position_offsets, at, count) for at in (to, position))
        return (pairs + (there - here)).to(self.like.dtype)
