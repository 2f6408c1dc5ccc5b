# SPDX-License-Identifier: Apache-2.0
"""Damaged and hostile files: whatever is in a file, reading it succeeds or ends with one sentence that names it.

No file may run code: a pickle that would make a folder stands in for each of them. The default run takes a sample;
CARRYFORWARD_CAMPAIGNS=all runs all.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from helpers import campaigns, prose
from helpers.damage import byte_damages, json_damages
from safetensors import safe_open

import carryforward as cf
from carryforward.analysis.continuations import _Store
from carryforward.analysis.topic_model import Topics
from carryforward.data.texts import read_json_lines
from carryforward.data.tokenization import Encoder
from carryforward.evaluation import horizon, report
from carryforward.models.loading import describe_causal, load_causal, load_recurrent
from carryforward.qa.dataset import read_questions
from carryforward.reproduction import recipes, results
from carryforward.utils import checkpoints
from carryforward.utils.parsing import read_yaml

EVERY = 23  # of the cases is in the sample
MAX_MESSAGE = 1500  # characters


# --- files, and how they are read ------------------------------------------------------------------------------------


def logits(folder):
    """What a model makes of a text: its config, weights and tokenizer are all used."""
    loaded = load_causal(str(folder))
    (encoded,) = Encoder(loaded.tokenizer).encode(["the state of a window"])
    ids = torch.tensor([[*map(int, encoded.ids)]])
    with torch.no_grad():
        return loaded.model(ids).logits


def generated(folder):
    model = load_causal(str(folder)).model
    for name in ("temperature", "repetition_penalty"):  # an option of `generate` may replace a 0
        setattr(model.generation_config, name, getattr(model.generation_config, name) or 1.0)
    with torch.no_grad():
        return model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, num_beams=1)


def embedding_model(folder):
    return load_recurrent(str(folder)).model


def run_record(folder):
    return describe_causal(str(folder))[1]


def shown(folder):
    loaded = report.load(folder / "result.json")
    return report.markdown(loaded), report.csv_text(loaded)


def stored(folder):
    return _Store(folder / "continuations.npz", {"seed": 0}).written


def topics(folder):
    return Topics.load(folder).distributions(["the window of a model"])


def recipe(folder):
    read = recipes.read(folder / "experiments" / "table2" / "recipes" / "tiny.yaml")
    return [cell.settings for cell in read.cells]


def recorded_rates(folder):
    cell = recipes.read(folder / "experiments" / "table2" / "recipes" / "tiny.yaml").cells[0]
    return cell.resolved(), results.read_record(cell), results.read_result(cell, "validation", {"settings": {}})


def lines(folder):
    return [*read_json_lines(folder / "texts.jsonl", "text")]


@dataclass
class Target:
    """A file, and the function that reads it."""

    name: str
    file: str
    read: Any
    json: bool = False


TARGETS = [
    Target("config", "model/config.json", lambda folder: logits(folder / "model"), json=True),
    Target("config of an embedding", "model/config.json", lambda folder: embedding_model(folder / "model"), json=True),
    Target("generation config", "model/generation_config.json", lambda folder: generated(folder / "model"), json=True),
    Target("weights", "model/model.safetensors", lambda folder: logits(folder / "model")),
    Target("tokenizer", "model/tokenizer.json", lambda folder: logits(folder / "model")),
    Target("tokenizer config", "model/tokenizer_config.json", lambda folder: logits(folder / "model"), json=True),
    Target("run", "model/run.json", lambda folder: run_record(folder / "model"), json=True),
    Target("seal", "model/complete.json", lambda folder: checkpoints.is_complete(folder / "model"), json=True),
    Target("result", "result.json", shown, json=True),
    Target("horizon", "horizon.json", horizon.read_earlier, json=True),
    Target("continuations", "continuations.npz", stored),
    Target("topics", "arrays.npz", topics),
    Target("SQuAD", "squad.json", lambda folder: read_questions(folder / "squad.json"), json=True),
    Target("HotpotQA", "hotpot.json", lambda folder: read_questions(folder / "hotpot.json"), json=True),
    Target("SQuAD, compressed", "squad.json.xz", lambda folder: read_questions(folder / "squad.json.xz")),
    Target("JSON lines", "texts.jsonl", lines),
    Target("settings", "settings.yaml", lambda folder: read_yaml(folder / "settings.yaml")),
    Target("recipe", "experiments/table2/recipes/tiny.yaml", recipe),
    Target("rates", "experiments/table2/results/tiny/plain-seed0/run.json", recorded_rates, json=True),
]


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """A folder with all files, intact."""
    folder = tmp_path_factory.mktemp("intact")
    prose.save_model(folder / "plain")
    memory = [cf.VectorMemoryConfig(hidden_sizes=(8,)), cf.KVMemoryConfig(recent=3)]
    model = cf.add_recurrence(load_causal(str(folder / "plain")).model, window=12, memory=memory,
                              documents=[list(range(300)) * 20])  # fmt: skip
    model.save_pretrained(folder / "model")
    prose.tokenizer().save_pretrained(folder / "model")
    generation = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "do_sample": True, "repetition_penalty": 1.1}
    _write(folder / "model/generation_config.json", {**generation, "eos_token_id": [0], "pad_token_id": 0})
    checkpoints.seal(folder / "model")
    _write(folder / "model/run.json", RUN)
    _write(folder / "experiments/table2/results/tiny/plain-seed0/run.json", RUN)
    _write(folder / "result.json", RESULT)
    _write(folder / "horizon.json", [HORIZON])
    np.savez(folder / "continuations.npz", identity=np.array('{"seed": 0}'), recurrent=np.ones((2, 3), np.int32))
    np.savez_compressed(folder / "arrays.npz", vocabulary=np.array(["model", "window"]), weights=np.ones((2, 2)) / 2,
                        about=np.array("{}"))  # fmt: skip
    _write(folder / "squad.json", SQUAD)
    _write(folder / "hotpot.json", [HOTPOT])
    from carryforward.qa.dataset import write_questions

    write_questions(read_questions(folder / "squad.json"), folder / "squad.json.xz")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": f"a text {i}", "id": i}) + "\n" for i in range(9)))
    (folder / "settings.yaml").write_text("data: x\nwindow: 8\noverlap: [1, 2]\nbf16: true\n")
    recipe_file = folder / "experiments/table2/recipes/tiny.yaml"
    recipe_file.parent.mkdir(parents=True)
    recipe_file.write_text(yaml.safe_dump(RECIPE))
    return folder


def _write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


RUN = {
    "kind": "run", "status": "finished", "tokens": 600, "search": [], "circumstances": {"window": 12, "processes": 1},
    "settings": {"model": "gpt2", "recurrence": True, "window": 12, "learning_rate": [1e-4],
                 "recurrence_learning_rate": [1e-3]},
}  # fmt: skip
ROW = {
    "overlap": 0, "use_state": True, "untrained_overlap": False, "nats": 10.5, "tokens": 9, "words": 8, "bytes": 40,
    "line_ends": 1, "word_perplexity": 3.5, "token_perplexity": 3.0, "bits_per_byte": 0.5,
    "flops": {"base": 1e6, "recurrence": 1e3, "vocabulary": 1e4}, "seconds": 0.1,
}  # fmt: skip
RESULT = {
    "kind": "evaluation", "date": "2025-01-01", "seed": 0, "settings": {"bf16": False, "reset_every": None},
    "model": {"name": "m", "recurrent": True, "window": 12, "recurrence": None},
    "data": {"name": "wikitext", "split": "test", "documents": 3, "words": 8, "max_tokens": None}, "rows": [ROW],
}  # fmt: skip
HORIZON = {
    "model": "m", "data": {"name": "d"}, "depths": [{"windows": 0, "nats": 1.0, "gain": 0.0}],
    "positions": [{"from": 0, "to": 4, "gain": 0.1, "tokens": 3}], "windows": [{"from": 1, "to": 2, "gain": 0.1}],
}  # fmt: skip
QA = {"id": "q", "question": "Who?", "answers": [{"text": "Ann", "answer_start": 0}], "is_impossible": False}
SQUAD = {"version": "2.0", "data": [{"title": "t", "paragraphs": [{"context": "Ann went home.", "qas": [QA]}]}]}
HOTPOT = {
    "_id": "h", "question": "Who?", "answer": "Ann", "context": [["Title", ["Ann went home.", " Bob stayed."]]],
    "supporting_facts": [["Title", 0]],
}  # fmt: skip
RECIPE = {
    "about": "Tiny.", "table": "overlaps", "train": {"model": "model", "window": 12, "learning_rate": "1e-4"},
    "score": {"validation": {"split": "validation"}},
    "cells": {"plain": {"train": {"recurrence": False}, "overlaps": [0], "rates_of": "table2/plain"}},
}  # fmt: skip


# --- the campaign ----------------------------------------------------------------------------------------------------


def damages(target, content, canary):
    yield from byte_damages(content, canary)
    if target.json:
        yield from json_damages(content)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_damaged_files_are_refused_by_name(target, intact, tmp_path, monkeypatch):
    folder = tmp_path / "files"
    shutil.copytree(intact, folder)
    file, canary = folder / target.file, tmp_path / "canary"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asks before it runs code"))
    content = file.read_bytes()
    target.read(folder)
    wrong, tried = [], 0
    for number, (name, damaged) in enumerate(damages(target, content, canary)):
        if number % EVERY and not campaigns.full():
            continue
        tried += 1
        file.write_bytes(damaged)
        try:
            target.read(folder)
        except (ValueError, OSError) as error:
            message = str(error)
            if file.name not in message and str(file.parent) not in message:
                wrong.append((name, "does not name the file", message[:300]))
            if len(message) > MAX_MESSAGE:
                wrong.append((name, "is too long", message[:300]))
        except Exception as error:
            wrong.append((name, type(error).__name__, str(error)[:300]))
    campaigns.record(f"damaged files[{target.name}]", tried, len(wrong))
    assert not wrong
    assert not canary.exists(), "code of a pickle was run"


def test_weights_in_a_pickle_are_not_run(intact, tmp_path):
    """A folder with pytorch_model.bin in place of safetensors: transformers must not unpickle it either."""
    from helpers.damage import _Canary

    folder = tmp_path / "model"
    shutil.copytree(intact / "model", folder)
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert weights.keys()
    (folder / "model.safetensors").unlink()
    torch.save({"weight": _Canary(tmp_path / "canary")}, folder / "pytorch_model.bin")
    with pytest.raises((ValueError, OSError), match="model"):
        logits(folder)
    assert not (tmp_path / "canary").exists()


def test_a_folder_in_the_place_of_a_file(intact, tmp_path):
    for target in TARGETS:
        folder = tmp_path / target.name
        shutil.copytree(intact, folder)
        file: Path = folder / target.file
        file.unlink()
        file.mkdir()
        if target.name in ("seal", "run", "rates", "generation config", "tokenizer config"):  # may be absent
            continue
        with pytest.raises((ValueError, OSError), match=f"{file.name}|{file.parent}"):
            target.read(folder)
