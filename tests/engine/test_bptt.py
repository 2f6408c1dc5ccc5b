# SPDX-License-Identifier: Apache-2.0
"""Gradients under everything people put on top of a training step, and the ways in which that has gone wrong."""

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
from carryforward.engine.window_batches import Reading

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
        (2, [False, False, False, False]),  # windows 1-2, 3-4 and 5 stand apart
        (3, [False, False, False, True]),  # 1-3 and 4-5
        (4, [False, False, False, False]),  # 1-4 and 5
        (5, [True, True, True, True]),
    ],
)
def test_truncation_stops_the_gradient_where_it_says(bptt_windows, reached, keep_graph):
    """The fifth window's loss reaches a token's embedding in an earlier window exactly if no cut lies between them."""
    model = tiny.recurrent(
        "gpt2", overlap=0, bptt_windows=bptt_windows, keep_graph=keep_graph, settings={"tie_word_embeddings": False}
    )
    ids = torch.arange(5, 46)[None]  # every token once
    labels = ids.masked_fill(torch.arange(41) < 33, -100)  # targets of inputs 32 to 39
    model(ids, labels=labels).loss.backward()
    by_window = model.get_input_embeddings().weight.grad[5:45].view(5, 8, -1)
    assert [bool(part.any()) for part in by_window] == [*reached, True]


def test_truncation_counts_from_the_documents_start_when_streaming():
    model = tiny.recurrent("gpt2", overlap=0, bptt_windows=2)
    expected = step(model)[1]
    first = model(IDS[:, :11], labels=IDS[:, :11])
    second = model(IDS[:, 11:], labels=IDS[:, 11:], state=first.state)
    ((first.nll_sum + second.nll_sum) / (first.n_scored + second.n_scored)).backward()
    tiny.assert_same_gradients(expected, tiny.gradients(model))


