# SPDX-License-Identifier: Apache-2.0
"""Generating token by token equals one call over the whole text."""

import pytest
import torch
import transformers as hf
from helpers import tiny
from helpers.generation import GREEDY, NO_EOS, WINDOW, decode, greedy_continuation, logits_of_one_call, pad_left
from torch.testing import assert_close

import carryforward as cf

VARIANTS = [
    {"overlap": 0},
    {"overlap": 2},
    {"overlap": WINDOW - 1},
    {"slots": 2, "insert_at": (1, 3), "pooling": "attention"},
    {"pooling": "max", "insert_at": "all", "state_per_layer": True},
    {"pooled_layers": "last", "slots": 3},
    {"pooled_layers": "below", "insert_at": "all", "residual": True, "slots": 2},
    {"slots": 0, "recent": 4, "sinks": 1},
    {"slots": 2, "insert_at": (1, 3), "recent": 6},
    {"overlap": 0, "recent": 3, "sinks": 1},
]
CASES = [(name, fields) for name in tiny.CAUSAL for fields in VARIANTS] + [
    ("gpt2", {"overlap": 0, **tiny.TOKENS}),
    ("gemma3_text", tiny.TOKENS),
    ("opt", {"overlap": WINDOW - 1, **tiny.TOKENS}),
    ("llama", tiny.ASSOCIATIVE),
    ("mistral", {"overlap": 0, **tiny.ASSOCIATIVE}),
    ("gpt2", tiny.ASSOCIATIVE_AND_KV),
]
KINDS = [{}, tiny.TOKENS, tiny.ASSOCIATIVE]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("name", "fields"), CASES, ids=str)
def test_token_by_token_equals_one_call(name, fields, attention):
    model = tiny.precise(name, **fields)
    model.base.set_attn_implementation(attention)
    ids, lengths = tiny.documents(3, 45), [1, 9, 20]
    logits, _ = decode(model, ids, lengths)
    assert_close(logits, logits_of_one_call(model, ids, lengths), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("overlap", [0, 3, WINDOW - 1])
@pytest.mark.parametrize(
    ("name", "fields"),
    [(name, {}) for name in tiny.CAUSAL] + [("llama", tiny.TOKENS), ("gpt2", tiny.ASSOCIATIVE)],
)
def test_generation_at_another_overlap_equals_one_call(name, fields, overlap):
    model = tiny.precise(name, overlap=2, **fields)
    ids, lengths = tiny.documents(2, 40), [5, 17]
    logits, cache = decode(model, ids, lengths, overlap)
    assert_close(logits, logits_of_one_call(model, ids, lengths, overlap=overlap), rtol=1e-4, atol=1e-4)
    assert f"overlap {overlap}" in cache.state.signature


@pytest.mark.parametrize(
    ("name", "fields"),
    [(name, {}) for name in tiny.CAUSAL] + [("gemma3_text", tiny.TOKENS), ("gpt2", tiny.ASSOCIATIVE)],
)
def test_without_a_state_windows_are_those_of_the_base_model(name, fields):
    model = tiny.precise(name, overlap=2, **fields)
    ids = tiny.documents(2, 30)
    logits, _ = decode(model, ids, [1, 1], use_state=False)
    for start, end, fresh in ((0, 8, 0), (6, 14, 8), (24, 30, 26)):
        expected = model.base(ids[:, start:end]).logits[:, fresh - start :]
        assert_close(logits[:, fresh:end], expected, rtol=1e-4, atol=1e-4)
    assert (decode(model, ids, [1, 1])[0] - logits).abs().max() > 1e-3, "the state has an effect"


@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, WINDOW + 1, 6 * WINDOW + 3])
@pytest.mark.parametrize(("overlap", "fields"), [(0, {}), (2, {}), (2, tiny.TOKENS), (0, tiny.ASSOCIATIVE)], ids=str)
def test_prompts_may_end_anywhere_in_a_window(length, overlap, fields):
    model = tiny.recurrent("gpt2", overlap=overlap, **fields)
    ids = tiny.documents(2, length)
    assert model.generate(ids, max_new_tokens=20, **GREEDY).equal(greedy_continuation(model, ids, 20))


