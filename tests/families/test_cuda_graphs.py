# SPDX-License-Identifier: Apache-2.0
"""The script that asks on a GPU which types are captured: its eager part, and its answers where a GPU is emulated."""

import json

import cuda_graphs
import pytest

from carryforward.engine import cuda_graphs as engine


@pytest.mark.parametrize(("name", "memory"), [("gptj", "kv"), ("falcon", "tokens"), ("albert", "vector")])
def test_windows_are_captured(name, memory, captures):
    assert cuda_graphs.outcome(name, memory, "cpu") == cuda_graphs.CAPTURED
    assert captures


def test_results_are_written_type_by_type_and_runs_go_on(tmp_path, capsys):
    """In a process of its own, without a GPU."""
    out = tmp_path / "graphs.json"
    assert cuda_graphs.main(["--types", "gptj,axk1", "--out", str(out)]) == 0
    assert (
        "Of 2 types 0 are captured with all memories, 1 ran eagerly only, 1 are refused, and 0"
        in capsys.readouterr().out
    )
    results = json.loads(out.read_text())
    memories = results["types"]["gptj"]["memories"]
    assert memories == dict.fromkeys(("vector", "kv", "tokens", "associative"), cuda_graphs.EAGER)
    assert results["versions"]["torch"]
    assert cuda_graphs.main(["--types", "gptj,bert", "--out", str(out), "--limit", "0"]) == 0
    assert capsys.readouterr().out.endswith(" 1 are left.\n")


def test_the_reason_is_told(captures, monkeypatch):
    def fail(function, pool):
        raise RuntimeError("not permitted while\na stream is capturing")

    monkeypatch.setattr(engine, "capture", fail)
    assert cuda_graphs.outcome("granite", "kv", "cpu") == "not captured: RuntimeError: not permitted while"


def test_another_loss_is_told(captures, monkeypatch):
    monkeypatch.setattr(engine, "capture", lambda function, pool: (function(), lambda: None))
    assert "differ by" in cuda_graphs.outcome("granite", "kv", "cpu")


def test_unknown_types_are_refused(capsys):
    with pytest.raises(SystemExit):
        cuda_graphs.main(["--types", "granit"])
    assert "--types: unknown types: granit. There are gpt2" in capsys.readouterr().err
