# SPDX-License-Identifier: Apache-2.0
"""From a question and a text of any length to answers: words, characters, probabilities."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging

from ..data.samples import by_length, pad
from ..data.tokenization import check_text, tokens_of
from ..models import argument_checks
from ..models.base import eval_mode
from ..models.question_answering import KINDS, RecurrentForQuestionAnswering
from ..utils.peft import unwrapped
from ..utils.progress import bar
from .dataset import Question
from .span_search import best_spans, characters

logger = logging.get_logger(__name__)
MAX_TOKENS = 30  # of an answer


@dataclass(frozen=True)
class Asked:
    """A question in a model's tokens.

    Attributes:
        question: as it was read.
        own, ids: the tokens of the question and of its document.
        offsets: the characters that each token of the document is, [N, 2].
    """

    question: Question
    own: np.ndarray
    ids: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True)
class Found:
    """An answer to a question.

    Attributes:
        text: a stretch of the document, "yes", "no", or "" for no answer.
        kind: "span", "yes", "no" or "none".
        probability: that this is the answer, and not another stretch or kind: the kind's, times what the stretch has of
            all that are not too long.
        start, end: the characters of the document it is, [start, end); None where it is no stretch of it.
    """

    text: str
    kind: str
    probability: float
    start: int | None = None
    end: int | None = None


def answer(
    model: RecurrentForQuestionAnswering,
    question: str,
    document: str,
    tokenizer: Any = None,
    *,
    top_k: int = 1,
    max_answer_tokens: int = MAX_TOKENS,
    allow_none: bool = False,
    overlap: int | None = None,
    use_state: bool | None = None,
) -> list[Found]:
    """The best answers to a question that a document of any length holds: those of the most probable kind first.

    Args:
        tokenizer: the model's, a fast one; by default the one saved with the model.
        top_k: how many answers.
        max_answer_tokens: the longest stretch that is an answer.
        allow_none: whether that there is no answer may be the answer.
        overlap: read at another overlap than the model was made for.
        use_state: False removes the state; by default as the model was trained.
    """
    model = unwrapped(model)
    if not isinstance(model, RecurrentForQuestionAnswering):
        raise ValueError(
            f"model is a {type(model).__name__}, which finds no answers: make one with add_recurrence(encoder, "
            'tokenizer=..., head="question-answering"), and train it.'
        )
    if tokenizer is None and not model.name_or_path:
        raise ValueError("tokenizer is missing: this model was not loaded from a folder that has one.")
    if tokenizer is None:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
        except (OSError, ValueError) as error:
            raise ValueError(f"tokenizer is missing, and {model.name_or_path} has none: give one.") from error
    asked = ask(model, [Question("", question, document, (), "span", "squad")], tokenizer, overlap=overlap)
    with bar(None, "reading", after=2) as report:
        done = 0

        def progress(tokens: int) -> None:
            nonlocal done
            done += tokens
            report(done, len(asked[0].ids))

        return answer_all(
            model, asked, top_k=top_k, max_answer_tokens=max_answer_tokens, allow_none=allow_none, overlap=overlap,
            use_state=use_state, progress=progress,
        )[0]  # fmt: skip


def ask(
    model: RecurrentForQuestionAnswering, questions: Sequence[Question], tokenizer: Any, *, overlap: int | None = None
) -> list[Asked]:
    """Questions as `answer_all` takes them. What the model cannot be asked is refused, by the question's id."""
    overlap = argument_checks.overlap(model.config, overlap)
    for question in questions:
        for name, text in zip(_names(question), (question.question, question.document), strict=True):
            check_text(name, text)
    own = tokens_of(tokenizer, [question.question for question in questions], offsets=False)
    texts = tokens_of(tokenizer, [question.document for question in questions], offsets=True)
    asked: list[Asked] = []
    with bar(None, "tokenising", after=2) as report:
        for question, (first, _), (ids, offsets) in zip(questions, own, texts, strict=True):
            asked.append(Asked(question, first, ids.astype(np.int32), offsets.astype(np.int32)))
            _check(model, asked[-1], overlap)
            report(len(asked), len(questions))
    return asked


