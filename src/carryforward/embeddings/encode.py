# SPDX-License-Identifier: Apache-2.0
"""Contextual embeddings of whole documents: a vector per token, per window or per document, as NumPy arrays.

A document is read once, window by window, with the state carried on; nothing is strided over twice unless an overlap is
asked for. Documents of similar length are read side by side, a few windows at a time, so memory depends neither on
their length nor, for document vectors, on their number of tokens.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..data.samples import by_length, pad
from ..data.tokenization import check_text, tokens_of
from ..models import argument_checks
from ..models.base import RecurrentPreTrainedModel, eval_mode
from ..models.headless import RecurrentModel
from ..state import State
from ..utils.peft import unwrapped
from ..utils.progress import Progress, bar

logger = logging.getLogger(__name__)

Output = Literal["document", "tokens", "windows"]
Pooling = Literal["mean", "state"]
WINDOWS_PER_CALL = 8  # how much of each document one call reads; only speed notices


@dataclass(frozen=True)
class TokenVectors:
    """The tokens of one document.

    Attributes:
        vectors: one for each of the document's own tokens, [N, k].
        offsets: where each token stands in the text: characters [from, to), [N, 2].
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
    progress: Progress | None = None,
) -> Any:
    """Embed documents of any length.

    Args:
        model: a recurrent model; a head it may have is left out.
        texts: the documents.
        tokenizer: the model's; a fast one, as "tokens" needs offsets. Special tokens are the model's business.
        output: "document" gives one vector each, [documents, k]; "tokens" a list of `TokenVectors`; "windows" a list of
            the states that windows pass on to the next, [windows - 1, states, slots, k].
        pooling: for "document": the "mean" of its token vectors, or the "state" after all of it, all slots side by
            side; a last window that is not full counts with the tokens it has. An empty document's vector is zero.
        overlap: read at another overlap than the model was made for. A token's vector then comes from the window in
            which it is farthest from an edge (encoders) or has the most context (causal models).
        use_state: False removes the state: every window stands alone, as with the base model.
        batch_size: documents read side by side.
        progress: called with the tokens read so far and in all; None shows a bar if there is a terminal.
    """
    check_choices(output, pooling)
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1.")
    if isinstance(texts, str):
        raise ValueError("texts is one string: give a list of documents.")
    reader = headless(model)
    if needs_state(output, pooling):
        _check_state(reader, output, use_state)
    overlap = argument_checks.overlap(reader.config, overlap)
    texts = list(texts)
    for i, text in enumerate(texts):
        check_text(f"texts[{i}]", text)
    tokenised = list(tokens_of(tokenizer, texts, offsets=output == "tokens"))
    ids = [token_ids for token_ids, _ in tokenised]
    if any(not len(token_ids) for token_ids in ids):
        logger.warning("%d documents have no tokens.", sum(not len(token_ids) for token_ids in ids))
    collect = {"document": _Mean if pooling == "mean" else _WholeState, "tokens": _Tokens, "windows": _States}[output]
    found = [collect(reader) for _ in ids]
    step = 1 if output == "windows" else WINDOWS_PER_CALL
    done, total = 0, sum(map(len, ids))
    with bar(progress, "embedding", after=2) as report, eval_mode(reader), torch.inference_mode():
        for document, count, vectors, state in _read(
            reader, ids, overlap, use_state, batch_size, step, states_only=collect is _WholeState
        ):
            found[document].add(vectors, state)
            done += count
            report(done, total)
    results = [one.result() for one in found]
    if output == "tokens":
        return [TokenVectors(vectors, offsets) for vectors, (_, offsets) in zip(results, tokenised, strict=True)]
    if output == "windows":
        return results
    return np.stack(results) if results else collect(reader).result()[None][:0]


def _check_state(reader: Any, output: str, use_state: bool) -> None:
    """Refuse to give out a state where there is none."""
    if not use_state:
        wanted = 'output="windows"' if output == "windows" else 'pooling="state"'
        raise ValueError(f"{wanted} needs the state, which use_state=False (--no-state) removes.")
    if not reader.config.recurrence.slots:
        raise ValueError(
            "the model pools nothing (slots=0): there is no state to give out as a vector. Use the mean of its tokens, "
            "or train one that has a slot (--preset kept --slots 1)."
        )


def check_choices(output: str, pooling: str) -> None:
    """Refuse outputs and poolings there are not."""
    for name, value, choices in (("output", output, get_args(Output)), ("pooling", pooling, get_args(Pooling))):
        if value not in choices:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")


def needs_state(output: str, pooling: str) -> bool:
    """Whether what is wanted is made of states, and not only of what tokens saw of them."""
    return output == "windows" or (output == "document" and pooling == "state")


