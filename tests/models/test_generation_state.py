# SPDX-License-Identifier: Apache-2.0
"""Generation that continues from a state, or from an earlier call's cache."""

import pytest
import torch
from helpers import tiny
from helpers.generation import GREEDY, NO_EOS, WINDOW, greedy_continuation, logits_of_one_call
from torch.testing import assert_close

import carryforward as cf
from carryforward.models.generation.window_cache import WindowCache


def test_a_cache_continues_with_more_text():
    """As in a chat: an answer, the user's next message, another answer."""
    model = tiny.recurrent("llama")
    ids, more = tiny.documents(2, 11), tiny.documents(2, 13, seed=1)
    first = model.generate(ids, max_new_tokens=9, return_dict_in_generate=True, **GREEDY)
    text = torch.cat([first.sequences, more], dim=1)
    answers = {"max_new_tokens": 12, "num_return_sequences": 2, "num_beams": 2}
    out = model.generate(text, past_key_values=first.past_key_values, **answers, **GREEDY)
    assert out.equal(model.generate(text, **answers, **GREEDY))


def test_a_cache_continues_without_new_text():
    """Also past a token that ended a row, as everywhere in Hugging Face."""
    model = tiny.recurrent("gpt2")
    ids = tiny.documents(2, 11)
    whole = greedy_continuation(model, ids, 10)
    first = model.generate(ids, max_new_tokens=9, return_dict_in_generate=True, **GREEDY)
    settings = {**GREEDY, "eos_token_id": whole[0, 19].item(), "max_new_tokens": 1}
    assert model.generate(first.sequences, past_key_values=first.past_key_values, **settings).equal(whole)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}], ids=str)
def test_a_generation_started_in_inference_mode_is_continued_outside_it(settings):
    model = tiny.recurrent("gpt2")
    ids = tiny.documents(2, 11)
    with torch.inference_mode():
        first = model.generate(ids, max_new_tokens=9, return_dict_in_generate=True, **GREEDY, **settings)
    assert first.sequences.equal(model.generate(ids, max_new_tokens=9, **GREEDY, **settings))
    if settings:
        return
    logits = model(first.sequences[:, -1:], past_key_values=first.past_key_values).logits
    assert_close(logits[:, 0], logits_of_one_call(model, first.sequences, [20, 20])[:, 0], rtol=1e-4, atol=1e-4)
    text = torch.cat([first.sequences, ids], dim=1)
    out = model.generate(text, past_key_values=first.past_key_values, max_new_tokens=12, **GREEDY)
    assert out.equal(model.generate(text, max_new_tokens=12, **GREEDY))


def test_a_state_does_not_change_when_generation_continues():
    model = tiny.recurrent("gpt2")
    first = model.generate(tiny.documents(1, 11), max_new_tokens=3, return_dict_in_generate=True, **GREEDY)
    state = first.past_key_values.state
    before = state.tokens.clone()
    model.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=9, **GREEDY)
    assert state.tokens.equal(before)


def test_several_sequences_continue_from_one_state():
    model = tiny.recurrent("llama")
    ids = tiny.documents(2, 30)
    state = model.advance_state(ids[:, :20])
    for settings in ({"do_sample": True, "num_return_sequences": 3}, {"num_beams": 3, "num_return_sequences": 3}):
        outs = []
        for prompts, start in ((ids[:, 20:], state), (ids, None)):
            torch.manual_seed(3)
            outs.append(model.generate(prompts, state=start, max_new_tokens=14, **settings, **NO_EOS)[:, -14:])
        assert outs[0].equal(outs[1])
        assert outs[0].shape == (6, 14)


def test_generation_starts_from_a_fresh_state(tmp_path):
    model = tiny.recurrent("gpt2")
    fresh = model.fresh_state(2)
    assert WindowCache(fresh, 2).state is fresh
    fresh.save(tmp_path / "state.safetensors")
    ids = tiny.documents(2, 9)
    loaded = cf.State.load(tmp_path / "state.safetensors")
    out = model.generate(ids, state=loaded, max_new_tokens=12, **GREEDY)
    assert out.equal(model.generate(ids, max_new_tokens=12, **GREEDY))


def test_a_state_s_last_token_may_equal_the_padding_id():
    model = tiny.recurrent("gpt2")
    ids = tiny.documents(1, 9)
    out = model.generate(state=model.advance_state(ids), max_new_tokens=5, pad_token_id=ids[0, -1].item(),
                         do_sample=False, eos_token_id=None)  # fmt: skip
    assert out[:, 1:].equal(greedy_continuation(model, ids, 5)[:, 9:])


def test_use_state_false_removes_a_given_state():
    """Two documents with the same unfinished window: without the state they are the same, as for `forward`."""
    model = tiny.recurrent("gpt2", overlap=0)
    ids = tiny.documents(2, 19)
    ids[1, 2 * WINDOW :] = ids[0, 2 * WINDOW :]
    state = model.advance_state(ids)
    assert state.started.all()
    prompts = tiny.documents(1, 2, seed=1).expand(2, -1)
    record = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 20}
    with_state = model.generate(prompts, state=state, **record, **GREEDY)
    assert (with_state.logits[0][0] - with_state.logits[0][1]).abs().max() > 1e-3
    out = model.generate(prompts, state=state, use_state=False, **record, **GREEDY)
    logits = torch.stack(out.logits, dim=1)
    with torch.no_grad():
        whole = model(out.sequences, state=state, use_state=False)
    assert_close(logits, whole.logits[:, 1:-1], rtol=1e-4, atol=1e-4)
    assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)
    for steps in (1, 20):  # before a window ended, and after
        record["max_new_tokens"] = steps
        cache = model.generate(prompts, state=state, use_state=False, **record, **GREEDY).past_key_values
        read = model.advance_state(out.sequences[:, : steps + 1], state=state, use_state=False)
        assert cache.state.started.equal(read.started), "as for `forward`"
