# SPDX-License-Identifier: Apache-2.0
"""Keys and values of earlier positions, carried to the next window beside what is pooled.

Shapes: B rows, L layers, heads with keys of size d, S positions: a document's first ones (sinks), then the newest.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .configuration import RecurrenceConfig

# Moves keys [B, L, heads, n, d] so many positions back.
Move = Callable[[Tensor, int], Tensor]


class Keeping(nn.Module):
    """Chooses what is kept of a window, and adds to each kept key and value an offset of its place, which is learned
    and starts at zero: so a model whose positions are learned vectors can tell what is from the window before."""

    def __init__(self, config: RecurrenceConfig, shape: Sequence[int]):
        """
        Args:
            shape: of one row's keys and values, (L, 2, heads, S, d).
        """
        super().__init__()
        self.newest, self.sinks = config.kept, config.sinks
        self.offsets = nn.Parameter(torch.zeros(*shape))

    def entering(self, kept: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        """For each layer, counted from 1, the keys and values it sees, each [B, heads, S, d]."""
        shown = kept + self.offsets
        return {layer: (pair[:, 0], pair[:, 1]) for layer, pair in enumerate(shown.unbind(1), start=1)}

    def leaving(
        self, noted: Sequence[tuple[Tensor, Tensor]], before: Tensor | None, start: int, following: int, move: Move
    ) -> Tensor:
        """What a window passes on, [B, L, 2, heads, S, d].

        Args:
            noted: the keys and values of layers 1 to L, each [B, heads, T, d].
            before: what was passed on to the window, if anything was.
            start: the first position of the document's in the window.
            following: the position at which the next window starts.
            move: so that keys stand where they stood, as seen from the next window.
        """
        newest = self._part(noted, max(following - self.newest, start), following, following - start, move)
        missing = self.newest - newest.shape[-2]  # of a document that ends: nothing follows, nothing sees it
        newest = pad(newest, (0, 0, missing, 0))
        if not self.sinks:
            return newest.to(self.offsets.dtype)
        if before is not None:
            first = before[..., : self.sinks, :]
        else:
            first = self._part(noted, start, start + self.sinks, self.newest + self.sinks, move)
            first = pad(first, (0, 0, 0, self.sinks - first.shape[-2]))
        return torch.cat([first, newest], dim=-2).to(self.offsets.dtype)

    def _part(self, noted: Sequence[tuple[Tensor, Tensor]], start: int, stop: int, back: int, move: Move) -> Tensor:
        keys, values = (torch.stack([pair[i][:, :, start:stop].to(self.offsets.device) for pair in noted], 1)
                        for i in (0, 1))  # fmt: skip
        return torch.stack([move(keys, back), values], dim=2)
