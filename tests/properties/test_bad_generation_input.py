# SPDX-License-Identifier: Apache-2.0
"""Arguments of `generate`, states and caches that cannot be used are refused with a message."""

import pytest
import torch
import transformers as hf
from helpers import tiny
from helpers.generation import GREEDY, WINDOW, greedy_continuation


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"assistant_model": tiny.base("gpt2")}, "cannot do assisted generation"),
        ({"prompt_lookup_num_tokens": 3}, "cannot do assisted generation"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "cannot do contrastive search"),
        ({"num_beams": 4, "num_beam_groups": 2}, "cannot do group beam search"),
        ({"dola_layers": "low"}, "cannot do dola generation"),
        ({"inputs_embeds": torch.zeros(1, 3, tiny.WIDTH)}, "inputs_embeds cannot be used .*: .* give input_ids"),
        ({"cache_implementation": "static"}, "a recurrent model has its own cache"),
        ({"prefill_chunk_size": 4}, "read window by window anyway"),
        ({"guidance_scale": 1.5}, "guidance_scale cannot be used"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions cannot be used"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states cannot be used"),
        ({"past_key_values": hf.DynamicCache()}, "past_key_values is a DynamicCache"),
        ({"overlap": WINDOW}, "overlap=8 must be"),
        ({"position_ids": torch.arange(9)[None]}, "position_ids cannot be used .*: positions are counted per window"),
        ({"input_ids": tiny.documents(1, 9)[0]}, r"input_ids has shape \[9\]: a batch \[batch, length\]"),
        ({"input_ids": tiny.documents(1, 9)[:, :0]}, "input_ids has no tokens: give a prompt, or a state"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_generate_cannot_follow_are_refused(settings, message):
    model = tiny.recurrent("gpt2")
    prompt = {} if "inputs_embeds" in settings else {"input_ids": tiny.documents(1, 9)}
    with pytest.raises(ValueError, match=message):
        model.generate(**{**prompt, **settings}, max_new_tokens=3, pad_token_id=1)


def test_continuous_batching_is_refused():
    with pytest.raises(ValueError, match="continuous batching \\(generate_batch\\) cannot be used .*: call generate"):
        tiny.recurrent("gpt2").generate_batch([[5, 6, 7]], max_new_tokens=3)


def test_a_guidance_scale_of_one_is_no_guidance():
    model = tiny.recurrent("gpt2")
    ids = tiny.documents(1, 9)
    assert model.generate(ids, guidance_scale=1.0, max_new_tokens=3, **GREEDY).equal(greedy_continuation(model, ids, 3))


def test_prompts_padded_on_the_right_are_refused():
    model = tiny.recurrent("gpt2")
    ids = tiny.documents(2, 9)
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    with pytest.raises(ValueError, match="padded on the left"):
        model.generate(ids, attention_mask=mask, max_new_tokens=3, **GREEDY)
    with pytest.raises(ValueError, match="padded on the left"):  # transformers makes the mask
        model.generate(ids.masked_fill(mask == 0, 1), max_new_tokens=3, **GREEDY)


def test_states_and_caches_that_do_not_fit_are_refused():
    model = tiny.recurrent("gpt2")
    ids = tiny.documents(2, 9)
    state = model.advance_state(ids)
    with pytest.raises(ValueError, match="state has 2 rows, input_ids has 1"):
        model.generate(ids[:1], state=state, max_new_tokens=3, **GREEDY)
    with pytest.raises(ValueError, match="another model or overlap"):
        model.generate(ids, state=state, overlap=0, max_new_tokens=3, **GREEDY)
    with pytest.raises(ValueError, match="there is no last token to continue from"):
        model.generate(state=model.fresh_state(1), max_new_tokens=3, **GREEDY)
    cache = model.generate(ids, max_new_tokens=3, return_dict_in_generate=True, **GREEDY).past_key_values
    with pytest.raises(ValueError, match="past_key_values has 2 rows, input_ids has 1"):
        model(ids[:1, :1], past_key_values=cache)
    with pytest.raises(ValueError, match="state has 2 rows, input_ids has 4"):
        model.generate(tiny.documents(4, 13), past_key_values=cache, max_new_tokens=3, **GREEDY)
    with pytest.raises(ValueError, match="another model or overlap"):
        tiny.recurrent("llama").generate(tiny.documents(2, 13), past_key_values=cache, max_new_tokens=3, **GREEDY)
    with pytest.raises(ValueError, match="read 11 columns, and input_ids has 9"):
        model.generate(ids, past_key_values=cache, max_new_tokens=3, **GREEDY)
    with pytest.raises(ValueError, match="past_key_values is a DynamicCache"):
        model(ids, past_key_values=hf.DynamicCache())


def test_arguments_that_a_cache_fixes_are_refused():
    model = tiny.recurrent("gpt2")
    ids = tiny.documents(2, 9)
    cache = model.generate(ids, max_new_tokens=3, return_dict_in_generate=True, **GREEDY).past_key_values
    for argument in ({"state": cache.state}, {"overlap": 2}, {"use_state": True}, {"use_state": False}):
        for call in (model, lambda *args, **kw: model.generate(*args, **kw, max_new_tokens=3, **GREEDY)):
            with pytest.raises(ValueError, match=f"{next(iter(argument))} cannot be given together with past_key_val"):
                call(ids, past_key_values=cache, **argument)
    for argument in ({"labels": ids}, {"logits_to_keep": 5}, {"logits_to_keep": torch.tensor([0])},
                     {"return_logits": False}, {"num_items_in_batch": 3}):  # fmt: skip
        with pytest.raises(ValueError, match=f"{next(iter(argument))} cannot be given together .* of the last token"):
            model(ids, past_key_values=cache, **argument)
    for argument in ({"logits_to_keep": 0}, {"logits_to_keep": 1}, {"return_logits": True}):
        assert model(ids[:, :1], past_key_values=cache, **argument).logits.shape[:2] == (2, 1)


def test_generating_under_gradient_checkpointing_is_refused():
    """Checkpointed layers have no cache."""
    model = tiny.recurrent("gpt2").train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="call model.eval\\(\\) first"):
        model.generate(tiny.documents(1, 9), max_new_tokens=3, **GREEDY)
    model.eval()
    ids = tiny.documents(1, 9)
    assert model.generate(ids, max_new_tokens=12, **GREEDY).equal(greedy_continuation(model, ids, 12))
