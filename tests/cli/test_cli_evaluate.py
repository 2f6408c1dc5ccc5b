# SPDX-License-Identifier: Apache-2.0
"""`carryforward evaluate` and `report` as people use them."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import transformers
from helpers import prose
from helpers.commands import fail, run, succeed
from helpers.training_runs import WINDOW, evaluation, write_texts

from carryforward.engine.block_size import BLOCK_TOKENS


def test_from_a_folder_of_text_to_a_table(trained, home, tmp_path):
    arguments = ["--window", WINDOW, "--overlap", 0, 3, "--out", tmp_path / "results"]
    result = succeed("evaluate", trained, home / "model", "--data", home / "texts", *arguments)
    written = {path.suffix: path for path in (tmp_path / "results").iterdir() if path.suffix != ".json"}
    assert (tmp_path / "results" / "table.md").read_text().strip() == result.out.strip()
    assert {".md", ".csv"} <= written.keys()
    assert result.out.count(str(trained)) == result.out.count(str(home / "model")) == 2
    assert succeed("report", tmp_path / "results", "--out", tmp_path / "again").out.strip() == result.out.strip()
    assert (tmp_path / "again" / "results.csv").exists()


def test_json_and_nothing_else_on_stdout(trained, home):
    environment = {**os.environ, "CARRYFORWARD_CACHE": str(home / "cache"), "PYTHONWARNINGS": "always"}
    command = [sys.executable, "-m", "carryforward", *map(str, evaluation(trained, home, "--json"))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout, parse_constant=pytest.fail)
    assert result["kind"] == "evaluation"
    assert "evaluate" in result["command"]
    assert {"commit", "seed", "versions", "hardware", "settings"} <= result.keys()
    assert result["settings"]["block_tokens"] == BLOCK_TOKENS["cpu"]
    assert result["model"]["base"] == str(home / "model")
    assert [row["use_state"] for row in result["rows"]] == [True, False]


def test_two_splits_in_one_folder_do_not_overwrite_each_other(trained, home, tmp_path):
    for split in ("validation", "test"):
        succeed(*evaluation(trained, home, "--split", split, "--no-control", "--out", tmp_path))
    assert len(list(tmp_path.glob("*.json"))) == 2


def test_other_evaluations_do_not_overwrite_each_other(trained, home, tmp_path):
    for overlap in (0, 3):
        succeed(*evaluation(trained, home, "--overlap", overlap, "--no-control", "--out", tmp_path))
    assert len(list(tmp_path.glob("*.json"))) == 2
    assert "| 3" in (tmp_path / "table.md").read_text()
    assert "| 0 |" in (tmp_path / "table.md").read_text()


def test_what_was_evaluated_is_kept_when_the_next_model_fails(trained, home, tmp_path):
    damaged = shutil.copytree(home / "model", tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"cut short")
    out = tmp_path / "out"
    assert "damaged" in fail(*evaluation(trained, home, damaged, "--no-control", "--out", out), code=2)
    assert len(list(out.glob("*.json"))) == 1


def test_all_models_are_looked_at_before_one_is_scored(trained, home, tmp_path):
    for other, more, message in (
        (home / "texts", (), "holds no model"),
        (home / "model", ("--overlap", 12), "overlap=12 must be"),
        (home / "model", ("--window", 13), "reads 12 tokens at once"),
    ):
        error = fail(*evaluation(other, home, trained, "--no-control", *more, "--out", tmp_path), code=2)
        assert message in error
        assert "evaluating" not in error
    assert not list(tmp_path.glob("*.json"))


def test_one_text_is_scored_whole(trained, home, tmp_path):
    text = tmp_path / "letter.txt"
    text.write_text("a b c d e f g h " * 20)
    for command in (("evaluate", trained), ("horizon", trained, "--depth", 1)):
        (result,) = json.loads(run(*command, "--data", text, "--json").out)
        assert result["data"]["split"] == "all"
        assert result["data"]["documents"] == 1
    assert "has no split 'test', only 'train'" in fail("evaluate", trained, "--data", text, "--split", "test", code=2)


# --- plain models ----------------------------------------------------------------------------------------------------


def test_a_plain_model_reads_as_many_tokens_as_it_has_positions(home, tmp_path):
    (result,) = json.loads(run(*evaluation(home / "model", home), "--json").out)
    assert result["model"]["window"] == 32
    shape = {"n_positions": 2048, "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": prose.VOCABULARY}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).save_pretrained(tmp_path / "long")
    prose.tokenizer().save_pretrained(tmp_path / "long")
    assert "say with --window how many tokens" in fail(*evaluation(tmp_path / "long", home), code=2)
    assert "has 32 positions" in fail(*evaluation(home / "model", home, "--window", 33), code=2)


def test_a_plain_model_of_any_type_is_scored(home, tmp_path):
    config = transformers.BloomConfig(vocab_size=300, hidden_size=16, n_layer=2, n_head=2)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path / "bloom")
    transformers.AutoTokenizer.from_pretrained(home / "model").save_pretrained(tmp_path / "bloom")
    (result,) = json.loads(succeed(*evaluation(tmp_path / "bloom", home, "--window", WINDOW, "--json")).out)
    assert result["rows"][0]["flops"]["base"] is None
    assert "| – |" in succeed(*evaluation(tmp_path / "bloom", home, "--window", WINDOW)).out


def test_a_plain_model_of_one_layer_is_scored(home, tmp_path):
    """The paper's second layer, where a state would enter, is none of its concern."""
    config = transformers.AutoConfig.from_pretrained(home / "model", n_layer=1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(home / "model").save_pretrained(tmp_path / "model")
    (result,) = json.loads(succeed(*evaluation(tmp_path / "model", home, "--window", WINDOW, "--json")).out)
    assert result["rows"][0]["flops"]["base"] > 0


# --- errors ----------------------------------------------------------------------------------------------------------


def test_nothing_to_score_and_missing_splits(trained, tmp_path):
    texts = write_texts(tmp_path / "texts", a=b"x", b=b"x", c=b"x")
    assert "no document has a second token to predict" in fail("evaluate", trained, "--data", texts, code=2)
    message = fail("evaluate", trained, "--data", texts, "--split", "held-out", code=2)
    assert "has no split 'held-out', only 'train', 'validation', 'test'" in message
    assert "no such file or folder" in fail("evaluate", trained, "--data", tmp_path / "none.txt", code=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--window", 13], "reads 12 tokens at once. Leave it out."),
        (["--overlap", 12], "overlap=12 must be at least 0 and smaller than the 12"),
        (["--batch-size", 0], "--batch-size 0: it must be at least 1"),
        (["--reset-every", 0], "--reset-every 0: it must be at least 1"),
        (["--device", "tpu"], "--device tpu: PyTorch finds no such device here"),
    ],
)
def test_evaluations_that_make_no_sense(trained, home, arguments, message):
    assert message in fail(*evaluation(trained, home, *arguments), code=2)


def test_results_need_a_folder_before_the_work_begins(home, tmp_path):
    (tmp_path / "file").write_text("")
    for arguments in (evaluation("no-such-model", home), ["report", home]):
        assert "is a file" in fail(*arguments, "--out", tmp_path / "file", code=2)
    message = fail(*evaluation("no-such-model", home), "--out", tmp_path / "file" / "deep", code=2)
    assert "is a file, where a folder is needed" in message


def test_a_damaged_result(tmp_path):
    result = tmp_path / "result.json"
    result.write_text('{"kind": "evaluation", "rows": [')
    message = fail("report", result, code=2)
    assert f"{result} is not valid JSON" in message
    assert "Run its evaluation again" in message
    result.write_text('{"kind": "evaluation", "rows": []}')
    assert "model lacks name" in fail("report", result, code=2)
