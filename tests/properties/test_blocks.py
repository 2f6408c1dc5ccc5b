# SPDX-License-Identifier: Apache-2.0
"""Windows that pass each layer side by side, in blocks: the same numbers as one after the other, whatever the block.

The references are the loop of single windows, one masked pass of the base model, and the base model itself.
"""

import itertools

import pytest
import torch
from helpers import tiny
from torch.testing import assert_close

import carryforward as cf
from carryforward.engine import block_size
from carryforward.evaluation.token_losses import loss_by_depth, token_losses
from carryforward.memories import kv_links

ALL = list(tiny.CONFIGS)
SIZES = (2, 7)  # windows of a block, against 1
CARRIED = [{"recent": 3, "sinks": 1}, {"recent": 5, "sinks": 0, "overlap": 0}]
LENGTHS = (37, 20, 3)


def carrying(name, block, **fields):
    return tiny.recurrent(name, **{"slots": 0, "recent": 3, "sinks": 1, **fields}, block_windows=block)


def ragged(lengths=LENGTHS):
    """Documents of different lengths, padded, and their mask."""
    ids = tiny.documents(len(lengths), max(lengths))
    return ids, (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def step(model, ids, mask=None, seed=5, **arguments):
    """The loss, the state and all gradients of a training step."""
    torch.manual_seed(seed)
    out = model(ids, attention_mask=mask, labels=ids, **arguments)
    out.loss.backward()
    return out, tiny.gradients(model)


def assert_same_step(one, other):
    (out, gradients), (expected, expected_gradients) = one, other
    assert_close(out.loss, expected.loss)
    for kind, state in expected.state.memory.items():
        assert_close(out.state.memory[kind], state, rtol=1e-4, atol=1e-5)
    tiny.assert_same_gradients(gradients, expected_gradients)


@pytest.mark.parametrize("fields", CARRIED, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_blocks_equal_single_windows(name, fields):
    ids, mask = ragged()
    for use_state in (True, False):
        expected = step(carrying(name, 1, **fields), ids, mask, use_state=use_state)
        for block, keep in ((2, 0), (7, 100)):
            model = carrying(name, block, keep_windows=keep, **fields)
            assert_same_step(step(model, ids, mask, use_state=use_state), expected)


@pytest.mark.parametrize("fields", [tiny.TOKENS, tiny.ASSOCIATIVE, tiny.ASSOCIATIVE_AND_KV], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_blocks_change_nothing_where_windows_wait_for_each_other(name, fields):
    """With a state one window of a row runs at a time; without one they run side by side, and have no memory."""
    (ids, mask), single, blocks = ragged(), *(tiny.precise(name, block_windows=n, **fields) for n in (1, 7))
    for use_state in (True, False):
        assert_same_step(*(step(model, ids, mask, use_state=use_state) for model in (blocks, single)))


@pytest.mark.parametrize("block", [1, *SIZES, 100])
def test_blocks_equal_one_masked_pass_of_the_base_model(block):
    """Rotary positions, no sinks: each position sees its own window causally, and the last five before the window."""
    model, window, recent = carrying("llama", block, window=8, overlap=0, recent=5, sinks=0), 8, 5
    ids, base = tiny.documents(2, 45), tiny.base("llama")
    position = torch.arange(45)
    query, key = position[:, None], position[None]
    begin = query // window * window
    visible = (key <= query) & (key >= begin - recent)
    mask = torch.zeros(45, 45).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None].expand(2, -1, -1, -1)
    logits = base(ids[:, :-1], attention_mask=mask[:, :, :-1, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    out, gradients = step(model, ids)
    assert_close(out.loss, loss)
    expected = {f"base.{name}": gradient for name, gradient in tiny.gradients(base).items()}
    tiny.assert_same_gradients(gradients, expected)


@pytest.mark.parametrize("name", ALL)
def test_the_first_window_is_that_of_the_base_model(name):
    model = carrying(name, 7)
    prefix, suffix = model.config.recurrence.prefix, model.config.recurrence.suffix
    ids = tiny.documents(2, 37)
    window = torch.cat([torch.tensor([prefix] * 2).long().view(2, -1), ids[:, :8], torch.tensor([suffix] * 2).long()
                        .view(2, -1)], dim=1)  # fmt: skip
    first = slice(len(prefix), len(prefix) + 7)  # an overlap of 2 leaves the eighth token to the second window
    expected = model.base(window).logits[:, first]
    assert_close(model(ids).logits[:, :7], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", SIZES)
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "bert", "modernbert"])
def test_pieces_cut_anywhere_equal_the_whole(name, block):
    """With gradients through the states between the pieces."""
    ids, whole = tiny.documents(2, 60), carrying(name, 1)
    expected = whole(ids, labels=ids)
    expected.nll_sum.backward()
    gradients = tiny.gradients(whole)
    for cuts in ((1, 25, 26), (8, 14, 50), (33,)):
        model, state, total = carrying(name, block), None, torch.zeros(())
        for begin, end in itertools.pairwise((0, *cuts, 60)):
            final = {} if name in tiny.CAUSAL else {"final": end == 60}
            out = model(ids[:, begin:end], labels=ids[:, begin:end], state=state, **final)
            state, total = out.state, total + out.nll_sum
        assert_close(total, expected.nll_sum)
        total.backward()
        tiny.assert_same_gradients(tiny.gradients(model), gradients)
        assert_close(state.memory["kv"], expected.state.memory["kv"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_truncated_bptt_detaches_inside_a_block(name, depth):
    ids, mask = ragged((60, 45, 9))
    expected = step(carrying(name, 1, bptt_windows=depth), ids, mask)
    whole = step(carrying(name, 1), ids, mask)[1]
    assert any((whole[key] - expected[1][key]).abs().max() > 1e-4 for key in whole), "truncation matters"
    for block, keep_graph in itertools.product((2, 3, 100), (False, True)):
        assert_same_step(step(carrying(name, block, bptt_windows=depth, keep_graph=keep_graph), ids, mask), expected)


@pytest.mark.parametrize("name", ["gpt2", "mistral", "modernbert"])
def test_recomputed_equals_kept_with_dropout(name):
    ids, mask = ragged()
    dropout = {"resid_pdrop": 0.2, "attention_dropout": 0.2, "mlp_dropout": 0.2}
    steps = [
        step(carrying(name, 2, settings=dropout, **how).train(), ids, mask)
        for how in ({"keep_windows": 0}, {"keep_windows": 100}, {"keep_graph": True})
    ]
    assert_same_step(steps[1], steps[0])
    assert_same_step(steps[2], steps[0])
    other = step(carrying(name, 2, settings=dropout).train(), ids, mask, seed=6)
    assert abs(float(other[0].loss.detach() - steps[0][0].loss.detach())) > 1e-4, "dropout matters"


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_checkpointing_hooks_and_offloaded_states_work_on_blocks(name):
    ids, mask = ragged()
    expected = step(carrying(name, 1), ids, mask)
    checkpointed = carrying(name, 2).train()
    for module in checkpointed.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if name == "gpt2":
        checkpointed.gradient_checkpointing_enable()
        assert_same_step(step(checkpointed, ids, mask), expected)
    hooked, seen = carrying(name, 2), []
    hooked.get_input_embeddings().weight.register_hook(lambda gradient: seen.append(1))
    assert_same_step(step(hooked, ids, mask), expected)
    assert len(seen) == 1
    assert_same_step(step(carrying(name, 2, offload_states=True), ids, mask), expected)


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "distilbert"])
def test_questions_of_different_lengths_stand_in_front_of_the_windows_of_a_block(name):
    ids, mask = ragged((45, 38, 20))
    answers = {"start_positions": torch.tensor([40, -100, 3]), "end_positions": torch.tensor([42, -100, 3]),
               "answer_kinds": torch.tensor([0, 2, 0])}  # fmt: skip
    results = []
    for block in (1, *SIZES):
        model = tiny.answering(name, slots=0, recent=2, sinks=1, window=16, block_windows=block)
        out = model(ids, attention_mask=mask, question_ids=tiny.QUESTIONS, **answers)
        out.loss.backward()
        results.append((out, tiny.gradients(model)))
    for out, gradients in results[1:]:
        for key in ("loss", "start_logits", "end_logits", "kind_logits"):
            assert_close(out[key], results[0][0][key], rtol=1e-4, atol=1e-5)
        tiny.assert_same_gradients(gradients, results[0][1])


@pytest.mark.parametrize("head", ["none", "token", "sequence"])
@pytest.mark.parametrize("name", ["bert", "modernbert", "llama"])
def test_outputs_of_blocks_equal_those_of_single_windows(name, head):
    if name in tiny.CAUSAL and head != "none":
        return
    ids, mask = ragged()
    results = []
    for block in (1, *SIZES):
        model = carrying(name, block, head=head)
        out = model(ids, attention_mask=mask)
        values = out.last_hidden_state if head == "none" else out.logits
        values.square().sum().backward()
        results.append((values.detach(), tiny.gradients(model)))
    for values, gradients in results[1:]:
        assert_close(values, results[0][0], rtol=1e-4, atol=1e-5)
        tiny.assert_same_gradients(gradients, results[0][1], tolerance=1e-4)


@pytest.fixture(params=[16, 56, 10**6], ids="{} tokens".format)
def block_tokens(request, monkeypatch):
    """Tokens of a block where there are no gradients; a window has 8."""
    monkeypatch.setitem(block_size.BLOCK_TOKENS, "cpu", request.param)
    return request.param


def reference(work):
    """What some work gives with blocks of one window."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(block_size.BLOCK_TOKENS, "cpu", 1)
        return work()


@pytest.mark.parametrize("name", ["gpt2", "gemma3_text"])
def test_evaluation_does_not_depend_on_the_block(name, block_tokens):
    model = carrying(name, "auto")
    documents = [tiny.documents(1, length, seed)[0].tolist() for seed, length in enumerate((90, 41, 9, 2, 33))]

    def scores():
        losses = token_losses(model, documents, batch_size=3)
        how = ({}, {"overlap": 0}, {"reset_every": 3}, {"use_state": False})
        totals = [cf.perplexity(model, documents, batch_size=n, **fields).nats for n in (1, 4) for fields in how]
        return [*map(torch.from_numpy, losses), torch.tensor(totals), _horizon(model, documents)]

    for result, expected in zip(scores(), reference(scores), strict=True):
        assert_close(result, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def _horizon(model, documents):
    by_depth, _ = loss_by_depth(model, documents, [0, 1, 3])
    return torch.tensor(list(by_depth.values()))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generation_after_a_long_prompt_does_not_depend_on_the_block(name, block_tokens):
    model = carrying(name, "auto")
    ids, mask = ragged((60, 60, 31))
    ids, mask = ids.flip(1), mask.flip(1)  # padded on the left

    def generate():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=None,
                             pad_token_id=1, return_dict_in_generate=True)  # fmt: skip
        return out.sequences, out.past_key_values.state.memory["kv"]

    (sequences, state), (expected, expected_state) = generate(), reference(generate)
    assert torch.equal(sequences, expected)
    assert_close(state, expected_state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fields", [{}, {"slots": 2}], ids=["carried", "vector beside it"])
def test_only_carried_keys_and_values_let_windows_run_side_by_side(fields):
    model = tiny.recurrent("gpt2", **{"slots": 0, "recent": 3, **fields}, block_windows=7)
    rows = []
    model.backbone.register_forward_hook(lambda module, args, out: rows.append(len(out.last_hidden_state)))
    with torch.no_grad():
        model(tiny.documents(1, 60))
    assert max(rows) == (1 if fields else 10)


def test_a_saved_model_keeps_its_block(tmp_path):
    for block in (3, "auto"):
        model = carrying("gpt2", block)
        model.save_pretrained(tmp_path / str(block))
        loaded = cf.RecurrentForCausalLM.from_pretrained(tmp_path / str(block))
        assert loaded.config.recurrence.block_windows == block
        ids = tiny.documents(1, 40)
        assert_close(loaded(ids).logits, model(ids).logits)


# --- short windows, mixed rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_documents_may_end_in_windows_shorter_than_the_sinks(name, sinks):
    """Each length alone and beside a longer document, read token by token at the end."""
    fields = {"overlap": 0, "recent": 3, "sinks": sinks}
    one, model = carrying(name, 1, **fields), carrying(name, 7, **fields)
    for length in (1, 2, 9, 10, 11, 19):
        ids, mask = ragged((30, length))
        assert_same_step(step(model, ids, mask), step(one, ids, mask))
        out = model(ids[1:, :length], labels=ids[1:, :length], **({} if name in tiny.CAUSAL else {"final": False}))
        for i in range(3):
            more = ids[:1, i : i + 1]
            final = {} if name in tiny.CAUSAL else {"final": i == 2}
            following = [m(more, labels=more, state=out.state, **final) for m in (model, one)]
            assert_close(following[0].nll_sum, following[1].nll_sum)
            out = following[0]


def test_short_documents_with_questions_in_front_may_stand_in_a_block():
    ids, mask = ragged((21, 1, 20))
    results = []
    for block in (1, 7):
        model = tiny.answering("bert", slots=0, recent=2, sinks=3, window=16, block_windows=block)
        results.append(model(ids, attention_mask=mask, question_ids=tiny.QUESTIONS).start_logits.detach())
    assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_rows_that_go_on_and_rows_that_begin_share_a_call():
    """Each with one window at the same column."""
    model, ids = carrying("llama", "auto", overlap=0), tiny.documents(2, 16)
    begun = model.advance_state(ids[:1, :9])[[0]]
    for pieces in ([begun, model.fresh_state(1)], [model.fresh_state(1), begun]):
        state, later = cf.State.cat(pieces), tiny.documents(2, 5, seed=1)
        together = model(later, state=state)
        alone = [model(later[row : row + 1], state=pieces[row]).logits for row in (0, 1)]
        assert_close(together.logits, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_second_derivatives_through_a_kept_block():
    norms = []
    for block in (1, 3):
        model = carrying("llama", block, keep_graph=True)
        model.base.set_attn_implementation("eager")  # the only one that has second derivatives
        ids = tiny.documents(1, 24)
        weight = model.base.model.layers[0].self_attn.k_proj.weight
        (gradient,) = torch.autograd.grad(model(ids, labels=ids).loss, weight, create_graph=True)
        gradient.square().sum().backward()
        norms.append(weight.grad)
    assert_close(norms[1], norms[0], rtol=1e-3, atol=1e-4)


# --- what short documents and large models must not pay for ----------------------------------------------------------


def batch_sizes(model):
    sizes = []
    model.backbone.register_forward_hook(lambda module, args, out: sizes.append(tuple(out.last_hidden_state.shape[:2])))
    return sizes


def test_a_document_of_one_window_neither_measures_nor_makes_a_block(monkeypatch):
    monkeypatch.setattr(kv_links.LayerLink, "__init__", lambda *args, **kwargs: pytest.fail("nothing is linked"))
    model = carrying("gpt2", "auto")
    sizes, ids = batch_sizes(model), tiny.documents(3, 7)
    model(ids, labels=ids)
    assert sizes == [(3, 6)]
    assert model.block_size.resolved is None


def test_logits_bound_a_block_that_makes_them_only_for_the_loss(monkeypatch):
    monkeypatch.setitem(block_size.LOGIT_BYTES, "cpu", 4 * tiny.VOCABULARY * 8 * 3)  # three windows
    ids = tiny.documents(1, 80)
    for name, settings, most in (
        ("bert", {}, 2),
        ("gemma3_text", {"final_logit_softcapping": 5.0}, 3),
        ("llama", {}, 13),
    ):
        model = carrying(name, "auto", settings=settings)
        sizes = batch_sizes(model)
        with torch.no_grad():
            model(ids, labels=ids)
        assert max(rows for rows, _ in sizes) == most, name


def test_wide_models_have_shorter_blocks():
    model = carrying("gpt2", "auto")
    tokens = block_size.block_tokens(model)
    model.config.base_config.n_embd = 4 * block_size.WIDTH
    assert block_size.block_tokens(model) == tokens // 4


def test_kept_windows_are_rounded_up_to_blocks():
    ids, runs = tiny.documents(1, 12 * 8), []
    for keep in (0, 5):
        model = carrying("gpt2", 4, keep_windows=keep, overlap=0)
        sizes = batch_sizes(model)
        model(ids, labels=ids)
        runs.append(len(sizes))
    assert runs == [5, 4], "of three blocks the last one never runs twice; with two kept, only the first does"
