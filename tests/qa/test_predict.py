# SPDX-License-Identifier: Apache-2.0
"""Finding answers: spans from logits, and from a question and a text to an answer."""

import itertools
import unicodedata

import numpy as np
import pytest
import torch
from helpers import prose, tiny
from transformers import BertConfig, BertModel

import carryforward as cf
from carryforward.qa import predict, span_search
from carryforward.qa.dataset import Question
from carryforward.qa.predict import PredictedAnswer, answer_all, best_answers, tokenise_questions


def test_spans_are_ranked_by_probability():
    torch.manual_seed(0)
    starts, ends, kinds = torch.randn(12), torch.randn(12), torch.tensor([2.0, 0.0, -1.0, 5.0])
    document = "".join(f"{n:x} " for n in range(12))
    offsets = np.array([(2 * n, 2 * n + 1) for n in range(12)])
    p = [starts.softmax(-1), ends.softmax(-1), kinds[:3].softmax(-1)]
    every = [(float(p[0][i] * p[1][j]), i, j) for i in range(12) for j in range(i, min(i + 3, 12))]
    total = sum(value for value, _, _ in every)
    every.sort(reverse=True)
    answers = best_answers((starts, ends, kinds), document, offsets, top_k=40, max_answer_tokens=3)
    spans = [one for one in answers if one.kind == "span"]
    assert len(spans) == len(every) == 33
    assert [(one.start, one.end) for one in spans] == [(2 * i, 2 * j + 1) for _, i, j in every]
    assert [one.probability for one in spans] == pytest.approx(
        [float(p[2][0]) * v / total for v, _, _ in every], rel=1e-5
    )
    assert [one.kind for one in answers[33:]] == ["yes", "no"]
    assert sum(one.probability for one in answers) == pytest.approx(1)
    assert all(document[one.start : one.end] == one.text for one in spans)
    assert best_answers((starts, ends, kinds), document, offsets, allow_none=True)[0].kind == "none"


def test_white_space_does_not_duplicate_answers():
    """Byte-level tokenizers have tokens of white space: an answer that ends with one is the same answer."""
    document, offsets = "a \n b", np.array([(0, 1), (1, 3), (3, 5)])
    logits = torch.tensor([0.0, 5.0, 0.0]), torch.tensor([0.0, 5.0, 0.0]), torch.zeros(4)
    answers = best_answers(logits, document, offsets, top_k=9)
    spans = [(one.text, one.start, one.end) for one in answers if one.kind == "span"]
    assert sorted(spans) == [("a", 0, 1), ("a \n b", 0, 5), ("b", 4, 5)]
    # a character of two tokens: their probabilities are added
    logits = torch.tensor([0.0, 0.0]), torch.tensor([0.0, 0.0]), torch.tensor([0.0, *[-torch.inf] * 3])
    assert best_answers(logits, "京", np.array([(0, 1), (0, 1)]), top_k=5) == [
        PredictedAnswer("京", "span", pytest.approx(1), 0, 1)
    ]


