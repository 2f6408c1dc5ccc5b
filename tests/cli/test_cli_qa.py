# SPDX-License-Identifier: Apache-2.0
"""`carryforward qa`: train, evaluate and answer as people do, with a tiny BERT and questions on Python's own texts."""

import dataclasses
import io
import json
import shutil
from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml
from helpers import prose
from helpers.commands import fail, succeed
from tokenizers.normalizers import Replace
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, AutoTokenizer, BertConfig, BertForMaskedLM, BertModel, set_seed

import carryforward as cf
from carryforward.engine import graph_cache
from carryforward.engine.block_size import BLOCK_TOKENS
from carryforward.memories.kinds import MEMORY_KINDS
from carryforward.models.loading import load_question_answering
from carryforward.presets import DEFAULT_SINKS, PRESET_MEMORIES
from carryforward.qa import predict, train
from carryforward.qa.dataset import Answer, Question, read_questions
from carryforward.qa.trainer import QuestionTrainer, QuestionTrainingArguments
from carryforward.settings.commands import FAST_PATHS, MAX_ANSWER_TOKENS, QuestionSettings
from carryforward.settings.recurrence import RecurrentSettings, _owners
from carryforward.training.callbacks import ProgressBarCallback
from carryforward.utils.files import read_sealed_json, write_sealed_json

SHIPPED = sorted((Path(__file__).parents[2] / "experiments" / "other" / "questions" / "settings").glob("*.yaml"))
TRAIN = ["--epochs", 2, "--batch-size", 4, "--learning-rate", 1e-3]
PAPER = ["--preset", "paper", "--window", 40]


