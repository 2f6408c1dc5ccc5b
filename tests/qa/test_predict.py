# SPDX-License-Identifier: Apache-2.0
"""Questions from files, answers found in texts, scores by hand, and the way from a question to an answer."""

import gzip
import itertools
import json
import lzma
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import prose, tiny
from transformers import BertConfig, BertModel

import carryforward as cf
from carryforward.qa import predict, span_search
from carryforward.qa.dataset import Answer, Question, read_questions, write_questions
from carryforward.qa.join_passages import join_files, join_passages
from carryforward.qa.metrics import normalised, score
from carryforward.qa.predict import Found, answer_all, ask, best

CORPORA = Path(__file__).resolve().parents[3] / "shared" / "corpora"


def write(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


# --- files -----------------------------------------------------------------------------------------------------------


def squad(*qas, context="The cat sat. A catalogue lay there."):
    return {"data": [{"title": "t", "paragraphs": [{"context": context, "qas": list(qas)}]}]}


def test_squad(tmp_path):
    told = {"question": " Who sat? ", "id": "1", "answers": [{"text": "cat", "answer_start": 4}]}
    shifted = {"question": "What lay?", "id": "2", "answers": [{"text": " catalogue ", "answer_start": 13}]}
    none = {"question": "Why?", "id": "3", "answers": [], "is_impossible": True}
    away = {"question": "Where?", "id": "4", "answers": [{"text": "elsewhere", "answer_start": 2}]}
    found = read_questions(write(tmp_path / "a.json", squad(told, shifted, none, away)))
    assert [(q.id, q.kind, q.place, q.aligned) for q in found] == [
        ("1", "span", (4, 7), True),
        ("2", "span", (15, 24), True),
        ("3", "none", None, True),
        ("4", "span", None, False),
    ]
    assert found[0].question == "Who sat?"
    assert found[1].document[slice(*found[1].place)] == "catalogue"
    assert found[3].answers == (Answer("elsewhere"),), "not lost: it can still be scored"
    rows = [{"id": "1", "context": "The cat", "question": "Who?", "answers": {"text": ["cat"], "answer_start": [4]}}]
    assert read_questions(write(tmp_path / "rows.json", rows))[0].place == (4, 7)


HOTPOT = {
    "_id": "h", "question": "Who was born in Rome?", "answer": "Ann", "type": "bridge", "level": "hard",
    "supporting_facts": [["Second", 1]],
    "context": [["First", ["Ann is a name.", " Anna too."]], ["Second", ["Annals of Rome.", " There Ann was born."]]],
}  # fmt: skip


def test_hotpotqa_prefers_the_sentences_that_support(tmp_path):
    official = read_questions(write(tmp_path / "a.json", [HOTPOT]))[0]
    assert official.document == "First\nAnn is a name. Anna too.\n\nSecond\nAnnals of Rome. There Ann was born."
    assert official.place == (official.document.index("There Ann") + 6, official.document.index("There Ann") + 9)
    hub = {**{key: HOTPOT[key] for key in ("question", "answer", "type", "level")}, "id": "h",
           "supporting_facts": {"title": ["Second"], "sent_id": [1]},
           "context": {"title": ["First", "Second"], "sentences": [s for _, s in HOTPOT["context"]]}}  # fmt: skip
    odd = {**hub, "id": "i", "question": "Who\u2028\x85was it?"}  # what Python takes for line ends, and JSON does not
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in (hub, odd)), "utf-8")
    other = replace(official, id="i", question=odd["question"])
    assert read_questions(tmp_path / "rows.jsonl") == [official, other]
    without = {**HOTPOT, "supporting_facts": [], "context": [["First", "Anna met Ann."]]}  # no sentences either
    assert read_questions(write(tmp_path / "b.json", [without]))[0].place == (15, 18), "as a word of its own"
    both = {**HOTPOT, "supporting_facts": [["Second", 0], ["Second", 1]]}
    assert read_questions(write(tmp_path / "c.json", [both]))[0].place == official.place, "and not within Annals"
    yes = read_questions(write(tmp_path / "c.json", [{**HOTPOT, "answer": "yes"}]))[0]
    assert (yes.kind, yes.place, yes.aligned) == ("yes", None, True)


