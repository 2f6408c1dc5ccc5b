# SPDX-License-Identifier: Apache-2.0
"""What must not make a difference, on tiny models of every supported architecture.

Recomputed = kept graph, batched = alone, streamed = whole, without state = base model, gradient checkpointing on = off,
saved and loaded = before. All in float32; comparisons cover losses and gradients.
"""

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import tiny
from torch.testing import assert_close

import carryforward as cf

ALL = list(tiny.CONFIGS)
PER_TOKEN = [(name, None) for name in ALL] + [(name, "token") for name in tiny.ENCODERS]
EVERY_HEAD = PER_TOKEN + [(name, "none") for name in ALL] + [(name, "sequence") for name in tiny.ENCODERS]
# Memories with positions of their own, each with a few families and heads.
AROUND = [
    *(
        (*case, tiny.TOKENS)
        for case in [("gpt2", None), ("gemma3_text", "none"), ("electra", None), ("bert", "sequence")]
    ),
    *(
        (*case, tiny.ASSOCIATIVE)
        for case in [("llama", None), ("opt", "none"), ("modernbert", None), ("roberta", "token")]
    ),
    *((*case, tiny.ASSOCIATIVE_AND_KV) for case in [("gpt2", None), ("bert", None)]),
]


def with_others(cases):
    """Families and heads with the paper's memory, and a few of them with memory positions."""
    heads = {head for _, head in cases}
    return [(*case, {}) for case in cases] + [case for case in AROUND if case[1] in heads]


def label(model, ids):
    """Labels for every token: the tokens themselves, or their classes for a token classifier."""
    return ids % 3 if isinstance(model, cf.RecurrentForTokenClassification) else ids


def run(model, ids, mask=None, labels=None, **arguments) -> tuple[torch.Tensor, dict]:
    """Loss and gradients of a call, whatever the head; hidden states get a loss here."""
    if isinstance(model, cf.RecurrentModel):
        hidden = model(ids, attention_mask=mask, **arguments).last_hidden_state
        loss = (hidden * torch.linspace(-1, 1, hidden.shape[-1])).pow(2).sum()
    elif isinstance(model, cf.RecurrentForSequenceClassification):
        loss = model(ids, attention_mask=mask, labels=ids[:, -1] % 3, **arguments).loss
    else:
        loss = model(ids, attention_mask=mask, labels=label(model, ids), **arguments).loss
    loss.backward()
    return loss.detach(), tiny.gradients(model)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "dropout"])
@pytest.mark.parametrize(("name", "head", "fields"), with_others(EVERY_HEAD))
def test_recomputed_equals_kept_graph(name, head, fields, training):
    ids = tiny.documents(2, 37)
    mask = torch.ones_like(ids)
    mask[0, 20:] = 0
    results = []
    for keep_graph in (False, True):
        model = tiny.precise(name, head, keep_graph=keep_graph, **fields).train(training)
        torch.manual_seed(5)
        results.append((*run(model, ids, mask), torch.rand(())))
    (loss, gradients, drawn), (kept_loss, kept_gradients, kept_drawn) = results
    assert_close(loss, kept_loss)
    assert drawn == kept_drawn, "the generator is in the state that a single pass leaves"
    tiny.assert_same_gradients(gradients, kept_gradients)
    for weight in ("vector.networks.0.0.weight", "tokens.first", "associative.associations.0.value.weight"):
        if f"memory.{weight}" in gradients:
            assert gradients[f"memory.{weight}"].abs().max() > 1e-6, "the state has an effect"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("name", "head", "fields"), with_others(PER_TOKEN))
