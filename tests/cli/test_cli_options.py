# SPDX-License-Identifier: Apache-2.0
"""Options, help, config files and exit codes of the command line."""

import errno
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import fail, into_a_closed_pipe, succeed
from helpers.training_runs import evaluation
from safetensors import SafetensorError
from typer.main import get_command

import carryforward
from carryforward.cli.main import app, main


def find(command):
    """A command by its words; a group for none or some of them."""
    found = get_command(app)
    for name in command.split():
        found = found.commands[name]
    return found


GROUPS = ["qa", "memory-tasks"]
COMMANDS = [
    "",
    *find("").commands,
    *(f"{group} {name}" for group in GROUPS for name in find(group).commands),
]


def test_the_version():
    assert succeed("--version").out.strip() == carryforward.__version__


# --- help ----------------------------------------------------------------------------------------------------------


def test_help_imports_nothing_heavy():
    """Of all commands, in one process."""
    code = (
        "import sys; from carryforward.cli.main import main\n"
        f"for command in {[command.split() for command in COMMANDS]}:\n"
        "    try: main([*command, '--help'])\n"
        "    except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'datasets'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: carryforward") == len(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("columns", [80, 120])
def test_help_fits_the_terminal(command, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = succeed(*command.split(), "--help").out
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text, "an option's name is cut off"


@pytest.mark.parametrize("command", ["train", "qa train"])
def test_the_main_panels_of_training_are_short(command):
    panels = {param.opts[0]: param.rich_help_panel or "" for param in find(command).params}
    basic = {name for name, panel in panels.items() if not panel.startswith("Advanced: ")}
    assert {"--model", "--data", "--out", "--epochs", "--learning-rate", "--batch-size", "--config"} <= basic
    assert len(basic) <= 12


def test_help_shows_a_flag_once_and_both_forms_are_accepted(home):
    text = succeed("train", "--help").out
    assert "--no-validation" in text
    assert "--validation " not in text
    assert "--bf16" in text
    assert "--no-bf16" not in text
    data = ["--model", home / "model", "--data", "none"]
    for flags in (["--bf16", "--no-bf16"], ["--validation", "--no-validation"]):
        assert "No such option" not in fail("train", *data, *flags, "--out", home / "none", code=2)


# --- values --------------------------------------------------------------------------------------------------------


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


def test_the_size_of_a_state(home):
    """The memory of `flops` is the paper's, unless sizes of carried keys and values are given."""
    flops = ["flops", "--model", home / "model", "--window", 16]  # 2 layers of width 16: 256 bytes a position
    sizes = {}
    for options in ([], ["--recent", 5], ["--reach", 12], ["--reach", "3KB"], ["--recent", 3, "--far", 2]):
        (row,) = json.loads(succeed(*flops, *options, "--json").out)
        sizes[" ".join(map(str, options))] = row["state_positions"], row["state_bytes"]
    assert sizes == {
        "": (0, 64), "--recent 5": (9, 9 * 256), "--reach 12": (12, 12 * 256), "--reach 3KB": (11, 11 * 256),
        "--recent 3 --far 2": (9, 9 * 256),
    }  # fmt: skip
    assert "--right" in fail(*flops, "--group-windows", 4, code=2)
    assert "right=4 lets windows see what comes after them, and gpt2 is causal" in fail(*flops, "--right", 4, code=2)
    shown = succeed(*flops, "--reach", 12).out
    memory = "keys and values of the 8 most recent positions and the first 4"
    assert shown.endswith(f"\nstate: 0.003 MB per text, 12 positions: {memory}\n")


def test_flops_of_a_recurrent_model(trained):
    (row,) = json.loads(succeed("flops", "--model", trained, "--json").out)
    assert (row["state_positions"], row["state_bytes"]) == (6, 6 * 256)
    assert "is recurrent already: leave --reach out" in fail("flops", "--model", trained, "--reach", 9, code=2)
    message = fail("flops", "--preset", "paper", "--reach", 9, code=2)
    assert "--reach: --preset paper says what is carried, too. Leave one of the two out" in message


def test_numbers_end_where_the_models_begin(trained, home):
    results = json.loads(succeed("evaluate", "--overlap", 0, 3, trained, "--data", home / "texts", "--json").out)
    assert [row["overlap"] for row in results[0]["rows"]] == [0, 3, 0, 3]
    assert [row["untrained_overlap"] for row in results[0]["rows"]] == [False, True, False, True]


def test_negative_numbers_are_values_not_options(trained, home):
    assert "--overlap -1: it must be at least 0" in fail(*evaluation(trained, home, "--overlap", -1), code=2)
    assert "--overlap -1: it must be at least 0" in fail(*evaluation(trained, home, "--overlap=0", -1), code=2)


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


# --- config files ----------------------------------------------------------------------------------------------------


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
        ("data: x\nsplit: test\ndata: y", "'data' stands twice"),
        ("data: x\nbatch-size: 1\nbatch_size: 2", "batch_size stands twice"),
        ("window: true", "window must not be true or false"),
        ("batch_size: 2.5", "Invalid value for '--batch-size'"),
        ("data: ''", "data is empty"),
        ("data: 2024-01-01T00:00:00Z", "data must be a name or a number"),
        ("data: !!python/object/apply:os.system [echo]", "could not determine a constructor"),
        ("[" * 2000, "nested too deeply"),
        ("data: \x00", "cannot be read"),
    ],
)
def test_a_wrong_config_file_is_refused_by_name(tmp_path, content, message):
    config = tmp_path / "c.yaml"
    config.write_text(content)
    assert message in fail("evaluate", "model", "--config", config, code=2)


