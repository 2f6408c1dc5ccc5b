# SPDX-License-Identifier: Apache-2.0
"""Keys and values that are carried from window to window, on tiny models of every supported architecture.

Two independent references: the plain model on the uncut text, and transformers' own cache, cut by hand.
"""

import itertools

import pytest
import torch
from helpers import prose, tiny
from torch.testing import assert_close
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import carryforward as cf
from carryforward.backbones import architectures, hooks
from carryforward.cli.main import main
from carryforward.models.position_offsets import needs_position_offsets

ALL = list(tiny.CONFIGS)
LEARNED = [name for name in ALL if not architectures.ARCHITECTURES[name].rotary]
KINDS = [{"slots": 0, "kept": 3, "sinks": 1}, {"slots": 2, "kept": 4, "insert_at": (1, 3)}]
WIDE = {"sliding_window": 64}  # what is kept is seen by every query, also of a layer that looks less far back


def untrained(name, **fields):
    settings = WIDE if name in ("mistral", "gemma3_text") else {}
    return cf.add_recurrence(tiny.base(name, **settings), window=8, slots=0, **fields)


# --- references ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("overlap", "kept", "sinks"), [(0, 8, 0), (0, 7, 1), (3, 5, 0), (3, 3, 2)])
@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_two_windows_that_keep_everything_are_one_text(name, overlap, kept, sinks, attention):
    model = untrained(name, overlap=overlap, kept=kept, sinks=sinks)
    model.base.set_attn_implementation(attention)
    ids = tiny.documents(2, 16 - overlap)
    expected = model.base(ids).logits
    assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)
    assert (model(ids, use_state=False).logits - expected).abs().max() > 1e-2


@pytest.mark.parametrize("rope", ["longrope", "dynamic", "yarn"])
def test_rotations_that_depend_on_the_length(rope):
    more = {"longrope": {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}}.get(rope, {})
    settings = {"rope_type": rope, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 6, **more}
    base = LlamaForCausalLM(LlamaConfig(**{**tiny._grouped, "max_position_embeddings": 24}, rope_parameters=settings))
    model = cf.add_recurrence(base.eval(), window=8, slots=0, kept=8)
    ids = tiny.documents(1, 16)
    expected = model.base(ids).logits
    for _ in range(2):  # nothing may depend on what was run before
        assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "overlap", "kept", "sinks"),
    [
        (name, *fields)
        for name in tiny.CAUSAL
        for fields in ((0, 3, 0), (0, 8, 0), (0, 3, 2), (2, 4, 1))
        if name in LEARNED or not fields[2]  # rotary sinks are turned: two windows that are one text show how
    ],
)
def test_transformers_own_cache_cut_by_hand(name, overlap, kept, sinks):
    model, seen = untrained(name, overlap=overlap, kept=kept, sinks=sinks), kept + sinks
    ids, places, learned = tiny.documents(2, 8 + 4 * (8 - overlap)), None, name in LEARNED
    if learned:
        places = torch.nn.init.normal_(model.recurrence.keeping.places, generator=torch.Generator().manual_seed(0))
    cache, expected, ahead = DynamicCache(), [], 8 - overlap
    for window in range(5):
        # rotations see differences of positions only; learned positions begin behind what is kept
        begin = min(ahead * window, seen) if learned else ahead * window
        part = ids[:, ahead * window : ahead * window + 8]
        position = torch.arange(begin, begin + 8)[None]
        out = model.base(part, past_key_values=cache, position_ids=position, attention_mask=_seen(cache, 8))
        expected.append(out.logits[:, overlap if window else 0 :])
        cache = DynamicCache()
        for layer, old in enumerate(out.past_key_values.layers):
            both = []
            for side, every in enumerate((old.keys, old.values)):
                own = every[:, :, -8:][:, :, ahead - kept : ahead]
                if learned:
                    stood = begin + ahead - kept
                    move = [places[layer, side, :, at : at + kept] for at in (sinks, stood)]
                    own = own + move[0] - move[1]
                first = every[:, :, :sinks]  # of the document: in the first window, and then of what was kept
                both.append(torch.cat([first, own], dim=2))
            cache.update(*both, layer)
    assert_close(model(ids).logits, torch.cat(expected, dim=1), rtol=1e-4, atol=1e-4)


