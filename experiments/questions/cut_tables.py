# SPDX-License-Identifier: Apache-2.0
"""What a state makes of questions whose passage or support windows cut, and what seeing it whole would be worth."""

from itertools import chain
from typing import Any

import numpy as np
from borders import PASSAGE, SUPPORT, WINDOWS
from cells import TEXTS
from comparing import RESAMPLES, Results, Seeds, f1, interval, told

from carryforward.utils.markdown import markdown_table

KINDS = ("recurrent", "kept", "overlapping")
LEFT = "b2c"  # borders that have something of the passage on their left which the answer's window lacks
Letters = dict[int, np.ndarray]  # of each question, by window
ABOUT = """
What a window does not have is, for SQuADShifts, the rest of the question's own passage: the others know nothing of it,
though a state might tell that a better answer was seen before. For HotpotQA it is the other sentences that an answer
rests on. The state comes from the left, so that it should help where a border is before the answer or within it;
windows that overlap by 100 tokens see both sides. Borders are those of disjoint windows, and a question is told by the
first of its accepted answers.
"""
WHOLE = """
What is it worth to see a passage whole? Windows of 512 without a state against those of 256, where the former have the
passage whole and the latter cut it, beyond their difference where both have it whole; times the share of such
questions, so in points of F1 on all of them. Those that even 512 cut are taken to be like the others. Beside it what
kept keys and values gain on disjoint windows of 256 there.
"""


def where_windows_cut(results: Results, found: dict[str, Any]) -> list[str]:
    """The section, from the results and what `borders.find` found, as soon as both windows have some."""
    if any((f"disjoint-{window}", text) not in results for window in WINDOWS for text in TEXTS):
        return []
    cuts = {text: {window: np.array([*found[text][str(window)]]) for window in WINDOWS}
            for text in ("squadshifts", "hotpotqa")}  # fmt: skip
    lines = ["", "## What windows cut", "", " ".join(ABOUT.split())]
    for text, names, about in (
        ("squadshifts", PASSAGE, "the question's passage is"),
        ("hotpotqa", SUPPORT, "what supports the answer is"),
    ):
        head = ["window", f"{text}: {about}", "questions", "disjoint: F1", *(f"{kind} against it" for kind in KINDS)]
        rows = [_row(results, text, window, name, cuts[text][window] == letter)
                for window in WINDOWS for letter, name in names.items()]  # fmt: skip
        lines += ["", markdown_table(head, rows, words=2)]
    return [*lines, "", " ".join(WHOLE.split()), "", _if_whole(results, cuts["squadshifts"])]


def _row(results: Results, text: str, window: int, name: str, some: np.ndarray) -> list[str]:
    plain = results[f"disjoint-{window}", text]
    gains = [_gain(results.get((f"{kind}-{window}", text)), plain, some) for kind in KINDS]
    return [f"{window}", name, f"{some.sum():,}", f"{f1(plain)[:, some].mean():.2f}", *gains]


def _gain(ours: Seeds | None, plain: Seeds, some: np.ndarray, share: float = 1.0) -> str:
    if not ours:
        return ""
    return told(*(share * figure for figure in interval(f1(ours)[:, some], f1(plain)[:, some])))


def _if_whole(results: Results, cuts: Letters) -> str:
    small, large = results["disjoint-256", "squadshifts"], results["disjoint-512", "squadshifts"]
    kept = results.get(("kept-256", "squadshifts"))
    letters = [letter for letter in PASSAGE if letter != "w"]
    parts = dict(zip(letters, _worth(f1(large), f1(small), cuts, letters), strict=True))
    rows = []
    for name, some in chain(
        ((PASSAGE[letter], [letter]) for letter in letters),
        (("before, on both sides or within", [*LEFT]), ("any of these", letters)),
    ):
        mask = np.isin(cuts[256], some)
        worth = sum(parts[letter] for letter in some)
        told_worth = told(worth[0], *np.percentile(worth[1:], [2.5, 97.5]))
        whole = (mask & (cuts[512] == "w")).sum()
        rows.append([name, f"{mask.sum():,}", f"{whole:,}", told_worth, _gain(kept, small, mask, mask.mean())])
    head = ["the passage, with windows of 256", "questions", "whole with 512", "worth", "kept gains"]
    return markdown_table(head, rows)


def _worth(large: np.ndarray, small: np.ndarray, cuts: Letters, letters: list[str]) -> np.ndarray:
    """For each letter what was found, then the same in samples of seeds and questions, [letters, 1 + samples]."""
    whole = cuts[512] == "w"
    both, groups = whole & (cuts[256] == "w"), [whole & (cuts[256] == letter) for letter in letters]
    shares = [np.mean(cuts[256] == letter) for letter in letters]
    random = np.random.default_rng(0)

    def once(draw: bool) -> list[float]:
        of = [side[random.integers(len(side), size=len(side))] if draw else side for side in (large, small)]
        mean = of[0].mean(axis=0) - of[1].mean(axis=0)
        means = [(random.choice(mean[some], some.sum()) if draw else mean[some]).mean() for some in (both, *groups)]
        return [share * (found - means[0]) for share, found in zip(shares, means[1:], strict=True)]

    return np.array([once(draw=False), *(once(draw=True) for _ in range(RESAMPLES))]).T
