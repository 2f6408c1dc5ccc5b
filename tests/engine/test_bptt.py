# SPDX-License-Identifier: Apache-2.0
"""Gradients through time: truncation, autocast, hooks, frozen weights, compilation, DDP and FSDP."""

import gc

import pytest
import torch
from helpers import ranks, tiny
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import carryforward as cf
from carryforward.engine import bptt
from carryforward.engine.batch_plan import BatchPlan

BOTH = pytest.mark.parametrize("keep_graph", [False, True], ids=["recomputed", "kept"])
IDS = tiny.documents(2, 37)


def step(model, ids=IDS, **arguments):
    """Loss and gradients of one training step."""
    loss = model(ids, labels=ids, **arguments).loss
    loss.backward()
    return loss.detach(), tiny.gradients(model)


@BOTH
@pytest.mark.parametrize(
    ("bptt_windows", "reached"),
    [
        (None, [True, True, True, True]),
        (2, [False, False, False, False]),  # windows 1-2, 3-4 and 5 are separate
        (3, [False, False, False, True]),  # 1-3 and 4-5
        (4, [False, False, False, False]),  # 1-4 and 5
        (5, [True, True, True, True]),
    ],
)
def test_truncation_stops_the_gradient(bptt_windows, reached, keep_graph):
    """The fifth window's loss reaches the embeddings of an earlier window exactly if no state between is detached."""
    model = tiny.recurrent(
        "gpt2", overlap=0, bptt_windows=bptt_windows, keep_graph=keep_graph, settings={"tie_word_embeddings": False}
    )
    ids = torch.arange(5, 46)[None]  # every token once
    labels = ids.masked_fill(torch.arange(41) < 33, -100)  # targets of inputs 32 to 39
    model(ids, labels=labels).loss.backward()
    by_window = model.get_input_embeddings().weight.grad[5:45].view(5, 8, -1)
    assert [bool(part.any()) for part in by_window] == [*reached, True]


def test_truncation_counts_windows_from_the_start_of_the_document():
    model = tiny.recurrent("gpt2", overlap=0, bptt_windows=2)
    expected = step(model)[1]
    first = model(IDS[:, :11], labels=IDS[:, :11])
    second = model(IDS[:, 11:], labels=IDS[:, 11:], state=first.state)
    ((first.nll_sum + second.nll_sum) / (first.n_scored + second.n_scored)).backward()
    tiny.assert_same_gradients(expected, tiny.gradients(model))


@BOTH
def test_truncation_follows_each_row_s_own_windows(keep_graph):
    """Rows of a batch may be at different windows of their documents."""
    model = tiny.recurrent("gpt2", overlap=0, bptt_windows=2, keep_graph=keep_graph)
    states = [model(IDS[:1, :length], labels=IDS[:1, :length]).state.detach() for length in (3, 10)]
    total = sum(model(IDS[:1], labels=IDS[:1], state=state).nll_sum for state in states)
    total.backward()
    expected = tiny.gradients(model)
    both = IDS[:1].expand(2, -1)
    model(both, labels=both, state=cf.State.cat(states)).nll_sum.backward()
    tiny.assert_same_gradients(expected, tiny.gradients(model))


