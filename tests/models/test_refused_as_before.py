# SPDX-License-Identifier: Apache-2.0
"""A model to which recurrence cannot be added is as it was before: hooks, attributes, buffers, mode, config and torch's
random numbers; and recurrence can be added to it in another way."""

import pytest
import torch
import transformers as hf
from helpers import families, prose, tiny
from helpers.snapshots import snapshot
from torch.testing import assert_close

import carryforward as cf
from carryforward.backbones.attention import unwrapped_name

KV = cf.KVMemoryConfig(recent=3, sinks=1)


def break_the_head(monkeypatch):
    monkeypatch.setattr(hf.GraniteForCausalLM, "loss_function", lambda self, **_: torch.tensor(7.0))


REFUSED = {
    "not understood": ("hunyuan_v1_dense", {"memory": "vector"}, "its keys are rotated in a way that is not known"),
    "not verified": ("granite", {"memory": "vector"}, "its loss would be"),
    "a wrong window": ("granite", {"window": 8, "overlap": 8}, "overlap"),
    "no text to measure on": ("gpt2", {"window": 8, "memory": KV}, "Give documents=... .* or tokenizer=..."),
    "too little text": ("gpt_bigcode", {"window": 8, "memory": KV, "documents": [[5, 6]]}, "Give more text"),
    "too little text for shared layers": ("albert", {"memory": KV, "documents": [[5, 6]]}, "Give more text"),
    "another tokenizer": ("esm", {"tokenizer": prose.tokenizer()}, "tokenizer gives ids up to"),
    "another head": ("eurobert", {"head": "question-answering"}, "has a head already"),
}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_model_is_as_before(case, attention, training, monkeypatch):
    name, arguments, message = REFUSED[case]
    if case == "not verified":
        break_the_head(monkeypatch)
    model = families.base(name).train(training)
    model.config._attn_implementation = attention
    model.base_model.get_input_embeddings().eval()
    assert_refused_as_before(model, message, **arguments)


def assert_refused_as_before(model, message, **arguments):
    before, random = snapshot(model), torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        cf.add_recurrence(model, **arguments)
    assert snapshot(model) == before
    assert torch.get_rng_state().equal(random)


@pytest.mark.parametrize(("name", "positions"), [("gptj", "exceeds the 40 positions"), ("falcon", "overlap=39")])
def test_one_that_attends_by_itself(name, positions):
    model = families.base(name)
    assert_refused_as_before(model, positions, window=39, overlap=39 * (name == "falcon"), memory=KV)
    exact = model.config._attn_implementation
    model.config._attn_implementation = "flash_attention_2"  # its class is chosen when it is loaded
    assert_refused_as_before(model, f"keeps the one that it was loaded with: load it with .*'{exact}'")


def test_recurrence_can_be_added_to_it_in_another_way(monkeypatch):
    model, ids = families.base("granite"), tiny.documents(2, 30)
    with monkeypatch.context() as patch:
        break_the_head(patch)
        with pytest.raises(ValueError, match="its loss would be"):
            cf.add_recurrence(model, window=8, memory=KV)
    again, fresh = (cf.add_recurrence(one, window=8, memory=KV) for one in (model, families.base("granite")))
    with torch.no_grad():
        assert_close(again(ids).logits, fresh(ids).logits, rtol=0, atol=0)


def test_what_an_earlier_recurrence_has_added_stays():
    base, ids = families.base("granite"), tiny.documents(2, 30)
    model = cf.add_recurrence(base, window=8, memory=KV)
    with torch.no_grad():
        expected = model(ids).logits
        with pytest.raises(ValueError, match="overlap"):
            cf.add_recurrence(base, window=8, overlap=8)
        assert_close(model(ids).logits, expected, rtol=0, atol=0)


# --- attention functions that cannot show the state ------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["flex_attention", "flash_attention_2", "paged|eager"])
@pytest.mark.parametrize("name", ["llama", "granite", "gemma2", "gpt_oss", "bert"])
def test_they_are_switched_to_an_exact_one(name, attention, caplog):
    exact = "eager" if name in ("gemma2", "gpt_oss") else "sdpa"  # which these have alone
    fields = {"memory": KV} | ({"window": 8} if families.is_causal(name) else {"window": 11, "prefix": (2,)})
    models = [families.base(name) for _ in range(2)]
    models[0].config._attn_implementation = attention  # set_attn_implementation asks for what is not installed
    models[1].set_attn_implementation(exact)
    models = [cf.add_recurrence(model, documents=tiny.TEXT, **fields) for model in models]
    assert f"attn_implementation={attention!r} cannot show a state to every query: {exact!r} is used" in caplog.text
    assert {unwrapped_name(model.base.config._attn_implementation) for model in models} == {exact}
    ids = tiny.documents(2, 30)
    with torch.no_grad():
        assert_close(*(model(ids).logits for model in models), rtol=0, atol=0)
