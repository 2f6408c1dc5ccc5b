# SPDX-License-Identifier: Apache-2.0
"""Associative memory against the equations of its paper (arXiv 2407.04841), token by token, in hooks around the layers
of an unmodified base model."""

from functools import partial

import pytest
import torch
from helpers import plain_windows
from helpers.plain_windows import assert_agree, build, call, is_causal, sample

import carryforward as cf

MEMORY = cf.AssociativeMemoryConfig(memory_tokens=3, key_size=5)
LAYERS = {"gpt2": "transformer.h", "opt": "model.decoder.layers", "bert": "bert.encoder.layer",
          "roberta": "roberta.encoder.layer", "electra": "electra.encoder.layer"}  # fmt: skip


def dpfp(x):
    """DPFP with ν = 3, of length 1: products of every number with its neighbours 1, 2 and 3 places before it."""
    r = torch.cat([x.clamp(min=0), (-x).clamp(min=0)], dim=-1)
    size = r.shape[-1]
    phi = torch.cat([r * r[..., (torch.arange(size) - shift) % size] for shift in (1, 2, 3)], dim=-1)
    return phi / phi.square().sum(-1, keepdim=True).sqrt()


class AssociativeMemory:
    """Matrices A [B, k, D] and normalisers z [B, D] of every layer, and how a window reads and writes them."""

    flaw = ""  # to see that a wrong reference is detected

    def __init__(self, name, base, weights, rows):
        self.name, self.base, self.weights, self.rows = name, base, weights, rows
        self.layers = base.get_submodule(LAYERS.get(name, "model.layers"))
        for number, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(partial(self.read, number), with_kwargs=True)
            layer.register_forward_hook(partial(self.record, number))
        self.count = len(weights["associative.tokens"])
        width, features = base.config.hidden_size, 6 * len(weights["associative.associations.0.key.weight"])
        self.matrices = [torch.zeros(rows, width, features).double() for _ in self.layers]
        self.normalisers = [torch.zeros(rows, features).double() for _ in self.layers]

    def project(self, number, name, x):
        return x @ self.weights[f"associative.associations.{number}.{name}.weight"].T

    def read(self, number, layer, args, kwargs):
        """x + A φ(W_q x) / (zᵀφ + ε)"""
        x = args[0] if args else kwargs["hidden_states"]
        phi = dpfp(self.project(number, "query", x))
        found = torch.einsum("bkd,bnd->bnk", self.matrices[number], phi)
        weight = torch.einsum("bd,bnd->bn", self.normalisers[number], phi)
        x = x + found / (weight + 1e-5)[..., None]
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

    def record(self, number, layer, args, output):
        self.outputs[number] = output

    def __call__(self, tokens, is_written):
        self.outputs = {}
        after = self.weights["associative.tokens"].expand(self.rows, -1, -1) if is_written else None
        unseen = self.count if is_written and not is_causal(self.name) else 0
        logits, _ = call(self.name, self.base, tokens, after=after, unseen=unseen)
        if is_written:
            for number in range(len(self.layers)):
                self.write(number, self.outputs[number][:, -self.count :])
        return logits

    def write(self, number, tokens):
        """The delta rule: every token corrects what the matrix holds at its key."""
        a, z = old_a, old_z = self.matrices[number], self.normalisers[number]
        for token in tokens.unbind(1):
            phi, value = dpfp(self.project(number, "key", token)), self.project(number, "value", token)
            bias = self.weights[f"associative.associations.{number}.gate.bias"]
            beta = torch.sigmoid(self.project(number, "gate", token) + bias)
            if self.flaw == "one after the other":
                old_a, old_z = a, z
            weight = torch.einsum("bd,bd->b", old_z, phi)[:, None]
            correction = value - torch.einsum("bkd,bd->bk", old_a, phi) / (weight + 1e-5)
            gamma = 1 - weight / phi.square().sum(-1, keepdim=True)
            gamma = gamma if self.flaw == "not clamped" else gamma.clamp(0, 1)
            gamma = gamma if self.flaw == "not detached" else gamma.detach()
            a = a + torch.einsum("bk,bd->bkd", beta * correction, phi)
            z = z + gamma * phi
        self.matrices[number], self.normalisers[number] = a, z

    def detach(self):
        for parts in (self.matrices, self.normalisers):
            parts[:] = [part.detach() for part in parts]


@pytest.mark.parametrize("keep_graph", [False, True], ids=["recomputed", "kept"])
@pytest.mark.parametrize("name", plain_windows.SETTINGS)
def test_the_library_computes_an_associative_memory(name, keep_graph):
    model = build(name, MEMORY, keep_graph=keep_graph)
    expected = assert_agree(name, model, AssociativeMemory, *sample(name))
    for weight in ("query.weight", "key.weight", "value.weight", "gate.weight"):
        assert expected[f"memory.associative.associations.0.{weight}"].abs().max() > 1e-4, f"{weight} has an effect"


@pytest.mark.parametrize(("overlap", "length", "bptt_windows"), [(0, 8, None), (0, 9, None), (0, 29, 2), (3, 26, 1)])
@pytest.mark.parametrize("name", ["gpt2", "gemma3_text", "roberta"])
def test_other_overlaps_lengths_and_depths(name, overlap, length, bptt_windows):
    model = build(name, MEMORY, overlap, bptt_windows=bptt_windows)
    assert_agree(name, model, AssociativeMemory, *sample(name, length), overlap, bptt_windows)


@pytest.mark.parametrize("flaw", ["one after the other", "not clamped", "not detached"])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_slightly_wrong_reference_is_detected(name, flaw, monkeypatch):
    monkeypatch.setattr(AssociativeMemory, "flaw", flaw)
    with pytest.raises(AssertionError):
        assert_agree(name, build(name, MEMORY), AssociativeMemory, *sample(name))
