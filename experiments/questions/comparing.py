# SPDX-License-Identifier: Apache-2.0
"""Results, and two of them question by question: means over seeds, and intervals by a paired bootstrap."""

import json
from typing import Any

import numpy as np
from cells import RESULTS

RESAMPLES = 10_000
Seeds = dict[int, dict[str, Any]]  # what a cell came to, by seed
Results = dict[tuple[str, str], Seeds]  # by cell and text
Pair = tuple[dict[str, Any], dict[str, Any]]  # scores to compare, of one seed


def load() -> Results:
    found: Results = {}
    for path in sorted(RESULTS.glob("*/*.json")):
        cell, _, seed = path.parent.name.rpartition("-seed")
        found.setdefault((cell, path.stem), {})[int(seed)] = json.loads(path.read_text())
    return found


def baseline(cell: str) -> str:
    return f"disjoint-{cell.rpartition('-')[2]}"


def pairs(ours: Seeds, theirs: Seeds) -> list[Pair]:
    """Scores of both sides, with every seed that both have."""
    return [(ours[seed]["rows"][0], theirs[seed]["rows"][0]) for seed in sorted(ours.keys() & theirs.keys())]


def interval(compared: list[Pair], some: np.ndarray | None = None) -> tuple[float, float, float]:
    """How much better the first F1 of a pair is, in points: the mean over seeds, and the 95 % interval of a paired
    bootstrap, which draws seeds and questions again; of some questions, or of all."""
    each = by_question(compared) if some is None else by_question(compared)[:, some]
    random, means = np.random.default_rng(0), []
    for _ in range(RESAMPLES):
        seeds, questions = (random.integers(count, size=count) for count in each.shape)
        means.append(each[seeds].mean(axis=0)[questions].mean())
    low, high = np.percentile(means, [2.5, 97.5])
    return float(each.mean()), float(low), float(high)


def by_question(compared: list[Pair]) -> np.ndarray:
    """By seed and question, in points."""
    return np.array([np.subtract(*(side["f1_each"] for side in pair)) for pair in compared]) / 10


def told(mean: float, low: float, high: float) -> str:
    return f"{mean:+.2f} ({low:+.2f} to {high:+.2f})"
