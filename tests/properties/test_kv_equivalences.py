# SPDX-License-Identifier: Apache-2.0
"""What must not make a difference if keys and values are carried, on every supported architecture."""

import itertools

import pytest
import torch
from helpers import tiny
from helpers.tiny import LEARNED
from torch.testing import assert_close

import carryforward as cf

ALL = list(tiny.CONFIGS)
MEMORIES = [{"slots": 0, "recent": 3, "sinks": 1}, {"slots": 2, "recent": 4, "insert_at": (1, 3)}]


def gradients(model, ids, **arguments):
    out = model(ids, labels=ids, **arguments)
    out.loss.backward()
    return out, tiny.gradients(model)


@pytest.mark.parametrize("fields", MEMORIES, ids=str)
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
    (out, recomputed), (expected, kept) = results
    assert_close(out.loss, expected.loss)
    tiny.assert_same_gradients(recomputed, kept)
    if name in LEARNED:
        offsets = recomputed["memory.kv.position_offsets"].abs().amax((1, 2, 4))
        begin = len(model.config.recurrence.prefix) + fields.get("sinks", 0)
        assert (offsets[:, begin : begin + fields["recent"]] > 1e-7).all(), "every carried position has an effect"


@pytest.mark.parametrize("fields", MEMORIES, ids=str)
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
            assert_close(state.memory["kv"], together.state[[row]].memory["kv"], rtol=1e-4, atol=1e-5)
    assert_close(total, together.nll_sum)
    total.backward()
    tiny.assert_same_gradients(expected, tiny.gradients(model))
    together.state.save(tmp_path / "state")
    assert cf.State.load(tmp_path / "state").memory["kv"].equal(together.state.memory["kv"])


@pytest.mark.parametrize("name", ALL)
def test_checkpointing_saving_and_another_attention_change_nothing(name, tmp_path):
    ids, results = tiny.documents(2, 30), []
    for checkpointed in (False, True):
        model = tiny.recurrent(name, **MEMORIES[0]).train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        torch.manual_seed(5)
        results.append(gradients(model, ids)[1])
    tiny.assert_same_gradients(*results)
    out = model.eval()(ids, labels=ids)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    for attention in ("sdpa", "eager"):
        loaded.base.set_attn_implementation(attention)
        assert_close(loaded(ids, labels=ids).loss, out.loss)
