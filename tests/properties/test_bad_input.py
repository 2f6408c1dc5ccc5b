# SPDX-License-Identifier: Apache-2.0
"""Every mistake gets a message that names the argument, the value, what is accepted and what to do."""

import json
import logging

import pytest
import torch
import transformers as hf
from helpers import tiny

import carryforward as cf
from carryforward.models import base


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": 41}, "window=41 is larger than the 40 learned positions that gpt2 can use. Use window=40 or less"),
        ({"window": 0}, "window=0 must be an integer of at least 1"),
        ({"window": 8, "overlap": 8}, "overlap=8 must be at least 0 and smaller than the 8 document tokens"),
        ({"window": 8, "overlap": -1}, "overlap=-1 must be at least 0"),
        ({"window": 8, "insert_at": 4}, "gpt2 has 3 layers, counted from 1, so layer 4 does not exist"),
        ({"window": 8, "insert_at": 0}, "insert_at=0 must be a layer number from 1"),
        ({"window": 8, "insert_at": [1, 1]}, "insert_at=.1, 1. must be"),
        ({"window": 8, "insert_at": "every"}, "insert_at='every' must be"),
        ({"widow": 8}, "no field 'widow'. Did you mean 'window'"),
        ({"window": 8, "pooling": "median"}, "pooling='median' must be one of 'mean', 'max', 'attention'"),
        ({"window": 8, "pooled_layers": "first"}, "pooled_layers='first' must be one of 'all', 'last', 'below'"),
        (
            {"window": 8, "pooled_layers": "below", "insert_at": (1, 2)},
            "insert_at=.1, 2. must be at least 2 with pooled_layers=.below.",
        ),
        ({"window": 8, "slots": 9}, "slots=9 must be at most 8"),
        ({"window": 8, "slots": 0}, "slots=0 must be"),
        ({"window": 8, "bptt_windows": 0}, "bptt_windows=0 must be None or at least 1"),
        ({"window": 8, "hidden_sizes": [200, 0]}, "hidden_sizes=.200, 0. must be positive integers"),
        ({"window": 8, "hidden_sizes": 200}, "hidden_sizes=200 must be a list of integers"),
        ({"window": 8, "prefix": [1]}, "prefix and suffix are for encoders; gpt2 is causal"),
    ],
)
def test_recurrences_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        cf.add_recurrence(tiny.base("gpt2"), **fields)


def test_a_misspelt_field_is_refused_wherever_it_comes_from(tmp_path):
    with pytest.raises(ValueError, match="Did you mean 'overlap'"):
        cf.RecurrenceConfig(window=300, overlp=5)
    tiny.recurrent("gpt2").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["recurrence"]["poolin"] = "max"
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="Did you mean 'pooling'"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("keep", [-1, "all", 1.5, True])
def test_a_wrong_number_is_refused(keep):
    with pytest.raises(ValueError, match=r"keep_windows=.* must be a number from 0"):
        cf.RecurrenceConfig(keep_windows=keep)


def test_a_wrong_fast_path_is_refused():
    model = tiny.recurrent("gpt2")
    assert model.fast_path == "auto"
    with pytest.raises(ValueError, match="must be one of 'auto', 'compiled', 'off'"):
        model.fast_path = "quick"


def test_other_models_and_heads_are_refused_by_name():
    bloom = hf.BloomForCausalLM(hf.BloomConfig(vocab_size=20, hidden_size=8, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="type 'bloom'. Supported types: gpt2, gpt_neox"):
        cf.add_recurrence(bloom, window=8)
    choice = hf.BertForMultipleChoice(tiny.CONFIGS["bert"]())
    with pytest.raises(ValueError, match="head of BertForMultipleChoice. Supported for 'bert': BertForMaskedLM"):
        cf.add_recurrence(choice, window=8)
    causal_classifier = hf.GPT2ForSequenceClassification(tiny.CONFIGS["gpt2"]())
    with pytest.raises(
        ValueError, match="head of GPT2ForSequenceClassification. Supported for 'gpt2': GPT2LMHeadModel"
    ):
        cf.add_recurrence(causal_classifier, window=8)
    decoder = hf.BertLMHeadModel(hf.BertConfig(**{**tiny.CONFIGS["bert"]().to_dict(), "is_decoder": True}))
    with pytest.raises(ValueError, match="'bert' with is_decoder=True"):
        cf.add_recurrence(decoder, window=8)
    with pytest.raises(ValueError, match="a Linear; a transformers PreTrainedModel is expected"):
        cf.add_recurrence(torch.nn.Linear(2, 2), window=8)
    with pytest.raises(ValueError, match="recurrent already"):
        cf.add_recurrence(tiny.recurrent("gpt2"), window=8)
    with pytest.raises(ValueError, match="layerdrop=0.1"):
        cf.add_recurrence(tiny.base("opt", layerdrop=0.1), window=8)
    with pytest.raises(ValueError, match="classifier_pooling='mean'.*set it to 'cls'"):
        cf.add_recurrence(tiny.base("modernbert", "sequence", classifier_pooling="mean"), window=8)


def test_attention_that_hides_the_state_is_refused():
    model = tiny.base("llama")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="attn_implementation='flex_attention'.*set_attn_implementation"):
        cf.add_recurrence(model, window=8)