def _seen(cache, queries):
    """Everything in the cache, and what is not ahead."""
    before = cache.get_seq_length()
    return torch.ones(queries, before + queries).tril(before).bool()[None, None].expand(2, 1, -1, -1)


@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_sinks_are_those_of_the_document(name):
    model = untrained(name, kept=2, sinks=2)
    first, later, other = tiny.documents(1, 8, 0), tiny.documents(1, 16, 1), tiny.documents(1, 8, 2)
    one, two = (model.advance_state(torch.cat([begin, later], 1)) for begin in (first, other))
    assert not one.kept[..., :2, :].equal(two.kept[..., :2, :])
    assert one.kept[..., :2, :].equal(model.advance_state(torch.cat([first, other, later], 1)).kept[..., :2, :])


@pytest.mark.parametrize("name", [name for name in LEARNED if name in tiny.ENCODERS])
def test_an_encoder_of_one_layer_that_keeps_everything(name):
    """Its keys and values depend on their own tokens alone, so the second window sees what it would in one text."""
    body = tiny.base(name, "none", num_hidden_layers=1, n_layers=1)
    model = cf.add_recurrence(body, window=9, slots=0, kept=7, sinks=1, prefix=(2,), suffix=())
    ids = tiny.documents(2, 16)
    whole = body(torch.cat([torch.full((2, 1), 2), ids], dim=1)).last_hidden_state[:, 1:]
    assert_close(model(ids, final=True).last_hidden_state[:, 8:], whole[:, 8:], rtol=1e-4, atol=1e-5)


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


# --- places ----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("documents", "more", "message"),
    [
        (["text"], {}, "documents must be a list of token ids for each text"),
        ((n for n in []), {}, "documents must be a list of token ids for each text"),
        ([[99] * 20], {}, "holds the token id 99"),
        ([[5] * 20], {"rows": 0}, "rows=0 must be at least 1"),
    ],
)
def test_documents_that_are_none(documents, more, message):
    with pytest.raises(ValueError, match=message):
        cf.measure_position_offsets(untrained("gpt2", kept=4), documents, **more)


def test_a_plain_model_has_no_places():
    with pytest.raises(ValueError, match="model is a GPT2LMHeadModel: add recurrence first"):
        cf.measure_position_offsets(tiny.base("gpt2"), [[5] * 20])


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


def test_a_short_document_beside_a_longer_one_keeps_its_own():
    model, ids = tiny.recurrent("gpt2", slots=0, kept=3, sinks=3), tiny.documents(2, 6)
    mask = torch.tensor([[1] * 6, [1] * 2 + [0] * 4])
    together = model.advance_state(ids, attention_mask=mask, final=True)
    alone = model.advance_state(ids[1:, :2], final=True)
    assert_close(together[[1]].kept, alone.kept)


def test_learned_positions_are_limited():
    with pytest.raises(ValueError, match="window=30 with 12 positions kept in front of it is larger than the 40"):
        cf.add_recurrence(tiny.base("gpt2"), window=30, kept=12)


# --- things that make no difference ----------------------------------------------------------------------------------


def gradients(model, ids, **arguments):
    out = model(ids, labels=ids, **arguments)
    out.loss.backward()
    return out, tiny.gradients(model)