def answer_all(
    model: RecurrentForQuestionAnswering,
    asked: Sequence[Asked],
    *,
    top_k: int = 1,
    max_answer_tokens: int = MAX_TOKENS,
    allow_none: bool = False,
    overlap: int | None = None,
    use_state: bool | None = None,
    batch_size: int = 8,
    progress: Callable[[int], object] = lambda tokens: None,
) -> list[list[Found]]:
    """The best answers to many questions, in their order; `progress` is told how many of the documents' tokens were
    just read."""
    for name, value in (("top_k", top_k), ("max_answer_tokens", max_answer_tokens)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    told_apart = model.tells_kinds
    if allow_none and not told_apart:
        logger.warning_once("The model was never trained to tell when there is no answer, and will always give one.")
    found: list[list[Found]] = [[] for _ in asked]
    for rows in by_length([len(one.ids) for one in asked], batch_size):
        texts = pad([torch.from_numpy(asked[i].ids).long() for i in rows])
        with eval_mode(model), torch.inference_mode():
            out = model(
                **{name: part.to(model.device) for name, part in texts.items()},
                question_ids=[asked[i].own.tolist() for i in rows], overlap=overlap, use_state=use_state,
                progress=progress,
            )  # fmt: skip
        kinds = out.kind_logits if told_apart else torch.tensor([[0.0, *[-torch.inf] * 3]]).expand(len(rows), -1)
        logits = [part.float().cpu() for part in (out.start_logits, out.end_logits, kinds)]
        for i, starts, ends, kinds in zip(rows, *logits, strict=True):
            length = len(asked[i].ids)
            found[i] = best(
                (starts[:length], ends[:length], kinds), asked[i].question.document, asked[i].offsets, top_k=top_k,
                max_answer_tokens=max_answer_tokens, allow_none=allow_none,
            )  # fmt: skip
    return found


def _check(model: RecurrentForQuestionAnswering, asked: Asked, overlap: int) -> None:
    """Refuse what cannot be asked; the question's id is named, if it has one."""
    recurrence = model.config.recurrence
    name, document = _names(asked.question)
    if not asked.question.document.strip() or not len(asked.ids):
        raise ValueError(f"{document} has no words: there is nothing to look for an answer in.")
    if not len(asked.own):
        raise ValueError(f"{name} is empty.")
    room = recurrence.window - sum(map(len, (recurrence.prefix, asked.own, recurrence.separator, recurrence.suffix)))
    needed = max(overlap + max(1, recurrence.seen), recurrence.slots + max(overlap - recurrence.overlap, 0))
    if room < needed:
        shared = f" at an overlap of {overlap}" if overlap else ""
        raise ValueError(
            f"{name} has {len(asked.own)} tokens: a window of {recurrence.window} has {max(room, 0)} left for the "
            f"document, and needs {needed}{shared}. Ask a shorter one, {'overlap less, ' * bool(overlap)}or use a "
            "model with larger windows."
        )


def _names(question: Question) -> tuple[str, str]:
    """What to call a question and its document."""
    name = f"question {question.id}"
    return (name, f"{name}: its document") if question.id else ("question", "document")


def best(
    logits: tuple[Tensor, Tensor, Tensor],
    document: str,
    offsets: np.ndarray,
    *,
    top_k: int = 1,
    max_answer_tokens: int = MAX_TOKENS,
    allow_none: bool = False,
) -> list[Found]:
    """Answers from a model's logits for one document: starts and ends [N], kinds [4].

    The most probable kind comes first, whatever is left to its single stretches.
    """
    starts, ends, kinds = logits
    kinds = kinds.clone()
    if not allow_none:
        kinds[KINDS.index("none")] = -torch.inf
    of_kind = dict(zip(KINDS, kinds.softmax(-1).tolist(), strict=True))
    found = [Found("" if kind == "none" else kind, kind, of_kind[kind]) for kind in KINDS[1:] if of_kind[kind] > 0]
    begins, stops = characters(document, offsets)
    for first, last, share in best_spans(starts, ends, (begins, stops), top_k, max_answer_tokens):
        begin, stop = int(begins[first]), int(stops[last])
        found.append(Found(document[begin:stop], "span", of_kind["span"] * share, begin, stop))
    return sorted(found, key=lambda one: (-of_kind[one.kind], -one.probability))[:top_k]
