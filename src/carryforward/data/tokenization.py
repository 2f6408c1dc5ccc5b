# SPDX-License-Identifier: Apache-2.0
"""Tokenization of texts, with the counts of the text that the tokens cover.

`Encoder` copies a fast tokenizer and removes truncation, padding and the post-processor from the copy: no special
tokens are added, offsets are not trimmed, and the user's tokenizer is not changed and does not warn about long
sequences. A slow tokenizer is used only through methods that do not change it.

Long texts are tokenised in pieces (long_texts.py): besides the text and its tokens, memory does not grow with their
length. A slow tokenizer gives no offsets to join pieces by, and gets the whole text.
"""

import copy
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from tokenizers import Tokenizer

from .long_texts import OVERLAP, SIZE, LongTextTokenizer, Piece
from .texts import count_text, find_surrogate

_LEAST_SHARE = 0.5  # tokens of a tokenizer, of its model's vocabulary
_SAMPLE = (
    "The quick brown Fox, 12345 naïve Übermenschen; don't   x_y=z+1\n\tΩμέγα 漢字 🙂 antidisestablishmentarianism."
)
_BATCH = 1_000_000  # characters per call of a tokenizer: with several texts, it uses several cores
_NO_LIMIT = int(1e30)  # `model_max_length` of transformers' tokenizers that know none
_Item = TypeVar("_Item")


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
        self._fast = _copy_backend(tokenizer)
        # Threads that may encode at once. A fast tokenizer releases the GIL: two threads per core, so that cores are
        # busy while one thread counts words. Counting needs the GIL: more than 32 would not help. A slow tokenizer may
        # not be thread-safe.
        self.threads = 1 if self._fast is None else min(32, 2 * (os.cpu_count() or 1))
        self.identity = self._identify(tokenizer)  # before the post-processor is removed, which is part of the identity
        self._long: LongTextTokenizer | None = None
        if self._fast is not None:
            self._fast.post_processor = None
            # Of a text that is truncated, little more than its beginning is tokenised.
            size = SIZE if max_tokens is None else min(SIZE, 16 * max(OVERLAP, max_tokens))
            self._long = LongTextTokenizer(self._fast, size, OVERLAP)
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
        short = iter(self._encode_short([text for text in texts if not self._is_long(text)]))
        for text in texts:
            yield _join_parts(list(self.encode_parts(text))) if self._is_long(text) else next(short)

    def encode_parts(self, text: str) -> Iterator[Encoded]:
        """Yield a text as one part or, if it is long, as consecutive parts whose counts add up to the text's."""
        if not self._is_long(text):
            yield from self._encode_short([text])
            return
        assert self._long is not None
        bos, left = self._bos, self.max_tokens
        for piece in self._long.encode(text, offsets=left is not None):
            ids, stop, final = piece.ids, piece.stop, piece.stop == len(text)
            if left is not None and len(ids) + (not final) > left:  # after a piece that is not the last, tokens follow
                assert piece.offsets is not None
                ids, stop, final = ids[:left], int(piece.offsets[left - 1, 1]), True
            yield self._with_counts(bos, ids, text, piece.start, stop)
            if final:
                return
            bos, left = [], None if left is None else left - len(ids)

    def encode_pieces(self, text: str) -> tuple[np.ndarray, list[str]]:
        """Return the token ids of a text and the piece of text of each token; joined, the pieces are the text.

        A character of several tokens belongs to the first one, white space without a token to the next one.
        """
        if self._long is None:
            ids = self._encode_short([text])[0].ids
            return ids, self.token_strings(ids.tolist())
        ids, offsets = _collect(self._long.encode(text, offsets=True), self.max_tokens)
        ends = np.maximum.accumulate(offsets[:, 1]).tolist()
        return ids.astype(self.dtype), [text[start:end] for start, end in pairwise([0, *ends])]

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token as it reads after another one: with its leading space, if it has one."""

        def decode(*tokens: int) -> str:
            return self._slow.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)

        first = self._slow.convert_tokens_to_ids(self._slow.tokenize("a"))[-1]
        length = len(decode(first))
        return [decode(first, token)[length:] for token in ids]

    def _is_long(self, text: str) -> bool:
        return self._long is not None and len(text) > self._long.size

    def _encode_short(self, texts: list[str]) -> list[Encoded]:
        if self._fast is None:
            return [self._encode_slow(text) for text in texts]
        # Offsets take time, and are needed only to truncate a text.
        encode = self._fast.encode_batch_fast if self.max_tokens is None else self._fast.encode_batch
        encodings = encode(texts, add_special_tokens=False)
        return [self._truncated(text, encoding) for text, encoding in zip(texts, encodings, strict=True)]

    def _truncated(self, text: str, encoding: Any) -> Encoded:
        ids, stop = encoding.ids, len(text)
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            ids = ids[: self.max_tokens]
            span = encoding.token_to_chars(self.max_tokens - 1)
            assert span is not None, "only special tokens cover no text"
            stop = span[1]
        return self._with_counts(self._bos, ids, text, 0, stop)

    def _encode_slow(self, text: str) -> Encoded:
        ids = self._slow.convert_tokens_to_ids(self._slow.tokenize(text))
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            ids = ids[: self.max_tokens]
            text = self._slow.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return self._with_counts(self._bos, ids, text, 0, len(text))

    def _with_counts(self, bos: list[int], ids: Any, text: str, start: int, stop: int) -> Encoded:
        """Return token ids with `bos` in front, if there are any, and the counts of text[start:stop]."""
        tokens = np.array(ids, dtype=self.dtype)
        if bos and len(tokens):
            tokens = np.insert(tokens, 0, bos)
        return Encoded(tokens, *count_text(text, start, stop))


def _join_parts(parts: Sequence[Encoded]) -> Encoded:
    """Return consecutive parts of a text as one."""
    counts = zip(*((part.words, part.bytes, part.line_ends) for part in parts), strict=True)
    return Encoded(np.concatenate([part.ids for part in parts]), *map(sum, counts))


def _copy_backend(tokenizer: Any) -> Tokenizer | None:
    """Return a copy of a fast tokenizer that does not truncate and pad; None for a slow tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    copy = Tokenizer.from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    copy.encode_special_tokens = bool(getattr(tokenizer, "split_special_tokens", False))
    return copy


