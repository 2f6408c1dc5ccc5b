# SPDX-License-Identifier: Apache-2.0
"""`carryforward demo`, on the bundled model and `python-docs`."""

import json
import re

import pytest
from helpers.cli_runner import invoke
from typer.main import get_command

from carryforward.cli.main import app
from carryforward.cli.options import repeat_flags
from carryforward.data import python_docs


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
        assert repeat_flags(words.split(), command) == expected.split()
