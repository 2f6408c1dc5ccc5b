# SPDX-License-Identifier: Apache-2.0
"""Windows that keep their activations: the same numbers, fewer passes, and only as many windows as fit in memory."""

import pytest
import torch
from helpers import tiny
from torch.testing import assert_close

from carryforward.engine import activation_budget, bptt

IDS = tiny.documents(2, 49)  # with window=8 and overlap=0: six full windows, and the target of the last token
WINDOWS = 6


def shape_key(model, rows):
    """The measured shape of windows with so many rows and a state."""
    (key,) = (key for key in model.activation_budget._sizes if key[:3] == (rows, 8, True))
    return key


def passes(model, ids=IDS):
    """The gradients of a step, and how often the base model ran for them."""
    count = []
    handle = model.backbone.register_forward_hook(lambda *args: count.append(1))
    torch.manual_seed(1)
    out = model(ids, labels=ids)
    out.loss.backward()
    handle.remove()
    return tiny.gradients(model) | {"loss": out.loss.detach()}, len(count)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "dropout"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_kept_windows_give_the_same_numbers_in_fewer_passes(name, training):
    results = {}
    for keep in (0, 1, 4, WINDOWS, 100):
        results[keep], count = passes(tiny.recurrent(name, overlap=0, keep_windows=keep).train(training))
        # The last window never runs without a graph; a kept window runs once.
        assert count == (2 * WINDOWS - 1 if keep == 0 else 2 * WINDOWS - min(keep, WINDOWS))
    for keep in (1, 4, WINDOWS, 100):
        for name, expected in results[0].items():
            assert torch.equal(results[keep][name], expected), (keep, name)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("lengths", [(45, 45, 45), (45, 43, 41), (45, 30, 9)], ids=str)
def test_windows_without_a_state_run_side_by_side(name, lengths):
    """As many as a block has places, with the same numbers as one after the other, whatever the memory."""
    ids = tiny.documents(3, 45)
    mask = (torch.arange(45) < torch.tensor(lengths)[:, None]).long()
    results, counts = {}, {}
    for block in (1, 2, 4, 100):
        model, count = tiny.recurrent(name, block_windows=block), []
        model.backbone.register_forward_hook(lambda *args, count=count: count.append(1))
        out = model(ids, attention_mask=mask, labels=ids, use_state=False)
        assert len(count) <= 8, "no window runs twice"
        out.loss.backward()
        results[block], counts[block] = tiny.gradients(model) | {"loss": out.loss.detach()}, len(count)
        with torch.no_grad():
            assert_close(model(ids, attention_mask=mask, labels=ids, use_state=False).loss, out.loss.detach())
    assert counts[100] == 1
    assert counts[1] > counts[2] > counts[4] >= counts[100]
    for block in (2, 4, 100):
        tiny.assert_same_gradients(results[block], results[1])


@pytest.mark.parametrize("head", ["sequence", "token"])
def test_outputs_without_a_state_do_not_depend_on_kept_windows(head):
    ids = tiny.documents(2, 45)
    for name in ("modernbert", "bert"):
        model = tiny.recurrent(name, head, keep_windows=4)
        with torch.no_grad():
            expected = model(ids, use_state=False).logits
        assert_close(model(ids, use_state=False).logits, expected)


@pytest.mark.parametrize("block", [1, 3, 8])
def test_no_more_windows_run_side_by_side_than_a_block_has_places(block, monkeypatch):
    model, sizes = tiny.recurrent("gpt2", overlap=0, block_windows=block), []
    monkeypatch.setattr(
        bptt._TwoPassRecompute,
        "_run_and_keep",
        lambda *args: pytest.fail("there is no second pass to keep a graph for"),
    )
    model.backbone.register_forward_hook(lambda module, args, out: sizes.append(len(out.last_hidden_state)))
    ids = tiny.documents(1, 30 * 8)
    model(ids, labels=ids, use_state=False).loss.backward()
    assert sum(sizes) == 30
    assert max(sizes) == block


def test_as_many_windows_are_kept_as_fit_in_memory(monkeypatch):
    available = 10**9
    monkeypatch.setattr(activation_budget, "available_memory", lambda device: available)
    model = tiny.recurrent("gpt2", overlap=0)
    assert model.config.recurrence.keep_windows == "auto"
    expected, count = passes(model)
    assert count == 2 * WINDOWS - 1, "the windows were not measured yet"
    gradients, count = passes(model)
    assert count == WINDOWS
    tiny.assert_same_gradients(gradients, expected)
    reserved = activation_budget.RESERVED_BYTES * sum(parameter.numel() for parameter in model.parameters())
    size = model.activation_budget._sizes[shape_key(model, 2)]
    for fitting in (0, 2):
        available = reserved + int((fitting + 0.5) * size / activation_budget.MEMORY_SHARE["cpu"])
        gradients, count = passes(model)
        assert count == 2 * WINDOWS - max(fitting, 1)
        tiny.assert_same_gradients(gradients, expected)


