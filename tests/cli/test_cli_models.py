# SPDX-License-Identifier: Apache-2.0
"""What commands accept as a model, and what they say of others."""

import os
import shutil

import pytest
import transformers
from helpers.commands import fail
from helpers.training_runs import TRAIN, WINDOW, evaluation


def test_models_that_are_not_there(home, tmp_path):
    for arguments in (
        ["evaluate", tmp_path / "none", "--data", home / "texts"],
        ["flops", "--model", tmp_path / "none"],
    ):
        assert f"model '{tmp_path / 'none'}': there is no such folder" in fail(*arguments, code=2)
    assert "holds no model (config.json is missing)" in fail(*evaluation(home / "texts", home), code=2)
    assert "model 'no-such-model' is no folder here" in fail(*evaluation("no-such-model", home), code=1)


def test_a_file_in_a_models_folder_is_not_the_model(home):
    message = fail("generate", home / "model" / "config.json", "--prompt", "a", code=2)
    assert "is a file: give its folder" in message


NO_LANGUAGE_MODEL = "is an encoder (bert), and this needs a causal language model"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("evaluate", "is an encoder without a head for masked-lm"),
        ("generate", NO_LANGUAGE_MODEL),
        ("inspect", NO_LANGUAGE_MODEL),
        ("train", "no mask token, which masked language models need"),  # its tokenizer is a language model's
        ("add", NO_LANGUAGE_MODEL),
    ],
)
def test_an_encoder_is_no_language_model(command, message, home, tmp_path, capfd):
    """Nothing is loaded to generate: transformers would give it a head that was never trained."""
    config = transformers.BertConfig(vocab_size=300, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    transformers.AutoTokenizer.from_pretrained(home / "model").save_pretrained(tmp_path / "bert")
    model = ["--model", tmp_path / "bert"] if command == "train" else [tmp_path / "bert"]
    more = {
        "evaluate": ["--data", home / "texts"],
        "generate": ["--prompt", "a"],
        "inspect": ["--text", __file__, "--out", tmp_path / "page.html"],
        "train": ["--data", home / "texts", *TRAIN, "--out", tmp_path / "own"],
        "add": ["--out", tmp_path / "own"],
    }
    capfd.readouterr()
    assert message in fail(command, *model, *more[command], code=2)
    assert not (tmp_path / "own").exists()


def test_a_model_in_a_runs_folder_is_not_that_runs(tmp_path, monkeypatch):
    """Only checkpoints are: `evaluate gpt2` may be called from anywhere."""
    from carryforward.utils.checkpoints import run_of

    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.json").write_text('{"kind": "run", "settings": {}}')
    (tmp_path / "checkpoint-5").mkdir()
    for name, known in (("gpt2", False), (".", True), ("checkpoint-5", True), (str(tmp_path / "checkpoint-5"), True)):
        assert (run_of(name) is not None) is known, name


@pytest.mark.parametrize("kind", ["plain", "recurrent"])
def test_weights_cut_short(trained, home, tmp_path, kind):
    copy = shutil.copytree(trained if kind == "recurrent" else home / "model", tmp_path / "copy")
    os.truncate(copy / "model.safetensors", 1000)
    message = fail(*evaluation(copy, home, "--window", WINDOW), code=2)
    assert f"{copy}" in message
    whole_run = "model.safetensors is damaged or was changed after training"  # its record has digests
    assert ("a weights file is cut short or damaged" if kind == "plain" else whole_run) in message


def test_a_damaged_record(trained, home, tmp_path):
    copy = shutil.copytree(trained, tmp_path / "copy")
    (copy / "run.json").write_text('{"kind": "run", "sett')
    assert f"{copy / 'run.json'} is not valid JSON" in fail(*evaluation(copy, home), code=2)
    again = ["train", "--model", home / "model", "--data", home / "texts", *TRAIN, "--out", copy]
    assert f"{copy / 'run.json'} is not valid JSON" in fail(*again, code=2)
    assert (copy / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
