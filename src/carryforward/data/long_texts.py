# SPDX-License-Identifier: Apache-2.0
"""Tokenization of long texts in overlapping pieces, with the tokens of the whole text, in bounded memory.

A fast tokenizer needs over 100 bytes per character while it works. Here it works on one piece at a time; consecutive
pieces overlap, and are joined where both have the same tokens.

Why the tokens are those of the whole text: normalizers, added tokens and pre-tokenizers work from left to right, and
look ahead and back by a few characters (or to the end of a run, such as white space). So a piece has the right tokens
except near its edges, once the beginning of a word in it is right. Two pieces are joined in the middle of their
overlap, at least a quarter of it away from their edges, and only if all tokens around are the same (id, characters,
beginning of a word):

- between two words: the model (BPE, WordPiece, Unigram, WordLevel) tokenises each word on its own;
- within a word that is longer than that, only with BPE. A sequence of tokens is the BPE of its text if each pair of
  neighbours is the BPE of theirs: the first merge across a border between tokens would be the first across it in the
  pair, too. Each pair here comes from one of the two pieces.

Where this fails, the earlier piece is made twice as long, in the worst case up to the end of the text. So the memory is
not bounded for WordPiece and Unigram without word borders, which must see a whole word, and for BPE where the pieces
never get in step (one repeated character after a prefix).

The limit: a pattern that decides about a word by text that is more than a quarter of the overlap away, such as
`a+(?=b)|a` on a very long run of "a", is not noticed if both pieces end before that text. Tokenizers with BPE dropout
are random, in pieces as on the whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import BPE

SIZE = 1 << 19  # characters of a piece: about 100 MB while it is tokenised
OVERLAP = 1 << 12  # characters that consecutive pieces share; much more than a token


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of a text.

    Attributes:
        ids: token ids, [n].
        offsets: the characters of each token in the whole text, [n, 2]; None unless they were asked for.
        start, stop: the characters from this piece's first token (or the text's start) to the next piece's.
    """

    ids: np.ndarray
    offsets: np.ndarray | None
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Joint:
    """Where to join two pieces.

    Attributes:
        begin: where the later piece begins.
        start: the first character of the first token that is taken from the later piece.
        last: ids with which the earlier piece must end; the `drop` last ones are not taken from it.
        first: ids with which the later piece must begin; the `skip` first ones are not taken from it.
    """

    begin: int
    start: int
    last: np.ndarray
    drop: int
    first: np.ndarray
    skip: int

    def fits(self, earlier: np.ndarray, later: np.ndarray) -> bool:
        """Whether the pieces have the tokens that were found around their edges."""
        return np.array_equal(earlier[-len(self.last) :], self.last) and np.array_equal(
            later[: len(self.first)], self.first
        )


class _Span:
    """The tokens of a short part of a text, with their characters in the text and the beginnings of words."""

    def __init__(self, encoding: Any, start: int) -> None:
        self.ids = np.array(encoding.ids, np.int64)
        self.starts, self.ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T + start
        words = np.array([-1 if word is None else word for word in encoding.word_ids], np.int64)
        self.begins_word = np.diff(words, prepend=-1) != 0

    def between(self, start: int, stop: int) -> slice:
        """The tokens of the characters [start, stop)."""
        first, end = np.searchsorted(self.starts, start), np.searchsorted(self.ends, stop, side="right")
        return slice(int(first), max(int(first), int(end)))

    def word_beginnings(self, tokens: slice) -> np.ndarray:
        """The indices of those of these tokens that begin a word."""
        return tokens.start + np.flatnonzero(self.begins_word[tokens])

    def same(self, tokens: slice, other: "_Span", others: slice) -> bool:
        """Whether these tokens are the same as those of another span."""
        return all(
            np.array_equal(getattr(self, name)[tokens], getattr(other, name)[others])
            for name in ("ids", "starts", "ends", "begins_word")
        )


class LongTextTokenizer:
    """A fast tokenizer that tokenises long texts in pieces."""

    def __init__(self, tokenizer: Tokenizer, size: int, overlap: int) -> None:
        """
        Args:
            tokenizer: it must neither truncate nor pad. It adds no special tokens here.
            size: characters of a piece.
            overlap: characters that consecutive pieces share.
        """
        assert size >= 4 * overlap
        self._tokenizer, self.size, self.overlap = tokenizer, size, overlap
        self._joins_within_words = isinstance(tokenizer.model, BPE)

    def encode(self, text: str, offsets: bool = False) -> Iterator[Piece]:
        """Yield the pieces of a text. All but the only one of a text without tokens have tokens."""
        begin, start, stop, skip = 0, 0, self.size, 0
        tokens = self._encode(text, begin, stop, offsets)
        while stop < len(text):
            joint = self._find_joint(text, begin, stop)
            later = None if joint is None else self._encode(text, joint.begin, joint.begin + self.size, offsets)
            if joint is not None and later is not None and joint.fits(tokens.ids, later.ids):
                yield _part(tokens, slice(skip, len(tokens.ids) - joint.drop), start, joint.start)
                tokens, begin, start, stop, skip = later, joint.begin, joint.start, later.stop, joint.skip
            else:
                stop = begin + 2 * (stop - begin)
                tokens = self._encode(text, begin, stop, offsets)
        yield _part(tokens, slice(skip, None), start, len(text))

    def _encode(self, text: str, begin: int, stop: int, offsets: bool) -> Piece:
        # Offsets double the time. A batch, because for a single text the tokenizer does not release the GIL.
        encode = self._tokenizer.encode_batch if offsets else self._tokenizer.encode_batch_fast
        (encoding,) = encode([text[begin:stop]], add_special_tokens=False)
        spans = np.array(encoding.offsets, np.int64).reshape(-1, 2) + begin if offsets else None
        return Piece(np.array(encoding.ids, np.uint32), spans, begin, stop)

    def _find_joint(self, text: str, begin: int, stop: int) -> _Joint | None:
        """Find where the piece [begin, stop) and the next one can be joined; None if nowhere."""
        quarter = self.overlap // 4
        tail = self._span(text, max(begin, stop - 2 * self.overlap), stop)
        first = tail.between(stop - self.overlap, stop - 3 * quarter)
        if first.start == first.stop:
            return None
        words = tail.word_beginnings(first)
        # The next piece begins at a token: patterns such as \d{1,3} are in step with this piece.
        next_begin = int(tail.starts[words[0] if len(words) else first.start])
        head = self._span(text, next_begin, next_begin + 2 * self.overlap)
        middle = next_begin + quarter, stop - quarter
        ours, theirs = tail.between(*middle), head.between(*middle)
        if not tail.same(ours, head, theirs):
            return None
        inner = slice(ours.start + 1, ours.stop)  # the tokens on both sides of the joint are among the same ones
        cuts = tail.word_beginnings(inner)
        if not len(cuts) and self._joins_within_words:
            cuts = np.arange(inner.start, inner.stop)
        if not len(cuts):
            return None
        cut = int(cuts[len(cuts) // 2])
        skip = theirs.start + cut - ours.start
        last, first_ids = tail.ids[ours.start :], head.ids[: theirs.stop]
        return _Joint(next_begin, int(tail.starts[cut]), last, len(tail.ids) - cut, first_ids, skip)

    def _span(self, text: str, begin: int, stop: int) -> _Span:
        (encoding,) = self._tokenizer.encode_batch([text[begin:stop]], add_special_tokens=False)
        return _Span(encoding, begin)


def _part(piece: Piece, tokens: slice, start: int, stop: int) -> Piece:
    return Piece(piece.ids[tokens], None if piece.offsets is None else piece.offsets[tokens], start, stop)
