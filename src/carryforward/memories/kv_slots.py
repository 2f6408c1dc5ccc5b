# SPDX-License-Identifier: Apache-2.0
"""Which position of a document stands in which slot, where keys and values reach further back than one window.

What a window sees of its past stands in *slots*: sinks, then far positions, then the most recent ones. While a document
is short, all of it fits; slots that are not used yet are invisible. Later, a position that leaves the recent ones is
dropped, or becomes one of the far ones.

Where a slot's keys and values are found is a *source*, a number: position j of window i of a block is i * T + j; behind
these come the slots of the state's rows. All of it is arithmetic on the host, once for all layers.

Shapes: P windows of T positions; n *readers*: the windows that receive something, in order, then the states that leave
the block; S, F and N slots for sinks, far and recent positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .links import BlockLayout, DocumentWindows

EMPTY = -1  # the source of a slot in which nothing stands


@dataclass(frozen=True)
class SlotSizes:
    """How many slots there are.

    Attributes:
        sinks, far: slots for a document's first positions, and for far ones.
        recent: most recent positions.
        group: so many neighbouring positions leave the recent ones together.
        averaged: a far slot holds the average of a group.
        archive: positions kept in a state that no window sees, until they are selected to be far ones.
    """

    sinks: int
    far: int
    recent: int
    group: int = 1
    averaged: bool = False
    archive: int = 0

    @property
    def merged(self) -> int:
        """Positions averaged in a far slot."""
        return self.group if self.averaged else 1

    @property
    def newest(self) -> int:
        """Slots for recent positions, and for those of a group that is not complete yet."""
        return self.recent + self.group - 1

    @property
    def total(self) -> int:
        """Slots that a window sees."""
        return self.sinks + self.far + self.newest

    @property
    def stored(self) -> int:
        """Slots of a state."""
        return self.total + self.archive

    def used(self, tokens: int) -> tuple[int, int, int]:
        """How many of the slots for sinks, far and recent positions a window uses that has so many tokens before it."""
        leaving = max(tokens - self.recent - self.sinks, 0)
        newest = min(tokens, self.recent + leaving % self.group)
        sinks = min(self.sinks, tokens - newest)
        return sinks, min(self.far, self.left(tokens) // self.merged), newest

    def left(self, tokens: int) -> int:
        """How many positions have left the recent ones, in whole groups, when so many tokens were read."""
        return max(tokens - self.recent - self.sinks, 0) // self.group * self.group

    def occupied(self, tokens: int) -> np.ndarray:
        """Which slots are used, [S + F + N]. Sinks are filled from the left, the others from the right."""
        sinks, far, newest = self.used(tokens)
        slot = np.arange(self.total)
        of_far, of_newest = slot - self.sinks, slot - self.sinks - self.far
        return np.where(
            slot < self.sinks, slot < sinks,
            np.where(of_newest < 0, of_far >= self.far - far, of_newest >= self.newest - newest),
        )  # fmt: skip

    def occupied_by(self, tokens: Sequence[int]) -> np.ndarray:
        """Which slots are used by readers that have so many tokens before them, [n, S + F + N]."""
        used = [self.occupied(count) for count in tokens]
        return np.array(used, dtype=np.bool_).reshape(len(tokens), self.total)


@dataclass(frozen=True)
class SlotTable:
    """What readers see, and what leaves.

    Attributes:
        sizes: how many slots there are.
        visible: which slots a reader uses, [n, S + F + N].
        place: where a slot stands among those that are used, counted from 0, [n, S + F + N].
        sinks, far, newest: the sources of slots, [n, S], [n, F * merged], [n, N]; `EMPTY` where nothing stands.
        count: how many slots a reader uses, [n].
        start: the first document position of a reader's window, [n].
        origin: the position in its window at which a source stands, [sources]; -1 for what stands nowhere: keys and
            values in states.
        cuts, reader_cuts: truncated BPTT: how many windows up to a source, and up to a reader, detach what they
            receive. A reader sees a source detached if it has more.
        steps: for a selection that decides window by window: what it decides.
        archive: the sources of the archives of the states that leave, [W, archive].
        lookups: for a selection that looks groups up in an archive.
    """

    sizes: SlotSizes
    visible: np.ndarray
    place: np.ndarray
    sinks: np.ndarray
    far: np.ndarray
    newest: np.ndarray
    count: np.ndarray
    start: np.ndarray
    origin: np.ndarray
    cuts: np.ndarray
    reader_cuts: np.ndarray
    steps: "list[SelectionStep]"
    archive: np.ndarray
    lookups: "Lookups | None"


@dataclass(frozen=True)
class SelectionStep:
    """Windows after which far positions are selected, each with a reader that sees what is selected. A window comes
    after all those of its document whose selections it sees.

    Attributes:
        windows: their numbers in the block, [m].
        readers: their own numbers as readers; `EMPTY` for documents' first windows, which see nothing, [m].
        next_readers: who sees what is selected, [m].
        last: the last position of the window that comes before the next one's start, [m].
        candidates: the sources of positions that become far, or are dropped, [m, most]; padded on the left.
        columns: where the candidates stand in what the window sees: slots, then its own positions, [m, most].
    """

    windows: np.ndarray
    readers: np.ndarray
    next_readers: np.ndarray
    last: np.ndarray
    candidates: np.ndarray
    columns: np.ndarray


@dataclass(frozen=True)
class Lookups:
    """After which windows groups of positions are looked up, and among which.

    Attributes:
        groups: the sources of all groups of positions, [G, group].
        windows: the windows after which something is looked up, [m].
        first, last: their document positions that come before the next window's start, [m].
        next_readers: who sees what is found, [m].
        begin, end: the groups in its archive, [m].
    """

    groups: np.ndarray
    windows: np.ndarray
    first: np.ndarray
    last: np.ndarray
    next_readers: np.ndarray
    begin: np.ndarray
    end: np.ndarray


def slot_table(block: BlockLayout, sizes: SlotSizes, selects: bool) -> SlotTable:
    """The slots of a block.

    Args:
        selects: far positions are selected by their contents.
    """
    return _Builder(block, sizes, selects).build()


class _Builder:
    def __init__(self, block: BlockLayout, sizes: SlotSizes, selects: bool):
        self.block, self.sizes, self.width = block, sizes, block.width
        self.selects = selects
        self.num_windows = windows = block.num_windows
        self.num_readers = windows - block.num_first
        leaving = sorted(document.windows[document.finished - 1] for document in block.documents if document.finished)
        self.leaving = {window: self.num_readers + i for i, window in enumerate(leaving)}
        n = self.num_readers + len(leaving)
        self.tokens = np.zeros(n, np.int64)  # before each reader
        self.start = np.zeros(n, np.int64)
        self.sinks = np.full((n, sizes.sinks), EMPTY)
        self.far = np.full((n, sizes.far, sizes.merged), EMPTY)
        self.newest = np.full((n, sizes.newest), EMPTY)
        self.reader_cuts = np.zeros(n, np.int64)
        self.archive = np.full((len(leaving), sizes.archive), EMPTY)
        self.groups: list[np.ndarray] = []
        self.lookups: list[tuple[int, int, int, int, int, int]] = []
        sources = windows * block.width + block.state_rows * sizes.stored
        self.cuts = np.zeros(sources, np.int64)
        self.origin = np.full(sources, EMPTY)
        self.origin[: windows * block.width] = np.tile(np.arange(block.width), windows)
        self.steps: dict[int, list[tuple[int, int, int, int, np.ndarray, np.ndarray]]] = {}

    def build(self) -> SlotTable:
        for document in self.block.documents:
            self._add(document)
        visible = self.sizes.occupied_by(self.tokens.tolist())
        return SlotTable(
            sizes=self.sizes, visible=visible, place=np.maximum(visible.cumsum(axis=1) - 1, 0),
            sinks=self.sinks, far=self.far.reshape(len(self.far), -1), newest=self.newest,
            count=visible.sum(axis=1), start=self.start,
            origin=self.origin, cuts=self.cuts, reader_cuts=self.reader_cuts,
            steps=[_step(self.steps[i]) for i in sorted(self.steps)],
            archive=self.archive, lookups=self._lookups(),
        )  # fmt: skip

    def _lookups(self) -> Lookups | None:
        if not self.lookups:
            return None
        return Lookups(np.concatenate(self.groups), *map(np.array, zip(*self.lookups, strict=True)))

    def _add(self, document: DocumentWindows) -> None:
        """Enter what the windows of a document see, and its state if it leaves."""
        cuts = np.cumsum(document.detach)
        for i, window in enumerate(document.windows):
            self.cuts[window * self.width : (window + 1) * self.width] = cuts[i]
            if window >= self.block.num_first:
                self._enter(document, window - self.block.num_first, document.tokens[i], cuts[i])
        if document.finished:
            last = document.windows[document.finished - 1]
            self._enter(document, self.leaving[last], document.after, cuts[document.finished - 1])
        if self.sizes.archive:
            self._add_lookups(document)
        elif self.selects:
            for i in range(document.finished):
                self._add_step(document, i)

    def _enter(self, document: DocumentWindows, reader: int, tokens: int, cuts: int) -> None:
        """Enter what a reader sees that has so many tokens before it."""
        sizes = self.sizes
        sinks, far, newest = sizes.used(tokens)
        self.tokens[reader], self.start[reader], self.reader_cuts[reader] = tokens, document.start, cuts
        self.sinks[reader, :sinks] = self._find(document, np.arange(sinks))
        self.newest[reader, sizes.newest - newest :] = self._find(document, np.arange(tokens - newest, tokens))
        end = tokens - newest  # far positions, as far as it is known which: those just before the recent ones
        groups = np.arange(end - far * sizes.merged, end).reshape(far, sizes.merged)
        self.far[reader, sizes.far - far :] = self._find(document, groups, selected=True)
        if reader >= self.num_readers and sizes.archive:
            archived = min(sizes.archive, sizes.left(tokens))
            places = slice(sizes.archive - archived, None)
            self.archive[reader - self.num_readers, places] = self._find(document, np.arange(end - archived, end))

    def _find(self, document: DocumentWindows, tokens: np.ndarray, selected: bool = False) -> np.ndarray:
        """The sources of a document's tokens; those that are not in the block are in the state's slots.

        Args:
            selected: far slots of the state rather than its archive.
        """
        begins = np.array(document.tokens)
        window = np.maximum(np.searchsorted(begins, tokens, side="right") - 1, 0)
        inside = np.array(document.windows)[window] * self.width + document.start + tokens - begins[window]
        if document.state is None:
            return inside
        in_state = self._find_in_state(document.state, begins[0], tokens, selected or not self.sizes.archive)
        return np.where(tokens >= begins[0], inside, in_state)

    def _find_in_state(self, row: int, before: int, tokens: np.ndarray, selected: bool) -> np.ndarray:
        """The sources of tokens in a state that was made when there were so many tokens before it."""
        sizes = self.sizes
        sinks, _, newest = sizes.used(before)
        back = before - newest - tokens  # 1 for the position just before the recent ones
        recent = sizes.total - (before - tokens)
        far = sizes.sinks + sizes.far - 1 - (back - 1) // sizes.merged if selected else sizes.stored - back
        slot = np.where(back <= 0, recent, np.where(tokens < sinks, tokens, far))
        return self.num_windows * self.width + row * sizes.stored + slot

    def _add_step(self, document: DocumentWindows, i: int) -> None:
        """Enter which positions leave the recent ones with the i-th window of a document."""
        window, sizes, first = document.windows[i], self.sizes, self.block.num_first
        following = document.windows[i + 1 : i + 2]
        after = document.tokens[i + 1] if following else document.after
        begin, end = (max(tokens - sizes.recent, sizes.sinks) for tokens in (document.tokens[i], after))
        tokens = np.arange(begin, end)
        columns = tokens - document.tokens[i] + sizes.total  # the most recent slot is the last one
        columns[tokens >= document.tokens[i]] += document.start
        reader = window - first if window >= first else EMPTY
        last = document.start + after - document.tokens[i] - 1
        for next_reader in self._next_readers(document, i):
            step = window, reader, next_reader, last, self._find(document, tokens), columns
            self.steps.setdefault(i, []).append(step)

    def _add_lookups(self, document: DocumentWindows) -> None:
        """Enter what is looked up after each finished window of a document."""
        sizes, count = self.sizes, sum(map(len, self.groups))
        after = [*document.tokens[1:], document.after][: document.finished]
        if document.finished:
            after[-1] = document.after
        ends = [sizes.left(tokens) // sizes.group for tokens in after]
        begins = [max(end - sizes.archive // sizes.group, 0) for end in ends]
        if not any(ends):
            return
        groups = np.arange(begins[0], ends[-1])
        tokens = sizes.sinks + groups[:, None] * sizes.group + np.arange(sizes.group)
        self.groups.append(self._find(document, tokens))
        for i, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            last = document.start + after[i] - document.tokens[i] - 1
            places = begin - begins[0] + count, end - begins[0] + count
            for next_reader in self._next_readers(document, i):
                self.lookups.append((document.windows[i], document.start, last, next_reader, *places))

    def _next_readers(self, document: DocumentWindows, i: int) -> list[int]:
        """Who sees what is selected after the i-th window of a document: the next one, and the state that leaves."""
        window, following = document.windows[i], document.windows[i + 1 : i + 2]
        leaving = [self.leaving[window]] if window in self.leaving else []
        return [follower - self.block.num_first for follower in following] + leaving


def _step(windows: Sequence[tuple[int, int, int, int, np.ndarray, np.ndarray]]) -> SelectionStep:
    *numbers, candidates, columns = zip(*windows, strict=True)
    most = max(map(len, candidates))
    padded = [[np.concatenate([np.full(most - len(x), EMPTY), x]) for x in of_all] for of_all in (candidates, columns)]
    return SelectionStep(*map(np.array, numbers), *(np.array(x, np.int64).reshape(len(windows), most) for x in padded))