def headless(model: PreTrainedModel) -> RecurrentModel:
    """The same model without its head; weights are shared."""
    model = unwrapped(model)
    if isinstance(model, RecurrentModel):
        return model
    if not isinstance(model, RecurrentPreTrainedModel):
        raise ValueError(f"model is a {type(model).__name__}: make it recurrent with add_recurrence first.")
    reader, path = _HEADLESS.get(model, (None, None))
    if reader is None or reader.base is not model.backbone or path != model.fast_path:
        with torch.device("meta"):  # the recurrence made here is thrown away: it should draw no random numbers
            reader = RecurrentModel(model.config, base=model.backbone)
        reader.fast_path = model.fast_path
        _HEADLESS[model] = reader, model.fast_path
    reader.recurrence = model.recurrence
    return reader


# by the model with a head: what was recorded for one document is of use for the next
_HEADLESS: WeakKeyDictionary[PreTrainedModel, tuple[RecurrentModel, str]] = WeakKeyDictionary()


def _read(
    model: RecurrentModel, ids: list[np.ndarray], overlap: int, use_state: bool, batch_size: int, step: int,
    states_only: bool,
) -> Iterator[tuple[int, int, np.ndarray, State]]:  # fmt: skip
    """Give each document piece by piece, in order: how many tokens were read, the vectors there are, and the state
    behind the piece; with `states_only` no vectors, and at last the state of the whole document."""
    recurrence = model.config.recurrence
    stride = recurrence.window - len(recurrence.prefix) - len(recurrence.suffix) - overlap
    for rows in by_length([len(one) for one in ids], batch_size):
        state: State | None = None
        start, stop = 0, step * stride + overlap + 1  # a window is complete with the token behind it
        while rows:
            going_on = [row for row, i in enumerate(rows) if len(ids[i]) > stop]
            ending = [row for row, i in enumerate(rows) if len(ids[i]) <= stop]
            kept = None
            for part, final in ((ending, True), (going_on, False)):
                if not part:
                    continue
                batch = pad([torch.from_numpy(ids[rows[row]][start:stop]) for row in part])
                counts = batch["attention_mask"].sum(dim=1).tolist()
                arguments: dict[str, Any] = {name: tensor.to(model.device) for name, tensor in batch.items()}
                arguments |= {"state": None if state is None else state[part], "final": final}
                arguments |= {"overlap": overlap, "use_state": use_state}
                if states_only:
                    behind, vectors = model.advance_state(**arguments), [np.empty(0)] * len(part)
                else:
                    out = model(**arguments)
                    behind, vectors = out.state, _unpadded(out, counts)
                for row, i in enumerate(part):
                    yield rows[i], counts[row], vectors[row], behind[[row]]
                kept = kept if final else behind
            rows, state = [rows[row] for row in going_on], kept
            start, stop = stop, stop + step * stride


def _unpadded(out: Any, counts: list[int]) -> list[np.ndarray]:
    """Each row's own vectors: for an encoder those it has given out so far."""
    if out.emitted is not None:
        counts = (out.emitted[:, 1] - out.emitted[:, 0]).tolist()
    hidden: Tensor = out.last_hidden_state
    return [vectors[:count] for vectors, count in zip(hidden.float().cpu().numpy(), counts, strict=True)]


class _Mean:
    """The mean of token vectors, without keeping them."""

    def __init__(self, model: RecurrentModel):
        self.total, self.count = np.zeros(model.config.base_config.hidden_size), 0

    def add(self, vectors: np.ndarray, state: State) -> None:
        self.total, self.count = self.total + vectors.sum(axis=0, dtype=np.float64), self.count + len(vectors)

    def result(self) -> np.ndarray:
        return (self.total / max(self.count, 1)).astype(np.float32)


class _WholeState:
    """The state after the whole document."""

    def __init__(self, model: RecurrentModel):
        self.last = np.zeros(model.config.state_shape, np.float32)

    def add(self, vectors: np.ndarray, state: State) -> None:
        if state.ended:
            self.last = state.carried[0].float().cpu().numpy()

    def result(self) -> np.ndarray:
        return self.last.flatten()


class _States:
    """What each full window passed on."""

    def __init__(self, model: RecurrentModel):
        self.shape, self.pending = model.config.state_shape, -1
        self.found: list[np.ndarray] = []

    def add(self, vectors: np.ndarray, state: State) -> None:
        start = int(state.read - state.pending)  # the next window's: it moves when a window is finished
        if state.started.all() and start != self.pending:
            self.found.append(state.carried[0].float().cpu().numpy())
        self.pending = start

    def result(self) -> np.ndarray:
        return np.stack(self.found) if self.found else np.zeros((0, *self.shape), np.float32)


class _Tokens:
    """Every token's vector."""

    def __init__(self, model: RecurrentModel):
        self.parts = [np.zeros((0, model.config.base_config.hidden_size), np.float32)]

    def add(self, vectors: np.ndarray, state: State) -> None:
        self.parts.append(vectors)

    def result(self) -> np.ndarray:
        return np.concatenate(self.parts)