def test_captured_buffers_serve_only_windows_of_their_shape(monkeypatch):
    cpu, many, few = torch.device("cpu"), (4, 8), (2, 8)
    monkeypatch.setattr(activation_budget, "available_memory", lambda device: 1000)  # free buffers included
    monkeypatch.setitem(activation_budget.MEMORY_SHARE, "cpu", 0.5)
    budget = activation_budget.ActivationBudget()
    budget.keep = "auto"
    budget._sizes = {many: 100, few: 60}
    assert budget.keepable([many] * 8, [], cpu) == [True] * 5 + [False] * 3
    for _ in range(4):
        budget.add_buffer(many, 110)
    # The share is 500, of which buffers take 440: room for one window of few rows, and for four in the buffers.
    assert budget.keepable([few] * 2 + [many] * 5, [], cpu) == [True, False] + [True] * 4 + [False]
    assert [budget.has_room(shape) for shape in (many, few, (8, 8))] == [False, True, False]
    budget.reset_buffers()
    assert budget.keepable([many] * 8, [], cpu) == [True] * 4 + [False] * 4, "110 each, as measured"


def test_a_buffer_that_is_given_up_frees_its_memory(monkeypatch):
    cpu, shape = torch.device("cpu"), (4, 8)
    monkeypatch.setattr(activation_budget, "available_memory", lambda device: 1000)
    monkeypatch.setitem(activation_budget.MEMORY_SHARE, "cpu", 0.5)
    budget = activation_budget.ActivationBudget()
    budget.keep = "auto"
    budget._sizes = {shape: 100}
    budget.keepable([shape], [], cpu)
    for _ in range(5):
        budget.add_buffer(shape, 100)
    assert not budget.has_room(shape)
    budget.remove_buffer(shape, 100)
    assert budget.has_room(shape)
    budget.set_free_buffers([shape])  # three are busy
    assert budget.keepable([shape] * 4, [], cpu) == [True, True, False, False], "the free buffer, and room for another"


def test_smaller_windows_are_taken_to_need_no_more_than_larger_ones():
    model = tiny.recurrent("gpt2", overlap=0, keep_windows="auto")
    passes(model, tiny.documents(3, 49))
    assert passes(model)[1] == WINDOWS, "fewer rows"
    assert passes(model, IDS[:, :-3])[1] == WINDOWS, "a shorter last window"
    assert passes(model, tiny.documents(4, 49))[1] == 2 * WINDOWS - 1


@pytest.mark.parametrize("keep", ["auto", WINDOWS])
def test_after_running_out_of_memory_windows_are_recomputed(keep, monkeypatch):
    """On a device where no third window fits."""
    model = tiny.recurrent("gpt2", overlap=0, keep_windows=keep)
    run, init = bptt.UnrollSettings.run, bptt._TwoPassRecompute.__init__
    failed, unrollings = [], []
    for _ in range(2):  # measured, then kept
        model(IDS, labels=IDS).loss.backward()
        expected = tiny.gradients(model)

    def out_of_memory(settings, i, *args, **kwargs):
        if torch.is_grad_enabled() and len(unrollings[-1].kept) == 2:
            failed.append(i)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(settings, i, *args, **kwargs)

    monkeypatch.setattr(bptt.UnrollSettings, "run", out_of_memory)
    monkeypatch.setattr(
        bptt._TwoPassRecompute, "__init__", lambda self, *args: unrollings.append(self) or init(self, *args)
    )
    if keep == "auto":
        model(IDS, labels=IDS).loss.backward()
        tiny.assert_same_gradients(tiny.gradients(model), expected)
    else:
        with pytest.raises(torch.OutOfMemoryError):
            model(IDS, labels=IDS)
    assert failed == [2]


def test_the_size_of_a_window_is_that_of_its_saved_tensors():
    """Weights do not count, so that twice the rows need nearly twice as much."""
    model = tiny.recurrent("gpt2", overlap=0)
    passes(model)
    passes(model, tiny.documents(4, 49))
    two, four = (model.activation_budget._sizes[shape_key(model, rows)] for rows in (2, 4))
    assert 1.6 * two < four <= 2 * two


def test_windows_are_measured_again_when_more_is_trained():
    model = tiny.recurrent("gpt2", overlap=0)
    for trained in (False, True):
        model.base.requires_grad_(trained)
        passes(model)
    frozen, whole = (size for key, size in model.activation_budget._sizes.items() if not key[2])  # of first windows
    assert whole > 5 * frozen


def test_available_memory_is_plausible():
    free = activation_budget.available_memory(torch.device("cpu"))
    assert 2**20 < free < 2**50


def test_nothing_is_kept_if_available_memory_is_unknown(monkeypatch):
    monkeypatch.setattr(activation_budget, "_read_text", lambda path: "")
    assert activation_budget.available_memory(torch.device("cpu")) == 0
    model = tiny.recurrent("gpt2", overlap=0)
    for _ in range(2):
        assert passes(model)[1] == 2 * WINDOWS - 1
