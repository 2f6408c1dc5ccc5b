# SPDX-License-Identifier: Apache-2.0
"""Tables by where windows cut a question's passage or support: the gain of a state, and of seeing the passage whole."""

from itertools import chain
from typing import Any

import numpy as np
from borders import PASSAGE, SUPPORT, WINDOWS
from cells import TEXTS
from comparison import RESAMPLES, Results, Seeds, f1, interval, interval_text
from harness import paragraph

from carryforward.utils.markdown import markdown_table

KINDS = ("recurrent", "kv", "overlapping")
LEFT = "b2c"  # cuts with a part of the passage on their left that the answer's window lacks
Letters = dict[int, np.ndarray]  # the letter of each question, by window
ABOUT = """
What can a window lack? For SQuADShifts, the rest of the question's own passage. The other passages are unrelated,
though a state might tell that a better answer came earlier. For HotpotQA, the other sentences that support the answer.
The state comes from the left, so it should help where a border lies before the answer or within it. Windows that
overlap by 100 tokens see both sides. Borders are those of disjoint windows. A question with several accepted answers
is classified by the first.
"""
WHOLE = """
How much does it gain to see the whole passage? "Worth": F1 of windows of 512 minus F1 of windows of 256, without a
state, on questions whose passage is whole with 512 and cut with 256; minus the same difference on questions whose
passage is whole with both; times the share of questions cut with 256, so in points of F1 on all questions. Questions
whose passage even 512 cuts are assumed to behave like the others. The last column is the gain of the carried keys and
values over disjoint windows of 256, on the same questions and in the same unit.
"""


def border_section(results: Results, borders: dict[str, Any]) -> list[str]:
    """The section, from the results and the output of `borders.find`; empty until both windows have results."""
    if any((f"disjoint-{window}", text) not in results for window in WINDOWS for text in TEXTS):
        return []
    cuts = {text: {window: np.array([*borders[text][str(window)]]) for window in WINDOWS}
            for text in ("squadshifts", "hotpotqa")}  # fmt: skip
    lines = ["", "## What windows cut", "", paragraph(ABOUT)]
    for text, names, about in (
        ("squadshifts", PASSAGE, "the question's passage is"),
        ("hotpotqa", SUPPORT, "what supports the answer is"),
    ):
        head = ["window", f"{text}: {about}", "questions", "disjoint: F1", *(f"{kind} against it" for kind in KINDS)]
        rows = [_row(results, text, window, name, cuts[text][window] == letter)
                for window in WINDOWS for letter, name in names.items()]  # fmt: skip
        lines += ["", markdown_table(head, rows, text_columns=2)]
    return [*lines, "", paragraph(WHOLE), "", _worth_table(results, cuts["squadshifts"])]


def _row(results: Results, text: str, window: int, name: str, mask: np.ndarray) -> list[str]:
    """One kind of cut: the questions of a mask, F1 of disjoint windows, and the gain of each kind of model."""
    plain = results[f"disjoint-{window}", text]
    gains = [_gain(results.get((f"{kind}-{window}", text)), plain, mask) for kind in KINDS]
    return [f"{window}", name, f"{mask.sum():,}", f"{f1(plain)[:, mask].mean():.2f}", *gains]


def _gain(ours: Seeds | None, plain: Seeds, mask: np.ndarray, share: float = 1.0) -> str:
    if not ours:
        return ""
    return interval_text(*(share * value for value in interval(f1(ours)[:, mask], f1(plain)[:, mask])))


def _worth_table(results: Results, cuts: Letters) -> str:
    small, large = results["disjoint-256", "squadshifts"], results["disjoint-512", "squadshifts"]
    carried = results.get(("kv-256", "squadshifts"))
    letters = [letter for letter in PASSAGE if letter != "w"]
    parts = dict(zip(letters, _worth(f1(large), f1(small), cuts, letters), strict=True))
    rows = []
    for name, group in chain(
        ((PASSAGE[letter], [letter]) for letter in letters),
        (("before, on both sides or within", [*LEFT]), ("any of these", letters)),
    ):
        mask = np.isin(cuts[256], group)
        worth = sum(parts[letter] for letter in group)
        worth_text = interval_text(worth[0], *np.percentile(worth[1:], [2.5, 97.5]))
        whole = (mask & (cuts[512] == "w")).sum()
        rows.append([name, f"{mask.sum():,}", f"{whole:,}", worth_text, _gain(carried, small, mask, mask.mean())])
    head = ["the passage, with windows of 256", "questions", "whole with 512", "worth", "gain of kv"]
    return markdown_table(head, rows)


def _worth(large: np.ndarray, small: np.ndarray, cuts: Letters, letters: list[str]) -> np.ndarray:
    """For each letter the worth of seeing the passage whole, then its bootstrap samples, [letters, 1 + samples]."""
    whole = cuts[512] == "w"
    both, groups = whole & (cuts[256] == "w"), [whole & (cuts[256] == letter) for letter in letters]
    shares = [np.mean(cuts[256] == letter) for letter in letters]
    random = np.random.default_rng(0)

    def estimate(draw: bool) -> list[float]:
        sides = [side[random.integers(len(side), size=len(side))] if draw else side for side in (large, small)]
        mean = sides[0].mean(axis=0) - sides[1].mean(axis=0)
        means = [(random.choice(mean[mask], mask.sum()) if draw else mean[mask]).mean() for mask in (both, *groups)]
        return [share * (group_mean - means[0]) for share, group_mean in zip(shares, means[1:], strict=True)]

    return np.array([estimate(draw=False), *(estimate(draw=True) for _ in range(RESAMPLES))]).T
