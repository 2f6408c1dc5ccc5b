# SPDX-License-Identifier: Apache-2.0
"""Every mistake raises an error that names the argument, the value, what is accepted and what to do."""

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
        ({"window": 41}, "window=41 exceeds the 40 learned positions that gpt2 has. Use window=40 or less"),
        ({"window": 0}, "window=0 must be an integer of at least 1"),
        ({"overlap": 8}, "overlap=8 must be at least 0 and smaller than the 8 document tokens"),
        ({"overlap": -1}, "overlap=-1 must be at least 0"),
        ({"widow": 8}, "no field 'widow'. Did you mean 'window'"),
        ({"bptt_windows": 0}, "bptt_windows=0 must be None or at least 1"),
        ({"prefix": [1]}, "prefix and suffix are for encoders; gpt2 is causal"),
        ({"prefix": 1}, "prefix=1 must be a list of token ids"),
        ({"suffix": [-1]}, "suffix=.-1,. must be token ids"),
    ],
    ids=str,
)
def test_recurrences_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        cf.add_recurrence(tiny.base("gpt2"), **{"window": 8, "memory": "vector", **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"insert_at": 4}, "gpt2 has 3 layers, counted from 1, so layer 4 does not exist"),
        ({"insert_at": 0}, "insert_at=0 must be a layer number from 1"),
        ({"insert_at": [1, 1]}, "insert_at=.1, 1. must be"),
        ({"insert_at": []}, "insert_at=.. must be"),
        ({"insert_at": "every"}, "insert_at='every' must be"),
        ({"pooling": "median"}, "pooling='median' must be one of 'mean', 'max', 'attention'"),
        ({"pooled_layers": "first"}, "pooled_layers='first' must be one of 'all', 'last', 'below'"),
        (
            {"pooled_layers": "below", "insert_at": (1, 2)},
            "insert_at=.1, 2. must be at least 2 with pooled_layers=.below.",
        ),
        ({"slots": 9}, "a window has 8 document tokens and needs 9 to carry 9 pooled vectors"),
        ({"slots": 0}, "slots=0 must be an integer of at least 1"),
        ({"hidden_sizes": [200, 0]}, "hidden_sizes=.200, 0. must be positive integers"),
        ({"hidden_sizes": 200}, "hidden_sizes=200 must be a list of integers"),
        ({"init_std": -1.0}, "init_std=-1.0 must be a finite number, 0 or more"),
    ],
    ids=str,
)
def test_vector_memories_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        cf.add_recurrence(tiny.base("gpt2"), window=8, memory=cf.VectorMemoryConfig(**fields))
    with pytest.raises(ValueError, match=message):
        cf.add_recurrence(tiny.base("gpt2"), window=8, memory={"kind": "vector", **fields})


def test_a_single_layer_has_none_below_it():
    base, memory = tiny.base("llama", num_hidden_layers=1), {"kind": "vector", "pooled_layers": "below"}
    with pytest.raises(ValueError, match="llama has a single layer, none below it. Use 'all'"):
        cf.add_recurrence(base, window=8, memory={**memory, "insert_at": "all"})


def test_a_misspelt_field_is_refused_in_a_call_and_in_a_file(tmp_path):
    with pytest.raises(ValueError, match="Did you mean 'overlap'"):
        cf.RecurrenceConfig(window=300, overlp=5, memory="vector")
    tiny.recurrent("gpt2").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for owner, name, suggestion in (
        (config["recurrence"]["memory"][0], "poolin", "pooling"),
        (config["recurrence"], "overlp", "overlap"),
    ):
        owner[name] = 1
        file.write_text(json.dumps(config))
        with pytest.raises(ValueError, match=f"Did you mean '{suggestion}'"):
            hf.AutoModelForCausalLM.from_pretrained(tmp_path)
        del owner[name]


@pytest.mark.parametrize("keep", [-1, "all", 1.5, True])
def test_a_wrong_number_of_kept_windows_is_refused(keep):
    with pytest.raises(ValueError, match=r"keep_windows=.* must be a number from 0"):
        cf.RecurrenceConfig(keep_windows=keep, memory="vector")


def test_a_wrong_fast_path_is_refused():
    model = tiny.recurrent("gpt2")
    assert model.fast_path == "auto"
    with pytest.raises(ValueError, match="must be one of 'auto', 'compiled', 'off'"):
        model.fast_path = "quick"


