# SPDX-License-Identifier: Apache-2.0
"""The cache of generation: keys and values of the current window, and the state that enters it.

The window's keys and values stay in place in buffers of the window's size, of which attention sees what is filled. When
a row's window is full, its memories write their state, the overlap is read again as the start of the next window, and
the buffers are reused: neither time nor memory depends on how much was written. Rows may be at different positions of
their windows, so every row has its own. The recurrent model comes with every call; the cache holds none.

On a GPU the decoding step is captured (`engine.decode_graph`): everything that it reads and writes stays in place.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...backbones.hooks import HookContext
from ...backbones.memory_positions import grow_cache_mask
from ...engine.decode_graph import DecodeGraph, decode_key
from ...engine.graph_cache import first_line
from ...memories.base import WindowRecord
from ...state import State
from ...windows import Span
from .cache_places import CachePlaces
from .cache_rows import CacheRows

CAPTURE_AFTER = 4  # tokens: a capture takes as long as a few


class WindowCache(CacheRows):
    """What has been read of a batch of documents, to continue token by token. Pass it as `past_key_values`.

    Attributes:
        ends: tokens that end a row. `generate` goes on giving padding to a row that ended before others; neither that
            nor the token that ended it is read.
    """

    def __init__(self, state: State, overlap: int, use_state: bool = True, allow_other_model: bool = False):
        """
        Args:
            state: how far the documents have been read; a fresh one for new documents.
            overlap: tokens that consecutive windows share.
            use_state: False removes the state.
            allow_other_model: the state may be that of a model with other weights or settings.
        """
        super().__init__(state)
        self.overlap = overlap
        self.use_state = use_state
        self.allow_other_model = allow_other_model
        self.ends: tuple[int, ...] = ()
        self._decode_graph: DecodeGraph | None = None
        self._steps = 0  # since the buffers were made
        self._reads_first = False  # documents' first windows receive something, too

    def __getstate__(self) -> dict[str, Any]:
        """Copies have buffers of their own, which a captured graph does not know."""
        return {**self.__dict__, "_decode_graph": None, "_steps": 0}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._decode_graph = None
        super().reorder_cache(beam_idx)

    # --- reading -------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # buffers made in that mode could not be written to outside it
    @torch.no_grad()
    def read(self, model: Any, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Read the next columns of every row; the logits of the last token of each, [B, 1, V]."""
        if mask is not None and not bool(mask[:, -1].all()):
            raise ValueError(
                "attention_mask ends with 0: prompts must be padded on the left (padding_side='left' in the tokenizer)."
            )
        if self.state_before is None and len(ids) != self._batch:
            raise ValueError(f"past_key_values has {self._batch} rows, input_ids has {len(ids)}.")
        if ids.shape[1] > 1:
            self.restart()
        logits = self._step(model, ids) if self.state_before is None else self._begin(model, ids, mask)
        self.columns += ids.shape[1]
        return logits

    def restart(self) -> None:
        """Prepare for more text: the unfinished window is read again with it. Refused if a row has ended."""
        if self.state_before is not None:
            return
        if any(self._ended):
            raise ValueError(
                f"row {self._ended.index(True)} has ended: continue from past_key_values.state instead, with the text "
                "that follows in each row."
            )
        self.state_before = self.state

    def _begin(self, model: Any, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Read the prompt: full windows give the state only; the tokens after them fill the buffers."""
        before = self.state_before
        assert before is not None
        if len(ids) > len(before):  # several sequences for each prompt
            before = before[torch.arange(len(before)).repeat_interleave(len(ids) // len(before))]
        state = model.advance_state(
            ids, mask, before, overlap=self.overlap, use_state=self.use_state, allow_other_model=self.allow_other_model
        )
        self.state_before = None
        self.kv = {}  # there may be more rows than before
        self._decode_graph, self._steps = None, 0
        self._signature, self._model = state.signature, state.model
        self._batch, self._window = len(state), model.config.recurrence.window
        self._architecture = model.config.architecture  # looking it up takes time
        self._state_columns = _state_columns(model)
        device = state.tokens.device
        self._memory = {kind: x.clone() for kind, x in state.memory.items()}  # written in place, for captured steps
        self._reads_first = model.memory.reads_first
        self._started = state.started.tolist()
        self._read = state.read.tolist()
        self._starts = (state.read - state.pending).tolist()
        self._origins = [0] * self._batch if state.origin is None else state.origin.tolist()
        self._visible = torch.zeros(self._batch, max(self._state_columns.values()), dtype=torch.bool, device=device)
        self.positions = [0] * self._batch
        self._ended = [False] * self._batch
        self._tokens = torch.zeros(self._batch, self._window + 1, dtype=torch.long, device=device)
        self._features = {
            kind: model.memory.like.new_zeros(self._batch, self._window + 1, memory.token_width)
            for kind, memory in model.memory.items()
            if memory.token_width
        }
        logits = None
        for with_state in (False, True):
            rows = [row for row in range(self._batch) if self._sees_state(row) == with_state]
            if rows:
                lengths = [int(state.pending[row]) for row in rows]
                tokens = state.tokens[rows, : max(lengths)]
                part = self._call(model, rows, tokens, lengths, brings_state=with_state)
                logits = part.new_zeros(self._batch, *part.shape[1:]) if logits is None else logits
                logits[rows] = part
        assert logits is not None
        return logits

    def _step(self, model: Any, column: Tensor) -> Tensor:
        """Read one more token in every row. Rows whose window is full begin the next one with it."""
        if self.ends and self._batch > 1:  # a single row that ends is not continued
            self._ended = [
                ended or token in self.ends for ended, token in zip(self._ended, column[:, 0].tolist(), strict=True)
            ]
        full = [row for row in range(self._batch) if self.positions[row] == self._window and not self._ended[row]]
        rest = [row for row in range(self._batch) if row not in full]
        new = [0 if ended else 1 for ended in self._ended]
        self._read = [read + count for read, count in zip(self._read, new, strict=True)]
        if not full:
            return self._next(model, column, new)
        if self._decode_graph is not None:
            self._decode_graph.stale = True
        begin = self._window - self.overlap
        tokens = torch.cat([self._tokens[full, : self._window], column[full].to(self._tokens.device)], dim=1)
        if self.use_state and model.memory.reads_again:
            self._read_again(model, full, tokens)
        elif self.use_state:
            self._write_state(model, full)
        for row in full:
            self._origins[row] = self._origins[row] if self._started[row] else self._starts[row]
            self.positions[row], self._started[row] = 0, self.use_state
            self._starts[row] += begin
        tokens = tokens[:, begin:]
        parts = [(full, self._call(model, full, tokens, [tokens.shape[1]] * len(full), brings_state=self.use_state))]
        if rest:
            parts.append((rest, self._call(model, rest, column[rest], [new[row] for row in rest])))
        logits = parts[0][1].new_empty(self._batch, *parts[0][1].shape[1:])
        for rows, part in parts:
            logits[rows] = part
        return logits

    def _write_state(self, model: Any, rows: list[int]) -> None:
        """Write the state after the windows of these rows, which are full."""
        recurrence = model.config.recurrence
        span = Span(0, recurrence.pooled(self._window, self.overlap), self._window - self.overlap)
        for kind, memory in model.memory.items():
            first, later = ([row for row in rows if self._started[row] == started] for started in (False, True))
            for group in (first, later) if memory.uses_previous else (rows,):
                if not group:
                    continue
                layers = sorted(self.kv) if memory.records_kv else []
                window_kv = [self._window_kv(layer, group, model.kv_layouts) for layer in layers]
                record = WindowRecord([], window_kv, model.rerotate)
                features = self._features[kind][group] if kind in self._features else torch.empty(0)
                previous = self._memory[kind][group] if group is later else None
                new = memory.write_tokens(features, record, span, previous)
                self._memory[kind].index_copy_(0, self._index(group).to(new.device), new)

    def _read_again(self, model: Any, rows: list[int], tokens: Tensor) -> None:
        """Read the full windows of these rows at once, to find the state after them: one more forward pass for each
        window. Selections need queries, which the cache does not hold; others need memory positions behind a window.

        Args:
            tokens: those of the windows and the next one, without which they are not complete, [b, T + 1].
        """
        state = self._state_of(rows, tokens[:, :0], [0] * len(rows), [self._starts[row] for row in rows])
        after = model.advance_state(tokens, state=state, overlap=self.overlap, allow_other_model=True)
        for kind, new in after.memory.items():
            self._memory[kind].index_copy_(0, self._index(rows).to(new.device), new)

    def _next(self, model: Any, column: Tensor, new: list[int]) -> Tensor:
        """Read one more token in every row that continues, none of which begins a window."""
        self._steps += 1
        capture = self._decode_graph is None and self._steps > CAPTURE_AFTER and not self.has_beams
        capture = capture and not model.memory.needs_history
        capture = capture and model.graph_cache.possible(self._tokens.device)
        if capture and model.graph_cache.usable(list(model.modules()), list(model.parameters())):
            reason = ""
            try:
                self._decode_graph = DecodeGraph(self, model, column)
            except Exception as error:  # as for windows: the eager way always works
                reason = first_line(error)
            if self._decode_graph is None:
                model.graph_cache.disable(reason)
        graph = self._decode_graph
        if graph is not None and (model.fast_path == "off" or graph.key != decode_key(model)):
            self._decode_graph, self._steps = None, 0
        if self._decode_graph is None:
            return self._call(model, range(self._batch), column, new)
        logits = self._decode_graph(self, column, new)
        self.positions = [position + count for position, count in zip(self.positions, new, strict=True)]
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

        A row of length 0 runs along without effect: taking it out of the batch would copy the others' buffers.
        """
        places = CachePlaces.of_call(
            rows, [self.positions[row] for row in rows], lengths, [self._sees_state(row) for row in rows],
            batch=self._batch, window=self._window, device=model.device,
        )  # fmt: skip
        context, columns = HookContext(), self._state_columns if places.sees_state else {}
        if brings_state:
            state = {kind: x[self._index(rows).to(x.device)] for kind, x in self._memory.items()}
            state = model.memory.entering(state, [self._started[row] for row in rows])
            model.memory.read_after(state, context, self._tokens_before(rows), model.rotation)
            self._visible[rows] = True if context.past_visible is None else context.past_visible
            # Carried keys and values go into the cache, from which attention reads them.
            self._past_kv = {
                layer: model.kv_layouts[layer - 1].cached(kv) if model.kv_layouts else kv
                for layer, kv in context.past_kv.items()
            }
            context.past_kv = {}
            columns = {layer: kv[0].shape[2] for layer, kv in self._past_kv.items()}
        last = sorted({max(length - 1, 0) for length in lengths})
        logits = self._run_base(model, tokens.to(model.device), places, context, columns, last)
        self._past_kv = {}
        for row, length in zip(rows, lengths, strict=True):
            self.positions[row] += length
        if len(last) == 1:
            return logits
        return logits[torch.arange(len(rows)), [last.index(max(length - 1, 0)) for length in lengths]][:, None]

    def run_step(
        self, model: Any, rows: Tensor, column: Tensor, positions: Tensor, ended: Tensor, with_state: Tensor
    ) -> Tensor:
        """Read one more token in every row, whatever the positions [B, 1] are: what a CUDA graph captures."""
        places = CachePlaces.of_rows(rows, positions, ended, with_state, self._window, self._window)
        return self._run_base(model, column, places, HookContext(), self._state_columns, [0])

    def _run_base(
        self,
        model: Any,
        tokens: Tensor,
        places: CachePlaces,
        context: HookContext,
        state_columns: dict[int, int],
        last: Sequence[int],
    ) -> Tensor:
        """Run the base model on tokens [b, n]; logits of the columns `last`."""
        self._places, positions = places, places.positions
        architecture, base_config = self._architecture, model.config.base_config
        history = model.memory.needs_history
        if self.use_state and not context.layer_inputs:
            model.memory.read_tokens({kind: places.of_rows_in(x) for kind, x in self._memory.items()}, context)
        context.past_visible = None  # the masks say it
        context.attention_masks = architecture.cache_masks(
            base_config, positions, places.keys, [state_columns.get(layer, 0) for layer in self._state_columns],
            places.of_rows_in(self._visible) if history else places.with_state[:, None],
            None if context.slots or history or context.before is not None else places.last,
        )  # fmt: skip
        shift = model.memory.position_shift
        if history:
            shifts = model.memory.position_shifts(self._tokens_before(range(self._batch)))
            if shifts is not None:
                shift = places.of_rows_in(torch.tensor(shifts, device=positions.device))[:, None]
        if shift is not None:
            positions = torch.where(places.with_state[:, None], positions + shift, positions)
        if context.before is not None:
            positions = self._enter_before(context, positions)
        out = model.base(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=architecture.replaced_mask(base_config, tokens.device),
            past_key_values=self,
            use_cache=True,
            logits_to_keep=1 if tokens.shape[1] == 1 else torch.tensor(last, device=tokens.device),
            hook_context=context,
        )
        if self._features:
            layer_outputs = context.take_layer_outputs()
            for kind, features in self._features.items():
                places.store(features, getattr(model.memory, kind).token_features(layer_outputs))
        places.store(self._tokens, tokens)
        return out.logits

    def _enter_before(self, context: HookContext, positions: Tensor) -> Tensor:
        """Make room for memory positions in front of the tokens at these positions [b, n]: in masks and positions."""
        assert context.before is not None
        count = context.before.shape[1]
        context.attention_masks = [grow_cache_mask(mask, count) for mask in context.attention_masks if mask is not None]
        own = torch.arange(count, device=positions.device).expand(len(positions), -1)
        return torch.cat([own, positions], dim=1)

    def _tokens_before(self, rows: Sequence[int]) -> list[int]:
        """For each of some rows, the tokens from where its memory begins to the start of its window."""
        return [self._starts[row] - self._origins[row] for row in rows]

    def _sees_state(self, row: int) -> bool:
        """Whether a row attends to a state, its own or a first one. With `use_state=False` it keeps one that it began
        with, unused."""
        return self.use_state and (self._started[row] or self._reads_first)

    def rows_with_state(self) -> list[bool]:
        return [self._sees_state(row) for row in range(self._batch)]


def _state_columns(model: Any) -> dict[int, int]:
    """For each layer, counted from 1, how many keys a state adds: found by reading an empty one."""
    context = HookContext()
    model.memory.read_after(model.memory.initial(1), context, [0], model.rotation)
    slots = {layer: vectors.shape[1] for layer, vectors in context.slots.items()}
    past = {layer: keys.shape[2] for layer, (keys, _) in context.past_kv.items()}
    layers = range(1, model.config.base_config.num_hidden_layers + 1)
    before = 0 if context.before is None else context.before.shape[1]
    return {layer: slots.get(layer, 0) + past.get(layer, 0) + before for layer in layers}
