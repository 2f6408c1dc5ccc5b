# SPDX-License-Identifier: Apache-2.0
"""Writing token by token equals reading the whole text at once, and `generate` keeps Hugging Face's habits."""

import pytest
import torch
import transformers as hf
from helpers import tiny
from torch.testing import assert_close

import carryforward as cf
from carryforward.models.window_cache import WindowCache

WINDOW = 8
QUIET = {"pad_token_id": 1, "eos_token_id": None}
GREEDY = {**QUIET, "do_sample": False}


def left_padded(ids, lengths):
    """The first so many tokens of each row, padded on the left, and their mask."""
    width = max(lengths)
    prompts, mask = torch.ones(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width).long()
    for row, length in enumerate(lengths):
        prompts[row, width - length :] = ids[row, :length]
        mask[row, width - length :] = 1
    return prompts, mask


def written(model, ids, lengths, overlap=None, use_state=True):
    """Logits from the end of each row's prompt on, token by token, [B, steps, V]."""
    overlap = model.config.recurrence.overlap if overlap is None else overlap
    cache = WindowCache(model.fresh_state(len(ids), overlap), overlap, use_state)
    prompts, mask = left_padded(ids, lengths)
    logits = [model(prompts, attention_mask=mask, past_key_values=cache).logits]
    for step in range(ids.shape[1] - max(lengths)):
        column = torch.stack([ids[row, length + step] for row, length in enumerate(lengths)])[:, None]
        logits.append(model(column, past_key_values=cache).logits)
    return torch.cat(logits, dim=1), cache


def read_at_once(model, ids, lengths, **arguments):
    """The same from one call over whole texts."""
    with torch.no_grad():
        whole = model(ids, **arguments).logits
    steps = ids.shape[1] - max(lengths) + 1
    return torch.stack([whole[row, length - 1 :][:steps] for row, length in enumerate(lengths)])


def greedily(model, ids, steps, **arguments):
    """Argmax of a whole call, again and again."""
    with torch.no_grad():
        for _ in range(steps):
            best = model(ids, logits_to_keep=1, **arguments).logits[:, -1].argmax(dim=-1, keepdim=True)
            ids = torch.cat([ids, best], dim=1)
    return ids


# --- exactness -----------------------------------------------------------------------------------------------------

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


def test_more_text_for_a_cache():
    """A chat: the answer, then what the user says next, then an answer again."""
    model = tiny.recurrent("llama")
    ids, more = tiny.documents(2, 11), tiny.documents(2, 13, seed=1)
    first = model.generate(ids, max_new_tokens=9, return_dict_in_generate=True, **GREEDY)
    text = torch.cat([first.sequences, more], dim=1)
    answers = {"max_new_tokens": 12, "num_return_sequences": 2, "num_beams": 2}
    out = model.generate(text, past_key_values=first.past_key_values, **answers, **GREEDY)
    assert out.equal(model.generate(text, **answers, **GREEDY))


def test_nothing_new_for_a_cache():
    """The text goes on, past a token that ended a row too, as everywhere in Hugging Face."""
    model = tiny.recurrent("gpt2")
    ids = tiny.documents(2, 11)
    whole = greedily(model, ids, 10)
    first = model.generate(ids, max_new_tokens=9, return_dict_in_generate=True, **GREEDY)
    settings = {**GREEDY, "eos_token_id": whole[0, 19].item(), "max_new_tokens": 1}
    assert model.generate(first.sequences, past_key_values=first.past_key_values, **settings).equal(whole)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}], ids=str)
def test_begun_in_inference_mode(settings):
    model = tiny.recurrent("gpt2")
    ids = tiny.documents(2, 11)
    with torch.inference_mode():
        first = model.generate(ids, max_new_tokens=9, return_dict_in_generate=True, **GREEDY, **settings)
    assert first.sequences.equal(model.generate(ids, max_new_tokens=9, **GREEDY, **settings))
    if settings:
        return
    logits = model(first.sequences[:, -1:], past_key_values=first.past_key_values).logits
    assert_close(logits[:, 0], read_at_once(model, first.sequences, [20, 20])[:, 0], rtol=1e-4, atol=1e-4)
    text = torch.cat([first.sequences, ids], dim=1)
    out = model.generate(text, past_key_values=first.past_key_values, max_new_tokens=12, **GREEDY)
    assert out.equal(model.generate(text, max_new_tokens=12, **GREEDY))


