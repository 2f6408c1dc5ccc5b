# SPDX-License-Identifier: Apache-2.0
"""From a question and a text of any length to answers: words, characters, probabilities."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .data.questions import Question
from .modeling import evaluating
from .question_answering import KINDS, RecurrentForQuestionAnswering

MAX_TOKENS = 30  # of an answer


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
    use_state: bool = True,
) -> list[Found]:
    """The best answers to a question that a document of any length holds, the most probable first.

    Args:
        tokenizer: the model's, a fast one; by default the one saved with the model.
        top_k: how many answers.
        max_answer_tokens: the longest stretch that is an answer.
        allow_none: whether that there is no answer may be the answer.
        overlap: read at another overlap than the model was made for.
        use_state: False removes the state.
    """
    if not isinstance(model, RecurrentForQuestionAnswering):
        raise ValueError(
            f"model is a {type(model).__name__}, which finds no answers: make one with add_recurrence(encoder, "
            'tokenizer=..., head="question-answering"), and train it.'
        )
    if tokenizer is None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    asked = Question("", question, document, (), "span", "squad")
    return answer_all(
        model, [asked], tokenizer, top_k=top_k, max_answer_tokens=max_answer_tokens, allow_none=allow_none,
        overlap=overlap, use_state=use_state,
    )[0]  # fmt: skip


def answer_all(
    model: RecurrentForQuestionAnswering,
    questions: Sequence[Question],
    tokenizer: Any,
    *,
    top_k: int = 1,
    max_answer_tokens: int = MAX_TOKENS,
    allow_none: bool = False,
    overlap: int | None = None,
    use_state: bool = True,
    batch_size: int = 8,
    progress: Callable[[int], object] = lambda questions: None,
) -> list[list[Found]]:
    """The best answers to many questions, in their order; `progress` is told how many were just answered."""
    asked = [tokens(tokenizer, question.question)[0] for question in questions]
    for question, own in zip(questions, asked, strict=True):
        check(model, question, own)
    found: list[list[Found]] = [[] for _ in questions]
    order = sorted(range(len(questions)), key=lambda i: -len(questions[i].document))
    for begin in range(0, len(order), batch_size):
        rows = order[begin : begin + batch_size]
        texts = [tokens(tokenizer, questions[i].document) for i in rows]
        ids, mask = (part.to(model.device) for part in padded([own for own, _ in texts]))
        with evaluating(model), torch.inference_mode():
            out = model(
                ids, attention_mask=mask, question_ids=[asked[i] for i in rows], overlap=overlap,
                use_state=use_state,
            )  # fmt: skip
        for row, i in enumerate(rows):
            length = len(texts[row][0])
            logits = out.start_logits[row, :length], out.end_logits[row, :length], out.kind_logits[row]
            found[i] = best(
                logits, questions[i].document, texts[row][1], top_k=top_k, max_answer_tokens=max_answer_tokens,
                allow_none=allow_none,
            )  # fmt: skip
        progress(len(rows))
    return found


def check(model: RecurrentForQuestionAnswering, question: Question, ids: Sequence[int]) -> None:
    """Refuse what cannot be asked; the question's id is named, if it has one."""
    name, recurrence = f"question {question.id}" if question.id else "question", model.config.recurrence
    if not question.document.strip():
        where = f"{name}: its document" if question.id else "document"
        raise ValueError(f"{where} is empty: there is nothing to look for an answer in.")
    if not ids:
        raise ValueError(f"{name} is empty.")
    room = recurrence.window - sum(map(len, (recurrence.prefix, ids, recurrence.separator, recurrence.suffix)))
    needed = recurrence.overlap + max(1, recurrence.slots, recurrence.seen)
    if room < needed:
        raise ValueError(
            f"{name} has {len(ids)} tokens: a window of {recurrence.window} has {max(room, 0)} left for the document, "
            f"and needs {needed}. Ask a shorter one, or use a larger window."
        )


def tokens(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """A text's tokens without special ones, and the characters each stands for."""
    if not tokenizer.is_fast:
        raise ValueError(f"answers need offsets, which {type(tokenizer).__name__} cannot give: use a fast tokenizer.")
    made = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False, return_offsets_mapping=True)
    return made["input_ids"], made["offset_mapping"]


def padded(rows: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Rows of token ids as one tensor, filled up on the right, and the mask of what is real."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for row, own in zip(ids, rows, strict=True):
        row[: len(own)] = torch.as_tensor(own)
    return ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()


def best(
    logits: tuple[Tensor, Tensor, Tensor],
    document: str,
    offsets: Sequence[tuple[int, int]],
    *,
    top_k: int = 1,
    max_answer_tokens: int = MAX_TOKENS,
    allow_none: bool = False,
) -> list[Found]:
    """Answers from a model's logits for one document: starts and ends [N], kinds [4].

    The most probable kind comes first, whatever is left to its single stretches.
    """
    starts, ends = (scores.float().log_softmax(-1).cpu() for scores in logits[:2])
    kinds = logits[2].float().cpu()
    if not allow_none:
        kinds = kinds.clone()
        kinds[KINDS.index("none")] = -torch.inf
    of_kind = dict(zip(KINDS, kinds.softmax(-1).tolist(), strict=True))
    found = [Found("" if kind == "none" else kind, kind, of_kind[kind]) for kind in KINDS[1:] if of_kind[kind] > 0]
    for start, end, score in _spans(starts, ends, top_k, max_answer_tokens):
        begin, stop = offsets[start][0], offsets[end][1]
        text = document[begin:stop]
        begin += len(text) - len(text.lstrip())  # byte-level tokens bring the space before them along
        text = text.strip()
        found.append(Found(text, "span", of_kind["span"] * score, begin, begin + len(text)))
    return sorted(found, key=lambda one: (-of_kind[one.kind], -one.probability))[:top_k]


def _spans(starts: Tensor, ends: Tensor, count: int, longest: int) -> list[tuple[int, int, float]]:
    """The most probable stretches of tokens, [first, last], of at most so many; their share of all such ones."""
    upto = ends.double().exp().cumsum(0)
    last = (torch.arange(len(ends)) + longest - 1).clamp(max=len(ends) - 1)
    total = (starts.double().exp() * (upto[last] - upto + ends.double().exp())).sum().clamp(min=1e-300).log()
    found: list[tuple[float, int, int]] = []
    for length in range(min(longest, len(starts))):
        scores = starts[: len(starts) - length] + ends[length:]
        values, places = scores.topk(min(count, len(scores)))
        found += [(value, place, place + length) for value, place in zip(values.tolist(), places.tolist(), strict=True)]
    found.sort(key=lambda one: (-one[0], one[1], one[2]))
    return [(start, end, min(math.exp(score - float(total)), 1.0)) for score, start, end in found[:count]]
