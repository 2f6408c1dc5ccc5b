# SPDX-License-Identifier: Apache-2.0
"""Things that must not make a difference where keys and values are carried, on every supported architecture."""

import itertools

import pytest
import torch
from helpers import tiny
from helpers.tiny import LEARNED
from torch.testing import assert_close

import carryforward as cf

ALL = list(tiny.CONFIGS)
KINDS = [{"slots": 0, "kept": 3, "sinks": 1}, {"slots": 2, "kept": 4, "insert_at": (1, 3)}]


def gradients(model, ids, **arguments):
    out = model(ids, labels=ids, **arguments)
    out.loss.backward()
    return out, tiny.gradients(model)


@pytest.mark.parametrize("fields", KINDS, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_kv_recomputed_equals_kept_graph(name, fields):
    ids = tiny.documents(2, 37)
    mask = torch.ones_like(ids)
    mask[0, 20:] = 0
    results = []
    for keep_graph in (False, True):
        model = tiny.recurrent(name, keep_graph=keep_graph, **fields).train()
        torch.manual_seed(5)
        results.append(gradients(model, ids, attention_mask=mask))
    (out, found), (expected, graph) = results
    assert_close(out.loss, expected.loss)
    tiny.assert_same_gradients(found, graph)
    if name in LEARNED:
        moved = found["recurrence.keeping.places"].abs().amax((1, 2, 4))
        begin = len(model.config.recurrence.prefix) + model.config.recurrence.sinks
        assert (moved[:, begin : begin + fields["kept"]] > 1e-7).all(), "every kept position of every layer takes part"


@pytest.mark.parametrize("fields", KINDS, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_streamed_and_batched_equal_whole_and_alone(name, fields, tmp_path):
    model = tiny.recurrent(name, **fields)
    ids, lengths = tiny.documents(3, 34), [34, 9, 21]
    mask = (torch.arange(34) < torch.tensor(lengths)[:, None]).long()
    together = model(ids, labels=ids, attention_mask=mask)
    together.nll_sum.backward()
    expected, total = tiny.gradients(model), torch.zeros(())
    for row, length in enumerate(lengths):
        state = None
        for begin, end in itertools.pairwise(sorted({0, min(10, length), min(11, length), length})):
            final = {} if name in tiny.CAUSAL else {"final": end == length}
            piece = ids[row : row + 1, begin:end]
            out = model(piece, labels=piece, state=state, **final)
            state, total = out.state, total + out.nll_sum
        if name in tiny.CAUSAL:
            assert_close(state.kept, together.state[[row]].kept, rtol=1e-4, atol=1e-5)
    assert_close(total, together.nll_sum)
    total.backward()
    tiny.assert_same_gradients(expected, tiny.gradients(model))
    together.state.save(tmp_path / "state")
    assert cf.State.load(tmp_path / "state").kept.equal(together.state.kept)


@pytest.mark.parametrize("name", ALL)
def test_checkpointing_saving_and_another_attention(name, tmp_path):
    ids, results = tiny.documents(2, 30), []
    for checkpointed in (False, True):
        model = tiny.recurrent(name, **KINDS[0]).train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        torch.manual_seed(5)
        results.append(gradients(model, ids)[1])
    tiny.assert_same_gradients(*results)
    out = model.eval()(ids, labels=ids)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    for attention in ("sdpa", "eager"):
        again.base.set_attn_implementation(attention)
        assert_close(again(ids, labels=ids).loss, out.loss)