# --- generate ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_greedy(name):
    model = tiny.recurrent(name)
    ids = tiny.documents(2, 20)
    expected = greedily(model, ids, 25)
    assert model.generate(ids, max_new_tokens=25, **GREEDY).equal(expected)
    assert model.generate(input_ids=ids, max_new_tokens=25, use_cache=False, **GREEDY).equal(expected)
    model.generation_config.eos_token_id = None
    config = hf.GenerationConfig(max_new_tokens=25, **GREEDY)
    assert model.generate(ids, config).equal(expected)
    prompts, mask = left_padded(ids, [13, 20])
    out = model.generate(prompts, attention_mask=mask, max_new_tokens=25, **GREEDY)
    assert out[1].equal(expected[1])
    assert out[0, 7:].equal(greedily(model, ids[:1, :13], 25)[0])


def test_sampling_is_reproducible_and_gives_what_it_says():
    model = tiny.recurrent("gpt2")
    ids = tiny.documents(2, 20)
    settings = {"do_sample": True, "num_return_sequences": 3, "temperature": 0.7, "top_k": 20, "top_p": 0.9,
                "min_p": 0.01, "repetition_penalty": 1.1, "max_new_tokens": 30}  # fmt: skip
    record = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    outs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        outs.append(model.generate(ids, **settings, **record, **QUIET))
    assert outs[0].sequences.equal(outs[1].sequences)
    assert not outs[0].sequences.equal(outs[2].sequences)
    out = outs[0]
    assert out.sequences.shape == (6, 50)
    with torch.no_grad():
        whole = model(out.sequences).logits
    assert len(out.logits) == len(out.scores) == 30
    assert_close(torch.stack(out.logits, dim=1), whole[:, 19:-1], rtol=1e-4, atol=1e-4)
    chances = torch.stack(out.scores, dim=1).softmax(dim=-1)
    assert ((chances > 0).sum(dim=-1) <= 20).all(), "no more than the top k"
    assert (chances.gather(2, out.sequences[:, 20:, None]) > 0).all(), "what was drawn was among them"


@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_beams_have_the_scores_of_their_texts(name):
    model = tiny.recurrent(name)
    prompts, mask = left_padded(tiny.documents(2, 20), [9, 20])
    settings = {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 22, "return_dict_in_generate": True}
    out = model.generate(prompts, attention_mask=mask, output_scores=True, **settings, **GREEDY)
    with torch.no_grad():
        real = torch.cat([mask.repeat_interleave(2, 0), torch.ones(4, 22).long()], dim=1)
        chances = model(out.sequences, attention_mask=real).logits.log_softmax(dim=-1)
    found = chances[:, 19:-1].gather(2, out.sequences[:, 20:, None]).sum(dim=(1, 2)) / 22
    assert_close(out.sequences_scores, found, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="after beam search there is no state"):
        out.past_key_values.state  # noqa: B018
    cache = model.generate(prompts, attention_mask=mask, num_beams=3, num_return_sequences=3, max_new_tokens=9,
                           return_dict_in_generate=True, **GREEDY)  # fmt: skip
    with pytest.raises(ValueError, match="after beam search there is no state"):
        model.generate(cache.sequences, past_key_values=cache.past_key_values, max_new_tokens=3, **GREEDY)


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


