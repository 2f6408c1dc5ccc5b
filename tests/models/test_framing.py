# SPDX-License-Identifier: Apache-2.0
"""Documents whose tokenizer has added special tokens: read as without them, with outputs at all given positions."""

import logging

import pytest
import torch
from helpers import tiny
from torch.testing import assert_close

PREFIX, SUFFIX = (2,), (3, 3)
CASES = [("bert", "masked"), ("roberta", "token"), ("modernbert", "none")]


def framed(ids: torch.Tensor) -> torch.Tensor:
    ends = (torch.tensor([tokens] * len(ids)) for tokens in (PREFIX, SUFFIX))
    return torch.cat([next(ends), ids, next(ends)], dim=1)


def values(out) -> torch.Tensor:
    return out.last_hidden_state if out.logits is None else out.logits


@pytest.mark.parametrize(("name", "head"), CASES)
def test_one_window_is_the_base_models(name, head):
    model, base = tiny.recurrent(name, head), tiny.base(name, head)
    ids = framed(tiny.documents(3, 8))  # a window of 11
    with torch.no_grad():
        expected = base(ids)
        expected = expected.last_hidden_state if head == "none" else expected.logits
        assert_close(values(model(ids)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "head"), CASES)
@pytest.mark.parametrize("memory", [{}, {"slots": 0, "recent": 3, "sinks": 1}], ids=["vector", "kv"])
def test_long_documents_are_read_as_without_special_tokens(name, head, memory):
    model, ids = tiny.recurrent(name, head, **memory), tiny.documents(2, 31)
    with torch.no_grad():
        bare, whole = model(ids), model(framed(ids))
        assert_close(values(whole)[:, 1:-2], values(bare))
        assert_close(whole.state.memory, bare.state.memory)
        assert whole.emitted.tolist() == bare.emitted.tolist()
        first = model(framed(ids[:, :8]))  # the first window: nothing has entered it
        assert_close(values(whole)[:, 0], values(first)[:, 0], rtol=1e-4, atol=1e-5)
        # the last window begins at 4 * (8 - 2): a state enters it, so that its special tokens have other outputs
        last = model(framed(ids[:, 24:]))
        assert values(whole)[:, -1].sub(values(last)[:, -1]).abs().max() > 1e-3
        alone = model(framed(ids), use_state=False)
        assert_close(values(alone)[:, -2:], values(last)[:, -2:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_a_batch_are_read_as_alone(side):
    model = tiny.recurrent("bert", "masked", slots=0, recent=3)
    rows = [framed(tiny.documents(1, n, seed=n)) for n in (4, 25, 13)]
    rows.append(tiny.documents(1, 9))  # without special tokens
    ids, mask = torch.full((4, 28), 1), torch.zeros(4, 28, dtype=torch.long)
    for i, row in enumerate(rows):
        inside = slice(0, row.shape[1]) if side == "right" else slice(28 - row.shape[1], 28)
        ids[i, inside], mask[i, inside] = row[0], 1
    with torch.no_grad():
        together = model(ids, attention_mask=mask).logits
        for i, row in enumerate(rows):
            assert_close(together[i][mask[i].bool()], model(row).logits[0], rtol=1e-4, atol=1e-5)
        assert not together[mask == 0].any(), "padding has no output"


def test_labels_of_special_tokens_are_not_scored_and_gradients_are_the_same():
    model, ids = tiny.recurrent("bert", "masked"), tiny.documents(2, 20)
    results = []
    for given, labels in ((ids, ids), (framed(ids), framed(ids))):
        out = model(given, labels=labels, return_logits=True)
        out.loss.backward()
        results.append((out, tiny.gradients(model)))
    (bare, expected), (whole, found) = results
    assert int(whole.n_scored) == int(bare.n_scored) == 40
    assert_close(whole.loss, bare.loss)
    assert_close(whole.logits[:, 1:-2], bare.logits)
    assert whole.logits[:, [0, -2, -1]].any(dim=-1).all()
    tiny.assert_same_gradients(found, expected)


def test_a_classifier_and_a_question_answering_model_leave_them_out():
    model, ids = tiny.recurrent("bert", "sequence"), tiny.documents(2, 20)
    with torch.no_grad():
        assert_close(model(framed(ids)).logits, model(ids).logits)
        finder = tiny.answering("bert")
        ends = torch.tensor([[3], [3]])
        given = torch.cat([torch.tensor([[2], [2]]), ids, ends], dim=1)
        whole, bare = (finder(x, question_ids=tiny.QUESTIONS[:2]).start_logits for x in (given, ids))
        assert_close(whole[:, 1:-1], bare)
        assert whole[:, [0, -1]].isneginf().all(), "special tokens are no answers"


def test_other_special_tokens_are_part_of_the_document(caplog):
    model, ids = tiny.recurrent("bert", "masked"), tiny.documents(1, 20)
    with torch.no_grad():
        for change in (slice(1, None), slice(None, -1)):  # without [CLS], or with one [SEP] of two
            given = framed(ids)[:, change]
            assert model(given).emitted.tolist() == [[0, given.shape[1]]]
        with caplog.at_level(logging.WARNING):
            model(framed(ids), final=False)
        assert "Tokenise pieces with add_special_tokens=False" in caplog.text


def test_a_document_of_special_tokens_alone_is_refused():
    with pytest.raises(ValueError, match="row 0 of input_ids has no real token"):
        tiny.recurrent("bert", "masked")(torch.tensor([[2, 3, 3]]))
