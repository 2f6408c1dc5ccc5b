# SPDX-License-Identifier: Apache-2.0
"""Verification refuses what is wrong without an error, by the check that names it, and passes what is right."""

import dataclasses
import json

import pytest
import torch
import transformers as hf
from helpers import families, tiny
from torch.testing import assert_close

import carryforward as cf
from carryforward.backbones import hooks
from carryforward.backbones.architectures import ARCHITECTURES, architecture_of, store_architecture
from carryforward.backbones.discovery import discover
from carryforward.models import verification


def described(name, **wrong):
    """A base model whose stored architecture is wrong."""
    model = families.base(name)
    store_architecture(model.config, dataclasses.replace(discover(model), **wrong))
    return model


def head_of(model):
    return cf.RecurrentForCausalLM if architecture_of(model.config).causal else cf.RecurrentForMaskedLM


def verify(model):
    verification.verify(model, head_of(model))


NORM = "a vector does not enter layer 1 as a token's hidden state does"
ROTATION = "two windows that carry everything are not one text"
LOSS = "its loss would be "
WRONG = [
    ("granite", {"norm": None}, NORM),
    ("granite", {"norm": "post_attention_layernorm"}, NORM),
    ("glm4", {"norm": "post_self_attn_layernorm"}, NORM),
    ("olmo2", {"norm": "post_attention_layernorm"}, NORM),
    ("nanochat", {"norm": None}, NORM),
    ("esm", {"norm": None}, NORM),
    ("eurobert", {"norm": "post_attention_layernorm"}, NORM),
    ("gpt_bigcode", {"norm": "ln_2"}, NORM),
    ("granite", {"rotation_layout": "halves backwards"}, ROTATION),
    ("nanochat", {"rotation_layout": "halves"}, ROTATION),
    ("cohere", {"rotation_layout": "neighbours, angles in halves"}, ROTATION),
    ("glm4", {"rotation_layout": "halves"}, ROTATION),
    ("eurobert", {"rotation_layout": "neighbours, angles in halves"}, ROTATION),
    ("granite", {"unrotated": (2,)}, ROTATION),
    ("smollm3", {"unrotated": ()}, ROTATION),
    ("smollm3", {"unrotated": (1, 2)}, ROTATION),
    ("granite", {"rotary": False}, NORM),  # it stands at another position
    ("smollm3", {"rotary": False, "unrotated": ()}, NORM),
    ("eurobert", {"rotary": False}, NORM),
    ("granite", {"plain_head": True}, LOSS),
    ("cohere", {"plain_head": True}, LOSS),
    ("stablelm", {"hands_down": True}, "the check 'state arrives' fails"),
    ("gptj", {"norm": None}, NORM),
    ("gptj", {"rotation_layout": "halves, angles once"}, ROTATION),
    ("gptj", {"reaches_layers": True}, "the check 'state arrives' fails"),
    ("gptj", {"own_attention": ""}, "the check 'state arrives' fails"),
    ("falcon", {"own_attention": ""}, "the check 'state arrives' fails"),
    ("falcon", {"own_attention": "_attn"}, "the check 'state arrives' fails"),
    ("falcon", {"norm": "ln_mlp"}, NORM),
    ("albert", {"order": ()}, "the check 'state arrives' fails"),
    ("jetmoe", {"kv_repeats": 1}, "the check 'token by token' fails"),
]


