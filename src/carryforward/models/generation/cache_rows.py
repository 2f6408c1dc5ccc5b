# SPDX-License-Identifier: Apache-2.0
"""The rows of a `WindowCache`: the buffers of keys and values, what each row has read, and its state.

The window's keys and values stay in place in buffers of the window's size, in front of which there are places for those
of a state. Rows may be at different positions of their windows. `window_cache` reads with them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from ...backbones.attention import KV
from ...backbones.kv_layout import KVLayout
from ...state import State
from .cache_places import CachePlaces


class CacheRows(Cache):
    """Buffers of a batch of documents that are read token by token, in the shape of a transformers cache.

    Attributes:
        columns: columns of the text that it was given.
        positions: for each row, how many tokens of the current window were read.
    """

    is_croppable = False  # transformers must not read a token ahead and take it back
    is_compileable = False

    def __init__(self, state: State):
        """
        Args:
            state: how far the documents have been read before.
        """
        super().__init__(layers=[])
        self.state_before: State | None = state
        self.columns = 0
        self.has_beams = False
        self.kv: dict[int, Tensor] = {}  # by layer, [B, 2, heads, places of the state and of the window, d]
        self.positions: list[int] = []
        self._memory: dict[str, Tensor] = {}  # the state, by kind of memory
        self._features: dict[str, Tensor] = {}  # of each token of the window, by kind of memory
        self._tokens = torch.empty(0, dtype=torch.long)
        self._visible = torch.empty(0, dtype=torch.bool)  # which places of the state each row sees, [B, S]
        self._past_kv: dict[int, KV] = {}  # keys and values that enter with the call in progress
        self._places: CachePlaces  # of the tokens of the call in progress
        self._batch = self._window = 0
        self._state_columns: dict[int, int] = {}  # by layer, places of the state
        self._started: list[bool] = []
        self._ended: list[bool] = []
        self._read: list[int] = []
        self._starts: list[int] = []  # of each row's window
        self._origins: list[int] = []
        self._signature = self._model = ""

    # --- the interface of transformers' caches ---------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    def update(  # type: ignore[override]
        self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a call's keys and values, [b, heads, n, d], after the state's; return those of the whole window."""
        layer, places, kv = layer_idx + 1, self._places, torch.stack((key, value), dim=1)
        if layer in self._past_kv:
            kv = torch.cat([torch.stack(self._past_kv[layer], dim=1).to(kv), kv], dim=3)
        columns, entering = self._state_columns[layer], kv.shape[3] - places.positions.shape[1]
        if layer_idx not in self.kv:
            shape = (self._batch, *kv.shape[1:3], columns + self._window + 1, kv.shape[4])
            self.kv[layer_idx] = kv.new_zeros(shape)
        buffer = self.kv[layer_idx]
        if entering:  # the call brings the state, which comes first
            places.store_state(buffer, kv[:, :, :, :entering])
        places.store(buffer.transpose(1, 3), kv[:, :, :, entering:].transpose(1, 3), columns)
        keys, values = places.visible(buffer, columns).unbind(1)
        return keys, values

    def reset(self, *args: Any) -> None:
        """Refused, like the methods below: the inherited ones would silently do nothing."""
        raise NotImplementedError(
            "a WindowCache cannot be reset, cropped, repeated or indexed: start another generation, from rows of "
            "past_key_values.state if it is to continue from there."
        )

    crop = batch_repeat_interleave = batch_select_indices = reset  # type: ignore[assignment]

    @torch.inference_mode(False)  # see `read`
    @torch.no_grad()
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder rows for beam search: each continues from the row it came from."""
        self.has_beams = True

        def reordered(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, beam_idx.to(tensor.device))

        groups: tuple[dict[Any, Tensor], ...] = (self.kv, self._memory, self._features)
        for tensors in groups:
            for name, tensor in tensors.items():
                tensors[name] = reordered(tensor)
        self._tokens = reordered(self._tokens)
        rows = beam_idx.tolist()
        self._visible = reordered(self._visible)
        for name in ("positions", "_read", "_starts", "_origins", "_started", "_ended"):
            setattr(self, name, [getattr(self, name)[row] for row in rows])

    # --- rows and their state --------------------------------------------------------------------------------------

    def _window_kv(self, layer: int, rows: list[int], layouts: Sequence[KVLayout]) -> KV:
        """The window's keys and values of a layer, counted from 0, without the state's, as they stand in a state.

        Args:
            layouts: of all layers; empty if they stand there as they are.
        """
        keys, values = self.kv[layer][rows, :, :, self._state_columns[layer + 1] :].unbind(1)
        return layouts[layer].from_cache(keys, values) if layouts else (keys, values)

    def _index(self, rows: Sequence[int]) -> Tensor:
        return torch.tensor(rows, device=self._tokens.device)

    @property
    def state(self) -> State:
        """How far the documents have been read: all that was given, less what ended a row. Any later call can continue
        from it."""
        if self.has_beams:
            raise ValueError(
                "after beam search there is no state: the beams that were still running are not the returned texts. "
                "Read those with model.advance_state."
            )
        if self.state_before is not None:
            return self.state_before
        tokens = self._tokens[:, : max(self.positions)].clone()  # the buffer is overwritten
        return self._state_of(range(self._batch), tokens, self.positions, self._read)

    def _state_of(self, rows: Sequence[int], tokens: Tensor, pending: Sequence[int], read: Sequence[int]) -> State:
        """The state of these rows, of which so many tokens were read and so many wait for the next window."""
        origins = [self._origins[row] if self._started[row] else 0 for row in rows]
        index = self._index(rows)
        return State(
            memory={kind: x[index.to(x.device)] for kind, x in self._memory.items()},
            started=torch.tensor([self._started[row] for row in rows]), tokens=tokens,
            pending=torch.tensor(pending), read=torch.tensor(read),
            origin=torch.tensor(origins) if any(origins) else None, signature=self._signature, model=self._model,
        )  # fmt: skip
