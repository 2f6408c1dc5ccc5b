# SPDX-License-Identifier: Apache-2.0
"""`sharded_backward` in two processes: gradients of the whole graph, in memory that grows by one state a block."""

import gc
import weakref

import pytest
import torch
from helpers import ranks, tiny
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing import assert_close

import carryforward as cf

KV = {"slots": 0, "recent": 3, "sinks": 1}
IDS = tiny.documents(4, 61)
# name: model, fields, lengths of two rows on each rank, and what else differs
CASES = {
    "vector": ("llama", {}, [(6, 3), (37, 20)], {}),
    "learned positions": ("gpt2", {**KV, "block_windows": 2}, [(61, 37), (20, 9)], {}),
    "rotary positions": ("llama", {**KV, "block_windows": 3}, [(37, 61), (1, 1)], {}),
    "both memories": ("qwen3", {"recent": 3, "sinks": 1}, [(30, 5), (20, 12)], {}),
    "sliding window": ("gemma3_text", {**KV, "block_windows": 2, "settings": tiny.WIDE}, [(30, 40), (20, 12)], {}),
    "encoder": ("bert", {"slots": 0, "recent": 3, "block_windows": 2}, [(30, 14), (9, 8)], {}),
    "dropout": ("gpt2", {**KV, "block_windows": 2}, [(61, 37), (20, 9)], {"train": True}),
    "truncated": ("llama", {**KV, "block_windows": 2, "bptt_windows": 3}, [(61, 37), (50, 9)], {}),
    "without state": ("llama", {**KV, "block_windows": 2}, [(61, 37), (20, 9)], {"call": {"use_state": False}}),
    "continued": ("llama", {**KV, "block_windows": 2}, [(40, 30), (20, 9)], {"read": 20}),
    "scaled": ("llama", {**KV, "block_windows": 2}, [(40, 30), (20, 9)], {"call": {"num_items_in_batch": 17}}),
    "frozen base": ("gpt2", {**KV, "block_windows": 2}, [(61, 37), (7, 6)], {"freeze": True}),
    "memory tokens": ("gpt2", tiny.TOKENS, [(61, 37), (20, 9)], {}),
    "associative": ("llama", tiny.ASSOCIATIVE, [(30, 5), (20, 12)], {"read": 20}),
    "version 1": ("gpt2", {**KV, "block_windows": 2}, [(61, 37), (20, 9)], {"version": 1}),
}


def _model(name, **fields):
    model, settings, _, more = CASES[name]
    built = tiny.recurrent(model, **{**settings, **fields}).train(more.get("train", False))
    if more.get("freeze"):
        built.base.requires_grad_(False)
    return built


def _batch(name, rank, model):
    """The arguments of a call: two rows, padded, and perhaps the state after their beginnings."""
    _, _, lengths, more = CASES[name]
    ids, lengths = IDS[2 * rank : 2 * rank + 2], torch.tensor(lengths[rank])
    ids = ids[:, : lengths.max()]
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    batch = {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100), **more.get("call", {})}
    if "read" in more:
        batch["state"] = model.advance_state(tiny.documents(2, more["read"], seed=rank)).detach()
    torch.manual_seed(5 + rank)
    return {"input_ids": ids, **batch}


