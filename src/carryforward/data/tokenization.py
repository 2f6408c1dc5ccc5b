# SPDX-License-Identifier: Apache-2.0
"""Tokenization of texts, with the counts of the text that the tokens cover.

`Encoder` copies a fast tokenizer and removes truncation, padding and the post-processor from the copy: no special
tokens are added, offsets are not trimmed, and the user's tokenizer is not changed and does not warn about long
sequences. A slow tokenizer is used only through methods that do not change it.
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

_LEAST_SHARE = 0.5  # tokens of a tokenizer, of its model's vocabulary
_SAMPLE = (
    "The quick brown Fox, 12345 naïve Übermenschen; don't   x_y=z+1\n\tΩμέγα 漢字 🙂 antidisestablishmentarianism."
)
_BATCH = 1_000_000  # characters per call of a tokenizer: with several texts, it uses several cores


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids, and the counts of words, UTF-8 bytes and line ends of exactly the text that they cover."""

    ids: np.ndarray
    words: int
    bytes: int
    line_ends: int


class Encoder:
    """A tokenizer that truncates documents to `max_tokens` and puts `bos` in front."""

    def __init__(self, tokenizer: Any, max_tokens: int | None = None, bos: int | None = None) -> None:
        self.max_tokens = max_tokens
        self._bos = [] if bos is None else [bos]
        self._slow = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._fast = None if backend is None else Tokenizer.from_str(backend.to_str())
        # Threads that may encode at once. A fast tokenizer releases the GIL: two threads per core, so that cores are
        # busy while one thread counts words. Counting needs the GIL: more than 32 would not help. A slow tokenizer may
        # not be thread-safe.
        self.threads = 1 if self._fast is None else min(32, 2 * (os.cpu_count() or 1))
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
            self._fast.encode_special_tokens = bool(getattr(tokenizer, "split_special_tokens", False))
        self.identity = self._identify(tokenizer)  # before the post-processor is removed, which is part of the identity
        if self._fast is not None:
            self._fast.post_processor = None
        vocabulary = tokenizer.get_vocab()
        self.dtype = dtype_for(max(len(tokenizer), max(vocabulary.values(), default=0) + 1))

    def _identify(self, tokenizer: Any) -> str:
        """Return a digest of everything that the token ids depend on."""
        parts: tuple[Any, ...]
        if self._fast is not None:
            parts = (self._fast.to_str(), self._fast.encode_special_tokens, self._bos)
        else:
            special = sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items())
            parts = (type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), special, self._bos)
        return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def encode(self, texts: Sequence[str]) -> Iterator[Encoded]:
        """Encode each text, without special tokens."""
        if self._fast is None:
            for text in texts:
                yield self._encode_slow(text)
        else:
            # Offsets take time, and are needed only to truncate a text.
            encode = self._fast.encode_batch_fast if self.max_tokens is None else self._fast.encode_batch
            for text, encoding in zip(texts, encode(list(texts), add_special_tokens=False), strict=True):
                ids = encoding.ids
                if self.max_tokens is not None and len(ids) > self.max_tokens:
                    ids = ids[: self.max_tokens]
                    span = encoding.token_to_chars(self.max_tokens - 1)
                    assert span is not None, "only special tokens cover no text"
                    text = text[: span[1]]
                yield self._with_counts(ids, text)

    def encode_pieces(self, text: str) -> tuple[np.ndarray, list[str]]:
        """Return the token ids of a text and the piece of text of each token; joined, the pieces are the text.

        A character of several tokens belongs to the first one, white space without a token to the next one.
        """
        if self._fast is None:
            ids = self._encode_slow(text).ids
            return ids, self.token_strings(ids.tolist())
        encoding = self._fast.encode(text, add_special_tokens=False)
        ends = accumulate((end for _, end in encoding.offsets[: self.max_tokens]), max, initial=0)
        return (
            np.array(encoding.ids[: self.max_tokens], dtype=self.dtype),
            [text[start:end] for start, end in pairwise(ends)],
        )

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token as it reads after another one: with its leading space, if it has one."""

        def decode(*tokens: int) -> str:
            return self._slow.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)

        first = self._slow.convert_tokens_to_ids(self._slow.tokenize("a"))[-1]
        length = len(decode(first))
        return [decode(first, token)[length:] for token in ids]

    def _encode_slow(self, text: str) -> Encoded:
        ids = self._slow.convert_tokens_to_ids(self._slow.tokenize(text))
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            ids = ids[: self.max_tokens]
            text = self._slow.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return self._with_counts(ids, text)

    def _with_counts(self, ids: list[int], text: str) -> Encoded:
        tokens = np.array(self._bos + ids if ids else [], dtype=self.dtype)
        return Encoded(tokens, len(text.split()), len(text.encode()), text.count("\n"))


def dtype_for(vocabulary: int) -> np.dtype:
    """Return the smallest type, uint16 or uint32, for the ids of a vocabulary of this size."""
    return np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)


def check_text(name: str, text: Any) -> None:
    """Raise a ValueError for anything but text that can be encoded as UTF-8.

    JSON may contain halves of surrogate pairs, where texts were truncated in the middle of a character.
    """
    if not isinstance(text, str):
        raise ValueError(f"{name} is of type {type(text).__name__}: give a string.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is not Unicode: character {error.start} is {text[error.start]!r}, half of a surrogate pair."
        ) from error


def token_array(ids: Any, name: str) -> np.ndarray:
    """Return a document's token ids as 64-bit integers, [N]; raise a ValueError for anything else."""
    try:
        array = np.asarray(ids)
    except (ValueError, TypeError) as error:  # rows of different lengths, a tensor on a GPU
        raise ValueError(f"{name} must be a list of integers: {error}") from error
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise ValueError(f"{name} has shape {list(array.shape)} and type {array.dtype}: give a list of integers.")
    return array.astype(np.int64)