@BOTH
def test_truncation_of_rows_at_different_windows(keep_graph):
    """Documents of different age in one batch are cut each at its own windows."""
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
def test_bfloat16_autocast(name, keep_graph):
    """Close to float32, and no weight without a gradient: weights cast in the first pass must not serve the second."""
    model = tiny.recurrent(name, keep_graph=keep_graph)
    expected_loss, expected = step(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(IDS, labels=IDS)  # fills the cast cache, as an earlier micro-batch would
        loss, got = step(model)
    assert_close(loss, expected_loss, rtol=0.02, atol=0.02)
    assert got.keys() == expected.keys()
    assert all(got[key].any() for key in expected if expected[key].any())
    for part in ("base.", "recurrence."):
        a, b = (torch.cat([g.flatten() for n, g in side.items() if n.startswith(part)]) for side in (got, expected))
        assert (a - b).norm() < 0.2 * b.norm(), part


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_bfloat16_autocast_recomputed_equals_kept(name):
    results = []
    for keep_graph in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(step(tiny.recurrent(name, keep_graph=keep_graph)))
    assert_close(results[0][0], results[1][0])
    # the sums over windows are made in another order, of numbers with eight bits
    tiny.assert_same_gradients(results[0][1], results[1][1], tolerance=5e-3)


def test_autocast_is_in_force_when_windows_run_again():
    """Hidden states are recomputed in `backward`, which people call outside of autocast."""

    def gradient(keep_graph, enabled):
        model = tiny.recurrent("gpt2", "none", keep_graph=keep_graph)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = model(IDS)
        assert out.state.carried.dtype == torch.float32, "states keep the weights' precision"
        (out.last_hidden_state.float() * torch.linspace(-1, 1, tiny.WIDTH)).square().sum().backward()
        return torch.cat([g.flatten() for g in tiny.gradients(model).values()])

    kept = gradient(True, True)
    assert (gradient(False, True) - kept).norm() < 3e-3 * kept.norm()
    assert (gradient(False, False) - kept).norm() > 6e-3 * kept.norm(), "in float32 it would be another number"


def test_bfloat16_weights():
    model = tiny.recurrent("gpt2").to(torch.bfloat16)
    loss, gradients = step(model)
    assert all(g.dtype == torch.bfloat16 for g in gradients.values())
    assert_close(loss, step(tiny.recurrent("gpt2"))[0], rtol=0.02, atol=0.02)


@BOTH
def test_accumulated_steps_add_up(keep_graph):
    model = tiny.recurrent("gpt2", keep_graph=keep_graph)
    expected = step(model)[1]
    for row in (0, 1):
        model(IDS[row : row + 1], labels=IDS[row : row + 1], num_items_in_batch=torch.tensor(2 * 36)).loss.backward()
    tiny.assert_same_gradients(expected, tiny.gradients(model))


@BOTH
def test_one_window_gives_the_recurrence_a_gradient_of_zero_not_none(keep_graph):
    model = tiny.recurrent("gpt2", keep_graph=keep_graph)
    _, gradients = step(model, IDS[:, :6])
    for name, _ in model.recurrence.named_parameters():
        assert gradients[f"recurrence.{name}"].abs().max() == 0
    _, gradients = step(model, IDS[:, :1])  # nothing at all to score
    assert all(g.abs().max() == 0 for n, g in gradients.items() if n.startswith("recurrence."))


def test_a_hook_on_a_parameters_gradient_runs_once():
    plain = step(tiny.recurrent("gpt2"))[1]
    model = tiny.recurrent("gpt2")
    calls = []
    model.base.transformer.ln_f.weight.register_hook(lambda gradient: calls.append(1) or 2 * gradient)
    hooked = step(model)[1]
    assert len(calls) == 1
    assert_close(hooked["base.transformer.ln_f.weight"], 2 * plain["base.transformer.ln_f.weight"])


def test_frozen_base_trains_the_recurrence_alone():
    results = []
    for keep_graph in (False, True):
        model = tiny.recurrent("llama", keep_graph=keep_graph)
        model.base.requires_grad_(False)
        results.append(step(model))
    assert all(name.startswith("recurrence.") for name in results[0][1])
    tiny.assert_same_gradients(results[0][1], results[1][1])


def test_dropout_that_only_the_base_model_has_switched_on():
    results = []
    for keep_graph in (False, True):
        model = tiny.recurrent("gpt2", keep_graph=keep_graph).eval()
        model.base.train()
        torch.manual_seed(5)
        results.append(step(model))
    assert_close(results[0][0], results[1][0])
    tiny.assert_same_gradients(results[0][1], results[1][1])


def test_tokens_overwritten_before_backward_are_an_error():
    """As in the base model; windows that are run again would read other tokens."""
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
def test_a_step_leaves_nothing_behind(labels, backward):
    """Neither its states nor the gradients that were waiting: a cycle through autograd would never be collected."""
    model = tiny.recurrent("gpt2")
    gc.collect()
    for _ in range(2):
        out = model(IDS, labels=labels)
        if backward:
            (out.logits.mean() if labels is None else out.loss).backward()
        del out
    gc.collect()
    assert not [held for held in gc.get_objects() if type(held) in (bptt._Sweep, Reading)]


def test_a_weight_changed_before_backward_is_an_error():
    model = tiny.recurrent("gpt2")
    loss = model(IDS, labels=IDS).loss
    with torch.no_grad():
        model.base.transformer.ln_f.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_gradient_of_the_carried_state_reaches_back():
    """What is built on the state alone trains everything behind it."""
    results = []
    for keep_graph in (False, True):
        model = tiny.recurrent("gpt2", keep_graph=keep_graph)
        out = model(IDS, labels=IDS)
        (out.loss + out.state.carried.tanh().mean()).backward()
        both = tiny.gradients(model)
        model(IDS, labels=IDS).state.carried.tanh().mean().backward()
        results.append((both, tiny.gradients(model)))
    tiny.assert_same_gradients(results[0][0], results[1][0])
    tiny.assert_same_gradients(results[0][1], results[1][1])


def test_a_detached_state_stops_the_gradient():
    model = tiny.recurrent("gpt2", settings={"tie_word_embeddings": False})
    ids = torch.arange(5, 45)[None]
    first = model(ids[:, :20], labels=ids[:, :20])
    model(ids[:, 20:], labels=ids[:, 20:], state=first.state.detach()).loss.backward()
    seen = model.get_input_embeddings().weight.grad[5:25].any(dim=1)
    assert not seen[:12].any(), "only the unfinished window's tokens are read again"


@pytest.mark.parametrize(("name", "keep_graph"), [("gpt2", False), ("bert", True)])
def test_compiled_equals_eager(name, keep_graph):
    model = tiny.recurrent(name, keep_graph=keep_graph)
    loss, expected = step(model)
    torch._dynamo.reset()
    model.compile(backend="aot_eager", fullgraph=True)  # what a window runs, as one graph
    wrapped = torch.compile(model, backend="aot_eager")  # what users and `Trainer` write
    for call in (model, wrapped):
        out = call(IDS, labels=IDS)
        out.loss.backward()
        assert_close(out.loss.detach(), loss)
        tiny.assert_same_gradients(expected, tiny.gradients(model))


def _parallel_gradients(rank: int, keep_graph: bool) -> dict[str, torch.Tensor]:
    model = tiny.recurrent("gpt2", keep_graph=keep_graph)
    parallel = DistributedDataParallel(model)
    # one rank has documents of a single token, then of a single window: not everything takes part there
    for length in (1, 6):
        ids = IDS[:1, :length] if rank == 0 else IDS[1:]
        model.zero_grad()
        parallel(ids, labels=ids).loss.backward()
    return tiny.gradients(model)


@BOTH
def test_two_ranks_have_equal_and_right_gradients(keep_graph, tmp_path):
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
        fully_shard(model.recurrence, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _sharded_gradients(rank: int) -> dict[str, torch.Tensor]:
    model = _sharded("llama")
    for length in (6, 37):  # a single window on one rank, then many on both
        ids = IDS[:1, :length] if rank == 0 else IDS[1:]
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def _kept_gradients(rank: int, own_unit: bool) -> dict[str, torch.Tensor]:
    model = _sharded("gpt2", own_unit=own_unit, kept=3, sinks=1)
    ids = IDS[rank : rank + 1]
    model(ids, labels=ids).loss.backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize("own_unit", [False, True])
def test_sharded_places_have_the_right_gradients(tmp_path, own_unit):
    first, second = ranks.run(_kept_gradients, tmp_path, own_unit)
    tiny.assert_same_gradients(first, second, tolerance=0)
    model = tiny.recurrent("gpt2", kept=3, sinks=1)
    alone = [step(model, IDS[row : row + 1])[1] for row in (0, 1)]
    tiny.assert_same_gradients(first, {name: (alone[0][name] + alone[1][name]) / 2 for name in first})


def test_sharded_weights_have_the_right_gradients(tmp_path):
    """FSDP gathers weights in hooks, so recomputation gives way to the plain graph."""
    first, second = ranks.run(_sharded_gradients, tmp_path)
    tiny.assert_same_gradients(first, second, tolerance=0)
    model = tiny.recurrent("llama")
    alone = [step(model, IDS[row : row + 1])[1] for row in (0, 1)]
    tiny.assert_same_gradients(first, {name: (alone[0][name] + alone[1][name]) / 2 for name in first})
