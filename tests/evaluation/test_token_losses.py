# SPDX-License-Identifier: Apache-2.0
"""Losses of single tokens, and losses by how many windows the state has read."""

import numpy as np
import pytest
import torch
from helpers import tiny
from torch.testing import assert_close

import carryforward as cf
from carryforward.evaluation.token_losses import loss_by_depth, token_losses

DOCUMENTS = [tiny.documents(1, length, seed)[0].numpy() for seed, length in enumerate([40, 1, 9, 2, 17, 8, 41])]
KINDS = [{}, {"slots": 0, "recent": 4, "sinks": 1}]


@pytest.mark.parametrize("use_state", [True, False])
@pytest.mark.parametrize("overlap", [0, 2, 3])
@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_losses_of_all_tokens_add_up_to_perplexity(fields, overlap, use_state):
    model = tiny.recurrent("llama", **fields)
    losses = token_losses(model, DOCUMENTS, overlap=overlap, use_state=use_state, batch_size=3)
    assert [len(loss) for loss in losses] == [len(document) for document in DOCUMENTS]
    assert all(np.isnan(loss[0]) and np.isfinite(loss[1:]).all() for loss in losses)
    result = cf.perplexity(model, DOCUMENTS, overlap=overlap, use_state=use_state)
    assert sum(np.nansum(loss) for loss in losses) == pytest.approx(result.nats, rel=1e-5)


def test_losses_equal_the_cross_entropy_of_the_logits():
    model = tiny.recurrent("gpt2")
    ids = torch.from_numpy(DOCUMENTS[0])[None]
    expected = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
    (losses,) = token_losses(model, DOCUMENTS[:1])
    assert_close(torch.from_numpy(losses[1:]).float(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_depth_zero_is_no_state_and_the_greatest_depth_is_the_whole_state(fields):
    model = tiny.recurrent("llama", **fields)  # windows of 8 tokens, an overlap of 2
    documents = [DOCUMENTS[0], DOCUMENTS[-1]]
    by_depth, tokens = loss_by_depth(model, documents, [0, 1, 4], batch_size=2)
    with_state, without = (token_losses(model, documents, use_state=use) for use in (True, False))
    # A window that ends at `end` scores targets end - 5 to end. Each has at least four windows before it.
    ends = [(i, end) for i, document in enumerate(documents) for end in range(32, len(document), 6)]
    assert tokens == 6 * len(ends)
    expected = np.mean([without[i][end - 5 : end + 1] for i, end in ends])
    assert by_depth[0] == pytest.approx(expected, rel=1e-5)
    # Only the first of these windows has exactly four windows before it.
    first, _ = loss_by_depth(model, [document[:33] for document in documents], [4])
    expected = np.mean([with_state[i][end - 5 : end + 1] for i, end in ends if end == 32])
    assert first[4] == pytest.approx(expected, rel=1e-5)
    assert len(set(by_depth.values())) == 3, "each further window changes the loss"


def test_32_windows_back_equal_the_plain_model_on_the_whole_text():
    """With rotary positions, and as long as all of a text is within reach."""
    base = tiny.base("llama", max_position_embeddings=200)
    model = cf.add_recurrence(base, window=4, reach=32 * 4)
    documents = [tiny.documents(1, length, seed)[0] for seed, length in enumerate([140, 133, 90])]
    by_depth, tokens = loss_by_depth(model, documents, [0, 4, 32])
    ends = [(i, end) for i, document in enumerate(documents) for end in range(33 * 4, len(document), 4)]
    assert tokens == 4 * len(ends) == 12
    for depth in by_depth:
        losses = []
        for i, end in ends:
            begin = end - (depth + 1) * 4
            logits = base(documents[i][None, begin:end]).logits[0, -4:]
            losses.append(torch.nn.functional.cross_entropy(logits, documents[i][end - 3 : end + 1]).item())
        assert by_depth[depth] == pytest.approx(np.mean(losses), rel=1e-4)


def test_bad_input():
    model = tiny.recurrent("llama")
    with pytest.raises(ValueError, match="no document has 10 full windows of 8 tokens"):
        loss_by_depth(model, DOCUMENTS, [9])
    with pytest.raises(ValueError, match="give numbers of windows"):
        loss_by_depth(model, DOCUMENTS, [])
    for batch_size in (0, -1):
        with pytest.raises(ValueError, match=f"batch_size={batch_size} must be at least 1"):
            token_losses(model, DOCUMENTS, batch_size=batch_size)
    with pytest.raises(ValueError, match="a recurrent causal language model is needed"):
        token_losses(tiny.recurrent("bert"), DOCUMENTS)