@pytest.mark.parametrize(("suffix", "opened"), [(".gz", gzip.open), (".xz", lzma.open)])
def test_compressed_files(tmp_path, suffix, opened):
    with opened(tmp_path / f"a.json{suffix}", "wt") as file:
        json.dump([HOTPOT], file)
    assert len(read_questions(tmp_path / f"a.json{suffix}")) == 1
    (question,) = read_questions(write(tmp_path / "b.json", squad({"id": "1", "question": "?", "answers": []})))
    write_questions([question], tmp_path / f"b.json{suffix}")
    with opened(tmp_path / f"b.json{suffix}", "rt") as file:
        assert json.load(file)["data"], "what is written so is compressed so"
    assert read_questions(tmp_path / f"b.json{suffix}") == [question]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "has no questions"),
        ('{"data": []}', "has no questions"),
        ("3", "neither HotpotQA's nor SQuAD's"),
        ("[1]", "neither HotpotQA's nor SQuAD's"),
        ('{"questions": []}', "neither HotpotQA's nor SQuAD's"),
        ('{"data": [{"story": "x"}]}', "neither HotpotQA's nor SQuAD's"),
        ('{"data": [1]}', "neither HotpotQA's nor SQuAD's"),
        ("{", "is no JSON: line 1, Expecting property name"),
        (json.dumps(HOTPOT) + "\n{", "is no JSON: line 2, Expecting property name"),
        (json.dumps([HOTPOT, HOTPOT]), "several questions have the id h"),
        (json.dumps(squad({"id": "9", "question": "?", "answers": []}, context=None)), "question 9 has another form"),
        (json.dumps([{**HOTPOT, "context": 3}]), "question h has another form"),
        (json.dumps(squad({"id": "9", "answers": []})), "question 9 lacks 'question'"),
        (json.dumps(squad({"id": "9", "question": "?"})), "question 9 lacks 'answers'"),
        (json.dumps([{**HOTPOT, "context": {"title": ["a", "b", "c"], "sentences": []}}]), "question h has another"),
        (json.dumps([{key: HOTPOT[key] for key in HOTPOT if key != "answer"}]), "a.json: the first row lacks 'answer'"),
        (json.dumps([{"id": "9", "question": "?", "context": "a b"}]), "the first row lacks 'answer' or 'answers'"),
        (json.dumps([{"id": "9", "question": "?", "context": "a b", "answers": {"text": ["a"], "answer_start": []}}]),
         "question 9 has another form"),
        (json.dumps(squad({"id": "9", "question": "?", "answers": [{"text": "a", "answer_start": "four"}]})),
         "a.json: question 9 has another form"),
        (json.dumps(squad({"id": "9", "question": "?", "answers": [{"text": "a", "answer_start": 999}]})),
         "question 9: an answer begins at character 999 of a document that has 35"),
    ],
)  # fmt: skip
def test_files_of_another_form(tmp_path, content, message):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_questions(tmp_path / "a.json")


def test_what_a_file_may_have_too(tmp_path):
    (tmp_path / "a.jsonl").write_text("\ufeff" + json.dumps(HOTPOT) + "\n")
    assert [question.id for question in read_questions(tmp_path / "a.jsonl")] == ["h"]
    empty = {"id": "9", "question": "?", "answers": [{"text": "", "answer_start": -1}]}
    (question,) = read_questions(write(tmp_path / "b.json", squad(empty)))
    assert question.kind == "none"


@pytest.mark.skipif(not CORPORA.exists(), reason="needs the corpora beside the repository")
@pytest.mark.parametrize(
    ("file", "count", "unanswered"),
    [("qa/covid_qa.json.xz", 1380, 0), ("hotpotqa/hotpot_dev_distractor_sample.json.xz", 600, 0)],
)
def test_real_files(file, count, unanswered):
    found = read_questions(CORPORA / file)
    assert (len(found), sum(not question.aligned for question in found)) == (count, unanswered)
    assert all(q.document[slice(*q.place)] in {answer.text for answer in q.answers} for q in found if q.place)


# --- joining ---------------------------------------------------------------------------------------------------------