IDS = tiny.documents(2, 20)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": IDS[:0]}, r"input_ids has shape \[0, 20\]: a batch"),
        ({"input_ids": IDS[0]}, r"input_ids has shape \[20\]"),
        ({"input_ids": None}, "input_ids is missing"),
        ({"input_ids": IDS.float()}, "input_ids has dtype torch.float32"),
        ({"input_ids": IDS[:, :0]}, "row 0 of input_ids has no real token"),
        ({"attention_mask": torch.tensor([[1] * 20, [0] * 20])}, "row 1 of input_ids has no real token"),
        ({"attention_mask": torch.ones(2, 19)}, r"attention_mask has shape \[2, 19\], input_ids \[2, 20\]"),
        ({"input_ids": IDS.clone().fill_(67)}, "token id 67; the model's vocabulary has ids from 0 to 66"),
        ({"input_ids": IDS.clone().fill_(-1)}, "token id -1;"),
        ({"labels": IDS[:, :-1]}, r"labels has shape \[2, 19\], input_ids \[2, 20\]"),
        ({"labels": IDS.clone().fill_(-1)}, "labels holds -1; accepted are 0 to 66, and -100"),
        ({"logits_to_keep": -1}, "logits_to_keep=-1: give 0"),
        ({"overlap": 8}, "overlap=8 must be at least 0 and smaller"),
    ],
)
def test_calls_that_cannot_be(arguments, message):
    model = tiny.recurrent("gpt2")
    with pytest.raises(ValueError, match=message):
        model(**{"input_ids": IDS, **arguments})


@pytest.mark.parametrize("overlap", [2.0, "2", True])
def test_an_overlap_is_a_number_of_tokens(overlap):
    with pytest.raises(ValueError, match="give a number of tokens"):
        tiny.recurrent("gpt2")(tiny.documents(1, 20), overlap=overlap)


def test_columns_that_are_not_there():
    with pytest.raises(ValueError, match="columns are -30 to 29, not"):
        tiny.recurrent("gpt2")(tiny.documents(2, 30), logits_to_keep=torch.tensor([3, 100]))


def test_special_tokens_must_exist():
    with pytest.raises(ValueError, match="hold 500, and token ids end at 66"):
        cf.add_recurrence(tiny.base("bert"), window=11, prefix=(500,))


def test_labels_under_the_padding_do_not_matter():
    ids, mask = tiny.documents(2, 30), torch.ones(2, 30, dtype=torch.long)
    mask[0, 20:] = 0
    strange = ids.masked_fill(mask == 0, 67)
    model = tiny.recurrent("gpt2")
    expected = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    assert torch.equal(model(strange, attention_mask=mask, labels=strange).loss, expected)


def test_ids_under_the_padding_do_not_matter():
    model = tiny.recurrent("gpt2")
    mask = torch.ones_like(IDS)
    mask[0, 12:] = 0
    padded = IDS.masked_fill(mask == 0, -100)
    assert model(padded, attention_mask=mask, labels=padded.where(mask == 1, -100)).loss.isfinite()


def test_token_types_must_be_those_of_one_sequence():
    model = tiny.recurrent("bert")
    assert model(IDS, token_type_ids=torch.zeros_like(IDS)).logits.equal(model(IDS).logits)
    with pytest.raises(ValueError, match="token_type_ids must be all zero"):
        model(IDS, token_type_ids=torch.ones_like(IDS))


def test_encoders_without_special_tokens_are_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        cf.add_recurrence(tiny.base("bert"), window=8)
    assert "tokenizer=" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        cf.add_recurrence(tiny.base("bert"), window=8, prefix=())
    assert not caplog.text


def test_special_tokens_that_would_be_read_twice_are_warned_of(monkeypatch):
    told = []
    monkeypatch.setattr(base.logger, "warning_once", told.append)
    model = cf.add_recurrence(tiny.base("bert"), window=11, prefix=(2,), suffix=(3,))
    model(IDS[:1])
    assert not told
    ids = torch.tensor([[2, 9, 8, 3, 0]])
    model(ids, attention_mask=(ids > 0).long())
    assert "add_special_tokens=False" in told[0]
    told.clear()
    model = cf.add_recurrence(tiny.base("bert").base_model, window=16, **tiny.FRAME, head="question-answering")
    model(IDS[:1], question_ids=[[5]])
    assert not told
    model(ids[:, :4], question_ids=[[5]])
    assert "add_special_tokens=False" in told[0]


def test_reentrant_checkpointing_is_refused():
    with pytest.raises(ValueError, match="use_reentrant=True loses the gradient"):
        tiny.recurrent("gpt2").gradient_checkpointing_enable({"use_reentrant": True})