def check_tokenizer(
    tokenizer: Any, vocabulary: int | None = None, *, name: str = "tokenizer", advice: str = ""
) -> None:
    """Raise a ValueError for a tokenizer that cannot be a model's.

    Refused are a tokenizer with fewer tokens than half of the model's vocabulary, and one with ids beyond it. Published
    tokenizers have nearly as many tokens as their models: 30,522 of 30,522 (BERT), 50,277 of 50,304 (Pythia), 151,665
    of 152,064 (Qwen2.5), 50,295 of 51,200 (Phi); transformers makes one of 1 to 5 tokens from a folder that has none.
    Special tokens beyond the vocabulary are accepted, as some models have them: texts do not contain them, padding is
    not read.

    Args:
        vocabulary: the number of tokens that the model has an embedding for; None checks only that it is a tokenizer.
        name: what the message calls it.
        advice: what to do, for the end of the message.
    """
    if not callable(tokenizer) or isinstance(tokenizer, type):
        raise ValueError(f"{name} is of type {type(tokenizer).__name__}: give a tokenizer of transformers.")
    if vocabulary is None or not hasattr(tokenizer, "get_vocab"):
        return
    ids = tokenizer.get_vocab()
    advice = advice or "Give the tokenizer that belongs to the model."
    if len(ids) < vocabulary * _LEAST_SHARE:
        raise ValueError(f"{name} has {len(ids):,} tokens, and the model a vocabulary of {vocabulary:,}. {advice}")
    special = {number for number, token in _added_tokens(tokenizer).items() if token.special}
    beyond = {number: token for token, number in ids.items() if number >= vocabulary and number not in special}
    if beyond:
        last = max(beyond)
        raise ValueError(
            f"{name} gives ids up to {last:,} ({beyond[last]!r}), and the model's vocabulary ends at "
            f"{vocabulary - 1:,}. {advice}"
        )


def _added_tokens(tokenizer: Any) -> dict[int, Any]:
    return getattr(tokenizer, "added_tokens_decoder", {})


def fingerprint(tokenizer: Any) -> str:
    """Return a digest of a tokenizer: of its vocabulary and of how it splits a sample.

    It does not change when a tokenizer is saved and loaded, or when padding or truncation are set.
    """
    sample = tokenizer.convert_tokens_to_ids(tokenizer.tokenize(_SAMPLE))
    content = [sorted(tokenizer.get_vocab().items()), sample]
    return blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


def tokens_in_span(offsets: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Return the indices of the tokens that overlap the characters [start, stop), given all tokens' offsets, [N, 2]."""
    return np.flatnonzero((offsets[:, 0] < stop) & (offsets[:, 1] > start))


def tokenise_texts(tokenizer: Any, texts: Sequence[str], offsets: bool) -> Iterator[tuple[np.ndarray, Any]]:
    """Yield each text's token ids, [N], without special tokens, and their character offsets, [N, 2], or None."""
    if offsets and not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} does not give the offsets of tokens: use a fast tokenizer.")
    for batch in _batches(texts):
        encoded = tokenizer(
            batch, add_special_tokens=False, truncation=False, padding=False, return_offsets_mapping=offsets,
            verbose=False,  # no warning about texts that are longer than the model's positions
        )  # fmt: skip
        for i, ids in enumerate(encoded["input_ids"]):
            spans = np.array(encoded["offset_mapping"][i], dtype=np.int64).reshape(-1, 2) if offsets else None
            yield np.array(ids, dtype=np.int64), spans


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield consecutive texts in batches of at least `_BATCH` characters; the last one may be smaller."""
    batch: list[str] = []
    count = 0
    for text in texts:
        batch.append(text)
        count += len(text)
        if count >= _BATCH:
            yield batch
            batch, count = [], 0
    if batch:
        yield batch
