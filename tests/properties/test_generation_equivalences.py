# SPDX-License-Identifier: Apache-2.0
"""Writing token by token equals reading the whole text at once."""

import pytest
import torch
import transformers as hf
from helpers import tiny
from helpers.generation import GREEDY, QUIET, WINDOW, greedily, left_padded, read_at_once, written
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
    {"slots": 0, "kept": 4, "sinks": 1},
    {"slots": 2, "insert_at": (1, 3), "kept": 6},
]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("fields", VARIANTS, ids=str)
@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_token_by_token_equals_one_call(name, fields, attention):
    model = tiny.recurrent(name, **fields)
    model.base.set_attn_implementation(attention)
    ids, lengths = tiny.documents(3, 45), [1, 9, 20]
    logits, _ = written(model, ids, lengths)
    assert_close(logits, read_at_once(model, ids, lengths), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("overlap", [0, 3, WINDOW - 1])
@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_another_overlap_than_trained_at(name, overlap):
    model = tiny.recurrent(name, overlap=2)
    ids, lengths = tiny.documents(2, 40), [5, 17]
    logits, cache = written(model, ids, lengths, overlap)
    assert_close(logits, read_at_once(model, ids, lengths, overlap=overlap), rtol=1e-4, atol=1e-4)
    assert f"overlap {overlap}" in cache.state.signature


@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_state_removed_equals_windows_of_the_base_model(name):
    model = tiny.recurrent(name, overlap=2)
    ids = tiny.documents(2, 30)
    logits, _ = written(model, ids, [1, 1], use_state=False)
    for start, end, fresh in ((0, 8, 0), (6, 14, 8), (24, 30, 26)):
        expected = model.base(ids[:, start:end]).logits[:, fresh - start :]
        assert_close(logits[:, fresh:end], expected, rtol=1e-4, atol=1e-4)
    assert (written(model, ids, [1, 1])[0] - logits).abs().max() > 1e-3, "the state takes part"


@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, WINDOW + 1, 6 * WINDOW + 3])
@pytest.mark.parametrize("overlap", [0, 2])
def test_prompts_that_end_anywhere_in_a_window(length, overlap):
    model = tiny.recurrent("gpt2", overlap=overlap)
    ids = tiny.documents(2, length)
    assert model.generate(ids, max_new_tokens=20, **GREEDY).equal(greedily(model, ids, 20))


@pytest.mark.parametrize("name", tiny.CAUSAL)
@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_bfloat16(name, how):
    model = tiny.recurrent(name)
    model = model.to(torch.bfloat16) if how == "weights" else model
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        for attention in ("sdpa", "eager"):
            model.base.set_attn_implementation(attention)
            out = model.generate(
                tiny.documents(2, 11), max_new_tokens=20, return_dict_in_generate=True, output_logits=True, **GREEDY
            )
            logits, whole = torch.stack(out.logits, dim=1), read_at_once(model, out.sequences, [11, 11])[:, :-1]
            assert_close(logits, whole.float(), rtol=0, atol=0.03 * whole.abs().max().item())


def test_beam_sampling_is_that_of_whole_texts():
    """The beams and their scores are those of a model that reads everything again for every token."""
    model = tiny.recurrent("gpt2", overlap=0)
    base = tiny.base("gpt2")
    ids = tiny.documents(2, 9)
    settings = {"num_beams": 3, "do_sample": True, "max_new_tokens": 15, "return_dict_in_generate": True,
                "output_scores": True}  # fmt: skip
    base.forward = lambda input_ids, **_: hf.modeling_outputs.CausalLMOutput(logits=model(input_ids).logits)
    outs = []
    for one, others in ((model, {}), (base, {"use_cache": False})):
        torch.manual_seed(4)
        outs.append(one.generate(ids, **settings, **others, **QUIET))
    assert outs[0].sequences.equal(outs[1].sequences)
    assert_close(outs[0].sequences_scores, outs[1].sequences_scores, rtol=1e-4, atol=1e-4)


def test_learned_positions_are_no_limit():
    """GPT-2 with 40 positions writes twenty times as many."""
    model = tiny.recurrent("gpt2", window=40, overlap=5)
    out = model.generate(tiny.documents(1, 7), max_new_tokens=800, do_sample=True, return_dict_in_generate=True,
                         output_logits=True, **QUIET)  # fmt: skip
    assert out.sequences.shape == (1, 807)
    with torch.no_grad():
        whole = model(out.sequences).logits
    assert_close(torch.stack(out.logits, dim=1), whole[:, 6:-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("steps", [1, 6, 7, 8, 30])
@pytest.mark.parametrize("overlap", [0, 2, WINDOW - 1])
def test_continued_equals_never_stopped(overlap, steps, tmp_path):
    model = tiny.recurrent("gpt2", overlap=overlap)
    prompts, mask = left_padded(tiny.documents(2, 12), [5, 12])
    whole = model.generate(prompts, attention_mask=mask, max_new_tokens=steps + 20, **GREEDY)
    settings = {"max_new_tokens": steps, "return_dict_in_generate": True}
    first = model.generate(prompts, attention_mask=mask, **settings, **GREEDY)
    state = first.past_key_values.state
    state.save(tmp_path / "state.safetensors")
    for given in (state, cf.State.load(tmp_path / "state.safetensors")):
        more = model.generate(first.sequences[:, -1:], state=given, max_new_tokens=20, **GREEDY)
        assert torch.cat([first.sequences, more[:, 1:]], dim=1).equal(whole)
    full = model.advance_state(first.sequences[:, -1:], state=state)  # all of it, the last token too
    for nothing in ({}, {"input_ids": prompts[:, :0]}):
        more = model.generate(**nothing, state=full, max_new_tokens=20, **GREEDY)
        assert torch.cat([first.sequences, more[:, 1:]], dim=1).equal(whole)
