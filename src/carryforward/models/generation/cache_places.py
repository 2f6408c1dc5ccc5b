# SPDX-License-Identifier: Apache-2.0
"""Where the tokens of one call stand in a `WindowCache`, and what they see of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class CachePlaces:
    """The places of tokens [b, n] in buffers [B, places of the window, ...].

    Attributes:
        rows, window: the rows and their places. Slices if all rows are at the same place; else indices [b, 1], [b, n].
        positions: of the tokens in their windows, [b, n].
        with_state: the rows that see their state, [b].
        keys: how many places of the window attention sees.
        last: the position of all tokens, if there is one a row and each sees the same places.
        sees_state: whether any row does. Otherwise attention is not given the places of the state.
    """

    rows: slice | Tensor
    window: slice | Tensor
    positions: Tensor
    with_state: Tensor
    keys: int
    last: int | None = None
    sees_state: bool = True

    @classmethod
    def of_call(
        cls,
        rows: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
        with_state: Sequence[bool],
        *,
        batch: int,
        window: int,
        device: torch.device,
    ) -> "CachePlaces":
        """The places of so many tokens in some rows, after those that were read there (`starts`)."""
        width = max(*lengths, 1)
        start, states = torch.tensor(starts, device=device)[:, None], torch.tensor(with_state, device=device)
        positions = start if width == 1 else start + torch.arange(width, device=device)
        keys, sees_state = min(max(starts) + width, window), any(with_state)
        if len(rows) == batch and {*lengths} == {width} and len({*starts}) == 1:
            last = starts[0] if width == 1 and len({*with_state}) == 1 else None
            return cls(slice(None), slice(starts[0], keys), positions, states, keys, last, sees_state)
        unread = positions >= start + torch.tensor(lengths, device=device)[:, None]
        index = torch.tensor(rows, device=device)[:, None]
        return cls.of_rows(index, positions, unread, states, keys, window, sees_state)

    @classmethod
    def of_rows(
        cls,
        rows: Tensor,
        positions: Tensor,
        unread: Tensor,
        with_state: Tensor,
        keys: int,
        window: int,
        sees_state: bool = True,
    ) -> "CachePlaces":
        """The places of tokens at any positions. Those that are not read go after the window, where no query sees."""
        places, inside = positions.masked_fill(unread, window), positions.clamp(max=window - 1)
        return cls(rows, places, inside, with_state, keys, sees_state=sees_state)

    def store(self, buffer: Tensor, tokens: Tensor, first: int = 0) -> None:
        """Store something of each token, [b, n, ...], in a buffer whose window begins at the place `first`."""
        if isinstance(self.window, slice):
            buffer[self.rows, self.window.start + first : self.window.stop + first] = tokens.to(buffer.dtype)
        else:
            rows, window = self.rows.to(buffer.device), self.window.to(buffer.device)  # type: ignore[union-attr]
            buffer[rows, window + first if first else window] = tokens.to(buffer.dtype)

    def store_state(self, kv: Tensor, state: Tensor) -> None:
        """Store the state's keys and values [b, 2, heads, S, d] at the first places of a buffer."""
        kv[self._rows_of(kv), :, :, : state.shape[3]] = state.to(kv.dtype)

    def visible(self, kv: Tensor, state_columns: int) -> Tensor:
        """What attention sees of a buffer [B, 2, heads, places, d] that begins with so many places for the state."""
        kv = kv[:, :, :, 0 if self.sees_state else state_columns : state_columns + self.keys]
        return kv if len(self.positions) == len(kv) else kv[self._rows_of(kv)]

    def of_rows_in(self, values: Tensor) -> Tensor:
        """What the tokens' rows have in values [B, ...]."""
        return values[self._rows_of(values)]

    def _rows_of(self, buffer: Tensor) -> slice | Tensor:
        return self.rows if isinstance(self.rows, slice) else self.rows[:, 0].to(buffer.device)
