# SPDX-License-Identifier: Apache-2.0
"""What must not make a difference if a memory reaches further back than one window, whatever it selects.

`tests/memories/test_far_reference.py` has what it carries; here are blocks, batches, streams, generation and gradients.
"""

import itertools

import pytest
import torch
from helpers import tiny
from helpers.generation import GREEDY, NO_EOS, WINDOW, decode, logits_of_one_call, pad_left
from torch.testing import assert_close

import carryforward as cf
from carryforward.engine import block_size
from carryforward.memories import kv
from carryforward.memories.kv_history import HistoryKVMemory
from carryforward.windows import encoder_schedule

LOOKUP = {"selection": "lookup", "group": 2, "archive": 8}
SELECTIONS = [{"selection": "attention"}, {"selection": "dissimilar"}, {"selection": "merged"}, LOOKUP]
MEMORIES = [
    {"recent": 13, "sinks": 0},
    {"recent": 9, "sinks": 2},
    *({"recent": 5, "sinks": 2, "far": 4, **selection} for selection in SELECTIONS),
    *({"recent": 10, "sinks": 0, "far": 3, **selection} for selection in SELECTIONS[:3]),
    {"recent": 10, "sinks": 0, "far": 6, "selection": "lookup", "group": 3, "archive": 6},
]
CAUSAL = ["gpt2", "llama", "mistral", "qwen3", "gemma3_text"]
NAMES = [*CAUSAL, "bert", "modernbert"]
LENGTHS = (45, 20, 3)
DROPOUT = {"resid_pdrop": 0.2, "attention_dropout": 0.2, "mlp_dropout": 0.2}


def each_memory(names, count=1):
    """Every memory with so many of the models, in turn, so that every model has one."""
    pairs = [(names[(i + 2 * j) % len(names)], fields) for i, fields in enumerate(MEMORIES) for j in range(count)]
    return pytest.mark.parametrize(("name", "fields"), pairs, ids=str)


def carrying(name, fields, block="auto", **others):
    model = tiny.recurrent(name, slots=0, block_windows=block, **fields, **others)
    assert isinstance(model.memory.kv, HistoryKVMemory)
    return model


def final(name, is_last):
    """Arguments of a piece of a text: encoders are told where it ends."""
    return {} if name in tiny.CAUSAL else {"final": is_last}