@pytest.mark.parametrize("max_pairs", [1, 20, 10**6])
@pytest.mark.parametrize("top_k", [1, 3, 200])
def test_spans_of_the_same_characters_are_merged(top_k, max_pairs, monkeypatch):
    """Three characters of four byte-level tokens each, then a word: compared with a loop over all pairs."""
    monkeypatch.setattr(span_search, "_MAX_PAIRS", max_pairs)
    document = "😀👍🎉 ok"  # followed by a token without characters
    offsets = np.array([(0, 1)] * 4 + [(1, 2)] * 4 + [(2, 3)] * 4 + [(3, 6), (0, 0)])
    starts, ends = (torch.randn(14, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    shares = {}
    for start, end in itertools.combinations_with_replacement(range(13), 2):
        if end - start >= 9:
            continue
        span = int(offsets[start, 0]) + (start == 12), int(offsets[end, 1])
        shares[span] = shares.get(span, 0.0) + float((starts[start] + ends[end]).exp())
    expected = sorted(((share / sum(shares.values()), span) for span, share in shares.items()), reverse=True)
    kinds = torch.tensor([0.0, *[-torch.inf] * 3])
    answers = best_answers((starts, ends, kinds), document, offsets, top_k=top_k, max_answer_tokens=9)
    assert [(one.start, one.end) for one in answers] == [span for _, span in expected][:top_k]
    assert [one.probability for one in answers] == pytest.approx([share for share, _ in expected][:top_k])


@pytest.mark.parametrize("word", ["Jose\u0301", "\u092e\u0947\u0902", "\u0e01\u0e34", "\u2764\ufe0f"])
def test_answers_include_combining_marks_of_their_last_letter(word):
    """Offsets of tokenizers that drop accents, vowel signs and variation selectors end before them."""
    last = len(unicodedata.normalize("NFD", word).rstrip("\u0301\u0947\u0902\u0e34\ufe0f"))
    document, after = f"{word} came", len(word) + 1
    (answer,) = best_answers((torch.tensor([5.0, 0]), torch.tensor([5.0, 0]), torch.tensor([0.0, *[-torch.inf] * 3])),
                    document, np.array([(0, last), (after, after + 4)]))  # fmt: skip
    assert (answer.text, answer.end) == (word, len(word))


@pytest.fixture(scope="module")
def finder():
    """A question-answering model and its tokenizer."""
    tokenizer = prose.tokenizer()
    tokenizer.add_special_tokens({"cls_token": "<|cls|>", "sep_token": "<|sep|>"})
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=40,
    )  # fmt: skip
    frame = {"prefix": (tokenizer.cls_token_id,), "separator": (tokenizer.sep_token_id,),
             "suffix": (tokenizer.sep_token_id,)}  # fmt: skip
    return cf.add_recurrence(BertModel(config), head="question-answering", memory="vector", **frame).eval(), tokenizer


def test_answers_are_spans_of_the_document(finder, tmp_path):
    model, tokenizer = finder
    document = "Émile – the café’s cat – sat.\n\n" + prose.TOPICS[3][:3000] + "   The end \n"
    answers = cf.answer(model, "Who sat?", document, tokenizer, top_k=20)
    assert len(answers) == 20
    assert all(one.text == document[one.start : one.end].strip() for one in answers if one.kind == "span")
    probabilities = [one.probability for one in answers if one.kind == answers[0].kind]
    assert probabilities == sorted(probabilities, reverse=True)
    assert 0 < sum(one.probability for one in answers) <= 1
    few = cf.answer(model, "Who sat?", "A cat.", tokenizer, top_k=50)
    assert {one.kind for one in few} == {"span"}, "an untrained head only predicts spans"
    assert sum(one.probability for one in few) == pytest.approx(1)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = cf.RecurrentForQuestionAnswering.from_pretrained(tmp_path)
    assert cf.answer(loaded, "Who sat?", document, top_k=20) == answers, "with the tokenizer saved with the model"


def test_wrong_arguments_are_refused(finder, tmp_path):
    model, tokenizer = finder
    with pytest.raises(ValueError, match="document has no words"):
        cf.answer(model, "Who?", "", tokenizer)
    with pytest.raises(ValueError, match="question is empty"):
        cf.answer(model, "", "Text.", tokenizer)
    with pytest.raises(ValueError, match="has 0 left for the document, and needs 1"):
        cf.answer(model, "Who? " * 30, "Text.", tokenizer)
    with pytest.raises(ValueError, match="which does not answer questions"):
        cf.answer(tiny.recurrent("bert"), "Who?", "Text.", tokenizer)
    with pytest.raises(ValueError, match="question is not Unicode"):
        cf.answer(model, "Who\ud800?", "Text.", tokenizer)
    room = model.config.recurrence.window - 4  # for a question of one token
    message = f"needs {room + 1} at an overlap of {room}. Use a shorter question, a smaller overlap, or"
    with pytest.raises(ValueError, match=message):
        cf.answer(model, "Who", "Text.", tokenizer, overlap=room)
    with pytest.raises(ValueError, match="tokenizer is missing"):
        cf.answer(model, "Who?", "Text.")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tokenizer is missing, and .* has none: give one"):
        cf.answer(cf.RecurrentForQuestionAnswering.from_pretrained(tmp_path), "Who?", "Text.")
    ids = torch.ones(1, 9, dtype=torch.long)
    with pytest.raises(ValueError, match="question_ids holds the token id 999999"):
        model(ids, question_ids=[[999999]])
    with pytest.raises(ValueError, match="answer_kinds holds 4; accepted are 0 to 3"):
        model(ids, question_ids=[[5]], start_positions=torch.tensor([0]), end_positions=torch.tensor([0]),
              answer_kinds=torch.tensor([4]))  # fmt: skip
    for name in ("top_k", "max_answer_tokens"):
        with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
            cf.answer(model, "Who?", "Text.", tokenizer, **{name: 0})
    with pytest.raises(ValueError, match="question 7 has .* and needs 37"):
        tokenise_questions(model, [Question("7", "Who?", "Text.", (), "span", "squad")], tokenizer, overlap=36)


def test_a_batch_is_answered_like_single_questions(finder):
    model, tokenizer = finder
    questions = [
        Question(str(n), f"Who{'?' * n}", prose.TOPICS[n][: 300 * n + 9], (), "span", "squad") for n in range(7)
    ]
    together = answer_all(model, tokenise_questions(model, questions, tokenizer), top_k=3, batch_size=3)
    for question, answers in zip(questions, together, strict=True):
        alone = cf.answer(model, question.question, question.document, tokenizer, top_k=3)
        assert [(one.text, one.start) for one in answers] == [(one.text, one.start) for one in alone]
        assert [one.probability for one in answers] == pytest.approx([one.probability for one in alone], rel=1e-3)


def test_allow_none_warns_for_a_model_that_cannot_predict_none(finder, monkeypatch):
    warnings = []
    monkeypatch.setattr(predict.logger, "warning_once", warnings.append)
    cf.answer(finder[0], "Who?", "Text.", finder[1], allow_none=True)
    assert "not trained to predict that there is no answer" in warnings[0]