def test_batched_equals_alone(name, head, fields, side):
    model = tiny.recurrent(
        name, head, **fields
    ).double()  # in float32, sums in another order differ too much on some CPUs
    lengths = [3, 37, 8, 9, 20]
    ids = tiny.documents(len(lengths), max(lengths))
    columns = torch.arange(max(lengths))
    real = torch.tensor(lengths)[:, None]
    mask = (columns < real if side == "right" else columns >= max(lengths) - real).long()

    together = model(ids, attention_mask=mask, labels=label(model, ids))
    together.nll_sum.backward()
    batched = tiny.gradients(model)
    logits = model(ids, attention_mask=mask).logits

    total = torch.zeros(())
    for row in range(len(lengths)):
        alone = ids[row][mask[row] == 1][None]
        out = model(alone, labels=label(model, alone))
        assert_close(model(alone).logits[0], logits[row][mask[row] == 1], rtol=1e-6, atol=1e-7)
        mine = together.state[[row]]
        assert mine.read.equal(out.state.read)
        assert mine.pending.equal(out.state.pending)
        assert mine.started.equal(out.state.started)
        if out.state.started.item():
            for kind, expected in out.state.memory.items():
                assert_close(mine.memory[kind], expected, rtol=1e-6, atol=1e-7)
        assert mine.tokens[0, : mine.pending].equal(out.state.tokens[0])
        total = total + out.nll_sum
    assert_close(together.nll_sum, total)
    total.backward()
    tiny.assert_same_gradients(batched, tiny.gradients(model), tolerance=1e-6)


CUTS = [[10, 11, 25], [1, 2, 8, 9], [16]]
TOKEN_BY_TOKEN = [(name, None, list(range(1, 34))) for name in ("gpt2", "llama", "bert", "modernbert")]


STREAMED = [(name, head, {}, cut) for name, head in PER_TOKEN for cut in CUTS] + [
    *((name, head, {}, cut) for name, head, cut in TOKEN_BY_TOKEN),
    *((*case, CUTS[0]) for case in AROUND if case[:2] in PER_TOKEN),
    ("gpt2", None, tiny.TOKENS, CUTS[1]),
    ("bert", None, tiny.ASSOCIATIVE, CUTS[1]),
]


@pytest.mark.parametrize(("name", "head", "fields", "cuts"), STREAMED)
def test_streamed_equals_whole(name, head, fields, cuts):
    model = tiny.precise(name, head, **fields)
    ids = tiny.documents(2, 34)
    labels = label(model, ids)
    whole = model(ids, labels=labels)
    whole.nll_sum.backward()
    expected = tiny.gradients(model)

    state, total, scored = None, torch.zeros(()), 0
    borders = [0, *cuts, 34]
    for begin, end in itertools.pairwise(borders):
        final = {} if name in tiny.CAUSAL else {"final": end == 34}
        out = model(ids[:, begin:end], labels=labels[:, begin:end], state=state, **final)
        state, total, scored = out.state, total + out.nll_sum, scored + out.n_scored
    assert scored == whole.n_scored == (2 * 33 if name in tiny.CAUSAL else 2 * 34)
    assert_close(total, whole.nll_sum)
    total.backward()
    tiny.assert_same_gradients(expected, tiny.gradients(model))
    assert state.read.tolist() == [34, 34]
    if name in tiny.CAUSAL:
        for kind, expected in whole.state.memory.items():
            assert_close(state.memory[kind], expected, rtol=1e-4, atol=1e-5)
        assert state.tokens.equal(whole.state.tokens)


@pytest.mark.parametrize("overlap", [0, 1, 3])
@pytest.mark.parametrize(
    ("name", "fields"),
    [(name, {}) for name in tiny.ENCODERS] + [("bert", tiny.TOKENS), ("modernbert", tiny.ASSOCIATIVE)],
)
def test_streamed_encoders_output_every_vector_once(name, fields, overlap):
    model = tiny.recurrent(name, "none", overlap=overlap, **fields)
    ids = tiny.documents(2, 34)
    whole = model(ids).last_hidden_state
    pieces, state, reached = [], None, 0
    for begin, end in ((0, 5), (5, 8), (8, 16), (16, 31), (31, 34)):
        out = model(ids[:, begin:end], state=state, final=False)
        state = out.state
        first, last = out.emitted[0].tolist()
        assert first == reached
        pieces.append(out.last_hidden_state)
        assert pieces[-1].shape == (2, last - first, tiny.WIDTH)
        reached = last
    assert not pieces[0].numel()
    pieces.append(model(state=state, final=True).last_hidden_state)
    assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-4, atol=1e-5)


