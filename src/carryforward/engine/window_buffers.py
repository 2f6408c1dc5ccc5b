# SPDX-License-Identifier: Apache-2.0
"""The fixed buffers from which a captured graph reads its window batch, and to which it writes gradients.

Buffers may have room for more than a batch brings: more rows, wider windows, and in a block more first windows, others,
rows of the state that enters and states that leave. Places that are not filled are computed and ignored.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..memories.links import WindowLinks
from ..windows import IGNORE
from .window_model import WindowInputs


class Sizes(NamedTuple):
    """The rows of a window batch.

    Attributes:
        first: in a block, documents' first windows; they come first.
        others: the other windows; without links all of them.
        entering: rows of the state that enters.
        leaving: states that are passed on.
    """

    first: int
    others: int
    entering: int
    leaving: int

    @property
    def rows(self) -> int:
        return self.first + self.others

    def fit(self, room: "Sizes") -> bool:
        """Whether a batch of these sizes can use such room. First windows, other windows and entering rows must be in
        both or in neither."""
        pairs = list(zip(self, room, strict=True))
        return all(size <= space for size, space in pairs) and all(bool(a) == bool(b) for a, b in pairs[:3])

    @property
    def states(self) -> "Sizes":
        """Those of the states that leave, as if they were the batch."""
        return Sizes(0, self.leaving, 0, 0)

    def places(self, room: "Sizes") -> Iterator[tuple[slice, slice]]:
        """Where the rows of a batch of these sizes are in buffers with room: (rows of buffers, rows of the batch)."""
        if self.first:
            yield slice(0, self.first), slice(0, self.first)
        if self.others:
            yield slice(room.first, room.first + self.others), slice(self.first, self.rows)


def sizes_of(window: WindowInputs) -> Sizes:
    """The sizes of a window batch."""
    rows, links = len(window.ids), window.links
    if links is None:
        return Sizes(0, rows, rows, rows)
    entering = 0 if window.state is None else len(window.state)
    return Sizes(links.num_first, rows - links.num_first, entering, len(links.last))


def shared_room(sizes: Sizes, rows: int) -> Sizes:
    """Room for other blocks too: powers of two, and as many rows as the largest block has."""
    first, entering, leaving = (_power_of_two(n) for n in (sizes.first, sizes.entering, sizes.leaving))
    others = max(sizes.others, rows - first) if sizes.others else 0
    return Sizes(first, others, entering, leaving)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length() if n else 0


def allocate(window: WindowInputs, room: Sizes) -> WindowInputs:
    """Buffers for window batches like this one, filled with it."""
    if room == sizes_of(window):
        return window.copy()
    rows = {"ids", "mask", "prefix_lengths", "token_types", "targets"}
    counts = {**dict.fromkeys(rows, room.rows), "state": room.entering}
    tensors = {
        name: value.new_zeros(counts[name], *value.shape[1:])
        for name, value in vars(window).items() if isinstance(value, Tensor)
    }  # fmt: skip
    links = None if window.links is None else _allocate_links(window.links, room)
    buffers = window.replace(**tensors, links=links)
    write(buffers, window)
    return buffers


def write(buffers: WindowInputs, window: WindowInputs) -> None:
    """Copy a window batch into buffers."""
    sizes, room, width = sizes_of(window), sizes_of(buffers), window.ids.shape[1]
    if window.targets is not None and buffers.targets is not None:
        buffers.targets.fill_(IGNORE)
    for name in ("ids", "prefix_lengths", "token_types", "targets"):
        buffer, values = getattr(buffers, name), getattr(window, name)
        if buffer is not None:
            for there, here in sizes.places(room):
                buffer[there, : values.shape[1]].copy_(values[here])
    if buffers.mask is not None:
        for there, here in sizes.places(room):
            buffers.mask[there, width:].zero_()
            visible = buffers.mask[there, :width]
            visible.fill_(1) if window.mask is None else visible.copy_(window.mask[here])
    if buffers.links is not None and window.links is not None:
        _write_links(buffers.links, window.links, sizes, room)
    if window.state is not None and buffers.state is not None:
        buffers.state[: sizes.entering].copy_(window.state)
        buffers.state[sizes.entering :].zero_()  # an earlier batch's may not be finite, and 0 times that is NaN


def read(values: Tensor, window: WindowInputs, buffers: WindowInputs) -> Tensor:
    """A copy of those of a graph's outputs that are a window batch's: a scalar, [b, k] or [b, n, ...]."""
    if values.ndim == 0:
        return values.clone()
    width = window.ids.shape[1] - window.start
    parts = [values[there] for there, _ in sizes_of(window).places(sizes_of(buffers))]
    parts = parts if values.ndim == 2 else [part[:, :width] for part in parts]
    return parts[0].clone() if len(parts) == 1 else torch.cat(parts)


def write_gradients(buffers: Sequence[Tensor], gradients: Sequence[Tensor | None], sizes: Sizes, room: Sizes) -> None:
    """Copy the gradients of a window batch's outputs into those of a graph's, whose other rows get zeros."""
    for buffer, gradient in zip(buffers, gradients, strict=True):
        if gradient is None or gradient.shape != buffer.shape:
            buffer.zero_()
        if gradient is None:
            continue
        if gradient.ndim == 0:
            buffer.copy_(gradient)
            continue
        for there, here in sizes.places(room):
            rows = gradient[here]
            buffer[there][tuple(map(slice, rows.shape))].copy_(rows)


def _allocate_links(links: WindowLinks, room: Sizes) -> WindowLinks:
    if links.has_fixed_sizes:
        return links.copy()
    lengths = {
        **dict.fromkeys(("previous", "first", "detach", "detach_first"), room.others),
        **dict.fromkeys(("last", "last_first", "last_detach_first"), room.leaving),
        "following": room.rows + room.entering, "prefix_lengths": room.rows,
    }  # fmt: skip
    tensors = {name: x.new_zeros(lengths[name], *x.shape[1:]) for name, x in links.tensors().items()}
    return links.replace(num_first=room.first, num_alone=room.first, **tensors)


def _write_links(buffers: WindowLinks, links: WindowLinks, sizes: Sizes, room: Sizes) -> None:
    """Copy indices; windows after the first ones are further back in the buffers."""
    if links.has_fixed_sizes:  # their buffers are never larger
        for buffer, numbers in ((buffers, links), (buffers.slots, links.slots)):
            for name, values in numbers.tensors().items() if numbers is not None else ():
                getattr(buffer, name).copy_(values)
        return
    moved = room.first - sizes.first
    assert buffers.following is not None
    assert links.following is not None
    buffers.following.fill_(-1)  # of windows that no other one follows
    for there, here in (*sizes.places(room), (slice(room.rows, None), slice(sizes.rows, None))):
        part = links.following[here]
        buffers.following[there][: len(part)].copy_(part)
    for name, indices in links.tensors().items():
        buffer = getattr(buffers, name)
        if name in ("previous", "last") and moved:
            indices = torch.where(indices >= sizes.first, indices + moved, indices)
        if name == "prefix_lengths":
            for there, here in sizes.places(room):
                buffer[there].copy_(indices[here])
        elif name != "following":
            buffer[: len(indices)].copy_(indices)
            buffer[len(indices) :].zero_()  # unused places may name any window
