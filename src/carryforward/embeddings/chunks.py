# SPDX-License-Identifier: Apache-2.0
"""Chunks of documents: which tokens belong to a span of characters, and the spans of chunks of so many tokens.

A token belongs to every span that contains its last character. So a token that begins with a space belongs to the word
behind the space, and spans that divide a text divide its tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..data.tokenization import tokenise_texts
from ..memories.base import is_int

Spans = Sequence[Sequence[tuple[int, int]]]


@dataclass(frozen=True)
class ChunkVectors:
    """The vectors of one document's C chunks.

    Attributes:
        vectors: one vector per chunk, [C, k]; zero for a chunk without tokens.
        spans: the characters [start, stop) of each chunk in the text, [C, 2].
    """

    vectors: np.ndarray
    spans: np.ndarray


@dataclass(frozen=True)
class Document:
    """A tokenised text, with a prompt in front.

    Attributes:
        ids: of all tokens, those of the prompt first, [N].
        offsets: the characters [start, stop) of each token in the text, [N, 2]; None if they were not asked for.
        places: the character that decides to which spans a token belongs: its last one, in ascending order, [N].
            Negative for tokens of the prompt.
    """

    ids: np.ndarray
    offsets: np.ndarray | None = None
    places: np.ndarray | None = None

    @property
    def whole(self) -> np.ndarray:
        """The range of all tokens, [1, 2]."""
        return np.array([[0, len(self.ids)]])

    @property
    def own(self) -> int:
        """The number of tokens of the prompt."""
        assert self.places is not None, "tokenised with offsets"
        return int(np.searchsorted(self.places, 0))

    def chunks(self, chunks: int | Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """The tokens [first, last) and the spans of chunks of so many tokens, or of these spans: [C, 2] each."""
        assert self.offsets is not None, "tokenised with offsets"
        assert self.places is not None, "tokenised with offsets"
        if not isinstance(chunks, int):
            spans = np.array(chunks, np.int64).reshape(-1, 2)
            return np.searchsorted(self.places, spans), spans
        first = np.arange(self.own, len(self.ids), chunks)
        last = np.minimum(first + chunks, len(self.ids))
        spans = np.stack([self.offsets[first, 0].clip(0), self.places[last - 1] + 1], axis=1)
        return np.stack([first, last], axis=1), spans


def tokenise_documents(tokenizer: Any, texts: Sequence[str], prompt: str, *, offsets: bool) -> list[Document]:
    """Tokenise texts with a prompt in front of each."""
    documents = []
    prompted = [prompt + text for text in texts]
    for text, (ids, spans) in zip(prompted, tokenise_texts(tokenizer, prompted, offsets=offsets), strict=True):
        if not offsets:
            documents.append(Document(ids))
            continue
        last = np.clip(np.maximum(spans[:, 1] - 1, spans[:, 0]), 0, max(len(text) - 1, 0))
        documents.append(Document(ids, spans - len(prompt), np.maximum.accumulate(last) - len(prompt)))
    return documents


def check_chunks(chunks: Any, output: str, texts: Sequence[str]) -> None:
    """Raise ValueError unless `chunks` is a size or has spans for each text, and is given for the output "chunks"."""
    if output != "chunks":
        if chunks is not None:
            raise ValueError(f'chunks is given, but output={output!r}. Use output="chunks", or leave it out.')
        return
    if is_int(chunks) and chunks > 0:
        return
    if not isinstance(chunks, Sequence) or isinstance(chunks, str):
        raise ValueError(
            f'chunks={chunks!r}: output="chunks" needs the tokens of a chunk (an integer above 0), or for each text '
            "its spans of characters, such as [[(0, 120), (120, 300)]]."
        )
    if len(chunks) != len(texts):
        raise ValueError(
            f"chunks has the spans of {len(chunks)} texts, and there are {len(texts)}. Give a list for each text."
        )
    for i, (spans, text) in enumerate(zip(chunks, texts, strict=True)):
        check_spans(spans, len(text), f"chunks[{i}]")


def check_spans(spans: Any, length: int, name: str) -> None:
    """Raise ValueError for anything but spans in a text of `length` characters."""
    if isinstance(spans, str) or not isinstance(spans, Iterable):
        raise ValueError(f"{name} is of type {type(spans).__name__}: give a list of [start, stop] characters.")
    for i, span in enumerate(spans):
        ends = span if isinstance(span, list | tuple | np.ndarray) else ()
        integers = all(is_int(end) or isinstance(end, np.integer) for end in ends)
        if len(ends) != 2 or not integers or not 0 <= ends[0] < ends[1] <= length:
            raise ValueError(
                f"{name}[{i}]={span!r} must be two integers, 0 <= start < stop <= {length}, characters of the text."
            )
