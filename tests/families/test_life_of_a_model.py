# SPDX-License-Identifier: Apache-2.0
"""Five model types that are not in the table, from the base model to one that is trained, saved, loaded and used: with
the library's trainer, Hugging Face's own, and peft's adapters."""

import pytest
import torch
import transformers as hf
from helpers import families, tiny
from helpers.generation import GREEDY, greedy_continuation
from helpers.trainers import train_with_hugging_face
from torch.testing import assert_close

import carryforward as cf
from carryforward.training.trainer import RecurrentTrainer, RecurrentTrainingArguments

DECODERS = ["granite", "glm4", "gpt_oss", "stablelm"]
TYPES = [*DECODERS, "eurobert"]
MEMORIES = [cf.KVMemoryConfig(recent=3, sinks=1), cf.VectorMemoryConfig(hidden_sizes=(12,))]
DOCUMENTS = [tiny.documents(1, 60, seed)[0].tolist() for seed in range(6)]
IDS = tiny.documents(2, 30)


def build(name):
    """A verified model with two memories."""
    special = {} if families.is_causal(name) else {"prefix": (2,), "suffix": (3, 3), "window": 11}
    model = cf.add_recurrence(families.base(name), memory=MEMORIES, **{"window": 8, "overlap": 2, **special})
    assert model.config.verified is not None
    return model


def assert_reloads(model, folder, rtol=1e-5):
    """Saved and loaded by its Auto class, a model computes the same and generates the same."""
    model.eval().save_pretrained(folder)
    loaded = getattr(hf, type(model).auto_class).from_pretrained(folder).eval()
    assert loaded.config.verified == model.config.verified
    with torch.no_grad():
        assert_close(loaded(IDS).logits, model(IDS).logits, rtol=rtol, atol=rtol)
    if isinstance(model, cf.RecurrentForCausalLM):
        text = loaded.generate(IDS, max_new_tokens=9, **GREEDY)
        assert text.equal(greedy_continuation(model, IDS, 9))


@pytest.mark.parametrize("name", TYPES)
def test_hugging_faces_trainer(name, tmp_path):
    model = build(name)
    before, after = train_with_hugging_face(model, tmp_path / "run")
    assert after < before
    assert_reloads(model, tmp_path / "model")


@pytest.mark.parametrize("name", DECODERS)
def test_the_librarys_trainer(name, tmp_path):
    model = build(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    perplexity = cf.perplexity(model, DOCUMENTS).nats
    arguments = RecurrentTrainingArguments(
        str(tmp_path / "run"), learning_rate=1e-2, recurrence_learning_rate=1e-2, warmup_steps=0, use_cpu=True,
        windows_per_sample=4, per_device_train_batch_size=2, num_train_epochs=2, eval_tokens=100, disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    RecurrentTrainer(model, arguments, DOCUMENTS, DOCUMENTS[:2]).train()
    assert cf.perplexity(model, DOCUMENTS).nats < perplexity
    changed = {key for key, value in model.state_dict().items() if not value.equal(before[key])}
    assert any(key.startswith("memory.vector") for key in changed)
    assert any("layers.0" in key for key in changed)
    assert_reloads(model, tmp_path / "model")


@pytest.mark.parametrize("name", TYPES)
def test_adapters(name, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    task = "CAUSAL_LM" if families.is_causal(name) else None
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, modules_to_save=["memory"], task_type=task
    )
    model, gradients = peft.get_peft_model(build(name), config), []
    for keep_graph in (False, True):
        inner = model.get_base_model()
        inner.config.recurrence = cf.RecurrenceConfig(**{**inner.config.recurrence.to_dict(), "keep_graph": keep_graph})
        model(input_ids=IDS, labels=IDS).loss.backward()
        gradients.append(tiny.gradients(model))
    assert any("lora" in key for key in gradients[0])
    assert not any("base_layer" in key for key in gradients[0])
    tiny.assert_same_gradients(*gradients)

    model.eval().save_pretrained(tmp_path / "adapters")
    torch.manual_seed(3)
    again = peft.PeftModel.from_pretrained(build(name), tmp_path / "adapters").eval()
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
        assert_close(again(input_ids=IDS).logits, expected)
        merged = model.merge_and_unload()
        assert_close(merged(IDS).logits, expected, rtol=1e-4, atol=1e-4)
    assert_reloads(merged, tmp_path / "merged")
