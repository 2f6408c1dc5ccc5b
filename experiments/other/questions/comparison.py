# SPDX-License-Identifier: Apache-2.0
"""Load the results and compare two of them question by question: means over seeds, and paired bootstrap intervals."""

import json
from typing import Any

import numpy as np
from cells import RESULTS

RESAMPLES = 10_000
Seeds = dict[int, dict[str, Any]]  # a cell's results by seed
Results = dict[tuple[str, str], Seeds]  # by cell and text
Interval = tuple[float, float, float]  # mean, lower end, upper end
Gains = dict[tuple[str, str], Interval]  # over disjoint windows of the same length, by cell and text


def load() -> Results:
    results: Results = {}
    for path in sorted(RESULTS.glob("*/*.json")):
        cell, _, seed = path.parent.name.rpartition("-seed")
        results.setdefault((cell, path.stem), {})[int(seed)] = json.loads(path.read_text())
    return results


def baseline(cell: str) -> str:
    """The cell with disjoint windows of the same length."""
    return f"disjoint-{cell.rpartition('-')[2]}"


def f1(seeds: Seeds, row: int = 0) -> np.ndarray:
    """F1 in points, [seeds, questions]. Row 1 is with the state removed."""
    return np.array([seeds[seed]["rows"][row]["f1_each"] for seed in sorted(seeds)]) / 10


def interval(ours: np.ndarray, theirs: np.ndarray, same_runs: bool = False) -> Interval:
    """The difference of two mean F1, and its 95 % bootstrap interval.

    Each resample draws the same questions for both sides, and seeds for each side independently.

    Args:
        ours, theirs: F1, [seeds, questions].
        same_runs: both sides are scores of the same trained models, so the same seeds are drawn for both.
    """
    random, means, count = np.random.default_rng(0), list[float](), ours.shape[1]
    for _ in range(RESAMPLES):
        times = np.bincount(random.integers(count, size=count), minlength=count)  # how often each question is drawn
        first, second = (side @ times / count for side in (ours, theirs))
        seeds = random.integers(len(first), size=len(first))
        their_seeds = seeds if same_runs else random.integers(len(second), size=len(second))
        means.append(first[seeds].mean() - second[their_seeds].mean())
    low, high = np.percentile(means, [2.5, 97.5])
    return float(ours.mean() - theirs.mean()), float(low), float(high)


def gains_of(results: Results) -> Gains:
    compared = {(cell, text): results.get((baseline(cell), text)) for cell, text in results if cell != baseline(cell)}
    return {key: interval(f1(results[key]), f1(plain)) for key, plain in compared.items() if plain}


def interval_text(mean: float, low: float, high: float) -> str:
    return f"{mean:+.2f} ({low:+.2f} to {high:+.2f})"
