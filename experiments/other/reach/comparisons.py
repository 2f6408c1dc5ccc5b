# SPDX-License-Identifier: Apache-2.0
"""Compare arms book by book.

All arms read the same books, and books differ far more than arms do. So arms are compared by the difference of their
losses on each book, with an interval from resampling the books.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES, CONFIDENCE = 10_000, 0.95
Result = dict[str, Any]


@dataclass(frozen=True)
class Estimate:
    """A number and its bootstrap interval over books."""

    value: float
    low: float
    high: float

    def percent(self, sign: str = "+", digits: int = 1) -> str:
        """In per cent: "-2.1 % (-2.6 to -1.7)"."""
        value, low, high = (f"{100 * number:{sign}.{digits}f}" for number in (self.value, self.low, self.high))
        return f"{value} % ({low} to {high})"


def change(result: Result, other: Result) -> Estimate:
    """The relative difference of a result's word perplexity from another's."""
    nats, words = _books(result, other)
    per_word = [(_resample(side) / _resample(words)) for side in nats]
    return _estimate(math.exp(_whole(nats[0], words) - _whole(nats[1], words)) - 1, np.expm1(per_word[0] - per_word[1]))


def cost(result: Result) -> float:
    """FLOPs per token, without the vocabulary projection."""
    return result["flops"]["base"] + result["flops"]["recurrence"]


def share_of_the_way(result: Result, start: Result, goal: Result) -> Estimate:
    """How far a result is on the way from one to another, in nats per word."""
    own, first, last = _books(result, start, goal)[0]
    ratio = _resample(first - own) / _resample(first - last)
    return _estimate(float((first - own).sum() / (first - last).sum()), ratio)


def _books(*results: Result) -> tuple[list[np.ndarray], np.ndarray]:
    """The nats of each book, for each result, and its words."""
    words = [result["books"]["words"] for result in results]
    if any(other != words[0] for other in words):
        raise ValueError("results on different books cannot be compared book by book. Measure all arms on the same.")
    return [np.array(result["books"]["nats"]) for result in results], np.array(words[0], dtype=float)


def _whole(nats: np.ndarray, words: np.ndarray) -> float:
    return float(nats.sum() / words.sum())


def _resample(values: np.ndarray) -> np.ndarray:
    """Sums over books that are drawn with replacement, the same books for values of the same length."""
    drawn = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    return values[drawn].sum(axis=1)


def _estimate(value: float, resampled: np.ndarray) -> Estimate:
    low, high = np.quantile(resampled, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(value, float(low), float(high))
