# SPDX-License-Identifier: Apache-2.0
"""Encoders whose windows see both neighbours: against references, and what must not make a difference."""

import itertools
import json

import pytest
import torch
from helpers import families, tiny
from helpers.two_sided import Sizes, bert_loop, masked_pass
from torch.testing import assert_close

import carryforward as cf
from carryforward.engine import block_size

SOME = ["bert", "roberta", "modernbert"]
LENGTHS = (50, 24, 3, 17)  # of documents; windows have eight of their tokens


def two_sided(name, group=3, block=1, sinks=1, head=None, settings=None, **fields):
    """A tiny encoder in double precision: three recent positions on the left, four on the right."""
    memory = cf.KVMemoryConfig(recent=3, sinks=sinks, right=4, group_windows=group)
    fields = {"overlap": 0, "memory": memory, "block_windows": block, **fields}
    return tiny.recurrent(name, head, settings=settings, **fields).double()


def ragged(lengths=LENGTHS):
    """Documents of different lengths, padded, their mask, and labels for about half of their tokens."""
    ids = tiny.documents(len(lengths), max(lengths))
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    labels = ids.masked_fill(torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.5, -100)
    return ids, mask, labels


def step(model, lengths=LENGTHS, **arguments):
    """The loss and all gradients of a training step."""
    ids, mask, labels = ragged(lengths)
    torch.manual_seed(5)
    out = model(ids, attention_mask=mask, labels=labels, **arguments)
    out.nll_sum.backward()
    return out.nll_sum.detach(), tiny.gradients(model)


def assert_same_step(one, other, tolerance=1e-9):
    assert_close(one[0], other[0], rtol=tolerance, atol=tolerance)
    tiny.assert_same_gradients(one[1], other[1], tolerance)


def reference_step(make_logits, modules, lengths=LENGTHS):
    """The same of a reference that reads one document at a time, [N] to [N, V]; and its gradients by name."""
    ids, _, labels = ragged(lengths)
    total = 0
    for row, length in enumerate(lengths):
        logits = make_logits(ids[row, :length])
        total = total + torch.nn.functional.cross_entropy(logits, labels[row, :length], reduction="sum")
    leaves = {name: parameter for name, parameter in modules.items() if parameter.requires_grad}
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return total.detach(), dict(zip(leaves, found, strict=True))


# --- references -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny.ENCODERS)
def test_windows_equal_one_masked_pass_over_all_readings(name):
    """Documents of one window to seven, in one batch, and groups of two windows, of four, and of a whole document."""
    sinks, tolerance = (0, 1e-5) if name == "modernbert" else (1, 1e-9)
    for group in (2, 4, 100):
        base, sizes = tiny.base(name).double(), Sizes(group, sinks=sinks)
        names = {f"base.{key}": parameter for key, parameter in base.named_parameters()}
        expected = reference_step(lambda ids: masked_pass(name, base, ids, sizes)[0], names)  # noqa: B023
        for block in (1, 5):
            out = step(tiny.unmeasured(two_sided(name, group, block, sinks)))
            out[1].pop("memory.kv.position_offsets", None)
            assert_same_step(out, expected, tolerance)


@pytest.mark.parametrize("bptt_windows", [None, 1, 3])
def test_keys_and_values_are_moved_by_position_offsets(bptt_windows):
    """And truncated BPTT detaches between groups, never inside one."""
    for group in (2, 3):
        model = two_sided("bert", group, 4, sinks=2, bptt_windows=bptt_windows)
        base, sizes = tiny.base("bert").double(), Sizes(group, sinks=2)
        offsets = model.memory.kv.position_offsets.detach().clone().requires_grad_()
        names = {f"base.{key}": parameter for key, parameter in base.named_parameters()}
        names["memory.kv.position_offsets"] = offsets

        def logits(ids, depth=bptt_windows, base=base, offsets=offsets, sizes=sizes):
            return base.cls(bert_loop(base.bert, offsets, ids, sizes, depth)[0])

        expected = reference_step(logits, names)
        assert_same_step(step(model), expected)
        whole = reference_step(lambda ids: logits(ids, None), names)[1]
        differs = any((whole[key] - expected[1][key]).abs().max() > 1e-4 for key in whole)
        assert differs == (bptt_windows is not None), "truncation matters"


