# SPDX-License-Identifier: Apache-2.0
"""Position offsets of carried keys and values, for base models with learned positions."""

import pytest
import torch
from helpers import tiny
from helpers.tiny import LEARNED, untrained
from torch.testing import assert_close

import carryforward as cf
from carryforward.models.position_offsets import needs_position_offsets

ALL = list(tiny.CONFIGS)


@pytest.mark.parametrize("name", ALL)
def test_only_learned_positions_need_places(name):
    fields = {"prefix": (2,), "suffix": (3, 3), "window": 11} if name in tiny.ENCODERS else {"window": 8}
    model = cf.add_recurrence(tiny.base(name, "none"), slots=0, kept=3, sinks=1, **fields)
    assert needs_position_offsets(model) == (name in LEARNED)
    if name not in LEARNED:
        assert not list(model.recurrence.parameters())
        return
    ids, places = tiny.documents(1, 24), model.recurrence.keeping.places
    before = model(ids).last_hidden_state
    with torch.no_grad():
        places[0, 1, :, len(model.config.recurrence.prefix) + 3] = 1.0  # where the newest stands, in the first layer
    assert not needs_position_offsets(model)
    changed = (model(ids).last_hidden_state - before).abs().amax(-1)[0]
    assert not changed[:5].any()
    assert changed[8:].min() > 1e-6


@pytest.mark.parametrize("name", LEARNED)
def test_places_are_means_over_texts(name):
    prefix = (2,) if name in tiny.ENCODERS else ()
    model = cf.add_recurrence(tiny.base(name, "none"), window=9, slots=0, kept=3, sinks=1, prefix=prefix).train()
    length = 13 - len(prefix)
    texts = tiny.documents(6, length)
    cf.measure_position_offsets(model, texts.numpy(), rows=6)
    assert model.training
    first = model.backbone.get_submodule(model.config.architecture.layers)[0]
    seen = []
    hook = first.get_submodule(model.config.architecture.attention).register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    model.eval().backbone(torch.cat([torch.tensor(prefix, dtype=torch.long).expand(6, -1), texts], dim=1))
    hook.remove()

    def projection(which):
        """The weight and bias that make the first layer's keys or values."""
        if name == "gpt2":
            part = slice(16 * (which + 1), 16 * (which + 2))
            return first.attn.c_attn.weight.T[part], first.attn.c_attn.bias[part]
        names = {"opt": "self_attn.{}_proj", "distilbert": "attention.{}_lin"}.get(name, "attention.self.{}")
        letters = ("k", "v") if name in ("opt", "distilbert") else ("key", "value")
        module = first.get_submodule(names.format(letters[which]))
        return module.weight, module.bias

    places = model.recurrence.keeping.places
    for which in (0, 1):
        expected = torch.nn.functional.linear(seen[0], *projection(which)).mean(0).view(13, 2, 8).transpose(0, 1)
        assert_close(places[0, which], expected, rtol=1e-4, atol=1e-5)
    assert (places[1:].abs().amax((-1, -2)) > 1e-3).all(), "of every layer, keys and values, every head"


def test_stretches_are_from_all_over():
    model = untrained("gpt2", kept=4)
    documents = [torch.randint(0, tiny.VOCABULARY, (n,)).numpy() for n in (5, 40, 3, 30)]
    cf.measure_position_offsets(model, documents, rows=4)
    assert not needs_position_offsets(model)
    with pytest.raises(ValueError, match="documents have 8 tokens where 12 are needed"):
        cf.measure_position_offsets(untrained("gpt2", kept=4), [documents[0], documents[2]])
    with pytest.raises(ValueError, match="documents have 0 tokens"):
        cf.measure_position_offsets(untrained("gpt2", kept=4), [])
    cf.measure_position_offsets(untrained("llama", kept=4), [])  # which needs none


def test_what_cannot_be_read_yet_is_said(monkeypatch):
    told = []
    monkeypatch.setattr("carryforward.models.base.logger.warning_once", told.append)
    monkeypatch.setattr(
        "carryforward.models.position_offsets.logger.warning", lambda message, *given: told.append(message % given)
    )
    model, ids = untrained("gpt2", kept=4), tiny.documents(1, 20)
    model(ids, use_state=False)
    untrained("llama", kept=4)(ids)
    assert not told
    model(ids)
    assert "measure_position_offsets" in told.pop()
    cf.measure_position_offsets(model, [ids[0].numpy()])
    assert "Only 1 stretches of 12 tokens" in told.pop()
    model(ids)
    assert not told
