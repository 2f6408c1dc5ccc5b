# SPDX-License-Identifier: Apache-2.0
"""Which windows may keep their activations: as many as asked for, or as there is memory for."""

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

Kind = tuple[Any, ...]  # how many rows and positions a window has, then whatever else decides what it takes
SHARE = {"cuda": 0.5, "cpu": 0.25}  # of the memory that is free; others want some too
SPARE = 4  # places beside those of the windows that are kept, where their number was said
TO_COME = 12  # bytes for each trained parameter: its gradient and Adam's two averages may not be there yet


class ActivationBudget:
    """A model's. It remembers what windows of each kind took.

    Attributes:
        keep: how many windows; "auto" for as many as fit.
        full: memory has run out; nothing more is kept in this call.
    """

    def __init__(self) -> None:
        self.keep: int | Literal["auto"] = 0
        self._sizes: dict[Kind, int] = {}
        self._ready: Counter[Kind] = Counter()  # places that are free
        self._positions, self._largest = 0, 0  # of the windows that there are places for
        self.release()

    def windows(self, kinds: Sequence[Kind], parameters: Sequence[nn.Parameter], device: torch.device) -> list[bool]:
        """Which windows keep their graph: of these kinds, the first that fit."""
        self.full = False
        if self.keep != "auto":
            return [i < self.keep for i in range(len(kinds))]
        to_come = TO_COME * sum(parameter.numel() for parameter in parameters)
        # what is taken counts as available: between two windows nothing lives there
        self._share = SHARE.get(device.type, 0.0) * (available(device) - to_come)
        left = self._share - self._taken
        ready, kept = self._ready.copy(), []
        for kind in kinds:
            ready[kind] -= 1
            size = 0 if ready[kind] >= 0 else self._most(kind)
            kept.append(size <= max(left, 0))
            left -= size if kept[-1] else 0
        return kept

    def _most(self, kind: Kind) -> float:
        """What a window takes: as measured, or at most what one of more rows and positions did, since batches of ragged
        documents have windows of ever new sizes. One that nothing is known of is run twice, and measured then."""
        if kind in self._sizes:
            return self._sizes[kind]
        larger = (
            size
            for known, size in self._sizes.items()
            if known[2:] == kind[2:] and all(a >= b for a, b in zip(known[:2], kind[:2], strict=True))
        )
        return min(larger, default=math.inf)

    def has_room(self, kind: Kind) -> bool:
        """Whether there may be one more place for a window of this kind; one in all there may be anyway, since a window
        must be run somewhere."""
        if self.keep != "auto":  # first and last windows are kinds of their own; those of ragged batches are too many
            largest = max(self._largest, math.prod(kind[:2]))
            return self._positions + math.prod(kind[:2]) <= (self.keep + SPARE) * largest
        size, left = self._most(kind), self._share - self._taken
        return size <= left or (size < math.inf and not self._positions)

    def take(self, kind: Kind, size: int) -> None:
        """A place for a window of this kind is there for good, and serves no other."""
        self._ready[kind] += 1
        self._taken += size
        self._positions += math.prod(kind[:2])
        self._largest = max(self._largest, math.prod(kind[:2]))
        self._sizes[kind] = max(self._sizes.get(kind, 0), size)

    def give_back(self, kind: Kind, size: int) -> None:
        """Such a place, which was free, is there no longer."""
        self._ready[kind] -= 1
        self._taken -= size
        self._positions -= math.prod(kind[:2])

    def free_places(self, kinds: Iterable[Kind]) -> None:
        """Which of the places that were taken can be used now: windows may be kept beyond the call that ran them."""
        self._ready = Counter(kinds)

    def release(self) -> None:
        """Nothing of what was taken is there any longer."""
        self._ready = Counter()
        self._taken, self._share = 0, math.inf
        self._positions, self._largest = 0, 0
        self.full = False

    @contextlib.contextmanager
    def measuring(self, kind: Kind, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Note what a window's graph holds on to, when windows of its kind are run with one for the first time. Not
        around one that is replayed, which holds on to nothing."""
        if self.keep != "auto" or kind in self._sizes:
            yield
            return
        known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        found: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        if found:
            self._sizes[kind] = sum(found.values())


def available(device: torch.device) -> int:
    """Bytes that could still be used; 0 where that cannot be known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    lines = dict(line.split(":") for line in _text("/proc/meminfo").splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else 0
    limit, used = _text("/sys/fs/cgroup/memory.max").strip(), _text("/sys/fs/cgroup/memory.current").strip()
    return min(free, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else free


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
