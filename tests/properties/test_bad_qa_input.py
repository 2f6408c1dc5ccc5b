# SPDX-License-Identifier: Apache-2.0
"""Questions and answers that cannot be used are refused with a message."""

import pytest
import torch
from helpers import tiny

import carryforward as cf


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "question_ids: missing. Give one question for each document"),
        ({"question_ids": tiny.QUESTIONS}, "question_ids: 3 rows, input_ids 1. Give one question for each document"),
        ({"question_ids": [[5] * 10]}, "leaves no room for the document after 14 special tokens"),
        ({"question_ids": [[5]], "start_positions": torch.tensor([20]), "end_positions": torch.tensor([20])},
         "start_positions: row 0 has 20, which is not a token of the document"),
        ({"question_ids": [[5]], "start_positions": torch.tensor([2])}, "end_positions is missing"),
        ({"question_ids": [[5]], "attention_mask": (torch.arange(20) < 15).long()[None],
          "start_positions": torch.tensor([3]), "end_positions": torch.tensor([15])},
         "end_positions: row 0 has 15, which is not a token of the document"),
    ],
)  # fmt: skip
def test_calls_that_cannot_be_answered_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny.answering("bert")(tiny.documents(1, 20), **arguments)


@pytest.mark.parametrize(
    ("name", "head", "message"),
    [
        ("gpt2", "none", "gpt2 is causal"),
        ("bert", "masked", "has a head already"),
    ],
)
def test_models_that_cannot_get_a_head_are_refused(name, head, message):
    with pytest.raises(ValueError, match=message):
        cf.add_recurrence(tiny.base(name, head), head="question-answering", memory="vector")


@pytest.mark.parametrize(
    ("starts", "ends", "message"),
    [
        ([3, 4, 5], [3, 4, 5], r"start_positions has shape \[3\]: one for each of 2 documents"),
        ([9, 4], [4, 4], "row 0: an answer cannot start at 9 and end at 4"),
        ([9, 4], [9, -100], "row 1: an answer cannot start at 4 and end at -100"),
    ],
)
def test_positions_that_are_not_answers_are_refused(starts, ends, message):
    with pytest.raises(ValueError, match=message):
        tiny.answering("bert")(tiny.documents(2, 30), question_ids=tiny.QUESTIONS[:2],
                               start_positions=torch.tensor(starts), end_positions=torch.tensor(ends))  # fmt: skip
