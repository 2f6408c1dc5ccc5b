# SPDX-License-Identifier: Apache-2.0
"""Copy and reverse, as in the appendix of the paper of the Recurrent Memory Transformer (arXiv 2207.06881).

A document is a sequence of symbols and its repetition, or its reverse:

    < c a f b | c > c a f | b c

Windows are cut so that the whole takes a given number of them: what is repeated was read several windows before.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from ..utils.checks import check_count
from .base import Samples, Task, check_size, generator, label_answers

SYMBOLS = 16
BEGIN, REPEAT = range(SYMBOLS, SYMBOLS + 2)
NAMES = (*"abcdefghijklmnop", "<", ">")


class Copy(Task):
    """Repeat a sequence. Sizes count its symbols; accuracy is that of single symbols.

    Attributes:
        symbols: of the longest sequence, which takes `windows` windows.
    """

    name: ClassVar[str] = "copy"
    unit: ClassVar[str] = "symbols"
    whole_answers: ClassVar[bool] = False
    vocabulary = NAMES
    chance = 1 / SYMBOLS
    window: int

    def __init__(self, symbols: int = 24, windows: int = 4):
        check_count("symbols", symbols)
        check_count("windows", windows)
        self.symbols, self.windows = symbols, windows
        tokens = 2 * symbols + 1  # read; the last symbol is only predicted
        self.window = -(-tokens // windows)
        if -(-tokens // self.window) != windows:
            possible = sorted({-(-tokens // window) for window in range(1, tokens + 1)}, key=lambda n: abs(n - windows))
            raise ValueError(
                f"windows={windows}: {symbols} symbols and their repetition, {tokens} tokens, cannot be cut into so "
                f"many equal windows. Use {min(possible[:2])} or {max(possible[:2])}."
            )
        self.train_sizes = tuple(sorted({self._symbols_in(number) for number in range(1, windows)} | {symbols}))
        self.test_sizes = self.train_sizes

    def settings(self) -> dict[str, Any]:
        return {"symbols": self.symbols, "windows": self.windows, "window": self.window}

    def _symbols_in(self, windows: int) -> int:
        """How many symbols take so many windows, with their repetition."""
        return max((windows * self.window - 1) // 2, 1)

    def length(self, size: int) -> int:
        return 2 * size + 2

    def samples(self, size: int, count: int, seed: Sequence[int]) -> Samples:
        check_size(self, size, count)
        sequence = generator(seed).integers(SYMBOLS, size=(count, size))
        begin, repeat = (np.full((count, 1), symbol) for symbol in (BEGIN, REPEAT))
        ids = np.concatenate([begin, sequence, repeat, self._answer(sequence)], axis=1)
        return Samples(*label_answers(ids, np.arange(self.length(size)) >= size + 2))

    def _answer(self, sequence: np.ndarray) -> np.ndarray:
        """What follows a sequence [B, n]."""
        return sequence


class Reverse(Copy):
    """Repeat a sequence backwards. Sizes count its symbols; accuracy is that of single symbols."""

    name: ClassVar[str] = "reverse"

    def _answer(self, sequence: np.ndarray) -> np.ndarray:
        return sequence[:, ::-1]
