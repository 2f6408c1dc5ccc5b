# SPDX-License-Identifier: Apache-2.0
"""Exact match and F1 of answers, computed as by the official scripts of SQuAD and HotpotQA.

Both compare words without case, punctuation and articles. SQuAD takes the best of several accepted answers; an empty
answer is right for a question without an answer. SQuAD 1.1 is scored by the rule of 2.0, which differs only where an
accepted answer consists of articles and punctuation. HotpotQA has one accepted answer, and gives no credit for words
shared with "yes", "no" or "noanswer".
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

from .dataset import Question

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ALL_OR_NOTHING = ("yes", "no", "noanswer")


def normalise(text: str) -> str:
    """Lower-case a text, remove punctuation and articles, and put one space between words."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def score(answer: str, accepted: Sequence[str], format: str) -> tuple[float, float]:
    """Exact match and F1 of an answer, each from 0 to 1; `accepted` is empty if the question has no answer."""
    # SQuAD 2.0 ignores accepted answers that consist of articles and punctuation
    references = [reference for reference in accepted if normalise(reference)] or [""]
    pairs = [_score_pair(answer, reference, format) for reference in references]
    return max(exact for exact, _ in pairs), max(f1 for _, f1 in pairs)


def score_all(questions: Sequence[Question], answers: Sequence[str]) -> list[tuple[float, float]]:
    """Exact match and F1 of each answer."""
    return [
        score(answer, [accepted.text for accepted in question.answers], question.format)
        for question, answer in zip(questions, answers, strict=True)
    ]


def mean_percent(scores: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Mean exact match and mean F1, in percent."""
    exact, f1 = (100 * sum(pair[i] for pair in scores) / max(len(scores), 1) for i in (0, 1))
    return exact, f1


def _score_pair(answer: str, reference: str, format: str) -> tuple[float, float]:
    answer, reference = normalise(answer), normalise(reference)
    exact = float(answer == reference)
    if format == "hotpotqa" and not exact and (answer in _ALL_OR_NOTHING or reference in _ALL_OR_NOTHING):
        return exact, 0.0
    answer_words, reference_words = answer.split(), reference.split()
    if not answer_words or not reference_words:
        # SQuAD: an empty answer to an unanswerable question is right. HotpotQA has no such questions.
        return exact, exact if format == "squad" else 0.0
    shared = sum((Counter(answer_words) & Counter(reference_words)).values())
    return exact, 2 * shared / (len(answer_words) + len(reference_words))
