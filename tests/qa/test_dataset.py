# SPDX-License-Identifier: Apache-2.0
"""Reading and writing HotpotQA and SQuAD files."""

import gzip
import json
import lzma
from dataclasses import replace
from pathlib import Path

import pytest

from carryforward.qa.dataset import Answer, read_questions, write_questions

CORPORA = Path(__file__).resolve().parents[3] / "shared" / "corpora"


def write(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def squad(*qas, context="The cat sat. A catalogue lay there."):
    return {"data": [{"title": "t", "paragraphs": [{"context": context, "qas": list(qas)}]}]}


def test_squad(tmp_path):
    exact = {"question": " Who sat? ", "id": "1", "answers": [{"text": "cat", "answer_start": 4}]}
    shifted = {"question": "What lay?", "id": "2", "answers": [{"text": " catalogue ", "answer_start": 13}]}
    none = {"question": "Why?", "id": "3", "answers": [], "is_impossible": True}
    absent = {"question": "Where?", "id": "4", "answers": [{"text": "elsewhere", "answer_start": 2}]}
    questions = read_questions(write(tmp_path / "a.json", squad(exact, shifted, none, absent)))
    assert [(q.id, q.kind, q.answer_span, q.aligned) for q in questions] == [
        ("1", "span", (4, 7), True),
        ("2", "span", (15, 24), True),
        ("3", "none", None, True),
        ("4", "span", None, False),
    ]
    assert questions[0].question == "Who sat?"
    assert questions[1].document[slice(*questions[1].answer_span)] == "catalogue"
    assert questions[3].answers == (Answer("elsewhere"),), "kept: it can still be scored"
    rows = [{"id": "1", "context": "The cat", "question": "Who?", "answers": {"text": ["cat"], "answer_start": [4]}}]
    assert read_questions(write(tmp_path / "rows.json", rows))[0].answer_span == (4, 7)


HOTPOT = {
    "_id": "h", "question": "Who was born in Rome?", "answer": "Ann", "type": "bridge", "level": "hard",
    "supporting_facts": [["Second", 1]],
    "context": [["First", ["Ann is a name.", " Anna too."]], ["Second", ["Annals of Rome.", " There Ann was born."]]],
}  # fmt: skip


def test_hotpotqa_answers_are_located_in_supporting_sentences_first(tmp_path):
    official = read_questions(write(tmp_path / "a.json", [HOTPOT]))[0]
    assert official.document == "First\nAnn is a name. Anna too.\n\nSecond\nAnnals of Rome. There Ann was born."
    assert official.answer_span == (official.document.index("There Ann") + 6, official.document.index("There Ann") + 9)
    hub = {**{key: HOTPOT[key] for key in ("question", "answer", "type", "level")}, "id": "h",
           "supporting_facts": {"title": ["Second"], "sent_id": [1]},
           "context": {"title": ["First", "Second"], "sentences": [s for _, s in HOTPOT["context"]]}}  # fmt: skip
    odd = {**hub, "id": "i", "question": "Who\u2028\x85was it?"}  # line ends for `str.splitlines`, but not in JSON
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in (hub, odd)), "utf-8")
    other = replace(official, id="i", question=odd["question"])
    assert read_questions(tmp_path / "rows.jsonl") == [official, other]
    without = {
        **HOTPOT,
        "supporting_facts": [],
        "context": [["First", "Anna met Ann."]],
    }  # a paragraph that is not split into sentences
    assert read_questions(write(tmp_path / "b.json", [without]))[0].answer_span == (15, 18), (
        "not as a part of a longer word"
    )
    both = {**HOTPOT, "supporting_facts": [["Second", 0], ["Second", 1]]}
    assert read_questions(write(tmp_path / "c.json", [both]))[0].answer_span == official.answer_span, (
        "not inside Annals"
    )
    yes = read_questions(write(tmp_path / "c.json", [{**HOTPOT, "answer": "yes"}]))[0]
    assert (yes.kind, yes.answer_span, yes.aligned) == ("yes", None, True)


@pytest.mark.parametrize(("suffix", "opened"), [(".gz", gzip.open), (".xz", lzma.open)])
def test_compressed_files(tmp_path, suffix, opened):
    with opened(tmp_path / f"a.json{suffix}", "wt") as file:
        json.dump([HOTPOT], file)
    assert len(read_questions(tmp_path / f"a.json{suffix}")) == 1
    (question,) = read_questions(write(tmp_path / "b.json", squad({"id": "1", "question": "?", "answers": []})))
    write_questions([question], tmp_path / f"b.json{suffix}")
    with opened(tmp_path / f"b.json{suffix}", "rt") as file:
        assert json.load(file)["data"], "the suffix decides the compression"
    assert read_questions(tmp_path / f"b.json{suffix}") == [question]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "has no questions"),
        ('{"data": []}', "has no questions"),
        ("3", "in neither HotpotQA nor SQuAD format"),
        ("[1]", "in neither HotpotQA nor SQuAD format"),
        ('{"questions": []}', "in neither HotpotQA nor SQuAD format"),
        ('{"data": [{"story": "x"}]}', "in neither HotpotQA nor SQuAD format"),
        ('{"data": [1]}', "in neither HotpotQA nor SQuAD format"),
        ("{", "is not JSON: line 1, Expecting property name"),
        (json.dumps(HOTPOT) + "\n{", "is not JSON: line 2, Expecting property name"),
        (json.dumps([HOTPOT, HOTPOT]), "several questions have the id h"),
        (json.dumps(squad({"id": "9", "question": "?", "answers": []}, context=None)),
         "question 9 has an unexpected form"),
        (json.dumps([{**HOTPOT, "context": 3}]), "question h has an unexpected form"),
        (json.dumps(squad({"id": "9", "answers": []})), "question 9 lacks 'question'"),
        (json.dumps(squad({"id": "9", "question": "?"})), "question 9 lacks 'answers'"),
        (json.dumps([{**HOTPOT, "context": {"title": ["a", "b", "c"], "sentences": []}}]),
         "question h has an unexpected form"),
        (json.dumps([{key: HOTPOT[key] for key in HOTPOT if key != "answer"}]), "a.json: the first row lacks 'answer'"),
        (json.dumps([{"id": "9", "question": "?", "context": "a b"}]), "the first row lacks 'answer' or 'answers'"),
        (json.dumps([{"id": "9", "question": "?", "context": "a b", "answers": {"text": ["a"], "answer_start": []}}]),
         "question 9 has an unexpected form"),
        (json.dumps(squad({"id": "9", "question": "?", "answers": [{"text": "a", "answer_start": "four"}]})),
         "a.json: question 9 has an unexpected form"),
        (json.dumps(squad({"id": "9", "question": "?", "answers": [{"text": "a", "answer_start": 999}]})),
         "question 9: an answer starts at character 999, but the document has only 35"),
    ],
)  # fmt: skip
def test_malformed_files_are_refused(tmp_path, content, message):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_questions(tmp_path / "a.json")


def test_byte_order_marks_and_empty_answers_are_accepted(tmp_path):
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
    questions = read_questions(CORPORA / file)
    assert (len(questions), sum(not question.aligned for question in questions)) == (count, unanswered)
    assert all(
        q.document[slice(*q.answer_span)] in {answer.text for answer in q.answers} for q in questions if q.answer_span
    )
