# SPDX-License-Identifier: Apache-2.0
"""Sentences of real texts, between which the facts of a task are strewn."""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..data.corpora import ALL, available_splits, default_split, open_corpus
from ..data.texts import SPLITS
from ..utils.progress import ProgressBar
from .base import TRAIN

_SENTENCE = re.compile(r"\S.*?[.!?][\"'”’)]*(?=\s|$)")
_WORDS = range(4, 60)  # of a sentence; others are headings, tables or code
_BATCH = 1000  # sentences tokenised at once
MAX_TOKENS = 2_000_000  # that are kept of each split


@dataclass(frozen=True)
class Sentences:
    """Tokenised sentences in their order, of all texts one after the other.

    Attributes:
        ids: all tokens, [n].
        starts: the first token of each sentence, and n, [sentences + 1].
    """

    ids: np.ndarray
    starts: np.ndarray

    def draw(self, rng: np.random.Generator, tokens: int) -> list[np.ndarray]:
        """Sentences that follow each other, from any of them on, with exactly so many tokens. What would be the last
        one stands first, without its beginning. After the last sentence of all comes the first one again."""
        drawn: list[np.ndarray] = []
        sentence = int(rng.integers(len(self.starts) - 1))
        while tokens > 0:
            ids = self.ids[self.starts[sentence] : self.starts[sentence + 1]]
            drawn.append(ids)
            tokens -= len(ids)
            sentence = (sentence + 1) % (len(self.starts) - 1)
        return [drawn[-1][-tokens:], *drawn[:-1]] if tokens else drawn


class Filler:
    """Sentences for training, validation and test, from the splits of a corpus.

    Attributes:
        name: of the corpus.
        sentences: by the source of seeds: TRAIN, VALIDATION and TEST.
    """

    def __init__(self, tokenizer: Any, source: str, *, text_field: str = "text", max_tokens: int = MAX_TOKENS):
        """
        Args:
            source: as of `open_corpus`. A single text, or a source without a split, gives the same sentences to all.
            max_tokens: that are kept of each split.
        """
        self.name = source
        self.sentences = {}
        for number, split in enumerate(SPLITS, TRAIN):
            chosen = default_split(source, split)
            if chosen != ALL and chosen not in available_splits(source):
                chosen = available_splits(source)[0]
            corpus = open_corpus(source, chosen, text_field=text_field)
            texts = (text.text for text in corpus)
            self.sentences[number] = tokenise_sentences(tokenizer, texts, max_tokens, f"{source}, {chosen}")


def tokenise_sentences(tokenizer: Any, texts: Iterable[str], max_tokens: int, name: str) -> Sentences:
    """Cut texts into sentences and tokenise each, with a space in front."""
    parts: list[np.ndarray] = []
    total, sentences = 0, (sentence for text in texts for sentence in split_sentences(text))
    with ProgressBar(f"tokenising {name}", max_tokens, "tokens", library=True) as bar:
        while total < max_tokens and (batch := [*itertools.islice(sentences, _BATCH)]):
            encoded = tokenizer([f" {sentence}" for sentence in batch], add_special_tokens=False)["input_ids"]
            parts += [np.array(ids, dtype=np.int64) for ids in encoded]
            total += sum(map(len, encoded))
            bar.update(total)
    if not parts:
        raise ValueError(f"{name} has no sentences of {_WORDS.start} to {_WORDS.stop} words. Give another text.")
    return Sentences(np.concatenate(parts), np.cumsum([0, *map(len, parts)]))


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, without line ends, headings and code.

    >>> split_sentences("A heading\\n\\nThe cat sat on the mat. It was\\nasleep, as ever.\\n\\n    x = 1")
    ['The cat sat on the mat.', 'It was asleep, as ever.']
    """
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    sentences = (sentence for paragraph in paragraphs for sentence in _SENTENCE.findall(paragraph))
    return [sentence for sentence in sentences if len(sentence.split()) in _WORDS]
