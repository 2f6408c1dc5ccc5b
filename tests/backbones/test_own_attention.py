# SPDX-License-Identifier: Apache-2.0
"""Models that attend by themselves, that keep keyword arguments from their layers, or that compute several layers by
one module: what belongs to a call reaches this call, and nothing of it stays behind."""

import copy
import pickle
from functools import partial

import pytest
import torch
import transformers as hf
from helpers import families, family_checks, tiny
from helpers.family_checks import MEMORIES, assert_same_step, build, trained
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from transformers.models.albert.modeling_albert import AlbertLayerGroup

import carryforward as cf
from carryforward.analysis.token_gains import measure_token_gains
from carryforward.backbones import hooks, layer_calls
from carryforward.models import verification

OWN = ["gptj", "falcon"]
FALCONS = {
    "7b": {"multi_query": True, "bias": True},
    "one after the other": {"multi_query": True, "parallel_attn": False},
    "all heads": {"multi_query": False},
    "11b": {"new_decoder_architecture": True, "num_kv_heads": 1, "num_ln_in_parallel_attn": 1},
}
FAR = {
    "gptj": cf.KVMemoryConfig(recent=3, sinks=1, far=3, selection="attention"),
    "falcon": cf.KVMemoryConfig(recent=11, sinks=1),
    "albert": cf.KVMemoryConfig(recent=3, sinks=1, far=3, selection="merged"),
}


# --- other settings of the same types --------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", FALCONS.values(), ids=FALCONS)
@pytest.mark.parametrize("title", ["verified", "two windows", "generated"])
def test_falcons_of_other_shapes(settings, title, monkeypatch):
    monkeypatch.setitem(families.ALL, "falcon", settings)
    family_checks.CHECKS[title].holds("falcon", "kv")


@pytest.mark.parametrize("name", FAR)
def test_memories_that_reach_far(name, monkeypatch):
    monkeypatch.setitem(MEMORIES, "far", FAR[name])
    for title in ("state removed", "streamed", "batched", "generated"):
        check = family_checks.CHECKS[title]
        if families.is_causal(name) or not check.causal_only:
            check.holds(name, "far")


def test_gpt_js_positions_end():
    """They are rotations, from a table."""
    with pytest.raises(ValueError, match="window=30 with 12 positions carried in front of it exceeds the 40 positions"):
        cf.add_recurrence(families.base("gptj"), window=30, memory=cf.KVMemoryConfig(recent=11, sinks=1))
    with pytest.raises(ValueError, match="reach=20 takes 20 positions, and the 40 positions that gptj has leave 10 "):
        cf.add_recurrence(families.base("gptj"), window=30, reach=20)


def test_a_falcon_that_was_loaded_with_eager_attention_uses_sdpa():
    model = hf.FalconForCausalLM._from_config(families.config("falcon"), attn_implementation="eager")
    recurrent = cf.add_recurrence(model, window=8, memory=MEMORIES["kv"]).eval()
    recurrent(tiny.documents(1, 20))
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("memory", ["vector", "kv"])
def test_attention_to_the_state_is_recorded(name, memory):
    model = build(name, memory)
    ids = tiny.documents(1, 30)[0].tolist()
    found = measure_token_gains(model, ids)
    assert found.attention.shape == (tiny.LAYERS, tiny.HEADS)
    assert (found.attention > 0.05).all()
    assert (found.attention < 0.95).all()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    chosen = logits[torch.arange(29), torch.tensor(ids[1:])]
    assert_close(torch.from_numpy(found.with_state.log_probs[1:]).to(chosen), chosen, rtol=1e-4, atol=1e-4)


# --- what belongs to a call ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", OWN)
def test_gradient_checkpointing_changes_nothing(name, memory):
    ids, steps = tiny.documents(2, 30), []
    for checkpointing, keep_graph in ((False, True), (True, True), (True, False)):
        model = build(name, memory, keep_graph=keep_graph).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        steps.append(trained(model, ids))
    for step in steps[1:]:
        assert_same_step(step, steps[0])


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_layer_that_runs_again_is_the_same_layer(memory, monkeypatch):
    """Transformers does not checkpoint ALBERT's layers; users may."""

    def checkpointed(self, *args, **kwargs):
        if not torch.is_grad_enabled():
            return nn.Module.__call__(self, *args, **kwargs)
        runs.append(1)
        return checkpoint(partial(nn.Module.__call__, self, **kwargs), *args, use_reentrant=False)

    ids, runs = tiny.documents(2, 30), []
    expected = trained(build("albert", memory, keep_graph=True), ids)
    monkeypatch.setattr(AlbertLayerGroup, "__call__", checkpointed)
    for keep_graph in (True, False):
        assert_same_step(trained(build("albert", memory, keep_graph=keep_graph), ids), expected)
    assert runs


