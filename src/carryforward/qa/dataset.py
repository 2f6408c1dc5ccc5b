# SPDX-License-Identifier: Apache-2.0
"""Questions with their documents and answers, from HotpotQA's and SQuAD's files; answers found in the text.

Formats: HotpotQA's official JSON and the Hub's rows of it; SQuAD's JSON (v1, and v2 with questions that have no answer)
and the Hub's rows of it. Rows are a JSON list or JSON lines. Files may be compressed (.gz, .xz).
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

from ..data.texts import decode
from ..utils.files import atomic_write

# how a file is packed and unpacked, by its ending; all others are as they are
_PACKED: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
    ".gz": (partial(gzip.compress, mtime=0), gzip.decompress),
    ".xz": (lzma.compress, lzma.decompress),
}


@dataclass(frozen=True)
class Answer:
    """An answer that is accepted.

    Attributes:
        text: its words.
        start: the character at which it begins in the document; None where it was not found there.
    """

    text: str
    start: int | None = None


@dataclass(frozen=True)
class Question:
    """A question on a document.

    Attributes:
        id: its name in its data set.
        question, document: the texts.
        answers: those that are accepted; none if the question has no answer.
        kind: "span", "yes", "no" or "none".
        format: the data set's, which decides how answers are scored: "hotpotqa" or "squad".
    """

    id: str
    question: str
    document: str
    answers: tuple[Answer, ...]
    kind: str
    format: str

    @property
    def place(self) -> tuple[int, int] | None:
        """The characters of the first answer that was found, [from, to); None where none was."""
        found = [answer for answer in self.answers if answer.start is not None]
        if self.kind != "span" or not found:
            return None
        start = found[0].start
        assert start is not None
        return start, start + len(found[0].text)

    @property
    def aligned(self) -> bool:
        """Whether it can be trained on: an answer that is a span has a place."""
        return self.kind != "span" or self.place is not None


def read_questions(path: str | Path) -> list[Question]:
    """All questions of a file. Those whose answer is not in the text are there too: see `Question.aligned`."""
    path = Path(path)
    content = read_json(path)
    try:
        found = list(_questions(content, path))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is neither HotpotQA's nor SQuAD's: a JSON object with 'data', or rows with a question, a context "
            "and an answer, is expected."
        ) from error
    if not found:
        raise ValueError(f"{path} has no questions.")
    _check_ids(found, path)
    return found


def write_questions(questions: Sequence[Question], path: Path) -> None:
    """A file of SQuAD's format, compressed if its name says so."""
    _check_ids(questions, path)
    rows: dict[str, list[dict[str, Any]]] = {}
    for question in questions:
        if question.kind in ("yes", "no"):
            raise ValueError(f"question {question.id}: SQuAD's format has no answer {question.kind!r}.")
        # one that is not in the document begins anywhere: whoever reads the file will not find it either
        answers = [{"text": answer.text, "answer_start": answer.start or 0} for answer in question.answers]
        row = {"id": question.id, "question": question.question, "answers": answers, "is_impossible": not answers}
        rows.setdefault(question.document, []).append(row)
    paragraphs = [{"context": document, "qas": qas} for document, qas in rows.items()]
    content = {"version": "2.0", "data": [{"title": "", "paragraphs": paragraphs}]}
    pack, _ = _PACKED.get(path.suffix, (bytes, bytes))
    with atomic_write(path) as beside:
        beside.write_bytes(pack((json.dumps(content, ensure_ascii=False) + "\n").encode()))


def _check_ids(questions: Sequence[Question], path: Path) -> None:
    """Predictions and scores go by them."""
    (name, count), *_ = Counter(question.id for question in questions).most_common(1)
    if count > 1:
        raise ValueError(f"{path}: several questions have the id {name}.")


def _questions(content: Any, path: Path) -> Iterator[Question]:
    if isinstance(content, dict) and "data" not in content:
        content = [content]  # JSON lines, of which there is one
    if isinstance(content, dict):
        for article in content["data"]:
            for paragraph in article["paragraphs"]:
                make = partial(_squad_question, paragraph.get("context"))
                yield from (_checked(make, row, number, path) for number, row in enumerate(paragraph["qas"]))
    elif content:
        lacking = [[field for field in fields if field not in content[0]] for _, fields in _ROWS]
        least = min(lacking, key=len)
        if len(least) > 1:
            raise KeyError(*content[0])
        if least:
            fields = " or ".join(dict.fromkeys(repr(field) for some in lacking if len(some) == 1 for field in some))
            raise ValueError(f"{path}: the first row lacks {fields}.")
        of_row = _ROWS[lacking.index(least)][0]
        yield from (_checked(of_row, row, number, path) for number, row in enumerate(content))


