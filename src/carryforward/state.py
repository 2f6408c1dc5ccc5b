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
from hashlib import blake2b
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .utils.files import atomic_write
from .windows import IGNORE

_ON_CPU = ("started", "pending", "read", "origin")  # windows are planned on the host
_MEMORY = "memory."  # prefix of the memory's tensors in a file
_FORMAT = "carryforward-state"
_INTEGERS = ("tokens", "pending", "read", "origin", "labels")


@dataclass(frozen=True, eq=False)
class State:
    """How far a batch of documents has been read, row by row.

    Attributes:
        memory: what the next window receives, by kind of memory, each [B, ...]; undefined in rows that have not
            started. "vector": h_prev, [B, states, slots, k]. "kv": [B, layers, 2, heads, positions, d]. "tokens":
            [B, memory tokens, k]. "associative": [B, layers, features, k + 1].
        started: whether a row has finished a window and so has a memory, [B], on the CPU.
        tokens: each row's tokens from the start of the unfinished window, [B, P], right-padded.
        pending: how many of these are real, [B], on the CPU.
        read: how many tokens of the document were read in all, [B], on the CPU.
        origin: at which token the memory begins, [B], on the CPU: not 0 where a document was first read without a
            state. None: 0 everywhere.
        labels: for encoders, the labels of `tokens`: a window may be scored in a later call than the one that gives it.
        summary: for sequence classification, the maximum so far over windows of their first token, [B, k].
        ended: the documents were declared complete and cannot be continued.
        signature: what a model must have to continue from it, in words: layers, memory, window and overlap.
        model: the fingerprint of the model it belongs to, its weights and its recurrence; empty if unknown, as after
            training steps, which change the weights.
    """

    memory: dict[str, Tensor]
    started: Tensor
    tokens: Tensor
    pending: Tensor
    read: Tensor
    origin: Tensor | None = None
    labels: Tensor | None = None
    summary: Tensor | None = None
    ended: bool = False
    signature: str = ""
    model: str = ""

    def __len__(self) -> int:
        return len(self.read)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{kind} {list(x.shape)}" for kind, x in self.memory.items())
        read = f"{min(self.read.tolist(), default=0)} to {max(self.read.tolist(), default=0)}"
        ended = ", ended" * self.ended
        return f"State({len(self)} rows, {read} tokens read{ended}; memory: {shapes}; signature: {self.signature!r})"

    def __getitem__(self, rows: int | slice | Sequence[int] | Tensor) -> "State":
        """The state of some rows: a slice, a list of row numbers or a mask; a single row is a batch of one."""
        if isinstance(rows, bool) or not isinstance(rows, Integral | slice):
            rows = _row_numbers(rows, len(self))
        index = torch.arange(len(self))[rows].reshape(-1)
        return self._map(lambda x: x.index_select(0, index.to(x.device)))

    def split(self, size: int = 1) -> list["State"]:
        """Pieces of `size` rows, in order."""
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"size={size!r} must be a number of rows, at least 1.")
        return [self[i : i + size] for i in range(0, len(self), size)]

    @staticmethod
    def cat(states: Sequence["State"]) -> "State":
        """Concatenate states of the same model, window and overlap to one batch."""
        if not isinstance(states, Sequence) or not all(isinstance(state, State) for state in states):
            raise ValueError("states must be a list of State objects.")
        if not states:
            raise ValueError("states is empty: State.cat needs at least one state.")
        models = {s.model for s in states}
        if len({(s.signature, s.ended) for s in states}) > 1 or len(models - {""}) > 1:
            raise ValueError(
                "These states cannot be concatenated: they come from different models, windows or overlaps, or some "
                "have ended: " + "; ".join(sorted({s._origin() + ", ended" * s.ended for s in states}))
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
        return dataclasses.replace(states[0]._replace(merged), model=models.pop() if len(models) == 1 else "")

    def _origin(self) -> str:
        return f"{self.signature}, model {self.model}" if self.model else self.signature

    def _tensor_or_default(self, name: str, example: Tensor) -> Tensor:
        """A tensor by name, or a neutral value if this state has none: no label, no window classified yet."""
        tensors = self._tensors()
        if name in tensors:
            return tensors[name]
        if name == "labels":
            return torch.full_like(self.tokens, IGNORE)
        if name == "origin":
            return torch.zeros_like(self.read)
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
        if not isinstance(device, str | torch.device | int):
            raise ValueError(f"device={device!r}: give a device, such as 'cpu' or 'cuda'.")
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:  # unknown, or not on this machine
            raise ValueError(f"device={device!r} cannot be used: {str(error).splitlines()[0]}") from error
        return self._replace({name: x.to(device) for name, x in self._tensors().items() if name not in _ON_CPU})

    def save(self, path: str | os.PathLike, **metadata: str) -> None:
        """Write a safetensors file, with a digest of its tensors; further metadata is stored with it."""
        from safetensors.torch import save_file

        # Cloned: the counts of a fresh state share one tensor, which safetensors refuses.
        tensors = {name: x.detach().cpu().clone().contiguous() for name, x in self._tensors().items()}
        own = {
            "format": _FORMAT, "signature": self.signature, "model": self.model, "ended": json.dumps(self.ended)
        }  # fmt: skip
        wrong = [name for name, value in metadata.items() if name in (*own, "digest") or not isinstance(value, str)]
        if wrong:
            raise ValueError(
                f"{wrong[0]}={metadata[wrong[0]]!r}: metadata are strings, and not named as a state's own."
            )
        content = {**metadata, **own}
        with atomic_write(path) as temporary:
            save_file(tensors, temporary, metadata={**content, "digest": _digest(content, tensors)})

    @classmethod
    def load(cls, path: str | os.PathLike, device: torch.device | str = "cpu") -> "State":
        """Read a state written by `save`. A damaged file is refused."""
        metadata, tensors = read_state_file(path)
        memory = {name.removeprefix(_MEMORY): x for name, x in tensors.items() if name.startswith(_MEMORY)}
        others = {name: x for name, x in tensors.items() if not name.startswith(_MEMORY)}
        return cls(
            memory=memory, **others, ended=metadata["ended"] == "true", signature=metadata["signature"],
            model=metadata.get("model", ""),
        ).to(device)  # fmt: skip

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


def _row_numbers(rows: Any, count: int) -> Tensor:
    """Rows as a tensor of numbers, or as a mask, [count]."""
    try:
        numbers = torch.as_tensor(rows).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"rows={rows!r}: give a row number, a slice, a list of row numbers, or a mask.") from error
    is_mask = numbers.dtype == torch.bool
    if (numbers.is_floating_point() and numbers.numel()) or (is_mask and numbers.shape != (count,)) or numbers.ndim > 1:
        raise ValueError(
            f"rows={rows!r}: give a row number, a slice, a list of row numbers, or a mask of {count} rows."
        )
    return numbers if is_mask else numbers.long()


