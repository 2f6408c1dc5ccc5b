# SPDX-License-Identifier: Apache-2.0
"""Writing one token at a time: keys and values of the current window, and the state that enters it.

The window's keys and values stay in place in buffers of its size. When a row's window is full, its state is pooled
from what the layers gave for it, the overlap is read again as the start of the next window, and the buffers are used
again: neither time nor memory depends on how much was written. Rows are at different places in their windows, so
every row has its own position. The recurrent model comes with every call; the cache holds none.

On a GPU the step of a token is recorded (`recorded_step`): everything it reads and writes stays in place until a window
is full, and then as well.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from ..backbones import hooks
from ..engine.decode_graph import DecodeGraph, mode
from ..engine.graph_cache import told
from ..state import State

RECORD_AFTER = 4  # tokens: a recording takes as long as a few


class WindowCache(Cache):
    """What has been read of a batch of documents, ready to go on token by token. Give it as `past_key_values`.

    Attributes:
        columns: how many columns of the text have been given to it.
        ends: tokens that end a row. `generate` goes on giving padding to a row that ended before others; neither that
            nor the token that ended it is read.
    """

    is_croppable = False  # transformers must not read a token ahead and take it back
    is_compileable = False

    def __init__(self, state: State, overlap: int, use_state: bool = True):
        """
        Args:
            state: where the documents stand; a fresh one for new documents.
            overlap: tokens that consecutive windows share.
            use_state: False removes the state.
        """
        super().__init__(layers=[])
        self.state_before: State | None = state
        self.overlap = overlap
        self.use_state = use_state
        self.columns = 0
        self.ends: tuple[int, ...] = ()
        self.has_beams = False
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self._recorded: DecodeGraph | None = None
        self._steps = 0  # since the buffers were made
        self._earlier: dict[int, tuple[Tensor, Tensor]] = {}  # what the call that is running brings

    def __getstate__(self) -> dict[str, Any]:
        """Copies have buffers of their own, which a recording does not know."""
        return {**self.__dict__, "_recorded": None, "_steps": 0}

    # --- what transformers asks of a cache -----------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    def update(  # type: ignore[override]
        self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Put a call's keys and values, [b, heads, n, d], in their places, behind the state's; give back those of the
        whole window."""
        held = self._held_at(layer_idx + 1)
        places = self._places + held
        if layer_idx + 1 in self._earlier:  # the call brings some from before the window
            key, value = (
                torch.cat([old.to(new), new], dim=2)
                for old, new in zip(self._earlier[layer_idx + 1], (key, value), strict=True)
            )
        if key.shape[2] > places.shape[1]:  # the call brings the state: it stands in front
            front = torch.arange(held, device=places.device).expand(len(places), -1)
            places = torch.cat([front, places], dim=1)
        found = []
        for buffers, new in ((self.keys, key), (self.values, value)):
            if layer_idx not in buffers:
                shape = (self._batch, key.shape[1], held + self._window + 1, new.shape[3])
                buffers[layer_idx] = new.new_zeros(shape)
            buffer, rows = buffers[layer_idx], self._rows.to(new.device)
            buffer[rows[:, None], :, places.to(new.device)] = new.transpose(1, 2).to(buffer.dtype)
            found.append(buffer if len(rows) == len(buffer) else buffer[rows])
        return found[0], found[1]

    def reset(self, *args: Any) -> None:
        """Neither this nor the others named below: inherited, they would do nothing and say nothing."""
        raise NotImplementedError(
            "a WindowCache cannot be reset, cropped, repeated or indexed: begin another generation, from rows of "
            "past_key_values.state if it is to go on from there."
        )

    crop = batch_repeat_interleave = batch_select_indices = reset  # type: ignore[assignment]

    @torch.inference_mode(False)  # see `read`
    @torch.no_grad()
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows for beams: each goes on from the row it came from."""
        self.has_beams, self._recorded = True, None
        rows = beam_idx.tolist()
        for buffers in (self.keys, self.values):
            for layer, buffer in buffers.items():
                buffers[layer] = buffer.index_select(0, beam_idx.to(buffer.device))
        for name in ("_mixed", "_tokens", "_carried", "_kept"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.index_select(0, beam_idx.to(tensor.device)))
        for name in ("_position", "_read", "_started", "_ended"):
            setattr(self, name, [getattr(self, name)[row] for row in rows])

    # --- reading -------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # buffers made in that mode could not be written to outside it
    @torch.no_grad()
    def read(self, model: Any, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Read the next columns of every row; the logits of the last token of each, [B, 1, V]."""
        if mask is not None and not bool(mask[:, -1].all()):
            raise ValueError(
                "attention_mask ends with 0: what is to be continued must be padded on the left "
                "(padding_side='left' in the tokenizer)."
            )
        if self.state_before is None and len(ids) != self._batch:
            raise ValueError(f"past_key_values has {self._batch} rows, input_ids has {len(ids)}.")
        if ids.shape[1] > 1:
            self.restart()
        logits = self._step(model, ids) if self.state_before is None else self._begin(model, ids, mask)
        self.columns += ids.shape[1]
        return logits

    def restart(self) -> None:
        """Make ready for more text: the unfinished window is read again with it. Refused where rows do not go on."""
        if self.state_before is not None:
            return
        if any(self._ended):
            raise ValueError(
                f"row {self._ended.index(True)} has ended: go on from past_key_values.state instead, with the text "
                "that follows in each row."
            )
        self.state_before = self.state

    def _begin(self, model: Any, ids: Tensor, mask: Tensor | None) -> Tensor:
        """The prompt: full windows give the state only; the tokens behind them fill the buffers."""
        before = self.state_before
        assert before is not None
        if len(ids) > len(before):  # several sequences for each prompt
            before = before[torch.arange(len(before)).repeat_interleave(len(ids) // len(before))]
        state = model.advance_state(ids, mask, before, overlap=self.overlap, use_state=self.use_state)
        self.state_before = None
        self.keys, self.values = {}, {}  # there may be more rows than before
        self._recorded, self._steps = None, 0
        self._signature = state.signature
        self._batch, self._window = len(state), model.config.recurrence.window
        self._layers, self._slots = model.config.insertion_layers, model.config.recurrence.slots
        self._seen, self._depth = model.config.recurrence.seen, model.config.base_config.num_hidden_layers
        device = state.tokens.device
        self._carried, self._kept = state.carried, state.kept
        self._started: list[bool] = state.started.tolist()
        self._read: list[int] = state.read.tolist()
        self._position = [0] * self._batch
        self._ended = [False] * self._batch
        self._tokens = torch.zeros(self._batch, self._window + 1, dtype=torch.long, device=device)
        width = model.recurrence.width if self._slots else 0
        self._mixed = model.recurrence.weight.new_zeros(self._batch, self._window + 1, width)
        logits = None
        for sees in (False, True):
            rows = [row for row in range(self._batch) if self._sees_state(row) == sees]
            if rows:
                lengths = [int(state.pending[row]) for row in rows]
                tokens = state.tokens[rows, : max(lengths)]
                part = self._call(model, rows, tokens, lengths, brings_state=sees)
                logits = part.new_zeros(self._batch, *part.shape[1:]) if logits is None else logits
                logits[rows] = part
        assert logits is not None
        return logits

    def _step(self, model: Any, column: Tensor) -> Tensor:
        """One more token in every row. Rows whose window is full begin the next one with it."""
        if self.ends and self._batch > 1:  # a single row that ends is not gone on with
            self._ended = [
                ended or token in self.ends for ended, token in zip(self._ended, column[:, 0].tolist(), strict=True)
            ]
        full = [row for row in range(self._batch) if self._position[row] == self._window and not self._ended[row]]
        rest = [row for row in range(self._batch) if row not in full]
        new = [0 if ended else 1 for ended in self._ended]
        self._read = [read + count for read, count in zip(self._read, new, strict=True)]
        if not full:
            return self._next(model, column, new)
        if self._recorded is not None:
            self._recorded.stale = True
        shared = self._tokens[full, self._window - self.overlap : self._window]
        if self.use_state:
            self._pass_on(model, full)
        for row in full:
            self._position[row], self._started[row] = 0, self.use_state
        tokens = torch.cat([shared, column[full].to(shared.device)], dim=1)
        parts = [(full, self._call(model, full, tokens, [tokens.shape[1]] * len(full), brings_state=self.use_state))]
        if rest:
            parts.append((rest, self._call(model, rest, column[rest], [new[row] for row in rest])))
        logits = parts[0][1].new_empty(self._batch, *parts[0][1].shape[1:])
        for rows, part in parts:
            logits[rows] = part
        return logits

    def _pass_on(self, model: Any, rows: list[int]) -> None:
        """The state after the windows of these rows, which are full."""
        recurrence, index = model.recurrence, self._index(rows)
        if self._slots:
            count = model.config.recurrence.pooled(self._window, self.overlap)
            pooled = recurrence.pool_mixed(self._mixed[rows, :count])
            self._carried = self._carried.index_copy(0, index, recurrence.carried(pooled))
        if recurrence.keeping is None:
            return
        assert self._kept is not None
        for started in (False, True):
            some = [row for row in rows if self._started[row] == started]
            if some:
                noted = [
                    tuple(buffers[layer][some, :, self._held_at(layer + 1) :] for buffers in (self.keys, self.values))
                    for layer in sorted(self.keys)
                ]
                before = self._kept[some] if started else None
                kept = recurrence.keeping(noted, before, 0, self._window - self.overlap, model._turn)
                self._kept = self._kept.index_copy(0, self._index(some).to(kept.device), kept)

    def _next(self, model: Any, column: Tensor, new: list[int]) -> Tensor:
        """One more token in every row that goes on, none of which begins a window."""
        self._steps += 1
        wanted = self._recorded is None and self._steps > RECORD_AFTER and not self.has_beams
        wanted = wanted and model.graph_cache.possible(self._tokens.device)
        if wanted and model.graph_cache.usable(list(model.modules()), list(model.parameters())):
            reason = ""
            try:
                self._recorded = DecodeGraph(self, model, column)
            except Exception as error:  # as for windows: the plain way is always there
                reason = told(error)
            if self._recorded is None:
                model.graph_cache.failed(reason)
        if self._recorded is not None and (model.fast_path == "off" or self._recorded.mode != mode(model)):
            self._recorded, self._steps = None, 0
        if self._recorded is None:
            return self._call(model, range(self._batch), column, new)
        logits = self._recorded(self, column, new)
        self._position = [position + count for position, count in zip(self._position, new, strict=True)]
        return logits

    def _call(
        self,
        model: Any,
        rows: Sequence[int],
        tokens: Tensor,
        lengths: Sequence[int],
        brings_state: bool = False,
    ) -> Tensor:
        """Run the base model on the next `lengths` tokens of some rows; tokens [b, n] are padded on the right.

        A row of length 0 runs along and leaves no trace: taking it out of the batch would copy the others' buffers.
        """
        device = model.device
        start = torch.tensor([self._position[row] for row in rows], device=device)[:, None]
        offset = torch.arange(tokens.shape[1], device=device)
        unread = offset >= torch.tensor(lengths, device=device)[:, None]
        index = self._index(rows)
        carry = hooks.HookContext()
        self._earlier = {}
        if brings_state:
            carry.slots = model._slots(self._carried.index_select(0, index.to(self._carried.device)))
            if self._kept is not None:
                kept = self._kept.index_select(0, index.to(self._kept.device))
                self._earlier = model.recurrence.keeping.entering(kept)
                carry.held = dict.fromkeys(self._earlier, self._seen)
        else:
            carry.held = self._held()
        carry.seen = torch.tensor([self._sees_state(row) for row in rows])
        last = sorted({max(length - 1, 0) for length in lengths})
        logits = self._run(model, index, tokens.to(device), start + offset, unread, carry, torch.tensor(last))
        self._earlier = {}
        for row, length in zip(rows, lengths, strict=True):
            self._position[row] += length
        return logits[torch.arange(len(rows)), [last.index(max(length - 1, 0)) for length in lengths]][:, None]

    def _run(
        self,
        model: Any,
        rows: Tensor,
        tokens: Tensor,
        positions: Tensor,
        unread: Tensor,
        carry: hooks.HookContext,
        last: Tensor,
    ) -> Tensor:
        """The base model on tokens [b, n] of some rows, at these positions of their windows; logits of the `last`."""
        # what is padding goes to a place behind the window that nothing ever sees
        self._places, self._rows = positions.masked_fill(unread, self._window), rows
        inside = standing = positions.clamp(max=self._window - 1)
        if model.recurrence.keeping is not None and model.recurrence.keeping.places is not None:
            assert carry.seen is not None
            standing = inside + carry.seen.to(inside.device)[:, None] * self._seen
        out = model.base(
            input_ids=tokens,
            position_ids=standing,
            attention_mask=model.config.architecture.masks(model.config.base_config, inside, self._window + 1),
            past_key_values=self,
            use_cache=True,
            logits_to_keep=last.to(tokens.device),
            carry=carry,
        )
        if self._slots:
            recurrence = model.recurrence
            mixed = recurrence.mix([h.to(self._mixed) for h in recurrence.chosen(carry.take_outputs())])
            self._mixed[rows[:, None], self._places.to(self._mixed.device)] = mixed
        self._tokens[rows[:, None], self._places.to(self._tokens.device)] = tokens.to(self._tokens)
        return out.logits

    def _sees_state(self, row: int) -> bool:
        """A row begun with a state keeps it when `use_state` is False, as in `forward`, but does not look at it."""
        return self.use_state and self._started[row]

    def _held_at(self, layer: int) -> int:
        """How many places in front of a layer's window are the state's."""
        return self._seen + (self._slots if layer in self._layers else 0)

    def _held(self) -> dict[int, int]:
        return {layer: self._held_at(layer) for layer in range(1, self._depth + 1)}

    def _index(self, rows: Sequence[int]) -> Tensor:
        return torch.tensor(rows, device=self._tokens.device)

    @property
    def state(self) -> State:
        """Where the documents stand, to go on with in any later call: all that was given, less what ended a row."""
        if self.has_beams:
            raise ValueError(
                "after beam search there is no state: the beams that were still running are not the texts given out. "
                "Read those with model.advance_state."
            )
        if self.state_before is not None:
            return self.state_before
        pending = torch.tensor(self._position)
        return State(
            carried=self._carried, kept=self._kept, started=torch.tensor(self._started),
            tokens=self._tokens[:, : int(pending.max())].clone(),  # the buffer is written on
            pending=pending, read=torch.tensor(self._read), signature=self._signature,
        )  # fmt: skip


def check_cache(cache: Any, **others: Any) -> None:
    """Refuse another kind of cache, and what a cache knows already."""
    if not isinstance(cache, WindowCache):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}: a recurrent model goes on from the WindowCache that "
            "generate gave out, or from a state."
        )
    for name, value in others.items():
        if value is not None:
            raise ValueError(
                f"{name} cannot be given together with past_key_values, which goes on as it began "
                "and gives the logits of the last token."
            )
