# SPDX-License-Identifier: Apache-2.0
"""Contextual embeddings of whole documents: a vector per token, per window or per document, as NumPy arrays.

Each document is read once, window by window, and the state is carried from window to window. Documents of similar
length share a batch, and a call reads a few windows. Memory therefore depends neither on the length of the
documents nor, for document vectors, on the number of tokens.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..backbones.modes import eval_mode
from ..data.samples import pad
from ..data.tokenization import check_text, check_tokenizer, tokenise_texts
from ..evaluation.streaming import Piece, stream_documents
from ..models import argument_checks
from ..models.headless import RecurrentModel, without_head
from ..models.outputs import RecurrentOutput
from ..state import State
from ..utils.checks import check_callable, check_count, check_flag
from ..utils.progress import ProgressBar, ProgressCallback

logger = logging.getLogger(__name__)

Output = Literal["document", "tokens", "windows"]
Pooling = Literal["mean", "state"]
WINDOWS_PER_CALL = 8  # of each document; affects only speed


@dataclass(frozen=True)
class TokenVectors:
    """The vectors of one document's N tokens.

    Attributes:
        vectors: one vector per token, without special tokens, [N, k].
        offsets: the characters [from, to) of each token in the text, [N, 2].
    """

    vectors: np.ndarray
    offsets: np.ndarray


def encode(
    model: PreTrainedModel,
    texts: Iterable[str],
    tokenizer: Any,
    *,
    output: str = "document",
    pooling: str = "mean",
    overlap: int | None = None,
    use_state: bool = True,
    batch_size: int = 8,
    progress: ProgressCallback | None = None,
) -> Any:
    """Embed documents of any length.

    Args:
        model: a recurrent model; its head, if it has one, is not used.
        texts: the documents.
        tokenizer: the model's tokenizer; a fast one for "tokens", which needs offsets. The model adds special tokens.
        output: "document" returns one vector per document, [documents, k]; "tokens" a list of `TokenVectors`;
            "windows" a list of the vectors that windows pass to the next: [windows - 1, states, slots, k] with the
            memory "vector", [windows - 1, memory tokens, k] with "tokens".
        pooling: the vector of a document: "mean" of its token vectors, or "state" after its last window, with all
            its vectors concatenated. A last window that is not full is pooled over the tokens it has. The vector of an
            empty document is zero.
        overlap: tokens that consecutive windows share; by default that of the config. A token's vector comes from the
            window in which it is farthest from an edge (encoders) or has the most context (causal models).
        use_state: False removes the state: every window is read on its own, as by the base model.
        batch_size: documents in a batch.
        progress: called with the number of tokens read so far and in total; None shows a bar on a terminal.
    """
    check_choices(output, pooling)
    check_count("batch_size", batch_size)
    check_flag("use_state", use_state)
    check_callable("progress", progress, optional=True)
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        kind = "one string" if isinstance(texts, str) else f"of type {type(texts).__name__}"
        raise ValueError(f"texts is {kind}: give a list of documents.")
    reader = without_head(model)
    if needs_state(output, pooling):
        _check_state(reader, output, use_state)
    overlap = argument_checks.check_overlap(reader.config, overlap)
    check_tokenizer(tokenizer, reader._vocabulary)
    texts = list(texts)
    for i, text in enumerate(texts):
        check_text(f"texts[{i}]", text)
    tokenised = list(tokenise_texts(tokenizer, texts, offsets=output == "tokens"))
    ids = [token_ids for token_ids, _ in tokenised]
    if any(not len(token_ids) for token_ids in ids):
        logger.warning("%d documents have no tokens.", sum(not len(token_ids) for token_ids in ids))
    collector = _collector(output, pooling)
    collectors = [collector(reader) for _ in ids]
    pieces = _read(
        reader, ids, overlap=overlap, use_state=use_state, batch_size=batch_size,
        windows_per_call=1 if output == "windows" else WINDOWS_PER_CALL, states_only=collector is _FinalState,
    )  # fmt: skip
    bar = ProgressBar("embedding", sum(map(len, ids)), "tokens", library=True, callback=progress)
    with bar, eval_mode(reader), torch.inference_mode():
        for document, count, vectors, state, row in pieces:
            collectors[document].add(vectors, state, row)
            bar.advance(count)
    results = [document.result() for document in collectors]
    if output == "tokens":
        return [TokenVectors(vectors, offsets) for vectors, (_, offsets) in zip(results, tokenised, strict=True)]
    if output == "windows":
        return results
    return np.stack(results) if results else collector(reader).result()[None][:0]


def _check_state(reader: RecurrentModel, output: str, use_state: bool) -> None:
    """Raise ValueError if states are to be returned and there are none, or they mean nothing."""
    windows = output == "windows"
    argument, instead = ('output="windows"', 'output="tokens"') if windows else ('pooling="state"', 'pooling="mean"')
    kind = reader.memory.vector_kind
    if kind in reader.untrained_memories:
        raise ValueError(
            f"{argument}: the model's memory is untrained, so its states mean nothing. Train it, or use {instead}."
        )
    if not use_state:
        raise ValueError(f"{argument} needs the state, which use_state=False (--no-state) removes.")
    if kind is None:
        raise ValueError(
            f'the model carries {reader.config.recurrence.describe()}, not vectors. Use pooling="mean" or '
            'output="tokens", or train a model whose memory consists of vectors (--memory kv vector, --memory tokens).'
        )


def check_choices(output: str, pooling: str) -> None:
    """Raise ValueError for an unknown output or pooling."""
    for name, value, choices in (("output", output, get_args(Output)), ("pooling", pooling, get_args(Pooling))):
        if value not in choices:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")


def needs_state(output: str, pooling: str) -> bool:
    """Whether the result consists of states rather than token vectors."""
    return output == "windows" or (output == "document" and pooling == "state")


def _read(
    model: RecurrentModel,
    ids: list[np.ndarray],
    *,
    overlap: int,
    use_state: bool,
    batch_size: int,
    windows_per_call: int,
    states_only: bool,
) -> Iterator[tuple[int, int, Tensor, State, int]]:
    """Read documents piece by piece.

    Args:
        ids: the token ids of each document, [N].
        states_only: compute no token vectors; the last state of a document is then that of the whole document.

    Yields:
        For each piece: the index of its document, its number of tokens, the n token vectors that are complete with it,
        [n, k], on the model's device, and the state after it with the row of the document in it. The pieces of a
        document come in order.
    """
    lengths = [len(token_ids) for token_ids in ids]

    def read(piece: Piece, state: State | None) -> RecurrentOutput:
        batch = pad([torch.from_numpy(ids[i][a:b]) for i, (a, b) in zip(piece.documents, piece.spans, strict=True)])
        kwargs: dict[str, Any] = {
            **batch,
            "state": state,
            "overlap": overlap,
            "use_state": use_state,
            "final": piece.final,
        }
        return RecurrentOutput(state=model.advance_state(**kwargs)) if states_only else model(**kwargs)

    recurrence = model.config.recurrence
    stride = recurrence.window - len(recurrence.prefix) - len(recurrence.suffix) - overlap
    for piece, out in stream_documents(
        read, lengths, stride=stride, overlap=overlap, windows_per_call=windows_per_call, batch_size=batch_size,
        separate_final=True, block_windows=model.block_size.windows(model, 1, use_state=use_state, logits=False),
        group=recurrence.window_group if use_state else None,
    ):  # fmt: skip
        assert out.state is not None
        counts = [b - a for a, b in piece.spans]
        vectors = [torch.empty(0)] * len(counts) if states_only else _unpad(out, counts)
        for row, i in enumerate(piece.documents):
            yield i, counts[row], vectors[row], out.state, row


def _unpad(out: RecurrentOutput, counts: list[int]) -> list[Tensor]:
    """The vectors of each row without padding, [n, k]; n is the row's count, or what an encoder has emitted."""
    assert out.last_hidden_state is not None
    if out.emitted is not None:
        counts = (out.emitted[:, 1] - out.emitted[:, 0]).tolist()
    return [vectors[:count] for vectors, count in zip(out.last_hidden_state, counts, strict=True)]


