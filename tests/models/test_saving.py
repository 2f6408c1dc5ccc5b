# SPDX-License-Identifier: Apache-2.0
"""Saving and loading with Hugging Face's own functions."""

import subprocess
import sys

import pytest
import torch
import transformers as hf
from helpers import tiny
from torch.testing import assert_close

import carryforward as cf

IDS = tiny.documents(2, 37)


def test_another_recurrence_can_be_given_on_loading(tmp_path):
    model = tiny.recurrent("gpt2")
    model.save_pretrained(tmp_path)
    own = model.config.recurrence.to_dict()
    load = hf.AutoModelForCausalLM.from_pretrained
    assert load(tmp_path, recurrence={**own, "keep_windows": 0}).config.recurrence.keep_windows == 0
    with pytest.raises(ValueError, match="window=64 exceeds the 40 learned positions"):
        load(tmp_path, recurrence={**own, "window": 64})


def test_a_generation_config_that_cannot_be_saved_is_corrected(tmp_path):
    base = tiny.base("gpt2")
    base.generation_config.temperature = 0.6
    model = cf.add_recurrence(base, window=8, memory="vector")
    model.save_pretrained(tmp_path)
    assert hf.GenerationConfig.from_pretrained(tmp_path).temperature == 0.6


def test_the_repository_on_the_hub_is_named_after_the_folder(tmp_path, monkeypatch):
    arguments = {}
    model = tiny.recurrent("gpt2")
    monkeypatch.setattr(hf.PreTrainedModel, "save_pretrained", lambda self, folder, **kwargs: arguments.update(kwargs))
    model.save_pretrained(tmp_path / "my-model", push_to_hub=True)
    assert arguments["repo_id"] == "my-model"


def test_tied_weights_stay_tied(tmp_path):
    model = tiny.recurrent("gpt2")
    model.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    for tied in (model, loaded):
        assert tied.base.lm_head.weight is tied.base.transformer.wte.weight
        assert tied.get_output_embeddings().weight is tied.get_input_embeddings().weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_memories_have_the_precision_of_the_base_model(dtype, tmp_path):
    model = cf.add_recurrence(tiny.base("gpt2").to(dtype), window=8, memory=["vector", "kv"], documents=tiny.TEXT)
    assert {p.dtype for p in model.parameters()} == {dtype}
    model.save_pretrained(tmp_path)
    for precision in (dtype, torch.float32):
        loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=precision)
        assert {weight.dtype for weight in loaded.memory.parameters()} == {precision}
        assert {state.dtype for state in loaded.fresh_state(1).memory.values()} == {precision}
    assert model.to(torch.bfloat16)(IDS).logits.dtype == torch.bfloat16


def test_a_device_map_can_be_given(tmp_path):
    model = tiny.recurrent("gpt2")
    model.save_pretrained(tmp_path)
    for device_map in ("auto", {"": "cpu"}):
        loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
        assert loaded(IDS).logits.equal(model(IDS).logits)


@pytest.mark.parametrize("fields", [{}, {"recent": 3, "sinks": 1}], ids=str)
def test_weights_can_be_offloaded_to_disk(fields, tmp_path):
    """accelerate loads a layer's weights when it runs, and with them the norm that the state passes."""
    model = tiny.recurrent("gpt2", **fields)
    model.save_pretrained(tmp_path)
    device_map = {"base.transformer.wte": "cpu", "base.transformer.wpe": "cpu", "base.transformer.drop": "cpu"}
    device_map |= {"base.transformer.h.0": "cpu", "base.transformer.h.1": "disk", "base.transformer.h.2": "disk"}
    device_map |= {"base.transformer.ln_f": "cpu", "base.lm_head": "cpu", "memory": "cpu"}
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map, offload_folder=tmp_path / "off")
    with torch.no_grad():
        assert_close(loaded(IDS).logits, model(IDS).logits)


