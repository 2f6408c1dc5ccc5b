# SPDX-License-Identifier: Apache-2.0
"""Gains of tokens, compared with transformers' own attention weights and logits, and with sums computed by hand."""

import dataclasses
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import prose, tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.testing import assert_close
from transformers import PreTrainedTokenizerFast

import carryforward as cf
from carryforward.analysis import word_classes
from carryforward.analysis.token_gains import (
    by_kind,
    by_position,
    by_token,
    by_window,
    corrected,
    draw,
    measure_token_gains,
)
from carryforward.backbones import attention, hooks
from carryforward.data.tokenization import Encoder
from carryforward.engine.window_model import WindowInputs
from carryforward.evaluation.token_losses import score, token_losses

IDS = tiny.documents(1, 43)[0].numpy()
KINDS = [
    {},
    {"slots": 2, "insert_at": "all"},
    {"slots": 0, "recent": 4, "sinks": 1},
    {"slots": 2, "recent": 3, "insert_at": (1, 3)},
]


# --- attention to the state ------------------------------------------------------------------------------------------


def attention_to_state(model, ids, **arguments):
    """Attention of each layer's heads to the state, for each window that has one: a list of {layer: [heads, n]}."""
    windows = []

    def take(scored):
        for i, has_state in enumerate(scored.has_state):
            if has_state and scored.attention:
                predicted = scored.targets[i] >= 0
                windows.append({layer: weights[i][:, predicted] for layer, weights in scored.attention.items()})

    with attention.recording_attention(model.backbone.config):
        score(model, [ids], take, record_attention=True, **arguments)
    return windows


@pytest.mark.parametrize("fields", [{"slots": 1}, {"slots": 3, "insert_at": (1, 3)}, {"insert_at": "all"}], ids=str)
@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_attention_to_slots_is_that_of_the_models_own_weights(name, fields):
    model = tiny.recurrent(name, overlap=0, **fields)
    ids = torch.from_numpy(IDS[:16])[None]
    # The second window reads tokens 8 to 14, and predicts 9 to 15.
    (layers_attention,) = attention_to_state(model, IDS[:16])
    with torch.no_grad():
        state = model.advance_state(ids[:, :9])
        window = WindowInputs(ids[:, 8:15], state=model.memory.flatten(state.memory))
        _, _, inputs = model._base_inputs(window)
        model.base.set_attn_implementation("eager")
        attentions = model.base(**inputs, output_attentions=True).attentions
    layers = model.memory.vector.insertion_layers
    assert set(layers_attention) == set(layers)
    slots = model.config.recurrence.find("vector").slots
    for layer in layers:
        weights = attentions[layer - 1][0, :, slots:]  # queries of the window's tokens; slots are the first keys
        assert weights.shape[-1] == slots + 7
        assert_close(layers_attention[layer], weights[..., :slots].sum(-1))
        assert 0.001 < layers_attention[layer].mean() < 0.999