@pytest.mark.parametrize("overlap", [0, 2])
def test_a_row_that_ends_early(overlap):
    """Others go on as if alone; the ended row's state is all but the token that ended it."""
    model = tiny.recurrent("gpt2", overlap=overlap)
    ids = tiny.documents(3, 10)
    settings = {"max_new_tokens": 30, "do_sample": True, "pad_token_id": 1}
    torch.manual_seed(1)
    free = model.generate(ids, eos_token_id=None, **settings)
    end = next(t for t in free[0, 10:].tolist() if t not in free[1:, 10:])  # only row 0 says it
    length = free[0, 10:].tolist().index(end) + 11
    assert length < 35, "long before the others"
    torch.manual_seed(1)
    out = model.generate(ids, eos_token_id=[end], return_dict_in_generate=True, **settings)
    assert out.sequences[1:].equal(free[1:])
    assert out.sequences[0, :length].equal(free[0, :length])
    assert (out.sequences[0, length:] == 1).all()
    state = out.past_key_values.state
    assert state.read.tolist() == [length - 1, 39, 39]
    for row, last in enumerate((length - 1, 39, 39)):
        alone = model.advance_state(free[row : row + 1, :last])
        assert state.pending[row] == alone.pending[0]
        assert state.tokens[row, : state.pending[row]].equal(alone.tokens[0])
        if alone.started[0]:
            assert_close(state.carried[row], alone.carried[0], rtol=1e-4, atol=1e-5)
    for text in (out.sequences, torch.cat([out.sequences, ids], dim=1)):
        with pytest.raises(ValueError, match="row 0 has ended: go on from past_key_values.state"):
            model.generate(text, past_key_values=out.past_key_values, max_new_tokens=3, **GREEDY)


def test_all_rows_ended_ends_the_writing():
    model = tiny.recurrent("gpt2")
    ids = tiny.documents(1, 10)
    free = greedily(model, ids, 12)
    end = free[0, 15].item()
    out = model.generate(ids, max_new_tokens=12, eos_token_id=end, pad_token_id=1, do_sample=False)
    stop = free[0, 10:].tolist().index(end) + 11
    assert out.equal(free[:, :stop])


def test_criteria_processors_and_streamers():
    model = tiny.recurrent("gpt2")
    ids = tiny.documents(1, 12)
    put = []

    class Streamer(hf.generation.streamers.BaseStreamer):
        def put(self, value):
            put.extend(value.flatten().tolist())

        def end(self):
            put.append("end")

    def never_even(input_ids, scores):
        return scores.masked_fill(torch.arange(tiny.VOCABULARY) % 2 == 0, -torch.inf)

    def stop(input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 32)

    out = model.generate(
        ids, max_new_tokens=50, logits_processor=[never_even], stopping_criteria=[stop], streamer=Streamer(), **GREEDY
    )
    assert out.shape == (1, 32)
    assert (out[0, 12:] % 2 == 1).all()
    assert put == [*out[0].tolist(), "end"]


def test_no_prompt_begins_with_bos():
    model = tiny.recurrent("llama")
    out = model.generate(max_new_tokens=12, **GREEDY)
    assert out.equal(greedily(model, torch.tensor([[2]]), 12))


def test_learned_positions_are_no_limit():
    """GPT-2 with 40 positions writes twenty times as many."""
    model = tiny.recurrent("gpt2", window=40, overlap=5)
    out = model.generate(tiny.documents(1, 7), max_new_tokens=800, do_sample=True, return_dict_in_generate=True,
                         output_logits=True, **QUIET)  # fmt: skip
    assert out.sequences.shape == (1, 807)
    with torch.no_grad():
        whole = model(out.sequences).logits
    assert_close(torch.stack(out.logits, dim=1), whole[:, 6:-1], rtol=1e-4, atol=1e-4)


def test_generation_config_is_kept_saved_and_loaded(tmp_path):
    base = tiny.base("gpt2")
    base.generation_config = hf.GenerationConfig(max_new_tokens=13, do_sample=False, pad_token_id=1, eos_token_id=[])
    base.generation_config.eos_token_id = None
    model = cf.add_recurrence(base, window=WINDOW)
    assert model.generation_config.max_new_tokens == 13
    assert model.generation_config is not base.generation_config
    model.save_pretrained(tmp_path / "model")
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert again.generation_config.max_new_tokens == 13
    ids = tiny.documents(1, 9)
    assert again.generate(ids).equal(model.generate(ids))
    assert again.generate(ids).shape == (1, 22)


# --- state in and out ----------------------------------------------------------------------------------------------


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


def test_a_state_does_not_change_when_the_writing_goes_on():
    model = tiny.recurrent("gpt2")
    first = model.generate(tiny.documents(1, 11), max_new_tokens=3, return_dict_in_generate=True, **GREEDY)
    state = first.past_key_values.state
    before = state.tokens.clone()
    model.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=9, **GREEDY)
    assert state.tokens.equal(before)


