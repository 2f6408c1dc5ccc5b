# SPDX-License-Identifier: Apache-2.0
"""What has been read so far of a batch of documents: all that the next call needs to go on.

A state is small: the carried vectors, the tokens of the window that is not finished yet (it is read again together
with what follows) and a few counts. Gradients flow through `carried` until `detach()`.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .utils.files import atomic_write


@dataclass(frozen=True, eq=False)
class State:
    """Where the reading of a batch of documents stands, row by row.

    Attributes:
        carried: the vectors the next window receives (h_prev), [B, states, slots, k]; meaningless where not started.
        kept: the keys and values it receives, [B, layers, 2, heads, positions, d], if the model carries some.
        started: whether a row has finished a window and so has carried vectors, [B], on the CPU.
        tokens: each row's tokens from the unfinished window's start on, [B, P], right-padded.
        pending: how many of them are real, [B], on the CPU.
        read: how many tokens of the document were read in all, [B], on the CPU.
        labels: for encoders, the labels of `tokens`, as a window may be scored in a later call than it is given.
        summary: for sequence classification, the maximum so far over windows of their first token, [B, k].
        ended: the documents were declared complete; there is nothing to go on with.
        signature: the model, window and overlap it belongs to.
    """

    carried: Tensor
    started: Tensor
    tokens: Tensor
    pending: Tensor
    read: Tensor
    kept: Tensor | None = None
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
        """One batch out of several; they must belong to the same model, window and overlap."""
        if not states:
            raise ValueError("State.cat needs at least one state.")
        if len({(s.signature, s.ended) for s in states}) > 1:
            raise ValueError(
                "These states do not belong together: they come from different models, windows or overlaps, or some "
                "have ended: " + "; ".join(sorted({f"{s.signature}{', ended' * s.ended}" for s in states}))
            )
        width = max(s.tokens.shape[1] for s in states)
        names = {name: value for s in states for name, value in s._tensors().items()}
        merged: dict[str, Any] = {}
        for name, example in names.items():
            parts = [s._value(name, example).to(states[0].carried.device, copy=False) for s in states]
            if name in ("tokens", "labels"):
                parts = [torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in parts]
            merged[name] = torch.cat(parts).to(example.device)
        return dataclasses.replace(states[0], **merged)

    def _value(self, name: str, example: Tensor) -> Tensor:
        """A field, or what stands for it where this state has none: no label, no window classified yet."""
        if getattr(self, name) is not None:
            return getattr(self, name)
        if name == "labels":
            return torch.full_like(self.tokens, -100)
        return example.new_full((len(self), *example.shape[1:]), -torch.inf)

    def before_last(self) -> tuple["State", Tensor]:
        """The state one token earlier, and that token of each row, [B, 1]."""
        if not bool((self.pending > 0).all()):
            raise ValueError("state has rows of which nothing was read: there is no last token to go on from.")
        last = self.tokens.gather(1, (self.pending - 1)[:, None].to(self.tokens.device))
        return dataclasses.replace(self, pending=self.pending - 1, read=self.read - 1), last

    def detach(self) -> "State":
        """The same state, through which no gradient flows."""
        return self._map(lambda x: x.clone() if x.is_inference() else x.detach())

    def to(self, device: torch.device | str) -> "State":
        """The same state on another device; the counts stay on the CPU, where windows are planned."""
        on_cpu = ("started", "pending", "read")
        return self._map(lambda x: x.to(device), [name for name in self._tensors() if name not in on_cpu])

    def save(self, path: str | os.PathLike, **notes: str) -> None:
        """Write a safetensors file, with notes of one's own in its metadata."""
        from safetensors.torch import save_file

        # cloned: a fresh state's counts are one tensor, which safetensors would not write twice
        tensors = {name: x.detach().cpu().clone().contiguous() for name, x in self._tensors().items()}
        own = {"signature": self.signature, "ended": json.dumps(self.ended), "format": "carryforward-state"}
        with atomic_write(path) as beside:
            save_file(tensors, beside, metadata={**notes, **own})

    @classmethod
    def load(cls, path: str | os.PathLike, device: torch.device | str = "cpu") -> "State":
        """Read a state written by `save`."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                note = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            if note.get("format") != "carryforward-state":
                raise ValueError(f"{path} is a safetensors file, but not one written by State.save.")
        except SafetensorError as error:
            raise ValueError(f"{path} is cut short or not a state written by State.save: {error}") from error
        return cls(**tensors, ended=json.loads(note["ended"]), signature=note["signature"]).to(device)

    def _tensors(self) -> dict[str, Tensor]:
        fields = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: value for name, value in fields if isinstance(value, Tensor)}

    def _map(self, function, names: Sequence[str] | None = None) -> "State":
        tensors = self._tensors()
        return dataclasses.replace(self, **{name: function(tensors[name]) for name in names or tensors})
