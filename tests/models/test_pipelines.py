# SPDX-License-Identifier: Apache-2.0
"""transformers' pipelines with recurrent models: the base model's on one window, the model's own call on long texts."""

import logging

import numpy as np
import pytest
import torch
import transformers as hf
from helpers import prose
from torch.testing import assert_close

import carryforward as cf

TOKENIZER = prose.encoder_tokenizer()  # texts end at 32 tokens
SHORT = "The first of them is a dog."
LONG = prose.TOPICS[3][:600]
TASKS = {
    "fill-mask": hf.BertForMaskedLM,
    "token-classification": hf.BertForTokenClassification,
    "text-classification": hf.BertForSequenceClassification,
    "feature-extraction": hf.BertModel,
}


def encoder(task):
    """A tiny BERT for a task, and the same with recurrence."""
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=len(TOKENIZER), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=48, num_labels=3, pad_token_id=TOKENIZER.pad_token_id,
    )  # fmt: skip
    base = TASKS[task](config).eval()
    with torch.no_grad():
        for weight in base.parameters():
            weight.normal_(std=0.3)
    documents, memory = [[*range(len(TOKENIZER))] * 3], cf.KVMemoryConfig(recent=12, sinks=2)
    return base, cf.add_recurrence(base, tokenizer=TOKENIZER, documents=documents, window=32, memory=memory)


def run(task, model, texts, tokenizer=None, **options):
    return hf.pipeline(task, model=model, tokenizer=tokenizer or model.tokenizer, device="cpu", **options)(texts)


def assert_like(found, expected):
    """Equal, but for rounding."""
    if isinstance(expected, dict | list):
        assert len(found) == len(expected)
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            assert_like(found[key], expected[key])
    elif isinstance(expected, float | np.floating):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    else:
        assert found == expected


@pytest.mark.parametrize("task", TASKS)
def test_one_window_is_the_base_models_pipeline(task, caplog):
    base, model = encoder(task)
    text = SHORT.replace("dog", TOKENIZER.mask_token) if task == "fill-mask" else SHORT
    expected = run(task, base, text, TOKENIZER)
    with caplog.at_level(logging.WARNING):
        assert_like(run(task, model, text, TOKENIZER), expected)  # with a tokenizer of the user's own
    assert "is not supported" not in caplog.text
    assert_like(run(task, model, text), expected)
    texts = [text, text + " It barks.", text]
    for found, alone in zip(run(task, model, texts, batch_size=2), run(task, base, texts, TOKENIZER), strict=True):
        # features of a batch have rows for padding, as the base model's have
        assert_like([found[0][: len(alone[0])]] if task == "feature-extraction" else found, alone)


@pytest.mark.parametrize("place", [0, 250, 599])
def test_a_mask_anywhere_in_a_long_text_is_filled(place):
    _, model = encoder("fill-mask")
    text = LONG[:place] + TOKENIZER.mask_token + LONG[place:]
    found = run("fill-mask", model, text, top_k=4)
    ids = TOKENIZER(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    assert ids.shape[1] > 150
    with torch.no_grad():
        logits = model(ids).logits[ids == TOKENIZER.mask_token_id]
    scores, tokens = logits[0].softmax(-1).topk(4)
    assert [one["token"] for one in found] == tokens.tolist()
    assert_like([one["score"] for one in found], scores.tolist())
    assert found[0]["sequence"].endswith(LONG[-20:] if place < 599 else LONG[-21:-1] + found[0]["token_str"] + LONG[-1])


@pytest.mark.parametrize("strategy", ["none", "simple", "max"])
def test_tokens_of_a_long_text_are_classified_where_they_stand(strategy):
    _, model = encoder("token-classification")
    found = run("token-classification", model, LONG, aggregation_strategy=strategy, ignore_labels=[])
    encoded = TOKENIZER(LONG, add_special_tokens=False, return_offsets_mapping=True, return_tensors="pt")
    assert found[-1]["end"] == len(LONG), "cut off at the tokenizer's maximum length"
    if strategy != "none":
        assert "".join(LONG[one["start"] : one["end"]] for one in found).split() == LONG.split()
        return
    with torch.no_grad():
        scores, labels = model(encoded["input_ids"]).logits[0].softmax(-1).max(-1)
    assert [[one["start"], one["end"]] for one in found] == encoded["offset_mapping"][0].tolist()
    assert [one["entity"] for one in found] == [model.config.id2label[label] for label in labels.tolist()]
    assert_like([one["score"].item() for one in found], scores.tolist())


def test_features_and_classes_of_long_texts_are_the_models():
    _, model = encoder("feature-extraction")
    features = run("feature-extraction", model, LONG, return_tensors=True)
    ids = TOKENIZER(LONG, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert_close(features[:, 1:-1], model(ids).last_hidden_state)
    assert features.shape[1] == ids.shape[1] + 2
    _, model = encoder("text-classification")
    results = run("text-classification", model, [LONG, SHORT, LONG[:300]], top_k=None, batch_size=3)
    for text, found in zip((LONG, SHORT, LONG[:300]), results, strict=True):
        ids = TOKENIZER(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            scores = model(ids).logits[0].softmax(-1).tolist()
        expected = [{"label": model.config.id2label[i], "score": score} for i, score in enumerate(scores)]
        assert_like(found, sorted(expected, key=lambda one: -one["score"]))


def test_saved_models_have_a_tokenizer_without_a_maximum_length(tmp_path):
    _, model = encoder("token-classification")
    model.save_pretrained(tmp_path)
    found = hf.pipeline("ner", model=str(tmp_path), device="cpu", ignore_labels=[])(LONG)
    assert found[-1]["end"] == len(LONG)
    assert TOKENIZER.model_max_length == 32, "the tokenizer that was given is not changed"


def test_text_generation_is_generate():
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=48,
    )  # fmt: skip
    tokenizer = prose.tokenizer()
    tokenizer.pad_token, tokenizer.padding_side, tokenizer.model_max_length = tokenizer.eos_token, "left", 32
    model = cf.add_recurrence(hf.LlamaForCausalLM(config).eval(), tokenizer=tokenizer, window=24)
    texts = [LONG[:300], SHORT]
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    found = [run("text-generation", model, texts, batch_size=size, **options) for size in (1, 2)]
    for text, *results in zip(texts, *found, strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        expected = tokenizer.decode(model.generate(ids, pad_token_id=0, **options)[0], skip_special_tokens=True)
        assert [one[0]["generated_text"] for one in results] == [expected] * 2
        assert expected.startswith(text)
