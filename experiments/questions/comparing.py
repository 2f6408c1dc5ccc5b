# SPDX-License-Identifier: Apache-2.0
"""Results, and two of them question by question: means over seeds, and intervals by a paired bootstrap."""

import json
from typing import Any

import numpy as np
from cells import RESULTS

RESAMPLES = 10_000
Seeds = dict[int, dict[str, Any]]  # what a cell came to, by seed
Results = dict[tuple[str, str], Seeds]  # by cell and text
Interval = tuple[float, float, float]  # a mean, and its ends
Gains = dict[tuple[str, str], Interval]  # on disjoint windows of the same length, by cell and text


def load() -> Results:
    found: Results = {}
    for path in sorted(RESULTS.glob("*/*.json")):
        cell, _, seed = path.parent.name.rpartition("-seed")
        found.setdefault((cell, path.stem), {})[int(seed)] = json.loads(path.read_text())
    return found


def baseline(cell: str) -> str:
    return f"disjoint-{cell.rpartition('-')[2]}"


def f1(found: Seeds, row: int = 0) -> np.ndarray:
    """By seed and question, in points; of row 1 with the state removed."""
    return np.array([found[seed]["rows"][row]["f1_each"] for seed in sorted(found)]) / 10


def interval(ours: np.ndarray, theirs: np.ndarray, same_runs: bool = False) -> Interval:
    """How much better our F1 is than theirs, by seed and question both: the difference of means, and its 95 % interval
    by a bootstrap. The same questions are drawn for both sides, and seeds for each on its own unless the runs are the
    same."""
    random, means, count = np.random.default_rng(0), list[float](), ours.shape[1]
    for _ in range(RESAMPLES):
        times = np.bincount(random.integers(count, size=count), minlength=count)  # that each question is drawn
        first, second = (side @ times / count for side in (ours, theirs))
        seeds = random.integers(len(first), size=len(first))
        others = seeds if same_runs else random.integers(len(second), size=len(second))
        means.append(first[seeds].mean() - second[others].mean())
    low, high = np.percentile(means, [2.5, 97.5])
    return float(ours.mean() - theirs.mean()), float(low), float(high)


def gains_of(results: Results) -> Gains:
    compared = {(cell, text): results.get((baseline(cell), text)) for cell, text in results if cell != baseline(cell)}
    return {key: interval(f1(results[key]), f1(plain)) for key, plain in compared.items() if plain}


def told(mean: float, low: float, high: float) -> str:
    return f"{mean:+.2f} ({low:+.2f} to {high:+.2f})"
