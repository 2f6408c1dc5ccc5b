# SPDX-License-Identifier: Apache-2.0
"""What comes with the package: the bundled model, the text of `python-docs`, and the demo on both."""

import json
import re
import sys
from itertools import combinations
from pathlib import Path

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

import carryforward as cf
from carryforward.cli.main import app
from carryforward.cli.options import spread
from carryforward.data import python_docs
from carryforward.data.corpora import open_corpus
from carryforward.models.loading import load_recurrent

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = ROOT / "src/carryforward/bundled"


def invoke(*arguments):
    """The command line, in this process."""
    return CliRunner().invoke(app, spread(list(map(str, arguments)), get_command(app)))


# --- the model -----------------------------------------------------------------------------------------------------


def test_the_bundled_model_is_small_and_whole():
    assert sum(file.stat().st_size for file in BUNDLED.iterdir()) <= 16e6
    model, tokenizer = cf.load_bundled()
    assert model.dtype == torch.float32
    assert model.config.model_type == "gpt2"
    assert model.config.max_position_embeddings == 512
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.decode(tokenizer("naïve café\n\t☃")["input_ids"]) == "naïve café\n\t☃"


def test_it_has_learned_english():
    """Far better than a model that knows no more than how often each token occurs, which is near 7 nats."""
    model, tokenizer = cf.load_bundled()
    ids = torch.tensor(
        [tokenizer("He took off his hat, and said that he would be glad to see her again.")["input_ids"]]
    )
    with torch.no_grad():
        assert model(ids, labels=ids).loss < 4


def test_its_name_works_where_a_model_is_named():
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


def test_a_folder_called_bundled_is_something_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bundled").mkdir()
    (tmp_path / "bundled" / "run.json").write_text("{")
    assert cf.load_bundled()[0].config.n_layer == 7
    with pytest.raises(ValueError, match="no model|not finished"):
        load_recurrent("./bundled")


# --- python-docs ---------------------------------------------------------------------------------------------------


def test_documents_of_python():
    words = [len(text.text.split()) for text in python_docs.documents()]
    assert 150 < len(words) < 400
    assert 200_000 < sum(words) < 450_000
    assert min(words) >= 200
    assert 5_000 < max(words) < 20_000
    names = {text.name for text in python_docs.documents()}
    assert {"library/argparse", "reference/specialnames"} < names
    assert not {name for name in names if re.search(r"\btests?\b|site-packages", name)}


def test_splits_are_fixed_and_share_nothing():
    splits = {split: list(open_corpus("python-docs", split)) for split in ("train", "validation", "test")}
    runs = {}
    for split, texts in splits.items():
        found = set()
        for text in texts:
            words = text.text.split()
            found |= {tuple(words[i : i + 30]) for i in range(len(words) - 29)}
        runs[split] = found
    for one, other in combinations(runs, 2):
        assert len(runs[one] & runs[other]) < 0.02 * min(len(runs[one]), len(runs[other]))
    assert len(splits["train"]) > 3 * (len(splits["validation"]) + len(splits["test"]))
    for name, split in (("ast", "train"), ("argparse", "validation"), ("enum", "test")):
        assert python_docs._split(f"library/{name}") == split, "the rule must not change: figures depend on it"


def test_contained_topics_are_dropped():
    names = {text.name for text in python_docs.documents()}
    assert "reference/specialnames" in names
    assert "reference/customization" not in names
    assert "reference/sequence-types" not in names


def test_modules_are_not_imported():
    already = set(sys.modules)
    python_docs.documents.cache_clear()
    python_docs.documents()
    assert {name for name in set(sys.modules) - already if not name.startswith("pydoc_data")} == set()
    assert "antigravity" not in sys.modules


# --- the demo ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "demo"
    return out, invoke("demo", "--short", "--out", out, "--seed", "1")


def test_the_demo_shows_a_table_a_figure_and_a_text(shown):
    out, result = shown
    assert result.exit_code == 0, result.stderr
    for overlap in ("0", "5", "10", "30", "50"):
        assert result.stdout.count(f"| {overlap} |") + result.stdout.count(f"| {overlap}\\* |") == 2
    assert "state removed" in result.stdout
    told = re.search(r"the state (lowers|does not lower) .*: ([\d,.]+) without .*, ([\d,.]+) with", result.stdout)
    plain, recurrent = (float(told[i].replace(",", "")) for i in (2, 3))
    assert (told[1] == "lowers") is (recurrent < plain)
    assert list((out / "results").glob("*.png"))
    assert "carryforward train" in result.stderr


def test_the_demo_trains_both_on_the_same_tokens(shown):
    out, _ = shown
    plain, recurrent = (json.loads((out / name / "run.json").read_text()) for name in ("plain", "recurrent"))
    differing = {name for name in plain["settings"] if plain["settings"][name] != recurrent["settings"][name]}
    assert differing == {"recurrence", "slots", "insert_at", "pooled_layers", "residual"}  # of the state alone
    assert plain["tokens"] == recurrent["tokens"]
    assert plain["circumstances"]["data"] == recurrent["circumstances"]["data"]


def test_a_demo_replaces_only_a_demo(shown, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    refused = invoke("demo", "--short", "--out", tmp_path)
    assert refused.exit_code == 2
    assert "holds other things" in refused.stderr
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_own_text(tmp_path):
    from carryforward.cli.demo import _own_text, _read

    texts = [text.text for text in python_docs.documents() if 1_000 < len(text.text.split()) < 1_500][:6]
    files = []
    for number, text in enumerate(texts):
        files.append(tmp_path / f"{number}.txt")
        files[-1].write_text(text)
    _own_text(_read(files), tmp_path / "many")
    assert [file.name for file in (tmp_path / "many/test").iterdir()] == ["4-4.txt"]
    assert len(list((tmp_path / "many/train").iterdir())) == 5
    _own_text(_read(files[:3]), tmp_path / "few")
    for number, text in enumerate(texts[:3]):
        parts = [(tmp_path / "few" / split / f"{number}-{number}.txt").read_text() for split in ("train", "test")]
        assert "".join(parts) == text
        assert 0.7 < len(parts[0]) / len(text) <= 0.8
    (tmp_path / "short.txt").write_text("Too short.")
    refused = invoke("demo", "--text", tmp_path / "short.txt", "--out", tmp_path / "d")
    assert refused.exit_code == 2
    assert "at least 2,000" in refused.stderr
    (tmp_path / "d" / "plain").mkdir(parents=True)
    assert invoke("demo", "--text", tmp_path / "short.txt", "--out", tmp_path / "d").exit_code == 2
    assert (tmp_path / "d" / "plain").exists(), "an earlier demo is not lost to a wrong argument"
    missing = invoke("demo", "--text", tmp_path / "none.txt", "--out", tmp_path / "d")
    assert missing.exit_code == 2
    assert "none.txt" in missing.stderr


def test_text_takes_several_files():
    command = get_command(app)
    for words, expected in (
        ("demo --text a b --seed 1", "demo --text a --text b --seed 1"),
        ("evaluate m --overlap 0 5 other", "evaluate m --overlap 0 --overlap 5 other"),
        ("qa train --insert-at 2 4 --epochs 1", "qa train --insert-at 2 --insert-at 4 --epochs 1"),
        ("qa train --learning-rate 1e-3 1e-5", "qa train --learning-rate 1e-3 1e-5"),  # takes one: click refuses two
        ("inspect m --text a b", "inspect m --text a b"),
    ):
        assert spread(words.split(), command) == expected.split()
