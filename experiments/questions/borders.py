# SPDX-License-Identifier: Apache-2.0
"""Where windows cut what a question is about: its passage in a joined document, or the sentences that bear an answer.

That bounds what a state can bring: where a window has all of it, nothing is to be carried. A letter for each question,
in the order of its file. And how many windows a question takes, which is what an overlap costs.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cells import CELLS, TEXTS, TRIED, windows_of

from carryforward.data.tokenization import tokens_of, tokens_within
from carryforward.models.add_recurrence import pair_tokens
from carryforward.models.loading import load_tokenizer
from carryforward.qa.dataset import Question, read_json, read_questions
from carryforward.utils.provenance import provenance
from carryforward.windows import Window, encoder_schedule

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


class Read(NamedTuple):
    """A question's document in tokens, the characters each is, and how many stand before it in a window."""

    ids: np.ndarray
    offsets: np.ndarray
    before: int


def find(encoder: Path, files: dict[str, Path], squad: Sequence[Path]) -> dict[str, Any]:
    """By text and window, what disjoint windows make of each question, and how many windows one takes on average."""
    tokenizer = load_tokenizer(str(encoder))
    asked = {text: read_questions(files[text]) for text in TEXTS}
    stretches = {
        "squadshifts": _passages(asked["squadshifts"], squad),
        "hotpotqa": _supporting(asked["hotpotqa"], files["hotpotqa"]),
    }
    found: dict[str, Any] = {**provenance("cpu"), "model": Path(encoder).name, "windows": {}}
    for text, questions in asked.items():
        suffix, read = len(pair_tokens(tokenizer)[2]), [*_read(questions, tokenizer)]
        found["windows"][text] = {
            f"{window}-{overlap}": np.mean([len(_windows(one, window, overlap, suffix)) for one in read]).round(2)
            for window, overlap in sorted({windows_of(cell) for cell in CELLS | TRIED})
        }
        if text in stretches:
            found[text] = {str(window): "".join(_letters(questions, read, stretches[text], window, suffix))
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


def _read(questions: Sequence[Question], tokenizer: Any) -> Iterator[Read]:
    prefix, separator, _ = map(len, pair_tokens(tokenizer))
    own = tokens_of(tokenizer, [question.question for question in questions], offsets=False)
    texts = tokens_of(tokenizer, [question.document for question in questions], offsets=True)
    for (asked, _), (ids, offsets) in zip(own, texts, strict=True):
        yield Read(ids, offsets, prefix + len(asked) + separator)


def _windows(read: Read, window: int, overlap: int, suffix: int) -> list[Window]:
    return [*encoder_schedule(len(read.ids), window, overlap, prefix=read.before, suffix=suffix)]


def _letters(
    questions: Sequence[Question],
    read: Sequence[Read],
    stretches: Sequence[Sequence[Stretch]],
    window: int,
    suffix: int,
) -> Iterator[str]:
    for question, one, some in zip(questions, read, stretches, strict=True):
        windows = _windows(one, window, 0, suffix)
        places = [_tokens(one.offsets, stretch) for stretch in some]
        if question.format == "squad":
            assert question.place is not None
            yield _cut(places[0], _tokens(one.offsets, question.place), [after.start for after in windows[1:]])
        elif not places:
            yield "?"
        else:
            first, last = min(place[0] for place in places), max(place[1] for place in places)
            yield "o" if any(seen.start <= first and last < seen.end for seen in windows) else "s"


def _tokens(offsets: np.ndarray, stretch: Stretch) -> tuple[int, int]:
    """The first and the last token of a stretch of characters."""
    inside = tokens_within(offsets, *stretch)
    return int(inside[0]), int(inside[-1])


def _cut(passage: tuple[int, int], answer: tuple[int, int], borders: Sequence[int]) -> str:
    inside = [border for border in borders if passage[0] < border <= passage[1]]
    if any(answer[0] < border <= answer[1] for border in inside):
        return "c"
    before, behind = any(border <= answer[0] for border in inside), any(border > answer[1] for border in inside)
    return "2" if before and behind else "b" if before else "a" if behind else "w"