@pytest.mark.parametrize("fields", KINDS, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_recomputed_equals_kept_graph(name, fields):
    ids = tiny.documents(2, 37)
    mask = torch.ones_like(ids)
    mask[0, 20:] = 0
    results = []
    for keep_graph in (False, True):
        model = tiny.recurrent(name, keep_graph=keep_graph, **fields).train()
        torch.manual_seed(5)
        results.append(gradients(model, ids, attention_mask=mask))
    (out, found), (expected, graph) = results
    assert_close(out.loss, expected.loss)
    tiny.assert_same_gradients(found, graph)
    if name in LEARNED:
        moved = found["recurrence.keeping.places"].abs().amax((1, 2, 4))
        begin = len(model.config.recurrence.prefix) + model.config.recurrence.sinks
        assert (moved[:, begin : begin + fields["kept"]] > 1e-7).all(), "every kept position of every layer takes part"


@pytest.mark.parametrize("fields", KINDS, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_streamed_and_batched_equal_whole_and_alone(name, fields, tmp_path):
    model = tiny.recurrent(name, **fields)
    ids, lengths = tiny.documents(3, 34), [34, 9, 21]
    mask = (torch.arange(34) < torch.tensor(lengths)[:, None]).long()
    together = model(ids, labels=ids, attention_mask=mask)
    together.nll_sum.backward()
    expected, total = tiny.gradients(model), torch.zeros(())
    for row, length in enumerate(lengths):
        state = None
        for begin, end in itertools.pairwise(sorted({0, min(10, length), min(11, length), length})):
            final = {} if name in tiny.CAUSAL else {"final": end == length}
            piece = ids[row : row + 1, begin:end]
            out = model(piece, labels=piece, state=state, **final)
            state, total = out.state, total + out.nll_sum
        if name in tiny.CAUSAL:
            assert_close(state.kept, together.state[[row]].kept, rtol=1e-4, atol=1e-5)
    assert_close(total, together.nll_sum)
    total.backward()
    tiny.assert_same_gradients(expected, tiny.gradients(model))
    together.state.save(tmp_path / "state")
    assert cf.State.load(tmp_path / "state").kept.equal(together.state.kept)


@pytest.mark.parametrize("name", ALL)
def test_checkpointing_saving_and_another_attention(name, tmp_path):
    ids, results = tiny.documents(2, 30), []
    for checkpointed in (False, True):
        model = tiny.recurrent(name, **KINDS[0]).train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        torch.manual_seed(5)
        results.append(gradients(model, ids)[1])
    tiny.assert_same_gradients(*results)
    out = model.eval()(ids, labels=ids)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    for attention in ("sdpa", "eager"):
        again.base.set_attn_implementation(attention)
        assert_close(again(ids, labels=ids).loss, out.loss)


def test_what_was_noted_is_let_go(monkeypatch):
    carries, make = [], hooks.HookContext
    monkeypatch.setattr(hooks, "HookContext", lambda: carries.append(make()) or carries[-1])
    model = tiny.recurrent("gpt2", keep_graph=True, **KINDS[0]).train()
    model.gradient_checkpointing_enable()  # whose graph holds on to all that a layer was called with
    loss = model(tiny.documents(1, 30), labels=tiny.documents(1, 30)).loss
    assert carries
    assert all(carry.outputs is None and not carry.noted for carry in carries)
    loss.backward()


@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_the_base_model_is_still_the_base_model(name):
    model, plain = tiny.recurrent(name, **KINDS[0]), tiny.base(name)
    ids = tiny.documents(2, 16)
    model(ids)
    assert_close(model.base(ids).logits, plain(ids).logits)
    again = cf.add_recurrence(model.base, window=8)  # whose attention has a door now
    assert_close(again(ids, use_state=False).logits[:, :8], plain(ids[:, :8]).logits, rtol=1e-4, atol=1e-5)


def test_presets():
    assert cf.RecurrenceConfig.preset("paper", window=64) == cf.RecurrenceConfig(window=64)
    kept = cf.RecurrenceConfig.preset("kept")
    assert (kept.window, kept.slots, kept.kept, kept.sinks) == (300, 0, 146, 4)
    assert cf.RecurrenceConfig.preset("kept", window=64, overlap=48).kept == 12
    other = cf.RecurrenceConfig.preset("kept", window=64, sinks=0, slots=2)
    assert (other.kept, other.sinks, other.slots) == (32, 0, 2)
    small = cf.RecurrenceConfig.preset("kept", window=4)
    assert (small.kept, small.sinks) == (1, 1)
    framed = cf.RecurrenceConfig.preset("kept", window=300, overlap=200, prefix=(1,), suffix=(2,))
    assert (framed.kept, framed.sinks) == (94, 4)
    with pytest.raises(ValueError, match="sinks='x' must be an integer"):
        cf.RecurrenceConfig.preset("kept", sinks="x")
    with pytest.raises(ValueError, match="kept=0 would carry nothing. Leave kept out, or use 'paper'"):
        cf.RecurrenceConfig.preset("kept", kept=0)
    with pytest.raises(ValueError, match=r"sinks=150 leaves nothing of the half window \(150\) to keep"):
        cf.RecurrenceConfig.preset("kept", sinks=150)
    with pytest.raises(ValueError, match="insert_at, pooling is about what is pooled.*: give slots as well"):
        cf.RecurrenceConfig.preset("kept", insert_at=6, pooling="max")
    assert cf.RecurrenceConfig.preset("kept", insert_at=6, slots=1).insert_at == 6
    with pytest.raises(ValueError, match="no preset 'best'. There are: 'paper', 'kept'"):
        cf.RecurrenceConfig.preset("best")
    with pytest.raises(ValueError, match="Did you mean 'window'"):
        cf.RecurrenceConfig.preset("kept", windw=4)


# --- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kept": -1}, "kept=-1 must be an integer of at least 0"),
        ({"sinks": 2}, "sinks=2 must be 0 without `kept`"),
        ({"slots": 0}, "slots=0 must be an integer of at least 1 without `kept`"),
        ({"kept": 7, "overlap": 2}, "kept=7 must be at most 6: by so many is a window ahead"),
        ({"kept": 7, "sinks": 2}, "kept=7 must be at most 6: by so many is a window ahead, less `sinks`"),
    ],
)
def test_settings_that_make_no_sense(fields, message):
    with pytest.raises(ValueError, match=message):
        cf.RecurrenceConfig(window=8, **fields)