def test_passages_are_joined_around_the_answer():
    texts = [f"Passage {n} has the word w{n}x and some more words to be long." for n in range(20)]
    questions = [
        Question(f"q{n}", "Which word?", text, (Answer(f"w{n}x", text.index(f"w{n}x")),), "span", "squad")
        for n, text in enumerate(texts)
    ]
    joined = join_passages(questions, 60, seed=3)
    for before, after in zip(questions, joined, strict=True):
        assert after.document[slice(*after.place)] == before.answers[0].text
        assert 60 <= len(after.document.split()) < 60 + 12
        assert len(set(after.document.split("\n\n"))) == len(after.document.split("\n\n"))
    assert len({question.place for question in joined}) > 5, "not always in the same place"
    assert join_passages(questions, 60, seed=3) == joined
    assert join_passages(questions, 60, seed=4) != joined
    same = [*questions[:3], Question("other", "?", "Another W1X here.", (Answer("W1X", 8),), "span", "squad")]
    assert "Another W1X" not in join_passages(same, 500)[1].document, "which would be a second answer"
    asked = [replace(questions[0], answers=(Answer("has"),), kind="no"), *questions[1:]]
    assert len(join_passages(asked, 60)[0].document.split()) >= 60, "a word of the text, but not what is looked for"


def test_what_is_set_aside_shares_no_passage(tmp_path):
    files = []
    for name in "ab":
        files.append(tmp_path / f"{name}.json")
        passages = [f"Passage {name}{n} has the word w{name}{n}x in it." for n in range(20)]
        write(files[-1], {"data": [{"paragraphs": [
            {"context": text, "qas": [{"id": f"{name}{n}{i}", "question": "Which?", "answers": [
                {"text": f"w{name}{n}x", "answer_start": text.index("w" + name)}]} for i in range(3)]}
            for n, text in enumerate(passages)]}]})  # fmt: skip
    train, test, validation = sides = join_files(files, 30, set_aside=(31, 14), seed=2)
    assert (len(train), len(test), len(validation)) == (120 - 33 - 15, 33, 15), "passages stay whole"
    for side in sides:
        write_questions(side, tmp_path / "out.json")
        assert read_questions(tmp_path / "out.json") == sorted(
            side, key=lambda q: [o.document for o in side].index(q.document)
        )
        assert all(q.document[slice(*q.place)] == f"w{q.id[:-1]}x" for q in side)
        assert not any(f"wa{n}x" in q.document for q in side for n in range(20) if q.id[0] == "b"), "of one file"
    shared = [{part for question in side for part in question.document.split("\n\n")} for side in sides]
    assert sum(map(len, shared)) == len(set.union(*shared)) == 40
    assert [len(side) for side in join_files(files, 30)] == [120]
    for counts in ((118,), (60, 58), (121,)):
        with pytest.raises(ValueError, match="too few to set"):
            join_files(files, 30, set_aside=counts)
    with pytest.raises(ValueError, match="several questions have the id a00"):
        write_questions([*train, *join_files(files, 30)[0]], tmp_path / "out.json")
    with pytest.raises(ValueError, match="question q: SQuAD's format has no answer 'yes'"):
        write_questions([Question("q", "?", "Text.", (Answer("yes"),), "yes", "hotpotqa")], tmp_path / "out.json")


# --- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [("The Cat's  hat", "cats hat"), ("An apple, a day.", "apple day"), ("theatre", "theatre"), ("...", "")],
)
def test_normalisation(text, expected):
    assert normalised(text) == expected


@pytest.mark.parametrize(
    ("answer", "accepted", "squad", "hotpotqa"),
    [
        ("The cat.", ["cat"], (1, 1), (1, 1)),
        ("black cat", ["the cat sat"], (0, 0.5), (0, 0.5)),  # one word of two shared, one of two
        ("cat", ["dog", "big cat"], (0, 2 / 3), (0, 2 / 3)),
        ("a b b", ["b b c"], (0, 2 * 2 / 5), (0, 2 * 2 / 5)),  # words count as often as they occur; "a" does not
        ("yes", ["yes"], (1, 1), (1, 1)),
        ("yes it is", ["yes"], (0, 2 / 4), (0, 0)),  # HotpotQA: all or nothing
        ("no", ["no way"], (0, 2 / 3), (0, 0)),
        ("", [], (1, 1), (1, 0)),
        ("cat", [], (0, 0), (0, 0)),
        ("", ["cat"], (0, 0), (0, 0)),
        ("", ["the", "cat"], (0, 0), (0, 0)),  # "the" is no answer, and nothing no answer to it
    ],
)
def test_scores_by_hand(answer, accepted, squad, hotpotqa):
    assert score(answer, accepted, "squad") == pytest.approx(squad)
    assert score(answer, accepted, "hotpotqa") == pytest.approx(hotpotqa)


