# SPDX-License-Identifier: Apache-2.0
"""`add_recurrence`: configs, special tokens and modes."""

import transformers as hf
from helpers import tiny
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForQuestionAnswering

import carryforward as cf

IDS = tiny.documents(2, 37)


def test_the_base_model_is_left_as_it_was():
    base = tiny.base("llama")
    before = {name: value.clone() for name, value in base.state_dict().items()}
    logits = base(IDS).logits
    model = cf.add_recurrence(base, window=8)
    assert model.base is base
    assert base.config._attn_implementation == "sdpa"
    assert base.state_dict().keys() == before.keys()
    assert all(value.equal(before[name]) for name, value in base.state_dict().items())
    assert base(IDS).logits.equal(logits)


def test_the_same_model_wrapped_twice():
    base = tiny.base("gpt2")
    first = cf.add_recurrence(base, window=8, insert_at="all")
    expected = first(IDS).logits
    cf.add_recurrence(base, window=8)
    assert first(IDS).logits.equal(expected)


def test_train_mode_follows_the_base_model():
    assert cf.add_recurrence(tiny.base("gpt2").train(), window=8).training
    assert not cf.add_recurrence(tiny.base("gpt2").eval(), window=8).training


def test_a_config_and_fields_on_top():
    config = cf.RecurrenceConfig(window=8, overlap=3, slots=2)
    model = cf.add_recurrence(tiny.base("gpt2"), config, overlap=1)
    assert (model.config.recurrence.slots, model.config.recurrence.overlap) == (2, 1)
    assert config.overlap == 3


def test_special_tokens_come_from_the_tokenizer():
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "[CLS]": 2, "[SEP]": 3, "a": 4, "b": 5}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=backend)
    config = cf.add_recurrence(tiny.base("bert"), window=8, tokenizer=tokenizer).config.recurrence
    assert (config.prefix, config.suffix) == ((2,), (3,))
    assert cf.add_recurrence(tiny.base("gpt2"), window=8, tokenizer=tokenizer).config.recurrence.prefix == ()


def test_the_paper_s_recurrence_is_the_default():
    encoder = tiny.base("bert", "none")
    model = cf.add_recurrence(encoder, head="question-answering", **tiny.FRAME)
    recurrence = model.config.recurrence
    assert (recurrence.window, recurrence.pooled_layers, recurrence.hidden_sizes, recurrence.insert_at) == (
        40, "last", (16,), 2)  # fmt: skip
    assert model.base.bert.encoder is encoder.encoder, "the weights are shared"
    out = model(tiny.documents(2, 30), question_ids=tiny.QUESTIONS[:2])
    assert (out.kind_logits.argmax(-1) == 0).all(), "a new head expects spans"
    with_head = AutoModelForQuestionAnswering.from_config(encoder.config)
    assert type(cf.add_recurrence(with_head, window=14, **tiny.FRAME)) is cf.RecurrentForQuestionAnswering


def test_special_tokens_of_a_pair():
    class Tokenizer:
        def __call__(self, text, pair=None, add_special_tokens=True):
            if not add_special_tokens:
                return {"input_ids": [7]}
            return {"input_ids": [0, 7, 2] if pair is None else [0, 7, 2, 2, 7, 2]}

    model = cf.add_recurrence(tiny.base("roberta", "none"), head="question-answering", tokenizer=Tokenizer())
    recurrence = model.config.recurrence
    assert (recurrence.prefix, recurrence.separator, recurrence.suffix) == ((0,), (2, 2), (2,))
