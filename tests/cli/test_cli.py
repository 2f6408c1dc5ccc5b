# SPDX-License-Identifier: Apache-2.0
"""The command line as people use it: train, evaluate, report, and what is said when something is wrong."""

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import transformers
from helpers import prose
from safetensors import SafetensorError

import carryforward
from carryforward.cli.main import main
from carryforward.models import causal_lm
from carryforward.training import callbacks
from carryforward.training.callbacks import GracefulStopCallback

WINDOW = 12
TRAIN = ["--window", WINDOW, "--windows-per-sample", 3, "--batch-size", 2, "--train-tokens", 600, "--eval-tokens", 300]


class Told(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


def run(*arguments):
    """A command, in this process."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            main([str(argument) for argument in arguments])
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    assert "Traceback" not in err.getvalue()
    return Told(code, out.getvalue(), err.getvalue())


def succeed(*arguments):
    told = run(*arguments)
    assert told.code == 0, told.err
    return told


def fail(*arguments, code):
    """A command that must end with `code` and a message; the message, on one line."""
    told = run(*arguments)
    assert told.code == code, told
    assert told.out == ""
    return " ".join(told.err.replace("│", " ").split())


def into_a_closed_pipe(*arguments):
    """A command whose reader has gone: it must end without a word."""
    read, written = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "carryforward", *map(str, arguments)]
    done = subprocess.run(command, stdout=written, stderr=subprocess.PIPE, text=True, timeout=100)
    os.close(written)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    """A folder with a model, texts and a cache of their tokens."""
    folder = tmp_path_factory.mktemp("home")
    prose.save_model(folder / "model")
    prose.save_topics(folder / "texts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CARRYFORWARD_CACHE", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="session")
def trained(home):
    """A finished run, made once: only to be read."""
    told = succeed("train", "--model", home / "model", "--data", home / "texts", *TRAIN, "--out", home / "run")
    assert told.out.startswith(f"{home / 'run'}: 6"), told.out
    assert "word perplexity" in told.out
    return home / "run"


@pytest.fixture
def train(home, tmp_path):
    """The arguments of a training run of one's own, and its folder."""
    return ["train", "--model", home / "model", "--data", home / "texts", *TRAIN, "--out", tmp_path / "own"]


def evaluation(model, home, *more):
    return ["evaluate", model, "--data", home / "texts", *more]


def test_a_run_that_only_warms_up_is_told_so(train):
    assert "steps in all, and 100 of warm-up: the learning rate stays small" in succeed(*train, "--no-validation").err
    again = [*train[:-1], f"{train[-1]}-2", "--warmup-steps", 2]
    assert "of warm-up" not in succeed(*again, "--no-validation").err


# --- help and flags ------------------------------------------------------------------------------------------------


def test_a_preset(home, tmp_path):
    base = ["train", "--data", home / "texts", *TRAIN, "--preset"]
    told = succeed(*base, "kept", "--model", home / "model", "--out", tmp_path / "run")
    assert " tokens, validation word perplexity " in told.out
    model = causal_lm.RecurrentForCausalLM.from_pretrained(tmp_path / "run")
    recurrence = model.config.recurrence
    assert (recurrence.slots, recurrence.kept, recurrence.sinks) == (0, 3, 3)
    assert model.recurrence.keeping.places.abs().mean() > 1e-3, "measured before training"
    assert "--preset other: it is one of paper, kept" in fail(*base, "other", "--out", tmp_path / "own", code=2)
    refused = fail(*base, "kept", "--model", tmp_path / "run", "--out", tmp_path / "own", code=2)
    assert "is recurrent already. Leave --preset out" in refused


@pytest.mark.parametrize("verb", ["", "train", "evaluate", "topics", "flops", "report"])
def test_help_needs_no_torch(verb):
    code = (
        "import sys; from carryforward.cli.main import main\n"
        f"try: main([*{verb.split()}, '--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'datasets'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Usage: carryforward" in done.stdout


@pytest.mark.parametrize(
    ("given", "overlaps"),
    [
        (["--overlap", "0", "5", "10"], [0, 5, 10]),
        (["--overlap", "0", "--overlap", "5"], [0, 5]),
        (["--overlap=0", "5"], [0, 5]),
        (["--overlap=0", "--overlap=5"], [0, 5]),
        ([], [0]),
    ],
)
def test_an_option_takes_several_numbers(home, given, overlaps):
    for arguments in (
        ["--model", home / "model", "--window", 16, *given],
        [*given, "--window=16", f"--model={home / 'model'}"],
    ):
        rows = json.loads(succeed("flops", "--json", *arguments).out)
        assert [row["overlap"] for row in rows] == overlaps


def test_numbers_end_where_the_models_begin(trained, home):
    results = json.loads(succeed("evaluate", "--overlap", 0, 3, trained, "--data", home / "texts", "--json").out)
    assert [row["overlap"] for row in results[0]["rows"]] == [0, 3, 0, 3]
    assert [row["untrained_overlap"] for row in results[0]["rows"]] == [False, True, False, True]


def test_negative_numbers_are_values_not_options(trained, home):
    assert "overlap=-1 must be at least 0" in fail(*evaluation(trained, home, "--overlap", -1), code=2)
    assert "overlap=-1 must be at least 0" in fail(*evaluation(trained, home, "--overlap=0", -1), code=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data"], "Option '--data' requires an argument"),
        (["--data", "x", "--overlap", "many"], "Invalid value for '--overlap'"),
        (["--data", "x", "--frobnicate"], "No such option"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments, message):
    assert message in fail("evaluate", "model", *arguments, code=2)
    assert "No such command 'frobnicate'" in fail("frobnicate", code=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", 0], "--batch-size 0: it must be at least 1"),
        (["--learning-rate", 1e-4, 0], "--learning-rate 0.0001 0.0: rates are numbers above 0"),
        (["--epochs", 0], "--epochs 0.0: it must be above 0"),
        (["--warmup-steps", -1], "--warmup-steps -1: it must be at least 0"),
        (["--insert-at", "last"], "--insert-at last: give layer numbers from 1, or all"),
        (["--no-recurrence", "--freeze-base"], "choose one"),
        (["--device", "tpu"], "--device tpu: training runs on the best device there is, or on cpu"),
    ],
)
def test_settings_that_make_no_sense_leave_no_run_behind(train, arguments, message):
    assert message in fail(*train, *arguments, code=2)
    assert not train[-1].exists()


# --- config files --------------------------------------------------------------------------------------------------


def test_a_config_file_with_flags_on_top(trained, home, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(f"data: {home / 'texts'}\nsplit: validation\noverlap: [0, 2]\nbatch-size: 3\njson: true\n")
    (result,) = json.loads(succeed("evaluate", trained, "--config", config, "--overlap", 5, "--no-control").out)
    assert result["data"]["split"] == "validation"
    assert result["settings"]["batch_size"] == 3
    assert [row["overlap"] for row in result["rows"]] == [5], "the flag wins"
    config.write_text(f"models: {trained}\ndata: {home / 'texts'}\noverlap: 2\ncontrol: no\n")
    assert "| 2\\* |" in succeed("evaluate", "--config", config).out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("data: x\nbatchsize: 3", "'batchsize' is not a setting of this command. It has: "),
        ("data: x\nconfig: other.yaml", "'config' is not a setting"),
        ("data: x\nbatch_size: many", "Invalid value for '--batch-size'"),
        ("data: [x, y]", "data must be a single value, not ['x', 'y']"),
        ("data: {x: y}", "data must be a single value, not {'x': 'y'}"),
        ("- data", "must hold `name: value` lines"),
        ("data: x: y", "cannot be read"),
    ],
)
def test_a_wrong_config_file_is_refused_by_name(tmp_path, content, message):
    config = tmp_path / "c.yaml"
    config.write_text(content)
    assert message in fail("evaluate", "model", "--config", config, code=2)


def test_a_missing_config_file(tmp_path):
    assert "No such file" in fail("train", "--config", tmp_path / "none.yaml", code=2)


# --- train, evaluate, report ---------------------------------------------------------------------------------------


def test_from_a_folder_of_text_to_a_table(trained, home, tmp_path):
    arguments = ["--window", WINDOW, "--overlap", 0, 3, "--out", tmp_path / "results"]
    told = succeed("evaluate", trained, home / "model", "--data", home / "texts", *arguments)
    written = {path.suffix: path for path in (tmp_path / "results").iterdir() if path.suffix != ".json"}
    assert (tmp_path / "results" / "table.md").read_text().strip() == told.out.strip()
    assert {".md", ".csv"} <= written.keys()
    assert told.out.count(str(trained)) == told.out.count(str(home / "model")) == 2
    assert succeed("report", tmp_path / "results", "--out", tmp_path / "again").out.strip() == told.out.strip()
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
    assert result["model"]["base"] == str(home / "model")
    assert [row["use_state"] for row in result["rows"]] == [True, False]


def test_two_splits_in_one_folder_do_not_overwrite_each_other(trained, home, tmp_path):
    for split in ("validation", "test"):
        succeed(*evaluation(trained, home, "--split", split, "--no-control", "--out", tmp_path))
    assert len(list(tmp_path.glob("*.json"))) == 2


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
        told = fail(*evaluation(other, home, trained, "--no-control", *more, "--out", tmp_path), code=2)
        assert message in told
        assert "evaluating" not in told
    assert not list(tmp_path.glob("*.json"))


def test_validation_data_without_splits_is_read_whole(train, home, tmp_path):
    text = b"a few words that are held out, and some more of them"
    texts = write(tmp_path / "held", **{f"t{i}": text for i in range(30)})
    told = succeed(*train, "--validation-data", texts)
    assert "validation: held, 30 documents" in told.err
    (tmp_path / "one.txt").write_bytes(text)
    again = [*train[:-1], f"{train[-1]}-2"]
    assert "validation: one, 1 document," in succeed(*again, "--validation-data", tmp_path / "one.txt").err


def test_what_is_of_training_may_change(trained, train):
    again = ["train", "--model", trained, *train[3:]]
    succeed(*again, "--keep-windows", 0, "--bptt-windows", 2)
    recurrence = json.loads((Path(train[-1]) / "config.json").read_text())["recurrence"]
    assert (recurrence["keep_windows"], recurrence["bptt_windows"]) == (0, 2)
    assert "is recurrent already, with slots=1" in fail(*again[:-1], f"{train[-1]}-2", "--slots", 2, code=2)


def test_one_text_is_scored_whole(trained, home, tmp_path):
    text = tmp_path / "letter.txt"
    text.write_text("a b c d e f g h " * 20)
    for command in (("evaluate", trained), ("horizon", trained, "--depth", 1)):
        (result,) = json.loads(run(*command, "--data", text, "--json").out)
        assert result["data"]["split"] == "all"
        assert result["data"]["documents"] == 1
    assert "has no split 'test', only 'train'" in fail("evaluate", trained, "--data", text, "--split", "test", code=2)


def test_a_plain_model_is_trained_in_the_same_loop(train, home, tmp_path):
    record = json.loads(succeed(*train, "--no-recurrence", "--json").out)
    own = train[-1]
    assert record["status"] == "finished"
    model = transformers.AutoModelForCausalLM.from_pretrained(own)
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert not torch.equal(
        model.lm_head.weight, transformers.AutoModelForCausalLM.from_pretrained(home / "model").lm_head.weight
    )
    (result,) = json.loads(succeed(*evaluation(own, home, "--json")).out)
    assert result["model"]["window"] == WINDOW, "as it was trained"
    assert [row["use_state"] for row in result["rows"]] == [False]


def test_the_same_command_again_is_finished(trained, home):
    before = (trained / "model.safetensors").read_bytes()
    again = succeed("train", "--model", home / "model", "--data", home / "texts", *TRAIN, "--out", trained)
    assert f"{trained} is finished already" in again.err
    assert (trained / "model.safetensors").read_bytes() == before


def test_other_settings_in_the_same_folder_are_refused(trained, home):
    other = ["--model", home / "model", "--data", home / "texts", *TRAIN, "--out", trained, "--seed", 7, "--slots", 2]
    message = fail("train", *other, code=2)
    assert "seed: 0 there, 7 here" in message
    assert "slots: None there, 2 here" in message
    assert "Use another --out" in message


@pytest.fixture
def interrupted(monkeypatch):
    """A command that gets a Ctrl-C in its third step; its message."""

    def run_interrupted(*arguments):
        show = callbacks.Show.on_step_end

        def on_step_end(self, args, state, *rest, **kwargs):
            show(self, args, state, *rest, **kwargs)
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGINT)

        with monkeypatch.context() as patch:
            patch.setattr(callbacks.Show, "on_step_end", on_step_end)
            return fail(*arguments, code=130)

    return run_interrupted


