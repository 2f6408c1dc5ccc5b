# SPDX-License-Identifier: Apache-2.0
"""Read and write question-answering files: HotpotQA and SQuAD.

Formats: the official JSON of HotpotQA and of SQuAD (v1, and v2 with unanswerable questions), and the rows that the
Hugging Face Hub has of both, as a JSON list or JSON lines. Files may be compressed (.gz, .xz).
"""

import gzip
import json
import lzma
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..data.texts import decode_utf8
from ..utils.files import atomic_write

# (compress, decompress) by file suffix; any other suffix is an uncompressed file
_COMPRESSION: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
    ".gz": (partial(gzip.compress, mtime=0), gzip.decompress),
    ".xz": (lzma.compress, lzma.decompress),
}


@dataclass(frozen=True)
class Answer:
    """An accepted answer.

    Attributes:
        text: the answer.
        start: index of its first character in the document; None if the document does not contain it.
    """

    text: str
    start: int | None = None


@dataclass(frozen=True)
class Question:
    """A question about a document.

    Attributes:
        id: its id in the data set.
        question, document: the texts.
        answers: the accepted answers; empty if the question has none.
        kind: "span", "yes", "no" or "none".
        format: "hotpotqa" or "squad": decides how answers are scored.
    """

    id: str
    question: str
    document: str
    answers: tuple[Answer, ...]
    kind: str
    format: str

    @property
    def answer_span(self) -> tuple[int, int] | None:
        """The characters [start, end) of the first answer that is in the document; None if there is none."""
        if self.kind != "span":
            return None
        for answer in self.answers:
            if answer.start is not None:
                return answer.start, answer.start + len(answer.text)
        return None

    @property
    def aligned(self) -> bool:
        """Whether the question can be trained on: if its answer is a span, the document must contain it."""
        return self.kind != "span" or self.answer_span is not None


def read_questions(path: str | Path) -> list[Question]:
    """Read all questions of a file, including those whose answer is not in the document (`Question.aligned`)."""
    path = Path(path)
    content = read_json(path)
    try:
        questions = list(_parse(content, path))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is in neither HotpotQA nor SQuAD format: expected a JSON object with 'data', or rows with a "
            "question, a context and an answer."
        ) from error
    if not questions:
        raise ValueError(f"{path} has no questions.")
    _check_ids(questions, path)
    return questions


def write_questions(questions: Sequence[Question], path: Path) -> None:
    """Write questions in SQuAD format, compressed if the suffix is .gz or .xz."""
    _check_ids(questions, path)
    rows: dict[str, list[dict[str, Any]]] = {}
    for question in questions:
        if question.kind in ("yes", "no"):
            raise ValueError(f"question {question.id}: SQuAD format has no answer {question.kind!r}.")
        # 0 for an answer that is not in the document: a reader searches for the text and does not find it either
        answers = [{"text": answer.text, "answer_start": answer.start or 0} for answer in question.answers]
        row = {"id": question.id, "question": question.question, "answers": answers, "is_impossible": not answers}
        rows.setdefault(question.document, []).append(row)
    paragraphs = [{"context": document, "qas": qas} for document, qas in rows.items()]
    content = {"version": "2.0", "data": [{"title": "", "paragraphs": paragraphs}]}
    compress, _ = _COMPRESSION.get(path.suffix, (bytes, bytes))
    with atomic_write(path) as temporary:
        temporary.write_bytes(compress((json.dumps(content, ensure_ascii=False) + "\n").encode()))