@pytest.mark.parametrize("name", ["modernbert", "nomic_bert", "eurobert"])
def test_one_group_is_local_attention_over_the_whole_text(name):
    """Rotary positions, no special tokens: an ordinary text, in which a mask shows each window and its neighbours."""
    if name in families.NOT_INSTALLED:
        pytest.skip(f"{name} is not in this version of transformers")
    ids, base = tiny.documents(2, 45), families.precise_base(name)
    memory = cf.KVMemoryConfig(recent=3, sinks=0, right=4, group_windows=100)
    model = families.recurrent(name, overlap=0, window=8, prefix=(), suffix=(), memory=memory)
    position = torch.arange(45)
    begin = position[:, None] // 8 * 8
    inside = (position >= begin) & (position < begin + 8)
    aside = ((position >= begin - 3) & (position < begin)) | ((position >= begin + 8) & (position < begin + 12))
    masks = {"full_attention": inside | aside}
    masks["sliding_attention"] = (inside & ((position[:, None] - position).abs() <= 2)) | aside
    masks = {key: mask.expand(2, 1, -1, -1) for key, mask in masks.items()}
    expected = base(ids, attention_mask=masks if name == "modernbert" else masks["full_attention"]).logits
    assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "distilbert", "modernbert"])
def test_every_window_of_a_group_has_its_question_in_front(name):
    """Questions of different lengths; the documents of a batch stand in blocks of any size."""
    sinks, lengths = int(name != "modernbert"), (45, 38, 3)
    memory = cf.KVMemoryConfig(recent=2, sinks=sinks, right=2, group_windows=3)
    (ids, mask, _), results = ragged(lengths), []
    for block in (1, 4, 100):
        model = tiny.answering(name, memory=memory, window=16, block_windows=block).double()
        model = model if name == "bert" else tiny.unmeasured(model)
        out = model(ids, attention_mask=mask, question_ids=tiny.QUESTIONS)
        (out.start_logits[mask.bool()].square().sum() + out.kind_logits.square().sum()).backward()
        results.append((out, tiny.gradients(model)))
    (out, expected), *others = results
    for row, length in enumerate(lengths):
        prefix = (2, *tiny.QUESTIONS[row], 3, 3)
        sizes = Sizes(3, 16 - len(prefix) - 1, left=2, right=2, sinks=sinks, prefix=prefix, suffix=(3,))
        if name == "bert":
            offsets = model.memory.kv.position_offsets
            tokens, firsts = bert_loop(model.base.bert, offsets, ids[row, :length], sizes, token_types=True)
            starts = model.base.qa_outputs(tokens)[:, 0]
            assert_close(out.kind_logits[row], model.kinds(firsts.amax(0)), rtol=1e-9, atol=1e-9)
        else:
            starts = masked_pass(name, model.base, ids[row, :length], sizes)[0]
        assert_close(out.start_logits[row, :length], starts, rtol=1e-6, atol=1e-6)
    for other, gradients in others:
        for key in ("start_logits", "end_logits", "kind_logits"):
            assert_close(other[key], out[key], rtol=1e-6, atol=1e-6)
        tiny.assert_same_gradients(gradients, expected, 1e-6)


