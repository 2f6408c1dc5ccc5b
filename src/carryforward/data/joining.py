# SPDX-License-Identifier: Apache-2.0
"""Long documents out of short ones: a question's own passage among passages of other questions."""

import random
from collections.abc import Sequence
from dataclasses import replace

from .questions import Answer, Question

_BETWEEN = "\n\n"


def join_passages(questions: Sequence[Question], words: int, *, seed: int = 0) -> list[Question]:
    """Each question on a document of about so many words: its own passage and others of the same list, in any order.

    No other passage is taken that has an accepted answer's text in it: that would be a second place to find it. Which
    are taken depends on the seed, the list and the question's id alone.

    Args:
        words: when a document has as many, no further passage is added.
    """
    passages = list(dict.fromkeys(question.document for question in questions))
    lengths = {passage: len(passage.split()) for passage in passages}
    return [_joined(question, passages, lengths, words, seed) for question in questions]


def _joined(question: Question, passages: list[str], lengths: dict[str, int], words: int, seed: int) -> Question:
    draw = random.Random(f"{seed} {question.id}")
    others, total, tried = [], lengths[question.document], {question.document}
    while total < words and len(tried) < len(passages):
        other = passages[draw.randrange(len(passages))]
        if other not in tried:
            tried.add(other)
            if not any(answer.text and answer.text in other for answer in question.answers):
                others.append(other)
                total += lengths[other]
    place = draw.randrange(len(others) + 1)
    before = "".join(other + _BETWEEN for other in others[:place])
    document = _BETWEEN.join([*others[:place], question.document, *others[place:]])
    answers = tuple(
        answer if answer.start is None else Answer(answer.text, answer.start + len(before))
        for answer in question.answers
    )
    return replace(question, document=document, answers=answers)
