# SPDX-License-Identifier: Apache-2.0
"""The library against a second implementation of the paper's equations, `helpers/reference.py`.

The reference takes the weights as a dictionary of leaves, so autograd gives the gradient of the plain unrolled graph.
The library's loss and all gradients must be the same, whether it recomputes its windows or keeps their graph.
"""

import pytest
import torch
from helpers import tiny
from helpers.reference import PREFIX, REFERENCES, SUFFIX, WINDOW, bert, gpt2, layer_norm, llama, run

import carryforward as cf


def build(name, overlap, **fields):
    """A tiny model in which nothing is zero and the state is large; other fields have the library's defaults."""
    settings = {"num_attention_heads": 4, "num_key_value_heads": 2} if name == "llama" else {}
    special = {"prefix": PREFIX, "suffix": SUFFIX, "window": WINDOW + 3} if name == "bert" else {"window": WINDOW}
    fields = tiny.with_memory(overlap=overlap, **special, **fields)
    model = cf.add_recurrence(tiny.base(name, **settings), **fields).eval()
    return tiny.without_zeros(model)


def sample(name, length):
    """Two documents and their labels; an encoder scores about half of its tokens."""
    ids = tiny.documents(2, length, seed=length)
    labels = ids.clone()
    if name == "bert":
        labels[torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.5] = -100
    return ids, labels


def library_results(model, ids, labels):
    out = model(ids, labels=labels)
    out.loss.backward()
    return out.nll_sum.detach(), int(out.n_scored), out.loss.detach(), tiny.gradients(model)


def reference_results(window, model, ids, labels, **settings):
    leaves = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    total, count = run(window, leaves, model.base.config, ids, labels, **settings)
    gradients = torch.autograd.grad(total / count, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return total.detach(), count, total.detach() / count, dict(zip(leaves, gradients, strict=True))


def assert_agree(ours, theirs):
    assert ours[1] == theirs[1]
    for a, b in ((ours[0], theirs[0]), (ours[2], theirs[2])):
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-5, atol=1e-5)
    tiny.assert_same_gradients(ours[3], theirs[3])


SMALL = {"overlap": 2, "hidden_sizes": (12, 12)}
SETTINGS = {
    "the paper's defaults": {"overlap": 2},
    "overlap 0": SMALL | {"overlap": 0},
    "overlap 3": SMALL | {"overlap": 3},
    "overlap T-1": SMALL | {"overlap": WINDOW - 1},
    "max": SMALL | {"pooling": "max"},
    "max, 3 slots": SMALL | {"pooling": "max", "slots": 3},
    "attention": SMALL | {"pooling": "attention"},
    "attention, 3 slots": SMALL | {"pooling": "attention", "slots": 3},
    "mean, 3 slots": SMALL | {"slots": 3},
    "first layer": SMALL | {"insert_at": 1},
    "last layer": SMALL | {"insert_at": 3},
    "all layers": SMALL | {"insert_at": "all", "slots": 2},
    "two layers": SMALL | {"insert_at": (1, 3), "state_per_layer": True},
    "a state for every layer": SMALL
    | {"insert_at": "all", "state_per_layer": True, "pooling": "attention", "slots": 2},
    "last layer pooled": SMALL | {"pooled_layers": "last"},
    "last layer pooled by max": SMALL | {"pooled_layers": "last", "pooling": "max"},
    "the layers below": SMALL | {"pooled_layers": "below", "insert_at": "all"},
    "the layer below, residual": SMALL | {"pooled_layers": "below", "insert_at": 3, "slots": 4, "residual": True},
    "the layers below by attention": SMALL
    | {"pooled_layers": "below", "insert_at": (2, 3), "slots": 2, "pooling": "attention", "residual": True},
    "all layers, residual": SMALL | {"residual": True, "insert_at": "all"},
    "truncated after 2": SMALL | {"bptt_windows": 2},
    "truncated after 1": SMALL | {"bptt_windows": 1, "overlap": 0},
    "one hidden layer": SMALL | {"hidden_sizes": (20,)},
}
# 29 tokens are five windows, the last of them short. The other lengths are around that of one window.
CASES = [(setting, 29) for setting in SETTINGS]
CASES += [
    (setting, n) for setting in ("the paper's defaults", "overlap 0") for n in (3, WINDOW, WINDOW + 1, WINDOW + 2, 26)
]


@pytest.mark.parametrize("keep_graph", [False, True], ids=["recomputed", "kept"])
@pytest.mark.parametrize(("setting", "length"), CASES)
@pytest.mark.parametrize("name", REFERENCES)
def test_the_library_computes_the_paper_s_equations(name, setting, length, keep_graph):
    settings = SETTINGS[setting]
    model, (ids, labels) = build(name, **settings, keep_graph=keep_graph), sample(name, length)
    theirs = reference_results(REFERENCES[name], model, ids, labels, **settings)
    assert_agree(library_results(model, ids, labels), theirs)


def test_the_paper_s_network():
    shapes = [tuple(p.shape) for p in build("gpt2", overlap=0).memory.vector.networks.parameters() if p.ndim == 2]
    assert shapes == [(200, tiny.WIDTH), (200, 200), (200, 200), (tiny.WIDTH, 200)]


def unnormed(*window):
    return gpt2(*window, norm_state=False)


def with_final_norm(w, config, ids, states):
    blocks, logits = gpt2(w, config, ids, states)
    normed = layer_norm(blocks[-1], w["transformer.ln_f.weight"], w["transformer.ln_f.bias"], config.layer_norm_epsilon)
    return [*blocks[:-1], normed], logits


def rotated(*window):
    return llama(*window, rotate_state=True)


@pytest.mark.parametrize(
    ("name", "flawed", "changed"),
    [
        ("gpt2", unnormed, {}),
        ("gpt2", with_final_norm, {}),
        ("llama", rotated, {}),
        ("gpt2", gpt2, {"overlap": 3}),
        ("llama", llama, {"insert_at": 1}),
        ("bert", bert, {"pooling": "max"}),
        ("bert", bert, {"bptt_windows": 3}),  # the loss is the same, only gradients differ
    ],
)
def test_a_slightly_wrong_reference_is_detected(name, flawed, changed):
    settings = SMALL | {"slots": 2}
    model, (ids, labels) = build(name, **settings), sample(name, 29)
    ours = library_results(model, ids, labels)
    assert_agree(ours, reference_results(REFERENCES[name], model, ids, labels, **settings))
    wrong = reference_results(flawed, model, ids, labels, **settings | changed)
    with pytest.raises(AssertionError):
        assert_agree(ours, wrong)
