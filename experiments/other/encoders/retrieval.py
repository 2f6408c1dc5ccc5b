# SPDX-License-Identifier: Apache-2.0
"""Which chunk answers a question? nDCG@10 over the chunks of all documents."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arms import Reader, Spans
from ranking import ndcg, rankings, word_spans

from carryforward.qa.dataset import read_json, read_questions

DEPTH = 10
SPARE = 50  # items ranked, since a passage may occur several times


@dataclass
class Collection:
    """Documents with chunks, and questions about them.

    Attributes:
        keys: of each document's chunks: what tells a chunk's content from that of others.
        queries: question, keys of the chunks that answer it, and number of its document.
    """

    texts: list[str] = field(default_factory=list)
    spans: list[Spans] = field(default_factory=list)
    keys: list[list[str]] = field(default_factory=list)
    queries: list[tuple[str, set[str], int]] = field(default_factory=list)


def covid_qa(file: Path, settings: dict[str, Any]) -> Collection:
    """Articles in chunks of so many words; the chunks that the answer lies in answer the question."""
    collection, numbers = Collection(), dict[str, int]()
    for question in read_questions(file):
        if question.answer_span is None:
            continue
        if question.document not in numbers:
            if settings["documents"] is not None and len(numbers) == settings["documents"]:
                continue
            number = numbers[question.document] = len(numbers)
            spans = word_spans(question.document, settings["words_per_chunk"])
            collection.texts.append(question.document)
            collection.spans.append(spans)
            collection.keys.append([f"{number} {i}" for i in range(len(spans))])
        number = numbers[question.document]
        start, stop = question.answer_span
        pairs = zip(collection.spans[number], collection.keys[number], strict=True)
        relevant = {key for (a, b), key in pairs if a < stop and b > start}
        if relevant:
            collection.queries.append((question.question, relevant, number))
    return collection


def hotpotqa(file: Path, settings: dict[str, Any]) -> Collection:
    """The passages of several questions joined to documents; a chunk is a passage with its title."""
    rows = [row for row in read_json(file) if row.get("supporting_facts")]
    size, collection = settings["questions_per_document"], Collection()
    for i in range(0, len(rows), size):
        if settings["documents"] is not None and len(collection.texts) == settings["documents"]:
            break
        text, spans, keys = "", [], []
        passages = {title: sentences for row in rows[i : i + size] for title, sentences in row["context"]}
        for title, sentences in passages.items():
            chunk = f"{title}\n{''.join(sentences)}"
            spans.append((len(text), len(text) + len(chunk)))
            keys.append(title)
            text += chunk + "\n\n"
        for row in rows[i : i + size]:
            relevant = {title for title, _ in row["supporting_facts"]} & set(keys)
            if relevant:
                collection.queries.append((row["question"], relevant, len(collection.texts)))
        collection.texts.append(text)
        collection.spans.append(spans)
        collection.keys.append(keys)
    return collection


DATA = {"covid-qa": covid_qa, "hotpotqa": hotpotqa}


def measure(reader: Reader, collection: Collection) -> dict[str, Any]:
    """nDCG@10 of every question."""
    chunks = reader.chunks(collection.texts, collection.spans)
    queries = reader.encode([question for question, _, _ in collection.queries])
    keys = [key for document in collection.keys for key in document]
    ranked = rankings(queries, chunks, SPARE)
    scores = [
        ndcg([keys[i] for i in row], relevant, DEPTH)
        for row, (_, relevant, _) in zip(ranked, collection.queries, strict=True)
    ]
    return {
        "documents": len(collection.texts), "chunks": len(keys), "queries": len(scores),
        "score": sum(scores) / len(scores), "scores": [round(score, 4) for score in scores],
        "groups": [number for _, _, number in collection.queries],
    }  # fmt: skip