def read_json(path: Path) -> Any:
    """Parse a JSON file, or a file of JSON lines as a list."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file.")
    _, decompress = _COMPRESSION.get(path.suffix, (bytes, bytes))
    try:
        raw = decompress(path.read_bytes())
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    text = decode_utf8(raw, path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        whole_file_error = error
    except (RecursionError, ValueError) as error:  # ValueError: a number of thousands of digits
        raise ValueError(f"{path} is not valid JSON: it is nested too deeply, or has a number too large.") from error
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):  # `splitlines` would also split inside JSON strings
        try:
            rows += [json.loads(line)] if line.strip() else []
        except (RecursionError, ValueError) as error:
            reason = getattr(error, "msg", "nested too deeply, or a number too large")
            first = whole_file_error
            place = f"line {number}, {reason}" if rows else f"line {first.lineno}, {first.msg}"
            raise ValueError(f"{path} is not JSON: {place}.") from error
    return rows


def _check_ids(questions: Sequence[Question], path: Path) -> None:
    """Refuse duplicate ids: predictions and scores are stored by id."""
    (name, count), *_ = Counter(question.id for question in questions).most_common(1)
    if count > 1:
        raise ValueError(f"{path}: several questions have the id {name}.")


def _parse(content: Any, path: Path) -> Iterator[Question]:
    if isinstance(content, dict) and "data" not in content:
        content = [content]  # JSON lines with a single line
    if isinstance(content, dict):
        for article in content["data"]:
            for paragraph in article["paragraphs"]:
                parse_entry = partial(_squad_question, paragraph.get("context"))
                yield from (_parse_row(parse_entry, row, number, path) for number, row in enumerate(paragraph["qas"]))
    elif content:
        parse = _row_parser(content[0], path)
        yield from (_parse_row(parse, row, number, path) for number, row in enumerate(content))


def _row_parser(row: Any, path: Path) -> Callable[[Any], Question]:
    """Choose the row format by the fields of the first row."""
    missing = [[field for field in fields if field not in row] for _, fields in _ROW_FORMATS]
    fewest = min(missing, key=len)
    if len(fewest) > 1:
        raise KeyError(*row)
    if fewest:
        candidates = dict.fromkeys(repr(fields[0]) for fields in missing if len(fields) == 1)
        raise ValueError(f"{path}: the first row lacks {' or '.join(candidates)}.")
    return _ROW_FORMATS[missing.index(fewest)][0]


def _parse_row(parse: Callable[[Any], Question], row: Any, number: int, path: Path) -> Question:
    """Parse a row; errors name the question or the row."""
    try:
        question = parse(row)
        for text in (question.id, question.question, question.document, *(answer.text for answer in question.answers)):
            text.encode()  # half a surrogate pair cannot be tokenised
        return question
    except (KeyError, TypeError, IndexError, AttributeError, OverflowError, ValueError) as error:
        name = (row.get("_id") or row.get("id")) if isinstance(row, dict) else None
        where = f"question {name}" if name else f"row {number}"
        if isinstance(error, _OutsideError):
            raise ValueError(f"{path}: {where}: {error}") from error
        problem = f"lacks {error}" if isinstance(error, KeyError) else f"has an unexpected form ({error})"
        raise ValueError(f"{path}: {where} {problem}.") from error


# --- SQuAD -----------------------------------------------------------------------------------------------------------


class _OutsideError(ValueError):
    """The start of an answer is outside the document."""


def _squad_question(document: Any, row: Any) -> Question:
    if not isinstance(document, str):
        raise TypeError("there is no context")
    name, entries = str(row["id"]), [] if row.get("is_impossible") else row["answers"]
    answers = []
    for entry in [entry for entry in entries or [] if entry["text"].strip()]:
        text, start = entry["text"].strip(), int(entry["answer_start"])
        if not 0 <= start < max(len(document), 1):
            raise _OutsideError(f"an answer starts at character {start}, but the document has only {len(document)}.")
        answers.append(Answer(text, _nearest_occurrence(document, text, start)))
    kind = "span" if answers else "none"
    return Question(name, row["question"].strip(), document, tuple(answers), kind, "squad")


def _nearest_occurrence(document: str, text: str, start: int) -> int | None:
    """Find the occurrence of a text that is nearest to a character: the offsets in some files are off by a few."""
    candidates = (document.find(text, start), document.rfind(text, 0, start + len(text)))
    occurrences = [position for position in candidates if text and position >= 0]
    return min(occurrences, key=lambda position: abs(position - start), default=None)


def _squad_row(row: Any) -> Question:
    answers = row["answers"]
    if isinstance(answers, dict):  # columns, as on the Hub
        pairs = zip(answers["text"], answers["answer_start"], strict=True)
        answers = [{"text": text, "answer_start": start} for text, start in pairs]
    return _squad_question(row["context"], {**row, "answers": answers})


# --- HotpotQA --------------------------------------------------------------------------------------------------------


def _hotpot(row: Any) -> Question:
    facts = {(title, int(sentence)) for title, sentence in row.get("supporting_facts") or []}
    return _hotpot_question(str(row["_id"]), row, [(title, sentences) for title, sentences in row["context"]], facts)


def _hotpot_row(row: Any) -> Question:
    context, facts = row["context"], row.get("supporting_facts") or {"title": [], "sent_id": []}
    paragraphs = list(zip(context["title"], context["sentences"], strict=True))
    return _hotpot_question(str(row["id"]), row, paragraphs, set(zip(facts["title"], facts["sent_id"], strict=True)))


def _hotpot_question(name: str, row: Any, paragraphs: list[tuple[str, Any]], facts: set[tuple[str, int]]) -> Question:
    """Build a document of paragraphs, each below its title, and locate the answer.

    The answer is searched for in the supporting sentences, then in their paragraphs, then in the whole document.
    """
    document, sentence_spans, paragraph_spans = "", [], []
    for title, sentences in paragraphs:
        begin = len(document)
        document += f"{title}\n"
        for number, sentence in enumerate([sentences] if isinstance(sentences, str) else sentences):
            if (title, number) in facts:
                sentence_spans.append((len(document), len(document) + len(sentence)))
            document += sentence
        if any(title == supporting for supporting, _ in facts):
            paragraph_spans.append((begin, len(document)))
        document += "\n\n"
    document = document.rstrip("\n")
    text = row["answer"].strip()
    if text.lower() in ("yes", "no"):
        return Question(name, row["question"].strip(), document, (Answer(text),), text.lower(), "hotpotqa")
    start = _locate(document, text, [sentence_spans, paragraph_spans, [(0, len(document))]])
    return Question(name, row["question"].strip(), document, (Answer(text, start),), "span", "hotpotqa")


def _locate(document: str, text: str, preferences: Sequence[Sequence[tuple[int, int]]]) -> int | None:
    """Find a text in the first group of spans that contains it.

    Within a group, an occurrence that is not part of a longer word comes first.
    """
    for spans in preferences:
        occurrences = [position for span in spans for position in _occurrences(document, text, *span)]
        for position in occurrences:
            end = position + len(text)
            neighbours = document[max(position - 1, 0) : position], document[end : end + 1]
            if not any(character.isalnum() for character in neighbours):
                return position
        if occurrences:
            return occurrences[0]
    return None


def _occurrences(document: str, text: str, start: int, stop: int) -> Iterator[int]:
    position = document.find(text, start, stop) if text else -1
    while position >= 0:
        yield position
        position = document.find(text, position + 1, stop)


# the parser of each row format, and the fields it needs
_ROW_FORMATS: tuple[tuple[Callable[[Any], Question], tuple[str, ...]], ...] = (
    (_hotpot, ("_id", "question", "answer", "context")),
    (_hotpot_row, ("id", "question", "answer", "context")),
    (_squad_row, ("id", "question", "answers", "context")),
)
