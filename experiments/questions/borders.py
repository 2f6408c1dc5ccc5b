# SPDX-License-Identifier: Apache-2.0
"""Where windows cut what a question is about: its passage in a joined document, or the sentences that bear an answer.

That bounds what a state can bring: where a window has all of it, nothing is to be carried. A letter for each question,
in the order of its file.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from carryforward.adding import pair_tokens
from carryforward.data.encoding import tokens_of
from carryforward.data.questions import Question, read_json, read_questions
from carryforward.loading import load_tokenizer
from carryforward.provenance import provenance
from carryforward.windows import encoder_schedule

WINDOWS = (256, 512)
PASSAGE = {
    "w": "whole in one window",
    "b": "cut before the answer",
    "a": "cut behind the answer",
    "2": "cut on both sides of it",
    "c": "cut within the answer",
}
SUPPORT = {"o": "all in one window", "s": "in several windows"}
Stretch = tuple[int, int]  # characters of a document, [from, to)


def find(encoder: Path, files: dict[str, Path], squad: Sequence[Path]) -> dict[str, Any]:
    """For SQuADShifts and HotpotQA, by window, what disjoint windows make of each question."""
    tokenizer = load_tokenizer(str(encoder))
    asked = {text: read_questions(files[text]) for text in ("squadshifts", "hotpotqa")}
    stretches = {
        "squadshifts": _passages(asked["squadshifts"], squad),
        "hotpotqa": _supporting(asked["hotpotqa"], files["hotpotqa"]),
    }
    found: dict[str, Any] = {**provenance("cpu"), "model": Path(encoder).name}
    for text, questions in asked.items():
        found[text] = {str(window): "".join(_letters(questions, stretches[text], window, tokenizer))
                       for window in WINDOWS}  # fmt: skip
    return found


def _passages(questions: Sequence[Question], files: Sequence[Path]) -> list[list[Stretch]]:
    """Each question's own passage in its joined document."""
    alone = {question.id: question.document for path in files for question in read_questions(path)}
    found = []
    for question in questions:
        begin = question.document.index(alone[question.id])
        found.append([(begin, begin + len(alone[question.id]))])
    return found


def _supporting(questions: Sequence[Question], path: Path) -> list[list[Stretch]]:
    """The sentences that support each answer; none where the file does not say which."""
    rows = {row["_id"]: row for row in read_json(path)}
    found: list[list[Stretch]] = []
    for question in questions:
        row, found_here = rows[question.id], []
        sentences = dict(row["context"])
        for title, number in row["supporting_facts"]:
            if isinstance(sentences.get(title), list) and number < len(sentences[title]):
                begin = question.document.index("".join(sentences[title])) + len("".join(sentences[title][:number]))
                found_here.append((begin, begin + len(sentences[title][number])))
        found.append(found_here)
    return found


def _letters(
    questions: Sequence[Question], stretches: Sequence[Sequence[Stretch]], window: int, tokenizer: Any
) -> Iterator[str]:
    prefix, separator, suffix = map(len, pair_tokens(tokenizer))
    own = tokens_of(tokenizer, [question.question for question in questions], offsets=False)
    texts = tokens_of(tokenizer, [question.document for question in questions], offsets=True)
    for question, some, (asked, _), (ids, offsets) in zip(questions, stretches, own, texts, strict=True):
        before = prefix + len(asked) + separator
        windows = [(one.start, one.end) for one in encoder_schedule(len(ids), window, prefix=before, suffix=suffix)]
        places = [_tokens(offsets, stretch) for stretch in some]
        if question.format == "squad":
            assert question.place is not None
            yield _cut(places[0], _tokens(offsets, question.place), [start for start, _ in windows[1:]])
        elif not places:
            yield "?"
        else:
            first, last = min(place[0] for place in places), max(place[1] for place in places)
            yield "o" if any(start <= first and last < end for start, end in windows) else "s"


def _tokens(offsets: np.ndarray, stretch: Stretch) -> tuple[int, int]:
    """The first and the last token of a stretch of characters."""
    inside = np.flatnonzero((offsets[:, 0] < stretch[1]) & (offsets[:, 1] > stretch[0]))
    return int(inside[0]), int(inside[-1])


def _cut(passage: tuple[int, int], answer: tuple[int, int], borders: Sequence[int]) -> str:
    inside = [border for border in borders if passage[0] < border <= passage[1]]
    if any(answer[0] < border <= answer[1] for border in inside):
        return "c"
    before, behind = any(border <= answer[0] for border in inside), any(border > answer[1] for border in inside)
    return "2" if before and behind else "b" if before else "a" if behind else "w"
