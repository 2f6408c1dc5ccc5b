# SPDX-License-Identifier: Apache-2.0
"""The recipe of the small encoder: data in pieces, masking, a short training run, and the card."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import prose
from transformers import AutoModelForMaskedLM, AutoTokenizer

import carryforward as cf

FOLDER = Path(__file__).resolve().parents[2] / "pretraining" / "encoder"
if not FOLDER.exists():
    pytest.skip("pretraining is not part of a source distribution", allow_module_level=True)
MODULES = ("prepare", "train", "card")


@pytest.fixture
def recipe(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def books(tmp_path):
    for split, topics in (("train", prose.TOPICS[:4]), ("validation", prose.TOPICS[4:6])):
        (tmp_path / "books" / split).mkdir(parents=True)
        for i, text in enumerate(topics):
            (tmp_path / "books" / split / f"{i}.txt").write_text(text[:6000])
    return tmp_path / "books"


def test_the_encoder_is_prepared_trained_and_described(recipe, books, tmp_path, monkeypatch):
    data = tmp_path / "data"
    about = recipe.prepare.prepare(str(books), data, vocabulary=150, piece=1000)
    pieces = [np.load(data / name) for name in sorted(about["train"]["files"])]
    assert [piece.dtype for piece in pieces] == [np.uint16] * len(pieces)
    assert {len(piece) for piece in pieces[:-1]} == {1000}
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    texts = [path.read_text() for path in sorted((books / "train").iterdir())]
    expected = [i for text in texts for i in (*tokenizer(text, add_special_tokens=False)["input_ids"], 3)]
    assert tokenizer.sep_token_id == 3
    assert np.concatenate(pieces).tolist() == expected
    assert about["train"]["tokens"] == len(expected)

    out, result = tmp_path / "model", tmp_path / "results" / "result.json"
    command = f"train.py --data {data} --out {out} --result {result} --steps 10 --width 16 --layers 2 --heads 2"
    command += " --positions 32 --batch 8 --warmup 2 --validate-every 5 --validation-rows 20 --learning-rate 0.01"
    monkeypatch.setattr(recipe.train, "REPORT_EVERY", 5)
    monkeypatch.setattr(sys, "argv", command.split())
    recipe.train.main()
    record = json.loads(result.read_text())
    assert (record["steps"], record["tokens"], len(record["curve"])) == (10, 10 * 8 * 30, 2)
    assert record["curve"][-1]["loss"] < record["curve"][0]["loss"]
    assert record["validation"]["masked_tokens"] == 20 * round(0.15 * 30)
    assert record["bytes"] == (out / "model.safetensors").stat().st_size < 3 * record["parameters"]
    model = AutoModelForMaskedLM.from_pretrained(out)
    assert model.dtype == torch.float32
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    assert cf.encode(out, texts[:1]).shape == (1, 16)
    text = (out / "README.md").read_text()
    assert text == recipe.card.card(record)
    assert f"accuracy {record['validation']['masked_accuracy']:.1%}" in text

    (data / "train-00.npy").unlink()
    with pytest.raises(SystemExit, match="train-00.npy is missing or damaged"):
        recipe.train.main()


def test_time_ends_the_training_and_a_large_model_is_refused(recipe, books, tmp_path, monkeypatch):
    data = tmp_path / "data"
    recipe.prepare.prepare(str(books), data, vocabulary=150)
    clock = iter(range(0, 10**6, 2))
    monkeypatch.setattr(recipe.train.time, "perf_counter", lambda: next(clock))
    command = f"train.py --data {data} --out {tmp_path / 'm'} --result {tmp_path / 'r.json'} --minutes 0.5 --width 16"
    command += " --layers 1 --heads 2 --positions 16 --batch 4 --validation-rows 4 --warmup 1"
    monkeypatch.setattr(sys, "argv", command.split())
    recipe.train.main()
    assert json.loads((tmp_path / "r.json").read_text())["steps"] == 14, "two seconds each, from the second on"
    monkeypatch.setattr(sys, "argv", [*command.split(), "--width", "512", "--layers", "9"])
    with pytest.raises(SystemExit, match="at most 10,000,000"):
        recipe.train.main()


def test_masks_are_drawn_as_bert_draws_them(recipe):
    frame = recipe.train.Frame(first=2, last=3, mask=4, ordinary=5, vocabulary=500)
    ids = torch.randint(5, 500, (400, 100), generator=torch.Generator().manual_seed(0))
    ids[:, 0], ids[:, -1], ids[:, 50] = 2, 3, 3
    corrupted, chosen = recipe.train.corrupt(ids, frame, 0.15, torch.Generator().manual_seed(1))
    assert chosen.shape == (400, round(0.15 * 98))
    assert all(len(set(row.tolist())) == len(row) for row in chosen)
    picked = torch.zeros_like(ids, dtype=torch.bool).scatter(1, chosen, True)
    assert not picked[ids < 5].any(), "special tokens are never chosen"
    assert torch.equal(corrupted[~picked], ids[~picked])
    shares = (corrupted[picked] == 4).float().mean(), (corrupted[picked] == ids[picked]).float().mean()
    assert shares[0] == pytest.approx(0.8, abs=0.02)
    assert shares[1] == pytest.approx(0.1, abs=0.02)
    assert (corrupted[picked] >= 4).all()


def test_an_epoch_has_every_token_once(recipe):
    frame = recipe.train.Frame(first=2, last=3, mask=4, ordinary=5, vocabulary=500)
    settings = recipe.train.Settings(positions=12, batch=4)
    stream = torch.arange(5, 5 + 10 * 20 + 9, dtype=torch.int16)
    batches = recipe.train.batches(stream, settings, frame)
    rows = torch.cat([next(batches) for _ in range(5)])
    assert (rows[:, 0] == 2).all()
    assert (rows[:, -1] == 3).all()
    own = rows[:, 1:-1].flatten().sort().values
    assert torch.equal(own, torch.arange(own[0], own[0] + 200)), "every token of the epoch's 20 windows once"


def test_the_default_shape_is_what_the_recipe_says(recipe):
    settings = recipe.train.Settings()
    tokenizer = type("Sized", (), {"pad_token_id": 0, "__len__": lambda self: recipe.prepare.VOCABULARY})()
    with torch.device("meta"):
        count = recipe.train.BertForMaskedLM(recipe.train.config(settings, tokenizer)).num_parameters()
    assert f"{count / 1e6:.2f} M parameters" in recipe.train.Settings.__doc__
    assert 2 * count < recipe.train.LIMIT
