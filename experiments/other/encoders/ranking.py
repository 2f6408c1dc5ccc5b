# SPDX-License-Identifier: Apache-2.0
"""Scores of rankings, spans of words, and intervals."""

import re
from collections.abc import Hashable, Sequence

import numpy as np


def word_spans(text: str, words: int) -> list[tuple[int, int]]:
    """The characters of consecutive stretches of so many words."""
    found = [match.span() for match in re.finditer(r"\S+", text)]
    return [(found[i][0], found[min(i + words, len(found)) - 1][1]) for i in range(0, len(found), words)]


def ndcg(ranked: Sequence[Hashable], relevant: set[Hashable], depth: int = 10) -> float:
    """nDCG of a ranking with relevant and other items. An item that occurs again does not count."""
    distinct = list(dict.fromkeys(ranked))[:depth]
    gain = sum(1 / np.log2(rank + 2) for rank, item in enumerate(distinct) if item in relevant)
    return float(gain / sum(1 / np.log2(rank + 2) for rank in range(min(len(relevant), depth))))


def rankings(queries: np.ndarray, items: np.ndarray, depth: int) -> np.ndarray:
    """The indices of the `depth` nearest items of each query by cosine, the nearest first, [Q, depth]."""
    scores = unit(queries) @ unit(items).T
    depth = min(depth, scores.shape[1])
    nearest = np.argpartition(-scores, depth - 1, axis=1)[:, :depth]
    order = np.argsort(-np.take_along_axis(scores, nearest, axis=1), axis=1, kind="stable")
    return np.take_along_axis(nearest, order, axis=1)


def unit(vectors: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(lengths > 0, lengths, 1)


def interval(values: Sequence[float], groups: Sequence[Hashable], seed: int = 0, draws: int = 2000) -> list[float]:
    """The 95 % interval of a mean, by drawing whole groups with replacement."""
    _, index = np.unique(np.array([str(group) for group in groups]), return_inverse=True)
    sums, counts = np.bincount(index, weights=values), np.bincount(index)
    drawn = np.random.default_rng(seed).integers(len(sums), size=(draws, len(sums)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    return [float(one) for one in np.quantile(means, [0.025, 0.975])]