@BOTH
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3_text", "bert", "modernbert"])
def test_gradients_under_autocast_are_close_to_float32(name, keep_graph):
    """And no weight lacks one: weights cast in the first pass, without a graph, must not be used in the second."""
    model = tiny.recurrent(name, keep_graph=keep_graph)
    expected_loss, expected = step(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(IDS, labels=IDS)  # fills autocast's cache, as an earlier micro-batch would
        loss, gradients = step(model)
    assert_close(loss, expected_loss, rtol=0.02, atol=0.02)
    assert gradients.keys() == expected.keys()
    assert all(gradients[key].any() for key in expected if expected[key].any())
    for part in ("base.", "memory."):
        a, b = (
            torch.cat([g.flatten() for n, g in side.items() if n.startswith(part)]) for side in (gradients, expected)
        )
        assert (a - b).norm() < 0.2 * b.norm(), part


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_recomputed_gradients_under_autocast_equal_kept_ones(name):
    results = []
    for keep_graph in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(step(tiny.recurrent(name, keep_graph=keep_graph)))
    assert_close(results[0][0], results[1][0])
    # Windows are summed in another order, in numbers of eight bits.
    tiny.assert_same_gradients(results[0][1], results[1][1], tolerance=5e-3)


def test_autocast_is_restored_when_windows_are_recomputed():
    """Hidden states are recomputed in `backward`, which is usually called outside of autocast."""

    def gradient(keep_graph, enabled):
        model = tiny.recurrent("gpt2", "none", keep_graph=keep_graph)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = model(IDS)
        assert out.state.memory["vector"].dtype == torch.float32, "states keep the weights' precision"
        (out.last_hidden_state.float() * torch.linspace(-1, 1, tiny.WIDTH)).square().sum().backward()
        return torch.cat([g.flatten() for g in tiny.gradients(model).values()])

    kept = gradient(True, True)
    assert (gradient(False, True) - kept).norm() < 3e-3 * kept.norm()
    assert (gradient(False, False) - kept).norm() > 6e-3 * kept.norm(), "in float32 it would be another number"


def test_bfloat16_weights_have_bfloat16_gradients():
    model = tiny.recurrent("gpt2").to(torch.bfloat16)
    loss, gradients = step(model)
    assert all(g.dtype == torch.bfloat16 for g in gradients.values())
    assert_close(loss, step(tiny.recurrent("gpt2"))[0], rtol=0.02, atol=0.02)


@BOTH
def test_accumulated_micro_batches_equal_one_batch(keep_graph):
    model = tiny.recurrent("gpt2", keep_graph=keep_graph)
    expected = step(model)[1]
    for row in (0, 1):
        model(IDS[row : row + 1], labels=IDS[row : row + 1], num_items_in_batch=torch.tensor(2 * 36)).loss.backward()
    tiny.assert_same_gradients(expected, tiny.gradients(model))


@BOTH
def test_one_window_gives_the_memory_a_gradient_of_zero_not_none(keep_graph):
    model = tiny.recurrent("gpt2", keep_graph=keep_graph)
    assert list(model.memory.parameters())
    for length in (6, 1):  # one window; nothing to score
        _, gradients = step(model, IDS[:, :length])
        for name, _ in model.memory.named_parameters():
            assert gradients[f"memory.{name}"].abs().max() == 0


def test_a_hook_on_a_parameters_gradient_runs_once():
    plain = step(tiny.recurrent("gpt2"))[1]
    model = tiny.recurrent("gpt2")
    calls = []
    model.base.transformer.ln_f.weight.register_hook(lambda gradient: calls.append(1) or 2 * gradient)
    hooked = step(model)[1]
    assert len(calls) == 1
    assert_close(hooked["base.transformer.ln_f.weight"], 2 * plain["base.transformer.ln_f.weight"])


def test_with_a_frozen_base_model_only_the_memory_is_trained():
    results = []
    for keep_graph in (False, True):
        model = tiny.recurrent("llama", keep_graph=keep_graph)
        model.base.requires_grad_(False)
        results.append(step(model))
    assert all(name.startswith("memory.") for name in results[0][1])
    tiny.assert_same_gradients(results[0][1], results[1][1])


def test_dropout_of_the_base_model_alone_is_repeated():
    results = []
    for keep_graph in (False, True):
        model = tiny.recurrent("gpt2", keep_graph=keep_graph).eval()
        model.base.train()
        torch.manual_seed(5)
        results.append(step(model))
    assert_close(results[0][0], results[1][0])
    tiny.assert_same_gradients(results[0][1], results[1][1])


def test_tokens_overwritten_before_backward_are_an_error():
    """Recomputed windows would read other tokens."""
    model = tiny.recurrent("gpt2")
    ids = IDS.clone()
    loss = model(ids).logits.square().mean()
    ids.fill_(5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_backward_twice_through_a_retained_graph():
    model = tiny.recurrent("gpt2")
    loss = model(IDS, labels=IDS).loss
    loss.backward(retain_graph=True)
    once = tiny.gradients(model)
    loss.backward()
    tiny.assert_same_gradients(once, tiny.gradients(model))


@pytest.mark.parametrize("backward", [True, False], ids=["trained", "forward only"])
@pytest.mark.parametrize("labels", [IDS, None], ids=["loss", "logits"])
def test_a_step_leaks_no_memory(labels, backward):
    """A reference cycle through autograd would never be collected."""
    model = tiny.recurrent("gpt2")
    gc.collect()
    for _ in range(2):
        out = model(IDS, labels=labels)
        if backward:
            (out.logits.mean() if labels is None else out.loss).backward()
        del out
    gc.collect()
    assert not [alive for alive in gc.get_objects() if type(alive) in (bptt._TwoPassRecompute, BatchPlan)]


def test_a_weight_changed_before_backward_is_an_error():
    model = tiny.recurrent("gpt2")
    loss = model(IDS, labels=IDS).loss
    with torch.no_grad():
        model.base.transformer.ln_f.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_loss_on_the_state_alone_reaches_back():
    """Also without a loss on tokens."""
    results = []
    for keep_graph in (False, True):
        model = tiny.recurrent("gpt2", keep_graph=keep_graph)
        out = model(IDS, labels=IDS)
        (out.loss + out.state.memory["vector"].tanh().mean()).backward()
        both = tiny.gradients(model)
        model(IDS, labels=IDS).state.memory["vector"].tanh().mean().backward()
        results.append((both, tiny.gradients(model)))
    tiny.assert_same_gradients(results[0][0], results[1][0])
    tiny.assert_same_gradients(results[0][1], results[1][1])


def test_a_detached_state_stops_the_gradient():
    model = tiny.recurrent("gpt2", settings={"tie_word_embeddings": False})
    ids = torch.arange(5, 45)[None]
    first = model(ids[:, :20], labels=ids[:, :20])
    model(ids[:, 20:], labels=ids[:, 20:], state=first.state.detach()).loss.backward()
    reached = model.get_input_embeddings().weight.grad[5:25].any(dim=1)
    assert not reached[:12].any(), "only the tokens of the unfinished window are read again"


@pytest.mark.parametrize(("name", "keep_graph"), [("gpt2", False), ("bert", True)])
def test_compiled_equals_eager(name, keep_graph):
    model = tiny.recurrent(name, keep_graph=keep_graph)
    loss, expected = step(model)
    torch._dynamo.reset()
    model.compile(backend="aot_eager", fullgraph=True)  # the base model, as one graph
    wrapped = torch.compile(model, backend="aot_eager")  # as users and `Trainer` do
    for call in (model, wrapped):
        out = call(IDS, labels=IDS)
        out.loss.backward()
        assert_close(out.loss.detach(), loss)
        tiny.assert_same_gradients(expected, tiny.gradients(model))


def _parallel_gradients(rank: int, keep_graph: bool) -> dict[str, torch.Tensor]:
    model = tiny.recurrent("gpt2", keep_graph=keep_graph)
    parallel = DistributedDataParallel(model)
    # One rank has a document of a single token, then of a single window: not all weights are used there.
    for length in (1, 6):
        ids = IDS[:1, :length] if rank == 0 else IDS[1:]
        model.zero_grad()
        parallel(ids, labels=ids).loss.backward()
    return tiny.gradients(model)


@BOTH
def test_ddp_gradients_are_equal_and_correct(keep_graph, tmp_path):
    first, second = ranks.run(_parallel_gradients, tmp_path, keep_graph)
    tiny.assert_same_gradients(first, second, tolerance=0)
    model = tiny.recurrent("gpt2")
    alone = [step(model, IDS[:1, :6])[1], step(model, IDS[1:])[1]]
    tiny.assert_same_gradients(first, {name: (alone[0][name] + alone[1][name]) / 2 for name in first})


def _sharded(name: str, *, own_unit: bool = False, **fields):
    model = tiny.recurrent(name, **fields)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.config.architecture.layer_list(model.backbone):
        fully_shard(layer, mesh=mesh)
    if own_unit:
        fully_shard(model.memory, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _sharded_gradients(rank: int) -> dict[str, torch.Tensor]:
    model = _sharded("llama")
    for length in (6, 37):  # a single window on one rank, then many on both
        ids = IDS[:1, :length] if rank == 0 else IDS[1:]
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def _sharded_kv_gradients(rank: int, own_unit: bool) -> dict[str, torch.Tensor]:
    model = _sharded("gpt2", own_unit=own_unit, recent=3, sinks=1)
    ids = IDS[rank : rank + 1]
    model(ids, labels=ids).loss.backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize("own_unit", [False, True])
def test_fsdp_gradients_of_position_offsets_are_correct(tmp_path, own_unit):
    first, second = ranks.run(_sharded_kv_gradients, tmp_path, own_unit)
    tiny.assert_same_gradients(first, second, tolerance=0)
    model = tiny.recurrent("gpt2", recent=3, sinks=1)
    alone = [step(model, IDS[row : row + 1])[1] for row in (0, 1)]
    tiny.assert_same_gradients(first, {name: (alone[0][name] + alone[1][name]) / 2 for name in first})


def test_fsdp_gradients_are_equal_and_correct(tmp_path):
    """FSDP gathers weights in hooks, so the graph of all windows is kept instead of recomputing them."""
    first, second = ranks.run(_sharded_gradients, tmp_path)
    tiny.assert_same_gradients(first, second, tolerance=0)
    model = tiny.recurrent("llama")
    alone = [step(model, IDS[row : row + 1])[1] for row in (0, 1)]
    tiny.assert_same_gradients(first, {name: (alone[0][name] + alone[1][name]) / 2 for name in first})
