# SPDX-License-Identifier: Apache-2.0
"""`State`: what has been read of a batch of documents, and all that the next call needs to continue.

A state holds what memories carry, the tokens of the window that is not finished yet (it is read again together with
what follows), and a few counts. Gradients flow through `memory` until `detach()`.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .utils.files import atomic_write
from .windows import IGNORE

_ON_CPU = ("started", "pending", "read")  # windows are planned on the host
_MEMORY = "memory."  # prefix of the memory's tensors in a file


@dataclass(frozen=True, eq=False)
class State:
    """How far a batch of documents has been read, row by row.

    Attributes:
        memory: what the next window receives, by kind of memory, each [B, ...]; undefined in rows that have not
            started. "vector": h_prev, [B, states, slots, k]. "kv": [B, layers, 2, heads, positions, d].
        started: whether a row has finished a window and so has a memory, [B], on the CPU.
        tokens: each row's tokens from the start of the unfinished window, [B, P], right-padded.
        pending: how many of these are real, [B], on the CPU.
        read: how many tokens of the document were read in all, [B], on the CPU.
        labels: for encoders, the labels of `tokens`: a window may be scored in a later call than the one that gives it.
        summary: for sequence classification, the maximum so far over windows of their first token, [B, k].
        ended: the documents were declared complete and cannot be continued.
        signature: the model, window and overlap it belongs to.
    """

    memory: dict[str, Tensor]
    started: Tensor
    tokens: Tensor
    pending: Tensor
    read: Tensor
    labels: Tensor | None = None
    summary: Tensor | None = None
    ended: bool = False
    signature: str = ""

    def __len__(self) -> int:
        return len(self.read)

    def __getitem__(self, rows: int | slice | Sequence[int] | Tensor) -> "State":
        """The state of some rows: a slice, a list of row numbers or a mask; a single row is a batch of one."""
        index = torch.arange(len(self))[rows].reshape(-1)
        return self._map(lambda x: x.index_select(0, index.to(x.device)))

    def split(self, size: int = 1) -> list["State"]:
        """Pieces of `size` rows, in order."""
        return [self[i : i + size] for i in range(0, len(self), size)]

    @staticmethod
    def cat(states: Sequence["State"]) -> "State":
        """Concatenate states of the same model, window and overlap to one batch."""
        if not states:
            raise ValueError("State.cat needs at least one state.")
        if len({(s.signature, s.ended) for s in states}) > 1:
            raise ValueError(
                "These states cannot be concatenated: they come from different models, windows or overlaps, or some "
                "have ended: " + "; ".join(sorted({f"{s.signature}{', ended' * s.ended}" for s in states}))
            )
        width = max(s.tokens.shape[1] for s in states)
        examples = {name: value for s in states for name, value in s._tensors().items()}
        device = next(iter(states[0].memory.values())).device
        merged: dict[str, Tensor] = {}
        for name, example in examples.items():
            parts = [s._tensor_or_default(name, example).to(device, copy=False) for s in states]
            if name in ("tokens", "labels"):
                parts = [torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in parts]
            merged[name] = torch.cat(parts).to(example.device)
        return states[0]._replace(merged)

    def _tensor_or_default(self, name: str, example: Tensor) -> Tensor:
        """A tensor by name, or a neutral value if this state has none: no label, no window classified yet."""
        tensors = self._tensors()
        if name in tensors:
            return tensors[name]
        if name == "labels":
            return torch.full_like(self.tokens, IGNORE)
        return example.new_full((len(self), *example.shape[1:]), -torch.inf)

    def before_last(self) -> tuple["State", Tensor]:
        """The state one token earlier, and that token of each row, [B, 1]."""
        if not bool((self.pending > 0).all()):
            raise ValueError("state has rows of which nothing was read: there is no last token to continue from.")
        last = self.tokens.gather(1, (self.pending - 1)[:, None].to(self.tokens.device))
        return dataclasses.replace(self, pending=self.pending - 1, read=self.read - 1), last

    def detach(self) -> "State":
        """The same state, detached from the graph."""
        return self._map(lambda x: x.clone() if x.is_inference() else x.detach())

    def to(self, device: torch.device | str) -> "State":
        """The same state on another device; the counts stay on the CPU."""
        return self._replace({name: x.to(device) for name, x in self._tensors().items() if name not in _ON_CPU})

    def save(self, path: str | os.PathLike, **metadata: str) -> None:
        """Write a safetensors file; further metadata is stored with it."""
        from safetensors.torch import save_file

        # Cloned: the counts of a fresh state share one tensor, which safetensors refuses.
        tensors = {name: x.detach().cpu().clone().contiguous() for name, x in self._tensors().items()}
        own = {"signature": self.signature, "ended": json.dumps(self.ended), "format": "carryforward-state"}
        with atomic_write(path) as temporary:
            save_file(tensors, temporary, metadata={**metadata, **own})

    @classmethod
    def load(cls, path: str | os.PathLike, device: torch.device | str = "cpu") -> "State":
        """Read a state written by `save`."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            if metadata.get("format") != "carryforward-state":
                raise ValueError(f"{path} is a safetensors file, but not one written by State.save.")
        except SafetensorError as error:
            raise ValueError(f"{path} is truncated or not a state written by State.save: {error}") from error
        memory = {name.removeprefix(_MEMORY): x for name, x in tensors.items() if name.startswith(_MEMORY)}
        others = {name: x for name, x in tensors.items() if not name.startswith(_MEMORY)}
        state = cls(memory=memory, **others, ended=json.loads(metadata["ended"]), signature=metadata["signature"])
        return state.to(device)

    def _tensors(self) -> dict[str, Tensor]:
        """All tensors by name; the memory's have a prefix."""
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        plain = {name: value for name, value in values if isinstance(value, Tensor)}
        return {**{f"{_MEMORY}{kind}": x for kind, x in self.memory.items()}, **plain}

    def _replace(self, tensors: dict[str, Tensor]) -> "State":
        memory = {name.removeprefix(_MEMORY): x for name, x in tensors.items() if name.startswith(_MEMORY)}
        plain: dict[str, Any] = {name: x for name, x in tensors.items() if not name.startswith(_MEMORY)}
        return dataclasses.replace(self, memory={**self.memory, **memory}, **plain)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "State":
        return self._replace({name: function(x) for name, x in self._tensors().items()})
