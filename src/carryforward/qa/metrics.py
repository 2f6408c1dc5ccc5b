# SPDX-License-Identifier: Apache-2.0
"""Exact match and F1 of answers, as SQuAD and HotpotQA count them.

Both compare words without case, punctuation and articles. SQuAD takes the best of several accepted answers, and for a
question without an answer an empty one is right; both versions are scored by the rule of 2.0, which differs where an
accepted answer is nothing but articles and punctuation. HotpotQA has one answer, and gives no credit for words shared
with "yes", "no" or "noanswer".
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

from .dataset import Question

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WHOLE = ("yes", "no", "noanswer")


def normalised(text: str) -> str:
    """Lower case, without punctuation and articles, one space between words."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def score(answer: str, accepted: Sequence[str], format: str) -> tuple[float, float]:
    """Exact match and F1 of an answer, each 0 to 1; `accepted` is empty if there is no answer to be found."""
    # one that is nothing but articles and punctuation is no answer (SQuAD 2.0)
    pairs = [_pair(answer, other, format) for other in filter(normalised, accepted)] or [_pair(answer, "", format)]
    return max(exact for exact, _ in pairs), max(shared for _, shared in pairs)


def score_all(questions: Sequence[Question], answers: Sequence[str]) -> list[tuple[float, float]]:
    """Exact match and F1 of each answer."""
    return [
        score(answer, [accepted.text for accepted in question.answers], question.format)
        for question, answer in zip(questions, answers, strict=True)
    ]


def percent(scores: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Mean exact match and F1, in percent."""
    exact, f1 = (100 * sum(pair[i] for pair in scores) / max(len(scores), 1) for i in (0, 1))
    return exact, f1


def _pair(answer: str, accepted: str, format: str) -> tuple[float, float]:
    given, wanted = normalised(answer), normalised(accepted)
    exact = float(given == wanted)
    if format == "hotpotqa" and given != wanted and (given in _WHOLE or wanted in _WHOLE):
        return exact, 0.0
    ours, theirs = given.split(), wanted.split()
    if not ours or not theirs:
        # SQuAD: nothing against nothing is right; HotpotQA has no such question, and shared words there are none
        return exact, exact if format == "squad" else 0.0
    shared = sum((Counter(ours) & Counter(theirs)).values())
    return exact, 2 * shared / (len(ours) + len(theirs))
