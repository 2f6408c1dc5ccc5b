# SPDX-License-Identifier: Apache-2.0
"""The fast path: windows that are recorded once and replayed give what windows give that are run as they are.

Where there is no GPU a recording is a tape of operations on tensors, which are done again in the same places; whatever
Python decided then stays decided, as in a CUDA graph. On a GPU the real thing is tested as well.
"""

import contextlib
import copy
import pickle

import pytest
import torch
from helpers import tiny
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

import carryforward as cf
from carryforward.backbones import hooks
from carryforward.embeddings import encode
from carryforward.engine import activation_budget, bptt, cuda_graphs, graph_cache
from carryforward.models import window_cache

IDS = tiny.documents(3, 45)
RAGGED = torch.tensor([[1] * 45, [1] * 30 + [0] * 15, [1] * 9 + [0] * 36])
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class Tape(TorchDispatchMode):
    """Notes every operation on tensors."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, result))
        return result


def run_again(function, pool):
    """A recording without a GPU: the same operations on the same tensors, and not a line of Python again."""
    with Tape() as tape:
        results = function()

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)  # or what was cast, and cast back, is cast once more
    def again():
        for operation, args, kwargs, result in tape.operations:
            if any(r.alias_info is not None and not r.alias_info.is_write for r in operation._schema.returns):
                continue  # a view: it shows what it is a view of
            new = operation(*[a.detach() if isinstance(a, torch.Tensor) else a for a in args], **kwargs)
            for place, value in zip(tree_leaves(result), tree_leaves(new), strict=True):
                if isinstance(place, torch.Tensor) and place.data_ptr() != value.data_ptr():
                    place.detach().copy_(value)

    return results, again


@pytest.fixture
def recordings(monkeypatch):
    """Recordings on a CPU, made at the second window of a kind, and counted."""
    made = []
    monkeypatch.setattr(graph_cache, "DEVICES", ("cpu",))
    monkeypatch.setattr(graph_cache, "RECORD_AFTER", 1)
    monkeypatch.setattr(cuda_graphs, "warm_up", lambda function, times=1: function())
    monkeypatch.setattr(cuda_graphs.GradientAccumulator, "pool", lambda self, shared=True: None)
    monkeypatch.setattr(
        cuda_graphs, "record", lambda function, pool: made.append(function) or run_again(function, pool)
    )
    return made


def step(model, ids=IDS, seed=3, **kwargs):
    torch.manual_seed(seed)
    out = model(ids, labels=ids, **kwargs)
    out.loss.backward()
    return out, tiny.gradients(model)


def both(name, training=False, **fields):
    plain, fast = (tiny.recurrent(name, **fields).train(training) for _ in range(2))
    plain.fast_path = "off"
    return plain, fast


@pytest.mark.parametrize("keep", [0, 2, 100, "auto"])
@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_replayed_windows_train_as_others_do(name, keep, recordings):
    plain, fast = both(name, training=True, keep_windows=keep)  # with dropout, where the model has some
    for seed in range(3):
        ids = tiny.documents(3, 45, seed)
        expected, slow = step(plain, ids, seed)
        out, quick = step(fast, ids, seed)
        assert_close(out.loss, expected.loss)
        assert_close(out.state.carried, expected.state.carried)
        tiny.assert_same_gradients(slow, quick)
    assert recordings, "nothing was replayed"


@pytest.mark.parametrize("keep", [0, "auto"])
@pytest.mark.parametrize(
    "length", [41, 45, 46]
)  # their last windows are shorter than others, and see all of themselves
@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_encoders(name, length, keep, recordings):
    plain, fast = both(name, keep_windows=keep)
    ids = tiny.documents(3, length)
    for _ in range(3):
        expected, slow = step(plain, ids)
        out, quick = step(fast, ids)
        assert_close(out.loss, expected.loss)
        tiny.assert_same_gradients(slow, quick)
        with torch.no_grad():
            assert_close(fast(ids, labels=ids).loss, plain(ids, labels=ids).loss)
    assert recordings


@pytest.mark.parametrize(
    "fields",
    [
        {"slots": 3, "insert_at": "all", "state_per_layer": True},
        {"pooled_layers": "below", "residual": True, "insert_at": (2, 3)},
        {"bptt_windows": 2},
        {"pooling": "attention", "slots": 2},
        {"slots": 0, "kept": 4, "sinks": 2},
        {"kept": 3},
    ],
    ids=str,
)
def test_recurrences_of_every_kind(fields, recordings):
    plain, fast = both("llama", **fields)
    for _ in range(3):
        expected, slow = step(plain, attention_mask=RAGGED)
        out, quick = step(fast, attention_mask=RAGGED)
        assert_close(out.loss, expected.loss)
        tiny.assert_same_gradients(slow, quick)
    assert recordings


@pytest.mark.parametrize(("name", "training"), [("gpt2", False), ("llama", True)])
def test_rows_of_different_lengths_use_the_recordings_of_full_windows(name, training, recordings):
    plain, fast = both(name, training, keep_windows=0)
    for _ in range(4):
        step(fast)
    made = len(recordings)
    lengths = torch.tensor([45, 41, 30])
    short = (torch.arange(45) < lengths[:, None]).long()
    for mask in (short, short.flip(1)):
        expected, slow = step(plain, attention_mask=mask)
        out, quick = step(fast, attention_mask=mask)
        assert_close(out.loss, expected.loss)
        tiny.assert_same_gradients(slow, quick)
    assert len(recordings) == made, "short windows and fewer rows were recorded anew"


def test_rows_that_are_not_filled_spoil_no_gradient(recordings):
    """What an earlier batch left in them may be anything, and zero times infinity is no number."""
    plain, fast = both("llama", training=True, keep_windows=0)
    for _ in range(4):
        step(fast)
    for made in fast.graph_cache._recordings.values():
        for one in made:
            if one.work.carried is not None:
                one.work.carried.data.fill_(torch.inf)
    _, slow = step(plain, IDS[:2])
    tiny.assert_same_gradients(slow, step(fast, IDS[:2])[1])


def test_what_is_replayed_takes_no_room_and_is_not_taken_for_small(recordings, monkeypatch):
    monkeypatch.setattr(activation_budget, "available", lambda device: 0)
    model = tiny.recurrent("llama", keep_windows="auto").train()
    for _ in range(4):
        step(model)
    assert recordings
    made = len(recordings)
    for _ in range(4):
        step(model, IDS[:2])  # served by recordings of three rows
    assert len(recordings) == made
    assert all(model.activation_budget._sizes.values())
    model.fast_path = "off"
    step(model)
    assert not any(model.activation_budget._ready.values()), "places that are gone"


def test_with_dropout_rows_draw_the_numbers_they_would_without_recordings(recordings):
    plain, fast = both("gpt2", training=True, keep_windows=0)
    for _ in range(4):
        step(fast)
    made = len(recordings)
    for _ in range(3):
        expected, _ = step(plain, IDS[:2])
        assert_close(step(fast, IDS[:2])[0].loss, expected.loss)
    assert len(recordings) > made, "two rows were run as three"


def test_in_pieces_with_gradients_through_the_state(recordings):
    results = []
    for model in both("gpt2"):
        for _ in range(3):
            first = model(IDS[:, :21], labels=IDS[:, :21])
            second = model(IDS[:, 21:], labels=IDS[:, 21:], state=first.state)
            (first.nll_sum + second.nll_sum).backward()
            found = tiny.gradients(model)
        results.append(found)
    tiny.assert_same_gradients(*results)
    assert recordings


def test_without_gradients(recordings):
    plain, fast = both("gpt2")
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            for overlap in (0, 2, 5):
                for _ in range(3):
                    out = fast(IDS, labels=IDS, overlap=overlap)
                expected = plain(IDS, labels=IDS, overlap=overlap)
                assert_close(out.nll_sum, expected.nll_sum)
                assert_close(out.state.carried, expected.state.carried)
    step(fast)  # what was recorded in inference mode does not stand in the way
    assert recordings


def test_a_second_backward_through_a_retained_graph(recordings):
    results = []
    for model in both("gpt2"):
        step(model), step(model)
        out = model(IDS, labels=IDS)
        out.loss.backward(retain_graph=True)
        out.loss.backward()
        results.append(tiny.gradients(model))
    tiny.assert_same_gradients(*results)


def test_weights_that_change_place_are_noticed(recordings):
    plain, fast = both("gpt2")
    step(fast), step(fast)
    for model in (plain, fast):
        model.double()
    (expected, slow), (out, quick) = step(plain), step(fast)
    assert out.loss.dtype == torch.float64
    assert_close(out.loss, expected.loss)
    tiny.assert_same_gradients(slow, quick)
    for model in (plain, fast):
        model.base.requires_grad_(False)
    for _ in range(3):
        (_, slow), (_, quick) = step(plain), step(fast)
        tiny.assert_same_gradients(slow, quick)


@pytest.mark.parametrize("frozen", ["base", "recurrence"])
@pytest.mark.parametrize("keep", [0, 100])
def test_frozen_weights(frozen, keep, recordings):
    plain, fast = both("gpt2", keep_windows=keep)
    for model in (plain, fast):
        getattr(model, frozen).requires_grad_(False)
    for _ in range(3):
        (expected, slow), (out, quick) = step(plain), step(fast)
        assert_close(out.loss, expected.loss)
        tiny.assert_same_gradients(slow, quick)
    assert fast.fast_path == "auto", "a recording failed"
    assert recordings


def test_a_call_that_is_broken_off_leaves_nothing_behind(recordings, monkeypatch):
    plain, fast = both("gpt2", keep_windows=0)
    for _ in range(3):
        _, expected = step(plain)
        step(fast)
    windows, run = [], graph_cache.GraphCache.run

    def interrupted(self, *args):
        windows.append(1)
        if len(windows) == 12:  # in the second pass, when some gradients are summed up already
            raise KeyboardInterrupt
        return run(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(graph_cache.GraphCache, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(fast)
    assert fast.graph_cache._gathering.summed, "the test interrupts too early"
    fast.zero_grad()
    tiny.assert_same_gradients(step(fast)[1], expected)


def freeze_dropout(model):
    model.base.eval()


def cap_logits(model):
    model.base.config.final_logit_softcapping = 0.5


def no_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


@pytest.mark.parametrize(
    ("name", "change"), [("gpt2", freeze_dropout), ("gpt2", no_dropout), ("gemma3_text", cap_logits)]
)
def test_settings_that_change_are_noticed(name, change, recordings):
    plain, fast = both(name, training=True)
    for _ in range(3):
        before, _ = step(plain)
        step(fast)
    for model in (plain, fast):
        change(model)
    for _ in range(3):
        (expected, slow), (out, quick) = step(plain), step(fast)
        assert_close(out.loss, expected.loss)
        tiny.assert_same_gradients(slow, quick)
    assert (before.loss - expected.loss).abs() > 1e-3
    assert recordings


def test_autocast_that_changes_between_calls(recordings):
    results = []
    for model in both("gpt2"):
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                first = model(IDS[:, :21], labels=IDS[:, :21])
            second = model(IDS[:, 21:], labels=IDS[:, 21:], state=first.state)
            second.nll_sum.backward()  # through windows that were run under autocast
            found = tiny.gradients(model)
        results.append(found)
    tiny.assert_same_gradients(*results)
    assert recordings


@pytest.mark.parametrize("keep", [0, 100])
@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_under_autocast_weights_are_cast_once_a_call(name, keep, recordings, monkeypatch):
    """And again in the next one, when they have changed; to the numbers that casting them in every window gives."""
    plain, fast = both(name, keep_windows=keep)
    layers = {weight.data_ptr() for layer in fast.config.architecture.layer_list(fast.backbone) for weight in
              (m.weight for m in layer.modules() if isinstance(m, torch.nn.Linear | Conv1D))}  # fmt: skip
    cast = []

    class AutocastWeights(Tape):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._to_copy.default and args[0].data_ptr() in layers:
                cast.append(args[0])
            return super().__torch_dispatch__(function, types, args, kwargs)

    monkeypatch.setattr(f"{__name__}.Tape", AutocastWeights)
    for seed in range(3):
        for model in (plain, fast):
            with torch.no_grad():
                for weight in model.base.parameters():
                    weight.mul_(1.1)
        with torch.autocast("cpu", torch.bfloat16):
            expected, slow = step(plain, seed=seed)
            out, quick = step(fast, seed=seed)
        assert torch.equal(out.loss, expected.loss)
        assert torch.equal(out.state.carried, expected.state.carried)
        assert out.state.carried.dtype == torch.float32
        tiny.assert_same_gradients(slow, quick)
    assert recordings
    assert not cast
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            assert_close(fast(IDS, labels=IDS).nll_sum, plain(IDS, labels=IDS).nll_sum)
    assert not cast


class Adapter(torch.nn.Module):
    """Reads the weight of the layer it is around, as some adapters do."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x):
        return self.base_layer(x) * torch.linalg.norm(self.base_layer.weight, dim=1)