@pytest.mark.parametrize(("name", "wrong", "message"), WRONG, ids=str)
def test_a_wrong_architecture_is_refused(name, wrong, message):
    model = described(name)
    verify(model)
    store_architecture(model.config, dataclasses.replace(architecture_of(model.config), **wrong))
    with pytest.raises(ValueError, match="^Recurrence cannot be added to ") as raised:
        verify(model)
    assert message in str(raised.value)
    assert str(raised.value).endswith("With verify=False it is added all the same.")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "wrong", "checks"),
    [
        ("granite", {}, set()),
        ("granite", {"norm": None}, {"_vectors_enter"}),
        ("granite", {"rotation_layout": "halves backwards"}, {"_two_windows", "_keys_move"}),
        ("granite", {"rotary": False}, {"_vectors_enter", "_keys_move"}),
        ("smollm3", {"unrotated": ()}, {"_two_windows", "_keys_move"}),
        ("granite", {"plain_head": True}, {"_loss"}),
        ("gptj", {}, set()),
        ("gptj", {"norm": None}, {"_vectors_enter"}),
        ("gptj", {"rotation_layout": "halves, angles once"}, {"_two_windows", "_keys_move"}),
        ("falcon", {}, set()),
        ("falcon", {"norm": "ln_mlp"}, {"_vectors_enter"}),
        ("falcon", {"rotary": False}, {"_vectors_enter", "_keys_move"}),
        ("albert", {}, set()),
    ],
    ids=lambda value: " ".join(sorted(value)) if isinstance(value, set) else str(value),
)
def test_each_check_finds_it_by_itself(name, wrong, checks, dtype):
    model = described(name, **wrong).to(dtype)
    with torch.no_grad():
        probe = verification._Probe(model, head_of(model))
        assert {check.__name__ for check in verification._CHECKS if verification._problem(check, probe)} == checks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [("granite", {"norm": None}, NORM), ("glm4", {"rotation_layout": "halves"}, ROTATION),
     ("smollm3", {"unrotated": ()}, ROTATION), ("granite", {"plain_head": True}, LOSS),
     ("granite", {"rotary": False}, NORM)],
)  # fmt: skip
def test_rounding_hides_no_wrong_architecture(name, wrong, message, dtype):
    with pytest.raises(ValueError, match=message):
        verify(described(name, **wrong).to(dtype))


def hide_the_state(model):
    """A mask that keeps carried positions from every query: what a model would do that makes its own masks."""
    attention = model.model.layers[1].self_attn

    def close(module, args, kwargs):
        hidden, slots = kwargs["hidden_states"], kwargs.get("slots")
        count = 0 if slots is None else slots.shape[1]
        if count:
            size = hidden.shape[1]
            mask = torch.ones(size, size, dtype=torch.bool).tril()
            mask[count:, :count] = False
            kwargs = {**kwargs, "attention_mask": mask[None, None]}
        return args, kwargs

    hooks.install(model.model, architecture_of(model.config))
    attention.register_forward_pre_hook(close, with_kwargs=True)


def remove_a_hook(model):
    """Attention that does not get what its layer was given."""
    hooks.install(model.model, architecture_of(model.config))
    attention = model.model.layers[1].self_attn
    attention._forward_pre_hooks.clear()
    attention._forward_pre_hooks_with_kwargs.clear()


def swallow_arguments(model):
    """A layer that does not hand keyword arguments on."""
    hooks.install(model.model, architecture_of(model.config))
    drop = ("attention_context", "slots")
    model.model.layers[1].self_attn.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {key: x for key, x in kwargs.items() if key not in drop}),
        with_kwargs=True, prepend=True,
    )  # fmt: skip


