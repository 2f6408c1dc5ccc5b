# SPDX-License-Identifier: Apache-2.0
"""Where windows cut the text that a question is about: its passage in a joined document, or the supporting sentences.

That bounds what a state can gain: where one window has all of it, nothing needs to be carried. The result has a letter
for each question, in the order of its file, and the mean number of windows per question, which is the cost of overlap.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cells import CELLS, TEXTS, VARIANTS, window_and_overlap

from carryforward.data.tokenization import tokenise_texts, tokens_in_span
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
Span = tuple[int, int]  # characters of a document, [from, to)


class Document(NamedTuple):
    """A question's document in tokens, the characters of each, and how many tokens precede it in a window."""

    ids: np.ndarray
    offsets: np.ndarray
    prefix: int


def find(encoder: Path, files: dict[str, Path], squad: Sequence[Path]) -> dict[str, Any]:
    """By text and window: where disjoint windows cut each question's text, and the mean number of windows."""
    tokenizer = load_tokenizer(str(encoder))
    questions_of = {text: read_questions(files[text]) for text in TEXTS}
    spans = {
        "squadshifts": _passages(questions_of["squadshifts"], squad),
        "hotpotqa": _supporting_sentences(questions_of["hotpotqa"], files["hotpotqa"]),
    }
    result: dict[str, Any] = {**provenance("cpu"), "model": Path(encoder).name, "windows": {}}
    for text, questions in questions_of.items():
        suffix, documents = len(pair_tokens(tokenizer)[2]), [*_tokenised(questions, tokenizer)]
        result["windows"][text] = {
            f"{window}-{overlap}": np.mean([len(_windows(one, window, overlap, suffix)) for one in documents]).round(2)
            for window, overlap in sorted({window_and_overlap(cell) for cell in CELLS | VARIANTS})
        }
        if text in spans:
            result[text] = {str(window): "".join(_letters(questions, documents, spans[text], window, suffix))
                            for window in WINDOWS}  # fmt: skip
    return result


def _passages(questions: Sequence[Question], files: Sequence[Path]) -> list[list[Span]]:
    """Each question's own passage in its joined document."""
    passages = {question.id: question.document for path in files for question in read_questions(path)}
    spans = []
    for question in questions:
        begin = question.document.index(passages[question.id])
        spans.append([(begin, begin + len(passages[question.id]))])
    return spans


def _supporting_sentences(questions: Sequence[Question], path: Path) -> list[list[Span]]:
    """The sentences that support each answer; none where the file does not name them."""
    rows = {row["_id"]: row for row in read_json(path)}
    spans: list[list[Span]] = []
    for question in questions:
        row, own = rows[question.id], []
        sentences = dict(row["context"])
        for title, number in row["supporting_facts"]:
            if isinstance(sentences.get(title), list) and number < len(sentences[title]):
                begin = question.document.index("".join(sentences[title])) + len("".join(sentences[title][:number]))
                own.append((begin, begin + len(sentences[title][number])))
        spans.append(own)
    return spans


def _tokenised(questions: Sequence[Question], tokenizer: Any) -> Iterator[Document]:
    prefix, separator, _ = map(len, pair_tokens(tokenizer))
    asked = tokenise_texts(tokenizer, [question.question for question in questions], offsets=False)
    texts = tokenise_texts(tokenizer, [question.document for question in questions], offsets=True)
    for (question_ids, _), (ids, offsets) in zip(asked, texts, strict=True):
        yield Document(ids, offsets, prefix + len(question_ids) + separator)


def _windows(document: Document, window: int, overlap: int, suffix: int) -> list[Window]:
    return [*encoder_schedule(len(document.ids), window, overlap, prefix=document.prefix, suffix=suffix)]


def _letters(
    questions: Sequence[Question],
    documents: Sequence[Document],
    spans: Sequence[Sequence[Span]],
    window: int,
    suffix: int,
) -> Iterator[str]:
    """The letter of `PASSAGE` or `SUPPORT` for each question; "?" where the supporting sentences are unknown."""
    for question, document, own in zip(questions, documents, spans, strict=True):
        windows = _windows(document, window, 0, suffix)
        tokens = [_tokens(document.offsets, span) for span in own]
        if question.format == "squad":
            assert question.answer_span is not None
            answer = _tokens(document.offsets, question.answer_span)
            yield _cut(tokens[0], answer, [following.start for following in windows[1:]])
        elif not tokens:
            yield "?"
        else:
            first, last = min(begin for begin, _ in tokens), max(end for _, end in tokens)
            yield "o" if any(seen.start <= first and last < seen.end for seen in windows) else "s"


def _tokens(offsets: np.ndarray, span: Span) -> tuple[int, int]:
    """The first and the last token of a span of characters."""
    inside = tokens_in_span(offsets, *span)
    return int(inside[0]), int(inside[-1])


def _cut(passage: tuple[int, int], answer: tuple[int, int], borders: Sequence[int]) -> str:
    inside = [border for border in borders if passage[0] < border <= passage[1]]
    if any(answer[0] < border <= answer[1] for border in inside):
        return "c"
    before, behind = any(border <= answer[0] for border in inside), any(border > answer[1] for border in inside)
    return "2" if before and behind else "b" if before else "a" if behind else "w"