def test_several_sequences_from_one_state():
    model = tiny.recurrent("llama")
    ids = tiny.documents(2, 30)
    state = model.advance_state(ids[:, :20])
    for settings in ({"do_sample": True, "num_return_sequences": 3}, {"num_beams": 3, "num_return_sequences": 3}):
        outs = []
        for prompts, given in ((ids[:, 20:], state), (ids, None)):
            torch.manual_seed(3)
            outs.append(model.generate(prompts, state=given, max_new_tokens=14, **settings, **QUIET)[:, -14:])
        assert outs[0].equal(outs[1])
        assert outs[0].shape == (6, 14)


def test_a_state_of_which_nothing_was_read(tmp_path):
    model = tiny.recurrent("gpt2")
    fresh = model.fresh_state(2)
    assert WindowCache(fresh, 2).state is fresh
    fresh.save(tmp_path / "state.safetensors")
    ids = tiny.documents(2, 9)
    again = cf.State.load(tmp_path / "state.safetensors")
    out = model.generate(ids, state=again, max_new_tokens=12, **GREEDY)
    assert out.equal(model.generate(ids, max_new_tokens=12, **GREEDY))


def test_a_last_token_that_looks_like_padding():
    model = tiny.recurrent("gpt2")
    ids = tiny.documents(1, 9)
    out = model.generate(state=model.advance_state(ids), max_new_tokens=5, pad_token_id=ids[0, -1].item(),
                         do_sample=False, eos_token_id=None)  # fmt: skip
    assert out[:, 1:].equal(greedily(model, ids, 5)[:, 9:])


def test_a_state_can_be_removed_at_once():
    """Two pasts, and the same unfinished window: without the state they are the same, as for `forward`."""
    model = tiny.recurrent("gpt2", overlap=0)
    ids = tiny.documents(2, 19)
    ids[1, 2 * WINDOW :] = ids[0, 2 * WINDOW :]
    state = model.advance_state(ids)
    assert state.started.all()
    prompts = tiny.documents(1, 2, seed=1).expand(2, -1)
    record = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 20}
    heard = model.generate(prompts, state=state, **record, **GREEDY)
    assert (heard.logits[0][0] - heard.logits[0][1]).abs().max() > 1e-3
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
        assert cache.state.started.equal(read.started), "as `forward` says"


# --- cost ----------------------------------------------------------------------------------------------------------


def test_buffers_stay_where_they_are():
    model = tiny.recurrent("gpt2")
    _, cache = written(model, tiny.documents(2, 12), [3, 5])

    def places():
        tensors = [*cache.keys.values(), *cache.values.values(), cache._mixed, cache._tokens]
        return [(tensor.data_ptr(), tensor.shape) for tensor in tensors]

    before = places()
    for column in tiny.documents(2, 10 * WINDOW).split(1, dim=1):
        model(column, past_key_values=cache)
    assert places() == before
    assert not any(tensor.requires_grad for tensor in (*cache.keys.values(), cache._mixed)), "no graph grows"


