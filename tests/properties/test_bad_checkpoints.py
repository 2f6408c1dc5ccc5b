# SPDX-License-Identifier: Apache-2.0
"""Damaged, incomplete and unsuitable checkpoints are refused with a message."""

import json

import pytest
import transformers as hf
from helpers import tiny


def test_a_truncated_checkpoint_is_refused(saved):
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cut short or damaged"):
        hf.AutoModelForCausalLM.from_pretrained(saved)


def test_a_checkpoint_with_missing_weights_is_refused(saved):
    from safetensors.torch import load_file, save_file

    weights = saved / "model.safetensors"
    tensors = load_file(weights)
    del tensors["memory.vector.layer_logits"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="missing: memory.vector.layer_logits"):
        hf.AutoModelForCausalLM.from_pretrained(saved)


def test_a_checkpoint_that_does_not_fit_its_config_is_refused(saved):
    file = saved / "config.json"
    config = json.loads(file.read_text())
    config["recurrence"]["memory"][0]["hidden_sizes"] = [12, 13]
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="do not fit"):
        hf.AutoModelForCausalLM.from_pretrained(saved)


def test_a_checkpoint_with_another_head_is_refused(saved):
    with pytest.raises(ValueError, match="RecurrentForCausalLM"):
        hf.AutoModel.from_pretrained(saved)


def test_a_checkpoint_with_a_missing_shard_is_refused(saved):
    tiny.recurrent("gpt2").save_pretrained(saved, max_shard_size="20KB")
    next(saved.glob("model-00002-*")).unlink()
    with pytest.raises(ValueError, match="model-00002"):
        hf.AutoModelForCausalLM.from_pretrained(saved)


def test_saving_to_a_file_is_refused(saved):
    with pytest.raises(ValueError, match="is a file; give a folder"):
        tiny.recurrent("gpt2").save_pretrained(saved / "config.json")
