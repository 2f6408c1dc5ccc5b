# SPDX-License-Identifier: Apache-2.0
"""`add_recurrence`: the base model, configs, special tokens and modes."""

import transformers as hf
from helpers import tiny
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForQuestionAnswering

import carryforward as cf

IDS = tiny.documents(2, 37)


def test_the_base_model_is_used_and_not_changed():
    base = tiny.base("llama")
    before = {name: value.clone() for name, value in base.state_dict().items()}
    logits = base(IDS).logits
    model = cf.add_recurrence(base, window=8, memory="vector")
    assert model.base is base
    assert base.config._attn_implementation == "sdpa"
    assert base.state_dict().keys() == before.keys()
    assert all(value.equal(before[name]) for name, value in base.state_dict().items())
    assert base(IDS).logits.equal(logits)


def test_measuring_position_offsets_changes_no_weight_and_no_mode():
    for training in (False, True):
        base = tiny.base("gpt2").train(training)
        before = {name: value.clone() for name, value in base.state_dict().items()}
        model = cf.add_recurrence(base, window=8, documents=tiny.TEXT)
        assert all(value.equal(before[name]) for name, value in base.state_dict().items())
        assert {module.training for module in model.modules()} == {training}
        assert not any(weight.grad is not None for weight in model.parameters())


def test_a_base_model_can_be_wrapped_twice():
    base = tiny.base("gpt2")
    first = cf.add_recurrence(base, window=8, memory=cf.VectorMemoryConfig(insert_at="all"))
    expected = first(IDS).logits
    cf.add_recurrence(base, window=8, memory="vector")
    assert first(IDS).logits.equal(expected)


def test_train_mode_follows_the_base_model():
    assert cf.add_recurrence(tiny.base("gpt2").train(), window=8, memory="vector").training
    assert not cf.add_recurrence(tiny.base("gpt2").eval(), window=8, memory="vector").training


def test_fields_override_those_of_a_config():
    config = cf.RecurrenceConfig(window=8, overlap=3, memory=cf.VectorMemoryConfig(slots=2))
    recurrence = cf.add_recurrence(tiny.base("gpt2"), config, overlap=1).config.recurrence
    assert (recurrence.find("vector").slots, recurrence.overlap) == (2, 1)
    assert config.overlap == 3
    recurrence = cf.add_recurrence(tiny.base("llama"), config, memory="kv").config.recurrence
    assert [memory.kind for memory in recurrence.memories] == ["kv"]
    assert recurrence.overlap == 3


def test_a_config_may_be_a_dictionary():
    config = {"window": 8, "memory": [{"kind": "vector", "slots": 2}]}
    recurrence = cf.add_recurrence(tiny.base("gpt2"), config).config.recurrence
    assert recurrence == cf.RecurrenceConfig(window=8, memory=cf.VectorMemoryConfig(slots=2))


def test_special_tokens_come_from_the_tokenizer():
    words = {chr(92 + number): number for number in range(4, tiny.VOCABULARY)}
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "[CLS]": 2, "[SEP]": 3, **words}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    settings = {"window": 8, "memory": "vector", "tokenizer": hf.PreTrainedTokenizerFast(tokenizer_object=backend)}
    recurrence = cf.add_recurrence(tiny.base("bert"), **settings).config.recurrence
    assert (recurrence.prefix, recurrence.suffix) == ((2,), (3,))
    assert cf.add_recurrence(tiny.base("gpt2"), **settings).config.recurrence.prefix == ()


def test_special_tokens_of_a_pair_come_from_the_tokenizer():
    class PairTokenizer:
        def __call__(self, text, pair=None, add_special_tokens=True):
            if not add_special_tokens:
                return {"input_ids": [7]}
            return {"input_ids": [0, 7, 2] if pair is None else [0, 7, 2, 2, 7, 2]}

    base = tiny.base("roberta", "none")
    model = cf.add_recurrence(base, head="question-answering", tokenizer=PairTokenizer(), memory="vector")
    recurrence = model.config.recurrence
    assert (recurrence.prefix, recurrence.separator, recurrence.suffix) == ((0,), (2, 2), (2,))


def test_a_question_answering_head_is_added():
    encoder = tiny.base("bert", "none")
    model = cf.add_recurrence(encoder, head="question-answering", preset="paper", **tiny.FRAME)
    recurrence, memory = model.config.recurrence, model.config.recurrence.find("vector")
    assert (recurrence.window, memory.pooled_layers, memory.hidden_sizes, memory.insert_at) == (40, "last", (16,), 2)
    assert model.base.bert.encoder is encoder.encoder, "the weights are shared"
    out = model(tiny.documents(2, 30), question_ids=tiny.QUESTIONS[:2])
    assert (out.kind_logits.argmax(-1) == 0).all(), "a new head expects spans"
    with_head = AutoModelForQuestionAnswering.from_config(encoder.config)
    model = cf.add_recurrence(with_head, window=14, memory="vector", **tiny.FRAME)
    assert type(model) is cf.RecurrentForQuestionAnswering
