# SPDX-License-Identifier: Apache-2.0
"""From a question and a text of any length to answers: words, characters, probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .modeling import evaluating
from .question_answering import KINDS, RecurrentForQuestionAnswering

MAX_TOKENS = 30  # of an answer


@dataclass(frozen=True)
class Found:
    """An answer to a question.

    Attributes:
        text: a stretch of the document, "yes", "no", or "" for no answer.
        kind: "span", "yes", "no" or "none".
        probability: that this is the answer, and not another stretch or kind.
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
    asked, text = tokens(tokenizer, question), tokens(tokenizer, document)
    if not text[0]:
        raise ValueError("document is empty: there is nothing to look for an answer in.")
    if not asked[0]:
        raise ValueError("question is empty.")
    with evaluating(model), torch.inference_mode():
        out = model(
            torch.tensor([text[0]], device=model.device), question_ids=[asked[0]], overlap=overlap, use_state=use_state
        )
    return best(
        (out.start_logits[0], out.end_logits[0], out.kind_logits[0]), document, text[1], top_k=top_k,
        max_answer_tokens=max_answer_tokens, allow_none=allow_none,
    )  # fmt: skip


def tokens(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """A text's tokens without special ones, and the characters each stands for."""
    if not tokenizer.is_fast:
        raise ValueError(f"answers need offsets, which {type(tokenizer).__name__} cannot give: use a fast tokenizer.")
    made = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False, return_offsets_mapping=True)
    return made["input_ids"], made["offset_mapping"]


def best(
    logits: tuple[Tensor, Tensor, Tensor],
    document: str,
    offsets: Sequence[tuple[int, int]],
    *,
    top_k: int = 1,
    max_answer_tokens: int = MAX_TOKENS,
    allow_none: bool = False,
) -> list[Found]:
    """Answers from a model's logits for one document: starts and ends [N], kinds [4]."""
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
    return sorted(found, key=lambda one: -one.probability)[:top_k]


def _spans(starts: Tensor, ends: Tensor, count: int, longest: int) -> list[tuple[int, int, float]]:
    """The most probable stretches of tokens, [first, last], of at most so many."""
    found: list[tuple[float, int, int]] = []
    for length in range(min(longest, len(starts))):
        scores = starts[: len(starts) - length] + ends[length:]
        values, places = scores.topk(min(count, len(scores)))
        found += [(value, place, place + length) for value, place in zip(values.tolist(), places.tolist(), strict=True)]
    found.sort(key=lambda one: (-one[0], one[1], one[2]))
    return [(start, end, float(torch.tensor(score).exp())) for score, start, end in found[:count]]