def test_unsupported_models_and_heads_are_refused_by_name():
    bloom = hf.BloomForCausalLM(hf.BloomConfig(vocab_size=20, hidden_size=8, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="type 'bloom': its attention is not computed by transformers' Attention"):
        cf.add_recurrence(bloom, window=8, memory="vector")
    choice = hf.BertForMultipleChoice(tiny.CONFIGS["bert"]())
    with pytest.raises(ValueError, match="head of BertForMultipleChoice. Supported for 'bert': BertForMaskedLM"):
        cf.add_recurrence(choice, window=8, memory="vector")
    causal_classifier = hf.GPT2ForSequenceClassification(tiny.CONFIGS["gpt2"]())
    with pytest.raises(
        ValueError, match="head of GPT2ForSequenceClassification. Supported for 'gpt2': GPT2LMHeadModel"
    ):
        cf.add_recurrence(causal_classifier, window=8, memory="vector")
    decoder = hf.BertLMHeadModel(hf.BertConfig(**{**tiny.CONFIGS["bert"]().to_dict(), "is_decoder": True}))
    with pytest.raises(ValueError, match="'bert' with is_decoder=True"):
        cf.add_recurrence(decoder, window=8, memory="vector")
    with pytest.raises(ValueError, match="a Linear; a transformers PreTrainedModel is expected"):
        cf.add_recurrence(torch.nn.Linear(2, 2), window=8, memory="vector")
    with pytest.raises(ValueError, match="recurrent already"):
        cf.add_recurrence(tiny.recurrent("gpt2"), window=8, memory="vector")
    with pytest.raises(ValueError, match="layerdrop=0.1"):
        cf.add_recurrence(tiny.base("opt", layerdrop=0.1), window=8, memory="vector")
    with pytest.raises(ValueError, match="classifier_pooling='mean'.*Set it to 'cls' or 'bos'"):
        cf.add_recurrence(tiny.base("modernbert", "sequence", classifier_pooling="mean"), window=8, memory="vector")


def test_attention_that_hides_the_state_is_switched_to_sdpa(caplog):
    expected = cf.add_recurrence(tiny.base("llama"), window=8)
    model = tiny.base("llama")
    model.config._attn_implementation = "flex_attention"
    with caplog.at_level(logging.WARNING):
        recurrent = cf.add_recurrence(model, window=8)
    assert "attn_implementation='flex_attention' cannot show a state" in caplog.text
    ids = tiny.documents(1, 30)
    torch.testing.assert_close(recurrent(ids).logits, expected(ids).logits, rtol=0, atol=0)


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
def test_wrong_arguments_of_a_call_are_refused(arguments, message):
    model = tiny.recurrent("gpt2")
    with pytest.raises(ValueError, match=message):
        model(**{"input_ids": IDS, **arguments})


@pytest.mark.parametrize("overlap", [2.0, "2", True])
def test_an_overlap_must_be_an_integer(overlap):
    with pytest.raises(ValueError, match="give a number of tokens"):
        tiny.recurrent("gpt2")(tiny.documents(1, 20), overlap=overlap)


def test_columns_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="columns are -30 to 29, not"):
        tiny.recurrent("gpt2")(tiny.documents(2, 30), logits_to_keep=torch.tensor([3, 100]))


def test_special_tokens_must_exist():
    with pytest.raises(ValueError, match="hold 500; token ids end at 66"):
        cf.add_recurrence(tiny.base("bert"), window=11, prefix=(500,), memory="vector")


def test_labels_at_padding_do_not_matter():
    ids, mask = tiny.documents(2, 30), torch.ones(2, 30, dtype=torch.long)
    mask[0, 20:] = 0
    padded = ids.masked_fill(mask == 0, 67)
    model = tiny.recurrent("gpt2")
    expected = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    assert torch.equal(model(padded, attention_mask=mask, labels=padded).loss, expected)


def test_ids_at_padding_do_not_matter():
    model = tiny.recurrent("gpt2")
    mask = torch.ones_like(IDS)
    mask[0, 12:] = 0
    padded = IDS.masked_fill(mask == 0, -100)
    assert model(padded, attention_mask=mask, labels=padded.where(mask == 1, -100)).loss.isfinite()


def test_token_types_must_be_zero():
    model = tiny.recurrent("bert")
    assert model(IDS, token_type_ids=torch.zeros_like(IDS)).logits.equal(model(IDS).logits)
    with pytest.raises(ValueError, match="token_type_ids must be all zero"):
        model(IDS, token_type_ids=torch.ones_like(IDS))


def test_encoders_without_special_tokens_are_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        cf.add_recurrence(tiny.base("bert"), window=8, memory="vector")
    assert "tokenizer=" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        cf.add_recurrence(tiny.base("bert"), window=8, prefix=(), memory="vector")
    assert not caplog.text


def test_special_tokens_around_pieces_are_warned_of(monkeypatch):
    """Around a whole document they are recognised. Around a piece they would stand in the middle of a text."""
    warnings = []
    monkeypatch.setattr(base.logger, "warning_once", warnings.append)
    model = cf.add_recurrence(tiny.base("bert"), window=11, prefix=(2,), suffix=(3,), memory="vector")
    ids = torch.tensor([[2, 9, 8, 3, 0]])
    mask = (ids > 0).long()
    model(IDS[:1], final=False)
    model(ids, attention_mask=mask)
    assert not warnings
    model(ids, attention_mask=mask, final=False)
    assert "add_special_tokens=False" in warnings.pop()
    model(ids, attention_mask=mask, state=model(IDS[:1], final=False).state)
    assert "add_special_tokens=False" in warnings.pop()


def test_reentrant_checkpointing_is_refused():
    with pytest.raises(ValueError, match="use_reentrant=True loses the gradient"):
        tiny.recurrent("gpt2").gradient_checkpointing_enable({"use_reentrant": True})
