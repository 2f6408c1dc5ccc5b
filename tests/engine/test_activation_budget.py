# SPDX-License-Identifier: Apache-2.0
"""Windows that keep their activations: the same numbers, fewer passes, and only as many as there is room for."""

import pytest
import torch
from helpers import tiny
from torch.testing import assert_close

from carryforward.engine import activation_budget, bptt

IDS = tiny.documents(2, 49)  # at window 8 and overlap 0: six windows, and the targets of the last are all there
WINDOWS = 6


def kind(model, rows):
    """The known kind of windows with so many rows and a state."""
    (found,) = (kind for kind in model.activation_budget._sizes if kind[:3] == (rows, 8, True))
    return found


def passes(model, ids=IDS):
    """A step's gradients, and how often the base model was run for them."""
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
        # the last window is never run without a graph; a window that is kept is run once
        assert count == (2 * WINDOWS - 1 if keep == 0 else 2 * WINDOWS - min(keep, WINDOWS))
    for keep in (1, 4, WINDOWS, 100):
        for key, expected in results[0].items():
            assert torch.equal(results[keep][key], expected), (keep, key)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("lengths", [(45, 45, 45), (45, 43, 41), (45, 30, 9)], ids=str)
def test_windows_that_stand_alone_run_side_by_side(name, lengths):
    """As many as may be in memory together, with the numbers of one after the other. Encoders' are not, nor those of
    rows with other numbers of windows."""
    ids = tiny.documents(3, 45)
    mask = (torch.arange(45) < torch.tensor(lengths)[:, None]).long()
    results, counts = {}, {}
    for keep in (0, 1, 4, 100):
        model, count = tiny.recurrent(name, keep_windows=keep), []
        model.backbone.register_forward_hook(lambda *args, count=count: count.append(1))
        out = model(ids, attention_mask=mask, labels=ids, use_state=False)
        assert len(count) <= 8, "no window is run twice"
        out.loss.backward()
        results[keep], counts[keep] = tiny.gradients(model) | {"loss": out.loss.detach()}, len(count)
        with torch.no_grad():
            assert_close(model(ids, attention_mask=mask, labels=ids, use_state=False).loss, out.loss.detach())
    windows = counts[0]
    together = name != "bert" and lengths[-1] > 9
    assert [counts[keep] for keep in (1, 4, 100)] == [windows, *([-(-windows // 4), 1] if together else [windows] * 2)]
    for keep in (1, 4, 100):
        tiny.assert_same_gradients(results[keep], results[0])


@pytest.mark.parametrize("head", ["sequence", "token"])
def test_what_windows_that_stand_alone_give_out_does_not_depend_on_memory(head):
    ids = tiny.documents(2, 45)
    for name in ("modernbert", "bert"):
        model = tiny.recurrent(name, head, keep_windows=4)
        with torch.no_grad():
            expected = model(ids, use_state=False).logits
        assert_close(model(ids, use_state=False).logits, expected)


@pytest.mark.parametrize("keep", [0, 3, 8])
def test_no_more_windows_are_in_memory_than_were_allowed(keep, monkeypatch):
    model, sizes = tiny.recurrent("gpt2", overlap=0, keep_windows=keep), []
    monkeypatch.setattr(bptt._Sweep, "_keep", lambda *args: pytest.fail("there is no second pass to keep a graph for"))
    model.backbone.register_forward_pre_hook(lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])),
                                          with_kwargs=True)  # fmt: skip
    ids = tiny.documents(1, 30 * 8)
    model(ids, labels=ids, use_state=False).loss.backward()
    assert sum(sizes) == 30
    assert max(sizes) == max(keep, 1)


def test_as_many_windows_are_kept_as_there_is_room_for(monkeypatch):
    room = 10**9
    monkeypatch.setattr(activation_budget, "available", lambda device: room)
    model = tiny.recurrent("gpt2", overlap=0)
    assert model.config.recurrence.keep_windows == "auto"
    expected, count = passes(model)
    assert count == 2 * WINDOWS - 1, "nothing is known of the windows yet"
    found, count = passes(model)
    assert count == WINDOWS
    tiny.assert_same_gradients(found, expected)
    to_come = activation_budget.TO_COME * sum(parameter.numel() for parameter in model.parameters())
    size = model.activation_budget._sizes[kind(model, 2)]
    for kept in (0, 2):
        room = to_come + int((kept + 0.5) * size / activation_budget.SHARE["cpu"])
        found, count = passes(model)
        assert count == 2 * WINDOWS - max(kept, 1)
        tiny.assert_same_gradients(found, expected)


def test_places_that_are_there_serve_their_own_kind_alone(monkeypatch):
    cpu, many, few = torch.device("cpu"), (4, 8), (2, 8)
    monkeypatch.setattr(activation_budget, "available", lambda device: 1000)  # with what is taken, where nothing lives
    monkeypatch.setitem(activation_budget.SHARE, "cpu", 0.5)
    allowance = activation_budget.ActivationBudget()
    allowance.keep = "auto"
    allowance._sizes = {many: 100, few: 60}
    assert allowance.windows([many] * 8, [], cpu) == [True] * 5 + [False] * 3
    for _ in range(4):
        allowance.take(many, 110)
    # half of a thousand may be used, 440 are: room for one of the others, and the places that are there
    assert allowance.windows([few] * 2 + [many] * 5, [], cpu) == [True, False] + [True] * 4 + [False]
    assert [allowance.has_room(kind) for kind in (many, few, (8, 8))] == [False, True, False]
    allowance.release()
    assert allowance.windows([many] * 8, [], cpu) == [True] * 4 + [False] * 4, "110 each, as was seen"


def test_smaller_windows_take_no_more_than_larger_ones():
    model = tiny.recurrent("gpt2", overlap=0, keep_windows="auto")
    passes(model, tiny.documents(3, 49))
    assert passes(model)[1] == WINDOWS, "fewer rows"
    assert passes(model, IDS[:, :-3])[1] == WINDOWS, "a shorter last window"
    assert passes(model, tiny.documents(4, 49))[1] == 2 * WINDOWS - 1


@pytest.mark.parametrize("keep", ["auto", WINDOWS])
def test_memory_that_others_took_meanwhile_costs_a_second_pass(keep, monkeypatch):
    """A device on which no window has room beside two others."""
    model, advance, begin = (
        tiny.recurrent("gpt2", overlap=0, keep_windows=keep),
        bptt.Plan.advance,
        bptt._Sweep.__init__,
    )
    failed, sweeps = [], []
    for _ in range(2):  # measured, then kept
        model(IDS, labels=IDS).loss.backward()
        expected = tiny.gradients(model)

    def runs_out(plan, i, *rest, **more):
        if torch.is_grad_enabled() and len(sweeps[-1].kept) == 2:
            failed.append(i)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return advance(plan, i, *rest, **more)

    monkeypatch.setattr(bptt.Plan, "advance", runs_out)
    monkeypatch.setattr(bptt._Sweep, "__init__", lambda sweep, *rest: sweeps.append(sweep) or begin(sweep, *rest))
    if keep == "auto":
        model(IDS, labels=IDS).loss.backward()
        tiny.assert_same_gradients(tiny.gradients(model), expected)
    else:
        with pytest.raises(torch.OutOfMemoryError):
            model(IDS, labels=IDS)
    assert failed == [2]


def test_a_window_takes_what_its_graph_holds():
    """Counted without the weights, so that twice the rows take nearly twice as much."""
    model = tiny.recurrent("gpt2", overlap=0)
    passes(model)
    passes(model, tiny.documents(4, 49))
    one, two = (model.activation_budget._sizes[kind(model, rows)] for rows in (2, 4))
    assert 1.6 * one < two <= 2 * one


def test_windows_are_measured_again_when_more_is_trained():
    model = tiny.recurrent("gpt2", overlap=0)
    for trained in (False, True):
        model.base.requires_grad_(trained)
        passes(model)
    frozen, whole = (size for kind, size in model.activation_budget._sizes.items() if not kind[2])  # of first windows
    assert whole > 5 * frozen


def test_what_is_free_is_known_here():
    free = activation_budget.available(torch.device("cpu"))
    assert 2**20 < free < 2**50


def test_nothing_is_kept_where_nothing_is_known_to_be_free(monkeypatch):
    monkeypatch.setattr(activation_budget, "_text", lambda path: "")
    assert activation_budget.available(torch.device("cpu")) == 0
    model = tiny.recurrent("gpt2", overlap=0)
    for _ in range(2):
        assert passes(model)[1] == 2 * WINDOWS - 1
