# SPDX-License-Identifier: Apache-2.0
"""Text to token ids, with what the ids stand for: the one file that calls a tokenizer.

A fast tokenizer is copied, and the copy's truncation, padding and post-processor are taken off: special tokens are
not wanted, trimmed offsets would miscount, and the user's tokenizer keeps its settings and gives no warnings about
long sequences. A slow one is used through methods that change nothing.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from tokenizers import Tokenizer

_TOGETHER = 1_000_000  # characters that a tokenizer gets at once: several texts use several cores


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids and the words, UTF-8 bytes and line ends of exactly the text they stand for."""

    ids: np.ndarray
    words: int
    bytes: int
    line_ends: int


class Encoder:
    """A tokenizer with a rule: only the first `max_tokens` of a document, and `bos` in front."""

    def __init__(self, tokenizer: Any, max_tokens: int | None = None, bos: int | None = None) -> None:
        self.max_tokens = max_tokens
        self._bos = [] if bos is None else [bos]
        self._slow = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._fast = None if backend is None else Tokenizer.from_str(backend.to_str())
        # How many may encode at once. A fast one runs beside Python, which then has counts to make: two for each core;
        # Python, with one thread at a time, keeps up with some 16 cores. A slow one may not expect another thread.
        self.threads = 1 if self._fast is None else min(32, 2 * (os.cpu_count() or 1))
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
            self._fast.encode_special_tokens = bool(getattr(tokenizer, "split_special_tokens", False))
        self.identity = self._identify(tokenizer)  # before the post-processor goes: it is part of the tokenizer
        if self._fast is not None:
            self._fast.post_processor = None
        vocabulary = tokenizer.get_vocab()
        self.dtype = dtype_for(max(len(tokenizer), max(vocabulary.values(), default=0) + 1))

    def _identify(self, tokenizer: Any) -> str:
        """A digest of all that decides which tokens come out."""
        parts: tuple[Any, ...]
        if self._fast is not None:
            parts = (self._fast.to_str(), self._fast.encode_special_tokens, self._bos)
        else:
            special = sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items())
            parts = (type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), special, self._bos)
        return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def encode(self, texts: Sequence[str]) -> Iterator[Encoded]:
        """Each text alone, without special tokens."""
        if self._fast is None:
            for text in texts:
                yield self._encode_slowly(text)
        else:
            # Offsets cost time and are needed only where a text may be cut.
            encode = self._fast.encode_batch_fast if self.max_tokens is None else self._fast.encode_batch
            for text, encoding in zip(texts, encode(list(texts), add_special_tokens=False), strict=True):
                ids = encoding.ids
                if self.max_tokens is not None and len(ids) > self.max_tokens:
                    ids = ids[: self.max_tokens]
                    span = encoding.token_to_chars(self.max_tokens - 1)
                    assert span is not None, "only special tokens stand for no text"
                    text = text[: span[1]]
                yield self._counted(ids, text)

    def pieces(self, text: str) -> tuple[np.ndarray, list[str]]:
        """Token ids of a text, and the stretch of it that each stands for: one behind the other they are the text. A
        character that takes several tokens is the first one's; white space that no token stands for, the next one's."""
        if self._fast is None:
            ids = self._encode_slowly(text).ids
            return ids, self.spelt(ids.tolist())
        encoding = self._fast.encode(text, add_special_tokens=False)
        ends = accumulate((end for _, end in encoding.offsets[: self.max_tokens]), max, initial=0)
        return (
            np.array(encoding.ids[: self.max_tokens], dtype=self.dtype),
            [text[begin:end] for begin, end in pairwise(ends)],
        )

    def spelt(self, ids: Sequence[int]) -> list[str]:
        """Each token as it reads behind another: with the space in front of it, if it has one."""

        def decode(*tokens: int) -> str:
            return self._slow.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)

        other = self._slow.convert_tokens_to_ids(self._slow.tokenize("a"))[-1]
        before = len(decode(other))
        return [decode(other, token)[before:] for token in ids]

    def _encode_slowly(self, text: str) -> Encoded:
        ids = self._slow.convert_tokens_to_ids(self._slow.tokenize(text))
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            ids = ids[: self.max_tokens]
            text = self._slow.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return self._counted(ids, text)

    def _counted(self, ids: list[int], text: str) -> Encoded:
        tokens = np.array(self._bos + ids if ids else [], dtype=self.dtype)
        return Encoded(tokens, len(text.split()), len(text.encode()), text.count("\n"))


def dtype_for(vocabulary: int) -> np.dtype:
    """The smaller of two types that hold every id of a vocabulary."""
    return np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)


def check_text(name: str, text: Any) -> None:
    """Refuse what no tokenizer takes and no file can hold; half a surrogate pair gets into JSON when texts are cut."""
    if not isinstance(text, str):
        raise ValueError(f"{name} is of type {type(text).__name__}: give text.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is not Unicode: character {error.start} is {text[error.start]!r}, half of a surrogate pair."
        ) from error


def tokens_within(offsets: np.ndarray, begin: int, stop: int) -> np.ndarray:
    """Which tokens stand for some of the characters [begin, stop), by the characters each stands for, [N, 2]."""
    return np.flatnonzero((offsets[:, 0] < stop) & (offsets[:, 1] > begin))


def tokens_of(tokenizer: Any, texts: Sequence[str], offsets: bool) -> Iterator[tuple[np.ndarray, Any]]:
    """Each text's tokens without special ones, [N], and the characters each stands for, [N, 2], or None."""
    if offsets and not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} cannot tell which characters a token is: use a fast tokenizer.")
    for some in _portions(texts):
        made = tokenizer(
            some, add_special_tokens=False, truncation=False, padding=False, return_offsets_mapping=offsets,
            verbose=False,  # a text longer than the model's positions is what this is for
        )  # fmt: skip
        for i, ids in enumerate(made["input_ids"]):
            spans = np.array(made["offset_mapping"][i], dtype=np.int64).reshape(-1, 2) if offsets else None
            yield np.array(ids, dtype=np.int64), spans


def _portions(texts: Sequence[str]) -> Iterator[list[str]]:
    """Consecutive texts, until they have enough characters."""
    some: list[str] = []
    count = 0
    for text in texts:
        some.append(text)
        count += len(text)
        if count >= _TOGETHER:
            yield some
            some, count = [], 0
    if some:
        yield some
