# SPDX-License-Identifier: Apache-2.0
"""Contexts are drawn uniformly, and continued as by a loop over whole forward calls."""

import numpy as np
import pytest
import torch
from helpers import tiny

from carryforward import windows
from carryforward.analysis.continuations import check_context, continue_greedily, draw_contexts, read_contexts

EOS, NEW = 3, 8  # so many new tokens that another window begins
KINDS = [{}, {"slots": 0, "recent": 4, "sinks": 1}, {"overlap": 0}]
CONTEXTS = tiny.documents(3, 14).numpy()  # two windows of 8 tokens that share 2
DOCUMENTS = [np.arange(length) for length in (9, 3, 4, 0, 12)]


def by_hand(logits_of, contexts, count):
    """Generate each token from a call on the whole text so far, without the end-of-text token."""
    ids = torch.from_numpy(contexts)
    for _ in range(count):
        with torch.no_grad():
            logits = logits_of(ids)
        logits[:, EOS] = -torch.inf
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids[:, contexts.shape[1] :].numpy()


def base_logits(model, ids):
    """Logits of the next token from the base model, in the window that predicts it alone."""
    recurrence = model.config.recurrence
    *_, last = windows.schedule(ids.shape[1] + 1, recurrence.window, recurrence.overlap)
    return model.base(ids[:, last.start : last.end]).logits[:, -1].clone()


@pytest.mark.parametrize("fields", KINDS, ids=str)
@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_continuations_are_those_of_a_loop_by_hand(name, fields):
    model = tiny.recurrent(name, **fields)
    contexts = CONTEXTS if "overlap" not in fields else CONTEXTS[:, :8]
    with_state = continue_greedily(model, contexts, NEW)
    assert (with_state == by_hand(lambda ids: model(ids).logits[:, -1].clone(), contexts, NEW)).all()
    removed = continue_greedily(model, contexts, NEW, use_state=False)
    assert (removed == by_hand(lambda ids: base_logits(model, ids), contexts, NEW)).all()
    if contexts.shape[1] == 8:
        assert (removed[:, 0] == with_state[:, 0]).all(), "the context's only window predicts the first token of both"
    plain = continue_greedily(model.base, contexts[:, -1:], NEW)
    assert (plain == by_hand(lambda ids: model.base(ids).logits[:, -1].clone(), contexts[:, -1:], NEW)).all()
    assert not (with_state == removed).all(), "the state changes the continuation"
    assert (continue_greedily(model, contexts[1:2], NEW) == with_state[1]).all(), "batched = alone"


def test_end_of_text_is_never_generated():
    model = tiny.recurrent("llama")
    unrestricted = continue_greedily(model, CONTEXTS, 6)
    model.generation_config.eos_token_id = end = int(unrestricted[0, 3])
    continued = continue_greedily(model, CONTEXTS, 6)
    assert continued.shape == unrestricted.shape
    assert not (continued == end).any()
    before = unrestricted[0].tolist().index(end)
    assert (continued[0, :before] == unrestricted[0, :before]).all()


def test_the_models_own_generation_config_has_no_effect():
    model = tiny.recurrent("llama")
    before = continue_greedily(model, CONTEXTS, 6)
    model.generation_config.update(
        do_sample=True, temperature=5.0, repetition_penalty=9.0, no_repeat_ngram_size=1, max_time=0.0,
        suppress_tokens=before[0].tolist(), forced_eos_token_id=1,
    )  # fmt: skip
    assert (continue_greedily(model, CONTEXTS, 6) == before).all()
    assert model.generation_config.no_repeat_ngram_size == 1


def test_a_plain_model_needs_positions_for_all_tokens():
    with pytest.raises(ValueError, match="new_tokens=40: the plain model has 39 positions left after the context"):
        continue_greedily(tiny.base("gpt2"), CONTEXTS[:, -1:], 40)


def test_continue_greedily_checks_contexts():
    with pytest.raises(ValueError, match="context_tokens=7: a context must end where a window ends: use 8, 14, 20"):
        continue_greedily(tiny.recurrent("gpt2"), CONTEXTS[:, :7], 4)


def test_every_position_can_be_drawn_once():
    everywhere = {(0, start) for start in range(6)} | {(2, 0)} | {(4, start) for start in range(9)}
    starts = draw_contexts(DOCUMENTS, 4, 16)
    assert {tuple(start) for start in starts.tolist()} == everywhere
    contexts = read_contexts(DOCUMENTS, starts, 4)
    assert (contexts == starts[:, 1:] + np.arange(4)).all()


def test_contexts_depend_on_the_seed_only():
    first, same, other = (draw_contexts(DOCUMENTS, 4, 7, seed=seed) for seed in (1, 1, 2))
    assert (first == same).all()
    assert not (first == other).all()


@pytest.mark.parametrize(
    ("tokens", "count", "message"),
    [(4, 17, "but there are only 16"), (13, 1, "but no document is that long")],
)
def test_too_many_contexts_are_refused(tokens, count, message):
    with pytest.raises(ValueError, match=message):
        draw_contexts(DOCUMENTS, tokens, count)


@pytest.mark.parametrize("tokens", [7, 9, 12])
def test_contexts_must_end_with_a_window(tokens):
    model = tiny.recurrent("llama")
    check_context(model, 8)
    check_context(model, 14)
    with pytest.raises(ValueError, match=f"context_tokens={tokens}: a context must end .* ends: use 8, 14, 20"):
        check_context(model, tokens)
