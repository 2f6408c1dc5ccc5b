# SPDX-License-Identifier: Apache-2.0
"""Commands on models of a type that is not in the table: their structure is found in the model's folder."""

import json
import shutil

import pytest
import transformers as hf
from helpers.commands import fail, succeed

from carryforward.backbones.architectures import is_known
from carryforward.models import loading
from carryforward.models.loading import describe, load_bundled, load_causal


@pytest.fixture(scope="module")
def granite(tmp_path_factory):
    """The folder of a tiny Granite, with the bundled tokenizer."""
    folder, (_, tokenizer) = tmp_path_factory.mktemp("types") / "granite", load_bundled()
    config = hf.GraniteConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=24, max_position_embeddings=64, logits_scaling=2.0, residual_multiplier=0.5,
    )  # fmt: skip
    hf.GraniteForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_models_config_is_given_with_its_architecture(granite):
    assert is_known(describe(str(granite)))
    assert not is_known(hf.AutoConfig.from_pretrained(granite))


def test_commands_add_recurrence_to_it_and_use_the_result(granite, tmp_path):
    assert "--out" not in succeed("add", granite, "--out", tmp_path / "recurrent").err
    loaded = load_causal(str(tmp_path / "recurrent"))
    assert loaded.recurrent
    assert loaded.model.config.verified["transformers"] == hf.__version__
    plain = succeed("flops", "--model", granite, "--preset", "recommended", "--window", "42")
    added = succeed("flops", "--model", tmp_path / "recurrent", "--window", "42")
    assert plain.out == added.out
    succeed("generate", tmp_path / "recurrent", "--prompt", "hello", "--max-new-tokens", "3", "--greedy")


def test_it_is_trained(granite, tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("a text of some words. " * 200)
    fields = ["--window", 16, "--batch-size", 2, "--bptt-windows", 2, "--epochs", 1, "--no-validation"]
    succeed("train", "--model", granite, "--data", text, "--out", out, "--device", "cpu", *fields)
    assert load_causal(str(out)).recurrent


def test_what_stands_in_the_way_is_told(tmp_path):
    _, tokenizer = load_bundled()
    config = hf.BloomConfig(vocab_size=len(tokenizer), hidden_size=8, n_layer=1, n_head=2)
    hf.BloomForCausalLM(config).save_pretrained(tmp_path / "bloom")
    tokenizer.save_pretrained(tmp_path / "bloom")
    refused = fail("add", tmp_path / "bloom", "--out", tmp_path / "recurrent", code=2)
    assert "its attention is not computed by transformers' AttentionInterface" in refused
    assert not (tmp_path / "recurrent").exists()


def test_a_config_that_names_something_else_than_a_model_is_read_all_the_same(granite, tmp_path):
    folder = tmp_path / "granite"
    shutil.copytree(granite, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["pipeline", "AutoConfig", "none"]}))
    assert is_known(describe(str(folder)))


def test_a_model_that_needs_more_than_token_ids_stays_unknown(tmp_path):
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    hf.ViTModel(hf.ViTConfig(**size, image_size=4, patch_size=2)).save_pretrained(tmp_path / "vit")
    assert not is_known(describe(str(tmp_path / "vit")))


def test_a_plain_model_is_loaded_once(granite, monkeypatch):
    loads, load = [], loading.load_model
    monkeypatch.setattr(loading, "load_model", lambda cls, *args, **more: loads.append(cls) or load(cls, *args, **more))
    assert is_known(load_causal(str(granite)).model.config)
    assert [cls.__self__ for cls in loads].count(hf.AutoModelForCausalLM) == 1
    assert not any(cls.__self__ is hf.GraniteForCausalLM for cls in loads)


def test_an_encoder_is_refused_where_a_causal_model_is_needed(tmp_path):
    _, tokenizer = load_bundled()
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.ErnieConfig(**size, vocab_size=len(tokenizer))
    hf.ErnieForMaskedLM(config).save_pretrained(tmp_path / "ernie")
    tokenizer.save_pretrained(tmp_path / "ernie")
    with pytest.raises(ValueError, match="is an encoder .ernie., and this needs a causal language model"):
        load_causal(str(tmp_path / "ernie"))
