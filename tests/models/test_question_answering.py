# SPDX-License-Identifier: Apache-2.0
"""The model that finds answers in long documents, on tiny encoders of every type.

References: the base model with its own question-answering head on windows put together by hand.
"""

import pytest
import torch
import torch.nn.functional as F
from helpers import tiny
from torch.testing import assert_close
from transformers import AutoModelForQuestionAnswering

import carryforward as cf
from carryforward.engine import bptt

QUESTIONS, FRAME = tiny.QUESTIONS, tiny.FRAME
KINDS = [{}, {"slots": 0, "kept": 3, "sinks": 1, "window": 16}, {"overlap": 2, "slots": 2, "insert_at": (1, 3)}]


def by_hand(model, question, stretch):
    """A window that stands alone, through the base model and its own head: starts and ends, [n, 2]."""
    front = [2, *question, 3, 3]
    ids = torch.tensor([[*front, *stretch, 3]])
    types = {}
    if getattr(model.config.base_config, "type_vocab_size", 0) > 1:
        types = {"token_type_ids": torch.tensor([[0] * len(front) + [1] * (len(stretch) + 1)])}
    out = model.base(ids, **types)
    inside = slice(len(front), len(front) + len(stretch))
    return torch.stack([out.start_logits[0, inside], out.end_logits[0, inside]], dim=-1)


def answers(out):
    return torch.stack([out.start_logits, out.end_logits], dim=-1)


@pytest.mark.parametrize("name", tiny.ENCODERS)
def test_without_a_state_windows_are_the_base_model_s(name):
    model, document = tiny.answering(name), tiny.documents(1, 20)
    found = answers(model(document, question_ids=QUESTIONS[:1], use_state=False))[0]
    text, room = document[0].tolist(), 14 - 7
    parts = [by_hand(model, QUESTIONS[0], text[begin : begin + room]) for begin in range(0, 20, room)]
    assert_close(found, torch.cat(parts), rtol=1e-4, atol=1e-5)
    with_state = answers(model(document, question_ids=QUESTIONS[:1]))[0]
    assert_close(with_state[:room], found[:room])
    assert (with_state[room:] - found[room:]).abs().amax(-1).min() > 1e-4


@pytest.mark.parametrize("fields", KINDS, ids=str)
@pytest.mark.parametrize("name", tiny.ENCODERS)
def test_rows_with_other_questions_are_as_if_alone(name, fields):
    model, documents, lengths = tiny.answering(name, **fields), tiny.documents(3, 31), [31, 8, 19]
    mask = (torch.arange(31) < torch.tensor(lengths)[:, None]).long()
    together = model(documents, attention_mask=mask, question_ids=QUESTIONS)
    for row, length in enumerate(lengths):
        alone = model(documents[row : row + 1, :length], question_ids=QUESTIONS[row : row + 1])
        assert_close(answers(together)[row, :length], answers(alone)[0], rtol=1e-4, atol=1e-5)
        assert_close(together.kind_logits[row], alone.kind_logits[0], rtol=1e-4, atol=1e-5)
        assert together.start_logits[row, length:].eq(-torch.inf).all()


@pytest.mark.parametrize("fields", KINDS, ids=str)
@pytest.mark.parametrize("name", tiny.ENCODERS)
def test_recomputed_equals_kept_graph(name, fields):
    documents, results = tiny.documents(3, 31), []
    told = {"start_positions": torch.tensor([25, -100, 3]), "end_positions": torch.tensor([27, -100, 3]),
            "answer_kinds": torch.tensor([0, 2, 0])}  # fmt: skip
    for keep_graph in (False, True):
        model = tiny.answering(name, keep_graph=keep_graph, **fields).train()
        torch.manual_seed(5)
        out = model(documents, question_ids=QUESTIONS, **told)
        out.loss.backward()
        results.append((out.loss, tiny.gradients(model)))
    assert_close(*(loss for loss, _ in results))
    tiny.assert_same_gradients(*(found for _, found in results))
    assert all(gradient.abs().max() > 0 for key, gradient in results[0][1].items() if key.startswith("recurrence.net"))