def test_a_missing_config_file(tmp_path):
    assert "No such file" in fail("train", "--config", tmp_path / "none.yaml", code=2)


# --- errors ----------------------------------------------------------------------------------------------------------


def test_a_reader_that_has_enough(home):
    """`carryforward flops ... | head -1`: no message, no traceback."""
    into_a_closed_pipe("flops", "--model", home / "model", "--window", 16)


def test_an_error_that_nobody_foresaw_says_where_its_traceback_is(home, monkeypatch, capsys):
    monkeypatch.setattr("carryforward.evaluation.report.flops_table", lambda rows: rows["nothing"])
    command = ["flops", "--model", str(home / "model"), "--window", "16"]
    with pytest.raises(SystemExit) as end:
        main(command)
    message = capsys.readouterr().err
    assert end.value.code == 1
    assert message.startswith("error: TypeError: list indices must be integers or slices, not str. This is a bug, or")
    file = Path(re.search(r"The traceback is in (\S+);", message)[1])
    assert "Traceback (most recent call last)" in file.read_text()
    file.unlink()
    monkeypatch.setenv("CARRYFORWARD_DEBUG", "1")
    with pytest.raises(TypeError):
        main(command)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.EDQUOT, "Disk quota exceeded", "run/x"), "run/x could not be written (Disk quota exceeded)"),
        (OSError(errno.EFBIG, "File too large"), "there could not be written (File too large)"),
        (OSError(errno.EROFS, "Read-only file system"), "there could not be written (Read-only file system)"),
        (SafetensorError("Error while serializing: I/O error: Input/output error (os error 5)"),
         "there could not be written (Input/output error)"),
        (SafetensorError("I/O error: Disk quota exceeded (os error 122)"), "(Disk quota exceeded). Make room"),
        (RuntimeError("[enforce fail at inline_container.cc:778] . PytorchStreamWriter failed writing file data/3"),
         "there could not be written (the disk is full, or a quota or size limit is reached)"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "a/b"), "a/b: a part of this path is a file"),
        (FileExistsError(errno.EEXIST, "File exists", "a"), "a: a file of this name is in the way of a folder"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
                      "tried to allocate 9 bytes. Error code 12"), "can't allocate memory: you tried to allocate 9"),
    ],
)  # fmt: skip
def test_errors_of_the_system_are_a_sentence(error, message, monkeypatch):
    def raise_error(paths):
        raise error

    monkeypatch.setattr("carryforward.evaluation.report.load", raise_error)
    assert message in fail("report", "results", "--out", "there", code=1)


def test_debugging_shows_where_an_error_comes_from(monkeypatch):
    monkeypatch.setenv("CARRYFORWARD_DEBUG", "1")
    with pytest.raises(ValueError, match="does not exist"):
        main(["report", str(Path("none.json"))])