def ragged(lengths=LENGTHS):
    """Documents of different lengths, padded, and their mask."""
    ids = tiny.documents(len(lengths), max(lengths))
    return ids, (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def step(model, ids, mask=None, seed=5, **arguments):
    """The outputs and all gradients of a training step."""
    torch.manual_seed(seed)
    out = model(ids, attention_mask=mask, labels=ids, **arguments)
    out.loss.backward()
    return out, tiny.gradients(model)


def assert_same_state(state, expected):
    """Of rows that have one."""
    assert state.started.equal(expected.started)
    assert state.read.equal(expected.read)
    assert state.pending.equal(expected.pending)
    rows = expected.started
    assert_close(state.memory["kv"][rows], expected.memory["kv"][rows], rtol=1e-4, atol=1e-5)


def assert_same_step(one, other):
    (out, gradients), (expected, expected_gradients) = one, other
    assert_close(out.loss, expected.loss)
    assert_same_state(out.state, expected.state)
    tiny.assert_same_gradients(gradients, expected_gradients)


# --- blocks and gradients --------------------------------------------------------------------------------------------


@each_memory(NAMES, 3)
def test_blocks_equal_single_windows(name, fields):
    ids, mask = ragged()
    expected = step(carrying(name, fields, 1, keep_graph=True), ids, mask)
    for block, keep in ((2, 0), (7, 100)):
        assert_same_step(step(carrying(name, fields, block, keep_windows=keep), ids, mask), expected)


@each_memory(NAMES)
def test_recomputed_equals_kept_with_dropout(name, fields):
    """A selection is made once: the second pass has the queries and keys of the first, but for rounding."""
    ids, mask = ragged()
    how = [
        {"keep_windows": 0},
        {"keep_windows": 100},
        {"keep_graph": True},
        {"keep_windows": 0, "offload_states": True},
    ]
    models = [carrying(name, fields, 2, settings=DROPOUT, **one).train() for one in how]
    expected, *steps = [step(model, ids, mask) for model in models]
    for one in steps:
        assert_same_step(one, expected)
    if name != "modernbert":  # its attention has no dropout in the windows' common call
        other = step(models[0], ids, mask, seed=6)
        assert abs(float(other[0].loss.detach() - expected[0].loss.detach())) > 1e-4, "dropout matters"


@pytest.mark.parametrize("fields", [SELECTIONS[0], SELECTIONS[1], LOOKUP], ids=str)
def test_windows_that_run_again_select_the_same(fields, monkeypatch):
    """Even if rounding would have it otherwise: here a second selection would be another one."""
    selection, fields, calls, once = fields["selection"], {"recent": 5, "far": 4, **fields}, [], []
    choose = kv.SELECTIONS[selection].choose

    def changing(self, past):
        calls.append(1)
        far = choose(self, past)
        return torch.zeros_like(far) if once and len(calls) > once[0] else far

    monkeypatch.setattr(kv.SELECTIONS[selection], "choose", changing)
    ids = tiny.documents(2, 45)
    expected = step(carrying("llama", fields, 3, keep_graph=True), ids)
    once.append(len(calls))
    for checkpointing, how in itertools.product((False, True), ({"keep_windows": 0}, {"keep_graph": True})):
        calls.clear()
        model = carrying("llama", fields, 3, **how).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        assert_same_step(step(model, ids), expected)
        assert len(calls) == once[0]


@each_memory(NAMES)
def test_gradient_checkpointing_changes_nothing(name, fields):
    ids, mask = ragged()
    expected = step(carrying(name, fields, 2).train(), ids, mask)
    for keep_graph in (False, True):
        model = carrying(name, fields, 2, keep_graph=keep_graph).train()
        model.gradient_checkpointing_enable()
        assert_same_step(step(model, ids, mask), expected)


@pytest.mark.parametrize("depth", [1, 2])
@each_memory(CAUSAL)
def test_truncated_bptt_equals_windows_with_detached_states(name, fields, depth):
    """Here a state is detached where a window enters that truncated BPTT names."""
    ids, overlap = tiny.documents(2, 34), 2
    by_hand, state, total = carrying(name, fields), None, torch.zeros(())
    borders = [0, *range(WINDOW + 1, 34, WINDOW - overlap), 34]  # with the token that a window's last one predicts
    for i, (begin, end) in enumerate(itertools.pairwise(borders)):
        state = state if i % depth or state is None else state.detach()
        out = by_hand(ids[:, begin:end], labels=ids[:, begin:end], state=state)
        state, total = out.state, total + out.nll_sum
    (total / (2 * 33)).backward()
    expected = tiny.gradients(by_hand)
    whole = step(carrying(name, fields), ids)[1]
    assert any((whole[key] - expected[key]).abs().max() > 1e-4 for key in whole), "truncation matters"
    for block, keep_graph in ((1, False), (2, False), (100, True)):
        model = carrying(name, fields, block, bptt_windows=depth, keep_graph=keep_graph)
        out, gradients = step(model, ids)
        assert_close(out.nll_sum, total)
        tiny.assert_same_gradients(gradients, expected)


@each_memory(tiny.ENCODERS)
def test_truncated_bptt_does_not_depend_on_the_block_in_encoders(name, fields):
    ids, mask = ragged()
    expected = step(carrying(name, fields, 1, bptt_windows=2), ids, mask)
    assert_same_step(step(carrying(name, fields, 2, bptt_windows=2), ids, mask), expected)
    whole = step(carrying(name, fields), ids, mask)[1]
    assert any((whole[key] - expected[1][key]).abs().max() > 1e-4 for key in whole), "truncation matters"


# --- batches and streams ---------------------------------------------------------------------------------------------


@each_memory(NAMES, 2)
def test_a_batch_equals_its_rows_alone_and_in_another_order(name, fields):
    model, lengths = carrying(name, fields), [45, 9, 1, 20, 45, 8, 17]
    ids, mask = ragged(lengths)
    order = torch.tensor([3, 6, 0, 4, 2, 1, 5])
    with torch.no_grad():
        together = model(ids, attention_mask=mask)
        shuffled = model(ids[order], attention_mask=mask[order])
        assert_close(shuffled.logits, together.logits[order], rtol=1e-4, atol=1e-5)
        assert_same_state(shuffled.state, together.state[order])
        left = model(*pad_left(ids, lengths))
        for row, length in enumerate(lengths):
            alone = model(ids[row : row + 1, :length])
            for logits in (together.logits[row, :length], left.logits[row, -length:]):
                assert_close(logits, alone.logits[0], rtol=1e-4, atol=1e-5)
            assert_same_state(together.state[[row]], alone.state)


@each_memory(NAMES)
def test_gradients_of_a_batch_are_those_of_its_rows(name, fields):
    model = carrying(name, fields)
    ids, mask = ragged()
    out = model(ids, attention_mask=mask, labels=ids)
    out.nll_sum.backward()
    gradients = tiny.gradients(model)
    total = sum(model(ids[row : row + 1, :n], labels=ids[row : row + 1, :n]).nll_sum for row, n in enumerate(LENGTHS))
    assert_close(total, out.nll_sum)
    total.backward()
    tiny.assert_same_gradients(gradients, tiny.gradients(model))


@each_memory(NAMES)
def test_pieces_cut_anywhere_equal_the_whole(name, fields, tmp_path):
    """With gradients through the states between the pieces; and, without, with states that were saved."""
    ids, whole = tiny.documents(2, 40), carrying(name, fields, 1)
    expected = whole(ids, labels=ids)
    expected.nll_sum.backward()
    gradients = tiny.gradients(whole)
    for block, cuts in ((1, (8, 25, 26)), (2, (1, 14))):
        model, state, loaded, total = carrying(name, fields, block), None, None, torch.zeros(())
        for begin, end in itertools.pairwise((0, *cuts, 40)):
            piece, is_last = ids[:, begin:end], final(name, end == 40)
            out = model(piece, labels=piece, state=state, **is_last)
            with torch.no_grad():
                again = model(piece, labels=piece, state=loaded, **is_last)
            assert_close(again.nll_sum, out.nll_sum)
            again.state.save(tmp_path / "state")
            state, total, loaded = out.state, total + out.nll_sum, cf.State.load(tmp_path / "state")
        assert_close(total, expected.nll_sum)
        total.backward()
        tiny.assert_same_gradients(tiny.gradients(model), gradients)
        assert_same_state(state, expected.state)
        assert_same_state(loaded, expected.state)


@each_memory(NAMES)
def test_a_text_may_be_read_token_by_token(name, fields):
    model, ids = carrying(name, fields), tiny.documents(1, 45)
    state, total = None, torch.zeros(())
    with torch.no_grad():
        expected = model(ids, labels=ids)
        for i in range(45):
            piece = ids[:, i : i + 1]
            out = model(piece, labels=piece, state=state, **final(name, i == 44))
            state, total = out.state, total + out.nll_sum
    assert_close(total, expected.nll_sum)
    assert_same_state(state, expected.state)


@each_memory(CAUSAL)
def test_rows_that_go_on_and_rows_that_begin_share_a_call(name, fields):
    """One of them was read without a state at first: its memory begins where it has one."""
    model, ids, later = carrying(name, fields, overlap=0), tiny.documents(3, 45), tiny.documents(3, 30, seed=1)
    with torch.no_grad():
        states = [
            model.advance_state(ids[:1]),
            model.fresh_state(1),
            model(ids[2:, :20], use_state=False).state,
        ]
        together = model(later, state=cf.State.cat(states))
        assert together.state.origin.tolist() == [0, 0, 16]
        for row, state in enumerate(states):
            alone = model(later[row : row + 1], state=state)
            assert_close(together.logits[row], alone.logits[0], rtol=1e-4, atol=1e-5)
            assert_same_state(together.state[[row]], alone.state)
        begun_late = model(torch.cat([ids[2:, 16:20], later[2:]], dim=1)).logits[0, 4:]
        assert_close(together.logits[2], begun_late, rtol=1e-4, atol=1e-5)


# --- windows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [0, 5])
@each_memory(NAMES)
def test_another_overlap_equals_a_model_that_was_made_for_it(name, fields, overlap):
    model, other = carrying(name, fields, overlap=2), carrying(name, fields, overlap=overlap)
    ids, mask = ragged()
    with torch.no_grad():
        out, expected = model(ids, attention_mask=mask, overlap=overlap), other(ids, attention_mask=mask)
        assert_close(out.logits, expected.logits, rtol=1e-4, atol=1e-5)
        assert_same_state(out.state, expected.state)
        assert (model(ids, attention_mask=mask).logits - out.logits).abs().max() > 1e-3


@pytest.mark.parametrize(("recent", "sinks"), [(7, 0), (5, 3)])
@pytest.mark.parametrize("name", NAMES)
def test_where_one_window_is_enough_both_memories_are_the_same(name, recent, sinks):
    """A model whose windows overlap needs the history, which another overlap makes superfluous."""
    far = carrying(name, {"recent": recent, "sinks": sinks}, overlap=2)
    near = tiny.recurrent(name, slots=0, recent=recent, sinks=sinks, overlap=0)
    assert not isinstance(near.memory.kv, HistoryKVMemory)
    ids, mask = ragged()
    (out, gradients), (expected, expected_gradients) = (
        step(far, ids, mask, overlap=0), step(near, ids, mask)
    )  # fmt: skip
    assert_close(out.loss, expected.loss)
    tiny.assert_same_gradients(gradients, expected_gradients)


@pytest.mark.parametrize("rope", ["longrope", "dynamic", "yarn"])
def test_rotations_may_depend_on_the_length(rope):
    """Windows are shorter than the 10 positions from which on these models rotate otherwise; what is carried is not."""
    extra = {"longrope": {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}}.get(rope, {})
    settings = {"rope_type": rope, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 10, **extra}
    ids, results = tiny.documents(2, 40), []
    for overlap in (2, 0):  # with a history, and without one
        base = tiny.base("llama", max_position_embeddings=10, rope_parameters=dict(settings))
        model = cf.add_recurrence(base, window=WINDOW, overlap=overlap, memory=cf.KVMemoryConfig(recent=7, sinks=0))
        results.append(model(ids, overlap=0).logits)
    assert_close(*results, rtol=1e-4, atol=1e-4)


@each_memory(NAMES)
def test_without_a_state_windows_are_those_of_the_base_model(name, fields):
    model = carrying(name, fields, overlap=0)
    ids, recurrence = tiny.documents(2, 30), model.config.recurrence
    front, back = (torch.tensor([tokens] * 2).long().view(2, -1) for tokens in (recurrence.prefix, recurrence.suffix))
    first = slice(len(recurrence.prefix), len(recurrence.prefix) + WINDOW)
    with torch.no_grad():
        logits = model(ids, use_state=False).logits
        for begin in range(0, 30, WINDOW):
            window = torch.cat([front, ids[:, begin : begin + WINDOW], back], dim=1)
            length = min(WINDOW, 30 - begin)
            expected = model.base(window).logits[:, first][:, :length]
            assert_close(logits[:, begin : begin + WINDOW], expected, rtol=1e-4, atol=1e-5)
        with_state = model(ids).logits
    assert_close(with_state[:, :WINDOW], logits[:, :WINDOW], rtol=1e-4, atol=1e-5)
    assert (with_state - logits)[:, WINDOW:].abs().amax((0, 2)).min() > 1e-4, "the state has an effect everywhere"


@pytest.mark.parametrize("overlap", [0, 3])
@each_memory(NAMES, 3)
def test_no_prediction_moves_if_a_later_token_changes(name, fields, overlap):
    """One row for each token that is changed. A causal model predicts from what comes before; in an encoder, windows
    that end before the token must not move."""
    model, length = carrying(name, fields, overlap=overlap), 34
    ids, token = tiny.documents(1, length), torch.arange(length)
    changed = ids.repeat(length, 1)
    changed[token, token] = (changed[token, token] - 5 + 31) % (tiny.VOCABULARY - 5) + 5
    reached = torch.arange(length)  # the last token that each prediction sees
    if name in tiny.ENCODERS:
        sizes = {"prefix": len(model.config.recurrence.prefix), "suffix": len(model.config.recurrence.suffix)}
        for window in encoder_schedule(length, model.config.recurrence.window, overlap, **sizes):
            reached[window.score_from : window.score_to] = window.end - 1
    with torch.no_grad():
        moved = (model(changed).logits - model(ids).logits).abs().amax(2)
    before = reached < token[:, None]
    assert moved[before].max() < 1e-4
    assert moved.diagonal().min() > 1e-3, "the token itself has an effect"


@pytest.mark.parametrize("block_tokens", [1 << 13, 160])  # a small block has few windows of a batch
@each_memory(CAUSAL)
def test_evaluation_does_not_depend_on_the_batch(name, fields, block_tokens, monkeypatch):
    monkeypatch.setitem(block_size.BLOCK_TOKENS, "cpu", block_tokens)
    model = carrying(name, fields)
    documents = [tiny.documents(1, length, seed)[0].tolist() for seed, length in enumerate((60, 41, 9, 2, 33))]
    for how in ({}, {"overlap": 0}, {"reset_every": 3}):
        alone, together = (cf.perplexity(model, documents, batch_size=n, **how).nats for n in (1, 4))
        assert alone == pytest.approx(together, rel=1e-5)
    with torch.no_grad():
        texts = [torch.tensor([document]) for document in documents]
        expected = sum(model(text, labels=text).nll_sum for text in texts).item()
    assert cf.perplexity(model, documents, batch_size=4).nats == pytest.approx(expected, rel=1e-5)


# --- generation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("overlap", "attention"), [(0, "sdpa"), (2, "eager"), (7, "sdpa")])
@each_memory(CAUSAL)
def test_token_by_token_equals_one_call(name, fields, overlap, attention):
    """Rows are at different positions of their windows."""
    model = carrying(name, fields, overlap=overlap)
    model.base.set_attn_implementation(attention)
    ids, lengths = tiny.documents(3, 36), [1, 9, 20]
    logits, cache = decode(model, ids, lengths)
    assert_close(logits, logits_of_one_call(model, ids, lengths), rtol=1e-4, atol=1e-4)
    for row, length in enumerate(lengths):
        expected = model.advance_state(ids[row : row + 1, : length + 16])
        assert_same_state(cache.state[[row]], expected)


@each_memory(CAUSAL)
def test_generation_at_another_overlap_equals_one_call(name, fields):
    model, ids, lengths = carrying(name, fields, overlap=2), tiny.documents(2, 36), [5, 17]
    logits, _ = decode(model, ids, lengths, overlap=3)
    assert_close(logits, logits_of_one_call(model, ids, lengths, overlap=3), rtol=1e-4, atol=1e-4)


@each_memory(CAUSAL)
def test_without_a_state_generation_is_that_of_windows_alone(name, fields):
    model, ids = carrying(name, fields), tiny.documents(2, 30)
    logits, _ = decode(model, ids, [4, 13], use_state=False)
    assert_close(logits, logits_of_one_call(model, ids, [4, 13], use_state=False), rtol=1e-4, atol=1e-4)


def assert_greedy(model, text, length, **arguments):
    """After so many tokens, each token is the most probable one."""
    with torch.no_grad():
        best = model(text, **arguments).logits.argmax(-1)
    assert best[:, length - 1 : -1].equal(text[:, length:])


@each_memory(CAUSAL)
def test_a_continued_generation_equals_whole_calls(name, fields, tmp_path):
    """From the state of a cache, saved or not, and from one in which a memory begins late."""
    model, ids = carrying(name, fields), tiny.documents(2, 19)
    prompts, mask = pad_left(ids, [5, 19])
    whole = model.generate(prompts, attention_mask=mask, max_new_tokens=16, **GREEDY)
    for row, length in enumerate((5, 19)):
        assert_greedy(model, whole[row : row + 1, 19 - length :], length)
    settings = {"max_new_tokens": 9, "return_dict_in_generate": True, **GREEDY}
    first = model.generate(prompts, attention_mask=mask, **settings)
    state = first.past_key_values.state
    state.save(tmp_path / "state")
    for start in (state, cf.State.load(tmp_path / "state")):
        more = model.generate(first.sequences[:, -1:], state=start, max_new_tokens=7, **GREEDY)
        assert torch.cat([first.sequences, more[:, 1:]], dim=1).equal(whole)
    late = model(ids, use_state=False).state
    assert_greedy(model, model.generate(ids[:, :3], state=late, max_new_tokens=12, **GREEDY), 3, state=late)


@each_memory(CAUSAL)
def test_beams_have_the_scores_of_their_texts(name, fields):
    model = carrying(name, fields)
    prompts, mask = pad_left(tiny.documents(2, 13), [6, 13])
    out = model.generate(
        prompts, attention_mask=mask, num_beams=3, max_new_tokens=14, return_dict_in_generate=True, output_scores=True,
        length_penalty=0.0, **NO_EOS, do_sample=False,
    )  # fmt: skip
    for row, length in enumerate((6, 13)):
        text = out.sequences[row : row + 1, 13 - length :]
        with torch.no_grad():
            logits = model(text).logits[0, length - 1 : -1].log_softmax(-1)
        score = logits.gather(1, text[0, length:, None]).sum()
        assert_close(out.sequences_scores[row], score, rtol=1e-4, atol=1e-4)


# --- saving, prefixes, precision -------------------------------------------------------------------------------------


@each_memory(NAMES)
def test_a_saved_model_is_unchanged(name, fields, tmp_path):
    model, ids = carrying(name, fields), tiny.documents(2, 40)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config.recurrence == model.config.recurrence
    (memory,) = loaded.config.recurrence.memories
    assert {key: getattr(memory, key) for key in fields} == fields
    state = model.advance_state(ids, **final(name, False))
    with torch.no_grad():
        for arguments in ({}, {"state": state}):
            assert_close(loaded(ids, **arguments).logits, model(ids, **arguments).logits)
    loaded.base.set_attn_implementation("eager")
    assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    other = carrying(name, {**fields, "recent": fields["recent"] - 1})
    with pytest.raises(ValueError, match="state"):
        other(ids, state=state)


@each_memory(["bert", "roberta", "modernbert"])
def test_rows_with_different_questions_equal_each_alone(name, fields):
    """A row's question stands in front of all its windows, so that documents have windows of different sizes."""
    ids, mask = ragged((45, 38, 20))
    answers = {"start_positions": torch.tensor([40, -100, 3]), "end_positions": torch.tensor([42, -100, 3]),
               "answer_kinds": torch.tensor([0, 2, 0])}  # fmt: skip
    results = []
    for block in (1, 2):
        model = tiny.answering(name, slots=0, window=16, overlap=2, block_windows=block, **{**fields, "recent": 13})
        assert isinstance(model.memory.kv, HistoryKVMemory)
        out = model(ids, attention_mask=mask, question_ids=tiny.QUESTIONS, **answers)
        out.loss.backward()
        results.append((out, tiny.gradients(model)))
    for out, gradients in results[1:]:
        for key in ("loss", "start_logits", "end_logits", "kind_logits"):
            assert_close(out[key], results[0][0][key], rtol=1e-4, atol=1e-5)
        tiny.assert_same_gradients(gradients, results[0][1])
    with torch.no_grad():
        for row, length in enumerate((45, 38, 20)):
            alone = model(ids[row : row + 1, :length], question_ids=tiny.QUESTIONS[row : row + 1])
            for key in ("start_logits", "end_logits"):
                assert_close(results[0][0][key][row, :length], alone[key][0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["weights", "autocast"])
@each_memory(NAMES)
def test_bfloat16_is_close(name, fields, how):
    """A selection may turn out otherwise, which moves a few predictions."""
    model, ids = carrying(name, fields), tiny.documents(2, 40)
    expected = step(model, ids)
    with torch.no_grad():
        logits = model(ids).logits
    model = model.to(torch.bfloat16) if how == "weights" else model
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        (out, gradients) = step(model, ids)
        with torch.no_grad():
            difference = (model(ids).logits.float() - logits).abs()
        if name in CAUSAL:
            model.generate(ids, max_new_tokens=12, **GREEDY)
    assert_close(out.loss.float(), expected[0].loss, rtol=0.03, atol=0)
    assert gradients.keys() == expected[1].keys()
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert difference.amax(-1).median() < 0.05 * logits.abs().max()
