# SPDX-License-Identifier: Apache-2.0
"""How the windows of a block follow each other.

A block is a batch of windows in which a window may stand beside the one before it. If windows depend on each other only
through keys and values of the same layer, all of them pass a layer together, and each takes what it receives from its
neighbour in the same call. The index tensors here say which window that is.

An encoder's windows may see both neighbours. A document's first window, which receives nothing, then still sees the one
on its right, and the reading of a group's last window that is not given out has the same left neighbour as the second.

Shapes: P windows: the first A see no other, the first F are documents' first windows; R rows of a state that enters;
W windows that pass one on. Without right neighbours A = F.
"""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .slot_links import SlotLinks


@dataclass(frozen=True)
class DocumentWindows:
    """The windows of one document in a block, for memories that reach further than one window back.

    Attributes:
        windows: their numbers in the block, in order.
        tokens: for each, how many tokens of the document come before it, counted from where its memory begins.
        finished: how many of them pass on a state, from the first on.
        after: how many tokens come before the window that follows the last finished one.
        state: the row of the entering state that the first one receives; None if it is the document's first window.
        start: the position of a window's first document token, after its prefix.
        detach: for each window, whether truncated BPTT detaches what it receives.
    """

    windows: tuple[int, ...]
    tokens: tuple[int, ...]
    finished: int
    after: int
    state: int | None
    start: int
    detach: tuple[bool, ...]


@dataclass(frozen=True)
class BlockLayout:
    """Which windows a block has, for memories that reach further than one window back.

    Attributes:
        documents: the windows of each document.
        num_windows: P; the first `num_first` of them receive nothing.
        width: positions of a window.
        state_rows: rows of the entering state.
    """

    documents: tuple[DocumentWindows, ...]
    num_windows: int
    num_first: int
    width: int
    state_rows: int


@dataclass(frozen=True)
class WindowLinks:
    """The links of a block.

    A *source* is a window of the block, counted from 0, or row r of the entering state, written as -1 - r.

    Attributes:
        num_first: the first so many windows, F, are documents' first windows: they receive nothing.
        num_alone: the first so many of these, A, see no other window. The numbers of windows below begin after them.
        next_start: in every window that another one follows, the position at which that one starts.
        start: the first document position of every window; None: after its own prefix.
        previous: for each window, the source of its recent positions, [P - A]; any for documents' first windows.
        following: the inverse of `previous`: for each window, then for each row of the state, the number of the window
            whose source it is, or -1, [P + R]. None if windows have right neighbours: a source may then serve two.
        first: likewise, the source of its document's first positions, [P - A]: one of the first windows, or the state.
        last: the windows whose states leave the block, [W].
        last_first: for each of these, the source of its document's first positions, [W].
        detach: truncated BPTT: for each window, whether recent positions are detached, [P - A].
        detach_first: likewise for its document's first positions: some window on the way to it detaches them.
        last_detach_first: likewise for the states that leave, [W].
        prefix_lengths: where windows have prefixes of their own, their lengths, [P, 1].
        next: for each window, its right neighbour, [P - A]; any if it has none. None if windows see none.
        num_right: how many positions each window sees of its right neighbour, [P].
        slots: where each window finds what it sees of its past, if a memory needs more than the window before.
    """

    num_first: int
    num_alone: int
    next_start: int
    start: int | None
    previous: Tensor
    first: Tensor
    last: Tensor
    last_first: Tensor
    following: Tensor | None = None
    detach: Tensor | None = None
    detach_first: Tensor | None = None
    last_detach_first: Tensor | None = None
    prefix_lengths: Tensor | None = None
    next: Tensor | None = None
    num_right: Tensor | None = None
    slots: "SlotLinks | None" = None

    @property
    def has_fixed_sizes(self) -> bool:
        """Whether its numbers are those of a block of exactly these sizes."""
        return self.slots is not None or self.next is not None

    @property
    def starts(self) -> int | Tensor:
        """The first document position of the windows: one for all, or each one's, [P, 1]."""
        if self.start is not None:
            return self.start
        assert self.prefix_lengths is not None, "the start is left to each window's prefix"
        return self.prefix_lengths

    def tensors(self) -> dict[str, Tensor]:
        """The index tensors by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def copy(self) -> "WindowLinks":
        """The same with tensors of its own."""
        copies: dict[str, Any] = {name: tensor.clone() for name, tensor in self.tensors().items()}
        return self.replace(slots=None if self.slots is None else self.slots.copy(), **copies)

    def replace(self, **values: Any) -> "WindowLinks":
        """The same with other values in some fields."""
        return dataclasses.replace(self, **values)

    def layout(self) -> tuple[Any, ...]:
        """What must be equal for the same code to run with other index tensors of the same sizes."""
        fixed = self.num_alone if self.next is not None else None
        slots = None if self.slots is None else self.slots.layout()
        return self.next_start, self.start, fixed, *self.tensors(), slots


def gather_sources(windows: Tensor, state: Tensor | None, sources: Tensor) -> Tensor:
    """Of windows [n, ...] and rows of a state [R, ...], those that sources name; see `WindowLinks`."""
    everything, index = _joined(windows, state, sources)
    return everything.index_select(0, index)


def gather_previous(windows: Tensor, state: Tensor | None, links: WindowLinks) -> Tensor:
    """As `gather_sources` with `links.previous`. Without right neighbours no window has two that follow it, so the
    gradient is a gather too, which is faster than adding at an index."""
    if links.following is None:
        return gather_sources(windows, state, links.previous)
    everything, index = _joined(windows, state, links.previous)
    return _GatherUnique.apply(everything, index, links.following.to(windows.device))


def _joined(windows: Tensor, state: Tensor | None, sources: Tensor) -> tuple[Tensor, Tensor]:
    """Windows and rows of a state in one tensor, and the indices of sources in it."""
    everything = windows if state is None else torch.cat([windows, state.to(windows)])
    sources = sources.to(windows.device)
    return everything, torch.where(sources >= 0, sources, len(windows) - 1 - sources)


class _GatherUnique(torch.autograd.Function):
    """Rows of x [n, ...] at an index without repetitions."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        if not len(gradient):
            return gradient.new_zeros(len(inverse), *gradient.shape[1:]), None, None
        used = (inverse >= 0).reshape(-1, *[1] * (gradient.ndim - 1))
        return torch.where(used, gradient.index_select(0, inverse.clamp(min=0)), 0), None, None


def detached_where(x: Tensor, detach: Tensor | None) -> Tensor:
    """x [n, ...], detached in the rows that `detach` [n] names."""
    if detach is None:
        return x
    return torch.where(detach.to(x.device).reshape(-1, *[1] * (x.ndim - 1)), x.detach(), x)