def questions(count):
    """Where does a name stand? On the beginnings of topics, several questions each."""
    paragraphs = []
    for number in range(count):
        words = prose.TOPICS[number][:600].split()
        text = " ".join(words)
        qas = [
            {"id": f"{number}-{i}", "question": f"What follows {words[i - 1]}?",
             "answers": [{"text": words[i], "answer_start": len(" ".join(words[:i])) + 1}]}
            for i in range(5, min(len(words), 40), 9)
        ]  # fmt: skip
        paragraphs.append({"context": text, "qas": qas})
    return {"version": "1", "data": [{"title": "topics", "paragraphs": paragraphs}]}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with an encoder, its tokenizer, and questions."""
    folder = tmp_path_factory.mktemp("questions")
    tokenizer = prose.tokenizer()
    tokenizer.add_special_tokens({"cls_token": "<|cls|>", "sep_token": "<|sep|>"})
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|cls|> $A <|sep|>", pair="<|cls|> $A <|sep|> $B:1 <|sep|>:1",
        special_tokens=[("<|cls|>", cls), ("<|sep|>", sep)],
    )  # fmt: skip
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    for name, model in (("model", BertModel(config)), ("masked", BertForMaskedLM(config))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "questions.json").write_text(json.dumps(questions(24)))
    (folder / "few.json").write_text(json.dumps(questions(3)))
    return folder


def command(home, *more):
    """The arguments of a training run."""
    few = ["--data", home / "questions.json", "--validation-data", home / "few.json"]
    return ["qa", "train", "--model", home / "model", *few, *TRAIN, *more]


@pytest.fixture(scope="module")
def trained(home):
    for name, more in (("run", []), ("alone", ["--no-recurrence"])):
        result = succeed(*command(home, *PAPER, *more, "--out", home / name))
        assert "questions, validation F1" in result.out
        assert "training: " in result.err
    return home / "run"


def test_training_keeps_a_record(home, trained):
    record = json.loads((trained / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["questions"] == sum(len(p["qas"]) for p in questions(24)["data"][0]["paragraphs"])
    assert record["lost"] == []
    assert len(record["history"]) == 2
    model = cf.RecurrentForQuestionAnswering.from_pretrained(trained)
    recurrence = model.config.recurrence
    assert recurrence.window == 40
    assert recurrence.memories == (cf.VectorMemoryConfig(pooled_layers="last", hidden_sizes=(16,)),)
    assert len(recurrence.prefix) == len(recurrence.separator) == len(recurrence.suffix) == 1
    assert "finished already" in succeed(*command(home, *PAPER, "--out", trained)).err


def test_resumed_is_never_stopped(home, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "again")
    newest = max((tmp_path / "again").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    shutil.rmtree(newest)
    for file in ("config.json", "model.safetensors"):
        (tmp_path / "again" / file).unlink()
    record = read_sealed_json(tmp_path / "again/run.json")
    write_sealed_json(tmp_path / "again/run.json", {**record, "status": "running"})
    succeed(*command(home, *PAPER, "--out", tmp_path / "again"))
    first, second = (cf.RecurrentForQuestionAnswering.from_pretrained(f) for f in (trained, tmp_path / "again"))
    for (name, one), (_, other) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_evaluation_gives_scores_controls_and_predictions(home, trained, tmp_path):
    outcome = succeed("qa", "evaluate", trained, home / "alone", "--data", home / "few.json", "--out", tmp_path / "out")
    rows = [line for line in outcome.out.splitlines() if "run" in line or "alone" in line]
    assert len(rows) == 2
    assert rows[1].endswith("| – | – |"), "a model trained without a state has no control"
    result = json.loads(next((tmp_path / "out").glob("*run-few-??????.json")).read_text())
    assert {row["use_state"] for row in result["rows"]} == {True, False}
    ids = [question["id"] for p in questions(3)["data"][0]["paragraphs"] for question in p["qas"]]
    assert list(result["rows"][0]["scores"]) == ids
    predictions = json.loads(next((tmp_path / "out").glob("*run-few-??????-predictions.json")).read_text())
    assert list(predictions) == ids
    succeed("qa", "evaluate", trained, "--data", home / "few.json", "--out", tmp_path / "out", "--overlap", 3)
    assert len(list((tmp_path / "out").glob("*run-few-??????.json"))) == 2, "other settings, other files"
    hotpot = {"_id": "h", "question": "What?", "answer": "yes", "supporting_facts": [], "context": [["T", ["A text."]]]}
    data, out = tmp_path / "hotpot.json", tmp_path / "hotpot"
    data.write_text(json.dumps([hotpot]))
    outcome = succeed("qa", "evaluate", trained, "--data", data, "--out", out, "--json")
    assert json.loads(outcome.out)[0]["data"]["format"] == "hotpotqa"
    predictions = json.loads(next(out.glob("*run-hotpot-??????-predictions.json")).read_text())
    assert predictions == {"answer": {"h": predictions["answer"]["h"]}, "sp": {"h": []}}


def test_whether_there_may_be_no_answer_is_the_files_rule(home, trained, tmp_path):
    """However many of its questions are asked."""
    some = questions(3)
    some["data"][0]["paragraphs"][2]["qas"][-1] |= {"answers": [], "is_impossible": True}
    (tmp_path / "some.json").write_text(json.dumps(some))
    ask = ["qa", "evaluate", trained, "--no-control", "--json", "--max-questions", 1, "--data"]
    for data, allowed in ((tmp_path / "some.json", True), (home / "few.json", False)):
        (found,) = json.loads(succeed(*ask, data).out)
        assert (found["data"]["questions"], found["settings"]["allow_none"]) == (1, allowed)
        assert found["settings"]["block_tokens"] == BLOCK_TOKENS[found["hardware"]["device"].split(":")[0]]


def test_answers_from_a_file_and_from_standard_input(trained, tmp_path, monkeypatch):
    text = prose.TOPICS[5][:4000]
    (tmp_path / "text.txt").write_text(text)
    ask = ["qa", "answer", trained, "--question", "What follows the?"]
    result = succeed(*ask, "--document", tmp_path / "text.txt", "--top-k", 3)
    assert result.out.count("characters") == 3
    text = text.replace("\n", "\r\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    found = json.loads(succeed(*ask, "--document", "-", "--json").out)
    assert found[0]["text"] == text[found[0]["start"] : found[0]["end"]], "line ends are characters as well"
    (tmp_path / "text.txt").write_bytes(text.encode())
    assert json.loads(succeed(*ask, "--document", tmp_path / "text.txt", "--json").out) == found


def test_passages_are_joined_to_files(home, tmp_path, caplog):
    train, test = tmp_path / "joined/train.json", tmp_path / "joined/test.json"
    result = succeed("qa", "join", home / "questions.json", "--words", 200, "--out", train, "--test", test,
                   "--test-questions", 20)  # fmt: skip
    counts = [len(read_questions(path)) for path in (train, test)]
    assert 20 <= counts[1] < 25
    assert sum(counts) == len(read_questions(home / "questions.json"))
    assert f"train.json: {counts[0]} questions, " in result.out
    result = succeed("qa", "join", home / "few.json", "--words", 900, "--out", train)
    assert "12 documents are shorter than 900 words" in caplog.text
    join = ["qa", "join", home / "few.json", "--out"]
    assert "give the file to write them to, with --test" in fail(*join, train, "--test-questions", 9, code=2)
    for more in ([home / "few.json"], [train, "--test", train], [train, "--test", test, "--validation", test]):
        assert "must be different files" in fail(*join, *more, code=2)
    assert read_questions(home / "few.json")
    hotpot = {"_id": "h", "question": "What?", "answer": "no", "supporting_facts": [], "context": [["T", ["A text."]]]}
    (tmp_path / "hotpot.json").write_text(json.dumps([hotpot]))
    assert "is not in SQuAD format" in fail("qa", "join", tmp_path / "hotpot.json", "--out", train, code=2)


def test_weights_of_less_precision_are_trained_in_full(home, tmp_path):
    AutoModel.from_pretrained(home / "model", dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    tokenizer.save_pretrained(tmp_path / "half")
    settings = QuestionSettings(str(tmp_path / "half"), "data", window=40)
    made = train._model(settings, tokenizer, read_questions(home / "few.json"), torch.device("cpu"))
    assert {weight.dtype for weight in made.parameters()} == {torch.float32}
    made.save_pretrained(tmp_path / "made")
    tokenizer.save_pretrained(tmp_path / "made")
    made.to(torch.bfloat16).save_pretrained(tmp_path / "made")
    assert load_question_answering(str(tmp_path / "made"), device="cpu").model.dtype == torch.float32


def test_presets_of_question_answering(home):
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    few, made = read_questions(home / "few.json"), {}
    for preset in (None, "paper", "recommended"):
        settings = QuestionSettings(str(home / "model"), "data", **({} if preset is None else {"preset": preset}))
        made[preset] = train._model(settings, tokenizer, few, torch.device("cpu")).config.recurrence
    assert made["recommended"] == made[None]
    assert (made["paper"].window, made["paper"].find("kv"), made["paper"].find("vector").slots) == (64, None, 1)
    assert (made["recommended"].window, made["recommended"].find("vector")) == (43, None)
    assert made["recommended"].extra_positions == 21


def test_patience_is_not_given_anew(home, tmp_path, monkeypatch):
    """A learning rate that changes nothing: no epoch is better than the first."""

    def run(folder):
        settings = QuestionSettings(str(home / "model"), str(home / "questions.json"), preset="paper", window=40,
                                    epochs=8, patience=2, validation_data=str(home / "few.json"), learning_rate=1e-12,
                                    batch_size=32, max_questions=32)  # fmt: skip
        return train.train(settings, folder, use_cpu=True)["steps"]

    assert run(tmp_path / "whole") == 3
    step = ProgressBarCallback.on_step_end

    def fails(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise RuntimeError("killed")
        step(self, args, state, control, **kwargs)

    monkeypatch.setattr(ProgressBarCallback, "on_step_end", fails)
    with pytest.raises(RuntimeError, match="killed"):
        run(tmp_path / "stopped")
    monkeypatch.setattr(ProgressBarCallback, "on_step_end", step)
    assert run(tmp_path / "stopped") == 3


def test_a_model_trained_without_a_state_answers_without_one(home, trained, tmp_path):
    text = prose.TOPICS[5][:2000]
    (tmp_path / "text.txt").write_text(text)
    model = cf.RecurrentForQuestionAnswering.from_pretrained(home / "alone")
    tokenizer = AutoTokenizer.from_pretrained(home / "alone")
    ask = ["qa", "answer", home / "alone", "--document", tmp_path / "text.txt", "--question", "What?", "--json"]
    given = json.loads(succeed(*ask).out)
    (found,) = cf.answer(model, "What?", text, tokenizer)
    assert found == cf.answer(model, "What?", text, tokenizer, use_state=False)[0]
    assert found.probability == pytest.approx(given[0]["probability"], rel=1e-5)
    with torch.no_grad():
        ids = {"input_ids": torch.arange(3, 90)[None], "question_ids": [[5, 6]]}
        outs = [model(**ids, **more).start_logits for more in ({}, {"use_state": False}, {"use_state": True})]
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_all_are_looked_at_before_one_is_asked(home, trained, tmp_path):
    message = fail("qa", "evaluate", trained, home / "model", "--data", home / "few.json", "--out", tmp_path, code=2)
    assert "has no question-answering head" in message
    assert not list(tmp_path.iterdir())


def test_what_goes_wrong_is_said(home, trained, tmp_path):
    ask = ["qa", "answer", trained, "--document", home / "few.json", "--question"]
    assert "left for the document, and needs 1" in fail(*ask, "Why? " * 60, code=2)
    assert "finds no answers" in fail("qa", "answer", prose_model(tmp_path), *ask[3:], "?", code=2)
    assert "has no question-answering head" in fail("qa", "answer", home / "masked", *ask[3:], "?", code=2)
    (tmp_path / "empty.txt").write_text(" \n")
    assert "empty.txt has no words" in fail(*ask[:3], "--document", tmp_path / "empty.txt", "--question", "?", code=2)
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    latin = fail(*ask[:3], "--document", tmp_path / "latin.txt", "--question", "?", code=2)
    assert "latin.txt is not UTF-8" in latin
    (tmp_path / "other.json").write_text("[1]")
    other = command(home, *PAPER, "--out", tmp_path / "own")
    other[other.index(home / "questions.json")] = tmp_path / "other.json"
    assert "in neither HotpotQA nor SQuAD format" in fail(*other, code=2)
    assert "is recurrent already, with window=" in fail(
        "qa", "train", "--model", trained, "--data", home / "few.json", "--validation-data", home / "few.json",
        "--window", 30, "--out", tmp_path / "own", code=2,
    )  # fmt: skip
    assert "other settings" in fail(*command(home, *PAPER, "--seed", 3, "--out", trained), code=2)
    assert not (tmp_path / "own").exists()


def prose_model(folder):
    """A causal recurrent model."""
    prose.save_model(folder / "plain")
    succeed("add", folder / "plain", "--out", folder / "causal", "--window", 16)
    return folder / "causal"


def test_a_question_that_cannot_be_asked_is_named(home, tmp_path):
    long = questions(3)
    long["data"][0]["paragraphs"][1]["qas"][0]["question"] = "Why? " * 60
    (tmp_path / "long.json").write_text(json.dumps(long))
    for data, validation in (("long", "few"), ("few", "long")):  # before anything is trained
        files = ["--data", data, "--validation-data", validation]
        files = [{"long": tmp_path / "long.json", "few": home / "few.json"}.get(one, one) for one in files]
        arguments = [*files, *TRAIN, *PAPER, "--out", tmp_path / "own"]
        message = fail("qa", "train", "--model", home / "model", *arguments, code=2)
        assert "question 1-5 has" in message
        assert not (tmp_path / "own").exists()


def test_lost_answers_are_counted(home, tmp_path):
    some = questions(4)
    some["data"][0]["paragraphs"][2]["qas"][0]["answers"][0]["text"] = "nowhere at all"
    (tmp_path / "some.json").write_text(json.dumps(some))
    result = succeed(
        "qa", "train", "--model", home / "model", "--data", tmp_path / "some.json", "--validation-data",
        home / "few.json", *PAPER, "--epochs", 1, "--out", tmp_path / "own",
    )  # fmt: skip
    assert "1 whose answer is not in the document are left out" in result.err
    record = json.loads((tmp_path / "own/run.json").read_text())
    assert record["lost"] == ["2-5"]
    assert f"own: {record['questions']} questions" in result.out, "those that were trained on"
    assert record["questions"] == len(read_questions(tmp_path / "some.json")) - 1


def test_position_offsets_are_measured_before_they_are_trained(home, tmp_path):
    """Keys and values are the default."""
    out = tmp_path / "own"
    result = succeed(*command(home, "--window", 50, "--recent", 8, "--out", out))
    assert "memory: keys and values of the 8 most recent positions and the first 4. Carried keys" in result.err
    model = cf.RecurrentForQuestionAnswering.from_pretrained(out)
    assert model.config.recurrence.memories == (cf.KVMemoryConfig(recent=8, sinks=4),)
    assert model.memory.kv.position_offsets.abs().mean() > 1e-3


def test_windows_may_see_both_neighbours(home, tmp_path):
    sides = ["--right", 6, "--sinks", 2, "--group-windows", 3]
    result = succeed(*command(home, "--window", 40, *sides, "--out", tmp_path / "own"))
    assert "the 4 most recent positions and the first 2, and of 6 that follow, in groups of 3 windows" in result.err
    model = cf.RecurrentForQuestionAnswering.from_pretrained(tmp_path / "own")
    assert model.config.recurrence.memories == (cf.KVMemoryConfig(4, 2, right=6, group_windows=3),)
    (tmp_path / "text.txt").write_text(prose.TOPICS[0][:600])
    answer = ["--question", "What follows the?", "--document", tmp_path / "text.txt", "--json"]
    assert json.loads(succeed("qa", "answer", tmp_path / "own", *answer).out)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"right": -1}, "--right -1: it must be at least 0"),
        ({"right": 4, "group_windows": 1}, "--group-windows 1: it must be at least 2"),
        ({"group_windows": 4}, "--group-windows 4: without --right windows see nothing after them. Give --right"),
        ({"epochs": 0}, "--epochs 0: it must be above 0"),
        ({"patience": 0}, "--patience 0: it must be at least 1"),
        ({"preset": "papr"}, "--preset papr: it must be one of recommended, paper"),
        ({"slots": 2}, "--slots is an option of the memory vector, and the memory is kv. Use --memory vector"),
        ({"recurrence": False, "recent": 2}, "--recent: no effect with --no-recurrence"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        QuestionSettings("model", "data", **settings)


def test_the_settings_know_all_choices():
    assert {kind for kinds in PRESET_MEMORIES.values() for kind in kinds} <= set(MEMORY_KINDS)
    for settings in (RecurrentSettings, QuestionSettings):
        for field in dataclasses.fields(settings):
            for kind in _owners(field):  # kinds of memory that it belongs to
                known = {"reach"}  # which becomes fields where the model is known
                assert field.name in known | {*MEMORY_KINDS[kind].__dataclass_fields__}, field.name
    assert cf.RecurrenceConfig().find("kv").sinks == DEFAULT_SINKS
    assert MAX_ANSWER_TOKENS == predict.MAX_TOKENS
    assert get_args(graph_cache.FastPath) == FAST_PATHS


def test_an_answer_without_tokens_is_lost(home, tmp_path):
    """Some tokenizers drop characters: what an answer is made of may not be there."""
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    tokenizer.backend_tokenizer.normalizer = Replace("\u200b", "")
    model = cf.add_recurrence(
        BertModel.from_pretrained(home / "model"), tokenizer=tokenizer, head="question-answering", memory="vector"
    )
    asked = [
        Question(name, "What?", "The \u200b sign.", (Answer(text, start),), "span", "squad")
        for name, text, start in (("there", "sign", 6), ("gone", "\u200b", 4))
    ]
    arguments = QuestionTrainingArguments(str(tmp_path), use_cpu=True)
    trainer = QuestionTrainer(model, arguments, asked, tokenizer=tokenizer)
    assert trainer.lost == ["gone"]
    assert len(trainer.train_dataset) == 1


def test_training_begins_with_the_kinds_of_answers_there_are(home, trained, tmp_path):
    """Not with all alike, nor with spans alone, which few questions without an answer would be slow to unlearn."""
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    model = cf.add_recurrence(
        BertModel.from_pretrained(home / "model"), tokenizer=tokenizer, head="question-answering", memory="vector"
    )
    span = Question("a", "What?", "The sign.", (Answer("sign", 4),), "span", "squad")
    none = Question("b", "What?", "The sign.", (), "none", "squad")
    arguments = QuestionTrainingArguments(str(tmp_path), use_cpu=True)
    for asked, expected in ([span, span, none], [2 / 3, 0.02, 0.02, 1 / 3]), ([span], [1, 0.02, 0.02, 0.02]):
        QuestionTrainer(model, arguments, asked, tokenizer=tokenizer)
        assert not model.predicts_kinds
        torch.testing.assert_close(model.kinds.bias.exp(), torch.tensor(expected))
    before = load_question_answering(str(trained)).model  # has learned them already
    after = load_question_answering(str(trained)).model
    QuestionTrainer(after, arguments, [none], tokenizer=tokenizer)
    assert after.predicts_kinds
    assert torch.equal(before.kinds.bias, after.kinds.bias)


@pytest.mark.parametrize("preset", ["recommended", "paper"])
def test_both_models_start_alike(home, preset):
    """The plain baseline differs in the state alone: the same weights at first, the same windows."""
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    few, made = read_questions(home / "few.json"), []
    for recurrence in (True, False):
        set_seed(3)
        settings = QuestionSettings(str(home / "model"), "data", preset=preset, recurrence=recurrence)
        made.append(train._model(settings, tokenizer, few, torch.device("cpu")))
    assert (
        made[0].config.recurrence.window == made[1].config.recurrence.window == {"recommended": 43, "paper": 64}[preset]
    )
    if preset == "paper":
        assert made[0].config.recurrence == made[1].config.recurrence
    assert [model.config.use_state for model in made] == [True, False]
    parameters = [
        {name: value for name, value in model.named_parameters() if preset == "paper" or not name.startswith("memory.")}
        for model in made
    ]
    assert parameters[0].keys() == parameters[1].keys()
    for name, value in parameters[0].items():
        assert torch.equal(value, parameters[1][name]), name


def test_other_models_are_refused(tmp_path):
    arguments = QuestionTrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(ValueError, match="model is a Linear: QuestionTrainer needs a question-answering model"):
        QuestionTrainer(torch.nn.Linear(2, 2), arguments, [], tokenizer=None)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_settings_that_are_shipped_can_be_used(path):
    given = {"model": "encoder", "data": "questions.json", **yaml.safe_load(path.read_text())}
    assert QuestionSettings(**given).epochs >= 3
    assert len(SHIPPED) == 2


def test_predictions_of_a_trainer_are_answers(home, trained, tmp_path):
    loaded, asked = load_question_answering(str(trained)), cf.read_questions(home / "few.json")
    args = cf.QuestionTrainingArguments(str(tmp_path), use_cpu=True)
    trainer = cf.QuestionTrainer(loaded.model, args, asked, tokenizer=loaded.tokenizer)
    out = trainer.predict(asked)
    expected = [cf.answer(loaded.model, one.question, one.document, loaded.tokenizer)[0] for one in asked]
    places = [[(one.start, one.end, one.kind) for one in some] for some in (out.predictions, expected)]
    assert places[0] == places[1]
    assert out.metrics == {name.replace("eval", "test"): value for name, value in trainer.evaluate(asked).items()}
