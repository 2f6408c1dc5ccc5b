# SPDX-License-Identifier: Apache-2.0
"""Keys and values carried further than from one window to the next: recent positions of any number, and far ones.

Every slot of a window is filled straight from the window that made the position, however long ago (`kv_slots` says
where it is found), so nothing is moved hop after hop. In a state, keys and values wait without a position (`kv_moves`).
A window sees them in front of its own tokens, at positions that follow each other. While all of a document fits, a
window sees all of it.

Shapes: P windows of T positions, the first F of which receive nothing; R rows of the entering state, W states that
leave; n readers: the P - F other windows, then the W states; h heads with keys of size d; S slots.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..backbones.attention import KV
from ..backbones.hooks import HookContext
from ..backbones.split_windows import split_windows
from ..windows import Span
from .base import Rotation, WindowRecord
from .kv_memory import KVMemory
from .kv_moves import LayerMove, LearnedMove, Move, RotaryMove, take
from .kv_slots import EMPTY
from .links import WindowLinks
from .slot_links import SlotLinks

if TYPE_CHECKING:
    from .kv import KVMemoryConfig
    from .selections.base import Selection


class HistoryKVMemory(KVMemory):
    """Finds the positions that every window sees, in its block and in the state that enters it."""

    needs_history = True

    def __init__(self, config: "KVMemoryConfig", shape: tuple[int, ...], window: int, learned_positions: bool):
        super().__init__(config, shape, window, learned_positions)
        self.sizes = config.slot_sizes
        self.selection = config.selection_method if config.selects else None

    def position_shifts(self, tokens: Sequence[int]) -> list[int] | None:
        if self.position_offsets is None:
            return None
        return [sum(self.sizes.used(before)) for before in tokens]

    def read(self, state: Tensor, context: HookContext) -> None:
        raise NotImplementedError("windows that have a history are read as blocks, or after a number of tokens")

    def read_after(self, state: Tensor, context: HookContext, tokens: Sequence[int], rotation: Rotation) -> None:
        """Give every layer its keys and values, each [B, heads, S, d], for windows without a prefix."""
        visible = self.sizes.occupied_by(tokens)
        place = np.maximum(visible.cumsum(axis=1) - 1, 0)
        move = self._mover(rotation, self.sizes.total)
        targets = place if self.position_offsets is not None else place - visible.sum(axis=1, keepdims=True)
        to = torch.from_numpy(targets)[:, None].to(state.device)  # [B, 1, S]
        for layer, both in enumerate(state[..., : self.sizes.total, :].unbind(1)):
            of_layer = move.of_layer(layer)
            keys, values = (of_layer(x, side, move.nowhere, to) for side, x in enumerate(both.unbind(1)))
            context.add_past_kv(layer + 1, (keys, values))
        context.past_visible = torch.from_numpy(visible).to(state.device)

    def _mover(self, rotation: Rotation, reach: int) -> Move:
        """How keys and values get from one position to another, at most `reach` apart."""
        if self.position_offsets is None:
            return RotaryMove(rotation, reach, self.like.device)
        return LearnedMove(self.position_offsets)

    def read_block(self, state: Tensor | None, context: HookContext, links: WindowLinks, rotation: Rotation) -> None:
        slots = links.slots
        assert slots is not None, "the slots of the block are not known"
        move = self._mover(rotation, slots.width + self.sizes.total)
        context.num_first, context.past_visible = links.num_first, slots.window_visible
        entering = [None] * self.shape[0] if state is None else state.unbind(1)
        for layer, kv in enumerate(entering):
            context.links[layer + 1] = HistoryLink(
                slots, links.num_first, move.of_layer(layer), self.selection, layer, kv, self.like.dtype
            )  # fmt: skip

    def write(self, record: WindowRecord, span: Span, previous: Tensor | None) -> Tensor:
        raise NotImplementedError("windows that have a history always run as blocks")


class HistoryLink:
    """Fills the slots of a block in one layer.

    Attributes:
        leaving: output: the keys and values of the states that leave the block, [W, 2, h, S, d].
    """

    leaving: Tensor

    def __init__(
        self,
        slots: SlotLinks,
        num_first: int,
        move: LayerMove,
        selection: "Selection | None",
        layer: int,
        state: Tensor | None,
        dtype: torch.dtype,
    ):
        """
        Args:
            num_first: windows that receive nothing (F).
            selection: selects by contents; None if it is known which positions are far.
            layer: a number, by which what was selected is found again.
            state: the keys and values that enter the block, [R, 2, h, S + A, d].
            dtype: the precision of states.
        """
        self.slots, self.num_first, self.move = slots, num_first, move
        self.selection, self.layer = selection, layer
        self.state, self.dtype = state, dtype

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> tuple[KV, KV, KV | None]:
        num_windows = self.slots.num_windows
        first, others, past, leaving = [], [], [], []
        far = self._far(query, key, scaling)
        for side, x in enumerate((key, value)):
            of_first, of_others, windows = split_windows(x, self.num_first, (0, x.shape[2]))
            first.append(of_first)
            others.append(of_others)
            everything = self.sources(windows, side)
            filled = self._fill(everything, side, far)
            past.append(filled[:num_windows])
            archive = self.moved(everything, side, self.slots.archive, self.slots.nowhere, slice(num_windows, None))
            states = torch.cat([filled[num_windows:], archive], dim=2).to(self.dtype)
            leaving.append(states * self.slots.state_visible[:, None, :, None].to(states))
        self.leaving = torch.stack(leaving, dim=1)
        return (first[0], first[1]), (others[0], others[1]), (past[0], past[1]) if num_windows else None

    def sources(self, x: Tensor, side: int) -> Tensor:
        """The keys or values of all sources, [P * T + R * S, h, d], from those of the windows [P, h, T, d]."""
        flat = x.transpose(1, 2).flatten(0, 1)
        if self.state is None:
            return flat
        return torch.cat([flat, self.state[:, side].transpose(1, 2).flatten(0, 1).to(flat)])

    def moved(
        self, everything: Tensor, side: int, sources: Tensor, targets: Tensor | int, readers: slice = slice(None)
    ) -> Tensor:
        """The keys or values that some readers find at sources [n, 1 or h, w], moved to other positions, [n, h, w, d];
        detached where truncated BPTT says so."""
        x, detached = take(everything, sources.clamp(min=0)), self.slots.detached(sources, readers)
        return self.move(x, side, self.origins(sources), targets, detached).to(x.dtype)

    def origins(self, sources: Tensor) -> Tensor:
        """The positions at which sources were made."""
        return self.slots.origins[sources.clamp(min=0)]

    def _fill(self, everything: Tensor, side: int, far: Tensor) -> Tensor:
        """What readers see, [n, h, S, d]."""
        slots = self.slots
        parts = [self.moved(everything, side, *place) for place in slots.places(far)]
        if slots.sizes.merged > 1:
            parts[1] = parts[1].unflatten(2, (-1, slots.sizes.merged)).mean(3)
        return torch.cat(parts, dim=2)

    @torch.no_grad()
    def _far(self, query: Tensor, key: Tensor, scaling: float | None) -> Tensor:
        """The sources of far slots. They are selected once; a layer that runs again finds the same."""
        choices = self.slots.choices
        if self.selection is None:
            return self.slots.far
        if self.layer not in choices:
            query, key = (x.to(self.slots.origins.device) for x in (query, key))  # layers may be on several devices
            past = LayerPast(self, self.sources(key, side=0), query, key, scaling)
            choices[self.layer] = self.selection.choose(past).to(torch.int32)
        return choices[self.layer].long()


class LayerPast:
    """What a selection sees of one layer: the queries, keys and slots of a block. Gradients do not flow here."""

    def __init__(self, link: HistoryLink, everything: Tensor, query: Tensor, key: Tensor, scaling: float | None):
        self.slots, self.query, self.key = link.slots, query, key
        self.scaling = key.shape[-1] ** -0.5 if scaling is None else scaling
        self._link, self._everything = link, everything

    @property
    def far(self) -> Tensor:
        """The far slots before anything is selected: those of the state, [n, 1, F]; other readers' are replaced."""
        return self.slots.far

    def send(self, values: np.ndarray) -> Tensor:
        """Numbers of what is to be selected (`slots.steps`, `slots.lookups`) on the device."""
        return self.slots.send(values)

    def queries(self, windows: Tensor, positions: Tensor) -> Tensor:
        """The queries of windows [m] at positions [m, t], without these where they are rotary, [m, heads, t, d]."""
        query = self.query[windows[:, None], :, positions].transpose(1, 2)
        return self._link.move.unplaced(query, positions[:, None])

    def keys(self, sources: Tensor) -> Tensor:
        """The keys of sources [n, 1 or h, w] without their positions, [n, h, w, d]."""
        return self._moved(sources, self.slots.nowhere)

    def seen_keys(self, readers: Tensor, far: Tensor) -> tuple[Tensor, Tensor]:
        """The keys that some readers see, [m, h, S, d], given the far slots of all; and which of them are visible,
        [m, S]. `EMPTY` stands for a reader that sees none."""
        slots, some = self.slots, readers.clamp(min=0)
        keys = [self._moved(sources[some], targets[some]) for sources, targets in slots.places(far)]
        visible = slots.visible[some] & (readers != EMPTY)[:, None]
        return torch.cat(keys, dim=2), visible

    def _moved(self, sources: Tensor, targets: Tensor | int) -> Tensor:
        keys = take(self._everything, sources.clamp(min=0))
        return self._link.move(keys, 0, self._link.origins(sources), targets)