def test_the_loss_by_hand():
    model, documents = tiny.answering("bert"), tiny.documents(2, 20)
    starts, ends, kinds = torch.tensor([4, -100]), torch.tensor([6, -100]), torch.tensor([0, 1])
    out = model(documents, question_ids=QUESTIONS[:2], start_positions=starts, end_positions=ends, answer_kinds=kinds)
    logp = [logits.log_softmax(-1) for logits in (out.start_logits, out.end_logits, out.kind_logits)]
    expected = -(logp[0][0, 4] + logp[1][0, 6]) / 2 - (logp[2][0, 0] + logp[2][1, 1]) / 2
    assert_close(out.loss, expected)
    nothing = torch.tensor([-100, -100])
    out = model(
        documents, question_ids=QUESTIONS[:2], start_positions=nothing, end_positions=nothing, answer_kinds=kinds
    )
    out.loss.backward()
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)


def test_only_the_document_is_pooled():
    model, pooled = tiny.answering("bert"), []
    forward = model.recurrence.forward

    def watched(hidden, *rest):
        hidden = [h.detach().requires_grad_() for h in hidden]
        with torch.enable_grad():
            found = forward(hidden, *rest)
            pooled.append(torch.autograd.grad(found.sum(), hidden[-1])[0].abs().sum(-1) > 0)
        return found.detach()

    model.recurrence.forward = watched
    model(tiny.documents(2, 20), question_ids=QUESTIONS[:2])
    position = torch.arange(14)
    expected = torch.stack([(begin <= position) & (position < 13) for begin in (6, 5)])
    assert pooled[0].equal(expected), "behind prefix, question and separator, before the suffix"


@pytest.mark.parametrize("training", [False, True])
def test_windows_leave_nothing_behind_but_what_they_emit(training, monkeypatch):
    """Memory does not grow with the states of windows that were read."""
    held = []
    unroll = bptt.unroll

    def watched(plan, table):
        emissions, table = unroll(plan, table)
        held.extend((tensor.untyped_storage().nbytes(), tensor.nbytes) for emitted in emissions for tensor in emitted)
        return emissions, table

    monkeypatch.setattr(bptt, "unroll", watched)
    with torch.set_grad_enabled(training):
        tiny.answering("bert")(tiny.documents(2, 40), question_ids=QUESTIONS[:2])
        told = {"labels": torch.tensor([0, 1])} if training else {}
        tiny.recurrent("bert", "sequence")(tiny.documents(2, 40), **told)
    assert len(held) > 10
    assert all(storage == own for storage, own in held)


def test_saving_and_the_auto_class(tmp_path):
    model, document = tiny.answering("roberta"), tiny.documents(1, 20)
    expected = model(document, question_ids=QUESTIONS[:1])
    model.save_pretrained(tmp_path)
    again = AutoModelForQuestionAnswering.from_pretrained(tmp_path)
    assert type(again) is cf.RecurrentForQuestionAnswering
    found = again(document, question_ids=QUESTIONS[:1])
    assert_close(answers(found), answers(expected))
    assert_close(found.kind_logits, expected.kind_logits)
    assert again.config.recurrence.separator == (3, 3)


def test_the_paper_s_recurrence_is_the_default():
    encoder = tiny.base("bert", "none")
    model = cf.add_recurrence(encoder, head="question-answering", **FRAME)
    recurrence = model.config.recurrence
    assert (recurrence.window, recurrence.pooled_layers, recurrence.hidden_sizes, recurrence.insert_at) == (
        40, "last", (16,), 2)  # fmt: skip
    assert model.base.bert.encoder is encoder.encoder, "the weights are shared"
    out = model(tiny.documents(2, 30), question_ids=QUESTIONS[:2])
    assert (out.kind_logits.argmax(-1) == 0).all(), "a new head expects spans"
    with_head = AutoModelForQuestionAnswering.from_config(encoder.config)
    assert type(cf.add_recurrence(with_head, window=14, **FRAME)) is cf.RecurrentForQuestionAnswering


