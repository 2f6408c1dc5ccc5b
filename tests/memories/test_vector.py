# SPDX-License-Identifier: Apache-2.0
"""The paper's memory: its network, how it is initialised, and which positions it pools."""

import pytest
import torch
from helpers import tiny
from torch.testing import assert_close

import carryforward as cf

IDS = tiny.documents(2, 37)


def vector_memory(name, **fields):
    """The vector memory that `add_recurrence` makes, with window=8."""
    memory = cf.VectorMemoryConfig(**fields)
    return cf.add_recurrence(tiny.base(name), window=8, memory=memory).memory.vector


def test_the_default_is_the_paper_s_network():
    memory = vector_memory("gpt2")
    linear = [layer for layer in memory.networks[0] if isinstance(layer, torch.nn.Linear)]
    assert [layer.out_features for layer in linear] == [200, 200, 200, tiny.WIDTH]
    assert memory.layer_logits.tolist() == [0] * tiny.LAYERS
    assert linear[-1].bias.abs().max() == 0
    assert 0.015 < linear[-1].weight.std() < 0.025
    assert all(linear[i].weight.std() > 0.03 for i in range(3))


@pytest.mark.parametrize(
    "fields", [{}, {"pooled_layers": "last"}, {"pooled_layers": "below"}, {"pooling": "attention"}]
)
def test_the_last_layer_is_initialised_near_zero(fields):
    torch.manual_seed(0)
    *_, last = vector_memory("llama", hidden_sizes=(400,), **fields).networks[0]
    assert 0.019 < last.weight.std() < 0.021
    assert not last.bias.any()
    *_, last = vector_memory("llama", residual=True, **fields).networks[0]
    assert not last.weight.any(), "the pooled vectors are carried unchanged"


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_at_another_overlap_the_state_runs_as_far_ahead(name):
    """Footnote 3: the state must run exactly as far ahead of the next window's first token as it did in training."""
    spans = []
    model = tiny.recurrent(name, overlap=3)
    model.memory.register_forward_pre_hook(lambda _, args: spans.append(args[2][:2]))
    first = 0 if name == "gpt2" else 1
    for overlap, stop in ((3, 8), (5, 6), (7, 4), (1, 8), (0, 8)):
        spans.clear()
        model(IDS, overlap=overlap)
        assert set(spans) == {(first, first + stop)}
    with pytest.raises(ValueError, match=r"overlap=5 \(trained at 0\): a window has 8 document tokens and needs 9"):
        tiny.recurrent(name, overlap=0, slots=4)(IDS, overlap=5)


def test_pooling_does_not_overflow_in_half_precision():
    """A sum over a window may exceed the range of float16; the mean does not."""
    model = cf.add_recurrence(tiny.base("gpt2", n_positions=1024), window=1000, memory="vector")
    hidden = [torch.full((1, 1000, tiny.WIDTH), 100.0, dtype=torch.half) for _ in range(tiny.LAYERS)]
    assert_close(model.memory.vector.pool(hidden), torch.full((1, 1, tiny.WIDTH), 100.0, dtype=torch.half))


def test_only_document_tokens_are_pooled():
    model, pooled = tiny.answering("bert"), []
    forward = model.memory.forward

    def watched(layer_outputs, *rest):
        layer_outputs = [output.detach().requires_grad_() for output in layer_outputs]
        with torch.enable_grad():
            state = forward(layer_outputs, *rest)
            pooled.append(torch.autograd.grad(state.sum(), layer_outputs[-1])[0].abs().sum(-1) > 0)
        return state.detach()

    model.memory.forward = watched
    model(tiny.documents(2, 20), question_ids=tiny.QUESTIONS[:2])
    position = torch.arange(14)
    expected = torch.stack([(begin <= position) & (position < 13) for begin in (6, 5)])
    assert pooled[0].equal(expected), "after prefix, question and separator, before the suffix"