def saturate(model):
    """Attention whose softmax is saturated, so that outputs do not show the state: nothing is wrong with it."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 1e3


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (hide_the_state, "in layer 2 not every token sees the state"),
        (remove_a_hook, "the check 'state arrives' fails"),
        (swallow_arguments, "the check 'state arrives' fails"),
    ],
)
def test_a_state_that_does_not_arrive_is_refused(break_it, message):
    model = described("granite")
    break_it(model)
    with pytest.raises(ValueError, match="^Recurrence cannot be added to GraniteForCausalLM: ") as raised:
        verify(model)
    assert message in str(raised.value)


def test_a_saturated_softmax_is_no_false_alarm():
    model = described("granite")
    saturate(model)
    verify(model)


def test_scaled_logits_of_a_single_row_are_refused():
    """A head that the architecture calls plain, with a forward pass that does more."""
    model = described("granite", plain_head=True)
    model.config.logits_scaling = 1.0
    verify(model)
    other = described("granite", plain_head=True)
    other.config.logits_scaling = 1.1
    with pytest.raises(ValueError, match=LOSS):
        verify(other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["granite", "cohere", "glm4", "gemma2", "stablelm", "gpt_bigcode", "esm", "eurobert"])
def test_models_of_every_precision_verify(name, dtype):
    model = families.base(name).to(dtype)
    store_architecture(model.config, discover(model))
    verify(model)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "modernbert", "granite"])
def test_known_models_verify_with_every_attention_function(name, attention):
    model = families.base(name)
    model.set_attn_implementation(attention)
    if name not in ARCHITECTURES:
        store_architecture(model.config, discover(model))
    verify(model)


def test_the_bundled_model_verifies():
    model, tokenizer = cf.load_bundled()
    recurrent = cf.add_recurrence(model, tokenizer=tokenizer, memory="vector", verify=True)
    assert recurrent.config.verified == verification.record_of(model)


# --- when it is asked ------------------------------------------------------------------------------------------------


def test_models_in_the_table_are_verified_only_if_asked(monkeypatch):
    calls = []
    monkeypatch.setattr(verification, "verify", lambda base, head: calls.append(type(base).__name__))
    cf.add_recurrence(families.base("llama"), memory="vector", window=8)
    cf.add_recurrence(families.base("granite"), memory="vector", window=8)
    cf.add_recurrence(families.base("llama"), memory="vector", window=8, verify=True)
    cf.add_recurrence(families.base("granite"), memory="vector", window=8, verify=False)
    assert calls == ["GraniteForCausalLM", "LlamaForCausalLM"]


def test_a_model_that_is_refused_can_be_added_all_the_same():
    with pytest.raises(ValueError, match=NORM):
        cf.add_recurrence(described("granite", norm=None), memory="vector", window=8)
    model = cf.add_recurrence(described("granite", norm=None), memory="vector", window=8, verify=False)
    assert model.config.verified is None
    assert model(tiny.documents(1, 20)).logits.isfinite().all()


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", ["granite", "gemma2"])  # sdpa and eager attention
def test_a_model_is_as_before_afterwards(name, training):
    model = described(name).train(training)
    model.model.embed_tokens.eval()
    modes, random = [module.training for module in model.modules()], torch.get_rng_state()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    needed = [parameter.requires_grad for parameter in model.parameters()]
    attention = model.config._attn_implementation
    with torch.no_grad():
        before = model.eval()(input_ids=tiny.documents(1, 9)).logits
    model.train(training)
    model.model.embed_tokens.eval()
    verify(model)
    assert [module.training for module in model.modules()] == modes
    assert torch.get_rng_state().equal(random)
    assert model.config._attn_implementation == attention
    assert [parameter.requires_grad for parameter in model.parameters()] == needed
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(value.equal(state[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        assert_close(model.eval()(input_ids=tiny.documents(1, 9)).logits, before)


@pytest.mark.parametrize("changed", [{"transformers": "5.0.0"}, {"source": "0" * 64}], ids=["version", "source"])
def test_another_source_is_verified_again_on_loading(changed, tmp_path, monkeypatch):
    model = cf.add_recurrence(families.base("granite"), memory="vector", window=8)
    model.save_pretrained(tmp_path)
    calls, verify_it = [], verification.verify
    monkeypatch.setattr(verification, "verify", lambda *args: [calls.append(args), verify_it(*args)])
    hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not calls, "nothing has changed"
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())
    content["verified"] |= changed
    file.write_text(json.dumps(content))
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(calls) == 1
    assert loaded.config.verified == verification.record_of(loaded.base)


def test_a_model_that_no_longer_verifies_is_refused_on_loading(tmp_path):
    model = cf.add_recurrence(described("granite", norm=None), memory="vector", window=8, verify=False)
    model.config.verified = {"transformers": "5.0.0", "source": ""}
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=NORM):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)
