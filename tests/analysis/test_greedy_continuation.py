# SPDX-License-Identifier: Apache-2.0
"""Contexts are drawn as they should be, and continued as a loop over whole forward calls would."""

import numpy as np
import pytest
import torch
from helpers import tiny

from carryforward import windows
from carryforward.analysis.greedy_continuation import check_context, continue_greedily, draw, read_contexts

EOS, NEW = 3, 8  # another window begins among the new ones
KINDS = [{}, {"slots": 0, "kept": 4, "sinks": 1}, {"overlap": 0}]
CONTEXTS = tiny.documents(3, 14).numpy()  # windows of 8 tokens, an overlap of 2: two windows
DOCUMENTS = [np.arange(length) for length in (9, 3, 4, 0, 12)]


def by_hand(logits_of, contexts, count):
    """Every token from a call on the whole text so far; the end of a text is no token."""
    ids = torch.from_numpy(contexts)
    for _ in range(count):
        with torch.no_grad():
            logits = logits_of(ids)
        logits[:, EOS] = -torch.inf
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids[:, contexts.shape[1] :].numpy()


def alone(model, ids):
    """What follows, from the base model in the window that answers for it and nothing before that."""
    recurrence = model.config.recurrence
    *_, last = windows.schedule(ids.shape[1] + 1, recurrence.window, recurrence.overlap)
    return model.base(ids[:, last.start : last.end]).logits[:, -1].clone()


@pytest.mark.parametrize("fields", KINDS, ids=str)
@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_continued_as_by_hand(name, fields):
    model = tiny.recurrent(name, **fields)
    contexts = CONTEXTS if "overlap" not in fields else CONTEXTS[:, :8]
    found = continue_greedily(model, contexts, NEW)
    assert (found == by_hand(lambda ids: model(ids).logits[:, -1].clone(), contexts, NEW)).all()
    removed = continue_greedily(model, contexts, NEW, use_state=False)
    assert (removed == by_hand(lambda ids: alone(model, ids), contexts, NEW)).all()
    if contexts.shape[1] == 8:
        assert (removed[:, 0] == found[:, 0]).all(), "the context's window, the first, chooses the first token for both"
    plain = continue_greedily(model.base, contexts[:, -1:], NEW)
    assert (plain == by_hand(lambda ids: model.base(ids).logits[:, -1].clone(), contexts[:, -1:], NEW)).all()
    assert not (found == removed).all(), "the state tells"
    assert (continue_greedily(model, contexts[1:2], NEW) == found[1]).all(), "batched = alone"


def test_the_end_of_a_text_is_never_written():
    model = tiny.recurrent("llama")
    first = continue_greedily(model, CONTEXTS, 6)
    model.generation_config.eos_token_id = end = int(first[0, 3])
    found = continue_greedily(model, CONTEXTS, 6)
    assert found.shape == first.shape
    assert not (found == end).any()
    before = first[0].tolist().index(end)
    assert (found[0, :before] == first[0, :before]).all()


def test_settings_of_the_models_own_do_not_change_the_choice():
    model = tiny.recurrent("llama")
    before = continue_greedily(model, CONTEXTS, 6)
    model.generation_config.update(
        do_sample=True, temperature=5.0, repetition_penalty=9.0, no_repeat_ngram_size=1, max_time=0.0,
        suppress_tokens=before[0].tolist(), forced_eos_token_id=1,
    )  # fmt: skip
    assert (continue_greedily(model, CONTEXTS, 6) == before).all()
    assert model.generation_config.no_repeat_ngram_size == 1


def test_a_plain_model_has_so_many_positions():
    with pytest.raises(ValueError, match="new_tokens=40: behind 1 the plain model has 39 positions left"):
        continue_greedily(tiny.base("gpt2"), CONTEXTS[:, -1:], 40)


def test_a_context_ends_where_a_window_does():
    with pytest.raises(ValueError, match="context_tokens=7: a context must end where a window does: 8, 14, 20"):
        continue_greedily(tiny.recurrent("gpt2"), CONTEXTS[:, :7], 4)


def test_all_places_are_drawn_if_all_are_asked_for():
    everywhere = {(0, start) for start in range(6)} | {(2, 0)} | {(4, start) for start in range(9)}
    places = draw(DOCUMENTS, 4, 16)
    assert {tuple(place) for place in places.tolist()} == everywhere
    contexts = read_contexts(DOCUMENTS, places, 4)
    assert (contexts == places[:, 1:] + np.arange(4)).all()


def test_places_depend_on_the_seed_alone():
    one, same, other = (draw(DOCUMENTS, 4, 7, seed=seed) for seed in (1, 1, 2))
    assert (one == same).all()
    assert not (one == other).all()


@pytest.mark.parametrize(
    ("tokens", "count", "message"),
    [(4, 17, "only 16 places for one"), (13, 1, "no document that is so long")],
)
def test_places_that_are_not_there(tokens, count, message):
    with pytest.raises(ValueError, match=message):
        draw(DOCUMENTS, tokens, count)


@pytest.mark.parametrize("tokens", [7, 9, 12])
def test_a_context_ends_with_a_window(tokens):
    model = tiny.recurrent("llama")
    check_context(model, 8)
    check_context(model, 14)
    with pytest.raises(ValueError, match=f"context_tokens={tokens}: a context must end .* does: 8, 14, 20"):
        check_context(model, tokens)
