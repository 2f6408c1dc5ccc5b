# SPDX-License-Identifier: Apache-2.0
"""The paper's memory: its network, how it starts, and which positions it pools."""

import pytest
import torch
from helpers import tiny
from torch.testing import assert_close

import carryforward as cf

IDS = tiny.documents(2, 37)


def test_the_papers_module_is_the_default():
    module = cf.add_recurrence(tiny.base("gpt2"), window=8).recurrence
    linear = [layer for layer in module.networks[0] if isinstance(layer, torch.nn.Linear)]
    assert [layer.out_features for layer in linear] == [200, 200, 200, tiny.WIDTH]
    assert module.layer_logits.tolist() == [0] * tiny.LAYERS
    assert linear[-1].bias.abs().max() == 0
    assert 0.015 < linear[-1].weight.std() < 0.025
    assert all(linear[i].weight.std() > 0.03 for i in range(3))


@pytest.mark.parametrize(
    "fields", [{}, {"pooled_layers": "last"}, {"pooled_layers": "below"}, {"pooling": "attention"}]
)
def test_how_the_network_starts(fields):
    torch.manual_seed(0)
    start = cf.add_recurrence(tiny.base("llama"), window=8, hidden_sizes=(400,), **fields).recurrence
    *_, last = start.networks[0]
    assert 0.019 < last.weight.std() < 0.021
    assert not last.bias.any()
    residual = cf.add_recurrence(tiny.base("llama"), window=8, residual=True, **fields).recurrence
    assert not residual.networks[0][-1].weight.any(), "what was pooled is carried as it is"


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_another_overlap_than_in_training_pools_as_far_ahead(name):
    """Footnote 3: the state must run exactly as far ahead of the next window's first token as it did in training."""
    seen = []
    model = tiny.recurrent(name, overlap=3)
    model.recurrence.register_forward_pre_hook(lambda _, args: seen.append(args[1][:2]))
    first = 0 if name == "gpt2" else 1
    for overlap, stop in ((3, 8), (5, 6), (7, 4), (1, 8), (0, 8)):
        seen.clear()
        model(IDS, overlap=overlap)
        assert set(seen) == {(first, first + stop)}
    with pytest.raises(ValueError, match="fewer than its 4 slots"):
        tiny.recurrent(name, overlap=0, slots=4)(IDS, overlap=5)


def test_pooling_holds_in_half_precision():
    """A sum over a window may be more than float16 can hold; a mean is not."""
    model = cf.add_recurrence(tiny.base("gpt2", n_positions=1024), window=1000)
    hidden = [torch.full((1, 1000, tiny.WIDTH), 100.0, dtype=torch.half) for _ in range(tiny.LAYERS)]
    assert_close(model.recurrence.pool(hidden), torch.full((1, 1, tiny.WIDTH), 100.0, dtype=torch.half))


def test_only_the_document_is_pooled():
    model, pooled = tiny.answering("bert"), []
    forward = model.recurrence.forward

    def watched(hidden, *rest):
        hidden = [h.detach().requires_grad_() for h in hidden]
        with torch.enable_grad():
            found = forward(hidden, *rest)
            pooled.append(torch.autograd.grad(found.sum(), hidden[-1])[0].abs().sum(-1) > 0)
        return found.detach()

    model.recurrence.forward = watched
    model(tiny.documents(2, 20), question_ids=tiny.QUESTIONS[:2])
    position = torch.arange(14)
    expected = torch.stack([(begin <= position) & (position < 13) for begin in (6, 5)])
    assert pooled[0].equal(expected), "behind prefix, question and separator, before the suffix"
