# SPDX-License-Identifier: Apache-2.0
"""The quickstart does what it shows: its code runs from top to bottom, and its commands on what the code saved."""

import contextlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "quickstart.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_quickstart_runs_as_printed(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CARRYFORWARD_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    names, printed = {}, io.StringIO()
    for language, code in BLOCKS:
        if language == "python" and "gpt2" not in code:  # that model cannot be had without the Hub
            with contextlib.redirect_stdout(printed):
                exec(code, names)
    without, with_state = map(
        float, re.search(r"Perplexity ([\d.]+) without a state, ([\d.]+) with", printed.getvalue()).groups()
    )
    assert with_state < without
    assert names["written"].shape[1] > names["base"].config.max_position_embeddings

    lines = [line for language, block in BLOCKS if not language for line in block.splitlines()]
    commands = [shlex.split(line) for line in lines if line.startswith("carryforward ")]
    assert len(commands) == 3
    for command in commands:
        process = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
