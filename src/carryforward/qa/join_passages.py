# SPDX-License-Identifier: Apache-2.0
"""Build long documents from short passages: each question's own passage among passages of other questions.

Split training and test questions before joining: the documents of one list share passages.
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
_SEPARATOR = "\n\n"


def join_passages(questions: Sequence[Question], words: int, *, seed: int = 0, name: str = "") -> list[Question]:
    """Give each question a document of about `words` words: its own passage and random others of the same list.

    A passage that contains an accepted answer (ignoring case) is not added, because it would be a second place to find
    the answer. Yes and no are exempt. The choice depends only on the seed, the list and the question's id.

    Args:
        words: passages are added until a document has at least as many words.
        name: the source of the questions, for log messages.
    """
    texts = dict.fromkeys(question.document for question in questions)
    passages = [_Passage(text, text.casefold(), len(text.split())) for text in texts]
    joined = [_join(question, passages, words, seed) for question in questions]
    short = sum(len(question.document.split()) < words for question in joined)
    if short:
        logger.warning(
            "%s%s shorter than %s words: too few passages do not contain the answer",
            f"{name}: " * bool(name), f"{short:,} document{' is' if short == 1 else 's are'}", f"{words:,}",
        )  # fmt: skip
    return joined


def join_files(
    files: Sequence[Path], words: int, *, set_aside: Sequence[int] = (), seed: int = 0
) -> list[list[Question]]:
    """Join the questions of several files, each with passages of its own file.

    Args:
        set_aside: sizes of held-out sets. Each set gets whole passages at random until it has at least that many
            questions. No passage is in two sets.

    Returns:
        The remaining questions, followed by one list for each held-out set.
    """
    questions_by_file = [read_questions(path) for path in files]
    for path, questions in zip(files, questions_by_file, strict=True):
        if any(question.format != "squad" for question in questions):
            raise ValueError(
                f"{path} is not in SQuAD format. Give SQuAD files: HotpotQA documents are long already, and have yes "
                "and no answers."
            )
    all_questions = [question for questions in questions_by_file for question in questions]
    held_out = _draw_held_out(all_questions, set_aside, seed)
    sets: list[list[Question]] = [[] for _ in (None, *set_aside)]
    for path, questions in zip(files, questions_by_file, strict=True):
        for number, members in enumerate(sets):
            own = [question for question in questions if held_out.get(question.document, 0) == number]
            members += join_passages(own, words, seed=seed, name=path.name)
    return sets


def _draw_held_out(questions: Sequence[Question], counts: Sequence[int], seed: int) -> dict[str, int]:
    """Draw passages at random for each held-out set; map each passage to the number of its set, from 1."""
    questions_per_passage = Counter(question.document for question in questions)
    passages = iter(random.Random(seed).sample(list(questions_per_passage), len(questions_per_passage)))
    held_out: dict[str, int] = {}
    for number, count in enumerate(counts, start=1):
        for passage in passages:
            held_out[passage] = number
            count -= questions_per_passage[passage]
            if count <= 0:
                break
    if len(held_out) == len(questions_per_passage):
        raise ValueError(
            f"{len(questions):,} questions on {len(questions_per_passage):,} passages are too few to set "
            f"{sum(counts):,} aside and train on the rest. Set fewer aside (--test-questions, --validation-questions)."
        )
    return held_out


class _Passage(NamedTuple):
    text: str
    folded: str
    words: int


def _join(question: Question, passages: list[_Passage], words: int, seed: int) -> Question:
    rng = random.Random(f"{seed} {question.id}")
    answers = question.answers if question.kind == "span" else ()
    accepted = [answer.text.casefold() for answer in answers if answer.text]
    others, total, tried = [], len(question.document.split()), {question.document}
    while total < words and len(tried) < len(passages):
        passage = passages[rng.randrange(len(passages))]
        if passage.text not in tried:
            tried.add(passage.text)
            if not any(text in passage.folded for text in accepted):
                others.append(passage.text)
                total += passage.words
    index = rng.randrange(len(others) + 1)
    shift = sum(len(text) + len(_SEPARATOR) for text in others[:index])
    document = _SEPARATOR.join([*others[:index], question.document, *others[index:]])
    shifted = tuple(
        answer if answer.start is None else Answer(answer.text, answer.start + shift) for answer in question.answers
    )
    return replace(question, document=document, answers=shifted)
