# SPDX-License-Identifier: Apache-2.0
"""From a padded batch, and the state it goes on from, to the windows that are run: rows, positions, targets.

Padding is taken away first, so that positions count real tokens. Each row then has its own schedule; what runs
together is a `Cell`: the next window of every row that still has one. Lengths are read from the device once; planning
is done on the host. Causal windows are padded on the right without a mask (no real position sees the
padding); encoder windows get prefix, suffix and mask. A row may have a prefix of its own, such as a question.

Coordinates: a *token* index counts from the document's start, a *position* from the window's start (prefix included),
a *column* from the start of the packed row (the unfinished window's first token).
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..config import RecurrentModelConfig
from ..state import State
from ..windows import IGNORE, Span, Window, encoder_schedule, schedule


@dataclass(frozen=True)
class Cell:
    """Windows that run as one batch: of different rows, or also several of a row where none needs another.

    Attributes:
        rows, windows: the row and the window of each.
        has_state: whether these rows receive a state (a document's first window does not).
        finished: for each row, whether the window is complete and passes on a state.
        cut: for each row, whether truncated backpropagation detaches the state it receives.
        width: positions of the longest window, special tokens included.
    """

    rows: list[int]
    windows: list[Window]
    has_state: bool
    finished: list[bool]
    cut: list[bool]
    width: int


class Reading:
    """One call's documents, packed, and the cells in which they are read."""

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
        abreast: int,
        prefixes: Sequence[Sequence[int]] | None,
    ):
        """
        Args:
            state: where the documents stand; a fresh one for new documents.
            outputs: an output is wanted at every token, the last one included, and not only the scored targets.
            final: the documents end here (encoders).
            closing: they end here, and their last windows pass on a state though they may not be full.
            use_state: pass states on. Without them every window stands alone.
            abreast: windows of a row that run together where each stands alone and only the loss is wanted. Rows with
                other numbers of windows, and encoders, whose windows have masks, are read one after the other: cells
                have few shapes then, each of which is recorded on a GPU.
            prefixes: the tokens in front of every window of each row, of which a document is then told apart by its
                token type, where a model knows several; by default the config's.
        """
        self.config = config
        self.causal = config.architecture.causal
        self.overlap = overlap
        self.outputs = outputs
        self.final = final
        self.closing = closing
        self.use_state = use_state
        recurrence = config.recurrence
        self.prefixes = [recurrence.prefix] * len(input_ids) if prefixes is None else [tuple(one) for one in prefixes]
        self.suffix = recurrence.suffix
        self.own = prefixes is not None
        self.typed = self.own and config.architecture.types_tokens(config.base_config)
        self.rooms = [recurrence.window - len(prefix) - len(self.suffix) for prefix in self.prefixes]
        self.before = state
        self._sent: dict[int, Sequence[Tensor]] = {}
        self._front: Tensor | None = None
        self.read: list[int] = state.read.tolist()
        self.first = [read - pending for read, pending in zip(self.read, state.pending.tolist(), strict=True)]
        self._pack(input_ids, attention_mask, labels)
        self.schedules = [self._windows(row) for row in range(len(self.read))]
        alone = self.causal and not use_state and not outputs and len({*map(len, self.schedules)}) == 1
        self.cells = self._cells(abreast if alone else 1)

    # --- packing -----------------------------------------------------------------------------------------------

    def _pack(self, input_ids: Tensor, attention_mask: Tensor | None, labels: Tensor | None) -> None:
        """Put each row's pending tokens and its new real ones side by side, starting in column 0."""
        batch, width = input_ids.shape
        self.width = width
        new = torch.full((batch,), width)
        self.source: Tensor | None = None  # which input column each new token comes from; None: the same
        if attention_mask is not None and not attention_mask.all():
            mask = attention_mask.bool().cpu()
            new = mask.sum(dim=1)
            self.source = mask.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, : int(new.max())]
        self.length: list[int] = (self.before.read + new).tolist()
        self.tokens = self._join(self.before.tokens, input_ids)
        self.labels = None
        if labels is not None or self.before.labels is not None:  # labels still pending are scored in any case
            earlier = self.before.labels
            if earlier is None:
                earlier = torch.full_like(self.before.tokens, IGNORE)
            self.labels = self._join(earlier, torch.full_like(input_ids, IGNORE) if labels is None else labels)

    def _join(self, earlier: Tensor, new: Tensor) -> Tensor:
        """Pending columns in front of the new ones, row by row; with neither these nor padding, nothing is copied."""
        if self.source is not None:
            new = new.gather(1, self.source.to(new.device))
        if not earlier.shape[1]:
            return new
        both = torch.cat([earlier.to(new.device), new], dim=1)
        pending = self.before.pending[:, None]
        columns = torch.arange(both.shape[1]).expand(len(both), -1)
        moved = (columns + earlier.shape[1] - pending).clamp(max=both.shape[1] - 1)
        return both.gather(1, torch.where(columns < pending, columns, moved).to(new.device))

    # --- planning ----------------------------------------------------------------------------------------------

    def _windows(self, row: int) -> list[Window]:
        window, length, start = self.config.recurrence.window, self.length[row], self.first[row]
        if self.causal:
            length += self.outputs  # as if one more token followed: then the last one has an output too
            return list(schedule(length, window, self.overlap, start=start, score_from=max(self.read[row], 1)))
        sizes = {"prefix": len(self.prefixes[row]), "suffix": len(self.suffix)}
        return list(encoder_schedule(length, window, self.overlap, **sizes, start=start, final=self.final))

    def _cells(self, abreast: int) -> list[Cell]:
        cells, bptt_windows = [], self.config.recurrence.bptt_windows
        started = self.before.started.tolist()
        for step in range(0, max(map(len, self.schedules), default=0), abreast):
            pairs = [(row, w) for row, windows in enumerate(self.schedules) for w in windows[step : step + abreast]]
            carried = [self.use_state and (step > 0 or started[row]) for row, _ in pairs]
            for has_state in (True, False):
                group = [pair for pair, carries in zip(pairs, carried, strict=True) if carries == has_state]
                if group:
                    finished = [self._finished(row, window) for row, window in group]
                    number = [window.start // (self.rooms[row] - self.overlap) for row, window in group]
                    cut = [bptt_windows is not None and n % bptt_windows == 0 for n in number]
                    width = max(len(self.prefixes[row]) + window.end - window.start for row, window in group)
                    rows, windows = map(list, zip(*group, strict=True))
                    cells.append(Cell(rows, windows, has_state, finished, cut, width + len(self.suffix)))
        return cells

    def _finished(self, row: int, window: Window) -> bool:
        """A window passes on its state when it is full and nothing of it is still to be scored."""
        if self._closes(row, window):
            return True
        full = window.end - window.start == self.rooms[row]
        more = window.end < self.length[row]
        return full and (more or not (self.causal or self.final))

    def _closes(self, row: int, window: Window) -> bool:
        return self.closing and window.end == self.length[row]

    # --- what a cell consists of -------------------------------------------------------------------------------

    def index(self, values: Sequence[Any] | Tensor) -> Tensor:
        """Numbers from the plan, on the device, without waiting for it."""
        numbers = torch.as_tensor(values)
        if self.tokens.is_cuda:
            numbers = numbers.pin_memory()
        return numbers.to(self.tokens.device, non_blocking=True)

    def _aligned(self, cell: Cell) -> int | None:
        """The packed column at which all rows have the same window, if they do: then nothing need be gathered."""
        begins = {w.start - self.first[row] for row, w in zip(cell.rows, cell.windows, strict=True)}
        same = len(begins) == 1 and len({w.end - w.start for w in cell.windows}) == 1
        return begins.pop() if same and len(cell.rows) == len(self.read) else None

    def inputs(self, cell: Cell) -> tuple[Tensor, Tensor | None]:
        """Token ids [b, width] and, where an encoder needs one, the attention mask."""
        begin = self._aligned(cell)
        if self.causal and begin is not None:
            return self.tokens[:, begin : begin + cell.width], None
        columns, in_stretch = self._columns(cell)
        rows, _, leads, lengths = self._numbers(cell)
        ids = self.tokens[rows, columns]
        if self.causal:
            return torch.where(in_stretch, ids, ids[:, :1]), None  # any real token will do: nothing looks at it
        position = torch.arange(cell.width, device=ids.device)
        past = position - leads - lengths  # 0 at the first position behind the stretch
        filler = getattr(self.config.base_config, "pad_token_id", None) or 0
        ids = torch.where(in_stretch, ids, filler)
        longest = min(max(map(len, self.prefixes)), cell.width)
        if longest:
            front = self._fronts(filler)[rows[:, 0], :longest]
            ids[:, :longest] = torch.where(position[:longest] < leads, front, ids[:, :longest])
        for i, token in enumerate(self.suffix):
            ids = torch.where(past == i, token, ids)
        return ids, (past < len(self.suffix)).long() if self.masked(cell) else None

    def masked(self, cell: Cell) -> bool:
        """Whether windows of different lengths stand side by side, where every position sees all others."""
        pairs = zip(cell.rows, cell.windows, strict=True)
        return not self.causal and len({len(self.prefixes[row]) + w.end - w.start for row, w in pairs}) > 1

    def _numbers(self, cell: Cell) -> Sequence[Tensor]:
        """Of each window the row, the first packed column, the length of its prefix and of its stretch, each [b, 1].
        Those of all cells are sent to the device at once: what is sent takes longer to send than to use."""
        if not self._sent:
            numbers = [
                (row, window.start - self.first[row], len(self.prefixes[row]), window.end - window.start)
                for one in self.cells
                for row, window in zip(one.rows, one.windows, strict=True)
            ]
            parts = self.index(numbers).split([len(one.rows) for one in self.cells])
            self._sent = {id(one): part.split(1, dim=1) for one, part in zip(self.cells, parts, strict=True)}
        return self._sent[id(cell)]

    def _fronts(self, filler: int) -> Tensor:
        """Every row's prefix, filled up to the longest."""
        if self._front is None:
            longest = max(map(len, self.prefixes))
            self._front = self.index([(*prefix, *[filler] * longest)[:longest] for prefix in self.prefixes])
        return self._front

    def fronts(self, cell: Cell) -> tuple[Tensor | None, Tensor | None]:
        """Where rows have prefixes of their own: how long these are, [b, 1], and the token types [b, width], if the
        model knows several: 0 in a row's prefix, 1 behind it."""
        if not self.own:
            return None, None
        leads = self._numbers(cell)[2]
        return leads, (torch.arange(cell.width, device=leads.device) >= leads).long() if self.typed else None

    def scored_from(self, cell: Cell) -> int:
        """The first position that any window of a cell is scored at."""
        return min(begin for begin, _ in self._spans(cell))

    def targets(self, cell: Cell, start: int) -> Tensor:
        """For each position from `start` on the label it is scored on, or -100, [b, width - start]."""
        assert self.labels is not None
        spans, aligned = self._spans(cell), self._aligned(cell)
        if self.causal and not self.outputs and aligned is not None and set(spans) == {(start, spans[0][1])}:
            stop = spans[0][1]  # one stretch of the labels, as they are
            labels = self.labels[:, aligned + start + 1 : aligned + stop + 1]
            return labels if stop == cell.width else pad(labels, (0, cell.width - stop), value=IGNORE)
        columns, _ = self._columns(cell, ahead=int(self.causal))
        labels = self.labels[self._numbers(cell)[0], columns]
        position = torch.arange(cell.width, device=labels.device)
        begins, ends = self.index(spans).split(1, dim=1)
        scored = (position >= begins) & (position < ends)
        if self.causal and self.outputs:  # the output at the last token has no target
            last = self.index([self.length[r] - w.start for r, w in zip(cell.rows, cell.windows, strict=True)])
            scored &= position + 1 < last[:, None]
        return labels.masked_fill(~scored, IGNORE)[:, start:]

    def _spans(self, cell: Cell) -> list[tuple[int, int]]:
        """For each window the positions whose outputs it answers for."""
        found = []
        for row, window in zip(cell.rows, cell.windows, strict=True):
            shift = len(self.prefixes[row]) - window.start - int(self.causal)
            found.append((window.score_from + shift, window.score_to + shift))
        return found

    def given(self, cell: Cell, place: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Which outputs of a cell are given out, and where they go.

        Args:
            place: for each row and packed column the output column, or -1, [B, M], on the CPU.
            width: output columns.

        Returns:
            row in the cell and position of each output, and its index in the call's outputs [B * width].
        """
        pairs = zip(cell.rows, cell.windows, strict=True)
        packed = [window.start - self.first[row] - len(self.prefixes[row]) for row, window in pairs]
        spans = torch.tensor(self._spans(cell))
        position, row = torch.arange(cell.width), torch.tensor(cell.rows)[:, None]
        column = (position + torch.tensor(packed)[:, None]).clamp(0, place.shape[1] - 1)
        column = place[row, column]
        wanted = (position >= spans[:, :1]) & (position < spans[:, 1:]) & (column >= 0)
        rows, positions = wanted.nonzero(as_tuple=True)
        return rows, positions, (column + row * width)[wanted]

    def pooled(self, cell: Cell) -> dict[Span, list[int]]:
        """The positions of finished windows that are pooled, each range with its rows in the cell: neither prefix nor
        suffix, and such that the state runs as far ahead of the next window, if there is one, as it did in training,
        where the overlap may have been another (footnote 3). Rows with prefixes of their own share a range: full
        windows end at the same position."""
        found: dict[Span, list[int]] = {}
        for i, (row, window) in enumerate(zip(cell.rows, cell.windows, strict=True)):
            if cell.finished[i]:
                start, closes = len(self.prefixes[row]), self._closes(row, window)
                end = start + window.end - window.start
                stop = end if closes else start + self.config.recurrence.pooled(end - start, self.overlap)
                begin = None if self.own and not closes else start
                found.setdefault(Span(begin, stop, end if closes else end - self.overlap), []).append(i)
        return found

    def _columns(self, cell: Cell, ahead: int = 0) -> tuple[Tensor, Tensor]:
        """The packed column at each position, and whether the position belongs to the stretch at all."""
        _, starts, leads, lengths = self._numbers(cell)
        position = torch.arange(cell.width, device=self.tokens.device) - leads
        columns = (starts + position + ahead).clamp(0, self.tokens.shape[1] - 1)
        return columns, (position >= 0) & (position < lengths)

    def count_scored(self) -> Tensor:
        """The number of targets this call scores."""
        assert self.labels is not None
        ranges = [(max(begin, int(self.causal)), end) for begin, end in self.emitted()]
        spans = self.index([(a - first, b - first) for (a, b), first in zip(ranges, self.first, strict=True)])
        column = torch.arange(self.labels.shape[1], device=self.labels.device)
        answered = (column >= spans[:, :1]) & (column < spans[:, 1:])
        return (answered & (self.labels != IGNORE)).sum()

    # --- where outputs go, and what is left for the next call --------------------------------------------------

    def emitted(self) -> list[tuple[int, int]]:
        """For each row the tokens whose outputs this call gives."""
        if self.causal:
            return list(zip(self.read, self.length, strict=True))
        ranges = []
        for first, windows in zip(self.first, self.schedules, strict=True):
            reached = first + (self.overlap + 1) // 2 if first else 0
            ranges.append((windows[0].score_from, windows[-1].score_to) if windows else (reached, reached))
        return ranges

    def place(self, columns: Tensor | None) -> Tensor:
        """Where each packed column's output goes, [B, M]; -1 for nowhere.

        Args:
            columns: for each input column its output column or -1; None puts a row's outputs one behind the other,
                as a streaming encoder must, whose outputs may concern tokens of earlier calls.
        """
        batch, width = self.tokens.shape
        place = torch.full((batch, width), -1)
        for row, (begin, end) in enumerate(self.emitted()):
            inside = slice(begin - self.first[row], end - self.first[row])
            if columns is None:
                place[row, inside] = torch.arange(end - begin)
            else:
                source = torch.arange(end - begin) if self.source is None else self.source[row, : end - begin]
                place[row, inside] = columns[source]
        return place

    def state(self, carried: Tensor, kept: Tensor | None, summary: Tensor | None = None) -> State:
        """Where the documents stand after this call."""
        starts, started = [], self.before.started.tolist()
        for row, windows in enumerate(self.schedules):
            starts.append(self.first[row])
            for window in windows:
                if self._finished(row, window):
                    starts[row] = min(window.start + self.rooms[row] - self.overlap, self.length[row])
                    started[row] = self.use_state
        pending = [length - start for length, start in zip(self.length, starts, strict=True)]
        columns = torch.arange(max(pending)) + torch.tensor(starts)[:, None] - torch.tensor(self.first)[:, None]
        columns = self.index(columns.clamp(max=self.tokens.shape[1] - 1))
        return dataclasses.replace(
            self.before,
            carried=carried,
            kept=kept,
            started=torch.tensor(started),
            tokens=self.tokens.gather(1, columns),
            pending=torch.tensor(pending),
            read=torch.tensor(self.length),
            labels=self.labels.gather(1, columns) if self.labels is not None and not self.causal else None,
            summary=summary,
            ended=self.closing or (self.final and not self.causal),
        )
