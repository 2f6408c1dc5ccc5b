# SPDX-License-Identifier: Apache-2.0
"""Long documents out of short ones: a question's own passage among passages of other questions.

What is trained on and what is tested on must be parted before: passages are shared by the documents of one list.
"""

import logging
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from .dataset import Answer, Question, read_questions

logger = logging.getLogger(__name__)
_BETWEEN = "\n\n"


def join_passages(questions: Sequence[Question], words: int, *, seed: int = 0, name: str = "") -> list[Question]:
    """Each question on a document of about so many words: its own passage and others of the same list, in any order.

    No other passage is taken that has an accepted answer's text in it, in whatever case: that would be a second place
    to find it, unless it is yes or no. Which are taken depends on the seed, the list and the question's id alone.

    Args:
        words: when a document has as many, no further passage is added.
        name: where the questions come from, for messages.
    """
    texts = dict.fromkeys(question.document for question in questions)
    passages = [_Passage(text, text.casefold(), len(text.split())) for text in texts]
    joined = [_joined(question, passages, words, seed) for question in questions]
    short = sum(len(question.document.split()) < words for question in joined)
    if short:
        logger.warning(
            "%s%s shorter than %s words: too few passages are without the answer",
            f"{name}: " * bool(name), f"{short:,} document{' is' if short == 1 else 's are'}", f"{words:,}",
        )  # fmt: skip
    return joined


def join_files(
    files: Sequence[Path], words: int, *, set_aside: Sequence[int] = (), seed: int = 0
) -> list[list[Question]]:
    """The questions of files, joined each with passages of its own file; and, for each number in `set_aside`, at least
    so many that were taken away before, none of whose passages is among those of any other."""
    lists = [read_questions(path) for path in files]
    for path, questions in zip(files, lists, strict=True):
        if any(question.format != "squad" for question in questions):
            raise ValueError(f"{path} is not SQuAD's: HotpotQA's documents are long already, and have yes and no.")
    drawn = _draw([question for questions in lists for question in questions], set_aside, seed)
    sides: list[list[Question]] = [[] for _ in (None, *set_aside)]
    for path, questions in zip(files, lists, strict=True):
        for number, side in enumerate(sides):
            own = [question for question in questions if drawn.get(question.document, 0) == number]
            side += join_passages(own, words, seed=seed, name=path.name)
    return sides


def _draw(questions: Sequence[Question], counts: Sequence[int], seed: int) -> dict[str, int]:
    """Passages at random, for each count until they have so many questions; and which of the counts it was, from 1."""
    asked = Counter(question.document for question in questions)
    passages = iter(random.Random(seed).sample(list(asked), len(asked)))
    drawn: dict[str, int] = {}
    for number, count in enumerate(counts, start=1):
        for passage in passages:
            drawn[passage] = number
            count -= asked[passage]
            if count <= 0:
                break
    if len(drawn) == len(asked):  # nothing is left to train on
        raise ValueError(
            f"{len(questions):,} questions on {len(asked):,} passages are too few to set {sum(counts):,} aside and "
            "train on the rest. Set fewer aside (--test-questions, --validation-questions)."
        )
    return drawn


class _Passage(NamedTuple):
    text: str
    folded: str
    words: int


def _joined(question: Question, passages: list[_Passage], words: int, seed: int) -> Question:
    draw = random.Random(f"{seed} {question.id}")
    found = question.answers if question.kind == "span" else ()
    accepted = [answer.text.casefold() for answer in found if answer.text]
    others, total, tried = [], len(question.document.split()), {question.document}
    while total < words and len(tried) < len(passages):
        other = passages[draw.randrange(len(passages))]
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
