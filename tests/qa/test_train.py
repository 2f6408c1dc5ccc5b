# SPDX-License-Identifier: Apache-2.0
"""`carryforward qa train`: the memory of a trained model, by default and with the paper's preset."""

import copy
import dataclasses
import json

import pytest
import torch
from helpers import prose
from helpers.commands import fail, succeed
from helpers.trainers import Watch, assert_identical, weights
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, BertConfig, BertModel

import carryforward as cf
from carryforward.models.add_recurrence import recurrence_of
from carryforward.training import base_trainer

WIDTH, POSITIONS = 16, 128


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with an encoder, its tokenizer, and questions."""
    folder = tmp_path_factory.mktemp("qa")
    tokenizer = prose.tokenizer()
    tokenizer.add_special_tokens({"cls_token": "<|cls|>", "sep_token": "<|sep|>"})
    special = [("<|cls|>", tokenizer.cls_token_id), ("<|sep|>", tokenizer.sep_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|cls|> $A <|sep|>", pair="<|cls|> $A <|sep|> $B:1 <|sep|>:1", special_tokens=special
    )
    tokenizer.save_pretrained(folder / "encoder")
    torch.manual_seed(0)
    BertModel(encoder_config(POSITIONS, len(tokenizer))).save_pretrained(folder / "encoder")
    (folder / "questions.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs()}]}))
    return folder


def encoder_config(positions, vocabulary=prose.VOCABULARY):
    return BertConfig(
        vocab_size=vocabulary, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=positions,
    )  # fmt: skip


def paragraphs():
    """Beginnings of topics with a question each, which their fifth word answers."""
    data = []
    for number, topic in enumerate(prose.TOPICS[:8]):
        words = topic[:1500].split()
        answer = {"text": words[4], "answer_start": len(" ".join(words[:4])) + 1}
        question = {"id": str(number), "question": f"After {words[3]}?", "answers": [answer]}
        data.append({"context": " ".join(words), "qas": [question]})
    return data


def train(home, out, *options):
    """Run the command; returns the trained model and what the command said."""
    data = ["--data", home / "questions.json", "--validation-data", home / "questions.json"]
    result = succeed("qa", "train", "--model", home / "encoder", *data, "--epochs", 1, "--device", "cpu",
                     "--out", out, *options)  # fmt: skip
    return cf.RecurrentForQuestionAnswering.from_pretrained(out), " ".join(result.err.split())


def test_the_default_carries_keys_and_values(home, tmp_path):
    model, messages = train(home, tmp_path / "run")
    recurrence = model.config.recurrence
    assert [memory.kind for memory in recurrence.memories] == ["kv"]
    kv = recurrence.find("kv")
    assert (recurrence.window, kv.recent, kv.sinks) == (85, 38, 4)  # together all positions of the encoder but one
    assert len(recurrence.prefix) == len(recurrence.separator) == len(recurrence.suffix) == 1
    assert "windows of 85 tokens" in messages
    assert "memory: keys and values of the 38 most recent positions and the first 4." in messages
    assert model.memory.kv.position_offsets.abs().mean() > 1e-3, "measured before training"
    assert model.config.use_state
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["settings"]["preset"], record["circumstances"]["window"]) == ("recommended", 85)


def test_the_preset_paper_carries_the_vector_of_section_5_4(home, tmp_path):
    model, messages = train(home, tmp_path / "run", "--preset", "paper")
    recurrence = model.config.recurrence
    assert recurrence.memories == (cf.VectorMemoryConfig(pooled_layers="last", hidden_sizes=(WIDTH,)),)
    assert recurrence.window == POSITIONS
    assert f"windows of {POSITIONS} tokens" in messages
    assert "memory: 1 pooled vector a window (the paper's memory)." in messages
    assert json.loads((tmp_path / "run" / "run.json").read_text())["settings"]["preset"] == "paper"


@pytest.mark.parametrize(("positions", "window"), [(128, 128), (512, 512), (600, 512)])
def test_the_papers_window_has_up_to_512_tokens(positions, window):
    recurrence = recurrence_of(encoder_config(positions), preset="paper", question_answering=True)
    assert recurrence.window == window


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (["--memory", "vector"], [{"pooled_layers": "last", "hidden_sizes": (WIDTH,)}]),
        (["--preset", "paper", "--pooled-layers", "all"], [{"pooled_layers": "all", "hidden_sizes": (WIDTH,)}]),
        (["--recent", 8, "--sinks", 0], [{"recent": 8, "sinks": 0}]),
        (["--memory", "kv", "vector", "--recent", 8], [{"pooled_layers": "last"}, {"recent": 8}]),
    ],
    ids=str,
)
def test_options_of_the_memory(home, tmp_path, options, fields):
    model, _ = train(home, tmp_path / "run", "--max-questions", 2, *options)
    memories = model.config.recurrence.memories
    assert len(memories) == len(fields)
    for memory, expected in zip(memories, fields, strict=True):
        assert {name: getattr(memory, name) for name in expected} == expected


def test_options_of_another_memory_are_refused(home, tmp_path):
    command = ["qa", "train", "--model", home / "encoder", "--data", home / "questions.json", "--out", tmp_path / "run"]
    assert "--slots is an option of the memory vector, and the memory is kv" in fail(*command, "--slots", 2, code=2)
    assert "--recent is an option of the memory kv" in fail(*command, "--preset", "paper", "--recent", 8, code=2)
    assert not (tmp_path / "run").exists()


# --- windows side by side --------------------------------------------------------------------------------------------


def test_the_number_of_windows_side_by_side_is_recorded(home, tmp_path):
    model, _ = train(home, tmp_path / "given", "--max-questions", 2, "--block-windows", 3)
    assert model.config.recurrence.block_windows == 3
    train(home, tmp_path / "auto", "--max-questions", 2, "--seed", 1)
    train(home, tmp_path / "waiting", "--max-questions", 2, "--preset", "paper")
    records = {path.name: json.loads((path / "run.json").read_text()) for path in tmp_path.iterdir()}
    assert (records["given"]["block_windows"], records["waiting"]["block_windows"]) == (3, 1)
    assert records["auto"]["block_windows"] > 1


def test_resumed_with_other_memory_equals_never_stopped(home, tmp_path, monkeypatch):
    """With dropout, whose random numbers are drawn block by block."""
    tokenizer = AutoTokenizer.from_pretrained(home / "encoder")
    questions = cf.read_questions(home / "questions.json")[:4]
    made = cf.add_recurrence(
        BertModel.from_pretrained(home / "encoder"), tokenizer=tokenizer, head="question-answering", window=60,
        documents=[range(9, 99)] * 128,
    )  # fmt: skip

    def stop(state, control):
        control.should_training_stop = state.global_step == 1

    def run(folder, measured, *callbacks, block_windows="auto"):
        monkeypatch.setattr(base_trainer, "measure_block_windows", lambda model, rows: measured)
        model = copy.deepcopy(made)
        model.config.recurrence = dataclasses.replace(made.config.recurrence, block_windows=block_windows)
        args = cf.QuestionTrainingArguments(
            str(folder), num_train_epochs=1, per_device_train_batch_size=2, use_cpu=True, save_strategy="steps",
            save_steps=1, load_best_model_at_end=False, learning_rate=1e-3, report_to="none", disable_tqdm=True,
        )  # fmt: skip
        job = cf.QuestionTrainer(model, args, questions, tokenizer=tokenizer, callbacks=[*callbacks])
        job.train(resume_from_checkpoint=True)
        return weights(job.model)

    whole, other = run(tmp_path / "whole", 2), run(tmp_path / "other", 1)
    run(tmp_path / "stopped", 2, Watch(stop))
    with pytest.raises(ValueError, match=r"was trained with 2 .* has 1"):
        run(tmp_path / "stopped", 2, block_windows=1)
    assert_identical(run(tmp_path / "stopped", 1), whole)
    assert any(not torch.equal(other[name], whole[name]) for name in whole)