# --- what must not make a difference ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOME)
def test_pieces_cut_anywhere_equal_the_whole(name, tmp_path):
    """With gradients through the states between them, also at the border of a group, and where a document ends there:
    with three windows a group there are borders after 16, 32 and 48 tokens. Pieces of a row are read in any block."""
    (ids, _, labels), lengths = ragged((48, 41)), (48, 41)
    for row, length in enumerate(lengths):
        row_ids, row_labels = ids[row : row + 1, :length], labels[row : row + 1, :length]
        whole = two_sided(name, bptt_windows=3)
        expected = whole(row_ids, labels=row_labels, return_logits=True)
        expected.nll_sum.backward()
        gradients = tiny.gradients(whole)
        for block, cuts in ((1, (24, 25, 40)), (7, (1, 16, 39)), (2, (33,))):
            model, state, total, logits = two_sided(name, block=block, bptt_windows=3), None, 0, []
            for begin, end in itertools.pairwise((0, *cuts, length)):
                part = slice(begin, end)
                out = model(row_ids[:, part], labels=row_labels[:, part], state=state, final=end == length,
                            return_logits=True)  # fmt: skip
                assert out.emitted.tolist() == [[sum(x.shape[1] for x in logits), *out.emitted.tolist()[0][1:]]]
                logits.append(out.logits[:, : int(out.emitted[0, 1] - out.emitted[0, 0])])
                state, total = out.state, total + out.nll_sum
            assert_close(torch.cat(logits, dim=1), expected.logits, rtol=1e-6, atol=1e-6)
            assert_close(state.memory["kv"], expected.state.memory["kv"], rtol=1e-6, atol=1e-6)
            total.backward()
            tiny.assert_same_gradients(tiny.gradients(model), gradients, 1e-6)
    before = model(row_ids[:, :30], final=False).state
    before.save(tmp_path / "state")
    rest = [model(row_ids[:, 30:], state=one).logits for one in (before, cf.State.load(tmp_path / "state"))]
    assert_close(*rest)
    assert_close(rest[0], expected.logits[:, 16:], rtol=1e-6, atol=1e-6)


def test_rows_at_different_places_of_their_groups_share_a_call():
    model, ids = two_sided("bert"), tiny.documents(3, 41)
    begun = [model.advance_state(ids[row : row + 1, :length]) for row, length in ((0, 25), (1, 41))]
    state, later = cf.State.cat([*begun, model.fresh_state(1)]), tiny.documents(3, 30, seed=1)
    together = model(later, state=state)
    for row, (one, start) in enumerate(zip((*begun, None), (16, 32, 0), strict=True)):
        alone = model(later[row : row + 1], state=one)
        assert together.emitted[row].tolist() == alone.emitted[0].tolist()
        assert alone.emitted[0, 0] == start
        count = int(alone.emitted[0, 1]) - start
        assert_close(together.logits[row, :count], alone.logits[0, :count])


@pytest.mark.parametrize("name", SOME)
def test_recomputed_equals_kept_with_dropout(name):
    settings = {"hidden_dropout_prob": 0.2, "attention_dropout": 0.2, "mlp_dropout": 0.2}
    steps = [step(two_sided(name, block=2, settings=settings, **how).train())
             for how in ({"keep_windows": 0}, {"keep_windows": 100}, {"keep_graph": True})]  # fmt: skip
    assert_same_step(steps[1], steps[0])
    assert_same_step(steps[2], steps[0])
    assert abs(steps[0][0] - step(two_sided(name, block=2))[0]) > 1e-3, "dropout matters"