def test_transformers_may_not_read_ahead():
    """On some devices it looks whether all rows have ended one step late, and would crop the cache."""
    cache = WindowCache(tiny.recurrent("gpt2").fresh_state(1), 2)
    assert not cache.is_croppable
    assert not cache.is_compileable


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"assistant_model": tiny.base("gpt2")}, "cannot do assisted generation"),
        ({"prompt_lookup_num_tokens": 3}, "cannot do assisted generation"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "cannot do contrastive search"),
        ({"num_beams": 4, "num_beam_groups": 2}, "cannot do group beam search"),
        ({"dola_layers": "low"}, "cannot do dola generation"),
        ({"inputs_embeds": torch.zeros(1, 3, tiny.WIDTH)}, "inputs_embeds cannot be used .*: .* give input_ids"),
        ({"cache_implementation": "static"}, "a recurrent model has a cache of its own"),
        ({"prefill_chunk_size": 4}, "read window by window anyway"),
        ({"guidance_scale": 1.5}, "guidance_scale cannot be used"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions cannot be used"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states cannot be used"),
        ({"past_key_values": hf.DynamicCache()}, "past_key_values is a DynamicCache"),
        ({"overlap": WINDOW}, "overlap=8 must be"),
        ({"position_ids": torch.arange(9)[None]}, "position_ids cannot be used .*: every window counts its own"),
        ({"input_ids": tiny.documents(1, 9)[0]}, r"input_ids has shape \[9\]: a batch \[batch, length\]"),
        ({"input_ids": tiny.documents(1, 9)[:, :0]}, "input_ids has no tokens: give a prompt, or a state"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_done_is_said(settings, message):
    model = tiny.recurrent("gpt2")
    prompt = {} if "inputs_embeds" in settings else {"input_ids": tiny.documents(1, 9)}
    with pytest.raises(ValueError, match=message):
        model.generate(**{**prompt, **settings}, max_new_tokens=3, pad_token_id=1)


def test_continuous_batching():
    with pytest.raises(ValueError, match="continuous batching \\(generate_batch\\) cannot be used .*: call generate"):
        tiny.recurrent("gpt2").generate_batch([[5, 6, 7]], max_new_tokens=3)


def test_no_guidance():
    """A scale of 1 means none."""
    model = tiny.recurrent("gpt2")
    ids = tiny.documents(1, 9)
    assert model.generate(ids, guidance_scale=1.0, max_new_tokens=3, **GREEDY).equal(greedily(model, ids, 3))


@pytest.mark.parametrize(
    "change", [("reset",), ("crop", 2), ("batch_repeat_interleave", 2), ("batch_select_indices", torch.tensor([0]))]
)
def test_a_cache_says_what_it_cannot_do(change):
    cache = WindowCache(tiny.recurrent("gpt2").fresh_state(1), 2)
    with pytest.raises(NotImplementedError, match="begin another generation"):
        getattr(cache, change[0])(*change[1:])


def test_prompts_padded_on_the_right():
    model = tiny.recurrent("gpt2")
    ids = tiny.documents(2, 9)
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    with pytest.raises(ValueError, match="padded on the left"):
        model.generate(ids, attention_mask=mask, max_new_tokens=3, **GREEDY)
    with pytest.raises(ValueError, match="padded on the left"):  # transformers makes the mask
        model.generate(ids.masked_fill(mask == 0, 1), max_new_tokens=3, **GREEDY)


def test_states_and_caches_that_do_not_fit():
    model = tiny.recurrent("gpt2")
    ids = tiny.documents(2, 9)
    state = model.advance_state(ids)
    with pytest.raises(ValueError, match="state has 2 rows, input_ids has 1"):
        model.generate(ids[:1], state=state, max_new_tokens=3, **GREEDY)
    with pytest.raises(ValueError, match="another model or overlap"):
        model.generate(ids, state=state, overlap=0, max_new_tokens=3, **GREEDY)
    with pytest.raises(ValueError, match="there is no last token to go on from"):
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
    for given in ({"state": state}, {"overlap": 2}, {"use_state": True}, {"use_state": False}):
        for call in (model, lambda *args, **kw: model.generate(*args, **kw, max_new_tokens=3, **GREEDY)):
            with pytest.raises(ValueError, match=f"{next(iter(given))} cannot be given together with past_key_values"):
                call(ids, past_key_values=cache, **given)
    for given in ({"labels": ids}, {"logits_to_keep": 5}, {"logits_to_keep": torch.tensor([0])},
                  {"return_logits": False}, {"num_items_in_batch": 3}):  # fmt: skip
        with pytest.raises(ValueError, match=f"{next(iter(given))} cannot be given together .* of the last token"):
            model(ids, past_key_values=cache, **given)
    for given in ({"logits_to_keep": 0}, {"logits_to_keep": 1}, {"return_logits": True}):
        assert model(ids[:, :1], past_key_values=cache, **given).logits.shape[:2] == (2, 1)
    with pytest.raises(ValueError, match="past_key_values is a DynamicCache"):
        model(ids, past_key_values=hf.DynamicCache())


def test_while_training_with_gradient_checkpointing():
    """Layers that are to be run again get no cache."""
    model = tiny.recurrent("gpt2").train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="call model.eval\\(\\) first"):
        model.generate(tiny.documents(1, 9), max_new_tokens=3, **GREEDY)
    model.eval()
    ids = tiny.documents(1, 9)
    assert model.generate(ids, max_new_tokens=12, **GREEDY).equal(greedily(model, ids, 12))