def test_a_piece_without_a_complete_window_has_no_logits():
    ids = tiny.documents(2, 4)
    for head, classes in (("masked", tiny.VOCABULARY), ("token", 3)):
        out = tiny.recurrent("bert", head)(ids, labels=ids % 3, final=False, return_logits=True)
        assert out.logits.shape == (2, 0, classes)
        assert out.n_scored == 0


@pytest.mark.parametrize(
    ("name", "fields"),
    [(name, {}) for name in tiny.ENCODERS] + [("bert", tiny.TOKENS), ("distilbert", tiny.ASSOCIATIVE)],
)
def test_a_streamed_classification_equals_one_call(name, fields):
    model = tiny.recurrent(name, "sequence", **fields)
    ids = tiny.documents(2, 34)
    whole = model(ids, labels=torch.tensor([0, 2]))
    first = model(ids[:, :15], final=False)
    assert first.logits is None
    last = model(ids[:, 15:], labels=torch.tensor([0, 2]), state=first.state)
    assert_close(last.logits, whole.logits, rtol=1e-4, atol=1e-5)
    assert_close(last.loss, whole.loss)


@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_without_a_state_windows_are_those_of_the_base_model(name):
    """Every window has the base model's logits, and one window has its loss."""
    model = tiny.recurrent(name, overlap=3)
    ids = tiny.documents(2, 30)
    logits = model(ids, use_state=False).logits
    for start, end, fresh in ((0, 8, 0), (5, 13, 8), (25, 30, 28)):
        assert_close(logits[:, fresh:end], model.base(ids[:, start:end]).logits[:, fresh - start :])
    assert (model(ids).logits - logits).abs().max() > 1e-3, "the state has an effect"
    short = ids[:, :8]
    for use_state in (True, False):
        out = model(short, labels=short, use_state=use_state)
        assert_close(out.loss, model.base(short, labels=short).loss)
    assert_close(model(short).logits, model.base(short).logits)


@pytest.mark.parametrize("fields", [tiny.TOKENS, tiny.ASSOCIATIVE, tiny.ASSOCIATIVE_AND_KV], ids=["t", "a", "a+kv"])
@pytest.mark.parametrize("name", ["gpt2", "gemma3_text", "bert", "modernbert"])
def test_without_a_state_there_are_no_memory_positions(name, fields):
    """Every window is the base model's. With a state, a document's first window reads memory tokens, but no matrix."""
    model, ids = tiny.recurrent(name, "none", overlap=0, **fields), tiny.documents(2, 20)
    prefix, suffix = (
        torch.tensor(side, dtype=torch.long).expand(2, -1)
        for side in (model.config.recurrence.prefix, model.config.recurrence.suffix)
    )
    without_state, with_state = model(ids, use_state=False).last_hidden_state, model(ids).last_hidden_state
    for start, end in ((0, 8), (8, 16), (16, 20)):
        window = model.base(torch.cat([prefix, ids[:, start:end], suffix], dim=1)).last_hidden_state
        inside = slice(prefix.shape[1], prefix.shape[1] + end - start)
        assert_close(without_state[:, start:end], window[:, inside], rtol=1e-4, atol=1e-5)
        difference = (with_state[:, start:end] - without_state[:, start:end]).abs().max()
        assert difference > 1e-3 if start or "tokens" in model.memory.kinds else difference < 1e-5


@pytest.mark.parametrize("name", ALL)
def test_an_associative_memory_before_training_is_the_base_model(name):
    """Its projection to values is zero, and so is what a matrix gives back."""
    special = {"window": 8} if name in tiny.CAUSAL else {"window": 11, "prefix": (2,), "suffix": (3, 3)}
    model = cf.add_recurrence(tiny.base(name), overlap=2, **special, **tiny.ASSOCIATIVE)
    assert model.untrained_memories == ["associative"]
    ids = tiny.documents(2, 30)
    assert_close(model(ids).logits, model(ids, use_state=False).logits, rtol=1e-5, atol=1e-6)
    model(ids, labels=ids).loss.backward()
    values = [association.value.weight.grad for association in model.memory.associative.associations]
    assert all(gradient.abs().max() > 0 for gradient in values), "training can begin"


