# SPDX-License-Identifier: Apache-2.0
"""Long documents out of short ones: a question's own passage among passages of other questions."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from .questions import Answer, Question

_BETWEEN = "\n\n"


def join_passages(questions: Sequence[Question], words: int, *, seed: int = 0) -> list[Question]:
    """Each question on a document of about so many words: its own passage and others of the same list, in any order.

    No other passage is taken that has an accepted answer's text in it, in whatever case: that would be a second place
    to find it. Which are taken depends on the seed, the list and the question's id alone.

    Args:
        words: when a document has as many, no further passage is added.
    """
    texts = dict.fromkeys(question.document for question in questions)
    passages = {text: _Passage(text, text.casefold(), len(text.split())) for text in texts}
    return [_joined(question, passages, words, seed) for question in questions]


class _Passage(NamedTuple):
    text: str
    folded: str
    words: int


def _joined(question: Question, passages: dict[str, _Passage], words: int, seed: int) -> Question:
    draw, choice = random.Random(f"{seed} {question.id}"), list(passages.values())
    accepted = [answer.text.casefold() for answer in question.answers if answer.text]
    others, total, tried = [], passages[question.document].words, {question.document}
    while total < words and len(tried) < len(choice):
        other = choice[draw.randrange(len(choice))]
        if other.text not in tried:
            tried.add(other.text)
            if not any(text in other.folded for text in accepted):
                others.append(other.text)
                total += other.words
    place = draw.randrange(len(others) + 1)
    before = "".join(other + _BETWEEN for other in others[:place])
    document = _BETWEEN.join([*others[:place], question.document, *others[place:]])
    answers = tuple(
        answer if answer.start is None else Answer(answer.text, answer.start + len(before))
        for answer in question.answers
    )
    return replace(question, document=document, answers=answers)
