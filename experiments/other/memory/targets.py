# SPDX-License-Identifier: Apache-2.0
"""What was to be shown, fixed before anything was measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from carryforward.tasks.report import accuracy

Result = dict[str, Any]
MET, MISSED, OPEN = "met", "missed", "not measured"


@dataclass(frozen=True)
class Target:
    """An accuracy that some arms should reach.

    Attributes:
        text: in words.
        setting: of the arms: the task and its arguments.
        labels: of the arms; of several, the best one counts.
        size: of the test documents.
        accuracy: the mean over seeds that is needed; None: reported as it is.
    """

    text: str
    setting: str
    labels: Callable[[str], bool]
    size: int
    accuracy: float | None


TARGETS = (
    Target("rewrite: at least 99 % at ten times the training length with `associative`", "retrieval-rewrite",
           "associative".__eq__, 500, 0.99),
    Target("copy of 120 symbols: at least 99 % over 9 windows with `tokens`", "copy-120-9", "tokens".__eq__, 120, 0.99),
    Target("facts: at least 95 % at 32 times the training length with the best kind", "facts-people", bool, 131072,
           0.95),
    Target("the paper's vector on rewrite, 50 pairs, as it is", "retrieval-rewrite", "vector".__eq__, 50, None),
    Target("the paper's vector on copy of 24 symbols, as it is", "copy-24-3", "vector".__eq__, 24, None),
)  # fmt: skip


def verdict(target: Target, results: Sequence[Result]) -> tuple[str, str]:
    """Whether a target is met, and by what. Only finished arms count, and all seeds of a model."""
    found: dict[str, list[float]] = {}
    for result in results:
        arm = result["arm"]
        if result["finished"] and arm["setting"] == target.setting and target.labels(arm["label"]):
            scores = [one for one in result["scores"] if one["size"] == target.size]
            values = [accuracy(one, result["whole_answers"]) for one in scores]
            found.setdefault(arm["label"], []).extend(values)
    found = {label: values for label, values in found.items() if values}
    if not found:
        return OPEN, "–"
    best = max(found, key=lambda label: mean(found[label]))
    each = ", ".join(f"{value:.1%}" for value in found[best]).replace("%", " %")
    reached = "as it is" if target.accuracy is None else MET if mean(found[best]) >= target.accuracy else MISSED
    return reached, f"{best}: {each}"


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
