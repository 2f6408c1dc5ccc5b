# SPDX-License-Identifier: Apache-2.0
"""`carryforward demo`, on the bundled model and `python-docs`."""

import json
import re

import pytest
from helpers.cli_runner import invoke
from typer.main import get_command

from carryforward.cli.demo import OVERLAPS
from carryforward.cli.demo_results import conclusion, scores
from carryforward.cli.main import app
from carryforward.cli.options import repeat_flags
from carryforward.data import python_docs


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "demo"
    return out, invoke("demo", "--short", "--out", out, "--seed", "1")


def test_the_demo_shows_gains_a_text_a_table_and_a_figure(shown):
    out, result = shown
    assert result.exit_code == 0, result.stderr
    first, rest = result.stdout.split("Predictions that became right")
    perplexities = [
        float(line.split("|")[3]) for line in first.splitlines() if line.startswith(("| windows", "| with "))
    ]
    change = float(re.search(r"Token perplexity ([+-][\d.]+) %", first)[1])
    assert perplexities[1] < perplexities[0], "keys and values help without training"
    assert change == pytest.approx(100 * (perplexities[1] / perplexities[0] - 1), abs=0.2)
    assert re.search(r"\[\w+\]   without: \w", rest), "a word in brackets, and what was predicted without a state"
    rows = re.findall(r"^\| (plain|keys and values carried|the same, state removed) \| (\d+) \|", rest, re.MULTILINE)
    carried = [("keys and values carried", "0"), ("the same, state removed", "0")]
    assert rows == [*(("plain", str(overlap)) for overlap in OVERLAPS), *carried]
    assert list((out / "results").glob("*.png"))
    commands = re.findall(r"^  carryforward (\w+)", result.stderr, re.MULTILINE)
    assert commands == ["inspect", "generate", "add", "evaluate", "train", "evaluate"]


def test_the_conclusion_says_what_the_table_does():
    def result(recurrent, *rows):
        keys = ("overlap", "use_state", "bits_per_byte", "base")
        rows = [dict(zip(keys, row, strict=True)) for row in rows]
        for row in rows:
            row |= {"flops": {"base": row.pop("base"), "recurrence": 0.0}, "token_perplexity": None}
        return {"model": {"recurrent": recurrent, "window": 64}, "rows": rows}

    plain = result(False, (0, True, 2.0, 10.0), (10, True, 1.9, 12.0), (30, True, 1.7, 20.0))
    carried = result(True, (0, False, 2.1, 10.0), (0, True, 1.8, 10.0))
    assert scores([plain, carried]) == {"plain": 2.0, "recurrent": 1.8, "removed": 2.1}
    assert "by -10.0 %" in conclusion([plain, carried])
    assert "overlap of 10 of 64 tokens, for 0.83 of its FLOPs" in conclusion([plain, carried])
    worse = result(True, (0, True, 2.2, 10.0))
    assert conclusion([plain, worse]) == "Carried keys and values change bits per byte by +10.0 %."


def test_the_demo_trains_both_on_the_same_tokens(shown):
    out, _ = shown
    plain, recurrent = (json.loads((out / name / "run.json").read_text()) for name in ("plain", "recurrent"))
    differing = {name for name in plain["settings"] if plain["settings"][name] != recurrent["settings"][name]}
    assert differing == {"recurrence"}, "what is carried is the recommended memory"
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
