# SPDX-License-Identifier: Apache-2.0
"""Associative retrieval, as in the paper of the Associative Recurrent Memory Transformer (arXiv 2407.04841).

A document is a list of pairs, each of which fills exactly one window, and a question in a window of its own:

    c a : f | b d : a | c c : b | ? b d : a

A key has k of 16 symbols, a value is one symbol. In `remember` all keys differ. In `rewrite` there are 16 keys, and the
value that a key was given last counts.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from ..utils.checks import check_count
from .base import Samples, Task, check_size, generator, label_answers

SYMBOLS = 16
COLON, ASK, PAD = range(SYMBOLS, SYMBOLS + 3)
NAMES = (*"abcdefghijklmnop", ":", "?", "-")
MODES = ("remember", "rewrite")


class Retrieval(Task):
    """Find the value of a key. Sizes count pairs.

    Attributes:
        mode: "remember", unique keys, or "rewrite", where the latest value of a key counts.
        key_symbols: symbols of a key.
    """

    name: ClassVar[str] = "retrieval"
    unit: ClassVar[str] = "pairs"
    vocabulary = NAMES
    window: int
    chance = 1 / SYMBOLS
    train_sizes = (2, 3, 5, 10, 20, 30, 40, 50)  # from one pair, models learn to ignore the key
    test_sizes = (1, 2, 5, 10, 20, 50, 100, 200, 500)

    def __init__(self, mode: str = "rewrite", *, key_symbols: int | None = None, window: int | None = None):
        """
        Args:
            key_symbols: by default 3 of "remember"; "rewrite" has 16 keys, of one symbol.
            window: tokens of a window; what a pair leaves is padded. By default a pair leaves nothing.
        """
        if mode not in MODES:
            raise ValueError(f"mode={mode!r} must be one of {', '.join(MODES)}.")
        check_count("key_symbols", key_symbols, optional=True)
        check_count("window", window, optional=True)
        if mode == "rewrite" and key_symbols not in (None, 1):
            raise ValueError(f"key_symbols={key_symbols}: the {SYMBOLS} keys of rewrite have one symbol. Leave it out.")
        self.mode = mode
        self.key_symbols = key_symbols or (3 if mode == "remember" else 1)
        pair = self.key_symbols + 2
        self.window = pair if window is None else window
        if self.window < pair:
            raise ValueError(f"window={window}: a pair has {pair} tokens. Use a window of at least that.")

    def settings(self) -> dict[str, Any]:
        return {"mode": self.mode, "key_symbols": self.key_symbols, "window": self.window}

    def length(self, size: int) -> int:
        return size * self.window + self.key_symbols + 3

    def samples(self, size: int, count: int, seed: Sequence[int]) -> Samples:
        check_size(self, size, count)
        rng = generator(seed)
        keys, values = self._keys(rng, size, count), rng.integers(SYMBOLS, size=(count, size))
        asked, latest = self._ask(rng, keys)
        rows = np.arange(count)
        ids = np.full((count, self.length(size)), PAD)
        pairs = ids[:, : size * self.window].reshape(count, size, self.window)  # a view
        pairs[:, :, : self.key_symbols] = self._symbols(keys)
        pairs[:, :, self.key_symbols] = COLON
        pairs[:, :, self.key_symbols + 1] = values
        question = ids[:, size * self.window :]
        question[:, 0] = ASK
        question[:, 1:-2] = self._symbols(asked)
        question[:, -2] = COLON
        question[:, -1] = values[rows, latest]
        answers = np.arange(ids.shape[1]) == ids.shape[1] - 1
        return Samples(*label_answers(ids, answers), torch.from_numpy(latest / max(size - 1, 1)))

    def _keys(self, rng: np.random.Generator, size: int, count: int) -> np.ndarray:
        """The number of each pair's key, [B, pairs]."""
        kinds = SYMBOLS**self.key_symbols
        if self.mode == "rewrite":
            return rng.integers(kinds, size=(count, size))
        if size > kinds:
            raise ValueError(
                f"size={size}: there are only {kinds} different keys of {self.key_symbols} symbols. Use longer keys "
                "(key_symbols), or fewer pairs."
            )
        return np.stack([rng.choice(kinds, size, replace=False) for _ in range(count)])

    def _ask(self, rng: np.random.Generator, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The key that is asked for, [B]: one of those given, equally likely; and the last pair that has it, [B]."""
        asked = np.array([rng.choice(np.unique(row)) for row in keys])
        latest = keys.shape[1] - 1 - (keys[:, ::-1] == asked[:, None]).argmax(axis=1)
        return asked, latest

    def _symbols(self, keys: np.ndarray) -> np.ndarray:
        """The symbols of keys, [..., k]."""
        return keys[..., None] // SYMBOLS ** np.arange(self.key_symbols)[::-1] % SYMBOLS
