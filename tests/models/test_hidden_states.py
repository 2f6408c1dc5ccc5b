# SPDX-License-Identifier: Apache-2.0
"""`output_hidden_states`: of all layers, at every token, from the window that gives the token's output."""

import pytest
import torch
from helpers import tiny
from torch.testing import assert_close

MEMORIES = {
    "vector": {},
    "kv": {"slots": 0, "recent": 3, "sinks": 1},
    "tokens": tiny.TOKENS,
    "associative": tiny.ASSOCIATIVE,
}
MODELS = [("gpt2", "causal"), ("llama", "causal"), ("llama", "none"), ("bert", "masked"), ("roberta", "token"),
          ("bert", "sequence"), ("modernbert", "none")]  # fmt: skip


def stacked(out) -> torch.Tensor:
    return torch.stack(out.hidden_states)


@pytest.mark.parametrize(("name", "head"), MODELS)
def test_one_window_is_the_base_models(name, head):
    model, base = tiny.recurrent(name, head), tiny.base(name, head)
    ids = tiny.documents(2, 8)
    whole = ids
    if name in tiny.ENCODERS:
        whole = torch.cat([torch.full((2, 1), 2), ids, torch.full((2, 2), 3)], dim=1)
    with torch.no_grad():
        expected = stacked(base(whole, output_hidden_states=True))
        out = model(whole, output_hidden_states=True)
        assert len(out.hidden_states) == tiny.LAYERS + 1
        assert_close(stacked(out), expected, rtol=1e-4, atol=1e-5)
        if name in tiny.ENCODERS:
            assert_close(stacked(model(ids, output_hidden_states=True)), expected[:, :, 1:-2], rtol=1e-4, atol=1e-5)
    assert out.logits is not None or out.last_hidden_state is not None


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_they_are_what_the_outputs_are_made_of(name, memory):
    """The last ones give the model's own outputs, in all windows of a long document; others stay as they are."""
    model = tiny.precise(name, **MEMORIES[memory])
    ids = tiny.documents(2, 29)
    with torch.no_grad():
        plain, out = model(ids), model(ids, output_hidden_states=True)
        assert plain.hidden_states is None
        assert_close(out.logits, plain.logits)
        head = model.base.lm_head if name != "bert" else model.base.cls
        assert_close(head(out.hidden_states[-1]), plain.logits)
        # embeddings depend on the token (and its position in the window); deeper layers see the state
        alone = model(ids, output_hidden_states=True, use_state=False)
        differs = (stacked(out) - stacked(alone)).abs().amax(dim=(1, 3))
        assert differs[-1, -3:].min() > 1e-4
        if name == "llama" and memory != "associative":  # which adds to every layer's input
            assert_close(out.hidden_states[0], model.base.model.embed_tokens(ids))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_batch_gives_those_of_its_documents_alone(name, side):
    model = tiny.recurrent(name, slots=0, recent=3, settings={})
    rows = [tiny.documents(1, n, seed=n) for n in (5, 27, 14)]
    ids, mask = torch.full((3, 27), 1), torch.zeros(3, 27, dtype=torch.long)
    for i, row in enumerate(rows):
        inside = slice(0, row.shape[1]) if side == "right" else slice(27 - row.shape[1], 27)
        ids[i, inside], mask[i, inside] = row[0], 1
    with torch.no_grad():
        together = stacked(model(ids, attention_mask=mask, output_hidden_states=True))
        for i, row in enumerate(rows):
            alone = stacked(model(row, output_hidden_states=True))[:, 0]
            assert_close(together[:, i][:, mask[i].bool()], alone, rtol=1e-4, atol=1e-5)
    assert not together[:, mask == 0].any()


def test_pieces_give_those_of_the_whole():
    model, ids = tiny.recurrent("llama"), tiny.documents(1, 30)
    with torch.no_grad():
        whole, state, parts = stacked(model(ids, output_hidden_states=True)), None, []
        for piece in ids.split(11, dim=1):
            out = model(piece, state=state, output_hidden_states=True)
            state = out.state
            parts.append(stacked(out))
        assert_close(torch.cat(parts, dim=2), whole, rtol=1e-4, atol=1e-5)
        encoder = tiny.recurrent("bert")
        first = encoder(ids[:, :3], final=False, output_hidden_states=True)  # completes no window
        assert [tuple(one.shape) for one in first.hidden_states] == [(1, 0, tiny.WIDTH)] * (tiny.LAYERS + 1)


def test_gradients_are_those_of_the_kept_graph():
    ids, results = tiny.documents(2, 26), []
    for keep_graph in (True, False):
        model = tiny.recurrent("llama", keep_graph=keep_graph, keep_windows=0)
        out = model(ids, labels=ids, output_hidden_states=True)
        (out.loss + sum(one.square().mean() for one in out.hidden_states)).backward()
        assert out.logits is None, "not asked for"
        results.append((out.loss.detach(), tiny.gradients(model)))
    assert_close(results[0][0], results[1][0])
    tiny.assert_same_gradients(results[1][1], results[0][1])


def test_the_loss_and_the_columns_of_logits_stay_as_they_are():
    model, ids = tiny.recurrent("gpt2"), tiny.documents(2, 26)
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
        assert_close(model(ids, labels=ids, output_hidden_states=True).loss, loss)
        for keep in (3, torch.tensor([20, 4, 4]), torch.arange(26) % 5 == 0):
            expected = model(ids, logits_to_keep=keep).logits
            out = model(ids, logits_to_keep=keep, output_hidden_states=True)
            assert_close(out.logits, expected)
            assert out.hidden_states[0].shape[1] == 26
        encoder = tiny.recurrent("bert", "masked")
        out = encoder(ids, labels=ids, output_hidden_states=True)
        assert_close(out.loss, encoder(ids, labels=ids).loss)
        assert out.logits is None


def test_the_config_can_ask_for_them_and_question_answering_has_them(tmp_path):
    model, ids = tiny.recurrent("llama"), tiny.documents(1, 20)
    model.config.output_hidden_states = True
    assert len(model(ids).hidden_states) == tiny.LAYERS + 1
    assert model(ids, output_hidden_states=False).hidden_states is None
    tokens = model.generate(ids, max_new_tokens=3, output_hidden_states=False)
    assert tokens.shape == (1, 23)
    finder = tiny.answering("bert")
    out = finder(ids, question_ids=[[5, 6]], output_hidden_states=True)
    scores = finder.base.qa_outputs(out.hidden_states[-1])
    assert_close(scores[..., 0], out.start_logits)
    assert finder(ids, question_ids=[[5, 6]]).hidden_states is None


def test_what_makes_no_sense_is_refused_by_name():
    model, ids = tiny.recurrent("llama"), tiny.documents(1, 20)
    for refused in (model, tiny.recurrent("bert", "masked"), tiny.recurrent("bert", "none")):
        with pytest.raises(ValueError, match="output_attentions is not supported: .*`carryforward inspect`"):
            refused(ids, output_attentions=True)
    with pytest.raises(ValueError, match="output_hidden_states"):
        model(ids, output_hidden_states="all")
    with pytest.raises(ValueError, match="output_hidden_states cannot be used to generate"):
        model.generate(ids, output_hidden_states=True, return_dict_in_generate=True)
