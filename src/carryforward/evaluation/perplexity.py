# SPDX-License-Identifier: Apache-2.0
"""Perplexity of whole documents at any overlap, for recurrent and plain causal models (section 4.2 of the paper).

Every token of a document except its first is scored exactly once. Results hold sums, and ratios are computed last, so
results of splits, batches and processes can be added. Words and bytes are counted in the original text, so models with
different tokenizers can be compared.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from .. import windows
from ..backbones.architectures import positions_of
from ..backbones.modes import eval_mode
from ..data.samples import check_documents, collate, make_sample, sample_spans
from ..distributed.work_map import WorkMap
from ..models import argument_checks
from ..models.base import RecurrentPreTrainedModel
from ..models.causal_lm import RecurrentForCausalLM
from ..models.outputs import RecurrentOutput
from ..state import State
from ..utils.checks import check_callable, check_count, check_flag
from ..utils.peft import get_recurrent_model
from ..windows import IGNORE
from .streaming import Piece, group_documents, stream_documents

WINDOWS_PER_CALL = 16  # of each document; affects only speed and how often progress is reported

# scores a unit of work, given its number: yields summed negative log-likelihoods, and numbers of scored tokens
Score = Callable[[int], Iterator[tuple[Tensor, int]]]
Span = tuple[int, int, int, int]  # a document, and the start, stop and score_from of a sample in it


@dataclass(frozen=True)
class Perplexity:
    """Sums over a set of documents, from which perplexity is computed. Results can be added with +.

    Attributes:
        nats: summed negative log-likelihood of the scored tokens.
        tokens: number of scored tokens.
        words, bytes, line_ends: counts of the documents' text; 0 if unknown.
        documents: number of documents.
    """

    nats: float = 0.0
    tokens: int = 0
    words: int = 0
    bytes: int = 0
    line_ends: int = 0
    documents: int = 0

    def __add__(self, other: "Perplexity") -> "Perplexity":
        return Perplexity(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def word_perplexity(self) -> float | None:
        """exp(nats / words), the metric of the paper; None if words were not counted."""
        return _exp(self.nats / self.words) if self.words else None

    @property
    def token_perplexity(self) -> float | None:
        """exp(nats / tokens); None if no token was scored."""
        return _exp(self.nats / self.tokens) if self.tokens else None

    @property
    def bits_per_byte(self) -> float | None:
        """None if bytes were not counted."""
        return self.nats / self.bytes / math.log(2) if self.bytes else None


def perplexity(
    model: PreTrainedModel,
    documents: Sequence[Any],
    *,
    overlap: int | None = None,
    window: int | None = None,
    use_state: bool = True,
    reset_every: int | None = None,
    batch_size: int = 8,
    progress: Callable[[int], object] = lambda scored: None,
    work_map: WorkMap | None = None,
) -> Perplexity:
    """Score documents with a causal language model.

    What is read together depends on the documents alone, and the sum of all batches is rounded once: on a CPU, the
    result is the same to the last bit whatever the number of processes.

    Args:
        model: a recurrent model, or any causal language model of Hugging Face.
        documents: token ids of each document. `Documents` also counts the words and bytes of the text.
        overlap: tokens that consecutive windows share; by default that of the config, or 0 for a plain model.
        window: tokens in a window, for plain models only; a recurrent model has its window in the config.
        use_state: False removes the state of a recurrent model: the control.
        reset_every: reset the state after this many windows, as in training.
        batch_size: documents (for a plain model: windows) in a batch.
        progress: called with the number of newly scored tokens.
        work_map: divides the batches among the processes of a command, which must all make this call.
    """
    model = get_recurrent_model(model)
    check_documents(documents)
    check_count("batch_size", batch_size)
    check_count("reset_every", reset_every, optional=True)
    check_flag("use_state", use_state)
    check_callable("progress", progress)
    window = _window_of(model, window)
    recurrence = model.config.recurrence if isinstance(model, RecurrentPreTrainedModel) else None
    check_count("overlap", overlap, 0, optional=True)
    overlap = (recurrence.overlap if recurrence else 0) if overlap is None else overlap
    windows.check(window, overlap)
    counts = {name: _count(documents, name) for name in ("words", "bytes", "line_ends")}
    with eval_mode(model), torch.inference_mode():
        if recurrence is None:
            targets, score = _score_windows(model, documents, window, overlap, batch_size)
        elif reset_every is not None:
            targets, score = _score_samples(model, documents, overlap, reset_every, batch_size, use_state)
        else:
            assert isinstance(model, RecurrentPreTrainedModel)
            targets, score = _score_documents(model, documents, overlap, batch_size, use_state)

        def work(number: int) -> tuple[Tensor, int]:
            nats, tokens = torch.zeros((), dtype=torch.float64), 0
            for nll_sum, scored in score(number):
                nats = nats.to(nll_sum.device) + nll_sum.double()
                tokens += scored
                progress(scored)
            return nats, tokens

        sums = (work_map or WorkMap())(targets, work, finish=lambda s: [float(s[0]), s[1]], progress=progress)
    nats, tokens = math.fsum(nats for nats, _ in sums), sum(tokens for _, tokens in sums)
    return Perplexity(nats=nats, tokens=tokens, documents=len(documents), **counts)


def _window_of(model: PreTrainedModel, window: int | None) -> int:
    """The window that documents are read with; raises ValueError if the model cannot score documents with it."""
    if not isinstance(model, PreTrainedModel) or not _is_causal(model):
        raise ValueError(f"model: perplexity needs a causal language model, not {type(model).__name__}.")
    if isinstance(model, RecurrentPreTrainedModel):
        own = model.config.recurrence.window
        if window not in (None, own):
            raise ValueError(f"window={window}: this recurrent model reads {own} tokens at once. Leave it out.")
        return own
    if window is None:
        raise ValueError("window is missing: give the number of tokens that the plain model reads at once.")
    check_count("window", window)
    check_positions(model.config, window)
    return window


def _is_causal(model: PreTrainedModel) -> bool:
    """False for encoders: they see the tokens to predict, so their perplexity would be meaningless. A class unknown to
    transformers counts as causal if it has output embeddings."""
    if isinstance(model, RecurrentPreTrainedModel):
        return isinstance(model, RecurrentForCausalLM)
    names = {cls.__name__ for cls in type(model).__mro__}
    if names & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}:
        return True
    return not names & {*MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()} and model.get_output_embeddings() is not None


def check_positions(config: PreTrainedConfig, window: int) -> None:
    """Raise ValueError if a plain model has fewer positions than the window has tokens."""
    positions = positions_of(config)
    if positions is not None and window > positions:
        raise ValueError(f"window={window}: this model has {positions} positions. Use {positions} or less.")


def _score_windows(
    model: PreTrainedModel, documents: Sequence[Any], window: int, overlap: int, batch_size: int
) -> tuple[list[int], Score]:
    """Score independent windows with a plain model; a batch may hold windows of several documents.

    Returns:
        The number of targets of each batch, and a function that scores one.
    """
    embeddings: Any = model.get_input_embeddings()
    vocabulary = embeddings.weight.shape[0]
    batches = _batches(documents, window, overlap, 1, batch_size)

    def score(number: int) -> Iterator[tuple[Tensor, int]]:
        batch = _collate(documents, batches[number])
        argument_checks.check_vocabulary(batch["input_ids"], batch["attention_mask"], vocabulary)
        ids, labels = batch["input_ids"].to(model.device), batch["labels"][:, 1:]
        first = int((labels != IGNORE).any(dim=0).nonzero()[0])  # logits before this position are not needed
        # no mask: padding is on the right, and causal attention does not look there
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits[:, first:].float()
        targets = labels[:, first:].to(logits.device)
        nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
        yield nll.double().sum(), _targets(batches[number])

    return [_targets(batch) for batch in batches], score


def _score_samples(
    model: PreTrainedModel,
    documents: Sequence[Any],
    overlap: int,
    windows_per_sample: int,
    batch_size: int,
    use_state: bool,
) -> tuple[list[int], Score]:
    """Score documents as training samples of several windows, each of which starts with an empty state. Returns what
    `_score_windows` does."""
    batches = _batches(documents, model.config.recurrence.window, overlap, windows_per_sample, batch_size)

    def score(number: int) -> Iterator[tuple[Tensor, int]]:
        batch = _collate(documents, batches[number])
        yield model(**batch, overlap=overlap, use_state=use_state).nll_sum, _targets(batches[number])

    return [_targets(batch) for batch in batches], score


def _score_documents(
    model: RecurrentPreTrainedModel, documents: Sequence[Any], overlap: int, batch_size: int, use_state: bool
) -> tuple[list[int], Score]:
    """Score whole documents, with a state that is carried from the first window to the last or without one. Returns
    what `_score_windows` does, for groups of documents."""
    lengths = [len(document) for document in documents]
    arguments: dict[str, Any] = {
        "stride": model.config.recurrence.window - overlap,
        "overlap": overlap,
        "batch_size": batch_size,
        "min_length": 2,
        "block_windows": model.block_size.windows(model, 1, use_state=use_state, logits=False),
        "scans": use_state and model.config.recurrence.scans,
    }
    groups = group_documents(lengths, **arguments)

    def score(number: int) -> Iterator[tuple[Tensor, int]]:
        group = groups[number]

        def read(piece: Piece, state: State | None) -> RecurrentOutput:
            # a later piece's first token is a target too: it is predicted from the state
            parts = zip(piece.documents, piece.spans, strict=True)
            samples = [make_sample(documents[group[i]], start, stop, max(start, 1)) for i, (start, stop) in parts]
            return model(**collate(samples), state=state, overlap=overlap, use_state=use_state)

        for piece, out in stream_documents(
            read, [lengths[i] for i in group], windows_per_call=WINDOWS_PER_CALL, **arguments
        ):
            assert out.nll_sum is not None, "labels were given"
            yield out.nll_sum, sum(stop - max(start, 1) for start, stop in piece.spans)

    return [sum(lengths[i] - 1 for i in group) for group in groups], score


def _batches(
    documents: Sequence[Any], window: int, overlap: int, windows_per_sample: int, batch_size: int
) -> list[list[Span]]:
    """Batches of training samples, in the order of the documents."""
    spans = [
        (i, *span)
        for i, document in enumerate(documents)
        for span in sample_spans(len(document), window, overlap, windows_per_sample)
    ]
    return [spans[start : start + batch_size] for start in range(0, len(spans), batch_size)]


def _collate(documents: Sequence[Any], batch: list[Span]) -> dict[str, Tensor]:
    return collate([make_sample(documents[i], *span) for i, *span in batch])


def _targets(batch: list[Span]) -> int:
    return sum(stop - score_from for _, _, stop, score_from in batch)


def _count(documents: Sequence[Any], name: str) -> int:
    return int(np.sum(getattr(documents, name, 0)))


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
