# SPDX-License-Identifier: Apache-2.0
"""What the state does to each token: against transformers' own attention weights, logits and counts made by hand."""

import itertools
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
from carryforward.analysis.token_gains import by_kind, by_position, by_token, by_window, draw, inspect
from carryforward.backbones import attention, hooks
from carryforward.data.tokenization import Encoder
from carryforward.engine import cuda_graphs
from carryforward.evaluation.token_losses import score, token_losses
from carryforward.windows import schedule

IDS = tiny.documents(1, 43)[0].numpy()
WIDE = {"sliding_window": 64}  # what is kept is seen by every query
KINDS = [
    {},
    {"slots": 2, "insert_at": "all"},
    {"slots": 0, "kept": 4, "sinks": 1},
    {"slots": 2, "kept": 3, "insert_at": (1, 3)},
]


# --- attention paid to what is carried -------------------------------------------------------------------------------


def paid_by(model, ids, **arguments):
    """What each layer's heads pay to the state, for each window that has one: a list of {layer: [heads, n]}."""
    found = []

    def take(scored):
        if scored.paid:
            found.append({layer: paid[0] for layer, paid in scored.paid.items()})

    with attention.recording_attention(model.backbone.config):
        score(model, [ids], take, watch=True, **arguments)
    return found


@pytest.mark.parametrize("fields", [{"slots": 1}, {"slots": 3, "insert_at": (1, 3)}, {"insert_at": "all"}], ids=str)
@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_slots_are_paid_what_the_models_own_weights_say(name, fields):
    model = tiny.recurrent(name, overlap=0, **fields)
    ids = torch.from_numpy(IDS[:16])[None]
    (found,) = paid_by(model, IDS[:16])  # the second window reads tokens 8 to 14, and predicts 9 to 15
    with torch.no_grad():
        state = model.advance_state(ids[:, :9])
        _, inputs = model._inputs(cuda_graphs.Work(ids[:, 8:15], carried=model._table(state)))
        model.base.set_attn_implementation("eager")
        attentions = model.base(**inputs, output_attentions=True).attentions
    layers = model.config.insertion_layers
    assert set(found) == set(layers)
    slots = model.config.recurrence.slots
    for layer in layers:
        weights = attentions[layer - 1][0, :, slots:]  # queries of the window; slots are the first keys
        assert weights.shape[-1] == slots + 7
        assert_close(found[layer], weights[..., :slots].sum(-1))
        assert 0.001 < found[layer].mean() < 0.999


