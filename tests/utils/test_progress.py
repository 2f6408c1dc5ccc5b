# SPDX-License-Identifier: Apache-2.0
"""The progress bar: on a terminal, in logs, in library functions, and in place of it a callback."""

import sys

import pytest

from carryforward.utils import progress
from carryforward.utils.progress import ProgressBar


@pytest.fixture
def clock(monkeypatch):
    """The time, which the test sets."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_a_command_logs_a_line_every_30_seconds(clock, capsys):
    with ProgressBar("training", 1000, "tokens", done=100) as bar:
        for clock[0] in (10, 20, 40, 50, 80):
            bar.advance(100)
        bar.update(700, remark="loss 2.0")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "training: 400 of 1,000 tokens, 7.5 tokens/s, 80 s left ",
        "training: 600 of 1,000 tokens, 6.2 tokens/s, 64 s left ",
    ]


def test_without_a_terminal_a_library_function_is_silent(clock, capsys):
    with ProgressBar("embedding", 10, "tokens", library=True) as bar:
        clock[0] = 100.0
        bar.advance(5)
    assert capsys.readouterr() == ("", "")


def test_a_callback_is_called_in_place_of_a_bar(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    calls = []
    with ProgressBar("embedding", None, "tokens", library=True, callback=lambda *args: calls.append(args)) as bar:
        clock[0] = 100.0
        bar.advance(5)
        bar.update(7, 10)
        bar.advance(3)
    assert calls == [(5, None), (7, 10), (10, 10)]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("library", "seconds", "shown"), [(False, 0, True), (True, 1, False), (True, 3, True)])
@pytest.mark.parametrize("total", [1000, None])
def test_on_a_terminal_a_bar_is_shown(clock, capsys, monkeypatch, library, seconds, shown, total):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    with ProgressBar("reading [text]", total, "tokens", library=library) as bar:
        clock[0] = float(seconds)
        bar.update(500, remark="a remark")
    text = capsys.readouterr().err
    assert ("reading [text]" in text) == shown
    assert ("a remark" in text) == shown
    assert ("500/1,000" in text) == (shown and total is not None)