@pytest.mark.parametrize(("name", "head"), [(n, h) for n in tiny.ENCODERS for h in (None, "token", "sequence", "none")])
def test_without_a_state_windows_are_those_of_the_base_encoder(name, head):
    model = tiny.recurrent(name, head, overlap=0)
    ids = tiny.documents(2, 20)

    def window(stretch):
        sides = [
            torch.tensor(side).expand(2, -1)
            for side in (model.config.recurrence.prefix, model.config.recurrence.suffix)
        ]
        return model.base(torch.cat([sides[0], stretch, sides[1]], dim=1))

    if head == "sequence":
        assert_close(model(ids[:, :8]).logits, window(ids[:, :8]).logits)
        return
    field = "last_hidden_state" if head == "none" else "logits"
    without_state = model(ids, use_state=False)[field]
    for start, end in ((0, 8), (8, 16), (16, 20)):
        assert_close(without_state[:, start:end], window(ids[:, start:end])[field][:, 1:-2], rtol=1e-4, atol=1e-5)
    assert (model(ids)[field] - without_state).abs().max() > 1e-3


@pytest.mark.parametrize("keep_graph", [False, True], ids=["recomputed", "kept"])
@pytest.mark.parametrize(("name", "head", "fields"), with_others([(name, None) for name in ALL]))
def test_gradient_checkpointing_changes_nothing(name, head, fields, keep_graph):
    ids = tiny.documents(2, 30)
    results = []
    for checkpointing in (False, True):
        model = tiny.precise(name, head, keep_graph=keep_graph, **fields).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
            assert model.is_gradient_checkpointing
        torch.manual_seed(3)
        results.append(run(model, ids))
    assert_close(results[0][0], results[1][0])
    tiny.assert_same_gradients(results[0][1], results[1][1])


@pytest.mark.parametrize(("name", "head", "fields"), with_others(EVERY_HEAD))
def test_a_saved_and_loaded_model_is_unchanged(name, head, fields, tmp_path):
    model = tiny.precise(name, head, **(fields or {"slots": 2, "insert_at": (1, 3)}))
    model.save_pretrained(tmp_path / "model")
    auto = getattr(transformers, type(model).auto_class)
    loaded = auto.from_pretrained(tmp_path / "model").eval()
    assert type(loaded) is type(model)
    assert loaded.config.recurrence == model.config.recurrence
    ids = tiny.documents(2, 30)
    before, after = run(model, ids), run(loaded, ids)
    rounding = 1e-9 if fields else 0  # loaded weights lie elsewhere in memory, where products may be summed otherwise
    assert_close(before[0], after[0], rtol=rounding, atol=0)
    tiny.assert_same_gradients(before[1], after[1], rounding)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize(
    ("name", "fields"), [(name, {}) for name in ALL] + [("gpt2", tiny.TOKENS), ("bert", tiny.ASSOCIATIVE)]
)
def test_copies_are_independent(name, fields, make):
    """A copy computes the same with its own weights: its hooks must not refer to the original."""
    model = tiny.recurrent(name, **fields)
    ids = tiny.documents(2, 30)
    before = run(model, ids)
    duplicate = make(model)
    assert before[0].equal(run(duplicate, ids)[0])
    with torch.no_grad():
        for parameter in duplicate.parameters():
            parameter.mul_(1.1)
    after = run(model, ids)
    assert before[0].equal(after[0])
    tiny.assert_same_gradients(before[1], after[1], tolerance=0)
    assert not before[0].equal(run(duplicate, ids)[0])


def test_a_sequence_classifier_takes_the_maximum_over_windows():
    """Section 5.4, without a state, so that the base model can run window by window."""
    model = tiny.recurrent("bert", "sequence", overlap=0)
    ids = tiny.documents(2, 37)
    firsts = [
        model.base.bert(F.pad(F.pad(ids[:, i : i + 8], (1, 0), value=2), (0, 2), value=3)).last_hidden_state[:, 0]
        for i in range(0, 37, 8)
    ]
    pooled = model.base.bert.pooler(torch.stack(firsts).amax(dim=0)[:, None])
    assert_close(model(ids, use_state=False).logits, model.base.classifier(pooled), rtol=1e-4, atol=1e-5)
