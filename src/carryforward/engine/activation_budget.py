# SPDX-License-Identifier: Apache-2.0
"""How many windows keep their activations for the backward pass, and how many are recomputed.

With `keep_windows=n` the newest n windows of a sample keep them. With "auto" as many do as fit into a share of the free
memory; the size of a window is measured when one of its shape first runs with a graph. Captured CUDA graphs hold their
activations between windows: the budget counts these buffers, which later windows of the same shape can use.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..utils.checkpoints import tensor_parts

ShapeKey = tuple[Any, ...]  # rows and positions of a window, then all else that decides its activation memory

MEMORY_SHARE = {"cuda": 0.5, "cpu": 0.25}  # of the free memory
SPARE_BUFFERS = 4  # captured buffers beyond the number of kept windows
RESERVED_BYTES = 12  # bytes per trained parameter: its gradient and Adam's two averages may not exist yet


class ActivationBudget:
    """A model's budget. It remembers the activation memory of windows by their shape.

    Attributes:
        keep: how many windows keep their activations; "auto" for as many as fit.
        exhausted: memory has run out; nothing more is kept in this call.
    """

    def __init__(self) -> None:
        self.keep: int | Literal["auto"] = 0
        self._sizes: dict[ShapeKey, int] = {}
        self._free_buffers: Counter[ShapeKey] = Counter()
        self._buffer_positions, self._largest_buffer = 0, 0
        self.reset_buffers()

    def keepable(
        self, shapes: Sequence[ShapeKey], parameters: Sequence[nn.Parameter], device: torch.device
    ) -> list[bool]:
        """Which windows keep their graph: of windows with these shapes, the first that fit."""
        self.exhausted = False
        if self.keep != "auto":
            return [i < self.keep for i in range(len(shapes))]
        # Captured buffers count as available: between two windows they hold nothing that is needed.
        self._share = usable_memory(parameters, device)
        left = self._share - self._buffer_bytes
        free, keep = self._free_buffers.copy(), []
        for shape in shapes:
            free[shape] -= 1
            size = 0 if free[shape] >= 0 else self._size_bound(shape)
            keep.append(size <= max(left, 0))
            left -= size if keep[-1] else 0
        return keep

    def _size_bound(self, shape: ShapeKey) -> float:
        """The activation memory of a window: as measured, or that of one with more rows and positions, since batches of
        ragged documents have windows of ever new sizes. Infinite if nothing is known: such a window is recomputed, and
        measured then."""
        if shape in self._sizes:
            return self._sizes[shape]
        larger = (
            size
            for known, size in self._sizes.items()
            if known[2:] == shape[2:] and all(a >= b for a, b in zip(known[:2], shape[:2], strict=True))
        )
        return min(larger, default=math.inf)

    # --- buffers: activation memory that captured graphs hold ------------------------------------------------------

    def has_room(self, shape: ShapeKey) -> bool:
        """Whether one more buffer for windows of this shape may be captured. The first one always may: a window must
        run somewhere."""
        if self.keep != "auto":  # first and last windows have shapes of their own; ragged batches have too many
            largest = max(self._largest_buffer, math.prod(shape[:2]))
            return self._buffer_positions + math.prod(shape[:2]) <= (self.keep + SPARE_BUFFERS) * largest
        size, left = self._size_bound(shape), self._share - self._buffer_bytes
        return size <= left or (size < math.inf and not self._buffer_positions)

    def add_buffer(self, shape: ShapeKey, size: int) -> None:
        """A buffer was captured, for windows of this shape only."""
        self._free_buffers[shape] += 1
        self._buffer_bytes += size
        self._buffer_positions += math.prod(shape[:2])
        self._largest_buffer = max(self._largest_buffer, math.prod(shape[:2]))
        self._sizes[shape] = max(self._sizes.get(shape, 0), size)

    def remove_buffer(self, shape: ShapeKey, size: int) -> None:
        """A free buffer was given up."""
        self._free_buffers[shape] -= 1
        self._buffer_bytes -= size
        self._buffer_positions -= math.prod(shape[:2])

    def set_free_buffers(self, shapes: Iterable[ShapeKey]) -> None:
        """Set which buffers are free now: windows may keep theirs beyond the call that ran them."""
        self._free_buffers = Counter(shapes)

    def reset_buffers(self) -> None:
        """All buffers are gone."""
        self._free_buffers = Counter()
        self._buffer_bytes, self._share = 0, math.inf
        self._buffer_positions, self._largest_buffer = 0, 0
        self.exhausted = False

    @contextlib.contextmanager
    def measuring(self, shape: ShapeKey, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Note how much memory a window's graph saves, when one of its shape first runs with a graph."""
        if self.keep != "auto" or shape in self._sizes:
            yield
            return
        with saved_sizes(parameters) as sizes:
            yield
        if sizes:
            self._sizes[shape] = sum(sizes.values())


@contextlib.contextmanager
def saved_sizes(parameters: Iterable[nn.Parameter]) -> Iterator[dict[int, int]]:
    """Yield a dictionary of what autograd saves inside, weights excepted: bytes by address."""
    parts = (part for parameter in parameters for part in tensor_parts(parameter))
    weights = {part.untyped_storage().data_ptr() for part in parts}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        for part in tensor_parts(tensor):
            storage = part.untyped_storage()
            if storage.data_ptr() not in weights:
                sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def usable_memory(parameters: Iterable[nn.Parameter], device: torch.device) -> float:
    """Bytes that activations may take: a share of what is free once gradients and the optimizer's averages exist."""
    reserved = RESERVED_BYTES * sum(parameter.numel() for parameter in parameters)
    return MEMORY_SHARE.get(device.type, 0.0) * (available_memory(device) - reserved)


def available_memory(device: torch.device) -> int:
    """Free memory in bytes; 0 where that is unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    lines = dict(line.split(":") for line in _read_text("/proc/meminfo").splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else 0
    limit, used = _read_text("/sys/fs/cgroup/memory.max").strip(), _read_text("/sys/fs/cgroup/memory.current").strip()
    return min(free, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else free


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
