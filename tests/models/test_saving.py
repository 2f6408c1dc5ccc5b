# SPDX-License-Identifier: Apache-2.0
"""Saving and loading with Hugging Face's own functions."""

import dataclasses
import subprocess
import sys

import pytest
import torch
import transformers as hf
from helpers import tiny
from torch.testing import assert_close

import carryforward as cf

IDS = tiny.documents(2, 37)


def test_another_recurrence_on_loading(tmp_path):
    model = tiny.recurrent("gpt2")
    model.save_pretrained(tmp_path)
    own = dataclasses.asdict(model.config.recurrence)
    load = hf.AutoModelForCausalLM.from_pretrained
    assert load(tmp_path, recurrence={**own, "keep_windows": 0}).config.recurrence.keep_windows == 0
    with pytest.raises(ValueError, match="window=64 is larger than the 40 learned positions"):
        load(tmp_path, recurrence={**own, "window": 64})
    assert cf.add_recurrence(tiny.base("gpt2"), {"window": 8}).config.recurrence.window == 8


def test_a_generation_config_that_cannot_be_saved_is_mended(tmp_path):
    base = tiny.base("gpt2")
    base.generation_config.temperature = 0.6
    model = cf.add_recurrence(base, window=8)
    model.save_pretrained(tmp_path)
    assert hf.GenerationConfig.from_pretrained(tmp_path).temperature == 0.6


def test_on_the_hub_it_has_its_folders_name(tmp_path, monkeypatch):
    given = {}
    model = tiny.recurrent("gpt2")
    monkeypatch.setattr(hf.PreTrainedModel, "save_pretrained", lambda self, folder, **kwargs: given.update(kwargs))
    model.save_pretrained(tmp_path / "my-model", push_to_hub=True)
    assert given["repo_id"] == "my-model"


def test_tied_weights_stay_tied(tmp_path):
    model = tiny.recurrent("gpt2")
    model.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    for one in (model, again):
        assert one.base.lm_head.weight is one.base.transformer.wte.weight
        assert one.get_output_embeddings().weight is one.get_input_embeddings().weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype, tmp_path):
    model = cf.add_recurrence(tiny.base("gpt2").to(dtype), window=8)
    assert {p.dtype for p in model.parameters()} == {dtype}
    model.save_pretrained(tmp_path)
    assert hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).recurrence.weight.dtype == dtype
    assert (
        hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).recurrence.weight.dtype == torch.float32
    )
    assert model.to(torch.bfloat16)(IDS).logits.dtype == torch.bfloat16


def test_device_map(tmp_path):
    model = tiny.recurrent("gpt2")
    model.save_pretrained(tmp_path)
    for device_map in ("auto", {"": "cpu"}):
        again = hf.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
        assert again(IDS).logits.equal(model(IDS).logits)


def test_weights_offloaded_to_disk(tmp_path):
    """Layer by layer on disk: accelerate brings weights in as they are used, and the state's norm with them."""
    model = tiny.recurrent("gpt2")
    model.save_pretrained(tmp_path)
    places = {"base.transformer.wte": "cpu", "base.transformer.wpe": "cpu", "base.transformer.drop": "cpu"}
    places |= {"base.transformer.h.0": "cpu", "base.transformer.h.1": "disk", "base.transformer.h.2": "disk"}
    places |= {"base.transformer.ln_f": "cpu", "base.lm_head": "cpu", "recurrence": "cpu"}
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "off")
    with torch.no_grad():
        assert_close(again(IDS).logits, model(IDS).logits)


def test_labels_of_a_classifier_are_its_own(tmp_path):
    base = tiny.base("bert", "token")
    base.config.id2label = {0: "O", 1: "PER", 2: "LOC"}
    model = cf.add_recurrence(base, window=8, prefix=())
    model.save_pretrained(tmp_path)
    for one in (model, hf.AutoModelForTokenClassification.from_pretrained(tmp_path)):
        assert one.config.id2label == {0: "O", 1: "PER", 2: "LOC"}
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
    assert cf.add_recurrence(base, window=8, prefix=())(ids).logits.shape[-1] == tiny.VOCABULARY + 5


def test_embeddings_added_later_start_as_the_base_models_do():
    model = tiny.recurrent("llama")
    model.resize_token_embeddings(tiny.VOCABULARY + 500, mean_resizing=False)
    assert 0.015 < model.get_input_embeddings().weight[tiny.VOCABULARY :].std() < 0.025


def test_import_is_instant_and_auto_classes_still_know_the_models(tmp_path):
    """Without importing torch or transformers; the registration follows when the Auto classes are imported."""
    tiny.recurrent("gpt2").save_pretrained(tmp_path)
    script = f"""
import sys, carryforward
heavy = {{"torch", "transformers"}} & sys.modules.keys()
assert not heavy, heavy
from transformers import AutoModelForCausalLM, AutoConfig
model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
assert type(model).__name__ == "RecurrentForCausalLM"
assert not any(type(finder).__module__.startswith("carryforward") for finder in sys.meta_path)
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


def test_a_failed_save_leaves_nothing_or_the_old(saved, monkeypatch):
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


def test_saving_leaves_alone_what_is_not_its_own(saved, monkeypatch):
    """Other ranks' calls, other variants and other people's files, by whatever path the folder is named."""
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
    assert "model.safetensors" not in names, "it was an earlier save in one piece"
    assert not any(name.startswith(".") for name in names)
    assert hf.AutoModelForCausalLM.from_pretrained(saved)(IDS).logits.equal(model(IDS).logits)
    assert hf.AutoModelForCausalLM.from_pretrained(saved, variant="fp16")(IDS).logits.equal(model(IDS).logits)
