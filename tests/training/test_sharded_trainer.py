# SPDX-License-Identifier: Apache-2.0
"""Training with FSDP through accelerate, in two CPU processes: saved, stopped, resumed, and equal to one process."""

import os
import types

import pytest
import torch
from accelerate.state import AcceleratorState
from helpers import fsdp_on_cpu, prose, ranks, tiny
from helpers.commands import accelerate
from helpers.trainers import DROPOUT, SGD, Watch, assert_identical, trainer, weights
from helpers.training_runs import TRAIN
from torch.distributed.fsdp import CPUOffloadPolicy

import carryforward as cf
from carryforward.training.sharding import gathered_weights, prepare_sharding

STATE_DICTS = ["FULL_STATE_DICT", "SHARDED_STATE_DICT"]
RUN = {
    "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "num_train_epochs": 1, "save_tokens": 150,
    "fields": {"slots": 0, "recent": 4, "sinks": 1, "block_windows": 2},
}  # fmt: skip


def _launched(rank):
    """What `accelerate launch --use_fsdp --fsdp_version 2` sets in the environment of a process."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "0",
        "MASTER_ADDR": "localhost", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    }  # fmt: skip
    fsdp_on_cpu.allow()


def _train(out, stop=None, **arguments):
    def stop_after(state, control):
        if state.global_step == stop:
            control.should_save = control.should_training_stop = True

    AcceleratorState._reset_state(True)
    job = trainer(out, callbacks=[Watch(stop_after)] if stop else [], **RUN, **arguments)
    job.train(resume_from_checkpoint=True)
    return job


def _work(rank, folder):
    """All that runs in two processes, whose start takes longer than the rest."""
    _launched(rank)
    return {
        "sgd": _with_sgd(folder),
        "offloaded": _offloaded(folder),
        **{kind: _whole_and_resumed(folder / kind, kind) for kind in STATE_DICTS},
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return ranks.run(_work, folder, folder)[0]


def _whole_and_resumed(folder, state_dicts):
    os.environ["FSDP_STATE_DICT_TYPE"] = state_dicts
    carrying = {"settings": DROPOUT, "carry_state": True}
    results = []
    for name, stops in (("whole", [None]), ("stopped", [2, None])):
        for stop in stops:
            job = _train(folder / name, stop, **carrying)
        results.append(gathered_weights(job, job.inner))
    return results


@pytest.mark.parametrize("state_dicts", STATE_DICTS)
def test_resumed_equals_never_stopped(trained, state_dicts):
    whole, resumed = trained[state_dicts]
    assert_identical(resumed, whole)


def _offloaded(folder):
    CPUOffloadPolicy.__init__.__defaults__ = (False,)  # without an accelerator no memory can be pinned
    os.environ["FSDP_OFFLOAD_PARAMS"] = "true"
    try:
        return _with_sgd(folder, "offloaded")
    finally:
        os.environ["FSDP_OFFLOAD_PARAMS"] = "false"


def _with_sgd(folder, name="sgd"):
    job = _train(folder / name, **SGD)
    losses = [entry["loss"] for entry in job.state.log_history if "loss" in entry]
    perplexities = [entry["eval_loss"] for entry in job.state.log_history if "eval_loss" in entry]
    return losses, perplexities, gathered_weights(job, job.inner)


def test_two_processes_equal_one(trained, tmp_path):
    losses, perplexities, final = trained["sgd"]
    one = trainer(tmp_path / "one", **{**RUN, **SGD, "per_device_train_batch_size": 2})
    one.train()
    log = one.state.log_history
    close = {"rtol": 1e-4, "atol": 1e-4}  # as the weights: two processes add up gradients in another order
    torch.testing.assert_close(losses, [entry["loss"] for entry in log if "loss" in entry], **close)
    torch.testing.assert_close(perplexities, [entry["eval_loss"] for entry in log if "eval_loss" in entry], **close)
    expected = {name: x for name, x in weights(one.model).items() if name in final}
    tiny.assert_same_gradients(final, expected, tolerance=1e-4)


def test_offloaded_equals_sharded(trained):
    """On CPUs nothing moves between host and device, but the path through FSDP's offload policy is the same."""
    for sharded, offloaded in zip(trained["sgd"][:2], trained["offloaded"][:2], strict=True):
        assert sharded == offloaded
    assert_identical(trained["offloaded"][2], trained["sgd"][2])


def test_accelerate_launch_trains_and_saves_a_whole_model(tmp_path):
    prose.save_model(tmp_path / "model")
    prose.save_topics(tmp_path / "texts")
    launch = [
        "--use_fsdp", "--fsdp_version", "2", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no",
        "--dynamo_backend", "no", fsdp_on_cpu.__file__,
    ]  # fmt: skip
    train = ["train", "--model", tmp_path / "model", "--data", tmp_path / "texts", *TRAIN, "--out", tmp_path / "run"]
    done = accelerate(*launch, *train, cache=tmp_path / "cache", seconds=180)
    assert done.code == 0, done.err
    assert "word perplexity" in done.out
    model = cf.RecurrentForCausalLM.from_pretrained(tmp_path / "run")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_what_cannot_shard_is_refused(monkeypatch):
    model = tiny.recurrent("gpt2")
    nothing = types.SimpleNamespace(state=types.SimpleNamespace(fsdp_plugin=None))
    prepare_sharding(nothing, model, None)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="only in several processes with a GPU each"):
        prepare_sharding(nothing, model, None)
    first = types.SimpleNamespace(state=types.SimpleNamespace(fsdp_plugin=types.SimpleNamespace(fsdp_version=1)))
    with pytest.raises(ValueError, match="Use --fsdp_version 2"):
        prepare_sharding(first, model, None)
