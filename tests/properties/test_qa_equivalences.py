# SPDX-License-Identifier: Apache-2.0
"""Question answering on tiny encoders of every type: what must not make a difference.

The reference is the base model with its own question-answering head, on windows assembled here.
"""

import pytest
import torch
from helpers import tiny
from torch.testing import assert_close

QUESTIONS = tiny.QUESTIONS
MEMORIES = [{}, {"slots": 0, "recent": 3, "sinks": 1, "window": 16}, {"overlap": 2, "slots": 2, "insert_at": (1, 3)}]
CASES = [(name, fields) for name in tiny.ENCODERS for fields in MEMORIES] + [
    ("bert", {**tiny.TOKENS, "window": 16}),
    ("modernbert", tiny.TOKENS),
    ("distilbert", {**tiny.ASSOCIATIVE, "overlap": 2}),
    ("roberta", tiny.ASSOCIATIVE),
]


def window_alone(model, question, stretch):
    """Starts and ends of one window from the base model and its own head, [n, 2]."""
    front = [2, *question, 3, 3]
    ids = torch.tensor([[*front, *stretch, 3]])
    types = {}
    if getattr(model.config.base_config, "type_vocab_size", 0) > 1:
        types = {"token_type_ids": torch.tensor([[0] * len(front) + [1] * (len(stretch) + 1)])}
    out = model.base(ids, **types)
    inside = slice(len(front), len(front) + len(stretch))
    return torch.stack([out.start_logits[0, inside], out.end_logits[0, inside]], dim=-1)


def answers(out):
    return torch.stack([out.start_logits, out.end_logits], dim=-1)


@pytest.mark.parametrize("name", tiny.ENCODERS)
def test_without_a_state_windows_are_those_of_the_base_model(name):
    model, document = tiny.answering(name), tiny.documents(1, 20)
    without_state = answers(model(document, question_ids=QUESTIONS[:1], use_state=False))[0]
    text, capacity = document[0].tolist(), 14 - 7
    parts = [window_alone(model, QUESTIONS[0], text[begin : begin + capacity]) for begin in range(0, 20, capacity)]
    assert_close(without_state, torch.cat(parts), rtol=1e-4, atol=1e-5)
    with_state = answers(model(document, question_ids=QUESTIONS[:1]))[0]
    assert_close(with_state[:capacity], without_state[:capacity])
    assert (with_state[capacity:] - without_state[capacity:]).abs().amax(-1).min() > 1e-4


@pytest.mark.parametrize(("name", "fields"), CASES, ids=str)
def test_rows_with_different_questions_equal_each_alone(name, fields):
    model, documents, lengths = tiny.answering(name, **fields), tiny.documents(3, 31), [31, 8, 19]
    mask = (torch.arange(31) < torch.tensor(lengths)[:, None]).long()
    together = model(documents, attention_mask=mask, question_ids=QUESTIONS)
    for row, length in enumerate(lengths):
        alone = model(documents[row : row + 1, :length], question_ids=QUESTIONS[row : row + 1])
        assert_close(answers(together)[row, :length], answers(alone)[0], rtol=1e-4, atol=1e-5)
        assert_close(together.kind_logits[row], alone.kind_logits[0], rtol=1e-4, atol=1e-5)
        assert together.start_logits[row, length:].eq(-torch.inf).all()


@pytest.mark.parametrize(("name", "fields"), CASES, ids=str)
def test_qa_recomputed_equals_kept_graph(name, fields):
    documents, results = tiny.documents(3, 31), []
    expected = {"start_positions": torch.tensor([25, -100, 3]), "end_positions": torch.tensor([27, -100, 3]),
                "answer_kinds": torch.tensor([0, 2, 0])}  # fmt: skip
    for keep_graph in (False, True):
        model = tiny.answering(name, keep_graph=keep_graph, **fields).train()
        torch.manual_seed(5)
        out = model(documents, question_ids=QUESTIONS, **expected)
        out.loss.backward()
        results.append((out.loss, tiny.gradients(model)))
    assert_close(*(loss for loss, _ in results))
    tiny.assert_same_gradients(*(gradients for _, gradients in results))
    memory = {name: gradient for name, gradient in results[0][1].items() if name.startswith("memory.")}
    trained = ("vector.networks", "tokens.first", "associative.tokens")
    assert all(gradient.abs().max() > 0 for name, gradient in memory.items() if any(part in name for part in trained))
    assert memory or name not in tiny.LEARNED