class Own(torch.nn.Linear):
    """Perhaps a quantised one."""


def adapted(model):
    for layer in model.backbone.layers:
        layer.self_attn.v_proj = Adapter(layer.self_attn.v_proj)


def tied(model):
    model.recurrence.networks[0][0].weight = model.backbone.layers[0].self_attn.q_proj.weight


def foreign(model):
    for module in model.backbone.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = Own


def half(model):
    model.to(torch.bfloat16)


@pytest.mark.parametrize("change", [adapted, tied, foreign, half])
def test_weights_that_others_look_at_are_not_cast(change, recordings):
    """Two calls before the backward pass: renewing what was cast must not touch the weights themselves."""
    results = []
    for model in both("llama", keep_windows=0, hidden_sizes=(16,)):
        change(model)
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                first, second = model(IDS, labels=IDS), model(IDS.flip(1), labels=IDS.flip(1))
            (first.loss + second.loss).backward()
            found = tiny.gradients(model)
        results.append(found | {"losses": torch.stack([first.loss, second.loss]).detach()})
    assert torch.equal(results[0].pop("losses"), results[1].pop("losses"))
    # autocast adds the gradients of a weight that is used twice in its own precision, unless it casts it twice
    tiny.assert_same_gradients(*results, tolerance=1e-3 if change is tied else 1e-5)
    assert recordings