@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_what_is_kept_is_paid_what_the_uncut_text_pays_to_it(name):
    settings = WIDE if name in ("mistral", "gemma3_text") else {}
    model = cf.add_recurrence(tiny.base(name, **settings), window=8, slots=0, kept=8)
    (found,) = paid_by(model, IDS[:16])
    model.base.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model.base(torch.from_numpy(IDS[:15])[None], output_attentions=True).attentions
    assert set(found) == set(range(1, tiny.LAYERS + 1))
    for layer, paid in found.items():
        assert_close(paid, attentions[layer - 1][0, :, 8:, :8].sum(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_attention_is_the_mean_over_tokens_that_have_a_state(fields):
    model = tiny.recurrent("llama", **fields)
    before = model.backbone.config._attn_implementation
    found = inspect(model, IDS)
    after = model.backbone.config._attn_implementation
    assert attention.unwrapped_name(after) == attention.unwrapped_name(before), "the model is as it was"
    windows = paid_by(model, IDS)  # scored positions are a window's last
    counts = [w.score_to - w.score_from for w in found.windows[1:]]
    expected = np.full((tiny.LAYERS, tiny.HEADS), np.nan)
    for layer in windows[0]:
        parts = [one[layer][:, -count:] for one, count in zip(windows, counts, strict=True)]
        expected[layer - 1] = torch.cat(parts, dim=1).mean(dim=1)
    np.testing.assert_allclose(found.attention, expected, rtol=1e-5)
    assert np.isnan(found.attention).any() == (set(windows[0]) != {1, 2, 3})


# --- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [None, 0, 3])
@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_log_probabilities_are_those_of_the_losses(fields, overlap):
    model = tiny.recurrent("gpt2", **fields)
    found = inspect(model, IDS, top=4, overlap=overlap)
    for side, use_state in ((found.with_state, True), (found.without, False)):
        (losses,) = token_losses(model, [IDS], overlap=overlap, use_state=use_state)
        np.testing.assert_allclose(side.log_probs, -losses, rtol=1e-4, atol=1e-5)
        whole = cf.perplexity(model, [IDS], overlap=overlap, use_state=use_state)
        assert side.perplexity == pytest.approx(whole.token_perplexity, rel=1e-5)
    assert (found.gain[1 : model.config.recurrence.window + 1] == 0).all(), "the first window has no state"
    assert (found.gain[model.config.recurrence.window + 1 :] != 0).all()


def test_the_likeliest_tokens_are_those_of_the_logits():
    model = tiny.recurrent("qwen3")
    found = inspect(model, IDS, top=3)
    for side, use_state in ((found.with_state, True), (found.without, False)):
        logits = model(torch.from_numpy(IDS)[None], use_state=use_state).logits[0, :-1]
        best = logits.log_softmax(-1).topk(3)
        np.testing.assert_array_equal(side.top_ids[1:], best.indices)
        np.testing.assert_allclose(side.top_log_probs[1:], best.values.detach(), rtol=1e-4, atol=1e-5)


def test_layer_weights_where_layers_are_mixed():
    model = tiny.recurrent("llama")
    expected = torch.softmax(model.recurrence.layer_logits.detach(), 0)
    assert_close(torch.from_numpy(inspect(model, IDS).layer_weights), expected)
    for fields in ({"pooled_layers": "last"}, {"slots": 0, "kept": 4}):
        assert inspect(tiny.recurrent("llama", **fields), IDS).layer_weights is None


def test_gains_by_position_window_and_table():
    found = inspect(tiny.recurrent("llama"), IDS)  # windows of 8 tokens that share 2
    columns, gain = found.columns(), found.gain
    assert all(len(column) == len(IDS) for column in columns.values())
    assert columns["window"].tolist()[:20] == [0] * 9 + [1] * 6 + [2] * 5
    assert columns["position"].tolist()[:16] == [-1, *range(8), *range(6), 0]
    rows = by_window(found)
    assert [row["window"] for row in rows] == list(range(1, len(found.windows)))
    assert rows[0]["gain"] == pytest.approx(gain[9:15].mean())
    places = by_position(found)
    assert [row["tokens"] for row in places] == [len(IDS[9 + i :: 6]) for i in range(6)]
    assert places[2]["gain"] == pytest.approx(gain[11::6].mean())
    assert sum(row["total"] for row in rows) == pytest.approx(gain[9:].sum())


def test_a_figure_of_it():
    found = inspect(tiny.recurrent("llama", insert_at=(1, 3)), IDS)
    drawn = draw(found)
    place, number, heads, _ = drawn.axes
    np.testing.assert_allclose(place.lines[0].get_ydata(), [row["gain"] for row in by_position(found)])
    np.testing.assert_allclose([bar.get_height() for bar in number.patches], [row["gain"] for row in by_window(found)])
    np.testing.assert_array_equal(heads.images[0].get_array().filled(np.nan), found.attention)


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
def test_what_cannot_be_inspected(change, message):
    arguments = {"model": tiny.recurrent("llama"), "ids": IDS, **change}
    with pytest.raises(ValueError, match=re.escape(message)):
        inspect(arguments.pop("model"), arguments.pop("ids"), **arguments)


def test_weights_that_are_no_numbers():
    model = tiny.recurrent("llama")
    torch.nn.init.constant_(model.get_output_embeddings().weight, torch.nan)
    with pytest.raises(ArithmeticError, match="no finite likelihoods"):
        inspect(model, IDS)


def test_attention_that_cannot_be_watched_is_refused_and_left_as_it_was():
    model = tiny.recurrent("gpt2", settings={"reorder_and_upcast_attn": True})
    before = model.backbone.config._attn_implementation
    with pytest.raises(ValueError, match="reorder_and_upcast_attn"):
        inspect(model, IDS)
    assert model.backbone.config._attn_implementation == before
    assert hooks.HookContext().watching is False


# --- words -----------------------------------------------------------------------------------------------------------


def test_kinds_of_words():
    pieces = ["Mar", "en", " waited", ".", " The", " 12", " men", " saw", " Mar", "en", "'s", " lamp", ",", " and",
              "\n\n", "Maren", " didn", "'t", " Waited", "—", "", " M", "ARK"]  # fmt: skip
    found = word_classes.classify(pieces, list(schedule(len(pieces), 7)))
    kinds = [word_classes.KINDS[kind] for kind in found.kinds]
    assert kinds == [
        "name", "inside a word", "other word", "punctuation", "function word", "number", "other word", "other word",
        "name", "inside a word", "inside a word", "other word", "punctuation", "function word", "space",
        "name", "function word", "inside a word", "other word", "punctuation", "punctuation", "name", "inside a word",
    ]  # fmt: skip
    assert found.words[8:12] == ["Maren", "Maren", "Maren", "lamp"]
    seen = [word_classes.SEEN[one] for one in found.seen]
    # the second window reads tokens 7 to 13 and answers for 8 to 14; the third reads from 14 on
    assert seen[:8] == ["new"] * 8
    assert seen[8:11] == ["in earlier windows only"] * 3
    assert seen[11:15] == ["new"] * 4
    assert seen[15] == seen[18] == "in earlier windows only"
    wider = word_classes.classify(pieces, list(schedule(len(pieces), 14, 7)))
    assert word_classes.SEEN[wider.seen[15]] == "in this window before", "which reads from token 7 on"


def test_a_word_that_begins_within_a_token_of_signs():
    found = word_classes.classify(["Mar", "en", ' "M', "aren", '"'], [])
    assert [word_classes.KINDS[kind] for kind in found.kinds[2:4]] == ["punctuation", "inside a word"]
    assert found.seen.tolist() == [
        word_classes.NEW,
        word_classes.NEW,
        word_classes.NEW,
        word_classes.HERE,
        word_classes.NEW,
    ]


def test_sentences_begin_with_capital_letters_that_make_no_name():
    text = "Rain fell. “Wind,” he said. Then rain. Wind and Halden, said Wind. Halden"
    found = word_classes.classify(list(itertools.chain(*([w, " "] for w in text.split(" ")))), [])
    named = {key for key, kind in zip(found.words, found.kinds, strict=True) if kind == word_classes.NAME}
    assert named == {"Halden", "Wind"}  # “Wind” once stands within a sentence; Rain does not, and is written small


def test_gains_by_kind_and_token_count_every_token_with_a_state_once():
    encoder = Encoder(prose.tokenizer())
    ids, pieces = encoder.pieces(prose.TOPICS[0][:600])
    model = tiny.recurrent("gpt2", settings={"vocab_size": prose.VOCABULARY})
    found = inspect(model, ids)
    told = word_classes.classify(pieces, found.windows)
    kinds = by_kind(found, told)
    with_state = len(ids) - 9
    assert sum(row["tokens"] for row in kinds if row["seen"] == "all") == with_state
    assert sum(row["tokens"] for row in kinds if row["seen"] != "all") == with_state
    tokens = by_token(found, told)
    keyed = [i for i in range(9, len(ids)) if told.words[i]]
    assert sum(row["tokens"] for row in tokens) == len(keyed)
    best = tokens[0]
    assert best["total"] == max(row["total"] for row in tokens)
    places = [i for i in keyed if told.words[i].casefold() == best["word"].casefold()]
    assert set(best["places"]) <= set(places)
    assert best["times"] == len(best["places"]) > 0
    assert best["total"] == pytest.approx(sum(found.gain[i] for i in places))


def test_the_documentations_example_runs(tmp_path, monkeypatch):
    """As printed; pandas is only ever given rows or columns."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "seeing.md").read_text()
    (code,) = [code for code in re.findall(r"```python\n(.+?)```", page, re.DOTALL) if "inspect(" in code]
    monkeypatch.chdir(tmp_path)
    names = {
        "tokenizer": prose.tokenizer(),
        "text": prose.TOPICS[1][:300],
        "model": tiny.recurrent("gpt2", settings={"vocab_size": prose.VOCABULARY}),
    }
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    exec(code, names)
    assert (tmp_path / "carried.png").stat().st_size > 10_000


# --- pieces of a text ------------------------------------------------------------------------------------------------


def test_pieces_are_the_text():
    encoder = Encoder(prose.tokenizer())
    text = "  Zoë says 🙂 — twice.\r\n\r\n\tEnd "
    ids, pieces = encoder.pieces(text)
    assert "".join(pieces) == text
    (whole,) = encoder.encode([text])
    np.testing.assert_array_equal(ids, whole.ids)
    assert pieces[pieces.index("🙂") + 1] == "", "the rest of a character's tokens stand for nothing more"
    few, first = Encoder(prose.tokenizer(), max_tokens=5).pieces(text)
    assert first == pieces[:5]
    np.testing.assert_array_equal(few, ids[:5])
    assert encoder.pieces("")[1] == []


@pytest.mark.parametrize("spaces", ["bytes", "metaspace"])
def test_a_token_is_spelt_with_its_space(spaces):
    tokenizer = prose.tokenizer() if spaces == "bytes" else metaspace()
    encoder = Encoder(tokenizer)
    ids, pieces = encoder.pieces("so the house, the shed")
    assert "".join(pieces) == "so the house, the shed"
    assert encoder.spelt(ids.tolist())[1:] == pieces[1:]
    assert " t" in [piece[:2] for piece in pieces]


def metaspace():
    """As Llama's first tokenizers: a decoder that takes the first space away."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    bpe.train_from_iterator(prose.TOPICS[:8], trainers.BpeTrainer(vocab_size=300, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=bpe)