def test_a_classifier_s_labels_are_saved(tmp_path):
    base = tiny.base("bert", "token")
    base.config.id2label = {0: "O", 1: "PER", 2: "LOC"}
    model = cf.add_recurrence(base, window=8, prefix=(), memory="vector")
    model.save_pretrained(tmp_path)
    for classifier in (model, hf.AutoModelForTokenClassification.from_pretrained(tmp_path)):
        assert classifier.config.id2label == {0: "O", 1: "PER", 2: "LOC"}
    with pytest.raises(ValueError, match="labels holds 3; accepted are 0 to 2"):
        model(IDS, labels=torch.full_like(IDS, 3))


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_embeddings_can_be_resized_before_and_after(name, tmp_path):
    model = tiny.recurrent(name)
    model.resize_token_embeddings(tiny.VOCABULARY + 5)
    ids = torch.full((1, 20), tiny.VOCABULARY + 4)
    assert model(ids).logits.shape[-1] == tiny.VOCABULARY + 5
    model.save_pretrained(tmp_path)
    assert_close(type(model).from_pretrained(tmp_path)(ids).logits, model(ids).logits)
    base = tiny.base(name)
    base.resize_token_embeddings(tiny.VOCABULARY + 5)
    assert cf.add_recurrence(base, window=8, prefix=(), memory="vector")(ids).logits.shape[-1] == tiny.VOCABULARY + 5


def test_embeddings_added_later_are_initialised_as_in_the_base_model():
    model = tiny.recurrent("llama")
    model.resize_token_embeddings(tiny.VOCABULARY + 500, mean_resizing=False)
    assert 0.015 < model.get_input_embeddings().weight[tiny.VOCABULARY :].std() < 0.025


def test_the_import_is_fast_and_auto_classes_know_the_models(tmp_path):
    """torch and transformers are not imported; models are registered when the Auto classes are imported."""
    tiny.recurrent("gpt2").save_pretrained(tmp_path)
    script = f"""
import sys, carryforward
heavy = {{"torch", "transformers"}} & sys.modules.keys()
assert not heavy, heavy
from transformers import AutoModelForCausalLM, AutoConfig
model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
assert type(model).__name__ == "RecurrentForCausalLM"
waiting = [finder.module for finder in sys.meta_path if type(finder).__module__.startswith("carryforward")]
assert waiting == ["transformers.pipelines"], waiting
assert set(carryforward.__all__) <= set(dir(carryforward))
assert all(getattr(carryforward, name) for name in carryforward.__all__)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    after = f"""
import carryforward, importlib.util
importlib.util.find_spec("transformers.models.auto.modeling_auto")
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
"""
    subprocess.run([sys.executable, "-c", after], check=True)
    after = f"""
from transformers import AutoModelForCausalLM
import carryforward
AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
"""
    subprocess.run([sys.executable, "-c", after], check=True)


def test_a_failed_save_changes_nothing(saved, monkeypatch):
    model = tiny.recurrent("gpt2", seed=3)
    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    def full_disk(self, directory, **kwargs):
        (directory / "model.safetensors").write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(hf.PreTrainedModel, "save_pretrained", full_disk)
    for target in (saved, saved.parent / "new"):
        with pytest.raises(OSError, match="No space"):
            model.save_pretrained(target)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert [path.name for path in saved.parent.iterdir()] == ["model"]


def test_saving_over_an_older_model_replaces_it(saved):
    (saved / "notes.txt").write_text("mine")
    (saved / "model-00001-of-00002.safetensors").write_bytes(b"stale")
    model = tiny.recurrent("gpt2", seed=3)
    model.save_pretrained(saved)
    assert (saved / "notes.txt").read_text() == "mine"
    assert not (saved / "model-00001-of-00002.safetensors").exists()
    assert hf.AutoModelForCausalLM.from_pretrained(saved)(IDS).logits.equal(model(IDS).logits)


def test_saving_leaves_other_files_alone(saved, monkeypatch):
    """Files of other ranks, variants and users, whatever path the folder is named by."""
    model = tiny.recurrent("gpt2")
    model.save_pretrained(saved, is_main_process=False)
    assert (saved / "model.safetensors").exists()
    (saved / "model-ema.safetensors").write_bytes(b"mine")
    model.save_pretrained(saved, variant="fp16")
    (saved.parent / "link").symlink_to(saved)
    model.save_pretrained(saved.parent / "link")
    monkeypatch.chdir(saved)
    model.save_pretrained(".", max_shard_size="20KB")
    names = {path.name for path in saved.iterdir()}
    assert {"model.fp16.safetensors", "model-ema.safetensors", "model.safetensors.index.json", "config.json"} <= names
    assert "model.safetensors" not in names, "it belongs to an earlier save in one piece"
    assert not any(name.startswith(".") for name in names)
    assert hf.AutoModelForCausalLM.from_pretrained(saved)(IDS).logits.equal(model(IDS).logits)
    assert hf.AutoModelForCausalLM.from_pretrained(saved, variant="fp16")(IDS).logits.equal(model(IDS).logits)