def test_ctrl_c_saves_and_the_same_command_goes_on(train, interrupted):
    own = train[-1]
    assert f"saved in {own}. To go on, give the same command again" in interrupted(*train)
    (checkpoint,) = own.glob("checkpoint-*")
    assert f"newest checkpoint is {checkpoint}" in fail("evaluate", own, "--data", "x", code=2)
    assert json.loads(succeed(*train, "--json").out)["status"] == "finished"


# --- bad input -----------------------------------------------------------------------------------------------------


def write(folder, **files):
    folder.mkdir()
    for name, content in files.items():
        (folder / f"{name}.txt").write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "there is no text in this folder. Accepted: "),
        ({"a": b" ", "b": b"\n", "c": b""}, "every document is empty or only white space"),
        ({"a": b"caf\xe9", "b": b"caf\xe9", "c": b"caf\xe9"}, "is not UTF-8 (byte 0xe9 at offset 3). Convert it"),
        ({"a": b"x", "b": b"x", "c": b"x"}, "no document has a second token to validate on"),
        ({"a": b"only one"}, "has no validation split (it has: train). Give --validation-data, or --no-validation"),
    ],
)
def test_texts_that_cannot_be_used(home, tmp_path, files, message):
    texts = write(tmp_path / "texts", **files)
    told = fail("train", "--model", home / "model", "--data", texts, *TRAIN, "--out", tmp_path / "own", code=2)
    assert message in told
    assert "texts" in told or "documents" in told