def test_checkpointing_eager_attention_and_offloaded_states_change_nothing():
    expected = step(two_sided("bert"))
    model = two_sided("bert", block=4, settings={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
    model.train().gradient_checkpointing_enable()
    assert_same_step(step(model), expected)
    eager = two_sided("bert", offload_states=True)
    eager.base.set_attn_implementation("eager")
    assert_same_step(step(eager), expected)


@pytest.mark.parametrize("name", tiny.ENCODERS)
def test_without_a_state_and_in_one_window_it_is_the_base_model(name):
    model, ids = two_sided(name), tiny.documents(2, 16)
    frame = [torch.tensor(side).expand(2, -1) for side in ((2,), (3, 3))]
    windows = [torch.cat([frame[0], part, frame[1]], dim=1) for part in (ids[:, :8], ids[:, 8:])]
    expected = [model.base(window).logits[:, 1:9] for window in windows]
    assert_close(model(ids[:, :8]).logits, expected[0], rtol=0, atol=1e-12)
    assert_close(model(ids, use_state=False).logits, torch.cat(expected, dim=1), rtol=0, atol=1e-12)
    assert (model(ids).logits[:, :8] - expected[0]).abs().max() > 1e-2, "the right neighbour matters"


def test_the_state_of_a_whole_document_is_that_of_the_last_window_with_a_right_neighbour():
    model, ids = two_sided("bert"), tiny.documents(2, 45)
    whole, ended = model(ids).state, model.advance_state(ids, final=True)
    assert ended.ended
    assert_close(ended.memory["kv"], whole.memory["kv"])
    assert (ended.memory["kv"] - model.advance_state(ids).memory["kv"]).abs().max() > 0.1, "of an earlier group"


def test_only_readings_that_are_given_out_are_pooled():
    """In a classifier's maximum over windows' first tokens a window that is read again counts once."""
    model, ids = two_sided("bert", head="sequence"), tiny.documents(1, 45)
    offsets = model.memory.kv.position_offsets
    firsts = bert_loop(model.base.bert, offsets, ids[0], Sizes(3, sinks=1))[1]
    state = model(ids[:, :37], final=False).state
    summary = model(ids[:, 37:], state=state).state.summary
    assert len(firsts) == 6
    for found in (model(ids).state.summary, summary):
        assert_close(found[0], firsts.amax(0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", tiny.ENCODERS)
def test_vectors_of_a_text_do_not_depend_on_the_block(name, monkeypatch):
    from helpers.fast_path import CharacterTokenizer

    model = two_sided(name, head="none")
    texts = ["the quick brown fox jumps over the lazy dog, twice a day", "ab", "", "a text of three windows or so"]
    tokens = [torch.tensor(CharacterTokenizer()([text])["input_ids"]) for text in texts]
    expected = [model(ids).last_hidden_state[0].detach().float().numpy() for ids in tokens if ids.numel()]
    for block in (1, 40, 10**6):
        monkeypatch.setitem(block_size.BLOCK_TOKENS, "cpu", block)
        found = [
            one.vectors for one in cf.encode(model, texts, CharacterTokenizer(), output="tokens") if len(one.vectors)
        ]
        for vectors, one in zip(found, expected, strict=True):
            assert_close(torch.from_numpy(vectors), torch.from_numpy(one), rtol=1e-5, atol=1e-5)
        means = cf.encode(model, texts, CharacterTokenizer())
        assert_close(torch.from_numpy(means[0]), torch.from_numpy(expected[0].mean(0)), rtol=1e-5, atol=1e-5)


# --- configs ----------------------------------------------------------------------------------------------------------


def test_a_saved_model_is_the_same_and_older_ones_still_load(tmp_path):
    model, ids = two_sided("bert"), tiny.documents(1, 40)
    model.float().save_pretrained(tmp_path / "both")
    loaded = cf.RecurrentForMaskedLM.from_pretrained(tmp_path / "both")
    assert loaded.config.recurrence == model.config.recurrence
    assert_close(loaded(ids).logits, model(ids).logits)
    old = tiny.recurrent("bert", slots=0, recent=3)
    old.save_pretrained(tmp_path / "left")
    memory = json.loads((tmp_path / "left/config.json").read_text())["recurrence"]["memory"][0]
    assert not {"right", "group_windows"} & {*memory}, "as before there were right neighbours"
    assert_close(cf.RecurrentForMaskedLM.from_pretrained(tmp_path / "left")(ids).logits, old(ids).logits)


def test_a_state_belongs_to_its_group_and_its_right_neighbours():
    model, other = two_sided("bert"), two_sided("bert", group=4)
    with pytest.raises(ValueError, match="state comes from another model"):
        other(tiny.documents(1, 9), state=model.fresh_state(1))
