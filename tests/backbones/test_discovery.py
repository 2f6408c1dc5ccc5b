# SPDX-License-Identifier: Apache-2.0
"""Discovery: what is found of a model, what is refused in which words, and that the model is as before afterwards."""

import dataclasses

import pytest
import torch
import transformers as hf
from helpers import families, tiny
from helpers.snapshots import snapshot
from torch.testing import assert_close

import carryforward as cf
from carryforward.backbones.architectures import ARCHITECTURES, STORED_AS
from carryforward.backbones.discovery import NotUnderstood, discover, probe_ids


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("build", [tiny.base, families.base], ids=["tiny", "families"])
@pytest.mark.parametrize("head", [None, "none"])
def test_discovery_agrees_with_the_table(name, build, head):
    model = build(name, head)
    row = ARCHITECTURES[name]
    if head is None and getattr(model.config, "final_logit_softcapping", None) is not None:
        row = dataclasses.replace(row, plain_head=False)  # which a row cannot know
    assert discover(model) == row


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("olmo2", {"norm": None, "rotary": True}),
        ("glm4", {"norm": "input_layernorm", "rotation_layout": "neighbours, angles in halves"}),
        ("cohere", {"rotation_layout": "neighbours", "plain_head": False}),
        ("nanochat", {"rotation_layout": "halves backwards", "plain_head": False}),
        ("gpt_oss", {"rotation_layout": "halves, angles once", "masks_by_type": True}),
        ("smollm3", {"unrotated": (2,)}),
        ("exaone4", {"unrotated": (2,), "norm": None}),
        ("granite", {"plain_head": False, "rotation_layout": "halves"}),
        ("stablelm", {"hands_down": False}),
        ("jetmoe", {"kv_shapes": ((2, 8, 8),) * 3, "kv_repeats": 2}),
        (
            "gptj",
            {
                "own_attention": "_attn",
                "rotation_table": "embed_positions",
                "reaches_layers": False,
                "rotation_layout": "neighbours, angles once",
            },
        ),
        ("falcon", {"own_attention": "scaled_dot_product_attention", "reaches_layers": False, "norm": "ln_attn"}),
        ("albert", {"order": (0, 0, 1), "layers": "encoder.albert_layer_groups", "norm": None}),
        ("gemma4_text", {"takes_embeddings": False}),
        ("esm", {"offset_positions": True, "causal": False, "rotary": False, "takes_embeddings": False}),
        ("gpt_bigcode", {"rotary": False, "offset_positions": False, "layers": "h"}),
        ("modernbert-decoder", {"rotary_by_type": True, "causal": True}),
    ],
)
def test_what_is_found(name, found):
    architecture = discover(families.base(name))
    assert {key: getattr(architecture, key) for key in found} == found


def thin_encoder(**settings):
    """One layer as it is initialised: other tokens change its outputs by less than a thousandth."""
    torch.manual_seed(0)
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return hf.ErnieForMaskedLM(hf.ErnieConfig(vocab_size=67, **size, **settings))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_thin_encoder_is_not_taken_for_causal(attention):
    model = thin_encoder().eval()
    model.set_attn_implementation(attention)
    ids = probe_ids(model, 6)
    with torch.no_grad():
        one, other = (model.ernie(x).last_hidden_state[:, :-1] for x in (ids, torch.cat([ids[:, :-1], ids[:, :1]], 1)))
    assert_close(other, one, rtol=0, atol=1e-3 * float(one.abs().max()))  # outputs do not tell
    assert not discover(model).causal


@pytest.mark.parametrize(
    "name", ["granite", "gpt_bigcode", "stablelm", "gptj", "falcon", "esm", "eurobert", "ernie", "albert"]
)
def test_causal_models_are_known_by_what_attention_is_given(name):
    for attention in ("sdpa", "eager") if families.base(name)._supports_sdpa else ("eager",):
        model = families.base(name)
        model.set_attn_implementation(attention)
        assert discover(model).causal == families.is_causal(name)


def test_a_model_with_layers_of_both_kinds_is_refused():
    model = families.base("ernie")
    model.ernie.encoder.layer[1].attention.self.is_causal = True
    with pytest.raises(NotUnderstood, match="some of its layers are causal, others are not"):
        discover(model)


# --- refusals --------------------------------------------------------------------------------------------------------