def read_json(path: Path) -> Any:
    """What a file holds, or a list of what its lines do."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file.")
    _, unpack = _PACKED.get(path.suffix, (bytes, bytes))
    try:
        raw = unpack(path.read_bytes())
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    text = decode(raw, path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        whole = error
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):  # `splitlines` would split within strings too
        try:
            rows += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as error:
            where = f"line {number}, {error.msg}" if rows else f"line {whole.lineno}, {whole.msg}"
            raise ValueError(f"{path} is no JSON: {where}.") from error
    return rows


def _checked(make: Callable[[Any], Question], row: Any, number: int, path: Path) -> Question:
    try:
        return make(row)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        name = (row.get("_id") or row.get("id")) if isinstance(row, dict) else None
        where = f"question {name}" if name else f"row {number}"
        if isinstance(error, _OutsideError):
            raise ValueError(f"{path}: {where}: {error}") from error
        told = f"lacks {error}" if isinstance(error, KeyError) else f"has another form than it should ({error})"
        raise ValueError(f"{path}: {where} {told}.") from error


# --- SQuAD -----------------------------------------------------------------------------------------------------------


class _OutsideError(ValueError):
    """An answer that begins where there is no document."""


def _squad_question(document: Any, row: Any) -> Question:
    if not isinstance(document, str):
        raise TypeError("there is no context")
    name, given = str(row["id"]), [] if row.get("is_impossible") else row["answers"]
    told = [one for one in given or [] if one["text"].strip()]
    answers = []
    for one in told:
        start = int(one["answer_start"])
        if not 0 <= start < max(len(document), 1):
            raise _OutsideError(f"an answer begins at character {start} of a document that has {len(document)}.")
        answers.append(Answer(one["text"].strip(), _nearest(document, one["text"].strip(), start)))
    kind = "span" if answers else "none"
    return Question(name, row["question"].strip(), document, tuple(answers), kind, "squad")


def _nearest(document: str, text: str, start: int) -> int | None:
    """Where a text stands nearest to a character: files have offsets that are wrong by a few."""
    places = (document.find(text, start), document.rfind(text, 0, start + len(text)))
    found = [place for place in places if text and place >= 0]
    return min(found, key=lambda place: abs(place - start), default=None)


def _squad_row(row: Any) -> Question:
    told = row["answers"]
    if isinstance(told, dict):  # as the Hub has them: columns
        pairs = zip(told["text"], told["answer_start"], strict=True)
        told = [{"text": text, "answer_start": start} for text, start in pairs]
    return _squad_question(row["context"], {**row, "answers": told})


# --- HotpotQA --------------------------------------------------------------------------------------------------------


def _hotpot(row: Any) -> Question:
    facts = {(title, int(sentence)) for title, sentence in row.get("supporting_facts") or []}
    return _hotpot_question(row["_id"], row, [(title, sentences) for title, sentences in row["context"]], facts)


def _hotpot_row(row: Any) -> Question:
    context, facts = row["context"], row.get("supporting_facts") or {"title": [], "sent_id": []}
    paragraphs = list(zip(context["title"], context["sentences"], strict=True))
    return _hotpot_question(row["id"], row, paragraphs, set(zip(facts["title"], facts["sent_id"], strict=True)))


def _hotpot_question(name: str, row: Any, paragraphs: list[tuple[str, Any]], facts: set[tuple[str, int]]) -> Question:
    """Paragraphs one below the other, each under its title. An answer is looked for in the sentences that support it,
    then in their paragraphs, then anywhere."""
    document, near, around = "", [], []
    for title, sentences in paragraphs:
        begin = len(document)
        document += f"{title}\n"
        for number, sentence in enumerate([sentences] if isinstance(sentences, str) else sentences):
            if (title, number) in facts:
                near.append((len(document), len(document) + len(sentence)))
            document += sentence
        if any(title == supported for supported, _ in facts):
            around.append((begin, len(document)))
        document += "\n\n"
    document = document.rstrip("\n")
    text = row["answer"].strip()
    if text.lower() in ("yes", "no"):
        return Question(name, row["question"].strip(), document, (Answer(text),), text.lower(), "hotpotqa")
    start = _first(document, text, [near, around, [(0, len(document))]])
    return Question(name, row["question"].strip(), document, (Answer(text, start),), "span", "hotpotqa")


def _first(document: str, text: str, preferred: Sequence[Sequence[tuple[int, int]]]) -> int | None:
    """Where a text stands first in the stretches that are preferred, or else in the next ones; as words of its own if
    it does so in any of these."""
    for stretches in preferred:
        places = [place for stretch in stretches for place in _occurrences(document, text, *stretch)]
        for place in places:
            around = document[max(place - 1, 0) : place], document[place + len(text) : place + len(text) + 1]
            if not any(character.isalnum() for character in around):
                return place
        if places:
            return places[0]
    return None


def _occurrences(document: str, text: str, start: int, stop: int) -> Iterator[int]:
    at = document.find(text, start, stop) if text else -1
    while at >= 0:
        yield at
        at = document.find(text, at + 1, stop)


_ROWS: tuple[tuple[Callable[[Any], Question], tuple[str, ...]], ...] = (
    (_hotpot, ("_id", "question", "answer", "context")),
    (_hotpot_row, ("id", "question", "answer", "context")),
    (_squad_row, ("id", "question", "answers", "context")),
)