def dtype_for(vocabulary: int) -> np.dtype:
    """Return the smallest type, uint16 or uint32, for the ids of a vocabulary of this size."""
    return np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)


def check_text(name: str, text: Any) -> None:
    """Raise a ValueError for anything but text that can be encoded as UTF-8.

    JSON may contain halves of surrogate pairs, where texts were truncated in the middle of a character.
    """
    if not isinstance(text, str):
        raise ValueError(f"{name} is of type {type(text).__name__}: give a string.")
    if (index := find_surrogate(text)) is not None:
        raise ValueError(f"{name} is not Unicode: character {index} is {text[index]!r}, half of a surrogate pair.")


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
    if vocabulary is None or not hasattr(tokenizer, "get_vocab") or vocabulary in _FITTING.get(tokenizer, ()):
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
    _FITTING.setdefault(tokenizer, set()).add(vocabulary)


# The vocabularies that a tokenizer was found to fit. Cached because reading its tokens takes tens of milliseconds; ids
# of tokens that are added later are checked by the model.
_FITTING: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()


def _added_tokens(tokenizer: Any) -> dict[int, Any]:
    return getattr(tokenizer, "added_tokens_decoder", {})


def without_length_limit(tokenizer: Any) -> Any:
    """A copy of a tokenizer that has no maximum length, since a recurrent model has none: at `model_max_length`
    transformers' token classification cuts texts off without a word."""
    unlimited = copy.deepcopy(tokenizer)
    unlimited.model_max_length = _NO_LIMIT
    return unlimited


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
    """Yield each text's token ids, int32 [N], without special tokens, and their character offsets, int64 [N, 2], or
    None."""
    if offsets and not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} does not give the offsets of tokens: use a fast tokenizer.")
    backend: Tokenizer | None = None
    for batch in batches(texts, len, full=_BATCH, alone=SIZE):
        if len(batch[0]) > SIZE and (backend := backend or _copy_backend(tokenizer)) is not None:
            ids, spans = _collect(LongTextTokenizer(backend, SIZE, OVERLAP).encode(batch[0], offsets))
            yield ids, spans if offsets else None
            continue
        encoded = tokenizer(
            batch, add_special_tokens=False, truncation=False, padding=False, return_offsets_mapping=offsets,
            verbose=False,  # no warning about texts that are longer than the model's positions
        )  # fmt: skip
        for i, token_ids in enumerate(encoded["input_ids"]):
            pairs = np.array(encoded["offset_mapping"][i], dtype=np.int64).reshape(-1, 2) if offsets else None
            yield np.array(token_ids, dtype=np.int32), pairs


def _collect(pieces: Iterable[Piece], max_tokens: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids, int32, and offsets of all pieces, or of the first `max_tokens` tokens."""
    ids, offsets = bytearray(), bytearray()  # they grow in place: joining arrays would take twice the memory
    for piece in pieces:
        ids += piece.ids.astype(np.int32).tobytes()
        offsets += b"" if piece.offsets is None else piece.offsets.tobytes()
        if max_tokens is not None and len(ids) >= max_tokens * np.int32().itemsize:
            break
    return np.frombuffer(ids, np.int32)[:max_tokens], np.frombuffer(offsets, np.int64).reshape(-1, 2)[:max_tokens]


def batches(items: Iterable[_Item], length: Callable[[_Item], int], full: int, alone: int) -> Iterator[list[_Item]]:
    """Yield consecutive items in batches. A batch ends when it has the length `full`; an item that is longer than
    `alone` is a batch of its own."""
    batch, total = list[_Item](), 0
    for item in items:
        if batch and length(item) > alone:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += length(item)
        if total >= full or total > alone:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch
