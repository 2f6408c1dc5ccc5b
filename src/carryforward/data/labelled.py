# SPDX-License-Identifier: Apache-2.0
"""Documents with labels, from JSON lines: one object a line.

For the classification of documents, a text and its label; for that of tokens, the words of a text and a label for each,
where null stands for a word that is not scored:

    {"text": "The harbour was frozen. ...", "label": "weather"}
    {"tokens": ["Ada", "lived", "in", "London"], "labels": ["PERSON", "O", "O", "PLACE"]}

Labels are texts or integers. Words are joined by a space and tokenised as one text, so that tokens are those that the
model knows. A word's label stands at its first token; its other tokens have none.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from ..utils.checks import check_count
from ..windows import IGNORE
from .corpora import ALL, RowSplit, find_rows
from .texts import count_text, get_text, read_json_rows
from .tokenization import check_text, check_tokenizer, tokenise_texts

CLASSIFICATION, TOKEN_CLASSIFICATION = "classification", "token-classification"
_FORMATS = {
    CLASSIFICATION: '{"text": "...", "label": "..."}',
    TOKEN_CLASSIFICATION: '{"tokens": ["...", ...], "labels": ["...", ...]}',
}
_SUFFIXES = (".jsonl",)
_Label = str | int


@dataclass(frozen=True)
class LabelledText:
    """A row of a file.

    Attributes:
        words: of a text whose tokens are classified: the characters [from, to) of each word; else None.
        labels: the label of the text, or of each word, where None is not scored.
    """

    name: str
    text: str
    labels: tuple[_Label | None, ...]
    words: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True, eq=False)
class LabelledDocuments(Sequence[np.ndarray]):
    """Tokenised documents with labels. As a sequence, the token ids of each.

    Attributes:
        ids: token ids of each document, int64 [N].
        labels: for each document its class, [1], or that of each token, [N], where -100 is not scored.
        classes: the names of the classes.
        task: "classification" or "token-classification".
        texts: the rows that the documents were made of.
        first_tokens: of documents whose tokens are classified, the first token of each word, -1 where it has none.
        name, split: the source and its split.
        max_tokens: the limit to which documents were truncated; None if there was none.
    """

    ids: list[np.ndarray]
    labels: list[np.ndarray]
    classes: tuple[str, ...]
    task: str
    texts: list[LabelledText]
    first_tokens: list[np.ndarray] | None = None
    name: str = ""
    split: str = ""
    max_tokens: int | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: Any) -> Any:
        return self.select(range(*index.indices(len(self)))) if isinstance(index, slice) else self.ids[index]

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.ids)

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(one) for one in self.ids], dtype=np.int64)

    @property
    def names(self) -> list[str]:
        return [text.name for text in self.texts]

    @property
    def words_without_token(self) -> int:
        """Words that the tokenizer, or truncation, has left without a token: they cannot be scored."""
        return sum(int((first < 0).sum()) for first in self.first_tokens or ())

    @cached_property
    def key(self) -> str:
        """A digest of tokens and labels."""
        digest = blake2b(repr(self.classes).encode(), digest_size=16)
        for ids, labels in zip(self.ids, self.labels, strict=True):
            digest.update(ids.tobytes() + b"\0" + labels.tobytes() + b"\0")
        return digest.hexdigest()

    def renumbered(self, classes: Sequence[str]) -> "LabelledDocuments":
        """Return the same documents with other numbers for their classes, which must be among `classes`."""
        numbers = np.array([*map(list(classes).index, self.classes), IGNORE])  # -100 is the last one: index -1
        labels = [numbers[np.where(own == IGNORE, -1, own)] for own in self.labels]
        return dataclasses.replace(self, labels=labels, classes=tuple(classes))

    def select(self, indices: Sequence[int]) -> "LabelledDocuments":
        """Return the documents with these indices, in this order."""
        lists: Any = {name: [getattr(self, name)[i] for i in indices] for name in ("ids", "labels", "texts")}
        first = None if self.first_tokens is None else [self.first_tokens[i] for i in indices]
        return dataclasses.replace(self, **lists, first_tokens=first)

    def about(self) -> dict[str, Any]:
        """Return a description of the data, as results record it."""
        return {
            "name": self.name,
            "split": self.split,
            "key": self.key,
            "documents": len(self),
            "tokens": int(self.lengths.sum()),
            "words": sum(count_text(text.text)[0] for text in self.texts),
            "labels": sum(int((labels != IGNORE).sum()) for labels in self.labels),
            "words_without_token": self.words_without_token,
            "classes": list(self.classes),
            "max_tokens": self.max_tokens,
        }


def load_labelled(
    source: str, split: str, tokenizer: Any, *, classes: Sequence[str] | None = None, task: str | None = None,
    text_field: str = "text", max_tokens: int | None = None,
) -> LabelledDocuments:  # fmt: skip
    """Read labelled documents from JSON lines and tokenise them.

    Args:
        source: a .jsonl file, which is divided by lines into 90 % for training and 5 % each for validation and test, or
            a folder with {train,validation,test}.jsonl.
        split: "train", "validation", "test", or "all" of a single file.
        tokenizer: the model's tokenizer; a fast one for labels of words.
        classes: the names of the classes, in the order of their numbers: another label is an error. By default the
            labels that occur, sorted.
        task: "classification" or "token-classification"; by default as the rows are.
        text_field: the field that holds a text.
        max_tokens: truncate documents to so many tokens.
    """
    check_tokenizer(tokenizer)
    check_count("max_tokens", max_tokens, optional=True)
    lines = _find_lines(source, split)
    task = task or labelled_task(source)
    if task not in _FORMATS:
        raise ValueError(f"{source}: its rows have no labels. Write {' or '.join(_FORMATS.values())} on each line.")
    texts = list(_read(lines, task, text_field))
    classes = _classes(texts, source) if classes is None else tuple(classes)
    documents = _tokenise(texts, tokenizer, classes, task, max_tokens)
    documents = dataclasses.replace(documents, name=lines.name, split=lines.split)
    if not any((labels != IGNORE).any() for labels in documents.labels):
        raise ValueError(f"{source}, split {split!r}: no document has a label to learn or score. Add some.")
    return documents


def labelled_task(source: str) -> str | None:
    """What the labels of a source are for, by its first row; None if it has none, or is not JSON lines."""
    for lines in find_rows(Path(source).expanduser(), _SUFFIXES).values():
        for _, row, _ in itertools.islice(read_json_rows(lines.path), 1):
            of_words = {"tokens", "labels"} <= row.keys()
            return TOKEN_CLASSIFICATION if of_words else CLASSIFICATION if "label" in row else None
    return None


def _find_lines(source: str, split: str) -> RowSplit:
    splits = find_rows(Path(source).expanduser(), _SUFFIXES)
    if not splits:
        raise ValueError(
            f"{source}: labelled documents are read from a .jsonl file, or a folder with "
            "{train,validation,test}.jsonl. Give one of these."
        )
    if split not in splits:
        available = ", ".join(map(repr, (name for name in splits if name != ALL)))
        raise ValueError(f"{source} has no split {split!r}, only {available}. Choose one of these.")
    return splits[split]


def _read(lines: RowSplit, task: str, text_field: str) -> Iterator[LabelledText]:
    for number, row, where in read_json_rows(lines.path, lines.belongs or (lambda number: True)):
        name = f"line-{number}"
        if task == CLASSIFICATION:
            if "label" not in row:
                raise ValueError(f"{where} has no label. Write {_FORMATS[task]} on each line.")
            yield LabelledText(name, get_text(row, text_field, where), (_label(row["label"], where),))
        else:
            yield _read_words(name, row, where)


def _read_words(name: str, row: dict, where: str) -> LabelledText:
    words, labels = row.get("tokens"), row.get("labels")
    if not isinstance(words, list) or not isinstance(labels, list) or len(words) != len(labels):
        raise ValueError(
            f"{where} must have as many labels as tokens. Write {_FORMATS[TOKEN_CLASSIFICATION]} on each line."
        )
    for word in words:
        check_text(f"{where}: a word", word)
    ends = np.cumsum([len(word) + 1 for word in words]).tolist()
    spans = tuple((end - 1 - len(word), end - 1) for word, end in zip(words, ends, strict=True))
    checked = tuple(None if label is None else _label(label, where) for label in labels)
    return LabelledText(name, " ".join(words), checked, spans)


def _label(label: Any, where: str) -> _Label:
    if isinstance(label, bool) or not isinstance(label, str | int) or label == "":
        raise ValueError(f"{where}: the label {json.dumps(label)} is neither a text nor an integer. Correct it.")
    return label


def _classes(texts: Iterable[LabelledText], source: str) -> tuple[str, ...]:
    """The labels that occur, sorted: integers as numbers, texts as texts."""
    labels = {label for text in texts for label in text.labels if label is not None}
    kinds = {type(label) for label in labels}
    if len(kinds) > 1:
        raise ValueError(f"{source}: some labels are texts and others integers. Use one kind for all.")
    return tuple(str(label) for label in sorted(labels))  # type: ignore[type-var]


def _tokenise(
    texts: list[LabelledText], tokenizer: Any, classes: tuple[str, ...], task: str, max_tokens: int | None
) -> LabelledDocuments:
    numbers = {name: number for number, name in enumerate(classes)}
    of_words = task == TOKEN_CLASSIFICATION
    ids, labels, kept, first_tokens = [], [], [], []
    for text, (tokens, offsets) in zip(
        texts, tokenise_texts(tokenizer, [text.text for text in texts], offsets=of_words), strict=True
    ):
        tokens = tokens[:max_tokens].astype(np.int64)
        if not len(tokens):
            continue
        own = np.array([_number(label, numbers, text.name) for label in text.labels], dtype=np.int64)
        if of_words:
            first = _first_tokens(offsets[:max_tokens], text.words or ())
            first_tokens.append(first)
            by_token = np.full(len(tokens), IGNORE)
            by_token[first[first >= 0]] = own[first >= 0]
            own = by_token
        ids.append(tokens)
        labels.append(own)
        kept.append(text)
    return LabelledDocuments(
        ids, labels, classes, task, kept, first_tokens if of_words else None, max_tokens=max_tokens
    )


def _number(label: _Label | None, numbers: dict[str, int], where: str) -> int:
    if label is None:
        return IGNORE
    if str(label) not in numbers:
        known = ", ".join(itertools.islice(numbers, 10))
        raise ValueError(
            f"{where}: the label {label!r} is not one of the model's or the training data's classes ({known}). Correct "
            "it, or train with documents that have it."
        )
    return numbers[str(label)]


def _first_tokens(offsets: np.ndarray, words: Sequence[tuple[int, int]]) -> np.ndarray:
    """The first token of each word, by the characters of tokens and words; -1 where it has none of its own."""
    first, free = np.full(len(words), -1), 0  # tokens from `free` on are no earlier word's
    starts, ends = np.maximum.accumulate(offsets, axis=0).T
    for i, (start, stop) in enumerate(words):
        token = max(free, int(np.searchsorted(ends, start, side="right")))
        if token < len(starts) and starts[token] < stop:
            first[i] = token
            free = int(np.searchsorted(starts, stop))
    return first
