# SPDX-License-Identifier: Apache-2.0
"""The config files for `accelerate launch` work: those that can run without GPUs train, and the others are read."""

import json
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from helpers import commands, fsdp_on_cpu, prose
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


def arguments(home, name, batch):
    """Those of a training."""
    run = ["--model", home / "model", "--data", home / "texts", *TRAIN, "--batch-size", batch, "--device", "cpu"]
    return ["train", *run, *FAST, "--out", home / name]


def losses(home, name, done):
    """The validations of a run that has ended well."""
    assert done.code == 0, done.err[-3000:]
    assert done.out.count("word perplexity") == 1, "only the first process prints"
    return [entry["eval_loss"] for entry in json.loads((home / name / "run.json").read_text())["history"]]


def launch(home, name, config, *more):
    """The validations of a training in two processes."""
    launcher = ["--config_file", CONFIGS / config, *more]
    done = commands.accelerate(*launcher, *arguments(home, name, batch=1), cache=home / "cache", seconds=400)
    return losses(home, name, done)


@pytest.fixture(scope="module")
def alone(home):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CARRYFORWARD_CACHE", str(home / "cache"))
        return losses(home, "alone", commands.run(*arguments(home, "alone", batch=2)))


@pytest.mark.slow
def test_two_processes_on_cpus_equal_one(home, alone):
    launched = launch(home, "ddp", "ddp-cpu.yaml", "-m", "carryforward")
    assert launched == pytest.approx(alone, rel=1e-5)
    assert launched[0] > 1.01 * launched[-1]


@pytest.mark.slow
def test_sharded_weights_in_two_processes_equal_one(home, alone):
    launched = launch(home, "fsdp", "fsdp2-gpus.yaml", "--num_processes", 2, fsdp_on_cpu.__file__)
    assert launched == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_configs_are_read(path):
    config = load_config_from_file(str(path))
    assert config.num_processes == (2 if "cpu" in path.stem else 8)
    assert f"examples/accelerate/{path.name} -m carryforward train" in path.read_text()
