# SPDX-License-Identifier: Apache-2.0
"""The table "What is exact with what": every row names tests that exist, or a refusal that is raised."""

import ast
import re
import types
from pathlib import Path

import pytest
import torch
from helpers import ranks, tiny
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM

import carryforward as cf
from carryforward.engine.run_policy import _check_placement
from carryforward.training.sharding import prepare_sharding

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "several-machines.md"
TABLE = PAGE.read_text().partition("## What is exact with what")[2].partition("\n## ")[0]
ROWS = [row.strip("| \n").split(" | ") for row in TABLE.splitlines() if row.startswith("| ")][1:]
REFUSED = dict(re.findall(r'^\| (.+?) \| no \| refused: "(.+)" \|$', TABLE, re.MULTILINE))


def ask_accelerate(variable, monkeypatch, tmp_path):
    monkeypatch.setenv(variable, "true")
    cf.RecurrentTrainingArguments(tmp_path)


def fsdp_1(monkeypatch, tmp_path):
    plugin = types.SimpleNamespace(fsdp_version=1)
    prepare_sharding(types.SimpleNamespace(state=types.SimpleNamespace(fsdp_plugin=plugin)), None, None)


def load_with_a_plan(monkeypatch, tmp_path):
    tiny.recurrent("llama").save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path, tp_plan="auto")


def several_devices(monkeypatch, tmp_path):
    """No machine without GPUs has two devices with weights: their placement is made up."""
    _check_placement([types.SimpleNamespace(device=torch.device("cuda", i)) for i in (0, 1)], sharded=False)


def reentrant(monkeypatch, tmp_path):
    tiny.recurrent("gpt2").gradient_checkpointing_enable({"use_reentrant": True})


def split(monkeypatch, tmp_path):
    message, _ = ranks.run(_split, tmp_path)
    raise ValueError(message)


def _split(rank):
    """What adding recurrence to a model says whose weights tensor parallelism has split, and what calling one says."""
    messages, mesh = [], init_device_mesh("cpu", (2,))
    for made, call in (
        (tiny.base("llama"), lambda model: cf.add_recurrence(model, window=8)),
        (tiny.recurrent("llama"), lambda model: model(tiny.documents(1, 20))),
    ):
        for layer in made.base_model.layers if made.base_model_prefix == "model" else made.base.model.layers:
            parallelize_module(layer.mlp, mesh, {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel()})
        try:
            call(made)
        except ValueError as error:
            messages.append(str(error))
    assert messages[0] == f"the model's {messages[1].removeprefix('the ')}"
    return messages[0]


REFUSALS = {
    "FSDP 1, `train`": fsdp_1,
    "DeepSpeed": lambda *fixtures: ask_accelerate("ACCELERATE_USE_DEEPSPEED", *fixtures),
    "Megatron-LM": lambda *fixtures: ask_accelerate("ACCELERATE_USE_MEGATRON_LM", *fixtures),
    "accelerate's parallelism config": lambda *fixtures: ask_accelerate("ACCELERATE_USE_PARALLELISM_CONFIG", *fixtures),
    "tensor parallelism, a recurrent model": load_with_a_plan,
    "tensor parallelism, a model to add recurrence to": split,
    "layers on several devices (pipeline, `device_map`)": several_devices,
    "gradient checkpointing, reentrant": reentrant,
}


def test_every_row_is_complete():
    assert len(ROWS) > 12
    for way, exact, evidence in ROWS:
        assert exact.startswith("yes") != (way in REFUSED), way
        assert exact == "no" or "`tests/" in evidence, way
    assert REFUSED.keys() == REFUSALS.keys()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(tests/\S+::\S+)`", TABLE))))
def test_tests_of_the_table_exist(name):
    file, _, function = name.partition("::")
    nodes = ast.parse((ROOT / file).read_text()).body
    assert function in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("way", REFUSED)
def test_what_is_not_exact_is_refused(way, monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=re.escape(REFUSED[way])):
        REFUSALS[way](monkeypatch, tmp_path)


def test_deepspeed_is_refused_as_an_argument_too(tmp_path):
    with pytest.raises(ValueError, match="DeepSpeed is not supported"):
        cf.RecurrentTrainingArguments(tmp_path, deepspeed={"zero_optimization": {"stage": 2}})