def test_nothing_to_score_and_missing_splits(trained, tmp_path):
    texts = write(tmp_path / "texts", a=b"x", b=b"x", c=b"x")
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
        (["--device", "tpu"], "--device tpu cannot be used: Expected one of cpu, cuda"),
    ],
)
def test_evaluations_that_make_no_sense(trained, home, arguments, message):
    assert message in fail(*evaluation(trained, home, *arguments), code=2)


def test_results_need_a_folder_before_the_work_begins(home, tmp_path):
    (tmp_path / "file").write_text("")
    for arguments in (evaluation("no-such-model", home), ["report", home]):
        assert "is a file" in fail(*arguments, "--out", tmp_path / "file", code=2)
    message = fail(*evaluation("no-such-model", home), "--out", tmp_path / "file" / "deep", code=1)
    assert "Not a directory" in message


def test_a_plain_model_reads_as_many_tokens_as_it_has_positions(home, tmp_path):
    (result,) = json.loads(run(*evaluation(home / "model", home), "--json").out)
    assert result["model"]["window"] == 32
    shape = {"n_positions": 2048, "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": prose.VOCABULARY}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).save_pretrained(tmp_path / "long")
    prose.tokenizer().save_pretrained(tmp_path / "long")
    assert "say with --window how many tokens" in fail(*evaluation(tmp_path / "long", home), code=2)
    assert "has 32 positions" in fail(*evaluation(home / "model", home, "--window", 33), code=2)


