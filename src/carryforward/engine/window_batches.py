# SPDX-License-Identifier: Apache-2.0
"""`WindowBatch`: windows that run as one batch, with the tensors they read and are scored on, and how they are linked.

Causal windows are padded on the right without a mask, since no real position sees the padding. Encoder windows get
prefix, suffix and mask. `batch_plan` has the coordinates: tokens, positions and columns.
"""

import dataclasses
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..memories.links import BlockLayout, DocumentWindows, WindowLinks
from ..memories.slot_links import SlotLinks
from ..windows import IGNORE, Span, Window, WindowGroup

if TYPE_CHECKING:
    from .batch_plan import BatchPlan


@dataclass(eq=False)
class WindowBatch:
    """Windows that run as one batch: one of each row, or a block, which may hold several of a row side by side.

    Attributes:
        plan: the call they belong to.
        rows, windows: the row and the window of each. Those of a row are in order, and without a gap.
        num_first: the first so many receive no state: documents' first windows, or all if there is no state.
        is_block: windows of a row stand side by side.
        num_alone: the first so many of these see no other window, on their right either.
        finished: for each window, whether it is complete and passes on a state.
        detach: for each window, whether truncated BPTT detaches the state it receives.
        width: positions of the longest window, special tokens included.
        output_rows, output_positions: which outputs the call returns, if any (`select_outputs`).
        choices: what a memory has selected in each layer.
        first_output: the first such position; the last position if there is none, since outputs have a shape.
    """

    plan: "BatchPlan"
    rows: list[int]
    windows: list[Window]
    num_first: int
    num_alone: int
    is_block: bool
    finished: list[bool]
    detach: list[bool]
    width: int
    output_rows: Tensor = field(init=False)
    output_positions: Tensor = field(init=False)
    first_output: int = field(init=False)
    choices: dict[int, Tensor] = field(init=False, default_factory=dict)
    _indices: tuple[Tensor, Tensor, Tensor, Tensor] | None = field(init=False, default=None)

    def set_indices(self, rows: Tensor, columns: Tensor, prefix_lengths: Tensor, lengths: Tensor) -> None:
        """Set the row, first packed column, prefix length and document length of each window, each [b, 1]."""
        self._indices = rows, columns, prefix_lengths, lengths

    @property
    def indices(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if self._indices is None:
            self.plan.send_indices()
        assert self._indices is not None
        return self._indices

    @property
    def has_state(self) -> bool:
        """Whether any of the windows receives a state."""
        return self.num_first < len(self.rows)

    @cached_property
    def entering(self) -> list[int]:
        """The rows whose state enters: those whose first window here is not their document's first."""
        if not self.is_block:
            return self.rows if self.has_state else []
        started = {*self.rows[: self.num_first]}
        return [row for row in dict.fromkeys(self.rows[self.num_first :]) if row not in started]

    @cached_property
    def leaving(self) -> dict[int, int]:
        """By row whose state leaves: the last window that is finished."""
        return {row: i for i, (row, finished) in enumerate(zip(self.rows, self.finished, strict=True)) if finished}

    @property
    def depth(self) -> int:
        """Windows of a row that stand side by side, at most."""
        return max(Counter(self.rows).values())

    @property
    def final_rows(self) -> list[int]:
        """Where there are blocks, the rows whose states leave for good: no later window passes one on."""
        leaving = self.leaving if self.plan.block_windows > 1 else {}
        return [row for row, i in leaving.items() if self.windows[i] is self.plan.last_finished(row)]

    @property
    def masked(self) -> bool:
        """Whether an encoder needs a mask: windows of different lengths stand side by side."""
        plan, pairs = self.plan, zip(self.rows, self.windows, strict=True)
        return not plan.causal and len({len(plan.prefixes[row]) + w.end - w.start for row, w in pairs}) > 1

    def _common_column(self) -> int | None:
        """The packed column at which all rows have the same window, if they do: a slice then replaces a gather."""
        plan = self.plan
        begins = {window.start - plan.first[row] for row, window in zip(self.rows, self.windows, strict=True)}
        same = len(begins) == 1 and len({w.end - w.start for w in self.windows}) == 1
        return begins.pop() if same and self.rows == [*range(len(plan.read))] else None

    def _columns(self, ahead: int = 0) -> tuple[Tensor, Tensor]:
        """The packed column at each position, and whether the position holds a document token, each [b, width]."""
        tokens = self.plan.tokens
        _, starts, prefix_lengths, lengths = self.indices
        position = torch.arange(self.width, device=tokens.device) - prefix_lengths
        columns = (starts + position + ahead).clamp(0, tokens.shape[1] - 1)
        return columns, (position >= 0) & (position < lengths)

    def inputs(self) -> tuple[Tensor, Tensor | None]:
        """Token ids [b, width] and, where an encoder needs one, the attention mask."""
        plan, begin = self.plan, self._common_column()
        if plan.causal and begin is not None:
            return plan.tokens[:, begin : begin + self.width], None
        columns, is_document = self._columns()
        rows, _, prefix_lengths, lengths = self.indices
        ids = plan.tokens[rows, columns]
        if plan.causal:
            return torch.where(is_document, ids, ids[:, :1]), None  # padding can be any token: nothing sees it
        position = torch.arange(self.width, device=ids.device)
        after = position - prefix_lengths - lengths  # 0 at the first position after the document's tokens
        ids = torch.where(is_document, ids, plan.filler)
        longest = min(max(map(len, plan.prefixes)), self.width)
        if longest:
            prefix = plan.prefix_table()[rows[:, 0], :longest]
            ids[:, :longest] = torch.where(position[:longest] < prefix_lengths, prefix, ids[:, :longest])
        for i, token in enumerate(plan.suffix):
            ids = torch.where(after == i, token, ids)
        return ids, (after < len(plan.suffix)).long() if self.masked else None

    def prefix_inputs(self) -> tuple[Tensor | None, Tensor | None]:
        """If rows have their own prefixes: prefix lengths [b, 1], and token types [b, width] if the model has several:
        0 in a row's prefix, 1 after it."""
        if not self.plan.has_row_prefixes:
            return None, None
        lengths = self.indices[2]
        types = (torch.arange(self.width, device=lengths.device) >= lengths).long() if self.plan.token_types else None
        return lengths, types

    def score_spans(self) -> list[tuple[int, int]]:
        """For each window the range of positions whose outputs it scores or returns."""
        plan, spans = self.plan, []
        for row, window in zip(self.rows, self.windows, strict=True):
            shift = len(plan.prefixes[row]) - window.start - int(plan.causal)
            spans.append((window.score_from + shift, window.score_to + shift))
        return spans

    @property
    def first_scored(self) -> int:
        """The first position that any of the windows scores."""
        return min(begin for begin, _ in self.score_spans())

    @property
    def num_scored(self) -> int:
        """Tokens that these windows score."""
        return sum(window.score_to - window.score_from for window in self.windows)

    def targets(self, start: int) -> Tensor:
        """The label of each position from `start` on, or -100, [b, width - start]."""
        plan = self.plan
        assert plan.labels is not None
        spans, begin = self.score_spans(), self._common_column()
        if plan.causal and not plan.outputs and begin is not None and set(spans) == {(start, spans[0][1])}:
            stop = spans[0][1]  # a slice of the labels
            labels = plan.labels[:, begin + start + 1 : begin + stop + 1]
            return labels if stop == self.width else pad(labels, (0, self.width - stop), value=IGNORE)
        columns, _ = self._columns(ahead=int(plan.causal))
        labels = plan.labels[self.indices[0], columns]
        position = torch.arange(self.width, device=labels.device)
        begins, ends = plan.index(spans).split(1, dim=1)
        scored = (position >= begins) & (position < ends)
        if plan.causal and plan.outputs:  # the output at the last token has no target
            last = plan.index([plan.lengths[r] - w.start for r, w in zip(self.rows, self.windows, strict=True)])
            scored &= position + 1 < last[:, None]
        return labels.masked_fill(~scored, IGNORE)[:, start:]

    def select_outputs(self, output_columns: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Find which outputs the call returns, and where they go.

        Args:
            output_columns: for each row and packed column the output column, or -1, as `BatchPlan.output_columns` has
                them, on the CPU.
            width: output columns.

        Returns:
            row in this batch and position of each output, and its index in the call's outputs [B * width].
        """
        plan, pairs = self.plan, zip(self.rows, self.windows, strict=True)
        before = len(plan.config.recurrence.prefix)
        packed = [before + window.start - plan.first[row] - len(plan.prefixes[row]) for row, window in pairs]
        spans = torch.tensor([self._output_span(i, span) for i, span in enumerate(self.score_spans())])
        position, row = torch.arange(self.width), torch.tensor(self.rows)[:, None]
        column = (position + torch.tensor(packed)[:, None]).clamp(0, output_columns.shape[1] - 1)
        column = output_columns[row, column]
        selected = (position >= spans[:, :1]) & (position < spans[:, 1:]) & (column >= 0)
        rows, positions = selected.nonzero(as_tuple=True)
        return rows, positions, (column + row * width)[selected]

    def _output_span(self, i: int, span: tuple[int, int]) -> tuple[int, int]:
        """The range of positions whose outputs a window returns: with its special tokens, where these are returned."""
        plan, row, window = self.plan, self.rows[i], self.windows[i]
        if not plan.gives_framing(row):
            return span
        begin, end = span
        is_first, is_last = window is plan.schedules[row][0], window is plan.schedules[row][-1]
        return 0 if is_first else begin, end + len(plan.suffix) if is_last else end

    def state_spans(self) -> dict[Span, list[int]]:
        """The positions that finished windows make their state of, each span with its windows in this batch.

        Neither prefix nor suffix are pooled. The state runs as far ahead of the next window, if there is one, as it did
        in training, where the overlap may have been another (footnote 3). Rows with prefixes of their own share a span:
        full windows end at the same position. In a block only the last finished window of a row has a state that
        leaves, and these states leave together, under the span of the first.
        """
        if self.is_block:
            leaving = sorted(self.leaving.values())
            return {self._state_span(leaving[0]): leaving} if leaving else {}
        spans: dict[Span, list[int]] = {}
        for i, finished in enumerate(self.finished):
            if finished:
                spans.setdefault(self._state_span(i), []).append(i)
        return spans

    def _state_span(self, i: int) -> Span:
        plan, row, window = self.plan, self.rows[i], self.windows[i]
        start, closes = len(plan.prefixes[row]), plan.closes(row, window)
        end = start + window.end - window.start
        stop = end if closes else start + plan.config.recurrence.pooled(end - start, plan.overlap)
        begin = None if plan.has_row_prefixes and not closes else start
        return Span(begin, stop, end if closes else end - plan.overlap)

    def links(self) -> WindowLinks | None:
        """How the windows of a block follow each other; None if none receives or passes on a state."""
        plan = self.plan
        if not self.is_block or not plan.use_state or not (self.has_state or self.leaving):
            return None
        columns = self._left_links()
        if plan.group is None:
            columns["following"] = self._following(columns["previous"])
        else:
            columns |= self._right_links(plan.group)
        numbers = plan.index([int(number) for column in columns.values() for number in column])  # one transfer
        parts = numbers.split([len(column) for column in columns.values()])
        tensors = {name: part.bool() if "detach" in name else part for name, part in zip(columns, parts, strict=True)}
        return WindowLinks(
            num_first=self.num_first,
            num_alone=self.num_alone,
            next_start=plan.next_start,
            start=None if plan.has_row_prefixes else len(plan.prefixes[0]),
            prefix_lengths=self.indices[2] if plan.has_row_prefixes else None,
            slots=self._slot_links(),
            **tensors,
        )

    def _left_links(self) -> dict[str, list[Any]]:
        """For fields of `WindowLinks`: where windows find what is before them, and which states leave."""
        latest, beginning = ({row: -1 - i for i, row in enumerate(self.entering)} for _ in range(2))
        detached = dict.fromkeys(self.rows, False)  # by row, whether a window so far has detached what it received
        previous: list[int] = []
        firsts: list[tuple[int, bool]] = []  # of every window
        for i, (row, window, detach) in enumerate(zip(self.rows, self.windows, self.detach, strict=True)):
            if i < self.num_first:
                beginning[row] = latest[row] = i
            else:
                detached[row] |= detach
            previous.append(latest[row])
            firsts.append((beginning[row], detached[row]))
            if not window.is_read_again:
                latest[row] = i
        alone, leaving = self.num_alone, sorted(self.leaving.values())
        sources, flags = map(list, zip(*firsts, strict=True))
        links: dict[str, list[Any]] = {
            "previous": previous[alone:], "first": sources[alone:], "last": leaving,
            "last_first": [sources[i] for i in leaving],
        }  # fmt: skip
        if any(flags):
            links |= {"detach": self.detach[alone:], "detach_first": flags[alone:]}
            links["last_detach_first"] = [flags[i] for i in leaving]
        return links

    def _following(self, previous: list[int]) -> list[int]:
        """The inverse of `WindowLinks.previous`."""
        following = [-1] * (len(self.rows) + len(self.entering))
        for i, source in enumerate(previous):
            following[source if source >= 0 else len(self.rows) - 1 - source] = i
        return following

    def _right_links(self, group: WindowGroup) -> dict[str, list[Any]]:
        """For fields of `WindowLinks`: the windows' right neighbours. Some window has one, or there are no links."""
        neighbours, num_right = [*range(len(self.rows))], [0] * len(self.rows)
        following: dict[int, int] = {}  # by row, the window after
        for i, (row, window) in reversed([*enumerate(zip(self.rows, self.windows, strict=True))]):
            after = following.get(row)
            if after is not None and window.sees_next(self.windows[after]):
                neighbours[i] = after
                num_right[i] = min(group.right, self.windows[after].end - self.windows[after].start)
            following[row] = i
        return {"next": neighbours[self.num_alone :], "num_right": num_right}

    def _slot_links(self) -> SlotLinks | None:
        """Made anew for every run: only what was selected is kept, so that windows that run again receive the same."""
        plan = self.plan
        if not plan.config.recurrence.needs_history:
            return None
        block = BlockLayout(self._documents(), len(self.rows), self.num_first, self.width, len(self.entering))
        slots = plan.config.recurrence.slot_links(block, plan.config.architecture.rotary, plan.index)
        return None if slots is None else dataclasses.replace(slots, choices=self.choices)

    def _documents(self) -> tuple[DocumentWindows, ...]:
        """The windows of each document in a block, and how far into the document they are."""
        plan, numbers = self.plan, defaultdict[int, list[int]](list)
        for i, row in enumerate(self.rows):
            numbers[row].append(i)
        states = {row: i for i, row in enumerate(self.entering)}
        documents = []
        for row, own in numbers.items():
            origin, finished = plan.origins[row], sum(self.finished[i] for i in own)
            documents.append(
                DocumentWindows(
                    windows=tuple(own),
                    tokens=tuple(self.windows[i].start - origin for i in own),
                    finished=finished,
                    after=plan.next_token(row, self.windows[own[finished - 1]]) - origin if finished else 0,
                    state=states.get(row),
                    start=len(plan.prefixes[row]),
                    detach=tuple(self.detach[i] for i in own),
                )
            )
        return tuple(documents)
