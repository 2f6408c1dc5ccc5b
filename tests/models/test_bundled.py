# SPDX-License-Identifier: Apache-2.0
"""The small model that comes with the package."""

import json
from pathlib import Path

import pytest
import torch
from helpers.cli_runner import invoke

import carryforward as cf
from carryforward.models.loading import load_recurrent

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = ROOT / "src/carryforward/bundled"


def test_the_bundled_model_is_small_and_complete():
    assert sum(file.stat().st_size for file in BUNDLED.iterdir()) <= 16e6
    model, tokenizer = cf.load_bundled()
    assert model.dtype == torch.float32
    assert model.config.model_type == "gpt2"
    assert model.config.max_position_embeddings == 512
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.decode(tokenizer("naïve café\n\t☃")["input_ids"]) == "naïve café\n\t☃"


def test_it_has_learned_english():
    """Token frequencies alone would give about 7 nats."""
    model, tokenizer = cf.load_bundled()
    ids = torch.tensor(
        [tokenizer("He took off his hat, and said that he would be glad to see her again.")["input_ids"]]
    )
    with torch.no_grad():
        assert model(ids, labels=ids).loss < 4


def test_commands_accept_its_name():
    loaded = load_recurrent("bundled", window=64)
    assert loaded.model.config.recurrence.window == 64
    assert loaded.model.base.dtype == torch.float32
    out = invoke("generate", "--prompt", "The old man", "--max-new-tokens", "5", "--greedy", "--json")
    assert out.exit_code == 0, out.stderr
    assert json.loads(out.stdout)["model"] == "bundled"
    assert "FLOPs" in invoke("flops", "--window", "64").stdout


def test_evaluate_needs_no_arguments(tmp_path):
    out = invoke("evaluate", "--max-document-tokens", "40", "--out", tmp_path / "results")
    assert out.exit_code == 0, out.stderr
    assert "bundled" in out.stdout
    (result,) = [json.loads(file.read_text()) for file in (tmp_path / "results").glob("*.json")]
    assert result["model"]["window"] == 512
    assert result["data"]["name"] == "python-docs"


def test_a_folder_named_bundled_is_another_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bundled").mkdir()
    (tmp_path / "bundled" / "run.json").write_text("{")
    assert cf.load_bundled()[0].config.n_layer == 7
    with pytest.raises(ValueError, match="no model|not finished"):
        load_recurrent("./bundled")