# --- answers ---------------------------------------------------------------------------------------------------------


def test_the_best_spans_of_all():
    torch.manual_seed(0)
    starts, ends, kinds = torch.randn(12), torch.randn(12), torch.tensor([2.0, 0.0, -1.0, 5.0])
    document = "".join(f"{n:x} " for n in range(12))
    offsets = np.array([(2 * n, 2 * n + 1) for n in range(12)])
    p = [starts.softmax(-1), ends.softmax(-1), kinds[:3].softmax(-1)]
    every = [(float(p[0][i] * p[1][j]), i, j) for i in range(12) for j in range(i, min(i + 3, 12))]
    total = sum(value for value, _, _ in every)
    every.sort(reverse=True)
    found = best((starts, ends, kinds), document, offsets, top_k=40, max_answer_tokens=3)
    spans = [one for one in found if one.kind == "span"]
    assert len(spans) == len(every) == 33
    assert [(one.start, one.end) for one in spans] == [(2 * i, 2 * j + 1) for _, i, j in every]
    assert [one.probability for one in spans] == pytest.approx(
        [float(p[2][0]) * v / total for v, _, _ in every], rel=1e-5
    )
    assert [one.kind for one in found[33:]] == ["yes", "no"]
    assert sum(one.probability for one in found) == pytest.approx(1)
    assert all(document[one.start : one.end] == one.text for one in spans)
    assert best((starts, ends, kinds), document, offsets, allow_none=True)[0].kind == "none"


def test_no_answer_is_found_twice():
    """Tokens of white space, as byte-level tokenizers have them, would make the same answer longer."""
    document, offsets = "a \n b", np.array([(0, 1), (1, 3), (3, 5)])
    logits = torch.tensor([0.0, 5.0, 0.0]), torch.tensor([0.0, 5.0, 0.0]), torch.zeros(4)
    found = [(one.text, one.start, one.end) for one in best(logits, document, offsets, top_k=9) if one.kind == "span"]
    assert sorted(found) == [("a", 0, 1), ("a \n b", 0, 5), ("b", 4, 5)]
    # a character of two tokens: what they say of it adds up
    logits = torch.tensor([0.0, 0.0]), torch.tensor([0.0, 0.0]), torch.tensor([0.0, *[-torch.inf] * 3])
    assert best(logits, "京", np.array([(0, 1), (0, 1)]), top_k=5) == [Found("京", "span", pytest.approx(1), 0, 1)]


