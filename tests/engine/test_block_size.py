# SPDX-License-Identifier: Apache-2.0
"""How many windows run side by side: what decides it, and that measuring it leaves no trace."""

import copy
import dataclasses
import pickle

import accelerate
import pytest
import torch
from helpers import tiny
from transformers import AutoModelForCausalLM

from carryforward.engine import activation_budget, block_size

ROWS = 2
DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)


def carrying(name="gpt2", **fields):
    return tiny.recurrent(name, memory="kv", **fields)


def windows(model, rows=ROWS, use_state=True, logits=False):
    return model.block_size.windows(model, rows, use_state=use_state, logits=logits)


@pytest.fixture
def memory(monkeypatch):
    """Set the free memory in bytes."""
    return lambda free: monkeypatch.setattr(activation_budget, "available_memory", lambda device: free)


def needed(model):
    """Free memory in which a block of one window fits, and what every further window adds to it."""
    ids = tiny.documents(2, 8)
    one, two = (_saved_bytes(model, ids[:rows]) for rows in (1, 2))
    reserved = activation_budget.RESERVED_BYTES * model.num_parameters(only_trainable=True)
    return reserved, 2 * (two - one) / activation_budget.MEMORY_SHARE["cpu"]


def _saved_bytes(model, ids):
    """What autograd holds after a forward pass over one window each, weights excepted."""
    plain = copy.deepcopy(model)
    plain.config.recurrence = dataclasses.replace(model.config.recurrence, keep_graph=True, block_windows=1)
    weights = {weight.untyped_storage().data_ptr() for weight in plain.parameters()}
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.untyped_storage().data_ptr(), x), id):
        out = plain(ids, labels=ids)
    del out
    return sum(x.untyped_storage().nbytes() for address, x in kept.items() if address not in weights)


def test_auto_is_as_many_windows_as_memory_allows(memory):
    model = carrying()
    reserved, each = needed(model)
    for fitting in (3, 8):
        memory(int(reserved + (fitting + 0.5) * ROWS * each))
        assert block_size.measure_block_windows(model, ROWS) == pytest.approx(fitting, abs=1)
    memory(2**50)
    assert block_size.measure_block_windows(model, ROWS) == block_size.BLOCK_TOKENS["cpu"] // 8 // ROWS
    for little in (0, reserved // 2):
        memory(little)
        assert block_size.measure_block_windows(model, ROWS) == 1


def test_auto_is_resolved_once(memory):
    model = carrying()
    reserved, each = needed(model)
    memory(int(reserved + 20 * each))
    first = windows(model, rows=4)
    assert first == model.block_size.resolved > 1
    for free in (2**50, 0):
        memory(free)
        assert [windows(model, rows) for rows in (1, 3, 4)] == [first] * 3, "the last batch may be smaller"
        assert windows(model, rows=8) == first // 2, "a larger batch has blocks of the same size"
        assert windows(model, rows=1000) == 1
        assert windows(model, logits=True) == first


def test_settings_come_before_memory(memory, monkeypatch):
    monkeypatch.setattr(block_size, "measure_block_windows", None)
    assert windows(carrying(block_windows=5)) == windows(carrying(block_windows=5), rows=99) == 5
    vector = tiny.recurrent("gpt2", block_windows=5)
    assert windows(vector) == 1
    assert windows(vector, use_state=False) == 5
    given = block_size.given_block_windows
    assert given(vector.config.recurrence, use_state=True) == 1
    assert given(vector.config.recurrence, use_state=False) == 5
    assert given(carrying().config.recurrence, use_state=True) is None


def test_without_gradients_a_block_has_a_fixed_number_of_tokens(monkeypatch):
    monkeypatch.setattr(block_size, "measure_block_windows", None)
    model = carrying(block_windows=5)
    with torch.no_grad():
        assert windows(model) == block_size.block_tokens(model) // 8 // ROWS
        assert windows(model, rows=10**6) == 1
        monkeypatch.setitem(block_size.LOGIT_BYTES, "cpu", 4 * 67 * 8 * 6)
        assert windows(model, logits=True) == 3
        assert windows(tiny.recurrent("gpt2")) == 1


@pytest.mark.parametrize("autocast", [False, True])
def test_measuring_leaves_no_trace(autocast):
    """A first step that measures equals one that does not, with dropout and in bfloat16."""
    ids = tiny.documents(ROWS, 40)
    losses, gradients = [], []
    for block in ("auto", None):
        model = carrying(settings=DROPOUT, block_windows=block or losses[0][1]).train()
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(ids, labels=ids).loss
        loss.backward()
        losses.append((loss.item(), windows(model), torch.rand(()).item()))
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    assert losses[0] == losses[1]
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


def test_weights_that_are_not_here_are_not_measured():
    model = carrying("llama")
    assert block_size.measure_block_windows(copy.deepcopy(model).to("meta"), ROWS) == 1
    offloaded = accelerate.cpu_offload(copy.deepcopy(model), torch.device("cpu"))
    ids = tiny.documents(ROWS, 40)
    torch.testing.assert_close(offloaded(ids).logits, model(ids).logits)
    assert offloaded.block_size.resolved == 1


def test_copies_keep_the_number_and_saved_models_keep_the_setting(tmp_path):
    model = carrying()
    model.block_size.resolve(3, ROWS)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        model.block_size.resolve(4, ROWS)
        assert windows(copied) == 3
        model.block_size.resolve(3, ROWS)
    model.fast_path = "off"
    assert windows(model) == 3
    model.save_pretrained(tmp_path / "auto")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "auto")
    assert loaded.config.recurrence.block_windows == "auto"
    assert loaded.block_size.resolved is None
    carrying(block_windows=3).save_pretrained(tmp_path / "three")
    assert windows(AutoModelForCausalLM.from_pretrained(tmp_path / "three")) == 3
