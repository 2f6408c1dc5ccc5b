# SPDX-License-Identifier: Apache-2.0
"""From a padded batch, and the state it continues from, to the window batches that run.

Padding is removed first, so that positions count real tokens. Each row then has its own schedule of windows. What runs
together is a `WindowBatch`: the next window of every row that still has one, or a block of windows of a few rows.
Lengths are read from the device once; planning is done on the host. A row may have a prefix of its own, such as a
question.

Blocks hold as many windows as there are places, row by row: all windows of a row, then those of the next. A row is cut
only if it has more windows than a block has places. Most blocks then need no state from another, and none of them has
to run twice. Where windows see their right neighbours, a block holds whole groups.

Coordinates: a *token* index counts from the document's start, a *position* from the window's start (prefix included),
a *column* from the start of the packed row (the unfinished window's first token).
"""

import dataclasses
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..config import RecurrentModelConfig
from ..state import State
from ..windows import IGNORE, Window, encoder_schedule, grouped_schedule, schedule
from .window_batches import WindowBatch


class BatchPlan:
    """One call's documents, packed, and the window batches in which they are read.

    Attributes:
        tokens, labels: packed rows, [B, M]: tokens pending from the state, then the new ones.
        first: for each row, the token index of its first column.
        origins: for each row, the token index at which what is carried begins.
        read, lengths: for each row, how many tokens were read before the call, and how many after it.
        capacities: for each row, the document tokens of a full window.
        group: the groups in which windows see their right neighbours, if they do.
        schedules: for each row, its windows.
        batches: the window batches, in order.
        width: columns of the input.
    """

    def __init__(
        self,
        config: RecurrentModelConfig,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        labels: Tensor | None,
        state: State,
        *,
        overlap: int,
        outputs: bool,
        final: bool,
        closing: bool,
        use_state: bool,
        block_windows: int,
        prefixes: Sequence[Sequence[int]] | None,
        framing: Tensor | None = None,
    ):
        """
        Args:
            state: how far the documents have been read; a fresh one for new documents.
            outputs: an output is needed at every token, the last one included, and not only the scored targets.
            final: the documents end here (encoders).
            closing: they end here, and their last windows pass on a state even if they are not full.
            use_state: pass states on. Otherwise every window stands alone.
            block_windows: a block has so many places for every row of the call, or those of a group; 1: every window
                waits for the one before it, and one of each row runs at a time.
            prefixes: the tokens in front of every window of each row, with token types that tell them from the
                document where the model has some; by default the config's.
            framing: the columns of special tokens that the input has around whole documents, [B, N]. They are masked,
                since every window gets its own, and have the outputs of those of the first and of the last window.
        """
        self.config = config
        recurrence = config.recurrence
        self.group = recurrence.window_group if use_state else None
        self.causal = config.architecture.causal
        self.overlap = overlap
        self.outputs = outputs
        self.final = final
        self.closing = closing and self.group is None
        self.use_state = use_state
        self.has_row_prefixes = prefixes is not None
        self.prefixes = [recurrence.prefix] * len(input_ids) if prefixes is None else [tuple(one) for one in prefixes]
        self.suffix = recurrence.suffix
        self.token_types = self.has_row_prefixes and config.architecture.has_token_types(config.base_config)
        self.filler = getattr(config.base_config, "pad_token_id", None) or 0  # where an encoder's window has no token
        self.capacities = [recurrence.window - len(prefix) - len(self.suffix) for prefix in self.prefixes]
        self.initial_state = state
        self.framing = None if framing is None else framing.cpu()
        self._prefix_table: Tensor | None = None
        self.read: list[int] = state.read.tolist()
        self.first = [read - pending for read, pending in zip(self.read, state.pending.tolist(), strict=True)]
        self._pack(input_ids, attention_mask, labels)
        self.schedules = [self._schedule(row) for row in range(len(self.read))]
        if self.group is not None:  # room for a group at least
            block_windows = max(block_windows, -(-self.group.size // len(self.read)), 2)
        self.block_windows = block_windows
        self._started: list[bool] = state.started.tolist()
        begun = [0] * len(self.read) if state.origin is None else state.origin.tolist()
        # A row without a memory begins one now.
        self.origins = [
            begin if started else first for begin, started, first in zip(begun, self._started, self.first, strict=True)
        ]
        self.batches = self._make_batches()

    # --- packing -----------------------------------------------------------------------------------------------

    def _pack(self, input_ids: Tensor, attention_mask: Tensor | None, labels: Tensor | None) -> None:
        """Put each row's pending tokens and its new real ones side by side, starting in column 0."""
        batch, width = input_ids.shape
        self.width = width
        new = torch.full((batch,), width)
        self.source: Tensor | None = None  # the input column of each new token; None: the same column
        if attention_mask is not None and not attention_mask.all():
            mask = attention_mask.bool().cpu()
            new = mask.sum(dim=1)
            self.source = mask.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, : int(new.max())]
        state = self.initial_state
        self.lengths: list[int] = (state.read + new).tolist()
        self.tokens = self._join(state.tokens, input_ids)
        self.labels = None
        if labels is not None or state.labels is not None:  # pending labels are scored in any case
            pending = torch.full_like(state.tokens, IGNORE) if state.labels is None else state.labels
            self.labels = self._join(pending, torch.full_like(input_ids, IGNORE) if labels is None else labels)

    def _join(self, pending: Tensor, new: Tensor) -> Tensor:
        """Pending columns before the new ones, row by row. Without pending columns or padding nothing is copied."""
        if self.source is not None:
            new = new.gather(1, self.source.to(new.device))
        if not pending.shape[1]:
            return new
        both = torch.cat([pending.to(new.device), new], dim=1)
        counts = self.initial_state.pending[:, None]
        columns = torch.arange(both.shape[1]).expand(len(both), -1)
        moved = (columns + pending.shape[1] - counts).clamp(max=both.shape[1] - 1)
        return both.gather(1, torch.where(columns < counts, columns, moved).to(new.device))

    # --- planning ----------------------------------------------------------------------------------------------

    def _schedule(self, row: int) -> list[Window]:
        window, length, start = self.config.recurrence.window, self.lengths[row], self.first[row]
        if self.causal:
            length += self.outputs  # as if one more token followed: then the last one has an output too
            return list(schedule(length, window, self.overlap, start=start, score_from=max(self.read[row], 1)))
        sizes = {"prefix": len(self.prefixes[row]), "suffix": len(self.suffix)}
        if self.group:
            return list(grouped_schedule(length, window, self.group.size, **sizes, start=start, final=self.final))
        return list(encoder_schedule(length, window, self.overlap, **sizes, start=start, final=self.final))

    def _make_batches(self) -> list[WindowBatch]:
        groups = self._blocks(self.block_windows * len(self.schedules)) if self.block_windows > 1 else self._steps()
        return [batch for group in groups for batch in self._batches_of(group)]

    def _steps(self) -> Iterator[list[tuple[int, Window]]]:
        """One window of each row at a time."""
        for step in range(max(map(len, self.schedules), default=0)):
            yield [(row, windows[step]) for row, windows in enumerate(self.schedules) if step < len(windows)]

    def _blocks(self, places: int) -> list[list[tuple[int, Window]]]:
        """Windows of any rows side by side, filled row by row. A group is never cut."""
        blocks: list[list[tuple[int, Window]]] = [[]]
        for row, windows in enumerate(self.schedules):
            if len(blocks[-1]) + len(windows) > places and blocks[-1]:
                blocks.append([])
            for group in self._groups(row):
                if len(blocks[-1]) + len(group) > places and blocks[-1]:
                    blocks.append([])
                blocks[-1] += group
        return [block for block in blocks if block]

    def _groups(self, row: int) -> list[list[tuple[int, Window]]]:
        """The windows of a row, group by group."""
        groups: list[list[tuple[int, Window]]] = []
        for window in self.schedules[row]:
            if window.begins_group:
                groups.append([])
            groups[-1].append((row, window))
        return groups

    def _batches_of(self, pairs: list[tuple[int, Window]]) -> Iterator[WindowBatch]:
        """A block, if windows of a row are side by side, or a memory can be read in no other way; else those that
        receive a state, apart from the others."""
        first = sorted((pair for pair in pairs if not self._receives(*pair)), key=lambda pair: self._sees_right(*pair))
        others = [pair for pair in pairs if self._receives(*pair)]
        needed = self.group is not None or (self.use_state and self.config.recurrence.needs_history)
        if needed or len({row for row, _ in pairs}) < len(pairs):
            yield self._make_batch(first + others, len(first), is_block=True)
            return
        for group in self._of_equal_length(others):
            yield self._make_batch(group, 0, is_block=False)
        for group in self._of_equal_length(first):
            yield self._make_batch(group, len(group), is_block=False)

    def _of_equal_length(self, pairs: list[tuple[int, Window]]) -> list[list[tuple[int, Window]]]:
        """Where documents end and memory positions stand right behind their last tokens, windows of each length apart:
        a causal window must not be padded in between. Otherwise all of them together."""
        if not (self.closing and self.causal and self.config.recurrence.writes_behind):
            return [pairs] if pairs else []
        groups = defaultdict[int, list[tuple[int, Window]]](list)
        for row, window in pairs:
            groups[window.end - window.start].append((row, window))
        return [*groups.values()]

    def _receives(self, row: int, window: Window) -> bool:
        """Whether a window receives a state."""
        return self.use_state and (window is not self.schedules[row][0] or self._started[row])

    def _sees_right(self, row: int, window: Window) -> bool:
        """Whether the first window of a row's schedule sees the one after it."""
        return any(window.sees_next(following) for following in self.schedules[row][1:2])

    def _make_batch(self, pairs: list[tuple[int, Window]], num_first: int, is_block: bool) -> WindowBatch:
        plan = weakref.proxy(self)  # a cycle would keep states alive until the garbage collector runs
        width = max(len(self.prefixes[row]) + window.end - window.start for row, window in pairs)
        rows, windows = map(list, zip(*pairs, strict=True))
        return WindowBatch(
            plan, rows, windows, num_first,
            num_alone=sum(not self._sees_right(*pair) for pair in pairs[:num_first]) if is_block else num_first,
            is_block=is_block,
            finished=[self.is_finished(row, window) for row, window in pairs],
            detach=[self._detaches(row, window) for row, window in pairs],
            width=width + len(self.suffix),
        )  # fmt: skip

    def _detaches(self, row: int, window: Window) -> bool:
        """Whether truncated BPTT detaches the state that a window receives. Inside a group nothing is detached: there
        gradients flow in both directions."""
        depth = self.config.recurrence.bptt_windows
        if depth is None or not window.begins_group:
            return False
        number = window.start // (self.capacities[row] - self.overlap)
        return number // depth != (number - (self.group.advance if self.group else 1)) // depth

    @property
    def next_start(self) -> int:
        """The position of a full window at which the next one starts."""
        return self.config.recurrence.window - len(self.suffix) - self.overlap

    def continues(self, batch: WindowBatch) -> bool:
        """Whether a later batch reads the state after this one."""
        if self.block_windows == 1:
            return batch is not self.batches[-1]
        last = dict(zip(batch.rows, batch.windows, strict=True))
        return self.use_state and any(window is not self.schedules[row][-1] for row, window in last.items())

    def is_finished(self, row: int, window: Window) -> bool:
        """Whether a window passes on its state: it is full and nothing of it is still to be scored."""
        if window.is_read_again:
            return False
        if self.closes(row, window):
            return True
        full = window.end - window.start == self.capacities[row]
        more = window.end < self.lengths[row]
        return full and (more or not (self.causal or self.final))

    def last_finished(self, row: int) -> Window | None:
        """The last window of a row that passes on its state."""
        return next((window for window in reversed(self.schedules[row]) if self.is_finished(row, window)), None)

    def next_token(self, row: int, window: Window) -> int:
        """The token at which the window after a finished one begins."""
        return window.end if self.closes(row, window) else window.start + self.capacities[row] - self.overlap

    def closes(self, row: int, window: Window) -> bool:
        """Whether a window is the last of a document that ends here."""
        return self.closing and window.end == self.lengths[row]

    # --- tensors that window batches share ---------------------------------------------------------------------

    def index(self, values: Sequence[Any] | Tensor) -> Tensor:
        """Numbers of the plan as a tensor on the device, sent without waiting for it."""
        numbers = torch.as_tensor(values)
        if self.tokens.is_cuda:
            numbers = numbers.pin_memory()
        return numbers.to(self.tokens.device, non_blocking=True)

    def send_indices(self) -> None:
        """Give every window batch its indices: one transfer for all, since latency costs more than size."""
        numbers = [
            (row, window.start - self.first[row], len(self.prefixes[row]), window.end - window.start)
            for batch in self.batches
            for row, window in zip(batch.rows, batch.windows, strict=True)
        ]
        parts = self.index(numbers).split([len(batch.rows) for batch in self.batches])
        for batch, part in zip(self.batches, parts, strict=True):
            batch.set_indices(*part.split(1, dim=1))

    def prefix_table(self) -> Tensor:
        """Every row's prefix, padded to the longest, [B, longest]."""
        if self._prefix_table is None:
            longest = max(map(len, self.prefixes))
            rows = [(*prefix, *[self.filler] * longest)[:longest] for prefix in self.prefixes]
            self._prefix_table = self.index(rows)
        return self._prefix_table

    def count_scored(self) -> Tensor:
        """The number of targets this call scores."""
        assert self.labels is not None
        ranges = [(max(begin, int(self.causal)), end) for begin, end in self.emitted()]
        spans = self.index([(a - first, b - first) for (a, b), first in zip(ranges, self.first, strict=True)])
        column = torch.arange(self.labels.shape[1], device=self.labels.device)
        inside = (column >= spans[:, :1]) & (column < spans[:, 1:])
        return (inside & (self.labels != IGNORE)).sum()

    # --- where outputs go, and the state after the call ----------------------------------------------------------

    def emitted(self) -> list[tuple[int, int]]:
        """For each row the range of tokens whose outputs this call returns."""
        if self.causal:
            return list(zip(self.read, self.lengths, strict=True))
        ranges = []
        for first, windows in zip(self.first, self.schedules, strict=True):
            reached = first + (self.overlap + 1) // 2 if first else 0
            ranges.append((windows[0].score_from, windows[-1].score_to) if windows else (reached, reached))
        return ranges

    def gives_framing(self, row: int) -> bool:
        """Whether the outputs of a row's special tokens are returned."""
        return self.framing is not None and not self.has_row_prefixes and bool(self.framing[row].any())

    def output_columns(self, columns: Tensor | None) -> Tensor:
        """The output column of each packed column, behind those of the prefix and in front of those of the suffix,
        [B, p + M + s]; -1 for none.

        Args:
            columns: for each input column its output column or -1. None packs a row's outputs from column 0 on, as a
                streaming encoder must, whose outputs may belong to tokens of earlier calls.
        """
        batch, width = self.tokens.shape
        prefix, suffix = len(self.config.recurrence.prefix), len(self.suffix)
        targets = torch.full((batch, prefix + width + suffix), -1)
        for row, (begin, end) in enumerate(self.emitted()):
            inside = slice(prefix + begin - self.first[row], prefix + end - self.first[row])
            if columns is None:
                targets[row, inside] = torch.arange(end - begin)
                continue
            source = torch.arange(end - begin) if self.source is None else self.source[row, : end - begin]
            targets[row, inside] = columns[source]
            if self.gives_framing(row):
                special = columns[self.framing[row].nonzero()[:, 0]]  # type: ignore[index]
                targets[row, :prefix], targets[row, inside.stop : inside.stop + suffix] = special.tensor_split([prefix])
        return targets

    def final_state(self, memory: dict[str, Tensor], summary: Tensor | None = None) -> State:
        """The state of the documents after this call."""
        starts, started = [], self.initial_state.started.tolist()
        for row, windows in enumerate(self.schedules):
            starts.append(self.first[row])
            for window in windows:
                if self.is_finished(row, window):
                    starts[row] = min(window.start + self.capacities[row] - self.overlap, self.lengths[row])
                    started[row] = self.use_state
        pending = [length - start for length, start in zip(self.lengths, starts, strict=True)]
        origins = [origin if begun else 0 for origin, begun in zip(self.origins, started, strict=True)]
        columns = torch.arange(max(pending)) + torch.tensor(starts)[:, None] - torch.tensor(self.first)[:, None]
        columns = self.index(columns.clamp(max=self.tokens.shape[1] - 1))
        return dataclasses.replace(
            self.initial_state,
            memory=memory,
            started=torch.tensor(started),
            tokens=self.tokens.gather(1, columns),
            pending=torch.tensor(pending),
            read=torch.tensor(self.lengths),
            labels=self.labels.gather(1, columns) if self.labels is not None and not self.causal else None,
            summary=summary,
            ended=self.closing or (self.final and not self.causal),
            origin=torch.tensor(origins) if any(origins) else None,
        )