# --- files ---------------------------------------------------------------------------------------------------------


def read_state_file(path: str | os.PathLike) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors of a state's file; a ValueError names the file and what is wrong with it."""
    from safetensors import SafetensorError, safe_open

    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"path={path!r}: give the name of a state file, written by State.save.")
    if not Path(path).is_file():
        what = "is a folder" if Path(path).is_dir() else "does not exist"
        raise ValueError(f"state file {path} {what}: give a file written by State.save.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ValueError(f"{path} is truncated or not a state written by State.save: {error}") from error
    if metadata.get("format") != _FORMAT:
        raise ValueError(f"{path} is a safetensors file, but not one written by State.save.")
    problem = _problem(metadata, tensors)
    if problem:
        raise ValueError(f"state file {path} is damaged: {problem}. Write the state again, or copy the file again.")
    return metadata, tensors


def _problem(metadata: dict[str, str], tensors: dict[str, Tensor]) -> str | None:
    """What is wrong with the content of a state's file."""
    for name in ("signature", "ended"):
        if name not in metadata:
            return f"its metadata has no {name!r}"
    if metadata["ended"] not in ("true", "false"):
        return f"its metadata has ended={metadata['ended'][:20]!r}"
    kinds = {name for name in tensors if name.startswith(_MEMORY)}
    missing = {"started", "tokens", "pending", "read"} - tensors.keys() or ({"memory"} if not kinds else set())
    if missing:
        return f"the tensor {min(missing)!r} is missing"
    for name in sorted(tensors):
        problem = _tensor_problem(name, tensors)
        if problem:
            return f"the tensor {name!r} {problem}"
    content = {name: value for name, value in metadata.items() if name != "digest"}
    if "digest" in metadata and metadata["digest"] != _digest(content, tensors):  # earlier versions wrote none
        return "its content differs from the digest that was written with it"
    return None


def _tensor_problem(name: str, tensors: dict[str, Tensor]) -> str | None:
    """Why a tensor of a file cannot be that of a state."""
    x, rows, width = tensors[name], tensors["read"].numel(), tensors["tokens"].shape[-1:].numel()
    is_memory, integer = name.startswith(_MEMORY), x.dtype in (torch.int64, torch.int32)
    if not is_memory and name not in (*_ON_CPU, *_INTEGERS, "summary"):
        return "does not belong to a state"
    shape = (rows,) if name in _ON_CPU else (rows, width) if name in _INTEGERS else (rows, *x.shape[1:])
    if not rows or not x.ndim or tuple(x.shape) != shape:
        return f"has shape {list(x.shape)}"
    if not (x.dtype == torch.bool if name == "started" else integer if name in _INTEGERS else x.is_floating_point()):
        return f"has dtype {x.dtype}"
    limit = torch.minimum(tensors["read"], torch.tensor(width))
    if name == "pending" and not bool(((x >= 0) & (x <= limit)).all()):
        return f"holds {x.tolist()}, which must be between 0 and {limit.tolist()}"
    return None


def _digest(metadata: dict[str, str], tensors: dict[str, Tensor]) -> str:
    """A digest of metadata, and of the names, types, shapes and bytes of tensors on the CPU."""
    digest = blake2b(json.dumps(metadata, sort_keys=True).encode(), digest_size=16)
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)} ".encode())
        digest.update(x.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
