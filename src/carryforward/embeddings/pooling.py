# SPDX-License-Identifier: Apache-2.0
"""What is made of a document while it is read, piece by piece: pooled vectors, all token vectors, or states."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..models.headless import RecurrentModel
from ..state import State


class Collector(Protocol):
    """Builds the result for one document from its pieces."""

    def add(self, vectors: Tensor, state: State, row: int) -> None:
        """Add the next piece: its token vectors, [n, k], and a row of the state after it."""

    def result(self) -> np.ndarray: ...


class Pooled(Collector):
    """The pooled vectors of ranges of tokens, [C, k]; zero for a range without tokens.

    The mean is a running sum on the model's device: the token vectors do not leave it.
    """

    def __init__(self, model: RecurrentModel, ranges: np.ndarray, how: str):
        """
        Args:
            ranges: tokens [first, last), [C, 2].
            how: "max"; anything else is the mean.
        """
        self.ranges, self.max, self.read = ranges, how == "max", 0
        self.size, self.weighted = model.config.base_config.hidden_size, model._output_size
        wide = torch.float32 if model.device.type == "mps" else torch.float64  # which Apple's GPUs do not have
        start = -torch.inf if self.max else 0.0
        self.pooled = torch.full((len(ranges), self.weighted), start, dtype=wide)

    def add(self, vectors: Tensor, state: State, row: int) -> None:
        self.pooled = self.pooled.to(vectors.device)
        begin, self.read = self.read, self.read + len(vectors)
        inside = np.clip(self.ranges, begin, self.read) - begin
        for i in np.flatnonzero(inside[:, 1] > inside[:, 0]).tolist():
            tokens = vectors[inside[i, 0] : inside[i, 1]]
            if self.max:
                self.pooled[i] = torch.maximum(self.pooled[i], tokens.amax(dim=0).to(self.pooled.dtype))
            else:
                self.pooled[i] += tokens.sum(dim=0, dtype=self.pooled.dtype)

    def result(self) -> np.ndarray:
        counts = torch.from_numpy(self.ranges[:, 1] - self.ranges[:, 0]).to(self.pooled)[:, None]
        pooled, weights = self.pooled[:, : self.size], self.pooled[:, self.size :]
        if not self.max:  # with shares of special tokens, vectors say how many tokens they stand for
            pooled = pooled / (weights if weights.shape[1] else counts)
        return torch.where(counts > 0, pooled, 0).float().cpu().numpy()


def _vector_state(model: RecurrentModel) -> tuple[str, tuple[int, ...]]:
    """The memory whose state consists of vectors, and the shape of its state: for "vector" states, slots and hidden
    size, for "tokens" memory tokens and hidden size."""
    kind = model.memory.vector_kind
    assert kind is not None, "checked before"
    return kind, getattr(model.memory, kind).shape


class FinalState(Collector):
    """The state after the last window, all its vectors in one, [1, k]."""

    def __init__(self, model: RecurrentModel):
        self.kind, shape = _vector_state(model)
        self.state = np.zeros(shape, np.float32)

    def add(self, vectors: Tensor, state: State, row: int) -> None:
        if state.ended:
            self.state = state.memory[self.kind][row].float().cpu().numpy()

    def result(self) -> np.ndarray:
        return self.state.reshape(1, -1)


class WindowStates(Collector):
    """The vectors that each full window passes to the next, [windows - 1, ..., k]. Needs one window a piece."""

    def __init__(self, model: RecurrentModel):
        self.kind, self.shape = _vector_state(model)
        self.next_start = -1
        self.states: list[np.ndarray] = []

    def add(self, vectors: Tensor, state: State, row: int) -> None:
        next_start = int(state.read[row] - state.pending[row])  # of the next window; changes when a window is complete
        if state.started[row] and next_start != self.next_start:
            self.states.append(state.memory[self.kind][row].float().cpu().numpy())
        self.next_start = next_start

    def result(self) -> np.ndarray:
        return np.stack(self.states) if self.states else np.zeros((0, *self.shape), np.float32)


class TokenList(Collector):
    """The vectors of all tokens, [N, k]."""

    def __init__(self, model: RecurrentModel):
        self.parts = [np.zeros((0, model.config.base_config.hidden_size), np.float32)]

    def add(self, vectors: Tensor, state: State, row: int) -> None:
        self.parts.append(vectors.float().cpu().numpy())

    def result(self) -> np.ndarray:
        return np.concatenate(self.parts)


def normalized(vectors: np.ndarray) -> np.ndarray:
    """Vectors of unit length; those that are zero stay zero."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(lengths > 0, lengths, 1)
