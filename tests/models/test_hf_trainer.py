# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's own `Trainer` and pipelines with a recurrent model."""

import pytest
import torch
import transformers as hf
from helpers import prose, tiny
from torch.testing import assert_close

import carryforward as cf


def test_trainer_trains_a_language_model(tmp_path):
    """It passes `num_items_in_batch`, and gathers only what has one row per token."""
    model = cf.add_recurrence(tiny.base("gpt2"), window=8, memory="vector")
    rows = [{"input_ids": row, "labels": row} for row in tiny.documents(8, 30)]
    arguments = hf.TrainingArguments(
        tmp_path, max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2,
        report_to=[], use_cpu=True, eval_strategy="steps", eval_steps=3, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = hf.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before


@pytest.mark.parametrize("head", ["sequence", "token"])
def test_trainer_trains_and_evaluates_classifiers(head, tmp_path):
    model = tiny.recurrent("bert", head).train()
    documents = tiny.documents(8, 30)
    labels = documents[:, 0] % 3 if head == "sequence" else documents % 3
    rows = [{"input_ids": row, "labels": label} for row, label in zip(documents, labels, strict=True)]
    arguments = hf.TrainingArguments(
        tmp_path, max_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = hf.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    predictions = trainer.predict(rows).predictions
    assert predictions.shape == ((8, 3) if head == "sequence" else (8, 30, 3))


def test_label_smoothing_scores_the_same_targets(tmp_path):
    model, ids = tiny.recurrent("gpt2"), tiny.documents(2, 30)
    arguments = hf.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, label_smoothing_factor=1e-9)
    with torch.no_grad():
        smoothed = hf.Trainer(model=model, args=arguments).compute_loss(
            model, {"input_ids": ids, "labels": ids.clone()}
        )
        assert_close(smoothed, model(ids, labels=ids).loss)


def test_a_pipeline_gives_the_same_labels_in_batches():
    tokenizer = prose.tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    config = hf.BertConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                           intermediate_size=16, max_position_embeddings=40)  # fmt: skip
    model = cf.add_recurrence(hf.BertForSequenceClassification(config).eval(), window=16, prefix=(), memory="vector")
    texts = ["The first of them.", "Another " * 30]
    alone, batched = (
        hf.pipeline("text-classification", model=model, tokenizer=tokenizer, batch_size=size)(texts) for size in (1, 2)
    )
    for expected, result in zip(alone, batched, strict=True):
        assert result["label"] == expected["label"]
        assert result["score"] == pytest.approx(expected["score"], abs=1e-5)