_small = {key: value for key, value in tiny._grouped.items() if key != "max_position_embeddings"}
REFUSED = {
    "bloom": (
        lambda: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=67, hidden_size=16, n_layer=2, n_head=2)),
        "its attention is not computed by transformers' AttentionInterface",
    ),
    "mpt": (
        lambda: hf.MptForCausalLM(hf.MptConfig(vocab_size=67, d_model=16, n_layers=2, n_heads=2, max_seq_len=40)),
        "its attention is not computed by transformers' AttentionInterface",
    ),
    "jamba": (
        lambda: hf.JambaForCausalLM(hf.JambaConfig(
            **_small, attn_layer_period=2, attn_layer_offset=0, use_mamba_kernels=False, mamba_d_state=8,
            num_experts=2, mamba_dt_rank=4)),
        "of its 3 layers have no attention of that kind (a recurrent state, say)",
    ),
    "qwen3_next": (
        lambda: hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(
            **_small, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
            shared_expert_intermediate_size=24, linear_num_key_heads=2, linear_num_value_heads=2,
            linear_key_head_dim=8, linear_value_head_dim=8,
            layer_types=["full_attention", "linear_attention", "full_attention"])),
        "1 of its 3 layers have no attention of that kind (a recurrent state, say)",
    ),
    "albert": (
        lambda: hf.AlbertForMaskedLM(hf.AlbertConfig(**tiny._common, embedding_size=12, inner_group_num=2)),
        "a layer computes attention more than once",
    ),
    "falcon_h1": (
        lambda: hf.FalconH1ForCausalLM(hf.FalconH1Config(
            **_small, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1)),
        "layer 1 passes something on from token to token beside attention (a recurrent state, say)",
    ),
    "gpt_neo": (
        lambda: hf.GPTNeoForCausalLM(hf.GPTNeoConfig(
            vocab_size=67, hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]])),
        "its attention function hides keys by itself, whatever mask it is given",
    ),
    "codegen": (
        lambda: hf.CodeGenForCausalLM(hf.CodeGenConfig(
            vocab_size=67, n_embd=16, n_layer=2, n_head=4, rotary_dim=4, n_positions=40, n_ctx=40)),
        "its attention takes no further keyword arguments",
    ),
    "moshi": (
        lambda: hf.MoshiForCausalLM(hf.MoshiConfig(**{**_small, "num_key_value_heads": 2}, ffn_dim=24)),
        "its attention rotates keys by itself, and not with a table",
    ),
    "mamba": (
        lambda: hf.MambaForCausalLM(hf.MambaConfig(vocab_size=67, hidden_size=16, num_hidden_layers=2, state_size=4)),
        "",
    ),
    "deepseek_v3": (
        lambda: families.base("deepseek_v3"),
        "its keys are rotated in a way that is not known, or changed after their rotation",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_understood_is_refused_in_a_sentence(name):
    make, reason = REFUSED[name]
    model = make()
    with pytest.raises(ValueError, match=f"^Recurrence cannot be added to a model of type {name!r}: ") as raised:
        cf.add_recurrence(model, memory="vector")
    message = str(raised.value)
    print(message)
    assert reason in message
    assert message.count(". ") == 1
    assert len(message) < 300
    assert isinstance(raised.value.__cause__, NotUnderstood)
    assert not hasattr(model.config, STORED_AS)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: hf.FalconForCausalLM(hf.FalconConfig(**{key: tiny._common[key] for key in (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}, alibi=True)),
         "'falcon' with alibi=True: its masks hold a bias for distances (ALiBi), which what is carried would not get."),
        (lambda: hf.T5ForConditionalGeneration(hf.T5Config(
            vocab_size=67, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)),
         "'t5' with is_encoder_decoder=True: only decoders and encoders are supported."),
    ],
)  # fmt: skip
def test_settings_are_refused_before_anything_is_tried(make, reason):
    model = make()
    with pytest.raises(ValueError, match=" with ") as raised:
        cf.add_recurrence(model, memory="vector")
    assert str(raised.value) == f"Recurrence cannot be added to a model of type {reason}"
    assert not hasattr(model.config, STORED_AS)


# --- the model is as before ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "name", ["granite", "gemma2", "stablelm", "gpt_oss", "esm", "bert", "albert", "jetmoe", "gptj", "falcon"]
)
def test_a_model_is_as_before_afterwards(name, attention, training):
    model = families.base(name)
    if name not in ("gptj", "falcon"):  # which have the one that they were made with
        model.set_attn_implementation("eager" if name in ("gpt_oss", "gemma2") else attention)
    model.train(training)
    model.base_model.get_input_embeddings().eval()  # a part that is in another mode stays so
    before, random, ids = snapshot(model), torch.get_rng_state(), tiny.documents(1, 9)
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
    model.train(training)
    model.base_model.get_input_embeddings().eval()
    discover(model)
    assert snapshot(model) == before
    assert torch.get_rng_state().equal(random)
    with torch.no_grad():
        assert_close(model.eval()(input_ids=ids).logits, expected, rtol=0, atol=0)


def test_a_failed_discovery_leaves_the_model_as_it_was():
    model = families.base("hunyuan_v1_dense").train()
    before = snapshot(model)
    with pytest.raises(NotUnderstood):
        discover(model)
    assert snapshot(model) == before


def test_probe_ids_avoid_special_tokens():
    model = families.base("granite")
    model.config.eos_token_id = [3, 40]
    ids = probe_ids(model, 20, rows=3)
    assert ids.shape == (3, 20)
    assert len(ids.unique()) == 60
    assert not set(ids.flatten().tolist()) & {1, 2, 3, 40}
