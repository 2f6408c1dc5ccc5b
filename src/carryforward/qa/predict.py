# SPDX-License-Identifier: Apache-2.0
"""Answer questions about documents of any length: text, characters and probability of each answer."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging

from ..backbones.modes import eval_mode
from ..data.samples import batch_by_length, pad
from ..data.tokenization import check_text, check_tokenizer, tokenise_texts
from ..distributed.work_map import WorkMap
from ..models import argument_checks
from ..models.model_files import load_tokenizer
from ..models.question_answering import ANSWER_KINDS, RecurrentForQuestionAnswering
from ..utils.checks import check_count, check_flag
from ..utils.peft import get_recurrent_model
from ..utils.progress import ProgressBar
from .dataset import Question
from .span_search import best_spans, trim_offsets

logger = logging.get_logger(__name__)
MAX_TOKENS = 30  # of an answer


@dataclass(frozen=True)
class TokenisedQuestion:
    """A question and its document as token ids.

    Attributes:
        question: the texts.
        question_ids, document_ids: their tokens, without special tokens.
        offsets: the characters [start, end) of each document token, [N, 2].
    """

    question: Question
    question_ids: np.ndarray
    document_ids: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True)
class PredictedAnswer:
    """A predicted answer.

    Attributes:
        text: a span of the document, "yes", "no", or "" for no answer.
        kind: "span", "yes", "no" or "none".
        probability: probability of the kind; for a span, times its share of all spans of at most `max_answer_tokens`.
        start, end: the characters [start, end) of the span in the document; None for other kinds.
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
) -> list[PredictedAnswer]:
    """Find the best answers to a question in a document of any length, those of the most probable kind first.

    Args:
        tokenizer: the model's fast tokenizer; by default the one saved with the model.
        top_k: number of answers.
        max_answer_tokens: length of the longest span that can be an answer.
        allow_none: whether "no answer" can be predicted.
        overlap: an overlap other than the model's own.
        use_state: False removes the state; by default as the model was trained.
    """
    model = get_recurrent_model(model)
    if not isinstance(model, RecurrentForQuestionAnswering):
        raise ValueError(
            f"model is a {type(model).__name__}, which does not answer questions: create one with "
            'add_recurrence(encoder, tokenizer=..., head="question-answering"), and train it.'
        )
    tokenizer = _saved_tokenizer(model) if tokenizer is None else tokenizer
    (tokenised,) = tokenise_questions(
        model, [Question("", question, document, (), "span", "squad")], tokenizer, overlap=overlap
    )
    with ProgressBar("reading", len(tokenised.document_ids), "tokens", library=True) as bar:
        return answer_all(
            model, [tokenised], top_k=top_k, max_answer_tokens=max_answer_tokens, allow_none=allow_none,
            overlap=overlap, use_state=use_state, progress=bar.advance,
        )[0]  # fmt: skip


def _saved_tokenizer(model: RecurrentForQuestionAnswering) -> Any:
    if model.tokenizer is not None:
        return model.tokenizer
    if not model.name_or_path:
        raise ValueError("tokenizer is missing, and the model was not loaded from a folder that has one: give one.")
    try:
        return load_tokenizer(model.name_or_path, model.config)
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer is missing, and {model.name_or_path} has none: give one. ({error})") from error


def tokenise_questions(
    model: RecurrentForQuestionAnswering, questions: Sequence[Question], tokenizer: Any, *, overlap: int | None = None
) -> list[TokenisedQuestion]:
    """Tokenise questions for `answer_all`; refuse those that do not fit into the model's windows, naming their id."""
    overlap = argument_checks.check_overlap(model.config, overlap)
    check_tokenizer(tokenizer, model.config.vocab_size)
    return [_check_fits(model, tokenised, overlap) for tokenised in tokenise_pairs(questions, tokenizer)]


def tokenise_pairs(questions: Sequence[Question], tokenizer: Any) -> Iterator[TokenisedQuestion]:
    """Tokenise questions and their documents. Refuses those without words, naming their id."""
    for question in questions:
        for name, text in zip(_names(question), (question.question, question.document), strict=True):
            check_text(name, text)
    question_tokens = tokenise_texts(tokenizer, [question.question for question in questions], offsets=False)
    document_tokens = tokenise_texts(tokenizer, [question.document for question in questions], offsets=True)
    with ProgressBar("tokenising", len(questions), "questions", library=True) as bar:
        for question, (question_ids, _), (ids, offsets) in zip(
            questions, question_tokens, document_tokens, strict=True
        ):
            tokenised = TokenisedQuestion(question, question_ids, ids.astype(np.int32), offsets.astype(np.int32))
            _check_not_empty(tokenised)
            yield tokenised
            bar.advance(1)