def test_too_much_overlap_for_what_is_kept():
    with pytest.raises(ValueError, match="the next window is only 3 tokens ahead, and the model keeps the keys and"):
        tiny.recurrent("gpt2", kept=4)(tiny.documents(1, 30), overlap=5)


@pytest.mark.parametrize("other", [{"kept": 3}, {"kept": 4, "settings": {"num_key_value_heads": 2}}], ids=str)
def test_states_of_others_are_refused(other):
    state = tiny.recurrent("llama", kept=4).advance_state(tiny.documents(1, 20))
    with pytest.raises(ValueError, match=r"kept 0\+4 of 1x8"):
        tiny.recurrent("llama", **other)(tiny.documents(1, 20), state=state)


def test_an_attention_that_would_be_another_one():
    model = tiny.recurrent("gpt2", kept=4, settings={"reorder_and_upcast_attn": True})
    with pytest.raises(ValueError, match="reorder_and_upcast_attn"):
        model(tiny.documents(1, 20))


def test_nothing_pooled_is_nothing_to_give_out(tmp_path):
    model = tiny.recurrent("gpt2", slots=0, kept=4)
    with pytest.raises(ValueError, match="pools nothing"):
        cf.encode(model, ["a"], None, pooling="state")


# --- the command -----------------------------------------------------------------------------------------------------


def test_a_model_that_reads_on(tmp_path, capsys):
    prose.save_model(tmp_path / "plain")
    with pytest.raises(SystemExit) as end:
        main(["add", str(tmp_path / "plain"), "--out", str(tmp_path / "on"), "--window", "16", "--sinks", "2"])
    told = capsys.readouterr()
    assert end.value.code == 0
    assert told.out == f"{tmp_path / 'on'}: windows of 16 tokens, 6 + 2 positions carried on\n"
    recurrence = cf.RecurrentForCausalLM.from_pretrained(tmp_path / "on").config.recurrence
    assert (recurrence.window, recurrence.slots, recurrence.kept, recurrence.sinks) == (16, 0, 6, 2)
    assert not needs_position_offsets(cf.RecurrentForCausalLM.from_pretrained(tmp_path / "on"))
    with pytest.raises(SystemExit) as end:
        main(["add", str(tmp_path / "plain"), "--out", str(tmp_path / "much"), "--kept", "12"])
    assert end.value.code == 0
    assert "windows of 16 tokens, 12 + 4 positions" in capsys.readouterr().out
    for model, message in (("plain", "exists already"), ("on", "is recurrent already")):
        out = "on" if model == "plain" else "other"
        with pytest.raises(SystemExit) as end:
            main(["add", str(tmp_path / model), "--out", str(tmp_path / out)])
        assert end.value.code == 2
        assert message in capsys.readouterr().err
