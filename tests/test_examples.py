# SPDX-License-Identifier: Apache-2.0
"""Every example runs as it is, without a download."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))
SAYS = {"continue_a_story": "tokens were read in windows of 64", "search_documents": "words)"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example, tmp_path):
    done = subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-2000:]
    assert SAYS[example.stem] in done.stdout
    assert not list(tmp_path.iterdir()), "nothing is left behind where it was called"