@pytest.mark.parametrize("name", tiny.CAUSAL)
@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_generation_in_bfloat16_is_close_to_one_call(name, how):
    model = tiny.recurrent(name)
    model = model.to(torch.bfloat16) if how == "weights" else model
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        for attention in ("sdpa", "eager"):
            model.base.set_attn_implementation(attention)
            out = model.generate(
                tiny.documents(2, 11), max_new_tokens=20, return_dict_in_generate=True, output_logits=True, **GREEDY
            )
            logits, whole = torch.stack(out.logits, dim=1), logits_of_one_call(model, out.sequences, [11, 11])[:, :-1]
            assert_close(logits, whole.float(), rtol=0, atol=0.03 * whole.abs().max().item())


@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_beam_sampling_equals_whole_calls(fields):
    """Beams and scores are those of a model that reads the whole text again for every token."""
    model = tiny.recurrent("gpt2", overlap=0, **fields)
    base = tiny.base("gpt2")
    ids = tiny.documents(2, 9)
    settings = {"num_beams": 3, "do_sample": True, "max_new_tokens": 15, "return_dict_in_generate": True,
                "output_scores": True}  # fmt: skip
    base.forward = lambda input_ids, **_: hf.modeling_outputs.CausalLMOutput(logits=model(input_ids).logits)
    outs = []
    for generator, extra in ((model, {}), (base, {"use_cache": False})):
        torch.manual_seed(4)
        outs.append(generator.generate(ids, **settings, **extra, **NO_EOS))
    assert outs[0].sequences.equal(outs[1].sequences)
    assert_close(outs[0].sequences_scores, outs[1].sequences_scores, rtol=1e-4, atol=1e-4)


def test_learned_positions_do_not_limit_the_length():
    """GPT-2 with 40 positions generates 800 tokens."""
    model = tiny.recurrent("gpt2", window=40, overlap=5)
    out = model.generate(tiny.documents(1, 7), max_new_tokens=800, do_sample=True, return_dict_in_generate=True,
                         output_logits=True, **NO_EOS)  # fmt: skip
    assert out.sequences.shape == (1, 807)
    with torch.no_grad():
        whole = model(out.sequences).logits
    assert_close(torch.stack(out.logits, dim=1), whole[:, 6:-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("overlap", "steps", "fields"),
    [(overlap, steps, {}) for overlap in (0, 2, WINDOW - 1) for steps in (1, 6, 7, 8, 30)]
    + [(2, 7, tiny.TOKENS), (2, 8, tiny.ASSOCIATIVE), (0, 30, tiny.TOKENS)],
)
def test_a_continued_generation_equals_an_uninterrupted_one(overlap, steps, fields, tmp_path):
    model = tiny.recurrent("gpt2", overlap=overlap, **fields)
    prompts, mask = pad_left(tiny.documents(2, 12), [5, 12])
    whole = model.generate(prompts, attention_mask=mask, max_new_tokens=steps + 20, **GREEDY)
    settings = {"max_new_tokens": steps, "return_dict_in_generate": True}
    first = model.generate(prompts, attention_mask=mask, **settings, **GREEDY)
    state = first.past_key_values.state
    state.save(tmp_path / "state.safetensors")
    for start in (state, cf.State.load(tmp_path / "state.safetensors")):
        more = model.generate(first.sequences[:, -1:], state=start, max_new_tokens=20, **GREEDY)
        assert torch.cat([first.sequences, more[:, 1:]], dim=1).equal(whole)
    full = model.advance_state(first.sequences[:, -1:], state=state)  # with the last token
    for no_prompt in ({}, {"input_ids": prompts[:, :0]}):
        more = model.generate(**no_prompt, state=full, max_new_tokens=20, **GREEDY)
        assert torch.cat([first.sequences, more[:, 1:]], dim=1).equal(whole)