def test_special_tokens_of_a_pair():
    class Tokenizer:
        def __call__(self, text, pair=None, add_special_tokens=True):
            if not add_special_tokens:
                return {"input_ids": [7]}
            return {"input_ids": [0, 7, 2] if pair is None else [0, 7, 2, 2, 7, 2]}

    model = cf.add_recurrence(tiny.base("roberta", "none"), head="question-answering", tokenizer=Tokenizer())
    recurrence = model.config.recurrence
    assert (recurrence.prefix, recurrence.separator, recurrence.suffix) == ((0,), (2, 2), (2,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "question_ids is missing"),
        ({"question_ids": QUESTIONS}, "question_ids is of 3 rows, input_ids of 1"),
        ({"question_ids": [[5] * 10]}, "leaves no room for the document after 14 special tokens"),
        ({"question_ids": [[5]], "start_positions": torch.tensor([20]), "end_positions": torch.tensor([20])},
         "start_positions: row 0 has 20, which is no token of the document"),
        ({"question_ids": [[5]], "start_positions": torch.tensor([2])}, "end_positions is missing"),
        ({"question_ids": [[5]], "attention_mask": (torch.arange(20) < 15).long()[None],
          "start_positions": torch.tensor([3]), "end_positions": torch.tensor([15])},
         "end_positions: row 0 has 15, which is no token of the document"),
    ],
)  # fmt: skip
def test_what_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny.answering("bert")(tiny.documents(1, 20), **arguments)


@pytest.mark.parametrize(
    ("name", "head", "message"),
    [
        ("gpt2", "none", "gpt2 is causal"),
        ("bert", "masked", "has a head already"),
    ],
)
def test_models_that_get_no_head(name, head, message):
    with pytest.raises(ValueError, match=message):
        cf.add_recurrence(tiny.base(name, head), head="question-answering")


def test_without_a_kind_to_score_the_loss_is_that_of_the_rest():
    model, ids = tiny.answering("bert"), tiny.documents(2, 30)
    asked = {"question_ids": tiny.QUESTIONS[:2], "start_positions": torch.tensor([3, 4])}
    asked["end_positions"] = asked["start_positions"]
    none = torch.full((2,), -100)
    loss = model(ids, **asked, answer_kinds=none).loss
    whole, kinds = model(ids, **asked), torch.zeros(2, dtype=torch.long)
    assert_close(loss, whole.loss - F.cross_entropy(whole.kind_logits, kinds))
    loss.backward()
    assert not any(parameter.grad is None or parameter.grad.isnan().any() for parameter in model.kinds.parameters())


@pytest.mark.parametrize(
    ("starts", "ends", "message"),
    [
        ([3, 4, 5], [3, 4, 5], r"start_positions has shape \[3\]: one for each of 2 documents"),
        ([9, 4], [4, 4], "row 0: an answer cannot start at 9 and end at 4"),
        ([9, 4], [9, -100], "row 1: an answer cannot start at 4 and end at -100"),
    ],
)
def test_positions_that_are_no_answers(starts, ends, message):
    with pytest.raises(ValueError, match=message):
        tiny.answering("bert")(tiny.documents(2, 30), question_ids=tiny.QUESTIONS[:2],
                               start_positions=torch.tensor(starts), end_positions=torch.tensor(ends))  # fmt: skip


def test_positions_may_stand_in_a_column():
    model, ids, places = tiny.answering("bert"), tiny.documents(2, 30), torch.tensor([3, 4])
    losses = [model(ids, question_ids=tiny.QUESTIONS[:2], start_positions=one, end_positions=one).loss
              for one in (places, places[:, None])]  # fmt: skip
    assert torch.equal(*losses)


def test_a_double_precision_model_stays_one():
    model = tiny.answering("bert").double()
    out = model(tiny.documents(2, 30), question_ids=tiny.QUESTIONS[:2])
    assert {out.start_logits.dtype, out.kind_logits.dtype} == {torch.float64}