def test_a_shared_layer_that_forgets_which_one_it_is_is_refused(monkeypatch):
    of_layer = layer_calls._ModelCall.of_layer

    def always_the_first(call, layer):
        call.count = 0
        return of_layer(call, layer)

    monkeypatch.setattr(layer_calls._ModelCall, "of_layer", always_the_first)
    with pytest.raises(ValueError, match="AlbertForMaskedLM: the check 'state arrives' fails"):
        cf.add_recurrence(families.base("albert"), memory="vector", prefix=())


@pytest.mark.parametrize("name", OWN)
def test_attention_that_is_not_taken_over_is_refused(name, monkeypatch):
    monkeypatch.setattr(hooks, "_take_over", lambda *_: None)
    with pytest.raises(ValueError, match="ForCausalLM: the check 'state arrives' fails"):
        cf.add_recurrence(families.base(name), memory="kv")


@pytest.mark.parametrize("name", OWN)
def test_attention_that_does_not_see_the_state_is_refused(name, monkeypatch):
    attend = hooks.attend_by_itself

    def without_past(call, context, *args, **kwargs):
        context.past_kv = None
        return attend(call, context, *args, **kwargs)

    monkeypatch.setattr(hooks, "attend_by_itself", without_past)
    with pytest.raises(ValueError, match="layer 1 does not see the keys that are carried"):
        cf.add_recurrence(families.base(name), memory="kv")


# --- nothing stays behind --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gptj", "falcon", "albert"])
def test_calls_without_a_state_are_as_before(name):
    base, ids = families.base(name), tiny.documents(2, 12)
    with torch.no_grad():
        expected = base(input_ids=ids).logits
        attributes = [sorted(vars(module)) for module in base.modules()]
        model = cf.add_recurrence(base, window=8, memory=["vector", MEMORIES["kv"]], prefix=(), documents=[[5] * 99])
        model.eval()(ids)
        assert_close(base.eval()(input_ids=ids).logits, expected, rtol=0, atol=0)
    added = {"_has_recurrence_hooks", "_tells_layers"}
    assert [sorted({*vars(module)} - added) for module in base.modules()] == attributes


@pytest.mark.parametrize("name", OWN)
def test_nothing_stays_behind_after_an_error(name, monkeypatch):
    base, ids = families.base(name), tiny.documents(2, 20)
    with torch.no_grad():
        expected = base(input_ids=ids).logits
        model = cf.add_recurrence(base, window=8, memory=MEMORIES["kv"]).eval()
        right = model(ids).logits

        def fail(*args, **kwargs):
            raise MemoryError("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(hooks, "attend_by_itself", fail)
            with pytest.raises(MemoryError):
                model(ids)
        assert_close(base(input_ids=ids).logits, expected, rtol=0, atol=0)
        assert_close(model(ids).logits, right, rtol=0, atol=0)
    assert not torch.overrides._get_current_function_mode_stack()


@pytest.mark.parametrize("name", ["gptj", "albert"])
def test_a_copy_is_independent(name):
    model, ids = build(name, "kv"), tiny.documents(1, 20)
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        expected = model(ids).logits
        for parameter in model.base.parameters():
            parameter.zero_()
        for other in (copied, loaded):
            assert_close(other(ids).logits, expected)


def test_verification_sees_all_layers_of_a_shared_module():
    """Which call of a shared module is which layer's is known."""
    model = families.base("albert")
    cf.add_recurrence(model, memory="vector", prefix=())
    probe = verification._Probe(model, cf.RecurrentForMaskedLM)
    layers = probe.architecture.layers_in_order(probe.backbone)
    assert [probe.architecture.layer_list(probe.backbone)[i] for i in (0, 0, 1)] == layers