def test_models_that_are_not_there(home, tmp_path):
    for arguments in (
        ["evaluate", tmp_path / "none", "--data", home / "texts"],
        ["flops", "--model", tmp_path / "none"],
    ):
        assert f"model '{tmp_path / 'none'}': there is no such folder" in fail(*arguments, code=2)
    assert "holds no model (config.json is missing)" in fail(*evaluation(home / "texts", home), code=2)
    assert "model 'no-such-model' is no folder here" in fail(*evaluation("no-such-model", home), code=1)


@pytest.mark.parametrize("kind", ["plain", "recurrent"])
def test_weights_cut_short(trained, home, tmp_path, kind):
    copy = shutil.copytree(trained if kind == "recurrent" else home / "model", tmp_path / "copy")
    os.truncate(copy / "model.safetensors", 1000)
    message = fail(*evaluation(copy, home, "--window", WINDOW), code=2)
    assert f"{copy}" in message
    assert "a weights file is cut short or damaged" in message


def test_a_damaged_record(trained, home, tmp_path):
    copy = shutil.copytree(trained, tmp_path / "copy")
    (copy / "run.json").write_text('{"kind": "run", "sett')
    assert f"{copy / 'run.json'} is damaged" in fail(*evaluation(copy, home), code=2)
    again = ["train", "--model", home / "model", "--data", home / "texts", *TRAIN, "--out", copy]
    assert f"{copy / 'run.json'} is damaged" in fail(*again, code=2)
    assert (copy / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()


def test_a_folder_that_is_not_a_run(train):
    own = write(train[-1], notes=b"precious")
    assert f"--out {own} exists and is not a run of carryforward. Use another folder." in fail(*train, code=2)
    assert [path.name for path in own.iterdir()] == ["notes.txt"]


def test_a_damaged_result(tmp_path):
    result = tmp_path / "result.json"
    result.write_text('{"kind": "evaluation", "rows": [')
    message = fail("report", result, code=2)
    assert f"{result} is not JSON, or cut short" in message
    assert "Run its evaluation again" in message
    result.write_text('{"kind": "evaluation", "rows": []}')
    assert "model lacks name" in fail("report", result, code=2)


def test_no_room_for_tokens(train, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("CARRYFORWARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(np, "savez", full)
    message = fail(*train, code=1)
    assert f"The disk is full: the tokens of texts (train) need about 1 MB in {tmp_path / 'cache'}" in message
    assert not list((tmp_path / "cache").iterdir())


def test_no_room_for_a_checkpoint_and_then_some(train, monkeypatch):
    """The second save fails as safetensors does; the first stays, and the same command goes on from it."""
    save, saved = causal_lm.RecurrentForCausalLM.save_pretrained, []

    def full(self, directory, **kwargs):
        saved.append(directory)
        if len(saved) > 1:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save(self, directory, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(causal_lm.RecurrentForCausalLM, "save_pretrained", full)
        message = fail(*train, "--save-tokens", 100, code=1)
    assert "The disk is full" in message
    assert "give the same command again: what was saved is whole" in message
    (checkpoint,) = train[-1].glob("checkpoint-*")
    evaluate = ["evaluate", checkpoint, "--data", train[4], "--no-control", "--json"]
    (result,) = json.loads(succeed(*evaluate).out)
    assert result["model"]["base"] == str(train[2]), "a checkpoint knows its run"
    assert json.loads(succeed(*train, "--save-tokens", 100, "--json").out)["status"] == "finished"


def test_a_checkpoint_cut_short_is_passed_over(train, interrupted, caplog):
    interrupted(*train, "--save-tokens", 50)
    *_, newest = sorted(train[-1].glob("checkpoint-*"))
    os.truncate(newest / "optimizer.pt", 100)
    assert json.loads(succeed(*train, "--save-tokens", 50, "--json").out)["status"] == "finished"
    assert f"{newest} is incomplete and is passed over" in caplog.text


def test_weights_that_are_not_numbers(home, tmp_path):
    bad = shutil.copytree(home / "model", tmp_path / "bad")
    model = transformers.AutoModelForCausalLM.from_pretrained(bad)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[0, 0] = torch.nan
    model.save_pretrained(bad)
    train = ["train", "--model", bad, "--data", home / "texts", *TRAIN, "--out", tmp_path / "own"]
    assert "norm became nan at step 1" in fail(*train, code=1)
    message = fail(*evaluation(bad, home, "--window", WINDOW, "--json"), code=1)
    assert f"{bad} gives no finite likelihoods at overlap 0: its weights hold NaN" in message


def test_a_loss_that_explodes_leaves_what_was_saved(train):
    arguments = ["--learning-rate", 1e30, "--warmup-steps", 0, "--max-grad-norm", 0, "--save-tokens", 20]
    message = fail(*train, *arguments, code=1)
    assert "became" in message
    assert "Use a smaller learning rate" in message
    assert list(train[-1].glob("checkpoint-*"))


def test_a_learning_rate_that_diverges_is_passed_over(train):
    arguments = ["--learning-rate", 1e-3, 1e30, "--warmup-steps", 0, "--search-tokens", 100, "--json"]
    record = json.loads(succeed(*train, *arguments).out)
    assert [trial["rates"][0] for trial in record["search"]] == [1e-3, 1e30]
    assert record["search"][1]["word_perplexity"] is None
    assert record["chosen"]["learning_rate"] == 1e-3


def test_a_run_does_not_go_on_with_other_data(train, home, tmp_path, monkeypatch):
    texts = shutil.copytree(home / "texts", tmp_path / "texts")
    command = [texts if argument == home / "texts" else argument for argument in train]
    monkeypatch.setattr("carryforward.training.train.train_until_done", _interrupt)
    fail(*command, code=130)
    monkeypatch.undo()
    (texts / "more.txt").write_text("More of it. " * 50)
    assert "belongs to a run with other data or processes" in fail(*command, code=2)


def _interrupt(*args):
    raise KeyboardInterrupt


def test_a_corrected_command_may_use_the_folder(train, home):
    assert "choose one" in fail(*train, "--carry-state", "--no-recurrence", code=2)
    assert "frobnicate is not supported" in fail(*train, "--report-to", "frobnicate", code=2)
    succeed(*train)


def test_a_checkpoint_of_a_plain_run_is_a_plain_model(train, home):
    succeed(*train, "--no-recurrence", "--save-tokens", 100)
    checkpoint = sorted(train[-1].glob("checkpoint-*"))[0]
    (result,) = json.loads(succeed(*evaluation(checkpoint, home, "--json")).out)
    assert not result["model"]["recurrent"]


def test_other_evaluations_do_not_overwrite_each_other(trained, home, tmp_path):
    for overlap in (0, 3):
        succeed(*evaluation(trained, home, "--overlap", overlap, "--no-control", "--out", tmp_path))
    assert len(list(tmp_path.glob("*.json"))) == 2
    assert "| 3" in (tmp_path / "table.md").read_text()
    assert "| 0 |" in (tmp_path / "table.md").read_text()


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


def test_a_model_in_a_runs_folder_is_not_that_runs(tmp_path, monkeypatch):
    """Only checkpoints are: `evaluate gpt2` may be called from anywhere."""
    from carryforward.models.loading import _run_of

    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.json").write_text('{"kind": "run"}')
    (tmp_path / "checkpoint-5").mkdir()
    for name, known in (("gpt2", False), (".", True), ("checkpoint-5", True), (str(tmp_path / "checkpoint-5"), True)):
        assert (_run_of(name) is not None) is known, name


@pytest.mark.parametrize("command", ["evaluate", "generate", "inspect", "train", "add"])
def test_an_encoder_is_no_language_model(command, home, tmp_path, capfd):
    """Nothing is loaded: transformers would give it a head that was never trained."""
    config = transformers.BertConfig(vocab_size=300, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    transformers.AutoTokenizer.from_pretrained(home / "model").save_pretrained(tmp_path / "bert")
    model = ["--model", tmp_path / "bert"] if command == "train" else [tmp_path / "bert"]
    more = {
        "evaluate": ["--data", home / "texts"],
        "generate": ["--prompt", "a"],
        "inspect": ["--text", __file__, "--out", tmp_path / "page.html"],
        "train": ["--data", home / "texts", *TRAIN, "--out", tmp_path / "own"],
        "add": ["--out", tmp_path / "own"],
    }
    capfd.readouterr()
    assert "is an encoder (bert), and this needs a causal language model" in fail(
        command, *model, *more[command], code=2
    )
    assert not (tmp_path / "own").exists()


def test_a_file_in_a_models_folder_is_not_the_model(home):
    told = fail("generate", home / "model" / "config.json", "--prompt", "a", code=2)
    assert "is a file: give its folder" in told


@pytest.mark.parametrize(("positions", "window"), [(512, 341), (1024, 683), (9, 6), (10, 7), (11, 7)])
def test_a_window_that_leaves_room_for_what_is_kept(positions, window, home, tmp_path):
    config = transformers.AutoConfig.from_pretrained(home / "model", n_positions=positions)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(home / "model").save_pretrained(tmp_path / "model")
    told = succeed("add", tmp_path / "model", "--data", home / "texts", "--out", tmp_path / "own")
    found = transformers.AutoConfig.from_pretrained(tmp_path / "own").recurrence
    assert (found.window, found.seen) == (window, window // 2), told


def test_what_is_of_no_use_without_a_state_is_refused(train):
    told = fail(*train, "--no-recurrence", "--slots", 4, "--preset", "kept", code=2)
    assert "--preset, --slots: there is no state with --no-recurrence" in told


def test_the_version():
    assert succeed("--version").out.strip() == carryforward.__version__


def test_a_stop_is_no_epochs_end():
    stop = GracefulStopCallback()
    for stopped, epoch, goes_on in ((False, 0.2, True), (True, 0.2, False), (True, 1.0, True)):
        stop.stopped = stopped
        control = transformers.TrainerControl(should_evaluate=True, should_save=True)
        stop.on_epoch_end(None, transformers.TrainerState(epoch=epoch), control)
        assert (control.should_evaluate, control.should_save) == (goes_on, goes_on)


def test_a_reader_that_has_enough(home):
    """`carryforward flops ... | head -1`: no message, no traceback."""
    into_a_closed_pipe("flops", "--model", home / "model", "--window", 16)


def test_a_bug_is_not_hidden(home, monkeypatch):
    monkeypatch.setattr("carryforward.evaluation.report.flops_table", lambda rows: rows["nothing"])
    with pytest.raises(TypeError):
        main(["flops", "--model", str(home / "model"), "--window", "16"])


def test_debugging_shows_where_an_error_comes_from(monkeypatch):
    monkeypatch.setenv("CARRYFORWARD_DEBUG", "1")
    with pytest.raises(ValueError, match="does not exist"):
        main(["report", str(Path("none.json"))])
