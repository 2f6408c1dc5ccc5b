# SPDX-License-Identifier: Apache-2.0
"""Every option of every command with odd values: accepted, or refused by name before any work and any file.

The default run takes a sample; CARRYFORWARD_CAMPAIGNS=all runs all.
"""

import io
from contextlib import redirect_stderr, redirect_stdout

import pytest
from helpers import campaigns
from helpers.commands import UNFORESEEN, fail
from typer.main import get_command

from carryforward.cli.main import app

TEXTS = ["", " ", "nan", "-1", "<b>x</b>", "../../etc", "a" * 5000, "x\ny", "ü\udcff", "none\0", "--", "file/x", "."]
LARGE = "9" * 20
NUMBERS = ["", " ", "nan", "inf", "-inf", "-1", "0", "1.5", "1e400", "true", "x", "0x10", LARGE, "9" * 5000, "-0.0"]
NONSENSE = {"", " ", "nan", "inf", "-inf", "true", "x", "0x10", "1e400", LARGE, "9" * 5000}  # of any number
EVERY = 12  # of the cases is in the sample

# a valid call of each command, and the function that does its work
COMMANDS = {
    "train": ("train --out out", "training.train.train"),
    "add": ("add model --out out", "cli.add.add_to_folder"),
    "demo": ("demo --out out", "cli.demo.run_demo"),
    "generate": ("generate model --prompt text", "cli.text_generation.generate"),
    "embed": ("embed model file --out out.npy", "embeddings.embed.embed"),
    "evaluate": ("evaluate model", "evaluation.evaluate.evaluate"),
    "horizon": ("horizon model", "models.loading.need_state"),
    "report": ("report file", "evaluation.report.load"),
    "flops": ("flops", "models.loading.describe"),
    "inspect": ("inspect model --text file --out page.html", "analysis.inspect.inspect"),
    "topics": ("topics model --out out", "analysis.topics.topics"),
    "samples": ("samples model --out out", "analysis.samples.samples"),
    "reproduce": ("reproduce table", "reproduction.recipes.read"),
    "qa train": ("qa train --model model --data file --out out", "qa.train.train"),
    "qa answer": ("qa answer model --question text --document file", "data.texts.read_file_or_stdin"),
    "qa evaluate": ("qa evaluate model --data file", "qa.evaluate.evaluate"),
    **{
        f"memory-tasks {task}": (f"memory-tasks {task} --model model --out out", "tasks.memory_tasks.memory_tasks")
        for task in ("retrieval", "copy", "reverse", "passkey", "facts")
    },
    "qa join": ("qa join file --out new", "qa.join_passages.join_files"),
}


class Accepted(BaseException):
    """The values were accepted: the work would begin."""


def find(name):
    command = get_command(app)
    for word in name.split():
        command = command.commands[word]
    return command


def is_number(option):
    """Whether the values are numbers."""
    return any(word in str(option.type_descriptor.annotation) for word in ("int", "float"))


def is_nonsense(option, value):
    """Whether no such option can take the value."""
    if not is_number(option):
        return not value.strip() and option.name != "prompt"
    return value in NONSENSE and not (value == LARGE and "float" in str(option.type_descriptor.annotation))


def cases(name):
    """Each option of a command with each odd value."""
    for option in find(name).params:
        if option.name in ("help", "config") or getattr(option, "is_flag", False):
            continue
        for value in NUMBERS if is_number(option) else TEXTS:
            yield option, value


def call(name, option, value):
    """The exit code of a command and what it has printed; None and nothing if the values were accepted."""
    words = COMMANDS[name][0].split()
    if option.opts[0].startswith("--"):
        words.append(f"{option.opts[0]}={value}")
    else:  # in place of the valid one
        position = len(name.split()) + [p.name for p in find(name).params if not p.opts[0].startswith("-")].index(
            option.name
        )
        words[position : position + 1] = [value]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            get_command(app)(args=words, prog_name="carryforward")
        except Accepted:
            return None, ""
        except SystemExit as end:
            return int(end.code or 0), " ".join((out.getvalue() + err.getvalue()).replace("│", " ").split())


@pytest.mark.parametrize("name", COMMANDS)
def test_odd_values_are_accepted_or_refused_by_name(name, tmp_path, monkeypatch):
    def accept(*args, **kwargs):
        raise Accepted

    (tmp_path / "file").write_text("text")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"carryforward.{COMMANDS[name][1]}", accept)
    wrong, tried = [], 0
    for number, (option, value) in enumerate(cases(name)):
        if number % EVERY and not campaigns.full():
            continue
        tried += 1
        code, message = call(name, option, value)
        flag = option.opts[0]
        if code is not None and (code != 2 or not message or UNFORESEEN in message or "Traceback" in message):
            wrong.append((flag, value[:20], code, message[-300:]))
        elif code is None and is_nonsense(option, value):
            wrong.append((flag, value[:20], "accepted"))
        elif code is not None and is_number(option) and value in NONSENSE and flag.lstrip("-") not in message:
            wrong.append((flag, value[:20], "refused without its name", message[-300:]))
    campaigns.record(f"option values[{name}]", tried, len(wrong))
    assert not wrong
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train --max-grad-norm nan", "--max-grad-norm nan"),
        ("train --max-grad-norm -1", "--max-grad-norm -1.0: it must be at least 0"),
        ("train --seed -1", "--seed -1: it must be from 0 to 4294967295"),
        ("train --seed 4294967296", "--seed 4294967296: it must be from 0 to"),
        ("train --preset paper --hidden-sizes 99999999999999999999", "--hidden-sizes 99999999999999999999: it must be"),
        ("train --window 0", "--window 0: it must be at least 1"),
        ("train --window 500", "Use window=341 or less"),
        ("train --device cuda", "--device cuda: PyTorch finds no such device here"),
        ("train --recent 500 --window 100", "exceeds the 512 learned positions that gpt2 has. Carry at most 412"),
    ],
)
def test_single_values(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: None)
    assert message in fail(*arguments.split(), "--out", "out", code=2)
    assert not [*tmp_path.iterdir()]


OUTPUTS = [name for name, (call, _) in COMMANDS.items() if name not in ("report", "flops", "generate", "qa answer")]


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_refused_command_leaves_nothing_behind(name, tmp_path, monkeypatch):
    """With a model that does not exist, and with a file in the place of a folder."""
    (tmp_path / "file").write_text("text")
    monkeypatch.chdir(tmp_path)
    words = [word.replace("model", "./no/model") if word == "model" else word for word in COMMANDS[name][0].split()]
    if name == "train":
        words += ["--model", "./no/model"]
    out = "--work" if name == "reproduce" else "--out"
    suffix = ".npy" if name == "embed" else ""
    if name != "demo":  # which trains the bundled model
        fail(*words, *([] if name == "reproduce" else [out, f"new/sub/out{suffix}"]), code=2)
    if name not in ("train", "qa train", "embed"):
        assert "file, where a folder is needed" in fail(*words, out, f"file/out{suffix}", code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
