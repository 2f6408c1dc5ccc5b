# SPDX-License-Identifier: Apache-2.0
"""The config files for `accelerate launch` work: those that can run without GPUs train, and the others are read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from helpers import fsdp_on_cpu, prose
from helpers.training_runs import TRAIN

CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "accelerate"

FAST = ["--warmup-steps", 0, "--learning-rate", 1e-2]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    config = prose.save_model(folder / "model") / "config.json"
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)  # processes would draw other numbers
    config.write_text(json.dumps(json.loads(config.read_text()) | dropout))
    prose.save_topics(folder / "texts")
    return folder


def train(home, launcher, name, batch):
    """Train in a launch; the validations of the run."""
    run = ["--model", home / "model", "--data", home / "texts", *TRAIN, "--batch-size", batch, "--device", "cpu"]
    environment = {**os.environ, "CARRYFORWARD_CACHE": str(home / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, [*launcher, "train", *run, *FAST, "--out", home / name])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("word perplexity") == 1, "only the first process prints"
    return [entry["eval_loss"] for entry in json.loads((home / name / "run.json").read_text())["history"]]


def accelerate(config, *more):
    return ["-m", "accelerate.commands.launch", "--config_file", CONFIGS / config, *more]


@pytest.fixture(scope="module")
def alone(home):
    return train(home, ["-m", "carryforward"], "alone", batch=2)


@pytest.mark.slow
def test_two_processes_on_cpus_equal_one(home, alone):
    launched = train(home, accelerate("ddp-cpu.yaml", "-m", "carryforward"), "ddp", batch=1)
    assert launched == pytest.approx(alone, rel=1e-5)
    assert launched[0] > 1.01 * launched[-1]


@pytest.mark.slow
def test_sharded_weights_in_two_processes_equal_one(home, alone):
    launched = train(home, accelerate("fsdp2-gpus.yaml", "--num_processes", 2, fsdp_on_cpu.__file__), "fsdp", batch=1)
    assert launched == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_configs_are_read(path):
    config = load_config_from_file(str(path))
    assert config.num_processes == (2 if "cpu" in path.stem else 8)
    assert f"examples/accelerate/{path.name} -m carryforward train" in path.read_text()
