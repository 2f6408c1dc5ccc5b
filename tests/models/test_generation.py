# SPDX-License-Identifier: Apache-2.0
"""`generate` behaves as that of other Hugging Face models."""

import pytest
import torch
import transformers as hf
from helpers import tiny
from helpers.generation import GREEDY, NO_EOS, WINDOW, greedy_continuation, pad_left
from torch.testing import assert_close

import carryforward as cf


@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_greedy_search_equals_whole_calls(name):
    model = tiny.recurrent(name)
    ids = tiny.documents(2, 20)
    expected = greedy_continuation(model, ids, 25)
    assert model.generate(ids, max_new_tokens=25, **GREEDY).equal(expected)
    assert model.generate(input_ids=ids, max_new_tokens=25, use_cache=False, **GREEDY).equal(expected)
    model.generation_config.eos_token_id = None
    config = hf.GenerationConfig(max_new_tokens=25, **GREEDY)
    assert model.generate(ids, config).equal(expected)
    prompts, mask = pad_left(ids, [13, 20])
    out = model.generate(prompts, attention_mask=mask, max_new_tokens=25, **GREEDY)
    assert out[1].equal(expected[1])
    assert out[0, 7:].equal(greedy_continuation(model, ids[:1, :13], 25)[0])


def test_sampling_is_reproducible_and_follows_its_settings():
    model = tiny.recurrent("gpt2")
    ids = tiny.documents(2, 20)
    settings = {"do_sample": True, "num_return_sequences": 3, "temperature": 0.7, "top_k": 20, "top_p": 0.9,
                "min_p": 0.01, "repetition_penalty": 1.1, "max_new_tokens": 30}  # fmt: skip
    record = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    outs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        outs.append(model.generate(ids, **settings, **record, **NO_EOS))
    assert outs[0].sequences.equal(outs[1].sequences)
    assert not outs[0].sequences.equal(outs[2].sequences)
    out = outs[0]
    assert out.sequences.shape == (6, 50)
    with torch.no_grad():
        whole = model(out.sequences).logits
    assert len(out.logits) == len(out.scores) == 30
    assert_close(torch.stack(out.logits, dim=1), whole[:, 19:-1], rtol=1e-4, atol=1e-4)
    probabilities = torch.stack(out.scores, dim=1).softmax(dim=-1)
    assert ((probabilities > 0).sum(dim=-1) <= 20).all(), "no more than the top k"
    assert (probabilities.gather(2, out.sequences[:, 20:, None]) > 0).all(), "sampled tokens are among them"


@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_beams_have_the_scores_of_their_texts(name):
    model = tiny.recurrent(name)
    prompts, mask = pad_left(tiny.documents(2, 20), [9, 20])
    settings = {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 22, "return_dict_in_generate": True}
    out = model.generate(prompts, attention_mask=mask, output_scores=True, **settings, **GREEDY)
    with torch.no_grad():
        real = torch.cat([mask.repeat_interleave(2, 0), torch.ones(4, 22).long()], dim=1)
        log_probabilities = model(out.sequences, attention_mask=real).logits.log_softmax(dim=-1)
    expected = log_probabilities[:, 19:-1].gather(2, out.sequences[:, 20:, None]).sum(dim=(1, 2)) / 22
    assert_close(out.sequences_scores, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="after beam search there is no state"):
        out.past_key_values.state  # noqa: B018
    cache = model.generate(prompts, attention_mask=mask, num_beams=3, num_return_sequences=3, max_new_tokens=9,
                           return_dict_in_generate=True, **GREEDY)  # fmt: skip
    with pytest.raises(ValueError, match="after beam search there is no state"):
        model.generate(cache.sequences, past_key_values=cache.past_key_values, max_new_tokens=3, **GREEDY)


@pytest.mark.parametrize("overlap", [0, 2])
def test_a_row_may_end_before_others(overlap):
    """Others continue as if alone; the state of the ended row lacks only the token that ended it."""
    model = tiny.recurrent("gpt2", overlap=overlap)
    ids = tiny.documents(3, 10)
    settings = {"max_new_tokens": 30, "do_sample": True, "pad_token_id": 1}
    torch.manual_seed(1)
    free = model.generate(ids, eos_token_id=None, **settings)
    end = next(t for t in free[0, 10:].tolist() if t not in free[1:, 10:])  # a token of row 0 alone
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
            assert_close(state.memory["vector"][row], alone.memory["vector"][0], rtol=1e-4, atol=1e-5)
    for text in (out.sequences, torch.cat([out.sequences, ids], dim=1)):
        with pytest.raises(ValueError, match="row 0 has ended: continue from past_key_values.state instead"):
            model.generate(text, past_key_values=out.past_key_values, max_new_tokens=3, **GREEDY)


def test_generation_stops_when_all_rows_have_ended():
    model = tiny.recurrent("gpt2")
    ids = tiny.documents(1, 10)
    free = greedy_continuation(model, ids, 12)
    end = free[0, 15].item()
    out = model.generate(ids, max_new_tokens=12, eos_token_id=end, pad_token_id=1, do_sample=False)
    stop = free[0, 10:].tolist().index(end) + 11
    assert out.equal(free[:, :stop])


def test_criteria_processors_and_streamers_are_called():
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


def test_without_a_prompt_generation_starts_from_bos():
    model = tiny.recurrent("llama")
    out = model.generate(max_new_tokens=12, **GREEDY)
    assert out.equal(greedy_continuation(model, torch.tensor([[2]]), 12))


def test_the_generation_config_is_copied_saved_and_loaded(tmp_path):
    base = tiny.base("gpt2")
    base.generation_config = hf.GenerationConfig(max_new_tokens=13, do_sample=False, pad_token_id=1, eos_token_id=[])
    base.generation_config.eos_token_id = None
    model = cf.add_recurrence(base, window=WINDOW, memory="vector")
    assert model.generation_config.max_new_tokens == 13
    assert model.generation_config is not base.generation_config
    model.save_pretrained(tmp_path / "model")
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.generation_config.max_new_tokens == 13
    ids = tiny.documents(1, 9)
    assert loaded.generate(ids).equal(model.generate(ids))
    assert loaded.generate(ids).shape == (1, 22)
