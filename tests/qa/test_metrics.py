# SPDX-License-Identifier: Apache-2.0
"""Exact match and F1, against values computed by hand."""

import pytest

from carryforward.qa.metrics import normalise, score


@pytest.mark.parametrize(
    ("text", "expected"),
    [("The Cat's  hat", "cats hat"), ("An apple, a day.", "apple day"), ("theatre", "theatre"), ("...", "")],
)
def test_normalisation(text, expected):
    assert normalise(text) == expected


@pytest.mark.parametrize(
    ("answer", "accepted", "squad", "hotpotqa"),
    [
        ("The cat.", ["cat"], (1, 1), (1, 1)),
        ("black cat", ["the cat sat"], (0, 0.5), (0, 0.5)),  # one shared word of two, and of two without the article
        ("cat", ["dog", "big cat"], (0, 2 / 3), (0, 2 / 3)),
        ("a b b", ["b b c"], (0, 2 * 2 / 5), (0, 2 * 2 / 5)),  # repeated words count repeatedly; "a" is an article
        ("yes", ["yes"], (1, 1), (1, 1)),
        ("yes it is", ["yes"], (0, 2 / 4), (0, 0)),  # HotpotQA: all or nothing
        ("no", ["no way"], (0, 2 / 3), (0, 0)),
        ("", [], (1, 1), (1, 0)),
        ("cat", [], (0, 0), (0, 0)),
        ("", ["cat"], (0, 0), (0, 0)),
        ("", ["the", "cat"], (0, 0), (0, 0)),  # "the" is ignored as an accepted answer
    ],
)
def test_scores_computed_by_hand(answer, accepted, squad, hotpotqa):
    assert score(answer, accepted, "squad") == pytest.approx(squad)
    assert score(answer, accepted, "hotpotqa") == pytest.approx(hotpotqa)
