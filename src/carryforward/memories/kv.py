# SPDX-License-Identifier: Apache-2.0
"""Keys and values of earlier positions, carried to the next window beside what is pooled.

Shapes: B rows, L layers, heads with keys of size d, S positions: a document's first ones (sinks), then the newest.
They stand in this order at the first positions of the next window, behind an encoder's prefix, and the window's own
tokens behind them, as if all were one text.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..config import RecurrenceConfig

# Turns keys [B, L, heads, n, d], so that they stand so many positions further back, or each row so many, [B, 1].
Turn = Callable[[Tensor, int | Tensor], Tensor]


class Keeping(nn.Module):
    """Chooses what is kept of a window, and moves it to where it stands before the next one.

    Rotary positions are differences: keys are turned, and that is all. Where positions are learned vectors, the base
    model gives the window's tokens later ones, and what is kept is moved by the difference of two `places`: what a
    position adds to keys and values on average. That is measured (`places`), and learned on with the rest.
    """

    def __init__(self, config: RecurrenceConfig, shape: Sequence[int], learned: bool):
        """
        Args:
            shape: of one row's keys and values, (L, 2, heads, S, d).
            learned: positions are learned vectors.
        """
        super().__init__()
        self.newest, self.sinks, self.seen = config.kept, config.sinks, config.seen
        *sides, _, size = shape
        self.places = nn.Parameter(torch.zeros(*sides, config.window + config.seen, size)) if learned else None
        # Of no size: where states live, and in what precision, if there are no weights to say it.
        self.register_buffer("like", torch.empty(0), persistent=False)
        self.like: Tensor
        self._known = False

    @property
    def known(self) -> bool:
        """Whether what is kept can be read: places are measured or learned, or none are needed."""
        if not self._known:
            self._known = self.places is None or bool(self.places.any())
        return self._known

    def entering(self, kept: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        """For each layer, counted from 1, the keys and values it sees, each [B, heads, S, d]."""
        pairs = (both.unbind(1) for both in kept.unbind(1))
        return {layer: (keys, values) for layer, (keys, values) in enumerate(pairs, start=1)}

    def standing(self, positions: Tensor, leads: Tensor | int) -> Tensor:
        """Where learned positions of a window are: those of the prefix, whose length is given, and behind what it
        sees."""
        return torch.where(positions < leads, positions, positions + self.seen)

    def forward(
        self,
        noted: Sequence[tuple[Tensor, Tensor]],
        before: Tensor | None,
        start: int | Tensor,
        following: int,
        turn: Turn,
    ) -> Tensor:
        """What a window passes on, [B, L, 2, heads, S, d].

        Args:
            noted: the keys and values of layers 1 to L, each [B, heads, T, d].
            before: what was passed on to the window, if anything was.
            start: the first position of the document's in the window, or each row's, [B, 1]. The window then has room
                for all that is kept.
            following: the position at which the next window starts.
        """
        # how far behind its positions the window stands
        behind = 0 if before is None and self.places is not None else self.seen

        def part(begin: int | Tensor, count: int, to: int | Tensor) -> Tensor:
            # all in one go: what is kept is much, and every pass over it costs
            both = torch.stack([_some(x, begin, count).to(self.like.device) for pair in noted for x in pair], dim=1)
            return self._moved(both.unflatten(1, (-1, 2)), begin + behind, to, turn)

        begin = following - self.newest
        begin = max(begin, start) if isinstance(start, int) else begin
        newest = part(begin, following - begin, start + self.seen - (following - begin))
        missing = self.newest - newest.shape[-2]  # of a document that ends: nothing follows, nothing sees it
        if missing:
            newest = pad(newest, (0, 0, missing, 0))
        if not self.sinks:
            return newest
        if before is not None:
            first = before[..., : self.sinks, :]
        else:
            first = part(start, min(self.sinks, following - start) if isinstance(start, int) else self.sinks, start)
            first = pad(first, (0, 0, 0, self.sinks - first.shape[-2]))
        return torch.cat([first, newest], dim=-2)

    def _moved(self, pairs: Tensor, standing: int | Tensor, to: int | Tensor, turn: Turn) -> Tensor:
        """Keys and values [B, L, 2, heads, n, d], from where the first of them stands to another position."""
        if self.places is None:
            keys, values = pairs.to(self.like.dtype).unbind(2)
            return torch.stack([turn(keys, standing - to), values], dim=2)
        there, here = (_some(self.places, at, pairs.shape[-2]) for at in (to, standing))
        return (pairs + (there - here)).to(self.like.dtype)


def _some(x: Tensor, begin: int | Tensor, count: int) -> Tensor:
    """So many positions of [..., T, d]; with a beginning for each row, [B, 1], those of each row of [B, heads, T, d],
    or, for each row, of `places`."""
    if isinstance(begin, int):
        return x[..., begin : begin + count, :]
    index = begin.to(x.device) + torch.arange(count, device=x.device)  # [B, count]
    if x.ndim > 4:
        return x[..., index, :].movedim(-3, 0)
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
