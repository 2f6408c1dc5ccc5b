# SPDX-License-Identifier: Apache-2.0
"""The slots of a block as tensors: what is the same in all layers. `kv_slots` works them out on the host.

Shapes: P windows of T positions, the first F of which receive nothing; n readers: the P - F other windows, then the W
states that leave; S slots that a window sees, A more in an archive.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .kv_moves import LearnedMove, RotaryMove
from .kv_slots import EMPTY, Lookups, SelectionStep, SlotSizes, SlotTable

Send = Callable[[Any], Tensor]  # to the device, without waiting for it


@dataclass(frozen=True)
class SlotLinks:
    """Where every reader finds what it sees of its past.

    Attributes:
        sizes, width, num_windows: slots, positions of a window, and windows that receive something (P - F).
        nowhere: the position of what is in a state; see `kv_moves`.
        sinks, far, newest: the sources of slots, [n, 1, w]; `EMPTY` where nothing stands. A far slot stands there as
            often as positions are averaged in it.
        sink_targets, far_targets, newest_targets: the positions at which they are seen; for states: nowhere.
        archive: the sources of what leaves with states and no window sees, [W, 1, A].
        origins: the position at which each source was made, [sources].
        visible: which slots readers use, [n, S].
        window_visible: those of windows, [P - F, S]; None: they use all.
        state_visible: those of the states that leave, with their archive, [W, S + A].
        reader_cuts, source_cuts: as in `SlotTable`; None without truncated BPTT.
        shift: where positions are learned, how many positions later the tokens of each window stand, [P].
        steps, lookups: on the host, what is selected; see `SlotTable`.
        choices: what was selected in each layer. The second pass of training selects the same.
        sent: arrays of `steps` and `lookups` that are on the device, by their identity.
    """

    sizes: SlotSizes
    width: int
    num_windows: int
    nowhere: int
    sinks: Tensor
    far: Tensor
    newest: Tensor
    sink_targets: Tensor
    far_targets: Tensor
    newest_targets: Tensor
    archive: Tensor
    origins: Tensor
    visible: Tensor
    window_visible: Tensor | None
    state_visible: Tensor
    reader_cuts: Tensor | None
    source_cuts: Tensor | None
    shift: Tensor | None
    steps: Sequence[SelectionStep] = ()
    lookups: Lookups | None = None
    choices: dict[int, Tensor] = field(default_factory=dict)
    sent: dict[int, Tensor] = field(default_factory=dict)

    def places(self, far: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """The sources and targets of sinks, far and newest slots, given the sources of the far ones."""
        return (self.sinks, self.sink_targets), (far, self.far_targets), (self.newest, self.newest_targets)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def copy(self) -> "SlotLinks":
        """The same with tensors of its own."""
        copies: dict[str, Any] = {name: tensor.clone() for name, tensor in self.tensors().items()}
        return dataclasses.replace(self, **copies)

    def layout(self) -> tuple[Any, ...]:
        """What must be equal for the same code to run with other tensors of the same sizes."""
        return self.sizes, self.width, self.num_windows, self.nowhere, *self.tensors()

    def send(self, values: np.ndarray) -> Tensor:
        """Numbers of `steps` or `lookups` on the device: sent once for all layers."""
        if id(values) not in self.sent:
            on_host = torch.from_numpy(np.ascontiguousarray(values))
            self.sent[id(values)] = on_host.to(self.origins.device, non_blocking=True)
        return self.sent[id(values)]

    def detached(self, sources: Tensor, readers: slice) -> Tensor | None:
        """Which sources [n, ..., w] some readers see detached (truncated BPTT)."""
        if self.reader_cuts is None or self.source_cuts is None:
            return None
        return self.reader_cuts[readers, None, None] > self.source_cuts[sources.clamp(min=0)]


def slot_links(table: SlotTable, width: int, num_first: int, rotary: bool, send: Send) -> SlotLinks:
    """The tensors of a table.

    Args:
        num_first: windows that receive nothing.
        rotary: the model's positions are rotary, not learned.
    """
    sizes, nowhere = table.sizes, RotaryMove.nowhere if rotary else LearnedMove.nowhere
    num_windows = len(table.count) - len(table.archive)
    windows = slice(num_windows)
    shift = np.zeros(num_first + num_windows, np.int64)
    targets = table.place + table.start[:, None]
    if rotary:
        targets -= table.count[:, None]  # in front of position 0, or of what stands behind the prefix
    else:
        shift[num_first:] = table.count[windows]  # windows stand behind what they receive
    targets[num_windows:] = nowhere
    origins = np.where(table.origin == EMPTY, nowhere, table.origin)
    origins[: len(shift) * width] += np.repeat(shift, width)
    parts = np.split(targets, [sizes.sinks, sizes.sinks + sizes.far], axis=1)
    parts[1] = np.repeat(parts[1], sizes.merged, axis=1)
    names = ("sinks", "far", "newest")
    numbers = {name: getattr(table, name)[:, None] for name in names}
    targets_of = ("sink_targets", "far_targets", "newest_targets")
    numbers |= {name: part[:, None] for name, part in zip(targets_of, parts, strict=True)}
    numbers |= {"archive": table.archive[:, None], "origins": origins}
    flags = {"visible": table.visible}
    flags["state_visible"] = np.concatenate([table.visible[num_windows:], table.archive != EMPTY], axis=1)
    if not table.visible[windows].all():
        flags["window_visible"] = table.visible[windows]
    if table.cuts.any():
        numbers |= {"reader_cuts": table.reader_cuts, "source_cuts": table.cuts}
    if not rotary:
        numbers["shift"] = shift
    tensors = _send_together(numbers | flags, send)
    for name in flags:
        tensors[name] = tensors[name].bool()
    absent: dict[str, Any] = dict.fromkeys(("window_visible", "reader_cuts", "source_cuts", "shift"))
    return SlotLinks(
        sizes, width, num_windows, nowhere, steps=table.steps, lookups=table.lookups, **{**absent, **tensors}
    )


def _send_together(arrays: dict[str, np.ndarray], send: Send) -> dict[str, Tensor]:
    """Arrays of integers on the device, by one transfer: latency costs more than size."""
    flat = send(np.concatenate([array.ravel() for array in arrays.values()]).astype(np.int64))
    parts = flat.split([array.size for array in arrays.values()])
    return {name: part.view(array.shape) for (name, array), part in zip(arrays.items(), parts, strict=True)}