def answer_all(
    model: RecurrentForQuestionAnswering,
    questions: Sequence[TokenisedQuestion],
    *,
    top_k: int = 1,
    max_answer_tokens: int = MAX_TOKENS,
    allow_none: bool = False,
    overlap: int | None = None,
    use_state: bool | None = None,
    batch_size: int = 8,
    progress: Callable[[int], object] = lambda tokens: None,
    work_map: WorkMap | None = None,
) -> list[list[PredictedAnswer]]:
    """Find the best answers to many questions, in their order.

    Arguments are those of `answer`; `progress` is called with the number of document tokens just read, and `work_map`
    divides the batches among the processes of a command, which must all make this call.
    """
    check_count("top_k", top_k)
    check_count("max_answer_tokens", max_answer_tokens)
    check_flag("allow_none", allow_none)
    check_flag("use_state", use_state, optional=True)
    predicts_kinds = model.predicts_kinds
    if allow_none and not predicts_kinds:
        logger.warning_once("The model was not trained to predict that there is no answer, and will always give one.")
    lengths = [len(question.document_ids) for question in questions]
    batches = batch_by_length(lengths, batch_size)

    def work(number: int) -> list[list[PredictedAnswer]]:
        rows = batches[number]
        documents = pad([torch.from_numpy(questions[i].document_ids).long() for i in rows])
        with eval_mode(model), torch.inference_mode():
            out = model(
                **documents,
                question_ids=[questions[i].question_ids.tolist() for i in rows], overlap=overlap,
                use_state=use_state, progress=progress,
            )  # fmt: skip
        kinds = out.kind_logits if predicts_kinds else torch.tensor([[0.0, *[-torch.inf] * 3]]).expand(len(rows), -1)
        logits = [tensor.float().cpu() for tensor in (out.start_logits, out.end_logits, kinds)]
        return [
            best_answers(
                (starts[: lengths[i]], ends[: lengths[i]], kinds), questions[i].question.document, questions[i].offsets,
                top_k=top_k, max_answer_tokens=max_answer_tokens, allow_none=allow_none,
            )
            for i, starts, ends, kinds in zip(rows, *logits, strict=True)
        ]  # fmt: skip

    sizes = [sum(lengths[i] for i in rows) for rows in batches]
    done = (work_map or WorkMap())(sizes, work, finish=_as_json, progress=progress)
    answers: list[list[PredictedAnswer]] = [[] for _ in questions]
    for i, candidates in zip(chain(*batches), chain(*done), strict=True):
        answers[i] = [PredictedAnswer(*fields) for fields in candidates]
    return answers


def _as_json(answers: list[list[PredictedAnswer]]) -> list[list[list[Any]]]:
    return [[list(dataclasses.astuple(one)) for one in candidates] for candidates in answers]


def _check_not_empty(tokenised: TokenisedQuestion) -> None:
    name, document = _names(tokenised.question)
    if not tokenised.question.document.strip() or not len(tokenised.document_ids):
        raise ValueError(f"{document} has no words: there is no text to find an answer in.")
    if not len(tokenised.question_ids):
        raise ValueError(f"{name} is empty.")


def _check_fits(model: RecurrentForQuestionAnswering, tokenised: TokenisedQuestion, overlap: int) -> TokenisedQuestion:
    """Refuse questions that leave too little of a window for the document."""
    recurrence = model.config.recurrence
    name, _ = _names(tokenised.question)
    question_ids = tokenised.question_ids
    room = recurrence.window - sum(map(len, (recurrence.prefix, question_ids, recurrence.separator, recurrence.suffix)))
    needed = recurrence.min_capacity(overlap)
    if room < needed:
        at_overlap = f" at an overlap of {overlap}" if overlap else ""
        raise ValueError(
            f"{name} has {len(question_ids)} tokens: a window of {recurrence.window} has {max(room, 0)} left for the "
            f"document, and needs {needed}{at_overlap}. Use a shorter question, "
            f"{'a smaller overlap, ' * bool(overlap)}or a model that has larger windows or carries less."
        )
    return tokenised


def _names(question: Question) -> tuple[str, str]:
    """Names of a question and of its document in error messages."""
    name = f"question {question.id}"
    return (name, f"{name}: its document") if question.id else ("question", "document")


def best_answers(
    logits: tuple[Tensor, Tensor, Tensor],
    document: str,
    offsets: np.ndarray,
    *,
    top_k: int = 1,
    max_answer_tokens: int = MAX_TOKENS,
    allow_none: bool = False,
) -> list[PredictedAnswer]:
    """Decode a model's logits for one document: starts and ends [N], kinds [4].

    Answers are sorted by the probability of their kind first, so that a probable kind "span" comes first even if its
    probability is spread over many spans.
    """
    starts, ends, kinds = logits
    kinds = kinds.clone()
    if not allow_none:
        kinds[ANSWER_KINDS.index("none")] = -torch.inf
    kind_probability = dict(zip(ANSWER_KINDS, kinds.softmax(-1).tolist(), strict=True))
    answers = [
        PredictedAnswer("" if kind == "none" else kind, kind, kind_probability[kind])
        for kind in ANSWER_KINDS[1:]
        if kind_probability[kind] > 0
    ]
    trimmed = trim_offsets(document, offsets)
    for first, last, share in best_spans(starts, ends, trimmed, top_k, max_answer_tokens):
        start, end = int(trimmed[0][first]), int(trimmed[1][last])
        answers.append(PredictedAnswer(document[start:end], "span", kind_probability["span"] * share, start, end))
    return sorted(answers, key=lambda one: (-kind_probability[one.kind], -one.probability))[:top_k]
