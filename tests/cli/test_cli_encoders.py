# SPDX-License-Identifier: Apache-2.0
"""`carryforward train` and `evaluate` for encoders: masked language models, classifiers of documents and of words."""

import itertools
import json
import shutil

import pytest
import torch
from helpers import encoders, families, prose
from helpers.commands import fail, succeed
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM, BertModel

import carryforward as cf

WINDOW = 14
TRAIN = ["--window", WINDOW, "--recent", 4, "--sinks", 1, "--windows-per-sample", 3, "--batch-size", 4]
SHORT = ["--train-tokens", 600, "--eval-tokens", 300, "--max-document-tokens", 120, "--warmup-steps", 2]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with an encoder whose tokenizer knows numbered words, texts of them, and rows with labels."""
    folder = tmp_path_factory.mktemp("encoders")
    torch.manual_seed(0)
    tokenizer = encoders.tokenizer()
    shape = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(**shape, intermediate_size=24, max_position_embeddings=40)
    for name, cls in (("bert", BertForMaskedLM), ("headless", BertModel)):
        cls(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "texts").mkdir()
    for number in range(12):
        (folder / "texts" / f"{number:02}.txt").write_text(text(number, 100 + number))
    write(folder / "labels.jsonl", [{"text": text(i, 30 + i), "label": "odd" if i % 2 else "even"} for i in range(40)])
    (folder / "words").mkdir()
    for split, count in (("train", 12), ("validation", 4), ("test", 4)):
        rows = [words(text(count + i, 25).split()) for i in range(count)]
        write(folder / "words" / f"{split}.jsonl", rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CARRYFORWARD_CACHE", str(folder / "cache"))
        yield folder


def text(seed, length):
    """A text that begins with an odd word if the seed is odd."""
    return " ".join(encoders.word(5 + (seed * 7 + i * (seed % 3 + 1) + i * i) % 62) for i in range(length))


def words(tokens):
    return {"tokens": tokens, "labels": ["odd" if int(token[1:]) % 2 else "even" for token in tokens]}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def trained(home):
    """A finished run of a masked language model, made once: only to be read."""
    command = ["train", "--model", home / "bert", "--data", home / "texts", *TRAIN, *SHORT, "--out", home / "run"]
    assert succeed(*command).out.startswith(f"{home / 'run'}: 6")
    return home / "run"


# --- masked language models ------------------------------------------------------------------------------------------


def test_a_masked_language_model(trained, home, tmp_path):
    record = json.loads((trained / "run.json").read_text())
    assert (record["task"], record["settings"]["task"]) == ("masked-lm", None)
    assert record["best_loss"] == min(entry["eval_loss"] for entry in record["history"])
    assert type(AutoModelForMaskedLM.from_pretrained(trained)).__name__ == "RecurrentForMaskedLM"
    command = ["evaluate", trained, home / "bert", "--window", WINDOW, "--data", home / "texts", "--overlap", 0, 4]
    out = succeed(*command, "--mask-probability", 0.4, "--mask-seed", 5, "--out", tmp_path).out
    assert "40% of tokens to predict, seed 5)" in out
    results = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    assert [result["model"]["recurrent"] for result in results] == [False, True]
    rows = [row for result in results for row in result["rows"]]
    assert [(row["overlap"], row["use_state"]) for row in rows] == [
        (0, False), (4, False), (0, True), (4, True), (0, False), (4, False)
    ]  # fmt: skip
    assert len({row["targets"] for row in rows}) == 1, "all arms score the same positions"
    assert rows[1]["flops"]["base"] == pytest.approx(rows[0]["flops"]["base"] * 12 / 8)
    assert rows[2]["flops"]["recurrence"] > rows[4]["flops"]["recurrence"] == 0
    documents = cf.tokenise(cf.open_corpus(str(home / "texts"), "test"), encoders.tokenizer())
    masked = cf.mask_documents(documents, encoders.tokenizer(), probability=0.4, seed=5)
    score = cf.masked_score(cf.RecurrentForMaskedLM.from_pretrained(trained), masked, overlap=4)
    assert rows[3]["loss"] == pytest.approx(score.loss)
    assert rows[3]["by_distance"] == score.by_distance()
    assert succeed("report", tmp_path).out.strip() == out.strip()


def test_ctrl_c_and_the_same_command(trained, home, tmp_path, interrupted):
    """Resumed, it ends with the weights of the run that was never stopped."""
    command = ["train", "--model", home / "bert", "--data", home / "texts", *TRAIN, *SHORT, "--out", tmp_path / "own"]
    assert "To resume, run the same command again" in interrupted(*command)
    succeed(*command)
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "own", trained))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert "is finished already" in succeed(*command).err
    message = fail(*command, "--mask-probability", 0.2, code=2)
    assert "mask_probability: None there, 0.2 here" in message


def test_learning_rates_are_compared_by_the_loss(home, tmp_path):
    command = ["train", "--model", home / "bert", "--data", home / "texts", *TRAIN, *SHORT, "--out", tmp_path / "own"]
    record = json.loads(succeed(*command, "--learning-rate", 1e-2, 1e30, "--search-tokens", 200, "--json").out)
    assert [trial["rates"][0] for trial in record["search"]] == [1e-2, 1e30]
    assert record["search"][0]["loss"] > 0
    assert record["chosen"]["learning_rate"] == 1e-2


def test_a_plain_model_whose_type_is_not_in_the_table(home, tmp_path):
    """It scores what the same model with recurrence scores without its state."""
    model = families.base("albert", "masked", vocab_size=len(encoders.tokenizer()))
    encoders.tokenizer().save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "plain")
    tokenizer, fields = encoders.tokenizer(), {"window": WINDOW, "overlap": 0, "memory": "vector"}
    cf.add_recurrence(model, tokenizer=tokenizer, **fields).save_pretrained(tmp_path / "recurrent")
    score = ["--data", home / "texts", "--split", "test", "--max-document-tokens", 60, "--json"]
    plain = json.loads(succeed("evaluate", tmp_path / "plain", "--window", WINDOW, *score).out)
    recurrent = json.loads(succeed("evaluate", tmp_path / "recurrent", *score).out)
    (plain,), (_, control) = plain[0]["rows"], recurrent[0]["rows"]
    assert not control["use_state"]
    assert plain["targets"] == control["targets"] > 5
    assert plain["nats"] == pytest.approx(control["nats"], rel=1e-5)


def test_without_recurrence_a_plain_model_is_saved(home, tmp_path):
    command = ["train", "--model", home / "bert", "--data", home / "texts", "--no-recurrence", "--window", WINDOW]
    succeed(*command, *SHORT, "--save-tokens", 200, "--out", tmp_path / "own")
    assert type(AutoModelForMaskedLM.from_pretrained(tmp_path / "own")).__name__ == "BertForMaskedLM"
    checkpoint = sorted((tmp_path / "own").glob("checkpoint-*"))[0]
    for model in (tmp_path / "own", checkpoint):
        (result,) = json.loads(succeed("evaluate", model, "--data", home / "texts", "--json").out)
        assert (result["model"]["recurrent"], result["model"]["window"]) == (False, WINDOW)


# --- classifiers -----------------------------------------------------------------------------------------------------


def test_a_classifier_of_documents(trained, home, tmp_path):
    """Made of the masked language model that was trained before: its encoder and its memory."""
    own, options = tmp_path / "own", ["--task", "classification", "--epochs", 2, "--freeze-base"]
    command = ["train", "--model", trained, "--data", home / "labels.jsonl", "--out", own, *options]
    assert "--freeze-base has no effect on the task classification" in fail(*command, code=2)
    rates = ["--learning-rate", 1e-9, "--recurrence-learning-rate", 1e-9]
    record = json.loads(succeed(*command[:-1], *rates, "--json").out)
    assert record["task"] == "classification"
    assert len(record["history"]) == 2, "after each epoch"
    model = cf.RecurrentForSequenceClassification.from_pretrained(own)
    assert model.config.id2label == {0: "even", 1: "odd"}
    pretrained = cf.RecurrentForMaskedLM.from_pretrained(trained)
    for mine, theirs in ((model.backbone.encoder, pretrained.backbone.encoder), (model.memory, pretrained.memory)):
        for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    out = tmp_path / "results"
    table = succeed("evaluate", own, "--data", home / "labels.jsonl", "--split", "train", "--out", out).out
    assert "| accuracy | state removed | macro-F1 | state removed |" in table
    (result,) = (json.loads(path.read_text()) for path in out.glob("*.json"))
    predicted = {path.name.partition("-overlap-")[2]: path.read_text().splitlines() for path in out.glob("*.jsonl")}
    assert predicted.keys() == {"0-predictions.jsonl", "0-without-state-predictions.jsonl"}
    rows = [json.loads(line) for line in predicted["0-predictions.jsonl"]]
    labels = dict(enumerate((home / "labels.jsonl").read_text().splitlines(), 1))
    right = [json.loads(labels[int(row["name"][5:])])["label"] == row["label"] for row in rows]
    assert result["rows"][0]["accuracy"] == pytest.approx(sum(right) / len(right))
    assert result["rows"][0]["scored"] == len(right) == 36


def test_a_classifier_of_words(home, tmp_path):
    """It learns which words are odd. A model without a head leaves no doubt of the task."""
    own, rates = tmp_path / "own", ["--learning-rate", 3e-2, "--warmup-steps", 2, "--epochs", 6]
    command = ["train", "--model", home / "headless", "--data", home / "words", *TRAIN, *rates, "--out", own, "--json"]
    record = json.loads(succeed(*command).out)
    assert record["task"] == "token-classification"
    assert record["best_macro_f1"] > 0.9
    out = tmp_path / "results"
    (result,) = json.loads(succeed("evaluate", own, "--data", home / "words", "--out", out, "--json").out)
    assert result["data"]["classes"] == ["even", "odd"]
    assert result["rows"][0]["scored"] == 4 * 25
    (file,) = out.glob("*-overlap-0-predictions.jsonl")
    rows = [json.loads(line)["labels"] for line in file.read_text().splitlines()]
    true = [json.loads(line)["labels"] for line in (home / "words" / "test.jsonl").read_text().splitlines()]
    pairs = zip(itertools.chain(*rows), itertools.chain(*true), strict=True)
    right = [one == other for one, other in pairs]
    assert result["rows"][0]["accuracy"] == pytest.approx(sum(right) / len(right))
    other = ["--data", home / "labels.jsonl", "--task", record["task"], "--out", tmp_path / "b"]
    assert "must have as many labels as tokens" in fail("train", "--model", own, *other, code=2)


# --- which task it is, and what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "data", "options", "message"),
    [
        ("bert", "labels.jsonl", [], "has a head for masked-lm, and {home}/labels.jsonl holds rows for classification. "
                                     "Say what to train with --task masked-lm or --task classification"),
        ("bert", "words", [], "--task masked-lm or --task token-classification"),
        ("bert", "texts", ["--task", "causal-lm"], "--task causal-lm: {home}/bert is an encoder"),
        ("gpt2", "texts", ["--task", "masked-lm"], "--task masked-lm: {home}/gpt2 is a causal language model"),
        ("bert", "texts", ["--task", "frobnicate"], "it must be one of causal-lm, masked-lm, classification"),
        ("bert", "texts", ["--mask-probability", 0], "--mask-probability 0.0: it must be above 0 and at most 1"),
        ("gpt2", "texts", ["--mask-probability", 0.2], "--mask-probability has no effect on the task causal-lm"),
        ("bert", "texts", ["--carry-state"], "--carry-state has no effect on the task masked-lm"),
        ("bert", "texts", ["--task", "classification"], "labelled documents are read from a .jsonl file"),
        ("unmasked", "texts", [], "has no mask token, which masked language models need"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained(home, tmp_path, model, data, options, message):
    if model == "gpt2" and not (home / "gpt2").exists():
        prose.save_model(home / "gpt2")
    if model == "unmasked":
        shutil.copytree(home / "bert", home / model)
        tokenizer = encoders.tokenizer()
        tokenizer.mask_token = None
        tokenizer.save_pretrained(home / model)
    command = ["train", "--model", home / model, "--data", home / data, *options, *TRAIN, "--out", tmp_path / "own"]
    assert message.format(home=home) in fail(*command, code=2)
    assert not (tmp_path / "own").exists()


def test_what_cannot_be_evaluated(trained, home):
    texts = ["--data", home / "texts"]
    assert "is an encoder without a head for masked-lm" in fail("evaluate", home / "headless", *texts, code=2)
    message = fail("evaluate", trained, *texts, "--reset-every", 2, code=2)
    assert "--reset-every has no effect on the task masked-lm" in message
    assert "overlap=12 must be" in fail("evaluate", trained, *texts, "--overlap", 12, code=2)
    message = fail("evaluate", trained, *texts, "--mask-probability", 1e-9, code=2)
    assert "no token was chosen to be predicted" in message