class _Collector(Protocol):
    """Builds the result for one document from its pieces."""

    def __init__(self, model: RecurrentModel): ...

    def add(self, vectors: Tensor, state: State, row: int) -> None:
        """Add the next piece: its token vectors, [n, k], and a row of the state after it."""

    def result(self) -> np.ndarray: ...


def _collector(output: str, pooling: str) -> type[_Collector]:
    if output == "document":
        return _TokenMean if pooling == "mean" else _FinalState
    return _TokenList if output == "tokens" else _WindowStates


class _TokenMean(_Collector):
    """The mean of all token vectors, [k], as a running sum on the model's device: the vectors do not leave it."""

    def __init__(self, model: RecurrentModel):
        wide = torch.float32 if model.device.type == "mps" else torch.float64  # which Apple's GPUs do not have
        self.total = torch.zeros(model.config.base_config.hidden_size, dtype=wide)
        self.count = 0

    def add(self, vectors: Tensor, state: State, row: int) -> None:
        self.total = self.total.to(vectors.device) + vectors.sum(dim=0, dtype=self.total.dtype)
        self.count += len(vectors)

    def result(self) -> np.ndarray:
        return (self.total / max(self.count, 1)).float().cpu().numpy()


def _vector_state(model: RecurrentModel) -> tuple[str, tuple[int, ...]]:
    """The memory whose state consists of vectors, and the shape of its state: for "vector" states, slots and hidden
    size, for "tokens" memory tokens and hidden size."""
    kind = model.memory.vector_kind
    assert kind is not None, "checked before"
    return kind, getattr(model.memory, kind).shape


class _FinalState(_Collector):
    """The state after the last window, all its vectors in one."""

    def __init__(self, model: RecurrentModel):
        self.kind, shape = _vector_state(model)
        self.state = np.zeros(shape, np.float32)

    def add(self, vectors: Tensor, state: State, row: int) -> None:
        if state.ended:
            self.state = state.memory[self.kind][row].float().cpu().numpy()

    def result(self) -> np.ndarray:
        return self.state.flatten()


class _WindowStates(_Collector):
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


class _TokenList(_Collector):
    """The vectors of all tokens, [N, k]."""

    def __init__(self, model: RecurrentModel):
        self.parts = [np.zeros((0, model.config.base_config.hidden_size), np.float32)]

    def add(self, vectors: Tensor, state: State, row: int) -> None:
        self.parts.append(vectors.float().cpu().numpy())

    def result(self) -> np.ndarray:
        return np.concatenate(self.parts)
