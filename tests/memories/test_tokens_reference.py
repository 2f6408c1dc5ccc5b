# SPDX-License-Identifier: Apache-2.0
"""Memory tokens against a plain loop over windows, written from the paper (arXiv 2207.06881): an unmodified base model
reads [memory; tokens; memory], and its last hidden states at the end are the next memory."""

import pytest
import torch
from helpers import plain_windows
from helpers.plain_windows import assert_agree, build, call, is_causal, sample

import carryforward as cf

MEMORY = cf.TokenMemoryConfig(memory_tokens=3)


class RecurrentMemoryTransformer:
    """The memory between windows, and how a window reads and writes it."""

    flaw = ""  # to see that a wrong reference is detected

    def __init__(self, name, base, weights, rows):
        self.name, self.base, self.weights = name, base, weights
        self.memory = weights["tokens.first"].expand(rows, -1, -1)
        self.count = len(weights["tokens.first"])

    def __call__(self, tokens, is_written):
        read = self.memory
        if "tokens.projection.weight" in self.weights:  # embeddings of another size than hidden states
            read = read @ self.weights["tokens.projection.weight"].T
        if is_causal(self.name):
            logits, behind = call(self.name, self.base, tokens, before=read, after=read if is_written else None)
        else:
            after = torch.cat([read, read], dim=1) if is_written else read
            unseen = self.count if is_written and self.flaw != "seen" else 0
            logits, behind = call(self.name, self.base, tokens, after=after, unseen=unseen)
        if is_written:
            self.memory = behind[:, -self.count :] + (self.memory if self.flaw == "residual" else 0)
        return logits

    def detach(self):
        self.memory = self.memory.detach()


@pytest.mark.parametrize("keep_graph", [False, True], ids=["recomputed", "kept"])
@pytest.mark.parametrize("name", plain_windows.SETTINGS)
def test_the_library_computes_a_recurrent_memory_transformer(name, keep_graph):
    model = build(name, MEMORY, keep_graph=keep_graph)
    expected = assert_agree(name, model, RecurrentMemoryTransformer, *sample(name))
    assert expected["memory.tokens.first"].abs().max() > 1e-3, "the memory has an effect"


@pytest.mark.parametrize(("overlap", "length", "bptt_windows"), [(0, 8, None), (0, 9, None), (0, 29, 2), (3, 26, 1)])
@pytest.mark.parametrize("name", ["gpt2", "gemma3_text", "roberta"])
def test_other_overlaps_lengths_and_depths(name, overlap, length, bptt_windows):
    model = build(name, MEMORY, overlap, bptt_windows=bptt_windows)
    assert_agree(name, model, RecurrentMemoryTransformer, *sample(name, length), overlap, bptt_windows)


@pytest.mark.parametrize(("name", "flaw"), [("gpt2", "residual"), ("bert", "residual"), ("bert", "seen")])
def test_a_slightly_wrong_reference_is_detected(name, flaw, monkeypatch):
    monkeypatch.setattr(RecurrentMemoryTransformer, "flaw", flaw)
    with pytest.raises(AssertionError):
        assert_agree(name, build(name, MEMORY), RecurrentMemoryTransformer, *sample(name))