@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_attention_to_carried_keys_is_that_of_the_whole_text(name):
    model = tiny.untrained(name, recent=8)
    (layers_attention,) = attention_to_state(model, IDS[:16])
    model.base.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model.base(torch.from_numpy(IDS[:15])[None], output_attentions=True).attentions
    assert set(layers_attention) == set(range(1, tiny.LAYERS + 1))
    for layer, weights in layers_attention.items():
        assert_close(weights, attentions[layer - 1][0, :, 8:, :8].sum(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_attention_to_memory_tokens_is_that_of_the_models_own_weights(name):
    model = tiny.recurrent(name, overlap=0, **tiny.TOKENS)
    (layers_attention,) = attention_to_state(model, IDS[:16])
    ids = torch.from_numpy(IDS[:16])[None]
    with torch.no_grad():
        memory = model.advance_state(ids[:, :9]).memory["tokens"]
        plain = tiny.base(name)
        plain.set_attn_implementation("eager")
        embeddings = torch.cat([memory, plain.get_input_embeddings()(ids[:, 8:15])], dim=1)
        attentions = plain(inputs_embeds=embeddings, output_attentions=True).attentions
    assert set(layers_attention) == set(range(1, tiny.LAYERS + 1))
    for layer, weights in layers_attention.items():
        assert_close(weights, attentions[layer - 1][0, :, 3:, :3].sum(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fields", [*KINDS, tiny.TOKENS, tiny.ASSOCIATIVE_AND_KV], ids=str)
def test_attention_is_the_mean_over_tokens_with_a_state(fields):
    model = tiny.recurrent("llama", **fields)
    before = model.backbone.config._attn_implementation
    tokens = measure_token_gains(model, IDS)
    after = model.backbone.config._attn_implementation
    assert attention.unwrapped_name(after) == attention.unwrapped_name(before), "the model is unchanged"
    windows = attention_to_state(model, IDS)  # predicted positions are the last of a window
    counts = [w.score_to - w.score_from for w in tokens.windows[1:]]
    expected = np.full((tiny.LAYERS, tiny.HEADS), np.nan)
    for layer in windows[0]:
        parts = [window[layer][:, -count:] for window, count in zip(windows, counts, strict=True)]
        expected[layer - 1] = torch.cat(parts, dim=1).mean(dim=1)
    np.testing.assert_allclose(tokens.attention, expected, rtol=1e-5)
    assert np.isnan(tokens.attention).any() == (set(windows[0]) != {1, 2, 3})


# --- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [None, 0, 3])
@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_log_probabilities_are_those_of_the_losses(fields, overlap):
    model = tiny.recurrent("gpt2", **fields)
    tokens = measure_token_gains(model, IDS, top=4, overlap=overlap)
    for side, use_state in ((tokens.with_state, True), (tokens.without, False)):
        (losses,) = token_losses(model, [IDS], overlap=overlap, use_state=use_state)
        np.testing.assert_allclose(side.log_probs, -losses, rtol=1e-4, atol=1e-5)
        whole = cf.perplexity(model, [IDS], overlap=overlap, use_state=use_state)
        assert side.perplexity == pytest.approx(whole.token_perplexity, rel=1e-5)
    end = model.config.recurrence.window + 1
    first, later = tokens.gain[1:end], tokens.gain[end:]
    assert np.abs(first).max() < 5e-6, "the first window has no state"  # but other windows may share its batch
    assert np.abs(later).max() > 1e-4
    assert (later != 0).all()


def test_the_most_probable_tokens_are_those_of_the_logits():
    model = tiny.recurrent("qwen3")
    tokens = measure_token_gains(model, IDS, top=3)
    for side, use_state in ((tokens.with_state, True), (tokens.without, False)):
        logits = model(torch.from_numpy(IDS)[None], use_state=use_state).logits[0, :-1]
        best = logits.log_softmax(-1).topk(3)
        np.testing.assert_array_equal(side.top_ids[1:], best.indices)
        np.testing.assert_allclose(side.top_log_probs[1:], best.values.detach(), rtol=1e-4, atol=1e-5)


def test_corrected_words_are_predicted_with_the_state_only():
    tokens = measure_token_gains(tiny.recurrent("gpt2", overlap=0, recent=4), IDS, top=1)
    with_state, without = tokens.with_state.top_ids[:, 0], tokens.without.top_ids[:, 0]
    # a random model is hardly ever right: let most of the text be what it predicts, and words have two tokens
    text = np.where(np.arange(len(IDS)) % 5, with_state, without)
    tokens = dataclasses.replace(tokens, ids=text)
    classes = word_classes.classify(["".join(" a" if i % 2 == 0 else "b") for i in range(len(IDS))], tokens.windows)
    words = [[i for i in (start, start + 1) if i < len(IDS)] for start in range(0, len(IDS), 2)]
    expected = [
        word
        for word in words
        if tokens.window[word[0]] and (text == with_state)[word].all() and (text != without)[word].any()
    ]
    assert 2 < len(expected) < len(words) - 4
    assert corrected(tokens, classes) == sorted(expected, key=lambda word: -tokens.gain[word].sum())


def test_layer_weights_where_layers_are_mixed():
    model = tiny.recurrent("llama")
    expected = torch.softmax(model.memory.vector.layer_logits.detach(), 0)
    assert_close(torch.from_numpy(measure_token_gains(model, IDS).layer_weights), expected)
    for fields in ({"pooled_layers": "last"}, {"slots": 0, "recent": 4}):
        assert measure_token_gains(tiny.recurrent("llama", **fields), IDS).layer_weights is None


def test_gains_by_position_window_and_table():
    tokens = measure_token_gains(tiny.recurrent("llama"), IDS)  # windows of 8 tokens that share 2
    columns, gain = tokens.columns(), tokens.gain
    assert all(len(column) == len(IDS) for column in columns.values())
    assert columns["window"].tolist()[:20] == [0] * 9 + [1] * 6 + [2] * 5
    assert columns["position"].tolist()[:16] == [-1, *range(8), *range(6), 0]
    rows = by_window(tokens)
    assert [row["window"] for row in rows] == list(range(1, len(tokens.windows)))
    assert rows[0]["gain"] == pytest.approx(gain[9:15].mean())
    positions = by_position(tokens)
    assert [row["tokens"] for row in positions] == [len(IDS[9 + i :: 6]) for i in range(6)]
    assert positions[2]["gain"] == pytest.approx(gain[11::6].mean())
    assert sum(row["total"] for row in rows) == pytest.approx(gain[9:].sum())


def test_the_figure_shows_the_measured_values():
    tokens = measure_token_gains(tiny.recurrent("llama", insert_at=(1, 3)), IDS)
    position_axes, window_axes, attention_axes, _ = draw(tokens).axes
    np.testing.assert_allclose(position_axes.lines[0].get_ydata(), [row["gain"] for row in by_position(tokens)])
    heights = [bar.get_height() for bar in window_axes.patches]
    np.testing.assert_allclose(heights, [row["gain"] for row in by_window(tokens)])
    np.testing.assert_array_equal(attention_axes.images[0].get_array().filled(np.nan), tokens.attention)


def test_no_attention_is_paid_to_a_matrix():
    tokens = measure_token_gains(tiny.recurrent("llama", **tiny.ASSOCIATIVE), IDS)
    assert np.isnan(tokens.attention).all()
    assert np.abs(tokens.gain[9:]).max() > 1e-4
    assert len(draw(tokens).axes) == 2, "gains, and no attention"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": IDS[:13]}, "the text has 13 tokens, fewer than two windows (14)"),
        ({"ids": IDS[:9], "overlap": 7}, "fewer than two windows (10)"),
        ({"top": 0}, "top=0: it must be from 1 to the 67 tokens"),
        ({"overlap": 8}, "overlap=8"),
        ({"model": tiny.base("gpt2")}, "a recurrent causal language model is needed, not GPT2LMHeadModel"),
        ({"model": tiny.recurrent("bert")}, "a recurrent causal language model is needed"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(change, message):
    arguments = {"model": tiny.recurrent("llama"), "ids": IDS, **change}
    with pytest.raises(ValueError, match=re.escape(message)):
        measure_token_gains(arguments.pop("model"), arguments.pop("ids"), **arguments)


def test_nan_weights_are_refused():
    model = tiny.recurrent("llama")
    torch.nn.init.constant_(model.get_output_embeddings().weight, torch.nan)
    with pytest.raises(ArithmeticError, match="log-probabilities are not finite"):
        measure_token_gains(model, IDS)


def test_attention_that_cannot_be_recorded_is_refused_and_unchanged():
    model = tiny.recurrent("gpt2", settings={"reorder_and_upcast_attn": True})
    before = model.backbone.config._attn_implementation
    with pytest.raises(ValueError, match="reorder_and_upcast_attn"):
        measure_token_gains(model, IDS)
    assert model.backbone.config._attn_implementation == before
    assert hooks.HookContext().record_attention is False


# --- kinds of words --------------------------------------------------------------------------------------------------


def test_gains_by_kind_and_by_token_count_every_token_with_a_state_once():
    encoder = Encoder(prose.tokenizer())
    ids, pieces = encoder.encode_pieces(prose.TOPICS[0][:600])
    model = tiny.recurrent("gpt2", settings={"vocab_size": prose.VOCABULARY})
    measured = measure_token_gains(model, ids)
    classes = word_classes.classify(pieces, measured.windows)
    kinds = by_kind(measured, classes)
    with_state = len(ids) - 9
    assert sum(row["tokens"] for row in kinds if row["seen"] == "all") == with_state
    assert sum(row["tokens"] for row in kinds if row["seen"] != "all") == with_state
    rows = by_token(measured, classes)
    with_word = [i for i in range(9, len(ids)) if classes.words[i]]
    assert sum(row["tokens"] for row in rows) == len(with_word)
    best = rows[0]
    assert best["total"] == max(row["total"] for row in rows)
    places = [i for i in with_word if classes.words[i].casefold() == best["word"].casefold()]
    assert set(best["places"]) <= set(places)
    assert best["times"] == len(best["places"]) > 0
    assert best["total"] == pytest.approx(sum(measured.gain[i] for i in places))


def test_the_documentations_example_runs(tmp_path, monkeypatch):
    """As printed, with a stand-in for pandas, which only gets rows or columns."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "seeing.md").read_text()
    (code,) = [code for code in re.findall(r"```python\n(.+?)```", page, re.DOTALL) if "measure_token_gains(" in code]
    monkeypatch.chdir(tmp_path)
    names = {
        "tokenizer": prose.tokenizer(),
        "text": prose.TOPICS[1][:300],
        "model": tiny.recurrent("gpt2", settings={"vocab_size": prose.VOCABULARY}),
    }
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    exec(code, names)
    assert (tmp_path / "gains.png").stat().st_size > 10_000


# --- pieces of a text ------------------------------------------------------------------------------------------------


def test_pieces_are_the_text():
    encoder = Encoder(prose.tokenizer())
    text = "  Zoë says 🙂 — twice.\r\n\r\n\tEnd "
    ids, pieces = encoder.encode_pieces(text)
    assert "".join(pieces) == text
    (whole,) = encoder.encode([text])
    np.testing.assert_array_equal(ids, whole.ids)
    assert pieces[pieces.index("🙂") + 1] == "", "the other tokens of a character have no text"
    first_ids, first_pieces = Encoder(prose.tokenizer(), max_tokens=5).encode_pieces(text)
    assert first_pieces == pieces[:5]
    np.testing.assert_array_equal(first_ids, ids[:5])
    assert encoder.encode_pieces("")[1] == []


@pytest.mark.parametrize("spaces", ["bytes", "metaspace"])
def test_tokens_are_decoded_with_their_space(spaces):
    tokenizer = prose.tokenizer() if spaces == "bytes" else metaspace()
    encoder = Encoder(tokenizer)
    ids, pieces = encoder.encode_pieces("so the house, the shed")
    assert "".join(pieces) == "so the house, the shed"
    assert encoder.token_strings(ids.tolist())[1:] == pieces[1:]
    assert " t" in [piece[:2] for piece in pieces]


def metaspace():
    """A tokenizer like Llama's first: its decoder removes the first space."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    bpe.train_from_iterator(prose.TOPICS[:8], trainers.BpeTrainer(vocab_size=300, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=bpe)
