# SPDX-License-Identifier: Apache-2.0
"""Every example runs as it is, without a download."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import prose
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

import carryforward as cf

FOLDER = Path(__file__).resolve().parents[2] / "examples"
EXAMPLES = sorted({*FOLDER.glob("*.py")} - {FOLDER / "embed_with_ray.py"})  # which tests/integrations/test_ray.py runs
SAYS = {"continue_a_story": "tokens were read in windows of 64", "search_documents": "words)"}


def run(example, folder, *arguments):
    """An example, called in an empty folder that is also the one for temporary files."""
    folder.mkdir()
    command = [sys.executable, example, *map(str, arguments)]
    environment = {**os.environ, "TMPDIR": str(folder), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=170)
    assert not list(folder.iterdir()), "nothing is left behind"
    return done


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example, tmp_path):
    assert example.stem in SAYS, "add what it prints to SAYS"
    done = run(example, tmp_path / "empty")
    assert done.returncode == 0, done.stderr[-2000:]
    assert SAYS[example.stem] in done.stdout


def test_a_story_told_by_a_model_of_ones_own(tmp_path):
    (story,) = (example for example in EXAMPLES if example.stem == "continue_a_story")
    plain = prose.save_model(tmp_path / "plain")
    done = run(story, tmp_path / "first", plain)
    assert done.returncode == 1
    assert f"{plain} is a plain model: give a recurrent one, such as a run of" in done.stderr
    assert "Traceback" not in done.stderr
    base = AutoModelForCausalLM.from_pretrained(plain)
    base.generation_config.suppress_tokens = [0]  # so that only the tokenizer could add it
    cf.add_recurrence(base, window=16, memory="vector").save_pretrained(tmp_path / "recurrent")
    tokenizer = prose.tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 0)]
    )
    tokenizer.save_pretrained(tmp_path / "recurrent")
    done = run(story, tmp_path / "second", tmp_path / "recurrent")
    assert "tokens were read in windows of 16" in done.stdout, done.stderr[-2000:]
    assert "<|end|>" not in done.stdout, "no special token at the start of the second part"