@pytest.mark.parametrize("at_once", [1, 20, 10**6])
@pytest.mark.parametrize("top_k", [1, 3, 200])
def test_stretches_of_the_same_characters_are_one_however_many(top_k, at_once, monkeypatch):
    """Three characters of four tokens each, as byte-level tokenizers have them, then a word: against all pairs."""
    monkeypatch.setattr(span_search, "_AT_ONCE", at_once)
    document = "😀👍🎉 ok"  # and a token that is no character
    offsets = np.array([(0, 1)] * 4 + [(1, 2)] * 4 + [(2, 3)] * 4 + [(3, 6), (0, 0)])
    starts, ends = (torch.randn(14, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    shares = {}
    for start, end in itertools.combinations_with_replacement(range(13), 2):
        if end - start >= 9:
            continue
        place = int(offsets[start, 0]) + (start == 12), int(offsets[end, 1])
        shares[place] = shares.get(place, 0.0) + float((starts[start] + ends[end]).exp())
    expected = sorted(((share / sum(shares.values()), place) for place, share in shares.items()), reverse=True)
    kinds = torch.tensor([0.0, *[-torch.inf] * 3])
    found = best((starts, ends, kinds), document, offsets, top_k=top_k, max_answer_tokens=9)
    assert [(one.start, one.end) for one in found] == [place for _, place in expected][:top_k]
    assert [one.probability for one in found] == pytest.approx([share for share, _ in expected][:top_k])


@pytest.mark.parametrize("word", ["Jose\u0301", "\u092e\u0947\u0902", "\u0e01\u0e34", "\u2764\ufe0f"])
def test_an_answer_keeps_the_accent_on_its_last_letter(word):
    """A tokenizer that leaves out accents, vowel signs and variants ends its token before them."""
    last = len(unicodedata.normalize("NFD", word).rstrip("\u0301\u0947\u0902\u0e34\ufe0f"))
    document, after = f"{word} came", len(word) + 1
    (found,) = best((torch.tensor([5.0, 0]), torch.tensor([5.0, 0]), torch.tensor([0.0, *[-torch.inf] * 3])),
                    document, np.array([(0, last), (after, after + 4)]))  # fmt: skip
    assert (found.text, found.end) == (word, len(word))


@pytest.fixture(scope="module")
def finder():
    tokenizer = prose.tokenizer()
    tokenizer.add_special_tokens({"cls_token": "<|cls|>", "sep_token": "<|sep|>"})
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=40,
    )  # fmt: skip
    frame = {"prefix": (tokenizer.cls_token_id,), "separator": (tokenizer.sep_token_id,),
             "suffix": (tokenizer.sep_token_id,)}  # fmt: skip
    return cf.add_recurrence(BertModel(config), head="question-answering", **frame).eval(), tokenizer


def test_an_answer_is_a_stretch_of_the_text(finder, tmp_path):
    model, tokenizer = finder
    document = "Émile – the café’s cat – sat.\n\n" + prose.TOPICS[3][:3000] + "   The end \n"
    found = cf.answer(model, "Who sat?", document, tokenizer, top_k=20)
    assert len(found) == 20
    assert all(one.text == document[one.start : one.end].strip() for one in found if one.kind == "span")
    spans = [one.probability for one in found if one.kind == found[0].kind]
    assert spans == sorted(spans, reverse=True)
    assert 0 < sum(one.probability for one in found) <= 1
    few = cf.answer(model, "Who sat?", "A cat.", tokenizer, top_k=50)
    assert {one.kind for one in few} == {"span"}, "which is all that a head without training knows"
    assert sum(one.probability for one in few) == pytest.approx(1)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = cf.RecurrentForQuestionAnswering.from_pretrained(tmp_path)
    assert cf.answer(again, "Who sat?", document, top_k=20) == found, "with the tokenizer that was saved beside it"


def test_what_has_no_answer(finder, tmp_path):
    model, tokenizer = finder
    with pytest.raises(ValueError, match="document has no words"):
        cf.answer(model, "Who?", "", tokenizer)
    with pytest.raises(ValueError, match="question is empty"):
        cf.answer(model, "", "Text.", tokenizer)
    with pytest.raises(ValueError, match="has 0 left for the document, and needs 1"):
        cf.answer(model, "Who? " * 30, "Text.", tokenizer)
    with pytest.raises(ValueError, match="which finds no answers"):
        cf.answer(tiny.recurrent("bert"), "Who?", "Text.", tokenizer)
    with pytest.raises(ValueError, match="question is not Unicode"):
        cf.answer(model, "Who\ud800?", "Text.", tokenizer)
    room = model.config.recurrence.window - 4  # of a question of one token
    told = f"needs {room + 1} at an overlap of {room}. Ask a shorter one, overlap less, or"
    with pytest.raises(ValueError, match=told):
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
        ask(model, [Question("7", "Who?", "Text.", (), "span", "squad")], tokenizer, overlap=36)


def test_many_are_answered_as_one_alone(finder):
    model, tokenizer = finder
    questions = [
        Question(str(n), f"Who{'?' * n}", prose.TOPICS[n][: 300 * n + 9], (), "span", "squad") for n in range(7)
    ]
    together = answer_all(model, ask(model, questions, tokenizer), top_k=3, batch_size=3)
    for question, found in zip(questions, together, strict=True):
        alone = cf.answer(model, question.question, question.document, tokenizer, top_k=3)
        assert [(one.text, one.start) for one in found] == [(one.text, one.start) for one in alone]
        assert [one.probability for one in found] == pytest.approx([one.probability for one in alone], rel=1e-3)


def test_that_nothing_was_learnt_about_no_answer_is_said(finder, monkeypatch):
    told = []
    monkeypatch.setattr(predict.logger, "warning_once", told.append)
    cf.answer(finder[0], "Who?", "Text.", finder[1], allow_none=True)
    assert "never trained to tell when there is no answer" in told[0]