def _shard(model, version=2):
    layers = model.config.architecture.layer_list(model.backbone)
    if version == 1:
        settings = {"use_orig_params": True, "device_id": torch.device("cpu")}
        return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({type(layers[0])}), **settings)
    mesh = init_device_mesh("cpu", (2,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _gradients(module, version):
    if version == 1:
        with FullyShardedDataParallel.summon_full_params(module, with_grads=True):
            return {name.replace("_fsdp_wrapped_module.", ""): p.grad.clone() for name, p in module.named_parameters()}
    return {name: p.grad.full_tensor() for name, p in module.named_parameters() if p.grad is not None}


def _work(rank):
    """All that runs in two processes, whose start takes longer than the rest."""
    return {"cases": _cases(rank), "peaks": _peaks(), "refused": _own_unit()}


def _cases(rank):
    results = {}
    for name, (*_, more) in CASES.items():
        model, version = _model(name), more.get("version", 2)
        batch = _batch(name, rank, model)  # before the weights are sharded
        module = _shard(model, version)
        out = cf.sharded_backward(module, **batch, factor=3.0)
        results[name] = out.loss, out.state.memory, _gradients(module, version)
    return results


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return ranks.run(_work, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_those_of_the_whole_graph(sharded, name):
    """Each rank's batch alone, with plain autograd through one window after the other."""
    windows = {} if CASES[name][3].get("train") else {"block_windows": 1}  # else dropout draws for other windows
    gradients = []
    for rank in (0, 1):
        model = _model(name, keep_graph=True, **windows)
        out = model(**_batch(name, rank, model))
        (3 * out.loss).backward()
        loss, memory, _ = sharded[rank]["cases"][name]
        assert_close(loss, out.loss.detach())
        for kind, x in memory.items():
            assert_close(x[out.state.started], out.state.memory[kind].detach()[out.state.started], rtol=1e-4, atol=1e-5)
        gradients.append(tiny.gradients(model))
    mean = {key: (gradients[0][key] + gradients[1][key]) / 2 for key in gradients[0]}
    for rank in (0, 1):
        tiny.assert_same_gradients(sharded[rank]["cases"][name][2], mean, tolerance=2e-5)


# --- memory ----------------------------------------------------------------------------------------------------------


class _LiveBytes:
    """Counts what autograd has saved: bytes now, and at most."""

    def __init__(self):
        self.now = self.most = 0

    def pack(self, x):
        holder = _Holder(x)
        self.now += x.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(holder, self._free, x.nbytes)
        return holder

    def _free(self, size):
        self.now -= size


class _Holder:
    def __init__(self, x):
        self.x = x


def _peaks():
    """For documents of 6, 12 and 24 windows: the most bytes that autograd saves, and those of all states alive."""
    model = tiny.recurrent("llama", **KV, overlap=0, block_windows=2)
    module, size, peaks = _shard(model), sum(model.memory.sizes), []
    for windows in (6, 12, 24):
        ids, saved, states = tiny.documents(1, 8 * windows + 1), _LiveBytes(), [0]

        def count(*_, states=states):
            alive = {x.data_ptr() for x in gc.get_objects() if isinstance(x, torch.Tensor) and x.shape == (1, size)}
            states.append(len(alive))

        handle = model.get_input_embeddings().register_forward_hook(count)
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda holder: holder.x):
            cf.sharded_backward(module, ids, labels=ids)
        handle.remove()
        peaks.append((saved.most, max(states)))
    return peaks


def test_memory_grows_by_one_state_a_block(sharded):
    for rank in sharded:
        (few, few_states), (more, more_states), (most, most_states) = rank["peaks"]
        assert few == more == most > 0, "activations of a block"
        assert (more_states - few_states, most_states - more_states) == (3, 6), "blocks"


# --- refused ---------------------------------------------------------------------------------------------------------


def _own_unit():
    model = tiny.recurrent("llama")
    fully_shard(model.memory, mesh=init_device_mesh("cpu", (2,)))
    try:
        cf.sharded_backward(_shard(model), IDS, labels=IDS)
    except ValueError as error:
        return str(error)


def test_a_memory_in_a_unit_of_its_own_is_refused(sharded):
    assert "model.memory is an FSDP unit of its own" in sharded[0]["refused"]


def test_other_models_are_refused():
    with pytest.raises(ValueError, match="for weights that FSDP shards"):
        cf.sharded_backward(tiny.recurrent("llama"), IDS, labels=IDS)
    with pytest.raises(ValueError, match="a loss for every token, not RecurrentForSequenceClassification"):
        cf.sharded_backward(tiny.recurrent("bert", "sequence"), IDS, labels=IDS)
    with pytest.raises(ValueError, match="a loss for every token, not RecurrentModel"):
        cf.sharded_backward(tiny.recurrent("llama", "none"), IDS, labels=IDS)
    with pytest.raises(ValueError, match="labels=None"):
        cf.sharded_backward(tiny.recurrent("llama"), IDS)