def test_a_model_that_changes_before_its_backward(recordings):
    results = []
    for model in both("gpt2"):
        step(model), step(model)
        out = model(IDS, labels=IDS)
        model.base.requires_grad_(False)
        model(IDS, labels=IDS)
        model.base.requires_grad_(True)
        out.state.carried.sum().backward()
        results.append(tiny.gradients(model))
    tiny.assert_same_gradients(*results)


def test_a_model_of_which_nothing_is_trained(recordings):
    plain, fast = both("gpt2")
    for model in (plain, fast):
        model.requires_grad_(False)
    for _ in range(3):
        assert_close(fast(IDS, labels=IDS).loss, plain(IDS, labels=IDS).loss)
    assert 0 < len(recordings) <= 3, "one for each kind of window"


def test_weights_that_change_in_place_are_used(recordings):
    plain, fast = both("gpt2")
    for model in (plain, fast):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            model(IDS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(fast(IDS, labels=IDS).loss, plain(IDS, labels=IDS).loss)
    assert recordings


def test_what_fails_is_said_once_and_run_as_it_is(recordings, monkeypatch):
    def broken(function, pool):
        raise RuntimeError("no kernel image\nand a long trace")

    monkeypatch.setattr(cuda_graphs, "record", broken)
    plain, fast = both("gpt2")
    said = []
    monkeypatch.setattr(graph_cache.logger, "warning_once", said.append)
    for _ in range(3):
        (expected, slow), (out, quick) = step(plain), step(fast)
        assert_close(out.loss, expected.loss)
        tiny.assert_same_gradients(slow, quick)
    assert said == ["Windows are run without the fast path: RuntimeError: no kernel image."]


@pytest.mark.parametrize("reason", ["hook", "checkpointing"])
def test_a_model_that_cannot_be_recorded_is_not(reason, recordings, monkeypatch):
    said = []
    monkeypatch.setattr(graph_cache.logger, "warning_once", said.append)
    model, called = tiny.recurrent("gpt2").train(), []
    if reason == "hook":
        model.base.transformer.h[0].register_forward_hook(lambda *args: called.append(1))
    else:
        model.gradient_checkpointing_enable()
    for _ in range(3):
        step(model)
    assert not recordings
    assert any(reason in message for message in said), said
    assert bool(called) == (reason == "hook")


def test_copies_and_pickles_have_recordings_of_their_own(recordings):
    model = tiny.recurrent("gpt2")
    step(model), step(model)
    _, expected = step(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not other.graph_cache._recordings
        for _ in range(3):
            _, found = step(other)
            tiny.assert_same_gradients(found, expected)


# --- windows that give something out ------------------------------------------------------------------------------

RAGGED_ROWS = (torch.arange(45) < torch.tensor([45, 38, 20])[:, None]).long()  # their last windows need a mask


def answers(name, training=False, **fields):
    plain, fast = (tiny.answering(name, **fields).train(training) for _ in range(2))
    plain.fast_path = "off"
    return plain, fast


def learn(model, seed=3, mask=RAGGED_ROWS, questions=tiny.QUESTIONS, device="cpu", **kwargs):
    """A step of a model that answers questions: its output and gradients."""
    out = asked(model, seed, mask, questions, device, **kwargs)
    out.loss.backward()
    return out, tiny.gradients(model)


def asked(model, seed=3, mask=RAGGED_ROWS, questions=tiny.QUESTIONS, device="cpu", **kwargs):
    torch.manual_seed(seed)
    told = {"start_positions": torch.tensor([40, -100, 3]), "end_positions": torch.tensor([42, -100, 3]),
            "answer_kinds": torch.tensor([0, 2, 0])}  # fmt: skip
    ids, rows = tiny.documents(3, 45, seed).to(device), len(questions)
    told = {key: value[:rows].to(device) for key, value in told.items()}
    return model(ids[:rows], attention_mask=mask[:rows].to(device), question_ids=questions, **told, **kwargs)


def assert_same_answers(out, expected, tolerance=1e-5):
    for key in ("loss", "start_logits", "end_logits", "kind_logits"):
        assert_close(out[key], expected[key], rtol=10 * tolerance, atol=tolerance)


@pytest.mark.parametrize("keep", [0, 2, 100, "auto"])
@pytest.mark.parametrize("name", tiny.ENCODERS)
def test_answering_is_learnt_as_without_recordings(name, keep, recordings):
    plain, fast = answers(name, training=True, keep_windows=keep)  # with dropout
    other = [[5], [6, 7, 8, 9], [10, 11]]
    for seed, questions in enumerate([tiny.QUESTIONS, other, other, tiny.QUESTIONS]):
        (expected, slow), (out, quick) = (learn(model, seed, questions=questions) for model in (plain, fast))
        assert_same_answers(out, expected)
        tiny.assert_same_gradients(slow, quick)
    assert fast.graph_cache._replayed > 8


def test_questions_of_other_lengths_are_not_recorded_anew(recordings):
    model = tiny.answering("bert", keep_windows=0)
    for seed, questions in enumerate([tiny.QUESTIONS, [[5], [6, 7, 8, 9], [10, 11]], [[5, 6]] * 3]):
        learn(model, seed, mask=torch.ones_like(RAGGED_ROWS), questions=questions)
    made = [one.work for some in model.graph_cache._recordings.values() for one in some]
    full = [work for work in made if work.ids.shape == (3, 14) and work.mask is None and work.pooled]
    assert len(full) == 4, "with and without gradients, with and without a state"


@pytest.mark.parametrize("keep", [0, 100])
@pytest.mark.parametrize(
    "fields",
    [
        {"slots": 0, "kept": 3, "sinks": 1, "window": 16},
        {"overlap": 2, "slots": 2, "insert_at": (1, 3), "pooled_layers": "all"},
        {"slots": 3, "pooling": "max"},
        {"slots": 2, "pooling": "attention", "insert_at": "all", "state_per_layer": True},
        {"bptt_windows": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
def test_answering_with_recurrences_of_every_kind(name, fields, keep, recordings):
    plain, fast = answers(name, keep_windows=keep, **fields)
    for seed in range(3):
        (expected, slow), (out, quick) = learn(plain, seed), learn(fast, seed)
        assert_same_answers(out, expected)
        tiny.assert_same_gradients(slow, quick)
    assert fast.graph_cache._replayed


@pytest.mark.parametrize("how", ["frozen base", "frozen recurrence", "frozen all but a head", "no state", "abreast"])
def test_answering_in_parts(how, recordings):
    plain, fast = answers("bert", keep_windows=2 if how == "abreast" else 0)
    settings = {"use_state": False} if how in ("no state", "abreast") else {}
    for model in (plain, fast):
        if how == "frozen base":
            model.base.requires_grad_(False)
        if how == "frozen recurrence":
            model.recurrence.requires_grad_(False)
        if how == "frozen all but a head":
            model.requires_grad_(False)
            model.kinds.requires_grad_(True)
    for seed in range(3):
        (expected, slow), (out, quick) = learn(plain, seed, **settings), learn(fast, seed, **settings)
        assert_same_answers(out, expected)
        tiny.assert_same_gradients(slow, quick)
    assert fast.graph_cache._replayed


def test_answers_without_gradients(recordings):
    """A window that is shorter, or has fewer rows, is filled up where a mask hides the rest."""
    plain, fast = answers("bert")
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            for _ in range(3):
                assert_same_answers(asked(fast), asked(plain))
            made = len(recordings)
            for length in (43, 42, 41):
                mask = (torch.arange(45) < torch.tensor([45, 38, length])[:, None]).long()
                expected, out = (asked(model, mask=mask) for model in (plain, fast))
                assert_same_answers(out, expected)
            assert_same_answers(asked(fast, questions=tiny.QUESTIONS[:2]), asked(plain, questions=tiny.QUESTIONS[:2]))
    assert made
    learn(fast)  # what was recorded in inference mode does not stand in the way


@pytest.mark.parametrize("keep", [0, 100])
def test_answering_under_autocast(keep, recordings):
    plain, fast = answers("bert", training=True, keep_windows=keep)
    for seed in range(3):
        for model in (plain, fast):
            with torch.no_grad():
                for weight in model.base.parameters():
                    weight.mul_(1.1)
        found = []
        for model in (plain, fast):
            with torch.autocast("cpu", torch.bfloat16):
                out = asked(model, seed)
            out.loss.backward()  # outside of it, as is usual
            found.append((out, tiny.gradients(model)))
        (expected, slow), (out, quick) = found
        assert torch.equal(out.loss, expected.loss)
        tiny.assert_same_gradients(slow, quick)
    assert fast.graph_cache._replayed


@pytest.mark.parametrize("keep", [0, 2, 100])
def test_several_calls_before_one_backward(keep, recordings):
    """What a window left behind is not written over by the next call."""
    results = []
    for model in answers("bert", training=True, keep_windows=keep):
        learn(model), learn(model)
        first, second = asked(model, 1), asked(model, 2)
        with torch.no_grad():
            asked(model, 3)
        (first.loss + 2 * second.loss).backward()
        results.append(tiny.gradients(model))
    tiny.assert_same_gradients(*results)
    assert model.graph_cache._replayed


@pytest.mark.parametrize("keep", [0, 100])
def test_an_answering_model_that_changes_before_its_backward(keep, recordings):
    results = []
    for model in answers("bert", keep_windows=keep):
        learn(model), learn(model)
        out = asked(model)
        model.base.requires_grad_(False)
        learn(model)
        model.base.requires_grad_(True)
        out.loss.backward()
        results.append(tiny.gradients(model))
    tiny.assert_same_gradients(*results)


def test_what_is_never_pulled_through_is_free_again(recordings):
    model = tiny.answering("bert", keep_windows=100)
    for seed in range(3):
        asked(model, seed)
    made = len(recordings)
    out = asked(model)
    busy = [one.busy for some in model.graph_cache._recordings.values() for one in some]
    assert any(busy)
    del out
    assert not any(one.busy for some in model.graph_cache._recordings.values() for one in some)
    asked(model)
    assert len(recordings) == made


def test_answering_broken_off_in_its_backward(recordings, monkeypatch):
    plain, fast = answers("bert", keep_windows=0)
    for _ in range(3):
        _, expected = learn(plain)
        learn(fast)
    run = graph_cache.GraphCache.run

    def interrupted(self, *args):
        if self._gathering.summed:
            raise KeyboardInterrupt
        return run(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(graph_cache.GraphCache, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            learn(fast)
    assert fast.graph_cache._gathering.summed
    fast.zero_grad()
    tiny.assert_same_gradients(learn(fast)[1], expected)


@pytest.mark.parametrize("keep", [0, 100, "auto"])
@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert"])
def test_classifiers_of_documents(name, keep, recordings):
    plain, fast = (tiny.recurrent(name, "sequence", keep_windows=keep).train() for _ in range(2))
    plain.fast_path = "off"
    for seed in range(4):
        found = []
        for model in (plain, fast):
            torch.manual_seed(seed)
            out = model(tiny.documents(3, 45, seed), attention_mask=RAGGED_ROWS, labels=torch.tensor([0, 1, 2]))
            out.loss.backward()
            found.append((out, tiny.gradients(model)))
        (expected, slow), (out, quick) = found
        assert_close(out.logits, expected.logits)
        tiny.assert_same_gradients(slow, quick)
    assert fast.graph_cache._replayed


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_classifiers_of_tokens_give_logits_and_loss(mode, recordings):
    plain, fast = (tiny.recurrent("bert", "token") for _ in range(2))
    plain.fast_path = "off"
    labels = (IDS % 4 - 1).masked_fill(IDS % 4 == 0, -100)
    for _ in range(3):
        with mode():
            found = [
                model(IDS, attention_mask=RAGGED_ROWS, labels=labels, return_logits=True) for model in (plain, fast)
            ]
        expected, out = found
        assert_close(out.logits, expected.logits)
        assert_close(out.loss, expected.loss)
        if out.loss.requires_grad:
            for one in found:
                one.loss.backward()
            tiny.assert_same_gradients(*map(tiny.gradients, (plain, fast)))
    assert fast.graph_cache._replayed


@pytest.mark.parametrize("keep", [0, 100])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "roberta", "modernbert"])
def test_hidden_states_in_pieces_with_gradients_through_the_state(name, keep, recordings):
    results = []
    for path in ("off", "auto"):
        model = tiny.recurrent(name, "none", keep_windows=keep)
        model.fast_path = path
        for _ in range(3):
            first = model(IDS[:, :21], attention_mask=RAGGED_ROWS[:, :21], final=False)
            rest = {"attention_mask": RAGGED_ROWS[:, 21:], "state": first.state}
            second = model(
                IDS[:2, 21:], **{**rest, "attention_mask": RAGGED_ROWS[:2, 21:], "state": first.state[[0, 1]]}
            )
            loss = first.last_hidden_state.square().sum() + second.last_hidden_state.sin().sum()
            (loss + second.state.carried.sum()).backward()
            found = tiny.gradients(model)
        results.append((first.last_hidden_state, second.last_hidden_state, second.state.carried, found))
    for a, b in zip(results[0][:3], results[1][:3], strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-5)
    tiny.assert_same_gradients(results[0][3], results[1][3], 1e-4)
    assert model.graph_cache._replayed


class Letters:
    """A tokenizer of characters."""

    is_fast = True

    def __call__(self, texts, **kwargs):
        ids = [[5 + ord(letter) % 60 for letter in text] for text in texts]
        offsets = [[(i, i + 1) for i in range(len(text))] for text in texts]
        return {"input_ids": ids, "offset_mapping": offsets}


@pytest.mark.parametrize(
    "settings", [{}, {"output": "tokens", "overlap": 4}, {"pooling": "state"}, {"use_state": False}], ids=str
)
@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2", "llama"])
def test_documents_are_encoded_as_without_recordings(name, settings, recordings, monkeypatch):
    texts = ["recurrence " * n for n in (9, 3, 8, 9, 1, 6, 9, 9)]
    plain, fast = both(name)
    replayed, run = [], cuda_graphs.CapturedForward.__call__
    monkeypatch.setattr(cuda_graphs.CapturedForward, "__call__", lambda *args: replayed.append(1) or run(*args))
    found = [cf.encode(model, texts, Letters(), batch_size=3, **settings) for model in (plain, fast)]
    for expected, out in zip(*found, strict=True):
        if "output" in settings:
            expected, out = expected.vectors, out.vectors
        assert_close(torch.from_numpy(out), torch.from_numpy(expected), rtol=1e-4, atol=1e-5)
    assert recordings
    assert len(replayed) > 10


def test_of_ragged_documents_only_the_largest_windows_are_compiled_at_once(recordings, monkeypatch):
    compiled = []
    monkeypatch.setattr(graph_cache, "RECORD_AFTER", 100)
    monkeypatch.setattr(graph_cache, "compiled", lambda model: compiled.append(1) or contextlib.nullcontext())
    plain, fast = answers("bert", training=True, keep_windows=0)
    fast.fast_path = "compiled"
    for seed, length in enumerate((31, 33, 35, 36)):
        mask = (torch.arange(45) < torch.tensor([45, 38, length])[:, None]).long()
        (expected, slow), (out, quick) = learn(plain, seed, mask), learn(fast, seed, mask)
        assert_same_answers(out, expected)
        tiny.assert_same_gradients(slow, quick)
    made = [one.work for some in fast.graph_cache._recordings.values() for one in some]
    assert len(compiled) == len(made)
    assert {work.ids.shape for work in made} == {(3, 14)}
    assert fast.graph_cache._replayed > 16


# --- writing token by token ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [0, 2, 5])
@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_recorded_steps_write_what_others_do(name, overlap, recordings, monkeypatch):
    monkeypatch.setattr(window_cache, "RECORD_AFTER", 2)
    plain, fast = both(name, slots=2, insert_at="all")
    prompt, mask = IDS[:, :11], RAGGED[:, :11].flip(1)
    settings = {"attention_mask": mask, "max_new_tokens": 40, "overlap": overlap, "do_sample": False}
    settings |= {"return_dict_in_generate": True, "output_logits": True, "pad_token_id": 0, "eos_token_id": None}
    expected, found = plain.generate(prompt, **settings), fast.generate(prompt, **settings)
    assert len(recordings) == 1
    assert_close(torch.stack(found.logits), torch.stack(expected.logits))
    assert found.sequences.equal(expected.sequences)
    assert_close(found.past_key_values.state.carried, expected.past_key_values.state.carried)


def test_rows_that_end_before_others(recordings, monkeypatch):
    monkeypatch.setattr(window_cache, "RECORD_AFTER", 2)
    plain, fast = both("gpt2")
    free = plain.generate(IDS[:, :11], max_new_tokens=40, do_sample=False, pad_token_id=0, eos_token_id=None)
    end = int(free[0, 20])  # the first row ends here at the latest
    settings = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "eos_token_id": end}
    settings |= {"return_dict_in_generate": True}
    expected, found = plain.generate(IDS[:, :11], **settings), fast.generate(IDS[:, :11], **settings)
    assert found.sequences.equal(expected.sequences)
    for name in ("carried", "read", "pending"):
        assert_close(getattr(found.past_key_values.state, name), getattr(expected.past_key_values.state, name))
    assert recordings


def test_beams_are_not_recorded(recordings, monkeypatch):
    monkeypatch.setattr(window_cache, "RECORD_AFTER", 2)
    plain, fast = both("gpt2")
    settings = {"max_new_tokens": 30, "num_beams": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert fast.generate(IDS[:, :11], **settings).equal(plain.generate(IDS[:, :11], **settings))
    assert not recordings


def test_a_copy_of_a_cache_goes_on_by_itself(recordings, monkeypatch):
    monkeypatch.setattr(window_cache, "RECORD_AFTER", 2)
    plain, fast = both("gpt2")
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = []
    for model in (plain, fast):
        cache = model.generate(IDS[:, :11], return_dict_in_generate=True, **settings).past_key_values
        other = copy.deepcopy(cache)
        for column in (5, 6, 7, 8):
            logits = model(torch.full((3, 1), column), past_key_values=cache).logits
            found.append((logits, model(torch.full((3, 1), column), past_key_values=other).logits))
    for (a, b), (c, d) in zip(found[:4], found[4:], strict=True):
        assert_close(a, b)
        assert_close(a, c)
        assert_close(a, d)
    assert recordings


def test_a_step_under_autocast(recordings, monkeypatch):
    """Weights that were cast outside a recording would stay as they were."""
    monkeypatch.setattr(window_cache, "RECORD_AFTER", 2)
    results = []
    for model in both("gpt2"):
        settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        with torch.autocast("cpu", torch.bfloat16):
            cache = model.generate(IDS[:, :9], return_dict_in_generate=True, **settings).past_key_values
            with torch.no_grad():
                model.base.transformer.h[0].mlp.c_fc.weight.mul_(1.5)
            torch.clear_autocast_cache()
            results.append(model(IDS[:, :1], past_key_values=cache).logits)
    assert_close(*results)
    assert recordings


@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_while_a_window_is_recorded_it_needs_no_mask(name, monkeypatch):
    """Or what was compiled before is compiled again during the recording, which fails; and fast kernels want none."""
    from transformers import masking_utils

    model, masks = tiny.recurrent(name), []
    for layer in model.config.architecture.layer_list(model.backbone):
        attention = layer.get_submodule(model.config.architecture.attention)
        attention.register_forward_pre_hook(
            lambda module, args, kwargs: masks.append([*args, kwargs.get("attention_mask")][-1]), with_kwargs=True
        )
    monkeypatch.setattr(masking_utils, "is_tracing", lambda tensor=None: True)  # as while a stream is captured
    with hooks.plain_masks():
        model.backbone(input_ids=IDS[:, :3], use_cache=False)  # shorter than any sliding window
    assert len(masks) == model.config.base_config.num_hidden_layers
    assert all(mask is None for mask in masks)


# --- the real thing --------------------------------------------------------------------------------------------------


def recordings_of(model, kind=cuda_graphs.CapturedForward):
    return [one for some in model.graph_cache._recordings.values() for one in some if isinstance(one, kind)]


def test_places_of_windows_that_are_needed_still_are_not_free(recordings, monkeypatch):
    """Several calls before one backward pass keep no more than one call would, where there is no more room."""
    model, kept = tiny.answering("bert", keep_windows="auto"), []
    keep = bptt._Sweep._keep
    monkeypatch.setattr(bptt._Sweep, "_keep", lambda sweep, i, table: kept.append(i) or keep(sweep, i, table))
    for seed in range(4):
        learn(model, seed)
    monkeypatch.setattr(activation_budget, "available", lambda device: 0)
    held, counts = [], []
    for _ in range(3):
        kept.clear()
        held.append(model(IDS, question_ids=tiny.QUESTIONS, start_positions=torch.zeros(3, dtype=torch.long),
                          end_positions=torch.zeros(3, dtype=torch.long)))  # fmt: skip
        counts.append(len(kept))
    assert counts[0] > 0
    assert counts[1:] == [0, 0]
    sum(out.loss for out in held).backward()


@pytest.mark.parametrize("keep", [0, 2])
def test_ragged_batches_do_not_fill_the_memory_with_recordings(keep, recordings):
    model = tiny.recurrent("gpt2", keep_windows=keep).train()  # with dropout no recording serves another shape
    generator = torch.Generator().manual_seed(0)
    for seed in range(60):
        lengths = torch.randint(2, 46, (3, 1), generator=generator)
        step(model, seed=seed, attention_mask=(torch.arange(45) < lengths).long())
    places = [one.work.ids.numel() for one in recordings_of(model, cuda_graphs.CapturedForwardBackward)]
    assert places
    assert sum(places) <= (keep + activation_budget.SPARE) * 3 * 8


def test_documents_that_end_one_after_the_other_share_few_recordings(recordings, monkeypatch):
    """Windows of fewer and fewer rows: no two of them have as many."""
    monkeypatch.setattr(graph_cache, "RECORD_AFTER", 2)
    documents = [tiny.documents(1, length, length)[0].tolist() for length in range(20, 260, 6)]
    plain, fast = both("llama")
    plainly = []
    fast._measured_window = lambda work: plainly.append(work) or type(fast)._measured_window(fast, work)
    expected, found = (cf.perplexity(model, documents, batch_size=100) for model in (plain, fast))
    assert found.nats == pytest.approx(expected.nats, rel=1e-6)
    made = recordings_of(fast)
    assert len(made) <= 6
    assert min(len(one.work.ids) for one in made) <= 6, "those that are left at the end, too"
    assert fast.graph_cache._replayed > 2 * len(plainly)


def test_what_a_replayed_window_gives_out_is_not_taken_for_all_it_holds(recordings, monkeypatch):
    monkeypatch.setattr(activation_budget, "available", lambda device: 0)
    model, plain = (tiny.answering("modernbert", keep_windows="auto").train() for _ in range(2))
    plain.fast_path = "off"
    for one in (model, plain):
        for questions in (tiny.QUESTIONS, tiny.QUESTIONS[:2]):
            for seed in range(4):
                learn(one, seed, questions=questions)
    assert recordings
    for kind, size in model.activation_budget._sizes.items():
        assert size == plain.activation_budget._sizes[kind], kind


def test_windows_first_met_after_others_were_compiled_are_compiled_too(recordings, monkeypatch):
    made = []
    monkeypatch.setattr(graph_cache, "compiled", lambda model: made.append(1) or contextlib.nullcontext())
    monkeypatch.setattr(graph_cache, "COMPILE_AFTER", 60)
    monkeypatch.setattr(graph_cache, "COMMON", 3)
    plain, model = both("gpt2", keep_windows=0)
    for _ in range(15):
        step(model)
    trained = len(made)
    assert trained > 0
    with torch.no_grad():
        for _ in range(30):
            found = model(IDS, labels=IDS).nll_sum
        assert_close(found, plain(IDS, labels=IDS).nll_sum)
    assert len(made) > trained
    assert all(one.compiled for one in recordings_of(model))


@pytest.mark.parametrize("keep", [0, 2, "auto"])
def test_under_checkpointing_of_the_whole_model(keep, recordings):
    """Whoever computes graphs again, or keeps them elsewhere, gets them: nothing is recorded."""
    results = []
    for model in both("gpt2", keep_windows=keep):
        for _ in range(3):
            states = checkpoint(lambda m=model: m(IDS).logits, use_reentrant=False)
            states.square().sum().backward()
            found = tiny.gradients(model)
        results.append(found)
        assert model.fast_path in ("auto", "off")
    tiny.assert_same_gradients(*results)


def test_full_windows_do_not_go_by_a_recording_with_a_mask(recordings):
    model = tiny.answering("bert")
    mask = (torch.arange(45) < torch.tensor([[45], [4], [45]])).long()
    with torch.no_grad():
        for _ in range(4):
            model(IDS, attention_mask=mask, question_ids=tiny.QUESTIONS)
        for _ in range(4):
            model(IDS[:, :21], question_ids=[[5, 6, 7]] * 3)
    shapes = {(one.work.ids.shape, one.work.mask is None) for one in recordings_of(model)}
    assert any(bare for _, bare in shapes)


def test_encoding_again_uses_what_was_recorded(recordings):
    model, texts = tiny.recurrent("bert"), ["a" * 45, "b" * 45, "c" * 45]
    for _ in range(3):
        cf.encode(model, texts, Letters(), batch_size=3)
    made = len(recordings)
    assert made
    cf.encode(model, texts, Letters(), batch_size=3)
    assert len(recordings) == made


@GPU
def test_states_that_wait_in_the_hosts_memory():
    results = []
    for offload in (False, True):
        model = tiny.recurrent("gpt2", keep_windows=0, offload_states=offload).cuda()
        results.append(step(model, IDS.cuda())[1])
    tiny.assert_same_gradients(*results)


@GPU
@pytest.mark.parametrize("path", ["auto", "compiled"])
@pytest.mark.parametrize(
    "fields", [{"keep_windows": 0}, {"keep_windows": 3}, {"slots": 0, "kept": 4, "sinks": 1}], ids=str
)
@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_on_a_gpu(name, fields, path, monkeypatch):
    monkeypatch.setattr(graph_cache, "RECORD_AFTER", 1)
    plain, fast = (model.cuda() for model in both(name, training=True, **fields))
    fast.fast_path = path
    for seed in range(3):
        ids = tiny.documents(3, 45, seed).cuda()
        expected, slow = step(plain, ids, seed)
        out, quick = step(fast, ids, seed)
        assert_close(out.loss, expected.loss, rtol=1e-4, atol=1e-5)
        tiny.assert_same_gradients(slow, quick, 1e-4)
    assert fast.graph_cache._replayed, "nothing was replayed"


@GPU
@pytest.mark.parametrize("fields", [{"slots": 2, "insert_at": "all"}, {"slots": 0, "kept": 4, "sinks": 1}], ids=str)
@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_generation_on_a_gpu(name, fields):
    results = []
    for path in ("off", "auto"):
        model = tiny.recurrent(name, **fields).cuda()
        model.fast_path = path
        settings = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        results.append(model.generate(IDS[:, :11].cuda(), output_logits=True, return_dict_in_generate=True, **settings))
    slow, fast = results
    assert fast.past_key_values._recorded is not None, "no step was recorded"
    assert slow.past_key_values._recorded is None
    assert_close(torch.stack(fast.logits), torch.stack(slow.logits), rtol=1e-4, atol=1e-4)
    assert fast.sequences.equal(slow.sequences)


@GPU
@pytest.mark.parametrize("path", ["auto", "compiled"])
@pytest.mark.parametrize("fields", [{"keep_windows": 0}, {"keep_windows": 2}, {"keep_windows": "auto"},
                                    {"slots": 0, "kept": 3, "sinks": 1, "window": 16}], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert"])
def test_answering_on_a_gpu(name, fields, path, monkeypatch):
    """Windows are recorded in the forward call and, where they are run again, in the backward one."""
    monkeypatch.setattr(graph_cache, "RECORD_AFTER", 1)
    plain, fast = (model.cuda() for model in answers(name, training=True, **fields))
    fast.fast_path = path
    for seed in range(4):
        (expected, slow), (out, quick) = (learn(model, seed, device="cuda") for model in (plain, fast))
        assert_same_answers(out, expected, 1e-4)
        tiny.assert_same_gradients(slow, quick, 1e-4)
    first, second = asked(fast, 1, device="cuda"), asked(fast, 2, device="cuda")
    (first.loss + second.loss).backward()
    quick = tiny.gradients(fast)
    (asked(plain, 1, device="cuda").loss + asked(plain, 2, device="cuda").loss).backward()
    tiny.assert_same_gradients(tiny.gradients(plain), quick, 1e-4)
    assert fast.fast_path == path, "a recording failed"
    assert fast.graph_cache._replayed > 8


@GPU
def test_answering_under_autocast_on_a_gpu(monkeypatch):
    monkeypatch.setattr(graph_cache, "RECORD_AFTER", 1)
    plain, fast = (model.cuda() for model in answers("bert", keep_windows=2))
    for seed in range(4):
        found = []
        for model in (plain, fast):
            with torch.autocast("cuda", torch.bfloat16):
                out = asked(model, seed, device="cuda")
            out.loss.backward()
            found.append((out.loss, tiny.gradients(model)))
        assert_close(found[0][0], found[1][0], rtol=2e-2, atol=2e-2)
        tiny.assert_same_gradients(found[0][1], found[1][1], 2e-2)
    assert fast.fast_path == "auto", "a recording failed"
    assert fast.graph_cache._replayed


@GPU
@pytest.mark.parametrize("path", ["auto", "compiled"])
@pytest.mark.parametrize("settings", [{}, {"pooling": "state"}, {"output": "tokens", "overlap": 4}], ids=str)
@pytest.mark.parametrize("name", ["bert", "modernbert", "gpt2"])
def test_encoding_on_a_gpu(name, settings, path, monkeypatch):
    monkeypatch.setattr(graph_cache, "RECORD_AFTER", 1)
    texts = ["recurrence " * n for n in (9, 3, 8, 9, 1, 6, 9, 9)]
    plain, fast = (encode.headless(model.cuda()) for model in both(name))
    fast.fast_path = path
    found = [cf.encode(model, texts, Letters(), batch_size=3, **settings) for model in (plain, fast)]
    for expected, out in zip(*found, strict=True):
        if "output" in settings:
            expected, out = expected.vectors, out.vectors
        assert_close(torch.from_numpy(out), torch.from_numpy(expected), rtol=1e-3, atol=1e-4)
    assert fast.fast_path == path, "a recording failed"
    assert fast.graph_cache._replayed > 10
